"""Hints for groups that fail: which prompts get one, how many, and what is trained then."""

from __future__ import annotations

import pytest
import torch

from flowgrpo.curriculum.epoch_batch import EpochBatch
from flowgrpo.curriculum.resampling import Hints
from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.processes import Processes
from tests.helpers import tiny_text

LED = Prompt("2+2=", metadata={"answer": 4, "hints": ["count", "it is 4"]})
PLAIN = Prompt("1+2=", metadata={"answer": 3})
SOLVED = Prompt("5-66=", metadata={"solution": "take five away from sixty six"})


def drawn(prompts: list[Prompt], totals: list[list[float]], epoch: int = 5) -> EpochBatch:
    found = EpochBatch([LED, PLAIN, SOLVED], epoch, 10, 0, Processes())
    found.add(prompts, torch.tensor(totals)[..., None], torch.tensor(totals))
    return found


def test_a_group_that_fails_gets_one_hint_more_each_time():
    part = Hints()
    found = drawn([LED, PLAIN, LED], [[0.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    [(place, once)] = part(found)  # one has no hints, one is solved
    assert place == 0 and once.text == "2+2=\n\nHint: count" and once.metadata["answer"] == 4
    found.add(found.replace([(place, once)]), torch.zeros(1, 2, 1), torch.zeros(1, 2))
    [(place, twice)] = part(found)
    assert place == 3 and twice.text == "2+2=\n\nHint: count\nit is 4"
    found.add(found.replace([(place, twice)]), torch.zeros(1, 2, 1), torch.zeros(1, 2))
    assert part(found) == [] and found.standing() == [1, 2, 4]  # none is left: the last one stays
    assert LED.metadata == {"answer": 4, "hints": ["count", "it is 4"]} and part.helped(LED) == once


def test_ever_longer_beginnings_of_the_solution():
    part = Hints(shares=(0.25, 0.5, 1.0), text="{prompt} ({hint})")
    texts, prompt = [], SOLVED
    while (prompt := part.helped(prompt)) is not None:
        texts.append(prompt.text)
    assert texts == ["5-66= (take five)", "5-66= (take five away)", "5-66= (take five away from sixty six)"]
    assert part.helped(LED) is None


def test_nobody_is_helped_at_first_or_above_the_mark():
    failing = [[0.0, 0.0]]
    assert Hints(after=0.5)(drawn([LED], failing, epoch=4)) == []
    assert len(Hints(after=0.5)(drawn([LED], failing, epoch=5))) == 1
    assert len(Hints(fail=0.25)(drawn([LED], [[0.25, 0.0]]))) == 1 and Hints()(drawn([LED], [[0.25, 0.0]])) == []
    assert len(Hints()(drawn([LED], [[float("nan"), 0.0]]))) == 1


def test_an_epoch_trains_on_the_prompt_with_its_hint():
    told: list[tuple[str, int]] = []

    def reward(texts, prompts, metadata):
        told.extend((prompt, entry["answer"]) for prompt, entry in zip(prompts[::4], metadata[::4]))
        return [float(text.count("7") + len(text)) if "8" in prompt else 0.0 for text, prompt in zip(texts, prompts)]

    trainer = tiny_text.trainer(rewards={"short": reward}, method="grpo+scaf_grpo", train__prompts=2,
                                parts={"redraw": {"after": 0.0, "text": "{prompt}{hint}"}})
    trainer.prompts = [Prompt("2+2=", metadata={"answer": 4, "hints": ["5", "8"]}),
                       Prompt("7+7=", metadata={"answer": 14, "hints": ["8"]})]
    metrics = trainer.run_epoch()
    assert metrics["reward/short/mean"] == 0 and metrics["grad_norm"] > 0 and trainer.first_ratio.found <= 1e-5
    assert sorted(told) == [("2+2=", 4), ("2+2=5", 4), ("2+2=5\n8", 4), ("7+7=", 14), ("7+7=8", 14)]


@pytest.mark.parametrize("options", [dict(shares=(0.5, 0.25)), dict(shares=(0.0,)), dict(after=2.0),
                                     dict(text="{hint}")])
def test_impossible_hints(options):
    with pytest.raises(ValueError, match="Hints: "):
        Hints(**options)
