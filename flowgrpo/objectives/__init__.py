"""Parts of a policy-gradient loss: log-ratios, surrogates, step weights, regularisers.

All are pure and per decision, [B, N] for B rows of N decisions. Those of some methods alone are in `forward_process`
and `sequence_losses`; those of texts in `text.losses`.
"""

from flowgrpo.objectives.kl import (
    GaussianKL,
    OutputError,
    SampledKL,
    at_epoch,
    is_active,
)
from flowgrpo.objectives.ratios import (
    CompletionRatio,
    Guard,
    Matching,
    PlainRatio,
    SequenceRatio,
)
from flowgrpo.objectives.reductions import InverseDelta, NoiseLevel, Sigma, Uniform
from flowgrpo.objectives.surrogates import (
    AdaptiveClip,
    Clip,
    DivergenceMask,
    DynamicClip,
    KLOnly,
    Reinforce,
    RewardAscent,
    TruncatedIS,
    surrogate_input,
)

__all__ = [
    "AdaptiveClip", "at_epoch", "Clip", "CompletionRatio", "DivergenceMask", "DynamicClip", "GaussianKL", "Guard",
    "InverseDelta", "is_active", "KLOnly", "Matching", "NoiseLevel", "OutputError", "PlainRatio", "Reinforce",
    "RewardAscent", "SampledKL", "SequenceRatio", "Sigma", "surrogate_input", "TruncatedIS", "Uniform",
]
