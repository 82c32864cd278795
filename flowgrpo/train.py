"""The loop, from prompt to gradient: it knows neither the model nor the method.

    prompts -> conditioning -> rollout -> decode -> rewards -> advantage -> replay -> objective -> optimizer
"""

from __future__ import annotations

import copy
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from flowgrpo import checkpoint, data, methods, rewards
from flowgrpo.advantages import below
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
from flowgrpo.samplers.preview import chosen, contrasting, previews, require_choice
from flowgrpo.samplers.rollout import Exploration, Part, Seed, explore, make_grid, replay, seeder
from flowgrpo.signals import Stop, Stopped
from flowgrpo.types import Context

COUNTERS = ("epoch", "update", "skipped", "seconds", "rollout_evaluations", "saved_evaluations")


class Trainer:
    """One run: the policy, its prompts, its rewards and its method, and the state that a checkpoint holds."""

    def __init__(self, config: Config, accelerator, policy: PipelinePolicy, train_rewards: dict[str, Any],
                 prompts: tuple[list[data.Prompt], list[data.Prompt]]):
        self.config, self.accelerator, self.policy, self.rewards = config, accelerator, policy, train_rewards
        self.method = methods.resolve(config, policy.process)
        self.geometry = geometry(config.train)
        self.encode = Encoder(policy, Path(config.cache) if config.cache else None)
        self.grid, self.timesteps = make_grid(config.train.grid, config.train.steps, config.train.shift, policy.stock)
        self.prompts, self.held_out = prompts
        self.optimizer = torch.optim.AdamW(policy.weights.parameters(), lr=config.train.lr, betas=config.train.betas,
                                           weight_decay=config.train.weight_decay)
        self.ema = policy.weights.snapshot() if config.train.ema else None
        self.epoch = self.update = self.skipped = 0
        self.seconds, self.rollout_evaluations, self.saved_evaluations = 0.0, 0, 0
        self.first_ratio = FirstRatio(policy, self.method.surrogate, self.geometry.micro_batch)
        self.memory: dict[str, Any] = {}  # what parts of the method remember between epochs
        self.clock, self.stop, self.say = Clock(), Stop(), print
        if self.method.preview:
            require_choice(self.explore_how(), self.method.preview.pool)
        self.marked = self.counters()

    # --- one epoch, read from top to bottom --------------------------------------------------------------------------

    def run_epoch(self) -> dict[str, Any]:
        """Prompts to gradient, once. Returns the epoch's metrics."""
        batch = data.draw(self.prompts, self.geometry.prompts, self.epoch, self.config.seed)
        parts, conditioning, grouped = self.sample(batch)
        credited = self.credit(parts, grouped, conditioning.prompts)
        return self.reward_metrics(grouped) | self.learn(credited, conditioning)

    def sample(self, batch: list[data.Prompt]) -> tuple[list[Part], Any, torch.Tensor]:
        """Sample and score this epoch's groups: (the parts, the prompts' conditioning, scores [groups,G,R])."""
        explorations, seed = self.explore_how(), seeder(self.config.seed, self.epoch)
        with self.clock("encode"):
            conditioning = self.encode([p.text for p in batch], [self.negative(p) for p in batch])
        if self.method.preview:
            seed = self.preview(batch, conditioning, seed)
        evaluations = self.policy.evaluations
        parts, scores = self.rollout(batch, conditioning, explorations, seed)
        self.count_evaluations(self.policy.evaluations - evaluations, explorations)
        return parts, conditioning, scores.unflatten(0, (-1, self.geometry.group))

    def preview(self, batch, conditioning, seed: Seed) -> Seed:
        """The seeds of the noises whose cheap previews score best and worst."""
        train, pool = self.config.train, self.method.preview.pool
        with self.clock("preview"):
            grid = make_grid(train.grid, self.method.preview.steps, train.shift, self.policy.stock)
            rows = torch.arange(len(batch)).repeat_interleave(pool)
            finals = previews(self.policy, conditioning, *grid, pool, self.geometry.micro_batch, seed)
            scores = self.score(batch, rows, self.decode(finals, conditioning.rows(rows)))
            total = (scores * torch.tensor(list(self.config.rewards.values()))).nansum(1)
            return chosen(seed, contrasting(total.view(-1, pool), train.group))

    def explore_how(self) -> list[Exploration]:
        """This epoch's grid, window, kernel and solver."""
        train = self.config.train
        return self.method.explorations(self.grid, train.group, train.shift, self.epoch, self.config.seed,
                                        self.timesteps)

    def count_evaluations(self, spent: int, explorations: list[Exploration]) -> None:
        """What the rollout cost, and what it would have cost if no two pictures shared anything."""
        self.rollout_evaluations += spent
        alone, shared = (count(explorations, self.geometry.prompts) for count in (cost.alone, cost.rollout))
        self.saved_evaluations += round(spent * alone / shared) - spent

    def negative(self, prompt: data.Prompt) -> str:
        return self.config.negative_prompt if prompt.negative is None else prompt.negative

    def rollout(self, batch, conditioning, explorations, seed: Seed) -> tuple[list[Part], torch.Tensor]:
        """Sample, decode and score; a thread scores one part while the next one samples.

        Returns (the parts, scores [B,R]); a picture that is finished in several granularities has R scores in each.
        """
        parts, scores = [], []
        with ThreadPoolExecutor(1) as pool:
            samples = explore(self.policy, conditioning, explorations, self.geometry.micro_batch, seed)
            while True:
                with self.clock("rollout"):
                    part = next(samples, None)
                if part is None:
                    break
                self.stop.check()
                for final in part.finals:
                    with self.clock("decode"):
                        pictures = self.decode(final, conditioning.rows(part.prompts))
                    scores.append(pool.submit(self.score, batch, part.prompts, pictures))
                parts.append(part)
            with self.clock("reward"):
                found, strides = [score.result() for score in scores], len(self.method.strides)
                columns = [torch.cat(found[stride::strides]) for stride in range(strides)]
                return parts, torch.cat(columns, 1)

    def score(self, batch, rows: torch.Tensor, pictures: torch.Tensor) -> torch.Tensor:
        """The rewards [b,R] of pictures of the prompts `rows` [b]."""
        return rewards.score(self.rewards, pictures, [batch[p].text for p in rows], [batch[p].metadata for p in rows])

    def decode(self, finals: torch.Tensor, conditioning) -> torch.Tensor:
        """Pictures on the CPU, decoded in micro-batches."""
        rows = torch.arange(len(finals)).split(self.geometry.micro_batch)
        return torch.cat([self.policy.decode(finals[at], conditioning.rows(at)).cpu() for at in rows])

    def credit(self, parts: list[Part], grouped: torch.Tensor, texts: list[str]) -> Iterator[Part | None]:
        """Give every transition its advantage, that of the mean reward of the pictures below it among its equals in
        the group, and leave out what the method does not train: None for a part of which nothing is left.

        grouped: [groups,G,R]; texts: the prompts.
        """
        method, context = self.method, self.context(parts, texts)
        weights = list(self.config.rewards.values()) * len(method.strides)
        shaped = method.shaping(grouped, context)
        of_width = {1: method.advantage(shaped, weights, context)}
        keep = method.selection(of_width[1], context)
        for part in parts:
            at, advantages, kept = slice(part.groups.start, part.groups.stop), [], []
            for taken in part.transitions:
                width = len(part.prompts) // len(taken.parent)
                if width not in of_width:
                    # Nodes above the leaves are compared without leaving a trace in what is remembered of the leaves.
                    of_width[width] = method.advantage(below(shaped, width), weights, copy.deepcopy(context))
                advantages.append(of_width[width][at].flatten())
                kept.append(keep[at].reshape(-1, width).any(1))
            yield part.credited(advantages, kept)

    def context(self, parts: list[Part], texts: list[str]) -> Context:
        """What a method may read beside rewards."""
        group = self.geometry.group
        return Context([texts[p] for part in parts for p in part.prompts[::group]],
                       torch.cat([part.log_probs() for part in parts]).view(-1, group), self.epoch,
                       self.config.train.epochs, self.memory)

    def learn(self, parts: Iterable[Part | None], conditioning) -> dict[str, Any]:
        """Replay the recorded steps and follow the method's loss: `updates` optimiser steps per inner epoch."""
        stats = Stats()
        parts = self.first_ratio([part for part in parts if part is not None], conditioning, self.say)
        weights = self.step_weights(parts)
        for inner in range(self.config.train.inner_epochs):
            for share in chunks(parts, self.geometry.updates):
                with self.clock("update"):
                    self.optimizer.zero_grad()
                    count = decisions(share)
                    for part in share:
                        self.backward(part, conditioning, weights, count, stats)
                    self.step_optimizer(stats)
        return stats.summary() | {"skipped_updates": self.skipped}

    def step_weights(self, parts: list[Part]) -> dict[int, float]:
        """The method's weight of every step of the grid that the epoch trains, however the parts are dealt out."""
        steps = sorted({step for part in parts for step in part.exploration.schedule.trained})
        if not steps:
            return {}
        return dict(zip(steps, self.method.step_weight(self.method.kernel, self.grid, steps).tolist()))

    def backward(self, part: Part, conditioning, weights: dict[int, float], count: int, stats: Stats) -> None:
        """Add one part's gradient, a batch of one recorded step at a time.

        count: the decisions of the whole optimiser step, by which every loss is divided.
        """
        method, reference = self.method, self.reference_scores(part, conditioning)
        for batch, (k, rows, new) in enumerate(self.replay(part, conditioning)):
            taken, advantage = part.transitions[k], part.advantages[k][rows, None].to(self.policy.device)
            old = taken.old.rows(rows)
            log_ratio = method.log_ratio(new, old)
            loss = method.surrogate(log_ratio, advantage, old.logp) * weights[taken.step]
            if reference:
                loss = loss + method.kl(new, reference[batch])
            mean_over_decisions(loss, new.mask, count).backward()
            stats.add(taken.step, log_ratio, method.surrogate.clipped(log_ratio, advantage, old.logp), loss)

    def reference_scores(self, part, conditioning) -> list:
        """The base model's score of the part's transitions, where the method's KL asks for it."""
        if not self.method.kl.weight:
            return []
        with self.policy.reference():
            return [score for _, _, score in self.replay(part, conditioning)]

    def replay(self, part: Part, conditioning):
        return replay(self.policy, conditioning, part, self.geometry.micro_batch)

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
        """Mean and deviation per reward, and the share of groups whose pictures all score the same; of scores
        [groups,G,R] in several granularities those of the first, the whole grid."""
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
            "rescore": self.first_ratio.rescore, "memory": copy.deepcopy(self.memory)}

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
        self.memory = copy.deepcopy(state["memory"])
        self.marked = state


def decisions(parts: list[Part]) -> int:
    """The trained decisions of one optimiser step: what its loss is divided by."""
    return sum(taken.old.logp.numel() for part in parts for taken in part.transitions)


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
