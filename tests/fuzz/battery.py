"""Battery of hostile inputs: `python -m tests.fuzz.battery [--seconds 600] [--seed 0] [TARGET...]`.

Each target runs in a process of its own, which may take MEMORY bytes more than at its start, and SECONDS per case. The
table counts cases, refusals and failures; a failure's first case is written to `--failures`.
"""

import argparse
import json
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.targets import TARGETS, prepare, refused

MEMORY = 2**30
SECONDS = 20
ROUND = 100  # cases between two looks at the clock


class Hang(BaseException):
    """Error: a case took longer than SECONDS."""


def _late(*_: object) -> None:
    raise Hang(f"longer than {SECONDS} s")


def limit() -> None:
    """Let this process take MEMORY more address space than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def place(error: BaseException) -> str:
    """Return the kind of a failure and the last line of the package that it passed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/flowgrpo/" in frame.filename]
    at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__} at {at}"


def child(name: str, seconds: float, first: int) -> dict[str, Any]:
    """Run a target's cases for some seconds; return the counts and the first case of each failure."""
    target, counts = TARGETS[name], {"cases": 0, "refused": 0, "slowest": 0.0}
    failures: dict[str, str] = {}
    signal.signal(signal.SIGALRM, _late)
    def once(case: Any) -> None:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            prepare(Path(folder))
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            try:
                counts["refused"] += refused(target, case, Path(folder))
            except (Exception, Hang) as error:
                failures.setdefault(place(error), f"{str(error)[:300]!r} from {repr(case)[:3000]}")
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        counts["cases"] += 1
        counts["slowest"] = max(counts["slowest"], time.monotonic() - began)
    with tempfile.TemporaryDirectory() as folder:  # imports what the target needs, before the limit
        prepare(Path(folder))
        try:
            refused(target, target.strategy.example(), Path(folder))
        except Exception as error:
            failures.setdefault(place(error), "the first case")
    limit()
    end, number = time.monotonic() + seconds, first
    while time.monotonic() < end:
        run = settings(
            max_examples=ROUND,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck))(given(target.strategy)(once))
        seed(number)(run)()
        number += 1
    return {**counts, "failures": failures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=600, help="of all targets together")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--failures", type=Path, help="file for the first case of each failure")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given_ = parser.parse_args()
    if given_.child:
        print("\n" + json.dumps(child(given_.child, given_.seconds, given_.seed)))
        return 0
    names, failed = given_.targets or list(TARGETS), {}
    print(f"{'target':<20}{'cases':>8}{'refused':>9}{'slowest':>10}{'failures':>10}")
    total = 0
    for name in names:
        share = given_.seconds / len(names)
        command = [sys.executable, "-m", "tests.fuzz.battery", "--child", name, "--seconds", str(share), "--seed",
                   str(given_.seed)]
        try:  # libraries print bytes of a case
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
                                  timeout=share + 10 * SECONDS)
            result = json.loads(done.stdout.splitlines()[-1])
        except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
            said = getattr(error, "stderr", None) or getattr(locals().get("done"), "stderr", "")
            result = {
                "cases": 0, "refused": 0, "slowest": 0.0,
                "failures": {f"the process ended: {error}": str(said)[-2000:]}}
        total += result["cases"]
        failed |= {f"{name}: {where}": case for where, case in result["failures"].items()}
        print(
            f"{name:<20}{result['cases']:>8,}{result['refused']:>9,}{result['slowest']:>8.1f} s"
            f"{len(result['failures']):>10}",
            flush=True)
    print(f"{'all':<20}{total:>8,}")
    for where in failed:
        print(f"- {where}")
    if given_.failures and failed:
        given_.failures.write_text(json.dumps(failed, indent=1), encoding="utf-8")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
