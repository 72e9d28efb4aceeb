"""Bytes that one rank of a node needs, by purpose and by phase of a step, in DeepSpeed's ZeRO stages 1-3.

T parameters are trained, F are frozen, R ranks share them; w is the bytes of train.dtype, f those of frozen weights.

    weights      stage 1, 2: w T + f F        stage 3: (w T + f F) / R, and w for each parameter gathered at a time
    optimizer    fp32 masters and two moments of Adam: 12 T / R (in stage 1, 2 fp32 weights are their own masters: 8)
    gradients    stage 1: w T                 stage 2, 3: w T / R
                 and where sums over micro-batches are in fp32: 4 T (stage 1, on every rank), 4 T / R (2, 3)
    update       a flat copy of a piece of the rank's gradients, in fp32 beside one in w where that is bf16
    buckets      reduce_bucket_size elements of w, in which gradients wait for each other; stage 3 keeps them always,
                 and copies them to reduce them; stages 1 and 2 have none where R is 1

    exchange     when weights or moments are gathered, one parameter after the other: two fp32 copies of it
    start        stage 3: all weights, which every rank makes before they are divided

Frozen experts have weights and nothing else. What is needed is the most of five phases: the start, the beginning of
the backward pass (activations and the loss), its end (gradients), the update, and the exchange (or a checkpoint). Each
of these terms was seen in DeepSpeed 0.19.8.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from spes_mega.layout.counts import count_parameters
from spes_mega.recipe import Recipe
from spes_mega.recipe.deepspeed_config import PIECE_ELEMENTS, PIECE_ELEMENTS_CPU
from spes_mega.tools.plan.activations import BYTES, Activations, activation_bytes, largest_tensor

Device = Literal["cuda", "cpu"]
Build = Literal["cuda", "cpu"]
"""Builds of torch. PyPI has the one with CUDA for Linux, which also machines without a GPU get by default."""
FP32_BUCKET = 500_000_000
"""Elements that DeepSpeed's optimizer for bf16 weights with fp32 sums reduces at once (not configurable)."""
PREFETCH_BUCKET = 50_000_000
MAX_LIVE = 1_000_000_000
GPU_RUNTIME = 1 << 30
"""What a process holds on a GPU before there is a model: the CUDA context, the libraries' workspaces, NCCL."""
TORCH: dict[Build, int] = {"cuda": 525_000_000, "cpu": 230_000_000}
"""What it holds in RAM once torch is imported (VmHWM of Python with nothing else), on a machine without a GPU."""
BESIDE_TORCH: dict[Build, int] = {"cuda": 305_000_000, "cpu": 155_000_000}
"""What it holds besides: Megatron-Core, DeepSpeed, and what these use of torch (measured: VmHWM of a node with a model
of next to no parameters)."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. `held` gradients live through the forward pass; `update` and `fresh` ones do not."""

    weights: int
    optimizer: int
    gradients_held: int
    gradients_fresh: int
    update: int
    buckets: int
    reducing: int
    activations: int
    loss: int
    layer: int
    undivided: int
    gathered: int
    runtime: int
    host: int
    device: Device

    @property
    def constant(self) -> int:
        """There all the time."""
        return self.weights + self.optimizer + self.gradients_held + self.runtime

    @property
    def phases(self) -> dict[str, int]:
        """The most that is in use at the points where it may be most."""
        begin = self.constant + self.activations + max(self.loss, self.layer)
        end = self.constant + self.buckets + self.reducing
        if self.device == "cpu":  # memory counts when it is touched, and gradients come as activations go
            end += max(self.activations, self.gradients_fresh)
        else:
            begin += self.buckets
            end += self.activations + self.gradients_fresh
        update = self.constant + self.gradients_fresh + self.update
        return {
            "start": self.undivided + self.runtime,
            "start of backward": begin,
            "end of backward": end,
            "update": update,
            "exchange": self.constant + self.gathered,
        }

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "phases": self.phases, "peak": self.peak}


def installed_build() -> Build:
    """Return the build of the torch that is installed here."""
    import torch

    return "cpu" if torch.version.cuda is None else "cuda"


def runtime_bytes(device: Device, build: Build) -> int:
    """Return what a process holds of the memory of its device before there is a model."""
    return GPU_RUNTIME if device == "cuda" else TORCH[build] + BESIDE_TORCH[build]


def rank_memory(recipe: Recipe, owned: int, ranks: int, device: Device, build: Build = "cpu") -> Memory:
    """What each of `ranks` ranks needs that share a node on which `owned` experts a layer are trained.

    On the CPU the `build` of torch counts.
    """
    counts = count_parameters(recipe.model)
    trained = counts.trainable(owned)
    states = _States(recipe, trained, counts.total - trained, ranks, device)
    kept = activation_bytes(recipe, owned, fused=device == "cuda")
    return _with_phases(states, kept, device, build)


def _with_phases(states: "_States", kept: Activations, device: Device, build: Build) -> Memory:
    buckets = states.buckets
    if device == "cpu":
        buckets = min(buckets, states.trained * BYTES[states.recipe.train.dtype])
    stage_3 = states.stage == 3
    return Memory(
        weights=states.weights,
        optimizer=0 if states.offloads else states.optimizer,
        gradients_held=states.gradients_held,
        gradients_fresh=states.gradients_fresh,
        update=states.update + (buckets if stage_3 else 0),
        buckets=buckets,
        reducing=buckets + buckets // states.ranks if stage_3 else 0,
        activations=kept.kept,
        loss=kept.loss,
        layer=kept.layer,
        undivided=states.undivided,
        gathered=2 * 4 * largest_tensor(states.recipe.model),
        runtime=runtime_bytes(device, build),
        host=states.host,
        device=device,
    )


class _States:
    """Weights, optimizer and gradients of one rank, in bytes."""

    def __init__(self, recipe: Recipe, trained: int, frozen: int, ranks: int, device: Device) -> None:
        self.recipe, self.trained, self.frozen, self.ranks = recipe, trained, frozen, ranks
        self.piece = PIECE_ELEMENTS_CPU if device == "cpu" and recipe.train.zero_stage < 3 else PIECE_ELEMENTS
        self.stage = recipe.train.zero_stage
        self.accumulation = recipe.train.accumulation(ranks)
        self.size = BYTES[recipe.train.dtype]
        self.zero: dict[str, Any] = recipe.deepspeed.get("zero_optimization", {})
        self.share = -(-trained // ranks)

    @property
    def offloads(self) -> bool:
        offload = self.zero.get("offload_optimizer") or {}
        return isinstance(offload, dict) and offload.get("device", "none") != "none"

    @property
    def sums_in_fp32(self) -> bool:
        """Gradients are summed over micro-batches in fp32 beside bf16 weights, as the engine asks for."""
        asked = self.recipe.deepspeed.get("data_types", {}).get("grad_accum_dtype", "fp32")
        return self.size == 2 and self.accumulation > 1 and asked == "fp32"

    @property
    def bf16_optimizer(self) -> bool:
        """DeepSpeed takes another optimizer for this combination: its fp32 gradients are whole on every rank."""
        return self.stage == 1 and self.sums_in_fp32 and not self.offloads

    @property
    def undivided(self) -> int:
        return self.size * self.trained + BYTES[self.recipe.frozen_dtype] * self.frozen

    @property
    def weights(self) -> int:
        whole = self.undivided
        if self.stage < 3:
            return whole
        count = self.trained + self.frozen
        live = min(count, int(self.zero.get("stage3_max_live_parameters", MAX_LIVE)))
        gathered = min(live, PREFETCH_BUCKET + 2 * largest_tensor(self.recipe.model)) if self.ranks > 1 else 0
        return -(-whole // self.ranks) + self.size * gathered

    @property
    def optimizer(self) -> int:
        return (8 if self.size == 4 and self.stage < 3 else 12) * self.share

    @property
    def gradients_held(self) -> int:
        """Live from one micro-batch to the next."""
        if self.offloads:
            return 0
        if self.bf16_optimizer:
            return 4 * self.trained
        if self.stage < 3 and self.accumulation == 1:
            return 0
        if self.stage == 1:
            return self.size * self.trained
        return (4 if self.sums_in_fp32 else self.size) * self.share

    @property
    def gradients_fresh(self) -> int:
        """Those of one backward pass."""
        if self.offloads or self.stage == 3:
            return self.size * largest_tensor(self.recipe.model)
        return self.size * (self.trained if self.stage == 1 else self.share)

    @property
    def update(self) -> int:
        """In use for the update alone."""
        if self.offloads:
            return 0
        if self.bf16_optimizer:
            return (4 + self.size) * min(self.trained, FP32_BUCKET)
        # one parameter group after the other, cut between parameters
        count = min(self.share, -(-max(self.piece, largest_tensor(self.recipe.model)) // self.ranks))
        return count * (4 if self.size == 4 else 4 + self.size)

    @property
    def buckets(self) -> int:
        if self.bf16_optimizer or (self.ranks == 1 and self.stage < 3 and not self.offloads):
            return 0
        asked = self.zero.get("reduce_bucket_size", PIECE_ELEMENTS)
        return self.size * int(asked if isinstance(asked, int | float) else PIECE_ELEMENTS)

    @property
    def host(self) -> int:
        """RAM (or NVMe) of the node that offloading takes, a rank: masters, moments and fp32 gradients."""
        return 16 * self.share if self.offloads else 0
