"""Files of a finished evaluation: `results.json`, `table.md`, `grid.png` and, of a sweep, `rlg.png`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flowgrpo.config.schema import Config
from flowgrpo.data import hub, sets, splits
from flowgrpo.data.suites import Suite
from flowgrpo.errors import UserError
from flowgrpo.evaluation import distances, findings, measured
from flowgrpo.evaluation.ledger import BaseLedger, Place
from flowgrpo.evaluation.pages import rlg_sweep, sources
from flowgrpo.evaluation.pages.before_after import frames_of, means_of
from flowgrpo.evaluation.pages.grid import Row, draw_grid
from flowgrpo.evaluation.pass_at_k import tries, verdicts
from flowgrpo.evaluation.plan import BASE, TUNED, Plan
from flowgrpo.storage import atomic
from flowgrpo.storage.json_files import finite

SHOWN = 12  # prompts of the page


def write(plan: Plan, suite: Suite, functions: dict[str, Any], ledger: BaseLedger, failed: dict[str, int],
          apart: Callable, distance: tuple[Sequence[str], str | Callable] = ((), "")) -> dict[str, Any]:
    """Write the table, the page and the findings of a finished evaluation to its folder; return the findings.

    failed: the number of samples without a score, by reward. apart: the distance between a prompt's samples.
    distance: names of distances between the tuned and the base's images, and their features.
    """
    known, shape = ledger.read(), (len(suite.cases), plan.samples)
    scores = {arm: {name: np.array([[known[place].get(name, math.nan) for place in row] for row in _places(arm, shape)])
                    for name in functions} for arm in plan.arms}
    spread = {arm: np.array([[apart(ledger.batch(row))] for row in _places(arm, shape)]) for arm in plan.arms} \
        if plan.samples > 1 else {}
    trained = list(plan.config.trained) if plan.config else None
    summary = findings.summarise(suite, scores, spread, trained, f"{plan.medium.unit}s")
    results = {"suite": {"name": suite.name, "format": suite.form, "prompts": shape[0],
                         "trained": seen(plan.config, suite)}, **plan.as_json(),
               "unit": plan.medium.unit, "failed": failed, **summary,
               "tries": {arm: tries({name: scores[arm][name] for name in verdicts(functions)},
                                    _answers(arm, shape, functions, ledger)) for arm in plan.arms}}
    if distance[0]:
        base, tuned = ((ledger.batch(row) for row in _places(arm, shape)) for arm in (BASE, TUNED))
        results["distances"] = distances.measured(*distance, base, tuned)
    text = json.dumps(finite(results), indent=2)
    atomic.write_text(ledger.folder / "results.json", text + "\n")
    atomic.write_text(ledger.folder / "table.md", findings.markdown(results))
    _page(plan, suite, scores, ledger)
    if plan.rlg == "sweep":
        rlg_sweep.plot(rlg_sweep.curves(plan.arms, results["arms"]), ledger.folder / "rlg.png")
    return results


def seen(config: Config | None, suite: Suite) -> int:
    """Return the number of a suite's prompts on which a run trained; 0 where its prompts are of the hub, or not there
    any more."""
    named = None if config is None else sets.SETS.get(config.prompts)
    if config is None or hub.named(named.train if named else config.prompts):
        return 0
    try:
        train, _ = splits.resolve(config)
    except UserError:
        return 0
    keys = {prompt.key for prompt in train}
    return sum(case.prompt.key in keys for case in suite.cases)


def _places(arm: str, shape: tuple[int, int]) -> list[list[Place]]:
    """Return the places of N prompts with S samples each."""
    return [[Place(arm, i, k) for k in range(shape[1])] for i in range(shape[0])]


def _answers(arm: str, shape: tuple[int, int], functions: dict[str, Any], ledger: BaseLedger) -> dict[str, list]:
    """Return the answers of an arm's texts [N,S], by the rewards that extract an answer."""
    reading = {name: reward.function for name, reward in functions.items() if hasattr(reward.function, "answer")}
    return {name: [[function.answer(text) for text in ledger.batch(row)] for row in _places(arm, shape)]
            for name, function in reading.items()}


def _page(plan: Plan, suite: Suite, scores: dict[str, dict[str, np.ndarray]], ledger: BaseLedger) -> None:
    """Write a page of some prompts, evenly over the suite, with the first sample of each arm."""
    rows = []
    for i in measured.evenly(len(suite.cases), SHOWN):
        prompt, samples = suite.cases[i].prompt, [ledger.load(Place(arm, i, 0)) for arm in plan.arms]
        numbers = [{name: float(values[i, 0]) for name, values in scores[arm].items()} for arm in plan.arms]
        rows.append(Row(prompt.text, samples, numbers, sources.of(prompt, frames_of(samples[0]))))
    draw_grid(ledger.folder / "grid.png", list(plan.arms), rows, means_of([scores[arm] for arm in plan.arms]),
              fps=plan.fps)
