"""PolicyScheduler: a diffusers scheduler that explores, records and replays.

It takes the place of `pipe.scheduler` and keeps that scheduler's configuration. The pipeline's own loop calls `step`
with the final model output (after guidance, packing and sign conventions); `step` draws the transition that the task
asks for. So any pipeline is driven through its own `__call__`, and no denoising loop is written here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from flowgrpo import gaussian
from flowgrpo.samplers.kernels import predict_x0
from flowgrpo.samplers.solvers import Euler


@dataclass(frozen=True)
class Task:
    """What one call of the pipeline is to do: the steps `steps` of `grid`, some of them stochastic, some recorded.

    grid: sigmas [T+1], from noise to data. kernel: the transition of the steps in `stochastic`; solver: of the steps
    after them; the deterministic ones before are Euler's (there, MixGRPO found, noise amplifies a solver's error).
    noise: a function of the state that returns its standard normal noise; needed where a step is stochastic.
    """

    grid: torch.Tensor
    steps: range
    kernel: Callable | None = None
    solver: Callable = Euler()
    stochastic: frozenset[int] = frozenset()
    recorded: frozenset[int] = frozenset()
    noise: Callable[[torch.Tensor], torch.Tensor] | None = None
    replay: bool = False

    def solver_of(self, i: int) -> Callable:
        return self.solver if i > max(self.stochastic, default=-1) else Euler()


@dataclass
class Record:
    """What a call of the pipeline left behind, by step index.

    x, x_next: the states [B,*D] around a recorded step, in the pipeline's dtype; x_next of one step and x of the next
    are the same tensor. transition: the Gaussian it was drawn from; logp: [B]. output: the model output [B,*D] of a
    replay, with its graph. x0: the last step's prediction of the data, the memory of a multistep solver.
    """

    x: dict[int, torch.Tensor] = field(default_factory=dict)
    x_next: dict[int, torch.Tensor] = field(default_factory=dict)
    transition: dict[int, gaussian.Gaussian] = field(default_factory=dict)
    logp: dict[int, torch.Tensor] = field(default_factory=dict)
    output: torch.Tensor | None = None
    x0: torch.Tensor | None = None

    def add(self, step: int, x: torch.Tensor, x_next: torch.Tensor, transition: gaussian.Gaussian) -> None:
        self.x[step], self.x_next[step], self.transition[step] = x, x_next, transition
        self.logp[step] = gaussian.log_prob(transition, x_next)


class PolicyScheduler:
    """Mixed into the class of the pipeline's own scheduler; make one with `PolicyScheduler.over(pipe.scheduler)`."""

    order = 1

    @staticmethod
    def over(stock: Any) -> Any:
        """A policy scheduler with the class and the configuration of `stock` (some pipelines test the class)."""
        cls = type(f"Policy{type(stock).__name__}", (PolicyScheduler, type(stock)), {})
        return cls.from_config(stock.config)

    def follow(self, task: Task, x0: torch.Tensor | None = None) -> Record:
        """Set the next call's task; the record returned here fills while the pipeline runs."""
        self.task, self.record = task, Record(x0=x0)
        return self.record

    def set_timesteps(self, num_inference_steps=None, device=None, timesteps=None, sigmas=None, mu=None, **_):
        """Announce the task's steps, whatever the pipeline asks for."""
        task = self.task
        self._pending = iter(task.steps)
        self.num_inference_steps = len(task.steps)
        self.sigmas = task.grid.to(device, torch.float32)
        self.timesteps = self.sigmas[task.steps.start:task.steps.stop] * self.config.num_train_timesteps

    def scale_model_input(self, sample, *_, **__):
        return sample

    def step(self, model_output, timestep, sample, *_, return_dict=True, **__):
        """Advance `sample` [B,*D] by one step of the task. The next state keeps its dtype, as the network sees it."""
        i, task = next(self._pending), self.task
        if task.replay:
            self.record.output, x_next = model_output, sample
        elif i in task.stochastic:
            x_next = self._draw(sample, model_output, i)
        else:
            x_next = task.solver_of(i)(sample, model_output, task.grid, i, self.record.x0).to(sample.dtype)
        if not task.replay:
            self.record.x0 = predict_x0(sample, model_output, task.grid[i])
        return SimpleNamespace(prev_sample=x_next) if return_dict else (x_next,)

    def _draw(self, x, v, i):
        transition = self.task.kernel(x, v, self.task.grid, i)
        # Rounded first: the density is that of the state which the network will see.
        x_next = gaussian.sample(transition, self.task.noise(x)).to(x.dtype)
        if i in self.task.recorded:
            self.record.add(i, x, x_next, transition)
        return x_next
