"""Compare what two versions of the package make of every rare feature of the training loop, bit by bit.

    python scripts/measure/compare_features.py --save features.json            # run each feature for 4 epochs
    python scripts/measure/compare_features.py --against features.json         # again; exit code 1 if something differs
    python scripts/measure/compare_features.py --save old.json --tree ../old_clone  # of the package in another folder
    python scripts/measure/compare_features.py --save features.json --pairs    # each pair of features too, minutes

The features are those of tests/helpers/features.py of this folder, whatever the tree. Results are hashes of the trained
weights and metrics without times. They are equal on one machine with the same versions alone.
"""

import argparse
import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EPOCHS = 4
PLAIN = "plain"  # a run without any of the features
Results = dict[str, Any]


def take_package(tree: Path) -> None:
    """Import the package from one folder, and all else from this one."""
    if not (tree / "flowgrpo" / "__init__.py").is_file():
        raise SystemExit(f"{tree} has no package flowgrpo")
    sys.path.insert(0, str(tree.resolve()))
    import flowgrpo

    sys.path[0] = str(ROOT)
    assert Path(flowgrpo.__file__).parents[1] == tree.resolve(), "the package was imported before"


def machine() -> dict[str, str]:
    """Versions and processor, on which the bits of a result depend."""
    import torch

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    versions = {name: importlib.metadata.version(name) for name in ("torch", "diffusers", "transformers", "peft")}
    return {"python": platform.python_version(), **versions, "cpu": names[0] if names else platform.machine(),
            "capability": torch.backends.cpu.get_cpu_capability()}


def measure(epochs: int, pairs: bool) -> Results:
    """Run every feature alone, and every pair of them if asked; a run that is refused or fails has its error."""
    from tests.helpers import features

    found: Results = {}
    for kind in features.KINDS:
        for names in ((), *((name,) for name in features.TABLES[kind]), *(features.pairs(kind) if pairs else ())):
            label = f"{kind} {' + '.join(names) or PLAIN}"
            try:
                found[label] = features.run(kind, *names, epochs=epochs)._asdict()
            except Exception as error:  # of a tree that lacks the feature, or breaks it
                found[label] = {"error": f"{type(error).__name__}: {error}"}
    return json.loads(json.dumps(found))


def difference(before: Results | None, after: Results | None) -> str:
    """Return what differs between two results of a feature; empty: nothing. None: there is no result."""
    if before is None or after is None:
        return "new: it is not in the file" if before is None else "gone: it is in the file alone"
    if "error" in before or "error" in after:
        one, other = (each.get("error", "no error") for each in (before, after))
        return "" if one == other else f"{one} -> {other}"
    told = [] if before["weights"] == after["weights"] else ["weights"]
    if len(before["metrics"]) != len(after["metrics"]):
        return f"{len(before['metrics'])} epochs -> {len(after['metrics'])}"
    for epoch, (one, other) in enumerate(zip(before["metrics"], after["metrics"]), 1):
        if keys := [key for key in {**one, **other} if repr(one.get(key)) != repr(other.get(key))]:
            told.append(f"epoch {epoch}: " + ", ".join(f"{key} {one.get(key)} -> {other.get(key)}" for key in keys))
            break  # later ones follow from it
    return "; ".join(told)


def compare(before: Results, after: Results) -> int:
    """Print a line per feature; return 1 if one differs, else 0."""
    lines = {name: difference(before.get(name), after.get(name)) for name in {**before, **after}}
    for name, told in lines.items():
        print(f"{name:40} {told or 'equal'}")
    wrong = sum(map(bool, lines.values()))
    print(f"{len(lines) - wrong} equal, {wrong} different")
    return int(bool(wrong))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the results")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with results that were saved")
    parser.add_argument("--tree", type=Path, metavar="FOLDER", default=ROOT, help="whose package is run")
    parser.add_argument("--pairs", action="store_true", help="run every pair of features too")
    args = parser.parse_args()
    if not args.save and not args.against:
        parser.error("expected --save or --against")
    saved = json.loads(args.against.read_text()) if args.against else None
    take_package(args.tree)
    found = {"epochs": EPOCHS, "machine": machine(), "features": measure(EPOCHS, args.pairs)}
    if args.save:
        args.save.write_text(json.dumps(found, indent=1) + "\n")
    if saved:
        if saved["machine"] != found["machine"]:
            print(f"the file is of another machine, where other bits are no fault: {saved['machine']}")
        sys.exit(compare(saved["features"], found["features"]))


if __name__ == "__main__":
    main()
