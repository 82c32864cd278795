"""Loss of an edit policy and its critic, and the checks of a method with an edit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from flowgrpo.objectives.surrogates import Surrogate, cut, ppo
from flowgrpo.parts import AtLeast, part
from flowgrpo.types import required


@dataclass(frozen=True, eq=False)
class Seen:
    """Inputs of the loss in addition to ratio and advantage.

    value: [b, 1], the critic's value of the samples' final states, with its gradient.
    reward: [b, 1], their rewards.
    edited: [b, 1], the value of their bases, edited by the present weights with the noise that the rollout drew, with
        the gradient of the edit alone; None if the loss does not read it.
    """

    value: Tensor
    reward: Tensor
    edited: Tensor | None = None


@part("surrogate", target="edits", jointly={"low high": "0 to 1 and 0 or more"})
class ActorCritic(Surrogate):
    """Loss of an edit and its critic, [B, 1] (EXPO, 2507.07986).

    Critic: critic * (Q - R)^2 of its value Q of every sample, with R the weighted sum of its rewards.
    That is EXPO's TD loss with one step. Its target is r + gamma (1 - done) max Q(s', a'), the maximum over n bases of
    the next state and their n edits. An edit of a finished latent ends its episode: done is 1, no next state has
    candidates, and the target is r for every gamma.
    Edit: through * -Q(x0 + edit), as published; its gradient passes the critic and leaves it unchanged, and reaches the
    edit's mean through the decision m + std * noise. Plus ratio * PPO's clipped loss with bounds low and high, which is
    ours and reads no critic.
    The two networks share no weights.
    """

    low: Annotated[float, AtLeast(0, to=1)] = 1e-3
    high: Annotated[float, AtLeast(0)] = 1e-3
    critic: Annotated[float, AtLeast(0, words="0 or more, the weight of its loss")] = 0.5
    through: float = 1.0
    ratio: float = 0.0

    def __post_init__(self) -> None:
        if min(self.through, self.ratio) < 0 or not self.through + self.ratio > 0:
            raise ValueError(f"ActorCritic: through is {self.through} and ratio {self.ratio}, expected 0 or more and "
                             "one of them above 0: nothing else trains the edit")

    @property
    def reads_means(self) -> bool:  # type: ignore[override]
        """True if the loss reads the edit's mean."""
        return self.through > 0

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: Seen) -> Tensor:
        loss = self.critic * (old.value - old.reward).square().to(log_ratio)
        if self.ratio:
            loss = loss + self.ratio * ppo(log_ratio.expm1(), advantage, -self.low, self.high)
        return loss - self.through * required(old.edited).to(log_ratio) if self.through else loss

    def clipped(self, log_ratio: Tensor, advantage: Tensor, old: Seen | None = None) -> Tensor:
        """Return the mask where the clip cuts the edit's gradient, bool [B, N]; false without the clipped loss."""
        return (self.ratio > 0) & cut(log_ratio.expm1(), advantage, -self.low, self.high)
