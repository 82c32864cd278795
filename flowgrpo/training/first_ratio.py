"""First-ratio check of every run: before its first update, replay and rollout agree on every recorded step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from flowgrpo.errors import UserError
from flowgrpo.objectives.surrogates import Surrogate
from flowgrpo.rollouts.base import Encoded, GroupSampler
from flowgrpo.samplers.replay import rescored
from flowgrpo.samplers.rollout import Part

ROUNDED = 0.02  # more is not rounding: a log-probability is a mean over a latent's values, with far smaller errors
UNCLIPPED = 1e-4  # the range for a surrogate without a clip, whose gradient does not read the ratio


class FirstRatio:
    """Result of the check: `found`, the largest first |log ratio|, and `rescore`, whether old scores are recomputed.

    Both are over all processes, which decide alike.
    explorer: replays a part.
    exact: largest difference of replay and rollout in fp32; None in other precisions, whose limit is a tenth of the
        clip range.
    most: upper bound of rounding errors.
    clip: narrower side of the clip range, None without one.
    """

    def __init__(self, rollouts: GroupSampler[Any], clip: Surrogate, exact: float | None, most: float = math.inf):
        self.rollouts, self.processes, self.exact = rollouts, rollouts.processes, exact
        self.most, narrow = most, min(clip.low, clip.high)
        self.clip = narrow if narrow < math.inf else None
        self.limit = self.exact or 0.1 * (narrow if narrow < math.inf else UNCLIPPED)
        self.found: float | None = None
        self.rescore = False

    def __call__(self, parts: list[Part], conditioning: Encoded, say: Callable[[str], None]) -> list[Part]:
        """Return the parts, with old scores that agree with the replay; only the first batch of a run is checked.

        In fp32 the run stops above `exact`. Otherwise the limit is a tenth of the clip range (of 1e-4 without a clip).
        Above it the old log-probabilities are recomputed as the replay computes them, now and in every later epoch. The
        run stops only if the two still differ, or if they differed by more than rounding can explain.
        """
        if self.rescore:
            return self._again(parts, conditioning)
        if self.found is not None or not self.processes.any(bool(parts)):
            return parts
        found = left = self._largest(parts, conditioning)
        if not self.exact and not left <= max(self.most, self.limit):
            raise UserError(f"the first |log ratio| is {left:.1e}, and rounding makes less than {self.most:.1e} of it: "
                            "replay and rollout disagree; look for an argument of the pipeline's call that depends on "
                            "the place in its loop, and compare a run with precision: fp32")
        rescore = False
        if left > self.limit and not self.exact:
            parts = self._again(parts, conditioning)
            left, rescore = self._largest(parts, conditioning), True
            say(f"first |log ratio| {found:.1e} is above a tenth of the clip range ({self.limit:.1e}); old "
                f"log-probabilities are computed again as the replay does: {left:.1e}")
        if not left <= self.limit:  # true for NaN too
            raise UserError(f"the first |log ratio| is {left:.1e}, expected at most {self.limit:.1e}: replay and "
                            "rollout disagree; look for dropout, a random module or a guidance that differs, and try "
                            "without train.checkpointing")
        self.found, self.rescore = found, rescore
        return parts

    def _again(self, parts: list[Part], conditioning: Encoded) -> list[Part]:
        with self.rollouts.old_policy.old(), self.processes.together():  # all have the old weights till all are done
            return [rescored(part, self.rollouts.replay(part, conditioning)) for part in parts]

    def _largest(self, parts: list[Part], conditioning: Encoded) -> float:
        """Return the largest |log ratio| of all transitions; NaN if one is."""
        with self.processes.together():
            maxima = [(new.logp - part.transitions[k].old.logp[rows].to(new.logp.device)).detach().abs().max()
                      for part in parts for k, rows, new in self.rollouts.replay(part, conditioning)]
        return self.processes.gather(torch.stack(maxima).cpu() if maxima else torch.empty(0)).max().item()
