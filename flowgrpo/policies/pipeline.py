"""Any diffusers pipeline as a policy, driven through its own `__call__`.

No line here knows a latent's shape, a model's embeddings or its guidance: the pipeline draws its own noise, encodes its
own prompts (once; the result is kept and given back to it) and applies its own guidance. See samplers/scheduler.py.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flowgrpo.config import Memory, nearest
from flowgrpo.errors import UserError
from flowgrpo.parts.adapted import Adapted
from flowgrpo.policies import sharded
from flowgrpo.policies.adapters import Weights
from flowgrpo.policies.attention import plain_on_cpu
from flowgrpo.policies.blend import guided, inside
from flowgrpo.policies.compiled import compile_blocks
from flowgrpo.policies.conditioning import Conditioning
from flowgrpo.policies.dtypes import DTYPES
from flowgrpo.policies.frozen import Encoders, decode_in_parts
from flowgrpo.policies.live import encoded_anew
from flowgrpo.policies.load import denoisers
from flowgrpo.policies.loading import Idle
from flowgrpo.policies.memo import Memo
from flowgrpo.policies.pictures import PICTURES, stay_apart
from flowgrpo.policies.recompute import checkpoint_blocks, recomputed
from flowgrpo.policies.seeded import seeded
from flowgrpo.policies.until_set import until_set
from flowgrpo.policies.vector import copies
from flowgrpo.samplers import grids
from flowgrpo.samplers.scheduler import PolicyScheduler, Record, Task
from flowgrpo.starter import FOLDERS

STARTER = FOLDERS["starter"]


def _shared(one: Any, two: Any) -> bool:
    """Whether a value of `encode_prompt`, for one prompt and for two, serves all prompts.

    ValueError where it grows with them, but has no row for each: bounds of sequences, rows in another dimension.
    """
    if not torch.is_tensor(one) and not isinstance(one, list):
        return False
    shapes = [value.shape if torch.is_tensor(value) else (len(value),) for value in (one, two)]
    if shapes[0] != shapes[1] and (len(one), len(two), *shapes[0][1:]) != (1, 2, *shapes[1][1:]):
        raise ValueError(f"encode_prompt gives {list(shapes[0])} for one prompt and {list(shapes[1])} for two")
    return shapes[0] == shapes[1]


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Inside, diffusers logs errors alone: what it warns of at every call, a prompt's first encoding has told."""
    from diffusers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(level)


class PipelinePolicy:
    """A diffusers pipeline with trainable weights: `encode`, `run`, `replay`, `decode`, and `generate` for evaluation.

    pipe: the pipeline; it is moved to `device` and its scheduler is kept for evaluation.
    adapter: None trains nothing.
    call: arguments of every call of the pipeline (height, width, max_sequence_length, ...); pictures among them
    (`image`, `video`, ...) are for prompts that bring none of their own.
    guidance: the scale of rollouts and replays; precision: of the frozen weights and of the arithmetic. memory: where
    text encoders and recorded states (`states`) wait, and how pictures are decoded; compiled: the denoisers' blocks.
    adapted: which modules are trained; with text encoders among them the policy is `live`, and prompts are encoded
    whenever they are read.
    """

    def __init__(self, pipe, adapter, *, device="cpu", precision="fp32", guidance=1.0, call=None, checkpointing=False,
                 memory=Memory(), compiled=False, adapted=Adapted()):
        self.pipe, self.guidance = pipe, guidance
        self.call = {key: value for key, value in (call or {}).items() if key not in PICTURES}
        self.given = {key: value for key, value in (call or {}).items() if key in PICTURES}
        self.device, self.precision, self.dtype = torch.device(device), precision, DTYPES[precision]
        self.exact = 1e-6 if self.dtype == torch.float32 else None  # how closely a replay repeats the rollout
        self.checkpointing, self.compiled = checkpointing, compiled
        self.states = self.device if memory.states == "device" else torch.device("cpu")
        self._call = inspect.unwrap(type(pipe).__call__)
        self.accepts = inspect.signature(self._call).parameters
        moves = any("frame" in name or "video" in name for name in self.accepts)
        self.modality, self.unit = "video" if moves else "image", "denoiser evaluations"
        self._check_call()
        self.stock = pipe.scheduler
        self.scheduler = PolicyScheduler.over(pipe.scheduler)
        self.process = self.scheduler.process  # flow, or vp for a variance-preserving one
        strength = self.accepts.get("strength")
        self.strength = self.call.get("strength", strength.default) if strength else 1.0  # share of the steps to do
        self.evaluations = 0  # rows that went through a denoiser
        shared_out = sharded.asked(memory.shard)
        # What is shared out comes to the device block by block, and never as a whole.
        self.encoders = Encoders(pipe, self.device, None if memory.encoders == "keep" else "cpu",
                                 later=denoisers(pipe) if shared_out else ())
        decode_in_parts(pipe, memory.vae)
        if checkpointing and getattr(getattr(pipe, "vae", None), "_supports_gradient_checkpointing", False):
            checkpoint_blocks(pipe.vae, self._attention)  # of pictures in a graph
        self.denoisers = denoisers(pipe)
        frozen = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
        for module in frozen.values():
            module.eval().requires_grad_(False)
        for name, module in self.denoisers.items():
            self._prepare(name, module)
        trained, self.live = adapted(pipe) if adapter is not None else {}, adapted.encoders
        self.weights = Weights(pipe, trained, adapter) if adapter is not None else None
        for module in self.denoisers.values() if shared_out else ():
            sharded.shard(module, self.device, self.weights.parameters())
        self.turns = sharded.Turns(self.device, self._accompany) if shared_out else None
        self._row: tuple[Conditioning, torch.Tensor, Task] | None = None  # one that was sampled last, and how
        for module in self.denoisers.values() if compiled else ():
            compile_blocks(module)
        self._memo = Memo({name: module for name, module in frozen.items()
                           if name not in self.denoisers and name not in trained})
        self._idle = Idle(self.scheduler, self.denoisers, self._skipped)
        self.loads: bool | None = None  # whether a state has to be put in place by an idle step; known after `encode`
        if strength:  # these pipelines cannot do without a step
            self.scheduler.quirk = replace(self.scheduler.quirk, idle=1)
        self._encode = pipe.encode_prompt
        if self.live:  # some are written to run without gradients
            self._encode = inspect.unwrap(type(pipe).encode_prompt).__get__(pipe)
        self.apart: bool | None = None  # whether the pipeline takes one prompt per call; known after the first `encode`
        self._shared: tuple[tuple[bool, ...], ...] = ()
        self._bare = False
        self._copies: dict[float, int] = {}  # by guidance, how the pipeline takes a vector of timesteps; see `vector`

    def _check_call(self) -> None:
        if unknown := sorted(set(self.call | self.given) - set(self.accepts)):
            raise UserError(f"picture: {type(self.pipe).__name__} takes no {unknown[0]!r}"
                            f"{nearest(unknown[0], sorted(set(self.accepts) - {'self'}))}")

    def _prepare(self, name: str, module: torch.nn.Module) -> None:
        if module.dtype != self.dtype:
            raise UserError(f"the {name} is in {module.dtype}, but precision is {self.precision!r}, which expects "
                            f"{self.dtype}: load the pipeline with that dtype, or set precision")
        states = next(iter(inspect.signature(module.forward).parameters))

        def count(_module, args, kwargs):
            self.evaluations += len(args[0] if args else kwargs[states])

        module.register_forward_pre_hook(count, with_kwargs=True)
        if self.checkpointing:
            checkpoint_blocks(module, self._attention, self.compiled)

    def pictures(self, count: int, images: Sequence[Any] | None = None) -> dict[str, list[Any]]:
        """The reference pictures of `count` prompts by the name of the pipeline's argument.

        images: of each prompt a picture, its file, or None for that of `call`. UserError where the pipeline takes none.
        """
        from PIL import Image

        found = {name: [value] * count for name, value in self.given.items()}
        if any(image is not None for image in images or ()):
            if "image" not in self.accepts:
                raise UserError(f"{type(self.pipe).__name__} takes no image, but a prompt brings one: leave it out")
            opened = [Image.open(each).convert("RGB") if isinstance(each, (str, Path)) else each for each in images]
            found["image"] = [self.given.get("image") if each is None else each for each in opened]
            if any(each is None for each in found["image"]):
                raise UserError("some prompts of a batch bring an `image` and others do not: give all one, or none")
        return found

    @torch.no_grad()
    def encode(self, prompts: list[str], negatives: list[str] | None = None,
               images: Sequence[Any] | None = None) -> Conditioning:
        """Encode P prompts once, exactly as the pipeline's own call would. UserError where it refuses its arguments.

        images: of each prompt a reference picture, its file, or None.
        """
        asked = Conditioning(prompts, negatives or [""] * len(prompts), inputs=self.pictures(len(prompts), images))
        try:
            if self.apart is None:
                self._learn(asked.rows(torch.tensor([0, 0])))
            conditioning = self.encoded(asked)
        except (TypeError, ValueError) as error:
            raise UserError(f"{type(self.pipe).__name__} refuses its arguments: {error}") from error
        if self.turns and self.apart:
            raise UserError(f"memory.shard is true, but {type(self.pipe).__name__} takes one prompt per call, so that "
                            "processes would not call it alike: use memory.shard: false")
        self.settle(conditioning)
        return conditioning

    def _skipped(self, rows: int) -> None:
        self.evaluations -= rows

    @torch.no_grad()
    def settle(self, conditioning: Conditioning) -> None:
        """Find out, once, whether the scheduler sees the state that is given as `latents`."""
        if self.loads is not None:
            return
        self.loads, before, row = False, self.evaluations, conditioning.rows(torch.tensor([0]))
        alphas, times = torch.tensor([0.9, 0.5]), torch.tensor([900, 500])
        task = Task(alphas, range(1), replay=True, timesteps=times if self.process == "vp" else None)
        drawn = self._drive(row, task, self.guidance, latents=None, generator=self.generators([0]))[1].first
        try:
            given = self._drive(row, task, self.guidance, latents=drawn, generator=self.generators([1]))[1].first
            self.loads = given.shape != drawn.shape or not torch.equal(given, drawn)
        except (IndexError, RuntimeError, TypeError, ValueError):  # it wants another shape than its scheduler sees
            self.loads = True
        if self.loads and not self.scheduler.quirk.idle:
            self.scheduler.quirk = replace(self.scheduler.quirk, idle=1)
        self.evaluations = before

    def _learn(self, twice: Conditioning) -> None:
        """Find out which values serve all prompts, and whether a call may bring several prompts with their pictures."""
        try:
            # Lengths alone would not tell: 77 tokens may meet 77 prompts. What grows with the prompts is theirs.
            one, two = self._calls(twice.rows(torch.tensor([0]))), self._calls(twice)
            self._shared = tuple(tuple(map(_shared, *values)) for values in zip(one, two, strict=True))
            self.apart = bool(twice.inputs) and not stay_apart(self, twice)
        except torch.OutOfMemoryError:
            raise
        # What a pipeline for one prompt may raise; if it is something else, the next call raises it again.
        except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            self.apart = True

    def encoded(self, asked: Conditioning) -> Conditioning:
        """What is asked for, with the values of `encode_prompt`."""
        if not self.apart:
            calls = self._calls(asked)
            per_prompt = tuple(tuple(value is not None and not shared for value, shared in zip(values, shares))
                               for values, shares in zip(calls, self._shared, strict=True))
            return replace(asked, calls=calls, per_prompt=per_prompt, bare=self._bare)
        asked = replace(asked, apart=True)
        each = [self._calls(asked.rows(torch.tensor([i]))) for i in range(len(asked.prompts))]
        calls = tuple(tuple(map(list, zip(*values))) for values in zip(*each, strict=True))
        return replace(asked, calls=calls, per_prompt=tuple((True,) * len(values) for values in calls), bare=self._bare)

    def _calls(self, asked: Conditioning) -> tuple[tuple[Any, ...], ...]:
        """What each call of `encode_prompt` returns during a call of the pipeline with no steps to do."""
        calls: list[tuple[Any, ...]] = []

        def remember(*args, **kwargs):
            self.encoders.come()
            found = self._encode(*args, **kwargs)
            self._bare = not isinstance(found, tuple)
            calls.append((found,) if self._bare else found)
            return found

        # Under guidance in either phase the negative embeddings have to be there.
        self._call_once(asked, Task(torch.ones(1), range(0)), remember, max(self.guidance, 2.0),
                        generator=self.generators(range(len(asked.prompts))))
        if not calls:
            raise UserError(f"{type(self.pipe).__name__} does not call its encode_prompt: its conditioning cannot be "
                            "cached")
        return tuple(calls)

    def sampling(self):
        """The grad mode of rollouts: compiled blocks compute as in a replay, and only the graph is dropped."""
        return torch.set_grad_enabled(self.compiled)

    def run(self, task: Task, conditioning: Conditioning, latents=None, generators=None, x0=None):
        """Run a segment of the grid from `latents` [B,*D], or from noise drawn with `generators` (one per row).

        Returns (the last state [B,*D], the record of the task).
        """
        self._announce(sharded.RUN, len(task.steps))
        with self.sampling():
            last, record = self._drive(conditioning, task, self.guidance, latents=latents, generator=generators, x0=x0)
        if self.turns:
            self._row = conditioning.rows(torch.tensor([0])), last[:1].detach(), task
        return last, record

    def vector(self, conditioning: Conditioning) -> bool:
        """Whether one call replays rows of different steps, at the present guidance: found out by trial, once."""
        if self.guidance not in self._copies:
            before, twice = self.evaluations, conditioning.rows(torch.tensor([0, 0]))
            task = Task(torch.tensor([0.9, 0.5]), range(1), replay=True,
                        timesteps=torch.tensor([900, 500]) if self.process == "vp" else None)

            def driven(task: Task, **options) -> Record:
                return self._drive(twice, task, self.guidance, **options)[1]

            with self.sampling():
                state = driven(task, latents=None, generator=self.generators([0, 1])).first
                self._copies[self.guidance] = 0 if self.apart else copies(
                    lambda task: driven(task, latents=state).output, self.process, self.dtype == torch.float32)
            self.evaluations = before
        return self._copies[self.guidance] > 0

    def replay(self, conditioning: Conditioning, x: torch.Tensor, grid: torch.Tensor, step: int | torch.Tensor,
               timesteps: torch.Tensor | None = None) -> torch.Tensor:
        """The model output [B,*D] at one step, through the pipeline's own call, with gradients where enabled: a
        velocity, or of a variance-preserving process, which needs its timesteps [T], the noise.

        step: or one per row, int64 [B], where the pipeline takes a `vector`."""
        if self._row:  # who accompanies this step elsewhere does so on its grid
            self._row = *self._row[:2], replace(self._row[2], grid=grid, timesteps=timesteps)
        self._announce(sharded.TRAIN if torch.is_grad_enabled() else sharded.LOOK, step)
        return self._replay(conditioning, x, grid, step, timesteps)

    def _replay(self, conditioning: Conditioning, x: torch.Tensor, grid: torch.Tensor, step: int | torch.Tensor,
                timesteps: torch.Tensor | None) -> torch.Tensor:
        task = Task(grid, range(1), replay=True, timesteps=timesteps)
        if torch.is_tensor(step):
            assert self.vector(conditioning), "this pipeline takes one timestep per call"
            task = task.at_rows(step, self._copies[self.guidance])
        else:
            task = task.at_step(step)
        return self._drive(conditioning, task, self.guidance, latents=x)[1].output

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a loss of the last replay."""
        self._announce(sharded.BACKWARD)
        loss.backward()

    def _announce(self, kind: int, step: int = 0) -> None:
        if self.turns:
            self.turns.take(kind, step)

    def _accompany(self, kind: int, step: int) -> torch.Tensor:
        """A replay of one row at a step that other processes replay: it counts nowhere."""
        (conditioning, x, task), before = self._row, self.evaluations
        with torch.set_grad_enabled(kind == sharded.TRAIN):
            output = self._replay(conditioning, x, task.grid, step, task.timesteps)
        self.evaluations = before
        return output

    def unroll(self, task: Task, conditioning: Conditioning, latents: torch.Tensor, checkpointing: bool = False
               ) -> torch.Tensor:
        """The last state [B,*D] of a segment of the grid, as `run` gives it, in one graph of all its steps where
        gradients are enabled. checkpointing: the backward computes every forward of a denoiser again."""
        kept = recomputed(self.denoisers.values(), self._attention) if checkpointing else contextlib.nullcontext()
        with kept:
            return self._drive(conditioning, replace(task, unrolled=True), self.guidance, latents=latents)[0]

    @torch.no_grad()
    def decode(self, latents: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        """`picture` without gradients."""
        return self.picture(latents, conditioning)

    def picture(self, latents: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        """Pictures [B,3,H,W] (or frames [B,F,3,H,W]) in [0, 1], not rounded, with gradients where enabled: the pipeline
        with no steps left to do."""
        task = Task(torch.zeros(1), range(0))
        return self._drive(conditioning, task, self.guidance, latents=latents, output_type="pt")[0].float()

    @torch.no_grad()
    def generate(self, conditioning: Conditioning, generators, steps: int, guidance: float, output_type="pt"):
        """Pictures on the CPU as a user of the stock pipeline gets them: its own scheduler, steps and guidance."""
        self._announce(sharded.RUN, steps)
        return self._drive(conditioning, None, guidance, generator=generators, num_inference_steps=steps,
                           output_type=output_type)[0].float().cpu()

    @torch.no_grad()
    def stock_grid(self, conditioning: Conditioning, steps: int) -> torch.Tensor:
        """The sigmas [steps+1] that the stock pipeline samples the first of these prompts with: its scheduler's, as the
        pipeline sets them, with its own sigmas and the shift of the picture's size. UserError where they are no grid.
        """
        row, generators = conditioning.rows(torch.tensor([0])), self.generators([0])
        try:
            with until_set(self.stock):
                self._drive(row, None, self.guidance, generator=generators, num_inference_steps=steps,
                            output_type="latent")
            return grids.stock(self.stock, steps)
        except ValueError as error:
            raise UserError(f"train.grid 'stock': {error} (train.grid: shifted asks nothing of the scheduler)"
                            ) from None

    def _drive(self, conditioning: Conditioning, task: Task | None, guidance: float, **options):
        """Call the pipeline, once, or for each row where it takes one alone: (what it returns, the task's record)."""
        self.encoders.leave()
        if self.live and (task is None or task.steps):
            with unlogged():
                conditioning = encoded_anew(self, conditioning)
        if not conditioning.apart:
            return self._call_once(conditioning, task, self._cached(conditioning), guidance, **options)
        found = []
        for i in range(len(conditioning.prompts)):
            row = conditioning.rows(torch.tensor([i]))
            own = {key: value[i:i + 1] if torch.is_tensor(value) or isinstance(value, list) else value
                   for key, value in options.items()}
            found.append(self._call_once(row, task and task.row(i), self._cached(row), guidance, **own))
        outs, records = zip(*found)
        return torch.cat(outs), task and Record.joined(records)

    def _cached(self, conditioning: Conditioning):
        """What stands in for `encode_prompt`: it returns the calls' values in turn."""
        values = ([value[0] for value in call] if conditioning.apart else call for call in conditioning.calls)
        calls = (call[0] if conditioning.bare else tuple(call) for call in values)
        return lambda *_, **__: next(calls)

    def _call_once(self, conditioning: Conditioning, task: Task | None, encode, guidance: float, *, x0=None, **options):
        """One call of the pipeline with our scheduler (without a task: its own) and with `encode` for the prompts."""
        pipe, record = self.pipe, None
        pipe.scheduler = self.stock if task is None else self.scheduler
        if task is not None:
            state = options.get("latents") if self.loads else None
            record = self.scheduler.follow(task, x0, state)
            if state is not None:
                options |= {"latents": None, "generator": self.generators(range(len(state)))}
            options = {"output_type": "latent"} | self._announced(task) | options
        if conditioning.apart and options.get("generator"):
            options["generator"] = options["generator"][0]
        inputs = {name: values[0] if conditioning.apart else values for name, values in conditioning.inputs.items()}
        arguments = dict(self.call, **inputs, **self._texts(conditioning), return_dict=False, **self._scale(guidance),
                         **options)
        pipe.encode_prompt = encode
        try:
            with self._precision(), self._attention(), self._remembering(task, inputs), self._idling(task), \
                    contextlib.nullcontext() if not conditioning.calls else unlogged(), \
                    seeded(pipe.scheduler, options.get("generator") if task is None else None):
                out = self._call(pipe, **{k: v for k, v in arguments.items() if k in self.accepts})[0]
        finally:
            pipe.scheduler = self.stock
            del pipe.encode_prompt
        record = None if record is None else self.scheduler.taken()
        # Some pipelines give latents in another shape than the one they work in.
        last = None if record is None or arguments["output_type"] != "latent" else record.last
        kept = not self.loads and torch.is_tensor(out) and last is not None and out.shape == last.shape
        return (out if last is None or kept else last), record

    def _announced(self, task: Task) -> dict[str, Any]:
        """How many steps the pipeline is told to do. With a strength below 1, which leaves out the first ones, it is
        told twice as many and to do half of them: no rounding comes between."""
        self.scheduler.halved = self.strength < 1
        steps = len(task.steps) + self.scheduler.idle
        if self.scheduler.halved:
            return {"num_inference_steps": 2 * steps, "strength": 0.5}
        return {"num_inference_steps": max(steps, 2)}  # some pipelines divide by one less

    @staticmethod
    def _texts(conditioning: Conditioning) -> dict[str, Any]:
        texts = {"prompt": conditioning.prompts, "negative_prompt": conditioning.negatives}
        # Copies of the prompts: some pipelines (Z-Image) write into the list.
        return {name: own[0] if conditioning.apart else list(own) for name, own in texts.items()}

    def _idling(self, task: Task | None):
        # The first calls have no idle step, but show what the denoisers return.
        watched = task is not None and (self.scheduler.idle or self.loads is None)
        return self._idle() if watched else contextlib.nullcontext()

    def _scale(self, guidance: float) -> dict[str, float]:
        """The guidance argument: true CFG where the pipeline has it and the model has no guidance embedded."""
        embedded = any(getattr(module.config, "guidance_embeds", False) for module in self.denoisers.values())
        true = "true_cfg_scale" in self.accepts and "true_cfg_scale" not in self.call and not embedded
        return {"true_cfg_scale" if true else "guidance_scale": guidance}

    def _remembering(self, task: Task | None, inputs: dict[str, Any]):
        return self._memo() if task is not None and inputs else contextlib.nullcontext()

    def _precision(self):
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def _attention(self):
        return plain_on_cpu(self.device)

    @contextlib.contextmanager
    def reference(self, held: Sequence[dict[str, torch.Tensor]] = ()) -> Iterator[None]:
        """Inside, the denoiser is the base model: the adapter is off (or, without one, the first weights are back); or
        it is the average of the snapshots `held` of its trainable weights."""
        with self.weights.reference(held), torch.no_grad():
            yield

    @contextlib.contextmanager
    def guided(self, weight: float) -> Iterator[None]:
        """Inside, the denoisers answer base + weight * (tuned - base), without gradients: RLG, see policies/blend.py.

        Without an adapter the base's weights are copied into place for every call, which is slow. UserError for a
        weight other than 0 and 1 where text encoders are trained: base and tuned model read the same embeddings."""
        if self.live:
            if weight not in (0, 1):
                raise UserError(f"RLG with weight {weight:g}: a text encoder is trained, but base and tuned model get "
                                "the same embeddings: expected 0 or 1")
            with contextlib.nullcontext() if weight else self.reference(), torch.no_grad():
                yield
            return
        bases = {module: inside(self.weights.base, module.forward) for module in self.denoisers.values()}
        before = self.evaluations
        with guided(bases, weight), torch.no_grad():
            yield
        if weight not in (0, 1):
            self.evaluations += self.evaluations - before  # a call that is counted ran both

    @staticmethod
    def generators(seeds) -> list[torch.Generator]:
        """One CPU generator per row, so that noise does not depend on device, process or micro-batch."""
        return [torch.Generator().manual_seed(int(seed)) for seed in seeds]
