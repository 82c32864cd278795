"""Samplers of (arm, prompts, seeds), by a pipeline or a language model: a sample depends on these three alone. One call
of a stock pipeline draws several images that equal those of single calls; a prompt enhancer is a language model that
rewrites prompts first (`--enhancer`).
"""

import contextlib
import gc
import inspect
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from flowgrpo import domains
from flowgrpo.config.schema import Config
from flowgrpo.config.sections import STEPS
from flowgrpo.cores import Threads
from flowgrpo.data.images import Clip
from flowgrpo.data.prompts import Prompt, encodable
from flowgrpo.errors import NotFinite, UserError
from flowgrpo.evaluation.plan import Arm, weights_digest
from flowgrpo.log import bar
from flowgrpo.policies import build, checkpoints, loading
from flowgrpo.policies.checkpoints import config_of
from flowgrpo.policies.pipelines import edits, few_steps, frames, prompt_inputs
from flowgrpo.policies.pipelines.call import disable_safety_checker, guidance_argument, schedule, seed_steps
from flowgrpo.policies.pipelines.load import denoisers
from flowgrpo.policies.pipelines.modular import guided, guiders
from flowgrpo.policies.pipelines.rlg import Branches
from flowgrpo.policies.weights.adapters import culprit
from flowgrpo.rewards.reward import require_finite
from flowgrpo.samplers.grids import require_steps
from flowgrpo.samplers.rollout import generators, noise_seed, seeder
from flowgrpo.starter import CALLS, EVAL, RATES

SHARE = 0.1  # maximum effect of the batch in half precision, as a share of the difference between two images
INSTRUCTION = ("Rewrite the user's prompt for a text-to-image model. Keep what it says. Add details of the scene, the "
               "light and the style. Answer with the new prompt alone.")


def call_arguments(model: str, lora: Path | None, steps: int | None = None, guidance: float | None = None
                   ) -> dict[str, Any]:
    """Arguments of the pipeline's calls besides prompt and seed. The guidance scale is `guidance`, whatever the
    pipeline calls it, and the frames per second are `fps`.

    lora: a run's `eval` and `image` set what is absent; otherwise a starter's card, what fits a model of few steps,
    or the pipeline does.
    Raises UserError for more than STEPS steps, and for a guidance that is not finite.
    """
    if steps is not None and steps > STEPS:
        raise UserError(f"--steps: got {steps}, expected {STEPS} at most")
    if guidance is not None and not math.isfinite(guidance):
        raise UserError(f"--guidance: got {guidance}, expected a finite number")
    arguments: dict[str, Any] = EVAL.get(model, {}) | CALLS.get(model, {})
    config, fps = config_of(lora), RATES.get(model)
    facts = few_steps.ahead(model)
    if config is None and model not in EVAL and facts.why:
        arguments |= {"num_inference_steps": facts.steps, "guidance": facts.guidance}
    if config is not None:
        arguments |= config.eval_call | {"num_inference_steps": config.eval.steps, "guidance": config.eval.guidance}
        fps = config.fps
    given = {"num_inference_steps": steps, "guidance": guidance, "fps": fps}
    return arguments | {key: value for key, value in given.items() if value is not None}


@torch.no_grad()
def draw_one(pipe: Any, prompt: Prompt, seed: int, arguments: dict[str, Any], negative: str = "") -> torch.Tensor:
    """Draw an image [3, H, W] or clip [F, 3, H, W] in [0, 1], by one pipeline call with noise of that seed.

    arguments: further ones of the call, from `call_arguments`. negative: for a prompt without its own.
    Raises UserError for a pipeline with another output, or that refuses its arguments, and for a missing input file.
    """
    if (editing := edits.edit_policy_of(pipe)) is not None:
        return editing.draw([prompt], [seed], arguments, negative)[0]
    generator = torch.Generator().manual_seed(seed)
    brought = prompt_inputs.decode_inputs(pipe, prompt.inputs, arguments) if prompt.brings is not None else {}
    image = {name: value.frames if isinstance(value, Clip) else value for name, value in brought.items()}
    with seed_steps(pipe.scheduler, generator), _explain_refusal(pipe, prompt, arguments, image):
        images = call(pipe, arguments, prompt=prompt.text, generator=generator, output_type="pt", **image,
                    negative_prompt=negative if prompt.negative is None else prompt.negative)
    if images.ndim not in (4, 5):
        raise UserError(f"{type(pipe).__name__} gives {list(images.shape)}: only images [1, 3, H, W] and clips "
                        "[1, F, 3, H, W] can be written")
    return frames.rgb(images[0], pipe).float().cpu()


def call(pipe: Any, arguments: dict[str, Any], **inputs: Any) -> torch.Tensor:
    """Call the pipeline and return its output. arguments: result of `call_arguments`. inputs: prompts, generators
    and the like. Arguments that the pipeline does not take are dropped."""
    require_steps(pipe.scheduler, arguments.get("num_inference_steps"))
    accepted, merged = inspect.signature(pipe.__call__).parameters, arguments | inputs
    if "fps" in arguments and (name := frames.fps_argument(type(pipe))):
        merged[name] = arguments["fps"]
    if "guidance" in arguments:
        merged[guidance_argument(accepted, denoisers(pipe).values())] = arguments["guidance"]
        merged |= schedule(accepted, arguments["guidance"], merged.get("num_inference_steps", 0))
    merged = {key: value for key, value in merged.items() if key in accepted}
    scaled = guiders(pipe) if "guidance" in arguments else []
    with torch.no_grad(), guided(scaled, arguments.get("guidance", 1.0), None, 0):
        made = inspect.unwrap(type(pipe).__call__)(pipe, **merged, return_dict=False)[0]
    if merged.get("output_type") == "pt":
        frames.require_made(merged.get("num_frames"), made, pipe, merged.get("height"), merged.get("width"))
    return made


@contextlib.contextmanager
def _explain_refusal(pipe: Any, prompt: Prompt, arguments: dict[str, Any], images: dict[str, Any]) -> Iterator[None]:
    """Context manager: a pipeline's refusal is one line. If a call without an image fails on a pipeline that takes
    one, that is named as a possible cause. images: what the prompt brings, as arguments."""
    try:
        yield
    except prompt_inputs.REFUSALS as error:
        takes = "image" in inspect.signature(pipe.__call__).parameters and "image" not in arguments | images
        if takes and isinstance(error, (AttributeError, TypeError, ValueError)) and not isinstance(error, UserError):
            raise UserError(f"{type(pipe).__name__} takes an image, and fails without one "
                            f"({' '.join(str(error).split())}): give `sample` an --image FILE, or every prompt of the "
                            "file an `image`") from error
        told = prompt_inputs.refusal(pipe, error, [prompt.brings], {
            name: value if isinstance(value, list) else [value] for name, value in images.items()}, arguments)
        if told is None:
            raise
        raise told from error


def _require_finite(samples: Sequence[Any], prompts: Sequence[Prompt], parts: dict[str, Any]) -> None:
    """Raise NotFinite for the first sample that holds NaN or an infinity, with the weight that does."""
    for sample, prompt in zip(samples, prompts):
        try:
            require_finite(sample, [prompt.text] * len(sample))
        except NotFinite as error:
            if line := culprit(parts):
                raise NotFinite(error.found, line) from None
            raise


class Together:
    """Draw images in batched calls. The first call tests the pipeline: one of its images is also drawn singly.
    `works` is None before that, then True or False."""

    def __init__(self) -> None:
        self.works: bool | None = None

    def draw(self, pipe: Any, prompts: Sequence[Prompt], seeds: Sequence[int], arguments: dict[str, Any],
             negative: str) -> list[torch.Tensor]:
        """Draw images [3, H, W] or clips [F, 3, H, W] in [0, 1], one per prompt and seed. They equal those of
        `draw_one` up to rounding of other matrix shapes. Prompts that bring files are drawn singly.
        Raises UserError if the device runs out of memory."""
        if (editing := edits.edit_policy_of(pipe)) is not None and len(prompts) > 1:
            return list(editing.draw(prompts, seeds, arguments, negative))
        if len(prompts) < 2 or self.works is False or any(prompt.brings for prompt in prompts):
            return [draw_one(pipe, prompt, seed, arguments, negative) for prompt, seed in zip(prompts, seeds)]
        images: list[torch.Tensor] = []
        try:
            images = list(_call_pipeline(pipe, prompts, seeds, arguments, negative))
        except torch.OutOfMemoryError as error:
            raise UserError(f"{len(prompts)} images in one call do not fit into the device's memory: give a --batch "
                            f"below {len(prompts)}") from error
        except prompt_inputs.REFUSALS:  # it takes one prompt; any other error is raised again by drawing singly
            if self.works:
                raise
        if self.works:
            return images
        # The second image: the first would match even if all rows had its noise or prompt.
        alone = draw_one(pipe, prompts[1], seeds[1], arguments, negative)
        self.works = bool(images) and images[1].shape == alone.shape and bool(
            (images[1] - alone).abs().mean() <= SHARE * (images[1] - images[0]).abs().mean())
        if self.works:
            return images
        tqdm.write(f"{type(pipe).__name__} does not draw several prompts in one call as it draws each: one at a time")
        return [alone if i == 1 else draw_one(pipe, prompt, seed, arguments, negative)
                for i, (prompt, seed) in enumerate(zip(prompts, seeds))]


@torch.no_grad()
def _call_pipeline(pipe: Any, prompts: Sequence[Prompt], seeds: Sequence[int], arguments: dict[str, Any],
                   negative: str) -> torch.Tensor:
    """Raises ValueError unless the output [B, ...] has one image or clip per prompt."""
    own, (texts, negatives, _) = generators(seeds), encodable(prompts, negative)
    with seed_steps(pipe.scheduler, own):
        images = call(pipe, arguments, prompt=texts, output_type="pt", generator=own, negative_prompt=negatives)
    if images.ndim not in (4, 5) or len(images) != len(prompts):
        raise ValueError(f"expected {len(prompts)} images or clips, got {list(images.shape)}")
    return frames.rgb(images, pipe).float().cpu()


def tell(threads: Threads) -> None:
    """Let torch use as many threads as cores are free; say a change on stderr, which is no result."""
    if line := threads.look():
        tqdm.write(line, file=sys.stderr)


def first_of_each(sampler: "Pipelines | Texts", arm: Arm, seed: int, prompts: Sequence[Prompt]) -> list[Any]:
    sampler.load(arm)  # before the bar: what cannot be loaded is one line
    of, places = seeder(seed, 0), range(len(prompts))
    parts = [places[at:at + sampler.together] for at in range(0, len(prompts), sampler.together)]
    return [sample for rows in bar(parts, title="sampling")
            for sample in sampler.draw(arm, [prompts[i] for i in rows], [of(i, 0) for i in rows])]


class Pipelines:
    """Sampler of images and clips by a stock pipeline, loaded at the first draw.

    It is loaded again for other weights than those in it, which do not leave it. The base draws before the tuned model
    without that, and so do several arms with RLG.
    """

    together = 1

    def __init__(self, model: str, config: Config, precision: str, device: torch.device):
        self.model, self.config, self.precision, self.device = model, config, precision, device
        self.threads = Threads.for_device(device)
        self.pipe: Any = None
        self.loaded: Path | None = None
        self.branches: Branches | None = None
        self.batched = Together()

    def draw(self, arm: Arm, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[torch.Tensor]:
        """Draw images [3, H, W] or clips [F, 3, H, W] in [0, 1], one per prompt and seed."""
        self.load(arm)
        tell(self.threads)
        weighted: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.branches is not None:
            assert arm.rlg is not None  # the same kind of arm, else `load` had loaded it
            weighted = self.branches.at(arm.rlg)
        with weighted, disable_safety_checker(self.pipe):
            drawn = self.batched.draw(self.pipe, prompts, seeds, arm.asked, self.config.negative_prompt)
        _require_finite(drawn, prompts, self.pipe.components)
        return drawn

    def load(self, arm: Arm) -> Any:
        """Load the pipeline with an arm's weights, unless they are in it, and return it.

        Raises UserError for weights that do not fit, and for a number of steps that the scheduler does not take.
        """
        as_loaded = (self.loaded, self.branches is not None) == (arm.weights, arm.rlg is not None)
        if self.pipe is None or not (self.loaded is None or as_loaded):
            if self.pipe is not None:
                self.pipe = self.loaded = self.branches = None
                gc.collect()  # two models at once may not fit
            self.pipe = loading.make_pipeline(self.model, self.precision, self.config.trust_remote_code, self.device,
                                             self.config.memory, loading.files_of(self.config, self.model))
        if self.loaded is None and arm.weights is not None and arm.rlg != 0:
            self.loaded = arm.weights
            if arm.rlg is None:
                loading.load_tuned(self.pipe, arm.weights)
            else:
                self.branches = loading.load_branches(self.pipe, arm.weights)
        require_steps(self.pipe.scheduler, arm.asked.get("num_inference_steps"))
        return self.pipe


class Texts:
    """Sampler of completions by a language model, texts or images, loaded for every arm. precision: None: the run's, or
    the device's default."""

    together = 8

    def __init__(self, model: str, config: Config | None, precision: str | None, device: torch.device):
        self.model, self.config, self.precision, self.device = model, config, precision, device
        self.threads = Threads.for_device(device)
        self.arm: Arm | None = None
        self.policy: Any = None

    def draw(self, arm: Arm, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Any]:
        """Write a completion per prompt and seed, or draw an image each [3, H, W]."""
        policy = self.load(arm)
        tell(self.threads)
        given = policy.encode([prompt.text for prompt in prompts], images=[prompt.brings for prompt in prompts])
        drawn = [*policy.generate(given, policy.generators(seeds))]
        _require_finite(drawn, prompts, {"model": policy.model})
        return drawn

    def load(self, arm: Arm) -> Any:
        """Load the model with an arm's weights and settings, unless they are in it, and return it."""
        if self.policy is None or arm != self.arm:
            self.policy = None  # two models at once may not fit
            sampler = domains.sampled_by("tokens").sampler
            self.policy = sampler(self.model, self.config, arm.asked, arm.weights, self.device, self.precision)
            self.arm = arm
        return self.policy


class Enhancer:
    """Language model that rewrites prompts, loaded at the first one; every text is rewritten once.

    source: model, finished run or checkpoint. A run's `text` settings apply; a model without a run is instructed by
    INSTRUCTION. Rewrites are greedy unless the run's `text.eval_temperature` is set; then they depend on `seed` and the
    text alone.
    Raises UserError for a model that writes no texts.
    """

    def __init__(self, source: str, seed: int = 0):
        self.source, self.seed = source, seed
        model, self.weights = checkpoints.source(source)
        run = checkpoints.config_of(self.weights)
        if not build.writes(model, run):
            raise UserError(f"--enhancer {source}: generates images, expected a language model, or a run that trained "
                            "one")
        self.sampler = Texts(model, run, None, loading.place())
        asked = domains.sampled_by("tokens").asked(run, 1, None)
        self.arm = Arm(self.weights, asked | ({} if run else {"system": INSTRUCTION}))
        self.known: dict[str, str] = {}

    def __call__(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        missing = [text for text in dict.fromkeys(prompt.text for prompt in prompts) if text not in self.known]
        together = self.sampler.together
        for at in bar(range(0, len(missing), together), title="rewriting"):
            some = missing[at:at + together]
            seeds = [noise_seed(self.seed, None, text, 0) for text in some]
            written = self.sampler.draw(self.arm, [Prompt(text) for text in some], seeds)
            self.known.update(zip(some, map(domains.sampled_by("tokens").rewritten, written)))
        return [replace(prompt, text=self.known[prompt.text]) for prompt in prompts]

    def as_json(self) -> dict[str, Any]:
        return {"enhancer": self.source, "enhancer_weights": weights_digest(self.weights)}
