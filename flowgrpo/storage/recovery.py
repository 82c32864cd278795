"""Newest whole checkpoint of a run; damaged ones are set aside, never deleted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path

from flowgrpo.storage import atomic, checkpoint
from flowgrpo.storage.places import checkpoints, foreign


def newest_whole(folder: Path, say: Callable[[str], None], required: Mapping[str, type | tuple[type, ...]]
                 ) -> Path | None:
    """Return the checkpoint of the highest epoch that is whole; None without one.

    A damaged one is renamed to NAME.damaged and reported in a line, as are folders of other names and a checkpoint
    without checksums. folder: of all checkpoints. required: types of the values that a checkpoint has to hold.
    """
    checkpoint.undo_replacing(folder)
    for name in foreign(folder):
        say(f"ignored {folder / name}: it is no checkpoint, expected a name such as epoch-00042")
    for path in reversed(list(checkpoints(folder).values())):
        damage = checkpoint.damage(path, required)
        if damage is None:
            if line := checkpoint.unchecked(path):
                say(line)
            return path
        aside = set_aside(path)
        earlier = checkpoint.latest(folder)
        then = f"{earlier.name} is tried" if earlier else "there is no earlier one"
        say(f"the checkpoint {path} is damaged ({damage}): it is now {aside.name}, and {then}")
    return None


def set_aside(path: Path) -> Path:
    """Rename a damaged file or folder to NAME.damaged, or to NAME.damaged.2 and so on; return the new path."""
    names = (path.with_name(f"{path.name}.damaged{'' if number == 1 else f'.{number}'}") for number in count(1))
    return atomic.rename(path, next(name for name in names if not name.exists()))
