"""A method is a frozen record of parts."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from flowgrpo import objectives
from flowgrpo.advantages import group, selection, shaping, token_credit
from flowgrpo.curriculum import order, resampling
from flowgrpo.errors import UserError
from flowgrpo.methods import adapted
from flowgrpo.objectives import best_path, forward_process, reductions, references
from flowgrpo.samplers import kernels, noised_finals, old_policy, plans, preview, solvers
from flowgrpo.samplers.grids import compress_tail
from flowgrpo.samplers.rollout import Exploration
from flowgrpo.samplers.text import decoding, groups

OF_TEXT = ("tokens", "masks")  # the processes of language models: causal, masked
# Of a flow and of a variance-preserving process.
_FORMS = {kernels.FlowDDIM: kernels.DDIM, kernels.CPS: kernels.VPCPS}


@dataclass(frozen=True)
class Method:
    """Parts of a method; the defaults are Flow-GRPO's.

    kernel: the transition of stochastic steps; plan: which steps are stochastic and which are trained; solver: of the
    deterministic steps; tail: the share of steps kept after the last stochastic one (1 keeps the grid);
    roots: initial noises per prompt, from which its samples grow (1: all share it, None: each has its own);
    strides: granularities of the grid behind the last split; preview: how initial noises are chosen;
    shaping: what becomes of the rewards before they are compared; kl: the regulariser, and reference: whose policy it
    holds to; reduction: what the loss is a mean over; tuning: a supervised term towards the best sample; times: when
    finals are noised and trained in place of recorded steps; lag: how slowly the old policy follows; backprop: how the
    steps from the plan's one on become the data whose reward's gradient is followed (None: none is);
    edit: how final latents are edited by a small policy, which is trained in place of the model (None: they are not);
    adapted: which modules are trained; chain: how recorded steps become one decision (None: each is its own);
    draws: how the texts of a group are drawn; spread: how the advantage of a text is spread over its tokens;
    curriculum: which prompts an epoch begins with; redraw: which of their groups are replaced by other prompts;
    value: the value model of a language model, or how the critic of edits learns (None: none).

    Of a language model the kernel is a `decoding.Decoding`, of a masked one an `Unmasking`, and what is about denoising
    (plan, solver, tail, roots, strides, preview, times, adapted, chain, edit) is not read; its backprop is a
    `gumbel_softmax.GumbelSoftmax`. `reads.PARTS` maps each part to what reads it; a part set in vain is refused.
    """

    kernel: Any = kernels.FlowSDE(0.7)
    plan: Any = plans.AllSteps()
    solver: Any = solvers.Euler()
    tail: float = 1.0
    roots: int | None = None
    strides: tuple[int, ...] = (1,)
    preview: preview.Preview | None = None
    shaping: Any = shaping.AsIs()
    advantage: Any = group.Advantage(scale="batch", order="rewards")
    selection: Any = selection.All()
    log_ratio: Any = objectives.PlainRatio()
    surrogate: Any = objectives.Clip(1e-4, 1e-4)
    step_weight: Any = objectives.Uniform()
    reduction: Any = reductions.PerDecision()
    kl: Any = objectives.GaussianKL(0.0)
    reference: Any = references.Base()
    tuning: Any = best_path.LayerTuning()
    times: Any = noised_finals.Recorded()
    lag: Any = old_policy.Lag()
    backprop: Any = None
    edit: Any = None
    adapted: Any = adapted.Adapted()
    chain: Any = None
    draws: Any = groups.Parallel()
    spread: Any = token_credit.Evenly()
    curriculum: Any = order.Walk()
    redraw: Any = resampling.Never()
    value: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "strides", tuple(self.strides))  # a recipe gives a list
        if not 0 < self.tail <= 1:
            raise ValueError(f"tail is {self.tail}, expected above 0 and at most 1")

    def fits(self, process: str) -> bool:
        """Return True if the kernel samples models of this process; an unmasking one cannot draw left to right."""
        if not self.for_tokens or process not in OF_TEXT:
            return not self.for_tokens and process not in OF_TEXT
        if process == "masks":
            return not self.spread.causal and not self.draws.causal and not self.kernel.expert  # answers have no trace
        return not isinstance(self.kernel, decoding.Unmasking)

    def on(self, process: str) -> Method:
        """The method as a process samples it: a "flow", a variance-preserving one ("vp"), "tokens" one after
        the other, or "masks" that become tokens. FlowDDIM and DDIM are one formula in two coordinates, so are CPS and
        VPCPS, and Euler stands for the deterministic step of either; Decoding unmasks as Unmasking does. UserError for
        what is of another process alone."""
        if not self.fits(process):
            other = {"tokens": "masked language models", "masks": "causal language models"}
            of = other.get(process, "language models") if self.for_tokens else "denoisers"
            raise UserError(f"the method is one of {of} (its kernel is {type(self.kernel).__name__}) and the model is "
                            "not: `flowgrpo methods` lists all kinds")
        if process == "masks" and not isinstance(self.kernel, decoding.Unmasking):
            return replace(self, kernel=decoding.Unmasking(*dataclasses.astuple(self.kernel)))
        if process in OF_TEXT:
            return self
        if process == "flow":
            return self._with_form({there: here for here, there in _FORMS.items()})
        if isinstance(self.times, noised_finals.Recorded):
            return self._on_vp()
        for part, kind in ((self.times, noised_finals.Stratified), (self.surrogate, forward_process.Preference)):
            if not isinstance(part, kind):
                raise UserError(f"this model is variance-preserving (it predicts noise or v), but {part} is about "
                                f"noised finals of flow matching alone, expected {kind.__name__}: use diffusion_dpo as "
                                "it is, or a method that trains recorded steps, such as ddpo")
        # A rollout that draws nothing on its way has no use for a kernel.
        return (replace(self, kernel=kernels.DDIM(0.0)) if isinstance(self.plan, plans.NoSteps) else self)._on_vp()

    def _on_vp(self) -> Method:
        takes = {"kernel": (type(self.kernel) in (*_FORMS, *_FORMS.values()), "{type: FlowDDIM, eta: 1.0}"),
                 "solver": (isinstance(self.solver, solvers.Euler), "{type: Euler}"),
                 "tail": (self.tail == 1, "1.0"), "strides": (max(self.strides) == 1, "[1]"),
                 # 1 / (grid[i] - grid[i+1]) is negative on alpha-bars, which are no sigmas
                 "step_weight": (not isinstance(self.step_weight, (objectives.InverseDelta, objectives.Sigma)),
                                 "{type: Uniform}")}
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
        """Return the explorations of an epoch: one per schedule of the plan, for every prompt.

        grid and timesteps are those of `make_grid`. Raises ValueError if the plan does not fit the grid or group.
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

    def noised(self, grid: torch.Tensor, group: int, epoch: int, seed: int, alphas: torch.Tensor | None = None
               ) -> Exploration | None:
        """When an epoch noises its finals; None where it trains recorded steps. ValueError where no time is left.

        alphas: the alpha-bars of all timesteps, of a variance-preserving process alone.
        """
        times = self.times(grid, epoch, seed)
        return None if times is None else noised_finals.exploration(times, group, self.solver, self.reads_means, alphas)

    @property
    def compares_with_reference(self) -> bool:
        """True where the surrogate reads the reference's scores, whatever the KL."""
        return getattr(self.surrogate, "of_reference", False)

    @property
    def reads_entropy(self) -> bool:
        """True where the loss needs the entropy of every token's distribution."""
        return getattr(self.surrogate, "of_entropy", False)

    @property
    def for_tokens(self) -> bool:
        """True where it samples a language model."""
        return isinstance(self.kernel, decoding.Decoding)

    @property
    def records_steps(self) -> bool:
        """True where what is trained are steps that a rollout recorded, by their log-probability."""
        return self.backprop is None and self.edit is None and isinstance(self.times, noised_finals.Recorded)

    @property
    def reads_means(self) -> bool:
        """True where the loss needs the transitions' means, not their log-probabilities alone."""
        of_means = isinstance(self.kl, (objectives.GaussianKL, objectives.OutputError))
        return (of_means and objectives.regularises(self.kl) or isinstance(self.log_ratio, objectives.Guard)
                or isinstance(self.surrogate, objectives.DivergenceMask) or self.tuning.weight > 0
                or getattr(self.surrogate, "of_means", False))
