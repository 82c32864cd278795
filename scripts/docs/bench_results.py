"""Results of benches as the documentation keeps them, docs/data/bench_results.json.

Kept are numbers that the pages show. Scores of single prompts, folders and seconds of the machine are left out.
"""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowgrpo.config.parse import read_yaml
from flowgrpo.errors import UserError
from flowgrpo.storage.json_files import read_object
from flowgrpo.tools.bench import models, table
from flowgrpo.tools.bench.plan import BENCH

MEND = "run the command of the bench again"
KEPT = ("model", "unit", "evaluations", "budget", "seeds", "points", "prompts", "measured_prompts", "measured",
        "trained", "watched", "reference", "base", "base_tasks", "goals", "test", "errors")
OF_METHOD = ("label", "given", "adjusted", "accuracy", "low", "high", "lowest", "highest", "gain", "reached", "epochs",
             "evaluations", "seconds_ratio", "kl", "zero_variance", "diversity", "watched", "tasks", "curve",
             "difference")
OF_TUNED = ("accuracy", "low", "high", "lowest", "highest", "lr", "clip", "difference")
ELSEWHERE = ("model", "tracker", "reward", "eval.rewards", "eval.grid")  # said apart, or they change no number
DIGITS = 6  # significant ones of kept numbers


def collected(folder: Path) -> dict[str, Any]:
    """Return what the documentation keeps of a bench's folder.

    limit: `--prompts` of the bench.
    Raises UserError for a folder without results, or without those of the reference.
    """
    for name in ("results.json", BENCH):
        if not (folder / name).is_file():
            raise UserError(f"{folder}: it has no {name}, expected the folder of a finished `flowgrpo compare methods`")
    told = read_object(folder / "results.json", MEND, methods=list)
    runs = [run for method in told["methods"] for run in method["runs"] + method.get("tuned", {}).get("runs", [])]
    if told["reference"] is None:
        raise UserError(f"{folder}: no run of the reference has finished: {MEND}")
    first = next(method["runs"][0] for method in told["methods"] if method["label"] == told["reference"])
    recipe = folder / "runs" / Path(first["folder"]).name / "config.yaml"  # also of a bench that was moved
    return rounded({
        **{key: told[key] for key in KEPT}, "limit": read_object(folder / BENCH, MEND)["prompts"], **facts(runs),
        "settings": settings(told["model"], read_yaml(recipe)),
        "methods": [kept(method) | {"commits": facts(method["runs"])["commits"]} for method in table.rank(told)]})


def facts(runs: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return commits, versions and precisions of runs, each once."""
    told = [(machine.get("commit", "unknown"), machine["flowgrpo"], machine["precision"].split()[0])
            for machine in (run["machine"] for run in runs)]
    return {key: list(dict.fromkeys(values)) for key, values in zip(("commits", "versions", "precisions"), zip(*told))}


def settings(name: str, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a run's recipe under the keys that all methods of a model share."""
    return {key: functools.reduce(lambda inner, part: inner[part], key.split("."), recipe)
            for key in models.common_settings(name) if key not in ELSEWHERE}


def kept(method: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept of a method's results.

    finals: (seed, accuracy) of every run. tuned: the best of the sweep, if there is one.
    """
    values = {key: method[key] for key in OF_METHOD} | {"finals": finals(method["runs"])}
    if tuned := method.get("tuned"):
        values["tuned"] = {key: tuned[key] for key in OF_TUNED} | {"finals": finals(tuned["runs"])}
    return values


def finals(runs: Iterable[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Return (seed, accuracy) of every run."""
    return [(run["seed"], run["accuracy"]) for run in runs]


def rounded(value: Any) -> Any:
    """Return a JSON value with DIGITS significant digits of all fractions."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(inner) for inner in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


# --- file ------------------------------------------------------------------------------------------------------------

def load(file: Path) -> list[dict[str, Any]]:
    """Return the kept results of all models; none if there is no file."""
    return read_object(file, "take it from the repository", models=list)["models"] if file.is_file() else []


def merged(before: Iterable[dict[str, Any]], after: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return results with those of the given models replaced, in the order in which the bench lists models.

    Raises UserError for two results of one model.
    """
    names = [results["model"] for results in after]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two folders are benches of {twice}, expected one for each model")
    by_name = {results["model"]: results for results in (*before, *after)}
    return [by_name[name] for name in models.MODELS if name in by_name]


def dumped(results: Iterable[Mapping[str, Any]]) -> str:
    """Return the text of the file, with a line for every method."""
    parts = []
    for model in results:
        head = json.dumps({key: value for key, value in model.items() if key != "methods"})
        parts.append(f'{head[:-1]}, "methods": [\n' + ",\n".join(map(json.dumps, model["methods"])) + "]}")
    return '{"models": [\n' + ",\n".join(parts) + "]}\n"
