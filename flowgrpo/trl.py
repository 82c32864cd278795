"""Trainers under TRL's names, thin over `align`: `FlowGRPOTrainer`, and the `DDPOTrainer` that TRL had.

    from flowgrpo.trl import DDPOConfig, DDPOTrainer, DefaultDDPOStableDiffusionPipeline

A script of TRL's DDPO runs with this import. What its loop does otherwise is in docs/reference/python.md.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flowgrpo.data import provenance
from flowgrpo.errors import UserError
from flowgrpo.rewards.find import find
from flowgrpo.rewards.preprocessing import eight_bit
from flowgrpo.rewards.reward import Batch, Reward, Wrapped, as_reward
from flowgrpo.run import align
from flowgrpo.storage import atomic
from flowgrpo.storage.json_files import read_lines

DRAWS = 2000  # calls of a prompt function, at most
PLAIN = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}


@dataclass
class FlowGRPOConfig:
    """Settings of `FlowGRPOTrainer`, by the names of TRL's GRPOConfig.

    output_dir, run_name: the run's folder is output_dir/run_name.
    method: presets joined by +; None: mix_grpo, of a language model grpo.
    num_generations: samples per prompt.
    per_device_train_batch_size: rows that go through the model at once. A step generates
        per_device_train_batch_size x gradient_accumulation_steps x processes samples.
    max_steps: rollout rounds; below 0 num_train_epochs passes over the prompts.
    epsilon: bounds of the ratio; None: the method's.
    beta: weight of the KL; None: the method's.
    num_inference_steps, guidance_scale: of a rollout.
    eval_steps, save_steps: rounds between; 0: only at the end.
    reward_weights: of reward_funcs.
    lora_r: 0 trains the model itself.
    options: any further keys of flowgrpo's configuration, such as {"eval": {"prompts": 8}}.
    """

    output_dir: str = "runs"
    run_name: str = "trl"
    method: str | None = None
    learning_rate: float = 3e-4
    num_train_epochs: float = 1.0
    max_steps: int = -1
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_generations: int = 8
    num_iterations: int = 1
    num_inference_steps: int = 10
    guidance_scale: float = 1.0
    beta: float | None = None
    epsilon: float | None = None
    max_grad_norm: float = 1.0
    weight_decay: float = 1e-4
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    warmup_steps: int = 0
    lr_scheduler_type: str = "constant"
    gradient_checkpointing: bool = False
    max_completion_length: int | None = None
    bf16: bool = False
    fp16: bool = False
    seed: int = 0
    save_steps: int = 50
    eval_steps: int = 0
    report_to: str = "none"
    reward_weights: list[float] | None = None
    lora_r: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def keys(self, prompts: int) -> dict[str, Any]:
        """Return flowgrpo's configuration. prompts: number of training prompts.

        Raises UserError if a step's samples are no whole groups.
        """
        _require_numbers(self, 1, "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations",
                         "num_iterations", "num_inference_steps")
        if not isinstance(self.max_steps, int) or isinstance(self.max_steps, bool):
            raise UserError(f"max_steps: got {self.max_steps!r}, expected an integer")
        if not (_is_number(self.num_train_epochs) and 0 < self.num_train_epochs < math.inf):
            raise UserError(f"num_train_epochs: got {self.num_train_epochs!r}, expected a number above 0")
        samples = self.per_device_train_batch_size * self.gradient_accumulation_steps * _processes()
        if samples % self.num_generations:
            raise UserError(f"a step has {samples} samples (per_device_train_batch_size x gradient_accumulation_steps "
                            f"x processes), expected a multiple of num_generations, {self.num_generations}")
        groups = samples // self.num_generations
        rounds = self.max_steps if self.max_steps > 0 else math.ceil(self.num_train_epochs * prompts / groups)
        parts: dict[str, Any] = {"kl": {"weight": self.beta}} if self.beta is not None else {}
        if self.epsilon is not None:
            parts["surrogate"] = {"low": self.epsilon, "high": self.epsilon}
        train = {"epochs": max(rounds, 1), "prompts": groups, "group": self.num_generations,
                 "micro_batch": self.per_device_train_batch_size, "inner_epochs": self.num_iterations,
                 "steps": self.num_inference_steps, "guidance": self.guidance_scale, "lr": self.learning_rate,
                 "clip_grad": self.max_grad_norm, "weight_decay": self.weight_decay,
                 "betas": (self.adam_beta1, self.adam_beta2), "warmup": self.warmup_steps,
                 "schedule": self.lr_scheduler_type, "checkpointing": self.gradient_checkpointing,
                 "save_every": self.save_steps}
        made: dict[str, Any] = {
            "name": self.run_name, "output": self.output_dir, "parts": parts, "seed": self.seed,
            "tracker": self.report_to, "precision": "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32",
            "train": train, "eval": {"every": self.eval_steps}}
        if self.method is not None:
            made["method"] = self.method
        if self.lora_r is not None:
            made["adapter"] = {"rank": self.lora_r}
        if self.max_completion_length is not None:
            made["text"] = {"max_tokens": self.max_completion_length}
        return _over(made, _mapping(self.options))


class FlowGRPOTrainer:
    """Trainer with the arguments of TRL's GRPOTrainer; `train()` returns the summary of `align`.

    model: as of `align`.
    reward_funcs: a name or a function, or several. A function takes flowgrpo's (images, prompts[, metadata]), or by
        name TRL's prompts, completions and the columns of the prompts. Completions are images [B, 3, H, W] in [0, 1],
        or those of a language model.
    args: a `FlowGRPOConfig`.
    train_dataset: prompts, or records with a `prompt`, whose other columns are metadata; a prompt file or set by name.
    eval_dataset: the held-out prompts, a file.
    processing_class: tokenizer of a loaded language model.
    callbacks: of transformers; on_train_begin, on_log, on_step_end and on_train_end are called, and what they ask for
        is not read.
    peft_config: its r and lora_alpha.
    """

    def __init__(self, model: Any, reward_funcs: Any, args: FlowGRPOConfig | None = None, train_dataset: Any = None,
                 eval_dataset: str | None = None, processing_class: Any = None,
                 callbacks: Sequence[Any] | None = None, peft_config: Any = None) -> None:
        if train_dataset is None:
            raise UserError("FlowGRPOTrainer: got no train_dataset, expected strings or records with a prompt")
        self.args = args or FlowGRPOConfig()
        self.model = (model, processing_class) if processing_class is not None else model
        self.prompts = train_dataset if isinstance(train_dataset, str) else [_record(row) for row in train_dataset]
        self.epochs = Epochs(callbacks or [], self.args)
        functions = reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        weights = self.args.reward_weights or [1.0] * len(functions)
        if len(weights) != len(functions):
            raise UserError(f"reward_weights: got {len(weights)} for {len(functions)} reward_funcs: give one for each")
        self.rewards = {_function(function): weight for function, weight in zip(functions, weights)}
        self.options: dict[str, Any] = {} if eval_dataset is None else {"held_out": eval_dataset}
        if peft_config is not None:
            if missing := [key for key in ("r", "lora_alpha") if not hasattr(peft_config, key)]:
                raise UserError(f"peft_config: got a {type(peft_config).__name__} without {' and '.join(missing)}, "
                                "expected a LoraConfig of peft")
            self.options["adapter"] = {"rank": peft_config.r, "alpha": peft_config.lora_alpha}

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self.args.output_dir) / self.args.run_name

    def train(self, resume_from_checkpoint: bool = False) -> dict[str, Any]:
        """Train, and return the content of summary.json."""
        from flowgrpo.data.prompts import load_prompts

        count = len(load_prompts(self.prompts)) if isinstance(self.prompts, str) else len(self.prompts)
        keys = _over(self.args.keys(count), self.options)
        with self.epochs.of(self.folder):
            return align(self.model, self.epochs.watching(self.rewards), self.prompts, resume=resume_from_checkpoint,
                         **keys)

    def save_model(self, output_dir: str) -> None:
        """Copy the trained weights of the run into a folder."""
        _saved(self.folder, output_dir)


@dataclass
class DDPOConfig:
    """Settings of `DDPOTrainer`, by TRL's names, with its defaults; mixed_precision is "no" by default.

    options: any further keys of flowgrpo's configuration. The fields of `UNREAD` are taken and not read.
    """

    exp_name: str = "ddpo"
    output_dir: str = "runs"
    log_with: str | None = None
    tracker_kwargs: dict[str, Any] = field(default_factory=dict)
    accelerator_kwargs: dict[str, Any] = field(default_factory=dict)
    project_kwargs: dict[str, Any] = field(default_factory=dict)
    tracker_project_name: str = "trl"
    logdir: str = "logs"
    seed: int = 0
    num_epochs: int = 100
    save_freq: int = 1
    num_checkpoint_limit: int = 5
    mixed_precision: str = "no"
    allow_tf32: bool = True
    resume_from: str = ""
    sample_num_steps: int = 50
    sample_eta: float = 1.0
    sample_guidance_scale: float = 5.0
    sample_batch_size: int = 1
    sample_num_batches_per_epoch: int = 2
    train_batch_size: int = 1
    train_use_8bit_adam: bool = False
    train_learning_rate: float = 3e-4
    train_adam_beta1: float = 0.9
    train_adam_beta2: float = 0.999
    train_adam_weight_decay: float = 1e-4
    train_adam_epsilon: float = 1e-8
    train_gradient_accumulation_steps: int = 1
    train_max_grad_norm: float = 1.0
    train_num_inner_epochs: int = 1
    train_cfg: bool = True
    train_adv_clip_max: float = 5.0
    train_clip_range: float = 1e-4
    train_timestep_fraction: float = 1.0
    per_prompt_stat_tracking: bool = False
    per_prompt_stat_tracking_buffer_size: int = 16
    per_prompt_stat_tracking_min_count: int = 16
    async_reward_computation: bool = False
    max_workers: int = 2
    negative_prompts: str = ""
    push_to_hub: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Samples of an epoch, of all processes."""
        return self.sample_batch_size * self.sample_num_batches_per_epoch * _processes()

    def keys(self, rank: int | None) -> dict[str, Any]:
        """Return flowgrpo's configuration. rank: of the LoRA, None for the default.

        Raises UserError for samples that optimizer steps do not divide, and for what is not supported.
        """
        _require_numbers(self, 1, *COUNTS)
        batch = self.train_batch_size * self.train_gradient_accumulation_steps * _processes()
        if self.samples % batch:
            raise UserError(f"an epoch has {self.samples} samples (sample_batch_size x sample_num_batches_per_epoch), "
                            f"expected a multiple of an optimizer step's {batch} (train_batch_size x "
                            "train_gradient_accumulation_steps): change one")
        if not self.train_cfg:
            raise UserError("train_cfg is False, which is not supported: training replays the guidance of the rollout; "
                            "set sample_guidance_scale to 1")
        tracked = self.per_prompt_stat_tracking
        history = {"buffer": self.per_prompt_stat_tracking_buffer_size,
                   "least": self.per_prompt_stat_tracking_min_count} if tracked else \
            {"buffer": WHOLE, "least": WHOLE}  # so that all samples of the epoch are compared
        plan = {} if self.train_timestep_fraction >= 1 else \
            {"plan": {"type": "RandomSubset", "fraction": self.train_timestep_fraction}}
        made: dict[str, Any] = {
            "name": self.exp_name, "output": self.output_dir, "method": "ddpo", "seed": self.seed,
            "tracker": self.log_with or "none", "negative_prompt": self.negative_prompts,
            "precision": PLAIN.get(self.mixed_precision, self.mixed_precision),
            "parts": {"advantage": {"clamp": self.train_adv_clip_max} | history,
                      "surrogate": {"low": self.train_clip_range, "high": self.train_clip_range},
                      "kernel": {"eta": self.sample_eta}} | plan,
            "train": {"epochs": self.num_epochs, "prompts": self.samples, "group": 1,
                      "micro_batch": self.train_batch_size, "updates": self.samples // batch,
                      "inner_epochs": self.train_num_inner_epochs, "steps": self.sample_num_steps,
                      "guidance": self.sample_guidance_scale, "lr": self.train_learning_rate,
                      "betas": (self.train_adam_beta1, self.train_adam_beta2),
                      "weight_decay": self.train_adam_weight_decay, "clip_grad": self.train_max_grad_norm,
                      "optimizer": "adamw8bit" if self.train_use_8bit_adam else "adamw",
                      "save_every": self.save_freq, "keep": self.num_checkpoint_limit},
            "eval": {"steps": self.sample_num_steps, "guidance": self.sample_guidance_scale}}
        if rank is not None:
            made["adapter"] = {"rank": rank}
        return _over(made, _mapping(self.options))


# Settings of TRL's that have no counterpart, or that every run does.
UNREAD = ("tracker_kwargs", "accelerator_kwargs", "project_kwargs", "tracker_project_name", "logdir", "allow_tf32",
          "train_adam_epsilon", "async_reward_computation", "max_workers")
WHOLE = 2**30
COUNTS = ("num_epochs", "sample_batch_size", "sample_num_batches_per_epoch", "sample_num_steps", "train_batch_size",
          "train_gradient_accumulation_steps", "train_num_inner_epochs")
MOMENTS = ("on_train_begin", "on_log", "on_step_end", "on_train_end")  # of callbacks


class DefaultDDPOStableDiffusionPipeline:
    """Stable Diffusion with a DDIM scheduler, as TRL's class of that name.

    pretrained_model_name: a hub id or a folder. use_lora: False trains the U-Net itself.
    """

    def __init__(self, pretrained_model_name: str, *, pretrained_model_revision: str = "main", use_lora: bool = True
                 ) -> None:
        from diffusers import DDIMScheduler, StableDiffusionPipeline

        here = Path(pretrained_model_name).is_dir()
        try:
            self.sd_pipeline = StableDiffusionPipeline.from_pretrained(
                pretrained_model_name, revision=None if here else pretrained_model_revision)
        except (OSError, ValueError) as error:  # the second: of the hub, for a name that is none
            raise UserError(f"pretrained_model_name: {pretrained_model_name!r} does not load "
                            f"({' '.join(str(error).split())[:200]}): expected a folder of a Stable Diffusion, or a "
                            "hub id OWNER/NAME") from None
        self.sd_pipeline.scheduler = DDIMScheduler.from_config(self.sd_pipeline.scheduler.config,
                                                                 clip_sample=False)
        self.use_lora = use_lora


class DDPOTrainer:
    """TRL's DDPO trainer: `train()` runs `align` with the method `ddpo`, and returns its summary.

    reward_function: (images [B, 3, H, W] in [0, 1], B prompts, B entries of metadata) to B rewards and further facts.
    prompt_function: () to a prompt and its metadata; it is called once for each sample, at most DRAWS times, and the
        prompts that it gave are sampled as often as it gave them.
    sd_pipeline: a loaded pipeline of diffusers, or that of `DefaultDDPOStableDiffusionPipeline`.
    image_samples_hook: (batches, epoch, log), after each epoch; a batch is [images, prompts, metadata, rewards, facts],
        and log has `log_images` and `log`, which write into the run's folder.
    """

    def __init__(self, config: DDPOConfig, reward_function: Callable[..., Any],
                 prompt_function: Callable[[], tuple[str, Any]], sd_pipeline: Any,
                 image_samples_hook: Callable[..., Any] | None = None) -> None:
        self.config = config
        _require_numbers(config, 1, *COUNTS)
        wrapper = sd_pipeline if isinstance(sd_pipeline, DefaultDDPOStableDiffusionPipeline) else None
        self.pipeline = sd_pipeline if wrapper is None else wrapper.sd_pipeline
        self._rank = 0 if wrapper is not None and not wrapper.use_lora else None
        self.prompts = _drawn(prompt_function, config)
        self.epochs = Epochs([], config, image_samples_hook)
        self.reward = _of_ddpo(reward_function)
        default = DDPOConfig()
        if given := [name for name in UNREAD if getattr(config, name) != getattr(default, name)]:
            print(f"DDPOConfig: {', '.join(given)}: not read here")

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self.config.output_dir) / self.config.exp_name

    def train(self, epochs: int | None = None) -> dict[str, Any]:
        """Train, and return the content of summary.json. epochs: in place of the configuration's."""
        keys = self.config.keys(self._rank)
        if epochs is not None:
            keys = _over(keys, {"train": {"epochs": epochs}})
        with self.epochs.of(self.folder):
            return align(self.pipeline, self.epochs.watching({self.reward: 1.0}), self.prompts,
                         resume=bool(self.config.resume_from), **keys)

    def save_model(self, output_dir: str) -> None:
        """Copy the trained weights of the run into a folder."""
        _saved(self.folder, output_dir)

    def push_to_hub(self, *_: Any, **__: Any) -> None:
        """Raise UserError: a command does it, which shows first what it sends."""
        raise UserError(f"push_to_hub: not supported here: flowgrpo push {self.folder}")


class Epochs:
    """Ends of a run's epochs, told to callbacks and to an image hook.

    The first reward of a run is watched: the first samples of an epoch, or the end of the run, end the one before.
    """

    def __init__(self, callbacks: Sequence[Any], args: Any, hook: Callable[..., Any] | None = None) -> None:
        if not isinstance(callbacks, (list, tuple)):
            raise UserError(f"callbacks: got a value of type {type(callbacks).__name__}, expected a list of callbacks")
        for callback in callbacks:
            if isinstance(callback, type) or not all(callable(getattr(callback, moment, None)) for moment in MOMENTS):
                raise UserError(f"callbacks: got {' '.join(repr(callback).split())[:80]}, expected objects of a "
                                "TrainerCallback of transformers")
        self.callbacks, self.args, self.hook = list(callbacks), args, hook
        self.folder, self.epoch, self.batches = Path(), -1, list[list[Any]]()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def of(self, folder: Path) -> Iterator[None]:
        """Context manager of a run in that folder."""
        self.folder, self.epoch = folder, -1
        self._tell("on_train_begin")
        yield
        self._end()
        self._tell("on_train_end")

    def watching(self, rewards: Mapping[Any, float]) -> dict[Any, Any]:
        """Return rewards with their rules, the first one watched if anybody listens."""
        if not (self.callbacks or self.hook):
            return dict(rewards)
        first, *others = rewards
        function = find(first) if isinstance(first, str) else first
        place = provenance.place(function)
        rule = {"weight": rewards[first]} | ({} if place is None or isinstance(first, str) else {"use": place})
        name = first if isinstance(first, str) else getattr(first, "__name__", type(first).__name__)
        return {Watched(name, as_reward(function, name), self): rule} | {key: rewards[key] for key in others}

    def add(self, batch: Batch, scores: Any) -> None:
        """Take samples of an epoch with their scores."""
        if batch.epoch is None:
            return
        with self._lock:
            if batch.epoch != self.epoch:
                self._end()
                self.epoch = batch.epoch
            if self.hook:
                self.batches.append([batch.samples, tuple(batch.prompts), tuple(batch.metadata),
                                     torch.as_tensor(scores, dtype=torch.float32), {}])

    def _end(self) -> None:
        """End the epoch of which there are samples."""
        if self.epoch < 0:
            return
        if self.hook:
            self.hook(self.batches, self.epoch, Log(self.folder / "hook"))
        self.batches = []
        if self.callbacks:
            lines = read_lines(self.folder / "metrics.jsonl")
            self._tell("on_log", logs=lines[-1] if lines else {})
            self._tell("on_step_end")

    def _tell(self, moment: str, **further: Any) -> None:
        from transformers import TrainerControl, TrainerState

        state = TrainerState(global_step=max(self.epoch, 0), epoch=float(max(self.epoch, 0)))
        for callback in self.callbacks:
            getattr(callback, moment)(self.args, state, TrainerControl(), **further)


class Watched(Wrapped):
    """Reward whose samples and scores of an epoch are passed on."""

    def __init__(self, name: str, reward: Reward, epochs: Epochs) -> None:
        super().__init__(name, reward)
        self.__name__, self.epochs = name, epochs

    def __call__(self, batch: Batch) -> Any:
        scores = self.reward(batch)
        self.epochs.add(batch, scores)
        return scores


class Log:
    """Place of what an image hook logs: files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def log_images(self, images: Mapping[str, Any], step: int, **_: Any) -> None:
        """Write images [1, 3, H, W] in [0, 1] as PNGs, with their captions in captions.json."""
        from PIL import Image

        folder = self.folder / f"epoch_{step:04}"
        folder.mkdir(parents=True, exist_ok=True)
        for number, image in enumerate(images.values()):
            Image.fromarray(eight_bit(torch.as_tensor(image).reshape(-1, *image.shape[-3:])[0])).save(
                folder / f"{number:03}.png")
        atomic.write_text(folder / "captions.json", json.dumps(list(images), ensure_ascii=False, indent=1))

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        """Add a line to log.jsonl."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step} | dict(values), default=str) + "\n")


def _processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _require_numbers(config: Any, least: int, *names: str) -> None:
    """Raise UserError for the first of a configuration's fields that is no integer of `least` or more."""
    for name in names:
        if not isinstance(value := getattr(config, name), int) or isinstance(value, bool) or value < least:
            raise UserError(f"{name}: got {value!r}, expected an integer of {least} or more")


def _mapping(options: Any) -> Mapping[str, Any]:
    if not isinstance(options, Mapping):
        raise UserError(f"options: got {' '.join(repr(options).split())[:80]}, expected a dictionary of flowgrpo's "
                        "keys")
    return options


def _over(base: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys with nested ones over those of a base."""
    result = dict(base)
    for key, value in keys.items():
        below = result.get(key)
        result[key] = _over(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return result


def _record(row: Any) -> dict[str, Any]:
    """Return a record of a dataset as a line of a prompt file: other columns than the prompt are metadata."""
    if isinstance(row, str):
        return {"prompt": row}
    if not isinstance(row, Mapping) or not isinstance(row.get("prompt"), str):
        raise UserError(f"train_dataset: got {' '.join(repr(row).split())[:80]}, expected strings or records with a "
                        "prompt that is a string")
    own = {key: row[key] for key in ("prompt", "image", "metadata") if key in row}
    further = {key: value for key, value in row.items() if key not in own}
    return own | ({"metadata": further | dict(own.get("metadata", {}))} if further else {})


def _function(function: Any) -> Any:
    """Return a reward as `align` takes it: one that names `completions` is called as TRL does."""
    if not callable(function) or "completions" not in inspect.signature(function).parameters:
        return function

    def of_trl(outputs: Any, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Any:
        columns = {key: [entry.get(key) for entry in metadata] for key in {key for entry in metadata for key in entry}}
        takes = inspect.signature(function).parameters
        named = columns | {"prompts": list(prompts), "completions": outputs}
        every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
        return function(**{key: value for key, value in named.items() if every or key in takes})

    of_trl.__name__ = getattr(function, "__name__", type(function).__name__)
    return of_trl


def _of_ddpo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reward function of TRL's DDPO, which gives (rewards, facts), as `align` takes it."""
    def of_ddpo(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Any:
        answer = function(images, tuple(prompts), tuple(metadata))
        return answer[0] if isinstance(answer, tuple) and len(answer) == 2 else answer

    of_ddpo.__name__ = getattr(function, "__name__", type(function).__name__).strip("_")
    return of_ddpo


def _drawn(prompt_function: Callable[[], tuple[str, Any]], config: DDPOConfig) -> list[dict[str, Any]]:
    """Return the prompts that a function gives, each once, with its frequency as weight."""
    counts: Counter[str] = Counter()
    for _ in range(min(config.samples * config.num_epochs, DRAWS)):
        text, metadata = prompt_function()
        counts[json.dumps({"prompt": str(text), "metadata": metadata or {}})] += 1
    return [json.loads(line) | {"weight": count} for line, count in counts.items()]


def _saved(folder: Path, output_dir: str) -> None:
    """Copy the weights files of a run into another folder."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"no trained weights in {folder}: call train() first")
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    for file in files:
        if file.parent.resolve() != Path(output_dir).resolve():
            atomic.write_bytes(Path(output_dir) / file.name, file.read_bytes())
