"""Results of the GPU hour: the manifest, what binds a result to the code that made it, and what is wrong with results.

A result names its commit, the digest of the files that were run, and the digest of its job. The digest of files is that
of their contents, so that files changed after the commit, or another commit's, are found out.
"""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
MANIFEST = Path(__file__).with_name("gpu_hour.yaml")
FOLDERS = ("flowgrpo", "configs", "scripts")  # whose files a result depends on
REPETITIONS = 3
# Fields of each measure, with the least value that each can have.
MEASURES: dict[str, dict[str, float]] = {
    "first_ratio": {"found": 0, "limit": 0, "rescored": 0},
    "peak": {"measured_gib": 0, "predicted_gib": 0},
    "memory": {"measured_gib": 0, "seconds": 0},
    "epoch": {"seconds": 0, "bare_seconds": 0},
    "one_pass": {"ratios": 0}}


@dataclass(frozen=True)
class Job:
    """Job of the manifest: a recipe of configs/, its overrides, its limit in seconds, and what it measures.

    model: of a language model, the configuration that is filled with random weights.
    """

    name: str
    recipe: str
    seconds: float
    measures: tuple[str, ...]
    set: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] | None = None

    @property
    def digest(self) -> str:
        """Return the SHA-256 of what the job is."""
        values = {**vars(self), "measures": list(self.measures)}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def manifest(file: Path = MANIFEST) -> list[Job]:
    """Return the jobs. Raises ValueError for a manifest that cannot be run as it stands."""
    raw = yaml.safe_load(file.read_text(encoding="utf-8"))
    jobs = [Job(**each | {"measures": tuple(each["measures"])}) for each in raw["jobs"]]
    if twice := [name for name, count in Counter(job.name for job in jobs).items() if count > 1]:
        raise ValueError(f"{file.name}: two jobs are called {twice[0]}: give each a name of its own")
    for job in jobs:
        unknown = sorted({*job.measures} - {*MEASURES})
        if unknown or not job.measures:
            raise ValueError(f"{file.name}: {job.name} measures {unknown or 'nothing'}: expected some of "
                             f"{', '.join(MEASURES)}")
    if (needed := sum(job.seconds for job in jobs)) > 60 * raw["minutes"]:
        raise ValueError(f"{file.name}: the jobs may take {needed:.0f} s, more than {raw['minutes']} minutes")
    return jobs


# --- what was run ----------------------------------------------------------------------------------------------------

def sources(root: Path = ROOT) -> str:
    """Return the SHA-256 of the files that are here: of each its path and git's name of its content."""
    files = (file for folder in FOLDERS for file in (root / folder).rglob("*")
             if (file.is_symlink() or file.is_file()) and "__pycache__" not in file.parts)
    return _digest({file.relative_to(root).as_posix(): _blob(file) for file in files})


def sources_of(commit: str, root: Path = ROOT) -> str:
    """Return `sources` of a commit."""
    listed = _git(root, "ls-tree", "-r", "-z", commit, "--", *FOLDERS).split("\0")
    entries = (entry.partition("\t")[::2] for entry in listed if entry)
    return _digest({path: about.split()[2] for about, path in entries})


def commit_of(name: str = "HEAD", root: Path = ROOT) -> str:
    """Return the 40 digits of a commit."""
    return _git(root, "rev-parse", "--verify", f"{name}^{{commit}}").strip()


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


def _blob(file: Path) -> str:
    content = str(file.readlink()).encode() if file.is_symlink() else file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _digest(files: Mapping[str, str]) -> str:
    return hashlib.sha256("\n".join(f"{path} {files[path]}" for path in sorted(files)).encode()).hexdigest()


# --- what is wrong ---------------------------------------------------------------------------------------------------

def complaints(jobs: list[Job], results: Mapping[str, Any], commit: str, files: str) -> Iterator[str]:
    """Yield what is wrong with results, one line each; nothing for results that are whole.

    commit, files: of the code that they have to be of (`commit_of`, `sources_of`).
    """
    if results.get("commit") != commit:
        yield f"results are of commit {results.get('commit')}, expected {commit}: run the jobs at that commit"
    if results.get("sources") != files:
        yield "the files that were run are not those of the commit: run the jobs from a clean checkout"
    if results.get("device_type") != "cuda":
        yield f"results are of {results.get('device', 'no device')}, expected a GPU"
    found = [entry.get("job") for entry in results.get("jobs", [])]
    for name, count in Counter(found).items():
        if name not in {job.name for job in jobs}:
            yield f"{name}: the manifest has no such job"
        elif count > 1:
            yield f"{name}: it has {count} results, expected one"
    entries = {entry.get("job"): entry for entry in results.get("jobs", [])}
    for job in jobs:
        if job.name not in entries:
            yield f"{job.name}: left out"
        else:
            yield from (f"{job.name}: {line}" for line in _of_job(job, entries[job.name], results))


def _of_job(job: Job, entry: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[str]:
    if entry.get("digest") != job.digest:
        yield "its result is of another job of that name: run it again"
    for key in ("commit", "sources", "device"):
        if entry.get(key) != results.get(key):
            yield f"its {key} is {entry.get(key)}, and that of the results {results.get(key)}"
    if entry.get("error"):
        yield f"failed: {entry['error']}"
        return
    measured = entry.get("measures", {})
    for name in job.measures:
        if name not in measured:
            yield f"{name} was not measured"
        else:
            yield from (f"{name}: {line}" for line in _of_measure(name, measured[name]))
    for name in sorted({*measured} - {*job.measures}):
        yield f"{name} is not a measure of this job"


def _of_measure(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    if values.get("error"):
        yield f"failed: {values['error']}"
        return
    for key, least in MEASURES[name].items():
        numbers = values.get(key) if key == "ratios" else [values.get(key)]
        if not isinstance(numbers, list) or not all(_number(number) and number >= least for number in numbers):
            what = "numbers" if key == "ratios" else "a number"
            yield f"{key} is {values.get(key)!r}, expected {what} of at least {least}"
        elif key == "ratios" and len(numbers) < REPETITIONS:
            yield f"{len(numbers)} repetitions, expected {REPETITIONS}"


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


# --- what was found --------------------------------------------------------------------------------------------------

def findings(jobs: list[Job], results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row of figures for each job. Raises KeyError for results that have complaints."""
    entries = {entry["job"]: entry for entry in results["jobs"]}
    rows = []
    for job in jobs:
        of = entries[job.name]["measures"]
        ratio, row = of["first_ratio"], {"job": job.name, "recipe": job.recipe}
        row |= {"first log ratio": ratio["found"], "limit": ratio["limit"],
                "first ratio holds": ratio["found"] <= ratio["limit"] or bool(ratio["rescored"])}
        row |= {"peak, GiB": of.get("peak", of.get("memory"))["measured_gib"]}
        if "peak" in of:
            row |= {"predicted, GiB": of["peak"]["predicted_gib"],
                    "peak over predicted": of["peak"]["measured_gib"] / of["peak"]["predicted_gib"]}
        if "epoch" in of:
            row["epoch over bare calls"] = of["epoch"]["seconds"] / of["epoch"]["bare_seconds"]
        if "one_pass" in of:
            row["replay over one pass"] = sorted(of["one_pass"]["ratios"])[len(of["one_pass"]["ratios"]) // 2]
        rows.append(row)
    return rows


def verified(jobs: list[Job], results: Mapping[str, Any]) -> dict[str, str]:
    """Return the column `verified` of the recipes that ran and whose first ratio holds: the device and the commit."""
    rows = findings(jobs, results)
    return {row["recipe"]: f"{results['device']}, {results['commit'][:8]}" for row in rows if row["first ratio holds"]}
