"""Measurements of the study of parts: quantities of a finished run, per held-out prompt."""

import contextlib
from collections.abc import Iterable
from statistics import mean
from typing import Any, cast

import torch
from study_settings import TEXTS

from flowgrpo.config import parse
from flowgrpo.config.schema import Config
from flowgrpo.evaluation.measured import EVAL_SEED, measure, spread
from flowgrpo.policies.pipelines.load import denoisers
from flowgrpo.policies.pipelines.rlg import Branches
from flowgrpo.storage import checkpoint
from flowgrpo.storage.json_files import read_object
from flowgrpo.tools.bench import models, probe
from flowgrpo.train import Trainer
from flowgrpo.training import sampling, state

PROMPTS, SAMPLES = 100, 8  # measured prompts of texts that are sampled at temperature 1, and the samples of each
PICTURED = 60  # measured prompts of images with probe.SAMPLES samples each, for diversity and KL
MEND = "remove the run's folder, and the same command trains it again"


def trained(config: Config) -> Trainer:
    """Return the trainer of a finished run, with its last weights."""
    trainer, last = probe.trainer_of(config), checkpoint.latest(config.folder / "checkpoints")
    assert last is not None, f"{config.folder} has no checkpoint"
    state.restore(trainer, last)
    return trainer


def texts(config: Config) -> dict[str, list[float]]:
    """Return the greedy accuracy, and quantities of samples at temperature 1.

    entropy: of a whole completion, in nats, as the mean of -log p. kl: to the base, of a whole completion.
    """
    greedy = read_object(config.folder / "report" / "after.json", MEND)["scores"]["numeric_match"]
    trainer = trained(config)
    policy, prompts = trainer.policy, spread(trainer.held_out, PROMPTS)
    sampler = probe.trainer_of(parse.load(None, TEXTS | {
        "seed": EVAL_SEED, "prompts": config.prompts, "held_out": config.held_out, "train.prompts": len(prompts),
        "train.group": SAMPLES, "train.updates": 1}), policy)
    with torch.no_grad():
        parts, conditioning, scores = sampling.sample(sampler, prompts)
        with policy.reference():
            base = [scored for part in parts for _, _, scored in sampler.rollouts.replay(part, conditioning)]
    old = [cast(Any, part.transitions[0]).old for part in parts]
    entropy = [-(each.logp * each.mask).sum(1) for each in old]
    kl = [((each.logp - other.logp) * each.mask).sum(1) for each, other in zip(old, base)]
    right = scores[..., 0] == 1
    return {"accuracy": greedy, "pass@8": right.any(1).double().tolist(), "entropy": by_prompt(entropy),
            "kl": by_prompt(kl)}


def by_prompt(values: Iterable[torch.Tensor]) -> list[float]:
    """Return the mean over the samples of every prompt; rows are prompt by prompt."""
    return torch.cat([*values]).view(-1, SAMPLES).double().mean(1).tolist()


def images(config: Config, prompts: int, rlg: float | None) -> dict[str, list[float]]:
    """Return the strict accuracy of an image per prompt, and quantities of PICTURED prompts.

    prompts: measured ones. rlg: images are drawn with base + rlg * (tuned - base), and their accuracy alone is
    measured. diversity: mean distance of a prompt's images. kl: to the base, of a whole sample.
    """
    trainer = trained(config)
    policy = cast(Any, trainer.policy)
    with torch.no_grad():
        with contextlib.nullcontext() if rlg is None else Branches(policy.pipe, denoisers(policy.pipe)).at(rlg):
            accuracy = accuracies(trainer, prompts)
        if rlg is not None:
            return {"accuracy": accuracy}
        sampled = spread(trainer.held_out, PICTURED)
        return {"accuracy": accuracy, "diversity": probe.diversity(trainer, sampled),
                "kl": probe.kl_to_base(config, policy, sampled)}


def accuracies(trainer: Trainer, count: int) -> list[float]:
    """Return the world's accuracy of one sample for each of `count` held-out prompts, by the evaluation's sampler."""
    settings, rollouts = trainer.config.eval, cast(Any, trainer.rollouts)
    name = models.MODELS[trainer.config.model].measured
    measured = measure(cast(Any, trainer.policy), spread(trainer.held_out, count),
                       {name: trainer.scoring.functions[name]}, samples=1, steps=settings.steps,
                       guidance=settings.guidance, micro_batch=trainer.geometry.micro_batch, encode=rollouts.encode,
                       prepare=rollouts.prepare)
    return measured.scores[name]


def base_accuracy(config: Config, prompts: int) -> float:
    """Return the accuracy of the untrained model on the held-out prompts of a run's configuration."""
    return mean(accuracies(probe.trainer_of(config), prompts))
