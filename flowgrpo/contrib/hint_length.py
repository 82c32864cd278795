"""Hints whose length follows the measured accuracy of a prompt: SEELE's item response model."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np

from flowgrpo.config.schema import Config
from flowgrpo.curriculum.epoch_batch import EpochBatch
from flowgrpo.curriculum.order import require_rate
from flowgrpo.curriculum.resampling import beginning, require_template
from flowgrpo.data.prompts import Guidance, Prompt
from flowgrpo.errors import UserError
from flowgrpo.parts import Above, AtLeast, part

KEY = "hint_length"  # of the memory: of each prompt's text, its last [share, rate, samples, epoch]
WHOLE = (1.0, 0.95, 1.0)  # share, rate and weight of a prior: nearly all samples succeed with the whole solution
LEAST = 1.0  # slope of the model: a longer hint never lowers the accuracy


@part("redraw", jointly={"target band decay": "numbers between 0 and 1"})
class HintLength:
    """Show that share of a prompt's solution at which its accuracy is near `target` (SEELE, 2509.06923).

    The accuracy at the share s is modelled as sigmoid(a s + b), a > 0, fitted to the prompt's measured pairs of share
    and accuracy. The first turn of an epoch takes the predicted share, none for a prompt that was never sampled. A
    group whose mean reward is further than `band` from the target is followed by one with the share predicted anew, up
    to `rounds` groups of a prompt in an epoch. All are trained, each compared by itself.

    keep: the number of pairs per prompt. decay: the factor on a pair's weight per epoch of age.
    text: the template that joins prompt and hint. learned: as of `Hints`.
    noise: shares of a prompt whose image a language model reads go on below 0, down to -1: at the share -s the
        image, of values from 0 to 1, has noise of the deviation s * noise, for prompts that are too easy (DeepVideo-R1,
        2506.07464, in a form of ours). 0: none.

    Rewards are within 0 to 1, and the metadata holds the text under `solution`. The model's lower asymptote is left
    out, and its prior of one sample with the whole solution is ours.
    """

    target: Annotated[float, Above(0, below=1)] = 0.5
    rounds: Annotated[int, AtLeast(1)] = 4
    band: Annotated[float, AtLeast(0, below=1)] = 0.1
    keep: Annotated[int, AtLeast(1)] = 8
    decay: Annotated[float, Above(0, to=1)] = 0.8
    text: str = "{prompt}\n\nThe solution begins like this, go on from there: {hint}"
    learned: bool = True
    noise: Annotated[float, AtLeast(0)] = 0.0

    def __post_init__(self) -> None:
        require_template("HintLength", self.text)

    def require_config(self, config: Config, of_text: bool) -> None:
        """Raise UserError for noise on images that no language model reads."""
        if self.noise and not of_text:
            raise UserError("parts.redraw.noise is about images that language models read, and a pipeline reads its "
                            "own: leave it out")

    def begin(self, prompts: Sequence[Prompt], drawn: EpochBatch) -> list[Prompt]:
        """Prompts of an epoch's first turn, with hints of the predicted shares."""
        known = drawn.memory.get(KEY, {})
        return [self.add_hint(prompt, self.share(known.get(prompt.unguided.key, []), drawn.epoch, self.least(prompt)))
                for prompt in prompts]

    def __call__(self, drawn: EpochBatch) -> list[tuple[None, Prompt]]:
        if drawn.turn >= self.rounds:
            return []
        pairs = self.collect_pairs(drawn)
        longer = []
        for place in drawn.turns[-1]:
            prompt, rewards = drawn.prompts[place], drawn.totals[place]
            rewards = rewards[~rewards.isnan()]
            if len(rewards) and abs(rewards.mean().item() - self.target) > self.band:
                share = self.share(pairs.get(prompt.unguided.key, []), drawn.epoch, self.least(prompt))
                changed = self.add_hint(prompt, share)
                longer += [changed] if changed.key != prompt.key else []
        return [(None, prompt) for prompt in longer]

    def learn(self, drawn: EpochBatch) -> None:
        drawn.memory[KEY] = self.collect_pairs(drawn)

    def collect_pairs(self, drawn: EpochBatch) -> dict[str, list[list[float]]]:
        """Pairs of all prompts, those of the present epoch included."""
        known = {key: [*pairs] for key, pairs in drawn.memory.get(KEY, {}).items()}
        for prompt, totals in zip(drawn.prompts, drawn.totals):
            rewards = totals[~totals.isnan()].double()
            if len(rewards) and (prompt.metadata.get("solution") or self.least(prompt)):
                require_rate(prompt.key, rewards.min().item(), rewards.max().item())
                share = prompt.guided.level if prompt.guided else 0.0
                pairs = known.setdefault(prompt.unguided.key, [])
                pairs.append([share, rewards.mean().item(), len(rewards), drawn.epoch])
        return {key: pairs[-self.keep:] for key, pairs in known.items()}

    def least(self, prompt: Prompt) -> float:
        """Smallest share of a prompt: -1 if its image can be noised, else 0."""
        return -1.0 if self.noise and prompt.image is not None else 0.0

    def share(self, pairs: Sequence[Sequence[float]], epoch: int, least: float = 0.0) -> float:
        """Share, `least` to 1, at which the accuracy is the target by the fitted model; 0 without pairs."""
        if not pairs:
            return 0.0
        slope, offset = fit_logistic([(share, (rate * count + 0.5) / (count + 1), count * self.decay ** (epoch - then))
                                      for share, rate, count, then in pairs])
        return min(max((math.log(self.target / (1 - self.target)) - offset) / slope, least), 1.0)

    def add_hint(self, prompt: Prompt, share: float) -> Prompt:
        """Prompt with that share of its solution as a hint, if any; below 0 with noise on its image."""
        if share < 0:
            return replace(prompt, guided=Guidance(prompt.text, learned=self.learned, level=share,
                                                   noise=-share * self.noise))
        hint = beginning(prompt.metadata, share)
        if not hint:
            return prompt.unguided
        text = self.text.replace("{prompt}", prompt.text).replace("{hint}", hint)
        return replace(prompt, guided=Guidance(text, learned=self.learned, level=share))


def fit_logistic(pairs: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Slope, LEAST at least, and offset of the likeliest model of pairs (share, rate, weight) and the prior WHOLE."""
    shares, rates, weights = np.array([*pairs, WHOLE]).T
    inputs, values = np.stack([shares, np.ones_like(shares)], 1), np.array([LEAST, 0.0])
    values = _newton(inputs, rates, weights, values)
    if values[0] < LEAST:
        values = np.array([LEAST, *_newton(inputs[:, 1:], rates, weights, values[1:], LEAST * shares)])
    return float(values[0]), float(values[1])


def _newton(inputs: Any, rates: Any, weights: Any, values: Any, constant: Any = 0.0) -> Any:
    """Maximum of a weighted logistic likelihood, by damped Newton steps; a small ridge keeps it finite."""
    for _ in range(50):
        odds = 1 / (1 + np.exp(-(inputs @ values + constant)))
        slope = inputs.T @ (weights * (rates - odds)) - 1e-4 * values
        curve = (inputs * (weights * odds * (1 - odds))[:, None]).T @ inputs + 1e-4 * np.eye(len(values))
        step = np.linalg.solve(curve, slope)
        values = values + step * min(1.0, 2 / max(np.abs(step).max(), 1e-12))
    return values
