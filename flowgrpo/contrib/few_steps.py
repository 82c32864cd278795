"""A student of few steps beside a method (`parts.distil`): what all its losses share.

Student and teacher are one copy of the denoiser: the student is the LoRA that is trained, the teacher the base model,
without it. Each optimizer step adds the gradient of a loss that draws the student to the teacher. A method without
rewards (`Unrewarded`) has no other gradient, so that its recorded steps are not replayed.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from flowgrpo import rewards
from flowgrpo.advantages.baselines import Unrewarded
from flowgrpo.config.features import DryRun
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.methods import capabilities
from flowgrpo.methods.distillation import Distillation, RewardedMatching
from flowgrpo.methods.setup import Setup
from flowgrpo.objectives.reductions import Divisor
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.weights.lora_files import ENCODER
from flowgrpo.policies.weights.trainable import disable_adapters, with_data
from flowgrpo.samplers.rollout import RolloutSpec, fork_seed
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension, Metrics, Run, Step
from flowgrpo.types import unwrap


def denoiser_weights(named: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
    """Trained weights of denoisers, by name: those of text encoders are the student's alone."""
    return {key: value for key, value in named.items() if ".lora_" in key and not key.startswith(ENCODER)}


class FewStepStudent(Extension):
    """Student of few steps that a loss of `parts.distil` draws to its base, the teacher, beside the method's own.

    live: the denoisers' LoRA. spec: the epoch's rollout, of which subclasses keep samples. measured: values of the
    present epoch, whose means are metrics. rewarded: the present step is the method's own, which follows rewards.
    rows: samples of this process per optimizer step; divisor: of all processes.
    """

    name = "distil"
    asked_by = "parts.distil is {0.method.loss.distil.__class__.__name__}"
    needs = frozenset({capabilities.PRESENT_WEIGHTS, capabilities.OWN_SAMPLES,
                       capabilities.AS_LEARNED, capabilities.LORA, capabilities.WHOLE_WEIGHTS})

    def __init__(self, trainer: Run):
        super().__init__(trainer)
        self.part: Distillation = unwrap(trainer.method.loss.distil)
        self.policy = cast(PipelinePolicy, trainer.policy)
        self.vp = self.policy.process == "vp"
        self.rows = -(-self.part.batch // trainer.processes.count)
        self.divisor = self.rows * trainer.processes.count
        self.live = denoiser_weights(self.policy.weights.named)
        self.policy.weights.lr_shares |= dict.fromkeys(self.live.values(), self.part.lr_share)
        self.spec: RolloutSpec | None = None
        self.conditioning: Any = None
        self.own: list[Prompt] = []
        self.measured: dict[str, list[Tensor]] = {}
        self.rewarded = True

    @classmethod
    def require(cls, setup: Setup) -> None:
        distil, epochs = unwrap(setup.method.loss.distil), setup.config.train.epochs
        if distil.after >= epochs:
            raise UserError(f"parts.distil.after is {distil.after}, but train.epochs is {epochs}, so that nothing "
                            "would be distilled: lower the one or raise the other")
        if ascent := distil.ascent:
            weights, known = setup.config.rewards, rewards.with_gradient(setup.trained)
            if not (followed := {name: reward for name, reward in known.items() if weights[name]}):
                raise UserError(f"parts.distil.ascent is {ascent:g}, but no trained reward with a weight has a "
                                "gradient: train on one too, such as scene_soft or pickscore, or set it to 0")
            rewards.require_gradient(followed)

    @classmethod
    def conflicts(cls, setup: Setup) -> dict[str, bool]:
        config, denoising, distil = setup.config, setup.method.denoising, unwrap(setup.method.loss.distil)
        return {
            "image.sizes, where states of a step differ in size": bool(config.image.sizes),
            "memory.context_parallel, whose processes share every call": config.memory.context_parallel > 1,
            "parts.distil.text: student, where no text encoder is trained":
                distil.text == "student" and not denoising.adapted.encoders,
            "parts.distil.after or alone, of a method that trains nothing but the match": bool(
                distil.after or distil.alone) and (
                isinstance(distil, RewardedMatching) or isinstance(setup.method.credit.advantage, Unrewarded)),
            "parts.adapted.denoisers: false, so that no student is trained": not denoising.adapted.denoisers,
            "parts.progress, whose clean predictions are let go": setup.method.credit.progress is not None,
            f"the kernel {type(denoising.kernel).__name__}, which learns": denoising.learned_noise is not None}

    @property
    def alone(self) -> bool:
        """True if the optimizer's steps have no other gradient than this loss."""
        if 0 <= self.trainer.epoch - self.part.after < self.part.alone:
            return True
        return isinstance(self.trainer.method.credit.advantage, Unrewarded) and not self.trainer.kl_reference.is_read

    def prepare(self) -> None:
        """Done before each optimizer step, such as steps of other weights."""

    def match(self, update: int) -> None:
        """Add the gradient of the loss."""
        raise NotImplementedError

    def add_steps(self, steps: Iterable[Step]) -> Iterable[Step]:
        """Prepare each optimizer step, and add steps of this loss alone. The schedule counts the method's steps."""
        optimization, none = self.trainer.optimization, Divisor(0, 0)
        if self.waits:
            yield from steps
            return
        for step in steps:
            for number in range(self.part.updates):
                self.rewarded = not number
                with self.trainer.clock("update"):
                    self.prepare()
                before = optimization.update
                yield ([], none) if self.alone or number else step
                if number:
                    optimization.unscheduled += optimization.update - before

    def on_backward(self, update: int) -> None:
        """Add the gradient of this loss to the student's.

        Text encoders that the teacher reads too get none: the loss compares what is drawn of one embedding.
        """
        if not self.waits:
            with self.policy.text_once() if self.part.text == "student" else contextlib.nullcontext():
                self.match(update)
        elif self.part.text == "student":
            for value in self.live.values():
                value.grad = None

    def ascent(self, x0: Tensor, prompts: Tensor, encoded: Any) -> Tensor:
        """Sum of the rewards that have a gradient at predicted data, times `part.ascent`."""
        images = self.policy.image(x0, encoded)
        return self.part.ascent * self.trainer.scoring.value(self.own, prompts, images).sum()

    @property
    def waits(self) -> bool:
        """True before the first epoch of this loss."""
        return self.trainer.epoch < self.part.after

    def draws(self, purpose: int, update: int, turn: int = 0) -> torch.Generator:
        seed, rank = self.trainer.config.seed, self.trainer.processes.rank
        return torch.Generator().manual_seed(fork_seed(seed, update, turn, purpose, rank))

    def worn(self, values: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[None]:
        """Context manager: the denoisers' LoRA has these values. A backward pass belongs inside."""
        return with_data((parameter, values[key].data) for key, parameter in self.live.items())

    def base(self) -> contextlib.AbstractContextManager[Any]:
        """Context manager: the base denoisers, with the text encoders that the teacher reads."""
        if self.part.text == "base":
            return self.policy.weights.base()
        return disable_adapters([layer for key, layer in self.policy.weights.layers().items()
                                 if not key.startswith(ENCODER)])

    def on_trained(self, epoch: Epoch) -> Metrics:
        """Return the epoch's means over the batches of this process, and let its samples go."""
        found = {f"distil/{name}": torch.stack(values).mean().item()
                 for name, values in self.measured.items() if values}
        self.conditioning, self.own = None, []
        self.measured = {name: [] for name in self.measured}
        return found

    def count_once(self, once: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        """Of a dry run: replace the methods that more prompts do not make more of."""
        self.on_backward = once(self.on_backward)  # type: ignore[method-assign]


class FewStepDryRun(DryRun):
    """Loss of a few-step student in a dry run: counted once an epoch."""

    def begin(self, trainer: Any) -> None:
        of = next(each for each in trainer.extensions.present if isinstance(each, FewStepStudent))
        of.part = replace(of.part, after=0, alone=0)  # an epoch of both is the one that has to fit

        def once(work: Callable[..., None]) -> Callable[..., None]:
            def counted(*given: Any) -> None:
                with trainer.clock("once"):
                    work(*given)
            return counted

        of.count_once(once)
