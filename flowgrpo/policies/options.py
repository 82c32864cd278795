"""Options that do not go together: all checks of them in their order, and those of `load`, `adapter` and `image`; and
defaults that depend on the model.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flowgrpo.config.schema import Config
from flowgrpo.config.sections import PIXELS, Image, Load
from flowgrpo.errors import UserError
from flowgrpo.methods import keys_read
from flowgrpo.methods.method import Method
from flowgrpo.methods.setup import Setup, require_compatible
from flowgrpo.methods.targets import LatentEdits
from flowgrpo.methods.validate import check_recorded_pairs, check_supervised, resolve
from flowgrpo.objectives import references
from flowgrpo.policies import build, sources
from flowgrpo.policies.pipelines import attention, encoded_prompts, few_steps
from flowgrpo.policies.weights import lora_files, memory_options, sharding
from flowgrpo.starter import EVAL, FOLDERS

OF_LANGUAGE = "grpo"  # the method of a language model whose recipe names none


def setup_of(config: Config, kind: str = "", device: str | torch.device = "cpu") -> Setup:
    """Setup of a configuration without a run. kind: of the model, where the configuration does not tell."""
    kind = kind or build.kind(config)
    return Setup(config, kind, resolve(config, build.process(kind)), device=device)


def check_method(config: Config, kind: str, device: str | torch.device) -> Method:
    """Check a configuration's keys and options without a run; return its method. kind: of the model."""
    setup = setup_of(config, kind, device)
    keys_read.check(setup)
    check(setup)
    return setup.method


def check(setup: Setup) -> None:
    """Raise UserError for options that conflict with each other, the method or the device."""
    for each in (require_load, require_init, require_memory, require_ahead,
                 memory_options.require_waiting, sharding.require_shardable,
                 attention.require_context_parallel, require_sizes, check_recorded_pairs, check_supervised):
        each(setup)


def require_load(setup: Setup) -> None:
    """Raise UserError for settings of `load` that the model does not read."""
    config = setup.config
    if setup.loaded is None:
        sources.require(config.model, config.load, config.memory.weights)
        if config.load.ip_adapter is not None and not config.adapter.rank:
            raise UserError("load.ip_adapter is set, but adapter.rank is 0, which would train the IP-Adapter's weights "
                            "too: set a rank")
        return
    for name, value in config.load:
        if value != getattr(Load(), name):
            raise UserError(f"load.{name} is {value!r}, but the model is an object that is loaded already: leave it "
                            "out, and load the object that way")


def require_init(setup: Setup) -> None:
    """Raise UserError for an `adapter.init` that is not here, or that the run does not read."""
    config, method = setup.config, setup.method
    if config.adapter.init is None:
        return
    if not config.adapter.rank or isinstance(method.target, LatentEdits):
        what = "adapter.rank is 0" if not config.adapter.rank else f"method {config.method} trains an edit policy"
        raise UserError(f"adapter.init is {config.adapter.init!r}, but {what}, so no LoRA is trained: leave it "
                        "out")
    lora_files.require_lora("adapter.init", config.adapter.init)
    path, cls, modules, trained = Path(config.adapter.init), None, dict[str, torch.nn.Module](), ["model"]
    if setup.kind == build.PIPELINE:
        from flowgrpo.policies.pipelines import load

        cls, modules = load.skeleton(config.model, config.load) if setup.loaded is None else (
            type(setup.loaded), load.denoisers(setup.loaded) | load.text_encoders(setup.loaded))
    if (start := lora_files.start_of(path, cls, modules)) is None:  # loading says what it is
        return
    if setup.kind == build.PIPELINE:
        adapted = method.rollout.adapted
        trained = [name for name in modules or dict.fromkeys(key.partition(".")[0] for key in start.ranks)
                   if (adapted.encoders if name.startswith(lora_files.ENCODER) else adapted.denoisers)]
    lora_files.require_start("adapter.init", path, start, config.adapter, trained, modules)


def require_memory(setup: Setup) -> None:
    """Raise UserError for conflicting options of the sections `memory`, `adapter` and `train`, and for those that the
    device lacks or whose package is absent."""
    config, method, device = setup.config, setup.method, torch.device(setup.device)
    weights, adapter = config.memory.weights, config.adapter
    attention.require_attention(config.memory.attention, device, config.precision)
    setting = f"memory.weights is {weights!r}" if weights != "full" else \
        f"load.denoiser is {config.load.denoiser!r}" if config.load.gguf else None
    # What quantises needs its package, its device, and weights that are not loaded yet.
    if weights != "full":
        memory_options.require_package(f"memory.weights is {weights!r}", memory_options.PACKAGES[weights])
        if setup.loaded is not None:
            raise UserError(f"{setting}, but the pipeline is loaded already: quantise it when you load it, with 'full' "
                            "here")
        if weights == "nf4" and device.type == "cpu":
            raise UserError(f"{setting}, which diffusers loads only onto a GPU: use int8 here")
    if setting:  # what changes or reads quantised weights
        if not adapter.rank:
            raise UserError(f"{setting}, but adapter.rank is 0: quantised weights cannot be trained, only a LoRA on "
                            "them")
        if adapter.dora:
            raise UserError(f"{setting}, but adapter.dora reads the lengths of whole weights: set one of them back")
        preview = method.rollout.preview
        if preview and preview.precision != "full":
            raise UserError(f"{setting}, and parts.preview.precision {preview.precision!r}: weights are quantised once")
    # A LoRA's own options, and what reads its weights as plain products B A.
    if not adapter.rank and (adapter.dora or adapter.rslora):
        raise UserError("adapter.rank is 0, which trains all weights without a LoRA: take adapter.dora and "
                        "adapter.rslora away, or set a rank")
    if isinstance(method.loss.reference, references.Soup):
        _require_models(config, "Soup", method.loss.reference.models)
    if isinstance(method.loss.reference, references.Teachers):
        _require_models(config, "Teachers", [path for _, path in method.loss.reference.models])
    if adapter.dora and isinstance(method.loss.reference, (references.WeightAverage, references.Soup)):
        raise UserError("a WeightAverage or Soup averages products of LoRAs, which with adapter.dora have lengths "
                        "besides: use the reference EMA or PreviousPolicy, or adapter.dora: false")
    if config.train.optimizer == "adamw8bit":
        memory_options.require_package("train.optimizer is 'adamw8bit'", "bitsandbytes")


def require_ahead(setup: Setup) -> None:
    """Raise UserError for options that conflict with `memory.encoders: ahead`."""
    config, method = setup.config, setup.method
    if config.memory.encoders != "ahead":
        return
    wrong = {"a model that is loaded already: use cpu": setup.loaded is not None,
             "memory.denoiser: cpu, which would never wait: use keep": config.memory.denoiser == "cpu",
             "the method of edits, which encodes by itself: use cpu": isinstance(method.target, LatentEdits),
             "memory.shard: use cpu": bool(config.memory.shard),
             "memory.context_parallel: use cpu": config.memory.context_parallel > 1}
    require_compatible("memory.encoders is ahead", wrong)
    encoded_prompts.require(config)


def _require_models(config: Config, name: str, models: Sequence[str]) -> None:
    """Raise UserError for a model of a reference that is not here, and for sharded weights."""
    if models and config.memory.shard:
        raise UserError(f"parts.reference {name} reads whole weights, and memory.shard is set: set it to false, or use "
                        "the reference Base")
    for model in models:
        if config.adapter.rank:
            lora_files.require_lora("parts.reference.models", model)
        elif not Path(model).is_dir():
            raise UserError(f"parts.reference.models: {model!r} is no folder, expected one with a model's weights")


def require_sizes(setup: Setup) -> None:
    """Raise UserError for options that conflict with `image.sizes`."""
    config, method = setup.config, setup.method
    if not config.image.sizes or method.for_tokens:
        return
    wrong = {f"method {config.method}, which trains more than the denoiser: use another":
             isinstance(method.target, LatentEdits) or method.denoising.learned_noise is not None,
             "preferences, whose images have sizes of their own: leave one of them out":
             config.preferences is not None,
             "parts.preview, which compares images of one size: leave sol_rl out":
             method.denoising.preview is not None,
             "memory.shard: use false": bool(config.memory.shard)}
    require_compatible("image.sizes is set", wrong)


def check_call(setup: Setup) -> None:
    """Raise UserError for arguments of calls that the model's pipeline does not take, or that other keys set, as far as
    it is known before it is loaded."""
    config = setup.config
    steps = {"eval.steps": config.eval.steps, "train.steps": config.train.steps if config.train.grid == "stock" else 0}
    for name, (key, count) in itertools.product(("sigmas", "timesteps"), steps.items()):
        if (given := config.image.call.get(name)) and count and len(given) != count:
            raise UserError(f"image.call has {len(given)} {name}, and {key} is {count}: set it to {len(given)}, or "
                            f"leave {name} out")
    if config.image != Image() and setup.kind == build.PIPELINE and setup.loaded is None:
        from flowgrpo.policies.pipelines import call, conditioned, prompt_inputs

        if (cls := conditioned.class_of(config)) is not None:
            _, further, images = prompt_inputs.split_arguments(cls, config.call, config.fps)
            call.require_arguments(cls, further | images)


def check_frames(setup: Setup) -> None:
    """Raise UserError for numbers of frames that the model does not make, as far as it is known."""
    config, call = setup.config, setup.config.call
    frames = config.eval.frames
    if frames and (pixels := frames * call.get("height", 8) * call.get("width", 8)) > PIXELS:
        raise UserError(f"eval.frames is {frames}, whose clips have {pixels:,} pixels: expected {PIXELS:,} at most")
    require_frames(setup, {"eval.frames": frames, "image.frames": call.get("num_frames")})


def require_frames(setup: Setup, counts: Mapping[str, int | None]) -> None:
    """Raise UserError for numbers of frames, by their keys, that the model does not make, as far as it is known."""
    config = setup.config
    if any(counts.values()):
        from flowgrpo.policies.pipelines import frames as clips

        known = clips.ahead(Path(FOLDERS.get(config.model, config.model))) if setup.loaded is None else setup.loaded
        for key, count in counts.items() if known is not None and setup.kind == build.PIPELINE else ():
            if count:
                clips.require(key, count, known)


def fitting(config: Config, loaded: Any = None) -> tuple[Config, str]:
    """Configuration whose absent keys fit the model, and what is to be said of it; empty for nothing.

    A language model gets its method, one of image tokens the guidance of its rollout in evaluations, a packaged model
    the evaluation of its card, a model of few steps its method, steps, grid and guidance.
    """
    if config.text.generates == "image" and "guidance" not in config.eval.model_fields_set:
        scale = config.train.guidance
        config = config.having({"eval.guidance": scale})
        return fitting(config, loaded)[0], f"eval.guidance {scale:g}, that of the rollout (train.guidance)"
    # A name that may be of the hub costs a request: only one with a slash is asked for.
    if "method" not in config.model_fields_set:
        here = sources.is_file(config.model) or Path(FOLDERS.get(config.model, config.model)).exists()
        language = build.kind(config, loaded) != build.PIPELINE if loaded is not None or here else \
            "/" in config.model and "model_type" in build.on_hub(config.model, config.load.revision)
        if language:
            return config.model_copy(update={"method": OF_LANGUAGE}), ""
    if isinstance(loaded, tuple):
        return config, ""
    given = config
    if card := EVAL.get(config.model):
        own = {"steps": card["num_inference_steps"], "guidance": card["guidance"]}
        config = config.having({f"eval.{key}": value for key, value in own.items()
                                if key not in config.eval.model_fields_set})
    # What the model says of its steps wins over defaults, never over what is given.
    facts = few_steps.ahead(config.model, config.load) if loaded is None else few_steps.of_pipe(
        loaded, config.model, config.load)
    if (why := facts.why) is None or build.kind(config, loaded) != build.PIPELINE:
        return config, ""
    fitted = few_steps.few_step_config(config, facts)
    said = few_steps.describe_changes(given, fitted)
    return fitted, f"a model of few steps ({why}), so by default: {said}" if said else ""
