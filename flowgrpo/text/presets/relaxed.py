"""Presets of masked language models that follow the gradient of a reward."""

from flowgrpo.advantages import group
from flowgrpo.methods.method import Method
from flowgrpo.objectives import ratios, reductions, references, surrogates
from flowgrpo.objectives.kl import SampledKL
from flowgrpo.text import targets
from flowgrpo.text.samplers import decoding, gumbel_softmax
from flowgrpo.text.targets import TextGeneration


def drakes(method: Method = Method()) -> Method:
    """DRAKES: a differentiable reward's gradient through the unmasking of an answer, by Gumbel-softmax (2410.13643).

    Less the KL of the process to the base model's.
    """
    return method.having(rollout=TextGeneration(decoding.Unmasking(order="random")),
                         target=targets.RelaxedTraces(gumbel_softmax.GumbelSoftmax()), shaping=None,
                         advantage=group.Advantage(scale="group", order="rewards"), selection=None,
                         log_ratio=ratios.PlainRatio(), surrogate=surrogates.RewardAscent(),
                         reduction=reductions.TokenMean(), kl=SampledKL(0.0), reference=references.Base())
