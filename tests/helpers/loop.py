"""Steps of the training loop by themselves: each makes the epoch that the loop hands on, and calls the loop's own."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flowgrpo.config import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.methods.setup import Setup
from flowgrpo.methods.validate import resolve
from flowgrpo.policies import build
from flowgrpo.samplers.rollout import Part
from flowgrpo.train import Trainer
from flowgrpo.training import credit as credits
from flowgrpo.training import sampling
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension
from flowgrpo.training.metrics import UpdateStats
from flowgrpo.types import Context, Scored


def epoch(trainer: Trainer, parts: Sequence[Part] = (), conditioning: Any = None, own: Sequence[Prompt] = (),
          weights: dict[int, float] | None = None) -> Epoch:
    """An epoch of parts that are sampled, without scores."""
    return Epoch(sampling.empty_batch(trainer, trainer.epoch), [*own], [*parts], conditioning, weights=weights or {})


def scored(trainer: Trainer, parts: Sequence[Part], scores: torch.Tensor, keys: Sequence[str]) -> Epoch:
    """An epoch of parts with the scores [groups,G,R] of all processes. keys: of the groups' prompts."""
    known = {prompt.key: prompt for prompt in trainer.prompts}
    made = epoch(trainer, parts)
    totals = trainer.scoring.sum_rewards(scores[..., :len(trainer.scoring.functions)])
    made.groups.add([known.get(key) or Prompt(key) for key in keys], scores, totals)
    return made


def draw(trainer: Trainer) -> Epoch:
    """The epoch that the trainer draws, from which its curriculum has learned."""
    drawn = trainer.extensions.draw_epoch() or sampling.draw(trainer)
    trainer.method.curriculum.learn(trainer.memory, drawn.groups)
    return drawn


def credit(trainer: Trainer, parts: Sequence[Part], scores: torch.Tensor, keys: Sequence[str]) -> list[Part | None]:
    """The parts with their advantages; None for one of which nothing is left to train."""
    left = credits.compare(trainer, scored(trainer, parts, scores, keys))
    found = [left.pop(0) if left and left[0].prompts is part.prompts else None for part in parts]
    assert not left
    return found


def context(trainer: Trainer, parts: Sequence[Part], keys: Sequence[str], own: Sequence[Prompt] = ()) -> Context:
    """What credit reads of these parts besides rewards. own: the prompts of the epoch's groups."""
    made = epoch(trainer, parts)
    made.groups.prompts = [*(own or trainer.prompts)]
    return credits.context_of(trainer, made, [*keys])


def learn(trainer: Trainer, credited: Sequence[Part | None], conditioning: Any, own: Sequence[Prompt] = (),
          sampled: Any = None) -> dict[str, Any]:
    """The metrics of an epoch's second half, from parts with advantages to its last update."""
    made = epoch(trainer, [part for part in credited if part is not None], conditioning, own)
    made.sampled = sampled
    return trainer.train_on(made)


def backward(trainer: Trainer, part: Part, conditioning: Any, weights: dict[int, float], count: int,
             stats: UpdateStats) -> None:
    """Add one part's gradient."""
    trainer.kl_reference.rollouts, trainer.kl_reference.conditioning = trainer.rollouts, conditioning
    trainer.backward(epoch(trainer, [part], conditioning, weights=weights), part, count, stats)


def reference(trainer: Trainer, part: Part, conditioning: Any) -> list[Scored]:
    """The reference's scores of a part's transitions, where they are needed."""
    trainer.kl_reference.rollouts, trainer.kl_reference.conditioning = trainer.rollouts, conditioning
    return trainer.kl_reference.scores(part)


def names(trainer: Trainer) -> list[str]:
    """The classes of a trainer's extensions."""
    return [type(each).__name__ for each in trainer.extensions.present]


def extension(trainer: Trainer, name: str) -> Any:
    """The trainer's extension of a class of that name."""
    return trainer.extensions.present[names(trainer).index(name)]


def term(trainer: Trainer) -> Any:
    """The trainer's supervised term."""
    return extension(trainer, "Supervised")


def critic(trainer: Trainer) -> Any:
    """The trainer's value model, or the quality head of its draws."""
    return extension(trainer, "ValueModel").critic


def watch(trainer: Trainer, **moments: Callable[..., Any]) -> None:
    """Call functions at moments of the trainer's epochs, behind its extensions."""
    watching = Extension(trainer)
    for moment, function in moments.items():
        assert hasattr(Extension, moment)
        setattr(watching, moment, function)
    trainer.extensions.present.append(watching)


def setup(config: Config, kind: str | None = None, prompts: Sequence[Prompt] = (), processes: int = 1,
          rewards: dict[str, Any] | None = None, loaded: Any = None, device: str = "cpu") -> Setup:
    """What a run is made of, for its checks. kind: of the model; without one the configuration's."""
    kind = kind or build.kind(config)
    functions = rewards or {}
    return Setup(config, kind, resolve(config, build.process(kind)), loaded=loaded, device=device, processes=processes,
                 all_processes=processes, trained=functions, measured=functions, split=([*prompts], []))
