"""Distillation beside a method: a student of few steps is held to the distribution of its base (`parts.distil`).

The fake score is a second set of values of the student's LoRA, with an optimizer of its own. In each optimizer step it
learns the samples that the epoch drew, by the denoising loss, and so does the surrogate of `RewardedMatching`, by their
advantages. Then the student predicts data at states of its own rollout, and the difference of both scores there is
added to its gradient.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flowgrpo.contrib.few_steps import FewStepStudent, denoiser_weights
from flowgrpo.methods.distillation import (
    DistributionMatching,
    RewardedMatching,
    matching_direction,
    preference_weights,
    pull,
)
from flowgrpo.methods.setup import Setup
from flowgrpo.methods.validate import resolve
from flowgrpo.policies.pipelines.call import at_guidance
from flowgrpo.samplers import noised_finals
from flowgrpo.samplers.kernels import predict_x0, x0_from_noise
from flowgrpo.samplers.rollout import RolloutSpec
from flowgrpo.storage import checkpoint
from flowgrpo.storage.checkpoint import joined, within
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Metrics, Run
from flowgrpo.training.memory import FULL, Measured
from flowgrpo.types import unwrap, wide

FAKE, STUDENT, SURROGATE = range(3)  # whose draws: they differ
CLIP = 1.0  # largest norm of the fake score's gradient


def add(phases: dict[str, dict[str, int]], measured: Measured) -> None:
    """Add the fake score, and a surrogate: values and two moments in all phases, the gradient in the update."""
    trained = sum(value.numel() for value in denoiser_weights(measured.policy.weights.named).values()) * FULL
    distil = resolve(measured.config, measured.policy.process).loss.distil
    for name in ("fake score", "surrogate")[:1 + isinstance(distil, RewardedMatching)]:
        for parts in phases.values():
            parts[name] = 3 * trained
        phases["update"][name] += trained


class States(NamedTuple):
    """States of one step of the epoch's rollouts: x [n, *D], their prompts [n], and the data predicted there."""

    x: Tensor
    prompts: Tensor
    clean: Tensor


class Learner:
    """Second set of values of the denoisers' LoRA, with an optimizer. values: by name, like the live ones."""

    def __init__(self, live: Mapping[str, torch.nn.Parameter], lr: float, betas: tuple[float, float]):
        self.values = {key: torch.nn.Parameter(value.detach().clone()) for key, value in live.items()}
        self.optimizer = torch.optim.AdamW([*self.values.values()], lr=lr, betas=betas, weight_decay=0.0)

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_([*self.values.values()], CLIP)
        self.optimizer.step()

    def state(self) -> dict[str, Tensor]:
        return joined({"values": {key: value.data for key, value in self.values.items()},
                       "moments": checkpoint.optimizer_tensors(self.optimizer)})

    def load(self, tensors: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for key, value in within(tensors, "values/").items():
                self.values[key].copy_(value)
        if moments := within(tensors, "moments/"):
            checkpoint.load_optimizer(self.optimizer, moments)


class MatchedStudent(FewStepStudent):
    """Fake score of a run, and the student's gradient to the teacher's distribution.

    states: of this process's samples of the epoch, by step. spec: their rollout. fake, surrogate: further values of the
    LoRA; None without a learned reward. groups: of the surrogate: samples [G, *D], advantages [G] and prompts [G].
    """

    part: DistributionMatching

    def __init__(self, trainer: Run):
        super().__init__(trainer)
        betas = trainer.config.train.betas
        self.fake = Learner(self.live, self.part.fake_lr, betas)
        self.surrogate = Learner(self.live, self.part.surrogate_lr, betas) if isinstance(
            self.part, RewardedMatching) else None
        self.groups: list[tuple[Tensor, Tensor, Tensor]] = []
        self.states: dict[int, States] = {}
        self.measured = {"gap": [], "fake_loss": [], "surrogate_weight": []}

    @classmethod
    def conflicts(cls, setup: Setup) -> dict[str, bool]:
        return super().conflicts(setup) | {
            "precision fp16, in which the fake score's gradients underflow": setup.config.precision == "fp16",
            "parts.selection or groups that are split over processes, of which a surrogate needs the whole":
                isinstance(setup.method.loss.distil, RewardedMatching) and (
                    setup.method.credit.selection is not None or setup.shape.slices > 1)}

    def on_drawn(self, epoch: Epoch) -> None:
        """Keep the states at which the student predicts data: the recorded ones, and those of the last step."""
        found: dict[int, list[States]] = {}
        for part in epoch.parts:
            self.spec = spec = unwrap(part.exploration)
            for taken in cast(Any, part.transitions):
                clean = unwrap(taken.clean).to(taken.x.dtype)
                found.setdefault(taken.step, []).append(States(taken.x, taken.prompts, clean))
            last = part.transitions[-1]
            if last.step + 2 == spec.steps and len(last.x_next) == len(part.prompts):
                found.setdefault(last.step + 1, []).append(States(last.x_next, part.prompts, part.finals[0]))
        self.states = {step: States(*map(torch.cat, zip(*parts))) for step, parts in sorted(found.items())}
        self.conditioning, self.own = epoch.conditioning, epoch.own

    def on_credited(self, epoch: Epoch) -> None:
        """Keep the groups that the surrogate compares: those of whose samples all have a reward."""
        self.groups = []
        for part in epoch.parts if self.surrogate else ():
            if len(part.advantages[-1]) == len(part.prompts):
                size = len(part.prompts) // len(part.groups)
                self.groups += zip(*(values.split(size) for values in (
                    part.finals[0], part.advantages[-1], part.prompts)))

    @property
    def alone(self) -> bool:
        return self.surrogate is not None or super().alone

    def prepare(self) -> None:
        """Train the fake score, then the surrogate."""
        trainer = self.trainer
        with self.policy.text_once():
            for turn in range(self.part.fake_updates):
                trainer.with_oom_retry(partial(self._gradient, self.fake, turn), "update")
                self.fake.step()
        if self.surrogate is not None and trainer.processes.any(bool(self.groups)):
            trainer.with_oom_retry(partial(self._gradient, self.surrogate), "update")
            self.surrogate.step()

    def match(self, update: int) -> None:
        """Add the gradient of the match at states of the student's own rollout."""
        spec = unwrap(self.spec)
        for step, states, noise, times, k in self._chunks(STUDENT, update):
            encoded, t = self.conditioning.rows(states.prompts), times.grid[k].item()
            x = states.x.to(self.policy.device)
            output = self.policy.replay(encoded, x, spec.grid, step, spec.timesteps)
            x0 = self._data(x, output, spec.grid[step].item())
            noised, _ = noised_finals.add_noise(x0.detach().to(x), noise.to(x0.device), t, self.policy.device, self.vp)

            def predicted() -> Tensor:
                return self._data(noised, self.policy.replay(encoded, noised, times.grid, k, times.timesteps), t)

            with torch.no_grad():
                with self._teacher(update), at_guidance(self.policy, self.part.scale):
                    real = predicted()
                with self.worn(self.fake.values):
                    direction = matching_direction(x0, real, predicted())
                self.measured["gap"].append(direction.abs().mean())
                if self.surrogate is not None and isinstance(self.part, RewardedMatching):
                    with self.base():
                        base = predicted()
                    with self.worn(self.surrogate.values):
                        direction = direction + self.part.reward * matching_direction(x0, predicted(), base)
            loss = self.part.weight * pull(x0, direction).sum()
            if self.part.ascent:
                loss = loss - self.ascent(x0.to(x.dtype), states.prompts, encoded)
            self.trainer.optimization.backward(loss / self.divisor)

    def _gradient(self, learner: Learner, turn: int = 0) -> None:
        """Set the gradient of the fake score or the surrogate, without those of the student."""
        live, update = self.policy.weights.named, self.trainer.optimization.update
        kept = {key: value.grad for key, value in live.items()}
        try:
            for value in live.values():
                value.grad = None
            with self.worn(learner.values):
                (self._denoise if learner is self.fake else self._prefer)(update, turn)
            self.trainer.processes.add_gradients([*self.live.values()])
            for key, value in self.live.items():
                learner.values[key].grad = value.grad
        finally:
            for key, value in live.items():
                value.grad = kept[key]

    def _denoise(self, update: int, turn: int) -> None:
        """Add the gradient of the denoising loss on data that the student predicted in the rollout."""
        total = torch.zeros((), device=self.policy.device)
        for _, states, noise, times, k in self._chunks(FAKE, update, turn):
            loss = self._errors(states.clean, noise, states.prompts, times, k).sum() / self.divisor
            self.policy.backward(loss)
            total += loss.detach()
        self.measured["fake_loss"].append(total)

    def _prefer(self, update: int, turn: int) -> None:
        """Add the gradient of the group preference on the samples of some groups, all noised to one time."""
        assert isinstance(self.part, RewardedMatching)
        draw, rows = self.draws(SURROGATE, update, turn), self.trainer.geometry.micro_batch
        count = max(self.rows // self.trainer.geometry.group, 1)
        times = self._times(update)
        for place in torch.randint(len(self.groups), (count,), generator=draw).tolist() if self.groups else ():
            samples, advantage, prompts = self.groups[place]
            noise = torch.randn(samples.shape, generator=draw)
            k = int(torch.randint(len(times.grid) - 1, (), generator=draw))

            def errors(at: Tensor) -> Tensor:
                return self._errors(samples[at.to(samples.device)], noise[at], prompts[at], times, k)

            parts = torch.arange(len(samples)).split(rows)
            with torch.no_grad():
                now = torch.cat([errors(at) for at in parts])
                with self.base():
                    base = torch.cat([errors(at) for at in parts])
            advantage = advantage.to(now)
            weight = preference_weights(advantage[None], now[None], base[None], self.part.beta)[0]
            self.measured["surrogate_weight"].append(weight.mean())
            for at in parts:
                loss = (weight * advantage[at.to(advantage.device)] * errors(at)).sum() / len(samples) / count
                self.policy.backward(loss / self.trainer.processes.count)

    def _errors(self, x0: Tensor, noise: Tensor, prompts: Tensor, times: RolloutSpec, k: int) -> Tensor:
        """Squared errors [b], means over values, of the present weights at data [b, *D] noised to the k-th time."""
        device = self.policy.device
        noised, target = noised_finals.add_noise(x0.to(device), noise.to(device), times.grid[k].item(), device, self.vp)
        output, target = wide(self.policy.replay(self.conditioning.rows(prompts), noised, times.grid, k,
                                                 times.timesteps), target)
        return (output - target).square().flatten(1).mean(1)

    def _data(self, x: Tensor, output: Tensor, t: float) -> Tensor:
        """Data predicted at states x [b, *D] of a time, from the model's output."""
        return x0_from_noise(x, output, t) if self.vp else predict_x0(x, output, torch.tensor(t))

    def _chunks(self, purpose: int, update: int, turn: int = 0
                ) -> Iterator[tuple[int, States, Tensor, RolloutSpec, int]]:
        """Yield the rows of a batch, in calls of one step and one time each, which come in turn: the step, its states,
        noise [b, *D], times as a grid whose last entry is not a time, and the place of the call's time there."""
        draw, steps, rows = self.draws(purpose, update, turn), [*self.states], self.rows
        count = min(rows, max(len(steps), -(-rows // self.trainer.geometry.micro_batch)))
        times = self._times(update * (self.part.fake_updates + 1)
                            + (turn if purpose == FAKE else self.part.fake_updates))
        order = torch.randperm(len(times.grid) - 1, generator=draw).tolist()
        first = int(torch.randint(len(steps), (), generator=draw))
        for number, size in enumerate(len(part) for part in torch.arange(rows).tensor_split(count)):
            step = steps[(first + number) % len(steps)]
            of = self.states[step]
            at = torch.randint(len(of.prompts), (size,), generator=draw)
            on = at.to(of.x.device)
            noise = torch.randn(size, *of.x.shape[1:], generator=draw)
            yield (step, States(of.x[on], of.prompts[at], of.clean[at.to(of.clean.device)]), noise, times,
                   order[number % len(order)])

    def _times(self, number: int) -> RolloutSpec:
        """Times of a batch as a grid, with their timesteps where the process needs them."""
        alphas = self.policy.stock.alphas_cumprod.cpu() if self.vp else None
        times = self.part.times(unwrap(self.spec).grid, number, self.trainer.config.seed)
        return noised_finals.exploration(times, 1, self.trainer.method.denoising.solver, False, False, alphas)

    def _teacher(self, update: int) -> contextlib.AbstractContextManager[Any]:
        """Context manager: the base denoisers, or their blend with the fake score."""
        part = self.part
        share = part.blend * (1 + math.cos(math.pi * min(update / part.blend_updates, 1))) / 2
        return self.base() if share <= 0 else self.worn({key: value.data * (share if ".lora_B." in key else 1)
                                                           for key, value in self.fake.values.items()})

    def on_trained(self, epoch: Epoch) -> Metrics:
        self.states, self.groups = {}, []
        return super().on_trained(epoch)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return joined({name: learner.state() for name, learner in self._learners.items()}), {
            "unscheduled": self.trainer.optimization.unscheduled}

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        for name, learner in self._learners.items():
            learner.load(within(tensors, f"{name}/"))
        self.trainer.optimization.unscheduled = values.get("unscheduled", 0)

    def count_once(self, once: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        """Besides, make the moments of the optimizers, as after a step."""
        super().count_once(once)
        for learner in self._learners.values():
            for value in learner.values.values():
                value.grad = torch.zeros_like(value)
            learner.optimizer.step()
            learner.step = once(learner.step)  # type: ignore[method-assign]
        self._gradient = once(self._gradient)  # type: ignore[method-assign]

    @property
    def _learners(self) -> dict[str, Learner]:
        return {"fake": self.fake} | ({} if self.surrogate is None else {"surrogate": self.surrogate})
