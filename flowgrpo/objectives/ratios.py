"""Log-ratios of the new policy to the old: `log_ratio(new, old) -> [B, N]`, for B rows of N decisions.

Those of transitions are in the unit of `gaussian.log_prob`, a mean over the latent's values, unless a class says
otherwise. A clip range is in the unit of the log-ratio that it bounds.
"""

import math
from typing import Annotated

from torch import Tensor

from flowgrpo.objectives.kl import deviations, divergence
from flowgrpo.parts import Above, part
from flowgrpo.types import Scored


class LogRatio:
    """Distance of the policy from the old one on a decision: base class.

    reads_means: it reads the means of transitions, of the new policy and of the old one.
    reads_deviations: it reads the new policy's deviations.
    """

    reads_means = reads_deviations = False

    def __call__(self, new: Scored, old: Scored) -> Tensor:
        """Log-ratio [B, N]."""
        raise NotImplementedError


@part("log_ratio")
class PlainRatio(LogRatio):
    """Log-ratio logp_new - logp_old, [B, N]."""

    def __call__(self, new: Scored, old: Scored) -> Tensor:
        return new.logp - old.logp


@part("log_ratio", target="gaussians", reads_means=True)
class Guard(LogRatio):
    """GRPO-Guard's RatioNorm (2510.22319): std * (logp_new - logp_old + b), b = mean((mean_new-mean_old)^2)/(2 std^2),
    [B, N].

    b removes the bias that keeps plain ratios below 1, and std the dependence on the step. What remains is mean(z *
    (mean_new - mean_old)), with z the drawn noise. b stays in the graph; otherwise its gradient would not cancel. Reads
    mean and std of both. Clip ranges shrink with std: 2e-6 there, where 1e-4 would never clip.
    """

    def __call__(self, new: Scored, old: Scored) -> Tensor:
        return deviations(new) * (new.logp - old.logp + divergence(new, old))


@part("log_ratio", target="steps", reads_deviations=True)
class SquaredErrorRatio(LogRatio):
    """Log-ratio mean((x' - mean_old)^2) - mean((x' - mean_new)^2) of transitions to x', [B, N]: 2 std^2 times the plain
    one (Flow-GRPO's code, 2505.05470, for the kernel CPS).

    Its clip range is in squared units of the latent, whatever the kernel's std: 1e-5 as released. Reads the std.
    """

    def __call__(self, new: Scored, old: Scored) -> Tensor:
        return 2 * deviations(new).square() * (new.logp - old.logp)


@part("log_ratio", target="tokens")
class SequenceRatio(LogRatio):
    """GSPO's log-ratio (2507.18071, equation 7): for every decision the mean log-ratio of its row, [B, N].

    All tokens of a completion have one ratio, the likelihood ratio of the whole to the power of 1 / length. They are
    clipped together.
    """

    def __call__(self, new: Scored, old: Scored) -> Tensor:
        mean = ((new.logp - old.logp) * new.mask).sum(1, keepdim=True) / new.mask.sum(1, keepdim=True).clamp(min=1)
        return mean.expand_as(new.logp)


@part("log_ratio", target="tokens")
class CompletionRatio(LogRatio):
    """Log-ratio of the whole completion, the sum of its tokens', at every token, [B, L]; each token carries only its
    own gradient.

    It is the ratio of the texts' probabilities, as in importance sampling. A loss f(log-ratio), with its tokens summed
    by `SequenceSum`, has the gradient f' grad log p of the completion (as GSPO-token, 2507.18071, section 4.3, has for
    its mean).
    """

    def __call__(self, new: Scored, old: Scored) -> Tensor:
        log_ratio = new.logp - old.logp
        return (log_ratio * new.mask).sum(1, keepdim=True).detach() + log_ratio - log_ratio.detach()


def error(scored: Scored) -> Tensor:
    """Return mean((v - u)^2) of a score under N(v, 1): [B, 1]."""
    return -2 * scored.logp - math.log(2 * math.pi)


@part("log_ratio", target="noised finals")
class Matching(LogRatio):
    """Log-ratio f(e_old) - f(e_new) of noised samples, [B, 1], f(e) = ((e + 1e-10)^power - 1e-10^power) / power.

    power 1 is the plain error; 0.25, with a step weight t, the "ghuber" of AWM (2509.25050, its code).
    """

    power: Annotated[float, Above(0, to=1, words="above 0 and at most 1")] = 1.0

    def __call__(self, new: Scored, old: Scored) -> Tensor:
        before, now = error(old), error(new)
        if self.power != 1:
            before, now = ((value.clamp(min=0) + 1e-10).pow(self.power) / self.power for value in (before, now))
        return before - now
