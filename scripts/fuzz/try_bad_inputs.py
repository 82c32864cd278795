"""Give the command line 368 inputs, nearly all with a mistake, and print how soon and in how many lines it says so.

    python scripts/fuzz/try_bad_inputs.py [--edges] [--only NAME ...] [--json FILE] [--limit SECONDS]

Each row is a process of its own in a folder of its own. A mistake has to end with exit code 2, one line on stderr that
starts with "flowgrpo: error:", no traceback, and within 10 seconds of the processor (--limit: more beside other
programs, which take its caches). `check` reports on stdout. A row of RIGHT is no mistake and has to end with 0, or with
3 if it trains nothing. A bar of progress is no line. A process may take MEMORY bytes of address space, and so a size
without bound ends it.
"""

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

from flowgrpo.cli.train import UNTRAINED

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 10  # seconds of the processor within which a mistake is said
MEMORY = 10 * 2**30
FINE = bad_inputs.FINE | set(bad_edges.RIGHT)


@dataclass(frozen=True)
class Outcome:
    """End of a command: exit code, seconds, those of the processor, and the lines of stderr that are no bar of
    progress."""

    code: int
    seconds: float
    busy: float
    lines: list[str]

    def wrong(self, fine: bool, reports: bool, limit: float) -> str:
        """Return the promise that was broken, or nothing. reports: the command prints its reasons on stdout."""
        if any("Traceback" in line for line in self.lines):
            return "traceback"
        if self.code not in ((0, UNTRAINED) if fine else (2,)):
            return f"exit code {self.code}"
        if fine:
            return ""
        if not reports and (len(self.lines) != 1 or not self.lines[0].startswith("flowgrpo: error: ")):
            return f"{len(self.lines)} lines"
        return "late" if self.busy > limit else ""


def processor() -> float:
    """Return the seconds that the processor has worked for this process's children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def once(arguments: list[str]) -> list[str]:
    """Return a command line with the last of each --KEY=VALUE: the command line takes none twice."""
    last = {argument.partition("=")[0]: place for place, argument in enumerate(arguments)}
    return [argument for place, argument in enumerate(arguments)
            if not (argument.startswith("--") and "=" in argument) or last[argument.partition("=")[0]] == place]


def limited() -> None:
    """Limit the address space of this process."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def tried(arguments: list[str], folder: Path, patience: float = 60) -> Outcome:
    """Run the command line in the folder; after so many seconds it is killed, with exit code 124."""
    began, busy = time.monotonic(), processor()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-m", "flowgrpo", *arguments], cwd=folder,
                               stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               env=environment, preexec_fn=limited)
    try:
        errors = process.communicate(timeout=patience)[1].decode()  # as text, each \r of a bar would begin a line
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return Outcome(124, time.monotonic() - began, processor() - busy, ["no end"])
    lines = [line for line in errors.split("\n") if line.strip() and "\r" not in line
             and (line.startswith("flowgrpo: error") or " sends " not in line)]
    return Outcome(process.returncode, time.monotonic() - began, processor() - busy, lines)


def main() -> int:
    """Run the cases, print a table, and return 1 where one broke a promise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--edges", action="store_true", help="the cases of bad_edges.py alone")
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of the processor for a mistake")
    given, outcomes = parser.parse_args(), {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "work"
        folder.mkdir()
        shutil.copy(Path(__file__).with_name("bad_rewards.py"), folder / "rewards.py")
        bad_inputs.prepare(folder, lambda *arguments: tried(list(arguments), folder))
        bad_edges.prepare(folder)
        print("| case | exit code | s | of the processor | verdict | last line |\n|---|---:|---:|---:|---|---|")
        for name, said in (bad_edges.CASES if given.edges else bad_inputs.CASES | bad_edges.CASES).items():
            if given.only and name not in given.only:
                continue
            arguments = once(said)
            outcome = tried(arguments, folder)
            verdict = outcome.wrong(name in FINE, arguments[0] == "check", given.limit)
            if not verdict and bad_edges.SAYS.get(name, "") not in " ".join(outcome.lines):
                verdict = "another reason"
            line = (outcome.lines or ["-"])[-1].removeprefix("flowgrpo: error: ").replace("|", "\\|")[:300]
            print(f"| {name} | {outcome.code} | {outcome.seconds:.1f} | {outcome.busy:.1f} | {verdict or 'ok'} "
                  f"| {line} |", flush=True)
            outcomes[name] = {"code": outcome.code, "seconds": round(outcome.seconds, 1),
                              "busy": round(outcome.busy, 1), "verdict": verdict, "line": line}
    broken = [name for name, row in outcomes.items() if row["verdict"]]
    print(f"\n{len(outcomes) - len(broken)} of {len(outcomes)} as promised" + "".join(f"; {name}" for name in broken))
    if given.json:
        given.json.write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
