"""Give the command line 336 inputs, nearly all with a mistake, and print how soon and in how many lines it says so.

    python scripts/try_bad_inputs.py [--edges] [--only NAME ...] [--json FILE]

Each row is a process of its own in a folder of its own. A mistake has to end with exit code 2, one line on stderr that
starts with "flowgrpo: error:", no traceback, and within 10 seconds. `check` reports on stdout. A row of RIGHT is no
mistake and has to end with 0. A bar of progress is no line. The seconds are those of one machine. A process may take
MEMORY bytes of address space, and so a size without bound ends it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import bad_edges
import bad_inputs

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 10  # seconds within which a mistake is said
MEMORY = 10 * 2**30
FINE = bad_inputs.FINE | set(bad_edges.RIGHT)


@dataclass(frozen=True)
class Outcome:
    """End of a command: exit code, seconds, and the lines of stderr that are no bar of progress."""

    code: int
    seconds: float
    lines: list[str]

    def wrong(self, fine: bool, reports: bool) -> str:
        """Return the promise that was broken, or nothing. reports: the command prints its reasons on stdout."""
        if any("Traceback" in line for line in self.lines):
            return "traceback"
        if self.code != (0 if fine else 2):
            return f"exit code {self.code}"
        if fine:
            return ""
        if not reports and (len(self.lines) != 1 or not self.lines[0].startswith("flowgrpo: error: ")):
            return f"{len(self.lines)} lines"
        return "late" if self.seconds > LIMIT else ""


def limited() -> None:
    """Limit the address space of this process."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def tried(arguments: list[str], folder: Path, patience: float = 60) -> Outcome:
    """Run the command line in the folder; after so many seconds it is killed, with exit code 124."""
    began = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-m", "flowgrpo", *arguments], cwd=folder,
                               stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               env=environment, preexec_fn=limited)
    try:
        errors = process.communicate(timeout=patience)[1].decode()  # as text, each \r of a bar would begin a line
    except subprocess.TimeoutExpired:
        process.kill()
        return Outcome(124, time.monotonic() - began, ["no end"])
    lines = [line for line in errors.split("\n") if line.strip() and "\r" not in line
             and (line.startswith("flowgrpo: error") or " sends " not in line)]
    return Outcome(process.returncode, time.monotonic() - began, lines)


def main() -> int:
    """Run the cases, print a table, and return 1 where one broke a promise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--edges", action="store_true", help="the cases of bad_edges.py alone")
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    given, outcomes = parser.parse_args(), {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "work"
        folder.mkdir()
        shutil.copy(Path(__file__).with_name("bad_rewards.py"), folder / "rewards.py")
        bad_inputs.prepare(folder, lambda *arguments: tried(list(arguments), folder))
        bad_edges.prepare(folder)
        print("| case | exit code | s | verdict | last line |\n|---|---:|---:|---|---|")
        for name, arguments in (bad_edges.CASES if given.edges else bad_inputs.CASES | bad_edges.CASES).items():
            if given.only and name not in given.only:
                continue
            outcome = tried(arguments, folder)
            verdict = outcome.wrong(name in FINE, arguments[0] == "check")
            if not verdict and bad_edges.SAYS.get(name, "") not in " ".join(outcome.lines):
                verdict = "another reason"
            line = (outcome.lines or ["-"])[-1].removeprefix("flowgrpo: error: ").replace("|", "\\|")[:300]
            print(f"| {name} | {outcome.code} | {outcome.seconds:.1f} | {verdict or 'ok'} | {line} |", flush=True)
            outcomes[name] = {"code": outcome.code, "seconds": round(outcome.seconds, 1), "verdict": verdict,
                              "line": line}
    broken = [name for name, row in outcomes.items() if row["verdict"]]
    print(f"\n{len(outcomes) - len(broken)} of {len(outcomes)} as promised" + "".join(f"; {name}" for name in broken))
    if given.json:
        given.json.write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
