"""Replays of a pipeline's steps under `check`: equal to the rollout, and with a gradient that is right."""

from __future__ import annotations

from typing import Any

import torch

from flowgrpo.check.gradients import GROUP, gradient_error, gradient_norm, require_exact
from flowgrpo.errors import UserError
from flowgrpo.methods.method import Method
from flowgrpo.policies.pipelines import probes
from flowgrpo.policies.pipelines.conditioning import Conditioning
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.samplers.growth import explore
from flowgrpo.samplers.kernels import FlowDDIM
from flowgrpo.samplers.plans import Schedule
from flowgrpo.samplers.replay import replay
from flowgrpo.samplers.rollout import RolloutSpec, seeder
from flowgrpo.samplers.scheduler import Segment
from flowgrpo.samplers.solvers import Euler


def replayed(policy: PipelinePolicy, conditioning: Conditioning, result: dict[str, Any], rows: int = GROUP) -> None:
    """Roll out three steps from two noises, the first two steps stochastic, and replay these two with gradients, both
    in batches of `rows`. The second step's states come from the pipeline's own loop, not from a replay."""
    grid, timesteps = probes.few_steps(policy, 3)
    kernel, both = Method().having(kernel=FlowDDIM()).on(policy.process).rollout.kernel, Schedule((0, 1), (0, 1))
    exploration = RolloutSpec(grid, both, kernel, Euler(), GROUP, GROUP, keep_means=True, timesteps=timesteps)
    [part] = explore(policy, conditioning, [exploration], rows, seeder(0, 0))
    [final], errors, ratios = part.finals, [], []
    result["picture_shape"] = list(policy.decode(final[:1], conditioning).shape[1:])
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


def require_equal(policy: PipelinePolicy, result: dict[str, Any]) -> None:
    """Raise UserError if replay and rollout differ in fp32. In lower precision a run recomputes old log-probabilities.
    """
    if policy.exact and not result["first_log_ratio"] <= policy.exact:
        raise UserError(f"replay and rollout disagree: |log ratio| {result['first_log_ratio']:.1e}, expected at most "
                        f"{policy.exact:.0e}; look for dropout or a random module"
                        + ", and try without train.checkpointing" * bool(policy.checkpointing))


def differentiated(policy: PipelinePolicy, conditioning: Conditioning, result: dict[str, Any]) -> None:
    """Store the gradient error of a step's squared output."""
    grid, timesteps = probes.few_steps(policy, 3)
    x, _ = policy.run(Segment(grid, range(1), timesteps=timesteps), conditioning, None, policy.generators([0]))

    def size() -> torch.Tensor:
        return policy.replay(conditioning, x, grid, 1, timesteps).double().square().mean()

    result["gradient_error"] = gradient_error(size, policy.weights)
    require_exact(result)
