"""A reward as a type: the facts of functions, objects and classes, one call, its data and its scores."""

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import flowgrpo
from flowgrpo import rewards
from flowgrpo.config.reward_rules import Retry, RewardRule
from flowgrpo.errors import UserError
from flowgrpo.rewards import Batch, as_reward, combine
from flowgrpo.rewards.about import Pairing
from flowgrpo.rewards.compose import Composed
from flowgrpo.training import sampling
from tests.helpers import tiny
from tests.helpers.refusals import message

IMAGES = torch.rand(4, 3, 4, 4, generator=torch.Generator().manual_seed(0))
PROMPTS, METADATA = ["a", "a", "b", "b"], [{"n": i} for i in range(4)]


def score(reward, **further) -> list[float]:
    return rewards.score({"it": reward}, IMAGES, PROMPTS, METADATA, **further)[:, 0].tolist()


# --- facts -----------------------------------------------------------------------------------------------------------

def three(images, prompts, metadata):
    return [entry["n"] for entry in metadata]


def two(images, prompts):
    return images.mean((1, 2, 3))


def of_groups(images, prompts, metadata, group):
    return images.mean((1, 2, 3)).view(-1, group).mean(1).repeat_interleave(group)


def beside(images, prompts, metadata, base):
    return [float("nan") if base is None else value for value in (images - base).mean((1, 2, 3)).tolist()]


def of_latents(latents, prompts):
    return latents.flatten(1).mean(1)


def better(first, second, prompts):
    return (first.mean((1, 2, 3)) > second.mean((1, 2, 3))).float()


class Level:
    def __call__(self, images, prompts, metadata):
        return images.mean((1, 2, 3))


class Network(torch.nn.Module):
    def forward(self, images, prompts):
        return images.mean((1, 2, 3))


@pytest.mark.parametrize("thing, unit, reads", [
    (three, "sample", set()), (two, "sample", set()), (of_groups, "group", set()), (beside, "sample", {"base"}),
    (of_latents, "sample", {"latents"}), (better, "pair", set()), (Level(), "sample", set()),
    (Network(), "sample", set()), (len, "sample", set())])
def test_the_names_of_the_parameters_are_its_facts(thing, unit, reads):
    made = as_reward(thing)
    assert (made.unit, made.reads, made.judges) == (unit, reads, rewards.MODALITIES) and not made.differentiable
    assert as_reward(made) is made and made.origin is thing


def test_names_and_attributes_ask_for_arguments():
    def any_of(images, prompts, *group, **base):
        return [float(len(group) + len(base))] * len(prompts)
    assert as_reward(any_of).unit == "sample" and not as_reward(any_of).reads and score(any_of) == [1] * 4
    mean = IMAGES.mean((1, 2, 3))
    assert score(three) == [0, 1, 2, 3] and score(two) == score(Level()) == score(Network()) == mean.tolist()
    assert score(of_groups, group=2) == pytest.approx(mean.view(2, 2).mean(1).repeat_interleave(2).tolist())
    assert score(lambda images, prompts, group: [float(group)] * len(prompts), group=2) == [2] * 4
    assert score(beside, base=IMAGES) == [0] * 4
    assert score(of_latents, latents=torch.full((4, 2), 3.0)) == [3] * 4
    assert score(better, group=2) == (mean > mean.view(2, 2).flip(1).flatten()).float().tolist()
    assert "reward 'it' compares the samples of a group, but here every image" in message(score, of_groups)
    def odd(outputs, texts, entries, size):
        return [float(size)] * len(texts)
    odd.group, odd.differentiable = True, True
    assert as_reward(odd).unit == "group" and as_reward(odd).differentiable and score(odd, group=2) == [2] * 4
    alone = rewards.find("exact_match", {"key": "right"})
    assert as_reward(alone).reads == {"metadata.right"} and as_reward(alone).judges == ["text"]


def test_a_judge_keeps_its_pairing():
    def judge(first, second, prompts):
        return better(first, second, prompts)
    judge.pairwise = Pairing(both_orders=True)
    from flowgrpo.rewards.pairwise import pairing
    assert pairing(judge) == pairing(rewards.Composed(judge)) == Pairing(both_orders=True)
    assert pairing(better) == Pairing() and pairing(two) is None


def test_the_facts_of_a_whole_are_those_of_its_parts():
    whole = combine.Gated([beside, {"use": "over_saturation"}], [0])
    assert whole.reads == {"base"} and whole.judges == ["image"] and whole.unit == "sample"
    assert [part.origin for part in rewards.inside(whole)][1] is beside
    assert [name for name, _ in rewards.named("it", combine.Tiered([whole]))] == ["it", "it[0]", "it[0][0]", "it[0][1]"]
    ruled = rewards.Composed(whole, RewardRule(timeout=5, on_error="skip", when={"n": [0, 1]}), name="it")
    for fact in ("judges", "unit", "reads", "differentiable", "parts", "about"):
        assert getattr(ruled, fact) == getattr(ruled.ready, fact) == getattr(whole, fact)


def test_a_reward_of_the_new_type_is_one_like_others():
    class Bright(rewards.Reward):
        judges, unit = ["image"], "group"

        def __call__(self, batch: Batch):
            return batch.samples.mean((1, 2, 3)) * batch.group

    assert score(Bright(), group=2) == (2 * IMAGES.mean((1, 2, 3))).tolist()
    with pytest.raises(UserError, match="reward 'it' judges image, but what is generated here is text"):
        rewards.score({"it": Bright()}, ["x"], ["p"], [{}])


# --- its samples -----------------------------------------------------------------------------------------------------

def addresses(reward, calls: int = 3) -> list[bool]:
    """Of several calls by its rule, whether the reward was given the memory of the images itself."""
    seen, composed = [], None
    def watched(images, prompts, metadata):
        seen.append(images.data_ptr() == IMAGES.data_ptr())
        return reward(images, prompts, metadata)
    composed = rewards.compose({"it": RewardRule()}, given={"it": watched})["it"]
    for _ in range(calls):
        rewards.score({"it": composed}, IMAGES, PROMPTS, METADATA)
    return seen


def test_images_are_copied_until_a_reward_has_shown_that_it_only_reads():
    before = IMAGES.clone()
    assert addresses(three) == [False, True, True]
    assert addresses(lambda images, prompts, metadata: images.mul_(2).mean((1, 2, 3))) == [False] * 3
    assert addresses(lambda images, prompts, metadata: images.numpy().fill(0) or [1.0] * 4) == [False] * 3
    assert torch.equal(IMAGES, before)


def test_a_late_write_is_an_error_that_names_the_reward():
    calls, pictures = [], IMAGES.clone()
    def late(images, prompts):
        calls.append(1)
        return images.mean((1, 2, 3)) if len(calls) == 1 else images.add_(1).mean((1, 2, 3))
    composed = rewards.compose({"it": RewardRule()}, given={"it": late})
    rewards.score(composed, pictures, PROMPTS, METADATA)
    with pytest.raises(UserError, match="reward 'it' wrote into the samples .*and not at first") as told:
        rewards.score(composed, pictures, PROMPTS, METADATA)
    assert "\n" not in str(told.value)


# --- its way ---------------------------------------------------------------------------------------------------------

def moves(functions) -> tuple[int, set[str]]:
    """Changes of file along the calls of one score, in all threads, and the files of the package."""
    package, files = str(Path(flowgrpo.__file__).parent), []
    def watch(frame, event, _) -> None:
        if event == "call" and (name := frame.f_code.co_filename).startswith(package):
            files.append(name)
    rewards.score(functions, IMAGES, PROMPTS, METADATA)  # weights, imports, and the first copies
    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        rewards.score(functions, IMAGES, PROMPTS, METADATA)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return 1 + sum(a != b for a, b in zip(files, files[1:])), {Path(file).name for file in files}


def test_the_way_of_a_score_is_short():
    bare, _ = moves({"it": three})
    composed, _ = moves(rewards.compose({"it": RewardRule()}, given={"it": three}))
    gated, _ = moves({"it": combine.Gated([two, three], [0])})
    ruled, _ = moves(rewards.compose({"it": RewardRule()}, given={"it": combine.Gated([two, three], [0])}))
    assert bare <= 5 and composed <= 5 and gated <= 12 and ruled <= 12, (bare, composed, gated, ruled)


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
