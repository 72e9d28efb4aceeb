"""What every section of a recipe is made of: a frozen model, and the types that several sections share."""

import math
import re
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

LOCAL: dict[str, Any] = {"local": True}
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


def json_value(value: Any) -> Any:
    """A value as JSON may have it. Raises ValueError on one that JSON lacks, such as a date.

    Texts like 5e8 become numbers: they are in JSON, which DeepSpeed's own examples use, but not in YAML.
    """
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        value = float(value)
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(inner) for inner in value]
    if not (value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))):
        raise ValueError(f"{value!r}: JSON has no such value")
    return value
