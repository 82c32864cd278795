"""Presets of language models: causal and masked."""

import math

from flowgrpo.advantages import baselines, gae, group, selection, shaping, token_credit, trackers
from flowgrpo.methods import supervised
from flowgrpo.methods.method import Method
from flowgrpo.objectives import ratios, reductions, references, sequence_losses, surrogates
from flowgrpo.objectives.kl import SampledKL
from flowgrpo.objectives.supervised import FixedWeights
from flowgrpo.objectives.surrogates import SoftGate
from flowgrpo.text import credit, losses, targets
from flowgrpo.text.samplers import decoding, groups, lookahead
from flowgrpo.text.targets import TextGeneration

CENTRED = group.Advantage(scale="none", order="rewards", clamp=math.inf)  # the reward less its group's mean
NO_KL = SampledKL(0.0)

def grpo(method: Method = Method()) -> Method:
    """GRPO: every token clipped for itself, the mean of completions' means, k3 KL to the base (2402.03300)."""
    rollout = method.rollout if method.for_tokens else TextGeneration()
    return method.having(rollout=rollout, target=targets.Completions(), decoding=decoding.Decoding(),
                         shaping=None, selection=None,
                         advantage=group.Advantage(scale="group", order="rewards", clamp=math.inf),
                         log_ratio=ratios.PlainRatio(), surrogate=surrogates.Clip(0.2, 0.2),
                         reduction=reductions.SequenceMean(), kl=SampledKL(0.04, "k3"))


def dr_grpo(method: Method = Method()) -> Method:
    """Dr.GRPO: no division by std or length, which favour easy prompts and long failures (2503.20783)."""
    return grpo(method).having(advantage=CENTRED, reduction=reductions.SequenceSum(budgeted=True), kl=NO_KL)


def dapo(method: Method = Method()) -> Method:
    """DAPO: a higher upper clip, the mean over tokens, groups that agree left out, overlong tails punished
    (2503.14476)."""
    return grpo(method).having(shaping=shaping.Overlong(0.2), selection=selection.DropZeroVariance(),
                               surrogate=surrogates.Clip(0.2, 0.28), reduction=reductions.TokenMean(), kl=NO_KL)


def dcpo(method: Method = Method()) -> Method:
    """DCPO: a clip that is wider for unlikely tokens, advantages smoothed with their prompt's history (2509.02333)."""
    return grpo(method).having(advantage=trackers.SmoothStandardised(), surrogate=surrogates.DynamicClip(0.16, 0.2),
                               kl=NO_KL)


def gspo(method: Method = Method()) -> Method:
    """GSPO: one ratio for a whole completion, its likelihood ratio per token (2507.18071)."""
    return grpo(method).having(log_ratio=ratios.SequenceRatio(), surrogate=surrogates.Clip(3e-4, 4e-4), kl=NO_KL)


def sapo(method: Method = Method()) -> Method:
    """SAPO: a soft gate in place of the clip, which fades faster for bad completions (2511.20347)."""
    return grpo(method).having(surrogate=SoftGate(), kl=NO_KL)


def cispo(method: Method = Method()) -> Method:
    """CISPO: bounded importance weights in place of a clip, so that every token keeps its gradient (2506.13585)."""
    return grpo(method).having(surrogate=surrogates.TruncatedIS(1.0, 4.0), reduction=reductions.TokenMean(), kl=NO_KL)


def rloo(method: Method = Method()) -> Method:
    """RLOO: REINFORCE on whole completions, each compared with the mean of the others (2402.14740)."""
    return grpo(method).having(surrogate=surrogates.Reinforce(), reduction=reductions.SequenceSum(),
                               advantage=group.Advantage(scale="leave_one_out", order="rewards", clamp=math.inf),
                               kl=NO_KL)


def reinforce_pp(method: Method = Method()) -> Method:
    """REINFORCE++ with a baseline: rewards less their group's mean, normalised over the batch; k2 KL (2501.03262)."""
    return grpo(method).having(advantage=group.Advantage(scale="none", order="gdpo", clamp=math.inf),
                               reduction=reductions.TokenMean(), kl=SampledKL(1e-3, "k2"))


def remax(method: Method = Method()) -> Method:
    """ReMax: REINFORCE on whole completions, each compared with the prompt's greedy one (2310.10505)."""
    return rloo(method).having(decoding=decoding.Decoding(greedy=1), advantage=baselines.First(),
                               selection=selection.ButFirst())


def ppo(method: Method = Method()) -> Method:
    """PPO: advantages per token by GAE, from a value model beside the policy; a clip and no KL (1707.06347)."""
    return grpo(method).having(value=gae.ValueHead(decay=0.95), advantage=baselines.NoBaseline(),
                               reduction=reductions.TokenMean(), kl=NO_KL)


def topr(method: Method = Method()) -> Method:
    """TOPR: REINFORCE whose bad samples count by their ratio, at most 1, and good ones fully (2503.14286)."""
    return rloo(method).having(log_ratio=ratios.CompletionRatio(), surrogate=sequence_losses.TaperedReinforce(),
                               advantage=CENTRED)


def nft(method: Method = Method()) -> Method:
    """NFT for text: likelihood of right completions, and of wrong ones under an implicit policy (2505.18116)."""
    return grpo(method).having(advantage=baselines.Correctness(), selection=selection.DropZeroVariance(),
                               surrogate=sequence_losses.NegativeAwareText(), reduction=reductions.TokenMean(),
                               kl=NO_KL)


def disco(method: Method = Method()) -> Method:
    """DisCO: scores of right completions above those of wrong ones, in a trust region (2505.12366)."""
    return grpo(method).having(advantage=baselines.Correctness(), surrogate=sequence_losses.Discriminative(), kl=NO_KL)


def reg_grpo(method: Method = Method()) -> Method:
    """Reg-GRPO: the advantage regressed on the standardised log-ratio, without a clip (2506.07464)."""
    return grpo(method).having(log_ratio=ratios.CompletionRatio(), surrogate=sequence_losses.Regressed(),
                               reduction=reductions.SequenceSum(), kl=NO_KL)


def real(method: Method = Method()) -> Method:
    """REAL: rewards are labels, the log-ratios of a group's completions the logits beside an anchor (2602.05630)."""
    return grpo(method).having(advantage=baselines.NoBaseline(), surrogate=losses.RewardLabels("anchor", 10.0),
                               kl=NO_KL)


def pacs(method: Method = Method()) -> Method:
    """PACS: cross-entropy of the rewards under each log-ratio less that of the others (2509.02522)."""
    return real(method).having(surrogate=losses.RewardLabels("leave_one_out", 1.0, reference=True),
                               log_ratio=ratios.CompletionRatio(), reduction=reductions.SequenceSum())


def rover(method: Method = Method()) -> Method:
    """ROVER: log-ratios regressed on the values of the uniformly random policy, which keep all ways (2509.24981)."""
    return grpo(method).having(advantage=CENTRED, surrogate=losses.RandomPolicyValue(),
                               reduction=reductions.TokenMean(), kl=NO_KL)


def sdpo(method: Method = Method()) -> Method:
    """SDPO: the policy that reads a right completion of its group teaches the policy that does not (2601.20802)."""
    return grpo(method).having(surrogate=surrogates.KLOnly(), reduction=reductions.TokenMean(),
                               kl=SampledKL(1.0, "k2"), reference=references.SelfTeacher())


def dpo(method: Method = Method()) -> Method:
    """DPO: the chosen completion of a recorded pair preferred to the rejected one, against the base model (2305.18290).

    Online, without `preferences`, the pair is the best and the worst of every group.
    """
    return grpo(method).having(surrogate=sequence_losses.PairLoss(0.1), selection=selection.BestWorst(2),
                               advantage=CENTRED, kl=NO_KL)


def simpo(method: Method = Method()) -> Method:
    """SimPO: mean log-probabilities of a pair's completions a margin apart, without a reference (2405.14734)."""
    return dpo(method).having(surrogate=sequence_losses.PairLoss(2.0, mean=True, reference=False, margin=1.0))


def hypo(method: Method = Method()) -> Method:
    """HyPO: DPO on recorded pairs, and the reverse KL to the base model on samples of the run (2406.01462).

    The pairs are those of `parts.data.source.path`. Rewards are measured alone.
    """
    return grpo(method).having(surrogate=surrogates.KLOnly(), reduction=reductions.SequenceSum(),
                               kl=SampledKL(0.01, "k2"), data=supervised.PreferencePairs())


def trpa(method: Method = Method()) -> Method:
    """TRPA: every better completion of a group preferred to every worse one, near the old policy (2504.04524)."""
    return grpo(method).having(surrogate=sequence_losses.PairwisePreference(), kl=NO_KL, advantage=CENTRED)


def w_reinforce(method: Method = Method()) -> Method:
    """W-REINFORCE: wrong completions pushed down, right ones pulled up a tenth as strongly (2506.01347)."""
    return grpo(method).having(advantage=baselines.Signed(0.1, 1.0), reduction=reductions.TokenMean(), kl=NO_KL)


def gtpo(method: Method = Method()) -> Method:
    """GTPO: tokens that good and bad completions share are not pushed down, and pulled up twice (2508.03772).

    Completions with a mean entropy above log 2 are left out, in groups that have others.
    """
    return grpo(method).having(surrogate=losses.ConflictTokens(most_entropy=math.log(2)), kl=NO_KL)


def grpo_lambda(method: Method = Method()) -> Method:
    """GRPO-lambda: right answers earn less the longer they are, in groups that are mostly right (2505.18086)."""
    return grpo(method).having(shaping=credit.LengthSwitch(), kl=NO_KL)


def spo_chain(method: Method = Method()) -> Method:
    """SPO-chain: every segment's own advantage, by continuations from where it begins and ends (2505.23564)."""
    return grpo(method).having(spread=token_credit.SegmentChain(), reduction=reductions.TokenMean(),
                               kl=SampledKL(1e-4, "k3"))


def spo_tree(method: Method = Method()) -> Method:
    """SPO-tree: a tree of completions, whose segments are compared with the other continuations (2505.23564)."""
    return spo_chain(method).having(draws=groups.Tree(), spread=token_credit.SegmentTree())


def gigpo(method: Method = Method()) -> Method:
    """GiGPO: steps that begin in the same state are compared too, beside whole completions (2505.10978)."""
    return grpo(method).having(spread=token_credit.StepGroups(), kl=SampledKL(0.01, "k3"))


def s_grpo(method: Method = Method()) -> Method:
    """S-GRPO: one chain of thought is left early in several ways; earlier right answers earn more (2505.07686)."""
    return grpo(method).having(draws=groups.EarlyExits(), shaping=credit.ExitDecay(), kl=NO_KL)


def latr(method: Method = Method()) -> Method:
    """LATR: completions that branch at uncertain tokens, and stay if they diverge (2510.24302)."""
    return grpo(method).having(draws=lookahead.BranchingLookahead(), kl=NO_KL)


def trace_rl(method: Method = Method()) -> Method:
    """TraceRL: of a masked language model, every token's ratio in the state of its own decoding step (2509.06949)."""
    return grpo(method).having(target=targets.Traces(), decoding=decoding.Unmasking(),
                               selection=selection.DropZeroVariance(), reduction=reductions.TokenMean(),
                               kl=SampledKL(0.01, "k3"), reference=references.PreviousPolicy())


def trace_rl_value(method: Method = Method()) -> Method:
    """TraceRL with its value model: advantages per token, by GAE over the steps of a trace (2509.06949)."""
    return trace_rl(method).having(value=gae.ValueHead(), advantage=baselines.NoBaseline())


def unirl(method: Method = Method()) -> Method:
    """UniRL: one model generates images by GRPO and answers about them by GRPO, in steps of their own (2505.23380)."""
    answers = supervised.SelfAnswers(samples=8, apart=True, batch=32)
    return grpo(method).having(advantage=CENTRED, surrogate=surrogates.Clip(0.2, 0.28),
                               reduction=reductions.TokenMean(), kl=SampledKL(0.01, "k3"), data=answers)


def unirl_sft(method: Method = Method()) -> Method:
    """UniRL, supervised: cross entropy of images that were found right, and of answers about them (2505.23380)."""
    answers = supervised.SelfAnswers(images=1.0, batch=32, balance=FixedWeights(rl=0.0, data=1.0))
    return unirl(method).having(kl=NO_KL, data=answers)
