import pytest
import torch
from safetensors.torch import load_file

from spes_mega.layout import FAMILIES, ExpertKey, expected_tensors, expert_name, expert_of, make_config


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {}),
        ("qwen3", {"tie_embeddings": True}),
        ("llama", {}),
        ("llama", {"tie_embeddings": True}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"dense_layers": (1,), "ffn_hidden_size": 40, "norm_topk_prob": False}),
        ("mixtral", {}),
        ("mixtral", {"tie_embeddings": True}),
        ("qwen2", {}),
        ("qwen2", {"head_dim": 8, "tie_embeddings": True}),
        ("mistral", {"sliding_window": 16}),
        ("olmo2", {}),
        ("qwen2_moe", {}),
        ("qwen2_moe", {"dense_layers": (0,), "ffn_hidden_size": 40}),
        ("olmoe", {}),
        ("flex_olmo", {"tie_embeddings": True}),
    ],
)
def test_names_and_shapes_are_those_that_transformers_writes(section, tmp_path, family, changes):
    transformers = pytest.importorskip("transformers")
    model = section(family, **changes)
    config = make_config(model, None, torch.float32)
    known = transformers.AutoConfig.for_model(**config)
    transformers.AutoModelForCausalLM.from_config(known).save_pretrained(tmp_path)
    theirs = {name: tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
    to_disk = FAMILIES[family].to_disk
    assert {to_disk(name): shape for name, shape in expected_tensors(model).items()} == theirs


def test_canonical_order_by_hand(section):
    names = list(expected_tensors(section("qwen3_moe", num_layers=1, num_experts=2)))
    layer, experts = "model.layers.0.", "model.layers.0.mlp.experts."
    assert names == [
        "model.embed_tokens.weight",
        layer + "input_layernorm.weight",
        layer + "self_attn.q_proj.weight",
        layer + "self_attn.k_proj.weight",
        layer + "self_attn.v_proj.weight",
        layer + "self_attn.q_norm.weight",
        layer + "self_attn.k_norm.weight",
        layer + "self_attn.o_proj.weight",
        layer + "post_attention_layernorm.weight",
        layer + "mlp.gate.weight",
        *[f"{experts}{e}.{m}_proj.weight" for e in (0, 1) for m in ("gate", "up", "down")],
        "model.norm.weight",
        "lm_head.weight",
    ]


def test_disk_names_are_distinct(section):
    for family, declared in FAMILIES.items():
        names = expected_tensors(section(family))
        assert len({declared.to_disk(name) for name in names}) == len(names)


def test_a_shared_expert_is_shared():
    for name in ("shared_expert.gate_proj", "shared_expert.down_proj", "shared_expert_gate"):
        assert expert_of(f"model.layers.3.mlp.{name}.weight") is None


def test_expert_of():
    assert expert_of(expert_name(3, 12, "up_proj")) == ExpertKey(3, 12, "up_proj")
    for shared in ("model.layers.3.mlp.gate.weight", "model.layers.3.mlp.up_proj.weight", "lm_head.weight"):
        assert expert_of(shared) is None
    assert expert_of("model.layers.3.mlp.experts.1.up_proj.weight.scale") is None
