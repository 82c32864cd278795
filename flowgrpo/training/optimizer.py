"""Optimizer of a run: the parts of each of its steps, schedule, loss scale of fp16, and moving average."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any

import torch
from torch import distributed

from flowgrpo.config.geometry import BatchShape
from flowgrpo.config.schema import Config
from flowgrpo.config.sections import Train
from flowgrpo.distributed.gradients import Buckets, GradientSum
from flowgrpo.distributed.processes import Processes
from flowgrpo.distributed.shards import is_shard, local
from flowgrpo.errors import UserError
from flowgrpo.methods.parts import Reduction
from flowgrpo.objectives.reductions import Divisor, OfRows, TokenMean
from flowgrpo.policies.policy import Policy
from flowgrpo.policies.weights.sharding import SumOnce
from flowgrpo.samplers.rollout import Part
from flowgrpo.types import unwrap

EPS_SHARE = 0.25  # share of the step that AdamW's eps takes, from which on it is reported


def shares(parts: list[Part], geometry: BatchShape, processes: Processes, reduction: Reduction
           ) -> list[tuple[list[Part], Divisor]]:
    """The parts of each optimizer step on this process, and its divisor over all; steps without a trained part go.

    A part is assigned to a step by its place among the parts of all processes, so their number changes no step; slices
    of one part have one place. A part whose completions are all left out has a place where a divisor counts it.
    """
    if not isinstance(reduction, OfRows):
        parts = [part for part in parts if part.transitions]
    numbers = [geometry.part_of(processes.rank, part.groups.start) for part in parts]
    everywhere = sorted(set(processes.gather(torch.tensor(numbers, dtype=torch.int64)).tolist()))
    steps = chunks(parts, geometry.updates, [everywhere.index(number) for number in numbers], len(everywhere))
    trained = [[part for part in step if part.transitions] for step in steps]
    here = [decisions(step, reduction) for step in steps]
    counts = processes.total([*here, *(count.tokens for count in here), *map(len, trained)])
    return [(share, Divisor(count, tokens)) for share, count, tokens, parts_left in zip(
        trained, counts, counts[len(steps):], counts[2 * len(steps):]) if parts_left]


def chunks(parts: list[Part], count: int, places: Sequence[int] | None = None, total: int | None = None
           ) -> list[list[Part]]:
    """Distribute `parts` over at most `count` optimizer steps: part i goes to step i % count. Of `total` parts these
    have the given places, by default all."""
    places = range(len(parts)) if places is None else places
    steps = min(count, len(parts) if total is None else total)
    return [[part for part, place in zip(parts, places) if place % count == step] for step in range(steps)]


def decisions(parts: list[Part], reduction: Reduction = TokenMean()) -> Divisor:
    masks = [transitions.old.mask for part in parts for transitions in part.transitions]
    left_out = sum(len(getattr(part, "left_out", ())) for part in parts) if isinstance(reduction, OfRows) else 0
    return Divisor(sum(map(reduction.count, masks)) + left_out, sum(int(mask.sum()) for mask in masks))


def make_optimizer(train: Train, parameters: Sequence[torch.nn.Parameter],
                   shares: Mapping[torch.nn.Parameter, float] = MappingProxyType({})) -> torch.optim.Optimizer:
    """AdamW over the parameters: in one kernel on CUDA, or with two moments in 8 bits (2110.02861, bitsandbytes) for
    tensors of 4,096 values or more. shares: of the learning rate; 1 for others. Raises UserError without parameters."""
    if not parameters:
        raise UserError("no weight is trained: the model has none that the adapter or the method names; look at "
                        "`flowgrpo check MODEL`, which lists the denoisers and the LoRA's layers")
    options: dict[str, Any] = {"lr": train.first_lr, "betas": train.betas, "eps": train.eps,
                               "weight_decay": train.weight_decay}
    # One kernel takes either sharded tensors or whole ones.
    groups = [{"params": list(alike), "share": share} for (_, share), alike in groupby(
        parameters, lambda each: (is_shard(each), shares.get(each, 1.0)))]
    if train.optimizer == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(groups, **options)
    return torch.optim.AdamW(groups, fused=parameters[0].device.type == "cuda", **options)


@torch.no_grad()
def clip_sharded(parameters: Sequence[torch.nn.Parameter], most: float) -> torch.Tensor:
    """`clip_grad_norm_` of gradients of which some are sharded; the norm before, 0-d, is equal on all processes."""
    sharded = [parameter for parameter in parameters if is_shard(parameter)]
    gradients = [[local(parameter.grad) for parameter in parameters
                  if parameter.grad is not None and is_shard(parameter) == kind] for kind in (True, False)]
    mesh: Any = sharded[0].device_mesh  # type: ignore[attr-defined]
    of_shards, of_whole = (torch.nn.utils.get_total_norm(of_kind) ** 2 for of_kind in gradients)
    of_shards = of_shards.to(local(sharded[0]).device)
    distributed.all_reduce(of_shards, group=mesh.get_group(mesh.ndim - 1))
    norm = (of_shards + of_whole.to(of_shards.device)).sqrt()
    for gradient in gradients[0] + gradients[1]:
        gradient.mul_((most / (norm + 1e-6)).clamp(max=1.0))
    return norm


def update_average(average: dict[str, torch.Tensor], named: dict[str, torch.nn.Parameter], decay: float) -> None:
    """Move an average towards the present parameters, on its device: decay * average + (1 - decay) * parameters.
    Of sharded parameters it holds this process's rows."""
    kept = [average[key] for key in named]
    if kept:  # one kernel for all on a GPU
        torch._foreach_lerp_(kept, [local(parameter).detach().to(each.device) for each, parameter in
                                    zip(kept, named.values(), strict=True)], 1 - decay)


def rate(update: int, total: int, train: Train) -> float:
    """The factor of the learning rate: linear warm-up, then the schedule down to 0 at the last update."""
    if update < train.warmup:
        return (update + 1) / train.warmup
    left = max(1 - (update - train.warmup) / max(total - train.warmup, 1), 0.0)
    return {"constant": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left)}[train.schedule]


class Optimization:
    """Optimizer of a run, with its schedule, loss scale and moving average.

    parameters: what it trains. gradients: their sum over processes.
    update: the steps so far; skipped: those that were left out for a gradient that is not finite. unsteady: the last
    one was left out.
    scale: factor of the learning rate, which extensions may change.
    unscheduled: steps so far that the schedule does not count, as those of data alone.
    ema: moving average of the trained weights, by name; None without `train.ema`.
    alone: no extension adds to the gradients behind the replays' backwards.
    """

    def __init__(self, config: Config, policy: Policy, processes: Processes, alone: bool = True):
        self.config = config
        self.policy = policy
        self.parameters = policy.weights.parameters()
        denoisers, sharded = [*getattr(policy, "denoisers", {}).values()], policy.weights.sharded
        if sharded and alone and len(denoisers) == 1:
            self.gradients: GradientSum = SumOnce(processes, self.parameters, denoisers[0])
        elif sharded or config.adapter.rank or processes.count * processes.members == 1:
            self.gradients = GradientSum(processes, self.parameters)
        else:
            self.gradients = Buckets(processes, self.parameters, alone and processes.members == 1)
        self.optimizer = make_optimizer(config.train, self.parameters, policy.weights.lr_shares)
        # The gradients of millions of decisions and latents underflow in fp16. So the loss is scaled up, and the
        # gradients down again. If they overflow, the step is skipped and the scale halved.
        self.scaler = torch.amp.GradScaler(policy.device.type, enabled=config.precision == "fp16")
        self.scaler.scale(torch.zeros((), device=policy.device))  # creates the scale: there may be nothing to train
        self.ema = policy.weights.copy_for_average() if config.train.ema else None
        self.update = 0
        self.scale = 1.0
        self.unscheduled = 0
        self.skipped = 0
        self.unsteady = False

    @property
    def total_updates(self) -> int:
        train = self.config.train
        return train.epochs * train.inner_epochs * train.updates

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def backward(self, loss: torch.Tensor, last: bool = False) -> None:
        """Add the gradient of a loss, which fp16 scales. last: none of this process's replays follows in the step."""
        self.gradients.before_backward(last)
        self.policy.backward(self.scaler.scale(loss))

    def step(self, stepped: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Clip the gradient and step; return its norm before, 0-d. One that is not finite is skipped and counted.
        stepped: called behind a step, before the moving average."""
        train = self.config.train
        has_gradients = any(parameter.grad is not None for parameter in self.parameters)  # not if no sample is
        if has_gradients:
            self.scaler.unscale_(self.optimizer)
        clip = clip_sharded if self.policy.weights.sharded else torch.nn.utils.clip_grad_norm_
        norm = clip(self.parameters, train.clip_grad)
        self.unsteady = not torch.isfinite(norm)
        if self.unsteady:
            self.skipped += 1
            self.scaler.update()
            return norm
        for group in self.optimizer.param_groups:
            group["lr"] = group["share"] * self.scale * train.first_lr * rate(
                self.update - self.unscheduled, self.total_updates, train)
        self.update += 1
        if has_gradients:
            self._step()
            self.scaler.update()
            stepped()
        if self.ema is not None:  # the k-th time by (1 + k) / (10 + k) at most, k from 0, as diffusers and Flow-GRPO do
            update_average(self.ema, self.policy.weights.named, min(self.update / (9 + self.update), train.ema))
        return norm

    def eps_share(self, norm: float) -> dict[str, float]:
        """`adam_eps_share`: the share of AdamW's denominator, sqrt(v) + eps, that eps is, if it is at least EPS_SHARE.
        norm: of the gradient, mean over the epoch's updates; the root mean square of its values stands for sqrt(v)."""
        values = sum(parameter.numel() for parameter in self.parameters)
        typical = min(norm, self.config.train.clip_grad) / math.sqrt(values)
        share = self.config.train.eps / (typical + self.config.train.eps) if typical > 0 else 0.0
        return {"adam_eps_share": share} if share >= EPS_SHARE else {}

    def _step(self) -> None:
        """Step. Raises UserError for a learning rate with which it overflows; the weights are no whole epoch's then."""
        try:
            self.scaler.step(self.optimizer)
        except RuntimeError as error:
            if "overflow" not in str(error):
                raise
            used = self.scale * self.config.train.first_lr
            raise UserError(f"the optimizer's step overflows with train.lr {used:g}: expected a lower one") from None

    def evaluated_weights(self) -> dict[str, torch.Tensor]:
        """The weights that are measured and saved: `eval.weights`."""
        if self.config.eval.weights == "ema":
            return unwrap(self.ema)
        return self.policy.weights.snapshot()
