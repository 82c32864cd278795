"""Ten minutes on one GPU: is it right, how fast is it, and how far is the dry run from it?

    python scripts/gpu/gpu_minutes.py wheels wheels                 # with a network: what such a machine lacks
    python scripts/gpu/gpu_minutes.py run results.json --wheels wheels --commit SHA     # on the machine with the GPU
    python scripts/gpu/gpu_minutes.py run results.json --rehearse   # tiny models on the CPU, in under a minute
    python scripts/gpu/gpu_minutes.py check results.json            # in a checkout; exit code 1 if something is wrong
    python scripts/gpu/gpu_minutes.py page results.json             # docs/gpu.md
    python scripts/gpu/gpu_minutes.py factors results.json          # flowgrpo/tools/dry_run/measured.json, by dry runs

Models have random weights of full size, and nothing is downloaded. Sections run one after another, in the order of the
questions, and no other work beside them. Those of one group share a process and a model. A section that fails, that
runs out of its seconds or that takes its process with it is noted, and the next one goes on. `results.json` is written
after every line.
"""

import argparse
import hashlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("gpu_sections.py")
PAGE, FACTORS = ROOT / "docs" / "gpu.md", ROOT / "flowgrpo" / "tools" / "dry_run" / "measured.json"
FOLDERS, SUFFIXES = ("flowgrpo", "configs", "scripts"), (".py", ".yaml")  # files that results depend on
LACKING = ("diffusers", "peft", "torchao")  # of a machine with torch, transformers and accelerate
START = 30.0  # seconds in which a group's process loads its packages
MINUTES = 10
Line = dict[str, Any]
QUESTIONS = {
    1: "Three epochs of SD 3.5 medium at full size",
    2: "Bare calls, share of the peak, and the kernels of one forward and one replay",
    3: "Variants",
    4: "What failed in the first run",
    5: "Beside flow_grpo's own functions",
    6: "Out of memory, killed and resumed, one pass, quantised",
    7: "Other models"}


@dataclass(frozen=True)
class Section:
    """Function of gpu_sections.py that yields lines. group: sections of one process. seconds: its budget."""

    name: str
    question: int
    group: str
    seconds: float


SECTIONS = (
    Section("epochs", 1, "medium", 60),
    Section("clocks", 2, "medium", 8),
    Section("attention", 2, "medium", 12),
    Section("calls", 2, "medium", 15),
    Section("kernels", 2, "medium", 15),
    Section("variants", 3, "medium", 45),
    Section("compiled", 3, "medium", 50),
    Section("faults", 4, "starters", 30),
    Section("beside_cpu", 4, "starters", 25),
    Section("beside_flow_grpo", 5, "peer", 45),
    Section("one_pass", 6, "memory", 30),
    Section("out_of_memory", 6, "memory", 15),
    Section("quantised", 6, "quantised", 35),
    Section("killed", 6, "killed", 40),
    Section("flux_dev", 7, "flux_dev", 35),
    Section("sdxl", 7, "sdxl", 25),
    Section("wan21_1b", 7, "wan21_1b", 25),
    Section("qwen3_0_6b", 7, "qwen3_0_6b", 20))


# --- what is run -----------------------------------------------------------------------------------------------------

def sources(root: Path = ROOT) -> str:
    """Return the SHA-256 of the files that are here: of each its path and git's name of its content."""
    files = (file for folder in FOLDERS for file in (root / folder).rglob("*") if file.suffix in SUFFIXES)
    return _digest({file.relative_to(root).as_posix(): _blob(file) for file in files})


def sources_of(commit: str, root: Path = ROOT) -> str:
    """Return `sources` of a commit."""
    listed = _git(root, "ls-tree", "-r", "-z", commit, "--", *FOLDERS).split("\0")
    entries = (entry.partition("\t")[::2] for entry in listed)
    return _digest({path: about.split()[2] for about, path in entries if path.endswith(SUFFIXES)})


def commit_of(name: str = "HEAD", root: Path = ROOT) -> str:
    """Return the 40 digits of a commit."""
    return _git(root, "rev-parse", "--verify", f"{name}^{{commit}}").strip()


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


def _blob(file: Path) -> str:
    content = os.readlink(file).encode() if file.is_symlink() else file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _digest(files: Mapping[str, str]) -> str:
    return hashlib.sha256("\n".join(f"{path} {files[path]}" for path in sorted(files)).encode()).hexdigest()


def download(folder: Path, names: tuple[str, ...] = LACKING, constraints: Path = ROOT / "constraints.txt") -> list[str]:
    """Return the command that puts the wheels of packages into a folder, in the versions of the constraints."""
    text = constraints.read_text(encoding="utf-8")
    pinned = [re.search(rf"^{name}==\S+", text, re.M) for name in names]
    return [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", f"--dest={folder}",
            *(found[0] if found else name for found, name in zip(pinned, names, strict=True))]


def install(folder: Path) -> Path:
    """Unpack the wheels of a folder beside them, without a network; return the folder to import them from."""
    place, wheels = folder / "installed", [str(wheel) for wheel in sorted(folder.glob("*.whl"))]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", f"--target={place}",
                    "--upgrade", *wheels], check=True)
    return place


# --- running ---------------------------------------------------------------------------------------------------------

class Results:
    """Results in a file, which is written after every line."""

    def __init__(self, file: Path, about: Line):
        self.file, self.values = file, about | {"sections": []}
        file.parent.mkdir(parents=True, exist_ok=True)

    def begin(self, section: Section) -> Line:
        entry = {"name": section.name, "question": section.question, "lines": [], "note": None, "seconds": 0.0}
        self.values["sections"].append(entry)
        return entry

    def write(self) -> None:
        self.file.write_text(json.dumps(self.values, indent=1) + "\n", encoding="utf-8")


def run(results: Results, options: list[str], sections: tuple[Section, ...], seconds: float,
        environment: Mapping[str, str], worker: Path = WORKER) -> None:
    """Run the sections, the groups one after another, until the seconds are over. worker: the script that runs them."""
    end = time.monotonic() + seconds
    for _, group in groupby(sections, key=lambda section: section.group):
        _run_group(results, [str(worker), *options], tuple(group), end, environment)
    results.values["seconds"] = round(seconds - (end - time.monotonic()), 1)
    results.write()


def _run_group(results: Results, worker: list[str], sections: tuple[Section, ...], end: float,
               environment: Mapping[str, str]) -> None:
    """Run the sections of a process, and note what did not come to its end."""
    left = end - time.monotonic()
    entries = {section.name: results.begin(section) for section in sections}
    if left < sections[0].seconds:
        for section in sections:
            entries[section.name]["note"] = f"skipped: {left:.0f} s are left, it may take {section.seconds:.0f} s"
        return results.write()
    process = subprocess.Popen([sys.executable, *worker, *entries], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, cwd=ROOT, env={**os.environ, **environment}, start_new_session=True)
    lines, said = queue.Queue[str | None](), list[str]()
    readers = [threading.Thread(target=_read, args=(stream, take, stream is process.stdout), daemon=True)
               for stream, take in ((process.stdout, lines.put), (process.stderr, said.append))]
    for reader in readers:
        reader.start()
    ended, begun, present = set[str](), time.monotonic(), sections[0].name
    deadline = begun + START + sections[0].seconds
    budget = {section.name: section.seconds for section in sections}
    while True:
        try:
            text = lines.get(timeout=max(min(deadline, end) - time.monotonic(), 0.0))
        except queue.Empty:
            entries[present]["note"] = (f"ended after {time.monotonic() - begun:.0f} s, expected at most "
                                        f"{budget[present]:.0f} s")
            os.killpg(process.pid, 9)
            break
        if text is None:
            break
        if not text.startswith(('{"section"', '{"about"')):
            continue
        told = json.loads(text)
        if "about" in told:
            results.values = told["about"] | results.values  # the first process's stays
            continue
        entry, present = entries[told["section"]], told["section"]
        if "begin" in told:
            begun = time.monotonic()
            deadline = begun + budget[present] + 10.0
        elif "line" in told:
            entry["lines"].append(told["line"])
        else:
            ended.add(present)
            entry |= {"note": told["note"], "seconds": told["seconds"]}
            print(f"{present}: {len(entry['lines'])} lines, {entry['seconds']} s; {entry['note'] or 'whole'}",
                  flush=True)
        results.write()
    process.wait()
    readers[1].join(timeout=5.0)  # a child of the process may hold its stderr open
    last = " ".join("".join(said).split())[-300:]
    for name in entries.keys() - ended:
        entries[name]["note"] = entries[name]["note"] or f"not run: the process ended with {process.returncode}: {last}"
        print(f"{name}: {entries[name]['note']}", flush=True)
    results.write()


def _read(stream: Any, take: Any, ends: bool) -> None:
    for line in stream:
        take(line)
    if ends:
        take(None)


# --- results ---------------------------------------------------------------------------------------------------------

def complaints(results: Mapping[str, Any], files: str | None) -> Iterator[str]:
    """Yield what is wrong with results, one line each. files: `sources_of` their commit, None for an unknown commit."""
    if files is None:
        yield f"results are of commit {results.get('commit')}, which is not in this repository"
    elif results.get("sources") != files:
        yield "the files that were run are not those of the commit: run them from a clean checkout"
    if results.get("rehearsed") is not False:
        yield "results are rehearsed, with tiny models on a CPU: no number is of a GPU"
    if results.get("beside_gib"):
        yield f"other programs held {results['beside_gib']} GiB of the GPU at the beginning"
    found = {entry["name"]: entry for entry in results.get("sections", [])}
    for section in SECTIONS:
        if section.name not in found:
            yield f"{section.name}: left out"
        elif found[section.name]["note"]:
            yield f"{section.name}: {found[section.name]['note']}"


def page(results: Mapping[str, Any]) -> str:
    """Return docs/gpu.md, of the results and of nothing else."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items() if version)
    text = ["# Measurements on a GPU", "",
            "Models of full size with random weights. Seconds end with the last kernel. Nothing ran beside them.", "",
            f"By `scripts/gpu/gpu_minutes.py` at commit `{results['commit'][:8]}` on {results['device']} in "
             f"{results['seconds']:.0f} s, with {versions}.", ""]
    for number, title in QUESTIONS.items():
        text += [f"## {number}. {title}", ""]
        for entry in (entry for entry in results["sections"] if entry["question"] == number):
            said = f": {entry['note']}" if entry["note"] else ""
            text += [f"`{entry['name']}`, {entry['seconds']:.0f} s{said}", "", *_tables(entry["lines"])]
    return "\n".join(text).rstrip() + "\n"


def _tables(lines: list[Line]) -> Iterator[str]:
    """Yield tables of lines; those with the same first key, one after another, are of one table."""
    for _, alike in groupby(lines, key=lambda line: next(iter(line))):
        rows = list(alike)
        keys = list(dict.fromkeys(key for row in rows for key in row))
        yield "| " + " | ".join(keys) + " |"
        yield "|" + "---|" * len(keys)
        yield from ("| " + " | ".join(cell(row.get(key)) for key in keys) + " |" for row in rows)
        yield ""


def cell(value: Any) -> str:
    """Return a value as a cell of a table."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")


def factors(results: Mapping[str, Any], computed: Any) -> dict[str, dict[str, Any]]:
    """Return measured seconds over computed ones, by pipeline and phase, with the commit.

    computed: returns {phase: seconds} of a dry run, for the settings of a model's section. An epoch's last line is
    that of a warm one.
    """
    found = {}
    for entry in results["sections"]:
        warm = [line for line in entry["lines"] if "epoch" in line]
        about = next((line for line in entry["lines"] if str(line.get("pipeline")).endswith("Pipeline")), None)
        if warm and about:  # a dry run does not cover language models
            expected = computed(about)
            ratios = {name: round(warm[-1][f"{name} s"] / expected[name], 3) for name in ("rollout", "update")}
            found[about["pipeline"]] = ratios | {"commit": results["commit"], "torch": results["versions"]["torch"]}
    return found


def _computed(card: str) -> Any:
    from gpu_sections import config_of

    from flowgrpo.gpus import gpu_named
    from flowgrpo.tools.dry_run.estimate import dry_run

    def computed(about: Line) -> dict[str, float]:
        phases = dry_run(config_of(about["recipe"], "cpu", False), gpu_named(card)).phases
        return {name: phase.duration for name, phase in phases.items()}
    return computed


# --- the commands ----------------------------------------------------------------------------------------------------

def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("wheels", help=f"download {', '.join(LACKING)}")
    preparing.add_argument("folder", type=Path)
    preparing.add_argument("--also", nargs="*", default=[], metavar="PACKAGE")
    running = commands.add_parser("run")
    running.add_argument("results", type=Path)
    running.add_argument("--commit", help="the commit that the files are of; without it git is asked")
    running.add_argument("--wheels", type=Path, help="folder of wheels, which are unpacked there")
    running.add_argument("--clone", type=Path, help="of flow_grpo, for question 5")
    running.add_argument("--only", default="", metavar="TEXT", help="sections whose name has this text in it")
    running.add_argument("--seconds", type=float, default=60.0 * MINUTES - 20)
    running.add_argument("--rehearse", action="store_true", help="tiny models on the CPU: a test of the script")
    for name in ("check", "page", "factors"):
        commands.add_parser(name).add_argument("results", type=Path)
    args = parser.parse_args(arguments)
    if args.command == "wheels":
        return subprocess.run(download(args.folder, (*LACKING, *args.also))).returncode
    return _run(args) if args.command == "run" else _read_results(args.command, args.results)


def _run(args: argparse.Namespace) -> int:
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, [
        str(install(args.wheels)) if args.wheels else "", str(ROOT), os.environ.get("PYTHONPATH", "")]))}
    environment |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}  # as `flowgrpo train` does
    options = ["--rehearse"] * args.rehearse + ([f"--clone={args.clone.resolve()}"] if args.clone else [])
    results = Results(args.results, {"commit": args.commit or commit_of(), "sources": sources(),
                                     "rehearsed": args.rehearse})
    chosen = tuple(section for section in SECTIONS if args.only in section.name)
    if args.rehearse:  # loading the packages once is most of it
        chosen = tuple(Section(each.name, each.question, "all", each.seconds) for each in chosen)
    run(results, options, chosen, args.seconds, environment)
    return 0 if "device" in results.values else 2  # without a GPU no process begins


def _read_results(command: str, file: Path) -> int:
    results = json.loads(file.read_text(encoding="utf-8"))
    try:
        files = sources_of(results["commit"])
    except subprocess.CalledProcessError:
        files = None
    wrong = [*complaints(results, files)]
    # The page says what failed.
    allowed = command == "page" and files == results["sources"] and not results["rehearsed"]
    if wrong and not allowed:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    if command == "page":
        PAGE.write_text(page(results), encoding="utf-8")
    elif command == "factors":
        if results["card"] is None:
            print(f"{results['device']} is none of the GPUs of flowgrpo/gpus.py: give it a row there", file=sys.stderr)
            return 1
        table = json.loads(FACTORS.read_text(encoding="utf-8"))
        table[results["card"]] = table.get(results["card"], {}) | factors(results, _computed(results["card"]))
        FACTORS.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    else:
        print(f"{len(results['sections'])} sections, none left out")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
