"""Presets that change one thing of a host that writes texts; without one, of GRPO or DAPO."""

from __future__ import annotations

from dataclasses import replace

from flowgrpo import objectives
from flowgrpo.method import Method
from flowgrpo.objectives import schedules, tokenwise
from flowgrpo.parts import references
from flowgrpo.presets.texts import dapo, grpo


def entropy_bonus(method: Method = Method()) -> Method:
    """An entropy bonus over a host of language models, GRPO without one (1707.06347, equation 9)."""
    method = method if method.for_tokens else grpo(method)
    return replace(method, surrogate=tokenwise.EntropyBonus(method.surrogate, 0.01))


def high_entropy(method: Method = Method()) -> Method:
    """The fifth of tokens of the largest entropies, over a host of language models, DAPO without one (2506.01939)."""
    method = method if method.for_tokens else dapo(method)
    return replace(method, surrogate=tokenwise.HighEntropy(method.surrogate, 0.2))


def llds(method: Method = Method()) -> Method:
    """LLDS over a host of language models, GRPO without one: good completions stay as likely (2512.04220)."""
    method = method if method.for_tokens else grpo(method)
    return replace(method, surrogate=tokenwise.LikelihoodKept(method.surrogate, 0.1))


def kdrl(method: Method = Method()) -> Method:
    """KDRL over a host of language models, GRPO without one: the reward, and a KL to a teacher that fades (2506.02208).

    The teacher is `reference.model`.
    """
    method = method if method.for_tokens else grpo(method)
    return replace(method, kl=objectives.SampledKL(5e-3, "k2", schedules.Linear(1e-3)), reference=references.Teacher())


def visurf(method: Method = Method()) -> Method:
    """ViSurf over a host of causal language models, GRPO without one: the prompt's own answer is one of its group
    (2510.10606)."""
    method = method if method.for_tokens else grpo(method)
    return replace(method, kernel=replace(method.kernel, expert=1))


def rl_plus(method: Method = Method()) -> Method:
    """RL-PLUS: ViSurf's answer in its group, with a ratio to the mixture of both policies (2508.00222)."""
    method = visurf(method)
    return replace(method, surrogate=tokenwise.ExpertMixture(method.surrogate))
