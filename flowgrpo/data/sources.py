"""Sources of prompts, decoded in full before a run: a damaged one is found while it costs nothing.

What was found is remembered by path, size and time of the last change, in this process and in a file beside the runs.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from flowgrpo.data.images import frames_of, read_image
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.nouns import quantity

FILE = ".sources.json"  # in the folder of the runs
MANY = 32  # files from which on a bar is shown, and what was found is written
OPAQUE = ("control_image", "mask_image")  # where transparency has no certain meaning

Place = tuple[str, str, int | None]  # path, key of the prompt, frames of a clip
_named: dict[str, str] = {}  # by path: the place of a prompt that names it
_known: dict[str, str | None] = {}  # by `_state`: why a file cannot be read, None for a good one


def _state(place: Place) -> str:
    """Key of a verdict: path, time, size and kind of a file. Of a folder: newest time and sum of sizes."""
    path = Path(place[0])
    try:
        files = [path, *path.iterdir()] if path.is_dir() else [path]
        facts: list[Any] = [max(file.stat().st_mtime_ns for file in files), sum(file.stat().st_size for file in files)]
    except OSError:
        facts = []
    return json.dumps([str(path.resolve()), *facts, place[1] in OPAQUE, place[1] == "video" and (place[2] or 0)])


def _verdict(place: Place) -> str | None:
    """Why a file cannot be read; None for one that was decoded in full, of a clip so many frames."""
    path, key, frames = place
    try:
        if key != "video":
            read_image(path, opaque=key in OPAQUE)
            return None
        count = 0
        for count, _ in enumerate(frames_of(Path(path)), 1):
            if count == frames:
                break
        if count < (frames or 1):
            return f"{path} has {quantity(count, 'frame')} that can be read, expected {frames}"
    except UserError as error:
        return str(error)
    return None


def places(prompt: Prompt, frames: int | None = None) -> list[Place]:
    """Files of a prompt. frames: of a clip that are read; None: all."""
    _named.update((path, prompt.inputs.place) for _, path in prompt.inputs.paths())
    return [(path, key, frames) for key, path in prompt.inputs.paths()]


def fault(prompt: Prompt, frames: int | None = None) -> UserError | None:
    """Error of a prompt's first file that cannot be read as it is now; a file is decoded once."""
    for place in places(prompt, frames):
        state = _state(place)
        if state not in _known:
            _known[state] = _verdict(place)
        if why := _known[state]:
            return prompt.inputs.error(place[1], why)
    return None


def count_lost(prompts: Iterable[Prompt]) -> int:
    bad = {json.loads(state)[0] for state, why in _known.items() if why is not None}
    return sum(any(str(Path(path).resolve()) in bad for _, path in prompt.inputs.paths()) for prompt in prompts)


def place_of(path: str) -> str:
    """Place of a prompt that names a file, as the begin of a message; empty if it is not known."""
    return f"{_named[path]}: " if path in _named else ""


def forget(path: str) -> None:
    """Forget what was found of a file that could be read before, and cannot now."""
    begin = json.dumps([str(Path(path).resolve())])[:-1]
    for state in [state for state in _known if state.startswith(begin)]:
        del _known[state]


def decode(prompts: Iterable[Prompt], frames: int | None = None, folder: Path | None = None, shown: bool = True
           ) -> list[tuple[Prompt, UserError]]:
    """Decode all files of prompts in parallel; return the prompts with one that cannot be read, and their errors.
    folder: of the runs, which keeps what was found. shown: with a bar."""
    prompts = list(prompts)
    file = None if folder is None else folder / FILE
    if file is not None and file.is_file():
        with contextlib.suppress(OSError, ValueError):
            _known.update({state: None for state in json.loads(file.read_text(encoding="utf-8"))})
    new = {state: place for prompt in prompts for place in places(prompt, frames)
           if (state := _state(place)) not in _known}
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        verdicts = pool.map(_verdict, new.values())
        bar = tqdm(verdicts, total=len(new), desc="decoding sources", unit="file", leave=False, file=sys.stderr,
                   disable=not shown or len(new) < MANY)
        _known.update(zip(new, bar))
    if file is not None and shown and len(new) >= MANY:
        good = sorted(state for state, why in _known.items() if why is None)
        with contextlib.suppress(OSError):  # it saves time alone
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_name(f"{FILE}.{os.getpid()}")  # another run may write the same file
            part.write_text(json.dumps(good), encoding="utf-8")
            part.replace(file)
    return [(prompt, error) for prompt in prompts if (error := fault(prompt, frames)) is not None]


def require(prompts: Sequence[Prompt], frames: int | None = None, folder: Path | None = None, shown: bool = True
            ) -> None:
    """Raise UserError for prompts with a file that cannot be read, naming the first and counting all."""
    if wrong := decode(prompts, frames, folder, shown):
        more = f" (and {len(wrong) - 1} more of {quantity(len(prompts), 'prompt')})" if len(wrong) > 1 else ""
        raise UserError(f"{wrong[0][1]}{more}")


def stand_ins(batch: Sequence[Prompt], lost: Sequence[bool], prompts: Sequence[Prompt], frames: int | None = None
              ) -> list[Prompt]:
    """Batch with the next prompt that is sound in the place of each lost one. prompts: all of training, in order.
    Raises UserError where none is sound."""
    order = {prompt.key: place for place, prompt in enumerate(prompts)}
    taken = {prompt.key for prompt, gone in zip(batch, lost) if not gone}
    kept = []
    for prompt, gone in zip(batch, lost):
        if gone:
            begin = order.get(prompt.key, 0)
            following = [*prompts[begin:], *prompts[:begin]]
            sound = [other for other in following if other.key != prompt.key and fault(other, frames) is None]
            if not sound:
                raise UserError(f"{fault(prompt, frames)}; no other prompt's files can be read: restore them, and "
                                "--resume")
            prompt = next((other for other in sound if other.key not in taken), sound[0])
            taken.add(prompt.key)
        kept.append(prompt)
    return kept
