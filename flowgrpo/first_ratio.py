"""The check of every run: before its first update, replay and rollout agree on every recorded step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flowgrpo.errors import UserError
from flowgrpo.objectives import Clip
from flowgrpo.samplers.rollout import Part, replay, rescored

LIMIT = 1e-6  # in fp32; elsewhere a tenth of the clip range


class FirstRatio:
    """Keeps what was `found`, the largest first |log ratio|, and whether old scores are computed again (`rescore`)."""

    def __init__(self, policy, clip: Clip, micro_batch: int):
        self.policy, self.micro_batch = policy, micro_batch
        self.exact = policy.dtype == torch.float32
        self.limit = LIMIT if self.exact else 0.1 * min(clip.low, clip.high)
        self.found: float | None = None
        self.rescore = False

    def __call__(self, parts: list[Part], conditioning, say: Callable[[str], None]) -> list[Part]:
        """The parts, with old scores that the replay agrees with; looks at the first batch of a run, then trusts.

        In fp32 the run stops above 1e-6. Otherwise, above a tenth of the clip range, the old log-probabilities are
        computed again as the replay computes them, now and in every later epoch, and the run stops only if the two
        still differ.
        """
        if self.rescore:
            return self._again(parts, conditioning)
        if self.found is not None or not parts:
            return parts
        self.found = left = self._largest(parts, conditioning)
        if left > self.limit and not self.exact:
            self.rescore, parts = True, self._again(parts, conditioning)
            left = self._largest(parts, conditioning)
            say(f"first |log ratio| {self.found:.1e} is above a tenth of the clip range ({self.limit:.1e}); old "
                f"log-probabilities are computed again as the replay does: {left:.1e}")
        if not left <= self.limit:  # a NaN is not
            raise UserError(f"the first |log ratio| is {left:.1e}, expected at most {self.limit:.1e}: replay and "
                            "rollout disagree; look for dropout, a random module or a guidance that differs")
        return parts

    def _again(self, parts, conditioning) -> list[Part]:
        return [rescored(self.policy, conditioning, part, self.micro_batch) for part in parts]

    def _largest(self, parts, conditioning) -> float:
        """The largest |log ratio| of all transitions; NaN where one is."""
        found = [(new.logp - part.transitions[k].old.logp[rows]).detach().abs().max() for part in parts
                 for k, rows, new in replay(self.policy, conditioning, part, self.micro_batch)]
        return torch.stack(found).max().item()
