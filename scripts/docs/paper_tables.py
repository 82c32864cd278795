"""Tables of published settings beside our recipes' in docs/get_started/papers.md.

    python scripts/docs/paper_tables.py             # the page, with the costs of scripts/docs/paper_costs.json
    python scripts/docs/paper_tables.py --costs     # computes the costs first: a dry run of each recipe, minutes each

Published settings with their sources are typed in `papers.json`, as read in a repository at the commit that it
names. Ours are read from the recipes in configs/papers/: none is typed.
"""

import json
import sys
from pathlib import Path
from typing import Any

from flowgrpo.config import load
from flowgrpo.config.schema import Config
from flowgrpo.gpus import GIB, gpu_named
from flowgrpo.methods import validate
from flowgrpo.methods.method import Method
from flowgrpo.tools.dry_run.estimate import dry_run

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "get_started" / "papers.md"
FOLDER = ROOT / "configs" / "papers"
COSTS = ROOT / "scripts" / "docs" / "paper_costs.json"
GPU, GPUS = "A100", 8  # of the recipes
MOST = 200  # GPU-hours that one GPU may be asked for
HEAD = """# Three papers, setting by setting

Settings of three papers' released code, at the named commit, and those of our recipes. **None of these recipes has been
run at full size.** On eight GPUs of 80 GB, the command without `--dry-run` prepares, trains, evaluates on the published
test set, the base too, and prints the paper's number beside ours. PickScore and HPSv2.1 are of DrawBench.

```
flowgrpo reproduce flow_grpo/geneval --dry-run     # three commands, and the computed cost
```

`check` computed the memory and hours below, on eight A100 of 80 GB, without rewards, evaluations and the exchange of
gradients.
"""


def papers() -> dict[str, Any]:
    """Return the published settings by paper."""
    content: dict[str, Any] = json.loads((ROOT / "scripts" / "docs" / "papers.json").read_text(encoding="utf-8"))
    return content


def recipe(paper: str, task: str) -> tuple[Config, Method]:
    """Return a recipe with its resolved method."""
    config = load(FOLDER / f"{paper}_{task}.yaml")
    return config, validate.resolve(config, "flow")


def value(key: str, config: Config, method: Method) -> Any:
    """Return our value under a dotted key; `parts.PART` and `parts.PART.FIELD` are of the resolved method."""
    if key == "gpus":
        return GPUS
    head, *path = key.split(".")
    if head == "parts":
        part = method.parts()[path[0]]
        return getattr(part, path[1]) if len(path) > 1 else part
    if key == "reward":
        return ", ".join(config.trained)
    found: Any = getattr(config, head)
    for name in path:
        found = getattr(found, name)
    return found


def shown(setting: Any) -> str:
    """Return a value as a cell."""
    if isinstance(setting, float):
        return f"{setting:g}"
    return str(setting) if isinstance(setting, (str, int)) else f"`{setting}`"


def of(task: str, given: Any) -> Any:
    """Return what a published setting or a note says of a task."""
    return given[task] if isinstance(given, dict) else given


def same(published: Any, ours: Any) -> bool:
    """True if a published setting is ours; a model counts by its name."""
    return published == ours or isinstance(ours, str) and str(published) == ours.split("/")[-1]


def rows(paper: str, task: str) -> tuple[list[str], list[str]]:
    """Return the rows of the settings that differ, and the names of those that are equal.

    Raises ValueError for a difference without a reason.
    """
    config, method = recipe(paper, task)
    lines, alike = list[str](), list[str]()
    for name, key, published, note in papers()[paper]["rows"]:
        theirs, ours, why = of(task, published), value(key, config, method), of(task, note)
        equal = same(theirs, ours)
        if not equal and not why:
            raise ValueError(f"{paper}_{task}: {name} is {theirs} there and {ours} here: write why into papers.json")
        if why:
            lines.append(f"| {name} | {shown(theirs)} | {shown(ours)} | {why} |")
        else:
            alike.append(name)
    return lines, alike


def compute() -> None:
    """Write the costs of all recipes: a dry run of each on one of its GPUs."""
    found = {}
    for paper, facts in papers().items():
        for task in facts["recipes"]:
            config, _ = recipe(paper, task)
            counts = dry_run(config, gpu_named(GPU), GPUS)
            found[f"{paper}_{task}"] = {"gpu": GPU, "processes": GPUS, "peak": round(counts.peak / GIB, 2),
                                        "seconds": round(counts.seconds, 1), "epochs": config.train.epochs}
    COSTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def costs() -> dict[str, Any]:
    """Return the computed costs by recipe: peak in GiB of each GPU, seconds of an epoch."""
    content: dict[str, Any] = json.loads(COSTS.read_text(encoding="utf-8"))
    return content


def cost(paper: str, task: str) -> str:
    """Return the sentences on a recipe's cost. Raises ValueError for costs of another number of epochs."""
    found, epochs = costs()[f"{paper}_{task}"], recipe(paper, task)[0].train.epochs
    if found["epochs"] != epochs:
        raise ValueError(f"{paper}_{task}: its costs are of {found['epochs']} epochs, and it has {epochs}: run "
                         "scripts/docs/paper_tables.py --costs")
    hours = found["seconds"] * epochs / 3600
    total = hours * found["processes"]
    several = " That is too long for one GPU: use several." if total > MOST else ""
    return (f"Computed on {found['processes']} {found['gpu']} (80 GB): {found['peak']:.1f} GiB each, "
            f"{found['seconds']:,.0f} s an epoch, {hours:,.0f} h for {epochs:,} epochs, "
            f"{total:,.0f} GPU-hours.{several}")


def page() -> str:
    """Return docs/get_started/papers.md: of each paper the costs of its recipes, and the settings that differ."""
    text = [HEAD]
    for paper, facts in papers().items():
        tasks = facts["recipes"]
        named = "\n".join(f"- `papers/{paper}_{task}`, as `{name}`: "
                          f"{cost(paper, task).partition(': ')[2].partition('. That')[0].rstrip('.')}"
                          for task, name in tasks.items())
        lines, equal = rows(paper, next(iter(tasks)))
        alike = len(equal) + sum(map(same_by_another_name, lines))
        text.append(f"## {facts['title']}\n\nSettings: {facts['source']}.\n\nPublished result: {facts['result']}\n\n"
                    f"{named}\n\n{alike} settings of each are equal. These differ:\n\n| setting | published | ours | "
                    "why |\n|---|---|---|---|\n" + "\n".join(differences(paper, list(tasks))) + "\n")
    return "\n".join(text)


def differences(paper: str, tasks: list[str]) -> list[str]:
    """Return the rows of the settings that differ, one for all tasks where these agree, else with the task's name.

    A setting that is the same under another name is none.
    """
    tables = {task: {line.split(" | ")[0]: line for line in rows(paper, task)[0]} for task in tasks}
    first, *others = tables.values()
    lines = list[str]()
    for name, line in first.items():
        if same_by_another_name(line):
            continue
        if all(other.get(name) == line for other in others):
            lines.append(line)
            continue
        of: dict[str, list[str]] = {}
        for task, table in tables.items():
            of.setdefault(table[name], []).append(task)
        lines += [each.replace(name, f"{name} ({', '.join(same)})", 1) for each, same in of.items()]
    return lines


def same_by_another_name(line: str) -> bool:
    """True for a row whose reason says no more than that the setting is the same."""
    return any(line.endswith(f"| {reason} |") for reason in (
        "the same", "the same: `batch`", "every step but the last: the same nine"))


if __name__ == "__main__":
    if "--costs" in sys.argv[1:]:
        compute()
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE} written")
