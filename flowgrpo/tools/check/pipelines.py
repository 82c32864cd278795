"""Check that a pipeline can be trained: run three steps, two of them stochastic, replay and differentiate them.

Language models: language.py.
"""

import math
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image

from flowgrpo.config.schema import Config
from flowgrpo.config.sections import Adapter, Load
from flowgrpo.data.prompts import load_prompts
from flowgrpo.errors import UserError
from flowgrpo.methods.method import Method
from flowgrpo.methods.presets.denoising import mix_grpo
from flowgrpo.policies import build, options
from flowgrpo.policies.pipelines import conditioned, few_steps, probes
from flowgrpo.policies.pipelines.call import SCHEDULE
from flowgrpo.policies.pipelines.conditioned import has_ip_adapter
from flowgrpo.policies.pipelines.conditioning import Conditioning
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.pipelines.prompt_inputs import IMAGES, MASKED, names
from flowgrpo.policies.policy import resolve_precision
from flowgrpo.policies.weights.lora_files import loader
from flowgrpo.samplers import cost
from flowgrpo.samplers.grids import shift_grid
from flowgrpo.samplers.kernels import prediction
from flowgrpo.samplers.scheduler import Segment
from flowgrpo.tools.check import replays
from flowgrpo.tools.check.loading import load_model, refuse
from flowgrpo.tools.check.replays import GROUP, RANK
from flowgrpo.training import memory

PROMPT = "a red circle"
SIDE = 512  # pixels of a stand-in image where the call states no size
STEPS, SAMPLES = 10, 12  # of the example whose cost is reported


def drive(model: str | tuple[Any, dict[str, Any]], recipe: Config | None, device: str, result: dict[str, Any]) -> None:
    """Fill `result` step by step. Raises the error that stops the pipeline."""
    config = recipe or Config(precision="fp32", adapter={"rank": RANK})  # replays and gradients are exact
    config = config.model_copy(update={"load": config.load if config.model == model else Load()})
    config, precision = resolve_precision(config, device, None if isinstance(model, str) else model[0])
    method = options.check_method(config, build.PIPELINE, device)
    pipe, call = load_model(model, config) if isinstance(model, str) else model
    result |= {"precision": precision, "pipeline": type(pipe).__name__, "scheduler": type(pipe.scheduler).__name__,
               "prediction": prediction(pipe.scheduler), "weights": memory.weights_gib(pipe.components.values()),
               "few_steps": None}
    facts = few_steps.of_pipe(pipe, model if isinstance(model, str) else "", config.load)
    if facts.why is not None:
        fitting = few_steps.few_step_config(Config(), facts)
        result["few_steps"] = f"{facts.why}; defaults: {few_steps.describe_changes(Config(), fitting)}"
    refuse(type(pipe))
    replays.require_whole(pipe.components)
    torch.manual_seed(0)  # initial adapter weights, so that a report is repeatable
    policy = PipelinePolicy(pipe, config.adapter, device=device, precision=config.precision, call=call,
                            checkpointing=config.train.recompute_share, memory=config.memory,
                            adapted=method.rollout.adapted)
    if not policy.denoisers:
        raise UserError(f"{type(pipe).__name__} has no denoiser: no module whose forward takes a time")
    result |= {"denoisers": list(policy.denoisers), **_sizes(policy, config.adapter)}
    result["lora_loader"] = list(dict.fromkeys(loader(pipe, name) for name in policy.weights.modules))
    conditioning = policy.encode([PROMPT], images=[_prompt_inputs(policy, recipe)])
    unread = set() if has_ip_adapter(pipe) else {"ip_adapter_image"}
    result["conditioning"] = [name for name in ("prompt", "negative_prompt", *IMAGES)
                              if name in policy.accepts and name not in unread]
    result["prompts_per_call"] = "one" if policy.encode_prompt.one_per_call else "any number"
    result["guidance"] = _guidance(policy, conditioning)
    policy.guidance = config.train.guidance
    result["timesteps_per_call"] = "one per row" if policy.vector(conditioning) else "one"
    replays.check_replay(policy, conditioning, result, min(GROUP, config.train.rows))
    train = config.train
    probes.require_middle(policy, conditioning, recipe is None or probes.goes_on(method, method.explorations(
        shift_grid(train.steps, train.shift), train.group, train.shift, 0, config.seed)))
    replays.require_equal(policy.exact, result, ", and try without train.checkpointing" * bool(policy.checkpointing))
    if policy.dtype == torch.float32 and not config.adapter.dora:
        grid, timesteps = probes.few_steps(policy, 3)
        x, _ = policy.run(Segment(grid, range(1), timesteps=timesteps), conditioning, None, policy.generators([0]))
        replays.check_gradient(lambda: policy.replay(conditioning, x, grid, 1, timesteps).double().square().mean(),
                               policy.weights, result)
    with TemporaryDirectory() as folder:
        policy.weights.save(Path(folder))  # reads the file back and raises if it differs
    if recipe is None and policy.process == "vp":  # the default method is for flows only
        config = config.model_copy(update={"method": "ddpo"})
    if recipe is None and facts.why:
        fitting = few_steps.few_step_config(Config(), facts)
        result |= _cost(fitting, options.check_method(fitting, build.PIPELINE, device))
    else:
        result |= _cost(recipe, method)
    result |= memory.memory_entries(
        recipe, config, policy.device, lambda held: memory.memory(policy, config, conditioning, held))


def _prompt_inputs(policy: PipelinePolicy, recipe: Config | None) -> Any:
    """Files that the recipe's first prompt brings beside its text; the pipeline is given images that it needs.

    Raises UserError for a prompt of the recipe's file whose files the pipeline does not take.
    """
    if recipe is not None and Path(recipe.prompts).is_file():
        prompts = load_prompts(recipe.prompts)
        conditioned.require_prompts(recipe, prompts, policy.pipe)
        if prompts[0].brings is not None:
            return prompts[0].brings
    size = policy.call.get("width") or SIDE, policy.call.get("height") or SIDE
    known, cls = names(type(policy.pipe)), type(policy.pipe).__name__
    missing = [known["control_image"]] if "ControlNet" in cls else []
    missing += [name for name in MASKED if "mask_image" in known]
    missing += ["ip_adapter_image"] * has_ip_adapter(policy.pipe)
    for name in missing:
        policy.given.setdefault(name, Image.linear_gradient("L").convert("RGB").resize(size))
    return None


def _sizes(policy: PipelinePolicy, adapter: Adapter) -> dict[str, Any]:
    names, ours = {key.split(".lora_")[0] for key in policy.weights.named}, set(policy.weights.parameters())
    sizes = [p.numel() for module in policy.denoisers.values() for p in module.parameters()
             if not adapter.rank or p not in ours]
    targets = dict.fromkeys([*adapter.targets, *adapter.encoder_targets])
    found = [target for target in targets if any(name.endswith("." + target) for name in names)]
    return {"parameters": sum(sizes), "lora_parameters": sum(p.numel() for p in ours),
            "lora_targets": found or sorted({name.rpartition(".")[2] for name in names})}


def _guidance(policy: PipelinePolicy, conditioning: Conditioning) -> str:
    """Describe the pipeline's guidance: the denoiser calls of a step at scale 4, compared with scale 1 (or 0 if that
    turns it off)."""
    rows, (grid, timesteps) = dict[float, list[int]](), probes.few_steps(policy, 2)  # rows of each call, by scale
    with ExitStack() as hooks:
        for module in policy.denoisers.values():
            hooks.enter_context(module.register_forward_hook(
                lambda _, args, kwargs, out: rows[policy.guidance].append(len(out[0])), with_kwargs=True))
        for policy.guidance in (4.0, 0.0, 1.0):
            rows[policy.guidance] = []
            rejects = () if policy.guidance else (ValueError,)  # some pipelines take no scale below 1, where it is off
            with suppress(*rejects):
                policy.run(Segment(grid, range(1), timesteps=timesteps), conditioning, None, policy.generators([0]))
    off = min((1.0, 0.0), key=lambda scale: sum(rows[scale]) or math.inf)
    if SCHEDULE in policy.accepts:
        return "by a second denoiser, in every step"
    if sum(rows[4.0]) == sum(rows[off]):
        embedded = any(getattr(module.config, "guidance_embeds", False)
                       or getattr(module.config, "time_cond_proj_dim", None) for module in policy.denoisers.values())
        return "embedded: one evaluation per step" if embedded else "none"
    calls = "one batch of twice the rows" if len(rows[4.0]) == len(rows[off]) else "two calls per step"
    return calls if off else f"{calls}, off at 0"


def _cost(recipe: Config | None, method: Method) -> dict[str, float]:
    """Return the cost of the recipe's first epoch, or of one of MixGRPO's without a recipe. Empty for a method that
    samples no groups."""
    if recipe:
        train = recipe.train
        if recipe.preferences or method.target.follows_reward:
            return {}
        epochs = [method.explorations(shift_grid(train.steps, train.shift), train.group, train.shift, 0, recipe.seed)]
        images = sum(exploration.group for exploration in epochs[0])
    else:
        method = mix_grpo()
        plan = method.rollout.plan
        epochs = [method.explorations(shift_grid(STEPS, 3.0), SAMPLES, 3.0, place * plan.every, 0)
                  for place in range(STEPS - plan.size)]
        images = len(epochs) * SAMPLES
    return {key: round(sum(count(explorations, 1) for explorations in epochs) / images, 2) for key, count in (
        ("evaluations_per_sample", cost.alone), ("evaluations_per_sample_shared", cost.rollout))}
