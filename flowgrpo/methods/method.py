"""Methods: a rollout, a target, the credit, the loss and the order of prompts, as frozen records of parts."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from flowgrpo.curriculum import order
from flowgrpo.curriculum.resampling import Expansion
from flowgrpo.errors import UserError
from flowgrpo.methods.groups import OF_TEXT, Credit, Denoising, Loss
from flowgrpo.methods.parts import Curriculum, GroupReplay, Redraw
from flowgrpo.methods.targets import NoisedFinals, RecordedSteps, Rollout, Target, TokenRollout
from flowgrpo.objectives import forward_process, reductions
from flowgrpo.objectives.supervised import LayerTuning
from flowgrpo.samplers import kernels, noised_finals, plans
from flowgrpo.samplers.grids import compress_tail
from flowgrpo.samplers.rollout import RolloutSpec, drop_quiet_steps

# Of a flow and of a variance-preserving process.
_FORMS: dict[Any, Any] = {kernels.FlowDDIM: kernels.DDIM, kernels.CPS: kernels.VPCPS}
# On a variance-preserving process in place of a part of flow matching alone: the part, and how a recipe writes it.
FOR_VP: dict[str, tuple[Any, str]] = {
    "kernel": (kernels.FlowDDIM(1.0), "{type: FlowDDIM, eta: 1.0}"), "solver": (kernels.Euler(), "{type: Euler}"),
    "tail": (1.0, "1.0"), "strides": ((1,), "[1]"), "step_weight": (reductions.Uniform(), "{type: Uniform}")}


@dataclass(frozen=True)
class Method:
    """Parts of a method in groups; the defaults are Flow-GRPO's.

    rollout: how groups are sampled.
    target: what the loss scores.
    credit: from rewards to advantages.
    loss: from scores and advantages to a scalar.
    curriculum: which prompts an epoch begins with.
    expansion: the input under which prompts are sampled; None: their own.
    redraw: which of their groups are replaced by other prompts; None: none.
    replay: which recorded groups are trained again; None: none.

    A part is named by its field, wherever it stands: fields of groups have different names.

    Example: `Method().having(plan=plans.Sliding(size=4), roots=1)`
    """

    rollout: Rollout = Denoising()
    target: Target = RecordedSteps()
    credit: Credit = Credit()
    loss: Loss = Loss()
    curriculum: Curriculum = order.EpochPermutation()
    expansion: Expansion | None = None
    redraw: Redraw | None = None
    replay: GroupReplay | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rollout, self.target.of):
            raise ValueError(f"{type(self.target).__name__} is no target of {type(self.rollout).__name__}: "
                             "expected one that is, `flowgrpo list methods` lists presets of each")

    def having(self, **parts: Any) -> Method:
        """The method with these parts in place of its present ones, by their names; whole groups first.
        Raises ValueError for a part that none of its groups has."""
        names = _fields(Method)
        method = replace(self, **{name: part for name, part in parts.items() if name in names})
        changes: dict[str, dict[str, Any]] = {}
        for name, part in parts.items():
            if name not in names:
                changes.setdefault(method.group_of(name), {})[name] = part
        return replace(method, **{group: replace(getattr(method, group), **inner) for group, inner in changes.items()})

    def group_of(self, name: str) -> str:
        """The group that has a part of this name. Raises ValueError if there is none."""
        for group in _GROUPS:
            if name in _fields(getattr(self, group).__class__):
                return group
        raise ValueError(f"a method that trains {self.target.trains} reads no {name}")

    def parts(self) -> dict[str, Any]:
        """By name, those of groups in their order."""
        found: dict[str, Any] = {}
        for name in _fields(Method):
            part = getattr(self, name)
            of_group = name in _GROUPS
            found |= {inner: getattr(part, inner) for inner in _fields(part.__class__)} if of_group else {name: part}
        return found

    def fits(self, process: str) -> bool:
        """True if the rollout samples models of this process; an unmasking one cannot draw left to right."""
        return self.rollout.fits(self, process)

    @property
    def asks_about_images(self) -> bool:
        """True if the model that is trained reads the images that it draws."""
        return getattr(self.loss.data, "reads_target", "") == "images"

    def require_modality(self, process: str) -> None:
        """Raise UserError for a method of language models on a denoiser's process, or the other way round."""
        if self.for_tokens != (process in OF_TEXT):
            raise self._unfit(process)

    def _unfit(self, process: str) -> UserError:
        if self.asks_about_images:
            return UserError("the method asks about images that the model generates by tokens: set text.generates: "
                             "image, for a model such as Janus")
        other = dict.fromkeys(OF_TEXT, "masked language models") | {"masks": "causal language models"}
        of = other.get(process, "language models") if self.for_tokens else "denoisers"
        name = type(self.generation.decoding if self.for_tokens else self.denoising.kernel).__name__
        return UserError(f"got a method of {of} (it samples by {name}), which this model is not: `flowgrpo list "
                         "methods` lists the methods of every kind")

    def on(self, process: str, given: Collection[str] = ()) -> Method:
        """The method as a process samples it: a "flow", a variance-preserving one ("vp"), "tokens" one after the other,
        "image tokens", or "masks" that become tokens.

        FlowDDIM and DDIM are one formula in two coordinates, so are CPS and VPCPS, and Euler stands for the
        deterministic step of either; Decoding unmasks as Unmasking does. What else is of flow matching alone has a
        substitute on a variance-preserving process (`FOR_VP`).
        given: names of parts that the user set; they are refused in place of being substituted.
        Raises UserError for what is of another process alone.
        """
        if not self.fits(process):
            raise self._unfit(process)
        if self.for_tokens:
            return self.generation.on(self, process, given)  # type: ignore[no-any-return]  # a method
        if process == "flow":
            return self._with_form({there: here for here, there in _FORMS.items()})
        if not isinstance(self.target, NoisedFinals):
            return self._on_vp(given)
        for part, kind in ((self.target.times, noised_finals.Stratified),
                           (self.loss.surrogate, forward_process.Preference)):
            if not isinstance(part, kind):
                raise UserError(f"this model is variance-preserving (it predicts noise or v), but {part} is about "
                                f"noised final samples of flow matching, expected {kind.__name__}: use diffusion_dpo "
                                "as it is, or a method that trains recorded steps, such as ddpo")
        # A rollout that draws nothing on its way has no use for a kernel.
        silent = self.denoising.noisy == "none"
        return (self.having(kernel=kernels.DDIM(0.0)) if silent else self)._on_vp(given)

    def of_flows_alone(self) -> list[str]:
        """The names of the parts that a variance-preserving process cannot have."""
        denoising = self.denoising
        takes = {"kernel": type(_inner(denoising.kernel)) in (*_FORMS, *_FORMS.values()),
                 "solver": isinstance(denoising.solver, kernels.Euler),
                 "tail": denoising.tail == 1, "strides": max(denoising.strides) == 1,
                 # 1 / (grid[i] - grid[i+1]) is negative on alpha-bars, which are no sigmas
                 "step_weight": not isinstance(self.loss.step_weight, (reductions.InverseDelta, reductions.Sigma))}
        return [name for name, fits in takes.items() if not fits]

    def _on_vp(self, given: Collection[str]) -> Method:
        wrong = self.of_flows_alone()
        learned = {"kernel"} if self.denoising.learned_noise else set()  # the method is about this kernel
        if refused := [name for name in wrong if name in learned | {*given}]:
            parts = self.parts()
            got = ", ".join(f"{name} {parts[name]}" for name in refused)
            cure = ", ".join(f"{name}: {FOR_VP[name][1]}" for name in refused)
            raise UserError(f"this model is variance-preserving (it predicts noise or v), but {got} is for flow "
                            f"matching: leave it out, or set parts: {{{cure}}}")
        return self.having(**{name: FOR_VP[name][0] for name in wrong})._with_form(_FORMS)

    def _with_form(self, forms: dict[Any, Any]) -> Method:
        kernel: Any = self.denoising.kernel
        inner = _inner(kernel)
        if (form := forms.get(type(inner))) is None:
            return self
        there = form(*dataclasses.astuple(inner))
        return self.having(kernel=there if inner is kernel else replace(kernel, kernel=there))

    def explorations(self, grid: torch.Tensor, group: int, shift: float | None, epoch: int, seed: int,
                     timesteps: torch.Tensor | None = None) -> list[RolloutSpec]:
        """The explorations of an epoch: one per schedule of the plan, for every prompt.
        grid and timesteps are those of `make_grid`; shift is the grid's, None of a pipeline's own. Steps whose noise is
        too small are not trained (`noise.quiet`).
        Raises ValueError if the plan does not fit the grid or group, or if no trained step is left."""
        specs = self.plan_explorations(grid, group, shift, epoch, seed, timesteps)
        return drop_quiet_steps(specs) if self.scores_noise else specs

    def plan_explorations(self, grid: torch.Tensor, group: int, shift: float | None, epoch: int, seed: int,
                          timesteps: torch.Tensor | None = None) -> list[RolloutSpec]:
        """The `explorations` with all trained steps of the plan."""
        denoising = self.denoising
        specs = []
        planned = denoising.plan(len(grid) - 1, epoch, seed)
        for schedule in (planned,) if isinstance(planned, plans.Schedule) else planned:
            settled = max(schedule.stochastic, default=-1) + 1
            kept = grid if denoising.tail == 1 else compress_tail(grid, settled, denoising.tail, shift)
            # Where the schedule says how states split, what is missing to the group are initial noises of their own.
            roots = denoising.roots or max(1, group // math.prod(schedule.children))
            specs.append(RolloutSpec(kept, schedule, denoising.kernel, denoising.solver, group, roots,
                                     denoising.strides, self.reads_means, self.reads_old_means, timesteps,
                                     keep_clean=self.credit.progress is not None or self.loss.distil is not None))
        return specs

    def noising_spec(self, grid: torch.Tensor, group: int, epoch: int, seed: int,
                     alphas: torch.Tensor | None = None) -> RolloutSpec | None:
        """Return when an epoch noises its finals; None where the target is another. ValueError where no time is left.
        alphas: the alpha-bars of all timesteps, of a variance-preserving process alone."""
        if not isinstance(self.target, NoisedFinals):
            return None
        times = self.target.times(grid, epoch, seed)
        return noised_finals.exploration(times, group, self.denoising.solver, self.reads_means, self.reads_old_means,
                                         alphas)

    @property
    def denoising(self) -> Denoising:
        assert isinstance(self.rollout, Denoising), "a language model's method"
        return self.rollout

    @property
    def generation(self) -> TokenRollout:
        assert self.for_tokens, "a pipeline's method"
        return cast(TokenRollout, self.rollout)

    @property
    def writes_prompts(self) -> bool:
        """True where the policy writes prompts for later epochs (`contrib.variants`)."""
        return bool(getattr(getattr(self.curriculum, "inner", self.curriculum), "writes", False))

    @property
    def tuning(self) -> LayerTuning:
        """The supervised term of recorded steps; weight 0 of other targets."""
        return self.target.tuning if isinstance(self.target, RecordedSteps) else _UNTUNED

    @property
    def teaches_itself(self) -> bool:
        """True where the reference is the policy under prompts that are made of an epoch's samples."""
        return getattr(self.loss.reference, "makes_prompts", False) is True

    @property
    def compares_with_reference(self) -> bool:
        """True where the surrogate, the shaping or the credit reads the reference's scores, whatever the KL."""
        return self.loss.surrogate.reads_reference or self.judges_by_reference or "reference" in self.needs

    @property
    def judges_by_reference(self) -> bool:
        return self.credit.shaping is not None and self.credit.shaping.reads_reference

    @property
    def needs(self) -> frozenset[str]:
        """Names of measures that the credit reads, such as "entropy": `AdvantageRule.needs`."""
        spread = self.credit.spread
        return frozenset(self.credit.advantage.needs) | frozenset(spread.needs if spread else ())

    @property
    def reads_entropy(self) -> bool | str:
        """True where the loss or the credit needs the entropy of every token's distribution; "uniform" where the loss
        needs its mean log-probability."""
        uniform = self.loss.surrogate.reads_uniform
        return "uniform" if uniform else self.loss.surrogate.reads_entropy or "entropy" in self.needs

    @property
    def for_tokens(self) -> bool:
        """True where it samples a language model."""
        return self.rollout.of_text

    @property
    def scores_noise(self) -> bool:
        """True where the loss scores steps by the density of their noise."""
        return self.target.trains_steps and not self.target.follows_reward

    @functools.cached_property
    def reads_means(self) -> bool:
        """True where the loss needs the transitions' means, not their log-probabilities alone."""
        return self.loss.reads_means or self.tuning.weight > 0

    @functools.cached_property
    def reads_old_means(self) -> bool:
        """True where the loss needs the means of the old policy too, which a rollout records."""
        return self.loss.reads_old_means or self.tuning.weight > 0


def _inner(kernel: Any) -> Any:
    return kernel.kernel if isinstance(kernel, kernels.AnnealedNoise) else kernel


_UNTUNED = LayerTuning()
_GROUPS = ("rollout", "target", "credit", "loss")


@functools.cache
def _fields(record: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(record))
