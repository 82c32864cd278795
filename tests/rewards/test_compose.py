"""The long form of a reward, rewards by task, and rewards inside rewards."""

import math
import re
import sys
from pathlib import Path

import pytest
import torch

from flowgrpo import config, rewards
from flowgrpo.advantages.group import Advantage
from flowgrpo.config import validate
from flowgrpo.config.reward_rules import Retry, RewardRule, WatchRule
from flowgrpo.contrib import verdicts
from flowgrpo.rewards import combine as combined
from flowgrpo.training import extensions
from tests.helpers import loop, tiny
from tests.helpers.refusals import message, refused

ROOT = Path(__file__).parents[2]
PROMPTS = ["a", "bb", "ccc", "dddd"]
METADATA = [{"task": "text"}, {"task": "count", "n": 2}, {"n": 2}, {"task": "colour", "n": 3}]
IMAGES = torch.arange(4.0)[:, None, None, None].expand(4, 3, 2, 2)


def numbers(scores: torch.Tensor) -> list:
    """Columns of scores, None for NaN."""
    return [[None if math.isnan(value) else value for value in column] for column in scores.T.tolist()]


# --- the notation ----------------------------------------------------------------------------------------------------
LONG = {"ocr": {"weight": 0.5, "when": {"task": "text"}, "transform": [{"clip": [0, 1]}, "log", {"threshold": 0.5}],
                "on_error": {"retry": 3, "wait": 0.5}, "timeout": 30, "cache": True, "args": {"edits": 2},
                "use": "mine.py:Ocr"}, "scene": 2, "red": {"on_error": "skip"}}


def test_the_long_form_stands_beside_the_short_one_and_runs_again(tmp_path):
    resolved = config.validate({"reward": LONG, "eval": {"rewards": {"scene_graded": {}, "red": {"timeout": 5}}}})
    assert resolved.rewards == {"ocr": 0.5, "scene": 2.0, "red": 1.0}
    ocr = resolved.trained["ocr"]
    assert (ocr.use, ocr.args, ocr.when, ocr.timeout, ocr.cache) == ("mine.py:Ocr", {"edits": 2}, {"task": "text"}, 30,
                                                                     True)
    assert ocr.on_error == Retry(retry=3, wait=0.5, then="raise")
    assert resolved.trained["scene"] == RewardRule(weight=2) and resolved.trained["red"].on_error == "skip"
    assert resolved.extra_rewards == {"scene_graded": WatchRule(), "red": WatchRule(timeout=5)}
    (tmp_path / "again.yaml").write_text(resolved.yaml())
    again = config.load(tmp_path / "again.yaml", {"name": resolved.name})
    assert again == resolved and again.yaml() == resolved.yaml()
    assert "scene: 2.0" in resolved.yaml()  # what was short stays short


def test_the_page_and_rules_of_named_rewards(tmp_path):
    [block, *_] = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8"), re.S)
    (tmp_path / "page.yaml").write_text(block)
    found = config.load(tmp_path / "page.yaml")
    assert found.rewards == {"scene_graded": 1.0, "ocr": 0.5} and found.extra_rewards.keys() == {"scene", "judge"}
    assert found.trained["ocr"].on_error == Retry(retry=3, then="skip") and found.extra_rewards["judge"].timeout == 60
    resolved = config.validate({"reward": {"red": {"timeout": 5}}, "eval": {"rewards": ["red", "scene"]}})
    assert resolved.extra_rewards == {"scene": WatchRule()}


WRONG = [
    ({"wieght": 1}, "unknown key 'reward.ocr.wieght': did you mean 'weight'?"),
    ({"normalise": "group"}, "unknown key 'reward.ocr.normalise'"),
    ({"weight": "much"}, "reward.ocr.weight: got 'much', expected a valid number"),
    ({"weight": float("nan")}, "reward.ocr.weight: got nan, expected a finite number"),
    ({"timeout": 0}, "reward.ocr.timeout: got 0, expected a number greater than 0"),
    ({"when": "text"}, "reward.ocr.when: got 'text', expected a valid dictionary"),
    ({"on_error": "sikp"}, "reward.ocr.on_error: got 'sikp', expected 'raise' or 'skip'"),
    ({"on_error": {"retry": 0}}, "reward.ocr.on_error.retry: got 0, expected a number greater than or equal to 1"),
    ({"on_error": {"rety": 2}}, "unknown key 'reward.ocr.on_error.rety': did you mean 'retry'?"),
    ({"on_error": {"wait": 2}}, "reward.ocr.on_error.retry: got {'wait': 2}, expected one more value"),
    ({"transform": ["lgo"]}, "reward.ocr.transform.0: got 'lgo', expected 'log' or 'rank'"),
    ({"transform": ["log", {"clip": 1}]}, "reward.ocr.transform.1.clip: got 1, expected a valid tuple"),
    ({"transform": [{"clip": [1, 0]}]}, "reward.ocr.transform.0: got {'clip': [1, 0]}, expected the lower bound below"),
    ({"transform": [{"clap": [0, 1]}]}, "unknown key 'reward.ocr.transform.0.clap': did you mean 'clip'?"),
    ({"transform": "log"}, "reward.ocr.transform: got 'log', expected a valid list")]
WRONG_OF_EVAL = [
    ({"ocr": {"weight": 1}}, "unknown key 'eval.rewards.ocr.weight'"),
    ({"ocr": {"timeout": -1}}, "eval.rewards.ocr.timeout: got -1, expected a number greater than"),
    (["ocr", 3], "eval.rewards.1: got 3, expected a valid string"),
    (3, "eval.rewards: got 3, expected a valid list or a valid dictionary")]


@pytest.mark.parametrize("raw, told", [*(({"reward": {"ocr": rule}}, told) for rule, told in WRONG),
                                       *(({"eval": {"rewards": given}}, told) for given, told in WRONG_OF_EVAL)])
def test_mistakes_in_a_rule_have_their_path(raw, told):
    assert message(config.validate, raw, "r.yaml").startswith(f"r.yaml: {told}")


# --- which prompts a reward is asked for -----------------------------------------------------------------------------
class Spy:
    """The level of an image, with a memory of what it was asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, images, prompts, metadata):
        assert len(images) == len(prompts) == len(metadata)
        self.asked.append(prompts)
        return images.mean((1, 2, 3))


@pytest.mark.parametrize("when, expected", [
    ({}, [0, 1, 2, 3]),
    ({"task": "text"}, [0, None, None, None]),
    ({"task": ["text", "colour"]}, [0, None, None, 3]),
    ({"task": "count", "n": 2}, [None, 1, None, None]),
    ({"n": [2, 3]}, [None, 1, 2, 3]),
    ({"task": "text", "n": 2}, [None] * 4)])
def test_a_reward_is_asked_where_it_applies_alone(when, expected):
    spy = Spy()
    mine = {"all": Spy(), "some": rewards.Composed(spy, RewardRule(when=when))}
    found = numbers(rewards.score(mine, IMAGES, PROMPTS, METADATA))
    assert found == [[0, 1, 2, 3], expected]
    asked = [prompt for prompt, value in zip(PROMPTS, expected) if value is not None]
    assert spy.asked == ([asked] if asked else [])


def test_routes_of_texts_and_routes_that_no_prompt_takes():
    mine = {"length": rewards.Composed(lambda texts, prompts: [len(text) for text in texts], WatchRule(when={"n": 2}))}
    assert numbers(rewards.score(mine, ["x", "yy", "zzz", ""], PROMPTS, METADATA)) == [[None, 2, 3, None]]
    mine = rewards.compose({"scene": WatchRule(when={"task": "txet"})})
    assert message(rewards.require_routes, mine, METADATA) == (
        "reward 'scene' applies to no prompt: its `when` is {'task': 'txet'}, and the metadata of 4 prompts has n, "
        "task (task: 'colour', 'count', 'text')")
    assert "1 prompt has no keys" in message(rewards.require_routes, mine, [{}])
    rewards.require_routes(rewards.compose({"scene": WatchRule(when={"n": 3})}), METADATA)


@pytest.mark.parametrize("name, args", [("exact_match", {}), ("numeric_match", {}),
                                        ("code_run", {"accept_risk": True})])
def test_a_key_that_no_prompt_has_is_told_from_the_prompts(name, args):
    keyed = rewards.compose({name: WatchRule(when={"n": 2}, args=args)})
    key = keyed[name].function.key
    assert message(rewards.require_routes, keyed, METADATA) == (
        f"reward {name!r} compares with metadata.{key}, which none of the 2 prompts has: their metadata has n, task; "
        "write it into the prompt file, or name another key, args: {key: NAME}")
    rewards.require_routes(keyed, [*METADATA, {"n": 2, key: "1"}])
    rewards.require_routes(rewards.compose({name: WatchRule(args={"key": "task", **args})}), METADATA)


# --- how rewards are made --------------------------------------------------------------------------------------------
FILE = """
class Weighing:
    def __init__(self, factor, least=0.0):
        self.factor, self.least = factor, least
    def __call__(self, images, prompts):
        return [max(self.factor * len(prompt), self.least) for prompt in prompts]

def plain(images, prompts):
    return [1.0] * len(prompts)
"""


def test_a_class_is_made_with_its_arguments_under_labels_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "weighing.py"
    file.write_text(FILE)
    rules = {"once": WatchRule(use=f"{file}:Weighing", args={"factor": 1}),
             "twice": WatchRule(use=f"{file}:Weighing", args={"factor": 2, "least": 5}), f"{file}:plain": WatchRule()}
    found = rewards.score(rewards.compose(rules), IMAGES, PROMPTS, METADATA)
    assert numbers(found) == [[1, 2, 3, 4], [5, 5, 6, 8], [1] * 4]
    for name, args, told in (("Weighing", {"fcator": 1}, "takes no argument 'fcator': did you mean 'factor'?"),
                             ("Weighing", {"least": 1}, "needs args: {factor: ...}: give them in its rule"),
                             ("Weighing", {}, "needs args: {factor: ...}: give them in its rule"),
                             ("plain", {"factor": 1}, "takes no args: it is not a class, got factor")):
        assert told in message(rewards.compose, {"mine": WatchRule(use=f"{file}:{name}", args=args)})


def test_objects_and_nested_readers():
    spy = Spy()
    assert rewards.compose({"spy": WatchRule()}, given={"spy": spy})["spy"].function is spy
    assert "takes no args" in message(lambda: rewards.compose({"spy": WatchRule(args={"a": 1})}, given={"spy": spy}))
    stale = loop.setup(tiny.config(train__staleness=1), "pipeline", rewards={"it": nested(own)})
    assert "the reward 'it', which reads the policy" in message(extensions.check, stale)


# --- what a reward judges --------------------------------------------------------------------------------------------
def test_another_modality_is_refused_where_it_is_known():
    def of_videos(videos, prompts):
        return videos.mean((1, 2, 3, 4))
    videos = IMAGES[:, None].expand(4, 5, 3, 2, 2)
    assert numbers(rewards.score({"mine": of_videos}, videos, PROMPTS, METADATA)) == [[0, 1, 2, 3]]
    of_videos.about = rewards.About(modality="video")
    assert numbers(rewards.score({"mine": of_videos}, videos, PROMPTS, METADATA)) == [[0, 1, 2, 3]]
    for outputs, kind in ((IMAGES, "image"), (PROMPTS, "text")):
        for mine in (of_videos, rewards.Composed(of_videos)):
            assert f"reward 'mine' judges video, but what is generated here is {kind}" in message(
                rewards.score, {"mine": mine}, outputs, PROMPTS, METADATA)
    of_videos.about = rewards.About(modality="image/video")
    rewards.require_modality({"mine": of_videos}, "image")
    refused("modality is 'picture', expected image, video, text", rewards.About, modality="picture", error=ValueError)


def test_a_reward_of_videos_is_refused_before_a_image_is_drawn(tmp_path):
    from flowgrpo.run import run
    def still(videos, prompts):
        return [1.0] * len(prompts)
    still.about = rewards.About(modality="video")
    for rewarded in ({"reward": {"still": 1.0}}, {"eval__rewards": {"still": {}}, "reward": {"red": 1.0}}):
        assert "reward 'still' judges video, but what is generated here is image" in message(
            lambda: run(tiny.config(tmp_path, **rewarded), pipe=tiny.sd3(), functions={"red": tiny.red, "still": still},
                        prompts=[tiny.Prompt(text) for text in tiny.PROMPTS]))
    assert not (tmp_path / "run").exists()


def test_an_error_names_the_label_of_a_reward_that_has_another_name(tmp_path):
    mine = {"mine": WatchRule(use="gated", args={"rewards": ["sharpness", "piqe"]})}
    refused(r"^reward 'mine' \(gated\): thresholds is \(\), expected a list of 1", rewards.compose, mine)
    (tmp_path / "odd.py").write_text("from flowgrpo.errors import UserError\n\ndef odd(images, prompts):\n"
                                     f"    raise UserError(\"reward '{tmp_path}/odd.py:odd': no\")\n")
    mine = rewards.compose({"mine": WatchRule(use=f"{tmp_path}/odd.py:odd")})
    assert message(rewards.score, mine, IMAGES, PROMPTS, METADATA) == f"reward 'mine' ({tmp_path}/odd.py:odd): no"


def test_tolerance_and_saturated_tasks():
    """Of a mean opinion of 4, 0.1 of it is 0.4 either way."""
    recipe = validate({"reward": {
        "score": {"use": "numeric_match", "args": {"tolerance": 0.1}, "when": {"task": "score"}},
        "damage": {"use": "exact_match", "when": {"task": "damage"}},
        "format_tags": {"args": {"tags": ["answer"]}, "weight": 0.1}}})
    composed, weights = rewards.compose(recipe.trained), list(recipe.rewards.values())
    def scores(task: str, answer: str, *said) -> torch.Tensor:
        texts = [f"<answer>{each}</answer>" for each in said]
        return rewards.score(composed, texts, ["p"] * len(said), [{"task": task, "answer": answer}] * len(said))[None]
    [found] = scores("score", "4", 4, 4.4, 4.5, 3.6, 3.5)
    assert found[:, 0].tolist() == [1, 1, 0, 1, 0] and found[:, 1].isnan().all() and (found[:, 2] == 1).all()
    assert (Advantage()(scores("score", "4", 4, 4, 4, 4), weights) == 0).all()
    going = Advantage()(scores("damage", "blur", "blur", *["noise"] * 3), weights)
    assert going[0, 0] == pytest.approx(0.75 / 0.5, abs=1e-6) and math.isclose(going.sum().item(), 0, abs_tol=1e-6)


def visiting(outputs, prompts, metadata, memory, epoch):
    """The epoch in which it scores, which its memory keeps; none outside of an epoch."""
    if epoch is not None:
        memory.setdefault("visits", []).append(epoch)
    return [None if epoch is None else float(epoch)] * len(prompts)


def own(outputs, prompts, metadata, policy):
    """The number that the policy is."""
    return [float(policy)] * len(prompts)


def nested(part, depth: int = 2):
    """The part inside of `depth` rewards."""
    for _ in range(depth):
        part = rewards.find("tiered", {"rewards": [part]})
    return part


def scored(reward, **run) -> float:
    return rewards.score({"it": reward}, ["x"], ["p"], [{}], **run).item()


@pytest.mark.parametrize("depth", [1, 3])
def test_an_epoch_reaches_nested_rewards_and_each_has_a_memory_of_its_own(depth):
    whole = rewards.find("tiered", {"rewards": [visiting, nested(visiting)], "thresholds": [0]})
    reward, memory = nested(whole, depth), {}
    assert scored(reward, memory=memory, epoch=7) == 14 and scored(reward, memory=memory, epoch=8) == 16
    def visits(kept) -> list:
        return [kept["visits"]] if "visits" in kept else [each for inner in kept.values() for each in visits(inner)]
    assert visits(memory) == [[7, 8]] * 2
    assert scored(reward, memory=memory) != scored(reward, memory=memory)  # NaN: of no epoch
    assert visits(memory) == [[7, 8]] * 2
    refused("remembers all prompts, and got 2 processes: run it in one", rewards.require_memory, {"it": reward}, 2)


def test_the_memory_of_nested_rewards():
    memory = {}
    scored(visiting, memory=memory, epoch=7)
    assert memory == {"it": {"visits": [7]}}
    seen = []
    def watching(images, prompts, metadata, policy, memory, epoch):
        seen.append((policy, memory, epoch))
        return [0.0] * len(prompts)
    trainer = tiny.trainer(rewards={"it": nested(watching)}, reward="it", train__epochs=2)
    for trainer.epoch in range(2):
        trainer.run_epoch()
    assert {epoch for _, _, epoch in seen} == {0, 1} and all(policy is trainer.policy for policy, _, _ in seen)
    assert all(memory is seen[0][1] for _, memory, _ in seen) and trainer.memory["rewards"]["it"]
    assert scored(nested(own), policy=5) == 5


def test_scores_that_change_are_not_kept_for_a_nested_reward_either(tmp_path):
    for part, told in ((own, "scores with the model that is trained, which changes: set cache: false"),
                       (visiting, "scores by the epoch or by earlier ones: set cache: false")):
        for reward in (part, nested(part)):
            refused(told, rewards.compose, {"it": RewardRule(cache=True)}, str(tmp_path), {"it": reward})


def test_routes_and_keys_of_nested_rewards():
    def gated(gate: dict, **rule):
        args = {"rewards": [{"use": "over_saturation", "when": gate}, "sharpness"], "thresholds": [0]}
        return rewards.compose({"whole": RewardRule(use="gated", args=args, **rule)})
    for typo in ({"tsk": "t"}, {"task": "u"}):  # of the one prompt to which the whole applies
        refused(r"reward 'whole\[0\]' applies to no prompt: its `when` is .* metadata of 1 prompt has task",
                rewards.require_routes, gated(typo, when={"task": "t"}), [{"task": "t"}, {"task": "u"}])
    rewards.require_routes(gated({"task": "t"}), [{"task": "t"}, {}])
    key = {"use": "ternary", "args": {"rewards": [{"use": "exact_match", "args": {"key": "anser"}}]}}
    composed = rewards.compose({"it": RewardRule(use="tiered", args={"rewards": [key]})})
    assert "reward 'it[0][0]' compares with metadata.anser, which none of the 1" in message(
        rewards.require_routes, composed, [{"answer": "x"}])


# --- gradients -------------------------------------------------------------------------------------------------------
def channel(row: int):
    return lambda images, prompts: images[:, row].mean((1, 2))


red, green, plain = rewards.differentiable(channel(0)), rewards.differentiable(channel(1)), channel(2)


def test_gradients_of_combinations():
    soft, hard = combined.Tiered([red, green], [0.5]), combined.Tiered([red, plain], [0.5])
    assert soft.differentiable and not hard.differentiable and nested(soft).differentiable
    assert not verdicts.Ternary([red]).differentiable  # a step has no slope
    rewards.require_gradient({"it": nested(soft)})
    assert "reward 'it' is not differentiable" in message(rewards.require_gradient, {"it": hard})
    assert "reward 'it[0]' has on_error or timeout" in message(
        rewards.require_gradient, {"it": combined.Tiered([{"use": "over_saturation", "timeout": 5}])})
    images = torch.tensor([[0.75, 0.5, 0], [0.25, 0.5, 0]])[:, :, None, None].expand(2, 3, 2, 2)
    value, gradient = values(combined.Gated([red, green], [0.5]), images, [{}, {}])
    assert value.tolist() == [1.0, 0.0]
    assert (gradient[0, 1] == 2 / 4).all() and not gradient[0, [0, 2]].any() and not gradient[1].any()
    images = torch.tensor([[0.8, 0.2, 0]])[:, :, None, None].expand(1, 3, 2, 2)
    value, gradient = values(combined.Harmonic([red, green], 0.3), images, [{}])
    mean = 1 / (0.3 / 0.8 + 0.7 / 0.2)
    assert value.item() == pytest.approx(2 * mean, abs=1e-6)
    expected = [2 * mean**2 * 0.3 / 0.8**2 / 4, 2 * mean**2 * 0.7 / 0.2**2 / 4, 0]
    torch.testing.assert_close(gradient[0, :, 0, 0], torch.tensor(expected))


def values(reward, images, metadata) -> tuple[torch.Tensor, torch.Tensor]:
    """The value of each image and its gradient."""
    leaf = images.clone().requires_grad_()
    total = rewards.value({"it": reward}, {"it": 2.0}, leaf, [""] * len(images), metadata)
    total.sum().backward()
    return total.detach(), leaf.grad


def test_parts_that_do_not_apply_have_no_gradient_and_the_values_are_the_scores():
    parts = [{"use": "over_saturation", "args": {"limit": 0.1}, "when": {"task": "t"}}, green]
    reward = combined.Tiered(parts, [-9])
    images = torch.rand(3, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    metadata = [{"task": "t"}, {}, {"task": "t"}]
    value, gradient = values(reward, images, metadata)
    scores = rewards.score({"it": reward}, images, [""] * 3, metadata)[:, 0]
    assert torch.equal(value, 2 * scores) and gradient.isfinite().all()
    assert (gradient[1, 1] == 2 / 16).all() and not gradient[1, [0, 2]].any()
    rows = combined.Gated([green, {"use": "over_saturation", "when": {"task": "t"}}], [0])
    value, gradient = values(rows, images, metadata)  # nothing to let through in the second row
    assert value[1] == 0 and not gradient[1].any() and gradient.isfinite().all()
