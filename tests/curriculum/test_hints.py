"""Hints for groups that fail: which prompts get one, how many, and what is trained then."""

import pytest
import torch

from flowgrpo.curriculum.epoch_batch import EpochBatch
from flowgrpo.curriculum.resampling import Hints
from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.processes import Processes
from tests.helpers import tiny_text
from tests.helpers.refusals import message

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
    assert place == 0 and once.shown == "2+2=\n\nHint: count" and once.key == once.shown
    assert once.text == "2+2=" and once.metadata == LED.metadata and once.learned == once and once.unguided == LED
    found.add(found.replace([(place, once)]), torch.zeros(1, 2, 1), torch.zeros(1, 2))
    [(place, twice)] = part(found)
    assert place == 3 and twice.shown == "2+2=\n\nHint: count\nit is 4"
    found.add(found.replace([(place, twice)]), torch.zeros(1, 2, 1), torch.zeros(1, 2))
    assert part(found) == [] and found.standing() == [1, 2, 4]  # none is left: the last one stays
    assert LED.metadata == {"answer": 4, "hints": ["count", "it is 4"]} and part.helped(LED) == once


def test_beginnings_of_a_solution_for_those_below_the_mark():
    part = Hints(shares=(0.25, 0.5, 1.0), text="{prompt} ({hint})")
    texts, prompt = [], SOLVED
    while (prompt := part.helped(prompt)) is not None:
        texts.append(prompt.shown)
    assert texts == ["5-66= (take five)", "5-66= (take five away)", "5-66= (take five away from sixty six)"]
    assert part.helped(LED) is None
    failing = [[0.0, 0.0]]
    assert Hints(after=0.5)(drawn([LED], failing, epoch=4)) == []
    assert len(Hints(after=0.5)(drawn([LED], failing, epoch=5))) == 1
    assert len(Hints(fail=0.25)(drawn([LED], [[0.25, 0.0]]))) == 1 and Hints()(drawn([LED], [[0.25, 0.0]])) == []
    assert len(Hints()(drawn([LED], [[float("nan"), 0.0]]))) == 1


def led(**options):
    """(trainer, what its reward has seen, what its policy has read); the group with the last hint can earn a reward."""
    seen: list[tuple[str, dict]] = []
    read: list[str] = []
    def reward(texts, prompts, metadata):
        seen.extend((prompt, {key: entry[key] for key in entry if key != "completion_tokens"})
                    for prompt, entry in zip(prompts[::4], metadata[::4]))
        turns = {prompt: sum(earlier == prompt for earlier, _ in seen) for prompt in prompts}
        return [float(text.count("7") + len(text)) if turns[prompt] == len(entry["hints"]) + 1 else 0.0
                for text, prompt, entry in zip(texts, prompts, metadata)]
    trainer = tiny_text.trainer(rewards={"short": reward}, **{"method": "grpo+scaf_grpo"} | options, train__prompts=2,
                                parts={"redraw": {"after": 0.0, "text": "{prompt}{hint}"}})
    trainer.prompts = [Prompt("2+2=", metadata={"answer": 4, "hints": ["5", "8"]}),
                       Prompt("7+7=", metadata={"answer": 14, "hints": ["8"]})]
    encode = trainer.rollouts.encode
    trainer.rollouts.encode = lambda texts, **given: read.append(texts) or encode(texts, **given)
    return trainer, seen, read


def test_an_epoch_trains_on_the_prompt_with_its_hint():
    """And rewards and the report see the prompt without it."""
    trainer, seen, read = led()
    metrics = trainer.run_epoch()
    assert metrics["reward/short/mean"] == 0 and metrics["grad_norm"] > 0 and trainer.first_ratio.max_log_ratio <= 1e-5
    assert [*map(sorted, read[:3])] == [["2+2=", "7+7="], ["2+2=5", "7+7=8"], ["2+2=5\n8"]]
    assert sorted(read[3]) == ["2+2=", "2+2=5", "2+2=5\n8", "7+7=", "7+7=8"]  # what is learned
    four, fourteen = (prompt.metadata for prompt in trainer.prompts)
    assert sorted(seen, key=str) == [("2+2=", four)] * 3 + [("7+7=", fourteen)] * 2
    shown = [prompt.text for _, prompt, *_ in (*trainer.scoring.extremes.best, *trainer.scoring.extremes.worst)]
    assert shown and {*shown} <= {"2+2=", "7+7="}


@pytest.mark.parametrize("options", [dict(shares=(0.5, 0.25)), dict(shares=(0.0,)), dict(after=2.0),
                                     dict(text="{hint}")])
def test_impossible_hints(options):
    assert "Hints: " in message(Hints, **options, error=ValueError)
