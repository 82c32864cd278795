"""Results of an evaluation: base against tuned per reward and category, pass@k and majority vote (maj@n) over the
samples of a prompt, and the files `results.json`, `table.md`, `grid.png` and, of a sweep, `rlg.png`.
"""

import json
import math
from collections.abc import Callable, Hashable, Sequence
from statistics import multimode
from typing import Any

import numpy as np

from flowgrpo.config.schema import Config
from flowgrpo.data import hub, sets
from flowgrpo.data.suites import Suite
from flowgrpo.errors import UserError
from flowgrpo.escaped import markdown as markdown_of
from flowgrpo.escaped import plain
from flowgrpo.escaped import table as markdown_table
from flowgrpo.evaluation import distances, measured
from flowgrpo.evaluation.distances import DISTANCES
from flowgrpo.evaluation.pages import figures, sources
from flowgrpo.evaluation.pages.before_after import means_of
from flowgrpo.evaluation.pages.grid import Row, draw_grid
from flowgrpo.evaluation.plan import BASE, TUNED, AnyLedger, Place, Plan
from flowgrpo.evaluation.statistics import (
    ALL,
    CONFIDENCE,
    STUDENT,
    WILSON,
    Interval,
    Scores,
    cell,
    change,
    decimals,
    drift,
    interval,
    mean_of,
    win_rate,
)
from flowgrpo.evaluation.statistics import show as print_table
from flowgrpo.log import plain_console
from flowgrpo.nouns import quantity
from flowgrpo.rewards.reward import about
from flowgrpo.storage import atomic
from flowgrpo.storage.json_files import finite

SHOWN = 12  # prompts of the page


def summarise(suite: Suite, scores: dict[str, dict[str, np.ndarray]], spread: dict[str, np.ndarray],
              trained: Sequence[str] | None, unit: str = "images") -> dict:
    """Summarise an evaluation: means with intervals per arm, reward and category (including `all prompts`). With both
    arms also the change, tuned minus base on the same prompt and seed, the win rate, diversity, and drift in words.

    scores: [N, S] by arm and reward. spread: distance between the samples of each prompt [N, 1] by arm, or empty.
    unit: name of the samples.
    `category_means` is the mean over the categories, the score of some suites (GenEval).
    """
    table = Scores(scores, {ALL: list(range(len(suite.cases)))} | suite.categories)
    arms = table.means()
    summary: dict[str, Any] = {"confidence": CONFIDENCE, "arms": arms, "category_means": {
        arm: {name: mean_of([Interval(**entry) for category, entry in categories.items() if category != ALL]).as_json()
              for name, categories in of_arm.items()} for arm, of_arm in arms.items()},
        "diversity": {arm: interval(values, STUDENT).as_json() for arm, values in spread.items()}}
    if scores.keys() != {"base", "tuned"}:
        return summary | {"compared": {}, "drift": []}
    moved, won = table.pairs(change), table.pairs(win_rate)
    closer = change(spread["base"], spread["tuned"], STUDENT) if spread else None
    if closer is not None:
        summary["diversity"]["change"] = closer.as_json()
    changes = {name: Interval(**of_reward[ALL]) for name, of_reward in moved.items()}
    return summary | {"compared": {name: {"change": moved[name], "win_rate": won[name]} for name in moved},
                      "drift": drift(changes, trained, closer, unit)}


def table(results: dict[str, Any], reward: str) -> tuple[list[str], list[list[str]]]:
    """Headings and lines of one reward's table: a line per category, all prompts last."""
    arms, compared = results["arms"], results["compared"].get(reward)
    first = next(iter(arms.values()))[reward]
    moved = [entry["mean"] for entry in compared["change"].values()] if compared else []
    digits = decimals((entry["mean"] for of_arm in arms.values() for entry in of_arm[reward].values()), moved)
    lines = []
    for name in [*(name for name in first if name != ALL), ALL]:
        columns = [arms[arm][reward][name] for arm in arms]
        cells = [cell(column, digits) for column in columns]
        if compared:
            cells += [cell(compared["change"][name], digits, "+"), cell(compared["win_rate"][name], 3)]
        lines.append([name, str(columns[0]["prompts"]), *cells])
    return ["category", "prompts", *arms, *(["change", "win rate"] if compared else [])], lines


def methods(results: dict[str, Any], reward: str) -> str:
    [used] = {entry["method"] for arm in results["arms"].values() for entry in arm[reward].values()}
    paired = "; of changes and win rates Newcombe's, from the same limits"
    return f"95 % intervals: {used}{paired if used == WILSON and reward in results['compared'] else ''}"


def notes(results: dict[str, Any]) -> list[str]:
    """Notes below the tables, one sentence each."""
    said = []
    for name in next(iter(results["arms"].values())):
        means = {arm: of_arm[name] for arm, of_arm in results["category_means"].items()}
        if all(entry["prompts"] for entry in means.values()):
            digits = decimals(entry["mean"] for entry in means.values())
            listed = ", ".join(f"{arm} {cell(entry, digits)}" for arm, entry in means.items())
            said.append(f"{name}, mean over the categories: {listed}")
    unit, suite = f"{results['unit']}s", results["suite"]
    if trained := suite.get("trained"):
        said.append(f"the run trained on {trained} of the {quantity(suite['prompts'], 'prompt')}: what it does on new "
                    "ones, a suite without them shows")
    said += [f"{name} failed on {count} {unit}, which are left out: the same command asks for them again"
             for name, count in results["failed"].items() if count]
    said += [f"{name}, {arm}: {', '.join(f'{what} {cell(entry)}' for what, entry in entries.items())}"
             for arm, rewards in results["tries"].items() for name, entries in rewards.items()]
    if results["diversity"]:
        cells = ", ".join(f"{name} {cell(entry, sign='+' * (name == 'change'))}"
                          for name, entry in results["diversity"].items())
        said.append(f"distance between the {unit} of a prompt: {cells}")
    if found := results.get("distances"):
        values = ", ".join(f"{name} {found[name]:.4g}" for name in DISTANCES if name in found)
        said.append(f"tuned {unit} to the base's, {found['images']} each, in the features {found['features']}: "
                    f"{values}")
    return [*said, *results["drift"]]


def title(results: dict[str, Any], reward: str) -> str:
    suite = results["suite"]
    return f"{reward} on {suite['name']} ({quantity(suite['prompts'], 'prompt')}, {results['samples']} per prompt)"


def markdown(results: dict[str, Any]) -> str:
    parts = []
    for reward in next(iter(results["arms"].values())):
        heads, lines = table(results, reward)
        shown = markdown_table([list(map(markdown_of, line)) for line in [heads, *lines]],
                               ["---", *["---:"] * (len(heads) - 1)])
        parts.append(f"## {markdown_of(title(results, reward))}\n\n{shown}\n\n{methods(results, reward)}")
    said = "\n".join(f"- {markdown_of(line)}" for line in notes(results))
    return "\n\n".join([*parts, *([said] if said else [])]) + "\n"


def show(results: dict[str, Any]) -> None:
    console = plain_console()
    for reward in next(iter(results["arms"].values())):
        print_table(console, title(results, reward), methods(results, reward), *table(results, reward))
    for note in notes(results):
        console.print(plain(note), highlight=False)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that one of k samples is right, by the unbiased estimate from n samples with c right:
    1 - C(n - c, k) / C(n, k) (Codex, 2107.03374, equation 1).
    Raises ValueError unless 1 <= k <= n and 0 <= c <= n."""
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass@{k} of {samples} samples, {right} of them right: expected k from 1 and right from 0 to "
                         "the number of samples")
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def majority(answers: Sequence[Hashable | None], scores: Sequence[float]) -> float:
    """Score of the most common answer to a prompt; on a tie the mean over the tied answers.

    answers: None for a sample without an answer, which gets no vote. With no answers at all the score is 0. NaN if a
    score is NaN.
    """
    if any(math.isnan(score) for score in scores):
        return math.nan
    leading = multimode(answer for answer in answers if answer is not None)
    means = [np.mean([score for answer, score in zip(answers, scores) if answer == one]) for one in leading]
    return float(np.mean(means)) if means else 0.0


def powers(samples: int) -> list[int]:
    """1, 2, 4, ... up to the number of samples, and that number."""
    return sorted({*(2**i for i in range(samples.bit_length())), samples})


def verdicts(rewards: dict[str, Any]) -> list[str]:
    """Rewards that may mean right and wrong: range 0 to 1, or unknown. A penalty's best score of 0 is no failure."""
    return [name for name, reward in rewards.items() if about(reward).range in (None, (0, 1))]


def tries(scores: dict[str, np.ndarray], answers: dict[str, list[list[Hashable | None]]]) -> dict[str, dict[str, Any]]:
    """Pass@k of every reward whose scores are all 0 or 1, and maj@n of those with answers, with intervals over prompts.

    scores: [N, S] by reward, NaN where it does not apply. answers: [N, S] by reward that extracts them from texts.
    """
    results: dict[str, dict[str, Any]] = {}
    for name, values in scores.items():
        there, count = ~np.isnan(values).any(1), values.shape[1]
        if count < 2 or not there.any() or not np.isin(values[there], (0, 1)).all():
            continue
        right = values[there].sum(1).astype(int)
        found = {f"pass@{k}": [pass_at_k(count, c, k) for c in right.tolist()] for k in powers(count)}
        if name in answers:
            found[f"maj@{count}"] = [majority(*both) for both, applies in zip(zip(answers[name], values), there)
                                     if applies]
        results[name] = {what: interval(np.array(of_prompts)[:, None], WILSON, count).as_json()
                         for what, of_prompts in found.items()}
    return results


def write(plan: Plan, suite: Suite, functions: dict[str, Any], ledger: AnyLedger, failed: dict[str, int],
          apart: Callable, distance: tuple[Sequence[str], str | Callable] = ((), "")) -> dict[str, Any]:
    """Write the table, the page and the findings of a finished evaluation to its folder; return the findings.

    failed: the number of samples without a score, by reward. apart: the distance between a prompt's samples.
    distance: names of distances between the tuned and the base's images, and their features.
    """
    known, prompts = ledger.read(), len(suite.cases)
    places = {arm: [[Place(arm, i, k) for k in range(plan.samples)] for i in range(prompts)] for arm in plan.arms}
    scores = {arm: {name: np.array([[known[place].get(name, math.nan) for place in row] for row in rows])
                    for name in functions} for arm, rows in places.items()}
    spread = {arm: np.array([[apart(ledger.batch(row))] for row in rows]) for arm, rows in places.items()} \
        if plan.samples > 1 else {}
    extract = {name: reward.function.answer for name, reward in functions.items()
               if hasattr(reward.function, "answer")}  # rewards that extract an answer from a text
    answers = {arm: {name: [[answer(text) for text in ledger.batch(row)] for row in rows]
                     for name, answer in extract.items()} for arm, rows in places.items()}
    trained = [name for name, rule in plan.config.trained.items() if rule.direction] if plan.config else None
    summary = summarise(suite, scores, spread, trained, f"{plan.medium.unit}s")
    results = {"suite": {"name": suite.name, "format": suite.form, "prompts": prompts,
                         "trained": count_trained(plan.config, suite)}, **plan.as_json(),
               "unit": plan.medium.unit, "failed": failed, **summary,
               "tries": {arm: tries({name: scores[arm][name] for name in verdicts(functions)}, answers[arm])
                         for arm in plan.arms}}
    if distance[0]:
        sides: Any = ((ledger.batch(row) for row in places[arm]) for arm in (BASE, TUNED))
        results["distances"] = distances.measure_distances(*distance, *sides)
    text = json.dumps(finite(results), indent=2)
    atomic.write_text(ledger.folder / "results.json", text + "\n")
    atomic.write_text(ledger.folder / "table.md", markdown(results))
    rows = []  # of a page of some prompts, evenly over the suite, with the first sample of each arm
    for i in measured.evenly(prompts, SHOWN):
        prompt, samples = suite.cases[i].prompt, [ledger.load(Place(arm, i, 0)) for arm in plan.arms]
        numbers = [{name: float(values[i, 0]) for name, values in scores[arm].items()} for arm in plan.arms]
        rows.append(Row(prompt.text, samples, numbers, sources.read_sources(prompt, samples[0])))
    draw_grid(ledger.folder / "grid.png", list(plan.arms), rows, means_of([scores[arm] for arm in plan.arms]),
              fps=plan.fps)
    if plan.rlg == "sweep":
        figures.plot(plan.arms, results["arms"], ledger.folder / "rlg.png")
    return results


def count_trained(config: Config | None, suite: Suite) -> int:
    """Number of a suite's prompts on which a run trained; 0 where its prompts are of the hub, or not there any more."""
    named = None if config is None else sets.SETS.get(config.prompts)
    if config is None or hub.is_dataset(named.train if named else config.prompts):
        return 0
    try:
        train, _ = sets.resolve(config)
    except UserError:
        return 0
    keys = {prompt.key for prompt in train}
    return sum(case.prompt.key in keys for case in suite.cases)
