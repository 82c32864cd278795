"""Facts of a model card: prompts, rewards, method, versions, hashes, cost, and pictures before and after."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flowgrpo.config.reward_rules import WatchRule
from flowgrpo.config.schema import Config
from flowgrpo.data import sets, splits
from flowgrpo.escaped import code, line, markdown
from flowgrpo.evaluation.pages import sources
from flowgrpo.evaluation.picture_files import weight_files
from flowgrpo.evaluation.report import snapshots
from flowgrpo.nouns import counted
from flowgrpo.rewards.find import ALIASES, BUILT_IN
from flowgrpo.storage import atomic
from flowgrpo.storage.json_files import read_object
from flowgrpo.version import __version__

FOLDER, PAIRS = "images", 4  # of the gallery, in the run's folder
PICTURE = "data:image/webp;base64,"
OF_WEIGHTS = ("model", "checkpoint", "head", "revision", "head_revision")


@dataclass(frozen=True)
class Pair:
    """Samples of a prompt before and after: paths of pictures relative to the run, or texts.

    brought: what the prompt brings, as keys of a prompt file with such paths.
    """

    prompt: str
    before: str
    after: str
    drawn: bool
    brought: tuple[tuple[str, str], ...] = ()


def gallery(run: Path) -> list[Pair]:
    """Write pictures of the first held-out prompts, before and after, to `images/`; return them, or texts."""
    sides = [_cards(run, name) for name in ("before", "after")]
    for old in (*(run / FOLDER).glob("[ab]*-[0-9].webp"), *(run / FOLDER).glob("source-[0-9]-*")):
        old.unlink()
    pairs = []
    for number, (before, after) in enumerate(list(zip(*sides))[:PAIRS]):
        brought = tuple(_brought(run, number))
        if "text" in before:
            pairs.append(Pair(line(before["prompt"]), line(before["text"]), line(after["text"]), False, brought))
        else:
            first, second = (_written(run, f"{name}-{number}.webp", card["picture"])
                             for name, card in (("before", before), ("after", after)))
            pairs.append(Pair(line(before["prompt"]), first, second, True, brought))
    return pairs


def _brought(run: Path, number: int) -> Iterator[tuple[str, str]]:
    """Copy what a held-out prompt brings to `images/`, and yield each key with the path."""
    files = {file: file.stem.split("-")[1:] for file in (run / sources.FOLDER).glob(f"{number:03d}-*")}
    for file, (key, *_) in sorted(files.items(), key=lambda item: (item[1][0], int("".join(item[1][1:]) or 0))):
        ending = file.name.partition("-")[2]
        atomic.write_bytes(run / FOLDER / f"source-{number}-{ending}", file.read_bytes())
        yield key, f"{FOLDER}/source-{number}-{ending}"


def _cards(run: Path, name: str) -> list[dict[str, Any]]:
    file = run / snapshots.FOLDER / f"{name}.json"
    return read_object(file, snapshots.MEND).get("cards", []) if file.is_file() else []


def _written(run: Path, name: str, url: str) -> str:
    atomic.write_bytes(run / FOLDER / name, base64.b64decode(url.removeprefix(PICTURE)))
    return f"{FOLDER}/{name}"


def widget(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Return the hub's gallery of tuned samples, with the source of each that has one."""
    return [({"src": pair.brought[0][1], "prompt": pair.prompt} if pair.brought else {})
            | {"text": pair.prompt, "output": {"url" if pair.drawn else "text": pair.after}} for pair in pairs]


def beside(pairs: Sequence[Pair]) -> str:
    """Return the table of samples before and after."""
    sourced = any(pair.brought for pair in pairs)
    rows = [[markdown(pair.prompt), *[" ".join(f"![{key}]({file})" for key, file in pair.brought)] * sourced,
             *(f"![]({side})" if pair.drawn else markdown(side) for side in (pair.before, pair.after))]
            for pair in pairs]
    return _table([["prompt", *["source"] * sourced, "before", "after"], *rows])


def prompts(config: Config) -> str:
    """Return the table of the prompts' sides: set or file, number of lines, SHA-256; and that a test set was trained
    on."""
    known = sets.SETS.get(config.prompts)
    shared = isinstance(config.held_out, float)
    held_out = known.held_out if known and known.held_out and shared else config.held_out
    sides = {"training": known.train if known else config.prompts,
             "held out": f"{held_out:.0%} of these" if isinstance(held_out, float) else held_out}
    name = config.prompts if known else line(Path(config.prompts).name)
    rows = [[side, code(name) if side == "training" or known else code(Path(str(place)).name), *_counted(Path(place))]
            for side, place in sides.items()]
    if isinstance(held_out, float) and Path(config.prompts).is_file():
        for row, part in zip(rows, splits.resolve(config)):
            row[2] = f"{len(part):,}"
    note = f"**{markdown(sets.caution(config.prompts))}.**\n\n" if config.train_on_test_set else ""
    return note + _table([["split", "set", "number", "SHA-256"], *rows])


def _counted(file: Path) -> list[str]:
    """Return the number of a file's lines, and its hash; dashes for what is no file here."""
    if not file.is_file():
        return ["-" if "of these" not in str(file) else str(file), "-"]
    content = file.read_bytes()
    return [f"{sum(bool(row.strip()) for row in content.splitlines()):,}", f"`{hashlib.sha256(content).hexdigest()}`"]


def rewards(config: Config) -> str:
    """Return the list of rewards with what tells their version."""
    return "\n".join(f"- {code(label)}{', eval-only' * (label not in config.rewards)}: {_version(label, rule)}"
                     for label, rule in (config.trained | config.watched).items())


def _version(label: str, rule: WatchRule) -> str:
    name = rule.use or label
    of = ", ".join(f"{key} {code(str(rule.args[key]))}" for key in OF_WEIGHTS if key in rule.args)
    if name in BUILT_IN or name in ALIASES:
        return f"flowgrpo {__version__}" + (f", {of}" if of else "")
    file = Path(name.rpartition(":")[0])
    if file.suffix == ".py":
        return f"SHA-256 of the file `{sha256(file)}`" if file.is_file() else "in a file of its author"
    return of or "of an installed package, a folder or an address"


def method(config: Config) -> str:
    """Return the method and its changed parts."""
    parts = yaml.safe_dump(config.parts, default_flow_style=True, width=10_000).strip() if config.parts else ""
    return code(config.method) + (f" with {code(parts)}" if parts else "")


def made_with(run: Path) -> str:
    """Return hardware, commit and versions of the run."""
    file = run / snapshots.FOLDER / "machine.json"
    known = read_object(file, snapshots.MEND) if file.is_file() else {"flowgrpo": __version__}
    return ", ".join(f"{key} {markdown(str(value))}" for key, value in known.items() if key not in ("system", "cores"))


def cost(summary: dict[str, Any], run: Path) -> str:
    """Return the training's cost as measured: samples, evaluations, hours of the devices."""
    file = run / snapshots.FOLDER / "machine.json"
    machine = read_object(file, snapshots.MEND) if file.is_file() else {}
    processes = int(machine.get("processes", 1))
    hours = summary["seconds"] * processes / 3600
    drawn = f"{counted(summary['sampled_pictures'], 'sample')}, " if "sampled_pictures" in summary else ""
    on = f" of {processes} x {markdown(machine['device'])}" if "device" in machine else ""
    return (f"{drawn}{summary['denoiser_evaluations']:,} {summary['unit']}, {summary['seconds']:,.0f} s of training "
            f"({hours:.3g} hours{on})")


def hashes(run: Path) -> str:
    """Return the list of weight files with their SHA-256."""
    return "\n".join(f"- {code(file.relative_to(run).as_posix())}: `{sha256(file)}`" for _, file in weight_files(run))


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file."""
    hashed = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            hashed.update(block)
    return hashed.hexdigest()


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]])
