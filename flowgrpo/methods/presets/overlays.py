"""Presets that modify one thing of a base method: `mix_grpo+grpo_guard`.

Without a base method, those of language models modify GRPO or DAPO.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flowgrpo import objectives
from flowgrpo.advantages import group
from flowgrpo.curriculum import order, resampling
from flowgrpo.methods import adapted, data_sources, supervised
from flowgrpo.methods.method import Method
from flowgrpo.objectives import balance, references, schedules, supervised_weights
from flowgrpo.samplers import preview
from flowgrpo.text.credit import expert_reward
from flowgrpo.text.losses import token_losses
from flowgrpo.text.presets.completions import dapo, grpo


def grpo_guard(method: Method = Method()) -> Method:
    """GRPO-Guard over any base method: regulated log-ratio, its own clip range, weights 1/delta-t (2510.22319)."""
    return method.having(log_ratio=objectives.Guard(), surrogate=objectives.Clip(2e-6, 2e-6),
                         step_weight=objectives.InverseDelta())


def flow_dppo(method: Method = Method()) -> Method:
    """Flow-DPPO over any base method: no clip, but no step further away from a policy that is far (2606.11025)."""
    return method.having(surrogate=objectives.DivergenceMask(1e-5))


def sol_rl(method: Method = Method()) -> Method:
    """Sol-RL over a base method: a rollout from the noises whose cheap previews scored best and worst (2604.06916).

    Every sample starts from a noise of its own and does not branch. As published: sol_rl+diffusion_nft.
    """
    return method.having(preview=preview.Preview(pool=96, steps=6), roots=None)


def texforce(method: Method = Method()) -> Method:
    """TexForce over any base method: a LoRA of the text encoders in place of the denoiser's (2311.15657).

    As published: ddpo+texforce. Both together: parts: {adapted: {denoisers: true}}.
    """
    return method.having(adapted=adapted.Adapted(denoisers=False, encoders=True))


def dynamic_sampling(method: Method = Method()) -> Method:
    """DAPO's dynamic sampling over any base method: groups that agree are replaced by fresh prompts (2503.14476).

    As published: dapo+dynamic_sampling.
    """
    return method.having(redraw=resampling.DynamicSampling())


def mopps(method: Method = Method()) -> Method:
    """MoPPS over any base method: prompts whose success rate is probably near 1/2, by Beta posteriors (2507.04632)."""
    return method.having(curriculum=order.ThompsonSampling())


def knapsack_rl(method: Method = Method()) -> Method:
    """Knapsack RL over any base method: more groups for prompts from which more is to be learned (2509.25849)."""
    return method.having(curriculum=order.Knapsack(), advantage=group.Pooled())


def scaf_grpo(method: Method = Method()) -> Method:
    """Scaf-GRPO over any base method: groups that all fail are resampled with one more hint each time (2510.19807)."""
    return method.having(redraw=resampling.Hints(after=0.15))


def ghpo(method: Method = Method()) -> Method:
    """GHPO over any base method: groups that all fail are resampled with more and more of the solution (2507.10628)."""
    template = "{prompt}\n\nThe solution begins like this, go on from there: {hint}"
    return method.having(redraw=resampling.Hints((0.25, 0.5, 0.75), text=template))


def entropy_bonus(method: Method = Method()) -> Method:
    """Entropy bonus over a base method of language models, GRPO without one (1707.06347, equation 9)."""
    method = method if method.for_tokens else grpo(method)
    return method.having(surrogate=token_losses.EntropyBonus(method.loss.surrogate, 0.01))


def high_entropy(method: Method = Method()) -> Method:
    """High-entropy tokens over a base method of language models, DAPO without one: the fifth with the largest entropy
    (2506.01939)."""
    method = method if method.for_tokens else dapo(method)
    return method.having(surrogate=token_losses.HighEntropy(method.loss.surrogate, 0.2))


def llds(method: Method = Method()) -> Method:
    """LLDS over a base method of language models, GRPO without one: good completions stay as likely (2512.04220)."""
    method = method if method.for_tokens else grpo(method)
    return method.having(surrogate=token_losses.LikelihoodFloor(method.loss.surrogate, 0.1))


def kdrl(method: Method = Method()) -> Method:
    """KDRL over any base method, GRPO of texts without one: the reward, and a KL to a teacher that fades (2506.02208).

    The teacher is `reference.model`.
    """
    method = grpo(method) if method == Method() else method
    kl: Any = objectives.SampledKL(0.0, "k2") if method.for_tokens else method.loss.kl
    return method.having(kl=replace(kl, weight=5e-3, schedule=schedules.Linear(1e-3)), reference=references.Teacher())


def visurf(method: Method = Method()) -> Method:
    """ViSurf over a base method of causal language models, GRPO without one: the prompt's own answer joins its group,
    with a controlled reward (2510.10606)."""
    method = _with_answer(method)
    return method.having(shaping=expert_reward.ExpertReward(shaping=method.credit.shaping))


def rl_plus(method: Method = Method()) -> Method:
    """RL-PLUS: ViSurf's answer in its group, with a ratio to the mixture of both policies (2508.00222)."""
    method = _with_answer(method)
    return method.having(surrogate=token_losses.ExpertMixture(method.loss.surrogate))


def chord(method: Method = Method()) -> Method:
    """CHORD over a base method of causal language models, GRPO without one: cross-entropy of answers added to the loss,
    its weight rising and falling, uncertain tokens first (2508.11408)."""
    method = method if method.for_tokens else grpo(method)
    return method.having(data=supervised.NextToken(balance=balance.WarmupCosine(),
                                                   token_weight=supervised_weights.Uncertain()))


def relift(method: Method = Method()) -> Method:
    """ReLIFT over a base method of causal language models, GRPO without one: prompts that all samples fail are kept
    with their answers for a supervised step (2506.07527)."""
    method = method if method.for_tokens else grpo(method)
    return method.having(data=supervised.NextToken(source=data_sources.PassRate(solved=False), apart=True))


def _with_answer(method: Method) -> Method:
    method = method if method.for_tokens else grpo(method)
    return method.having(decoding=replace(method.generation.decoding, expert=1))
