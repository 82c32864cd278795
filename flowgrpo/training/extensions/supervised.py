"""Supervised term of a run: its gradient beside the reinforcement gradient, in every optimizer step or in its own."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowgrpo import packages
from flowgrpo.methods.supervised import NextToken, PicturePairs, PreferencePairs, SelfAnswers
from flowgrpo.objectives.reductions import Divisor
from flowgrpo.objectives.supervised import Now
from flowgrpo.rollouts import data_losses
from flowgrpo.rollouts.data_losses import Example
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.examples import Examples
from flowgrpo.training.extension import Extension, Metrics, Run, Step
from flowgrpo.types import unwrap

HERE = "flowgrpo.rollouts.data_losses"
LOSSES: dict[type, str] = {SelfAnswers: "flowgrpo.contrib.questions.answer_losses:AnswerLosses",
                           NextToken: f"{HERE}:TokenLosses", PreferencePairs: f"{HERE}:PairTokenLosses",
                           PicturePairs: f"{HERE}:PairNoisedLosses"}
NOISED = f"{HERE}:NoisedLosses"  # of other parts
MEMORY = "data"  # signals of earlier epochs, in the memory of the method's parts
ALONE = "data_updates"  # steps of examples alone so far, likewise


class Supervised(Extension):
    """Supervised term of a run.

    batch: examples that get an optimizer step of their own, now. losses, weights: of the epoch's batches.
    """

    name = "data"

    def __init__(self, trainer: Run):
        super().__init__(trainer)
        self.part = unwrap(trainer.method.loss.data)
        self.batch: list[Example] = []
        self.losses: list[Tensor] = []
        self.weights: list[float] = []
        self.reward = 0.0
        self.examples = Examples(self.part, trainer)
        losses = next((losses for kind, losses in LOSSES.items() if isinstance(self.part, kind)), NOISED)
        self.loss: data_losses.DataLosses = packages.load(losses)(self.part, trainer)
        if isinstance(self.loss, (data_losses.TokenLosses, data_losses.PairTokenLosses)):
            self.loss.require(example for examples in self.examples.recorded.values() for example in examples)

    def on_drawn(self, epoch: Epoch) -> None:
        scoring, (_, scores) = self.trainer.scoring, epoch.groups.prompts_and_scores()
        values = scoring.sum_rewards(scores[..., :len(scoring.functions)])
        self.examples.collect(epoch.groups, values, epoch.parts)
        self.reward = values.nanmean().item()

    def add_steps(self, steps: Iterable[Step]) -> Iterable[Step]:
        """Yield the optimizer steps, and behind them those of full batches of examples, which train no part."""
        optimization, memory = self.trainer.optimization, self.trainer.memory
        optimization.unscheduled = memory.get(ALONE, 0)
        yield from steps
        while self.part.apart:
            self.batch = self.examples.pop(self.part.batch, self.trainer.optimization.update)
            if not self.batch:
                return
            update = optimization.update
            yield [], Divisor(0, 0)
            optimization.unscheduled += optimization.update - update
            memory[ALONE] = optimization.unscheduled
            self.batch = []

    def on_gradients(self, update: int) -> None:
        """Replace the parameters' gradients, of all processes, by their balance with the data gradient.
        update: the number of earlier optimizer steps."""
        part, parameters = self.part, self.trainer.policy.weights.parameters()
        if part.apart and not self.batch:
            return
        # What a balance reads, without the gradients' norms.
        drawn = random.Random(f"balance/{self.trainer.config.seed}/{update}").random()
        now = Now(update, drawn, signals=self.trainer.memory.get(MEMORY, {}))
        weights = (0.0, 1.0) if part.apart else part.balance(now)
        chosen = self.batch or self.examples.sample(part.batch, update)
        if not chosen or not weights[1] and not part.balance.reads_norms:
            return
        before = [parameter.grad for parameter in parameters]
        self.trainer.with_oom_retry(partial(self._backward, chosen, update), "update")
        self.trainer.optimization.gradients.finish(self.trainer.log)
        if part.balance.reads_norms and not part.apart:
            norms = norm(before), norm([parameter.grad for parameter in parameters])
            weights = part.balance(replace(now, norms=norms))
        for parameter, gradient in zip(parameters, before):
            parameter.grad = combine_gradients(gradient, weights[0], parameter.grad, weights[1])
        self.weights.append(weights[1])

    def _backward(self, chosen: Sequence[Example], update: int) -> None:
        """Compute the data gradient of this process's share of a batch anew, without the sum over processes."""
        run, places = self.trainer, range(len(chosen))
        divisor, total = self.loss.divisor(chosen), torch.zeros(())
        for parameter in run.policy.weights.parameters():
            parameter.grad = None
        with run.processes.collective(), run.optimization.gradients.step():
            own = run.processes.own(places)
            for start in range(own.start, own.stop, run.geometry.micro_batch):
                at = range(start, min(start + run.geometry.micro_batch, own.stop))
                for loss in self.loss([chosen[place] for place in at], at, update):
                    run.optimization.backward(loss / divisor)
                    total = total.to(loss.device) + loss.detach().float() / divisor
        self.losses.append(total)

    def on_trained(self, epoch: Epoch) -> Metrics:
        """Give the epoch's metrics, and keep its signals for later epochs; all processes call it."""
        self.examples.mark()
        metrics: dict[str, float] = {"data/examples": len(self.examples.pool)}
        if self.losses:
            losses = torch.stack([loss.cpu() for loss in self.losses])
            loss = self.trainer.processes.gather(losses).sum().item() / len(losses)
            metrics |= {"data/loss": loss, "data/weight": sum(self.weights) / len(self.weights)}
            metrics |= self.loss.metrics(self.trainer.processes.total)
            signals = self.trainer.memory.setdefault(MEMORY, {"rl": [], "data": []})
            for name, value in (("rl", self.reward), ("data", loss)):
                signals[name].append(value)
        self.losses, self.weights = [], []
        return metrics

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return self.examples.state()

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        self.examples.load_state(tensors, values)


def norm(gradients: Sequence[Tensor | None]) -> float:
    """The Euclidean norm of gradients together; None counts as zeros."""
    present = [gradient for gradient in gradients if gradient is not None]
    return torch.nn.utils.get_total_norm(present).item() if present else 0.0


def combine_gradients(one: Tensor | None, a: float, two: Tensor | None, b: float) -> Tensor | None:
    """a * one + b * two, in the place of a gradient; None counts as zeros, and so does what has weight 0."""
    one, two = one if a else None, two if b else None
    if one is None or two is None:
        only, weight = (one, a) if two is None else (two, b)
        return only if only is None or weight == 1 else only.mul_(weight)
    return (one if a == 1 else one.mul_(a)).add_(two, alpha=b)
