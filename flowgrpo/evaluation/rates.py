"""Success rates of prompts: from an evaluation, a run or a file, or by the likelihood of their answers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flowgrpo.curriculum.history import RATES
from flowgrpo.curriculum.order import KEY
from flowgrpo.data.prompts import Prompt, answer_of
from flowgrpo.data.suites import load_suite
from flowgrpo.errors import UserError
from flowgrpo.evaluation.plan import SETTINGS, digest, entries
from flowgrpo.storage.checkpoint import VALUES
from flowgrpo.storage.json_files import read_object
from flowgrpo.storage.places import checkpoints

Rates = dict[str, list[float]]


def load(source: Path, sets: Sequence[str], reward: str | None = None) -> Rates:
    """Success rates by prompt key, the oldest first.

    source: the output of `flowgrpo eval` on one of the sets, a run whose curriculum records rates, or a .jsonl of
    {"prompt": TEXT, "rate": NUMBER}. reward: of an evaluation; None: its only one. Raises UserError.
    """
    if source.suffix == ".jsonl":
        given: Rates = {}
        try:
            for line in source.read_text(encoding="utf-8").splitlines():
                if line.strip():
                    entry = json.loads(line)
                    given.setdefault(entry["prompt"], []).append(float(entry["rate"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"--rates {source}: expected lines such as {{\"prompt\": \"a cat\", \"rate\": 0.5}} "
                            f"({error!r})") from None
        return given
    if (source / SETTINGS).is_file() and any(source.glob("scores-*.jsonl")):
        return _of_evaluation(source, sets, reward)
    if kept := checkpoints(source / "checkpoints"):
        memory = read_object([*kept.values()][-1] / VALUES, "give an older checkpoint's run", memory=dict)["memory"]
        rates = memory.get(RATES) or {key: [a / (a + b)] for key, (a, b) in memory.get(KEY, {}).items()}
        if rates:
            return rates
        raise UserError(f"{source}: the run records no success rates: train with a curriculum that does, such as "
                        "parts.curriculum: {type: Retention}, or give the output of `flowgrpo eval`")
    raise UserError(f"--rates: got {source}, expected the output of `flowgrpo eval`, a run's folder with a checkpoint, "
                    "or a .jsonl of prompts with their rates")


def _of_evaluation(source: Path, sets: Sequence[str], reward: str | None) -> Rates:
    settings = read_object(source / SETTINGS, "give another folder", rewards=dict)
    suite = next((suite for suite in map(load_suite, sets)
                  if digest([str(case) for case in suite.cases]) == settings.get("suite")), None)
    if suite is None:
        raise UserError(f"{source} is an evaluation of other prompts than {', '.join(sets)}: expected one of the same "
                        "file or set")
    names = [reward] if reward else [*settings["rewards"]]
    if len(names) > 1 or names[0] not in settings["rewards"]:
        raise UserError(f"--reward: got {reward}, expected one that {source} has: {', '.join(settings['rewards'])}")
    scores: dict[tuple[str, int], list[float]] = {}
    for entry in entries(source, "scores-*.jsonl"):
        arm, prompt, _ = entry["place"]
        if (value := entry["scores"].get(names[0])) is not None:
            scores.setdefault((arm, prompt), []).append(value)
    arm = "tuned" if any(arm == "tuned" for arm, _ in scores) else "base"
    return {suite.prompts[place].key: [sum(values) / len(values)] for (of, place), values in sorted(scores.items())
            if of == arm}


@torch.no_grad()
def likelihoods(policy: Any, prompts: Sequence[Prompt]) -> Rates:
    """Likelihood of every prompt's answer under a causal language model: exp of the mean log-probability of its tokens
    and its end. Prompts without an answer are left out."""
    rates: Rates = {}
    for prompt in prompts:
        if (answer := answer_of(prompt)) is None:
            continue
        ids = policy.answer(answer)[None]
        mask = torch.ones_like(ids, dtype=torch.bool)
        tokenized = policy.encode([prompt.text], images=[prompt.brings])
        scored = policy.log_probs(tokenized, torch.zeros(1, dtype=torch.int64), ids, mask, policy.plain)
        rates[prompt.key] = [scored.logp.mean().exp().item()]
    return rates
