"""TRL's DDPO trainer, which TRL has no more: `DDPOConfig`, `DDPOTrainer` and its pipeline.

    from flowgrpo.trl import DDPOConfig, DDPOTrainer, DefaultDDPOStableDiffusionPipeline

A script of TRL's DDPO runs with this import. What its loop does otherwise is in docs/reference/python.md.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flowgrpo.errors import UserError
from flowgrpo.parts import Above, AtLeast, Range
from flowgrpo.run import align
from flowgrpo.trl.arguments import NamedArguments, check
from flowgrpo.trl.config import SENT, mapping, over, processes, wrong_numbers
from flowgrpo.trl.epochs import Epochs, copy_weights

DRAWS = 2000  # calls of a prompt function, at most
PLAIN = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}


@dataclass
class DDPOConfig(NamedArguments):
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
        return self.sample_batch_size * self.sample_num_batches_per_epoch * processes()

    def __post_init__(self) -> None:
        self.keys(None)

    def keys(self, rank: int | None) -> dict[str, Any]:
        """Return flowgrpo's configuration. rank: of the LoRA, None for the default.

        Raises UserError for samples that optimizer steps do not divide, and for what is not supported.
        """
        wrong = [*wrong_numbers(self, COUNTS, RANGES)]
        if not self.train_cfg:
            wrong.append("train_cfg is False, which is not supported: training replays the guidance of the rollout; "
                         "set sample_guidance_scale to 1")
        if self.push_to_hub:
            wrong.append(f"push_to_hub: got {self.push_to_hub!r}, which is not supported: {SENT}")
        if wrong:
            raise UserError("; ".join(wrong))
        batch = self.train_batch_size * self.train_gradient_accumulation_steps * processes()
        if self.samples % batch:
            raise UserError(f"an epoch has {self.samples} samples (sample_batch_size x sample_num_batches_per_epoch), "
                            f"expected a multiple of an optimizer step's {batch} (train_batch_size x "
                            "train_gradient_accumulation_steps): change one")
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
                      "weight_decay": self.train_adam_weight_decay, "eps": self.train_adam_epsilon,
                      "clip_grad": self.train_max_grad_norm or math.inf,
                      "optimizer": "adamw8bit" if self.train_use_8bit_adam else "adamw",
                      "save_every": self.save_freq, "keep": self.num_checkpoint_limit},
            "eval": {"steps": self.sample_num_steps, "guidance": self.sample_guidance_scale}}
        if rank is not None:
            made["adapter"] = {"rank": rank}
        return over(made, mapping(self.options))


# Settings of TRL's that have no counterpart, or that every run does.
UNREAD = ("tracker_kwargs", "accelerator_kwargs", "project_kwargs", "tracker_project_name", "logdir", "allow_tf32",
          "async_reward_computation", "max_workers")
WHOLE = 2**30
COUNTS = dict.fromkeys((
    "num_epochs", "sample_batch_size", "sample_num_batches_per_epoch", "sample_num_steps", "train_batch_size",
    "train_gradient_accumulation_steps", "train_num_inner_epochs", "save_freq", "num_checkpoint_limit"), 1) | {
        "seed": 0}
RANGES: dict[str, Range] = {
    "train_learning_rate": Above(0), "train_adam_weight_decay": AtLeast(0), "train_adam_beta1": AtLeast(0, below=1),
    "train_adam_beta2": AtLeast(0, below=1), "train_adam_epsilon": AtLeast(0), "train_max_grad_norm": AtLeast(0),
    "train_adv_clip_max": Above(0), "train_clip_range": AtLeast(0, to=1), "train_timestep_fraction": Above(0, to=1)}


class DefaultDDPOStableDiffusionPipeline(NamedArguments):
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


class DDPOTrainer(NamedArguments):
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
        wrapper = sd_pipeline if isinstance(sd_pipeline, DefaultDDPOStableDiffusionPipeline) else None
        self.pipeline = sd_pipeline if wrapper is None else wrapper.sd_pipeline
        self._rank = 0 if wrapper is not None and not wrapper.use_lora else None
        keys = config.keys(self._rank)
        self.prompts = _collect_prompts(prompt_function, config)
        self.epochs = Epochs([], config, image_samples_hook)
        self.reward = _of_ddpo(reward_function)
        default = DDPOConfig()
        check(self.pipeline, {self.reward: 1.0}, self.prompts, keys)
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
            keys = over(keys, {"train": {"epochs": epochs}})
        with self.epochs.of(self.folder):
            return align(self.pipeline, self.epochs.watching({self.reward: 1.0}), self.prompts,
                         resume=bool(self.config.resume_from), **keys)

    def save_model(self, output_dir: str) -> None:
        """Copy the trained weights of the run into a folder."""
        copy_weights(self.folder, output_dir)

    def push_to_hub(self, *_: Any, **__: Any) -> None:
        """Raise UserError: a command does it, which shows first what it sends."""
        raise UserError(f"push_to_hub: not supported here: flowgrpo push {self.folder}")


def _of_ddpo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reward function of TRL's DDPO, which gives (rewards, facts), as `align` takes it."""
    def of_ddpo(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Any:
        answer = function(images, tuple(prompts), tuple(metadata))
        return answer[0] if isinstance(answer, tuple) and len(answer) == 2 else answer

    of_ddpo.__name__ = getattr(function, "__name__", type(function).__name__).strip("_")
    return of_ddpo


def _collect_prompts(prompt_function: Callable[[], tuple[str, Any]], config: DDPOConfig) -> list[dict[str, Any]]:
    """Return the prompts that a function gives, each once, with its frequency as weight."""
    counts: Counter[str] = Counter()
    for _ in range(min(config.samples * config.num_epochs, DRAWS)):
        text, metadata = prompt_function()
        counts[json.dumps({"prompt": str(text), "metadata": metadata or {}})] += 1
    return [json.loads(line) | {"weight": count} for line, count in counts.items()]
