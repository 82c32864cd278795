"""Rewards: found by name, called, and what they return is checked; a mistake names the reward and a prompt."""

import math
import sys

import numpy as np
import pytest
import torch

from flowgrpo import config, rewards
from flowgrpo.config.reward_rules import WatchRule
from flowgrpo.errors import UserError
from flowgrpo.rewards.find import ALIASES, _told
from tests.helpers.refusals import message

PROMPTS = ["a cat", "a dog", "a bird"]
METADATA = [{"n": 1}, {"n": 2}, {"n": 3}]


def column(function) -> torch.Tensor:
    return rewards.score({"mine": function}, torch.zeros(3, 3, 4, 4), PROMPTS, METADATA)


def returning(value):
    return lambda images, prompts, metadata: value


# --- scoring ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("values", [
    [0.25, -1, True], (0.25, -1.0, 1), np.array([0.25, -1, 1]), torch.tensor([0.25, -1, 1], dtype=torch.bfloat16),
    torch.tensor([0.25, -1, 1], requires_grad=True), [torch.tensor(0.25), np.float64(-1), np.int64(1)]])
def test_lists_arrays_and_tensors_are_numbers(values):
    scores = column(returning(values))
    assert scores.dtype == torch.float32 and scores.shape == (3, 1) and not scores.requires_grad
    assert scores[:, 0].tolist() == [0.25, -1, 1]


def test_columns_of_rewards_and_none():
    images = torch.arange(3.0)[:, None, None, None].expand(3, 3, 2, 2)
    scores = rewards.score({
        "level": lambda images, prompts, metadata: images.mean((1, 2, 3)),
        "length": lambda images, prompts: [len(prompt) for prompt in prompts],
        "n": lambda images, prompts, metadata: [entry["n"] for entry in metadata],
    }, images, PROMPTS, METADATA)
    assert scores.tolist() == [[0, 5, 1], [1, 5, 2], [2, 6, 3]]
    scores = column(returning([1.0, None, 0.0]))[:, 0].tolist()
    assert scores[0] == 1 and math.isnan(scores[1]) and scores[2] == 0


def test_objects_and_optional_metadata_are_called():
    class Bright:
        def __call__(self, videos, prompts, metadata=None):
            return [0.0 if metadata is None else 1.0] * len(prompts)

    assert column(Bright()).tolist() == [[1], [1], [1]]


def test_no_gradient_is_recorded_in_a_reward():
    weight = torch.ones(3, requires_grad=True)
    recorded = []
    def learned(images, prompts, metadata):
        recorded.append((weight * 2).requires_grad)
        return weight * 2
    assert column(learned).tolist() == [[2], [2], [2]] and recorded == [False]


@pytest.mark.parametrize("value, told", [
    ([0.0, math.nan, 1.0], "reward 'mine' returned nan, expected a finite number, or None where it does not apply "
                           "(prompt: 'a dog')"),
    (torch.tensor([0.0, 1.0, -math.inf]), "reward 'mine' returned -inf, expected a finite number"),
    ([0.0, 1.0, 1e39], "returned 1e+39, expected a finite number"),
    ([0.0, "1.0", 2.0], "returned '1.0', expected a finite number"),
    ([0.0, {"score": 1}, 2.0], "returned {'score': 1}, expected a finite number"),
    ([0.0, 1.0], "reward 'mine' returned 2 values: expected 3 numbers, one per sample (first prompt: 'a cat')"),
    (torch.zeros(3, 1), "reward 'mine' returned the shape [3, 1]: expected 3 numbers"),
    (np.zeros((3, 2)), "returned the shape [3, 2]: expected 3 numbers"),
    (torch.tensor(1.0), "returned the shape []: expected 3 numbers"),
    ([torch.zeros(1)] * 3, "returned the shape [1] for one sample, expected a number (prompt: 'a cat')"),
    (None, "returned None: expected 3 numbers"),
    (0.5, "returned 0.5: expected 3 numbers"),
    ({"a": 1, "b": 2, "c": 3}, "returned {'a': 1, 'b': 2, 'c': 3}: expected 3 numbers"),
    ("abc", "returned 'abc': expected 3 numbers")])
def test_what_is_no_score_is_told(value, told):
    assert told in message(column, returning(value))


def test_errors_of_rewards():
    def broken(images, prompts, metadata):
        raise ArithmeticError("too\n  much")
    told = message(column, torch.no_grad()(broken))
    line = broken.__code__.co_firstlineno + 1
    assert told == ("reward 'mine' raised on 3 samples (first prompt of the batch: 'a cat'): "
                    f"ArithmeticError: too much (test_rewards.py, line {line})")
    def needs(images, prompts, metadata):
        raise UserError("install it")
    assert message(column, needs) == "install it"
    assert "takes (images): expected (images, prompts, metadata)" in message(column, lambda images: [1.0])


# --- finding ---------------------------------------------------------------------------------------------------------

def test_registered_functions_and_classes_are_found(monkeypatch):
    monkeypatch.setattr(sys.modules["flowgrpo.rewards.find"], "_registered", {})
    assert rewards.reward("ones")(len) is len and rewards.find("ones") is len

    @rewards.reward("object")
    class Ones:
        def __call__(self, images, prompts):
            return [1.0] * len(prompts)

    assert isinstance(rewards.find("object"), Ones) and rewards.locate("object") is Ones
    assert {"ones", "object", "scene", "scene_graded"} <= set(rewards.names())
    assert rewards.source("ones") == "registered" and rewards.source("scene") == "built in"


def test_names_of_rewards():
    assert "taken by a built-in reward" in message(rewards.reward, "scene")
    assert all(callable(rewards.locate(name)) for name in rewards.BUILT_IN)  # a class; made, some read weights
    assert "unknown reward 'scen_graded': did you mean 'scene_graded'?" in message(rewards.find, "scen_graded")
    told = message(rewards.find, "zzzzzzzzz")
    assert told.startswith("unknown reward 'zzzzzzzzz' (`flowgrpo list rewards` lists all; or path/to/file.py:")
    assert message(rewards.find, "score").count("'") == 2 * (1 + 5)  # itself, and five names at most


def test_entry_points_are_found(tmp_path, monkeypatch):
    (tmp_path / "elsewhere_rewards.py").write_text("def length(images, prompts):\n    return list(map(len, prompts))\n")
    (tmp_path / "broken_rewards.py").write_text("import no_such_module\n")
    info = tmp_path / "elsewhere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[flowgrpo.rewards]\nlength = elsewhere_rewards:length\nbroken = broken_rewards:f\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert column(rewards.find("length")).tolist() == [[5], [5], [6]]
    assert rewards.source("length") == "package elsewhere" and "length" in rewards.names()
    assert message(rewards.find, "broken") == ("reward 'broken' does not import: ModuleNotFoundError: No module named "
                                               "'no_such_module' (broken_rewards.py, line 1)")


def test_a_function_of_a_file_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "helper_of_mine.py").write_text("FACTOR = 2.0\n")
    file = tmp_path / "mine.py"
    file.write_text("import helper_of_mine as h\n\ndef f(images, prompts):\n    return [h.FACTOR] * len(prompts)\n")
    assert column(rewards.find(f"{file}:f")).tolist() == [[2], [2], [2]]
    assert rewards.find(f"{file}:f") is rewards.find(f"{file}:f")


@pytest.mark.parametrize("text, name, told", [
    (None, "no.py:f", "no file at"),
    ("x = 1", "r.py", "expected path/to/file.py:name"),
    ("def bright(a, b): ...", "r.py:brigth", "has no 'brigth': did you mean 'bright'?"),
    ("import no_such_module", "r.py:f", "does not import: ModuleNotFoundError: No module named 'no_such_module' "
                                        "(r.py, line 1)"),
    ("def f(:", "r.py:f", "does not import: SyntaxError: invalid syntax (r.py, line 1)"),
    ("import sys\nsys.exit(3)", "r.py:f", "does not import: SystemExit: 3 (r.py, line 2)"),
    ("f = 3", "r.py:f", "is of type int: expected a function of (images, prompts, metadata)"),
    ("class f:\n    def __init__(self, path): ...", "r.py:f", "needs args: {path: ...}")])
def test_broken_files_are_told(text, name, told, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    if text:
        (tmp_path / "r.py").write_text(text)
    assert told in message(rewards.find, f"{tmp_path}/{name}")


def test_earlier_names_run_and_say_the_present_one_once(capsys):
    _told.clear()
    for old, new in ALIASES.items():
        assert rewards.locate(old) is rewards.locate(new)
        assert capsys.readouterr().err == f"the reward {old!r} is now called {new!r}\n"
        assert rewards.locate(old) is rewards.locate(new) and capsys.readouterr().err == ""
    assert not set(ALIASES) & set(rewards.names())
    with rewards.lazily():
        composed = rewards.compose({"hps_v2": WatchRule(), "mine": WatchRule(use="pick_score")})
    assert [type(reward.function).__name__ for reward in composed.values()] == ["HpsV2", "PickScore"]
    assert "is taken by a built-in reward" in message(rewards.reward, "pick_score")


def test_a_recipe_with_earlier_names_says_the_present_ones(capsys, tmp_path):
    _told.clear()
    (tmp_path / "old.yaml").write_text("method: flow_grpo\nreward: {pick_score: 1, image_reward: {weight: 0.5}}\n"
                                       "eval: {rewards: {hps_v2: {}}}\n")
    recipe = config.load(tmp_path / "old.yaml")
    with rewards.lazily():
        composed = rewards.compose(recipe.trained | recipe.watched)
    assert [type(reward.function).__name__ for reward in composed.values()] == ["PickScore", "ImageReward", "HpsV2"]
    assert capsys.readouterr().err.splitlines() == [
        f"the reward {old!r} is now called {new!r}"
        for old, new in (("pick_score", "pickscore"), ("image_reward", "imagereward"), ("hps_v2", "hpsv2.1"))]


@pytest.mark.parametrize("name, axis", [("videoalign_vq", "VQ"), ("videoalign_mq", "MQ"), ("videoalign_ta", "TA")])
def test_a_reward_that_was_removed_says_what_to_use(name, axis):
    told = message(rewards.find, name)
    assert told.startswith(f"the reward {name!r} was removed: ") and "choose videoalign" in told
    assert f"args: {{axes: {{{axis}: 1}}}}" in told


def test_a_name_with_a_number_is_one_key_of_the_command_line():
    chosen = config.load(None, {"reward.hpsv2.1.weight": 2, "reward.hpsv2.1.args.antialias": False,
                                "reward.pickscore": 0.5})
    assert chosen.rewards == {"hpsv2.1": 2, "pickscore": 0.5}
    assert chosen.trained["hpsv2.1"].args == {"antialias": False}
