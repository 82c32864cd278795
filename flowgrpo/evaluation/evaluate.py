"""A model on a suite of prompts: its samples, scored by several rewards, base and tuned on one seed.

Pictures are drawn by the stock pipeline, texts by the language model as a run evaluates it (draw.py).

Everything is saved as it is made (ledger.py), so that a killed evaluation goes on, and rewards can be added later
without drawing again. Under `accelerate launch` or `torchrun` every process takes an equal share of what is left to do.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from flowgrpo import rewards
from flowgrpo.config.reward_rules import WatchRule
from flowgrpo.config.schema import Config
from flowgrpo.distributed.processes import Processes
from flowgrpo.errors import UserError
from flowgrpo.evaluation import draw, findings, held_out, images, measured, texts
from flowgrpo.evaluation.ledger import Ledger, Place
from flowgrpo.evaluation.pages import rlg_sweep
from flowgrpo.evaluation.pages.grid import Row, draw_grid
from flowgrpo.evaluation.pass_at_k import tries, verdicts
from flowgrpo.evaluation.plan import BASE, TUNED, Medium, Plan, digest
from flowgrpo.evaluation.suites import Suite, load_suite
from flowgrpo.policies import build
from flowgrpo.rewards import Failed, pairwise
from flowgrpo.rewards.remote import exchange
from flowgrpo.rewards.score import columns
from flowgrpo.storage import paths
from flowgrpo.storage.json_files import finite

AT_ONCE = 8  # samples that are scored in one call
SHOWN = 12  # prompts of the page


@images.memory_told()
def evaluate(source: str, suite: str, names: Sequence[str] | dict[str, WatchRule], output: str | Path, *,
             lora: str | Path | None = None, base: bool = False, samples: int = 1, steps: int | None = None,
             guidance: float | None = None, seed: int = 0, features: str | Callable = "pixels",
             rlg: Sequence[float] = (), batch: int | None = None, temperature: float | None = None,
             max_tokens: int | None = None, precision: str | None = None) -> dict[str, Any]:
    """Draw a suite, score it, and write its samples, `results.json`, `table.md` and `grid.png` to the folder `output`;
    returns the results.

    source: a model, or a run (then its model with its result, and its `eval` steps and guidance); suite: as of
    `load_suite`; names: rewards, of which a run's own keep their rules, or rules by name; without any those of the run.
    lora: weights to
    load into a model; base: draw the model without them too, from the same seeds, and compare. samples: per prompt;
    features: what the distance of a prompt's pictures is taken of, as of `rewards.guards.Diversity`. rlg: draw
    the tuned pictures with base + rlg * (tuned - base); of several numbers each is drawn, and `rlg.png` shows the
    rewards over them. temperature and max_tokens: of a language model, in place of the run's `text` settings; several
    samples are drawn at temperature 1 where neither says. precision: None takes the run's, or what suits the device.
    Of several samples pass@k is told, by rewards of 0 and 1.
    A sample depends on the seed, the number of its prompt and its number among the prompt's, and on nothing else; with
    a `batch` of several per call (None: one picture, or 8 texts), to rounding. UserError for what cannot be loaded, and
    for a folder that holds another evaluation.
    """
    plan = make_plan(source, lora, base, samples, steps, guidance, seed, rlg, temperature, max_tokens, precision)
    processes, apart = _processes(), plan.medium.apart(features)
    if processes.first:
        paths.require_folder(output)
    chosen, functions = load_suite(suite), _functions(plan.config, names)
    if plan.medium.modality:
        rewards.require_modality(functions, plan.medium.modality)
    rewards.require_routes(functions, [prompt.metadata for prompt in chosen.prompts])
    ledger = plan.medium.ledger(Path(output), processes.rank)
    settings = plan.told() | {"suite": digest([str(case) for case in chosen.cases]),
                              "rewards": held_out.rules(functions)}
    ledger.check(settings)
    known = _known(ledger, plan, functions)
    processes.wait()  # what is left to do is the same for all: nobody writes before all have read
    if processes.first:
        ledger.settle(settings)
    failed = _make(plan, chosen, functions, ledger, known, processes, batch or plan.medium.together)
    if not processes.first:
        return {}
    return _finish(plan, chosen, functions, ledger, failed, apart)


def make_plan(source: str, lora: str | Path | None, base: bool, samples: int, steps: int | None,
              guidance: float | None, seed: int, rlg: Sequence[float] = (), temperature: float | None = None,
              max_tokens: int | None = None, precision: str | None = None) -> Plan:
    """Tell runs from models, and pictures from texts. UserError for a run with another LoRA, for a base with nothing to
    compare it to, for weights of RLG without a tuned model or beside a base, and for options of the other medium."""
    run = Path(source)
    if (run / "config.yaml").is_file():
        if lora is not None:
            raise UserError(f"{source} is a run, whose result is evaluated: leave out --lora, or give its model")
        lora = run
    tuned = None if lora is None else Path(lora)
    if tuned is None and base:
        raise UserError("--base compares with a result: give a run, or a model and --lora")
    if tuned is None and rlg:
        raise UserError("--rlg guides a result away from its base: give a run, or a model and --lora")
    if base and len(rlg) > 1:
        raise UserError("--base: several weights of --rlg are told side by side; leave it out, weight 0 is the base")
    config = images.run_config(tuned) if tuned is not None and (tuned / "config.yaml").is_file() else None
    model = config.model if config is not None and tuned == run else source
    medium = draw.TEXTS if build.writes(model, config) else draw.PICTURES
    _require_fitting(medium, {"steps": steps, "guidance": guidance, "rlg": rlg or None},
                     {"temperature": temperature, "max-tokens": max_tokens})
    if medium is draw.TEXTS:
        asked = texts.asked(config, samples, temperature, max_tokens)
    else:
        if config is not None:
            steps, guidance = steps or config.eval.steps, config.eval.guidance if guidance is None else guidance
        asked = images.call_arguments(model, tuned, steps, guidance)
    arms = {BASE: 0.0} if base or tuned is None else {}
    arms |= {f"rlg-{weight:g}": weight for weight in sorted(rlg)} if len(rlg) > 1 else \
        {TUNED: rlg[0] if rlg else 1.0} if tuned is not None else {}
    if len(arms) < len(rlg):
        raise UserError(f"--rlg: got a weight twice in {', '.join(f'{weight:g}' for weight in rlg)}")
    return Plan(model, tuned, arms, "sweep" if len(rlg) > 1 else next(iter(rlg), None), config, asked, samples, seed,
                medium, precision)


def _require_fitting(medium: Medium, of_pictures: dict[str, Any], of_texts: dict[str, Any]) -> None:
    """UserError for an option of the other medium, which would have no effect."""
    unread, of = (of_pictures, "a denoiser") if medium is draw.TEXTS else (of_texts, "a language model")
    for name, value in unread.items():
        if value is not None:
            raise UserError(f"--{name}: is of {of}, and the model draws {medium.unit}s: leave it out")


def _functions(config: Config | None, names: Sequence[str] | dict[str, WatchRule]) -> dict[str, Any]:
    rules: dict[str, WatchRule] = config.trained | config.watched if config else {}
    given = names if isinstance(names, dict) else {name: rules.get(name, WatchRule()) for name in names}
    asked = given or rules
    if not asked:
        raise UserError("--rewards: expected the names of rewards, such as --rewards scene (`flowgrpo rewards` lists "
                        "them)")
    made = rewards.compose(asked, config.cache if config else None)
    # Of a run's own, those that see groups are left out; one that is asked for by name is refused.
    own = {name: made.pop(name) for name in asked if config and not names and name in config.trained}
    return pairwise.measured(own, made)


def _processes() -> Processes:
    """Those that the launcher started, this one alone without a launcher."""
    from accelerate import PartialState

    from flowgrpo.distributed.processes import PATIENCE

    return Processes(PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE))


# --- drawing and scoring ---------------------------------------------------------------------------------------------

def _make(plan: Plan, suite: Suite, functions: dict[str, Any], ledger: Ledger, known: dict[Place, dict[str, float]],
          processes: Processes, batch: int) -> dict[str, int]:
    """Draw and score what is not there yet. Returns on how many samples each reward failed, of all processes."""
    hand, at_once = plan.medium.hand(plan, processes.device), max(AT_ONCE, batch)
    failed: Counter[str] = Counter()
    for arm in plan.arms:
        processes.wait()  # the base's samples of all are there before they are compared with
        places = [Place(arm, i, k) for i in range(len(suite.cases)) for k in range(plan.samples)]
        own = processes.own([place for place in places if not functions.keys() <= known.get(place, {}).keys()])
        with processes.together(), tqdm(total=len(own), desc=f"{suite.name}, {arm}", unit=plan.medium.unit,
                                        leave=False, disable=None if processes.first else True) as bar:
            for part, some in enumerate(_parts(own, batch, at_once)):
                missing = [place for place in some if not ledger.has(place)]
                for first in range(0, len(missing), batch):
                    places = missing[first:first + batch]
                    drawn = hand.draw(arm, [suite.cases[place.prompt].prompt for place in places], places)
                    for place, each in zip(places, drawn):
                        ledger.save(place, each)
                with contextlib.nullcontext() if part else exchange.brief():
                    failed += _score(some, suite, functions, ledger, known, plan.unchanged)
                bar.update(len(some))
    return dict(zip(functions, processes.total([failed[name] for name in functions])))


def _parts(places: Sequence[Place], first: int, rest: int) -> list[Sequence[Place]]:
    """What is scored in one call: a few samples at first, so that a mistake in a reward costs seconds."""
    starts = [0, *range(first, len(places), rest)] if places else []
    return [places[start:end] for start, end in zip(starts, [*starts[1:], len(places)])]


def _known(ledger: Ledger, plan: Plan, functions: dict[str, Any]) -> dict[Place, dict[str, float]]:
    """The scores that stand, of samples that are there; those that earlier calls lacked a base for are asked for again
    where there is one."""
    again = {name for name, reward in functions.items() if plan.unchanged and rewards.sees_base(reward)}
    return {place: {name: value for name, value in scores.items() if name not in again or not math.isnan(value)}
            for place, scores in ledger.read().items() if ledger.has(place)}


def _score(places: Sequence[Place], suite: Suite, functions: dict[str, Any], ledger: Ledger,
           known: dict[Place, dict[str, float]], base: str | None) -> Counter[str]:
    """Score samples by the rewards that one of them lacks, and write down what each lacks; base: the arm that is
    compared with. Returns how many failed: they are not written down, so that the next call asks for them again."""
    missing = {name: reward for name, reward in functions.items()
               if any(name not in known.get(place, {}) for place in places)}
    prompts = [suite.cases[place.prompt].prompt for place in places]
    compared = base is not None and any(map(rewards.sees_base, missing.values()))
    found = columns(missing, ledger.batch(places), [p.text for p in prompts], [p.metadata for p in prompts],
                    base=ledger.batch([p._replace(arm=base) for p in places]) if compared else None)
    failed: Counter[str] = Counter()
    for place, values in zip(places, zip(*found)):
        lacked = {name: value for name, value in zip(missing, values) if name not in known.get(place, {})}
        failed.update(name for name, value in lacked.items() if isinstance(value, Failed))
        ledger.write(place, {name: float(np.float32(value))  # as `rewards.score` has it
                             for name, value in lacked.items() if not isinstance(value, Failed)})
    return failed


# --- what was found --------------------------------------------------------------------------------------------------

def _finish(plan: Plan, suite: Suite, functions: dict[str, Any], ledger: Ledger, failed: dict[str, int],
            apart: Callable) -> dict[str, Any]:
    known, shape = ledger.read(), (len(suite.cases), plan.samples)
    scores = {arm: {name: np.array([[known[place].get(name, math.nan) for place in row] for row in _places(arm, shape)])
                    for name in functions} for arm in plan.arms}
    spread = {arm: np.array([[apart(ledger.batch(row))] for row in _places(arm, shape)]) for arm in plan.arms} \
        if plan.samples > 1 else {}
    trained = list(plan.config.trained) if plan.config else None
    found = findings.summarise(suite, scores, spread, trained, f"{plan.medium.unit}s")
    results = {"suite": {"name": suite.name, "format": suite.form, "prompts": shape[0]}, **plan.told(),
               "unit": plan.medium.unit, "failed": failed, **found,
               "tries": {arm: tries({name: scores[arm][name] for name in verdicts(functions)},
                                    _answers(arm, shape, functions, ledger)) for arm in plan.arms}}
    text = json.dumps(finite(results), indent=2)
    (ledger.folder / "results.json").write_text(text + "\n")
    (ledger.folder / "table.md").write_text(findings.markdown(results))
    _page(plan, suite, scores, ledger)
    if plan.rlg == "sweep":
        rlg_sweep.plot(rlg_sweep.curves(plan.arms, results["arms"]), ledger.folder / "rlg.png")
    return results


def _places(arm: str, shape: tuple[int, int]) -> list[list[Place]]:
    """The places of N prompts with S samples each."""
    return [[Place(arm, i, k) for k in range(shape[1])] for i in range(shape[0])]


def _answers(arm: str, shape: tuple[int, int], functions: dict[str, Any], ledger: Ledger) -> dict[str, list]:
    """What the texts [N,S] of an arm answer, by the rewards that read an answer out of them."""
    reading = {name: reward.function for name, reward in functions.items() if hasattr(reward.function, "answer")}
    return {name: [[function.answer(text) for text in ledger.batch(row)] for row in _places(arm, shape)]
            for name, function in reading.items()}


def _page(plan: Plan, suite: Suite, scores: dict[str, dict[str, np.ndarray]], ledger: Ledger) -> None:
    """A page of some prompts, evenly over the suite, with the first sample of each arm."""
    rows = [Row(suite.cases[i].prompt.text, [ledger.load(Place(arm, i, 0)) for arm in plan.arms],
                [{name: float(values[i, 0]) for name, values in scores[arm].items()} for arm in plan.arms])
            for i in measured.evenly(len(suite.cases), SHOWN)]
    draw_grid(ledger.folder / "grid.png", list(plan.arms), rows)
