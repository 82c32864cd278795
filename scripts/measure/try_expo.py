"""EXPO on the starter: train the edit policy and its critic, then compare at equal scorer calls on held-out prompts.

    python scripts/measure/try_expo.py --train.steps=2       # bases of two steps; about half an hour on one core
    python scripts/measure/try_expo.py --train.epochs=80     # any KEY=VALUE of a configuration
    python scripts/measure/try_expo.py --parts.surrogate.through=0 --parts.surrogate.ratio=1 \\
        --parts.edit.acting=pairs \\
        --parts.advantage.type=Paired                # the edit by its ratio, not by the critic

Against the best of 2N bases of a prompt, by the scorer, stands with as many calls of the scorer:

- the best of 2N images as EXPO's acting policy draws them, each the critic's choice of `candidates` bases and their
  edits: of one base, which takes no more of the denoiser, and of CANDIDATES;
- the best of N bases and their N edits, whatever the critic thinks of them.

Differences are paired by prompt, with 95 % intervals. Its limits are reported too: how well the critic ranks a
prompt's bases, and the gain that it expects of an edit; and what the bound leaves room for, by edits that follow the
gradient of `scene_soft`, a soft form of the reward itself, which no trained edit can read.
"""

import sys
import time
from collections import defaultdict

import numpy as np
import torch
from common import options
from scipy.stats import spearmanr

from flowgrpo import rewards
from flowgrpo.config import load
from flowgrpo.data import sets
from flowgrpo.device import pick_device
from flowgrpo.distributed.processes import make_accelerator
from flowgrpo.evaluation.measured import spread
from flowgrpo.evaluation.statistics import STUDENT, interval
from flowgrpo.policies.build import make_policy
from flowgrpo.policies.policy import resolve_precision
from flowgrpo.rewards.starter.scene_soft import scene_soft
from flowgrpo.samplers import latent_edits
from flowgrpo.samplers.rollout import seeder
from flowgrpo.train import Trainer

N, CANDIDATES, PROMPTS, AT_ONCE, SEED = 4, 4, 120, 12, 20_000
RECIPE = {"model": "starter", "method": "expo", "prompts": "starter", "tracker": "none", "device": "cpu",
          "precision": "fp32", "reward": "scene_graded", "train.epochs": 40, "train.prompts": 12,
          "train.group": 16, "train.micro_batch": 96, "train.steps": 6, "train.shift": 1.5, "train.guidance": 2.0,
          "train.inner_epochs": 2, "train.updates": 2, "train.lr": 1e-3, "train.schedule": "linear"}


def trained(config) -> Trainer:
    """Trainer after all its epochs; nothing is written."""
    torch.manual_seed(config.seed)
    device = pick_device(config.device)
    config, _ = resolve_precision(config, device)
    trainer = Trainer(config, make_accelerator(device), make_policy(config, device),
                      rewards.compose(config.trained, config.cache), sets.resolve(config))
    start = time.time()
    for trainer.epoch in range(config.train.epochs):
        found = trainer.run_epoch()
        if trainer.epoch % 5 == 4:
            print(f"epoch {trainer.epoch + 1}: reward {found['reward/scene_graded/mean']:.3f}, "
                  f"loss {found['loss']:.3f}, {time.time() - start:.0f} s", flush=True)
    return trainer


@torch.no_grad()
def compared(trainer: Trainer) -> dict[str, np.ndarray]:
    """Rewards of prompts: those of all bases [P, 2N], of the first N edited [P, N], by the networks ("edits") and by
    the soft reward's gradient ("possible"), and of what the acting policy draws of one or several candidates [P, 2N];
    the critic's values of all bases [P, 2N] and the gains that it expects of the edits [P, N]."""
    policy, found = trainer.policy, defaultdict(list)
    chosen, seed = spread(trainer.held_out, PROMPTS), seeder(SEED, 0)
    for at in range(0, len(chosen), AT_ONCE):
        batch = chosen[at:at + AT_ONCE]
        conditioning, owns = trainer.rollouts.conditioning(batch), torch.arange(len(batch))
        rows = owns.repeat_interleave(2 * N * CANDIDATES)
        generators = policy.generators(seed(at + int(row), i % (2 * N * CANDIDATES)) for i, row in enumerate(rows))
        every = drawn(trainer, conditioning, rows, generators).unflatten(0, (-1, CANDIDATES, 2 * N)).transpose(1, 2)
        x, own = every[:, :, 0], conditioning.rows(owns.repeat_interleave(N))
        first = x[:, :N].flatten(0, 1)
        edited = policy.editor.edit.apply(first, policy.editor.replay(own, first)).unflatten(0, (-1, N))
        possible = ascended(trainer, batch, conditioning, x[:, :N])
        acts = {f"acting, of {n}": acting(trainer, conditioning, every[:, :, :n]) for n in (1, CANDIDATES)}
        scores = {name: scored(trainer, batch, conditioning, each)
                  for name, each in ({"bases": x, "edits": edited, "possible": possible} | acts).items()}
        _, values = latent_edits.on_the_fly(policy.editor, conditioning, x[:, :N])
        rows = owns.repeat_interleave(2 * N)
        plain = policy.editor.value(conditioning.rows(rows), x.flatten(0, 1)).unflatten(0, (-1, 2 * N))
        scores |= {"values": plain, "expected": values[:, N:] - values[:, :N]}
        for name, value in scores.items():
            found[name].append(value.numpy())
    return {name: np.concatenate(each) for name, each in found.items()}


def acting(trainer: Trainer, conditioning, x: torch.Tensor) -> torch.Tensor:
    """Return the critic's choices [P, m, *D] of each n bases x [P, m, n, *D] and their edits."""
    rows = torch.arange(len(x)).repeat_interleave(x.shape[1])
    return latent_edits.on_the_fly(trainer.policy.editor, conditioning.rows(rows),
                                   x.flatten(0, 1))[0].view_as(x[:, :, 0])


def ascended(trainer: Trainer, batch, conditioning, x: torch.Tensor, steps: int = 10, lr: float = 0.3) -> torch.Tensor:
    """Latents [P, n, *D], each moved within the bound by Adam up the gradient of `scene_soft`."""
    policy, rows = trainer.policy, torch.arange(len(x)).repeat_interleave(x.shape[1])
    texts, flat = [batch[int(p)].text for p in rows], x.flatten(0, 1)
    decision = torch.zeros_like(flat).requires_grad_()
    optimizer = torch.optim.Adam([decision], lr)
    for _ in range(steps):
        with torch.enable_grad():
            images = policy.image(policy.editor.edit.apply(flat, decision), conditioning.rows(rows))
            loss = -scene_soft(images, texts).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy.editor.edit.apply(flat, decision.detach()).unflatten(0, (-1, x.shape[1]))


def drawn(trainer: Trainer, conditioning, rows: torch.Tensor, generators) -> torch.Tensor:
    """Final latents as the rollouts of training have them."""
    [exploration] = trainer.rollouts.explorations(0)
    return trainer.policy.run(exploration.task(0, exploration.steps), conditioning.rows(rows), None, generators)[0]


def scored(trainer: Trainer, batch, conditioning, x: torch.Tensor) -> torch.Tensor:
    """Reward [P, n] of the images of latents [P, n, *D]."""
    rows = torch.arange(len(x)).repeat_interleave(x.shape[1])
    images = trainer.rollouts.decode(x.flatten(0, 1), conditioning.rows(rows))
    return trainer.scoring.score(batch, rows, images, x.shape[1]).view(len(x), -1)


def ranked(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Spearman's correlation of the critic's values and the rewards within prompts, [P']; a prompt whose bases all
    score the same has none and is left out."""
    pairs = [(value, own) for value, own in zip(values, known) if np.ptp(own) > 0 and np.ptp(value) > 0]
    return np.array([spearmanr(value, own).statistic for value, own in pairs])


def told(name: str, values: np.ndarray, method: str | None = None) -> str:
    found = interval(values.reshape(len(values), -1), method)
    return f"{name:<44} {found.mean:+.4f}  ({found.low:+.4f} to {found.high:+.4f})"


def main() -> None:
    torch.set_num_threads(1)
    trainer = trained(load(None, RECIPE | options([each.lstrip("-") for each in sys.argv[1:]])))
    found = compared(trainer)
    bases, edited, best = found["bases"], found["edits"], found["bases"].max(1)
    both = [np.concatenate([bases[:, :N], each], 1).max(1) for each in (edited, found["possible"])]
    print(told("one base", bases[:, 0]))
    print(told("its edit", edited[:, 0]))
    print(told("edit less its base", edited - bases[:, :N], STUDENT))
    print(told("    as the critic expects", found["expected"], STUDENT))
    print(told("the critic's rank correlation within a prompt", ranked(found["values"], bases), STUDENT))
    print(told(f"best of {2 * N} bases", best))
    for n in (1, CANDIDATES):
        acts = found[f"acting, of {n}"]
        print(told(f"one image of the acting policy, of {n}", acts[:, 0]))
        print(told(f"best of {2 * N} of its images, of {n}", acts.max(1)))
        print(told("    difference", acts.max(1) - best, STUDENT))
    print(told(f"best of {N} bases and {N} edits", both[0]))
    print(told("    difference", both[0] - best, STUDENT))
    print(told("edit by the soft reward less its base", found["possible"] - bases[:, :N], STUDENT))
    print(told("    difference with such edits", both[1] - best, STUDENT))


if __name__ == "__main__":
    main()
