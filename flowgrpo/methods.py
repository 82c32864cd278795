"""A method is a frozen record of parts; a named method is a function from a Method to a Method.

Presets stack: `preset("mix_grpo", "grpo_guard")`, on the command line `--method mix_grpo+grpo_guard`. Nothing anywhere
asks for a method's name. A new method adds at most one part, one preset and one test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from flowgrpo import advantages, objectives, selection
from flowgrpo.config import Config, nearest
from flowgrpo.errors import UserError
from flowgrpo.gaussian import log_prob
from flowgrpo.samplers import kernels, plans, solvers
from flowgrpo.samplers.grids import shifted


@dataclass(frozen=True)
class Method:
    """What a method is made of; the defaults are Flow-GRPO's.

    kernel: the transition of stochastic steps; plan: which steps are stochastic and which are trained; solver: of the
    deterministic steps; tail: the share of steps kept after the last stochastic one (1 keeps the grid);
    shared_noise: one initial noise per prompt, so that the steps up to and with the first stochastic one are
    evaluated once per prompt.
    """

    kernel: Any = kernels.FlowSDE(0.7)
    plan: Any = plans.AllSteps()
    solver: Any = solvers.Euler()
    tail: float = 1.0
    shared_noise: bool = False
    advantage: advantages.Advantage = advantages.Advantage(scale="batch", order="rewards")
    selection: Any = selection.All()
    log_ratio: Any = objectives.PlainRatio()
    surrogate: objectives.Clip = objectives.Clip(1e-4, 1e-4)
    step_weight: Any = objectives.Uniform()
    kl: objectives.GaussianKL = objectives.GaussianKL(0.0)

    def __post_init__(self) -> None:
        if not 0 < self.tail <= 1:
            raise ValueError(f"tail is {self.tail}, expected above 0 and at most 1")

    @property
    def reads_means(self) -> bool:
        """True where the loss needs the transitions' means, not their log-probabilities alone."""
        return self.kl.weight > 0 or isinstance(self.log_ratio, objectives.Guard)


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
    return replace(method, kernel=kernels.DanceSDE(0.3), plan=plans.RandomSubset(0.6), shared_noise=True,
                   advantage=advantages.Advantage(scale="group", order="advantages"), kl=objectives.GaussianKL(0.0))


def mix_grpo(method: Method = Method()) -> Method:
    """MixGRPO: a sliding window of stochastic, trained steps; the others deterministic (2507.21802, section 3)."""
    return replace(method, kernel=kernels.FlowSDE(0.7), plan=plans.Sliding(size=4, stride=1, every=25),
                   shared_noise=True, advantage=advantages.Advantage(scale="group", order="advantages"),
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


PRESETS: dict[str, Callable[..., Method]] = {
    preset.__name__: preset for preset in (flow_grpo, flow_grpo_fast, dance_grpo, mix_grpo, mix_grpo_flash, grpo_guard)}


def preset(*names: str) -> Method:
    """Stack presets from left to right: preset("mix_grpo", "grpo_guard") or preset("mix_grpo+grpo_guard")."""
    method = Method()
    for name in (part.strip() for joined in names for part in joined.split("+")):
        if name not in PRESETS:
            raise UserError(f"unknown method {name!r}{nearest(name, list(PRESETS))}")
        method = PRESETS[name](method)
    return method


_TYPES = {cls.__name__: cls for module in (kernels, plans, solvers, selection, objectives, advantages)
          for cls in vars(module).values() if dataclasses.is_dataclass(cls) and cls.__module__ == module.__name__}


def with_parts(method: Method, parts: dict[str, Any]) -> Method:
    """Lay a recipe's `parts` over a method: {"plan": {"size": 2}, "kernel": {"type": "CPS", "level": 0.8}}."""
    return _overlay(method, parts, "parts")


def _overlay(part: Any, changes: dict[str, Any], path: str) -> Any:
    if "type" in changes:
        name, changes = changes["type"], {key: value for key, value in changes.items() if key != "type"}
        if name not in _TYPES:
            raise UserError(f"{path}.type: unknown part {name!r}{nearest(str(name), sorted(_TYPES))}")
        if type(part).__module__ != _TYPES[name].__module__:
            kin = [known for known, cls in _TYPES.items() if cls.__module__ == type(part).__module__]
            raise UserError(f"{path}.type: {name} does not belong there; there are: {', '.join(sorted(kin))}")
        if type(part) is not _TYPES[name]:
            return _build(_TYPES[name], changes, path)
    fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    for key in changes:
        if key not in fields:
            raise UserError(f"unknown key {path}.{key}{nearest(key, list(fields))}")
        if dataclasses.is_dataclass(fields[key]) and not isinstance(changes[key], dict):
            raise UserError(f"{path}.{key}: got {changes[key]!r}, expected keys with values, such as "
                            f"{{type: {type(fields[key]).__name__}}}")
    values = {key: _overlay(fields[key], value, f"{path}.{key}") if dataclasses.is_dataclass(fields[key]) else value
              for key, value in changes.items()}
    return _build(lambda **kept: replace(part, **kept), values, path)


def _build(make: Callable[..., Any], values: dict[str, Any], path: str) -> Any:
    try:
        return make(**values)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None


def resolve(config: Config) -> Method:
    """The method a configuration asks for, its parts tried on the configuration's number of steps and samples."""
    method, train = with_parts(preset(config.method), config.parts), config.train
    grid, x = shifted(train.steps, train.shift), torch.zeros(1, 1)
    try:
        method.selection(torch.zeros(1, train.group))
        for step in method.plan(train.steps, 0, config.seed).trained:
            log_prob(method.kernel(x, x, grid, step), x)
    except (TypeError, ValueError) as error:
        raise UserError(f"method {config.method} with train.steps {train.steps}, train.group {train.group} and "
                        f"parts {config.parts}: {error}") from None
    return method
