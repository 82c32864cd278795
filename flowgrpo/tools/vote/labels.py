"""Preference pairs from the scores of samples: which samples of a prompt become a pair, and its verdicts by aspect."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowgrpo import rewards
from flowgrpo.advantages.group import weighted_sum
from flowgrpo.config.reward_rules import RewardRule
from flowgrpo.contrib.taste.votes import relative
from flowgrpo.data.pairs import ASPECT, OVERALL
from flowgrpo.errors import UserError
from flowgrpo.rewards import Composed, Tally
from flowgrpo.storage import atomic, paths
from flowgrpo.tools.vote.judged import Group, score


@dataclass(frozen=True)
class Choice:
    """Choice of the pairs of a prompt.

    every: all pairs of its samples; otherwise its best sample and its worst.
    least: total by which the chosen one has to be better, more than that.
    tie: difference of an aspect up to which it is a tie.
    """

    every: bool = False
    least: float = 0.0
    tie: float = 0.0

    def pairs(self, totals: Tensor) -> list[tuple[int, int]]:
        """(chosen, rejected) of the totals [G] of a prompt's samples; one with NaN is in no pair."""
        ranked = [place for place in totals.argsort(descending=True, stable=True).tolist() if not totals[place].isnan()]
        ends = list(zip(ranked[:1], ranked[-1:]))
        pairs = [(good, bad) for at, good in enumerate(ranked) for bad in ranked[at + 1:]] if self.every else ends
        return [(good, bad) for good, bad in pairs if float(totals[good] - totals[bad]) > self.least]


def require(output: Path, rules: dict[str, RewardRule]) -> None:
    """Raise UserError for a file that this command did not write, and for rewards that cannot name aspects."""
    if output.suffix != ".jsonl":
        raise UserError(f"--output {output}: expected a .jsonl file")
    paths.require_file(output)
    if output.exists() and not scores_file(output).is_file():
        raise UserError(f"--output {output} holds pairs that this command did not write: name another file")
    if not rules:
        raise UserError("--rewards: expected the names of rewards, such as --rewards scene (`flowgrpo list rewards` "
                        "lists them)")
    for name, rule in rules.items():
        if rule.limit is not None:
            raise UserError(f"--rewards: {name!r} has a limit, which a run's epochs have; give it a weight")
        if len(rules) > 1 and (name == OVERALL or not ASPECT.fullmatch(name)):
            raise UserError(f"--rewards: {name!r} cannot name an aspect: expected letters, digits, _ and -, other than "
                            f"{OVERALL}; in FILE.yaml give it a label, such as colour: {{use: {name!r}}}")


def label(groups: Sequence[Group], rules: dict[str, RewardRule], output: Path, choice: Choice
          ) -> tuple[int, int, dict[str, tuple[int, str]]]:
    """Score the samples of prompts, and write the pairs that they make to `output`, a .jsonl file of pairs. Return the
    numbers of pairs and of prompts without one, and by reward that of failures, with the last one.

    Each reward is an aspect, if there are several; the aspect `overall` is their weighted sum after transforms. Margins
    are differences of these. Scores are kept beside `output`, so the same command goes on.
    Raises UserError if no prompt has a pair, and as rewards do.
    """
    composed = rewards.compose(rules)
    rewards.require_routes(composed, [group.prompt.metadata for group in groups])
    atomic.make_folder(output.parent)
    tally = Tally()
    table = score(groups, composed, scores_file(output), tally)
    weights = [rule.weight for rule in rules.values()]
    rows = [_rows(group, scores, composed, weights, output.parent, choice) for group, scores in zip(groups, table)]
    failed = {name: (count, tally.said[name]) for name, count in tally.failed.items()}
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for several in rows for row in several]
    if not lines:
        why = f"; {failed[next(iter(failed))][1]}" if failed else ""
        raise UserError(f"no prompt has a pair: the samples of each score the same, or differ by {choice.least:g} at "
                        f"most: sample more per prompt, or lower --least{why}")
    atomic.write_text(output, "".join(lines))
    return len(lines), sum(not several for several in rows), failed


def scores_file(output: Path) -> Path:
    return output.with_suffix(".scores.jsonl")


def _rows(group: Group, scores: Tensor, composed: dict[str, Composed], weights: Sequence[float], folder: Path,
          choice: Choice) -> list[dict[str, Any]]:
    """Lines of a prompt's pairs. scores: [G, R]; weights: of the R rewards."""
    shaped = rewards.transform_scores(composed, scores[None])
    [totals] = weighted_sum(shaped, weights)
    signed = shaped[0] * torch.tensor(weights, dtype=shaped.dtype).sign()
    rows = []
    for good, bad in choice.pairs(totals):
        apart = dict(zip(composed, (signed[good] - signed[bad]).tolist())) if len(composed) > 1 else {}
        apart = {name: value for name, value in apart.items() if value == value}
        chosen, rejected = (sample if isinstance(sample, str) else relative(sample, folder)
                            for sample in (group.samples[good], group.samples[bad]))
        row: dict[str, Any] = {"prompt": group.prompt.text, "chosen": chosen, "rejected": rejected}
        if apart:
            row["aspects"] = {name: "tie" if abs(value) <= choice.tie else "chosen" if value > 0 else "rejected"
                              for name, value in apart.items()}
        rows.append(row | {"margins": {OVERALL: float(totals[good] - totals[bad])} | apart})
    return rows
