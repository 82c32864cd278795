"""Call rewards and check their scores: one column of numbers per reward, NaN for none."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import RewardFunction
from flowgrpo.rewards.compose import Composed
from flowgrpo.rewards.failures import Failed, Tally
from flowgrpo.rewards.reward import Batch, Reward, about, modality_of, require_modality

if TYPE_CHECKING:
    from torch import Tensor

# Images or videos in a tensor, or in a list of tensors of several sizes, or texts.
Shown: TypeAlias = "Tensor | Sequence[Tensor] | Sequence[str]"
FRAMES, SIDE = 5, 32  # of the clip on which a function is tried
OPENED = "completion_opened"  # metadata key


def score(
    rewards: Mapping[str, RewardFunction | Reward], outputs: Shown | None, prompts: Sequence[str],
    metadata: Sequence[dict[str, Any]], group: int = 1, tally: Tally | None = None, base: Tensor | None = None,
    latents: Tensor | None = None, policy: Any = None, memory: dict[str, Any] | None = None, epoch: int | None = None,
    fps: float | None = None, training: bool = False,
) -> Tensor:
    """Score a batch of B outputs with each of R rewards -> [B, R] float32. Transforms are not applied here.

    NaN where a reward returned None, and where its rule does not apply to the prompt. Also NaN where it had no answer
    (`Failed` in place of a number), or failed and its rule skips failures.

    rewards: functions, or `Composed` with their rules.
    outputs: images [B, 3, H, W] in [0, 1], videos [B, F, 3, H, W], a list of these without B, of which those of one
    size are scored together, or a list of texts; for a `Completion` the metadata holds the number of tokens as
    `completion_tokens`, and the tag that its prompt ends with as `completion_opened` where the prompt's text does not
    say so, as under a chat template. None: nothing was decoded.
    group: size of the consecutive groups that the B outputs form, for rewards that compare them (pairwise.py); 1: every
    output is scored alone.
    tally: counts the failures.
    base: the base model's outputs, for rewards that compare with them; None: there are none.
    latents: clean latents [B, ...] of the outputs, for rewards that score these; None: there are none.
    policy, memory, epoch, fps, training: of the run, for rewards that read them; see `Batch`.

    A reward may return a list, a tensor or an array of B numbers.
    Raises UserError, with the reward's name and a prompt, if it raises, takes too long, returns another shape or number
    of values, anything but numbers, NaN or an infinity; and if it judges another modality.
    """
    import torch

    table = [[torch.nan if isinstance(value, Failed) else value for value in column]
             for column in columns(rewards, outputs, prompts, metadata, group, tally, base=base, latents=latents,
                                   policy=policy, memory=memory, epoch=epoch, fps=fps, training=training)]
    return torch.tensor(table, dtype=torch.float32).reshape(len(table), len(prompts)).T.contiguous()


def columns(rewards: Mapping[str, RewardFunction | Reward], outputs: Shown | None, prompts: Sequence[str],
            metadata: Sequence[dict[str, Any]], group: int = 1, tally: Tally | None = None, **further: Any
            ) -> list[list[float | Failed]]:
    """R columns of B numbers as `score` does, but with failures in place: NaN only means that a reward does not apply.

    further: as in `score`.
    """
    batch = Batch(outputs, list(prompts), list(metadata), group, **further)
    assert all(len(given) == len(prompts) for given in (outputs, metadata, batch.latents) if given is not None)
    return of_batch(rewards, batch, tally)


def of_batch(rewards: Mapping[str, RewardFunction | Reward], batch: Batch, tally: Tally | None = None
             ) -> list[list[float | Failed]]:
    if isinstance(batch.samples, list) and batch.samples:
        if hasattr(batch.samples[0], "shape"):
            return by_size(batch, lambda alike: of_batch(rewards, alike, tally))
        batch = _with_facts(batch)
    batch.require_finite()
    made: dict[str, Reward] = {}  # each under its rule, by the label of this call
    for name, reward in rewards.items():
        composed = reward if isinstance(reward, Composed) else Composed(reward, name=name)
        named = composed if composed.name == name else replace(composed, name=name)
        made[name] = named.checked if named.plain else named
    if batch.samples is not None:
        require_modality(made, modality_of(batch.samples))
    table = []
    for name, reward in made.items():
        lost: list[Failed] = []
        table.append(values := reward(replace(batch.view_for(name, reward), lost=lost)))
        for error in (*values, *lost):
            if tally is not None and isinstance(error, Failed):
                tally.add(name, error)
    return table


def by_size(batch: Batch, columns: Callable[[Batch], list[list[float | Failed]]]) -> list[list[float | Failed]]:
    """`columns` of images of several sizes: those of one size are scored together, in the order of the batch.
    Raises UserError for a group whose samples differ in size."""
    import torch

    alike: dict[tuple[int, ...], list[int]] = {}
    for row, output in enumerate(batch.samples):
        alike.setdefault(tuple(output.shape), []).append(row)
    if any(output.shape != batch.samples[row - row % batch.group].shape for row, output in enumerate(batch.samples)):
        raise UserError(f"the samples of a group of {batch.group} differ in size ({', '.join(map(str, alike))}): "
                        "expected one size in each group")
    scored: dict[int, tuple[float | Failed, ...]] = {}
    for rows in alike.values():
        scored |= zip(rows, zip(*columns(batch.rows(rows, torch.stack))))
    return [list(column) for column in zip(*(scored.get(row, ()) for row in range(len(batch))))]


def _with_facts(batch: Batch) -> Batch:
    """Batch of completions, whose metadata holds what a text of a reward server or of a file does not."""
    from flowgrpo.types import Completion, opening_tag

    texts, entries = [], []
    for text, prompt, entry in zip(batch.samples, batch.prompts, batch.metadata):
        tag = opening_tag(prompt)
        if isinstance(text, Completion):
            facts = {"completion_tokens": text.tokens} if text.tokens is not None else {}
            entry = entry | facts | ({OPENED: text.opened} if text.opened != tag else {})
        elif opened := entry.get(OPENED, tag):
            text = Completion(text, None, opened=str(opened))
        texts.append(text)
        entries.append(entry)
    return replace(batch, samples=texts, metadata=entries)


def require_clips(rewards: Mapping[str, Composed], prompt: str, metadata: dict[str, Any]) -> None:
    """Raise UserError for a function that fails on a clip [1, F, 3, H, W] and scores an image. Functions that state
    their modality are not called, nor are objects. prompt, metadata: of a sample."""
    for name, reward in rewards.items():
        if not inspect.isfunction(reward.function) or about(reward.function).modality is not None:
            continue
        given = [prompt], [metadata]
        failed = _failure(reward, (1, FRAMES, 3, SIDE, SIDE), *given)
        if failed is not None and _failure(reward, (1, 3, SIDE, SIDE), *given) is None:
            used = reward.rule.use or name
            short = used.rpartition(":")[2]  # without its file
            raise UserError(f"reward {name!r} judges images, but what is generated here is video ({failed}): score "
                            f'its frames, reward: {{{short}: {{use: frames, args: {{reward: "{used}"}}}}}}')


def _failure(reward: Composed, shape: tuple[int, ...], prompts: Sequence[str], metadata: list[dict[str, Any]]
             ) -> str | None:
    """Why a reward does not score a grey sample of this shape; None if it does."""
    import torch

    try:
        score({"it": Composed(reward.function)}, torch.full(shape, 0.5), prompts, copy.deepcopy(metadata))
    except UserError as error:
        return str(error).removeprefix("reward 'it' ")
    return None
