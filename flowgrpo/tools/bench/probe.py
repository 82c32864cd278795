"""Measurements of a bench beside those of a run: the cost of an epoch before it, diversity and KL after it."""

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, cast

import torch

from flowgrpo import rewards
from flowgrpo.config import parse
from flowgrpo.config.schema import Config
from flowgrpo.data import sets
from flowgrpo.data.prompts import Prompt
from flowgrpo.device import pick_device
from flowgrpo.distributed.processes import make_accelerator
from flowgrpo.evaluation import draw
from flowgrpo.evaluation.measured import EVAL_SEED, measure, spread
from flowgrpo.methods.targets import LatentEdits
from flowgrpo.objectives.kl import divergence, k3
from flowgrpo.policies.build import make_policy
from flowgrpo.policies.policy import Policy, resolve_precision
from flowgrpo.rewards import pairwise
from flowgrpo.samplers.rollout import Part, seeder
from flowgrpo.storage.places import checkpoints
from flowgrpo.tools.bench import models
from flowgrpo.train import Trainer
from flowgrpo.training import sampling, state

PROMPTS, SAMPLES = 24, 4  # held-out prompts of diversity and KL, and the samples of each
TIMED = 8  # prompts of the timed evaluation


def trainer_of(config: Config, policy: Policy | None = None) -> Trainer:
    """Trainer of a configuration, as a run has it before its first epoch; nothing is written."""
    device = pick_device(config.device)
    config, _ = resolve_precision(config, device)
    trained: dict[str, Any] = {**rewards.compose(config.trained, config.cache)}
    return Trainer(config, make_accelerator(device), policy or make_policy(config, device), trained,
                   sets.resolve(config))


def trial(config: Config) -> dict[str, float]:
    """Run two epochs and a small evaluation; return their cost. first, following: evaluations of the epochs. seconds:
    of the second one. measuring: seconds per held-out prompt."""
    trainer, spent, seconds = trainer_of(config), [0], []
    for trainer.epoch in range(2):
        start = time.perf_counter()
        trainer.run_epoch()
        seconds.append(time.perf_counter() - start)
        spent.append(trainer.policy.evaluations)
    extra = rewards.compose(config.extra_rewards, config.cache)
    functions = pairwise.held_out_rewards(trainer.scoring.functions, extra)
    prompts, rollouts, start = spread(trainer.held_out, TIMED), cast(Any, trainer.rollouts), time.perf_counter()
    measure(cast(Any, trainer.policy), prompts, functions, steps=config.eval.steps, guidance=config.eval.guidance,
            samples=1, micro_batch=trainer.geometry.micro_batch, encode=rollouts.encode,
            prepare=rollouts.prepare)
    return {"first": spent[1], "following": spent[2] - spent[1], "seconds": seconds[1],
            "measuring": (time.perf_counter() - start) / len(prompts)}


def epochs_to_measure(epochs: list[int], every: int) -> list[int]:
    """Epochs of a run's checkpoints, in order, that `eval.every` measures, and the last; 0: only this."""
    return [epoch for epoch in epochs if epoch == epochs[-1] or (every and epoch % every == 0)]


def final_measures(folder: Path) -> dict[str, Any]:
    """Diversity and KL of a finished run, of its held-out prompts.

    diversity: mean distance between the samples of a prompt, of the base and of the tuned model, as `flowgrpo eval`
    measures it. kl: see `kl_to_base`; None for a method that leaves the model unchanged and edits its latents.
    points: both at the checkpoint of every measured epoch, of the tuned model alone.
    """
    config = parse.load(folder / "config.yaml")
    if models.MODELS[config.model].process == "tokens":  # greedy samples of a prompt are equal
        config = config.having({"text.eval_temperature": 1.0})
    trainer, folders = trainer_of(config), checkpoints(folder / "checkpoints")
    assert folders, f"{folder} has no checkpoint"
    prompts = spread(trainer.held_out, min(PROMPTS, config.eval.prompts))
    points: list[dict[str, Any]] = []
    for epoch in epochs_to_measure(sorted(folders), config.eval.every):
        state.restore(trainer, folders[epoch])
        policy = trainer.policy
        with torch.no_grad(), policy.weights.swap(trainer.optimization.evaluated_weights()):
            kl = None if isinstance(trainer.method.target, LatentEdits) else mean(
                kl_to_base(trainer.config, policy, prompts))
            points.append({"epoch": epoch, "kl": kl, "diversity": mean(diversity(trainer, prompts))})
    with torch.no_grad(), trainer.policy.reference():
        base = mean(diversity(trainer, prompts))
    return {"kl": points[-1]["kl"], "diversity": {"base": base, "tuned": points[-1]["diversity"]}, "points": points}


def diversity(trainer: Trainer, prompts: list[Prompt]) -> list[float]:
    """Mean distance between SAMPLES samples of every prompt, with the evaluation's sampler."""
    policy, settings, seed = cast(Any, trainer.policy), trainer.config.eval, seeder(EVAL_SEED, 0)
    apart = draw.distance_between(draw.TEXTS if policy.modality == "text" else draw.IMAGES, "pixels")
    rollouts, distances = cast(Any, trainer.rollouts), []
    rollouts.prepare(prompts)
    for i, prompt in enumerate(prompts):
        conditioning = rollouts.encode([prompt.text] * SAMPLES, [prompt.negative or ""] * SAMPLES,
                                       [prompt.brings] * SAMPLES)
        seeds = policy.generators([seed(i, k) for k in range(SAMPLES)])
        distances.append(apart(policy.generate(conditioning, seeds, settings.steps, settings.guidance)))
    return distances


def kl_to_base(config: Config, policy: Policy, prompts: list[Prompt]) -> list[float]:
    """KL(tuned || base) per sample of every prompt, on SAMPLES samples of the tuned model.

    Denoisers: the sum over steps of `gaussian.kl`, with the sampler of the model's default reference method. Texts: the
    sum over tokens of `k3`, which is never negative.
    """
    of, shared = models.MODELS[config.model], models.common_settings(config.model)
    sampler = parse.load(None, shared | {
        "method": of.reference, "parts": of.parts_of_kl, "seed": EVAL_SEED, "device": config.device,
        "precision": config.precision, "prompts": config.prompts, "held_out": config.held_out,
        "train.prompts": len(prompts), "train.group": SAMPLES, "train.updates": 1})
    trainer = trainer_of(sampler, policy)
    parts, conditioning, _ = sampling.sample(trainer, prompts)
    tuned = _scores(trainer, parts, conditioning)
    with policy.reference():  # text encoders that were trained are the base's too
        base = _scores(trainer, parts, trainer.rollouts.conditioning(prompts))
    distance = divergence if of.process != "tokens" else lambda new, old: k3(new.logp, old.logp)
    totals = [torch.zeros(len(part.prompts), dtype=torch.float64) for part in parts]
    for (part, rows, new), (_, _, old) in zip(tuned, base):
        totals[part][rows] += (distance(new, old) * new.mask).sum(1).double().cpu()
    return torch.cat(totals).view(len(prompts), SAMPLES).mean(1).tolist()


def _scores(trainer: Trainer, parts: Sequence[Part], conditioning: Any) -> list[tuple[int, slice, Any]]:
    return [(number, rows, scored) for number, part in enumerate(parts)
            for _, rows, scored in trainer.rollouts.replay(part, conditioning)]
