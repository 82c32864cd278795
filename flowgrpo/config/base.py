"""Base class of all configuration sections: frozen, unknown keys are errors, numbers are finite and no truth values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `true` where a number is expected, which would count as 1; also one level below, in lists and
        dictionaries."""
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        if any(isinstance(each, bool) for each in inner):
            kinds = set(_kinds(cls.model_fields[str(info.field_name)].annotation))
            if kinds & {int, float} and not kinds & {bool, Any}:
                raise ValueError("a number")
        return value


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield the types that an annotation is made of."""
    if not (inner := get_args(annotation)):
        yield annotation
    for each in inner:
        yield from _kinds(each)
