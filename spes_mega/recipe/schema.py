"""The whole recipe: its sections, what must hold between them, and what hub and nodes agree on."""

import hashlib
import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator
from pydantic.fields import FieldInfo

from spes_mega.outer.ownership import Ownership, ownership_of
from spes_mega.recipe.agreement import MEANING, meanings
from spes_mega.recipe.data import CheckpointSection, DataSection
from spes_mega.recipe.model import ModelSection
from spes_mega.recipe.section import LOCAL, Section, json_value
from spes_mega.recipe.spes import SpesSection
from spes_mega.recipe.train import TrainSection
from spes_mega.recipe.upcycle import UpcycleSection


class Recipe(Section):
    """A run: the model, the outer loop, local training, data, and how the model was upcycled."""

    name: str = "run"
    model: ModelSection
    spes: SpesSection = SpesSection()
    train: TrainSection = TrainSection()
    data: DataSection = DataSection()
    checkpoint: CheckpointSection = Field(default=CheckpointSection(), json_schema_extra=LOCAL)
    upcycle: UpcycleSection = UpcycleSection()
    deepspeed: Annotated[dict[str, Any], BeforeValidator(json_value)] = Field(
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

    def ownership(self) -> Ownership:
        """Return who trains which experts while all nodes are there."""
        spes = self.spes
        return ownership_of(self.model.num_experts, spes.num_nodes, spes.ownership, spes.capacity)

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
