"""Parts of a policy-gradient loss: log-ratios, surrogates, step weights, regularisers.

All are pure and per decision, [B, N] for B rows of N decisions. Those of some methods alone are in `forward_process`,
`sequence_losses`, `token_losses` and `actor_critic`.
"""

from flowgrpo.objectives.kl import (
    ESTIMATORS,
    GaussianKL,
    OutputError,
    SampledKL,
    in_epoch,
    k1,
    k2,
    k3,
    regularises,
)
from flowgrpo.objectives.ratios import CompletionRatio, Guard, Matching, PlainRatio, SequenceRatio
from flowgrpo.objectives.step_weights import InverseDelta, NoiseLevel, Sigma, Uniform
from flowgrpo.objectives.surrogates import (
    AdaptiveClip,
    Ascent,
    Clip,
    DivergenceMask,
    DualClip,
    DynamicClip,
    Reinforce,
    Truncated,
    beside,
)

__all__ = [
    "AdaptiveClip", "Ascent", "beside", "Clip", "CompletionRatio", "DivergenceMask", "DualClip", "DynamicClip",
    "ESTIMATORS", "GaussianKL", "Guard", "in_epoch", "InverseDelta", "k1", "k2", "k3", "Matching", "NoiseLevel",
    "OutputError", "PlainRatio", "regularises", "Reinforce", "SampledKL", "SequenceRatio", "Sigma", "Truncated",
    "Uniform",
]
