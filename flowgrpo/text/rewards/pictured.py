"""Image rewards of rewritten prompts: a frozen pipeline draws from a completion, and rewards score it for the prompt.

It trains a prompt enhancer: a language model that rewrites prompts, with the pipeline as its environment (EPO).
"""

import contextlib
import inspect
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from flowgrpo.advantages.group import weighted_sum
from flowgrpo.config.sections import ELSEWHERE, Load
from flowgrpo.policies.pipelines.call import guidance_argument
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.rewards.about import About, built_in
from flowgrpo.rewards.combine import Combined
from flowgrpo.rewards.failures import Failed, first_failed
from flowgrpo.rewards.local_model import LocalModel, require_arguments
from flowgrpo.rewards.reward import EPOCH, Batch
from flowgrpo.samplers.rollout import noise_seed
from flowgrpo.starter import CALLS, EVAL
from flowgrpo.text.rewards.answer_keys import answer_tag, strip_thoughts
from flowgrpo.types import Completion

SHOWN = 320  # longer side of an image that is kept for display, in pixels


def rewritten(completion: str) -> str:
    """The prompt that a completion states: the text in its last <answer> tags, or all text after its thoughts."""
    text = strip_thoughts(completion)
    answer = answer_tag(text)
    return (text if answer is None else answer).strip()


@dataclass(frozen=True, eq=False)
class FrozenPipeline(LocalModel):
    """Pipeline that draws and is not trained.

    model: folder, hub id or name of a starter. lora: fused into it, a finished run's folder or a LoRA's file.
    steps, guidance: None for the pipeline's defaults. call: further arguments of its calls, such as height and width.
    parts: a `PipelinePolicy`, ready-made. dtype, device, batch_size: as in `LocalModel`.
    """

    model: str
    lora: str | None = None
    steps: int | None = None
    guidance: float | None = None
    call: dict[str, Any] = field(default_factory=dict)
    reward = "pictured"

    def _load(self) -> tuple[PipelinePolicy]:
        files = Load(lora=[self.lora] if self.lora else [])
        policy = PipelinePolicy(load_pipeline(self.model, self.dtype, files=files, checker=False), None,
                                device=self.device or "cpu", precision=self.dtype,
                                call=CALLS.get(self.model, {}) | self.call)
        # The attention of trained pipelines on a CPU replaces torch's for all threads, while another one writes texts.
        policy.driver.attention = contextlib.nullcontext  # type: ignore[method-assign]
        return (policy,)

    def draw(self, texts: Sequence[str], seeds: Sequence[int]) -> Tensor:
        """Draw an image of each text from noise of its seed: [B, 3, H, W] in [0, 1], of clips [B, F, 3, H, W]."""
        [policy] = self.models
        unique = list(dict.fromkeys(texts))
        conditioning = policy.encode(unique).rows(torch.tensor([unique.index(text) for text in texts]))
        return policy.generate(conditioning, policy.generators(seeds), *self._settings(policy))

    def _settings(self, policy: PipelinePolicy) -> tuple[int, float]:
        accepted = inspect.signature(policy.pipe.__call__).parameters
        scale = accepted.get(guidance_argument(accepted, policy.denoisers.values()))
        known = {"num_inference_steps": accepted["num_inference_steps"].default,
                 "guidance": scale.default if scale else 1.0} | EVAL.get(self.model, {})
        return (known["num_inference_steps"] if self.steps is None else self.steps,
                known["guidance"] if self.guidance is None else self.guidance)


@built_in("pictured", "prompt enhancer rewriting", eq=False)
class Pictured(Combined):
    """Weighted sum of image rewards of what a frozen pipeline makes of a completion; they judge the user's prompt.

    rewards: of images or clips, by name or rule; weights: theirs, 1 each without.
    pipeline, lora, steps, guidance, call, parts: of `FrozenPipeline`. images: images per completion, whose mean
    counts. Completions of a prompt share their noise, so that scores differ by the text alone.
    noise: "epoch" draws other noise in every epoch, "prompt" the same in all; held-out samples always have the latter.
    seed: of the noise. dtype, device, batch_size (8 images): as in `LocalModel`.
    Equal texts of a prompt are drawn once in a call.
    """

    weights: Sequence[float] | None = None
    _: KW_ONLY
    pipeline: str
    lora: str | None = None
    steps: int | None = None
    guidance: float | None = None
    call: dict[str, Any] = field(default_factory=dict)
    images: int = 1
    noise: str = "epoch"
    seed: int = 0
    dtype: str = "fp32"
    device: str | None = None
    batch_size: int = 8
    parts: Any = field(default=None, repr=False)  # ready-made, then the rewards
    painter: FrozenPipeline = field(init=False, repr=False)
    about = About(modality="text", range=(None, None), needs="", licence="the pipeline's, the rewards'")

    def __post_init__(self) -> None:
        given = self.parts
        super().__post_init__()
        self._require({"image", "video"} & set(str(self.about.modality).split("/")), "rewards", "rewards of images")
        self._require(self.weights is None or len(self.weights) == len(self.rewards), "weights",
                      f"{len(self.rewards)}, one per reward")
        self._require(self.images >= 1, "images", "1 or more")
        self._require(self.noise in ("epoch", "prompt"), "noise", "epoch or prompt")
        self._require(not ELSEWHERE.keys() & self.call.keys(), "call",
                      f"none of {', '.join(ELSEWHERE)}, which are set for it")
        require_arguments("pictured", self.dtype, self.device, self.batch_size)
        painter = FrozenPipeline(self.pipeline, self.lora, self.steps, self.guidance, self.call, dtype=self.dtype,
                                 device=self.device, batch_size=self.batch_size, parts=given)
        for name, value in (("painter", painter), ("about", type(self).about), ("judges", ["text"]),
                            ("reads", self.reads | ({EPOCH} if self.noise == "epoch" else set()))):
            object.__setattr__(self, name, value)

    def __call__(self, batch: Batch) -> list[float | None | Failed]:
        prompts, outputs, epoch = batch.prompts, batch.samples, batch.epoch if self.noise == "epoch" else None
        entries = [{key: value for key, value in entry.items() if not key.startswith("completion_")}
                   for entry in batch.metadata]
        texts = [rewritten(text) for text in outputs]
        alike = list(zip(texts, prompts, entries))
        first = [alike.index(row) for row in alike]  # an image is drawn and scored once for equal rows
        jobs = [(row, number) for row in dict.fromkeys(first) for number in range(self.images)]
        scores: dict[int, list[float | None | Failed]] = {row: [] for row in first}
        shown: dict[int, Tensor] = {}
        for at in range(0, len(jobs), self.batch_size):
            rows, numbers = zip(*jobs[at:at + self.batch_size])
            images = self.painter.draw([texts[row] for row in rows], [
                noise_seed(self.seed, epoch, prompts[row], number) for row, number in zip(rows, numbers)])
            values = super().__call__(Batch(images, [prompts[row] for row in rows], [entries[row] for row in rows]))
            for row, image, value in zip(rows, images, values):
                scores[row].append(value)
                shown.setdefault(row, small(image))
        for text, row in zip(outputs, first):
            if isinstance(text, Completion):
                text.image = shown[row]
        return [mean(scores[row]) for row in first]

    def combine(self, scores: Tensor) -> Tensor:
        return weighted_sum(scores[:, None], self.weights or [1.0] * scores.shape[1])[:, 0]


def mean(values: Sequence[float | None | Failed]) -> float | None | Failed:
    scores = [value for value in values if value is not None]
    if failed := first_failed(scores):
        return failed
    return sum(map(float, scores)) / len(scores) if scores else None  # type: ignore[arg-type]  # no failure is left


def small(image: Tensor) -> Tensor:
    """An image [3, H, W] in [0, 1], of a clip [F, 3, H, W] the middle frame, at most SHOWN pixels long."""
    image = image[len(image) // 2] if image.ndim == 4 else image
    factor = SHOWN / max(image.shape[1:])
    if factor >= 1:
        return image.clone()
    return interpolate(image[None], scale_factor=factor, mode="area")[0]
