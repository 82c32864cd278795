"""The loop, from prompt to gradient: it knows neither the model nor the method.

    prompts -> conditioning -> rollout -> decode -> rewards -> advantage -> replay -> objective -> optimizer
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from flowgrpo import checkpoint, data, methods, rewards
from flowgrpo.config import Config
from flowgrpo.errors import UserError
from flowgrpo.evaluation import held_out
from flowgrpo.first_ratio import FirstRatio
from flowgrpo.geometry import geometry
from flowgrpo.log import Clock, Log, Stats
from flowgrpo.objectives import mean_over_decisions
from flowgrpo.policies.conditioning import Encoder
from flowgrpo.policies.pipeline import PipelinePolicy
from flowgrpo.samplers import cost
from flowgrpo.samplers.grids import compress_tail
from flowgrpo.samplers.rollout import Exploration, Part, column, explore, make_grid, replay, seeder
from flowgrpo.signals import Stop, Stopped

COUNTERS = ("epoch", "update", "skipped", "seconds", "rollout_evaluations", "saved_evaluations")


class Trainer:
    """One run: the policy, its prompts, its rewards and its method, and the state that a checkpoint holds."""

    def __init__(self, config: Config, accelerator, policy: PipelinePolicy, train_rewards: dict[str, Any],
                 prompts: tuple[list[data.Prompt], list[data.Prompt]]):
        self.config, self.accelerator, self.policy, self.rewards = config, accelerator, policy, train_rewards
        self.method = methods.resolve(config)
        self.geometry = geometry(config.train)
        self.encode = Encoder(policy, Path(config.cache) if config.cache else None)
        self.grid = make_grid(config.train.grid, config.train.steps, config.train.shift, policy.stock)
        self.prompts, self.held_out = prompts
        self.optimizer = torch.optim.AdamW(policy.weights.parameters(), lr=config.train.lr, betas=config.train.betas,
                                           weight_decay=config.train.weight_decay)
        self.ema = policy.weights.snapshot() if config.train.ema else None
        self.epoch = self.update = self.skipped = 0
        self.seconds, self.rollout_evaluations, self.saved_evaluations = 0.0, 0, 0
        self.first_ratio = FirstRatio(policy, self.method.surrogate)
        self.clock, self.stop, self.say = Clock(), Stop(), print
        self.marked = self.counters()

    # --- one epoch, read from top to bottom --------------------------------------------------------------------------

    def run_epoch(self) -> dict[str, Any]:
        """Prompts to gradient, once. Returns the epoch's metrics."""
        config, shape = self.config, self.geometry
        batch = data.draw(self.prompts, shape.prompts, self.epoch, config.seed)
        exploration = self.explore_how()
        with self.clock("encode"):
            conditioning = self.encode([p.text for p in batch], [self.negative(p) for p in batch])
        evaluations = self.policy.evaluations
        parts, scores = self.rollout(batch, conditioning, exploration)
        self.count_evaluations(self.policy.evaluations - evaluations, exploration)
        grouped = scores.view(shape.prompts, shape.group, -1)
        advantage = self.method.advantage(grouped, list(config.rewards.values()))
        keep = self.method.selection(advantage)
        metrics = self.reward_metrics(grouped)
        metrics |= self.learn(parts, conditioning, exploration, advantage.flatten(), keep.flatten())
        return metrics

    def explore_how(self) -> Exploration:
        """This epoch's grid, window, kernel and solver."""
        method, train = self.method, self.config.train
        schedule, grid = method.plan(train.steps, self.epoch, self.config.seed), self.grid
        if method.tail < 1:
            grid = compress_tail(grid, schedule.stochastic[-1] + 1, method.tail, train.shift)
        return Exploration(grid, schedule, method.kernel, method.solver, method.shared_noise, method.reads_means)

    def count_evaluations(self, spent: int, exploration: Exploration) -> None:
        """What the rollout cost, and what it would have cost without the shared prefix."""
        self.rollout_evaluations += spent
        shape, steps = self.geometry, len(exploration.grid) - 1
        alone, shared = (cost.rollout(exploration.schedule, steps, shape.prompts, shape.group, sharing,
                                      shape.micro_batch) for sharing in (False, exploration.shared_noise))
        self.saved_evaluations += round(spent * alone / shared) - spent

    def negative(self, prompt: data.Prompt) -> str:
        return self.config.negative_prompt if prompt.negative is None else prompt.negative

    def rollout(self, batch, conditioning, exploration) -> tuple[list[Part], torch.Tensor]:
        """Sample, decode and score B rows; a thread scores one micro-batch while the next one samples.

        Returns (the parts, scores [B,R]).
        """
        seed = seeder(self.config.seed, self.epoch)
        parts, scores = [], []
        with ThreadPoolExecutor(1) as pool:
            samples = explore(self.policy, conditioning, exploration, self.geometry.group, self.geometry.micro_batch,
                              seed)
            while True:
                with self.clock("rollout"):
                    part = next(samples, None)
                if part is None:
                    break
                self.stop.check()
                with self.clock("decode"):
                    pictures = self.policy.decode(part.taken.final, conditioning.rows(part.prompts)).cpu()
                scores.append(pool.submit(rewards.score, self.rewards, pictures, [batch[p].text for p in part.prompts],
                                          [batch[p].metadata for p in part.prompts]))
                parts.append(part)
            with self.clock("reward"):
                return parts, torch.cat([score.result() for score in scores])

    def learn(self, parts, conditioning, exploration, advantage, keep) -> dict[str, Any]:
        """Replay the recorded steps and follow the method's loss: `updates` optimiser steps per inner epoch.

        advantage and keep: [B], in the order of the epoch's rows.
        """
        stats = Stats(exploration.schedule.trained)
        parts = [kept for part in parts if (kept := part.kept(keep[part.rows])) is not None]
        parts = self.first_ratio(parts, conditioning, exploration, self.say)
        for inner in range(self.config.train.inner_epochs):
            for share in chunks(parts, self.geometry.updates):
                with self.clock("update"):
                    self.optimizer.zero_grad()
                    count = decisions(share)
                    for part in share:
                        self.backward(part, conditioning, exploration, advantage[part.rows], count, stats)
                    self.step_optimizer(stats)
        return stats.summary() | {"skipped_updates": self.skipped}

    def backward(self, part: Part, conditioning, exploration, advantage, count: int, stats: Stats) -> None:
        """Add one micro-batch's gradient, a recorded step at a time.

        advantage: [b], one per row; count: the decisions of the whole optimiser step, by which every loss is divided.
        """
        method, rows = self.method, conditioning.rows(part.prompts)
        weights = method.step_weight(exploration.grid, part.taken.steps)
        advantage = advantage[:, None].to(self.policy.device)
        reference = self.reference_scores(part, rows, exploration)
        for k, new in replay(self.policy, rows, exploration, part):
            old = column(part.old, k)
            log_ratio = method.log_ratio(new, old)
            loss = method.surrogate(log_ratio, advantage) * weights[k]
            if reference:
                loss = loss + method.kl(new, reference[k])
            mean_over_decisions(loss, new.mask, count).backward()
            stats.add(k, log_ratio, method.surrogate.clipped(log_ratio, advantage), loss)

    def reference_scores(self, part, rows, exploration) -> list:
        """The base model's score of the part's steps, where the method's KL asks for it."""
        if not self.method.kl.weight:
            return []
        with self.policy.reference():
            return [score for _, score in replay(self.policy, rows, exploration, part)]

    def step_optimizer(self, stats: Stats) -> None:
        """Clip and step; a gradient that is not finite is skipped and counted."""
        train, parameters = self.config.train, self.policy.weights.parameters()
        norm = torch.nn.utils.clip_grad_norm_(parameters, train.clip_grad)
        stats.norms.append(norm)
        if not torch.isfinite(norm):
            self.skipped += 1
            return
        for group in self.optimizer.param_groups:
            group["lr"] = train.lr * rate(self.update, self.total_updates, train)
        self.optimizer.step()
        self.update += 1
        if self.ema is not None:
            for key, parameter in self.policy.weights.named.items():
                self.ema[key].lerp_(parameter.detach().cpu(), 1 - train.ema)

    @property
    def total_updates(self) -> int:
        train = self.config.train
        return train.epochs * train.inner_epochs * train.updates

    def evaluated_weights(self) -> dict[str, torch.Tensor]:
        """The weights that are measured and saved: `eval.weights`."""
        return self.ema if self.config.eval.weights == "ema" else self.policy.weights.snapshot()

    # --- around the epochs -------------------------------------------------------------------------------------------

    def reward_metrics(self, grouped: torch.Tensor) -> dict[str, float]:
        metrics = {}
        for name, scores in zip(self.config.rewards, grouped.unbind(-1)):
            present = scores[~scores.isnan()]
            spread = present.std().item() if len(present) > 1 else 0.0
            metrics |= {f"reward/{name}/mean": present.mean().item(), f"reward/{name}/std": spread,
                        f"reward/{name}/zero_variance_groups": (scores.std(1) == 0).float().mean().item()}
        return metrics

    def train(self, folder: Path, measured: dict[str, Any]) -> None:
        """Run the remaining epochs; save on the way, at the end, and when asked to stop."""
        train = self.config.train
        log = Log(folder, self.accelerator, train.epochs, self.epoch)
        self.say = log.say
        start, before = time.perf_counter(), self.seconds
        try:
            with self.stop:
                while self.epoch < train.epochs:
                    metrics = self.run_epoch() | self.clock.take()
                    self.seconds = before + time.perf_counter() - start
                    metrics |= {"evaluations": self.policy.evaluations, "seconds": round(self.seconds, 2)}
                    self.epoch += 1
                    self.marked = self.counters()
                    try:
                        if self.config.eval.every and self.epoch % self.config.eval.every == 0:
                            metrics |= held_out.sample_pictures(self, measured, folder)
                    finally:
                        log.epoch(self.epoch, metrics, shown(metrics, self.config))
                    self.stop.check()
                    if self.epoch % train.save_every == 0 or self.epoch == train.epochs:
                        self.save(folder)
        except torch.OutOfMemoryError as error:
            self.save_whole(folder)
            raise UserError(f"out of memory ({str(error).splitlines()[0]}): lower train.micro_batch (now "
                            f"{train.micro_batch}) or set train.checkpointing: true; --resume goes on from the last "
                            "checkpoint") from None
        except (Stopped, UserError):
            self.save_whole(folder)
            raise
        finally:
            log.close()

    def counters(self) -> dict[str, Any]:
        """Where the run stands, apart from its weights."""
        return {key: getattr(self, key) for key in COUNTERS} | {
            "evaluations": self.policy.evaluations, "first_log_ratio": self.first_ratio.found,
            "rescore": self.first_ratio.rescore}

    def save_whole(self, folder: Path) -> None:
        """Save an interrupted run, unless the broken epoch has already changed the weights: it will be run again."""
        if self.update == self.marked["update"]:
            self.save(folder)

    def save(self, folder: Path) -> None:
        """A checkpoint of everything, as of the end of the last whole epoch."""
        tensors = {f"weights/{k}": v for k, v in self.policy.weights.named.items()}
        tensors |= {f"ema/{k}": v for k, v in (self.ema or {}).items()}
        tensors |= {f"optimizer/{k}": v for k, v in checkpoint.optimizer_tensors(self.optimizer).items()}
        checkpoint.save(folder / "checkpoints", self.epoch, tensors, self.marked, self.config.train.keep)

    def restore(self, folder: Path) -> None:
        tensors, state = checkpoint.load(folder)
        taken: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for name, tensor in tensors.items():
            room, key = name.split("/", 1)
            taken[room][key] = tensor
        shapes = {key: parameter.shape for key, parameter in self.policy.weights.named.items()}
        if shapes != {key: tensor.shape for key, tensor in taken["weights"].items()}:
            raise UserError(f"--resume: {folder} holds other weights than are trained now: keep model and adapter as "
                            "in the run's config.yaml, or give the run another name")
        self.policy.weights.load(taken["weights"])
        checkpoint.load_optimizer(self.optimizer, taken["optimizer"])
        if self.ema is not None:
            self.ema = taken["ema"] or self.policy.weights.snapshot()
        for key in COUNTERS:
            setattr(self, key, state[key])
        self.policy.evaluations = state["evaluations"]
        self.first_ratio.found, self.first_ratio.rescore = state["first_log_ratio"], state["rescore"]
        self.marked = state


def decisions(parts: list[Part]) -> int:
    """The trained decisions of one optimiser step: what its loss is divided by."""
    return sum(part.old.logp.numel() for part in parts)


def chunks(parts: list[Part], count: int) -> list[list[Part]]:
    """`parts` dealt out to at most `count` optimiser steps, as evenly as they go."""
    return [share for i in range(count) if (share := parts[i::count])]


def rate(update: int, total: int, train) -> float:
    """The learning rate's factor: linear warm-up, then the schedule down to 0 at the last update."""
    if update < train.warmup:
        return (update + 1) / train.warmup
    left = 1 - (update - train.warmup) / max(total - train.warmup, 1)
    return {"constant": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left)}[train.schedule]


def shown(metrics: dict[str, Any], config: Config) -> dict[str, str]:
    """What the progress bar says of an epoch."""
    rewards_now = {name: f"{metrics[f'reward/{name}/mean']:.3f}" for name in config.rewards}
    return rewards_now | {"clip": f"{metrics.get('clip_fraction', 0):.2f}", "grad": f"{metrics['grad_norm']:.2g}"}
