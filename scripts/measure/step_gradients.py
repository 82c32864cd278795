"""Gradient of every denoising step on the image starter, before training: its size, and how well epochs agree on it.

    python scripts/measure/step_gradients.py --methods flow_grpo,dance_grpo,mix_grpo+grpo_guard --epochs 8

Epochs differ in prompts and noise, and nothing is updated between them. Two epochs agree by the cosine of their
gradients: 1 is pure signal, 0 is pure noise. Settings are those of `flowgrpo compare methods`, without a KL. Methods
that train recorded steps alone.

    step      index of the denoising step
    std       deviation of its noise, as the kernel draws it
    share     of the whole gradient's squared norm
    agreement mean cosine of the step's gradients of two epochs
"""

import argparse
import itertools
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from flowgrpo.config import parse
from flowgrpo.log import silence
from flowgrpo.tools.bench import models, probe
from flowgrpo.tools.bench.models import Entry, entries
from flowgrpo.train import Trainer
from flowgrpo.training import credit, sampling

MODEL = "starter"


def trainer_of(entry: Entry, folder: Path, seed: int) -> Trainer:
    """Return the trainer of a bench's run before its first epoch."""
    sides = {side: str(folder / f"{key}.jsonl") for side, key in (("prompts", "train"), ("held_out", "held_out"))}
    return probe.trainer_of(parse.load(None, models.common_settings(MODEL) | entry.settings | sides | {"seed": seed}))


def gradients(trainer: Trainer, epoch: int) -> tuple[dict[int, Tensor], dict[int, float], Tensor]:
    """Return an epoch's gradient [D] and the deviation of the noise by step, and its scores [P, G, R]."""
    trainer.epoch = epoch
    drawn = trainer.extensions.draw_epoch() or sampling.draw(trainer)
    trainer.method.curriculum.learn(trainer.memory, drawn.groups)
    _, scores = drawn.groups.prompts_and_scores()
    credited = credit.compare(trainer, drawn)
    weights, method = trainer.rollouts.step_weights(credited, epoch), trainer.method
    sums: dict[int, Tensor] = {}
    noise: dict[int, float] = {}
    for part in credited:
        for k, rows, new in trainer.rollouts.replay(part, drawn.conditioning):
            taken: Any = part.transitions[k]
            old, advantage = taken.old.rows(rows), part.advantage(k, rows)
            loss = method.loss.surrogate(method.loss.log_ratio(new, old), advantage, old.logp)
            trainer.optimization.optimizer.zero_grad()
            trainer.policy.backward((loss * weights[taken.step]).sum())
            sums[taken.step] = sums.get(taken.step, 0) + flat(trainer)
            noise[taken.step] = float(new.std.mean())
    return sums, noise, scores


def flat(trainer: Trainer) -> Tensor:
    """Return the gradients of all trained weights as one vector [D]."""
    return torch.cat([weight.grad.double().flatten() for weight in trainer.policy.weights.parameters()
                      if weight.grad is not None])


def agreement(vectors: list[Tensor]) -> float:
    """Return the mean cosine of all pairs of vectors [D]; nan for fewer than two."""
    pairs = [float(torch.cosine_similarity(one, two, dim=0)) for one, two in itertools.combinations(vectors, 2)]
    return mean(pairs) if pairs else float("nan")


def lines(entry: Entry, folder: Path, epochs: int, seed: int) -> Iterator[str]:
    """Yield a method's rows of the table, and a line on its groups."""
    trainer, steps, noise = trainer_of(entry, folder, seed), defaultdict[int, list[Tensor]](list), dict[int, float]()
    whole, spread = list[Tensor](), list[float]()
    for epoch in range(epochs):
        sums, of_step, scores = gradients(trainer, epoch)
        noise |= of_step
        whole.append(sum(sums.values()))  # type: ignore[arg-type]
        spread.append(float((scores[..., 0].std(1) > 0).double().mean()))
        for step, gradient in sums.items():
            steps[step].append(gradient)
    squares = {step: mean(float(each.square().sum()) for each in found) for step, found in steps.items()}
    for step in sorted(steps):
        yield (f"| {entry.label} | {step} | {noise[step]:.3f} | {squares[step] / sum(squares.values()):.0%} | "
               f"{agreement(steps[step]):.3f} |")
    yield f"| {entry.label} | all | | | {agreement(whole):.3f} |"
    yield f"| {entry.label} | groups that differ in accuracy: {mean(spread):.0%} | | | |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", required=True, help="as of flowgrpo compare methods, separated by commas")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    silence()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        models.write_sides(MODEL, Path(folder))
        print("| method | step | std | share | agreement |", "|---|---:|---:|---:|---:|", sep="\n", flush=True)
        for entry in entries(args.methods.split(","), MODEL, models.MODELS[MODEL]):
            for line in lines(entry, Path(folder), args.epochs, args.seed):
                print(line, flush=True)


if __name__ == "__main__":
    main()
