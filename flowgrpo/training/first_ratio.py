"""First-ratio check of every run: before its first update, replay and rollout agree on every recorded step."""

import math
from collections.abc import Callable
from typing import Any

import torch

from flowgrpo.errors import UserError
from flowgrpo.objectives.ratios import PlainRatio
from flowgrpo.policies.weights.forwards import replaced
from flowgrpo.rollouts.base import Encoded, GroupSampler
from flowgrpo.samplers.rollout import Part
from flowgrpo.training.epoch import Epoch

ROUNDED = 0.02  # more is not rounding: a log-probability is a mean over a latent's values, with far smaller errors
MARGIN, MOST = 8, 1e-4  # in fp32: the limit over what another batch size makes; a wrong step or guidance makes 1e-3
UNCLIPPED = 1e-4  # the range for a surrogate without a clip, whose gradient does not read the ratio


class FirstRatio:
    """Result of the check, over all processes, which decide alike.

    max_log_ratio: the largest first |log ratio|; None before the check.
    rescore: old scores are recomputed.
    rollouts: replay a part; texts have no upper bound of rounding.
    exact: largest difference of log-probabilities of replay and rollout in fp32, unless the batch's size makes more;
        None in other precisions, whose limit is a tenth of the clip range, for the method's own log-ratio.
    most: upper bound of rounding errors of a log-probability.
    clip: narrower side of the clip range, None without one.
    """

    def __init__(self, rollouts: GroupSampler[Any]):
        loss = rollouts.method.loss
        self.rollouts, self.processes, self.exact = rollouts, rollouts.processes, rollouts.exact
        self.log_ratio = PlainRatio() if self.exact else loss.log_ratio
        self.most = math.inf if rollouts.policy.unit == "tokens" else ROUNDED
        narrow = min(loss.surrogate.low, loss.surrogate.high)
        self.clip = narrow if narrow < math.inf else None
        self.limit = self.exact or 0.1 * (narrow if narrow < math.inf else UNCLIPPED)
        self.max_log_ratio: float | None = None
        self.rescore = False

    def __call__(self, parts: list[Part], conditioning: Encoded, log: Callable[[str], None]) -> list[Part]:
        """The parts, with old scores that agree with the replay; only the first batch of a run is checked.

        In fp32 the run stops above `exact`, or above MARGIN times what half the micro-batch changes, at most MOST:
        batches of other sizes are summed in another order, and old scores may be of one. Otherwise, above a tenth of
        the clip range (of 1e-4 without a clip), old log-probabilities are recomputed as the replay does, now and in
        every later epoch, and the run stops only where that does not help or rounding cannot explain the difference.
        """
        if self.rescore:
            return self._again(parts, conditioning)
        if self.max_log_ratio is not None or not self.processes.any(bool(parts)):
            return parts
        plain, found = self._largest(parts, conditioning)
        left = found
        if math.isnan(plain):
            raise UserError("the first |log ratio| is nan: log-probabilities of the rollout or of its replay are not "
                            "finite: look at the precision (fp16 overflows), at the model's weights and at train.lr")
        # In fp32 the machine itself tells how large rounding is: what another size of batch changes.
        if self.exact and found > self.limit:
            again, spread = self._spreads(parts, conditioning)
            if again <= self.exact:  # what changes by itself is no rounding
                self.limit = max(self.exact, min(MARGIN * spread, MOST))
            if found <= self.limit:
                log(f"first |log ratio| {found:.1e} is above {self.exact:.0e}, and half the micro-batch alone changes "
                    f"log-probabilities by {spread:.1e}: the limit is {self.limit:.1e}")
        # In half precision a difference of rounding is repaired, and a larger one is a fault of the pipeline.
        if not self.exact and not plain <= max(self.most, self.limit):
            raise UserError(f"the first |log ratio| is {plain:.1e}, and rounding makes less than {self.most:.1e} of "
                            "it: replay and rollout disagree; look for an argument of the pipeline's call that depends "
                            "on the place in its loop, and compare a run with precision: fp32")
        rescore = False
        if left > self.limit and not self.exact:
            parts = self._again(parts, conditioning)
            (_, left), rescore = self._largest(parts, conditioning), True
            log(f"first |log ratio| {found:.1e} is above a tenth of the clip range ({self.limit:.1e}); old "
                f"log-probabilities are computed again as the replay does: {left:.1e}")
        # What neither explains would train on wrong ratios, so that the run ends here.
        if not left <= self.limit:  # true for NaN too
            raise UserError(f"the first |log ratio| is {left:.1e}, expected at most {self.limit:.1e}: replay and "
                            "rollout disagree; look for dropout, a random module or a guidance that differs, and try "
                            "without train.checkpointing")
        self.max_log_ratio, self.rescore = found, rescore
        return parts

    def check(self, epoch: Epoch, rollouts: GroupSampler[Any], log: Callable[[str], None]) -> None:
        """Check the first epoch's parts; give later ones the old scores of their replay where that is needed."""
        self.rollouts = rollouts
        epoch.parts = self(epoch.parts, epoch.sampled or epoch.conditioning, log)

    def _again(self, parts: list[Part], conditioning: Encoded) -> list[Part]:
        with self.rollouts.old_policy.old(), self.processes.collective():  # all have the old weights till all are done
            return [self.rollouts.rescore(part, conditioning) for part in parts]

    def _spreads(self, parts: list[Part], conditioning: Encoded) -> tuple[float, float]:
        """The largest differences of the first part's log-probabilities between two replays at the run's micro-batch,
        and to one at half of it (at 2 in place of 1)."""
        shape = self.rollouts.geometry
        run, scores = shape.micro_batch, []
        with replaced("micro_batch", (shape, run)), self.processes.collective():  # which the replays change
            for part in parts[:1]:
                for shape.micro_batch in (run, run, run // 2 or 2):
                    logp = [torch.zeros_like(taken.old.logp, device="cpu") for taken in part.transitions]
                    for k, rows, new in self.rollouts.replay(part, conditioning):
                        logp[k][rows] = new.logp.detach().cpu()
                    scores.append(torch.cat([values.flatten() for values in logp]))
        apart = torch.stack([(scores[0] - other).abs().max() for other in scores[1:]])[None] if scores \
            else torch.empty(0, 2)
        again, half = self.processes.gather(apart).max(0).values.tolist()
        return again, half

    def _largest(self, parts: list[Part], conditioning: Encoded) -> tuple[float, float]:
        """The largest difference of log-probabilities, and the method's largest |log ratio|; NaN if one is."""
        maxima = []
        with self.processes.collective():
            for part in parts:
                for k, rows, new in self.rollouts.replay(part, conditioning):
                    old = part.transitions[k].old.rows(rows).to(new.logp.device)
                    both = new.logp - old.logp, self.log_ratio(new, old)
                    maxima.append(torch.stack([each.detach().abs().max() for each in both]))
        found = self.processes.gather(torch.stack(maxima).cpu() if maxima else torch.empty(0, 2))
        plain, own = found.max(0).values.tolist()
        return plain, own
