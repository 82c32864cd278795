"""PolicyScheduler: a diffusers scheduler that explores, records and replays.

It replaces `pipe.scheduler` and keeps that scheduler's configuration. The pipeline's own loop calls `step` with the
final model output (after guidance, packing and sign conventions); `step` draws the transition that the task asks for.
So any pipeline runs through its own `__call__`, and this package has no denoising loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from diffusers.utils.torch_utils import randn_tensor

from flowgrpo import gaussian, types
from flowgrpo.device import to_device
from flowgrpo.samplers.kernels import DDIM, Euler, Kernel, as_noise, predict_x0, process, x0_from_noise
from flowgrpo.types import unwrap


@dataclass(frozen=True)
class Quirk:
    """Differences of a scheduler class from the usual `step(output, timestep, state)`.

    state: index of the state among the arguments after the output.
    idle: steps that a task without any step takes nevertheless; they leave the state unchanged.
    ahead: the network reads the timestep of the next step too (a flow map), so that an idle step ends a segment.
    host: its sigmas stay on the CPU, as the stock class has them: pipelines read them there (Wan, Cosmos 2.5).
    """

    state: int = 1
    idle: int = 0
    ahead: bool = False
    host: bool = False


QUIRKS = {
    # Its pipeline returns the data predicted by the last step, a variable that is unbound without a step.
    "LCMScheduler": Quirk(idle=1),
    # step(output, earlier prediction, timestep, timestep before, state)
    "CogVideoXDPMScheduler": Quirk(state=3),
    "UniPCMultistepScheduler": Quirk(host=True),
}


def noise_like(x: torch.Tensor, generators: list[torch.Generator] | None) -> torch.Tensor:
    """Draw standard normal noise for the states x [B,*D], in float32, each row from its own generator: [B,*D]."""
    drawn = randn_tensor(x.shape, generator=generators, device=torch.device("cpu"), dtype=torch.float32)
    return to_device(drawn, x.device)


@dataclass(frozen=True)
class Segment:
    """Task of one pipeline call: the steps `steps` of `grid`, some of them stochastic, some recorded.

    grid: sigmas [T+1], from noise to data.
    kernel: the transition of the steps in `stochastic`.
    solver: of the steps after them; the deterministic steps before are Euler's (there, MixGRPO found, noise amplifies a
        solver's error).
    generators: of the rows' noise, B of them; needed if a step is stochastic.
    timesteps: int64 [T], of a variance-preserving process only: its grid holds alpha-bars, its model output is the
        noise (see `kernels.as_noise`), and its deterministic steps are DDIM's.
    rows: int64 [B], of a replay only, the step of every row if they differ.
    copies: how often the denoiser's batch repeats the rows (see `probes.copies` in policies/pipelines).
    unrolled: gradients go through all steps, from the last state back to the first.
    """

    grid: torch.Tensor
    steps: range
    kernel: Kernel | None = None
    solver: Callable = Euler()
    stochastic: frozenset[int] = frozenset()
    recorded: frozenset[int] = frozenset()
    generators: list[torch.Generator] | None = None
    replay: bool = False
    timesteps: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    copies: int = 1
    unrolled: bool = False

    def at_step(self, step: int) -> Segment:
        return replace(self, steps=range(step, step + 1))

    def at_rows(self, rows: torch.Tensor, copies: int) -> Segment:
        """Replay of one step per row."""
        assert self.replay
        return replace(self.at_step(int(rows[0])), rows=rows, copies=copies)

    def of_rows(self, at: slice) -> Segment:
        task = self if self.generators is None else replace(self, generators=self.generators[at])
        return task if self.rows is None else task.at_rows(self.rows[at], self.copies)

    @property
    def multistep(self) -> bool:
        """True if the solver reads the data predicted at the step before; a solver that does not say so does."""
        return getattr(self.solver, "multistep", True)

    def predict_x0(self, x: torch.Tensor, v: torch.Tensor, i: int) -> torch.Tensor:
        """Data [B,*D] predicted from the state x and the model output v of step i."""
        return (predict_x0 if self.timesteps is None else x0_from_noise)(x, v, self.grid[i])


@dataclass
class StepRecord:
    """Results of a pipeline call, by step index.

    x, x_next: the states [B,*D] around a recorded step, in the pipeline's dtype; x_next of one step and x of the next
        are the same tensor.
    transition: the Gaussian it was drawn from.
    logp: [B].
    output: the model output [B,*D] of a replay, with its graph.
    x0: the last step's prediction of the data, for a multistep solver.
    first, last: the first and the last state of the scheduler.
    """

    x: dict[int, torch.Tensor] = field(default_factory=dict)
    x_next: dict[int, torch.Tensor] = field(default_factory=dict)
    transition: dict[int, types.Gaussian] = field(default_factory=dict)
    logp: dict[int, torch.Tensor] = field(default_factory=dict)
    output: torch.Tensor | None = None
    x0: torch.Tensor | None = None
    first: torch.Tensor | None = None
    last: torch.Tensor | None = None

    @staticmethod
    def concatenate(records: Sequence[StepRecord]) -> StepRecord:
        joined = _join(records, torch.cat)  # with the densities of the calls, bit by bit
        joined.logp = {step: torch.cat([record.logp[step] for record in records]) for step in joined.logp}
        return joined

    def add(self, step: int, x: torch.Tensor, x_next: torch.Tensor, transition: types.Gaussian) -> None:
        self.x[step] = x
        self.x_next[step] = x_next
        self.transition[step] = transition
        self.logp[step] = gaussian.log_prob(transition, x_next)


def _join(records: Sequence[StepRecord], cat: Callable[[list[torch.Tensor]], torch.Tensor]) -> StepRecord:
    output, x0, first, last = (cat_known([getattr(record, name) for record in records], cat)
                               for name in ("output", "x0", "first", "last"))
    joined = StepRecord(output=output, x0=x0, first=first, last=last)
    for step, drawn in records[0].transition.items():
        x, x_next, mean = (cat([*values]) for values in zip(*(
            (record.x[step], record.x_next[step], record.transition[step].mean) for record in records)))
        shared = drawn.std.ndim < drawn.mean.ndim
        std = drawn.std if shared else cat([record.transition[step].std for record in records])
        joined.add(step, x, x_next, types.Gaussian(mean, std))
    return joined


def cat_known(values: list[torch.Tensor | None], cat: Callable[..., torch.Tensor] = torch.cat) -> torch.Tensor | None:
    """Concatenate values [n,...] along rows; None if they are."""
    return None if values[0] is None else cat([unwrap(value) for value in values])


class PolicyScheduler:
    """Mixin for the class of the pipeline's own scheduler; create one with `PolicyScheduler.over(pipe.scheduler)`."""

    order = 1
    quirk = Quirk()
    halved = False  # the pipeline skips the first half of its timesteps (see policies/pipelines/call.py)
    init_noise_sigma = 1.0  # the state is that of the process, for any scaling of the stock class
    process: str
    inverted: bool
    idle: int
    companions: list[PolicyScheduler]
    leader: PolicyScheduler | None
    if TYPE_CHECKING:  # of the stock class
        config: Any
        alphas_cumprod: torch.Tensor
        from_config: Callable[..., PolicyScheduler]
        time_shift: Callable[[float, float, torch.Tensor], torch.Tensor]

    @staticmethod
    def over(stock: Any) -> PolicyScheduler:
        """Policy scheduler with the class and the configuration of `stock` (some pipelines test the class)."""
        name = type(stock).__name__
        attributes = {"process": process(stock), "quirk": QUIRKS.get(name, Quirk()),
                      "inverted": bool(stock.config.get("invert_sigmas"))}
        cls: Any = type(f"Policy{name}", (PolicyScheduler, type(stock)), attributes)
        return cls.from_config(stock.config)

    def follow(self, task: Segment, x0: torch.Tensor | None = None, state: torch.Tensor | None = None) -> StepRecord:
        """Set the next call's task; the returned record fills while the pipeline runs. state: [B,*D], replaces the
        pipeline's own in an idle step before the first (see policies/pipelines/call.py)."""
        self.idle = 1 if state is not None else 0 if task.steps else self.quirk.idle
        self.state = state
        self.companions = []
        self.leader = None
        assert not task.steps or (self.process == "vp") == (task.timesteps is not None), self.process
        self.task = task
        self.multistep = task.multistep
        self.record = StepRecord(x0=x0)
        return self.record

    def __deepcopy__(self, memo: dict[int, Any]) -> PolicyScheduler:
        """Companion, for a second state that the pipeline denoises in parallel (LTX-2's sound)."""
        twin = type(self).from_config(self.config)
        twin.quirk, twin.halved = self.quirk, self.halved
        twin.follow(self.task, self.record.x0, self.state)
        twin.leader = self
        self.companions.append(twin)
        return twin

    def take_record(self) -> StepRecord:
        """Record of the call, which the scheduler lets go; with companions, of all states in one [B,N]."""
        records = [self.record, *(twin.record for twin in self.companions)]
        self.record, self.companions = StepRecord(), []
        return records[0] if len(records) == 1 else _join(records, lambda values: torch.cat(
            [value.flatten(1) for value in values], 1))

    def _own(self, value: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
        """This scheduler's part of `value`, which holds the states of all companions, in the shape of x."""
        if value is None or value.shape == x.shape:
            return value
        before = 0
        if self.leader is not None:
            ahead = self.leader.companions[:self.leader.companions.index(self)]
            before = sum(unwrap(scheduler.record.first)[0].numel() for scheduler in (self.leader, *ahead))
        return value[:, before:before + x[0].numel()].view_as(x)

    def set_timesteps(self, num_inference_steps: int | None = None, device: str | torch.device | None = None,
                      timesteps: Any = None, sigmas: Any = None, mu: float | None = None, **_: Any) -> None:
        """Set the task's steps, whatever the pipeline asks for."""
        if "task" not in vars(self):  # a class that sets steps when it is made
            return
        task = self.task
        first = task.steps.start
        stop = task.steps.stop + (self.quirk.ahead and 0 < len(task.steps) and task.steps.stop + 1 < len(task.grid))
        self._pending = [None] * self.idle + list(task.steps) + [None] * (stop - task.steps.stop)
        self.num_inference_steps = len(self._pending)
        grid = (1 - task.grid if self.inverted else task.grid).float()
        every = grid * self.config.num_train_timesteps
        if self.process == "vp":  # a task without steps comes without timesteps
            every = torch.zeros(1, dtype=torch.int64) if task.timesteps is None else task.timesteps
        elif timesteps is not None and mu is not None:  # CogView4's network reads unshifted times
            back = 1 / mu if self.config.time_shift_type == "linear" else -mu
            every = self.time_shift(back, 1.0, grid) * self.config.num_train_timesteps
        # A pipeline that reads sigmas counts its own steps. An idle step has the index of the first.
        self.sigmas = torch.cat([grid[first:first + 1]] * self.idle + [grid[first:stop + 1]])
        self.timesteps = torch.cat([every[first:first + 1]] * self.idle + [every[first:stop]])
        if task.rows is not None:
            every = to_device(every, device)
            vector = every[to_device(task.rows, every.device)].repeat(task.copies)
            self.timesteps = vector.expand(len(self._pending), -1)
        if self.halved:
            self.timesteps = torch.cat([self.timesteps, self.timesteps])
        if device is not None and torch.device(device).type != "cpu":
            self.timesteps = to_device(self.timesteps, device)
            self.sigmas = self.sigmas if self.quirk.host else to_device(self.sigmas, device)

    @property
    def idling(self) -> bool:
        return bool(self._pending) and self._pending[0] is None

    def scale_model_input(self, sample: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return sample

    def add_noise(self, original_samples: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor | float
                  ) -> torch.Tensor:
        """State [B,*D] at `timesteps` (one, or one per row) with the data `original_samples`."""
        at = torch.as_tensor(timesteps, device=noise.device).reshape(-1, *[1] * (noise.ndim - 1))
        if self.process == "vp":
            alpha = self.alphas_cumprod.to(noise)[at.long()]
            return alpha.sqrt() * original_samples + (1 - alpha).sqrt() * noise
        sigma = (at / self.config.num_train_timesteps).to(noise.dtype)
        sigma = 1 - sigma if self.inverted else sigma
        return (1 - sigma) * original_samples + sigma * noise

    def scale_noise(self, sample: torch.Tensor, timestep: torch.Tensor | float | None = None,
                    noise: torch.Tensor | None = None) -> torch.Tensor:
        assert noise is not None and timestep is not None
        return self.add_noise(sample, noise, timestep)

    def step(self, model_output: torch.Tensor, *args: Any, sample: torch.Tensor | None = None,
             per_token_timesteps: torch.Tensor | None = None, return_dict: bool = True, **__: Any
             ) -> SimpleNamespace | tuple[torch.Tensor, torch.Tensor]:
        """Advance the state [B,*D] by one step of the task. The next state keeps its dtype, as the network sees it."""
        x = args[self.quirk.state] if sample is None else sample
        x = x if x._base is None else x.clone()  # some pipelines write the next state into their own tensor
        if model_output.shape[1] == 2 * x.shape[1] and self.config.get("variance_type") in ("learned", "learned_range"):
            model_output = model_output.chunk(2, 1)[0]  # without the variance, which transitions here set themselves
        i = self._pending.pop(0)
        if not (self.task.replay or self.task.unrolled):
            model_output = model_output.detach()  # a compiled policy samples in grad mode
        if self.record.first is None:
            self.record.first = x
        if self.inverted or per_token_timesteps is not None:
            model_output = -model_output  # these velocities point towards the data
        if i is None:
            x_next = x if self.state is None or self.record.last is not None else unwrap(self._own(self.state, x)).to(x)
        else:
            x_next = self._next_state(model_output, x, i)
        self.record.last = x_next
        # Schedulers also return the predicted data, and some pipelines end with it (LCM; one-step PixArt).
        return SimpleNamespace(prev_sample=x_next, pred_original_sample=x_next) if return_dict else (x_next, x_next)

    def _next_state(self, output: torch.Tensor, x: torch.Tensor, i: int) -> torch.Tensor:
        task = self.task
        if self.process == "vp":
            tables = task.grid, unwrap(task.timesteps)
            alpha, timestep = (table[i] for table in tables) if task.rows is None else (
                to_device(table[task.rows], x.device).view(-1, *[1] * (x.ndim - 1)) for table in tables)
            output = as_noise(self, output, x, alpha, timestep)
        if task.replay:
            self.record.output = output
            return x
        if i in task.stochastic:
            assert task.kernel is not None, "a stochastic step without a kernel"
            with torch.set_grad_enabled(task.unrolled and torch.is_grad_enabled()):  # a kernel may be learned
                transition = task.kernel(x, output, task.grid, i)
            # Round first: the density is that of the state that the network will see.
            x_next = gaussian.sample(transition, noise_like(x, task.generators)).to(x.dtype)
            if i in task.recorded:
                self.record.add(i, x, x_next, transition)
        elif self.process == "vp":
            assert isinstance(task.solver, Euler), task.solver
            x_next = DDIM(0.0)(x, output, task.grid, i).mean.to(x.dtype)
        else:
            solver = task.solver if i > max(task.stochastic, default=-1) else Euler()
            x_next = solver(x, output, task.grid, i, self._own(self.record.x0, x)).to(x.dtype)
        if self.multistep:
            self.record.x0 = task.predict_x0(x, output, i)
        return x_next
