"""The loop, from prompt to gradient: it knows neither the model nor the method.

    prompts -> conditioning -> rollout -> decode -> rewards -> advantage -> replay -> objective -> optimizer
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from flowgrpo import checkpoint, data, methods, rewards
from flowgrpo.config import Config, validate
from flowgrpo.errors import UserError
from flowgrpo.evaluation import held_out
from flowgrpo.gaussian import log_prob
from flowgrpo.geometry import geometry
from flowgrpo.log import Clock, Log
from flowgrpo.objectives import mean_over_decisions
from flowgrpo.policies.conditioning import Encoder
from flowgrpo.policies.pipeline import PipelinePolicy, load_pipeline
from flowgrpo.samplers import cost
from flowgrpo.samplers.grids import compress_tail, shifted
from flowgrpo.samplers.rollout import Exploration, Part, column, explore, make_grid, replay, rescored, seeder
from flowgrpo.signals import Stop, Stopped

FIRST_RATIO_LIMIT = 1e-6  # in fp32; elsewhere a tenth of the clip range
COUNTERS = ("epoch", "update", "skipped", "seconds", "first_log_ratio", "rescore", "rollout_evaluations",
            "saved_evaluations")


class Trainer:
    """One run: the policy, its prompts, its rewards and its method, and the state that a checkpoint holds."""

    def __init__(self, config: Config, accelerator, policy: PipelinePolicy, train_rewards: dict[str, Any],
                 prompts: tuple[list[data.Prompt], list[data.Prompt]]):
        self.config, self.accelerator, self.policy, self.rewards = config, accelerator, policy, train_rewards
        self.method = resolve_method(config)
        self.geometry = geometry(config.train, accelerator.num_processes)
        self.encode = Encoder(policy, Path(config.cache) if config.cache else None)
        self.grid = make_grid(config.train.grid, config.train.steps, config.train.shift, policy.stock)
        self.prompts, self.held_out = prompts
        self.optimizer = torch.optim.AdamW(policy.weights.parameters(), lr=config.train.lr, betas=config.train.betas,
                                           weight_decay=config.train.weight_decay)
        self.ema = policy.weights.snapshot() if config.train.ema else None
        self.epoch = self.update = self.skipped = 0
        self.whole = 0  # updates at the end of the last whole epoch
        self.seconds, self.first_log_ratio, self.rescore = 0.0, None, False
        self.rollout_evaluations = self.saved_evaluations = 0
        self.clock, self.stop = Clock(), Stop()

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
        alone, shared = (cost.rollout(exploration.schedule, steps, shape.prompts, shape.group, sharing, shape.micro_batch)
                         for sharing in (False, exploration.shared_noise))
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
            samples = explore(self.policy, conditioning, exploration, self.geometry.group, self.geometry.micro_batch, seed)
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
        """Replay the recorded steps and follow the method's loss: `updates` optimiser steps per inner epoch."""
        stats = Stats(exploration.schedule.trained)
        parts = [kept for part in parts if (kept := part.kept(keep[part.rows])) is not None]
        if self.rescore:
            parts = self.rescored(parts, conditioning, exploration)
        if self.update == 0 and parts:
            parts = self.check_first_ratio(parts, conditioning, exploration)
        for inner in range(self.config.train.inner_epochs):
            for share in chunks(parts, self.geometry.updates):
                with self.clock("update"):
                    self.optimizer.zero_grad()
                    count = self.decisions(share, exploration)
                    for part in share:
                        self.backward(part, conditioning, exploration, advantage[part.rows], count, stats)
                    self.step_optimizer(stats)
        return stats.summary() | {"skipped_updates": self.skipped}

    def decisions(self, parts: list[Part], exploration) -> float:
        """How many trained decisions one optimiser step has, over all processes: what the loss is divided by."""
        mine = torch.tensor(float(sum(len(part.rows) for part in parts) * len(exploration.schedule.trained)))
        return self.accelerator.reduce(mine.to(self.policy.device), "sum").item()

    def backward(self, part: Part, conditioning, exploration, advantage, count: float, stats: Stats) -> None:
        """Add one micro-batch's gradient, a recorded step at a time."""
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
        """Reduce over processes, clip, step; a gradient that is not finite is skipped and counted."""
        train, parameters = self.config.train, self.policy.weights.parameters()
        self.all_reduce(parameters)
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

    def all_reduce(self, parameters) -> None:
        """Sum the gradients over processes; the loss was already divided by the global count."""
        if self.accelerator.num_processes > 1:
            for parameter in parameters:
                parameter.grad = self.accelerator.reduce(parameter.grad, "sum")

    @property
    def total_updates(self) -> int:
        train = self.config.train
        return train.epochs * train.inner_epochs * train.updates

    # --- the first ratio ---------------------------------------------------------------------------------------------

    def check_first_ratio(self, parts, conditioning, exploration) -> list[Part]:
        """Before the first update the ratio of the run's first batch must be 1.

        In fp32 the run stops above 1e-6. Otherwise, above a tenth of the clip range, the old log-probabilities are
        computed again as the replay computes them, now and in every later epoch, and the run stops only if the two
        still differ.
        """
        clip, exact = self.method.surrogate, self.policy.dtype == torch.float32
        limit = FIRST_RATIO_LIMIT if exact else 0.1 * min(clip.low, clip.high)
        found = self.first_log_ratio = self.largest_log_ratio(parts, conditioning, exploration)
        if found <= limit:
            return parts
        if not exact and not self.rescore:
            parts, self.rescore = self.rescored(parts, conditioning, exploration), True
            left = self.largest_log_ratio(parts, conditioning, exploration)
            self.log.say(f"first |log ratio| {found:.1e} is above a tenth of the clip range ({limit:.1e}); old "
                         f"log-probabilities are computed again as the replay does: {left:.1e}")
            if left <= limit:
                return parts
        raise UserError(f"the first |log ratio| is {found:.1e}, expected at most {limit:.1e}: replay and "
                        "rollout disagree; look for dropout, a random module or a guidance that differs")

    def largest_log_ratio(self, parts, conditioning, exploration) -> float:
        """The largest |log ratio| of all rows and steps; NaN where one is."""
        found = []
        for part in parts:
            rows = conditioning.rows(part.prompts)
            found += [(new.logp - column(part.old, k).logp).detach().abs().max()
                      for k, new in replay(self.policy, rows, exploration, part)]
        return torch.stack(found).max().item()

    def rescored(self, parts, conditioning, exploration) -> list[Part]:
        """The parts with their old scores computed by the replay, in the replay's own grad mode."""
        return [rescored(self.policy, conditioning.rows(part.prompts), exploration, part)
                for part in parts]

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
        self.log = Log(folder, self.accelerator, self.accelerator.is_main_process, train.epochs, self.epoch)
        start, before = time.perf_counter(), self.seconds
        try:
            with self.stop:
                while self.epoch < train.epochs:
                    metrics = self.run_epoch() | self.clock.take()
                    self.seconds = before + time.perf_counter() - start
                    metrics |= {"evaluations": self.policy.evaluations, "seconds": round(self.seconds, 2)}
                    self.epoch, self.whole = self.epoch + 1, self.update
                    try:
                        if self.config.eval.every and self.epoch % self.config.eval.every == 0:
                            metrics |= held_out.sample_pictures(self, measured, folder)
                    finally:
                        self.log.epoch(self.epoch, metrics, shown(metrics, self.config))
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
            self.log.close()

    def save_whole(self, folder: Path) -> None:
        """Save an interrupted run, unless the broken epoch has already changed the weights: it will be run again."""
        if self.update == self.whole:
            self.save(folder)

    def save(self, folder: Path) -> None:
        """A checkpoint of everything, as of the end of the last whole epoch."""
        if not self.accelerator.is_main_process:
            return
        tensors = {f"weights/{k}": v for k, v in self.policy.weights.named.items()}
        tensors |= {f"ema/{k}": v for k, v in (self.ema or {}).items()}
        tensors |= {f"optimizer/{k}": v for k, v in checkpoint.optimizer_tensors(self.optimizer).items()}
        state = {key: getattr(self, key) for key in COUNTERS} | {"evaluations": self.policy.evaluations}
        checkpoint.save(folder / "checkpoints", self.epoch, tensors, state, self.config.train.keep)

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
        self.whole, self.policy.evaluations = self.update, state["evaluations"]


class Stats:
    """What an epoch's updates looked like, per grid step; read once, at the end."""

    def __init__(self, steps: tuple[int, ...]):
        self.steps, self.norms, self.losses = steps, [], []
        self.ratios: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.clipped: dict[int, list[torch.Tensor]] = defaultdict(list)

    def add(self, k: int, log_ratio, clipped, loss) -> None:
        self.ratios[self.steps[k]].append(log_ratio.detach())
        self.clipped[self.steps[k]].append(clipped)
        self.losses.append(loss.detach().mean())

    def summary(self) -> dict[str, Any]:
        if not self.losses:
            return {"loss": 0.0, "grad_norm": 0.0}
        ratios = {step: torch.cat(values) for step, values in self.ratios.items()}
        return {"loss": torch.stack(self.losses).mean().item(),
                "grad_norm": torch.stack(self.norms).mean().item(),
                "log_ratio_max": max(values.abs().max().item() for values in ratios.values()),
                "clip_fraction": torch.cat([c for values in self.clipped.values() for c in values]).float().mean().item(),
                **{f"ratio/step_{step}": values.exp().mean().item() for step, values in ratios.items()},
                **{f"clip_fraction/step_{step}": torch.cat(c).float().mean().item() for step, c in self.clipped.items()}}


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
    rewards_now = {name: f"{metrics[f'reward/{name}/mean']:.3f}" for name in config.rewards}
    return rewards_now | {"clip": f"{metrics.get('clip_fraction', 0):.2f}", "grad": f"{metrics['grad_norm']:.2g}"}


# --- entry points ----------------------------------------------------------------------------------------------------

def pick_device(name: str) -> str:
    """`auto` takes CUDA, then MPS, then the CPU. UserError where the asked one is absent."""
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return next(device for device, there in present.items() if there)
    if not present[name]:
        raise UserError(f"device is {name!r}, but torch {torch.__version__} sees none here: use device: auto or cpu")
    return name


def resolve_method(config: Config) -> methods.Method:
    """The method a configuration asks for, its parts tried on the configuration's number of steps and samples."""
    method, train = methods.with_parts(methods.preset(config.method), config.parts), config.train
    grid, x = shifted(train.steps, train.shift), torch.zeros(1, 1)
    try:
        method.selection(torch.zeros(1, train.group))
        for step in method.plan(train.steps, 0, config.seed).trained:
            log_prob(method.kernel(x, x, grid, step), x)
    except (TypeError, ValueError) as error:
        raise UserError(f"method {config.method} with train.steps {train.steps}, train.group {train.group} and "
                        f"parts {config.parts}: {error}") from None
    return method


def run(config: Config, resume: bool = False, *, pipe=None, functions: dict[str, Any] | None = None,
        prompts: list[data.Prompt] | None = None) -> dict[str, Any]:
    """Align a model as `config` says; returns the summary that is also written to `summary.json`.

    pipe, functions (by name), prompts: objects that take the place of what the configuration names.
    """
    from accelerate.utils import set_seed

    # Whatever a person can get wrong is looked at before anything is loaded or written.
    device = pick_device(config.device)
    resolve_method(config)
    geometry(config.train)
    given = functions or {}
    train_rewards = {name: given.get(name) or rewards.find(name) for name in config.rewards}
    measured = train_rewards | {name: given.get(name) or rewards.find(name) for name in config.eval.rewards}
    split = data.resolve(config) if prompts is None else data.split(prompts, config.held_out, data.SPLIT_SEED)
    folder = config.folder
    last = checkpoint.latest(folder / "checkpoints") if resume else None
    if resume and last is None:
        raise UserError(f"--resume: no checkpoint in {folder / 'checkpoints'}: expected one that an earlier run left")
    if config.eval.weights == "ema" and not config.train.ema:
        raise UserError("eval.weights is 'ema', but train.ema is 0: set train.ema to a decay such as 0.9")

    accelerator = make_accelerator(config, device, folder)
    set_seed(config.seed)
    pipe = pipe or load_pipeline(config.model, config.precision, config.trust_remote_code)
    policy = PipelinePolicy(pipe, config.adapter, device=device, precision=config.precision,
                            guidance=config.train.guidance, call=config.call,
                            checkpointing=config.train.checkpointing)
    trainer = Trainer(config, accelerator, policy, train_rewards, split)
    if last:
        trainer.restore(last)
    else:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # of an earlier run: they would be taken for ours
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config.yaml(), encoding="utf-8")
    keep_lines(folder / "metrics.jsonl", trainer.epoch)
    start_tracker(accelerator, config)
    try:
        before = held_out.before(trainer, measured, folder, reuse=last is not None)
        trainer.train(folder, measured)
        return held_out.finish(trainer, measured, folder, before)
    finally:
        accelerator.end_training()


def make_accelerator(config: Config, device: str, folder: Path):
    """Launch, device, collectives and trackers are accelerate's."""
    from accelerate import Accelerator

    return Accelerator(cpu=device == "cpu", log_with=None if config.tracker == "none" else config.tracker,
                       project_dir=str(folder))


def start_tracker(accelerator, config: Config) -> None:
    if config.tracker != "none":
        accelerator.init_trackers("flowgrpo" if config.tracker == "wandb" else "events")


def keep_lines(path: Path, epoch: int) -> None:
    """Drop the metrics of epochs that will be run (again), and a last line that a kill cut off."""
    if path.exists():
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        kept = path.with_suffix(".tmp")
        kept.write_text("".join(line for line in whole if json.loads(line)["epoch"] <= epoch))
        kept.replace(path)


def align(model, rewards="scene_graded", prompts="starter", method: str = "mix_grpo", **options: Any) -> dict[str, Any]:
    """Align `model` to `rewards` on `prompts`: what the command line does, from Python.

    model: `starter`, a directory, a hub id, or a loaded diffusers pipeline. rewards: a name, a function
    `reward(images, prompts, metadata) -> floats`, or a dictionary of these to weights (functions under their own
    names). prompts: a file, or a list of strings. options: configuration keys, sections as dictionaries, such as
    `train={"epochs": 50}`. Returns the run's summary, the content of `summary.json`.
    """
    weighted = rewards if isinstance(rewards, dict) else {rewards: 1.0}
    names = [key if isinstance(key, str) else getattr(key, "__name__", type(key).__name__) for key in weighted]
    if len(set(names)) < len(names):
        raise UserError(f"rewards {', '.join(names)}: two have the same name, expected functions of different names")
    functions = {name: key for name, key in zip(names, weighted) if callable(key)}
    loaded = not isinstance(model, (str, Path))
    listed = not isinstance(prompts, (str, Path))
    config = validate({"method": method, "reward": dict(zip(names, weighted.values())),
                       "model": type(model).__name__ if loaded else str(model),
                       "prompts": "a list" if listed else str(prompts), **options})
    return run(config, pipe=model if loaded else None, functions=functions,
               prompts=[data.Prompt(text) for text in prompts] if listed else None)
