"""EXPO on the starter: train the edit policy and its critic, then compare at equal scorer calls on held-out prompts.

    python scripts/try_expo.py                       # about a quarter of an hour on one core
    python scripts/try_expo.py --train.epochs=80     # any KEY=VALUE of a configuration

For every prompt 2N bases are drawn, and the first N of them are edited. Best of the N bases and their N edits stands
against best of the 2N bases: chosen by the scorer, 2N calls each, and by the critic, which needs none. Differences are
paired by prompt, with 95 % intervals.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch
from common import options

from flowgrpo import data, rewards
from flowgrpo.config import load
from flowgrpo.evaluation.held_out import spread
from flowgrpo.evaluation.statistics import interval
from flowgrpo.policies.build import make_policy
from flowgrpo.run import make_accelerator, pick_device
from flowgrpo.samplers import edits
from flowgrpo.samplers.rollout import seeder
from flowgrpo.train import Trainer

N, PROMPTS, AT_ONCE, SEED = 4, 120, 12, 20_000
RECIPE = {"model": "starter", "method": "expo", "prompts": "starter", "tracker": "none", "device": "cpu",
          "reward": "scene_graded", "train.epochs": 40, "train.prompts": 12, "train.group": 16,
          "train.micro_batch": 96, "train.steps": 6, "train.shift": 1.5, "train.guidance": 2.0,
          "train.inner_epochs": 2, "train.updates": 2, "train.lr": 1e-3, "train.schedule": "linear"}


def trained(config) -> Trainer:
    """A trainer after all its epochs; nothing is written."""
    torch.manual_seed(config.seed)
    device = pick_device(config.device)
    trainer = Trainer(config, make_accelerator(config, device), make_policy(config, device),
                      rewards.compose(config.trained, config.cache), data.resolve(config))
    start = time.time()
    for trainer.epoch in range(config.train.epochs):
        found = trainer.run_epoch()
        if trainer.epoch % 5 == 4:
            print(f"epoch {trainer.epoch + 1}: reward {found['reward/scene_graded/mean']:.3f}, "
                  f"loss {found['loss']:.3f}, {time.time() - start:.0f} s", flush=True)
    return trainer


@torch.no_grad()
def compared(trainer: Trainer) -> dict[str, np.ndarray]:
    """Rewards of prompts: those of all bases [P, 2N] and of the first N edited [P, N], and the critic's choices [P]."""
    policy, found = trainer.policy, {"bases": [], "edits": [], "critic, 2N bases": [], "critic, N and edits": []}
    chosen, seed = spread(trainer.held_out, PROMPTS), seeder(SEED, 0)
    for at in range(0, len(chosen), AT_ONCE):
        batch = chosen[at:at + AT_ONCE]
        conditioning = trainer.explorer.conditioning(batch)
        rows = torch.arange(len(batch)).repeat_interleave(2 * N)
        generators = policy.generators(seed(at + int(row), i % (2 * N)) for i, row in enumerate(rows))
        x = drawn(trainer, conditioning, rows, generators).unflatten(0, (-1, 2 * N))
        first, own = x[:, :N].flatten(0, 1), conditioning.rows(rows[::2])
        edited = policy.editor.edit.applied(first, policy.editor.replay(own, first)).unflatten(0, (-1, N))
        scores = {name: scored(trainer, batch, conditioning, each) for name, each in (("bases", x), ("edits", edited))}
        _, values = edits.on_the_fly(policy.editor, conditioning, x[:, :N])
        plain = policy.editor.value(conditioning.rows(rows), x.flatten(0, 1)).unflatten(0, (-1, 2 * N))
        both = torch.cat([scores["bases"][:, :N], scores["edits"]], 1)
        scores["critic, N and edits"] = both.gather(1, values.argmax(1, keepdim=True))
        scores["critic, 2N bases"] = scores["bases"].gather(1, plain.argmax(1, keepdim=True))
        for name, value in scores.items():
            found[name].append(value.numpy())
    return {name: np.concatenate(each) for name, each in found.items()}


def drawn(trainer: Trainer, conditioning, rows: torch.Tensor, generators) -> torch.Tensor:
    """Final latents as the rollouts of training have them."""
    [exploration] = trainer.explorer.explorations(0)
    return trainer.policy.run(exploration.task(0, exploration.steps), conditioning.rows(rows), None, generators)[0]


def scored(trainer: Trainer, batch, conditioning, x: torch.Tensor) -> torch.Tensor:
    """The reward [P, n] of the pictures of latents [P, n, *D]."""
    rows = torch.arange(len(x)).repeat_interleave(x.shape[1])
    pictures = trainer.explorer.decode(x.flatten(0, 1), conditioning.rows(rows))
    return trainer.score(batch, rows, pictures, x.shape[1]).view(len(x), -1)


def told(name: str, values: np.ndarray, share: bool = True) -> str:
    found = interval(values.reshape(len(values), -1), share=share)
    return f"{name:<44} {found.mean:+.4f}  ({found.low:+.4f} to {found.high:+.4f})"


def main() -> None:
    torch.set_num_threads(1)
    trainer = trained(load(None, {**RECIPE, **options([each.lstrip("-") for each in sys.argv[1:]])}))
    found = compared(trainer)
    bases, edited = found["bases"], found["edits"]
    best = np.concatenate([bases[:, :N], edited], 1).max(1), bases.max(1)
    print(told("one base", bases[:, 0]))
    print(told("its edit", edited[:, 0]))
    print(told("edit less its base", edited - bases[:, :N], False))
    print(told(f"best of {2 * N} bases, by the scorer", best[1]))
    print(told(f"best of {N} bases and {N} edits, by the scorer", best[0]))
    print(told("    difference", best[0] - best[1], False))
    print(told(f"best of {2 * N} bases, by the critic", found["critic, 2N bases"]))
    print(told(f"best of {N} bases and {N} edits, by the critic", found["critic, N and edits"]))
    print(told("    difference", found["critic, N and edits"] - found["critic, 2N bases"], False))


if __name__ == "__main__":
    main()
