"""One hour on one GPU: run the jobs of gpu_hour.yaml, check their results, and print the tables.

    python scripts/gpu_hour.py run --output results.json --commit SHA   # on the machine with the GPU, without a network
    python scripts/gpu_hour.py check results.json                       # in a checkout; exit code 1: a job is left out
    python scripts/gpu_hour.py page results.json                        # the same, and the tables as Markdown

Each job is a process of its own with a limit of time, so that an error of one leaves the others. `results.json` is
written after every job. `check` compares commit and files with those of this checkout: results of other code, of
changed files, without a job or without a measure are refused.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu_results as of
from gpu_report import cell


def run(output: Path, commit: str, device: str, only: str = "", tiny: bool = False) -> dict[str, Any]:
    """Run the jobs, each in a process of its own; return and write the results."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else device
    bound = {"commit": commit, "sources": of.sources(), "device": name}
    results: dict[str, Any] = {**bound, "device_type": device, "jobs": []}
    for job in (job for job in of.manifest() if only in job.name):
        start = time.monotonic()
        entry = {"job": job.name, "digest": job.digest, **bound} | _result(job, device, tiny)
        results["jobs"].append(entry | {"seconds": round(time.monotonic() - start, 1)})
        print(f"{job.name}: {entry.get('error') or 'measured'}", flush=True)
        output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def _result(job: of.Job, device: str, tiny: bool) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("gpu_jobs.py")), job.name, f"--device={device}"]
    try:
        done = subprocess.run(command + ["--tiny"] * tiny, capture_output=True, text=True, timeout=job.seconds,
                              cwd=of.ROOT)
    except subprocess.TimeoutExpired:
        return {"error": f"it took more than {job.seconds:.0f} s"}
    if done.returncode:
        return {"error": f"exit code {done.returncode}: {' '.join(done.stderr.split())[-300:]}"}
    return {"measures": json.loads(done.stdout.splitlines()[-1])}


def page(results: dict[str, Any]) -> str:
    """Return the figures of results without complaints, and the recipes that they verify, as Markdown."""
    jobs = of.manifest()
    rows, marks = of.findings(jobs, results), of.verified(jobs, results)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = [f"Measured by `scripts/gpu_hour.py` at commit {results['commit'][:8]} on one {results['device']}, with "
            "random weights of full size.", "", *_table(columns, [[cell(row.get(key)) for key in columns]
                                                                  for row in rows]), ""]
    text += _table(["recipe", "verified"], [[f"`{name}`", mark] for name, mark in marks.items()])
    return "\n".join(text) + "\n"


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in (heads, *rows)]
    return [lines[0], "|" + "---|" * len(heads), *lines[1:]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--output", type=Path, required=True)
    running.add_argument("--commit", help="the commit that the files are of; without it git is asked")
    running.add_argument("--device", default="cuda")
    running.add_argument("--only", default="", metavar="TEXT", help="jobs whose name has this text in it")
    running.add_argument("--tiny", action="store_true", help="small widths: a test of the script")
    for name in ("check", "page"):
        reading = commands.add_parser(name)
        reading.add_argument("results", type=Path)
        reading.add_argument("--commit", default="HEAD")
    args = parser.parse_args(arguments)
    if args.command == "run":
        run(args.output, args.commit or of.commit_of(), args.device, args.only, args.tiny)
        return 0
    results, commit = json.loads(args.results.read_text(encoding="utf-8")), of.commit_of(args.commit)
    wrong = list(of.complaints(of.manifest(), results, commit, of.sources_of(commit)))
    if not wrong:
        print(page(results) if args.command == "page" else f"{len(results['jobs'])} jobs, none left out")
        return 0
    print("\n".join(wrong), file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
