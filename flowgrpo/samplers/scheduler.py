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
from flowgrpo.errors import UserError
from flowgrpo.samplers.kernels import DDIM, denoised, predict_x0
from flowgrpo.samplers.solvers import Euler
from flowgrpo.types import wide


def prediction(scheduler: Any) -> str:
    """What the denoiser predicts, by its scheduler: velocity for flows, else epsilon, v_prediction or sample."""
    config = scheduler.config
    flow = "FlowMatch" in type(scheduler).__name__ or config.get("use_flow_sigmas") \
        or config.get("prediction_type") == "flow_prediction"
    return "velocity" if flow else config.get("prediction_type", "unknown")


def process(scheduler: Any) -> str:
    """The process of a pipeline's scheduler: "flow", or "vp" where it is variance-preserving and the network predicts
    noise or v. UserError for any other."""
    predicted = prediction(scheduler)
    if predicted == "velocity":
        return "flow"
    if predicted in ("epsilon", "v_prediction") and hasattr(scheduler, "alphas_cumprod"):
        return "vp"
    raise UserError(f"{type(scheduler).__name__} (prediction {predicted!r}) cannot be driven: expected a scheduler of "
                    "flow matching, or one with alphas_cumprod and prediction_type epsilon or v_prediction")


@dataclass(frozen=True)
class Task:
    """What one call of the pipeline is to do: the steps `steps` of `grid`, some of them stochastic, some recorded.

    grid: sigmas [T+1], from noise to data. kernel: the transition of the steps in `stochastic`; solver: of the steps
    after them; the deterministic ones before are Euler's (there, MixGRPO found, noise amplifies a solver's error).
    noise: a function of the state that returns its standard normal noise; needed where a step is stochastic.
    timesteps: int64 [T], of a variance-preserving process alone, whose grid are alpha-bars, whose model output is the
    noise, and whose deterministic steps are DDIM's.
    """

    grid: torch.Tensor
    steps: range
    kernel: Callable | None = None
    solver: Callable = Euler()
    stochastic: frozenset[int] = frozenset()
    recorded: frozenset[int] = frozenset()
    noise: Callable[[torch.Tensor], torch.Tensor] | None = None
    replay: bool = False
    timesteps: torch.Tensor | None = None

    def advanced(self, x: torch.Tensor, v: torch.Tensor, i: int, previous: torch.Tensor | None) -> torch.Tensor:
        """The state [B,*D] after the deterministic step i; previous: what the step before predicted as data."""
        if self.timesteps is not None:
            assert isinstance(self.solver, Euler), self.solver
            return DDIM(0.0)(x, v, self.grid, i).mean
        solver = self.solver if i > max(self.stochastic, default=-1) else Euler()
        return solver(x, v, self.grid, i, previous)

    def predict_x0(self, x: torch.Tensor, v: torch.Tensor, i: int) -> torch.Tensor:
        """The data that the state x and the model output v of step i predict, [B,*D]."""
        return (predict_x0 if self.timesteps is None else denoised)(x, v, self.grid[i])


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
    init_noise_sigma = 1.0  # the state is that of the process, whatever scaling the stock class works in

    @staticmethod
    def over(stock: Any) -> Any:
        """A policy scheduler with the class and the configuration of `stock` (some pipelines test the class)."""
        cls = type(f"Policy{type(stock).__name__}", (PolicyScheduler, type(stock)), {"process": process(stock)})
        return cls.from_config(stock.config)

    def follow(self, task: Task, x0: torch.Tensor | None = None) -> Record:
        """Set the next call's task; the record returned here fills while the pipeline runs."""
        assert not task.steps or (self.process == "vp") == (task.timesteps is not None), self.process
        self.task, self.record = task, Record(x0=x0)
        return self.record

    def set_timesteps(self, num_inference_steps=None, device=None, timesteps=None, sigmas=None, mu=None, **_):
        """Announce the task's steps, whatever the pipeline asks for."""
        task = self.task
        self._pending = iter(task.steps)
        self.num_inference_steps = len(task.steps)
        self.sigmas = task.grid.to(device, torch.float32)
        every = self.sigmas * self.config.num_train_timesteps if task.timesteps is None else task.timesteps.to(device)
        self.timesteps = every[task.steps.start:task.steps.stop]

    def scale_model_input(self, sample, *_, **__):
        return sample

    def step(self, model_output, timestep, sample, *_, return_dict=True, **__):
        """Advance `sample` [B,*D] by one step of the task. The next state keeps its dtype, as the network sees it."""
        i, task = next(self._pending), self.task
        output = self._output(model_output, sample, i)
        if task.replay:
            self.record.output, x_next = output, sample
        elif i in task.stochastic:
            x_next = self._draw(sample, output, i)
        else:
            x_next = task.advanced(sample, output, i, self.record.x0).to(sample.dtype)
        if not task.replay:
            self.record.x0 = task.predict_x0(sample, output, i)
        return SimpleNamespace(prev_sample=x_next) if return_dict else (x_next,)

    def _output(self, v, x, i):
        """What kernels read: the velocity, or the noise, sqrt(a) v + sqrt(1-a) x for a v-prediction (2202.00512)."""
        if prediction(self) != "v_prediction":
            return v
        x, v = wide(x, v)
        alpha = self.task.grid[i].to(x.dtype)
        return alpha.sqrt() * v + (1 - alpha).sqrt() * x

    def _draw(self, x, v, i):
        transition = self.task.kernel(x, v, self.task.grid, i)
        # Rounded first: the density is that of the state which the network will see.
        x_next = gaussian.sample(transition, self.task.noise(x)).to(x.dtype)
        if i in self.task.recorded:
            self.record.add(i, x, x_next, transition)
        return x_next
