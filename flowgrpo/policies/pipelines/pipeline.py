"""Any diffusers pipeline as a policy, driven through its own `__call__`.

No line here knows a latent's shape, a model's embeddings or its guidance. See samplers/scheduler.py.
"""

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from flowgrpo.config.sections import Adapter, Memory
from flowgrpo.device import DTYPES
from flowgrpo.distributed import shards
from flowgrpo.errors import UserError
from flowgrpo.methods.groups import Adapted
from flowgrpo.policies.pipelines import attention
from flowgrpo.policies.pipelines.call import EncodePrompt, PipelineCall, require_arguments, silence_warnings, until_set
from flowgrpo.policies.pipelines.conditioning import Conditioning
from flowgrpo.policies.pipelines.frames import require_made
from flowgrpo.policies.pipelines.load import modality, trainable_modules
from flowgrpo.policies.pipelines.probes import copies, stay_apart
from flowgrpo.policies.pipelines.prompt_inputs import SHARED, images_of, one_line, split_arguments, watch
from flowgrpo.policies.pipelines.rlg import Teachers, inside, rl_guidance
from flowgrpo.policies.weights import forwards, memory_options, sharding
from flowgrpo.policies.weights.checkpointing import checkpoint_blocks, recompute_forwards, supports_checkpointing
from flowgrpo.policies.weights.forwards import modules_of, replaced
from flowgrpo.policies.weights.trainable import TrainableWeights
from flowgrpo.samplers import grids
from flowgrpo.samplers.rollout import generators
from flowgrpo.samplers.scheduler import Segment, StepRecord
from flowgrpo.starter import FOLDERS
from flowgrpo.types import unwrap

STARTER = FOLDERS["starter"]
# Arguments of calls that go by the place in the pipeline's loop, and how they do nothing.
PLACED = {"skip_guidance_layers": None, "cfg_trunc_ratio": 1.0, "use_dynamic_cfg": False, "control_guidance_start": 0.0,
          "control_guidance_end": 1.0}


class PipelinePolicy:
    """Diffusers pipeline with trainable weights: `encode`, `run`, `replay`, `decode`, and `generate` for evaluation.

    pipe: the pipeline; it is moved to `device` and its scheduler is kept for evaluation.
    adapter: None trains nothing.
    call: arguments of every call of the pipeline (height, width, max_sequence_length, ...); images among them
    (`image`, `video`, ...) are for prompts that bring none of their own.
    guidance: the scale of rollouts and replays; precision: of the frozen weights and of the arithmetic. memory: where
    text encoders and recorded states (`states`) wait, and how images are decoded; compiled: the denoisers' blocks.
    checkpointing: the share of the denoisers' blocks that recompute in the backward pass, 0 to 1.
    fps: frames per second of clips; None: the model's own (`frames.rate`).
    adapted: which modules are trained; with text encoders among them the policy is `live`, and prompts are encoded
    whenever they are read.
    """

    generators = staticmethod(generators)

    def __init__(self, pipe: Any, adapter: Adapter | None, *, device: str | torch.device = "cpu",
                 precision: str = "fp32", guidance: float = 1.0, call: dict[str, Any] | None = None,
                 checkpointing: float = 0.0, memory: Memory = Memory(), compiled: bool = False,
                 adapted: Adapted = Adapted(), fps: float | None = None):
        self.pipe, self.guidance = pipe, guidance
        watch(pipe)
        self.frames, self.call, self.given = split_arguments(type(pipe), call or {}, fps)
        self.device, self.precision, self.dtype = torch.device(device), precision, DTYPES[precision]
        self.exact = 1e-6 if self.dtype == torch.float32 else None  # how closely a replay repeats the rollout
        self.checkpointing, self.compiled, self.offloads = float(checkpointing), compiled, memory.offload != "none"
        self.states = self.device if memory.states == "device" else torch.device("cpu")
        trained, self.live = trainable_modules(pipe, adapted) if adapter is not None else {}, adapted.encoders
        self.driver = driver = PipelineCall(  # an idle step omits rows that were counted
            pipe, self.call, self.device, self.dtype, trained,
            lambda rows: setattr(self, "evaluations", self.evaluations - rows), fps)
        self.accepts, self.denoisers = driver.accepts, driver.denoisers
        self.stock, self.strength = driver.stock, driver.strength
        self.process = driver.scheduler.process  # flow, or vp for a variance-preserving one
        self.modality, self.unit = modality(type(pipe)), "denoiser evaluations"
        require_arguments(type(pipe), self.call | self.given, self.denoisers.values())
        for name in PLACED.keys() & self.call.keys():
            if self.call[name] not in (PLACED[name], [PLACED[name]]):
                raise UserError(f"`image`: {name} goes by the place in the loop of {type(pipe).__name__}, of which a "
                                "replay, and a rollout whose samples share steps, are a part: leave it out")
        self._trial = Segment(torch.tensor([0.9, 0.5]), range(1), replay=True,  # to find out what the pipeline does
                              timesteps=torch.tensor([900, 500]) if self.process == "vp" else None)
        self.evaluations, self.teacher = 0, Teachers(self)  # rows that went through a denoiser; other denoisers
        mesh = sharding.mesh(memory.shard, self.device)
        # Sharded and offloaded weights come to the device block by block, and never as a whole.
        self.encoders = memory_options.Encoders(
            pipe, self.device, None if memory.encoders == "keep" else "cpu",
            self.denoisers if mesh is not None or memory_options.later(memory) else ())
        memory_options.decode_in_parts(pipe, memory.vae)
        attention.use_attention(memory.attention, self.denoisers.values())
        for part in modules_of(pipe).values():
            part.eval().requires_grad_(False)
        for name, module in self.denoisers.items():
            self._prepare(name, module)
        if checkpointing:
            self.checkpoint(self.checkpointing)
        self.weights: Any = TrainableWeights(pipe, trained, adapter, mesh is None) if adapter is not None else None
        forwards.contiguous_inputs(self.denoisers.values(), self.device)
        if adapter is None or adapter.rank and forwards.without_casts(self.weights.layers().values()):
            driver.casts = False  # all frozen weights are in `precision`
        if mesh is not None:
            for module in self.denoisers.values():
                sharding.shard(module, mesh, self.device, self.weights.parameters(), self.dtype)
            if not self.weights.adapter.rank:  # it holds the shards from here on
                self.weights.hold()
        memory_options.place(self.denoisers.values(), self.encoders, self.device, memory, self.weights)
        attention.enable(self.denoisers.values(), memory.context_parallel, self.device)
        self.turns = shards.Lockstep(self.device, self._accompany) if mesh is not None else None
        self._row: tuple[Conditioning, torch.Tensor, Segment] | None = None  # one that was sampled last, and how
        for module in self.denoisers.values() if compiled else ():
            forwards.compile_blocks(module)
        self.encode_prompt = EncodePrompt(driver, self.encoders, self.live)
        self._copies: dict[float, int] = {}  # by guidance, how the pipeline takes a vector of timesteps; see `vector`

    @property
    def fps(self) -> float | None:
        return self.driver.fps

    def _prepare(self, name: str, module: torch.nn.Module) -> None:
        if module.dtype != self.dtype:
            raise UserError(f"the {name} is in {module.dtype}, but precision is {self.precision!r}, which expects "
                            f"{self.dtype}: load the pipeline with that dtype, or set precision")
        states = next(iter(inspect.signature(module.forward).parameters))

        def count(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.evaluations += len(args[0] if args else kwargs[states])

        module.register_forward_pre_hook(count, with_kwargs=True)
        forwards.fuse_norms(module, self.device)

    def checkpoint(self, share: float) -> None:
        """Recompute this share of the denoisers' and the autoencoder's blocks in the backward pass, from here on."""
        self.checkpointing = share
        for module in (*self.denoisers.values(), *filter(supports_checkpointing, [self.pipe.components.get("vae")])):
            checkpoint_blocks(module, self.driver.attention, self.compiled, share)

    @torch.no_grad()
    def encode(self, prompts: list[str], negatives: list[str] | None = None,
               images: Sequence[Any] | None = None) -> Conditioning:
        """Encode P prompts once, exactly as the pipeline's own call would. UserError where it refuses its arguments.

        images: of each prompt a reference image, its file, all that it brings (`Inputs`), or None.
        """
        brings = self.given or any(image is not None for image in images or ())
        pictures = images_of(self, len(prompts), images) if brings else {}
        plain = Conditioning(prompts, negatives or [""] * len(prompts), inputs=pictures)
        with one_line(self.pipe, self.call, images, pictures):
            if not self.encode_prompt.knows(plain):
                twice = plain.rows(torch.tensor([0, 0]))
                self.encode_prompt.learn(twice, self.guidance, lambda: stay_apart(self, twice))
            conditioning = self.encode_prompt(plain, self.guidance)
            self.probe(conditioning)
        return conditioning

    @torch.no_grad()
    def probe(self, conditioning: Conditioning) -> None:
        """Find out, once, whether the scheduler sees the state that is given as `latents`. UserError for prompts of
        which sharded weights cannot take several in a call."""
        single = conditioning.one_per_call or set(SHARED) & set(conditioning.inputs)
        if self.turns and (single or conditioning.parts and conditioning.masks is None):
            raise UserError(f"memory.shard is true, but {type(self.pipe).__name__} takes one prompt per call, so that "
                            "processes would not call it alike: use memory.shard: false")
        driver = self.driver
        if driver.loads is not None:
            return
        before, row = self.evaluations, conditioning.rows(torch.tensor([0]))

        def first(**options: Any) -> torch.Tensor:
            return unwrap(unwrap(self._drive(row, self._trial, self.guidance, **options)[1]).first)

        driver.loads = False
        drawn = first(latents=None, generator=generators([0]))
        try:
            given = first(latents=drawn, generator=generators([1]))
            driver.loads = given.shape != drawn.shape or not torch.equal(given, drawn)
        except (IndexError, RuntimeError, TypeError, ValueError):  # it wants another shape than its scheduler sees
            driver.loads = True
        if driver.loads and not driver.scheduler.quirk.idle:
            driver.scheduler.quirk = replace(driver.scheduler.quirk, idle=1)
        self.evaluations = before

    def sampling(self) -> contextlib.AbstractContextManager[Any]:
        """Return the grad mode of rollouts: compiled blocks compute as in a replay, and only the graph is dropped."""
        return torch.set_grad_enabled(self.compiled)

    def run(self, task: Segment, conditioning: Conditioning, latents: torch.Tensor | None = None,
            generators: list[torch.Generator] | None = None, x0: torch.Tensor | None = None
            ) -> tuple[torch.Tensor, StepRecord]:
        """Run a segment of the grid from `latents` [B,*D], or from noise drawn with `generators` (one per row); return
        the last state [B,*D] and the record of the task."""
        self._announce(shards.RUN, len(task.steps))
        with self.sampling():
            last, record = self._drive(conditioning, task, self.guidance, latents=latents, generator=generators, x0=x0)
        if self.turns:
            self._row = conditioning.rows(torch.tensor([0])), last[:1].detach(), task
        assert record is not None  # of a call with a task
        return last, record

    def vector(self, conditioning: Conditioning) -> bool:
        """Return True if one call can replay rows of different steps at the rows' guidance; tried once."""
        if (guidance := conditioning.scale(self.guidance)) not in self._copies:
            before, twice = self.evaluations, conditioning.rows(torch.tensor([0, 0]))

            def drive(task: Segment, **options: Any) -> StepRecord:
                return unwrap(self._drive(twice, task, guidance, **options)[1])

            with self.sampling():
                state = drive(self._trial, latents=None, generator=generators([0, 1])).first
                self._copies[guidance] = 0 if self.encode_prompt.one_per_call else copies(
                    lambda task: unwrap(drive(task, latents=state).output), self.process,
                    self.dtype == torch.float32)
            self.evaluations = before
        return self._copies[guidance] > 0

    def replay(self, conditioning: Conditioning, x: torch.Tensor, grid: torch.Tensor, step: int | torch.Tensor,
               timesteps: torch.Tensor | None = None) -> torch.Tensor:
        """Return the model output [B,*D] at one step, with gradients where enabled: a velocity or, of a
        variance-preserving process, which needs its timesteps [T], the noise.
        step: or one per row, int64 [B], where the pipeline takes a `vector`."""
        if self._row:  # who accompanies this step elsewhere does so on its grid
            self._row = *self._row[:2], replace(self._row[2], grid=grid, timesteps=timesteps)
        self._announce(shards.TRAIN if torch.is_grad_enabled() else shards.LOOK, step)
        return self._replay(conditioning, x, grid, step, timesteps)

    def _replay(self, conditioning: Conditioning, x: torch.Tensor, grid: torch.Tensor, step: int | torch.Tensor,
                timesteps: torch.Tensor | None) -> torch.Tensor:
        task = Segment(grid, range(1), replay=True, timesteps=timesteps)
        if torch.is_tensor(step):
            assert self.vector(conditioning), "this pipeline takes one timestep per call"
            task = task.at_rows(step, self._copies[conditioning.scale(self.guidance)])
        else:
            task = task.at_step(step)
        record = self._drive(conditioning, task, self.guidance, latents=x)[1]
        assert record is not None and record.output is not None  # of a replay
        return record.output

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a loss of the last replay."""
        self._announce(shards.BACKWARD)
        loss.backward()

    def _announce(self, kind: int, step: int | torch.Tensor = 0) -> None:
        if self.turns:
            assert isinstance(step, int), "sharded weights do not go with packed replays"
            self.turns.join(kind, step)

    def _accompany(self, kind: int, step: int) -> torch.Tensor:
        """Replay one row at a step that other processes replay: it counts nowhere."""
        (conditioning, x, task), before = unwrap(self._row), self.evaluations
        with torch.set_grad_enabled(kind == shards.TRAIN):
            output = self._replay(conditioning, x, task.grid, step, task.timesteps)
        self.evaluations = before
        return output

    def unroll(self, task: Segment, conditioning: Conditioning, latents: torch.Tensor, checkpointing: bool = False
               ) -> torch.Tensor:
        """Return the last state [B,*D] of a segment of the grid, as `run`, with all its steps in one graph.
        checkpointing: the backward computes every forward of a denoiser again."""
        kept = (recompute_forwards(self.denoisers.values(), self.driver.attention) if checkpointing
                else contextlib.nullcontext())
        with kept:
            return self._drive(conditioning, replace(task, unrolled=True), self.guidance, latents=latents)[0]

    @torch.no_grad()
    def decode(self, latents: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        """Return `image` without gradients."""
        return self.image(latents, conditioning)

    def image(self, latents: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        """Return images [B,3,H,W] (or frames [B,F,3,H,W]) in [0, 1], not rounded, with gradients where enabled."""
        task = Segment(torch.zeros(1), range(0))
        with one_line(self.pipe, self.call):
            images = self._drive(conditioning, task, self.guidance, latents=latents, output_type="pt")[0].float()
        return self._as_asked(images, conditioning)

    @torch.no_grad()
    def sound(self, latents: torch.Tensor, prompts: Sequence[str]) -> tuple[torch.Tensor, int]:
        """Return the sound [B, channels, N] of clean latents on the CPU, and its samples per second. UserError for a
        pipeline that makes none."""
        rate = getattr(getattr(getattr(self.pipe, "vocoder", None), "config", None), "output_sampling_rate", None)
        if rate is None:
            raise UserError(f"{type(self.pipe).__name__} makes no sound: leave rewards of sound out, or take LTX-2")
        conditioning, heard = self.encode(list(prompts)), list[torch.Tensor]()
        with replaced("heard", (self.driver, heard)):
            self.image(latents.to(self.device, self.dtype), conditioning)
        return torch.cat(heard).float().cpu(), rate

    @torch.no_grad()
    def of_noise(self, conditioning: Conditioning, generators: Sequence[torch.Generator], output_type: str = "pt"
                 ) -> torch.Tensor:
        """Return the pipeline's decoded initial noise on the CPU, in its images' form; "latent": not decoded."""
        task = Segment(torch.zeros(1), range(0))
        drawn = self._drive(conditioning, task, self.guidance, generator=generators, output_type=output_type)[0]
        return self._as_asked(drawn.float().cpu(), conditioning, output_type)

    @torch.no_grad()
    def generate(self, conditioning: Conditioning, generators: list[torch.Generator], steps: int, guidance: float,
                 output_type: str = "pt") -> torch.Tensor:
        """Return images on the CPU as the stock pipeline draws them: by its own scheduler, steps and guidance."""
        grids.require_steps(self.stock, steps)
        self._announce(shards.RUN, steps)
        with one_line(self.pipe, self.call):
            drawn = self._drive(conditioning, None, guidance, generator=generators, num_inference_steps=steps,
                                output_type=output_type)[0].float().cpu()
        return self._as_asked(drawn, conditioning, output_type)

    def _as_asked(self, drawn: torch.Tensor, conditioning: Conditioning, output_type: str = "pt") -> torch.Tensor:
        """Return what a call gave. Raises UserError for images of another size or number of frames."""
        if output_type == "pt":
            asked = self.call | conditioning.size
            require_made(asked.get("num_frames"), drawn, self.pipe, asked.get("height"), asked.get("width"))
        return drawn

    @torch.no_grad()
    def stock_grid(self, conditioning: Conditioning, steps: int) -> torch.Tensor:
        """Return the sigmas [steps+1] of the stock pipeline for the first of these prompts: its scheduler's, as the
        pipeline sets them, with its own sigmas and the image's shift. Raises UserError where they are no grid."""
        row = conditioning.rows(torch.tensor([0]))
        try:
            with until_set(self.stock):
                self._drive(row, None, self.guidance, generator=generators([0]), num_inference_steps=steps,
                            output_type="latent")
            return grids.stock(self.stock, steps)
        except ValueError as error:
            raise UserError(f"train.grid 'stock': {error} (train.grid: shifted asks nothing of the scheduler)"
                            ) from None

    def _drive(self, conditioning: Conditioning, task: Segment | None, guidance: float, **options: Any
               ) -> tuple[Any, StepRecord | None]:
        """Call the pipeline, whose prompts are encoded anew where that is trained: (what it returns, the record)."""
        if self.encoders.away is not None:
            self.encoders.offload()
        if self.live and (task is None or task.steps):
            with silence_warnings():
                conditioning = self.encode_prompt.anew(conditioning, self.guidance)
        return self.driver(conditioning, task, guidance, **options)

    def text_once(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: replays encode each prompt once, without gradients of trained text encoders."""
        return replaced("kept", (self.encode_prompt, {}))

    @contextlib.contextmanager
    def reference(self, held: Sequence[dict[str, torch.Tensor]] = ()) -> Iterator[None]:
        """Context manager: the denoiser is the base model (`TrainableWeights.base`), or the average of `held`."""
        with self.weights.reference(held), torch.no_grad():
            yield

    @contextlib.contextmanager
    def rl_guidance(self, weight: float) -> Iterator[None]:
        """Context manager: denoisers return base + weight * (tuned - base), without gradients (RLG, `rlg.py`).

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
        with rl_guidance(bases, weight), torch.no_grad():
            yield
        if weight not in (0, 1):
            self.evaluations += self.evaluations - before  # a call that is counted ran both
