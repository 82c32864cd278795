"""Table of dry runs: memory, FLOPs and seconds of an epoch of every packaged recipe, computed without a GPU.

    python scripts/dry_run_table.py                              # every recipe, a minute each at most; prints Markdown
    python scripts/dry_run_table.py flux_dev sdxl --json FILE    # those two; the file keeps the rows of other recipes
    python scripts/dry_run_table.py --json FILE --docs           # and puts the table into docs/dry_run.md
    python scripts/dry_run_table.py --none --json FILE --docs    # the table of the file's rows

Nothing is downloaded: the models' configurations are those of flowgrpo/published.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import recipe_table

from flowgrpo.config import load
from flowgrpo.dry_run.estimate import Estimate, dry_run, gib
from flowgrpo.gpus import GPUS, gpu_named

ROOT = Path(__file__).parent.parent
PAGE, BEGIN, END = ROOT / "docs" / "dry_run.md", "<!-- dry runs: begin -->\n", "<!-- dry runs: end -->\n"
PHASES = ("encode", "rollout", "decode", "update")


def row(name: str, gpu: str) -> dict[str, Any]:
    """Run a recipe dry, as one of the processes that its comment names; return its row."""
    begun, count = time.monotonic(), recipe_table.processes(recipe_table.comment(name))
    counts = dry_run(load(recipe_table.path(name)), gpu_named(gpu), count)
    phases = {key: {"gib": round(gib(phase.allocated), 1), "reserved_gib": round(gib(phase.reserved), 1),
                    "pflop": round(phase.flops / 1e15, 2), "seconds": round(phase.seconds, 1)}
              for key, phase in counts.phases.items()}
    return {"gpu": gpu, "processes": count, "phases": phases, "rewards_gib": round(gib(counts.rewards), 1),
            "peak_gib": round(gib(counts.peak), 1), "seconds": round(counts.seconds), "fits": smallest(counts),
            "waits_per_step": counts.step_waits, "waits_per_replay": counts.replay_waits, "commit": commit(),
            "took_seconds": round(time.monotonic() - begun, 1)}


def smallest(counts: Estimate) -> str | None:
    """Return the GPU of the least memory that the epoch fits; None if none does."""
    fitting = [name for name, gpu in sorted(GPUS.items(), key=lambda item: item[1].memory)
               if not counts.above(gpu.room)]
    return fitting[0] if fitting else None


def commit() -> str:
    """Return the commit that is checked out."""
    return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()


def markdown(rows: dict[str, dict[str, Any]]) -> str:
    """Return the table, and what it was computed with."""
    gpus, commits = ({row[key] for row in rows.values()} for key in ("gpu", "commit"))
    lines = [f"Written by `scripts/dry_run_table.py` at commit {', '.join(sorted(commits))}: the recipe as it stands, "
             f"on its number of GPUs, each an {', '.join(sorted(gpus))}.", "",
             "| recipe | GPUs | encode | rollout | decode | update | rewards | peak, GiB | PFLOP | seconds "
             "| rollout / update | waits per step / replay | smallest GPU |", "|---|" + "---:|" * 11 + "---|"]
    for name, row in rows.items():
        phases, seconds = row["phases"], max(row["seconds"], 1)
        shares = " / ".join(f"{phases[key]['seconds'] / seconds:.0%}" for key in ("rollout", "update"))
        waits = " / ".join(f"{sum(row[key].values()):.2g}" for key in ("waits_per_step", "waits_per_replay"))
        cells = [f"`{name}`", f"{row['processes']}", *(f"{phases[key]['gib']:.1f}" for key in PHASES),
                 f"{row['rewards_gib']:.1f}", f"{row['peak_gib']:.1f}",
                 f"{sum(phase['pflop'] for phase in phases.values()):,.0f}",
                 f"{row['seconds']:,}", shares, waits, row["fits"] or "none"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write(page: Path, table: str) -> None:
    """Replace what stands between the page's two marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(before + BEGIN + table + END + rest.partition(END)[2], encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = recipe_table.names()
    parser.add_argument("recipes", nargs="*", help=f"of {', '.join(names)}; all unless given")
    parser.add_argument("--none", action="store_true", help="run none, and use the rows of the file")
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--json", type=Path, help="rows by recipe, which are read and written there")
    parser.add_argument("--docs", action="store_true", help="put the table into docs/dry_run.md")
    args = parser.parse_args()
    rows = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    for name in [] if args.none else args.recipes or names:
        rows[name] = row(name, args.gpu.upper())
        if args.json:
            args.json.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")
    table = markdown(dict(sorted(rows.items())))
    print(table)
    if args.docs:
        write(PAGE, table)


if __name__ == "__main__":
    main()
