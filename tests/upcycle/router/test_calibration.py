"""The k-means router: what it is made of, and that it sorts tokens."""

import numpy as np
import pytest
import torch
import transformers

from spes_mega.errors import DataError
from spes_mega.layout import open_checkpoint
from spes_mega.recipe import UpcycleSection
from tests.upcycle.making import run
from upcycle.plan import make_plan
from upcycle.router.calibration import calibrate
from upcycle.sources import open_sources


@pytest.fixture
def text(tmp_path):
    """Write an indexed dataset of random tokens; returns its prefix."""

    def make(count=600, vocab=103, name="text", tokens=None):
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        prefix = tmp_path / name
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16 if tokens is None else np.int32)
        if tokens is None:
            tokens = torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(5))
        builder.add_document(tokens, [len(tokens)])
        builder.finalize(f"{prefix}.idx")
        return prefix

    return make


def calibrated(src, prefix, **settings):
    with open_sources([src]) as sources:
        plan = make_plan(sources, UpcycleSection(router_init="kmeans", **settings))
        return calibrate(sources, plan, prefix)


def ffn_inputs(src, tokens):
    """What the FFNs receive, according to transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(src, dtype=torch.float32).eval()
    seen = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, 1)))
    with torch.inference_mode():
        model(tokens)
    return seen


@pytest.mark.parametrize("family", ["qwen3", "llama", "olmo2"])
def test_rows_are_centers_of_what_transformers_gives_the_ffns(make_dense, text, family):
    """One step of spherical k-means from the rows gives their directions again, and the logits have a std of 1."""
    src = make_dense(family)
    found = calibrated(src, text(), num_experts=4, calibration_tokens=512)
    assert found.tokens == 512
    tokens = torch.randint(103, (600,), generator=torch.Generator().manual_seed(5))
    # windows of 128 (the model's longest), evenly over 600 tokens
    windows = torch.stack([tokens[start : start + 128] for start in (0, 157, 314, 472)])
    for layer, inputs in enumerate(ffn_inputs(src, windows)):
        rows = found.routers[layer]
        assert rows.shape == (4, 32)
        logits = inputs @ rows.T
        assert float(logits.std(dim=1, correction=0).square().mean().sqrt()) == pytest.approx(1, rel=1e-3)
        units = torch.nn.functional.normalize(inputs)
        nearest = logits.argmax(dim=1)
        for expert in range(4):
            mean = units[nearest == expert].mean(0)
            cosine = torch.cosine_similarity(mean, rows[expert], dim=0)
            assert float(cosine) > 0.995  # the last steps may move a few tokens


def test_the_router_stands_in_the_result_and_copies_stay_exact(make_dense, logits_of, text, tmp_path):
    src = make_dense()
    run(src, tmp_path / "moe", calibration=text(), method="copy", num_experts=4, router_init="kmeans")
    found = calibrated(src, tmp_path / "text", method="copy", num_experts=4)
    with open_checkpoint(tmp_path / "moe") as moe:
        for layer in range(2):
            assert torch.equal(moe.read(f"model.layers.{layer}.mlp.gate.weight"), found.routers[layer])
    assert float((logits_of(tmp_path / "moe") - logits_of(src)).abs().max()) <= 1e-4


def test_it_goes_with_split_and_with_single_layers(make_dense, logits_of, text, tmp_path):
    src = make_dense()
    settings = {"method": "split", "num_experts": 3, "granularity": 4, "router_init": "kmeans", "moe_layers": "1"}
    run(src, tmp_path / "moe", calibration=text(), **settings)
    assert float((logits_of(tmp_path / "moe") - logits_of(src)).abs().max()) <= 1e-4
    with open_checkpoint(tmp_path / "moe") as moe:
        groups = moe.read("model.layers.1.mlp.gate.weight").view(3, 4, 32)
        assert torch.equal(groups[:, :1].expand(3, 4, 32), groups)


def test_the_same_bits_whatever_the_threads_and_shards(make_dense, text):
    prefix, before = text(), torch.get_num_threads()
    found = []
    try:
        for threads, shards in ((1, "5GB"), (2, "60KB"), (4, "60KB")):
            torch.set_num_threads(threads)
            src = make_dense(name=f"dense-{threads}", max_shard_size=shards)
            found.append(calibrated(src, prefix, num_experts=4))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(other.routers[layer], found[0].routers[layer]) for layer in range(2))
        assert other.sha256 == found[0].sha256


def test_texts_that_will_not_do(make_dense, text, tmp_path):
    src = make_dense()
    with pytest.raises(DataError, match="3 tokens to calibrate on are too few for 4 experts"):
        calibrated(src, text(3, name="short"), num_experts=4)
    with pytest.raises(
        DataError, match=r"other\.bin: token \d+ of document \d+ .* model\.vocab_size 103 allows 0 to 102"
    ):
        calibrated(src, text(vocab=500, name="other"))
    tokens = torch.arange(600) % 103
    tokens[7] = -5  # of a smaller integer type that overflowed
    with pytest.raises(DataError, match=r"wrapped\.bin: token 7 of document 0 .* is -5"):
        calibrated(src, text(tokens=tokens, name="wrapped"))
    with pytest.raises(DataError, match=r"nothing.idx: no such file"):
        calibrated(src, tmp_path / "nothing")
