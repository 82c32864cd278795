"""Rewards: how they are found by name, and how what they return is checked.

A reward is a plain function or object called as `reward(images, prompts, metadata) -> B floats` (`videos` or
`completions` likewise; `metadata` may be left out of its signature). `None` in place of a float says that the reward
does not apply to that sample. A name is one of

- a name given by `@flowgrpo.reward("name")`,
- a built-in reward,
- `path/to/file.py:function`,
- an entry point in the group `flowgrpo.rewards`.

A class is made without arguments once, when the reward is found; its object is the reward.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowgrpo.config import nearest
from flowgrpo.errors import UserError

if TYPE_CHECKING:
    import torch

GROUP = "flowgrpo.rewards"
BUILT_IN = {
    "scene": "flowgrpo.rewards.scene:scene",
    "scene_graded": "flowgrpo.rewards.scene:scene_graded",
}
_registered: dict[str, Any] = {}


def reward(name: str) -> Callable[[Any], Any]:
    """Register a function, an object or a class as the reward `name`; a later one of that name takes its place."""
    if name in BUILT_IN:
        raise UserError(f"the reward name {name!r} is taken by a built-in reward: choose another")

    def register(thing: Any) -> Any:
        _registered[name] = thing
        return thing

    return register


def names() -> list[str]:
    """Every name that `find` knows, without those of files."""
    return sorted({*_registered, *BUILT_IN, *_entry_points()})


def source(name: str) -> str:
    """Where the reward of that name comes from, for a table."""
    if name in _registered:
        return "registered"
    return "built in" if name in BUILT_IN else f"package {_entry_points()[name].dist.name}"


def find(name: str) -> Callable[..., Any]:
    """The reward of that name, ready to be called.

    Raises UserError for an unknown name (with the nearest), for a file that is missing, does not import or lacks the
    function, and for what cannot be called.
    """
    found = locate(name)
    if inspect.isclass(found):
        found = _guarded(f"reward {name!r} cannot be made", found)
    if not callable(found):
        raise UserError(f"reward {name!r} is of type {type(found).__name__}: expected a function of "
                        f"(images, prompts, metadata)")
    return found


def locate(name: str) -> Any:
    """What stands behind a name, a class not yet made into an object: `find` without loading a model."""
    if name in _registered:
        return _registered[name]
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(_guarded(f"reward {name!r} does not import", importlib.import_module, module), attribute)
    if ".py" in name:
        return _from_file(name)
    if name in _entry_points():
        return _guarded(f"reward {name!r} does not import", _entry_points()[name].load)
    raise UserError(f"unknown reward {name!r}{nearest(name, names())} (or path/to/file.py:function)")


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _from_file(name: str) -> Any:
    file, _, attribute = name.rpartition(":")
    if not file.endswith(".py") or not attribute:
        raise UserError(f"reward {name!r}: expected path/to/file.py:function")
    path = Path(file).resolve()
    if not path.is_file():
        raise UserError(f"reward {name!r}: no file at {file}")
    module = _guarded(f"reward file {file} does not import", _module, path)
    if not hasattr(module, attribute):
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(f"reward file {file} has no {attribute!r}{nearest(attribute, own)}")
    return getattr(module, attribute)


def _module(path: Path) -> Any:
    """Import a file by its path, once; modules beside it can be imported by it."""
    name = "flowgrpo_reward" + re.sub(r"\W", "_", str(path))
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _guarded(what: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """Call the code of others; what it raises becomes a UserError that begins with `what`."""
    try:
        return call(*arguments)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{what}: {told}{_place(error)}") from error


_FOREIGN = ("<frozen", __file__, *{sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})


def _place(error: BaseException) -> str:
    """The deepest line of a traceback that belongs to no installed package: where the mistake can be mended."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_FOREIGN)]
    if not frames or isinstance(error, SyntaxError):  # a SyntaxError tells its place itself
        return ""
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"


def score(
    rewards: dict[str, Callable[..., Any]], outputs: Any, prompts: Sequence[str], metadata: Sequence[dict[str, Any]],
) -> torch.Tensor:
    """Score a batch of B outputs with each of R rewards -> [B, R] float32; NaN where a reward answered None.

    `outputs` is what the rewards take: pictures [B, 3, H, W] in [0, 1], videos, or a list of texts. A reward may return
    a list, a tensor or an array of B numbers. Raises UserError, with the reward's name and a prompt, where a reward
    raises, returns another shape or number of values, something that is no number, NaN or an infinity.
    """
    import torch

    assert len(outputs) == len(prompts) == len(metadata), (len(outputs), len(prompts), len(metadata))
    columns = []
    for name, function in rewards.items():
        with torch.no_grad():
            values = _call(name, function, outputs, list(prompts), list(metadata))
        columns.append(torch.tensor(_numbers(name, values, prompts), dtype=torch.float32))
    return torch.stack(columns, dim=1)


def _call(name: str, function: Callable[..., Any], outputs: Any, prompts: list[str], metadata: list[dict]) -> Any:
    arguments = (outputs, prompts, metadata)[:_arity(name, function)]
    first = f"first prompt of the batch: {prompts[0]!r}"
    return _guarded(f"reward {name!r} raised on {len(prompts)} samples ({first})", function, *arguments)


def _arity(name: str, function: Callable[..., Any]) -> int:
    """3 where the reward takes (images, prompts, metadata), 2 where it takes (images, prompts)."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # compiled functions may have none
        return 3
    for count in (3, 2):
        try:
            signature.bind(*range(count))
            return count
        except TypeError:
            continue
    raise UserError(f"reward {name!r} takes {signature}: expected (images, prompts, metadata) or (images, prompts)")


def _numbers(name: str, values: Any, prompts: Sequence[str]) -> list[float]:
    """B floats, NaN for None; UserError where `values` is anything else."""
    count = len(prompts)
    expected = f"expected {count} numbers, one per sample (first prompt: {prompts[0]!r})"
    shape = getattr(values, "shape", None)
    if shape is not None and len(shape) != 1:
        raise UserError(f"reward {name!r} returned the shape {list(shape)}: {expected}")
    if values is None or isinstance(values, (str, bytes, dict)) or not hasattr(values, "__len__"):
        raise UserError(f"reward {name!r} returned {_short(values)}: {expected}")
    if len(values) != count:
        raise UserError(f"reward {name!r} returned {len(values)} values: {expected}")
    values = values.tolist() if hasattr(values, "tolist") else values
    return [_number(name, value, prompt) for value, prompt in zip(values, prompts)]


def _number(name: str, value: Any, prompt: str) -> float:
    if value is None:
        return math.nan
    if getattr(value, "shape", ()) != ():
        raise UserError(f"reward {name!r} returned the shape {list(value.shape)} for one sample, expected a number "
                        f"(prompt: {prompt!r})")
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) <= 3.4e38:  # beyond it, float32 has only infinity
        raise UserError(f"reward {name!r} returned {_short(value)}, expected a finite number, or None where it does "
                        f"not apply (prompt: {prompt!r})")
    return number


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
