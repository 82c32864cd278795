"""Evaluation of a model on a suite of prompts: samples scored by several rewards, base and tuned on one seed.

Images are drawn by the stock pipeline, texts by the language model as a run evaluates it (draw.py).

Results are saved as they are made (plan.py), so a killed evaluation resumes, and rewards can be added later without
sampling again. Under `accelerate launch` or `torchrun` every process takes an equal share of the remaining work.
"""

import contextlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import torch

from flowgrpo import domains, rewards
from flowgrpo.config.reward_rules import WatchRule
from flowgrpo.config.schema import Config
from flowgrpo.data.suites import Suite, load_suite
from flowgrpo.device import require_generators
from flowgrpo.distributed.processes import PATIENCE, Processes
from flowgrpo.distributed.signals import promptly
from flowgrpo.errors import UserError
from flowgrpo.evaluation import best_of as choice
from flowgrpo.evaluation import distances, draw, findings, held_out, run_rewards, samplers
from flowgrpo.evaluation.plan import BASE, TUNED, AnyLedger, Place, Plan, digest
from flowgrpo.log import bar
from flowgrpo.policies import build, checkpoints, loading
from flowgrpo.rewards import Failed
from flowgrpo.rewards.remote import exchange
from flowgrpo.rewards.score import columns
from flowgrpo.storage import paths

AT_ONCE = 8  # samples scored in one call


@loading.memory_told()
def evaluate(source: str, suite: str, names: Sequence[str] | dict[str, WatchRule], output: str | Path, *,
             features: str | Callable = "pixels", batch: int | None = None, distance: Sequence[str] = (),
             samples: int = 1, rlg: Sequence[float] = (), **options: "Unpack[PlanOptions]") -> dict[str, Any]:
    """Sample a suite, score it, and write samples, `results.json`, `table.md` and `grid.png` to the folder `output`;
    returns the results.

    source, samples, rlg: see `make_plan`. options: see `PlanOptions`.
    suite: see `load_suite`.
    names: rewards, where a run's rewards keep their rules, or rules by name; empty: those of the run. They judge for
    the suite's prompts, whatever an enhancer makes of these.
    features: space of the distance between a prompt's images, see `rewards.guards.Diversity`.
    distance: "fid", "kid" or both, of the tuned images to the base's, in `features`; see distances.py.
    A sample depends only on the seed, its prompt's number and its number within the prompt. With a `batch` of several
    per call (None: 1 image, 8 texts) this holds up to rounding.
    Raises UserError for what cannot be loaded, and for a folder that holds another evaluation.
    """
    from accelerate import PartialState

    plan = make_plan(source, samples=samples, rlg=rlg, **options)
    # Refuse what does not go together, before anything is drawn.
    processes = Processes(PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE))
    apart = draw.distance_between(plan.medium, features)
    if processes.first:
        paths.require_folder(output)
    chosen, functions = load_suite(suite), run_rewards.rewards_by_name(plan.config, names)
    require_generators(len(chosen.cases) * samples, "samples")
    if distance:
        if plan.medium is draw.TEXTS:
            raise UserError("--distance: is of images, and the model writes completions: leave it out")
        if plan.arms.keys() != {BASE, TUNED}:
            raise UserError("--distance: is of the tuned images to the base's: add --base")
        side = (plan.config or Config()).image
        distances.require(distance, features, len(chosen.cases) * samples,
                          (side.height or distances.SIDE, side.width or distances.SIDE))
    if plan.medium.modality:
        rewards.require_modality(functions, plan.medium.modality)
    rewards.require_routes(functions, [prompt.metadata for prompt in chosen.prompts])
    # Take up what earlier calls have drawn and scored in this folder.
    ledger = plan.medium.ledger(Path(output), processes.rank)
    settings = plan.as_json() | {"suite": digest([str(case) for case in chosen.cases]),
                              "rewards": held_out.rules(functions)}
    ledger.check(settings)
    edited = rewards.edited_rewards(ledger.code(), functions)
    # Scores that are kept: not those of edited rewards, nor those that lacked a base if there is one now.
    again = {name for name, reward in functions.items() if plan.base_arm and rewards.sees_base(reward)}
    known = {place: {name: value for name, value in scores.items()
                     if name not in edited and (name not in again or not math.isnan(value))}
             for place, scores in ledger.read().items() if ledger.has(place)}
    processes.wait()  # the remaining work is the same for all: no one writes before all have read
    if processes.first and edited:
        print(f"the file of {', '.join(edited)} has changed since it scored these samples: they are scored again",
              file=sys.stderr)
    with paths.undone(ledger.folder):
        if processes.first:
            ledger.settle(settings, rewards.code_hashes(functions), edited)
        failed = _make(plan, chosen, functions, ledger, known, processes, batch or plan.medium.together)
    if not processes.first:
        return {}
    return findings.write(plan, chosen, functions, ledger, failed, apart, (distance, features))


class PlanOptions(TypedDict, total=False):
    """Options of `make_plan`, of which `evaluate` and `sample_file` take those that they do not set.

    lora: weights to load into a model. base: also sample without them, from the same seeds, and compare.
    temperature, max_tokens: of a language model, in place of the run's `text` settings. Several samples default to
    temperature 1.
    precision: None takes the run's, or the device's default. epoch: of a run's checkpoint, in place of its result.
    best_of: draws per sample, of which the one with the highest reward `by` is kept, a name or its rule by name.
    enhancer: language model or run that rewrites the prompts of images.
    generates: "text" or "image", of a language model with an image head; None: as the run has it, or texts.
    """

    lora: str | Path | None
    base: bool
    steps: int | None
    guidance: float | None
    seed: int
    temperature: float | None
    max_tokens: int | None
    precision: str | None
    epoch: int | None
    best_of: int
    by: str | dict[str, Any]
    enhancer: str | None
    generates: str | None


def make_plan(source: str, lora: str | Path | None = None, *, base: bool = False, samples: int = 1,
              steps: int | None = None, guidance: float | None = None, seed: int = 0, rlg: Sequence[float] = (),
              temperature: float | None = None, max_tokens: int | None = None, precision: str | None = None,
              epoch: int | None = None, best_of: int = 1, by: str | dict[str, Any] = "", enhancer: str | None = None,
              generates: str | None = None) -> Plan:
    """Resolve the source, a model or a run (its model and result, with its `eval` steps and guidance), to a plan for
    images or for texts.

    samples: per prompt; with several, pass@k of rewards of 0 and 1 is reported.
    rlg: draw the tuned images with base + rlg * (tuned - base); several weights are all drawn, and `rlg.png` plots
    the rewards over them.
    The other options: see `PlanOptions`.
    Raises UserError for a run with another LoRA, for a base with nothing to compare, for RLG weights without a tuned
    model or with a base, and for options of the other medium."""
    model, tuned = checkpoints.source(source, lora, epoch)
    if tuned is None and base:
        raise UserError("--base compares with a result: give a run, or a model and --lora")
    if tuned is None and rlg:
        raise UserError("--rlg guides a result away from its base: give a run, or a model and --lora")
    if tuned is not None:
        loading.require_weights(tuned)
    config = checkpoints.config_of(tuned)
    medium = draw.IMAGES
    if build.writes(model, config):
        medium = draw.DRAWINGS if (generates or (config.text.generates if config else "")) == "image" else draw.TEXTS
    elif generates is not None:
        raise UserError(f"--generates {generates}: is of language models, and {model} is a pipeline: leave it out")
    # Options of another medium would have no effect.
    of_images: dict[str, Any] = {"steps": steps, "guidance": guidance, "rlg": rlg or None, "enhancer": enhancer}
    of_texts: dict[str, Any] = {"temperature": temperature, "max-tokens": max_tokens}
    unread, whose = (of_texts, "a language model") if medium is draw.IMAGES else (of_images, "a denoiser")
    if medium is draw.DRAWINGS:  # it has a guidance, and as many tokens as its grid
        unread = of_images | {"guidance": None, "max-tokens": max_tokens}
    for name, value in unread.items():
        if value is not None:
            raise UserError(f"--{name}: is of {whose}, and the model generates {medium.unit}s: leave it out")
    if medium is not draw.IMAGES:
        asked = domains.sampled_by("tokens").asked
        arguments = asked(config, samples * best_of, temperature, max_tokens, generates, guidance, model)
    else:
        arguments = samplers.call_arguments(model, tuned, steps, guidance)
    arms = {BASE: 0.0} if base or tuned is None else {}
    arms |= {f"rlg-{weight:g}": weight for weight in sorted(rlg)} if len(rlg) > 1 else \
        {TUNED: rlg[0] if rlg else 1.0} if tuned is not None else {}
    if len(arms) < len(rlg):
        raise UserError(f"--rlg: got a weight twice in {', '.join(f'{weight:g}' for weight in rlg)}")
    return Plan(model, tuned, arms, "sweep" if len(rlg) > 1 else next(iter(rlg), None), config, arguments, samples,
                seed, medium, precision, choice.make(best_of, by, config),
                None if enhancer is None else samplers.Enhancer(enhancer, seed))


# --- drawing and scoring ---------------------------------------------------------------------------------------------

def _make(plan: Plan, suite: Suite, functions: dict[str, Any], ledger: AnyLedger, known: dict[Place, dict[str, float]],
          processes: Processes, batch: int) -> dict[str, int]:
    """Sample and score what is missing. Returns the number of failed samples by reward, over all processes."""
    hand, prompts, at_once = draw.Drawer(plan, processes.device), suite.prompts, max(AT_ONCE, batch)
    failed: Counter[str] = Counter()
    for arm in plan.arms:
        processes.wait()  # the tuned samples are compared with the base's of all processes
        places = [Place(arm, i, k) for i in range(len(prompts)) for k in range(plan.samples)]
        remaining = processes.own([place for place in places if not functions.keys() <= known.get(place, {}).keys()])
        with processes.collective(), bar(total=len(remaining), title=f"{suite.name}, {arm}", unit=plan.medium.unit,
                                         shown=processes.first) as shown:
            # A few samples first, so that a reward's mistake costs seconds.
            starts = [0, *range(batch, len(remaining), at_once)] if remaining else []
            for part, (start, end) in enumerate(zip(starts, [*starts[1:], len(remaining)])):
                some = remaining[start:end]
                hand.fill(ledger, prompts, [place for place in some if not ledger.has(place)], batch)
                with contextlib.nullcontext() if part else exchange.brief():
                    failed += _score(some, suite, functions, ledger, known, plan.base_arm, plan.fps)
                shown.update(len(some))
    return dict(zip(functions, processes.total([failed[name] for name in functions])))


def _score(places: Sequence[Place], suite: Suite, functions: dict[str, Any], ledger: AnyLedger,
           known: dict[Place, dict[str, float]], base: str | None, fps: float | None) -> Counter[str]:
    """Score samples by the rewards missing for any of them, and store the missing scores. base: the arm to compare
    with. fps: frames per second of clips. Returns the number of failures by reward; failures are not stored, so the
    next call retries them."""
    missing = {name: reward for name, reward in functions.items()
               if any(name not in known.get(place, {}) for place in places)}
    prompts = [suite.cases[place.prompt].prompt for place in places]
    bases: Any = (ledger.batch([p._replace(arm=base) for p in places])
                  if base is not None and any(map(rewards.sees_base, missing.values())) else None)
    scores = promptly(lambda: columns(missing, ledger.batch(places), [p.text for p in prompts],
                                      [p.metadata for p in prompts], base=bases, fps=fps))
    failed: Counter[str] = Counter()
    for place, values in zip(places, zip(*scores)):
        lacked = {name: value for name, value in zip(missing, values) if name not in known.get(place, {})}
        failed.update(name for name, value in lacked.items() if isinstance(value, Failed))
        ledger.write(place, {name: float(np.float32(value))  # as `rewards.score` returns it
                             for name, value in lacked.items() if not isinstance(value, Failed)})
    return failed
