"""Load a function from FILE.py:NAME."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from flowgrpo.errors import UserError, nearest
from flowgrpo.rewards.failures import guarded

_reading: list[Path] = []


def load(name: str) -> Any:
    """Return the function FILE.py:NAME; a class there is instantiated.
    Raises UserError for anything not callable."""
    found = from_file(name)
    if inspect.isclass(found):
        found = guarded(f"{name!r} cannot be made", found)
    if not callable(found):
        raise UserError(f"{name!r} is of type {type(found).__name__}: expected a function")
    return found


def from_file(name: str) -> Any:
    file, _, attribute = name.rpartition(":")
    if not file.endswith(".py") or not attribute:
        raise UserError(f"reward {name!r}: expected path/to/file.py:function")
    path = Path(file).resolve()
    if not path.is_file():
        raise UserError(f"reward {name!r}: no file at {file}")
    module = guarded(f"reward file {file} does not import", _module, path)
    if not hasattr(module, attribute):
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(f"reward file {file} has no {attribute!r}{nearest(attribute, own)}")
    return getattr(module, attribute)


def _module(path: Path) -> Any:
    """Import a file by its path, once. It can import modules in its folder."""
    name = "flowgrpo_reward" + re.sub(r"\W", "_", str(path))
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    _reading.append(path)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        _reading.pop()
    return module


def reading() -> list[Path]:
    """Return the reward files being imported now, each imported by the one before it."""
    return _reading
