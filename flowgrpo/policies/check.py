"""Can this pipeline be trained? Three steps with two of them stochastic, replayed and differentiated, tell.

Of language models: check_text.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from flowgrpo import devices, methods
from flowgrpo.config import Adapter, Config
from flowgrpo.errors import UserError
from flowgrpo.method import Method
from flowgrpo.policies import build, check_text, memory, midway, tiny
from flowgrpo.policies.adapters import Weights
from flowgrpo.policies.conditioning import Conditioning
from flowgrpo.policies.driver import unlogged
from flowgrpo.policies.dtypes import DTYPES
from flowgrpo.policies.load import load_pipeline
from flowgrpo.policies.lora import loader
from flowgrpo.policies.pictures import PICTURES
from flowgrpo.policies.pipeline import PipelinePolicy
from flowgrpo.presets.steps import mix_grpo
from flowgrpo.samplers import cost
from flowgrpo.samplers.grids import shifted
from flowgrpo.samplers.kernels import FlowDDIM
from flowgrpo.samplers.plans import Schedule
from flowgrpo.samplers.predictions import prediction
from flowgrpo.samplers.replay import replay
from flowgrpo.samplers.rollout import Exploration, explore, seeder
from flowgrpo.samplers.scheduler import Task
from flowgrpo.samplers.solvers import Euler
from flowgrpo.starter import FOLDERS

PROMPT = "a red circle"
RANK, GROUP = 4, 2
SHARES, LARGEST_GRADIENT_ERROR = (1e-3, 1e-4), 0.01  # of small steps along the gradient
LIKE = 0.8  # from which likeness on a name is a misspelt one, and not a hub id
STEPS, SAMPLES = 10, 12  # of the example that tells the cost
# What is told of a pipeline, beside `check_text.FIELDS` of a language model.
FIELDS = ("precision", "pipeline", "scheduler", "prediction", "weights", "denoisers", "parameters", "lora_parameters",
          "lora_targets", "lora_loader", "conditioning", "prompts_per_call", "guidance", "timesteps_per_call",
          "picture_shape", "latent_shape", "replay_error", "first_log_ratio", "lora_grad", "gradient_error", "memory",
          "memory_parts", "evaluations_per_picture", "evaluations_per_picture_shared", "notes")


def report(model: Any, config: Config | None = None, device: str | None = None) -> dict[str, Any]:
    """Drive `model` through a rollout, a replay and a gradient.

    model: `starter`, a directory, a hub id, the name of a class of diffusers or transformers (of which a tiny random
    instance is built), a loaded (pipeline, arguments of its call), or a loaded (language model, tokenizer or
    processor). config: a recipe, for the pipeline's arguments, the adapter, the precision, guidance, checkpointing and
    the memory that it needs; without one the defaults, in fp32. device: cpu, cuda, or None for cuda where it is there;
    UserError where it is not.

    Keys of a pipeline, None where the check did not come that far: model, drivable (None of a diffusers class that has
    no tiny instance, and where memory ran out); where it is not, reason (one line); precision (with the reason where
    it is chosen); pipeline, scheduler, prediction, weights (GiB of all parts), denoisers, parameters, lora_parameters,
    lora_targets; lora_loader (what loads a LoRA of each trained module into the stock pipeline); conditioning
    (arguments that differ from prompt to prompt), prompts_per_call, guidance; and at the recipe's guidance:
    timesteps_per_call (whether `train.pack` goes), picture_shape, latent_shape; replay_error (largest
    difference of a transition's mean between rollout and replay), first_log_ratio (largest |log ratio| of the replay,
    which has to be 0), lora_grad (norm of the adapter's gradient), gradient_error (in fp32: how far a step along the
    gradient is from what it foretells, relative; not of a DoRA);
    memory (GiB by phase, for the recipe, see memory.py), memory_parts (GiB by part, of the update);
    evaluations_per_picture and evaluations_per_picture_shared: of a rollout of the recipe's first epoch, without and
    with shared prefixes and whatever its guidance costs; without a recipe of mix_grpo with 10 steps and 12 pictures per
    prompt, on average over the window's places; notes: what the recipe's options leave untold.

    Keys of a language model beside those of the same names: kind, class, tokenizer, vocabulary, chat_template (whether
    there is one), end_tokens, pad_token, prompt_tokens, completion_tokens (of a prompt and the longest of two
    completions of it); shared_prefix (a group's prompt is read once) and head_alone (logits are the head's, so that
    only those of drawn tokens are made), not of a masked one; trained_parameters where all are.
    """
    named = model if isinstance(model, str) else type(model[0]).__name__
    found: dict[str, Any] = {"model": named, "drivable": False, "reason": None}
    fields, device = FIELDS, _device(device)
    try:
        with torch.random.fork_rng():
            if check_text.is_text(model):
                fields = check_text.FIELDS
                check_text.drive(model, config, device, found)
            else:
                _drive(model, config, device, found)
        found |= {"drivable": True, "notes": _notes(config) or None}
    except Unknown as error:
        found |= {"drivable": None, "reason": str(error)}
    except Exception as error:  # whatever a stranger's pipeline raises is the answer
        told = " ".join(str(error).split()) or "no message"
        if _without_room(error):
            found |= {"drivable": None, "reason": _room(found, device)}
        else:
            found["reason"] = told if isinstance(error, UserError) else f"{type(error).__name__}: {told}"
    return dict.fromkeys((*found, *fields)) | found


def _without_room(error: Exception) -> bool:
    """Whether memory ran out, of which torch has no class of its own on the CPU."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


def _room(found: dict[str, Any], device: str) -> str:
    weights = f", where the weights alone take {found['weights']} GiB" if "weights" in found else ""
    options = "" if "kind" in found else ", memory.weights: int8, memory.encoders: cpu, smaller pictures"
    return (f"memory ran out on {device}{weights}, so that nothing is known: give a --recipe with precision: bf16, "
            f"train.checkpointing, train.micro_batch: 1{options}, or take "
            + ("--device cpu" if device == "cuda" else "a machine with more"))


def _notes(config: Config | None) -> list[str]:
    if config is None:
        return []
    untold = {"the gradient's error is left out: with adapter.dora peft holds the norms of the weights constant in the "
              "backward": config.adapter.dora,
              "memory is of one process that holds all weights: memory.shard leaves each its share of the denoisers":
              config.memory.shard}
    return [note for note, told in untold.items() if told]


def _drive(model: Any, recipe: Config | None, device: str, found: dict[str, Any]) -> None:
    """Fill `found` step by step; raises what stops the pipeline."""
    config = recipe or Config(precision="fp32", adapter={"rank": RANK})  # in which replays and gradients are exact
    config, precision = devices.settle(config, device, None if isinstance(model, str) else model[0])
    method = methods.resolve(config)
    build.require(config, method, device)
    pipe, call = _loaded(model, config) if isinstance(model, str) else model
    found |= {"precision": precision, "pipeline": type(pipe).__name__, "scheduler": type(pipe.scheduler).__name__,
              "prediction": prediction(pipe.scheduler), "weights": memory.held(pipe.components.values())}
    refuse(type(pipe))
    torch.manual_seed(0)  # of the adapter's first weights, so that a report can be repeated
    policy = PipelinePolicy(pipe, config.adapter, device=device, precision=config.precision, call=call,
                            checkpointing=config.train.checkpointing, memory=config.memory, adapted=method.adapted)
    if not policy.denoisers:
        raise UserError(f"{type(pipe).__name__} has no denoiser: no module whose forward takes a time")
    found |= {"denoisers": list(policy.denoisers), **_sizes(policy, config.adapter)}
    found["lora_loader"] = list(dict.fromkeys(loader(pipe, name) for name in policy.weights.modules))
    conditioning = policy.encode([PROMPT])
    found["conditioning"] = [name for name in ("prompt", "negative_prompt", *PICTURES) if name in policy.accepts]
    found["prompts_per_call"] = "one" if policy.encode_prompt.apart else "any number"
    found["guidance"] = _guidance(policy, conditioning)
    policy.guidance = config.train.guidance
    found["timesteps_per_call"] = "one per row" if policy.vector(conditioning) else "one"
    _replayed(policy, conditioning, found, min(GROUP, config.train.micro_batch))
    midway.require(policy, conditioning, recipe is None or _goes_on(method, config))
    _require_equal(policy, found)
    if policy.dtype == torch.float32 and not config.adapter.dora:
        _differentiated(policy, conditioning, found)
    with TemporaryDirectory() as folder:
        policy.weights.save(Path(folder))  # reads the file back, and raises where it is not the same
    if recipe is None and policy.process == "vp":  # the default method is for flows alone
        config = config.model_copy(update={"method": "ddpo"})
    found |= _cost(recipe, method) | _memory(policy, config, conditioning)


class Unknown(UserError):
    """Nothing can be told of a model, for want of it."""


def _loaded(model: str, config: Config) -> tuple[Any, dict[str, Any]]:
    """The pipeline, in the recipe's precision, and the arguments of its call."""
    known = tiny.factories()
    if Path(model).exists() or model in FOLDERS or not (model in known or model.isidentifier()):
        return _read(model, config)
    import diffusers

    if model not in known and hasattr(diffusers, model):
        refuse(getattr(diffusers, model))
        raise Unknown(f"there is no tiny instance of {model}, so that nothing is known of it: give a directory or a "
                      "hub id of such a pipeline")
    close = difflib.get_close_matches(model, [*known, *FOLDERS], n=1, cutoff=LIKE)
    if model not in known and not model.endswith("Pipeline") and not close:
        return _read(model, config)
    pipe, call = tiny.make(model)
    with unlogged():  # of modules that loading, and not casting, would keep in fp32
        return pipe.to(DTYPES[config.precision]), call


def _read(model: str, config: Config) -> tuple[Any, dict[str, Any]]:
    pipe = load_pipeline(model, config.precision, weights=config.memory.weights)
    return pipe, config.model_copy(update={"model": model}).call


def refuse(cls: type) -> None:
    """UserError for a pipeline class that cannot be driven, whatever its weights."""
    if not hasattr(cls, "encode_prompt"):
        raise UserError(f"{cls.__name__} has no encode_prompt: its conditioning cannot be cached")


def _memory(policy: PipelinePolicy, config: Config, conditioning: Conditioning) -> dict[str, dict[str, float]]:
    phases = memory.memory(policy, config, conditioning)
    return {"memory": {name: memory.total(parts) for name, parts in phases.items()},
            "memory_parts": {name: memory.total({name: size}) for name, size in phases["update"].items()}}


def _device(asked: str | None) -> str:
    present = ["cuda"] * torch.cuda.is_available() + ["cpu"]
    if asked and asked not in present:
        raise UserError(f"--device is {asked!r}, but the check runs on {' or '.join(present)} here: take one of these")
    return asked or present[0]


def _sizes(policy: PipelinePolicy, adapter: Adapter) -> dict[str, Any]:
    names, ours = {key.split(".lora_")[0] for key in policy.weights.named}, set(policy.weights.parameters())
    sizes = [p.numel() for module in policy.denoisers.values() for p in module.parameters()
             if not adapter.rank or p not in ours]
    targets = dict.fromkeys([*adapter.targets, *adapter.encoder_targets])
    return {"parameters": sum(sizes), "lora_parameters": sum(p.numel() for p in ours),
            "lora_targets": [target for target in targets if any(name.endswith("." + target) for name in names)]}


def _guidance(policy: PipelinePolicy, conditioning: Conditioning) -> str:
    """How the pipeline does guidance: what a step at scale 4 runs, beside one at scale 1, or at 0 where that is off."""
    rows, (grid, timesteps) = {}, memory.few_steps(policy, 2)
    for policy.guidance in (4.0, 0.0, 1.0):
        with _counted(policy) as batches:
            policy.run(Task(grid, range(1), timesteps=timesteps), conditioning, None, policy.generators([0]))
        rows[policy.guidance] = batches
    off = min((1.0, 0.0), key=lambda scale: sum(rows[scale]))
    if sum(rows[4.0]) == sum(rows[off]):
        embedded = any(getattr(module.config, "guidance_embeds", False)
                       or getattr(module.config, "time_cond_proj_dim", None) for module in policy.denoisers.values())
        return "embedded: one evaluation per step" if embedded else "none"
    told = "one batch of twice the rows" if len(rows[4.0]) == len(rows[off]) else "two calls per step"
    return told if off else f"{told}, off at 0"


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


def _replayed(policy: PipelinePolicy, conditioning: Conditioning, found: dict[str, Any], rows: int = GROUP) -> None:
    """A rollout of three steps from two noises, the first two steps stochastic, and the replay of those with gradients,
    both in batches of `rows`. The second step's states are those of the pipeline's own loop, and not of a replay."""
    grid, timesteps = memory.few_steps(policy, 3)
    kernel, both = Method(kernel=FlowDDIM()).on(policy.process).kernel, Schedule((0, 1), (0, 1))
    exploration = Exploration(grid, both, kernel, Euler(), GROUP, GROUP, keep_means=True, timesteps=timesteps)
    [part] = explore(policy, conditioning, [exploration], rows, seeder(0, 0))
    [final], errors, ratios = part.finals, [], []
    found["picture_shape"] = list(policy.decode(final[:1], conditioning).shape[1:])
    found["latent_shape"] = list(final.shape[1:])
    for k, at, new in replay(policy, conditioning, part, rows):
        old = part.transitions[k].old
        errors.append((new.mean.detach() - old.mean[at].to(new.mean)).abs().max())
        ratios.append((new.logp.detach() - old.logp[at].to(new.logp)).abs().max())
        new.logp.sum().backward()
    found["replay_error"], found["first_log_ratio"] = (torch.stack(each).max().item() for each in (errors, ratios))
    modules = [module for module in policy.pipe.components.values() if isinstance(module, torch.nn.Module)]
    found["lora_grad"] = gradient_norm(modules, policy.weights)


def _goes_on(method: Method, config: Config) -> bool:
    train = config.train
    grid = shifted(train.steps, train.shift)
    return midway.goes_on(method, method.explorations(grid, train.group, train.shift, 0, config.seed))


def _require_equal(policy: PipelinePolicy, found: dict[str, Any]) -> None:
    """UserError where replay and rollout differ in fp32; in less a run computes old log-probabilities again."""
    if policy.exact and not found["first_log_ratio"] <= policy.exact:
        raise UserError(f"replay and rollout disagree: |log ratio| {found['first_log_ratio']:.1e}, expected at most "
                        f"{policy.exact:.0e}; look for dropout or a random module"
                        + ", and try without train.checkpointing" * policy.checkpointing)


def gradient_norm(modules: Sequence[torch.nn.Module], weights: Weights) -> float:
    """Norm of the adapter's gradient; UserError where it is 0 or not finite, or where it reaches anything else."""
    ours = set(weights.parameters())
    other = [p for module in modules for p in module.parameters() if p.grad is not None and p not in ours]
    if other:
        raise UserError(f"a gradient reaches {len(other)} frozen weights")
    # In the list's order, not the set's, which differs from call to call and with it the last bit.
    reached = [p.grad.norm() for p in weights.parameters() if p.grad is not None]
    norm = torch.stack(reached or [torch.zeros(())]).norm().item()
    if not 0 < norm < float("inf"):
        raise UserError(f"the gradient that reaches the adapter has the norm {norm}")
    return norm


def _differentiated(policy: PipelinePolicy, conditioning: Conditioning, found: dict[str, Any]) -> None:
    """The error of the gradient of a step's squared output."""
    grid, timesteps = memory.few_steps(policy, 3)
    x, _ = policy.run(Task(grid, range(1), timesteps=timesteps), conditioning, None, policy.generators([0]))

    def size() -> torch.Tensor:
        return policy.replay(conditioning, x, grid, 1, timesteps).double().square().mean()

    found["gradient_error"] = gradient_error(size, policy.weights)
    require_exact(found)


def gradient_error(size: Callable[[], torch.Tensor], weights: Weights) -> float:
    """How far a difference quotient along the gradient of `size` is from what it foretells, relative: a part of the
    model that lets no gradient through (HiDream's experts run under no_grad) leaves one that is finite and wrong."""
    value, parameters = size(), weights.parameters()
    gradient = torch.autograd.grad(value, parameters, allow_unused=True)
    squared = sum(part.double().square().sum() for part in gradient if part is not None).item()

    def moved(length: float) -> float:
        with torch.no_grad(), weights.swapped({key: p + length * (0 if part is None else part)
                                               for (key, p), part in zip(weights.named.items(), gradient)}):
            return size().item()

    # Where the value hardly answers, a step that changes it by some share of itself is a long one: the best counts.
    lengths = [share * value.item() / squared for share in SHARES]
    return min(abs((moved(length) - moved(-length)) / (2 * length * squared) - 1) for length in lengths)


def require_exact(found: dict[str, Any]) -> None:
    """UserError for a gradient that is off."""
    if not found["gradient_error"] <= LARGEST_GRADIENT_ERROR:
        raise UserError(f"the gradient is off by {found['gradient_error']:.0%} of the change that it foretells: a part "
                        "of the model runs without gradients")


def _cost(recipe: Config | None, method: Method) -> dict[str, float]:
    """Of the recipe's first epoch, or without one of MixGRPO's; nothing of a method that draws no groups of its own."""
    if recipe:
        train = recipe.train
        if recipe.preferences or method.backprop:
            return {}
        of = method.explorations(shifted(train.steps, train.shift), train.group, train.shift, 0, recipe.seed)
        alone, shared = (count(of, 1) / sum(each.group for each in of) for count in (cost.alone, cost.rollout))
        return {"evaluations_per_picture": round(alone, 2), "evaluations_per_picture_shared": round(shared, 2)}
    method, grid = mix_grpo(), shifted(STEPS, 3.0)
    places = range(STEPS - method.plan.size)
    explorations = [method.explorations(grid, SAMPLES, 3.0, place * method.plan.every, 0) for place in places]
    alone, shared = (sum(count(each, 1) for each in explorations) / (len(places) * SAMPLES)
                     for count in (cost.alone, cost.rollout))
    return {"evaluations_per_picture": round(alone, 2), "evaluations_per_picture_shared": round(shared, 2)}
