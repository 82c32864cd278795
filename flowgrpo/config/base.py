"""Base class of all configuration sections, and what a key says of itself: who reads it, and when."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

Share = Annotated[float, Field(ge=0, le=1)]
# Kinds of models (`policies.build`) that read a key.
DENOISERS = ("pipeline",)
LEFT_TO_RIGHT = ("causal_lm", "vision_lm")
LANGUAGE = (*LEFT_TO_RIGHT, "masked_lm")
IMAGE_TOKENS = ("image_tokens",)


class Section(BaseModel):
    """Section of a recipe: frozen, unknown keys are errors, numbers are finite and no truth values.

    kinds: of models that read its keys, unless a key says others; empty: all.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)
    kinds: ClassVar[tuple[str, ...]] = ()

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `true`, which would count as 1, where a number is expected or numbers are listed."""
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        if any(isinstance(each, bool) for each in inner):
            kinds = set(types(cls.model_fields[str(info.field_name)].annotation))
            if kinds & {int, float} and not kinds & {bool, Any}:
                raise ValueError("a number")
        return value


class FeatureKeys(Section):
    """Keys that a feature adds to a section of the configuration, each `Keys.read(config).name`.

    section: its name, "" for the top of the configuration. A section that there is not is this class itself.
    """

    section: ClassVar[str] = ""

    @classmethod
    def read(cls, config: Section) -> Self:
        """The feature's values in a configuration, which was validated as a whole."""
        values = getattr(config, cls.section) if cls.section else config
        return cls.model_construct(**{name: getattr(values, name) for name in cls.model_fields})  # type: ignore[return-value]


@dataclass(frozen=True)
class When:
    """Condition on which a run reads a key.

    reads: True for a configuration and its method that read it.
    why: what the run has instead; {0} stands for the configuration, {1} for the method. cure: what has the key read.
    """

    reads: Callable[[Any, Any], bool]
    why: str
    cure: str


@dataclass(frozen=True)
class Key:
    """Facts of a key beside its type and range.

    kinds: of models that read it; empty: those of its section. when: all of these hold where a run reads it.
    after: of a feature's key, the one that it follows in its section, "" for none; None: the feature's own before it.
    writes: its value is a folder into which a run writes.
    """

    kinds: tuple[str, ...] = ()
    when: tuple[When, ...] = ()
    after: str | None = None
    writes: bool = False


def key(default: Any, *when: When, of: tuple[str, ...] = (), after: str | None = None, writes: bool = False,
        **field: Any) -> Any:
    """Field of a key, as `pydantic.Field`, with its facts (`Key`)."""
    made = Field(default, **field)
    made.metadata.append(Key(of, when, after, writes))
    return made


def facts(field: FieldInfo) -> Key:
    return next((each for each in field.metadata if isinstance(each, Key)), Key())


def types(annotation: Any) -> Iterator[Any]:
    if not (inner := get_args(annotation)):
        yield annotation
    for each in inner:
        yield from types(each)
