"""The named methods: functions from a Method to a Method, which hold what differs.

A new one adds at most one part, one preset and one test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flowgrpo import (
    actor_critic,
    adapted,
    advantages,
    baselines,
    correctness,
    critic,
    curriculum,
    forward_objectives,
    hints,
    knapsack,
    lag,
    layer_tuning,
    length_terms,
    lookahead,
    objectives,
    paired,
    pooled,
    redraws,
    reductions,
    references,
    schedules,
    selection,
    shaping,
    spreads,
    text_groups,
    text_trees,
    text_objectives,
    token_objectives,
)
from flowgrpo.method import Method
from flowgrpo.samplers import (
    backprop,
    chains,
    edits,
    forward,
    kernels,
    noise_net,
    plans,
    preview,
    relaxation,
    solvers,
    tokens,
)


def flow_grpo(method: Method = Method()) -> Method:
    """Flow-GRPO: every step stochastic and trained, KL to the base (2505.05470, sections 4.2 and 5).

    The KL is the full Gaussian one (weight 0.004); the released code divides by 2 g^2 without the step's length and
    uses a weight ten times larger.
    """
    return replace(method, kernel=kernels.FlowSDE(0.7), plan=plans.AllSteps(),
                   advantage=advantages.Advantage(scale="batch", order="rewards"), kl=objectives.GaussianKL(0.004))


def flow_grpo_fast(method: Method = Method()) -> Method:
    """Flow-GRPO-Fast: a random window of two stochastic steps in the first half, no KL (released code).

    The released recipe pairs a clip range of 1e-5 with a log-probability of the CPS kernel that lacks 1/(2 s^2). Ours
    is the true density, whose log-ratio is 1/(2 s^2) times larger; with the Flow-SDE kernel the range stays at 1e-4.
    """
    return replace(method, kernel=kernels.FlowSDE(0.7), plan=plans.Sliding(size=2, order="random", stop=0.5),
                   advantage=advantages.Advantage(scale="batch", order="rewards"), kl=objectives.GaussianKL(0.0))


def dance_grpo(method: Method = Method()) -> Method:
    """DanceGRPO: constant noise, shared initial noise, 60 % of the steps trained, an advantage per reward (2505.07818).

    The released code draws the trained steps per sample; here they are drawn once per epoch, so that a step is one
    batch.
    """
    return replace(method, kernel=kernels.DanceSDE(0.3), plan=plans.RandomSubset(0.6), roots=1,
                   advantage=advantages.Advantage(scale="group", order="advantages"), kl=objectives.GaussianKL(0.0))


def mix_grpo(method: Method = Method()) -> Method:
    """MixGRPO: a sliding window of stochastic, trained steps; the others deterministic (2507.21802, section 3)."""
    return replace(method, kernel=kernels.FlowSDE(0.7), plan=plans.Sliding(size=4, stride=1, every=25),
                   roots=1, advantage=advantages.Advantage(scale="group", order="advantages"),
                   kl=objectives.GaussianKL(0.0))


def mix_grpo_flash(method: Method = Method()) -> Method:
    """MixGRPO-Flash: MixGRPO with DPM-Solver++ 2M on a compressed tail of 40 % of the steps (2507.21802, section 3.3).

    The tail always ends at sigma 0; with one step left the released code stopped above it.
    """
    return replace(mix_grpo(method), solver=solvers.DPMSolver2M(), tail=0.4)


def grpo_guard(method: Method = Method()) -> Method:
    """GRPO-Guard over any host: regulated log-ratio, its own clip range, weights 1/delta-t (2510.22319)."""
    return replace(method, log_ratio=objectives.Guard(), surrogate=objectives.Clip(2e-6, 2e-6),
                   step_weight=objectives.InverseDelta())


def flow_dppo(method: Method = Method()) -> Method:
    """Flow-DPPO over any host: no clip, but no step further away from a policy that is far (2606.11025)."""
    return replace(method, surrogate=objectives.DivergenceMask(1e-5))


def ddpo(method: Method = Method()) -> Method:
    """DDPO: ancestral sampling, every step trained, rewards compared with the prompt's own history (2305.13301)."""
    return replace(method, kernel=kernels.FlowDDIM(1.0), plan=plans.AllSteps(), roots=None,
                   advantage=advantages.Advantage(scale="running", order="rewards"), kl=objectives.GaussianKL(0.0))


def tempflow_grpo(method: Method = Method()) -> Method:
    """TempFlow-GRPO: branches at every step of a deterministic trunk, weighted by the step's noise (2508.04324).

    The branches of one step are compared with each other alone. KL with the deviation of the whole step, 0.004.
    """
    return replace(method, kernel=kernels.FlowSDE(0.7), plan=plans.EachStep(), roots=1,
                   advantage=advantages.Advantage(scale="group", order="rewards"),
                   step_weight=objectives.NoiseLevel(), kl=objectives.GaussianKL(0.004))


def granular_grpo(method: Method = Method()) -> Method:
    """Granular-GRPO (G2RPO): one stochastic step from a shared anchor, scored in three granularities (2510.01982).

    Every branch is finished on the grid and on every second and third of its sigmas, and its advantages are summed; the
    released code has the first two.
    """
    return replace(method, kernel=kernels.FlowSDE(0.7), plan=plans.EachStep(stop=0.5), roots=1, strides=(1, 2, 3),
                   advantage=advantages.Advantage(scale="group", order="advantages"), kl=objectives.GaussianKL(0.0))


def branch_grpo(method: Method = Method()) -> Method:
    """BranchGRPO: a binary tree, whose edges are compared with those of their depth (2509.06040).

    An edge is worth the mean of the pictures below it. The splits are at the paper's places of a grid of 20 steps.
    """
    return replace(method, kernel=kernels.DanceSDE(0.3), plan=plans.Branches(), roots=None,
                   advantage=advantages.Advantage(scale="group", order="advantages"),
                   surrogate=objectives.Clip(1e-3, 1e-3), kl=objectives.GaussianKL(0.0))


def tree_rpo(method: Method = Method()) -> Method:
    """Dynamic-TreeRPO: a binary tree inside of MixGRPO's window, with noise that grows with the depth (2509.23352).

    With LayerTuning: clip bounds that adapt to the advantage, and a supervised term towards the best path. All of it is
    a reconstruction, and the numbers are ours.
    """
    return replace(method, kernel=kernels.FlowSDE(0.7), plan=plans.TreeWindow(plans.Sliding(size=4), growth=0.5),
                   roots=None, advantage=advantages.Advantage(scale="group", order="advantages"),
                   surrogate=layer_tuning.AdaptiveClip(1e-4, 2e-4, 1.0), kl=objectives.GaussianKL(0.0),
                   tuning=layer_tuning.LayerTuning(1e-4))


def pref_grpo(method: Method = Method()) -> Method:
    """Pref-GRPO: a sample's reward is its win rate against the other samples of its group (2508.20751).

    A pairwise judge says who wins (`flowgrpo.judge`), or the larger score of a reward that scores pictures one by one.
    """
    return replace(method, kernel=kernels.FlowSDE(0.7), plan=plans.RandomSubset(0.6), roots=1,
                   shaping=shaping.WinRate(), advantage=advantages.Advantage(scale="group", order="advantages"),
                   kl=objectives.GaussianKL(0.0))


def b2_diffurl(method: Method = Method()) -> Method:
    """B2-DiffuRL: a trained interval that grows from the end, and of its branches the extremes (2503.11240).

    Ancestral sampling, branches where the interval begins, and of every branch group its best and its worst where they
    stand out from the prompt's history.
    """
    return replace(method, kernel=kernels.FlowDDIM(1.0), plan=plans.GrowingTail(branch=4), roots=None,
                   advantage=advantages.Advantage(scale="running", order="rewards"),
                   selection=selection.Extremes(-0.5, 0.5, branch=4), surrogate=objectives.Clip(0.1, 0.1),
                   kl=objectives.GaussianKL(0.0))


def sol_rl(method: Method = Method()) -> Method:
    """Sol-RL over a host: a rollout from the noises whose cheap previews scored best and worst (2604.06916).

    The host's samples each start from a noise of their own and do not branch. As published: sol_rl+diffusion_nft.
    """
    return replace(method, preview=preview.Preview(pool=48, steps=4), roots=None)


def grpo(method: Method = Method()) -> Method:
    """GRPO: every token clipped for itself, the mean of completions' means, k3 KL to the base (2402.03300)."""
    return replace(method, kernel=tokens.Decoding(), roots=None, shaping=shaping.AsIs(),
                   advantage=advantages.Advantage(scale="group", order="rewards", clamp=math.inf),
                   selection=selection.All(), log_ratio=objectives.PlainRatio(), surrogate=objectives.Clip(0.2, 0.2),
                   reduction=reductions.PerRow(), kl=objectives.SampledKL(0.04, "k3"))


def dr_grpo(method: Method = Method()) -> Method:
    """Dr.GRPO: no division by deviation or length, which favour easy prompts and long failures (2503.20783)."""
    return replace(grpo(method), advantage=advantages.Advantage(scale="none", order="rewards", clamp=math.inf),
                   reduction=reductions.RowSums(budgeted=True), kl=objectives.SampledKL(0.0))


def dapo(method: Method = Method()) -> Method:
    """DAPO: a higher upper clip, the mean over tokens, groups that agree left out, overlong tails punished
    (2503.14476)."""
    return replace(grpo(method), shaping=shaping.Overlong(0.2), selection=selection.DropZeroVariance(),
                   surrogate=objectives.Clip(0.2, 0.28), reduction=reductions.PerDecision(),
                   kl=objectives.SampledKL(0.0))


def gspo(method: Method = Method()) -> Method:
    """GSPO: one ratio for a whole completion, its likelihood ratio per token (2507.18071)."""
    return replace(grpo(method), log_ratio=objectives.SequenceRatio(), surrogate=objectives.Clip(3e-4, 4e-4),
                   kl=objectives.SampledKL(0.0))


def cispo(method: Method = Method()) -> Method:
    """CISPO: bounded importance weights in place of a clip, so that every token keeps its gradient (2506.13585)."""
    return replace(grpo(method), surrogate=objectives.Truncated(1.0, 4.0), reduction=reductions.PerDecision(),
                   kl=objectives.SampledKL(0.0))


def rloo(method: Method = Method()) -> Method:
    """RLOO: REINFORCE on whole completions, each compared with the mean of the others (2402.14740)."""
    return replace(grpo(method), surrogate=objectives.Reinforce(), reduction=reductions.RowSums(),
                   advantage=advantages.Advantage(scale="leave_one_out", order="rewards", clamp=math.inf),
                   kl=objectives.SampledKL(0.0))


def reinforce_pp(method: Method = Method()) -> Method:
    """REINFORCE++ with a baseline: rewards less their group's mean, normalised over the batch; k2 KL (2501.03262)."""
    return replace(grpo(method), advantage=advantages.Advantage(scale="none", order="gdpo", clamp=math.inf),
                   reduction=reductions.PerDecision(), kl=objectives.SampledKL(1e-3, "k2"))


def remax(method: Method = Method()) -> Method:
    """ReMax: REINFORCE on whole completions, each compared with the prompt's greedy one (2310.10505)."""
    return replace(rloo(method), kernel=tokens.Decoding(greedy=1), advantage=baselines.First(),
                   selection=selection.ButFirst())


def diffusion_nft(method: Method = Method()) -> Method:
    """DiffusionNFT: good samples pull the velocity at their noised finals, bad ones push it away (2509.16117).

    The old policy lags behind and draws the samples.
    """
    return _forward(method, forward.GridTimes(share=0.99), surrogate=forward_objectives.NegativeAware(),
                    lag=lag.Lag(slope=0.001, most=0.5), kl=objectives.OutputError(1e-4))


def awm(method: Method = Method()) -> Method:
    """AWM: the matching error of noised finals as log-probability, weighted by the advantage (2509.25050).

    The paper divides its advantages by 5: loss and KL weight are five times its own here.
    """
    return _forward(method, forward.GridTimes(every=2, start=1, share=0.9), surrogate=objectives.Clip(1.0, 1.0),
                    log_ratio=forward_objectives.Matching(0.25), step_weight=objectives.Sigma(),
                    kl=objectives.OutputError(0.005))


def dgpo(method: Method = Method()) -> Method:
    """DGPO: noised finals of a group preferred to each other as a whole, against the reference (2510.08425).

    At high noise alone, with one noise per group and time.
    """
    return _forward(method, forward.GridTimes(every=2, share=0.7, shared=True),
                    surrogate=forward_objectives.GroupPreference(),
                    lag=lag.Lag(slope=0.001, most=0.3, draws=False), kl=objectives.OutputError(0.001))


def crd(method: Method = Method()) -> Method:
    """CRD: the implicit reward of noised finals, centred in the group, regressed on the reward (2603.14128).

    The old policy lags behind and draws the samples.
    """
    return _forward(method, forward.GridTimes(share=0.99), surrogate=forward_objectives.CentredReward(),
                    lag=lag.Lag(start=0.25, slope=0.005, most=0.999), kl=objectives.OutputError(0.05))


def diffusion_dpo(method: Method = Method()) -> Method:
    """Diffusion-DPO: online, the best of a group preferred to its worst, at noised finals (2311.12908)."""
    return _forward(method, forward.Stratified(4), surrogate=forward_objectives.Preference(),
                    selection=selection.BestWorst(2), kl=objectives.OutputError(0.0))


def _forward(method: Method, times: Any, **parts: Any) -> Method:
    """A method of noised finals: rollouts without noise, each from its own, and what `parts` say."""
    usual = {"plan": plans.NoSteps(), "roots": None, "log_ratio": forward_objectives.Matching(), "lag": lag.Lag(),
             "advantage": advantages.Advantage(scale="batch", order="rewards"), "step_weight": objectives.Uniform()}
    return replace(method, times=times, **usual | parts)


def refl(method: Method = Method()) -> Method:
    """ReFL: the reward's gradient through one late step and its prediction of the data (2304.05977, algorithm 1).

    The released code adds the pre-training loss, and weighs this one 1e-3; Adam does not see the weight.
    """
    return replace(_backprop(method, backprop.OneStep()), plan=plans.LateStep(0.75), surrogate=objectives.Ascent(2.0))


def draft(method: Method = Method()) -> Method:
    """DRaFT-K: the reward's gradient through the last K steps of a deterministic rollout (2309.17400).

    K is the plan's count: 1 here, and as many as there are steps for DRaFT.
    """
    return replace(_backprop(method, backprop.Unroll()), plan=plans.LastSteps(1))


def alignprop(method: Method = Method()) -> Method:
    """AlignProp: the reward's gradient through a random number of last steps of ancestral sampling (2310.03739).

    The denoiser is checkpointed, step by step.
    """
    return replace(_backprop(method, backprop.Unroll(checkpointing=True)), plan=plans.RandomLast(0.16, 0.1),
                   kernel=kernels.FlowDDIM(1.0))


def _backprop(method: Method, ending: Any) -> Method:
    """A method that follows the reward's gradient, on a deterministic rollout; what compares samples is not read."""
    return replace(method, backprop=ending, kernel=kernels.FlowDDIM(0.0), roots=None, strides=(1,), tail=1.0,
                   advantage=advantages.Advantage(scale="group", order="rewards"), log_ratio=objectives.PlainRatio(),
                   surrogate=objectives.Ascent(), step_weight=objectives.Uniform(), kl=objectives.GaussianKL(0.0),
                   tuning=layer_tuning.LayerTuning())


def trace_rl(method: Method = Method()) -> Method:
    """TraceRL: of a masked language model, every token's ratio in the state of its own decoding step (2509.06949)."""
    return replace(grpo(method), kernel=tokens.Unmasking(), selection=selection.DropZeroVariance(),
                   reduction=reductions.PerDecision(), kl=objectives.SampledKL(0.01, "k3"), reference=references.Old())


def rpo(method: Method = Method()) -> Method:
    """RPO: recorded pairs of a subject's picture and a drawn one, labelled anew by a harmonic reward (2407.12164).

    The labels are drawn, and the subject's picture is matched whichever it prefers; beta as in the released code.
    """
    return replace(diffusion_dpo(method), times=forward.Stratified(4, shared=True), shaping=shaping.BradleyTerry(),
                   surrogate=forward_objectives.Preference(2.0, similarity=1.0))


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


def grpo_lambda(method: Method = Method()) -> Method:
    """GRPO-lambda: right answers earn less the longer they are, in groups that are mostly right (2505.18086)."""
    return replace(grpo(method), shaping=length_terms.LengthSwitch(), kl=objectives.SampledKL(0.0))


def spo_chain(method: Method = Method()) -> Method:
    """SPO-chain: every segment's own advantage, by continuations from where it begins and ends (2505.23564)."""
    return replace(grpo(method), spread=spreads.SegmentChain(), reduction=reductions.PerDecision(),
                   kl=objectives.SampledKL(1e-4, "k3"))


def spo_tree(method: Method = Method()) -> Method:
    """SPO-tree: a tree of completions, whose segments are compared with what else went on from there (2505.23564)."""
    return replace(spo_chain(method), draws=text_trees.Tree(), spread=spreads.SegmentTree())


def gigpo(method: Method = Method()) -> Method:
    """GiGPO: steps that begin in the same state are compared too, beside whole completions (2505.10978)."""
    return replace(grpo(method), spread=spreads.StepGroups(), kl=objectives.SampledKL(0.01, "k3"))


def s_grpo(method: Method = Method()) -> Method:
    """S-GRPO: one thought left at several places; of right answers the earlier ones earn more (2505.07686)."""
    return replace(grpo(method), draws=text_groups.Serial(), shaping=length_terms.ExitDecay(),
                   kl=objectives.SampledKL(0.0))


def knapsack_rl(method: Method = Method()) -> Method:
    """Knapsack RL over any host: more groups for prompts from which more is to be learned (2509.25849)."""
    return replace(method, curriculum=knapsack.Knapsack(), advantage=pooled.Pooled())


def latr(method: Method = Method()) -> Method:
    """LATR: completions that branch where the model wavers, and stay where they go apart (2510.24302)."""
    return replace(grpo(method), draws=lookahead.Lookahead(), kl=objectives.SampledKL(0.0))


def scaf_grpo(method: Method = Method()) -> Method:
    """Scaf-GRPO over any host: groups that all fail are sampled again with hints, one more each time (2510.19807)."""
    return replace(method, redraw=hints.Hints(after=0.15))


def ghpo(method: Method = Method()) -> Method:
    """GHPO over any host: groups that all fail are sampled again with more and more of the solution (2507.10628)."""
    told = "{prompt}\n\nThe solution begins like this, go on from there: {hint}"
    return replace(method, redraw=hints.Hints((0.25, 0.5, 0.75), text=told))


def reinflow(method: Method = Method()) -> Method:
    """ReinFlow: noise that a network learns beside the flow, and one ratio for a sample's whole chain (2505.22094).

    Advantages are those of the group, in place of the paper's critic; its entropy bonus is left out.
    """
    return replace(method, kernel=noise_net.LearnedNoise(), plan=plans.AllSteps(), roots=None, chain=chains.Joint(),
                   advantage=advantages.Advantage(scale="batch", order="rewards"), log_ratio=objectives.PlainRatio(),
                   surrogate=objectives.Clip(1e-3, 1e-3), step_weight=objectives.Uniform(),
                   kl=objectives.GaussianKL(0.0))


def ppo(method: Method = Method()) -> Method:
    """PPO: advantages per token by GAE, from a value model beside the policy; a clip and no KL (1707.06347)."""
    return replace(grpo(method), value=critic.ValueHead(decay=0.95), advantage=baselines.NoBaseline(),
                   reduction=reductions.PerDecision(), kl=objectives.SampledKL(0.0))


def trace_rl_value(method: Method = Method()) -> Method:
    """TraceRL with its value model: advantages per token, by GAE over the steps of a trace (2509.06949)."""
    return replace(trace_rl(method), value=critic.ValueHead(), advantage=baselines.NoBaseline())


def drakes(method: Method = Method()) -> Method:
    """DRAKES: a differentiable reward's gradient through the unmasking of an answer, by Gumbel-softmax (2410.13643).

    Less the KL of the process to the base model's.
    """
    return replace(_backprop(method, relaxation.GumbelSoftmax()), kernel=tokens.Unmasking(order="random"),
                   shaping=shaping.AsIs(), selection=selection.All(), reduction=reductions.PerDecision(),
                   kl=objectives.SampledKL(0.0), reference=references.Base())


def topr(method: Method = Method()) -> Method:
    """TOPR: REINFORCE whose bad samples count by their ratio, at most 1, and good ones fully (2503.14286)."""
    return replace(rloo(method), log_ratio=text_objectives.CompletionRatio(), surrogate=text_objectives.Tapered(),
                   advantage=advantages.Advantage(scale="none", order="rewards", clamp=math.inf))


def nft(method: Method = Method()) -> Method:
    """NFT for text: likelihood of right completions, and of wrong ones under an implicit policy (2505.18116)."""
    return replace(grpo(method), advantage=correctness.Correctness(), selection=selection.DropZeroVariance(),
                   surrogate=text_objectives.ImplicitNegative(), reduction=reductions.PerDecision(),
                   kl=objectives.SampledKL(0.0))


def disco(method: Method = Method()) -> Method:
    """DisCO: scores of right completions above those of wrong ones, in a trust region (2505.12366)."""
    return replace(grpo(method), advantage=correctness.Correctness(), surrogate=text_objectives.Discriminative(),
                   kl=objectives.SampledKL(0.0))


def reg_grpo(method: Method = Method()) -> Method:
    """Reg-GRPO: the advantage regressed on the standardised log-ratio, without a clip (2506.07464)."""
    return replace(grpo(method), log_ratio=text_objectives.CompletionRatio(), surrogate=text_objectives.Regressed(),
                   reduction=reductions.RowSums(), kl=objectives.SampledKL(0.0))


def trpa(method: Method = Method()) -> Method:
    """TRPA: every better completion of a group preferred to every worse one, near the old policy (2504.04524)."""
    return replace(grpo(method), surrogate=text_objectives.Levels(), kl=objectives.SampledKL(0.0),
                   advantage=advantages.Advantage(scale="none", order="rewards", clamp=math.inf))


def w_reinforce(method: Method = Method()) -> Method:
    """W-REINFORCE: wrong completions pushed down, right ones pulled up a tenth as strongly (2506.01347)."""
    return replace(grpo(method), advantage=correctness.Signed(0.1, 1.0), reduction=reductions.PerDecision(),
                   kl=objectives.SampledKL(0.0))


def entropy_bonus(method: Method = Method()) -> Method:
    """An entropy bonus over a host of language models, GRPO without one (1707.06347, equation 9)."""
    method = method if method.for_tokens else grpo(method)
    return replace(method, surrogate=token_objectives.EntropyBonus(method.surrogate, 0.01))


def high_entropy(method: Method = Method()) -> Method:
    """The fifth of tokens of the largest entropies, over a host of language models, DAPO without one (2506.01939)."""
    method = method if method.for_tokens else dapo(method)
    return replace(method, surrogate=token_objectives.HighEntropy(method.surrogate, 0.2))


def gtpo(method: Method = Method()) -> Method:
    """GTPO: tokens that good and bad completions share are not pushed down, and pulled up twice (2508.03772)."""
    return replace(grpo(method), surrogate=token_objectives.Conflicts(), kl=objectives.SampledKL(0.0))


def llds(method: Method = Method()) -> Method:
    """LLDS over a host of language models, GRPO without one: good completions stay as likely (2512.04220)."""
    method = method if method.for_tokens else grpo(method)
    return replace(method, surrogate=token_objectives.LikelihoodKept(method.surrogate, 0.1))


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
    return replace(method, surrogate=token_objectives.ExpertMixture(method.surrogate))


def rlcm(method: Method = Method()) -> Method:
    """RLCM: the steps of a consistency model's multistep sampling, all of their noise fresh, trained like DDPO's
    (2404.03673)."""
    return replace(ddpo(method), kernel=kernels.CPS(1.0), surrogate=objectives.Clip(1e-4, 1e-4),
                   advantage=advantages.Advantage(scale="running", order="rewards", clamp=10.0))


def expo(method: Method = Method()) -> Method:
    """EXPO: a small policy edits the final latents of a frozen model, and a critic chooses (2507.07986).

    The edit is trained by policy gradient, each against its own base, in place of the critic's gradient.
    """
    return replace(method, edit=edits.Edit(), kernel=kernels.FlowDDIM(0.0), plan=plans.NoSteps(), roots=None,
                   strides=(1,), tail=1.0, advantage=paired.Paired(), log_ratio=objectives.PlainRatio(),
                   surrogate=actor_critic.ActorCritic(), step_weight=objectives.Uniform(),
                   kl=objectives.GaussianKL(0.01), tuning=layer_tuning.LayerTuning(), lag=lag.Lag(),
                   times=forward.Recorded(), backprop=None, preview=None)


PRESETS: dict[str, Callable[..., Method]] = {
    preset.__name__: preset for preset in (
        flow_grpo, flow_grpo_fast, dance_grpo, ddpo, mix_grpo, mix_grpo_flash, grpo_guard, flow_dppo, tempflow_grpo,
        granular_grpo, branch_grpo, tree_rpo, pref_grpo, b2_diffurl, sol_rl, diffusion_nft, awm, dgpo, crd,
        diffusion_dpo, refl, draft, alignprop, grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce_pp, remax,
        trace_rl, rpo, texforce, grpo_lambda, spo_chain, gigpo, dynamic_sampling, mopps, s_grpo, scaf_grpo, ghpo,
        spo_tree, knapsack_rl, reinflow, latr, drakes, trace_rl_value, ppo, topr, nft, disco, reg_grpo, trpa,
        w_reinforce, entropy_bonus, high_entropy, gtpo, llds, kdrl, visurf, rl_plus, rlcm, expo)}


def suited(process: str) -> list[str]:
    """The presets for a process, such as "tokens"."""
    return [name for name, make in PRESETS.items() if make().fits(process)]
