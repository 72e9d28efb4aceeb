"""The spes section: who owns which experts, how often nodes synchronize, merging, and deadlines."""

from typing import Literal, Self

from pydantic import Field, model_validator

from spes_mega.recipe.outer import OuterSection, WireSection
from spes_mega.recipe.section import LOCAL, Deadline, Positive, Section, Share

MAX_NODES = 4096


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
