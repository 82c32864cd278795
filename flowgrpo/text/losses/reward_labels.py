"""Loss of samples whose rewards are labels: classification of the samples of a group by their log-ratios."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from flowgrpo.objectives.sequence_losses import SampleLoss
from flowgrpo.ranges import above
from flowgrpo.types import CompletionBatch, NoisedBatch, required

FORMS = ("anchor", "each", "leave_one_out")


@dataclass(frozen=True)
class RewardLabels(SampleLoss):
    """Cross-entropy of a group's labels under the logits z = scale * s, s the mean log-ratio of a sample's decisions,
    [B, N] (REAL, 2602.05630; PACS, 2509.02522).

    y: the label, the advantage within 0 to 1: with `NoBaseline` the reward itself, right 1 and wrong 0, or between.
    form: "anchor": log(1 + sum y e^-z) + log(1 + sum (1 - y) e^z), REAL's with scale = 1 / temperature: one softmax of
        the right and one of the wrong samples, each with an anchor logit 0, so that all slopes are bounded. The paper
        and its code leave out groups of one class; here they are trained too.
        "each": the mean of -y log sigmoid(z) - (1 - y) log sigmoid(-z).
        "leave_one_out": the same of psi = z less the mean z of the others, PACS's; psi adds up to 0 over the group.
    reference: s is the log-ratio to the reference, in place of that to the old policy.

    Of completions s is a mean over tokens with `PlainRatio` and `SequenceMean`, the log-ratio of the whole with
    `CompletionRatio` and `SequenceSum`. The returned values have the loss and its gradient. Every token has the loss of
    its group, whose mean over tokens is logged.
    """

    form: str = "anchor"
    scale: float = 1.0
    reference: bool = False
    reads_groups = reads_advantages = reads_labels = True

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"RewardLabels: form is {self.form!r}, expected one of {', '.join(FORMS)}")
        above(self, 0, "scale")

    @property
    def reads_reference(self) -> bool:  # type: ignore[override]
        """True if the logits are log-ratios to the reference."""
        return self.reference

    def _ratio(self, batch: CompletionBatch | NoisedBatch) -> Tensor:
        other = required(batch.reference) if self.reference else batch.old
        return required(batch.measure)(batch.new, other)

    def statistic(self, batch: CompletionBatch | NoisedBatch) -> Tensor:
        """Return s of every sample: [b]."""
        return (self._ratio(batch) * batch.new.mask).sum(1) / batch.new.mask.sum(1).clamp(min=1)

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: CompletionBatch | NoisedBatch) -> Tensor:
        peers, ratio = required(old.peers), self._ratio(old)
        same = peers.group[:, None] == peers.group
        labels = peers.advantage.clamp(0, 1).to(peers.statistic)
        value, slope = self.losses(self.scale * peers.statistic, labels, same.to(peers.statistic))
        value, slope = value[old.rows, None].to(ratio), self.scale * slope[old.rows, None].to(ratio)
        return value + slope * (ratio - ratio.detach())

    def losses(self, logits: Tensor, labels: Tensor, same: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each sample's group and its slope by the sample's logit times the group's size, [m] both.

        logits, labels: [m]; same: [m, m], 1 for two samples of one group.
        """
        size = same.sum(1)
        if self.form == "anchor":
            right, wrong = (self._anchored(z, weight, same) for z, weight in ((-logits, labels), (logits, 1 - labels)))
            return right[0] + wrong[0], (wrong[1] - right[1]) * size
        psi = logits
        if self.form == "leave_one_out":
            others = (size - 1).clamp(min=1)
            psi = logits - (same @ logits - logits) / others
        value = same @ (softplus(psi) - labels * psi) / size
        error = torch.sigmoid(psi) - labels
        return value, error if self.form == "each" else error - (same @ error - error) / others

    @staticmethod
    def _anchored(z: Tensor, weight: Tensor, same: Tensor) -> tuple[Tensor, Tensor]:
        """Return log(1 + sum w e^z) over each sample's group, and the sample's share of that sum: [m] both."""
        scores = z + weight.log()
        total = torch.logaddexp((scores + same.log()).logsumexp(1), torch.zeros_like(z))
        return total, (scores - total).exp()
