"""Run a model's Python code in a separate process with limits of time, memory and files, and without a network.

Guarantees of these limits: docs/rewards.md, "Code". The process itself is sandbox_child.py.
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
from typing import BinaryIO

CHILD = Path(__file__).with_name("sandbox_child.py")
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Bounds:
    """Limits of a run.

    seconds: wall-clock time, and CPU time rounded up.
    memory, files: MiB of address space, and of the largest file; printed output counts as one.
    namespace: request a network namespace from the system.
    """

    seconds: float = 10.0
    memory: int = 1024
    files: int = 8
    namespace: bool = True


@dataclass(frozen=True)
class Done:
    """Outcome of a run.

    status: exit status (negative: the signal that ended it), None after a time-out. out: printed output.
    passed: per test, fewer than given if it ended early.
    isolation: of the network, "namespace", "hook", or None if it died before.
    """

    status: int | None
    out: str
    passed: list[bool]
    isolation: str | None


def run(code: str, tests: Sequence[str] | None, given: str, bounds: Bounds) -> Done:
    """Run a program with `given` as its standard input, or, with tests, execute its definitions and then run each test.
    """
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


def _ended(job: Path, work: Path, seconds: float, stdin: BinaryIO, out: BinaryIO, report: BinaryIO) -> int | None:
    """Return the exit status of the process; None if it was killed after a time-out."""
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


def _read(file: BinaryIO, bounds: Bounds) -> str:
    file.seek(0)
    return file.read(bounds.files * 2**20).decode("utf-8", "replace")


def _reported(text: str, word: str) -> tuple[list[bool], str | None]:
    lines = [line.removeprefix(word).strip() for line in text.split("\n") if line.startswith(word)]
    return [line == "1" for line in lines[1:]], lines[0] if lines else None


@functools.cache
def isolation() -> str | None:
    """Return the network isolation on this machine: "namespace", or "hook" if the system grants none; None if no
    process can start under these limits."""
    return run("", [], "", Bounds(seconds=120)).isolation
