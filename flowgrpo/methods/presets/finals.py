"""Presets that train what rollouts end with: noised finals, a reward's gradient through the last steps, edits."""

from typing import Any

from flowgrpo.advantages import gae, group, selection, shaping
from flowgrpo.methods import targets
from flowgrpo.methods.method import Method
from flowgrpo.methods.parts import Backprop, Times
from flowgrpo.objectives import forward_process, ratios, reductions, surrogates
from flowgrpo.objectives.kl import GaussianKL, OutputError
from flowgrpo.samplers import kernels, latent_edits, noised_finals, old_policy, plans, reward_gradient


def diffusion_nft(method: Method = Method()) -> Method:
    """DiffusionNFT: good samples pull the velocity at their noised finals, bad ones push it away (2509.16117).

    The old policy lags behind and draws the samples.
    """
    return _forward(method, noised_finals.RandomGridTimes(0.99), surrogate=forward_process.NegativeAware(),
                    lag=old_policy.Lag(slope=0.001, most=0.5), kl=OutputError(1e-4))


def awm(method: Method = Method()) -> Method:
    """AWM: the matching error of noised finals as log-probability, weighted by the advantage (2509.25050).

    The paper divides its advantages by 5: loss and KL weight are five times its own here.
    """
    return _forward(method, noised_finals.GridTimes(every=2, start=1, share=0.9), surrogate=surrogates.Clip(1.0, 1.0),
                    log_ratio=ratios.Matching(0.25), step_weight=reductions.Sigma(),
                    kl=OutputError(0.005))


def dgpo(method: Method = Method()) -> Method:
    """DGPO: noised finals of a group preferred to each other as a whole, against the reference (2510.08425).

    At high noise alone, with one noise per group and time.
    """
    return _forward(method, noised_finals.GridTimes(every=2, share=0.7, shared=True),
                    surrogate=forward_process.GroupPreference(),
                    lag=old_policy.Lag(slope=0.001, most=0.3, draws=False), kl=OutputError(0.001))


def crd(method: Method = Method()) -> Method:
    """CRD: the implicit reward of noised finals, centred in the group, regressed on the reward (2603.14128).

    The old policy lags behind and draws the samples.
    """
    return _forward(method, noised_finals.GridTimes(share=0.99), surrogate=forward_process.CentredReward(),
                    lag=old_policy.Lag(start=0.25, slope=0.005, most=0.999), kl=OutputError(0.05))


def diffusion_dpo(method: Method = Method()) -> Method:
    """Diffusion-DPO: online, the best of a group preferred to its worst, at noised finals (2311.12908)."""
    return _forward(method, noised_finals.Stratified(4), surrogate=forward_process.Preference(),
                    selection=selection.BestWorst(2), kl=OutputError(0.0))


def rpo(method: Method = Method()) -> Method:
    """RPO: recorded pairs of a subject's image and a generated one, labelled anew by a harmonic reward (2407.12164).

    The labels are drawn, and the subject's image is matched whichever it prefers; beta as in the released code.
    """
    return diffusion_dpo(method).having(times=noised_finals.Stratified(4, shared=True),
                                        shaping=shaping.BradleyTerry(),
                                        surrogate=forward_process.Preference(2.0, similarity=1.0))


def _forward(method: Method, times: Times, **parts: Any) -> Method:
    usual = {"plan": plans.NoSteps(), "roots": None, "log_ratio": ratios.Matching(),
             "advantage": group.Advantage(scale="batch", order="rewards"), "step_weight": reductions.Uniform()}
    return method.having(target=targets.NoisedFinals(times), **usual | parts)


def refl(method: Method = Method()) -> Method:
    """ReFL: the reward's gradient through one late step and its prediction of the data (2304.05977, algorithm 1).

    The released code adds the pre-training loss, and weighs this one 1e-3; Adam does not see the weight.
    """
    return _backprop(method, reward_gradient.OneStep()).having(plan=plans.LateStep(0.75),
                                                               surrogate=surrogates.RewardAscent(2.0))


def draft(method: Method = Method()) -> Method:
    """DRaFT-K: the reward's gradient through the last K steps of a deterministic rollout (2309.17400).

    K is the plan's count: 1 here, and as many as there are steps for DRaFT.
    """
    return _backprop(method, reward_gradient.Unroll()).having(plan=plans.LastSteps(1))


def alignprop(method: Method = Method()) -> Method:
    """AlignProp: the reward's gradient through a random number of last steps of ancestral sampling (2310.03739).

    The denoiser is checkpointed, step by step.
    """
    return _backprop(method, reward_gradient.Unroll(checkpointing=True)).having(plan=plans.RandomLast(0.16, 0.1),
                                                                                kernel=kernels.FlowDDIM(1.0))


def _backprop(method: Method, ending: Backprop) -> Method:
    return method.having(target=targets.RewardGradient(ending), kernel=kernels.FlowDDIM(0.0), roots=None,
                         advantage=group.Advantage(scale="group", order="rewards"), log_ratio=ratios.PlainRatio(),
                         surrogate=surrogates.RewardAscent(), step_weight=reductions.Uniform(),
                         kl=GaussianKL(0.0))


def expo(method: Method = Method()) -> Method:
    """EXPO: a small policy edits the final latents of a frozen model, and a critic chooses (2507.07986).

    The edit is trained along the critic's gradient, and samples are the critic's choice of bases and edits. The target
    of the critic is the reward: of one step that is the TD target.
    """
    return method.having(target=targets.LatentEdits(latent_edits.Edit()), kernel=kernels.FlowDDIM(0.0),
                         plan=plans.NoSteps(), roots=None,
                         advantage=group.Advantage(scale="batch", order="rewards"),
                         log_ratio=ratios.PlainRatio(), surrogate=surrogates.ActorCritic(),
                         step_weight=reductions.Uniform(),
                         kl=GaussianKL(0.01), value=gae.Recall())
