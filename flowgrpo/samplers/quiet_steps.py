"""Steps whose noise is too small to be trained.

The gradient of a step's log-probability grows with 1 / std^2. On a grid that ends in a short step, such as SD3.5's own
(0.278, 0.009, 0), the last trained step of a posterior kernel has nearly all of an epoch's squared gradient, and a
half-precision state is rounded by a fifth of its deviation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flowgrpo.samplers.learned_noise import LearnedNoise, Noisy
from flowgrpo.samplers.rollout import RolloutSpec

LEAST = 0.02  # deviation of a step that is trained


def deviation(spec: RolloutSpec, step: int) -> float:
    """Return the deviation of the whole step of a rollout, in units of the latent; of learned noise its lower bound."""
    if isinstance(spec.kernel, (LearnedNoise, Noisy)):
        return spec.kernel.low * (spec.grid[step] - spec.grid[step + 1]).abs().sqrt().item()
    zero = spec.grid.new_zeros(1, 1)
    return spec.transition(zero, zero, spec.grid, step).std.item()


def quiet(spec: RolloutSpec) -> tuple[int, ...]:
    """Return the trained steps of a rollout whose deviation is below `LEAST`."""
    return tuple(step for step in spec.schedule.trained if deviation(spec, step) < LEAST)


def trained_by_noise(specs: Sequence[RolloutSpec]) -> list[RolloutSpec]:
    """Return an epoch's rollouts without their quiet steps among the trained ones; one that trains no other is left
    out.

    Quiet steps are drawn as before. Raises ValueError where no trained step is left.
    """
    found = [(spec, quiet(spec)) for spec in specs]
    if not any(steps for _, steps in found):
        return list(specs)
    kept = [(spec, tuple(step for step in spec.schedule.trained if step not in steps)) for spec, steps in found]
    left = [replace(spec, schedule=replace(spec.schedule, trained=steps)) for spec, steps in kept if steps]
    if not left:
        spec, steps = found[0]
        raise ValueError(f"the trained steps {list(steps)} of {spec.steps} have a std of at most "
                         f"{max(deviation(spec, step) for step in steps):.2g} under {spec.kernel}, expected {LEAST} or "
                         "more: use more noise, fewer steps, train.grid: shifted, or a plan that trains earlier ones")
    return left


def message(found: Mapping[int, float], steps: int) -> str:
    """Return a line on the quiet steps of a run, by their deviations, among the steps of its grid."""
    listed = ", ".join(f"{step} ({found[step]:.2g})" for step in sorted(found))
    return f"of the steps 0 to {steps - 1} these are not trained, their deviation is below {LEAST}: {listed}"
