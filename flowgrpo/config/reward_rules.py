"""Long form of a reward in a recipe: its weight and further keys.

    reward:
      ocr: {weight: 1.0, when: {task: text}, transform: [{clip: [0, 1]}], on_error: {retry: 3}, timeout: 30}
      unsafe: {limit: {at_most: 0.1, rate: 0.05}}

The normalisation of a reward is not set here. The method's advantage normalises each reward (`parts: {advantage:
{order: advantages, scale: group}}`) or their sum (`order: rewards`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from flowgrpo.config.base import Section


def _kind(value: Any) -> str:
    """Branch of a union that a value belongs to: an error names that branch alone, and not its tag in <>."""
    return "<keys>" if isinstance(value, (dict, Section)) else "<value>"


class Change(Section):
    """Value that moves over a run, from `start` in its first epoch to `end`."""

    start: float
    end: float
    shape: Literal["linear", "geometric"] = Field("linear", description="geometric: equal factors, of two values above "
                                                                        "0 or two below it")
    stages: int | None = Field(None, ge=2, description="equal stages of a constant value each; None: a new value every "
                                                       "epoch")
    until: float = Field(1.0, gt=0, le=1, description="share of the run at which `end` is reached")

    @model_validator(mode="after")
    def _signs(self) -> Change:
        if self.shape == "geometric" and self.start * self.end <= 0:
            raise ValueError("with shape geometric a start and an end of the same sign, neither of them 0")
        return self

    def at(self, progress: float) -> float:
        """Value at a share of the run, 0 in the first epoch and 1 in the last."""
        share = min(1.0, progress / self.until)
        if self.stages is not None:
            share = min(int(share * self.stages), self.stages - 1) / (self.stages - 1)
        if self.shape == "geometric":
            return self.start * (self.end / self.start) ** share
        return self.start + (self.end - self.start) * share


Moving = Annotated[Annotated[float, Tag("<value>")] | Annotated[Change, Tag("<keys>")], Discriminator(_kind)]


def value_at(value: float | Change, progress: float) -> float:
    """Value, or that of a `Change` at a share of the run."""
    return value.at(progress) if isinstance(value, Change) else value


class Bounded(Section):
    """Transform of which the first key is a pair of bounds, in order at the run's ends and at 100 places between."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        low, high = getattr(self, next(iter(type(self).model_fields)))
        if not all(value_at(low, place / 100) < value_at(high, place / 100) for place in range(101)):
            raise ValueError("the lower bound below the upper one, throughout the run")
        return self


class Clip(Bounded):
    """Bound the score to [low, high]."""

    clip: tuple[Moving, Moving]


class Threshold(Section):
    """1 if the score reaches the threshold, else 0."""

    threshold: Moving


class Stretch(Bounded):
    """0 up to the lower bound, 1 from the upper one on, linear between them."""

    stretch: tuple[Moving, Moving]


class Band(Bounded):
    """1 within [low, high], falling linearly to 0 at a distance of `margin`; a margin of 0 is a step."""

    band: tuple[Moving, Moving]
    margin: float = Field(0.0, ge=0)


class Budget(Section):
    """1 for a score up to the budget, falling linearly to 0 at twice the budget."""

    budget: Moving

    @model_validator(mode="after")
    def _positive(self) -> Budget:
        if value_at(self.budget, 0) <= 0 or value_at(self.budget, 1) <= 0:
            raise ValueError("a budget above 0")
        return self


KEYED: dict[str, type[Section]] = {"clip": Clip, "threshold": Threshold, "stretch": Stretch, "band": Band,
                                   "budget": Budget}  # transforms by their key


Transform = Annotated[
    Annotated[Literal["log", "rank"], Tag("<word>")] | Annotated[Clip, Tag("<clip>")]
    | Annotated[Threshold, Tag("<threshold>")] | Annotated[Stretch, Tag("<stretch>")] | Annotated[Band, Tag("<band>")]
    | Annotated[Budget, Tag("<budget>")], Discriminator(
        lambda value: next((f"<{key}>" for key in KEYED if key in dict(value)), "<clip>")
        if isinstance(value, (dict, Section)) else "<word>")]


class Limit(Section):
    """Constraint on a reward's mean over the samples of an epoch, and its multiplier's step (Safe RLHF-V)."""

    at_most: float | None = Field(None, description="the mean is to stay at most here; the reward is a cost")
    at_least: float | None = Field(None, description="or at least here")
    rate: float = Field(0.05, gt=0, description="step of the multiplier per unit of violation and epoch")
    start: float = Field(0.0, ge=0, description="the multiplier before the first epoch")

    @model_validator(mode="after")
    def _one(self) -> Limit:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError("either at_most or at_least")
        return self

    @property
    def sign(self) -> int:
        """-1 for a cost, 1 for a reward that has to stay above a bound."""
        return 1 if self.at_most is None else -1

    def violation(self, mean: float) -> float:
        """Distance of a mean beyond the bound; negative while the bound is kept."""
        return mean - self.at_most if self.at_most is not None else (self.at_least or 0.0) - mean

    def __str__(self) -> str:
        return f"at most {self.at_most:g}" if self.at_most is not None else f"at least {self.at_least:g}"


class Retry(Section):
    """Retry after `wait` seconds, twice as many the next time, and so on; if that does not help, `then`."""

    retry: int = Field(ge=1, description="further attempts")
    wait: float = Field(1.0, ge=0, description="seconds before the first of them")
    then: Literal["raise", "skip"] = "raise"


OnError = Annotated[Annotated[Literal["raise", "skip"], Tag("<value>")] | Annotated[Retry, Tag("<keys>")],
                    Discriminator(_kind)]


class WatchRule(Section):
    """Measured reward: its name, arguments, prompts and error handling."""

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
    """Trained reward: its weight, and the transforms of its scores before they are compared."""

    weight: float = Field(1.0, description="in the sum of rewards or of their advantages")
    transform: list[Transform] = Field([], description="from left to right: {clip: [low, high]}, log, rank, "
                                                       "{threshold: value}, {stretch: [low, high]}, {band: [low, "
                                                       "high], margin: 0}, {budget: value}; a value can be {start: 1, "
                                                       "end: 2}, which moves over the run")
    limit: Limit | None = Field(None, description="{at_most: 0.1, rate: 0.05}: a constraint in place of a weight, with "
                                                  "a multiplier that grows while the mean violates it")

    @model_validator(mode="after")
    def _weight_or_limit(self) -> RewardRule:
        if self.limit is not None:
            if "weight" in self.model_fields_set and self.weight:
                raise ValueError("a weight or a limit, which brings its multiplier")
            object.__setattr__(self, "weight", 0.0)
        return self

    @property
    def strength(self) -> str:
        """The weight or the limit, in words."""
        return f"weight {self.weight:g}" if self.limit is None else str(self.limit)

    @property
    def direction(self) -> float:
        """Weight, or the sign of a limited reward's multiplier: below 0 if the reward is to fall."""
        return self.weight if self.limit is None else self.limit.sign


Weighted = Annotated[Annotated[float, Tag("<value>")] | Annotated[RewardRule, Tag("<keys>")], Discriminator(_kind)]
