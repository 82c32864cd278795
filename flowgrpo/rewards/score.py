"""Call rewards and check their scores: one column of numbers per reward, NaN for none."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from flowgrpo.distributed.signals import promptly
from flowgrpo.errors import UserError
from flowgrpo.rewards.about import Reward, modality_of, require_modality, scores_latents
from flowgrpo.rewards.beside_base import sees_base
from flowgrpo.rewards.compose import Composed
from flowgrpo.rewards.failures import Failed, Tally, numbers, settled, within
from flowgrpo.rewards.pairwise import sees_groups, whole
from flowgrpo.user_code import guarded

if TYPE_CHECKING:
    from torch import Tensor

# Pictures or videos in a tensor, or in a list of tensors of several sizes, or texts.
Shown: TypeAlias = "Tensor | Sequence[Tensor] | Sequence[str]"


def score(
    rewards: Mapping[str, Reward | Composed], outputs: Shown | None, prompts: Sequence[str],
    metadata: Sequence[dict[str, Any]], group: int = 1, tally: Tally | None = None, base: Tensor | None = None,
    latents: Tensor | None = None,
) -> Tensor:
    """Score a batch of B outputs with each of R rewards -> [B, R] float32. Transforms are not applied here.

    NaN where a reward returned None, and where its rule does not apply to the prompt. Also NaN where it had no answer
    (`Failed` in place of a number), or failed and its rule skips failures.

    rewards: functions, or `Composed` with their rules.
    outputs: pictures [B, 3, H, W] in [0, 1], videos [B, F, 3, H, W], a list of these without B, of which those of one
    size are scored together, or a list of texts; for a `Completion` the metadata holds the number of tokens as
    `completion_tokens`. None: nothing was decoded.
    group: size of the consecutive groups that the B outputs form, for rewards that compare them (pairwise.py); 1: every
    output is scored alone.
    tally: counts the failures.
    base: the base model's outputs, for rewards that compare with them (beside_base.py); None: there are none.
    latents: clean latents [B, ...] of the outputs, for rewards that score these; None: there are none.

    A reward may return a list, a tensor or an array of B numbers.
    Raises UserError, with the reward's name and a prompt, if it raises, takes too long, returns another shape or number
    of values, anything but numbers, NaN or an infinity; and if it judges another modality.
    """
    import torch

    table = [numbers(column) for column in columns(rewards, outputs, prompts, metadata, group, tally, base,
                                                  latents)]
    return torch.tensor(table, dtype=torch.float32).reshape(len(table), len(prompts)).T.contiguous()


def columns(
    rewards: Mapping[str, Reward | Composed], outputs: Shown | None, prompts: Sequence[str],
    metadata: Sequence[dict[str, Any]], group: int = 1, tally: Tally | None = None, base: Tensor | None = None,
    latents: Tensor | None = None,
) -> list[list[float | Failed]]:
    """Return R columns of B numbers as `score` does, but with failures in place.

    NaN only means that a reward does not apply.
    """
    return promptly(lambda: _columns(rewards, outputs, prompts, metadata, group, tally, base, latents))


def _columns(
    rewards: Mapping[str, Reward | Composed], outputs: Shown | None, prompts: Sequence[str],
    metadata: Sequence[dict[str, Any]], group: int, tally: Tally | None, base: Tensor | None, latents: Tensor | None,
) -> list[list[float | Failed]]:
    from flowgrpo.types import Completion

    assert all(len(given) == len(prompts) for given in (outputs, metadata, latents) if given is not None)
    tally = Tally() if tally is None else tally
    batch = Batch(outputs, list(prompts), list(metadata), base, latents)
    if isinstance(outputs, list) and outputs and hasattr(outputs[0], "shape"):
        return _by_size(rewards, batch, group, tally)
    if outputs is not None:
        require_modality(rewards, modality_of(outputs))
    if isinstance(outputs, list):
        metadata = [entry | {"completion_tokens": text.tokens} if isinstance(text, Completion) else entry
                    for text, entry in zip(outputs, metadata)]
        batch = replace(batch, metadata=list(metadata))
    return [_column(name, reward if isinstance(reward, Composed) else Composed(reward), batch, group, tally)
            for name, reward in rewards.items()]


@dataclass(frozen=True, eq=False)
class Batch:
    """B samples.

    outputs: a tensor or a list. prompts, metadata: a list each. base: the base model's outputs, or None. latents: a
    tensor, or None.
    """

    outputs: Any
    prompts: list[str]
    metadata: list[dict[str, Any]]
    base: Any = None
    latents: Tensor | None = None

    def seen(self, name: str, reward: Composed) -> Batch:
        """Return what a reward is given: the outputs, or in their place the latents.

        Raises UserError for a reward that scores latents where there are none.
        """
        if not scores_latents(reward):
            return replace(self, latents=None)
        if self.latents is None:
            raise UserError(f"reward {name!r} scores latents (scores = 'latents'), but here only decoded samples are "
                            "known: leave it out, and use it by itself in `flowgrpo train`")
        return replace(self, outputs=self.latents, latents=None)

    def of_size(self, rows: Sequence[int]) -> Batch:
        """Return samples of one size, their outputs in one tensor."""
        import torch

        return Batch(torch.stack([self.outputs[i] for i in rows]), [self.prompts[i] for i in rows],
                     [self.metadata[i] for i in rows],
                     None if self.base is None else torch.stack([self.base[i] for i in rows]),
                     None if self.latents is None else torch.stack([self.latents[i] for i in rows]))

    def copy(self) -> Batch:
        """Return a copy for a reward, which may write into what it is given."""
        outputs = self.outputs.clone() if hasattr(self.outputs, "clone") else list(self.outputs)
        return Batch(outputs, list(self.prompts), copy.deepcopy(self.metadata),
                     None if self.base is None else self.base.clone())

    def rows(self, rows: Sequence[int]) -> Batch:
        """Return some of the samples."""
        if list(rows) == list(range(len(self.prompts))):
            return self
        outputs = self.outputs[list(rows)] if hasattr(self.outputs, "shape") else [self.outputs[i] for i in rows]
        return Batch(outputs, [self.prompts[i] for i in rows], [self.metadata[i] for i in rows],
                     None if self.base is None else self.base[list(rows)])


def _by_size(rewards: Mapping[str, Reward | Composed], batch: Batch, group: int, tally: Tally
             ) -> list[list[float | Failed]]:
    """Return `columns` of pictures of several sizes: those of one size are scored together, in the order of the batch.

    Raises UserError for a group whose samples differ in size.
    """
    alike: dict[tuple[int, ...], list[int]] = {}
    for row, output in enumerate(batch.outputs):
        alike.setdefault(tuple(output.shape), []).append(row)
    if any(batch.outputs[row].shape != batch.outputs[row - row % group].shape for row in range(len(batch.outputs))):
        raise UserError(f"the samples of a group of {group} differ in size ({', '.join(map(str, alike))}): expected "
                        "one size in each group")
    values: list[list[Any]] = [[None] * len(batch.prompts) for _ in rewards]
    for rows in alike.values():
        some = batch.of_size(rows)
        for column, scores in zip(values, columns(rewards, some.outputs, some.prompts, some.metadata, group, tally,
                                                  some.base, some.latents)):
            for row, value in zip(rows, scores):
                column[row] = value
    return values


def _column(name: str, reward: Composed, batch: Batch, group: int, tally: Tally) -> list[float | Failed]:
    """Return B scores of one reward; it is called only for samples that its rule applies to and that are not cached."""
    batch = batch.seen(name, reward)
    rows = [i for i, entry in enumerate(batch.metadata) if reward.rule.applies(entry)]
    bases = batch.base if sees_base(reward) and batch.base is not None else [None] * len(batch.prompts)
    keys = {i: reward.kept.key(batch.outputs[i], batch.prompts[i], batch.metadata[i], bases[i])
            for i in (rows if reward.kept else ())}
    known = reward.kept.read(list(keys.values())) if keys else {}
    values: dict[int, float | Failed] = {i: known[key] for i, key in keys.items() if key in known}
    if missing := [i for i in rows if i not in values]:
        lost: list[Failed] = []  # comparisons without an answer by a pairwise judge
        function = whole(name, reward.function, group, lost)
        compared = sees_base(reward)
        reward.come()
        results = settled(lambda those: _ask(name, function, batch.rows(those), reward.rule.timeout, compared), missing,
                          reward.rule.on_error, group if sees_groups(reward.function) else 1)
        values |= zip(missing, results)
        for error in [value for value in results if isinstance(value, Failed)] + lost:
            tally.add(name, error)
    if keys:
        fresh = ((keys[i], values[i]) for i in missing)
        reward.kept.write({key: value for key, value in fresh if not isinstance(value, Failed)})
    return [values.get(i, math.nan) for i in range(len(batch.prompts))]


def _ask(name: str, function: Reward, batch: Batch, timeout: float | None, compared: bool
         ) -> list[float | Failed]:
    """Call a reward once; return a number per sample, NaN for None, and a Failed where the reward returned one.
    Raises Failed if it does not return such values in time."""
    import torch

    on = f"on {len(batch.prompts)} samples (first prompt of the batch: {batch.prompts[0]!r})"
    inputs = batch.copy()
    further = {"base": inputs.base} if compared else {}
    arguments = (inputs.outputs, inputs.prompts, inputs.metadata)[:arity(name, function, **further)]

    def call() -> Any:
        with torch.no_grad():  # here, since it holds only for the thread that enters it
            return guarded(f"reward {name!r} raised {on}", function, *arguments, error_type=Failed,
                           **further)

    return _numbers(name, within(timeout, f"reward {name!r} hangs {on}", call), batch.prompts)


def arity(name: str, function: Reward, **further: Any) -> int:
    """Return 3 if a reward takes (images, prompts, metadata), 2 if it takes (images, prompts); `further` go by name."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # compiled functions may have none
        return 3
    for count in (3, 2):
        try:
            signature.bind(*range(count), **further)
            return count
        except TypeError:
            continue
    raise UserError(f"reward {name!r} takes {signature}: expected (images, prompts, metadata) or (images, prompts)"
                    + "".join(f", and {name}" for name in further))


def _numbers(name: str, values: Any, prompts: Sequence[str]) -> list[float | Failed]:
    """Return B floats, NaN for None, or failures.
    Raises Failed if `values` is anything else."""
    count = len(prompts)
    expected = f"expected {count} numbers, one per sample (first prompt: {prompts[0]!r})"
    shape = getattr(values, "shape", None)
    if shape is not None and len(shape) != 1:
        raise Failed(f"reward {name!r} returned the shape {list(shape)}: {expected}")
    if inspect.iscoroutine(values):
        values.close()  # else Python warns that it was never awaited
        raise Failed(f"reward {name!r} is an `async def`, which returned a coroutine: {expected}")
    if isinstance(values, (str, bytes, dict, set, frozenset)) or not hasattr(values, "__len__"):
        raise Failed(f"reward {name!r} returned {_short(values)}: {expected}")
    if len(values) != count:
        raise Failed(f"reward {name!r} returned {len(values)} values: {expected}")
    values = guarded(f"reward {name!r} returned {type(values).__name__} without values: {expected}",
                     lambda: values.tolist() if hasattr(values, "tolist") else list(values), error_type=Failed)
    return [_number(name, value, prompt) for value, prompt in zip(values, prompts)]


def _number(name: str, value: Any, prompt: str) -> float | Failed:
    if value is None or isinstance(value, Failed):
        return math.nan if value is None else value
    if getattr(value, "shape", ()) != ():
        raise Failed(f"reward {name!r} returned the shape {list(value.shape)} for one sample, expected a number "
                     f"(prompt: {prompt!r})")
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last of a tensor without values (meta device)
        number = math.nan
    if not abs(number) <= 3.4e38:  # float32 is infinite beyond it
        raise Failed(f"reward {name!r} returned {_short(value)}, expected a finite number, or None where it does "
                     f"not apply (prompt: {prompt!r})")
    return number


def _short(value: object) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a number of thousands of digits, or an object whose repr fails
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
