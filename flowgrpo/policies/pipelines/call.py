"""Calls of a pipeline with our scheduler in the place of its own: its loop, its guidance and its packing stay its own.

    rows that one call may bring -> our scheduler, cached prompts -> the pipeline's own call -> record of its steps

A `Segment` of the scheduler (samplers/scheduler.py) states the steps of a call. Two helpers serve the pipelines that
need them: `idle_steps` put a state into a loop that does not take it, and `EncoderCache` encodes an image once.
`EncodePrompt` calls a pipeline with no steps to do, for what its `encode_prompt` returns there.
"""

import contextlib
import functools
import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from flowgrpo.errors import UserError, nearest
from flowgrpo.policies.pipelines.conditioning import Conditioning, concatenate, digest
from flowgrpo.policies.pipelines.frames import call_parameters, is_video, rate_of, rgb
from flowgrpo.policies.pipelines.load import denoisers, takes_timestep
from flowgrpo.policies.pipelines.modular import guided, guiders
from flowgrpo.policies.weights.forwards import FUSED, modules_of, plain, replaced
from flowgrpo.policies.weights.memory_options import Encoders
from flowgrpo.samplers.rollout import generators
from flowgrpo.samplers.scheduler import PolicyScheduler, Segment, StepRecord

SCHEDULE = "guidance_schedule"


def schedule(accepts: Collection[str], scale: float, steps: int) -> dict[str, Any]:
    """Return the argument with a scale for every place in the loop, for pipelines that have it: one for all."""
    return {SCHEDULE: None if "guidance_scale" in accepts else [scale] * steps} if SCHEDULE in accepts else {}


def class_on_device(stock: type, device: torch.device) -> type:
    """Subclass of a pipeline's class whose `_execution_device` is a constant.

    diffusers looks for it in every call, and walks all modules of all components several times to find it.
    """
    return type(stock.__name__, (stock,), {"_execution_device": device, "__module__": stock.__module__})


class PipelineCall:
    """Diffusers pipeline that is called for tasks, or, without one, with its own scheduler.

    call: arguments of every call; device, dtype: of the arithmetic; trained: names of modules whose weights change, so
    that their answers are not kept; skipped: called with the rows of every evaluation that an idle step omitted. fps:
    frames per second of clips; None: the model's own.
    """

    def __init__(self, pipe: Any, call: dict[str, Any], device: torch.device, dtype: torch.dtype,
                 trained: Collection[str], skipped: Callable[[int], None], fps: float | None = None):
        self.pipe, self.call, self.device, self.dtype = pipe, call, device, dtype
        self.fps = rate_of(pipe, call, fps) if is_video(type(pipe)) else None
        self._call = inspect.unwrap(type(pipe).__call__)
        self._kinds = type(pipe), class_on_device(type(pipe), device)
        self._guiders = guiders(pipe)
        self.accepts = inspect.signature(self._call).parameters
        self.stock = pipe.scheduler
        self.scheduler = PolicyScheduler.over(pipe.scheduler)
        strength = self.accepts.get("strength")
        self.strength = call.get("strength", strength.default) if strength else 1.0  # share of the steps to do
        if strength or getattr(pipe, "needs_step", False):  # these pipelines cannot do without a step
            self.scheduler.quirk = replace(self.scheduler.quirk, idle=1)
        self.denoisers = denoisers(pipe)
        if any(getattr(module.config, "flow_map", False) for module in self.denoisers.values()):
            self.scheduler.quirk = replace(self.scheduler.quirk, ahead=True)
        self.scale = guidance_argument(self.accepts, self.denoisers.values())
        self._memo = EncoderCache({name: part for name, part in modules_of(pipe).items()
                                   if name not in trained and not takes_timestep(part)})
        self._idle = idle_steps(self.scheduler, self.denoisers, skipped)
        self.casts = dtype != torch.float32  # autocast surrounds calls
        self.around_rollout: Callable[[Segment], contextlib.AbstractContextManager] | None = None  # given its task
        self.heard: list[torch.Tensor] | None = None  # what calls give beside their clips, while somebody listens
        self.loads: bool | None = None  # whether a state has to be put in place by an idle step; known once it is tried

    def __call__(self, conditioning: Conditioning, task: Segment | None, guidance: float, **options: Any
                 ) -> tuple[Any, StepRecord | None]:
        """Call the pipeline, once, or for each row if it takes one alone, or if their images differ in size, or for
        each run of rows whose prompts differ in length and cannot be padded.

        guidance: the scale of rows without one of their own. Returns what it returns, and the task's record.
        """
        guidance = conditioning.scale(guidance)
        if conditioning.parts:
            conditioning = conditioning.rows(torch.arange(len(conditioning.prompts)))  # padded, if that is possible
        if len(conditioning.runs) == 1 and not conditioning.one_per_call:
            return self.once(conditioning, task, _replay_encode_prompt(conditioning), guidance, **options)
        results = []
        for run in conditioning.runs:
            at = slice(run.start, run.stop)
            row = conditioning.rows(torch.arange(run.start, run.stop))
            row_options: dict[str, Any] = {
                key: value[at] if torch.is_tensor(value) or isinstance(value, list) else value
                for key, value in options.items()}
            results.append(self.once(row, task and task.of_rows(at), _replay_encode_prompt(row), guidance,
                                     **row_options))
        outs, records = zip(*results)
        return torch.cat(outs), None if task is None else StepRecord.concatenate(records)

    def once(self, conditioning: Conditioning, task: Segment | None, encode: Callable, guidance: float, *,
             x0: torch.Tensor | None = None, **options: Any) -> tuple[Any, StepRecord | None]:
        """Call the pipeline once with our scheduler (without a task: its own) and with `encode` for the prompts."""
        given = self.call | conditioning.arguments()
        if task is not None:
            state = options.get("latents") if self.loads else None
            self.scheduler.follow(task, x0, state)
            if state is not None:
                options |= {"latents": None, "generator": generators(range(len(state)))}
            # A strength below 1 leaves out the first steps, as an LCMScheduler does by itself. The call then gets twice
            # as many and a strength of 0.5, so that nothing is rounded.
            self.scheduler.halved = self.strength < 1 and "strength" not in inspect.signature(
                self.stock.set_timesteps).parameters
            steps = len(task.steps) + self.scheduler.idle
            counted = {"num_inference_steps": 2 * steps, "strength": 0.5} if self.scheduler.halved else {
                "num_inference_steps": max(steps, 2)}  # some pipelines divide by one less
            options = {"output_type": "latent"} | counted | options
        if conditioning.alone and options.get("generator"):
            options["generator"] = options["generator"][0]
        given |= {"return_dict": False, self.scale: guidance} | options
        given |= schedule(self.accepts, guidance, given.get("num_inference_steps", 0))
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._ours(encode, self.stock if task is None else self.scheduler))
            if self._guiders:
                stack.enter_context(guided(self._guiders, guidance, task, self.scheduler.idle if task else 0))
            for context in self._contexts(conditioning, task, options.get("generator")):
                stack.enter_context(context)
            out, *beside = self._call(self.pipe, **{k: v for k, v in given.items() if k in self.accepts})
            record = None if task is None else self.scheduler.take_record()
        if self.heard is not None and beside:
            self.heard.append(beside[0])
        if given.get("output_type") == "pt":
            out = rgb(out, self.pipe)
        # Some pipelines give latents in another shape than the one they work in.
        last = None if record is None or given["output_type"] != "latent" else record.last
        kept = not self.loads and torch.is_tensor(out) and last is not None and out.shape == last.shape
        return (out if last is None or kept else last), record

    @contextlib.contextmanager
    def _ours(self, encode: Callable, scheduler: Any) -> Iterator[None]:
        """Context manager: the pipeline has this scheduler and `encode_prompt`, and knows its device."""
        pipe, (stock, ours) = self.pipe, self._kinds
        pipe.scheduler, pipe.encode_prompt, pipe.__class__ = scheduler, encode, ours
        try:
            yield
        finally:
            pipe.__class__ = stock
            pipe.scheduler = self.stock
            del pipe.encode_prompt

    def _contexts(self, conditioning: Conditioning, task: Segment | None, generator: Any
                  ) -> Iterator[contextlib.AbstractContextManager]:
        """Yield what else surrounds a call, in order: each is there only where it changes something."""
        yield disable_safety_checker(self.pipe)
        yield self.arithmetic()
        if self.casts:
            yield _decoding(self.pipe)
        if self.device.type == "cpu":
            yield self.attention()
        if conditioning.calls:
            yield silence_warnings()
        if task is None:
            yield seed_steps(self.pipe.scheduler, generator)
            return
        if conditioning.inputs:
            yield self._memo()
        if self.around_rollout is not None and not task.replay:
            yield self.around_rollout(task)
        # A first call does not idle, but shows what denoisers return.
        if self.scheduler.idle or self.scheduler.quirk.ahead or self.loads is None:
            yield self._idle()

    def arithmetic(self) -> contextlib.AbstractContextManager[Any]:
        """Context manager: arithmetic of the denoisers, autocast where weights of several precisions meet."""
        return torch.autocast(self.device.type, self.dtype) if self.casts else contextlib.nullcontext()

    def attention(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: attention of the denoisers. A recomputation in backward needs it too."""
        return plain_on_cpu(self.device)


def _decoding(pipe: Any) -> contextlib.AbstractContextManager[None]:
    """Context manager: autoencoders decode in their own precision, as the stock pipeline's do, not under autocast."""
    def stock(vae: Any) -> Callable:
        decode = vae.decode

        @functools.wraps(decode)
        def decode_in_dtype(latents: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            with torch.autocast(latents.device.type, enabled=False):
                return decode(latents.to(vae.dtype), *args, **kwargs)
        return decode_in_dtype

    return replaced("decode", *((part, stock(part)) for name, part in modules_of(pipe).items()
                                if "vae" in name and hasattr(part, "decode") and "decode" not in vars(part)))


def _replay_encode_prompt(conditioning: Conditioning) -> Callable:
    """Return a replacement of `encode_prompt` that returns the calls' cached values in turn."""
    values = ([value[0] for value in call] if conditioning.one_per_call else call for call in conditioning.calls)
    calls = (call[0] if conditioning.bare else tuple(call) for call in values)
    return lambda *_, **__: next(calls)


def seed_steps(scheduler: Any, generator: torch.Generator | Sequence[torch.Generator] | None
               ) -> contextlib.AbstractContextManager[None]:
    """Context manager: `scheduler.step` reads `generator`, one or one per row, unless it is called with another.

    A FlowMatchLCMScheduler in a StableDiffusion3Pipeline, which passes no generator to it, would take torch's own: its
    images would depend on what else was drawn before.
    """
    if generator is None or scheduler is None or "generator" not in inspect.signature(scheduler.step).parameters:
        return contextlib.nullcontext()
    return replaced("step", (scheduler, partial(scheduler.step, generator=generator)))


def disable_safety_checker(pipe: Any) -> contextlib.AbstractContextManager[None]:
    """Context manager: a pipeline without its safety checker, which blackens images that are to be scored."""
    return replaced("safety_checker", (pipe, None))  # the pipeline's own setter would forget the checker's class


def silence_warnings() -> contextlib.AbstractContextManager[None]:
    """Context manager: diffusers logs errors alone. A prompt's first encoding has shown what it warns of at every call.

    It sets the level of the handlers, because that of a logger empties the caches of all loggers.
    """
    return replaced("level", *((handler, logging.ERROR) for handler in logging.getLogger("diffusers").handlers))


def at_guidance(policy: Any, scale: float) -> contextlib.AbstractContextManager[None]:
    return replaced("guidance", (policy, scale))


def guidance_argument(accepted: Collection[str], denoisers: Iterable[torch.nn.Module] = ()) -> str:
    """Return the name of the argument that sets a pipeline's guidance scale.

    It is `true_cfg_scale` if the pipeline has it and no denoiser has its guidance embedded; else `guidance_scale`.

    accepted: the names of the arguments that the pipeline's call takes.
    """
    embedded = any(getattr(module.config, "guidance_embeds", False) for module in denoisers)
    return "true_cfg_scale" if "true_cfg_scale" in accepted and not embedded else "guidance_scale"


def require_arguments(cls: type, call: Collection[str], denoisers: Iterable[torch.nn.Module] | None = None) -> None:
    """Raise UserError for arguments of `image` that calls of a pipeline class do not take, or that another key sets.

    denoisers: None before they are loaded, when it is not known whether guidance is embedded.
    """
    accepted = call_parameters(cls)
    if unknown := sorted(set(call) - set(accepted)):
        raise UserError(f"`image`: {cls.__name__} takes no {unknown[0]!r}"
                        f"{nearest(unknown[0], sorted(set(accepted) - {'self'}))}")
    scale = guidance_argument(accepted, denoisers or ())
    if scale in call and (denoisers is not None or scale == "guidance_scale"):
        raise UserError(f"call has {scale}, which the key guidance sets (train.guidance, eval.guidance): leave it out "
                        "of call")


class _Set(Exception):
    """Signal: the scheduler has its steps."""


@contextlib.contextmanager
def until_set(scheduler: Any) -> Iterator[None]:
    """Context manager: a pipeline call ends silently once it has set the steps of `scheduler`, which keeps them."""
    stock = scheduler.set_timesteps

    @functools.wraps(stock)  # pipelines look at the arguments that it takes
    def set_timesteps(*args: Any, **kwargs: Any) -> None:
        stock(*args, **kwargs)
        raise _Set

    with replaced("set_timesteps", (scheduler, set_timesteps)), contextlib.suppress(_Set):
        yield


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


# --- a state that a pipeline does not take as it is ------------------------------------------------------------------

# Most pipelines take a state as `latents` and hand it to their scheduler as it is. Some do not: an image-to-video
# pipeline may set the first frame of `latents` itself and show its scheduler the others alone, mix its image into
# them once more at every call, or keep a second state beside them. Their loop is given the state by its scheduler: in
# an idle step, whose "next state" it is. What the denoiser says in an idle step is not read, so that it does not run;
# it answers with zeros.


def idle_steps(scheduler: Any, denoisers: dict[str, torch.nn.Module], skipped: Callable[[int], None]
               ) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return what makes contexts in which denoisers do not run while their scheduler idles, once a real step has shown
    what they return. skipped: called with the rows of every evaluation that did not take place.
    """
    known: dict[torch.nn.Module, tuple[int, Any]] = {}  # rows of a real step, and zeros in the form of its output

    def skipping(module: torch.nn.Module, forward: Callable) -> Callable:
        states = next(iter(inspect.signature(forward).parameters))

        @functools.wraps(forward)  # some pipelines look whether an argument is there
        def answer(*args: Any, **kwargs: Any) -> Any:
            rows = len(args[0] if args else kwargs[states])
            if scheduler.idling and module in known:
                skipped(rows)
                return _zeros(known[module][1], rows / known[module][0])
            out = forward(*args, **kwargs)
            if module not in known and isinstance(out, tuple):  # of one number in memory, not as many as it has
                known[module] = rows, tree_map_only(torch.Tensor, lambda x: x.new_zeros(()).expand(x.shape), out)
            return out
        return answer

    return lambda: replaced("forward", *((module, skipping(module, module.forward)) for module in denoisers.values()))


def _zeros(out: Any, times: float = 1) -> Any:
    """Zeros in the form of an output, for so many times its rows."""
    if isinstance(out, tuple):
        return tuple(_zeros(value, times) for value in out)
    if isinstance(out, list):  # of tensors, one per row
        return [_zeros(out[0]) for _ in range(round(len(out) * times))]
    return out.new_zeros(round(len(out) * times), *out.shape[1:]) if torch.is_tensor(out) else None


# --- reference images, encoded once --------------------------------------------------------------------------------

SIZE = 64  # inputs whose encoding is kept


class EncoderCache:
    """Cache of frozen modules: `encode` of those that have one, the forward of the others.

    Inside `with memo():` a latent distribution gives its mean in place of a sample, so that an image has one encoding,
    in rollout and replay alike.
    """

    def __init__(self, modules: dict[str, torch.nn.Module]):
        self.modules = modules
        self.rowwise = {name for name, module in modules.items() if hasattr(module, "encode")}
        self._known: OrderedDict[str, Any] = OrderedDict()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        distribution: Any = DiagonalGaussianDistribution
        with contextlib.ExitStack() as stack:
            for name, module in self.modules.items():
                method = "encode" if name in self.rowwise else "forward"
                stack.enter_context(replaced(method, (module, self._once(name, getattr(module, method)))))
            stack.callback(setattr, distribution, "sample", distribution.sample)
            distribution.sample = lambda self, generator=None: self.mode()
            yield

    def _once(self, name: str, method: Callable) -> Callable:
        def one(*args: Any, **kwargs: Any) -> Any:
            # Row by row, so that an image is encoded once whatever the batch that it comes in.
            if name in self.rowwise and args and torch.is_tensor(args[0]) and len(args[0]) > 1:
                return join([one(row, *args[1:], **kwargs) for row in args[0].split(1)])
            key = digest((name, args, kwargs))
            if key not in self._known:
                self._known[key] = method(*args, **kwargs)
            self._known.move_to_end(key)
            while len(self._known) > SIZE:
                self._known.popitem(last=False)
            return self._known[key]
        return one


def join(parts: list[Any]) -> Any:
    """Join an autoencoder's `encode` results of single rows to that of a batch."""
    def cat(*values: Any) -> Any:
        if values[0] is None:
            return None
        if torch.is_tensor(values[0]):
            return torch.cat(values)
        return type(values[0])(torch.cat([value.parameters for value in values]))  # a latent distribution

    return tree_map(cat, *parts)  # diffusers' output classes are trees too


# --- prompts, encoded by a call without steps ------------------------------------------------------------------------

ALONE = ("PRXPipeline",)  # their guided loops take one prompt: the timestep is repeated twice, whatever the rows
Kinds = frozenset[tuple[str, bool]]
PLAIN = (bool, int, float, str, torch.dtype)  # of values that may serve all prompts


class EncodePrompt:
    """Encodes prompts by calls of the pipeline with no steps to do, and keeps what its `encode_prompt` returns there.

    encoders: which have to be here; live: they are trained (TexForce, 2311.15657), and gradients go through.
    """

    def __init__(self, driver: PipelineCall, encoders: Encoders, live: bool):
        self.driver, self.encoders, pipe = driver, encoders, driver.pipe
        # Some are written to run without gradients.
        self._encode = inspect.unwrap(type(pipe).encode_prompt).__get__(pipe) if live else pipe.encode_prompt
        self.one_per_call: bool | None = None  # whether the pipeline takes one prompt per call; known after `learn`
        self.kept: dict[tuple[Any, ...], Conditioning] | None = None  # within `text_once`
        self._shared: tuple[tuple[bool, ...], ...] = ()
        self._learned: dict[Kinds, tuple[bool, tuple[tuple[bool, ...], ...]]] = {}  # by kinds of images
        self._bare = False

    def knows(self, plain: Conditioning) -> bool:
        """Return True once it has learned from prompts with such images, or from prompts without any."""
        return _kinds(plain) in self._learned

    def learn(self, twice: Conditioning, guidance: float, stay_apart: Callable[[], bool]) -> None:
        """Find out which values serve all prompts, and whether a call may bring several prompts with their images.

        twice: one prompt, two times, not yet encoded. stay_apart: whether each sees its own image."""
        self.one_per_call = None
        try:
            # Lengths alone would not tell: 77 tokens may meet 77 prompts. What grows with the prompts is theirs.
            one, two = self._calls(twice.rows(torch.tensor([0])), guidance), self._calls(twice, guidance)
            self._shared = tuple(tuple(map(_is_shared, *values)) for values in zip(one, two, strict=True))
            self.one_per_call = type(self.driver.pipe).__name__ in ALONE or bool(twice.inputs) and not stay_apart()
        except torch.OutOfMemoryError:
            raise
        # What a pipeline for one prompt may raise; if it is something else, the next call raises it again.
        except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            self.one_per_call = True
        self._learned[_kinds(twice)] = self.one_per_call, self._shared

    def __call__(self, plain: Conditioning, guidance: float) -> Conditioning:
        """Return the prompts' conditioning, with the values of `encode_prompt`."""
        self.one_per_call, self._shared = self._learned.get(_kinds(plain), (self.one_per_call, self._shared))
        if not self.one_per_call and not (plain.inputs and len(plain.runs) > 1):
            calls = self._calls(plain, guidance)
            per_prompt = tuple(tuple(value is not None and not shared for value, shared in zip(values, shares))
                               for values, shares in zip(calls, self._shared, strict=True))
            return replace(plain, calls=calls, per_prompt=per_prompt, bare=self._bare)
        plain = replace(plain, one_per_call=True, listed=not self.one_per_call)
        rows = [self._calls(plain.rows(torch.tensor([row])), guidance) for row in range(len(plain.prompts))]
        calls = tuple(tuple(map(list, zip(*values))) for values in zip(*rows, strict=True))
        return replace(plain, calls=calls, per_prompt=tuple((True,) * len(values) for values in calls), bare=self._bare)

    def anew(self, conditioning: Conditioning, guidance: float) -> Conditioning:
        """Return the same rows as the present text encoders encode them, with gradients where they are enabled.

        Every prompt is encoded once, however many rows it has, and by itself: rollout and replay so compute the same
        numbers, whatever their batches. UserError where no gradient gets through.
        """
        rows = list(zip(conditioning.prompts, conditioning.negatives,
                        zip(*([id(image) for image in values] for values in conditioning.inputs.values()))
                        if conditioning.inputs else [()] * len(conditioning.prompts), strict=True))
        plain = replace(conditioning, calls=(), per_prompt=(), parts=(), sizes=[])
        different = list(dict.fromkeys(rows))
        known = {} if self.kept is None else self.kept
        new = [row for row in different if row not in known]
        alone = [plain.rows(torch.tensor([rows.index(row)])) for row in new]
        with contextlib.nullcontext() if self.kept is None else torch.no_grad():
            known |= {row: self(one, guidance) for row, one in zip(new, alone)}
        parts = [known[row] for row in different]
        if torch.is_grad_enabled() and self.kept is None and not any(
                torch.is_tensor(value) and value.requires_grad for value in tree_leaves([one.calls for one in parts])):
            raise UserError(f"encode_prompt of {type(self.driver.pipe).__name__} gives no gradient of its text "
                            "encoders: train only the denoiser, parts: {adapted: {encoders: false, denoisers: true}}")
        encoded = concatenate(parts, conditioning.masks, pad=False)
        return replace(encoded.rows(torch.tensor([different.index(row) for row in rows])), sizes=conditioning.sizes,
                       scales=conditioning.scales)

    def _calls(self, plain: Conditioning, guidance: float) -> tuple[tuple[Any, ...], ...]:
        """Return the values of each call of `encode_prompt` during a pipeline call without steps."""
        calls: list[tuple[Any, ...]] = []

        def remember(*args: Any, **kwargs: Any) -> Any:
            if not self.encoders.here:
                self.encoders.load()
            values = self._encode(*args, **kwargs)
            self._bare = not isinstance(values, tuple)
            calls.append((values,) if self._bare else values)
            return values

        # Under guidance in either phase the negative embeddings have to be there.
        noise = [torch.Generator().manual_seed(row) for row in range(len(plain.prompts))]
        self.driver.once(plain, Segment(torch.ones(1), range(0)), remember, max(guidance, 2.0), generator=noise)
        if not calls:
            raise UserError(f"{type(self.driver.pipe).__name__} does not call its encode_prompt: its conditioning "
                            "cannot be cached")
        return tuple(calls)


def _kinds(plain: Conditioning) -> Kinds:
    """Return the names of what prompts bring, and which of it are several images per prompt."""
    return frozenset((name, isinstance(values[0], (list, tuple))) for name, values in plain.inputs.items())


def _is_shared(one: Any, two: Any) -> bool:
    """Return True if a value of `encode_prompt` is the same for one prompt and for two, and so serves all prompts.

    Raises ValueError if it grows with them without a row for each: bounds of sequences, rows in another dimension.
    """
    if isinstance(one, PLAIN) and one == two:
        return True
    if not torch.is_tensor(one) and not isinstance(one, list):
        return False
    shapes = [value.shape if torch.is_tensor(value) else (len(value),) for value in (one, two)]
    if shapes[0] != shapes[1] and (len(one), len(two), *shapes[0][1:]) != (1, 2, *shapes[1][1:]):
        raise ValueError(f"encode_prompt gives {list(shapes[0])} for one prompt and {list(shapes[1])} for two")
    return shapes[0] == shapes[1]
