"""Presets that modify one thing of a language model's base method; without one, of GRPO or DAPO."""

from dataclasses import replace

from flowgrpo.methods import supervised
from flowgrpo.methods.method import Method
from flowgrpo.objectives.supervised import Uncertain, WarmupCosine
from flowgrpo.text import credit, losses
from flowgrpo.text.presets.completions import dapo, grpo


def entropy_bonus(method: Method = Method()) -> Method:
    """Entropy bonus: a reward for undecided tokens over a base method of language models, GRPO without one
    (1707.06347, equation 9)."""
    method = method if method.for_tokens else grpo(method)
    return method.having(surrogate=losses.EntropyBonus(method.loss.surrogate, 0.01))


def high_entropy(method: Method = Method()) -> Method:
    """High-entropy tokens over a base method of language models, DAPO without one: the fifth with the largest entropy
    (2506.01939)."""
    method = method if method.for_tokens else dapo(method)
    return method.having(surrogate=losses.HighEntropy(method.loss.surrogate, 0.2))


def llds(method: Method = Method()) -> Method:
    """LLDS over a base method of language models, GRPO without one: good completions stay as likely (2512.04220)."""
    method = method if method.for_tokens else grpo(method)
    return method.having(surrogate=losses.LikelihoodFloor(method.loss.surrogate, 0.1))


def visurf(method: Method = Method()) -> Method:
    """ViSurf over a base method of causal language models, GRPO without one: the prompt's own answer joins its group,
    with a controlled reward (2510.10606)."""
    method = _with_answer(method)
    return method.having(shaping=credit.ExpertReward(shaping=method.credit.shaping))


def rl_plus(method: Method = Method()) -> Method:
    """RL-PLUS: ViSurf's answer in its group, with a ratio to the mixture of both policies (2508.00222)."""
    method = _with_answer(method)
    return method.having(surrogate=losses.ExpertMixture(method.loss.surrogate))


def chord(method: Method = Method()) -> Method:
    """CHORD over a base method of causal language models, GRPO without one: cross-entropy of answers added to the loss,
    its weight rising and falling, uncertain tokens first (2508.11408)."""
    method = method if method.for_tokens else grpo(method)
    return method.having(data=supervised.NextToken(balance=WarmupCosine(), token_weight=Uncertain()))


def relift(method: Method = Method()) -> Method:
    """ReLIFT over a base method of causal language models, GRPO without one: prompts that all samples fail are kept
    with their answers for a supervised step (2506.07527)."""
    method = method if method.for_tokens else grpo(method)
    return method.having(data=supervised.NextToken(source=supervised.PassRate(solved=False), apart=True))


def _with_answer(method: Method) -> Method:
    method = method if method.for_tokens else grpo(method)
    return method.having(decoding=replace(method.generation.decoding, expert=1))
