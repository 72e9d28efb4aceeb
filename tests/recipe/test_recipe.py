from operator import attrgetter
from pathlib import Path

import pytest
import yaml

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
        (
            {},
            {"spes": {"rpc_deadline_s": 99, "round_deadline_s": 9}},
            "must nest: rpc_deadline_s 99 .* round_deadline_s 9",
        ),
        ({}, {"spes": {"wire": "fp8"}}, r"spes\.wire\.up\.shared.*'fp32', 'bf16' or 'int8' \(got 'fp8'\)"),
        ({}, {"spes": {"wire": {"upp": "bf16"}}}, r"spes\.wire\.upp: unknown key; did you mean up\?"),
        (
            {},
            {"spes": {"wire": {"up": {"expert": "bf16"}}}},
            r"spes\.wire\.up\.expert: unknown key; did you mean exp",
        ),
        ({}, {"spes": {"outer": {"shared": {"momentum": 0.9}}}}, r"outer\.shared: momentum 0.9 needs optimizer: nest"),
        (
            {},
            {"spes": {"outer": {"experts": {"optimizer": "nesterov"}}}},
            r"experts: optimizer nesterov needs a momentum",
        ),
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


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"spes": {"join_deadline_s": float("inf")}}, r"spes\.join_deadline_s: .*finite number \(got inf\)"),
        ({"spes": {"rpc_deadline_s": 1e300}}, r"spes\.rpc_deadline_s: .*less than or equal to 2592000 \(got 1e\+300\)"),
        ({"spes": {"outer": {"shared": {"lr": float("inf")}}}}, r"spes\.outer\.shared\.lr: .*finite number"),
        ({"spes": {"num_nodes": 99_999_999_999}}, r"spes\.num_nodes: .*less than or equal to 4096"),
        ({"train": {"lr": float("inf")}}, r"train\.lr: .*finite number"),
        ({"train": {"weight_decay": float("inf")}}, r"train\.weight_decay: .*finite number"),
        ({"deepspeed": {"a": float("inf")}}, "deepspeed: inf: JSON has no such value"),
        ({"data": {"train": "~nosuchuser/x"}}, r"r\.yaml: data\.train: ~nosuchuser/x: no such user"),
    ],
)
def test_numbers_and_paths_that_nothing_could_be_done_with_are_refused(sections, message):
    with pytest.raises(RecipeError, match=message):
        recipe(**sections)


def test_a_setting_or_overlay_with_an_unknown_user_is_named(tmp_path):
    path = write(tmp_path, yaml.safe_dump({"model": MOE}))
    setting = "data.train=~nosuchuser/x"
    with pytest.raises(RecipeError, match=rf"^--set {setting}: data\.train: ~nosuchuser/x: no such user"):
        load_recipe(path, [setting])
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("data: {train: ~nosuchuser/x}")
    with pytest.raises(RecipeError, match=rf"^{overlay}: data\.train: ~nosuchuser/x: no such user"):
        load_recipe(path, [overlay])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"head_dim": 7}, r"r\.yaml: model\.head_dim 7 is odd: RoPE rotates numbers in pairs"),
        ({"rope_theta": float("inf")}, r"model\.rope_theta: .*finite number"),
        ({"rope_scaling": {"factor": float("nan")}}, r"model\.rope_scaling: nan: JSON has no such value"),
    ],
)
def test_models_that_no_node_could_run_are_refused(model, message):
    with pytest.raises(RecipeError, match=message):
        recipe(model)


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


def test_one_word_stands_for_all_codecs_or_those_of_a_direction():
    both = {"shared": "bf16", "experts": "bf16"}
    assert recipe(spes={"wire": "bf16"}) == recipe(spes={"wire": {"up": both, "down": "bf16"}})
    wire = recipe(spes={"wire": {"up": {"experts": "int8"}, "down": "bf16"}}).spes.wire
    assert (wire.up.shared, wire.up.experts, wire.down.shared, wire.down.experts) == ("fp32", "int8", "bf16", "bf16")
    assert (wire.lossless, recipe().spes.wire.lossless) == (False, True)


def test_what_counts_as_plain_averaging():
    outer = recipe(spes={"outer": {"shared": {"lr": 0.9}}}).spes.outer
    assert (outer.shared.averages, outer.experts.averages) == (False, True)


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
        recipe(spes={"wire": {"down": {"experts": "int8"}}}),
        recipe(spes={"outer": {"experts": {"lr": 0.7}}}),
        recipe(spes={"weight_by_tokens": True}),
    ):
        assert other.digest() != base.digest()


def test_frozen_experts_may_not_be_wider_than_the_others():
    wide = {"frozen_dtype": "fp32"}
    assert recipe(wide, train={"dtype": "fp32"}).frozen_dtype == "fp32"
    assert recipe({"frozen_dtype": "train"}, train={"dtype": "fp32"}).frozen_dtype == "fp32"
    assert recipe(train={"dtype": "fp32"}).frozen_dtype == "bf16"
    with pytest.raises(RecipeError, match=r"model\.frozen_dtype fp32 is wider than train\.dtype bf16"):
        recipe(wide, train={"dtype": "bf16"})


CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("name", "total"),
    [("tiny", None), ("study-1b", 1_170_000_000), ("2b", 1_938_000_000), ("7b", 7_300_000_000), ("9b", 9_120_000_000)],
)
def test_shipped_recipes_load_and_have_the_size_they_are_named_after(name, total):
    loaded = load_recipe(CONFIGS / f"{name}.yaml")
    if total is not None:
        assert count_parameters(loaded.model).total == pytest.approx(total, rel=0.01)


# arXiv 2602.11543 and its reference implementation; what is not published for a model is not in its entry.
IN_ALL = {
    "model.init_std": 0.02, "spes.sync_every": 100, "spes.merge_interval": 500, "spes.merge_donors": 4,
    "train.adam_beta1": 0.9, "train.adam_beta2": 0.95, "train.adam_eps": 1e-8, "train.weight_decay": 0.1,
    "train.decay_norms": True, "train.clip_grad": 1.0, "train.warmup_from": 0.1, "train.min_lr_ratio": 0.1,
    "train.aux_loss_coeff": 0.01, "train.aux_loss_warmup": 0.0, "train.router_z_loss_coeff": 0.001,
    "train.logit_z_loss_coeff": 1e-5, "train.dtype": "bf16",
}  # fmt: skip
FROM_SCRATCH = {
    "model.family": "olmoe", "model.norm_topk_prob": False, "model.tie_embeddings": False, "model.init": "truncated",
    "model.vocab_size": 151_665, "train.seq_len": 2048, "train.warmup_steps": 2000,
}  # fmt: skip
PUBLISHED = {
    "study-1b": FROM_SCRATCH | {
        "model.num_layers": 12, "model.hidden_size": 768, "model.num_heads": 12, "model.num_kv_heads": 12,
        "model.head_dim": 64, "model.expert_hidden_size": 2048, "model.num_experts": 16, "model.top_k": 2,
        "model.rope_theta": 500_000, "model.norm_eps": 1e-6, "spes.num_nodes": 4,
        "train.lr": 5e-4, "train.steps": 50_000, "train.batch_size": 256, "train.micro_batch_size": 8,
    },
    "7b": FROM_SCRATCH | {
        "model.num_layers": 16, "model.hidden_size": 2048, "model.num_heads": 16, "model.num_kv_heads": 16,
        "model.head_dim": 128, "model.expert_hidden_size": 2048, "model.num_experts": 32, "model.top_k": 4,
        "model.rope_theta": 32_000, "model.norm_eps": 1e-5, "spes.num_nodes": 4,
        "train.lr": 4e-4, "train.steps": 500_000, "train.batch_size": 1024, "train.micro_batch_size": 2,
    },
    "2b": FROM_SCRATCH | {"spes.num_nodes": 16, "model.num_experts": 16},
    "9b": {
        "model.family": "qwen3_moe", "model.norm_topk_prob": True,
        "model.num_layers": 28, "model.hidden_size": 2048, "model.num_heads": 16, "model.num_kv_heads": 8,
        "model.head_dim": 128, "model.expert_hidden_size": 6144, "model.num_experts": 8, "model.top_k": 2,
        "model.rope_theta": 1_000_000, "model.vocab_size": 151_936, "model.norm_eps": 1e-6,
        "spes.num_nodes": 4, "spes.merge_steps": 20_000, "spes.merge_alpha": 0.05,
        "train.seq_len": 4096, "train.lr": 1e-4, "train.warmup_steps": 1000, "train.steps": 100_000,
        "train.batch_size": 256, "train.micro_batch_size": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_recipes_have_the_published_settings(name):
    loaded = load_recipe(CONFIGS / f"{name}.yaml")
    published = IN_ALL | PUBLISHED[name]
    assert {field: attrgetter(field)(loaded) for field in published} == published
    spes = loaded.spes
    assert spes.ownership == "equal"
    assert spes.capacity is None
    assert spes.wire.lossless
    assert spes.outer.shared.averages
    assert spes.outer.experts.averages


def test_a_dense_layer_that_is_named_twice_is_one_when_the_balance_loss_gets_its_meaning():
    model = {"num_layers": 3, "ffn_hidden_size": 8}
    meant = [recipe(model | {"dense_layers": layers}).agreed()["meaning"] for layers in ([1], [1, 1])]
    assert meant[0] == meant[1] == {"train.aux_loss_coeff": "weight of the mean over MoE layers"}


@pytest.mark.parametrize("name", ["study-1b", "2b", "7b", "9b"])
@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_a_recipe_means_the_same_batch_on_any_number_of_gpus(name, ranks):
    train = load_recipe(CONFIGS / f"{name}.yaml").train
    assert ranks * train.micro_batch_size * train.accumulation(ranks) == train.batch_size


@pytest.mark.parametrize(
    ("train", "ranks", "passes"),
    [
        ({}, 3, 1),
        ({"grad_accumulation": 5}, 3, 5),
        ({"batch_size": 24, "micro_batch_size": 2}, 3, 4),
        ({"batch_size": 24, "micro_batch_size": 2, "grad_accumulation": 4}, 3, 4),
    ],
)
def test_forward_passes_follow_from_the_batch(train, ranks, passes):
    assert recipe(train=train).train.accumulation(ranks) == passes


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            {"batch_size": 256, "micro_batch_size": 8},
            r"train\.batch_size 256 is not a multiple of 3 ranks x train\.micro_batch_size 8 = 24: the nearest that "
            r"are: 240 or 264",
        ),
        ({"batch_size": 2, "micro_batch_size": 1}, "= 3: the nearest that are: 3;"),
        (
            {"batch_size": 24, "grad_accumulation": 4},
            r"batch_size 24 is not 3 ranks x train\.micro_batch_size 1 x train\.grad_accumulation 4 = 12: remove "
            "grad_accumulation, which then becomes 8",
        ),
    ],
)
def test_a_batch_that_cannot_be_made_is_refused_with_the_nearest_that_can(train, message):
    with pytest.raises(RecipeError, match=message):
        recipe(train=train).train.accumulation(3)


@pytest.mark.parametrize("name", ["tiny", "study-1b", "2b", "7b", "9b"])
def test_baselines_are_laid_over_every_recipe(name):
    path = CONFIGS / f"{name}.yaml"
    ours = load_recipe(path)
    diloco = load_recipe(path, [CONFIGS / "baselines/diloco.yaml"])
    assert (diloco.spes.ownership, diloco.spes.sync_every, diloco.spes.merge_steps) == ("all", 50, 0)
    assert diloco.spes.num_nodes == ours.spes.num_nodes
    centralized = load_recipe(path, [CONFIGS / "baselines/centralized.yaml"])
    assert (centralized.spes.num_nodes, centralized.spes.merge_steps) == (1, 0)
    assert diloco.model == centralized.model == ours.model
    assert diloco.train == centralized.train == ours.train


def test_counts_by_hand():
    counts = count_parameters(recipe().model)
    attention = 64 * (4 * 32) * 2 + 64 * (2 * 32) * 2 + 2 * 32
    assert counts.expert == 3 * 64 * 32
    assert counts.shared == 2 * 100 * 64 + 64 + 2 * (attention + 2 * 64 + 4 * 64)
    assert counts.total == counts.shared + 2 * 4 * counts.expert
    assert counts.active == counts.shared + 2 * 2 * counts.expert
    assert counts.trainable(1) == counts.shared + 2 * counts.expert


def overlay(tmp_path: Path, text: str, name: str = "over.yaml") -> Path:
    folder = tmp_path / "overlays"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def moe_file(tmp_path: Path) -> Path:
    return write(tmp_path, "model: {" + ", ".join(f"{k}: {v}" for k, v in MOE.items()) + "}\ntrain: {steps: 7}\n")


def test_an_overlay_is_merged_at_every_depth_and_settings_come_last(tmp_path):
    path = moe_file(tmp_path)
    first = overlay(tmp_path, "spes: {num_nodes: 2, sync_every: 5}\ndata: {train: text}\n")
    second = overlay(
        tmp_path, "spes: {sync_every: 6}\ndeepspeed: {zero_optimization: {overlap_comm: true}}\n", "2.yaml"
    )
    loaded = load_recipe(path, [first, second, "spes.num_nodes=4", "deepspeed.zero_optimization.round=1"])
    assert (loaded.spes.num_nodes, loaded.spes.sync_every, loaded.train.steps) == (4, 6, 7)
    assert loaded.data.train == tmp_path / "overlays/text"
    assert loaded.deepspeed == {"zero_optimization": {"overlap_comm": True, "round": 1}}


def test_the_digest_is_that_of_the_merged_recipe(tmp_path):
    path = moe_file(tmp_path)
    by_overlay = load_recipe(path, [overlay(tmp_path, "spes: {num_nodes: 2, ownership: all}\n")])
    assert by_overlay.digest() == load_recipe(path, ["spes.num_nodes=2", "spes.ownership=all"]).digest()
    assert by_overlay.digest() != load_recipe(path).digest()


def test_a_fault_names_the_file_or_setting_that_has_it(tmp_path):
    path = moe_file(tmp_path)
    over = overlay(tmp_path, "spes: {sync_evry: 5}\n")
    with pytest.raises(RecipeError, match=rf"^{over}: spes\.sync_evry: unknown key; did you mean sync_every\?$"):
        load_recipe(path, [over])
    with pytest.raises(RecipeError, match=r"^--set train\.steps=0: train\.steps: .*greater than 0"):
        load_recipe(path, [overlay(tmp_path, "train: {steps: 3}\n"), "train.steps=0"])
    with pytest.raises(RecipeError, match=r"nowhere\.yaml: cannot read the overlay"):
        load_recipe(path, [tmp_path / "nowhere.yaml"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["train.warmup_steps=9", "train.lr=1"], "{0} and FILE: train: warmup_steps 9 is more than steps 7"),
        (["train.warmup_steps=9", "train.steps=8"], "{0} and {1}: train: warmup_steps 9 is more than steps 8"),
        (["spes.min_nodes=2"], "{0} and FILE: spes: min_nodes 2 is more than num_nodes 1"),
        (["model.max_seq_len=9", "name=x"], "FILE and {0}: train.seq_len 2048 is over model.max_seq_len 9"),
        (["model.num_experts=0"], "FILE and {0}: model: family qwen3_moe does not go with num_experts 0"),
        (["spes.outer.shared={optimizer: nesterov}"], "{0}: spes.outer.shared: optimizer nesterov needs a momentum"),
        (["spes.wire=fp8", "spes.num_nodes=2"], "{0}: spes.wire.up.shared: "),
    ],
)
def test_a_contradiction_names_where_its_fields_come_from_and_nothing_else(tmp_path, settings, said):
    path = moe_file(tmp_path)
    with pytest.raises(RecipeError) as refused:
        load_recipe(path, settings)
    expected = said.replace("FILE", str(path))
    for place, setting in enumerate(settings):
        expected = expected.replace(f"{{{place}}}", f"--set {setting}")
    assert str(refused.value).startswith(expected)


def test_what_the_recipe_contradicts_by_itself_or_lacks_is_not_blamed_on_a_setting(tmp_path):
    path = write(tmp_path, "model: {family: llama}\ntrain: {steps: 7, warmup_steps: 9}\n")
    over = overlay(tmp_path, "model: {hidden_size: 8}\ntrain: {lr: 0.1}\n")
    with pytest.raises(RecipeError) as refused:
        load_recipe(path, [over, "train.lr=0.2", "model.num_layers=1"])
    lines = str(refused.value).splitlines()
    assert f"{path}: train: warmup_steps 9 is more than steps 7" in lines
    assert f"{path}: model.vocab_size: Field required" in lines
    assert all(line.startswith(f"{path}: ") for line in lines)


def test_a_setting_takes_the_place_of_a_whole_mapping(tmp_path):
    path = moe_file(tmp_path)
    changed = load_recipe(path, ["deepspeed={a: {b: 1}}", "deepspeed.a={c: 2}"])
    assert changed.deepspeed == {"a": {"c": 2}}
