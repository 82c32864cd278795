"""Code of users: objects of FILE.py:NAME, and calls of which any error becomes one line that names the place to fix."""

import ast
import functools
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from hashlib import blake2b
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from flowgrpo import trust
from flowgrpo.errors import UserError, nearest

T = TypeVar("T")

_reading: list[Path] = []
_sources: dict[str, tuple[Path, bytes]] = {}  # of an imported module: its file, and what it had in it


def load(name: str) -> Callable[..., Any]:
    """Function FILE.py:NAME of a reward; a class there is instantiated. Raises UserError for anything not callable."""
    thing = from_file(name, "reward")
    if inspect.isclass(thing):
        thing = call_user_code(f"{name!r} cannot be made", thing)
    if not callable(thing):
        raise UserError(f"{name!r} is of type {type(thing).__name__}: expected a function")
    return thing


def from_file(name: str, what: str, further: Callable[[Path], Mapping[str, Any]] = lambda path: {}) -> Any:
    """Object NAME of FILE.py, imported once.

    what: its kind, for errors. further: objects of a file by other names than those at its top level.

    Raises UserError if there is no such file or name, the file does not import, or an opened run alone names it.
    """
    path = trust.code_file(name)
    if path is None:
        raise UserError(f"{what} {name!r}: expected path/to/file.py:name")
    file, _, attribute = name.rpartition(":")
    trust.require(path, f"{what} {name!r}")
    if not path.is_file():
        raise UserError(f"{what} {name!r}: no file at {file}; it was looked for as {path}")
    module = call_user_code(f"{what} file {file} does not import", _module, path)
    if hasattr(module, attribute):
        return getattr(module, attribute)
    others = further(path)
    if attribute not in others:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(f"{what} file {file} has no {attribute!r}{nearest(attribute, [*names, *others])}")
    return others[attribute]


def _module(path: Path) -> ModuleType:
    """Import a file by its path, once. It can import modules in its folder."""
    name = "flowgrpo_user_" + blake2b(str(path).encode(), digest_size=8).hexdigest()
    if name in _sources:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    source = path.read_bytes()
    _reading.append(path)
    _sources[name] = path, source
    try:
        exec(compile(source, path, "exec"), vars(module))  # a file that was edited within a second has old bytecode
    except BaseException:
        del sys.modules[name], _sources[name]
        raise
    finally:
        _reading.pop()
    return module


def forget_changed() -> None:
    """Let files that changed be imported again, at the start of a run: a notebook edits its reward between two."""
    for name, (path, source) in [*_sources.items()]:
        if path not in _reading and not (path.is_file() and path.read_bytes() == source):
            del _sources[name]


def definitions(path: Path) -> str:
    """Hash of what a Python file defines: without comments, calls at its top level and what it does as a script."""
    tree = ast.parse(path.read_bytes())
    tree.body = [node for node in tree.body if not isinstance(node, ast.Expr) and not (
        isinstance(node, ast.If) and "__name__" in ast.unparse(node.test))]
    return blake2b(ast.unparse(tree).encode(), digest_size=8).hexdigest()


def require_read() -> None:
    """Raise UserError for a run that a file begins while it is imported."""
    if _reading:
        raise UserError(f"{_reading[-1]} calls align while it is read for a reward: put that call below "
                        "if __name__ == '__main__':")


def group_entry_points(group: str) -> dict[str, EntryPoint]:
    """Entry points of a group that installed packages declare, by name; imports none of them."""
    return {point.name: point for point in _read_entry_points(group, tuple(sys.path))}


@functools.cache
def _read_entry_points(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """A group's entry points, read once for each `sys.path`: a reading opens a file of every package."""
    return tuple(entry_points(group=group))


def call_user_code(what: str, call: Callable[..., T], /, *arguments: Any, error_type: type[UserError] = UserError,
                   **keywords: Any) -> T:
    """Call third-party code; raise any of its errors as a UserError that begins with `what`."""
    try:
        return call(*arguments, **keywords)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, or an exception class of the user's
        raise error_type(f"{what}: {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """Error of third-party code in one line, with the place to mend it; its class alone if its text cannot be made."""
    kind = type(error).__name__
    try:
        text = " ".join(f"{kind}: {error}".split())
    except KeyboardInterrupt:
        raise
    except BaseException:  # as SystemExit
        text = f"{kind}, of which str() fails"
    # The place to fix it is the deepest line of the traceback outside installed packages.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_FOREIGN)]
    if not frames or isinstance(error, SyntaxError):  # a SyntaxError states its place itself
        return text
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"


# Files of ours that call users' code.
_OURS = tuple(str(Path(__file__).parent / name) for name in ("user_code.py", "rewards/failures.py", "rewards/find.py",
                                                             "rewards/gradient.py", "rewards/reward.py",
                                                             "rewards/compose.py", "rewards/score.py"))
_FOREIGN = ("<frozen", *_OURS, *{sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})
