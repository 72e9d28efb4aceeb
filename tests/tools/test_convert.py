"""`spes-mega convert`: the same logits in another family, or a reason why not."""

import json

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from spes_mega.cli import main
from spes_mega.errors import CheckpointError
from spes_mega.layout import CheckpointWriter, open_checkpoint
from spes_mega.model import forward_logits
from spes_mega.tools.convert import command, convert, plan_conversion
from tests.model import tiny


@pytest.fixture
def make(tmp_path):
    def make(family, name="source", zero=(), dtype=torch.float32, max_shard_bytes=2**30, **changes):
        model = tiny.section(family, **changes)
        with CheckpointWriter(
            tmp_path / name,
            model,
            dtype,
            base_config={"model_type": family, "eos_token_id": [5, 7]},
            max_shard_bytes=max_shard_bytes,
        ) as writer:
            for key, tensor in tiny.random_weights(model).items():
                writer.write(key, tensor * 0 if key.endswith(zero) and zero else tensor)
        return tmp_path / name

    return make


def run(src, out, to=None, dtype="source"):
    with open_checkpoint(src) as source:
        plan = plan_conversion(source, to, dtype)
        convert(source, out, plan)
    return plan


def weights(path):
    with open_checkpoint(path) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.names}


def logits(path):
    with open_checkpoint(path) as checkpoint:
        gpt = tiny.loaded(tiny.recipe(checkpoint.model), {n: checkpoint.read(n) for n in checkpoint.names}).eval()
        ids = tiny.tokens(checkpoint.model)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return forward_logits(gpt, ids), theirs(ids).logits


@pytest.mark.parametrize(
    ("chain", "changes"),
    [
        (("mixtral", "qwen2_moe", "mixtral"), {"tie_embeddings": True}),
        (("mixtral", "mixtral"), {"sliding_window": 9}),
        (("llama", "mistral", "qwen2", "llama"), {"norm_eps": 1e-3}),
        (("qwen2_moe", "qwen2_moe"), {}),
        (("olmoe", "olmoe"), {"norm_topk_prob": False}),
    ],
)
def test_logits_stay_and_so_do_all_weights(make, tmp_path, chain, changes):
    src = make(chain[0], **changes)
    expected, stock = logits(src)
    torch.testing.assert_close(stock, expected, atol=1e-4, rtol=1e-4)
    assert expected.std() > 0.5
    last = src
    for k, family in enumerate(chain[1:]):
        plan = run(last, tmp_path / f"step-{k}", family)
        last = tmp_path / f"step-{k}"
        assert plan.model.family == json.loads((last / "config.json").read_text())["model_type"] == family
        assert not plan.rounded
        for found in logits(last):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert json.loads((last / "config.json").read_text())["eos_token_id"] == [5, 7]
    before, after = weights(src), weights(last)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_what_is_added_does_nothing_and_never_will(make, tmp_path):
    plan = run(make("mixtral", norm_eps=1e-3), tmp_path / "out", "qwen2_moe")
    found = weights(tmp_path / "out")
    assert plan.model.shared_expert_hidden_size == 16
    assert len(plan.added) == 2 * (3 + 4)  # layers x (biases + shared expert with its gate)
    assert plan.dropped == ()
    for name in plan.added:
        assert found[name].dtype == torch.float32
        assert not found[name].any(), name
    gpt = tiny.loaded(tiny.recipe(plan.model), found).train()
    forward_logits(gpt, tiny.tokens(plan.model)).square().mean().backward()
    for layer in gpt.decoder.layers:
        for parameter in layer.mlp.shared_experts.parameters():
            assert parameter.grad is not None
            assert not parameter.grad.any()
        assert layer.mlp.router.weight.grad.any()


def test_what_does_something_is_not_left_out(make, tmp_path):
    src = make("qwen2_moe", zero=("shared_expert.up_proj.weight",))
    with pytest.raises(CheckpointError, match="mixtral cannot hold this qwen2_moe model: qwen2_moe has biases"):
        run(src, tmp_path / "out", "mixtral")
    src = make("qwen2_moe", "silent", zero=("shared_expert.up_proj.weight", ".bias"))
    plan = run(src, tmp_path / "out", "mixtral")
    assert len(plan.dropped) == 14
    torch.testing.assert_close(logits(tmp_path / "out")[0], logits(src)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "to", "said"),
    [
        ("qwen3_moe", "mixtral", "normalizes queries and keys over each head"),
        ("qwen3_moe", "olmoe", "over their whole width"),
        ("olmoe", "qwen3_moe", "over their whole width, qwen3_moe normalizes queries and keys over each head"),
        ("olmoe", "flex_olmo", "normalizes the inputs"),
        ("qwen3_moe", "qwen3", "is a Mixture-of-Experts, qwen3 is dense"),
        ("qwen3", "qwen3_moe", "is dense .qwen3., qwen3_moe a Mixture-of-Experts: spes-mega upcycle"),
    ],
)
def test_refused_with_a_reason_and_without_output(make, tmp_path, family, to, said):
    src = make(family)
    with pytest.raises(CheckpointError, match=said):
        run(src, tmp_path / "out", to)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_norm_of_each_head_is_never_taken_for_one_of_all_heads(make, tmp_path):
    src = make("olmoe", num_heads=1, num_kv_heads=1, head_dim=64)  # where the shapes would agree
    with pytest.raises(CheckpointError, match="over their whole width"):
        run(src, tmp_path / "out", "qwen3_moe")


def test_dtypes_and_shards(make, tmp_path):
    one, many = make("qwen2", "one", dtype=torch.bfloat16), make("qwen2", "many", max_shard_bytes=60_000)
    assert len(list(many.glob("*.safetensors"))) > 2
    assert not run(one, tmp_path / "a").rounded
    assert {tensor.dtype for tensor in weights(tmp_path / "a").values()} == {torch.bfloat16}
    assert not run(one, tmp_path / "b", dtype="fp32").rounded
    assert {tensor.dtype for tensor in weights(tmp_path / "b").values()} == {torch.float32}
    assert run(many, tmp_path / "c", dtype="bf16").rounded
    assert (tmp_path / "c/model.safetensors").read_bytes() == (tmp_path / "a/model.safetensors").read_bytes()


def test_damaged_weights_leave_nothing(make, tmp_path):
    src = make("llama")
    state = load_file(src / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(state, src / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model.layers.1.mlp.up_proj.weight: has NaN"):
        run(src, tmp_path / "out", "mistral")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_megatron_state_dict_becomes_a_hugging_face_directory(tmp_path, make):
    model = tiny.section("qwen2")  # 4 heads of 2 KV groups, non-zero biases, a vocabulary of 1003
    gpt = tiny.loaded(tiny.recipe(model), tiny.random_weights(model))
    torch.save({"model": gpt.state_dict()}, tmp_path / "megatron.pt")
    config = make("qwen2") / "config.json"
    result = CliRunner().invoke(
        command, [str(tmp_path / "megatron.pt"), "--config", str(config), "--out", str(tmp_path / "out"), "--json"]
    )
    report = json.loads(result.stdout)
    assert (report["from"], report["to"], report["added"], report["rounded"]) == ("qwen2", "qwen2", [], False)
    found, expected = weights(tmp_path / "out"), tiny.random_weights(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    ours, theirs = logits(tmp_path / "out")
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)


def test_what_it_says(make, tmp_path):
    src = make("llama")
    result = CliRunner().invoke(command, [str(src), "--to", "qwen2", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    count = sum(tensor.numel() for tensor in weights(tmp_path / "out").values())
    assert lines[0].startswith(f"llama -> qwen2, {count:,} parameters, {4 * count:,} bytes in {tmp_path}/out")
    assert lines[1] == "added 6 tensors of zeros that do nothing, such as model.layers.0.self_attn.q_proj.bias"
    assert lines[2] == "no value was changed"
    assert lines[3] == f"next: spes-mega upcycle {tmp_path}/out"


def test_an_output_that_exists_is_refused(make, capsys):
    src = make("llama")
    with pytest.raises(SystemExit) as e:
        main(["convert", str(src), "--out", str(src)])
    assert e.value.code == CheckpointError.exit_code
    assert "exists already" in capsys.readouterr().err
