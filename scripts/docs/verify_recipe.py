"""Record what a run on a GPU shows of its recipe, for the column `level` of docs/recipes.md.

    python scripts/docs/verify_recipe.py runs/sdxl_24gb     # a run of the recipe of that name
    python scripts/docs/recipe_table.py --none              # writes the page

The level is `loads` (the model is loaded, the rewards scored, the base is measured), `N epochs`, or `curve`: all epochs
of the recipe, after which each trained reward has risen on held-out prompts, with 95 % confidence. It is read from the
run's files. A run on a CPU and one of other settings than the recipe's, epochs aside, are refused. Recipes without such
a run are `gated` where tests/golden/gates.json has them (scripts/measure/gates.py), and `computed` otherwise.
"""

import json
import sys
from pathlib import Path
from typing import Any

from flowgrpo.config import load
from flowgrpo.config.schema import Config
from flowgrpo.evaluation.statistics import ALL
from flowgrpo.storage.json_files import read_lines

ROOT = Path(__file__).parents[2]
FILE = ROOT / "scripts" / "docs" / "verified.json"
GATES = ROOT / "tests" / "golden" / "gates.json"
SAME = ("model", "method", "parts", "reward", "prompts", "image", "adapter")


def verified(name: str, file: Path = FILE) -> str:
    """Return the level of a recipe."""
    runs, gates = (json.loads(each.read_text(encoding="utf-8")) for each in (file, GATES))
    return str(runs[name]["level"]) if name in runs else "gated" if name in gates else "computed"


def level(run: Path, recipe: Config) -> str:
    """Return the level that a run's files show. SystemExit for a run that does not count."""
    config = load(run / "config.yaml")
    different = [key for key in SAME if getattr(config, key) != getattr(recipe, key)]
    trains = [config.train.model_copy(update={"epochs": 1}), recipe.train.model_copy(update={"epochs": 1})]
    if different or trains[0] != trains[1]:
        raise SystemExit(f"{run} differs from its recipe in {', '.join(different) or 'train'}: it shows nothing of it")
    if "cpu" in machine(run)["device"].lower():
        raise SystemExit(f"{run} ran on a CPU: it shows nothing of a recipe for a GPU")
    epochs = len(read_lines(run / "metrics.jsonl"))
    if epochs >= recipe.train.epochs and rose(run, [*recipe.trained]):
        return "curve"
    if epochs:
        return f"{epochs} epoch{'s' * (epochs > 1)}"
    if not (run / "before.json").is_file():
        raise SystemExit(f"{run} has not measured the base yet: it shows nothing")
    return "loads"


def rose(run: Path, rewards: list[str]) -> bool:
    """True if each of the rewards has risen on held-out prompts, by the lower end of its interval."""
    file = run / "summary.json"
    compared = json.loads(file.read_text(encoding="utf-8"))["compared"] if file.is_file() else {}
    return bool(compared) and all(compared[name][ALL]["change"]["low"] > 0 for name in rewards)


def machine(run: Path) -> dict[str, Any]:
    """Return the machine of a run."""
    facts: dict[str, Any] = json.loads((run / "report" / "machine.json").read_text(encoding="utf-8"))
    return facts


def main(run: Path, file: Path = FILE) -> None:
    """Add what a run shows to the file."""
    recipe = load(ROOT / "configs" / f"{run.name}.yaml")
    facts = machine(run)
    known = json.loads(file.read_text(encoding="utf-8"))
    known[run.name] = {"level": level(run, recipe), "device": facts["device"], "processes": facts["processes"],
                       "commit": facts.get("commit", "unknown")}
    file.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{run.name}: {known[run.name]['level']}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
