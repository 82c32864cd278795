"""Power cuts: the states in which a folder can be found after one, by what a program had forced to the disk.

A `Recorder` wraps the calls of the operating system that write files' names and force files and folders to the disk. At
each of them it notes the folder as the program sees it, and what of it is certain: the content of a file at its last
fsync, and the names in a folder at its own. `build` writes a state that POSIX allows after a cut: what is certain, or
that and a part of the rest.
"""

import os
import random
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CALLS = ("fsync", "replace", "rename", "unlink", "remove", "rmdir", "mkdir")
Names = dict[str, int]  # inodes by name


@dataclass(frozen=True)
class Moment:
    """Folder at a call: its inodes, seen and certain.

    contents: of files by inode; names: of folders by inode. A file that was never forced to the disk is certain to be
    empty at most, a folder to have no names. between: for each folder, its names at the calls since they were certain.
    """

    call: str
    contents: dict[int, bytes]
    names: dict[int, Names]
    certain_contents: dict[int, bytes]
    certain_names: dict[int, Names]
    between: dict[int, list[Names]]


class Recorder:
    """Moments of a folder, one after every call that changes or forces something below it."""

    def __init__(self, folder: Path):
        self.folder, self.moments = folder, list[Moment]()
        self._certain_contents: dict[int, bytes] = {}
        self._certain_names: dict[int, Names] = {}
        self._between: dict[int, list[Names]] = {}
        self._held: dict[tuple[int, int, int], bytes] = {}
        self._one = threading.RLock()  # threads write checkpoints
        self._open: dict[int, int] = {}  # descriptors by inode, so that no other gets the number

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager: record the calls of this process."""
        originals = {name: getattr(os, name) for name in CALLS}
        for name, call in originals.items():
            setattr(os, name, self._wrapped(name, call))
        try:
            yield
        finally:
            for name, call in originals.items():
                setattr(os, name, call)
            for descriptor in self._open.values():
                os.close(descriptor)

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            with self._one:
                result = call(*arguments, **keywords)
                if self.folder.exists():
                    self._note(name, os.fstat(arguments[0]).st_ino if name == "fsync" else None)
                return result

        return wrapped

    def _note(self, call: str, forced: int | None) -> None:
        """Add a moment; forced: the inode that was forced to the disk."""
        contents: dict[int, bytes] = {}
        names: dict[int, Names] = {}
        self._read(self.folder, contents, names)
        if forced in contents:
            self._certain_contents[forced] = contents[forced]
        if forced in names:
            self._certain_names[forced], self._between[forced] = names[forced], []
        for inode, inside in names.items():
            states = self._between.setdefault(inode, [])
            if inside != (states[-1] if states else self._certain_names.get(inode, {})):
                states.append(inside)
        last = self.moments[-1] if self.moments else None
        contents, names = (last.contents | contents, last.names | names) if last else (contents, names)
        self.moments.append(Moment(call, contents, names,
                                   dict(self._certain_contents), dict(self._certain_names),
                                   {inode: list(states) for inode, states in self._between.items()}))

    def _read(self, path: Path, contents: dict[int, bytes], names: dict[int, Names]) -> None:
        inode = path.stat().st_ino
        self._hold(path, inode)
        inside = names[inode] = {}
        for entry in sorted(path.iterdir()):
            with suppress(FileNotFoundError):  # a library of another thread renames its file
                facts = entry.lstat()
                if stat.S_ISDIR(facts.st_mode):
                    self._read(entry, contents, names)
                else:
                    contents[facts.st_ino] = self._content(entry, facts)
                inside[entry.name] = facts.st_ino

    def _hold(self, path: Path, inode: int) -> None:
        if inode not in self._open:
            self._open[inode] = os.open(path, os.O_RDONLY)

    def _content(self, file: Path, facts: os.stat_result) -> bytes:
        self._hold(file, facts.st_ino)
        key = facts.st_ino, facts.st_mtime_ns, facts.st_size
        if key not in self._held:
            self._held[key] = file.read_bytes()
        return self._held[key]


def build(moment: Moment, root: int, target: Path, chance: random.Random | None = None) -> None:
    """Write into `target` the folder of inode `root` as a cut at the moment can leave it.

    Without chance all that is not certain is lost. With it each folder has its names of a random call since they were
    certain, and each file what is certain and a random part of what follows, or of all if it was written anew.
    """
    states = [moment.certain_names.get(root, {})]
    if chance is not None:
        states += moment.between.get(root, [])
    names = states[0] if chance is None else chance.choice(states)
    target.mkdir(parents=True, exist_ok=True)
    for name, inode in names.items():
        if inode in moment.names:
            build(moment, inode, target / name, chance)
            continue
        certain, seen = moment.certain_contents.get(inode, b""), moment.contents[inode]
        if chance is not None and certain != seen:
            begun = certain if seen.startswith(certain) else b""
            certain = begun + seen[len(begun):chance.randint(len(begun), len(seen))]
        (target / name).write_bytes(certain)
