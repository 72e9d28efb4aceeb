"""The upcycle section: how a dense checkpoint becomes a Mixture-of-Experts."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from spes_mega.recipe.model import MoEFamily
from spes_mega.recipe.section import Positive, Section, Share


def _layers_text(value: Any) -> Any:
    """`moe_layers` as YAML may have it (a single number is no text there). Raises ValueError on what it can't mean."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(text, str) and not re.fullmatch(r"all|odd|even|\d+(-\d+)?(,\d+(-\d+)?)*", text):
        raise ValueError(f"{text!r}: expected all, odd, even, or numbers and ranges such as 1-27 or 3,5,7")
    return text


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
