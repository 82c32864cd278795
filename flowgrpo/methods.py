"""A method is a frozen record of parts; a named method is a function from a Method to a Method.

Presets stack: `preset("mix_grpo", "grpo_guard")`, on the command line `--method mix_grpo+grpo_guard`. Nothing anywhere
asks for a method's name. A new method adds at most one part, one preset and one test.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from flowgrpo import (
    advantages,
    baselines,
    forward_objectives,
    influence,
    lag,
    layer_tuning,
    objectives,
    reductions,
    references,
    schedules,
    selection,
    shaping,
)
from flowgrpo.config import Config, nearest
from flowgrpo.errors import UserError
from flowgrpo.gaussian import log_prob
from flowgrpo.samplers import backprop, forward, kernels, plans, preview, solvers, tokens
from flowgrpo.samplers.grids import compress_tail, shifted
from flowgrpo.samplers.rollout import Exploration


# Of a flow and of a variance-preserving process.
_FORMS = {kernels.FlowDDIM: kernels.DDIM, kernels.CPS: kernels.VPCPS}


@dataclass(frozen=True)
class Method:
    """What a method is made of; the defaults are Flow-GRPO's.

    kernel: the transition of stochastic steps; plan: which steps are stochastic and which are trained; solver: of the
    deterministic steps; tail: the share of steps kept after the last stochastic one (1 keeps the grid);
    roots: initial noises per prompt, from which its samples grow (1: all share it, None: each has its own);
    strides: granularities of the grid behind the last split; preview: how initial noises are chosen;
    shaping: what becomes of the rewards before they are compared; kl: the regulariser, and reference: whose policy it
    holds to; reduction: what the loss is a mean over; tuning: a supervised term towards the best sample; times: when
    finals are noised and trained in place of recorded steps; lag: how slowly the old policy follows; backprop: how the
    steps from the plan's one on become the data whose reward's gradient is followed (None: none is).

    Of a language model the kernel is a `tokens.Decoding`, and what is about denoising (plan, solver, tail, roots,
    strides, preview, times, backprop) is not read.
    """

    kernel: Any = kernels.FlowSDE(0.7)
    plan: Any = plans.AllSteps()
    solver: Any = solvers.Euler()
    tail: float = 1.0
    roots: int | None = None
    strides: tuple[int, ...] = (1,)
    preview: preview.Preview | None = None
    shaping: Any = shaping.AsIs()
    advantage: Any = advantages.Advantage(scale="batch", order="rewards")
    selection: Any = selection.All()
    log_ratio: Any = objectives.PlainRatio()
    surrogate: Any = objectives.Clip(1e-4, 1e-4)
    step_weight: Any = objectives.Uniform()
    reduction: Any = reductions.PerDecision()
    kl: Any = objectives.GaussianKL(0.0)
    reference: Any = references.Base()
    tuning: Any = layer_tuning.LayerTuning()
    times: Any = forward.Recorded()
    lag: Any = lag.Lag()
    backprop: Any = None

    def __post_init__(self) -> None:
        if not 0 < self.tail <= 1:
            raise ValueError(f"tail is {self.tail}, expected above 0 and at most 1")

    def on(self, process: str) -> Method:
        """The method as a process samples it: a "flow", a variance-preserving one ("vp"), or "tokens". FlowDDIM and
        DDIM are one formula in two coordinates, so are CPS and VPCPS, and Euler stands for the deterministic step of
        either. UserError for what is of another process alone."""
        if for_tokens(self) != (process == "tokens"):
            of = ("language models", "denoisers")[process == "tokens"]
            raise UserError(f"the method is one of {of} (its kernel is {type(self.kernel).__name__}) and the model is "
                            f"not; there are: {', '.join(suited(process))}")
        if process == "tokens":
            return self
        if process == "flow":
            return self._with_form({there: here for here, there in _FORMS.items()})
        if not isinstance(self.times, forward.Recorded):
            raise UserError(f"this model is variance-preserving (it predicts noise or v), but {self.times} noises the "
                            "finals of flow matching alone: use a method that trains recorded steps, such as ddpo")
        takes = {"kernel": (type(self.kernel) in (*_FORMS, *_FORMS.values()), "{type: FlowDDIM, eta: 1.0}"),
                 "solver": (isinstance(self.solver, solvers.Euler), "{type: Euler}"),
                 "tail": (self.tail == 1, "1.0"), "strides": (max(self.strides) == 1, "[1]"),
                 # 1 / (grid[i] - grid[i+1]) is negative on alpha-bars
                 "step_weight": (not isinstance(self.step_weight, objectives.InverseDelta), "{type: Uniform}")}
        cures = {name: cure for name, (fits, cure) in takes.items() if not fits}
        if cures:
            got = ", ".join(f"{name} {getattr(self, name)}" for name in cures)
            cure = ", ".join(f"{name}: {cure}" for name, cure in cures.items())
            raise UserError(f"this model is variance-preserving (it predicts noise or v), but {got} is for flow "
                            f"matching alone: set parts: {{{cure}}}")
        return self._with_form(_FORMS)

    def _with_form(self, forms: dict[type, type]) -> Method:
        form = forms.get(type(self.kernel))
        return replace(self, kernel=form(*dataclasses.astuple(self.kernel))) if form else self

    def explorations(self, grid: torch.Tensor, group: int, shift: float, epoch: int, seed: int,
                     timesteps: torch.Tensor | None = None) -> list[Exploration]:
        """How an epoch samples every prompt: one exploration per schedule of the plan. ValueError where they cannot.

        grid and timesteps are those of `make_grid`.
        """
        planned = self.plan(len(grid) - 1, epoch, seed)
        found = []
        for schedule in (planned,) if isinstance(planned, plans.Schedule) else planned:
            settled = max(schedule.stochastic, default=-1) + 1
            own = grid if self.tail == 1 else compress_tail(grid, settled, self.tail, shift)
            # Where the schedule says how states split, what is missing to the group are initial noises of their own.
            roots = self.roots or max(1, group // math.prod(schedule.children))
            found.append(Exploration(own, schedule, self.kernel, self.solver, group, roots, self.strides,
                                     self.reads_means, timesteps))
        return found

    def noised(self, grid: torch.Tensor, group: int, epoch: int, seed: int) -> Exploration | None:
        """When an epoch noises its finals; None where it trains recorded steps. ValueError where no time is left."""
        times = self.times(grid, epoch, seed)
        return None if times is None else forward.exploration(times, group, self.solver, self.reads_means)

    @property
    def compares_with_reference(self) -> bool:
        """True where the surrogate reads the reference's scores, whatever the KL."""
        return getattr(self.surrogate, "of_reference", False)

    @property
    def records_steps(self) -> bool:
        """True where what is trained are steps that a rollout recorded, by their log-probability."""
        return self.backprop is None and isinstance(self.times, forward.Recorded)

    @property
    def reads_means(self) -> bool:
        """True where the loss needs the transitions' means, not their log-probabilities alone."""
        of_means = isinstance(self.kl, (objectives.GaussianKL, objectives.OutputError))
        return (of_means and objectives.regularises(self.kl) or isinstance(self.log_ratio, objectives.Guard)
                or isinstance(self.surrogate, objectives.DivergenceMask) or self.tuning.weight > 0
                or getattr(self.surrogate, "of_means", False))


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


PRESETS: dict[str, Callable[..., Method]] = {
    preset.__name__: preset for preset in (
        flow_grpo, flow_grpo_fast, dance_grpo, ddpo, mix_grpo, mix_grpo_flash, grpo_guard, flow_dppo, tempflow_grpo,
        granular_grpo, branch_grpo, tree_rpo, pref_grpo, b2_diffurl, sol_rl, diffusion_nft, awm, dgpo, crd,
        diffusion_dpo, refl, draft, alignprop, grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce_pp, remax)}


def for_tokens(method: Method) -> bool:
    """Whether a method samples a language model."""
    return isinstance(method.kernel, tokens.Decoding)


def suited(process: str) -> list[str]:
    """The presets for a process, "tokens" or another."""
    return [name for name, make in PRESETS.items() if for_tokens(make()) == (process == "tokens")]


def preset(*names: str) -> Method:
    """Stack presets from left to right: preset("mix_grpo", "grpo_guard") or preset("mix_grpo+grpo_guard")."""
    method = Method()
    for name in (part.strip() for joined in names for part in joined.split("+")):
        if name not in PRESETS:
            raise UserError(f"unknown method {name!r}{nearest(name, list(PRESETS))}")
        method = PRESETS[name](method)
    return method


_MODULES = (kernels, tokens, plans, solvers, selection, objectives, reductions, layer_tuning, forward_objectives,
            schedules, references, advantages, baselines, influence, shaping, preview, forward, lag, backprop)
_RECORDS = (plans.Schedule, backprop.Unfinished, backprop.Valued)  # what parts return
_TYPES = {cls.__name__: cls for module in _MODULES for cls in vars(module).values()
          if dataclasses.is_dataclass(cls) and cls.__module__ == module.__name__ and cls not in _RECORDS}
# Of parts that take each other's place.
_HOMES = {baselines: advantages, influence: advantages, layer_tuning: objectives, forward_objectives: objectives,
          tokens: kernels}
_KIND = {cls: _HOMES.get(module, module).__name__ for module in _MODULES
         for cls in vars(module).values() if cls in _TYPES.values() and cls.__module__ == module.__name__}


def with_parts(method: Method, parts: dict[str, Any]) -> Method:
    """Lay a recipe's `parts` over a method: {"plan": {"size": 2}, "kernel": {"type": "CPS", "level": 0.8}}."""
    return _overlay(method, parts, "parts")


def _overlay(part: Any, changes: dict[str, Any], path: str) -> Any:
    if "type" in changes:
        name, changes = changes["type"], {key: value for key, value in changes.items() if key != "type"}
        if name not in _TYPES:
            raise UserError(f"{path}.type: unknown part {name!r}{nearest(str(name), sorted(_TYPES))}")
        if part is not None and _KIND[type(part)] != _KIND[_TYPES[name]]:
            kin = [known for known, cls in _TYPES.items() if _KIND[cls] == _KIND[type(part)]]
            raise UserError(f"{path}.type: {name} does not belong there; there are: {', '.join(sorted(kin))}")
        if type(part) is not _TYPES[name]:
            needed = [field for field in dataclasses.fields(_TYPES[name]) if field.default is dataclasses.MISSING]
            if needed:
                return _build(_TYPES[name], changes, path)
            part = _TYPES[name]()
    elif part is None:
        raise UserError(f"{path}: got {changes!r}, expected a type with it, such as {{type: Preview}}")
    fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    for key in changes:
        if key not in fields:
            raise UserError(f"unknown key {path}.{key}{nearest(key, list(fields))}")
        if dataclasses.is_dataclass(fields[key]) and not isinstance(changes[key], dict):
            raise UserError(f"{path}.{key}: got {changes[key]!r}, expected keys with values, such as "
                            f"{{type: {type(fields[key]).__name__}}}")
    values = {key: _overlay(fields[key], value, f"{path}.{key}") if _nested(fields[key], value) else value
              for key, value in changes.items()}
    return _build(lambda **kept: replace(part, **kept), values, path)


def _nested(part: Any, value: Any) -> bool:
    """Where a recipe's value is keys with values for a part, or for the place of one that is absent."""
    return isinstance(value, dict) and (part is None or dataclasses.is_dataclass(part))


def _build(make: Callable[..., Any], values: dict[str, Any], path: str) -> Any:
    try:
        return make(**values)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None


def resolve(config: Config, process: str = "flow") -> Method:
    """The method a configuration asks for, its parts tried on the configuration's number of steps and samples."""
    method, train = with_parts(preset(config.method), config.parts).on(process), config.train
    if process == "tokens":
        return _on_tokens(method, config)
    grid, x = shifted(train.steps, train.shift), torch.zeros(1, 1)
    if process == "vp":
        grid = torch.linspace(0.01, 0.99, train.steps + 1)  # alpha-bars, as good as any for a trial
    try:
        if isinstance(method.surrogate, objectives.DynamicClip):
            raise ValueError("the surrogate DynamicClip reads probabilities of tokens, not densities: use Clip")
        _require_decisions(method, method.noised(grid, train.group, 0, config.seed))
        if not isinstance(method.reference, references.Base) and not objectives.regularises(method.kl) \
                and not method.compares_with_reference:
            raise ValueError(f"the reference {type(method.reference).__name__} is read by a KL alone, whose weight is "
                             "0: set parts.kl.weight")
        method.selection(torch.zeros(1, train.group))
        if method.backprop:
            backprop.require(method)
        elif isinstance(method.surrogate, objectives.Ascent):
            raise ValueError("the surrogate Ascent follows a reward's gradient: set parts.backprop: {type: Unroll}")
        explorations = method.explorations(grid, train.group, train.shift, 0, config.seed)
        if method.backprop:
            backprop.require_one_step(explorations)
        for exploration in () if method.backprop else explorations:
            for step in exploration.schedule.trained:
                log_prob(exploration.transition(x, x, exploration.grid, step), x)
    except (TypeError, ValueError) as error:
        raise UserError(f"method {config.method} with train.steps {train.steps}, train.group {train.group} and "
                        f"parts {config.parts}: {error}") from None
    return method


def _on_tokens(method: Method, config: Config) -> Method:
    """The method, its parts tried on the configuration's number of samples."""
    try:
        if method.reads_means or method.tuning.weight:
            raise ValueError("a part reads means of transitions, which tokens have none of: use SampledKL and Clip")
        if method.kernel.greedy >= config.train.group:
            raise ValueError(f"{method.kernel.greedy} greedy samples leave none of the group to train")
        method.selection(torch.zeros(1, config.train.group))
    except ValueError as error:
        raise UserError(f"method {config.method} with train.group {config.train.group} and parts {config.parts}: "
                        f"{error}") from None
    return method


def _require_decisions(method: Method, noised: Exploration | None) -> None:
    """ValueError where what is trained and what the loss reads do not go together."""
    if noised is None and isinstance(method.plan, plans.NoSteps):
        raise ValueError("the plan NoSteps records no step to be trained: set parts.times, or another plan")
    if noised is None and isinstance(method.surrogate, forward_objectives.OfNoised):
        raise ValueError(f"the surrogate {type(method.surrogate).__name__} reads noised finals, but times is Recorded: "
                         "set parts.times, such as {type: GridTimes}")
    if noised is not None and (method.strides != (1,) or method.tuning.weight):
        raise ValueError(f"strides are {list(method.strides)} and tuning.weight {method.tuning.weight}, but noised "
                         "finals have neither granularities nor a best path: expected [1] and 0")
