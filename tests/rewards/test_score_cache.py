"""Scores that are kept: known again by everything that they depend on, and by nothing else."""

import json
import math
import sys

import pytest
import torch

from flowgrpo import rewards
from flowgrpo.config.reward_rules import RewardRule
from flowgrpo.rewards.cached_scores import FILE, version
from tests.helpers.refusals import message

PROMPTS = ["a", "bb", "ccc"]
METADATA = [{"n": 1}, {"n": 2}, {}]
IMAGES = torch.rand(3, 3, 4, 4, generator=torch.Generator().manual_seed(0))
SOURCE = """
class Level:
    def __init__(self, factor=1.0):
        self.factor, self.asked = factor, []
    def __call__(self, images, prompts, metadata):
        self.asked += prompts
        return [None if p == "bb" else self.factor * float(i.mean()) for p, i in zip(prompts, images)]
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A maker of the reward of a file: its scores are kept in one folder."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "level.py").write_text(SOURCE)
    def make(folder="kept", file="level.py", **rule):
        rule = RewardRule(cache=True, use=f"{tmp_path / file}:Level", **rule)
        return rewards.compose({"level": rule}, str(tmp_path / folder))["level"]
    make.folder = tmp_path
    return make


def scored(reward, pictures=IMAGES, prompts=PROMPTS, metadata=METADATA) -> tuple[list, list]:
    """The scores, None for NaN, and the prompts that the reward was asked for."""
    reward.function.asked.clear()
    found = rewards.score({"level": reward}, pictures, prompts, metadata)[:, 0].tolist()
    return [None if math.isnan(value) else value for value in found], list(reward.function.asked)


def test_what_was_scored_is_not_asked_again_in_another_run(made):
    first, asked = scored(made())
    assert asked == PROMPTS and first[1] is None and first[0] == pytest.approx(IMAGES[0].mean().item(), abs=1e-7)
    assert scored(made()) == (first, [])
    assert (made.folder / "kept" / FILE).read_bytes().startswith(b"SQLite format 3")


def test_what_is_missing_alone_is_asked(made):
    everything, _ = scored(made("other"))
    scored(made(), IMAGES[1:2], PROMPTS[1:2], METADATA[1:2])
    assert scored(made()) == (everything, ["a", "ccc"])
    assert scored(made(), IMAGES.flip(0), PROMPTS[::-1], METADATA[::-1]) == (everything[::-1], [])


def test_a_key_tells_its_parts_apart_and_a_part_has_a_source(made):
    reward = rewards.find("checklist", {"rewards": ["sharpness", eval("lambda images, prompts: [1.0]")]})
    assert "has no source file by which its scores could be known again" in message(version, "checklist", reward)
    kept = made().kept
    assert len({kept.key("t", "ab", {}), kept.key("t", "a", {}), kept.key("ta", "b", {}), kept.key("tab", "", {})}) == 4
    assert kept.key("t", "p", {"a": 1, "b": 2}) == kept.key("t", "p", {"b": 2, "a": 1})


def test_another_image_prompt_or_metadata_is_asked_for(made):
    scored(made())
    reward = made()
    for change in (dict(pictures=IMAGES + 1e-6), dict(pictures=IMAGES.double()), dict(metadata=[{"n": 0}] * 3),
                   dict(prompts=[prompt + " " for prompt in PROMPTS])):
        assert len(scored(reward, **change)[1]) == 3
    assert reward.kept.key(IMAGES[0], "a", {}) != reward.kept.key(IMAGES[0].flatten(1), "a", {})


def test_other_arguments_and_another_source_are_asked_for(made):
    (first, _), (double, asked) = scored(made()), scored(made(args={"factor": 2.0}))
    assert asked == PROMPTS and double[0] == pytest.approx(2 * first[0])
    (made.folder / "changed.py").write_text(SOURCE.replace("self.factor *", "3 *"))
    triple, asked = scored(made(file="changed.py"))
    assert asked == PROMPTS and triple[0] == pytest.approx(3 * first[0])


def test_the_version_is_that_of_the_source(made):
    before = version("level", made().function)
    (made.folder / "same.py").write_text(SOURCE)
    (made.folder / "changed.py").write_text(SOURCE + "\n")
    assert version("level", made(file="same.py").function) == before
    assert version("level", made(file="changed.py").function) != before
    from flowgrpo import __version__
    assert version("scene", rewards.find("scene")).startswith(f"{__version__} ")


PART = """
def f(images, prompts=None):
    return [LEVEL] * len(images)

features = boxes = f
"""


@pytest.mark.parametrize("name, args", [
    ("checklist", {"rewards": ["{}:f"], "thresholds": [0.5]}), ("harmonic", {"rewards": ["{}:f", "sharpness"]}),
    ("gated", {"rewards": ["sharpness", {"use": "ternary", "args": {"rewards": ["{}:f"]}}], "thresholds": [0]}),
    ("frames", {"reward": "{}:f"}), ("geneval_fast", {"detector": "{}:boxes"}),
    ("t2i_compbench", {"detector": "{}:boxes", "dimension": "spatial"}),
    ("base_similarity", {"features": "{}:features"})])
def test_a_part_that_was_edited_is_another_reward(tmp_path, monkeypatch, name, args):
    """The same names and arguments; the file that a part is in says 1, then 0."""
    found = []
    for level in ("1.0", "0.0", "1.0"):
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setattr(sys, "modules", {**sys.modules})  # as of a new process
        (tmp_path / "edit.py").write_text(PART.replace("LEVEL", level))
        named = json.loads(json.dumps(args).replace("{}", f"{tmp_path}/edit.py"))
        [reward] = rewards.compose({name: RewardRule(cache=True, args=named)}, str(tmp_path / "kept")).values()
        found.append(reward.kept.identity)
    assert found[0] == found[2] != found[1]


def test_a_failure_is_not_kept(made):
    """Asked for all three, then one by one; the third fails the first two times."""
    (made.folder / "failing.py").write_text(SOURCE.replace("self.asked += prompts", """self.asked += prompts
        if prompts[-1] == "ccc" and self.asked.count("ccc") < 3: raise ArithmeticError"""))
    reward, tally = made(file="failing.py", on_error="skip"), rewards.Tally()
    def ask() -> list[bool]:
        return rewards.score({"level": reward}, IMAGES, PROMPTS, METADATA, tally=tally)[:, 0].isnan().tolist()
    assert ask() == [False, True, True] and tally.failed == {"level": 1}
    assert ask() == [False, True, False] and tally.failed == {"level": 1}
    assert reward.function.asked == [*PROMPTS, "a", "bb", "ccc", "ccc"]


@pytest.mark.parametrize("rule, given, cache, told", [
    (RewardRule(cache=True), None, None, "keeps its scores (cache: true), but no folder is named: set the key cache"),
    (RewardRule(cache=True), eval("lambda images, prompts: [1.0]"), "kept", "has no source file"),
    (RewardRule(cache=True), print, "kept", "has no source file")])
def test_scores_that_cannot_be_kept_are_told(tmp_path, monkeypatch, rule, given, cache, told):
    monkeypatch.chdir(tmp_path)
    line = message(rewards.compose, {"scene": rule}, cache, {"scene": given} if given else None)
    assert line.startswith("reward 'scene' ") and told in line


def test_scores_of_groups_and_a_file_that_is_no_cache_are_told(made):
    def of_groups(images, prompts, metadata, group): ...
    of_groups.group = True
    assert "compares the samples of a group, and its scores hold only for that group" in message(
        rewards.compose, {"mine": RewardRule(cache=True)}, str(made.folder), {"mine": of_groups})
    (made.folder / "kept").mkdir(exist_ok=True)
    (made.folder / "kept" / FILE).write_bytes(b"something else, and long enough to be read as a header" * 40)
    assert "rewards.sqlite cannot be used (file is not a database): remove the file" in message(made)
