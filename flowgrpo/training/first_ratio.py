"""The check of every run: before its first update, replay and rollout agree on every recorded step."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from flowgrpo.errors import UserError
from flowgrpo.objectives import Clip
from flowgrpo.samplers.replay import rescored
from flowgrpo.samplers.rollout import Part

ROUNDED = 0.02  # more is no rounding: a log-probability is a mean over a latent's values, which rounds to far less
UNCLIPPED = 1e-4  # the range that stands for that of a surrogate without a clip, whose gradient no ratio enters


class FirstRatio:
    """Keeps what was `found`, the largest first |log ratio|, and whether old scores are computed again (`rescore`).

    Both are of all processes, which decide alike. explorer: what replays a part; exact: by how much replay and rollout
    may differ where it computes in fp32, None where it does not, and a tenth of the clip range is the limit; most: what
    no rounding reaches.
    """

    def __init__(self, explorer, clip: Clip, exact: float | None, most: float = math.inf):
        self.explorer, self.processes, self.exact = explorer, explorer.processes, exact
        self.most, narrow = most, min(clip.low, clip.high)
        self.limit = self.exact or 0.1 * (narrow if narrow < math.inf else UNCLIPPED)
        self.found: float | None = None
        self.rescore = False

    def __call__(self, parts: list[Part], conditioning, say: Callable[[str], None]) -> list[Part]:
        """The parts, with old scores that the replay agrees with; looks at the first batch of a run, then trusts.

        In fp32 the run stops above `exact`. Otherwise, above a tenth of the clip range (of 1e-4, where nothing is
        clipped), the old log-probabilities are computed again as the replay computes them, now and in every later
        epoch, and the run stops only if the two still differ, or if they were further apart than rounding brings them.
        """
        if self.rescore:
            return self._again(parts, conditioning)
        if self.found is not None or not self.processes.any(bool(parts)):
            return parts
        self.found = left = self._largest(parts, conditioning)
        if not self.exact and not left <= max(self.most, self.limit):
            raise UserError(f"the first |log ratio| is {left:.1e}, and rounding makes less than {self.most:.1e} of it: "
                            "replay and rollout disagree; look for an argument of the pipeline's call that goes by the "
                            "place in its loop, and see what a run with precision: fp32 says")
        if left > self.limit and not self.exact:
            self.rescore, parts = True, self._again(parts, conditioning)
            left = self._largest(parts, conditioning)
            say(f"first |log ratio| {self.found:.1e} is above a tenth of the clip range ({self.limit:.1e}); old "
                f"log-probabilities are computed again as the replay does: {left:.1e}")
        if not left <= self.limit:  # a NaN is not
            raise UserError(f"the first |log ratio| is {left:.1e}, expected at most {self.limit:.1e}: replay and "
                            "rollout disagree; look for dropout, a random module or a guidance that differs, and try "
                            "without train.checkpointing")
        return parts

    def _again(self, parts, conditioning) -> list[Part]:
        with self.processes.together(), self.explorer.lagging.old():
            return [rescored(part, self.explorer.replay(part, conditioning)) for part in parts]

    def _largest(self, parts, conditioning) -> float:
        """The largest |log ratio| of all transitions; NaN where one is."""
        with self.processes.together():
            found = [(new.logp - part.transitions[k].old.logp[rows].to(new.logp.device)).detach().abs().max()
                     for part in parts for k, rows, new in self.explorer.replay(part, conditioning)]
        return self.processes.gather(torch.stack(found).cpu() if found else torch.empty(0)).max().item()
