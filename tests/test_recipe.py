from pathlib import Path

import pytest

from spes_mega.errors import RecipeError
from spes_mega.layout.counts import count_parameters
from spes_mega.recipe import Recipe, load_recipe, parse_recipe

MOE = {
    "family": "qwen3_moe", "num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32,
    "num_experts": 4, "top_k": 2, "expert_hidden_size": 32, "vocab_size": 100,
}  # fmt: skip


def recipe(model: dict | None = None, **sections: dict) -> Recipe:
    raw = {"model": {**MOE, **(model or {})}, **sections}
    return parse_recipe(raw, source="r.yaml", base=Path("/base"))


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    return path


def test_unknown_key_names_file_key_and_nearest_known_one():
    with pytest.raises(RecipeError, match=r"r\.yaml: spes\.sync_evry: unknown key; did you mean sync_every\?"):
        recipe(spes={"sync_evry": 5})


def test_every_fault_is_listed_at_once():
    with pytest.raises(RecipeError) as e:
        recipe(train={"steps": 0, "dtype": "fp8"})
    assert "train.steps" in str(e.value)
    assert "train.dtype" in str(e.value)


@pytest.mark.parametrize(
    ("model", "sections", "message"),
    [
        ({"num_kv_heads": 3}, {}, "not a multiple"),
        ({"top_k": 5}, {}, "top_k 5 must be between 1 and num_experts 4"),
        ({"top_k": 1}, {}, "router gets no gradient"),
        ({"family": "qwen3"}, {}, "family qwen3 does not go with num_experts 4"),
        ({"expert_hidden_size": None}, {}, "needs expert_hidden_size"),
        ({"dense_layers": [2], "ffn_hidden_size": 8}, {}, "must lie in 0..1"),
        ({"family": "mixtral", "norm_topk_prob": False}, {}, "always renormalizes"),
        ({}, {"spes": {"num_nodes": 2, "min_nodes": 3}}, "min_nodes 3 is more than num_nodes 2"),
        ({}, {"spes": {"num_nodes": 2, "ownership": [[0, 1, 2, 3]]}}, "ownership lists 1 nodes, num_nodes is 2"),
        ({}, {"spes": {"num_nodes": 2, "ownership": [[0, 1], [3]]}}, "nobody owns expert 2"),
        ({}, {"spes": {"num_nodes": 2, "ownership": [[0, 1], [2, 3, 4]]}}, "there is no expert 4"),
        ({}, {"spes": {"num_nodes": 2, "capacity": [1]}}, "capacity lists 1 nodes, num_nodes is 2"),
        ({}, {"spes": {"num_nodes": 2, "capacity": [1, 0]}}, r"spes\.capacity\.1"),
        ({}, {"spes": {"num_nodes": 2, "capacity": [1, 2], "ownership": "all"}}, "no effect with ownership: all"),
        ({}, {"spes": {"adopt_after": 0}}, r"spes\.adopt_after"),
        ({}, {"spes": {"rpc_deadline_s": 99, "round_deadline_s": 9}}, "deadlines must nest"),
        ({}, {"train": {"steps": 5, "warmup_steps": 6}}, "warmup_steps 6 is more than steps 5"),
        ({}, {"train": {"seq_len": 8192}}, "over model.max_seq_len 4096"),
        ({}, {"train": {"zero_stage": 0}}, "train.zero_stage"),
        ({}, {"upcycle": {"top_k": 9}}, "top_k 9 is more than num_experts 8"),
        ({}, {"upcycle": {"top_k": 1}}, "no gradient"),
    ],
)
def test_contradictions_are_refused(model, sections, message):
    with pytest.raises(RecipeError, match=message):
        recipe(model, **sections)


def test_top_1_works_when_the_softmax_comes_before_the_choice():
    assert recipe({"top_k": 1, "norm_topk_prob": False}).model.top_k == 1


def test_overrides_reach_any_field_and_values_are_yaml(tmp_path):
    text = "model: {" + ", ".join(f"{k}: {v}" for k, v in MOE.items()) + "}\n"
    path = write(tmp_path, text)
    changed = load_recipe(path, ["spes.sync_every=7", "spes.num_nodes=2", "spes.ownership=[[0, 1], [2, 3]]"])
    assert changed.spes.sync_every == 7
    assert changed.spes.ownership == ((0, 1), (2, 3))
    with pytest.raises(RecipeError, match=r"--set spes: expected section\.field=value"):
        load_recipe(path, ["spes"])
    with pytest.raises(RecipeError, match="did you mean sync_every"):
        load_recipe(path, ["spes.sync_every_=7"])


def test_relative_data_paths_start_at_the_recipe(tmp_path):
    text = "model: {" + ", ".join(f"{k}: {v}" for k, v in MOE.items()) + "}\ndata: {train: d/text}\n"
    assert load_recipe(write(tmp_path, text)).data.train == tmp_path / "d/text"


@pytest.mark.parametrize(("text", "message"), [("[1", "not valid YAML"), ("7", "a recipe is a mapping")])
def test_unreadable_recipes_are_named(tmp_path, text, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(write(tmp_path, text))
    with pytest.raises(RecipeError, match=r"nowhere\.yaml: cannot read"):
        load_recipe(tmp_path / "nowhere.yaml")


def test_rounds_cover_all_steps_and_the_last_may_be_short():
    r = recipe(train={"steps": 25}, spes={"sync_every": 10})
    assert r.num_rounds == 3
    assert [r.step_at(i) for i in range(4)] == [0, 10, 20, 25]


def test_digest_ignores_what_may_differ_between_nodes_and_nothing_else():
    base = recipe()
    same = recipe(
        {"frozen_dtype": "train", "implementation": "local"},
        train={"micro_batch_size": 3, "zero_stage": 2, "dtype": "fp32", "recompute": "full"},
        data={"train": "x"},
        deepspeed={"a": 1},
    )
    assert same.digest() == base.digest()
    for other in (
        recipe(train={"lr": 1e-3}),
        recipe(spes={"sync_every": 7}),
        recipe({"rope_theta": 5.0}),
        recipe({"init_std": 0.1}),
        recipe(spes={"capacity": [1]}),
    ):
        assert other.digest() != base.digest()


def test_frozen_experts_may_not_be_wider_than_the_others():
    wide = {"frozen_dtype": "fp32"}
    assert recipe(wide, train={"dtype": "fp32"}).frozen_dtype == "fp32"
    assert recipe({"frozen_dtype": "train"}, train={"dtype": "fp32"}).frozen_dtype == "fp32"
    assert recipe(train={"dtype": "fp32"}).frozen_dtype == "bf16"
    with pytest.raises(RecipeError, match=r"model\.frozen_dtype fp32 is wider than train\.dtype bf16"):
        recipe(wide, train={"dtype": "bf16"})


CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.mark.parametrize(
    ("name", "total"), [("tiny", None), ("2b", 1_989_000_000), ("7b", 7_300_000_000), ("9b", 9_120_000_000)]
)
def test_shipped_recipes_load_and_have_the_size_they_are_named_after(name, total):
    loaded = load_recipe(CONFIGS / f"{name}.yaml")
    if total is not None:
        assert count_parameters(loaded.model).total == pytest.approx(total, rel=0.01)


def test_counts_by_hand():
    counts = count_parameters(recipe().model)
    attention = 64 * (4 * 32) * 2 + 64 * (2 * 32) * 2 + 2 * 32
    assert counts.expert == 3 * 64 * 32
    assert counts.shared == 2 * 100 * 64 + 64 + 2 * (attention + 2 * 64 + 4 * 64)
    assert counts.total == counts.shared + 2 * 4 * counts.expert
    assert counts.active == counts.shared + 2 * 2 * counts.expert
    assert counts.trainable(1) == counts.shared + 2 * counts.expert
