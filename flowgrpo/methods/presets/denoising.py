"""Presets that train recorded steps of a rollout, by their log-probability: rows and trees of them."""

from flowgrpo.advantages import baselines, group, selection, shaping
from flowgrpo.methods import targets
from flowgrpo.methods.distillation import DistributionMatching, RewardedMatching
from flowgrpo.methods.method import Method
from flowgrpo.objectives import ratios, reductions, supervised, surrogates
from flowgrpo.objectives.kl import GaussianKL
from flowgrpo.samplers import kernels, plans


def flow_grpo(method: Method = Method()) -> Method:
    """Flow-GRPO: every step stochastic and trained, KL to the base (2505.05470, sections 4.2 and 5).

    The KL is the full Gaussian one (weight 0.004); the released code divides by 2 g^2 without the step's length and
    uses a weight ten times larger.
    """
    return method.having(kernel=kernels.FlowSDE(0.7), plan=plans.AllSteps(),
                         advantage=group.Advantage(scale="batch", order="rewards"), kl=GaussianKL(0.004))


def flow_grpo_fast(method: Method = Method()) -> Method:
    """Flow-GRPO-Fast: a random window of two stochastic steps in the first half, no KL (released code).

    The kernel is Flow-SDE, with a clip range of 1e-4. The released recipes of the kernel CPS clip at 1e-5 a
    log-probability without 1/(2 s^2): that is the log-ratio SquaredErrorRatio, and not in this preset.
    """
    return flow_grpo(method).having(plan=plans.Sliding(size=2, order="random", stop=0.5), kl=GaussianKL(0.0))


def dance_grpo(method: Method = Method()) -> Method:
    """DanceGRPO: constant noise, shared initial noise, 60 % of the steps trained, an advantage per reward (2505.07818).

    The released code draws the trained steps per sample; here they are drawn once per epoch, so that a step is one
    batch.
    """
    return method.having(kernel=kernels.DanceSDE(0.3), plan=plans.RandomSubset(0.6), roots=1,
                         advantage=group.Advantage(scale="group", order="advantages"), kl=GaussianKL(0.0))


def ddpo(method: Method = Method()) -> Method:
    """DDPO: ancestral sampling, every step trained, rewards compared with the prompt's own history (2305.13301)."""
    return method.having(kernel=kernels.FlowDDIM(1.0), plan=plans.AllSteps(), roots=None,
                         advantage=group.Advantage(scale="running", order="rewards"), kl=GaussianKL(0.0))


def mix_grpo(method: Method = Method()) -> Method:
    """MixGRPO: a sliding window of SDE steps, which are trained; the others are ODE steps (2507.21802, section 3)."""
    return method.having(kernel=kernels.FlowSDE(0.7), plan=plans.Sliding(size=4, stride=1, every=25),
                         roots=1, advantage=group.Advantage(scale="group", order="advantages"),
                         kl=GaussianKL(0.0))


def mix_grpo_flash(method: Method = Method()) -> Method:
    """MixGRPO-Flash: MixGRPO with DPM-Solver++ 2M on a compressed tail of 40 % of the steps (2507.21802, section 3.3).

    The tail always ends at sigma 0; with one step left the released code stopped above it.
    """
    return mix_grpo(method).having(solver=kernels.DPMSolver2M(), tail=0.4)


def tempflow_grpo(method: Method = Method()) -> Method:
    """TempFlow-GRPO: branches at every step of a shared ODE prefix, weighted by the step's noise (2508.04324).

    The branches of one step are compared with each other alone. KL with the deviation of the whole step, 0.004.
    """
    return method.having(kernel=kernels.FlowSDE(0.7), plan=plans.EachStep(), roots=1,
                         advantage=group.Advantage(scale="group", order="rewards"),
                         step_weight=reductions.NoiseLevel(), kl=GaussianKL(0.004))


def granular_grpo(method: Method = Method()) -> Method:
    """Granular-GRPO (G2RPO): one SDE step from a shared anchor, scored in three granularities (2510.01982).

    Every branch is finished on the grid and on every second and third of its sigmas, and its advantages are summed; the
    released code has the first two.
    """
    return mix_grpo(method).having(plan=plans.EachStep(stop=0.5), strides=(1, 2, 3))


def branch_grpo(method: Method = Method()) -> Method:
    """BranchGRPO: a binary tree, whose edges are compared with those of their depth (2509.06040).

    An edge is worth the mean of the images below it. The splits are at the paper's places of a grid of 20 steps.
    """
    return dance_grpo(method).having(plan=plans.Branches(), roots=None, surrogate=surrogates.Clip(1e-3, 1e-3))


def tree_rpo(method: Method = Method()) -> Method:
    """Dynamic-TreeRPO: a binary tree inside of MixGRPO's window, with noise that grows with the depth (2509.23352).

    With LayerTuning: both clip bounds follow the advantage, and a supervised term towards the best path is weighted by
    its progress. All of it is a reconstruction, and the numbers are ours.
    """
    return mix_grpo(method).having(plan=plans.TreeWindow(plans.Sliding(size=4), growth=0.5), roots=None,
                                   surrogate=surrogates.AdaptiveClip(1e-4, 2e-4, 1.0),
                                   target=targets.RecordedSteps(supervised.LayerTuning(1e-4, by="progress")))


def pref_grpo(method: Method = Method()) -> Method:
    """Pref-GRPO: a sample's reward is its win rate against the other samples of its group (2508.20751).

    A pairwise judge says who wins (`flowgrpo.judge`), or the larger score of a reward that scores images one by one.
    """
    return dance_grpo(method).having(kernel=kernels.FlowSDE(0.7), shaping=shaping.WinRate())


def b2_diffurl(method: Method = Method()) -> Method:
    """B2-DiffuRL: a trained interval that grows from the end, and of its branches the extremes (2503.11240).

    Ancestral sampling, branches where the interval begins, and of every branch group its best and its worst where they
    stand out from the prompt's history.
    """
    return ddpo(method).having(plan=plans.GrowingTail(branch=4), selection=selection.Extremes(-0.5, 0.5),
                               surrogate=surrogates.Clip(0.1, 0.1))


def reinflow(method: Method = Method()) -> Method:
    """ReinFlow: noise that a network learns beside the flow, and one ratio for a sample's whole chain (2505.22094).

    Advantages are those of the group, in place of the paper's critic; its entropy bonus is left out.
    """
    return method.having(kernel=kernels.LearnedNoise(), plan=plans.AllSteps(), roots=None,
                         target=targets.JointDensity(),
                         advantage=group.Advantage(scale="batch", order="rewards"), log_ratio=ratios.PlainRatio(),
                         surrogate=surrogates.Clip(1e-3, 1e-3), step_weight=reductions.Uniform(),
                         kl=GaussianKL(0.0))


def rlcm(method: Method = Method()) -> Method:
    """RLCM: the steps of a consistency model's multistep sampling, all of their noise fresh, trained like DDPO's
    (2404.03673)."""
    return ddpo(method).having(kernel=kernels.CPS(1.0), surrogate=surrogates.Clip(1e-4, 1e-4),
                               advantage=group.Advantage(scale="running", order="rewards", clamp=10.0))


def dmd2(method: Method = Method()) -> Method:
    """DMD2: a student of few steps matches the distribution of its base, without rewards (2405.14867).

    Multistep sampling with fresh noise, by which states of training are those of inference. Without the GAN loss, which
    needs real images.
    """
    return method.having(kernel=kernels.CPS(1.0), plan=plans.AllSteps(), roots=None,
                         advantage=baselines.Unrewarded(), kl=GaussianKL(0.0),
                         distil=DistributionMatching())


def dmdr(method: Method = Method()) -> Method:
    """DMDR: the student's own steps are rewarded by GRPO while they match the base's distribution (2511.13649).

    The match holds the reward, in the place of a KL.
    """
    return dmd2(method).having(advantage=group.Advantage(scale="group", order="rewards"),
                               distil=DistributionMatching(blend=0.25))


def tdm_r1(method: Method = Method()) -> Method:
    """TDM-R1: a student of few steps follows its base, and a surrogate that learns the reward on its samples
    (2603.07700).

    The surrogate learns from final samples of multistep sampling, in place of the states of a deterministic one.
    """
    return dmdr(method).having(distil=RewardedMatching())
