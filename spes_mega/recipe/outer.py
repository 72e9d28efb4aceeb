"""The wire and the outer optimizer, which are parts of the spes section."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from spes_mega.recipe.section import Beta, Section

CodecName = Literal["fp32", "bf16", "int8"]


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
