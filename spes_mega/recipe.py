"""The recipe: one YAML file that describes a run.

Every default lives here, once. Commands generate their flags from these sections (`options.py`),
and any field can be set from the command line by `--set section.field=value`, or by an overlay: a file with some keys.
Fields marked *local* may differ from node to node; all others are part of `Recipe.digest()`, on which
hub and nodes must agree.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from spes_mega.agreement import MEANING, meanings
from spes_mega.errors import RecipeError, system_errors
from spes_mega.strict_yaml import MAX_DEPTH, YamlError, parse_yaml
from spes_mega.text_files import read_text
from spes_mega.validation import Key, Source, explain, shortened

LOCAL: dict[str, Any] = {"local": True}
DenseFamily = Literal["qwen3", "qwen2", "llama", "mistral", "olmo2"]
MoEFamily = Literal["qwen3_moe", "mixtral", "qwen2_moe", "olmoe", "flex_olmo"]
MOE_FAMILIES = get_args(MoEFamily)
CodecName = Literal["fp32", "bf16", "int8"]
MIXED_FAMILIES = ("qwen3_moe", "qwen2_moe")
"""MoE families in which single layers may be dense."""
# Far above any model; a damaged config.json must not make names of tensors without end.
MAX_LAYERS = 10_000
MAX_EXPERTS = 100_000
MAX_NODES = 4096
MAX_BYTES = 4 << 20
"""Of a recipe, which is read in some seconds then."""
Positive = Annotated[int, Field(gt=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Deadline = Annotated[float, Field(gt=0, le=30 * 86_400)]


class Section(BaseModel):
    """A frozen part of the recipe; unknown keys are errors, and so are numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _within_64_bits(self) -> Self:
        for name, value in self:
            if isinstance(value, int) and value.bit_length() > 63:
                raise ValueError(f"{name} is a number of more than 63 bits")
        return self


def _json(value: Any) -> Any:
    """A value as JSON may have it. Raises ValueError on one that JSON lacks, such as a date.

    Texts like 5e8 become numbers: they are in JSON, which DeepSpeed's own examples use, but not in YAML.
    """
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        value = float(value)
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json(inner) for inner in value]
    if not (value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))):
        raise ValueError(f"{value!r}: JSON has no such value")
    return value


class ModelSection(Section):
    """Shape of a decoder-only language model, dense or Mixture-of-Experts."""

    family: DenseFamily | MoEFamily = Field(description="Hugging Face model_type that the checkpoint has at rest")
    num_layers: int = Field(gt=0, le=MAX_LAYERS)
    hidden_size: Positive
    num_heads: Positive
    num_kv_heads: Positive
    head_dim: Positive = Field(description="its own number: need not be hidden_size / num_heads")
    ffn_hidden_size: Positive | None = Field(default=None, description="width of a dense FFN")
    num_experts: int = Field(default=0, ge=0, le=MAX_EXPERTS, description="experts a layer; 0: a dense model")
    top_k: int = Field(default=0, ge=0, description="experts a token is sent to")
    expert_hidden_size: Positive | None = Field(default=None, description="FFN width of one expert")
    shared_expert_hidden_size: Positive | None = Field(
        default=None, description="FFN width of the expert that sees every token (qwen2_moe)"
    )
    norm_topk_prob: bool = Field(default=True, description="renormalize the top-k router weights to sum to 1")
    dense_layers: tuple[int, ...] = Field(default=(), description="layers of an MoE model that stay dense")
    vocab_size: Positive
    max_seq_len: Positive = Field(default=4096, description="positions the model is declared for")
    rope_theta: float = Field(default=10_000.0, gt=0)
    rope_scaling: Annotated[dict[str, Any] | None, BeforeValidator(_json)] = Field(
        default=None, description="a RoPE variant, as config.json has it"
    )
    sliding_window: Positive | None = Field(
        default=None, description="positions that a query sees, its own among them (mistral, mixtral); default: all"
    )
    norm_eps: float = Field(default=1e-6, gt=0)
    tie_embeddings: bool = False
    init: Literal["scaled", "truncated"] = Field(
        default="scaled",
        description="how fresh matrices are drawn. scaled: N(0, init_std), those that project into the residual stream "
        "with init_std / sqrt(2 * num_layers); truncated: all of them N(0, init_std) cut at 3 standard deviations, as "
        "the paper's models",
    )
    init_std: float = Field(default=0.02, ge=0, description="std of freshly drawn matrices")
    frozen_dtype: Literal["bf16", "fp32", "train"] = Field(
        default="bf16",
        json_schema_extra=LOCAL,
        description="of the weights of experts that a node does not train, which it holds once; train: train.dtype",
    )
    implementation: Literal["auto", "transformer_engine", "local"] = Field(
        default="auto",
        json_schema_extra=LOCAL,
        description="modules that the model is built of; auto: Transformer Engine's where they are installed and CUDA "
        "is there, else local ones",
    )

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - len(set(self.dense_layers)) if self.is_moe else 0

    def is_moe_layer(self, layer: int) -> bool:
        return self.is_moe and layer not in self.dense_layers

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.is_moe != (self.family in MOE_FAMILIES):
            raise ValueError(f"family {self.family} does not go with num_experts {self.num_experts}")
        if self.is_moe:
            self._check_experts()
        elif self.ffn_hidden_size is None or self.top_k or self.dense_layers:
            raise ValueError(
                "a dense model (num_experts 0) needs ffn_hidden_size, and has neither top_k nor dense_layers"
            )
        if (self.shared_expert_hidden_size is not None) != (self.family == "qwen2_moe"):
            raise ValueError("shared_expert_hidden_size: family qwen2_moe needs it, and no other has it")
        if self.sliding_window is not None and self.family not in ("mistral", "mixtral"):
            raise ValueError(f"sliding_window: family {self.family} has none (mistral and mixtral have)")
        if self.family == "olmoe" and self.num_heads * self.head_dim != self.hidden_size:
            raise ValueError(f"family olmoe needs num_heads * head_dim to be hidden_size {self.hidden_size}")
        return self

    def _check_experts(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k {self.top_k} must be between 1 and num_experts {self.num_experts}")
        if self.expert_hidden_size is None:
            raise ValueError(f"an MoE model (num_experts {self.num_experts}) needs expert_hidden_size")
        if self.dense_layers and self.ffn_hidden_size is None:
            raise ValueError("dense_layers need ffn_hidden_size")
        if any(not 0 <= layer < self.num_layers for layer in self.dense_layers):
            raise ValueError(
                f"dense_layers {self.dense_layers} must lie in 0..{self.num_layers - 1} (num_layers {self.num_layers})"
            )
        if self.dense_layers and self.family not in MIXED_FAMILIES:
            raise ValueError(f"dense_layers: family {self.family} has experts in every layer")
        if self.family == "mixtral" and not self.norm_topk_prob:
            raise ValueError("family mixtral always renormalizes (norm_topk_prob: true)")


class CodecPair(Section):
    """In what precision one direction's weights travel; a single word stands for both kinds."""

    shared: CodecName = Field(default="fp32", description="fp32: the values; bf16, int8: changes, rounding carried on")
    experts: CodecName = Field(default="fp32", description="int8 has one scale a row")

    @model_validator(mode="before")
    @classmethod
    def _both(cls, value: Any) -> Any:
        return {"shared": value, "experts": value} if isinstance(value, str) else value

    @property
    def lossless(self) -> bool:
        return self.shared == self.experts == "fp32"


class WireSection(Section):
    """In what precision weights travel, up from and down to the nodes; a single word stands for all four."""

    up: CodecPair = CodecPair()
    down: CodecPair = CodecPair()

    @model_validator(mode="before")
    @classmethod
    def _all(cls, value: Any) -> Any:
        return {"up": value, "down": value} if isinstance(value, str) else value

    @property
    def lossless(self) -> bool:
        return self.up.lossless and self.down.lossless


class OuterOptimizer(Section):
    """What the hub does with the mean change of the nodes."""

    optimizer: Literal["sgd", "nesterov"] = Field(default="sgd", description="sgd with lr 1 is plain averaging")
    lr: float = Field(default=1.0, gt=0, description="DiLoCo: nesterov with lr 0.7")
    momentum: Beta = Field(default=0.0, description="of nesterov; DiLoCo: 0.9")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.optimizer == "sgd" and self.momentum:
            raise ValueError(f"momentum {self.momentum:g} needs optimizer: nesterov (sgd has none)")
        if self.optimizer == "nesterov" and not self.momentum:
            raise ValueError("optimizer nesterov needs a momentum over 0 (DiLoCo: 0.9)")
        return self

    @property
    def averages(self) -> bool:
        """The mean is taken as it is: what a node alone trains stays as it trained it."""
        return self.optimizer == "sgd" and self.lr == 1


class OuterSection(Section):
    """The outer optimizer, of the shared weights and of the experts."""

    shared: OuterOptimizer = OuterOptimizer()
    experts: OuterOptimizer = OuterOptimizer()


class SpesSection(Section):
    """The outer loop: who owns which experts, how often nodes synchronize, expert merging, deadlines."""

    num_nodes: int = Field(default=1, gt=0, le=MAX_NODES)
    sync_every: Positive = Field(default=100, description="local steps between two synchronizations (H)")
    ownership: Literal["equal", "all"] | tuple[tuple[int, ...], ...] = Field(
        default="equal",
        description="equal: contiguous shares; all: everyone owns every expert (DiLoCo); or one list a node (an expert "
        "in several lists is averaged over its owners)",
    )
    capacity: tuple[Positive, ...] | None = Field(
        default=None,
        description="one number a node, as in [2, 1, 1]: shares of experts are in this proportion; default: all equal",
    )
    adopt_after: Positive | None = Field(
        default=None,
        json_schema_extra=LOCAL,
        description="rounds that a node is missed before others train its experts, until it is back; default: never",
    )
    wire: WireSection = WireSection()
    outer: OuterSection = OuterSection()
    weight_by_tokens: bool = Field(
        default=False, description="weigh each node's part of a mean by the tokens that it trained on"
    )
    overlap: bool = Field(
        default=False,
        description="nodes train on while their weights travel; what others trained comes one round later",
    )
    merge_interval: Positive = Field(
        default=500,
        description="steps between two expert merges. Where sync_every does not divide it, the first synchronization "
        "after each multiple merges; the reference code then merges only at steps that are multiples of both",
    )
    merge_steps: int = Field(default=0, ge=0, description="merging stops at this step; 0: no merging")
    merge_alpha: Share = Field(default=0.01, description="weight of the donors at step 0, falling linearly to 0")
    merge_donors: Positive = Field(default=4, description="most similar experts that an expert takes from")
    min_nodes: Positive | None = Field(
        default=None, json_schema_extra=LOCAL, description="pushes that suffice at the deadline; default: all"
    )
    join_deadline_s: Deadline = Field(
        default=1800, json_schema_extra=LOCAL, description="seconds for all nodes to join"
    )
    round_deadline_s: Deadline = Field(
        default=7200, json_schema_extra=LOCAL, description="seconds for a round's pushes; no deadline is over 30 days"
    )
    rpc_deadline_s: Deadline = Field(default=600, json_schema_extra=LOCAL, description="seconds for one transfer")
    max_update_norm: float | None = Field(
        default=None,
        gt=0,
        json_schema_extra=LOCAL,
        description="largest L2 norm of what a node's push changes, over all its tensors; the hub refuses a push above "
        "it; default: any finite one",
    )
    on_full_disk: Literal["wait", "stop"] = Field(
        default="wait",
        json_schema_extra=LOCAL,
        description="what the hub does when its disk is full: wait until there is room, or stop the run",
    )
    snapshot_every: Positive = Field(
        default=10, json_schema_extra=LOCAL, description="rounds between two snapshot directories"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min_nodes is not None and self.min_nodes > self.num_nodes:
            raise ValueError(f"min_nodes {self.min_nodes} is more than num_nodes {self.num_nodes}")
        if isinstance(self.ownership, tuple) and len(self.ownership) != self.num_nodes:
            raise ValueError(f"ownership lists {len(self.ownership)} nodes, num_nodes is {self.num_nodes}")
        if self.capacity is not None and len(self.capacity) != self.num_nodes:
            raise ValueError(f"capacity lists {len(self.capacity)} nodes, num_nodes is {self.num_nodes}")
        if self.capacity is not None and self.ownership == "all":
            raise ValueError("capacity has no effect with ownership: all, where every node owns every expert")
        if self.rpc_deadline_s > self.round_deadline_s:
            raise ValueError(
                f"deadlines must nest: rpc_deadline_s {self.rpc_deadline_s:g} is longer than "
                f"round_deadline_s {self.round_deadline_s:g}"
            )
        return self


class TrainSection(Section):
    """What every node does between two synchronizations."""

    steps: Positive = Field(default=1000, description="optimizer steps in all")
    seq_len: Positive = Field(default=2048, description="tokens of one sample")
    batch_size: Positive | None = Field(
        default=None,
        json_schema_extra=LOCAL,
        description="samples of one optimizer step of a node, over all its ranks; default: ranks x micro_batch_size x "
        "grad_accumulation",
    )
    micro_batch_size: Positive = Field(default=1, json_schema_extra=LOCAL, description="samples a rank a forward pass")
    grad_accumulation: Positive | None = Field(
        default=None,
        json_schema_extra=LOCAL,
        description="forward passes a step; default: what batch_size needs, else 1",
    )
    lr: float = Field(default=5e-4, ge=0, description="peak learning rate")
    min_lr_ratio: Share = Field(default=0.1, description="final learning rate as a fraction of lr")
    warmup_steps: int = Field(default=0, ge=0)
    warmup_from: Share = Field(
        default=0.0, description="learning rate at step 0 as a fraction of lr, from which it rises linearly to lr"
    )
    adam_beta1: Beta = 0.9
    adam_beta2: Beta = 0.95
    adam_eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0, description="on matrices, embeddings among them")
    decay_norms: bool = Field(default=False, description="weight decay on norms and biases, too")
    clip_grad: float = Field(default=1.0, ge=0, description="largest norm of the gradient; 0: no clipping")
    aux_loss_coeff: float = Field(
        default=0.01,
        ge=0,
        description="weight of the load-balancing loss, which is the mean over MoE layers. It is computed for each "
        "micro-batch and rank, and is not linear in the batch: 2 ranks differ from 1 of twice the micro-batch, by 2e-4 "
        "where that was compared",
    )
    aux_loss_warmup: Share = Field(
        default=0.0,
        description="fraction of the steps over which the load-balancing loss's weight on the experts that a node owns "
        "rises linearly from 0.7 to 1, so that its router leans towards them early on (aux_loss in the metrics is what "
        "is weighed so); the reference's using_decayed_aux_loss is 0.2, and off in its published configs; 0: off",
    )
    router_z_loss_coeff: float = Field(
        default=1e-3, ge=0, description="weight of the router's z-loss, which is the sum over MoE layers"
    )
    logit_z_loss_coeff: float = Field(default=1e-5, ge=0, description="weight of the z-loss on the output logits")
    dtype: Literal["fp32", "bf16"] = Field(default="bf16", json_schema_extra=LOCAL)
    zero_stage: Literal[1, 2, 3] = Field(default=1, json_schema_extra=LOCAL, description="DeepSpeed ZeRO stage")
    recompute: Literal["none", "selective", "full"] = Field(
        default="none",
        json_schema_extra=LOCAL,
        description="activations computed again in the backward pass instead of being kept; selective: those inside "
        "feed-forward networks and experts; full: all but the inputs of layers",
    )
    seed: int = Field(default=1234, ge=0, description="of weights drawn at the start and of the order of the data")
    log_every: Positive = Field(default=10, json_schema_extra=LOCAL, description="steps between two console lines")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} is more than steps {self.steps}")
        return self

    def accumulation(self, ranks: int) -> int:
        """Forward passes that each of a node's `ranks` makes in one optimizer step.

        Raises RecipeError: batch_size cannot be made of such passes, or is not what grad_accumulation makes.
        """
        if self.batch_size is None:
            return self.grad_accumulation or 1
        at_once = ranks * self.micro_batch_size
        passes, rest = divmod(self.batch_size, at_once)
        made_of = f"{ranks} rank{'s' * (ranks > 1)} x train.micro_batch_size {self.micro_batch_size}"
        if rest or not passes:
            nearest = " or ".join(str(size * at_once) for size in (passes, passes + 1) if size)
            raise RecipeError(
                f"train.batch_size {self.batch_size} is not a multiple of {made_of} = {at_once}: the nearest that "
                f"are: {nearest}; or change train.micro_batch_size"
            )
        if self.grad_accumulation not in (None, passes):
            raise RecipeError(
                f"train.batch_size {self.batch_size} is not {made_of} x train.grad_accumulation "
                f"{self.grad_accumulation} = {at_once * self.grad_accumulation}: remove grad_accumulation, which then "
                f"becomes {passes}, or change train.batch_size"
            )
        return passes


def _possible(path: Path) -> Path:
    if "\0" in str(path):
        raise ValueError("no path has a NUL character")
    return path


class DataSection(Section):
    """Indexed datasets (`PREFIX.bin`, `PREFIX.idx`); relative paths start at the recipe's own folder."""

    train: Annotated[Path, AfterValidator(_possible)] | None = Field(
        default=None, json_schema_extra=LOCAL, description="prefix of the training data"
    )
    sharding: Literal["shared", "own"] = Field(
        default="shared",
        json_schema_extra=LOCAL,
        description="shared: all nodes have this file and each reads its own part; own: it is this node's alone",
    )


def _layers_text(value: Any) -> Any:
    """`moe_layers` as YAML may have it (a single number is no text there). Raises ValueError on what it can't mean."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(text, str) and not re.fullmatch(r"all|odd|even|\d+(-\d+)?(,\d+(-\d+)?)*", text):
        raise ValueError(f"{text!r}: expected all, odd, even, or numbers and ranges such as 1-27 or 3,5,7")
    return text


class CheckpointSection(Section):
    """How a node saves its state, to go on when it is started again; the model itself is also with the hub."""

    every: int = Field(
        default=100,
        ge=0,
        json_schema_extra=LOCAL,
        description="steps between two checkpoints; one more is written when the node is asked to stop; 0: none at all",
    )
    keep_last: Positive = Field(default=2, json_schema_extra=LOCAL, description="checkpoints that are kept")


class UpcycleSection(Section):
    """How a dense checkpoint becomes a Mixture-of-Experts. The defaults are the 9B setup of SPES."""

    method: Literal["copy", "noise", "drop", "split", "partition", "mix"] = Field(
        default="noise",
        description="how experts are made from a dense layer's feed-forward network (FFN). copy: each expert is the "
        "FFN; noise: copies plus random noise; drop: copies, each with a part of its units drawn anew; split: copies, "
        "each cut into several smaller experts; partition: the FFN's units are divided among the experts, so the model "
        "does not grow; mix: each expert is the FFN of one of several checkpoints",
    )
    num_experts: Positive = Field(
        default=8, description="experts a layer; with split: copies of the FFN, of `granularity` experts each"
    )
    top_k: Positive = Field(
        default=2, description="experts that a token is sent to; with split: copies, all experts of which it is sent to"
    )
    moe_layers: Annotated[str, BeforeValidator(_layers_text)] = Field(
        default="all",
        description="layers that get experts, counted from 0: all, odd, even, or numbers and ranges such as 1-27 or "
        "3,5,7; the others stay as they are",
    )
    noise_std: float = Field(default=0.02, ge=0, description="noise: its standard deviation")
    noise_fraction: Share = Field(default=0.5, description="noise: fraction of each expert's entries that get it")
    drop_ratio: Share = Field(default=0.5, description="drop: fraction of each expert's units that are drawn anew")
    granularity: Positive = Field(default=4, description="split: experts that one copy of the FFN is cut into")
    partition_by: Literal["random", "kmeans"] = Field(
        default="random",
        description="partition: units are dealt at random, or units that react to similar inputs lie together",
    )
    router_init: Literal["zeros", "normal", "mlp_std", "kmeans"] = Field(
        default="zeros",
        description="the router's first weights. zeros: all experts tie, and all tokens go to the same ones until "
        "training moves the router; normal: N(0, 0.02); mlp_std: normal with the std of the layer's down projection; "
        "kmeans: centers of what the layer's FFN receives on a text (needs --calibration)",
    )
    calibration_tokens: Positive = Field(default=4096, description="kmeans router: tokens read from the text")
    to: MoEFamily | None = Field(default=None, description="family of the result; default: the source's own")
    seed: int = Field(default=1234, ge=0, description="of all that is random")
    dtype: Literal["source", "fp32", "bf16", "fp16"] = Field(
        default="source", description="of the result; source: unchanged"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        split = self.method == "split"
        if split and self.granularity < 2:
            raise ValueError("granularity must be at least 2 with method split: with 1, split is copy")
        if self.num_experts < 2 and not split:
            raise ValueError(f"num_experts must be at least 2 with method {self.method}")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} is more than num_experts {self.num_experts}")
        if self.top_k == 1 and not split:
            raise ValueError(
                f"top_k 1 renormalized is always 1, so the router would get no gradient (method {self.method}): use at "
                "least 2"
            )
        if split and self.router_init == "zeros" and self.top_k < self.num_experts:
            raise ValueError(
                "router_init zeros does not go with method split and a top_k below num_experts: all experts would tie, "
                "and a token would get parts of different copies instead of whole ones; use router_init normal, "
                "mlp_std or kmeans"
            )
        return self


class Recipe(Section):
    """A run: the model, the outer loop, local training, data, and how the model was upcycled."""

    name: str = "run"
    model: ModelSection
    spes: SpesSection = SpesSection()
    train: TrainSection = TrainSection()
    data: DataSection = DataSection()
    checkpoint: CheckpointSection = Field(default=CheckpointSection(), json_schema_extra=LOCAL)
    upcycle: UpcycleSection = UpcycleSection()
    deepspeed: Annotated[dict[str, Any], BeforeValidator(_json)] = Field(
        default={}, json_schema_extra=LOCAL, description="more keys for DeepSpeed's own config"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.train.seq_len > self.model.max_seq_len:
            raise ValueError(f"train.seq_len {self.train.seq_len} is over model.max_seq_len {self.model.max_seq_len}")
        if self.model.head_dim % 2:
            raise ValueError(f"model.head_dim {self.model.head_dim} is odd: RoPE rotates numbers in pairs")
        if self.model.is_moe and self.model.top_k == 1 and self.model.norm_topk_prob:
            raise ValueError(
                "model.top_k 1 with model.norm_topk_prob: true makes every router weight 1, so the router gets no "
                "gradient: set model.norm_topk_prob: false, or top_k to at least 2"
            )
        if self.model.frozen_dtype == "fp32" and self.train.dtype == "bf16":
            raise ValueError("model.frozen_dtype fp32 is wider than train.dtype bf16: use bf16 or train")
        if isinstance(self.spes.ownership, tuple):
            self._check_ownership(self.spes.ownership)
        return self

    @property
    def frozen_dtype(self) -> Literal["fp32", "bf16"]:
        """Of the weights of frozen experts."""
        return self.train.dtype if self.model.frozen_dtype == "train" else self.model.frozen_dtype

    def _check_ownership(self, lists: tuple[tuple[int, ...], ...]) -> None:
        owned = {expert for experts in lists for expert in experts}
        experts = set(range(self.model.num_experts))
        if missing := sorted(experts - owned):
            raise ValueError(f"spes.ownership: nobody owns expert {missing[0]} (model.num_experts {len(experts)})")
        if unknown := sorted(owned - experts):
            raise ValueError(f"spes.ownership: there is no expert {unknown[0]} (model.num_experts {len(experts)})")

    @property
    def num_rounds(self) -> int:
        """Rounds in the whole run; the last may be shorter than `sync_every` steps."""
        return -(-self.train.steps // self.spes.sync_every)

    def step_at(self, round_: int) -> int:
        """Optimizer steps done when `round_` rounds are closed."""
        return min(round_ * self.spes.sync_every, self.train.steps)

    def agreed(self) -> dict[str, Any]:
        """Everything that hub and nodes must agree on (all fields but the local ones), as JSON has it."""
        agreed = _agreed(self)
        agreed.pop("name")
        agreed.pop("upcycle")
        as_json: dict[str, Any] = json.loads(json.dumps(agreed))
        return as_json | {MEANING: meanings(as_json)}

    def digest(self) -> str:
        """Hex SHA-256 of what is agreed."""
        return hashlib.sha256(json.dumps(self.agreed(), sort_keys=True).encode()).hexdigest()


def _agreed(section: BaseModel) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        if is_local(field):
            continue
        value = getattr(section, name)
        out[name] = _agreed(value) if isinstance(value, BaseModel) else value
    return out


def is_local(field: FieldInfo) -> bool:
    """Whether a field may differ from node to node."""
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("local"))


@system_errors(RecipeError)
def load_recipe(path: Path | str, overrides: Iterable[str | Path] = ()) -> Recipe:
    """Read a recipe file and lay `overrides` over it, in this order.

    A `Path` is an overlay, a YAML file with some of a recipe's keys; a text is `section.field=value` (a YAML value).
    Relative paths to data start at the folder of the file that has them.

    Raises:
        RecipeError: a file cannot be read, or a key or value is wrong; the message names file (or override) and key.
    """
    raw = _read(Path(path), "recipe")
    layers = [(str(path), raw)]
    for override in overrides:
        if isinstance(override, Path):
            layers.append((str(override), _read(override, "overlay")))
            raw = _overlaid(raw, layers[-1][1])
        else:
            layers.append((f"--set {override}", _parse_override(override)))
            raw = _set(raw, layers[-1][1])
    return parse_recipe(raw, source=lambda key: _origin(layers, key), base=Path(path).resolve().parent)


def override_recipe(recipe: Recipe, overrides: Iterable[str]) -> Recipe:
    """`recipe` with `section.field=value` laid over it. Raises RecipeError: a key or value is wrong."""
    raw = recipe.model_dump(mode="json")
    for override in overrides:
        raw = _set(raw, _parse_override(override))
    return parse_recipe(raw, source=recipe.name, base=Path())


def parse_recipe(raw: dict[str, Any], *, source: Source, base: Path) -> Recipe:
    """Check a raw mapping; relative data paths are taken from `base`. Raises RecipeError naming `source`."""
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as e:
        raise RecipeError("\n".join(explain(source, e, Recipe))) from e
    if recipe.data.train is not None:
        train = _without_tilde(recipe.data.train, source if isinstance(source, str) else source(("data", "train")))
        data = recipe.data.model_copy(update={"train": base / train})
        recipe = recipe.model_copy(update={"data": data})
    return recipe


def _without_tilde(train: Path, source: str) -> Path:
    try:
        return train.expanduser()
    except RuntimeError as e:
        raise RecipeError(f"{source}: data.train: {train}: no such user, or one without a home directory") from e


def _read(path: Path, what: str) -> dict[str, Any]:
    """The mapping in a YAML file, with its path to data made absolute if it is an overlay's."""
    text = read_text(path, RecipeError, what, MAX_BYTES)
    try:
        raw = parse_yaml(text)
    except YamlError as e:
        raise RecipeError(e.located(str(path))) from e
    if not isinstance(raw, dict):
        raise RecipeError(f"{path}: a recipe is a mapping with sections such as model, spes, train")
    data = raw.get("data")
    if what == "overlay" and isinstance(data, dict) and isinstance(data.get("train"), str):
        data["train"] = str(path.resolve().parent / _without_tilde(Path(data["train"]), str(path)))
    return raw


def _parse_override(override: str) -> dict[str, Any]:
    """`section.field=value` as the mapping that it stands for."""
    key, sep, text = override.partition("=")
    if not sep or not key:
        raise RecipeError(f"--set {shortened(override)}: expected section.field=value")
    if key.count(".") >= MAX_DEPTH:
        raise RecipeError(f"--set {shortened(override)}: nested over {MAX_DEPTH} deep")
    try:
        value = parse_yaml(text)
    except YamlError as e:
        raise RecipeError(e.located(f"--set {shortened(override)}", single="\n" not in text)) from e
    path = _Inner()
    *sections, field = key.split(".")
    path[field] = value
    for section in reversed(sections):
        path = _Inner({section: path})
    return path


def _overlaid(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Mappings are merged at every depth; everything else is replaced."""
    merged = dict(below)
    for key, value in above.items():
        inner = merged.get(key)
        if isinstance(value, dict):
            merged[key] = _overlaid(inner if isinstance(inner, dict) else {}, value)
        else:
            merged[key] = value
    return merged


def _set(below: dict[str, Any], path: dict[str, Any]) -> dict[str, Any]:
    """`below` with the value at the end of `path`, nested mappings of one key each; the value takes the place whole."""
    ((key, value),) = path.items()
    inner = below.get(key)
    if isinstance(value, _Inner):
        value = _set(inner if isinstance(inner, dict) else {}, value)
    return below | {key: value}


class _Inner(dict[str, Any]):
    """A mapping on the way to a value that is set, as opposed to a mapping that is the value."""


def _origin(layers: list[tuple[str, dict[str, Any]]], key: Key) -> str:
    """The last layer that says what `key` is; the recipe for what nobody says."""
    return next((source for source, layer in reversed(layers) if _says(layer, key)), layers[0][0])


def _says(layer: Any, key: Key) -> bool:
    """Whether `key` or what it is in has its value from this layer, as opposed to some of its neighbours."""
    whole = False
    for part in key:
        if not isinstance(layer, dict):
            return True
        if part not in layer:
            return whole
        inner = layer[part]
        whole = whole or (isinstance(layer, _Inner) and not isinstance(inner, _Inner))
        layer = inner
    return True
