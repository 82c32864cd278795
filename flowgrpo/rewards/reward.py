"""A reward: `reward(batch) -> B scores`, and six facts about it, which are all that the package reads of one.

    score = as_reward(function)(Batch(images, prompts, metadata))

A function, an object or a class of the user becomes a `Reward` by `as_reward`, which reads its facts from the names of
its parameters. A score is a number; None (or NaN, once checked): the reward does not apply; a `Failed`: it should have
answered, and did not.
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from flowgrpo.errors import NotFinite, UserError
from flowgrpo.nouns import quantity
from flowgrpo.rewards.about import MODALITIES, About, Pairing, RewardFunction
from flowgrpo.rewards.failures import Failed
from flowgrpo.user_code import describe_error

if TYPE_CHECKING:
    import torch
    from torch import Tensor

UNKNOWN = About()
# Optional fields of a batch that a reward reads; all but the latents are passed on by name.
LATENTS, BASE, POLICY, MEMORY, EPOCH, FPS = "latents", "base", "policy", "memory", "epoch", "fps"
TRAINING = "training"
PASSED = (BASE, POLICY, MEMORY, EPOCH, FPS, TRAINING)


@dataclass(frozen=True, eq=False)
class Batch:
    """B samples, in whole groups of `group` consecutive ones.

    samples: images [B, 3, H, W] or videos [B, F, 3, H, W] in [0, 1], a list of these without B, B texts, or the clean
    latents [B, ...] for a reward that reads these. base: the base model's samples, or None. latents: a tensor, or None.
    policy: the model that is trained. memory: of the run, JSON-able, that a reward may write into; by rewards' names
    until it is given to one. epoch: in which they are drawn; None outside of one, as for held-out samples.
    fps: frames per second of videos; None where that is not known. training: True for samples that are trained on,
    False for those of an evaluation.
    lost: collects failures that are in no score, such as comparisons without an answer.
    """

    samples: Any
    prompts: list[str]
    metadata: list[dict[str, Any]]
    group: int = 1
    base: Any = None
    latents: Tensor | None = None
    policy: Any = None
    memory: dict[str, Any] | None = None
    epoch: int | None = None
    fps: float | None = None
    training: bool = False
    lost: list[Failed] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.prompts)

    def rows(self, rows: Sequence[int], join: Callable[[list[Any]], Any] | None = None) -> Batch:
        """Some of the samples. join: makes one tensor of a list's, which else stay a list."""
        if join is None and list(rows) == list(range(len(self))):
            return self
        kept: list[Any] = [
            None if held is None else join([held[i] for i in rows]) if join is not None else
            held[list(rows)] if hasattr(held, "shape") else [held[i] for i in rows]
            for held in (self.samples, self.base, self.latents)]
        samples, base, latents = kept
        return replace(self, samples=samples, prompts=[self.prompts[i] for i in rows],
                       metadata=[self.metadata[i] for i in rows], base=base, latents=latents)

    def view_for(self, name: str, reward: Reward) -> Batch:
        """Batch for a reward of that name: with its own memory, and with samples or latents, not both.

        Raises UserError for a reward that reads latents where there are none.
        """
        own = self.memory.setdefault(name, {}) if self.memory is not None and MEMORY in reward.reads else None
        if LATENTS not in reward.reads:
            device = str(getattr(self.samples, "device", "cpu"))
            samples = self.samples if device == "cpu" or reads_on(device, reward) else self.on_host
            return replace(self, samples=samples, latents=None, memory=own)
        if self.latents is None:
            raise UserError(f"reward {name!r} scores latents (scores = 'latents'), but here only decoded samples are "
                            "known: leave it out, and use it by itself in `flowgrpo train`")
        return replace(self, samples=self.latents, latents=None, memory=own)

    def copy(self, tensors: bool) -> Batch:
        """Copy for a reward, which may write into what it is given. tensors: copy those too."""
        def own(held: Any) -> Any:
            if hasattr(held, "clone"):
                return held.clone() if tensors else held
            return None if held is None else list(held)

        return replace(self, samples=own(self.samples), prompts=list(self.prompts),
                       metadata=copy.deepcopy(self.metadata), base=own(self.base))

    def require_finite(self) -> None:
        """Raise NotFinite if a sample, the base's or latents hold NaN or an infinity."""
        for what, held in (("sample", self.samples), ("base's sample", self.base), ("latents", self.latents)):
            require_finite(held, self.prompts, what)

    @cached_property
    def on_host(self) -> Tensor:
        """The samples on the CPU."""
        import torch

        from flowgrpo.device import put_away, wait_for_copies

        host = put_away(self.samples, torch.device("cpu"))
        wait_for_copies(self.samples.device)
        return host

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The samples, and the base's, where they are tensors."""
        return [held for held in (self.samples, self.base) if hasattr(held, "clone")]


class Reward:
    """Reward of a batch: base class.

    judges: what it can be given, "image", "video" or "text". unit: what a score depends on: the sample, its group, or,
    of a judge of pairs, both samples of a pair. reads: optional fields of the batch that it needs (`base`, `latents`,
    `policy`, `memory`, `epoch`, `fps`, `training`), and `metadata.KEY` that it compares with. differentiable: its
    scores are in the samples' graph. parts: rewards, and other objects, that it is made of. about: range, packages and
    licence.
    """

    judges: Sequence[str] = MODALITIES
    unit: Literal["sample", "group", "pair"] = "sample"
    reads: frozenset[str] = frozenset()
    differentiable: bool = False
    parts: Sequence[Reward] = ()
    about: About = UNKNOWN

    @property
    def origin(self) -> Any:
        """Function or object that it was made of."""
        return self

    def facts(self) -> dict[str, Any]:
        return {fact: getattr(self, fact)
                for fact in ("judges", "unit", "reads", "differentiable", "parts", "about")}

    def __call__(self, batch: Batch) -> Any:
        """B scores: a list, a tensor or an array."""
        raise NotImplementedError


class Function(Reward):
    """Reward that is called as (images, prompts[, metadata]).

    The names of further parameters say what it reads: `base`, `policy`, `memory`, `epoch`, `fps`, `training`, and
    `group`, the size of the groups that the samples form. A first parameter `latents` gets the clean latents; (first,
    second, prompts[, metadata]) is a judge of pairs.
    Attributes say the same where names do not: `group`, `base`, `scores = "latents"`, `pairwise`, `differentiable`,
    `about`, `made_of` (what it is made of), `keyed` and `key` (of the metadata, which it compares with).
    """

    def __init__(self, function: RewardFunction, name: str = "") -> None:
        self.function, self.name = function, name
        try:
            self.signature: inspect.Signature | None = inspect.signature(_signature_target(function))
        except (ValueError, TypeError):  # compiled functions may have none
            self.signature = None
        names = [name for name, parameter in (self.signature.parameters if self.signature else {}).items()
                 if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)]

        def says(fact: str, otherwise: Any = None) -> Any:
            value = getattr(function, fact, otherwise)
            return otherwise if isinstance(value, property) else value  # of a class that is not made yet

        self.pairing: Pairing | bool | None = says("pairwise", names[:2] == ["first", "second"]) or None
        self.named_group = "group" in names
        self.unit = "pair" if self.pairing else "group" if says("group", self.named_group) else "sample"
        facts = says("about")
        self.about = facts if isinstance(facts, About) else UNKNOWN
        self.judges = self.about.modality.split("/") if self.about.modality else MODALITIES
        self.differentiable = bool(says("differentiable", False))
        self.parts = [as_reward(part) for part in says("made_of", ())]
        reads = {LATENTS: says("scores", names[0] if names else None) == LATENTS,
                 BASE: says(BASE, BASE in names) is True, POLICY: says("reads_policy", POLICY in names),
                 MEMORY: MEMORY in names, EPOCH: EPOCH in names, FPS: FPS in names, TRAINING: TRAINING in names,
                 f"metadata.{says('key')}": bool(says("keyed", False))}
        self.reads = frozenset(field for field, read in reads.items() if read)

    @property
    def origin(self) -> Any:
        return self.function

    def __call__(self, batch: Batch) -> Any:
        further = {field: getattr(batch, field) for field in self._further}
        given = *(batch.samples if self.unit == "pair" else [batch.samples]), batch.prompts, batch.metadata
        if self.unit == "group" and not self.named_group:  # an attribute says so: the fourth by position
            return self.function(*given, batch.group, **further)
        return self.function(*given[:self._takes(further)], **further)

    @property
    def _further(self) -> list[str]:
        """Fields of a batch that are passed by name."""
        if self.unit == "pair":
            return []
        return [field for field in PASSED if field in self.reads] + ["group"] * self.named_group

    def require_signature(self) -> None:
        """Raise UserError for a function that cannot be called as a reward: an `async def`, or other parameters."""
        if inspect.iscoroutinefunction(_signature_target(self.function)):
            raise UserError(f"reward {self.name!r} is an `async def`: expected a function that returns a number per "
                            "sample; asyncio.run(...) inside it waits for a coroutine")
        if self.unit != "group" or self.named_group:
            self._takes(dict.fromkeys(self._further))

    def _takes(self, further: Mapping[str, Any]) -> int:
        """Number of values that the function takes by position: with metadata, the last, or without."""
        kind, begins, most = ("judge", "(first, second, ", 4) if self.unit == "pair" else ("reward", "(images, ", 3)
        for count in (most, most - 1):
            try:
                if self.signature is not None:
                    self.signature.bind(*range(count), **further)
                return count
            except TypeError:
                continue
        raise UserError(f"{kind} {self.name!r} takes {self.signature}: expected {begins}prompts, metadata) or "
                        f"{begins}prompts)" + "".join(f", and {name}" for name in further))


def _signature_target(function: RewardFunction) -> RewardFunction:
    torch = sys.modules.get("torch")
    return function.forward if torch and isinstance(function, torch.nn.Module) else function


def as_reward(thing: Any, name: str = "") -> Reward:
    """Function or an object as a reward. name: its label, for messages."""
    return thing if isinstance(thing, Reward) else Function(thing, name)


def require_signature(label: str, thing: Any) -> None:
    """Raise UserError for a function that cannot be called as a reward. A class, not made yet, is not looked at."""
    if inspect.isfunction(thing):
        Function(thing, label).require_signature()


def named_parts(name: str, reward: Any) -> Iterator[tuple[str, Reward]]:
    """A reward and all that it is made of, at any depth, with their names: parts are NAME[0], NAME[1]."""
    made = as_reward(reward, name)
    yield name, made
    for place, part in enumerate(made.parts):
        yield from named_parts(f"{name}[{place}]", part)


def inside(reward: Any) -> list[Reward]:
    """A reward and all that it is made of, at any depth."""
    return [part for _, part in named_parts("", reward)]


def modality_of(outputs: object) -> str:
    """Modality of a batch of outputs: images [B,3,H,W], videos [B,F,3,H,W], or texts."""
    by_dimensions: dict[int | None, str] = {4: "image", 5: "video"}
    return by_dimensions.get(getattr(outputs, "ndim", None), "text")


def about(reward: object) -> About:
    """Facts of a reward: all unknown for a plain function without them."""
    return as_reward(reward).about


def sees_base(reward: object) -> bool:
    return BASE in as_reward(reward).reads


def scores_latents(reward: object) -> bool:
    return LATENTS in as_reward(reward).reads


def reads_on(device: str, reward: object) -> bool:
    """True if a reward takes samples that lie on this device, where its weights are: a differentiable one does."""
    made = as_reward(reward)
    return made.differentiable and BASE not in made.reads and str(getattr(made.origin, "device", None)) == device


def is_privileged(reward: object) -> bool:
    """True if a reward, or a part of it, may do more for a request than score it: run code, read files, use a key.

    Built-in rewards say so by the attribute `privileged`; any code from elsewhere may.
    """
    for part in inside(reward):
        thing = part.origin
        module = getattr(thing, "__module__", None) or type(thing).__module__
        if ".py:" in thing if isinstance(thing, str) else \
                not module.startswith("flowgrpo.") or getattr(thing, "privileged", False) is True:
            return True
    return False


def require_for_tokens(rewards: Mapping[str, object]) -> None:
    """Raise UserError for the first reward that compares with the base's sample from the same initial noise, or scores
    latents: a model that writes tokens has neither."""
    for name, reward in rewards.items():
        if sees_base(reward):
            raise UserError(f"reward {name!r} compares with the base's image from the same noise (base = True), and "
                            "this model writes completions: take `base` away")
        if scores_latents(reward):
            raise UserError(f"reward {name!r} scores latents (scores = 'latents'), and this model writes "
                            "completions: take `scores` away")


def require_modality(rewards: Mapping[str, Any], modality: str) -> None:
    """Raise UserError for the first reward known to judge another modality."""
    for name, reward in rewards.items():
        made = as_reward(reward)
        if modality not in made.judges:
            cure = f", or score its frames: {{use: frames, args: {{reward: {name}}}}}" \
                if modality == "video" and "image" in made.judges else ""
            raise UserError(f"reward {name!r} judges {'/'.join(made.judges)}, but what is generated here is "
                            f"{modality}: choose a reward for {modality} (`flowgrpo list rewards` lists them){cure}")


class Wrapped(Reward):
    """Reward around another one, with the same facts."""

    def __init__(self, name: str, reward: Reward) -> None:
        self.name, self.reward = name, reward
        vars(self).update(reward.facts())

    @property
    def origin(self) -> Any:
        return self.reward.origin


class Checked(Wrapped):
    """Reward whose answer is B finite numbers, NaN where it does not apply, or failures: the innermost wrapper.

    A reward's writes into its samples stay its own: it receives a copy, until a call has left the copy as it was. From
    then on it receives the samples, and a write is an error.
    """

    def __init__(self, name: str, reward: Reward) -> None:
        super().__init__(name, reward)
        self._reads_only = False

    def __call__(self, batch: Batch) -> list[float | Failed]:
        """Raises Failed if the reward raises or returns anything else."""
        import torch

        if self.unit == "group" and batch.group < 2:
            raise UserError(f"reward {self.name!r} compares the samples of a group, but here every image is scored "
                            "by itself: choose a reward that scores one image at a time")
        shared = self._reads_only
        on = f"on {len(batch)} sample{'s' * (len(batch) != 1)} (first prompt of the batch: {batch.prompts[0]!r})"
        given = batch.copy(tensors=not shared)
        before = _writes(given)
        try:
            with torch.no_grad():  # here, since it holds only for the thread that enters it
                values = self.reward(given)
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit, or an exception class of the user's
            raise Failed(f"reward {self.name!r} raised {on}: {describe_error(error)}") from error
        if shared and _writes(given) != before:
            raise UserError(f"reward {self.name!r} wrote into the samples that it was given, {on}, and not at first: "
                            "let it copy them before it writes")
        self._reads_only = shared or all(map(torch.equal, batch.tensors, given.tensors))
        return _numbers(self.name, values, batch.prompts)


def require_finite(samples: Any, prompts: Sequence[str], what: str = "sample") -> None:
    """Raise NotFinite for the first of B samples, not texts or a list, with NaN or an infinity. what: its name."""
    if not hasattr(samples, "isfinite") or samples.isfinite().all():
        return
    row = next(row for row, sample in enumerate(samples) if not sample.isfinite().all())
    raise NotFinite(f"the {what} of the prompt {prompts[row][:60]!r} holds NaN or an infinity",
                    "look at the precision (autoencoders overflow in fp16: --precision=bf16, or fp32), at the weights "
                    "of the autoencoder and the denoiser, and at train.lr")


def _writes(batch: Batch) -> list[int]:
    return [held._version for held in batch.tensors if not held.is_inference()]


def _numbers(name: str, values: Any, prompts: Sequence[str]) -> list[float | Failed]:
    """B floats, NaN for None, or failures. Raises Failed if `values` is anything else."""
    count = len(prompts)
    expected = f"expected {count} number{'s' * (count != 1)}, one per sample (first prompt: {prompts[0]!r})"
    shape = getattr(values, "shape", None)
    if shape is not None and len(shape) != 1:
        raise Failed(f"reward {name!r} returned the shape {list(shape)}: {expected}")
    if inspect.iscoroutine(values):
        values.close()  # else Python warns that it was never awaited
        raise Failed(f"reward {name!r} is an `async def`, which returned a coroutine: {expected}")
    if isinstance(values, (str, bytes, dict, set, frozenset)) or not hasattr(values, "__len__"):
        raise Failed(f"reward {name!r} returned {_short(values)}: {expected}")
    if len(values) != count:
        raise Failed(f"reward {name!r} returned {quantity(len(values), 'value')}: {expected}")
    try:
        listed = values.tolist() if hasattr(values, "tolist") else list(values)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise Failed(f"reward {name!r} returned {type(values).__name__} without values: {expected}: "
                     f"{describe_error(error)}") from error
    return [_number(name, value, prompt) for value, prompt in zip(listed, prompts)]


def _number(name: str, value: Any, prompt: str) -> float | Failed:
    import numpy as np

    if isinstance(value, Failed):
        return value
    if value is None or value is np.ma.masked:  # of a list of a masked array's entries
        return math.nan
    try:
        shape = list(getattr(value, "shape", ()))
        number = math.nan if shape or isinstance(value, (str, bytes)) else float(value)
    except Exception:  # of a tensor without values (meta device), or of a class of the user's
        shape, number = [], math.nan
    if shape:
        raise Failed(f"reward {name!r} returned the shape {shape} for one sample, expected a number (prompt: "
                     f"{prompt!r})")
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
