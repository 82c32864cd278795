"""Rewards: found by name, called, checked, and a reward as a type with its facts, its data and its scores."""

import math
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import flowgrpo
from flowgrpo import config, rewards
from flowgrpo.config.reward_rules import Retry, RewardRule
from flowgrpo.errors import UserError
from flowgrpo.rewards import Batch, combine
from flowgrpo.rewards.about import Pairing
from flowgrpo.rewards.compose import Composed
from flowgrpo.rewards.find import ALIASES, _told
from flowgrpo.rewards.reward import Reward, as_reward, named_parts
from flowgrpo.training import sampling
from tests.helpers import tiny
from tests.helpers.refusals import message, refused

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


def test_objects_are_called_without_a_gradient():
    class Bright:
        def __call__(self, videos, prompts, metadata=None):
            return [0.0 if metadata is None else 1.0] * len(prompts)

    assert column(Bright()).tolist() == [[1], [1], [1]]
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
    ("abc", "returned 'abc': expected 3 numbers"),
    *((odd, "reward 'mine' returned ") for odd in (
        torch.zeros(3, device="meta"), [0.5, 0.5, torch.zeros((), device="meta")], torch.zeros(3).to_sparse(),
        [10**400, 1.0, 1.0], [10**5000, 1.0, 1.0], type("Counted", (), {"__len__": lambda self: 3})(), {1.0, 2.0, 3.0},
        torch.zeros(3, dtype=torch.complex64), [[1.0], [2.0], [3.0]], iter([1.0, 2.0, 3.0])))])
def test_what_holds_no_numbers_is_one_line_that_names_the_reward(value, told):
    said = message(column, returning(value))
    assert told in said and said.startswith("reward 'mine' returned ") and "expected" in said and len(said) < 400


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


def test_names_and_keys_of_rewards():
    assert "taken by a built-in reward" in message(rewards.reward, "scene")
    assert all(callable(rewards.locate(name)) for name in rewards.BUILT_IN)  # a class; made, some read weights
    assert "unknown reward 'scen_graded': did you mean 'scene_graded'?" in message(rewards.find, "scen_graded")
    told = message(rewards.find, "zzzzzzzzz")
    assert told.startswith("unknown reward 'zzzzzzzzz' (`flowgrpo list rewards` lists all; or path/to/file.py:")
    assert message(rewards.find, "mine/taste").startswith("unknown reward 'mine/taste': no folder mine/taste is here (")
    assert message(rewards.find, "score").count("'") == 2 * (1 + 5)  # itself, and five names at most
    chosen = config.load(None, {"reward.hpsv2.1.weight": 2, "reward.hpsv2.1.args.antialias": False,
                                "reward.pickscore": 0.5})
    assert chosen.rewards == {"hpsv2.1": 2, "pickscore": 0.5}
    assert chosen.trained["hpsv2.1"].args == {"antialias": False}


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
    assert "is taken by a built-in reward" in message(rewards.reward, "pick_score")
    for name, axis in (("videoalign_vq", "VQ"), ("videoalign_mq", "MQ"), ("videoalign_ta", "TA")):
        told = message(rewards.find, name)
        assert told.startswith(f"the reward {name!r} was removed: ") and "choose videoalign" in told
        assert f"args: {{axes: {{{axis}: 1}}}}" in told


def test_a_recipe_with_earlier_names_says_the_present_ones(capsys, tmp_path):
    _told.clear()
    (tmp_path / "old.yaml").write_text("method: flow_grpo\nreward: {pick_score: 1, own: {use: image_reward}}\n"
                                       "eval: {rewards: {hps_v2: {}}}\n")
    recipe = config.load(tmp_path / "old.yaml")
    with rewards.lazily():
        composed = rewards.compose(recipe.trained | recipe.extra_rewards)
    assert [type(reward.function).__name__ for reward in composed.values()] == ["PickScore", "ImageReward", "HpsV2"]
    assert capsys.readouterr().err.splitlines() == [
        f"the reward {old!r} is now called {new!r}"
        for old, new in (("pick_score", "pickscore"), ("image_reward", "imagereward"), ("hps_v2", "hpsv2.1"))]


IMAGES = torch.rand(4, 3, 4, 4, generator=torch.Generator().manual_seed(0))
FACT_PROMPTS, FACT_METADATA = ["a", "a", "b", "b"], [{"n": i} for i in range(4)]


def score(reward, **further) -> list[float]:
    return rewards.score({"it": reward}, IMAGES, FACT_PROMPTS, FACT_METADATA, **further)[:, 0].tolist()


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


def test_pairings_and_facts_of_wholes():
    def judge(first, second, prompts):
        return better(first, second, prompts)
    judge.pairwise = Pairing(both_orders=True)
    from flowgrpo.rewards.pairwise import pairing
    assert pairing(judge) == pairing(rewards.Composed(judge)) == Pairing(both_orders=True)
    assert pairing(better) == Pairing() and pairing(two) is None
    whole = combine.Gated([beside, {"use": "over_saturation"}], [0])
    assert whole.reads == {"base"} and whole.judges == ["image"] and whole.unit == "sample"
    assert [part.origin for part in rewards.inside(whole)][1] is beside
    names = [name for name, _ in named_parts("it", combine.Tiered([whole]))]
    assert names == ["it", "it[0]", "it[0][0]", "it[0][1]"]
    ruled = rewards.Composed(whole, RewardRule(timeout=5, on_error="skip", when={"n": [0, 1]}), name="it")
    for fact in ("judges", "unit", "reads", "differentiable", "parts", "about"):
        assert getattr(ruled, fact) == getattr(ruled.checked, fact) == getattr(whole, fact)


def test_a_reward_of_the_new_type_is_one_like_others():
    class Bright(Reward):
        judges, unit = ["image"], "group"

        def __call__(self, batch: Batch):
            return batch.samples.mean((1, 2, 3)) * batch.group

    assert score(Bright(), group=2) == (2 * IMAGES.mean((1, 2, 3))).tolist()
    assert "reward 'it' judges image, but what is generated here is text" in message(
        rewards.score, {"it": Bright()}, ["x"], ["p"], [{}])


# --- its samples -----------------------------------------------------------------------------------------------------
def addresses(reward, calls: int = 3) -> list[bool]:
    """Of several calls by its rule, whether the reward was given the memory of the images itself."""
    seen, composed = [], None
    def watched(images, prompts, metadata):
        seen.append(images.data_ptr() == IMAGES.data_ptr())
        return reward(images, prompts, metadata)
    composed = rewards.compose({"it": RewardRule()}, given={"it": watched})["it"]
    for _ in range(calls):
        rewards.score({"it": composed}, IMAGES, FACT_PROMPTS, FACT_METADATA)
    return seen


def test_late_writes_are_errors_and_images_copied_before():
    before = IMAGES.clone()
    assert addresses(three) == [False, True, True]
    assert addresses(lambda images, prompts, metadata: images.mul_(2).mean((1, 2, 3))) == [False] * 3
    assert addresses(lambda images, prompts, metadata: images.numpy().fill(0) or [1.0] * 4) == [False] * 3
    assert torch.equal(IMAGES, before)
    calls, pictures = [], IMAGES.clone()
    def late(images, prompts):
        calls.append(1)
        return images.mean((1, 2, 3)) if len(calls) == 1 else images.add_(1).mean((1, 2, 3))
    given = rewards.compose({"it": RewardRule()}, given={"it": late}), pictures, FACT_PROMPTS, FACT_METADATA
    rewards.score(*given)
    refused("reward 'it' wrote into the samples .*and not at first", rewards.score, *given)


# --- its way ---------------------------------------------------------------------------------------------------------
def moves(functions) -> tuple[int, set[str]]:
    """Changes of file along the calls of one score, in all threads, and the files of the package."""
    package, files = str(Path(flowgrpo.__file__).parent), []
    def watch(frame, event, _) -> None:
        if event == "call" and (name := frame.f_code.co_filename).startswith(package):
            files.append(name)
    rewards.score(functions, IMAGES, FACT_PROMPTS, FACT_METADATA)  # weights, imports, and the first copies
    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        rewards.score(functions, IMAGES, FACT_PROMPTS, FACT_METADATA)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return 1 + sum(a != b for a, b in zip(files, files[1:])), {Path(file).name for file in files}


def test_the_way_of_a_score_is_short():
    bare, _ = moves({"it": three})
    composed, _ = moves(rewards.compose({"it": RewardRule()}, given={"it": three}))
    gated, _ = moves({"it": combine.Gated([two, three], [0])})
    ruled, _ = moves(rewards.compose({"it": RewardRule()}, given={"it": combine.Gated([two, three], [0])}))
    assert bare <= 5 and composed <= 3 and gated <= 13 and ruled <= 11, (bare, composed, gated, ruled)


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
    seen = []  # asked again, a reward sees what it saw at first
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


MASKED = np.ma.masked_array([0.25, 0.75, 0.5], mask=[True, False, False])


@pytest.mark.parametrize("answer", [MASKED, list(MASKED), [np.ma.masked, 0.75, 0.5], [None, 0.75, 0.5]])
def test_a_masked_number_is_no_score(answer):
    assert column(returning(answer))[:, 0].nan_to_num(-1).tolist() == [-1, 0.75, 0.5]


class Silent(Exception):
    def __str__(self):
        raise self.args[0]


@pytest.mark.parametrize("of_the_text", [RuntimeError("no text"), SystemExit(0), GeneratorExit()])
def test_an_exception_without_a_text_is_told_by_its_class(of_the_text):
    def silent(images, prompts):
        raise Silent(of_the_text)
    refused("^reward 'mine' raised on 3 .*: Silent, of which str.. fails .test_rewards", column, silent)


def test_an_async_function_is_one_line_without_a_warning(recwarn):
    async def late(images, prompts):
        return [1.0] * 3
    refused("^reward 'mine' is an `async def`, which returned a coroutine: ", column, late)
    assert not list(recwarn)
