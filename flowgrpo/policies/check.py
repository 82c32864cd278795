"""Can this pipeline be trained? Three steps with one of them stochastic, replayed and differentiated, tell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flowgrpo.config import Adapter
from flowgrpo.errors import UserError
from flowgrpo.methods import Method, mix_grpo
from flowgrpo.policies.pipeline import Conditioning, PipelinePolicy, load_pipeline
from flowgrpo.samplers import cost
from flowgrpo.samplers.grids import shifted
from flowgrpo.samplers.kernels import FlowDDIM
from flowgrpo.samplers.plans import Schedule
from flowgrpo.samplers.rollout import Exploration, explore, make_grid, replay, seeder
from flowgrpo.samplers.scheduler import Task, prediction
from flowgrpo.samplers.solvers import Euler
from flowgrpo.starter import CALL

PROMPT = "a red circle"
RANK, GROUP = 4, 2
LARGEST_LOG_RATIO = 1e-6  # above it a run in fp32 stops before its first update
STEPS, PICTURES = 10, 12  # of the example that tells the cost


def report(model: str) -> dict[str, Any]:
    """Drive `model` (`starter`, a directory or a hub id) through a rollout, a replay and a gradient, in fp32.

    Keys, as far as the check came: model, drivable; where it is not, reason (one line); pipeline,
    scheduler, denoisers, prediction, guidance, picture_shape, latent_shape, parameters, lora_parameters, lora_targets;
    replay_error (largest difference of a transition's mean between rollout and replay), first_log_ratio (largest
    |log ratio| of the replay, which has to be 0), lora_grad (norm of the adapter's gradient);
    evaluations_per_picture and evaluations_per_picture_shared: of a mix_grpo rollout with 10 steps and 12 pictures per
    prompt at guidance 1, on average over the window's places, without and with a shared prefix.
    """
    found: dict[str, Any] = {"model": model, "drivable": False, "reason": None}
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)  # of the adapter's first weights, so that a report can be repeated
            _drive(model, found)
        found["drivable"] = True
    except Exception as error:  # whatever a stranger's pipeline raises is the answer
        told = " ".join(str(error).split()) or "no message"
        found["reason"] = told if isinstance(error, UserError) else f"{type(error).__name__}: {told}"
    return found


def _drive(model: str, found: dict[str, Any]) -> None:
    """Fill `found` step by step; raises what stops the pipeline."""
    pipe = load_pipeline(model)
    found |= {"pipeline": type(pipe).__name__, "scheduler": type(pipe.scheduler).__name__,
              "prediction": prediction(pipe.scheduler)}
    if not hasattr(pipe, "encode_prompt"):
        raise UserError(f"{type(pipe).__name__} has no encode_prompt: its conditioning cannot be cached")
    targets = Adapter().targets
    policy = PipelinePolicy(pipe, Adapter(rank=RANK, targets=targets), device=_device(),
                            call=CALL if model == "starter" else {})
    if not policy.denoisers:
        raise UserError(f"{type(pipe).__name__} has no denoiser under a name that is known")
    found |= {"denoisers": list(policy.denoisers), **_sizes(policy, targets)}
    conditioning = policy.encode([PROMPT])
    found["guidance"] = _guidance(policy, conditioning)
    _replayed(policy, conditioning, found)
    found |= _cost()


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _sizes(policy: PipelinePolicy, targets: list[str]) -> dict[str, Any]:
    names = {key.split(".lora_")[0] for key in policy.weights.named}
    sizes = [parameter.numel() for module in policy.denoisers.values() for parameter in module.parameters()]
    added = sum(parameter.numel() for parameter in policy.weights.parameters())
    return {"parameters": sum(sizes) - added, "lora_parameters": added,
            "lora_targets": [target for target in targets if any(name.endswith("." + target) for name in names)]}


def _guidance(policy: PipelinePolicy, conditioning: Conditioning) -> str:
    """How the pipeline does guidance: what a step at scale 4 runs, beside one at scale 1."""
    rows, (grid, timesteps) = {}, make_grid("shifted", 2, 1.0, policy.stock)
    for policy.guidance in (4.0, 1.0):  # ends at 1, which is what training starts from
        with _counted(policy) as batches:
            policy.run(Task(grid, range(1), timesteps=timesteps), conditioning, None, policy.generators([0]))
        rows[policy.guidance] = batches
    if sum(rows[4.0]) == sum(rows[1.0]):
        embedded = any(getattr(module.config, "guidance_embeds", False) for module in policy.denoisers.values())
        return "embedded: one evaluation per step" if embedded else "none"
    return "one batch of twice the rows" if len(rows[4.0]) == len(rows[1.0]) else "two calls per step"


@contextmanager
def _counted(policy: PipelinePolicy) -> Iterator[list[int]]:
    """Inside, the batch of every call of a denoiser is appended to the list."""
    batches: list[int] = []
    hooks = [module.register_forward_hook(lambda _, args, kwargs, out: batches.append(len(out[0])), with_kwargs=True)
             for module in policy.denoisers.values()]
    try:
        yield batches
    finally:
        for hook in hooks:
            hook.remove()


def _replayed(policy: PipelinePolicy, conditioning: Conditioning, found: dict[str, Any]) -> None:
    """A rollout of three steps, the second stochastic, and the replay of that one with gradients."""
    grid, timesteps = make_grid("shifted", 3, 3.0, policy.stock)
    kernel = Method(kernel=FlowDDIM()).on(policy.process).kernel
    exploration = Exploration(grid, Schedule((1,), (1,)), kernel, Euler(), GROUP, keep_means=True, timesteps=timesteps)
    [part] = explore(policy, conditioning, [exploration], GROUP, seeder(0, 0))
    [final], [taken] = part.finals, part.transitions
    found["picture_shape"] = list(policy.decode(final, conditioning.rows(part.prompts)).shape[1:])
    found["latent_shape"] = list(final.shape[1:])
    [(_, _, new)] = replay(policy, conditioning, part, GROUP)
    found["replay_error"] = (new.mean - taken.old.mean).abs().max().item()
    found["first_log_ratio"] = (new.logp - taken.old.logp).abs().max().item()
    new.logp.sum().backward()
    found["lora_grad"] = _gradient(policy)
    if not found["first_log_ratio"] <= LARGEST_LOG_RATIO:
        raise UserError(f"replay and rollout disagree: |log ratio| {found['first_log_ratio']:.1e}, expected at most "
                        f"{LARGEST_LOG_RATIO:.0e}; look for dropout or a random module")


def _gradient(policy: PipelinePolicy) -> float:
    """Norm of the adapter's gradient; UserError where it is 0 or not finite, or where it reaches anything else."""
    modules = [module for module in policy.pipe.components.values() if isinstance(module, torch.nn.Module)]
    ours = set(policy.weights.parameters())
    other = [p for module in modules for p in module.parameters() if p.grad is not None and p not in ours]
    if other:
        raise UserError(f"a gradient reaches {len(other)} frozen weights")
    # In the list's order, not the set's, which differs from call to call and with it the last bit.
    reached = [p.grad.norm() for p in policy.weights.parameters() if p.grad is not None]
    norm = torch.stack(reached or [torch.zeros(())]).norm().item()
    if not 0 < norm < float("inf"):
        raise UserError(f"the gradient that reaches the adapter has the norm {norm}")
    return norm


def _cost() -> dict[str, float]:
    method, grid = mix_grpo(), shifted(STEPS, 3.0)
    places = range(STEPS - method.plan.size)
    explorations = [method.explorations(grid, PICTURES, 3.0, place * method.plan.every, 0) for place in places]
    alone, shared = (sum(count(each, 1) for each in explorations) / (len(places) * PICTURES)
                     for count in (cost.alone, cost.rollout))
    return {"evaluations_per_picture": round(alone, 2), "evaluations_per_picture_shared": round(shared, 2)}
