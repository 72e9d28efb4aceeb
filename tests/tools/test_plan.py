"""`spes-mega plan`: counts against built models, formulas against what torch keeps, and figures by hand."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from spes_mega.cli import group
from spes_mega.errors import RecipeError
from spes_mega.layout.counts import count_parameters
from spes_mega.layout.names import expected_tensors
from spes_mega.model import build, forward_logits, language_model_loss, load_weights
from spes_mega.model.loss import PART_ELEMENTS
from spes_mega.outer.merging import merge_due
from spes_mega.outer.ownership import ownership_of
from spes_mega.recipe import Recipe, load_recipe, override_recipe
from spes_mega.recipe.deepspeed_config import PIECE_ELEMENTS, PIECE_ELEMENTS_CPU, deepspeed_config
from spes_mega.tools.plan.activations import LOSS_PART, activation_bytes
from spes_mega.tools.plan.compute import flops_per_token
from spes_mega.tools.plan.memory import BESIDE_TORCH, TORCH, rank_memory
from spes_mega.tools.plan.plan import Machines, make_plan
from spes_mega.tools.plan.suggest import suggest
from spes_mega.tools.plan.traffic import CONFIGURED, Links, merging_rounds, node_traffic, round_seconds, waited_seconds
from tests.model import tiny

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = sorted(CONFIGS.glob("*.yaml"))
GIB = 1 << 30


def shipped(name: str, *changes: str) -> Recipe:
    return override_recipe(load_recipe(CONFIGS / f"{name}.yaml"), changes)


def machines(**changes) -> Machines:
    return Machines(**{"gpus": 1, "memory": 48 * GIB, "links": Links(1e9, 1e9), "tflops": 100.0} | changes)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_counts_are_those_of_the_model_built_on_meta(path):
    recipe = load_recipe(path)
    counts = count_parameters(recipe.model)
    ownership = ownership_of(recipe.model.num_experts, recipe.spes.num_nodes, recipe.spes.ownership)
    owned = ownership.owned(0)
    gpt = build(recipe, owned, device="meta")
    assert {p.device.type for p in gpt.parameters()} == {"meta"}
    assert sum(p.numel() for p in gpt.parameters()) == counts.total
    assert sum(p.numel() for p in gpt.parameters() if p.requires_grad) == counts.trainable(len(owned))


def kept_bytes(recipe: Recipe, owned: tuple[int, ...]) -> int:
    """Bytes of all storages that autograd keeps in forward, without parameters and the logits."""
    gpt = build(recipe, owned)
    generator = torch.Generator().manual_seed(0)
    load_weights(gpt, recipe.model, lambda n: 0.1 * torch.randn(expected_tensors(recipe.model)[n], generator=generator))
    parameters = {p.untyped_storage().data_ptr() for p in gpt.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    tokens = tiny.tokens(recipe.model, recipe.train.micro_batch_size, recipe.train.seq_len)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward_logits(gpt, tokens)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("owned", [(), (1,), tuple(range(6))])
@pytest.mark.parametrize(
    ("dtype", "frozen", "settings"),
    [
        ("fp32", "train", {}),
        ("bf16", "bf16", {}),
        ("fp32", "bf16", {"zero_stage": 3}),
        ("fp32", "train", {"recompute": "selective"}),
        ("bf16", "bf16", {"recompute": "full"}),
    ],
)
def test_activations_are_what_torch_keeps_on_the_cpu(dtype, frozen, settings, owned):
    """Within 10 %: positions, indices and the uneven spread of tokens over experts are left out."""
    shape = {"hidden_size": 128, "expert_hidden_size": 192, "vocab_size": 64, "num_layers": 3}
    model = tiny.section("qwen3_moe", frozen_dtype=frozen, **shape)
    recipe = tiny.recipe(model, dtype=dtype, micro_batch_size=4, seq_len=128, aux_loss_coeff=0.01, **settings)
    expected = activation_bytes(recipe, len(owned), fused=False).kept
    assert kept_bytes(recipe, owned) == pytest.approx(expected, rel=0.1)


def test_logits_and_their_gradient_take_the_same_room():
    """What the loss needs beside them for a part of the logits, torch's logsumexp takes, and is not seen here."""
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Live(TorchDispatchMode):
        storages: dict[int, tuple[StorageWeakRef, int]] = {}  # noqa: RUF012
        peak = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    storage = leaf.untyped_storage()
                    self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
            self.storages = {key: one for key, one in self.storages.items() if not one[0].expired()}
            self.peak = max(self.peak, sum(size for _, size in self.storages.values()))
            return result

    model = tiny.section("qwen3_moe", vocab_size=20_000, num_layers=1)
    recipe = tiny.recipe(model, seq_len=64, micro_batch_size=2)
    gpt = tiny.loaded(recipe, tiny.random_weights(model))
    tokens = tiny.tokens(model, 2, 64)
    with Live() as live:
        sum(language_model_loss(forward_logits(gpt, tokens), tokens, 1e-5, use_up=True)).backward()
    expected = activation_bytes(recipe, 6, fused=False)
    logits, head = (4 * model.vocab_size * width for width in (tokens.numel(), model.hidden_size))
    assert expected.loss == logits + min(logits, 4 * LOSS_PART)
    # The output layer's backward pass makes its weights' gradient; they themselves are seen as a view of them is taken.
    assert live.peak == pytest.approx(expected.kept + logits + 2 * head, rel=0.02)


def test_buckets_and_pieces_are_those_that_a_node_asks_deepspeed_for():
    zero = deepspeed_config(shipped("2b"), ranks=2)["zero_optimization"]
    assert zero["reduce_bucket_size"] == zero["sub_group_size"] == PIECE_ELEMENTS == 32 << 20
    assert PIECE_ELEMENTS_CPU == 4 << 20
    assert PART_ELEMENTS == LOSS_PART


def test_states_by_hand():
    """ZeRO 1-3 of two ranks: bf16 weights, fp32 masters and moments; frozen experts are weights alone."""
    recipe = shipped("2b", "train.batch_size=null")
    counts = count_parameters(recipe.model)
    trained, frozen = counts.trainable(1), counts.total - counts.trainable(1)
    by_stage = [rank_memory(shipped("2b", "train.batch_size=null", f"train.zero_stage={s}"), 1, 2, "cuda")
                for s in (1, 2, 3)]  # fmt: skip
    assert by_stage[0].weights == by_stage[1].weights == 2 * (trained + frozen)
    assert by_stage[2].weights < by_stage[1].weights
    assert {memory.optimizer for memory in by_stage} == {12 * (trained // 2)}
    assert [by_stage[s].gradients_fresh for s in (0, 1)] == [2 * trained, trained]
    assert by_stage[0].gradients_held == 0
    summed = rank_memory(shipped("2b"), 1, 2, "cuda")
    assert summed.gradients_held == 4 * trained  # sums over micro-batches in fp32
    offloaded = "deepspeed.zero_optimization.offload_optimizer.device=cpu"
    moved = rank_memory(shipped("2b", offloaded), 1, 2, "cuda")
    assert (moved.optimizer, moved.gradients_held, moved.host) == (0, 0, 16 * (trained // 2))


def test_a_rank_has_room_for_all_weights_at_the_start_and_for_the_largest_parameter_at_an_exchange():
    recipe = shipped("9b", "train.zero_stage=3", "train.recompute=full", "train.seq_len=64")
    model, counts = recipe.model, count_parameters(recipe.model)
    memory = rank_memory(recipe, 2, 64, "cuda")
    assert memory.peak == memory.phases["start"] == 2 * counts.total + memory.runtime
    assert memory.phases["exchange"] == memory.constant + 8 * model.vocab_size * model.hidden_size
    assert memory.phases["exchange"] > memory.phases["update"]


NODE_MEMORY = ("train.seq_len=256", "train.micro_batch_size=1", "train.batch_size=null")


@pytest.mark.parametrize(
    ("row", "owned", "settings"),
    [
        ("2 B, one of 16 experts owned", 1, ()),
        ("5 of its 12 layers, all experts owned", 16, ("model.num_layers=5",)),
        ("5 of its 12 layers, one of 16 owned", 1, ("model.num_layers=5",)),
    ],
)
def test_measured_peaks_at_full_size_are_planned_within_a_tenth(row, owned, settings):
    """Figures of benchmarks/node_memory/README.md, and what docs/reference/memory.md says was planned for them."""
    readme, docs = (
        (CONFIGS.parent / path).read_text() for path in ("benchmarks/node_memory/README.md", "docs/reference/memory.md")
    )
    measured, hub = re.search(rf"\| {row} \|.*\| ([\d.]+) GiB \| ([\d.]+) GiB \|", readme).groups()
    planned = rank_memory(shipped("2b", *NODE_MEMORY, *settings), owned, 1, "cpu").peak / GIB
    assert planned == pytest.approx(float(measured), rel=0.1)
    assert f"| {row} | {planned:.2f} GiB | {measured} GiB | {hub} GiB |" in docs


def test_flops_are_six_a_weight_where_everything_is_trained_and_four_where_it_is_frozen():
    recipe = shipped("7b", "train.seq_len=1")
    counts = count_parameters(recipe.model)
    used = counts.active - recipe.model.vocab_size * recipe.model.hidden_size
    everything, nothing = flops_per_token(recipe, 32), flops_per_token(recipe, 0)
    assert everything.total == pytest.approx(6 * used, rel=1e-3)
    routed = counts.active - counts.shared
    assert everything.weight_gradients - nothing.weight_gradients == 2 * routed
    attention = flops_per_token(shipped("7b"), 32).forward - everything.forward
    assert attention == 2 * 2047 * 2048 * 16


def test_bytes_of_a_round_are_those_of_the_smollm2_example():
    """Measured there: 856.9 MB up, 856.9 MB down, 1,493.9 MB down after a merge."""
    recipe = load_recipe(Path(__file__).parents[2] / "examples/smollm2/recipe.yaml")
    ownership = ownership_of(recipe.model.num_experts, recipe.spes.num_nodes, recipe.spes.ownership)
    for node in (0, 1):
        traffic = node_traffic(recipe, ownership, node, "fp32", 0)
        megabytes = [traffic.up / 1e6, traffic.down / 1e6, traffic.down_after_merge / 1e6]
        assert megabytes == pytest.approx([856.9, 856.9, 1493.9], abs=0.2)
        half = node_traffic(recipe, ownership, node, "bf16", 0)
        assert (half.up, half.down) == pytest.approx((traffic.up / 2, traffic.down / 2), rel=1e-3)
        assert node_traffic(recipe, ownership, node, "int8", 0).up == pytest.approx(traffic.up / 4, rel=0.01)


def test_the_recipes_own_wire_has_a_row_beside_the_codecs():
    """Directions and kinds apart; with one codec for everything it is that codec's row."""
    wire = "spes.wire={up: {shared: bf16, experts: int8}, down: {shared: int8, experts: fp32}}"
    found = make_plan(shipped("2b", wire), machines()).spes.exchanges
    counts = count_parameters(load_recipe(CONFIGS / "2b.yaml").model)
    experts = counts.moe_layers * counts.expert  # of one expert, in all layers
    assert found[CONFIGURED].up == pytest.approx(2 * counts.shared + experts, rel=2e-3)
    assert found[CONFIGURED].down == pytest.approx(counts.shared + 4 * 15 * experts, rel=2e-3)
    assert found["int8"].up < found[CONFIGURED].up < found["bf16"].up
    plain = make_plan(shipped("2b", "spes.wire=int8"), machines()).schemes
    for scheme in plain[:2]:
        assert scheme.exchanges[CONFIGURED] == scheme.exchanges["int8"]
    assert CONFIGURED not in plain[2].exchanges


def test_experts_that_are_not_just_averaged_come_back_to_their_own_node():
    outer = "spes.outer.experts={optimizer: nesterov, lr: 0.7, momentum: 0.9}"
    plain, moving = (make_plan(shipped("2b", *more), machines()) for more in ((), (outer,)))
    total = count_parameters(plain.recipe.model).total
    assert moving.spes.exchanges["fp32"].down == pytest.approx(4 * total, rel=1e-3)
    assert plain.spes.exchanges["fp32"].down < 0.96 * 4 * total


@pytest.mark.parametrize(
    ("exchange_s", "rounds", "lost_s"), [(30, 4, 30 / 4), (150, 4, (3 * 50 + 150) / 4), (30, 1, 30)]
)
def test_overlap_loses_what_is_longer_than_the_next_rounds_compute(exchange_s, rounds, lost_s):
    """And the whole of the last round's exchange, as `OverlappingHubNode` closes it in the plain way."""
    settings = (f"train.steps={100 * rounds}", "train.warmup_steps=1", "spes.merge_steps=0")
    plain, overlapping = (shipped("2b", *settings, f"spes.overlap={on}") for on in ("false", "true"))
    assert waited_seconds(overlapping, exchange_s, 100) == pytest.approx(lost_s)
    assert waited_seconds(plain, exchange_s, 100) == exchange_s


def test_the_share_of_time_lost_is_that_with_overlap():
    exchange = make_plan(shipped("9b", "spes.overlap=true"), machines(gpus=8, tflops=300)).spes.exchanges["int8"]
    assert exchange.seconds > 60
    assert exchange.waited_s == pytest.approx(exchange.seconds / 1000)
    assert exchange.share_lost < 1e-3


def test_the_slower_link_counts():
    recipe = shipped("tiny", "spes.merge_steps=0")
    ownership = ownership_of(4, 2, "equal")
    nodes = [node_traffic(recipe, ownership, node, "fp32", 0) for node in (0, 1)]
    moved = 8 * (nodes[0].up + nodes[0].down)
    assert round_seconds(Links(1e6, 1e9), nodes, 0)[0] == pytest.approx(moved / 1e6)
    assert round_seconds(Links(1e6, 1e9), nodes, 0)[1] == pytest.approx(2 * moved / 1e9)
    assert merging_rounds(shipped("tiny")) == 2  # after steps 100 and 200; merging stops at 300


def test_nodes_with_unequal_loads_are_planned_apart():
    plan = make_plan(shipped("9b", "spes.ownership=[[0,1,2,3],[4,5],[6],[7]]"), machines(gpus=8))
    assert [(group.nodes, group.owned) for group in plan.spes.groups] == [((0,), 4), ((1,), 2), ((2, 3), 1)]
    peaks = [group.memory.peak for group in plan.spes.groups]
    assert peaks == sorted(peaks, reverse=True)
    assert plan.spes.compute_s == plan.spes.groups[0].compute_s


def test_spes_needs_less_than_diloco_of_everything():
    plan = make_plan(shipped("2b"), machines())
    spes, diloco, centralized = plan.schemes
    assert spes.peak < diloco.peak
    assert spes.compute_s < diloco.compute_s
    for codec in ("fp32", "bf16", "int8"):
        assert spes.exchanges[codec].up + spes.exchanges[codec].down < 0.7 * 2 * diloco.exchanges[codec].up
    assert centralized.exchanges["bf16"].seconds > 50 * diloco.exchanges["bf16"].seconds / 16


@pytest.mark.parametrize("changes", [(), ("train.batch_size=null",), ("train.grad_accumulation=8",)])
@pytest.mark.parametrize("gpus", [1, 4])
def test_one_job_over_all_machines_computes_as_long_as_nodes_that_train_everything(changes, gpus):
    if gpus > 1 and changes == ("train.grad_accumulation=8",):
        changes = ("train.grad_accumulation=2",)
    _, diloco, centralized = make_plan(shipped("2b", *changes), machines(gpus=gpus)).schemes
    assert centralized.compute_s == pytest.approx(diloco.compute_s)


def test_checkpoints_need_room_for_weights_and_moments_of_what_is_trained():
    plan = make_plan(shipped("2b"), machines())
    trained = max(group.trained for group in plan.spes.groups)
    assert plan.disk.node_checkpoints == pytest.approx(12 * trained * 3, rel=1e-3)  # two, and the next one
    assert make_plan(shipped("2b", "checkpoint.keep_last=4"), machines()).disk.node_checkpoints == pytest.approx(
        12 * trained * 5, rel=1e-3
    )
    assert make_plan(shipped("2b", "checkpoint.every=0"), machines()).disk.node_checkpoints == 0


def test_disks_hold_what_lossy_codecs_overlap_and_momentum_need():
    """The files themselves are compared in tests/tools/test_wire_sizes.py."""
    recipe = shipped("2b")
    counts = count_parameters(recipe.model)
    state, trained = 4 * counts.total, 4 * counts.trainable(1)
    experts = 4 * counts.moe_layers * counts.expert

    def disk(*settings: str):
        return make_plan(shipped("2b", *settings), machines()).disk

    plain = disk()
    assert plain.hub_weights == pytest.approx(3 * state, rel=1e-3)
    assert plain.hub_beside == plain.node_overlap == plain.node_moving == 0
    assert plain.hub_pushes == pytest.approx(2 * 16 * trained, rel=1e-3)
    assert plain.node == plain.node_spools == pytest.approx(state + trained, rel=1e-3)
    lossy = disk("spes.wire=bf16")
    assert lossy.hub_weights == plain.hub_weights
    # Residual, and the change in bf16; in one state of three, what a merge has changed of all experts.
    assert lossy.hub_beside == pytest.approx(3 * 1.5 * state + 16 * experts / 2, rel=1e-3)
    assert disk("spes.wire=bf16", "spes.merge_steps=0").hub_beside == pytest.approx(3 * 1.5 * state, rel=1e-3)
    assert lossy.hub_pushes == pytest.approx(plain.hub_pushes / 2, rel=1e-3)
    # A state and a push, the published weights, the node's experts that are staged, two residuals.
    assert lossy.node_spools == pytest.approx(2 * state + trained / 2 + experts + 2 * trained, rel=1e-3)
    assert lossy.node_checkpoints == pytest.approx(plain.node_checkpoints * 4 / 3, rel=1e-3)
    moving = disk("spes.outer.shared={optimizer: nesterov, lr: 0.7, momentum: 0.9}")
    assert moving.hub_beside == pytest.approx(3 * 4 * counts.shared, rel=1e-3)
    assert disk("spes.overlap=true").node_overlap == disk("spes.adopt_after=2").node_moving == 2 * trained
    assert disk("spes.overlap=true", "spes.wire=bf16").node_checkpoints == plain.node_checkpoints
    assert plain.hub_snapshots == disk("spes.wire=bf16").hub_snapshots == pytest.approx(100 * state, rel=1e-3)


def test_a_suggestion_fits_and_nothing_cheaper_would():
    assert suggest(make_plan(shipped("2b"), machines())) == []
    (found,) = suggest(make_plan(shipped("2b"), machines(memory=20 * GIB)))
    assert found.fits
    assert found.settings == ("train.micro_batch_size=2",)
    changed = make_plan(shipped("2b", *found.settings), machines(memory=20 * GIB))
    assert changed.spes.fits
    assert changed.spes.peak == found.peak_bytes
    (hopeless,) = suggest(make_plan(shipped("2b"), machines(memory=GIB)))
    assert not hopeless.fits


def test_nothing_is_suggested_that_a_node_would_refuse():
    asked = machines(gpus=4, memory=24 * GIB)
    (found,) = suggest(make_plan(shipped("2b"), asked))
    assert found.settings == ("train.zero_stage=2",)
    (found,) = suggest(make_plan(shipped("2b", "deepspeed={zero_optimization: {stage: 1}}"), asked))
    assert found.fits
    assert not any("train.zero_stage=" in setting for setting in found.settings)


@pytest.mark.parametrize(
    ("section", "gpus", "message"),
    [
        ("{fp16: {enabled: true}}", 1, r"deepspeed\.fp16\.enabled is True, but the train section makes it False"),
        ("{zero_optimization: 3}", 1, r"deepspeed\.zero_optimization: expected a mapping, got 3"),
        ("{data_types: bf16}", 1, r"deepspeed\.data_types: expected a mapping, got 'bf16'"),
        ("{zero_optimization: {round_robin_gradients: true}}", 2, "round_robin_gradients cannot be set: with several"),
    ],
)
def test_a_deepspeed_section_that_a_node_would_refuse_is_refused(section, gpus, message):
    arguments = ["plan", str(CONFIGS / "2b.yaml"), "--gpus-per-node", str(gpus), "--set", f"deepspeed={section}"]
    with pytest.raises(RecipeError, match=message):
        CliRunner().invoke(group, arguments, catch_exceptions=False)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(group, ["plan", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_says_whether_it_fits_and_what_would():
    recipe = str(CONFIGS / "2b.yaml")
    assert "It fits: at most" in run(recipe)
    text = run(recipe, "--gpu-memory", "20GiB", "--micro-batch", "8")
    assert "It does not fit" in text
    assert "Cheapest change that fits: --set train.micro_batch_size=" in text
    assert "micro-batch 8 x 2048" in text


def test_the_table_marks_the_recipes_own_codecs():
    recipe = str(CONFIGS / "2b.yaml")
    assert "fp32 *" in run(recipe)
    text = run(recipe, "--set", "spes.wire.up=int8", "--set", "spes.overlap=true")
    assert "spes.wire: up int8, down fp32" in text
    assert "│ spes.wire │" in text
    assert "for spes.overlap" in text


@pytest.mark.parametrize(("device", "where"), [("cpu", "RAM"), ("nvme", "NVMe")])
def test_the_report_says_where_an_offloaded_optimizer_lies(device, where):
    offload = f"deepspeed.zero_optimization.offload_optimizer={{device: {device}, nvme_path: /nvme}}"
    text = run(str(CONFIGS / "2b.yaml"), "--set", offload, "--set", "train.zero_stage=3")
    trained = count_parameters(load_recipe(CONFIGS / "2b.yaml").model).trainable(1)
    assert f"{where} of a node for the optimizer that is offloaded: {16 * trained / 1e9:.2f} GB" in text


@pytest.mark.parametrize(("build", "other"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_memory_of_a_process_on_the_cpu_is_that_of_the_build_of_torch_that_is_installed(monkeypatch, build, other):
    monkeypatch.setattr(torch.version, "cuda", "13.0" if build == "cuda" else None)
    arguments = (str(CONFIGS / "tiny.yaml"), "--device", "cpu", "--gpu-memory", "4GiB")
    held = {one: TORCH[one] + BESIDE_TORCH[one] for one in (build, other)}
    text = run(*arguments)
    assert f"  {held[build] / 1e9:.2f} GB of a process: Python and libraries, with the {build.upper()} build" in text
    assert f"({held[other] / 1e9:.2f} GB with {other.upper()})" in text
    report = json.loads(run(*arguments, "--json"))
    assert report["machines"]["torch"] == build
    assert report["schemes"][0]["nodes"][0]["memory"]["runtime"] == held[build]
    assert "Python and libraries" not in run(str(CONFIGS / "tiny.yaml"))


def test_json_has_what_the_tables_have():
    recipe = str(CONFIGS / "7b.yaml")
    report = json.loads(run(recipe, "--nodes", "8", "--gpus-per-node", "4", "--gpu-memory", "80GB", "--json"))
    assert report["num_nodes"] == 8
    assert report["parameters"]["total"] == count_parameters(load_recipe(recipe).model).total
    names = [scheme["name"] for scheme in report["schemes"]]
    assert names == ["this recipe", "DiLoCo", "centralized"]
    (nodes,) = report["schemes"][0]["nodes"]
    assert nodes["nodes"] == list(range(8))
    assert nodes["owned_experts"] == 4
    assert nodes["memory"]["peak"] == report["schemes"][0]["peak_bytes"]
    exchange = report["schemes"][0]["communication_per_round"]["int8"]
    compute = report["schemes"][0]["compute_s_per_round"]
    assert exchange["share_lost"] == pytest.approx(exchange["seconds"] / (exchange["seconds"] + compute))
    assert report["fits"] is nodes["fits"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("deepspeed.zero_optimization.foo=1", r"deepspeed\.zero_optimization\.foo is 1: Extra inputs"),
        ("deepspeed.zero_optimization.reduce_bucket_size=-5", r"reduce_bucket_size is -5: .* greater than 0"),
        (
            "deepspeed.zero_optimization.stage3_max_live_parameters=abc",
            r"stage3_max_live_parameters is 'abc': .* integer",
        ),
        ("deepspeed.zero_optimization.offload_optimizer.device=gpu", r"offload_optimizer\.device is 'gpu'"),
        ("deepspeed.data_types=null", r"deepspeed\.data_types: expected a mapping"),
        ("model.rope_scaling={type: yarn, factor: 2}", r"model\.rope_scaling: RoPE variant 'yarn'"),
    ],
)
def test_what_a_node_would_refuse_is_refused(setting, message):
    with pytest.raises(RecipeError, match=message):
        make_plan(shipped("tiny", "train.zero_stage=3", setting), machines())


def test_the_json_of_a_plan_with_a_deepspeed_section_is_all_that_is_printed():
    """In a process of its own: DeepSpeed speaks while it is imported."""
    arguments = ["plan", str(CONFIGS / "tiny.yaml"), "--json", "--set", "deepspeed.zero_optimization.sub_group_size=7"]
    program = f"from spes_mega.cli import group; group({arguments!r})"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["fits"] is True


def test_merging_rounds_are_those_of_a_walk_through_all_rounds():
    for steps, every, interval, stop in itertools.product(
        (7, 12, 30), (1, 3, 5, 40), (2, 3, 7, 12), (0, 1, 8, 12, 13, 99)
    ):
        spes = {"sync_every": every, "merge_interval": interval, "merge_steps": stop}
        changes = [
            f"train.steps={steps}",
            "train.warmup_steps=0",
            *(f"spes.{key}={value}" for key, value in spes.items()),
        ]
        recipe = shipped("tiny", *changes)
        at = [recipe.step_at(round_) for round_ in range(recipe.num_rounds + 1)]
        due = [merge_due(a, b, interval=interval, merge_steps=stop) for a, b in itertools.pairwise(at)]
        assert merging_rounds(recipe) == sum(due), changes
