"""Presets that modify one thing of a base method: `mix_grpo+grpo_guard`."""

from dataclasses import replace
from typing import Any

from flowgrpo import domains
from flowgrpo.advantages import baselines, group
from flowgrpo.curriculum import order, resampling
from flowgrpo.methods import groups
from flowgrpo.methods.method import Method
from flowgrpo.objectives import ratios, reductions, references, surrogates
from flowgrpo.objectives.kl import Linear, SampledKL
from flowgrpo.samplers.preview import Preview


def grpo_guard(method: Method = Method()) -> Method:
    """GRPO-Guard over any base method: regulated log-ratio, its own clip range, weights 1/delta-t (2510.22319)."""
    return method.having(log_ratio=ratios.Guard(), surrogate=surrogates.Clip(2e-6, 2e-6),
                         step_weight=reductions.InverseDelta())


def flow_dppo(method: Method = Method()) -> Method:
    """Flow-DPPO over any base method: no clip, but no step further away from a policy that is far (2606.11025)."""
    return method.having(surrogate=surrogates.DivergenceMask(1e-5))


def sol_rl(method: Method = Method()) -> Method:
    """Sol-RL over a base method: a rollout from the noises whose cheap previews scored best and worst (2604.06916).

    Every sample starts from a noise of its own and does not branch. As published: sol_rl+diffusion_nft.
    """
    return method.having(preview=Preview(pool=96, steps=6), roots=None)


def texforce(method: Method = Method()) -> Method:
    """TexForce over any base method: a LoRA of the text encoders in place of the denoiser's (2311.15657).

    As published: ddpo+texforce. Both together: parts: {adapted: {denoisers: true}}.
    """
    return method.having(adapted=groups.Adapted(denoisers=False, encoders=True))


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


def kdrl(method: Method = Method()) -> Method:
    """KDRL over any base method, GRPO without one: the reward, and a KL to a teacher that fades (2506.02208).

    The teacher is `reference.model`.
    """
    if method == Method():
        method = domains.sampled_by("tokens").base_method(method)
    kl: Any = SampledKL(0.0, "k2") if method.for_tokens else method.loss.kl
    return method.having(kl=replace(kl, weight=5e-3, schedule=Linear(1e-3)), reference=references.Teacher())


def diffusion_opd(method: Method = Method()) -> Method:
    """DiffusionOPD over any base method: no reward, and a KL to the teacher of each prompt's source (2605.15055).

    The teachers are `reference.models`.
    """
    kl: Any = SampledKL(0.0, "k2") if method.for_tokens else method.loss.kl
    return method.having(kl=replace(kl, weight=1.0), reference=references.Teachers(),
                         advantage=baselines.Unrewarded())
