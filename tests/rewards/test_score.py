"""Every reward has data of its own: what it writes into harms neither the others nor the samples that are kept."""

import numpy as np
import pytest
import torch

from flowgrpo import rewards
from flowgrpo.config.reward_rules import Retry, RewardRule
from flowgrpo.errors import UserError
from flowgrpo.rewards.compose import Composed
from flowgrpo.training import sampling
from tests.helpers import tiny


def spoiler(images, prompts, metadata):
    """Write into everything that is given."""
    images.zero_()
    images.numpy()[:] = -1.0  # past what torch counts as a write
    for entry in metadata:
        entry["colour"]["name"] = "none"
        entry.clear()
    metadata.clear()
    prompts.clear()
    return [0.0, 0.0]


def red(images, prompts, metadata):
    assert [entry["colour"]["name"] for entry in metadata] == ["red", "blue"] and prompts == ["a", "b"]
    return images[:, 0].mean((1, 2))


def test_a_reward_that_writes_into_its_data_changes_no_other_score_in_any_order():
    images, base = torch.rand(2, 3, 4, 4), torch.rand(2, 3, 4, 4)
    metadata = [{"colour": {"name": "red"}}, {"colour": {"name": "blue"}}]
    given = images.clone(), base.clone()
    expected = torch.stack([torch.zeros(2), images[:, 0].mean((1, 2))], 1)
    functions = {"spoiler": spoiler, "red": red}
    for order in (["spoiler", "red"], ["red", "spoiler"]):
        found = rewards.score({name: functions[name] for name in order}, images, ["a", "b"], metadata, base=base)
        assert torch.equal(found[:, [order.index("spoiler"), order.index("red")]], expected)
    assert torch.equal(images, given[0]) and torch.equal(base, given[1])
    assert metadata == [{"colour": {"name": "red"}}, {"colour": {"name": "blue"}}]


def test_a_reward_that_is_asked_again_sees_what_it_saw_at_first():
    seen = []
    def once(images, prompts):
        seen.append(images.mean().item())
        images.zero_()
        if len(seen) == 1:
            raise OSError("away")
        return [1.0, 1.0]
    rewards.score({"once": Composed(once, RewardRule(on_error=Retry(retry=1, wait=0)))}, torch.ones(2, 3, 4, 4),
                  ["a", "b"], [{}, {}])
    assert seen == [1.0, 1.0]


def test_the_images_of_a_run_are_those_that_were_drawn():
    def black(images, prompts):
        return images.zero_().mean((1, 2, 3))
    whole, spoilt = (tiny.trainer(rewards=functions, reward=dict.fromkeys(functions, 1.0))
                     for functions in ({"red": tiny.red}, {"black": black, "red": tiny.red}))
    (_, _, expected), (_, _, found) = (sampling.sample(each, each.prompts[:2]) for each in (whole, spoilt))
    assert torch.equal(found[..., 1], expected[..., 0]) and expected.mean() > 0
    [ours, theirs] = ([kept[3] for kept in each.scoring.extremes.best] for each in (whole, spoilt))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class Counted:
    """An object with a length and no values."""

    def __len__(self):
        return 2


@pytest.mark.parametrize("answer", [
    torch.zeros(2, device="meta"), [0.5, torch.zeros((), device="meta")],
    torch.zeros(2).to_sparse(), [10**400, 1.0], [10**5000, 1.0], Counted(), {1.0, 2.0},
    torch.zeros(2, dtype=torch.complex64), [[1.0], [2.0]], iter([1.0, 2.0]), {"a": 1.0, "b": 2.0}])
def test_what_holds_no_numbers_is_one_line_that_names_the_reward(answer):
    with pytest.raises(UserError, match="^reward 'mine' returned ") as caught:
        rewards.score({"mine": lambda images, prompts: answer}, torch.ones(2, 3, 4, 4), ["a", "b"], [{}, {}])
    assert "\n" not in str(caught.value) and "expected" in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("answer", [
    np.ma.masked_array([0.25, 0.75], mask=[True, False]), [np.ma.masked, 0.75],
    list(np.ma.masked_array([0.25, 0.75], mask=[True, False])), [None, 0.75]])
def test_a_masked_number_is_no_score(answer):
    scores = rewards.score({"mine": lambda images, prompts: answer}, torch.ones(2, 3, 4, 4), ["a", "b"], [{}, {}])
    assert scores[0].isnan().tolist() == [True] and scores[1].tolist() == [0.75]


class Silent(Exception):
    def __str__(self):
        raise self.args[0]


@pytest.mark.parametrize("of_the_text", [RuntimeError("no text"), SystemExit(0), GeneratorExit()])
def test_an_exception_without_a_text_is_told_by_its_class(of_the_text):
    def silent(images, prompts):
        raise Silent(of_the_text)
    with pytest.raises(UserError, match="^reward 'mine' raised on 2 .*: Silent, of which str.. fails .test_score"):
        rewards.score({"mine": silent}, torch.ones(2, 3, 4, 4), ["a", "b"], [{}, {}])


def test_an_async_function_is_one_line_without_a_warning(recwarn):
    async def late(images, prompts):
        return [1.0, 1.0]
    with pytest.raises(UserError, match="^reward 'mine' is an `async def`, which returned a coroutine: ") as caught:
        rewards.score({"mine": late}, torch.ones(2, 3, 4, 4), ["a", "b"], [{}, {}])
    assert "\n" not in str(caught.value) and not list(recwarn)
