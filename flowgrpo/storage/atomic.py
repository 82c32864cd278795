"""Atomic, durable writes: a file or folder is there whole or not at all, also after a power cut.

Content is written under a temporary name and forced to the disk (fsync). Then it gets its name (rename), and the folder
is forced to the disk too. Loads no torch.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk (fsync). File systems that cannot do so for folders are
    left as they are."""
    folder = path.is_dir()
    try:
        opened = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    except OSError:
        if folder:  # Windows opens no folders
            return
        raise
    try:
        os.fsync(opened)
    except OSError:
        if not folder:  # a lost write: the file must not take its name
            raise
    finally:
        os.close(opened)


def make_folder(folder: Path) -> None:
    """Make a folder and the missing ones above it, durably."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync(path.parent)


def rename(source: Path, target: Path) -> Path:
    """Rename a file or folder within its folder, durably; a file takes the place of an earlier one."""
    source.replace(target)
    sync(target.parent)
    return target


def remove(folder: Path) -> None:
    """Delete a folder of which no part may stay under its name; one that does not exist is no error."""
    if folder.is_dir():
        shutil.rmtree(rename(folder, folder.with_name(f".{folder.name}.old")))
        sync(folder.parent)


@contextlib.contextmanager
def replacing(path: Path, shared: bool = False) -> Iterator[Path]:
    """Context manager: yield a temporary path; the file written there takes the place of `path` at the end.
    After an exception `path` is as before, and the temporary file is deleted. shared: several processes may write
    the same file."""
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp" if shared else f".{path.name}.tmp")
    try:
        yield temporary
        sync(temporary)
        rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_bytes(path: Path, content: bytes, shared: bool = False) -> None:
    with replacing(path, shared) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, text: str, shared: bool = False) -> None:
    write_bytes(path, text.encode("utf-8"), shared)


def append_line(path: Path, line: str) -> None:
    """Append a line, given without its end, and force it to the disk. An earlier line without an end gets one."""
    new = not path.exists()
    with path.open("ab+") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        cut = file.read(1) not in (b"", b"\n")
        file.write(b"\n" * cut + line.encode("utf-8") + b"\n")
        file.flush()
        os.fsync(file.fileno())
    if new:
        sync(path.parent)


@contextlib.contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """Context manager: yield a temporary folder; the files written there get their places in `folder` at the end.
    Other files of `folder` stay. After an exception it is as before."""
    make_folder(folder)
    temporary = folder / ".files.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for path in (*sorted(temporary.rglob("*"), reverse=True), temporary):
            sync(path)
        places = {file: folder / file.relative_to(temporary) for file in sorted(temporary.rglob("*")) if file.is_file()}
        for parent in {place.parent: None for place in places.values()}:
            make_folder(parent)
        for file, place in places.items():
            file.replace(place)
        for parent in {place.parent: None for place in places.values()}:
            sync(parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
