import json
from pathlib import Path

import pytest
import transformers
from click.testing import CliRunner

from spes_mega.data.text_tokenizer import load_tokenizer
from spes_mega.errors import SpesError
from spes_mega.layout.counts import count_parameters
from spes_mega.tools.demo.command import command, newest_snapshot, prepare
from spes_mega.tools.demo.corpus import HELD_OUT_EVERY, blocks, train_tokenizer, write_corpus
from spes_mega.tools.demo.plot import plot_losses, trailing_mean
from spes_mega.tools.demo.processes import Command, Together

TINY = Path(__file__).parents[2] / "configs/tiny.yaml"


def texts(path):
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_corpus_is_split_without_loss_or_overlap(tmp_path):
    train, valid = (texts(p) for p in write_corpus(tmp_path))
    assert sorted(train + valid) == sorted(blocks())
    assert valid == blocks()[::HELD_OUT_EVERY]
    assert sum(map(len, train)) > 300_000


def test_tokenizer_keeps_every_character(tmp_path):
    train, valid = write_corpus(tmp_path)
    folder = train_tokenizer(train, tmp_path / "tokenizer", 512)
    ours = load_tokenizer(folder)
    assert (ours.vocab_size, ours.eod) == (512, 2)
    text = texts(valid)[3]
    assert "\n" in text
    assert ours.decode(ours.encode(text)) == text


def test_transformers_reads_the_tokenizer_alike_beside_any_config(tmp_path):
    train, valid = write_corpus(tmp_path)
    folder = train_tokenizer(train, tmp_path / "tokenizer", 512)
    expected = [load_tokenizer(folder).encode(text) for text in texts(valid)]
    for model_type in ("qwen3", "qwen3_moe", "llama"):
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        assert len(theirs) == 512
        assert [theirs.encode(text, add_special_tokens=False) for text in texts(valid)] == expected


def test_both_models_of_the_demo_belong_together(tmp_path):
    demo = prepare(tmp_path / "out")
    dense, moe = count_parameters(demo.dense.model), count_parameters(demo.moe.model)
    router = demo.moe.model.num_experts * demo.moe.model.hidden_size
    layers, experts = demo.moe.model.num_layers, demo.moe.model.num_experts
    assert moe.total == dense.total + layers * ((experts - 1) * moe.expert + router)
    assert demo.moe.num_rounds >= 4
    assert demo.moe.data.train == tmp_path / "out/text/train"


def test_a_folder_that_the_demo_did_not_make_is_left_alone(tmp_path):
    precious = tmp_path / "thesis.tex"
    precious.write_text("…")
    result = CliRunner().invoke(command, ["--out", str(tmp_path)])
    assert isinstance(result.exception, SpesError)
    assert "not made by the demo" in str(result.exception)
    assert precious.exists()


def test_a_folder_of_an_earlier_demo_is_cleared(tmp_path):
    prepare(tmp_path / "out")
    old = tmp_path / "out/old"
    old.touch()
    prepare(tmp_path / "out")
    assert not old.exists()


def test_newest_snapshot_is_the_last_round(tmp_path):
    for number in (2, 10, 9):
        (tmp_path / f"snapshots/round-{number:06d}").mkdir(parents=True)
    assert newest_snapshot(tmp_path).name == "round-000010"


def test_trailing_mean_starts_with_what_there_is():
    assert trailing_mean([4.0, 2.0, 0.0, 6.0], window=2) == [4.0, 3.0, 1.0, 3.0]


def test_picture_is_a_png(tmp_path):
    rows = [{"step": s, "lm_loss": 3 - s / 10} for s in range(1, 9)]
    plot_losses({"node 0": rows, "node 1": rows}, [4, 8], [4], {"final": 2.5}, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_failing_process_is_reported_with_its_last_lines_and_the_others_are_stopped(tmp_path):
    shown: list[str] = []
    with Together() as together:
        waiting = together.add(
            Command("hub", ["hub", str(TINY), "--state", str(tmp_path / "s"), "--listen", "127.0.0.1:0"],
                    tmp_path / "hub.log", shown.append, 1)
        )  # fmt: skip
        waiting.wait_for_line("listening on", 60)
        failing = together.add(
            Command("node", ["launch", str(tmp_path / "none.yaml")], tmp_path / "node.log", shown.append, 1)
        )
        with pytest.raises(
            SpesError, match=r"node ended with exit code 3(?s:.*)none\.yaml: cannot read the recipe"
        ) as e:
            together.wait()
        assert str(tmp_path / "node.log") in str(e.value)
        assert failing.code == 3
        assert waiting.code is None
    assert waiting.code == 0
    assert any("$ spes-mega launch" in line for line in shown)
