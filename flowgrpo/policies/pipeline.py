"""Any diffusers pipeline as a policy, driven through its own `__call__`.

No line here knows a latent's shape, a model's embeddings or its guidance: the pipeline draws its own noise, encodes its
own prompts (once; the result is kept and given back to it) and applies its own guidance. See samplers/scheduler.py.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flowgrpo.errors import UserError
from flowgrpo.policies.adapters import Weights
from flowgrpo.samplers.scheduler import PolicyScheduler, Record, Task

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STARTER = Path(__file__).parent.parent / "starter" / "model"
DENOISERS = ("transformer", "transformer_2", "unet", "prior")


@dataclass(frozen=True)
class Conditioning:
    """Encoded prompts: what each call of `encode_prompt` returned, tensors with one row per prompt (None where absent)."""

    prompts: list[str]
    negatives: list[str]
    encoded: tuple[Any, ...]

    def rows(self, index: torch.Tensor) -> Conditioning:
        """The rows `index` (int64 [B]); a row may be taken several times."""
        picked = index.tolist()
        take = [part[index.to(part.device)] if torch.is_tensor(part) else part for part in self.encoded]
        return Conditioning([self.prompts[i] for i in picked], [self.negatives[i] for i in picked], tuple(take))


def load_pipeline(model: str, precision: str = "fp32", trust_remote_code: bool = False):
    """Load a diffusers pipeline from the package (`starter`), a directory or a hub id. UserError where it does not load."""
    from diffusers import DiffusionPipeline
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for library in (diffusers_logging, transformers_logging):
        library.disable_progress_bar()
    source = STARTER if model == "starter" else model
    try:
        # A component that the index names as absent has to be passed as None, unless its class calls it optional.
        index = DiffusionPipeline.load_config(source)
        absent = {name: None for name, value in index.items() if isinstance(value, list) and value[0] is None}
        pipe = DiffusionPipeline.from_pretrained(source, dtype=DTYPES[precision],
                                                 trust_remote_code=trust_remote_code, **absent)
    except (OSError, ValueError, ImportError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"cannot load the model {model!r} ({first}): expected 'starter', a directory with a "
                        "model_index.json, or a hub id") from None
    pipe.set_progress_bar_config(disable=True)
    return pipe


class PipelinePolicy:
    """A diffusers pipeline with trainable weights: `encode`, `run`, `replay`, `decode`, and `generate` for evaluation.

    pipe: the pipeline; it is moved to `device` and its scheduler is kept for evaluation.
    call: arguments of every call of the pipeline (height, width, max_sequence_length, ...).
    guidance: the scale of rollouts and replays; precision: of the frozen weights and of the arithmetic.
    """

    def __init__(self, pipe, adapter, *, device="cpu", precision="fp32", guidance=1.0, call=None, checkpointing=False):
        self.pipe, self.guidance, self.call = pipe, guidance, call or {}
        self.device, self.dtype = torch.device(device), DTYPES[precision]
        self.stock = pipe.scheduler
        self.scheduler = PolicyScheduler.over(pipe.scheduler)
        self.evaluations = 0  # rows that went through a denoiser
        pipe.to(self.device)
        self.denoisers = {name: getattr(pipe, name) for name in DENOISERS if getattr(pipe, name, None) is not None}
        for module in pipe.components.values():
            if isinstance(module, torch.nn.Module):
                module.eval().requires_grad_(False)
        for module in self.denoisers.values():
            module.register_forward_pre_hook(self._count, with_kwargs=True)
            if checkpointing:
                module.enable_gradient_checkpointing()
        self.weights = Weights(pipe, self.denoisers, adapter)
        self._call = inspect.unwrap(type(pipe).__call__)
        self._accepts = set(inspect.signature(self._call).parameters)
        self._encode = pipe.encode_prompt

    def _count(self, _module, args, kwargs):
        self.evaluations += len(args[0] if args else kwargs["hidden_states"])

    @torch.no_grad()
    def encode(self, prompts: list[str], negatives: list[str] | None = None) -> Conditioning:
        """Encode P prompts once, exactly as the pipeline's own call would."""
        negatives = negatives or [""] * len(prompts)
        encoded: list[Any] = []

        def remember(*args, **kwargs):
            encoded.extend(self._encode(*args, **kwargs))
            return tuple(encoded)

        # Under guidance in either phase the negative embeddings have to be there.
        blank = Conditioning(prompts, negatives, ())
        self._drive(blank, remember, Task(torch.ones(1), range(0)), guidance=max(self.guidance, 2.0),
                    generator=self.generators(range(len(prompts))))
        return Conditioning(prompts, negatives, tuple(encoded))

    @torch.no_grad()
    def run(self, task: Task, conditioning: Conditioning, latents=None, generators=None, x0=None):
        """Run a segment of the grid from `latents` [B,*D], or from noise drawn with `generators` (one per row).

        Returns (the last state [B,*D], the record of the task).
        """
        record = self.scheduler.follow(task, x0)
        final = self._drive(conditioning, self._cached(conditioning), task, latents=latents, generator=generators,
                            guidance=self.guidance)
        return final, record

    def replay(self, conditioning: Conditioning, x: torch.Tensor, grid: torch.Tensor, step: int) -> torch.Tensor:
        """The model output [B,*D] at one step, through the pipeline's own call, with gradients where enabled."""
        task = Task(grid, range(step, step + 1), replay=True)
        record: Record = self.scheduler.follow(task)
        self._drive(conditioning, self._cached(conditioning), task, latents=x, guidance=self.guidance)
        return record.output

    @torch.no_grad()
    def decode(self, latents: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        """Pictures [B,3,H,W] (or frames [B,F,3,H,W]) in [0, 1]: the pipeline with no steps left to do."""
        task = Task(torch.zeros(1), range(0))
        return self._drive(conditioning, self._cached(conditioning), task, latents=latents, guidance=self.guidance,
                           output_type="pt").float()

    @torch.no_grad()
    def generate(self, conditioning: Conditioning, generators, steps: int, guidance: float, output_type="pt"):
        """Pictures as a user of the stock pipeline gets them: its own scheduler, steps and guidance."""
        return self._drive(conditioning, self._cached(conditioning), None, generator=generators, guidance=guidance,
                           steps=steps, output_type=output_type)

    def _cached(self, conditioning: Conditioning):
        return lambda *_, **__: conditioning.encoded

    def _drive(self, conditioning, encode, task, *, guidance, latents=None, generator=None, steps=None,
               output_type="latent"):
        """One call of the pipeline with our scheduler (or, without a task, its own) and with `encode` for the prompts."""
        pipe = self.pipe
        pipe.scheduler = self.stock if task is None else self.scheduler
        if task is not None and task.steps.stop == task.steps.start:
            self.scheduler.follow(task)
        arguments = dict(self.call, prompt=conditioning.prompts, negative_prompt=conditioning.negatives,
                         num_inference_steps=steps or len(task.steps), guidance_scale=guidance, latents=latents,
                         generator=generator, output_type=output_type, return_dict=False)
        pipe.encode_prompt = encode
        try:
            with self._precision():
                out = self._call(pipe, **{k: v for k, v in arguments.items() if k in self._accepts})[0]
        finally:
            pipe.scheduler = self.stock
            del pipe.encode_prompt
        return out

    def _precision(self):
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, the denoiser is the base model: the adapter is off (or, without one, the first weights are back)."""
        with self.weights.base(), torch.no_grad():
            yield

    @staticmethod
    def generators(seeds) -> list[torch.Generator]:
        """One CPU generator per row, so that noise does not depend on device, process or micro-batch."""
        return [torch.Generator().manual_seed(int(seed)) for seed in seeds]
