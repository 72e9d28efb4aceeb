"""Where a directory has several sets of weights, we open the one that transformers opens."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from spes_mega.errors import CheckpointError
from spes_mega.layout import EMBEDDING, open_checkpoint

FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


@pytest.fixture
def make_weights(make_dense, tmp_path):
    """A directory with some of FILES; the embedding of each is filled with its place in that list."""
    src = make_dense("llama")
    state = load_file(src / "model.safetensors")

    def make(*files):
        out = tmp_path / "several"
        out.mkdir()
        shutil.copy(src / "config.json", out)
        for file in files:
            mine = state | {EMBEDDING: torch.full_like(state[EMBEDDING], FILES.index(file))}
            held = f"shard-{FILES.index(file)}" + (".bin" if "bin" in file else ".safetensors")
            held = held if file.endswith(".index.json") else file
            torch.save(mine, out / held) if "bin" in file else save_file(mine, out / held, {"format": "pt"})
            if held != file:
                (out / file).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(mine, held)}))
        return out

    return make


@pytest.mark.parametrize("first", range(len(FILES)))
def test_the_first_that_transformers_finds(make_weights, first):
    out = make_weights(*FILES[first:])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with open_checkpoint(out) as ours:
        assert torch.equal(ours.read(EMBEDDING), theirs.get_input_embeddings().weight)
        assert ours.read(EMBEDDING).eq(first).all()


def test_a_variant_is_taken_by_nobody(make_weights):
    out = make_weights("pytorch_model.bin")
    (out / "model.fp16.safetensors").write_bytes(b"another variant")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with open_checkpoint(out) as ours:
        assert torch.equal(ours.read(EMBEDDING), theirs.get_input_embeddings().weight)


def test_the_file_that_config_json_names(make_weights):
    out = make_weights(*FILES[:2])
    raw = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(raw | {"transformers_weights": FILES[1]}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with open_checkpoint(out) as ours:
        assert torch.equal(ours.read(EMBEDDING), theirs.get_input_embeddings().weight)
        assert ours.read(EMBEDDING).eq(1).all()
    (out / "config.json").write_text(json.dumps(raw | {"transformers_weights": "other.safetensors"}))
    with pytest.raises(CheckpointError, match=r"other\.safetensors: missing; config\.json names it"):
        open_checkpoint(out)
