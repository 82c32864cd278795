"""Credit of denoising steps: what each trained step adds to the reward of the predicted clean picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
from torch import Tensor

from flowgrpo.advantages.group import weighted_sum
from flowgrpo.parts import AtLeast, part
from flowgrpo.types import Context, required


@part("progress", jointly={"weight outcome discount": "0 or more, 0 or more, and 0 to 1"})
class Progress:
    """Bonus of a trained step: the change of the clean prediction's reward over it (MRT, 2503.07572; IRCoCo,
    2401.16637): `progress`.

    Before every trained step the predicted clean picture is decoded and scored. A step's reward is `outcome` times the
    sample's reward plus `weight` times its progress, and is compared by the method's advantage at that step. Papers
    score blocks of text; the denoising form is a reconstruction.

    discount: share of the later steps' progress that counts too. 0 is the step's progress alone; 1 is the sample's
        reward less that of the prediction, which is potential-based shaping with Phi = V and Phi(end) = 0 (GRPO-R).
    rewards: names of the run's rewards that score predictions; empty: all. One of weight 0 counts with weight 1.
    """

    weight: Annotated[float, AtLeast(0)] = 1.0
    outcome: Annotated[float, AtLeast(0)] = 1.0
    discount: Annotated[float, AtLeast(0, to=1)] = 0.0
    rewards: tuple[str, ...] = ()

    def bonuses(self, rewards: Tensor, context: Context) -> Tensor:
        """Return the bonus of every trained step, [P, G, K]. rewards: [P, G, R], of the samples."""
        weights = chosen_weights(dict(zip(context.rewards.names, context.rewards.weights)), self.rewards)
        columns = [number for number, name in enumerate(context.rewards.names) if name in weights]
        final = weighted_sum(rewards[..., columns], list(weights.values()))
        return progress(required(context.samples.predicted).to(final), final, self.discount)


def progress(values: Tensor, final: Tensor, discount: float = 0.0) -> Tensor:
    """Return the progress of K steps, [P, G, K]: the value behind a step less that before it.

    values: [P, G, K], of the states before the steps. final: [P, G], behind the last one.
    discount: a step's result is its progress plus `discount` times the result of the next step.

    Undiscounted progress of a sample's steps adds up to its final value less its first one.
    """
    steps = torch.cat([values[..., 1:], final[..., None]], 2) - values
    results = [steps[..., -1]]
    for step in range(steps.shape[2] - 2, -1, -1):
        results.append(steps[..., step] + discount * results[-1] if discount else steps[..., step])
    return torch.stack(results[::-1], 2)


def chosen_weights(weights: Mapping[str, float], names: Sequence[str] = ()) -> dict[str, float]:
    """Return the weights of the rewards `names`, 1 in place of 0; without names all of them, unchanged."""
    return {name: weight or 1.0 for name, weight in weights.items() if name in names} if names else dict(weights)
