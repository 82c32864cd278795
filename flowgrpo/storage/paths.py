"""Check that output paths are writable before work starts; set the mode of written files."""

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from flowgrpo.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Of files that one may expect in place of a folder.
ENDINGS = {f".{ending}" for ending in (
    "apng avif bmp gif heic jpeg jpg png svg tif tiff webp avi mkv mov mp4 webm mp3 wav bat bin ckpt csv doc exe gguf "
    "gz htm html ipynb js json jsonl log md npy npz onnx parquet pdf pkl ps psd pt pth py safetensors sh tar tex toml "
    "tsv txt xml xls xlsx yaml yml zip").split()}
IDLE = ("settings.json", "prompts.jsonl")  # of an evaluation that has made nothing yet
BROKEN = (errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.EROFS, errno.EBADMSG)  # of a disk or its server


def require_folder(path: str | Path, other: str = "") -> None:
    """Raise UserError if no file can be written below the folder `path`, or if its name is that of a file.
    The folder need not exist, and is not left behind. other: what may be named besides, for the error."""
    if (ending := Path(path).suffix.lower()) in ENDINGS and not Path(path).is_dir():
        raise UserError(f"{path}: got the name of a {ending} file, expected that of a folder{other}")
    _try(Path(path), Path(path))


def require_file(path: str | Path) -> None:
    """Raise UserError if the file `path` cannot be written; it is not changed, and its folders are not left behind."""
    _try(Path(path), Path(path).parent)


@contextlib.contextmanager
def undone(*places: Path) -> Iterator[None]:
    """Context manager around what fills files and folders: after an error the new ones are removed, unless one of them
    has more than the IDLE files, so that a corrected command finds nothing of a rejected one."""
    new = [place for place in places if not place.exists()]
    made = [parent for place in new for parent in place.parents if not parent.exists()]
    try:
        yield
    except BaseException:
        if all(file.name in IDLE for place in new for file in place.rglob("*") if file.is_file()):
            for place in new:
                shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
            for parent in sorted(made, reverse=True):
                with contextlib.suppress(OSError):
                    parent.rmdir()
        raise


def require_room(folder: Path, needed: int, what: str,
                 way: str = "make room, lower train.keep, or name another output") -> None:
    """Raise UserError if the disk of `folder`, which need not exist, has less than `needed` bytes. way: the fix."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise UserError(f"{folder} has room for {_size(free)}, but {what} take {_size(needed)}: {way}")


def _size(count: int) -> str:
    power = min(max(count.bit_length() - 1, 0) // 10, 3)
    return f"{count / 1024**power:,.{0 if power < 3 else 1}f} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"


def _try(path: Path, folder: Path) -> None:
    created: list[Path] = []
    try:
        created = [parent for parent in (folder, *folder.parents) if not parent.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        if path != folder and path.exists():
            path.open("ab").close()
    except OSError as error:
        kind = "folder" if path == folder else "file"
        raise UserError(f"{path} cannot be written ({error.strerror}): expected a {kind} that can, name another one"
                        ) from None
    finally:
        for parent in created:
            with contextlib.suppress(OSError):
                parent.rmdir()


def refusal(error: Exception) -> str | None:
    """The message for an error by which the system refused a file or had no room for it; None for other errors."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename2 or error.filename)}: {error.strerror}"  # the second: of a renaming
    match = re.search(r"\(os error (\d+)\)", str(error))  # the wording of Rust libraries such as safetensors
    number = getattr(error, "errno", None) or (int(match[1]) if match else None)
    if number in BROKEN:
        return f"a file cannot be read or written ({os.strerror(number)}): look at the disk, or the server that has it"
    if number not in FULL:
        return None
    return (f"a file cannot be written whole ({os.strerror(number)}): make room for it; `train --resume` goes on "
            "from the last checkpoint, if there is one")


def readable(place: Path) -> None:
    """Set the default mode of new files on safetensors files, which are written for their owner alone.
    place: a file, or a folder, whose files are changed recursively."""
    status = Path("/proc/self/status")
    if status.is_file() and (match := re.search(r"^Umask:\s*([0-7]+)$", status.read_text(), re.MULTILINE)):
        mask = int(match[1], 8)
    else:  # the system does not report it: set it for a moment, in which other threads' files would get this mode
        mask = os.umask(0o077)
        os.umask(mask)
    for file in (place, *place.rglob("*.safetensors")):
        if file.is_file():
            file.chmod(0o666 & ~mask)
