"""Command lines of the documents, run in-process: each once, in a folder of its own with the files that it names."""

import contextlib
import io
import itertools
import os
import re
import shlex
import shutil
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin

from flowgrpo.cli import main
from flowgrpo.cli.train import UNTRAINED
from tests.helpers.commands import leaf

ROOT = Path(__file__).parents[2]
VISITED = {"vote": "", "--live": "", "serve": "/health"}  # what is asked of servers
ADDRESS = re.compile(r"http://[\w.]+:\d+\S*")


@dataclass(frozen=True)
class Made:
    """What one run of a line wrote and said."""

    folder: Path
    code: int
    out: str
    err: str
    status: int  # of a server's answer


def words(line: str) -> list[str]:
    """Return the arguments of a shown line: what stands behind `flowgrpo`, without the comment and the shell's `&`."""
    arguments = shlex.split(re.split(r"(?:^|-m |\s)flowgrpo ", line, maxsplit=1)[1], comments=True)
    return arguments[:-1] if arguments[-1:] == ["&"] else arguments


def value(arguments: list[str], option: str) -> str | None:
    """Return the last value of an option, given as `--option value` or `--option=value`."""
    joined = " ".join(arguments)
    found = re.findall(rf"(?<!\S){option}[ =](\S+)", joined)
    return found[-1] if found else None


def named(arguments: list[str]) -> Iterator[str]:
    """Yield what may be a file's name within arguments, without outputs."""
    for before, argument in zip(["", *arguments], arguments):
        if before != "--output":
            yield from (name.removeprefix("./") for name in re.split(r"[,=+]|:(?!\w+/)", argument) if name)


class Typed:
    """A folder in which the lines are typed, one after the other.

    files: the maker of each file that a line may name: a function of the folder, or a line with the paths that are
    copied from its folder, the first under the file's name. stand_ins: words for placeholders, of a line or of all.
    options: what is appended to lines that match a pattern.
    """

    def __init__(self, place: Path, files: dict[str, Callable[[Path], object] | tuple[str, ...]],
                 stand_ins: dict[str, dict[str, str | None]], options: dict[str, str]) -> None:
        self.place, self.files, self.stand_ins, self.options = place, files, stand_ins, options
        self.made: dict[str, Made] = {}
        self.count = itertools.count()

    def arguments(self, line: str) -> list[str]:
        """Return the line's words with stand-ins, and the options that shorten it."""
        typed = words(line)
        shown = " ".join(typed)
        replaced: dict[str, str | None] = {}
        for pattern, stand_ins in self.stand_ins.items():
            replaced |= stand_ins if re.match(pattern, shown) else {}
        typed = [word for word in (replaced.get(word, word) for word in typed) if word is not None]
        return typed + [option for pattern, more in self.options.items() if re.match(pattern, " ".join(typed))
                        for option in shlex.split(more)]

    def run(self, line: str) -> Made:
        """Run a line, unless the same words ran before."""
        arguments = self.arguments(line)
        key = shlex.join(arguments)
        if key not in self.made:
            folder = self.place / f"{next(self.count):02}"
            folder.mkdir()
            for name in dict.fromkeys(filter(None, map(self._file, named(leaf(arguments)[1])))):
                self._put(name, folder)
            self.made[key] = typed_in(folder, arguments)
        return self.made[key]

    def _file(self, name: str) -> str | None:
        """Return the longest key of `files` that is the path or one of its folders."""
        return max((key for key in self.files if name == key or name.startswith(f"{key}/")), key=len, default=None)

    def _put(self, name: str, folder: Path) -> None:
        """Put a file where a line will look for it."""
        maker = self.files[name]
        if callable(maker):
            maker(folder)
            return
        line, *paths = maker
        made = self.run(line)
        assert made.code in (0, UNTRAINED), f"{line}\n{made.out}{made.err}"
        for source, target in zip(paths, [name, *paths[1:]]):
            (folder / target).parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (made.folder / source).is_dir() else shutil.copyfile
            copy(made.folder / source, folder / target)


class Visited(io.StringIO):
    """Output of a server: the address that it says is asked once, then the server ends as by Ctrl-C."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path, self.status = path, 0
        self.visitor: threading.Thread | None = None

    def write(self, text: str) -> int:
        address = ADDRESS.search(text)
        if address and self.visitor is None:
            self.visitor = threading.Thread(target=self._visit, args=[urljoin(address[0], self.path)])
            self.visitor.start()
        return super().write(text)

    def _visit(self, address: str) -> None:
        try:
            with urllib.request.urlopen(address, timeout=60) as answer:
                self.status = answer.status
        finally:
            os.kill(os.getpid(), signal.SIGINT)


def typed_in(folder: Path, arguments: list[str]) -> Made:
    """Run a command in a folder; a server answers one request."""
    before, err = Path.cwd(), io.StringIO()
    [path] = [VISITED[word] for word in arguments if word in VISITED] or [None]
    out = io.StringIO() if path is None else Visited(path)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of xdist ignore the signal
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
    finally:
        os.chdir(before)
        signal.signal(signal.SIGINT, handler)
    return Made(folder, code, out.getvalue(), err.getvalue(), getattr(out, "status", 0))
