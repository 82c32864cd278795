"""Calls of a pipeline with our scheduler in the place of its own: its loop, its guidance and its packing stay its own.

A `Segment` of the scheduler (samplers/scheduler.py) states the steps of a call. The file also finds the argument that
sets a pipeline's guidance scale, and ends a call as soon as its scheduler knows its steps.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from flowgrpo.policies.generators import generators, seeded
from flowgrpo.policies.pipelines.conditioning import Conditioning
from flowgrpo.policies.pipelines.encoder_cache import EncoderCache
from flowgrpo.policies.pipelines.guider import guided
from flowgrpo.policies.pipelines.idle_steps import IdleSteps
from flowgrpo.policies.pipelines.load import denoisers, timed, unchecked
from flowgrpo.policies.pipelines.prompt_inputs import arguments
from flowgrpo.samplers.scheduler import PolicyScheduler, Segment, StepRecord


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Context manager: diffusers logs errors alone. A prompt's first encoding has shown what it warns of at every call.

    It sets the level of the handlers, because that of a logger empties the caches of all loggers.
    """
    handlers = logging.getLogger("diffusers").handlers
    levels = [handler.level for handler in handlers]
    for handler in handlers:
        handler.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for handler, level in zip(handlers, levels, strict=True):
            handler.setLevel(level)


@contextlib.contextmanager
def _on_device(pipe: Any, kind: type) -> Iterator[None]:
    """Context manager: the pipeline is of class `kind`, a subclass of its own that knows its device."""
    stock = type(pipe)
    pipe.__class__ = kind
    try:
        yield
    finally:
        pipe.__class__ = stock


def placed(stock: type, device: torch.device) -> type:
    """Subclass of a pipeline's class whose `_execution_device` is a constant.

    diffusers looks for it in every call, and walks all modules of all components several times to find it.
    """
    return type(stock.__name__, (stock,), {"_execution_device": device, "__module__": stock.__module__})


class PipelineCall:
    """Diffusers pipeline that is called for tasks, or, without one, with its own scheduler.

    call: arguments of every call; device, dtype: of the arithmetic; trained: names of modules whose weights change, so
    that their answers are not kept; skipped: called with the rows of every evaluation that an idle step omitted.
    """

    def __init__(self, pipe: Any, call: dict[str, Any], device: torch.device, dtype: torch.dtype,
                 trained: Collection[str], skipped: Callable[[int], None]):
        self.pipe, self.call, self.device, self.dtype = pipe, call, device, dtype
        self._call = inspect.unwrap(type(pipe).__call__)
        self._kind = placed(type(pipe), device)
        self.accepts = inspect.signature(self._call).parameters
        self.stock = pipe.scheduler
        self.scheduler = PolicyScheduler.over(pipe.scheduler)
        strength = self.accepts.get("strength")
        self.strength = call.get("strength", strength.default) if strength else 1.0  # share of the steps to do
        if strength:  # these pipelines cannot do without a step
            self.scheduler.quirk = replace(self.scheduler.quirk, idle=1)
        self.denoisers = denoisers(pipe)
        self._memo = EncoderCache({name: part for name, part in pipe.components.items()
                                   if isinstance(part, torch.nn.Module) and name not in trained
                                   and not timed(part)})
        self._idle = IdleSteps(self.scheduler, self.denoisers, skipped)
        self.casts = dtype != torch.float32  # autocast surrounds calls
        self.loads: bool | None = None  # whether a state has to be put in place by an idle step; known once it is tried

    def try_loading(self, first: Callable[..., torch.Tensor]) -> None:
        """Find out whether the scheduler sees the state that is given as `latents`.

        first: the state that it sees first in a call with the options that are given."""
        self.loads = False
        drawn = first(latents=None, generator=generators([0]))
        try:
            given = first(latents=drawn, generator=generators([1]))
            self.loads = given.shape != drawn.shape or not torch.equal(given, drawn)
        except (IndexError, RuntimeError, TypeError, ValueError):  # it wants another shape than its scheduler sees
            self.loads = True
        if self.loads and not self.scheduler.quirk.idle:
            self.scheduler.quirk = replace(self.scheduler.quirk, idle=1)

    def __call__(self, conditioning: Conditioning, task: Segment | None, guidance: float, **options: Any
                 ) -> tuple[Any, StepRecord | None]:
        """Call the pipeline, once, or for each row if it takes one alone, or if their pictures differ in size, or for
        each run of rows whose prompts differ in length and cannot be padded.

        Returns what it returns, and the task's record.
        """
        if conditioning.parts:
            conditioning = conditioning.rows(torch.arange(len(conditioning.prompts)))  # padded, if that is possible
        runs = conditioning.runs()
        if len(runs) == 1 and not conditioning.apart:
            return self.once(conditioning, task, _cached(conditioning), guidance, **options)
        results = []
        for run in runs:
            at = slice(run.start, run.stop)
            row = conditioning.rows(torch.arange(run.start, run.stop))
            row_options: dict[str, Any] = {
                key: value[at] if torch.is_tensor(value) or isinstance(value, list) else value
                for key, value in options.items()}
            results.append(self.once(row, task and task.of_rows(at), _cached(row), guidance, **row_options))
        outs, records = zip(*results)
        return torch.cat(outs), None if task is None else StepRecord.joined(records)

    def once(self, conditioning: Conditioning, task: Segment | None, encode: Callable, guidance: float, *,
             x0: torch.Tensor | None = None, **options: Any) -> tuple[Any, StepRecord | None]:
        """Call the pipeline once with our scheduler (without a task: its own) and with `encode` for the prompts."""
        pipe, record = self.pipe, None
        pipe.scheduler = self.stock if task is None else self.scheduler
        if task is not None:
            state = options.get("latents") if self.loads else None
            record = self.scheduler.follow(task, x0, state)
            if state is not None:
                options |= {"latents": None, "generator": generators(range(len(state)))}
            options = {"output_type": "latent"} | self._announced(task) | options
        alone = conditioning.apart and not conditioning.listed
        if alone and options.get("generator"):
            options["generator"] = options["generator"][0]
        inputs = arguments(conditioning.inputs, alone)
        scale = {guidance_argument(self.accepts, self.call, self.denoisers.values()): guidance}
        given = self.call | conditioning.size | inputs
        given |= dict(_texts(conditioning), return_dict=False, **scale, **options)
        pipe.encode_prompt = encode
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(guided(pipe, guidance))
                for context in self._contexts(conditioning, task, options.get("generator")):
                    stack.enter_context(context)
                out = self._call(pipe, **{k: v for k, v in given.items() if k in self.accepts})[0]
        finally:
            pipe.scheduler = self.stock
            del pipe.encode_prompt
        if record is not None and self.scheduler.companions:
            record = self.scheduler.taken()
        # Some pipelines give latents in another shape than the one they work in.
        last = None if record is None or given["output_type"] != "latent" else record.last
        kept = not self.loads and torch.is_tensor(out) and last is not None and out.shape == last.shape
        return (out if last is None or kept else last), record

    def _contexts(self, conditioning: Conditioning, task: Segment | None, generator: Any
                  ) -> Iterator[contextlib.AbstractContextManager]:
        """Yield what surrounds a call, in order: each is there only where it changes something."""
        yield _on_device(self.pipe, self._kind)
        yield unchecked(self.pipe)
        yield self.arithmetic()
        if self.casts:
            yield _decoding(self.pipe)
        if self.device.type == "cpu":
            yield self.attention()
        if conditioning.calls:
            yield unlogged()
        if task is None:
            yield seeded(self.pipe.scheduler, generator)
            return
        if conditioning.inputs:
            yield self._memo()
        if self.scheduler.idle or self.loads is None:  # a first call does not idle, but shows what denoisers return
            yield self._idle()

    def _announced(self, task: Segment) -> dict[str, Any]:
        """Return the call's number of steps.

        A strength below 1 leaves out the first steps. The call then gets twice as many and a strength of 0.5, so that
        nothing is rounded.
        """
        self.scheduler.halved = self.strength < 1
        steps = len(task.steps) + self.scheduler.idle
        if self.scheduler.halved:
            return {"num_inference_steps": 2 * steps, "strength": 0.5}
        return {"num_inference_steps": max(steps, 2)}  # some pipelines divide by one less

    def arithmetic(self) -> contextlib.AbstractContextManager[Any]:
        """Context manager: arithmetic of the denoisers, autocast where weights of several precisions meet."""
        return torch.autocast(self.device.type, self.dtype) if self.casts else contextlib.nullcontext()

    def attention(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: attention of the denoisers. A recomputation in backward needs it too."""
        return plain_on_cpu(self.device)


@contextlib.contextmanager
def _decoding(pipe: Any) -> Iterator[None]:
    """Context manager: autoencoders decode in their own precision, as the stock pipeline's do, not under autocast."""
    def stock(vae: Any, decode: Callable) -> Callable:
        @functools.wraps(decode)
        def decoded(latents: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            with torch.autocast(latents.device.type, enabled=False):
                return decode(latents.to(vae.dtype), *args, **kwargs)
        return decoded

    vaes: list[Any] = [part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)
                       and "vae" in name and hasattr(part, "decode") and "decode" not in vars(part)]
    for vae in vaes:
        vae.decode = stock(vae, vae.decode)
    try:
        yield
    finally:
        for vae in vaes:
            del vae.decode


def _cached(conditioning: Conditioning) -> Callable:
    """Return a replacement of `encode_prompt` that returns the calls' cached values in turn."""
    values = ([value[0] for value in call] if conditioning.apart else call for call in conditioning.calls)
    calls = (call[0] if conditioning.bare else tuple(call) for call in values)
    return lambda *_, **__: next(calls)


def _texts(conditioning: Conditioning) -> dict[str, Any]:
    texts = {"prompt": conditioning.prompts, "negative_prompt": conditioning.negatives}
    # Copies of the prompts: some pipelines (Z-Image) write into the list.
    alone = conditioning.apart and not conditioning.listed
    return {name: values[0] if alone else list(values) for name, values in texts.items()}


def guidance_argument(accepted: Collection[str], call: Collection[str], denoisers: Iterable[torch.nn.Module]) -> str:
    """Return the name of the argument that sets a pipeline's guidance scale.

    It is `true_cfg_scale` if the pipeline has it, no denoiser has its guidance embedded, and `call`, the arguments that
    the user gives, does not set it; else `guidance_scale`.

    accepted: the names of the arguments that the pipeline's call takes.
    """
    embedded = any(getattr(module.config, "guidance_embeds", False) for module in denoisers)
    true = "true_cfg_scale" in accepted and "true_cfg_scale" not in call and not embedded
    return "true_cfg_scale" if true else "guidance_scale"


class _Set(Exception):
    """Signal: the scheduler has its steps."""


@contextlib.contextmanager
def until_set(scheduler: Any) -> Iterator[None]:
    """Context manager: a pipeline call ends silently once it has set the steps of `scheduler`, which keeps them."""
    @functools.wraps(scheduler.set_timesteps)  # pipelines look at the arguments that it takes
    def set_timesteps(*args: Any, **kwargs: Any) -> None:
        stock(*args, **kwargs)
        raise _Set

    stock, scheduler.set_timesteps = scheduler.set_timesteps, set_timesteps
    try:
        with contextlib.suppress(_Set):
            yield
    finally:
        del scheduler.set_timesteps


# --- attention on a CPU ----------------------------------------------------------------------------------------------

# Three plain operations in place of torch's fused kernel, whose backward is several times slower: measured by
# `scripts/bench_overhead.py`. The scores of one call have to fit in memory; for small models they do.

FUSED = F.scaled_dot_product_attention
LARGEST = 2**28  # scores of one call; above, the fused kernel's smaller memory counts for more


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
          dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False
          ) -> torch.Tensor:
    """Return softmax(q k^T * scale + mask) v, [..., N, D], as `F.scaled_dot_product_attention`.

    What it lacks goes there.
    """
    size = query.shape[:-1].numel() * key.shape[-2]
    boolean = attn_mask is not None and attn_mask.dtype == torch.bool
    if dropout_p or enable_gqa or is_causal or boolean or size > LARGEST:
        return FUSED(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    scores = (query * (scale or query.shape[-1] ** -0.5)) @ key.transpose(-1, -2)
    if attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1) @ value


@contextlib.contextmanager
def plain_on_cpu(device: torch.device) -> Iterator[None]:
    """Context manager: attention is `plain` if `device` is a CPU.

    Rollout and replay both run inside, so that they agree.
    """
    if device.type != "cpu":
        yield
        return
    F.scaled_dot_product_attention = plain
    try:
        yield
    finally:
        F.scaled_dot_product_attention = FUSED
