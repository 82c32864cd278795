"""Table of dry runs: memory, FLOPs and seconds of an epoch of every packaged recipe, computed without a GPU.

    python scripts/docs/dry_run_table.py                          # every recipe, a minute each at most; prints Markdown
    python scripts/docs/dry_run_table.py flux_dev sdxl --json FILE  # those two; other rows of the file stay
    python scripts/docs/dry_run_table.py --none --json FILE       # the table of the file's rows

Nothing is downloaded: the models' configurations are those of flowgrpo/published.py.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import recipe_table
from revisions import commit

from flowgrpo.config import load
from flowgrpo.gpus import GIB, GPUS, gpu_named
from flowgrpo.tools.dry_run.estimate import Estimate, dry_run


def row(name: str, gpu: str) -> dict[str, Any]:
    """Run a recipe dry, as one of the processes that its comment names; return its row."""
    begun, count = time.monotonic(), recipe_table.processes(recipe_table.comment(name))
    counts = dry_run(load(recipe_table.path(name)), gpu_named(gpu), count)
    phases = {key: {"gib": round(phase.allocated / GIB, 1), "reserved_gib": round(phase.reserved / GIB, 1),
                    "pflop": round(phase.flops / 1e15, 2), "seconds": round(phase.duration, 1),
                    "kernels": phase.kernels, "tbyte": round(phase.traffic / 1e12, 1)}
              for key, phase in counts.phases.items()}
    return {"gpu": gpu, "processes": count, "phases": phases, "rewards_gib": round(counts.rewards / GIB, 1),
            "peak_gib": round(counts.peak / GIB, 1), "seconds": round(counts.seconds), "fits": smallest(counts),
            "waits_per_step": counts.step_waits, "waits_per_replay": counts.replay_waits, "commit": commit(),
            "took_seconds": round(time.monotonic() - begun, 1)}


def smallest(counts: Estimate) -> str | None:
    """Return the GPU of the least memory that the epoch fits; None if none does."""
    fitting = [name for name, gpu in sorted(GPUS.items(), key=lambda item: item[1].memory)
               if not counts.above(gpu.room)]
    return fitting[0] if fitting else None


def markdown(rows: dict[str, dict[str, Any]]) -> str:
    """Return the table, and what it was computed with."""
    gpus, commits = ({row[key] for row in rows.values()} for key in ("gpu", "commit"))
    lines = [f"Computed at commit {', '.join(sorted(commits))}: the recipe as it stands, on its number of GPUs, each "
             f"an {', '.join(sorted(gpus))}. GiB by phase, without the rewards.", "",
             "| recipe | encode | rollout | update | peak with rewards | smallest GPU |",
             "|---|" + "---:|" * 4 + "---|"]
    for name, row in rows.items():
        cells = [f"`{name}`", *(f"{row['phases'][key]['gib']:.1f}" for key in ("encode", "rollout", "update")),
                 f"{row['peak_gib']:.1f}", row["fits"] or "none"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = recipe_table.names()
    parser.add_argument("recipes", nargs="*", help=f"of {', '.join(names)}; all unless given")
    parser.add_argument("--none", action="store_true", help="run none, and use the rows of the file")
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--json", type=Path, help="rows by recipe, which are read and written there")
    args = parser.parse_args()
    rows = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    for name in [] if args.none else args.recipes or names:
        rows[name] = row(name, args.gpu.upper())
        if args.json:
            args.json.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")
    print(markdown(dict(sorted(rows.items()))))


if __name__ == "__main__":
    main()
