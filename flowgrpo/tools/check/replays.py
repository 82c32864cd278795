"""Replays of a pipeline's steps under `check`: equal to the rollout, and with a gradient that is right by finite
differences.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flowgrpo.errors import UserError
from flowgrpo.methods.method import Method
from flowgrpo.policies.pipelines import probes
from flowgrpo.policies.pipelines.conditioning import Conditioning
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.weights.adapters import culprit
from flowgrpo.policies.weights.trainable import TrainableWeights
from flowgrpo.samplers.growth import explore, replay
from flowgrpo.samplers.kernels import Euler, FlowDDIM
from flowgrpo.samplers.plans import Schedule
from flowgrpo.samplers.rollout import RolloutSpec, seeder

RANK, GROUP = 4, 2
SHARES, LARGEST_GRADIENT_ERROR = (1e-2, 1e-3, 1e-4), 0.01  # SHARES: small steps along the gradient


def require_whole(parts: Mapping[str, Any]) -> None:
    """Raise UserError if a weight of a model's parts, modules by name, is not finite."""
    if line := culprit(parts, buffers=False):
        raise UserError(line)


def gradient_norm(modules: Sequence[torch.nn.Module], weights: TrainableWeights) -> float:
    """Norm of the adapter's gradient. Raises UserError if it is 0 or not finite, or if a weight outside the adapter has
    a gradient."""
    ours = set(weights.parameters())
    other = [p for module in modules for p in module.parameters() if p.grad is not None and p not in ours]
    if other:
        raise UserError(f"a gradient reaches {len(other)} frozen weights")
    # List order: a set's order differs between calls, and with it the last bit.
    reached = [p.grad.norm() for p in weights.parameters() if p.grad is not None]
    norm = torch.stack(reached or [torch.zeros(())]).norm().item()
    if not 0 < norm < float("inf"):
        raise UserError(f"the gradient that reaches the adapter has the norm {norm}")
    return norm


def check_gradient(size: Callable[[], torch.Tensor], weights: TrainableWeights, result: dict[str, Any]) -> None:
    """Store the relative error of a finite difference of `size` along its gradient. A part that blocks gradients
    (HiDream's experts run under no_grad) leaves a gradient that is finite but wrong: raises UserError."""
    value, parameters = size(), weights.parameters()
    gradient = torch.autograd.grad(value, parameters, allow_unused=True)
    squared = sum(part.double().square().sum() for part in gradient if part is not None).item()

    def size_at(length: float) -> float:
        with torch.no_grad(), weights.swap({key: p + length * (0 if part is None else part)
                                            for (key, p), part in zip(weights.named.items(), gradient)}):
            return size().item()

    # If the value hardly changes, the step that changes it by a given share is long: take the best share.
    lengths = [share * value.item() / squared for share in SHARES]
    error = min(abs((size_at(length) - size_at(-length)) / (2 * length * squared) - 1) for length in lengths)
    result["gradient_error"] = error
    if not error <= LARGEST_GRADIENT_ERROR:
        raise UserError(f"the gradient is off by {error:.0%} of the change that it predicts: a part of the model runs "
                        "without gradients")


def check_replay(policy: PipelinePolicy, conditioning: Conditioning, result: dict[str, Any], rows: int = GROUP) -> None:
    """Roll out three steps from two noises, the first two steps stochastic, and replay these two with gradients, both
    in batches of `rows`. The second step's states come from the pipeline's own loop, not from a replay."""
    grid, timesteps = probes.few_steps(policy, 3)
    kernel, both = Method().having(kernel=FlowDDIM()).on(policy.process).rollout.kernel, Schedule((0, 1), (0, 1))
    exploration = RolloutSpec(grid, both, kernel, Euler(), GROUP, GROUP, keep_means=True, timesteps=timesteps)
    [part] = explore(policy, conditioning, [exploration], rows, seeder(0, 0))
    [final], errors, ratios = part.finals, [], []
    result["sample_shape"] = list(policy.decode(final[:1], conditioning).shape[1:])
    result["latent_shape"] = list(final.shape[1:])
    for k, at, new in replay(policy, conditioning, part, rows):
        old = part.transitions[k].old
        assert old.mean is not None  # keep_means
        errors.append((new.mean.detach() - old.mean[at].to(new.mean)).abs().max())
        ratios.append((new.logp.detach() - old.logp[at].to(new.logp)).abs().max())
        new.logp.sum().backward()
    result["replay_error"] = torch.stack(errors).max().item()
    result["first_log_ratio"] = torch.stack(ratios).max().item()
    modules = [module for module in policy.pipe.components.values() if isinstance(module, torch.nn.Module)]
    result["lora_grad"] = gradient_norm(modules, policy.weights)


def require_equal(exact: float | None, result: dict[str, Any], advice: str = "") -> None:
    """Raise UserError if replay and rollout differ by more than `exact`. It is None below fp32,
    where a run recomputes old log-probabilities."""
    if exact and not result["first_log_ratio"] <= exact:
        raise UserError(f"replay and rollout disagree: |log ratio| {result['first_log_ratio']:.1e}, expected at most "
                        f"{exact:.0e}; look for dropout or a random module{advice}")
