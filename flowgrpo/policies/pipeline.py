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

from flowgrpo.config import nearest
from flowgrpo.errors import UserError
from flowgrpo.log import quiet
from flowgrpo.policies.adapters import Weights
from flowgrpo.policies.attention import plain_on_cpu
from flowgrpo.samplers.scheduler import PolicyScheduler, Record, Task

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STARTER = Path(__file__).parent.parent / "starter" / "model"
DENOISERS = ("transformer", "transformer_2", "unet", "prior")


@dataclass(frozen=True)
class Conditioning:
    """Encoded prompts: what the pipeline's `encode_prompt` returned, call by call.

    calls: the values of each call, in order (with true CFG the negative prompts are encoded by a call of their own).
    per_prompt: which of these values have a row per prompt; the others (None, Flux's `text_ids`) serve all prompts.
    """

    prompts: list[str]
    negatives: list[str]
    calls: tuple[tuple[Any, ...], ...]
    per_prompt: tuple[tuple[bool, ...], ...]

    def rows(self, index: torch.Tensor) -> Conditioning:
        """The rows `index` (int64 [B]); a row may be taken several times."""
        picked = index.tolist()
        calls = tuple(tuple(_rows(value, picked) if own else value for value, own in zip(values, owns, strict=True))
                      for values, owns in zip(self.calls, self.per_prompt, strict=True))
        return Conditioning([self.prompts[i] for i in picked], [self.negatives[i] for i in picked], calls,
                            self.per_prompt)


def _rows(value: torch.Tensor | list[Any], picked: list[int]) -> torch.Tensor | list[Any]:
    return value[picked] if torch.is_tensor(value) else [value[i] for i in picked]


def _length(value: Any) -> int | None:
    return len(value) if torch.is_tensor(value) or isinstance(value, list) else None


def load_pipeline(model: str, precision: str = "fp32", trust_remote_code: bool = False):
    """Load a diffusers pipeline: `starter`, a directory or a hub id. UserError where it does not load."""
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
        with quiet():  # of components in another class than the pipeline's usual one, such as a small autoencoder
            pipe = DiffusionPipeline.from_pretrained(source, dtype=DTYPES[precision],
                                                     trust_remote_code=trust_remote_code, **absent)
    except Exception as error:  # whatever stands in a stranger's files
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"cannot load the model {model!r} ({first}): expected 'starter', a directory with a "
                        "model_index.json, or a hub id") from error
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
        self.device, self.dtype, self.checkpointing = torch.device(device), DTYPES[precision], checkpointing
        self.stock = pipe.scheduler
        self.scheduler = PolicyScheduler.over(pipe.scheduler)
        self.process = self.scheduler.process  # flow, or vp for a variance-preserving one
        self.evaluations = 0  # rows that went through a denoiser
        pipe.to(self.device)
        self.denoisers = {name: getattr(pipe, name) for name in DENOISERS if getattr(pipe, name, None) is not None}
        for module in pipe.components.values():
            if isinstance(module, torch.nn.Module):
                module.eval().requires_grad_(False)
        for name, module in self.denoisers.items():
            if module.dtype != self.dtype:
                raise UserError(f"the {name} is in {module.dtype}, but precision is {precision!r}, which expects "
                                f"{self.dtype}: load the pipeline with that dtype, or set precision")
            module.register_forward_pre_hook(self._count, with_kwargs=True)
            if checkpointing:
                module.enable_gradient_checkpointing()
        self.weights = Weights(pipe, self.denoisers, adapter)
        self._call = inspect.unwrap(type(pipe).__call__)
        self._accepts = set(inspect.signature(self._call).parameters)
        self._encode, self._per_prompt = pipe.encode_prompt, None
        if unknown := sorted(set(self.call) - self._accepts):
            raise UserError(f"picture: {type(pipe).__name__} takes no {unknown[0]!r}"
                            f"{nearest(unknown[0], sorted(self._accepts - {'self'}))}")

    def _count(self, _module, args, kwargs):
        # A U-Net calls its states `sample`, a transformer `hidden_states`.
        self.evaluations += len(args[0] if args else kwargs.get("hidden_states", kwargs.get("sample")))

    @torch.no_grad()
    def encode(self, prompts: list[str], negatives: list[str] | None = None) -> Conditioning:
        """Encode P prompts once, exactly as the pipeline's own call would. UserError where it refuses its arguments."""
        negatives = negatives or [""] * len(prompts)
        try:
            if self._per_prompt is None:
                # Lengths alone would not tell: 77 tokens may meet 77 prompts. What grows with the prompts is theirs.
                one, two = (self._encoded(prompts[:1] * count, negatives[:1] * count) for count in (1, 2))
                self._per_prompt = tuple(tuple(_length(a) != _length(b) for a, b in zip(*values, strict=True))
                                         for values in zip(one, two, strict=True))
            return Conditioning(prompts, negatives, self._encoded(prompts, negatives), self._per_prompt)
        except (TypeError, ValueError) as error:
            raise UserError(f"{type(self.pipe).__name__} refuses its arguments: {error}") from error

    def _encoded(self, prompts: list[str], negatives: list[str]) -> tuple[tuple[Any, ...], ...]:
        """What each call of `encode_prompt` returns during a call of the pipeline with no steps to do."""
        calls: list[tuple[Any, ...]] = []

        def remember(*args, **kwargs):
            calls.append(tuple(self._encode(*args, **kwargs)))
            return calls[-1]

        # Under guidance in either phase the negative embeddings have to be there.
        self._drive(Conditioning(prompts, negatives, (), ()), remember, Task(torch.ones(1), range(0)),
                    guidance=max(self.guidance, 2.0), generator=self.generators(range(len(prompts))))
        return tuple(calls)

    @torch.no_grad()
    def run(self, task: Task, conditioning: Conditioning, latents=None, generators=None, x0=None):
        """Run a segment of the grid from `latents` [B,*D], or from noise drawn with `generators` (one per row).

        Returns (the last state [B,*D], the record of the task).
        """
        record = self.scheduler.follow(task, x0)
        final = self._drive(conditioning, self._cached(conditioning), task, latents=latents, generator=generators,
                            guidance=self.guidance)
        return final, record

    def replay(self, conditioning: Conditioning, x: torch.Tensor, grid: torch.Tensor, step: int,
               timesteps: torch.Tensor | None = None) -> torch.Tensor:
        """The model output [B,*D] at one step, through the pipeline's own call, with gradients where enabled: a
        velocity, or of a variance-preserving process, which needs its timesteps [T], the noise."""
        task = Task(grid, range(step, step + 1), replay=True, timesteps=timesteps)
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
        calls = iter(conditioning.calls)
        return lambda *_, **__: next(calls)

    def _drive(self, conditioning, encode, task, *, guidance, latents=None, generator=None, steps=None,
               output_type="latent"):
        """One call of the pipeline with our scheduler (without a task: its own) and with `encode` for the prompts."""
        pipe = self.pipe
        pipe.scheduler = self.stock if task is None else self.scheduler
        if task is not None and task.steps.stop == task.steps.start:
            self.scheduler.follow(task)
        arguments = dict(self.call, prompt=conditioning.prompts, negative_prompt=conditioning.negatives,
                         num_inference_steps=steps or max(len(task.steps), 1), guidance_scale=guidance, latents=latents,
                         generator=generator, output_type=output_type, return_dict=False)
        pipe.encode_prompt = encode
        try:
            with self._precision(), self._attention():
                out = self._call(pipe, **{k: v for k, v in arguments.items() if k in self._accepts})[0]
        finally:
            pipe.scheduler = self.stock
            del pipe.encode_prompt
        return out

    def _precision(self):
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def _attention(self):
        # Checkpointing computes the forward again during the backward, outside of here, and must find the same kernel.
        return contextlib.nullcontext() if self.checkpointing else plain_on_cpu(self.device)

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, the denoiser is the base model: the adapter is off (or, without one, the first weights are back)."""
        with self.weights.base(), torch.no_grad():
            yield

    @staticmethod
    def generators(seeds) -> list[torch.Generator]:
        """One CPU generator per row, so that noise does not depend on device, process or micro-batch."""
        return [torch.Generator().manual_seed(int(seed)) for seed in seeds]
