"""TRL's DDPO trainer, which TRL has no more. What its loop does otherwise is in docs/reference/python.md."""

import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flowgrpo.errors import UserError
from flowgrpo.parts import Above, AtLeast, Range
from flowgrpo.rewards.preprocessing import eight_bit
from flowgrpo.rewards.reward import Batch, Wrapped, as_reward
from flowgrpo.run import align
from flowgrpo.storage import atomic
from flowgrpo.trl.arguments import NamedArguments, check, processes, with_options, wrong_numbers

DRAWS = 2000  # calls of a prompt function, at most


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
        """Flowgrpo's configuration. rank: of the LoRA, None for the default.

        Raises UserError for samples that optimizer steps do not divide, and for what is not supported.
        """
        wrong = [*wrong_numbers(self, RANGES)]
        if not self.train_cfg:
            wrong.append("train_cfg is False, which is not supported: training replays the guidance of the rollout; "
                         "set sample_guidance_scale to 1")
        if self.push_to_hub:
            wrong.append(f"push_to_hub: got {self.push_to_hub!r}, which is not supported: flowgrpo push "
                         "RUN OWNER/NAME uploads a run")
        if wrong:
            raise UserError("; ".join(wrong))
        # DDPO counts an optimizer step in samples, the loop here in updates of an epoch.
        batch = self.train_batch_size * self.train_gradient_accumulation_steps * processes()
        if self.samples % batch:
            raise UserError(f"an epoch has {self.samples} samples (sample_batch_size x sample_num_batches_per_epoch), "
                            f"expected a multiple of an optimizer step's {batch} (train_batch_size x "
                            "train_gradient_accumulation_steps): change one")
        # Advantages: of a prompt's last rewards, or, with a buffer that no prompt fills, of the whole epoch.
        past = {"buffer": self.per_prompt_stat_tracking_buffer_size, "least": self.per_prompt_stat_tracking_min_count}
        if not self.per_prompt_stat_tracking:  # all samples of the epoch are compared
            past = {"buffer": 2**30, "least": 2**30}
        plan = {"plan": {"type": "RandomSubset", "fraction": self.train_timestep_fraction}}
        # Every sample is a group of its own: DDPO compares with the past, not within a group.
        made: dict[str, Any] = {
            "name": self.exp_name, "output": self.output_dir, "method": "ddpo", "seed": self.seed,
            "tracker": self.log_with or "none", "negative_prompt": self.negative_prompts,
            "precision": "fp32" if self.mixed_precision == "no" else self.mixed_precision,
            "parts": {"advantage": {"clamp": self.train_adv_clip_max} | past,
                      "surrogate": {"low": self.train_clip_range, "high": self.train_clip_range},
                      "kernel": {"eta": self.sample_eta}} | (plan if self.train_timestep_fraction < 1 else {}),
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
        return with_options(made, self.options)


# Settings of TRL's that have no counterpart, or that every run does.
UNREAD = ("tracker_kwargs", "accelerator_kwargs", "project_kwargs", "tracker_project_name", "logdir", "allow_tf32",
          "async_reward_computation", "max_workers")
RANGES: dict[str, Range | int] = {**dict.fromkeys((
    "num_epochs", "sample_batch_size", "sample_num_batches_per_epoch", "sample_num_steps", "train_batch_size",
    "train_gradient_accumulation_steps", "train_num_inner_epochs", "save_freq", "num_checkpoint_limit"), 1),
    "seed": 0, "train_learning_rate": Above(0), "train_adam_weight_decay": AtLeast(0),
    "train_adam_beta1": AtLeast(0, below=1), "train_adam_beta2": AtLeast(0, below=1), "train_adam_epsilon": AtLeast(0),
    "train_max_grad_norm": AtLeast(0), "train_adv_clip_max": Above(0), "train_clip_range": AtLeast(0, to=1),
    "train_timestep_fraction": Above(0, to=1)}


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
        self.sd_pipeline.scheduler = DDIMScheduler.from_config(self.sd_pipeline.scheduler.config, clip_sample=False)
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
        counts: Counter[str] = Counter()  # of prompts with their metadata, which are their weights
        for _ in range(min(config.samples * config.num_epochs, DRAWS)):
            text, metadata = prompt_function()
            counts[json.dumps({"prompt": str(text), "metadata": metadata or {}})] += 1
        self.prompts = [json.loads(line) | {"weight": count} for line, count in counts.items()]

        def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Any:
            answer = reward_function(images, tuple(prompts), tuple(metadata))
            return answer[0] if isinstance(answer, tuple) and len(answer) == 2 else answer

        reward.__name__ = getattr(reward_function, "__name__", type(reward_function).__name__).strip("_")
        self._hook, self.reward = image_samples_hook, reward
        check(self.pipeline, {self.reward: 1.0}, self.prompts, keys)
        if given := [name for name in UNREAD if getattr(config, name) != getattr(DDPOConfig(), name)]:
            print(f"DDPOConfig: {', '.join(given)}: not read here")

    @property
    def folder(self) -> Path:
        return Path(self.config.output_dir) / self.config.exp_name

    def train(self, epochs: int | None = None) -> dict[str, Any]:
        """Train, and return the content of summary.json. epochs: in place of the configuration's."""
        keys = self.config.keys(self._rank)
        if epochs is not None:
            keys = with_options(keys, {"train": {"epochs": epochs}})
        hooked = None if self._hook is None else Hooked(self.reward, self._hook, self.folder / "hook")
        rewards: dict[Any, Any] = {self.reward: 1.0} if hooked is None else {hooked: {"weight": 1.0}}
        summary = align(self.pipeline, rewards, self.prompts, resume=bool(self.config.resume_from), **keys)
        if hooked is not None:
            hooked.end_epoch()
        return summary

    def save_model(self, output_dir: str) -> None:
        """Copy the trained weights of the run into another folder."""
        files, folder = sorted(self.folder.glob("*.safetensors")), Path(output_dir)
        if not files:
            raise UserError(f"no trained weights in {self.folder}: call train() first")
        for file in files:
            if self.folder.resolve() != folder.resolve():
                atomic.write_bytes(folder / file.name, file.read_bytes())

    def push_to_hub(self, *_: Any, **__: Any) -> None:
        """Raise UserError: a command does it, which shows first what it sends."""
        raise UserError(f"push_to_hub: not supported here: flowgrpo push {self.folder}")


class Hooked(Wrapped):
    """Reward that collects an epoch's samples for an image hook; the first samples of an epoch end the one before."""

    def __init__(self, function: Callable[..., Any], hook: Callable[..., Any], folder: Path) -> None:
        super().__init__(function.__name__, as_reward(function, function.__name__))
        self.__name__, self.hook, self.log = function.__name__, hook, Log(folder)
        self.epoch, self.batches = -1, list[list[Any]]()
        self._lock = threading.Lock()

    def __call__(self, batch: Batch) -> Any:
        scores = self.reward(batch)
        if batch.epoch is not None:
            with self._lock:
                if batch.epoch != self.epoch:
                    self.end_epoch()
                    self.epoch = batch.epoch
                self.batches.append([batch.samples, tuple(batch.prompts), tuple(batch.metadata),
                                     torch.as_tensor(scores, dtype=torch.float32), {}])
        return scores

    def end_epoch(self) -> None:
        if self.epoch >= 0:
            self.hook(self.batches, self.epoch, self.log)
        self.batches = []


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
        atomic.make_folder(self.folder)
        atomic.append_line(self.folder / "log.jsonl", json.dumps({"step": step} | dict(values), default=str))
