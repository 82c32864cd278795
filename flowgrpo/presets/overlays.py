"""Presets that change one thing of any host: `mix_grpo+grpo_guard`."""

from __future__ import annotations

from dataclasses import replace

from flowgrpo import objectives
from flowgrpo.method import Method
from flowgrpo.parts import adapted, curriculum, hints, knapsack, pooled, redraws
from flowgrpo.samplers import preview


def grpo_guard(method: Method = Method()) -> Method:
    """GRPO-Guard over any host: regulated log-ratio, its own clip range, weights 1/delta-t (2510.22319)."""
    return replace(method, log_ratio=objectives.Guard(), surrogate=objectives.Clip(2e-6, 2e-6),
                   step_weight=objectives.InverseDelta())


def flow_dppo(method: Method = Method()) -> Method:
    """Flow-DPPO over any host: no clip, but no step further away from a policy that is far (2606.11025)."""
    return replace(method, surrogate=objectives.DivergenceMask(1e-5))


def sol_rl(method: Method = Method()) -> Method:
    """Sol-RL over a host: a rollout from the noises whose cheap previews scored best and worst (2604.06916).

    The host's samples each start from a noise of their own and do not branch. As published: sol_rl+diffusion_nft.
    """
    return replace(method, preview=preview.Preview(pool=96, steps=6), roots=None)


def texforce(method: Method = Method()) -> Method:
    """TexForce over any host: a LoRA of the text encoders in place of the denoiser's (2311.15657).

    As published: ddpo+texforce. Both together: parts: {adapted: {denoisers: true}}.
    """
    return replace(method, adapted=adapted.Adapted(denoisers=False, encoders=True))


def dynamic_sampling(method: Method = Method()) -> Method:
    """DAPO's dynamic sampling over any host: groups that agree are replaced by fresh prompts (2503.14476).

    As published: dapo+dynamic_sampling.
    """
    return replace(method, redraw=redraws.Refill())


def mopps(method: Method = Method()) -> Method:
    """MoPPS over any host: prompts whose success rate is probably near 1/2, by Beta posteriors (2507.04632)."""
    return replace(method, curriculum=curriculum.Posterior())


def knapsack_rl(method: Method = Method()) -> Method:
    """Knapsack RL over any host: more groups for prompts from which more is to be learned (2509.25849)."""
    return replace(method, curriculum=knapsack.Knapsack(), advantage=pooled.Pooled())


def scaf_grpo(method: Method = Method()) -> Method:
    """Scaf-GRPO over any host: groups that all fail are sampled again with hints, one more each time (2510.19807)."""
    return replace(method, redraw=hints.Hints(after=0.15))


def ghpo(method: Method = Method()) -> Method:
    """GHPO over any host: groups that all fail are sampled again with more and more of the solution (2507.10628)."""
    told = "{prompt}\n\nThe solution begins like this, go on from there: {hint}"
    return replace(method, redraw=hints.Hints((0.25, 0.5, 0.75), text=told))
