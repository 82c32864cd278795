"""Code that a command executes, and addresses and secrets that leave: those of its command line and of your recipes.

What a run's folder names needs --trust-run. What a recipe names that is not yours, and each address that gets a secret
from any recipe, is asked for once at a terminal, and remembered with the recipe's content; without one it needs
--trust.
"""

import functools
import ipaddress
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flowgrpo.errors import UserError
from flowgrpo.escaped import line

FLAG = "--trust-run"
RECIPE_FLAG = "--trust"
KEYS = {"key_env": "the key in", "token_file": "the token of the file"}  # arguments of rewards that send a secret
# Keys of folders that a run writes, and of files that a reward reads and may write.
WRITTEN = {"output": "writes to", "cache": "writes to", "file": "uses the file"}
# Rewards that execute code of prompts' metadata or of completions.
_EXECUTING = ("code_run",)


def code_file(name: str) -> Path | None:
    """File that FILE.py:NAME executes, resolved; None for a name of another form. `user_code.from_file`, which loads
    all code of users, asks this function too."""
    file, _, attribute = name.rpartition(":")
    return _resolved(file) if file.endswith(".py") and attribute else None


def _resolved(path: str) -> Path:
    try:
        return Path(path).resolve()
    except (OSError, RuntimeError, ValueError):  # a circle of links, a NUL
        return Path(path)


def code_files(text: str) -> list[Path]:
    """Files that a text executes as the name of a reward, of a part, or of methods joined by +."""
    return [file for name in dict.fromkeys([text, *text.split("+")]) if (file := code_file(name))]


@dataclass(frozen=True)
class Limit:
    """Permissions of a command that opens runs, or of a recipe that is not trusted.

    named: texts of the command line. allowed: texts of the recipe that may execute code and be reached. recipe: its
    file; None: opened runs. own: its code and addresses are yours, so that secrets alone are asked for. digest: of its
    content. fix: the end of errors. said: printed notes.
    """

    named: frozenset[str]
    allowed: frozenset[str] = frozenset()
    recipe: Path | None = None
    own: bool = False
    digest: bytes = b""
    fix: str = ""
    said: set[str] = field(default_factory=set)

    @functools.cached_property
    def files(self) -> frozenset[Path]:
        return frozenset(file for text in self.named | self.allowed for file in code_files(text))

    def names(self, url: str) -> bool:
        """True for an address of the command line."""
        return _has(self.named, url)

    def mark(self, does: str, files: Sequence[Path] = ()) -> str:
        """Hash of what this recipe does, with the content of code files: another content asks again."""
        found = blake2b(self.digest, digest_size=20)
        for part in (does.encode("utf-8", "surrogatepass"), *(file.read_bytes() for file in files if file.is_file())):
            found.update(len(part).to_bytes(8, "big") + part)
        return found.hexdigest()


@dataclass(frozen=True)
class Reach:
    """An effect of a recipe's value beyond training here: in words, `does`.

    path: the value's dotted key. text: the value. secrets: (a secret in words, its name, an address).
    """

    path: str
    text: str
    does: str
    secrets: tuple[tuple[str, str, str], ...] = ()


# Module's variables, since rewards also run in threads, to which a context variable is not passed on.
_limits: list[Limit] | None = None  # None: outside of a command
_answers: set[str] = set()  # marks that were agreed to in this process


@contextmanager
def _limited(limits: list[Limit]) -> Iterator[None]:
    global _limits
    before, _limits = _limits, limits
    try:
        yield
    finally:
        _limits = before


def command() -> AbstractContextManager[None]:
    """Context manager: until its end recipes that are not trusted are limited."""
    return _limited([])


def opening(*named: object) -> AbstractContextManager[None]:
    """Context manager: until its end only files that the command line names are imported. named: values of the command
    line, also nested."""
    return _limited([*_of_recipes(), Limit(
        frozenset(texts(named)), fix=f"name it on the command line, or add {FLAG} if you trust it")])


def _opened() -> Limit | None:
    return next((limit for limit in _limits or () if limit.recipe is None), None)


def _of_recipes() -> list[Limit]:
    return [limit for limit in _limits or () if limit.recipe]


def _foreign() -> Limit | None:
    """Limit of a recipe that is not yours; None without one."""
    return next((limit for limit in _of_recipes() if not limit.own), None)


def require(file: Path, what: str, program: str | None = None) -> None:
    """Raise UserError for code that an opened run, or a recipe that is not yours, alone names. file: its resolved path.
    what: for the error. program: in place of a file of Python, as it is given."""
    def named(limit: Limit) -> bool:
        return file in limit.files or program in limit.named | limit.allowed

    if (opened := _opened()) and not named(opened):
        raise UserError(f"{what}: a run's folder names this code, and opening a run executes none: {opened.fix}")
    if (foreign := _foreign()) and not any(map(named, _of_recipes())):
        raise UserError(f"{what}: {foreign.recipe}, which is not yours, executes this code: {foreign.fix}")


def require_address(who: str, urls: Sequence[str], secret: str | None = None, name: str = "") -> None:
    """Raise UserError for addresses to which nothing, or no secret, may go. urls: none of this machine. secret: what
    goes there, in words. name: of its variable or file."""
    opened, foreign, recipes = _opened(), _foreign(), _of_recipes()
    for url in urls:
        if opened and not opened.names(url):
            raise UserError(f"{who}: a run's folder names {_shown(url)}: {opened.fix}")
        senders = [limit for limit in recipes if _has(limit.allowed, url)]
        if foreign and not foreign.names(url) and not senders:
            raise UserError(f"{who}: {foreign.recipe}, which is not yours, sends samples to {_shown(url)}: "
                            f"{foreign.fix}")
        for limit in (senders or recipes) if secret else ():
            if not limit.names(url) and name not in limit.named:
                _agree(limit, [_sending(f"{secret}", url)])


def reaches_out(*named: object) -> bool:
    """True if an opened run's reward executes code, sends samples to an address, or uses a secret, or a file elsewhere,
    that the command line does not name. named: the reward's name and arguments."""
    return (opened := _opened()) is not None and any(
        reach.text not in opened.named and not any(file in opened.files for file in code_files(reach.text))
        for reach in _reaches(named, {"file": WRITTEN["file"]}))


def remote_code(allowed: bool, run: Path) -> bool:
    """A run's `trust_remote_code`: False while a run is opened, which is printed."""
    if allowed and _opened():
        log(f"{run}: trust_remote_code is not taken from a run's folder; {FLAG} takes it")
        return False
    return allowed


def require_own(recipe: Path, files: Sequence[Path], values: Mapping[str, Any], foreign: str | None,
                given: Iterable[str], named: object, flag: str | None, written: Iterable[str] = ()) -> None:
    """Raise UserError if a recipe does what you do not agree to, and limit it to what it does until the command ends.

    recipe: one of its `files`, the first that is not yours. foreign: where that lies, in words; None: it is yours, and
    needs agreement to send a secret to an address. Any other needs it to execute code, to send anything to an address,
    to read a key or a token, and to write outside of the working folder. values: its keys, with `given`, the dotted
    ones of the command line, whose values are `named`, in place. flag: the command's option that allows it. written:
    further dotted keys of folders that a run writes.
    """
    keys, folders = tuple(given), WRITTEN | dict.fromkeys(written, "writes to")
    found = [reach for reach in _reaches(values, folders)
             if not any(reach.path == key or reach.path.startswith(f"{key}.") for key in keys)]
    ours = frozenset(texts(named))
    limit = Limit(ours | {os.path.expanduser(text) for text in ours}, frozenset(texts(values)), recipe,
                  foreign is None, blake2b(b"".join(blake2b(file.read_bytes()).digest() for file in files)).digest(),
                  f"{flag} (from Python: trust=True) lets it" if flag else "copy it below the working folder to let it")
    sent = [_sending(secret, url) for reach in found for secret, name, text in reach.secrets if name not in limit.named
            for url in sorted(_addresses(text)) if not limit.names(url) and not _is_here(url)]
    if foreign is None and _asks():  # else as soon as a key is read: not every command sends it
        _agree(limit, sent)
    elif foreign is not None and found:
        _agree(limit, found + sent, f"it is {foreign}, so it may not: read it, and {limit.fix}", found)
    if foreign is not None:
        limit = replace(limit, allowed=frozenset(reach.text for reach in found))
    if _limits is not None:
        _limits.append(limit)


def _sending(secret: str, url: str) -> Reach:
    return Reach("", "", f"sends {secret} to {_shown(_spelled(url))}")


def _agree(limit: Limit, reaches: Sequence[Reach], why: str = "", told: Sequence[Reach] = ()) -> None:
    """Ask at a terminal, once for a recipe's content, whether it may do all this. Raises UserError if it may not, or
    without a terminal. why, told: the end of that error, and what it has of `reaches`."""
    known = _answers | {each.split(" ", 1)[0] for each in _remembered()}
    marks = {mark: reach for reach in reaches if (mark := limit.mark(reach.does, code_files(reach.text))) not in known}
    if not marks:
        return
    does = f"{limit.recipe} {'; '.join(reach.does for reach in [*(told or marks.values())][:3])}"
    if not _asks():
        raise UserError(f"{does}: {why}" if why else f"{does}, and no terminal is here to ask whether you agree: run "
                        f"it once at one, or {RECIPE_FLAG} (from Python: trust=True) lets it")
    print(f"{line(str(limit.recipe))}:", *(f"  {line(reach.does)}" for reach in marks.values()),
          "Do you let it, as long as it stays as it is? [y/N] ", sep="\n", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UserError(f"{does}: you did not let it")
    _answers.update(marks)
    _remember([f"{mark} {line(f'{limit.recipe} {reach.does}')}\n" for mark, reach in marks.items()])


def _asks() -> bool:
    """True where a question can be answered: at a terminal, by a run's only process."""
    alone = os.environ.get("RANK", "0") == "0" and os.environ.get("WORLD_SIZE", "1") == "1"
    return alone and all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))


def _file() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")) / "flowgrpo" / "agreed.txt"


def _remembered() -> list[str]:
    """Lines of that file; none of one that another user owns or may write."""
    try:
        with _file().open(encoding="utf-8") as file:
            facts = os.fstat(file.fileno())
            foreign = hasattr(os, "getuid") and (facts.st_uid != os.getuid() or facts.st_mode & 0o022)
            return [] if foreign else [*file]
    except (OSError, UnicodeDecodeError):
        return []


def _remember(lines: list[str]) -> None:
    try:
        _file().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=_file().parent)  # for its owner alone
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.writelines(_remembered() + lines)
        os.replace(name, _file())
    except OSError as error:
        print(f"the answer is not remembered: {_file()}: {error.strerror}", file=sys.stderr)


def _reaches(value: object, folders: Mapping[str, str], path: str = "", key: object = "", near: tuple[str, ...] = ()
             ) -> Iterator[Reach]:
    """Yield what a recipe's value makes a run do beyond training here. key: the last one of `path`. folders: what a run
    does with keys of folders and files. near: addresses around it."""
    text = str(value)
    if key == "trust_remote_code" and value:
        yield Reach(path, text, "runs code that comes with a model (trust_remote_code)")
    elif key == "python" and value:
        yield Reach(path, text, f"runs the program {text} ({path})")
    elif key == "options" and any({*each} & {*"./\\"} for each in texts(value)):  # other packages unpickle weights
        yield Reach(path, text, f"gives another package {text} ({path})")
    elif key in KEYS and value is not None:
        secret = f"{KEYS[str(key)]} {os.path.expanduser(text)}"
        yield Reach(path, text, f"sends {KEYS[str(key)]} {text} ({path})", tuple((secret, text, url) for url in near))
    elif isinstance(value, (Mapping, list, tuple, set, frozenset)):
        pairs = [*value.items()] if isinstance(value, Mapping) else [*enumerate(value)]
        near = *near, *(each for pair in pairs for each in pair if isinstance(each, str) and _is_address(each))
        for name, inner in pairs:
            here = f"{path}.{name}".lstrip(".")
            yield from _of_text(str(name), here)
            yield from _reaches(inner, folders, here, name, near)
    elif isinstance(value, str):
        yield from _of_text(value, path)
        does = folders.get(path, folders.get(str(key)))
        if does and not _resolved(os.path.expanduser(value)).is_relative_to(Path.cwd()):
            yield Reach(path, value, f"{does} {value} ({path})")


def _of_text(text: str, path: str) -> Iterator[Reach]:
    if code_files(text) or text in _EXECUTING:
        yield Reach(path, text, f"executes code ({text})")
    elif _is_address(text):
        yield Reach(path, text, f"sends samples to {text}")


def _is_address(text: str) -> bool:
    """True for a text that a client of HTTP may read as an address: some leave control characters out."""
    return "://" in "".join(character for character in text if character > " ")


def _addresses(text: str) -> set[str]:
    return {_spelled(url) for url in text.split(",")}


def _has(some: Iterable[str], url: str) -> bool:
    return _spelled(url) in {address for text in some for address in _addresses(text)}


def _spelled(url: str) -> str:
    return url.strip().rstrip("/").removesuffix("/chat/completions")


def _shown(url: str) -> str:
    return url.partition("?")[0]


def _is_here(url: str) -> bool:
    try:
        return is_here(urlsplit(url).hostname or "")
    except ValueError:
        return False


def is_here(host: str) -> bool:
    """True for a name or an address of this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def log(text: str) -> None:
    """Print a note to stderr, once per command."""
    if (opened := _opened()) and text not in opened.said:
        opened.said.add(text)
        print(text, file=sys.stderr)


def texts(value: object) -> Iterator[str]:
    """Yield the texts in a value, also in its lists, keys and fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from texts(pair)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for inner in value:
            yield from texts(inner)
    elif hasattr(value, "model_dump"):
        yield from texts(value.model_dump())
