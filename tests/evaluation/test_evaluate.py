"""`spes-mega evaluate` against transformers on the same directory and the same windows."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from transformers import AutoModelForCausalLM

from spes_mega.data.token_stream import TokenStream
from spes_mega.errors import CheckpointError, DataError, RecipeError
from spes_mega.evaluation.evaluate import command, evaluate
from tests.model import tiny

TOKENS = np.random.default_rng(3).integers(0, 1003, 107)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data") / "valid", TOKENS)


def write(prefix, tokens):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(70_000))
    for document in np.array_split(tokens, 3):
        builder.add_document(torch.from_numpy(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral", "llama"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    tiny.transformers_model(tiny.section(request.param, tie_embeddings=request.param == "llama")).save_pretrained(
        folder
    )
    return folder


def transformers_loss(folder, tokens, seq_len):
    """Windows one by one, with the loss that transformers itself computes from `labels`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total = 0.0
    for start in range(0, len(tokens) - 1, seq_len):
        window = torch.from_numpy(tokens[start : start + seq_len + 1])[None]
        with torch.no_grad():
            total += model(input_ids=window, labels=window).loss.item() * (window.shape[1] - 1)
    return total / (len(tokens) - 1)


# 106 predictions: three whole windows and a short one in two batches; one short window; whole windows alone
@pytest.mark.parametrize(("seq_len", "batch_size"), [(32, 2), (128, 2), (53, 8)])
def test_loss_is_that_of_transformers(checkpoint, data, seq_len, batch_size):
    result = evaluate(checkpoint, data, seq_len=seq_len, batch_size=batch_size)
    assert result.tokens == 106
    assert result.loss == pytest.approx(transformers_loss(checkpoint, TOKENS, seq_len), rel=1e-5)
    assert result.perplexity == pytest.approx(np.exp(result.loss))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    tiny.transformers_model(tiny.section("llama")).save_pretrained(folder)
    return folder


def test_command_prints_json_and_stops_at_max_tokens(llama, data):
    options = ["--data", str(data), "--seq-len", "32", "--max-tokens", "50", "--json"]
    result = CliRunner().invoke(command, [str(llama), *options], catch_exceptions=False)
    values = json.loads(result.stdout)
    assert values["tokens"] == 50
    assert values["loss"] == pytest.approx(transformers_loss(llama, TOKENS[:51], 32), rel=1e-5)


def test_command_speaks_to_people_too(llama, data):
    result = CliRunner().invoke(command, [str(llama), "--data", str(data)], catch_exceptions=False)
    loss = transformers_loss(llama, TOKENS, 128)
    assert result.stdout == f"loss {loss:.4f}  perplexity {np.exp(loss):.2f}  tokens 106\n"


def test_bf16_is_near_and_not_equal(llama, data):
    full, half = (evaluate(llama, data, dtype=dtype).loss for dtype in ("fp32", "bf16"))
    assert half != full
    assert half == pytest.approx(full, rel=0.05)


def test_what_cannot_be_evaluated_is_named(llama, data, tmp_path):
    with pytest.raises(RecipeError, match=r"--seq-len 129: .* at most 128"):
        evaluate(llama, data, seq_len=129)
    with pytest.raises(DataError, match=r"nowhere\.idx: no such file"):
        evaluate(llama, tmp_path / "nowhere")
    with pytest.raises(
        DataError, match=r"token 0 of document 2 .* is 1003, but model\.vocab_size 1003 allows 0 to 1002"
    ):
        evaluate(llama, write(tmp_path / "large", np.array([1, 2, 1003])))
    with pytest.raises(DataError, match="1 tokens are too few"):
        evaluate(llama, write(tmp_path / "one", np.array([1])))
    with pytest.raises(CheckpointError, match="nothing"):
        evaluate(tmp_path / "nothing", data)


def test_a_loss_that_is_not_finite_is_an_error(data, tmp_path):
    model = tiny.transformers_model(tiny.section("llama"))
    model.model.norm.weight.data[3] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"the loss on .* is nan"):
        evaluate(tmp_path, data)


def test_a_truncated_index_is_named(tmp_path):
    (tmp_path / "text.bin").write_bytes(b"\0" * 64)
    (tmp_path / "text.idx").write_bytes(b"MMIDIDX\x00\x00" + b"\x01" + b"\0" * 20)
    with pytest.raises(DataError, match=r"text\.idx: not the index of a Megatron-Core dataset"):
        TokenStream(tmp_path / "text")
