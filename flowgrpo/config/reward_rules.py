"""Long form of a reward in a recipe: its weight and further keys.

    reward:
      ocr: {weight: 1.0, when: {task: text}, transform: [{clip: [0, 1]}], on_error: {retry: 3}, timeout: 30}

The normalisation of a reward is not set here. The method's advantage normalises each reward (`parts: {advantage:
{order: advantages, scale: group}}`) or their sum (`order: rewards`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from flowgrpo.config.base import Section


def _kind(value: Any) -> str:
    """Return the branch of a union that a value belongs to: an error names that branch alone, and not its tag in <>."""
    return "<keys>" if isinstance(value, (dict, Section)) else "<value>"


class Clip(Section):
    """Bound the score to [low, high]."""

    clip: tuple[float, float]

    @model_validator(mode="after")
    def _ordered(self) -> Clip:
        if not self.clip[0] < self.clip[1]:
            raise ValueError("the lower bound below the upper one")
        return self


class Threshold(Section):
    """1 if the score reaches the threshold, else 0."""

    threshold: float


def _transform_kind(value: Any) -> str:
    keys = value if isinstance(value, dict) else vars(value) if isinstance(value, Section) else None
    return "<word>" if keys is None else "<threshold>" if "threshold" in keys else "<clip>"


Transform = Annotated[Annotated[Literal["log", "rank"], Tag("<word>")] | Annotated[Clip, Tag("<clip>")]
                      | Annotated[Threshold, Tag("<threshold>")], Discriminator(_transform_kind)]


class Retry(Section):
    """Retry after `wait` seconds, twice as many the next time, and so on; if that does not help, `then`."""

    retry: int = Field(ge=1, description="further attempts")
    wait: float = Field(1.0, ge=0, description="seconds before the first of them")
    then: Literal["raise", "skip"] = "raise"


OnError = Annotated[Annotated[Literal["raise", "skip"], Tag("<value>")] | Annotated[Retry, Tag("<keys>")],
                    Discriminator(_kind)]


class WatchRule(Section):
    """A reward that is measured: its name, arguments, prompts and error handling."""

    use: str | None = Field(None, min_length=1, description="the reward, where the key is a label of your own")
    args: dict[str, Any] = Field({}, description="arguments of a reward that is a class")
    when: dict[str, Any] = Field({}, description="the metadata of the prompts that it applies to; a list: one of these")
    on_error: OnError = Field("raise", description="`raise`, `skip`, or {retry: 3, wait: 1, then: raise}")
    timeout: float | None = Field(None, gt=0, description="seconds within which a call has to answer")
    cache: bool = Field(False, description="keep the scores, by content, in the folder `cache`")

    def applies(self, metadata: dict[str, Any]) -> bool:
        """True if a prompt's metadata has, for every key of `when`, its value or one of its list of values."""
        return all(key in metadata and metadata[key] in (expected if isinstance(expected, list) else [expected])
                   for key, expected in self.when.items())


class RewardRule(WatchRule):
    """A reward that is trained on: its weight, and the transforms of its scores before they are compared."""

    weight: float = Field(1.0, description="in the sum of rewards or of their advantages")
    transform: list[Transform] = Field([], description="from left to right: {clip: [low, high]}, log, rank, "
                                                       "{threshold: value}")


Weighted = Annotated[Annotated[float, Tag("<value>")] | Annotated[RewardRule, Tag("<keys>")], Discriminator(_kind)]
