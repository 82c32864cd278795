"""Runs of a folder: their settings, progress, rewards and state, read from their files. Loads no torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowgrpo.config.parse import read_yaml
from flowgrpo.errors import UserError
from flowgrpo.storage.json_files import read_lines, read_object
from flowgrpo.storage.places import CONFIG, CRASH, is_held

MEND = "restore it, or remove it"
HELD_OUT = "held_out/"  # before the names of rewards in metrics.jsonl


@dataclass(frozen=True)
class Run:
    """One run.

    name: of its folder; model, method: of its configuration.
    epochs, total: epochs that are done, and those of the configuration.
    before, after: means of the rewards on held-out prompts; `after` of an unfinished run is its last measurement.
    state: running, finished, stopped (also by a kill), crashed by an error, which crash.txt has, or damaged if a file
        cannot be read.
    changed: time of its last epoch, or of its start, in seconds since 1970.
    """

    name: str
    state: str = "damaged"
    model: str = ""
    method: str = ""
    epochs: int = 0
    total: int | None = None
    before: dict[str, float | None] = field(default_factory=dict)
    after: dict[str, float | None] = field(default_factory=dict)
    changed: float = 0.0


@contextmanager
def require_format(folder: Path) -> Iterator[None]:
    """Context manager: raise UserError for files of a run whose content has another form than a run writes."""
    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
        raise UserError(f"{folder}: a file of the run is damaged ({said[:200]}): {MEND}") from error


def list_runs(folder: Path) -> list[Run]:
    """Runs in a folder, or the run that the folder is, the newest first. Raises UserError if there are none."""
    files = [*folder.glob(CONFIG), *folder.glob(f"*/{CONFIG}")]
    if not files:
        raise UserError(f"no run in {folder}: expected a folder that holds runs, which a recipe names as `output`")
    return sorted((read(file.parent) for file in files), key=lambda run: (-run.changed, run.name))


def read(folder: Path) -> Run:
    """Read the run of a folder, as far as its files can be read."""
    name, files = folder.resolve().name, (folder / CONFIG, folder / "metrics.jsonl")
    changed = max(file.stat().st_mtime for file in files if file.is_file())
    try:
        with require_format(folder):
            return _read_run(folder, name, changed)
    except UserError:
        return Run(name, changed=changed)


def _read_run(folder: Path, name: str, changed: float) -> Run:
    config, lines = read_yaml(folder / CONFIG), read_lines(folder / "metrics.jsonl", "epoch")
    summary = read_object(folder / "summary.json", MEND) if (folder / "summary.json").is_file() else {}
    epochs = lines[-1]["epoch"] if lines else 0
    finished = bool(summary) and summary["epochs"] >= epochs
    held: dict[str, Any] = next((line for line in reversed(lines) if any(key.startswith(HELD_OUT) for key in line)), {})
    before = means_of_base(folder)
    after = {key.removeprefix(HELD_OUT): value for key, value in held.items() if key.startswith(HELD_OUT)}
    if finished:
        before, after = summary["before"], summary["after"]
    total = (config.get("train") or {}).get("epochs")
    numbers = (total, *before.values(), *after.values())
    if not all(value is None or isinstance(value, (int, float)) for value in numbers):
        raise TypeError("rewards or epochs that are no numbers")
    ended = "crashed" if (folder / CRASH).is_file() else "stopped"
    state = "running" if is_held(folder) else "finished" if finished else ended
    return Run(name, state, str(config.get("model", "")), str(config.get("method", "")), epochs, total, before, after,
               changed)


def means_of_base(folder: Path) -> dict[str, float | None]:
    """The base's mean rewards on the prompts of the run's evaluations on the way; empty before they are known."""
    first = next((path for path in (folder / "choosing.json", folder / "before.json") if path.is_file()), None)
    scores = read_object(first, MEND).get("scores", {}) if first else {}
    return {reward: mean(values) for reward, values in scores.items()}


def mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
