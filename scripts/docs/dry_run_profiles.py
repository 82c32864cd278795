"""Write the stored counts of `flowgrpo check RECIPE --gpu NAME`: flowgrpo/tools/dry_run/profiles.json.

    python scripts/docs/dry_run_profiles.py                # the recipes whose counts are not known; those unused go
    python scripts/docs/dry_run_profiles.py sdxl_24gb      # that one, anew

Each recipe is run dry once, half a minute, for all GPUs. Nothing is downloaded.
"""

import argparse
import json
from dataclasses import astuple
from typing import Any

import recipe_table
from revisions import commit

from flowgrpo.config import features, load
from flowgrpo.config.schema import Config
from flowgrpo.contrib.taste import session
from flowgrpo.gpus import GPUS
from flowgrpo.policies import options
from flowgrpo.policies.pipelines import few_steps
from flowgrpo.tools.dry_run import profiles
from flowgrpo.tools.dry_run.estimate import dry_run


def runs(name: str) -> dict[str, tuple[Config, int]]:
    """Return what the check of a recipe runs dry by digest, with the number of processes: as one process and as those
    of its comment, with either value in place of `auto`, and as a session of taste."""
    config, _ = options.fitting(load(recipe_table.path(name)))
    found = {}
    for count in sorted({1, recipe_table.processes(recipe_table.comment(name))}):
        for fits in (False, True):
            each = config
            for feature in features.dry_runs(features.all()):
                each = feature.resolve_auto(each, count, lambda held, fits=fits: fits)
            found[profiles.digest_of(each, count)] = each, count
            if count == 1 and (config.image.frames or 1) == 1 and few_steps.ahead(config.model, config.load).why:
                sitting = session.of_recipe(each)
                found[profiles.digest_of(sitting, 1)] = sitting, 1
    return {digest: run for digest, run in found.items() if digest is not None}


def profile(name: str, config: Config, processes: int) -> dict[str, Any]:
    """Return the counts of a recipe for all GPUs, with the commit."""
    every = profiles.EveryGPU(*astuple(GPUS["H100"]))
    return profiles.as_profile(dry_run(config, every, processes)) | {"commit": commit(), "recipe": name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = recipe_table.names()
    parser.add_argument("recipes", nargs="*", help=f"of {', '.join(names)}; all unless given")
    args = parser.parse_args()
    wanted = {digest for name in names for digest in runs(name)}
    known = {digest: found for digest, found in profiles.packaged().items() if digest in wanted}
    for name in args.recipes or names:
        for digest, (config, processes) in runs(name).items():
            if digest not in known or args.recipes:
                known[digest] = profile(name, config, processes)
                write(known)
                print(name, processes, flush=True)
    write(known)


def write(known: dict[str, Any]) -> None:
    """Write the profiles, one a line."""
    lines = (f"{json.dumps(digest)}: {json.dumps(found, separators=(',', ':'))}" for digest, found in
             sorted(known.items()))
    profiles.PACKAGED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
