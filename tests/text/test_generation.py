"""Completions that are drawn at once: `train.generation_batch`, its calls, its rounding, and memory that runs out."""

from dataclasses import fields

import pytest
import torch

from flowgrpo.config.geometry import geometry
from flowgrpo.text import memory
from flowgrpo.text.samplers.groups import concatenate, reorder
from flowgrpo.text.samplers.language_model import SampledCompletions
from flowgrpo.training import state
from tests.helpers import tiny_runs
from tests.helpers import tiny_text as tiny

CALLS = [(None, [16]), (16, [16]), (8, [8, 8]), (6, [4] * 4), (3, [3, 1] * 4)]  # of 4 prompts x 4 samples


def trainer(**options):
    return tiny.trainer(**{"train__prompts": 4, "train__micro_batch": 4} | options)


def record_calls(made) -> list[int]:
    """Rows of each call that draws."""
    rows: list[int] = []
    draw = made.policy.sample
    def sample(tokenized, decoding, generators, greedy):
        rows.append(len(generators))
        return draw(tokenized, decoding, generators, greedy)
    made.policy.sample = sample
    return rows


def drawn(made):
    conditioning = made.rollouts.conditioning(made.prompts[:4])
    return [part for part, _ in made.rollouts.sample(conditioning, 0, None)]


@pytest.mark.parametrize("size, calls", CALLS)
def test_whole_groups_are_drawn_together_and_stay_in_parts_of_a_micro_batch(size, calls):
    made, usual = trainer(train__generation_batch=size), trainer(train__generation_batch=4)
    rows = record_calls(made)
    found, expected = drawn(made), drawn(usual)
    assert rows == calls and [part.groups for part in found] == [range(k, k + 1) for k in range(4)]
    for one, other in zip(found, expected):
        [taken], [same] = one.transitions, other.transitions
        assert torch.equal(taken.ids, same.ids) and torch.equal(taken.old.mask, same.old.mask)
        # Rounding of other matrix shapes, in fp32 and two layers.
        torch.testing.assert_close(taken.old.logp, same.old.logp, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ["grpo", "spo_tree", "s_grpo", "dr_grpo"])
def test_an_epoch_is_that_of_a_micro_batch_up_to_rounding(method):
    found = []
    for size in (None, 4):
        made = tiny_runs.trainer("tokens", tiny_runs.config("tokens", method, train__generation_batch=size,
                                                            train__micro_batch=4))
        found.append((tiny_runs.epochs(made, 1), made.policy.weights.snapshot()))
        assert made.first_ratio.max_log_ratio <= 1e-5
    for key, tensor in found[0][1].items():
        torch.testing.assert_close(tensor, found[1][1][key], rtol=0, atol=1e-4)


def test_where_memory_runs_out_fewer_are_drawn_at_once_and_the_micro_batch_stays(capsys):
    made = trainer()
    rows, draw = record_calls(made), made.policy.sample
    def refusing(tokenized, decoding, generators, greedy):
        if len(generators) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return draw(tokenized, decoding, generators, greedy)
    made.policy.sample = refusing
    made.run_epoch()
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("out of memory")]
    assert told == [f"out of memory in the rollout: train.generation_batch {was} -> {was // 2} from here on"
                    for was in (16, 8, 4)]
    assert rows == [2] * 8
    values = state.counters(made)
    assert values["generation_batch"] == [None, 2] and values["micro_batch"] == [4, 4]
    assert state.counters(trainer())["generation_batch"] == [None, None]


def test_the_estimate_holds_the_cache_of_all_that_are_drawn_at_once():
    made = {size: trainer(train__generation_batch=size) for size in (None, 8, 4)}
    cache = {size: memory.memory(one.policy, one.config, one.rollouts.conditioning(one.prompts[:1]))["rollout"]["cache"]
             for size, one in made.items()}
    assert cache[None] == 2 * cache[8] == 4 * cache[4] > 0
    assert geometry(made[None].config.train, 2).generation_batch == 8  # of each of two processes


@pytest.mark.parametrize("more", [{"steps": torch.arange(8).view(4, 2)},
                                  {"images": torch.arange(48.0).view(4, 3, 2, 2)}])
def test_pieces_of_every_kind_are_joined_and_ordered_with_all_that_they_hold(more):
    whole = SampledCompletions(torch.arange(8).view(4, 2), -torch.arange(8.0).view(4, 2),
                               torch.ones(4, 2, dtype=torch.bool), torch.tensor([True, False, True, False]),
                               ["a", "b", "c", "d"], **more)
    pieces = [reorder(whole, torch.tensor(at)) for at in ([0], [1, 2], [3])]
    joined, turned = concatenate(pieces), reorder(whole, torch.tensor([3, 3, 0]))
    for field in fields(whole):
        value = getattr(whole, field.name)
        if torch.is_tensor(value):
            assert torch.equal(getattr(joined, field.name), value)
            assert torch.equal(getattr(turned, field.name), value[[3, 3, 0]])
    assert joined.texts == whole.texts and turned.texts == ["d", "d", "a"] and joined.expert is None
