"""The commands in the head of each recipe run as they stand there, on a tiny model of the same kind.

The recipe's copy keeps everything but sizes; this machine stands for hub.example.org, and for all nodes that the head
has a line for.
"""

import json
import re
import shlex

import pytest
import sentencepiece
import transformers
import yaml

from spes_mega.recipe import load_recipe
from tests.integration.processes import COMMAND, ROOT, Process

NAMES = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
SIZES = {
    "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "expert_hidden_size": 24,
    "vocab_size": 128, "max_seq_len": 32,
}  # fmt: skip
TRAIN = {"steps": 2, "warmup_steps": 1, "seq_len": 16, "micro_batch_size": 64, "dtype": "fp32", "log_every": 1}
WORDS = [f"word{number}" for number in range(20)]


def commands(name):
    """The head's commands, as lists of words; a wrapped line would not be one."""
    head = (ROOT / f"configs/{name}.yaml").read_text().split("\nname:")[0]
    found = [shlex.split(line) for line in re.findall(r"^#   (.*)$", head, re.M)]
    assert all(line[0] == "spes-mega" for line in found)
    return [line[1:] for line in found]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a reader would be: with recipes, a text, a tokenizer, and the dense model of the 9B run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("\n".join(" ".join(WORDS[i % 7 :]) for i in range(400)))
    sentencepiece.SentencePieceTrainer.train(
        input="my.txt", model_prefix="tokenizer", vocab_size=34, model_type="bpe", minloglevel=2
    )
    config = transformers.AutoConfig.for_model(
        "qwen3", vocab_size=128, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=8, max_position_embeddings=32, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained("Qwen3-1.7B")
    (tmp_path / "configs/baselines").mkdir(parents=True)
    for path in (ROOT / "configs/baselines").glob("*.yaml"):
        (tmp_path / "configs/baselines" / path.name).write_text(path.read_text())
    return tmp_path


def shrink(name, folder, nodes):
    raw = yaml.safe_load((ROOT / f"configs/{name}.yaml").read_text())
    experts = raw["spes"]["num_nodes"]
    raw["model"] |= SIZES | {"num_experts": max(2, experts), "top_k": 2}
    raw["train"] |= TRAIN | ({"batch_size": 64} if "batch_size" in raw["train"] else {})
    raw["spes"] |= {"num_nodes": nodes, "sync_every": 1}
    if "upcycle" in raw:
        raw["upcycle"]["num_experts"] = max(2, experts)
    path = folder / f"configs/{name}.yaml"
    path.write_text(yaml.safe_dump(raw))
    return load_recipe(path)


class Reader:
    """Runs the commands in order; hubs and their nodes run on beside what follows."""

    def __init__(self, running):
        self.running, self.port, self.started = running, "", []

    def run(self, number, words):
        words = [word.replace("hub.example.org", "localhost") for word in words]
        if words[0] == "hub":
            words[words.index("--listen") + 1] = "localhost:0"
            self.port = self._start(words).wait_for(r"listening on \S+:(\d+)")[1]
        elif words[0] == "launch" and "--hub" in words:
            address = words.index("--hub") + 1
            assert words[address] in ("localhost:7070", "127.0.0.1:7070")
            words[address] = f"localhost:{self.port}"
            self._start([*words, "--out", f"out-{number}"])
        else:
            if words[0] == "launch":  # a lone node: by then the others have ended
                self.finish()
                words += ["--out", f"out-{number}"]
            self.running(Process([*COMMAND, *words])).succeed()

    def _start(self, words):
        self.started.append(self.running(Process([*COMMAND, *words])))
        return self.started[-1]

    def finish(self):
        for process in self.started:
            process.succeed()


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_in_a_recipes_head_run(name, folder, running):
    lines = commands(name)
    nodes = sum(line[0] == "launch" and "--hub" in line for line in lines)
    assert nodes > 0
    recipe = shrink(name, folder, nodes)
    reader = Reader(running)
    if not any(line[0] == "tokenize" for line in lines):
        reader.run(0, ["tokenize", "my.txt", "--tokenizer", "tokenizer.model", "--out", "text/train"])
    for number, words in enumerate(lines):
        reader.run(number, words)
    reader.finish()
    for out in folder.glob("out-*"):
        steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert steps == [1, recipe.train.steps]
    assert len(list(folder.glob("out-*"))) == sum(line[0] == "launch" for line in lines)
