"""Python code of a model, run in a process of its own with limits of time, memory and files, and without a network.

What the limits are and what they are not: docs/rewards.md, "Code". The process itself is sandbox_child.py.
"""

from __future__ import annotations

import functools
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CHILD = Path(__file__).with_name("sandbox_child.py")
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Bounds:
    """seconds: of the clock, and of a processor rounded up; memory, files: MiB of address space, and of the largest
    file, which what is printed is, too; namespace: whether to ask the system for a network namespace."""

    seconds: float = 10.0
    memory: int = 1024
    files: int = 8
    namespace: bool = True


@dataclass(frozen=True)
class Done:
    """What came of it: the exit status (negative: the signal that ended it), None where the time was up; what was
    printed; which of the tests passed, fewer than there are where it ended before; and how the network was kept away,
    "namespace", "hook", or None where it died before."""

    status: int | None
    out: str
    passed: list[bool]
    isolation: str | None


def run(code: str, tests: Sequence[str] | None, given: str, bounds: Bounds) -> Done:
    """Run a program, with `given` as its standard input, or, for tests, define what it defines and then run each."""
    word = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="flowgrpo-") as folder:
        work = Path(folder, "work")
        work.mkdir()
        Path(folder, "in").write_text(given, encoding="utf-8", errors="replace")
        job = Path(folder, "job.json")
        job.write_text(json.dumps({
            "code": code, "tests": None if tests is None else list(tests), "namespace": bounds.namespace, "word": word,
            "cpu": math.ceil(bounds.seconds), "memory": bounds.memory * 2**20, "files": bounds.files * 2**20,
            "wall": math.ceil(bounds.seconds) + 5}), encoding="utf-8")
        with (open(Path(folder, "in"), "rb") as stdin, open(Path(folder, "out"), "w+b") as out,
              open(Path(folder, "report"), "w+b") as report):
            status = _ended(job, work, bounds.seconds, stdin, out, report)
            return Done(status, _read(out, bounds), *_reported(_read(report, bounds), word))


def _ended(job: Path, work: Path, seconds: float, stdin: object, out: object, report: object) -> int | None:
    """The exit status of the process; None where it was ended because the time was up."""
    environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": str(work), "TMPDIR": str(work)} | dict.fromkeys(
        THREADS, "1")
    process = subprocess.Popen(
        [sys.executable, "-I", "-B", "-X", "utf8", str(CHILD), str(job), str(report.fileno())], cwd=work,
        stdin=stdin, stdout=out, stderr=subprocess.DEVNULL, env=environment, pass_fds=[report.fileno()],
        start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _read(file: object, bounds: Bounds) -> str:
    file.seek(0)
    return file.read(bounds.files * 2**20).decode("utf-8", "replace")


def _reported(text: str, word: str) -> tuple[list[bool], str | None]:
    told = [line.removeprefix(word).strip() for line in text.split("\n") if line.startswith(word)]
    return [line == "1" for line in told[1:]], told[0] if told else None


@functools.cache
def isolation() -> str | None:
    """How the network is kept away on this machine: "namespace", or "hook" where the system grants none; None where no
    process can be started under these limits."""
    return run("", [], "", Bounds(seconds=120)).isolation
