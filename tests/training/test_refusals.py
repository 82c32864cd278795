"""Settings of a run that do not go together: one line of the command, exit code 2, before anything is loaded."""

from typing import Any

import pytest

from tests.helpers.commands import refusal


def limited(rule: dict[str, Any]) -> dict[str, Any]:
    return {"reward": {"scene": 1.0, "safety": rule}}


def term(**data: Any) -> dict[str, Any]:
    return {"parts": {"data": data}}


FLOW = {"type": "FlowMatching"}
PAIRS = {"method": "hypo"}
IMAGES = [
    # evaluation
    ({"eval.best": "scene"}, "eval.best is set, but eval.every is 0"),
    ({"eval.best": "blue", "eval.every": 1}, "eval.best names the reward 'blue', which is not measured: expected "),
    ({"eval.best": 3}, "eval.best: got 3, expected"),
    ({"eval.stop.reward": "scene", "eval.stop.patience": 1}, "eval.stop is set, but eval.every is 0"),
    ({"eval.stop.reward": "blue", "eval.stop.patience": 1, "eval.every": 1}, "eval.stop names the reward 'blue'"),
    ({"eval.stop.reward": "a"}, "eval.stop.patience: got"),
    ({"eval.stop.reward": "a", "eval.stop.patience": 0}, "eval.stop.patience: got 0, expected a number greater than"),
    ({"eval.stop": {"reward": "a", "patience": 2, "patince": 1}}, "unknown key 'eval.stop.patince': did you mean 'pat"),
    ({"eval.stop": 3}, "eval.stop: got 3, expected keys with values"),
    ({"eval.prompts": 0, "eval.every": 5},
     "expected no every beside prompts 0, which measures nothing: set eval.every to 0 too"),
    ({"eval.prompts": 0, "eval.rewards": ["scene"]},
     "expected no rewards beside prompts 0, which measures nothing: set eval.rewards to [] too"),
    # limits of rewards
    (limited({"limit": {"at_most": 0.1, "at_least": 0.1}}), "expected either at_most or at_least"),
    (limited({"limit": {"at_most": 0.1}, "weight": 2}), "expected a weight or a limit"),
    (limited({"limit": {"atmost": 0.1}}), "unknown key 'reward.safety.limit.atmost': did you mean 'at_most'"),
    ({"reward": {"scene": {"limit": {"at_most": 1}}}}, "scene has a limit, but nothing else is trained on"),
    (limited({"limit": {"at_most": 1}}) | {"parts": {"advantage": {"type": "Influence"}}}, "parts.advantage Influence"),
    # supervised terms and recorded pairs
    (term(**FLOW, source={"type": "Recorded"}), "has no path: set it to a .jsonl file"),
    (term(**FLOW, source={"type": "Explained"}), "whose examples a language model writes"),
    (term(**FLOW, source={"path": "a.jsonl"}), "no such file"),
    (term(**FLOW) | {"memory.shard": True}, "does not go with memory.shard"),
    (term(type="NextToken"), "parts.data: got NextToken, which reads completions"),
    ({"method": "rpo", "train.group": 2, "parts": {}}, "the first image of recorded pairs, but preferences is not set"),
    # keys that nothing reads
    ({"text.engine": "vllm"}, "text.engine is set, which is about language models: leave it out for a pipe"),
    ({"train.extrapolate_every": 4}, "train.extrapolate_every is 4, but train.extrapolate is 0"),
    ({"resume": "yes"}, "got --resume=yes, expected --resume or --resume=auto")]
TEXTS = [
    (term(**FLOW), "parts.data: got FlowMatching, which reads"),
    (PAIRS | term(source={"path": ""}), "names no pairs: set parts.data.source.path to a .jsonl file of pairs"),
    (PAIRS | term(source={"path": "nowhere.jsonl"}), "pairs nowhere.jsonl: no such file"),
    (PAIRS | term(source={"type": "PassRate"}), "its source is a file of pairs"),
    (PAIRS | term(beta=1.0), "and no beta beside that of loss"),
    ({"text.penalty": 2.0}, "text.penalty is 2.0, but text.truncated is 'keep'"),
    ({"memory.vae": "tiled"}, "memory.vae is set, which is about denoisers"),
    *(({key: value}, f"{key} is set, which is about denoisers: leave it out for a language")
      for key, value in (("train.steps", 4), ("eval.guidance", 2.0), ("image.height", 64)))]


@pytest.mark.parametrize("recipe, options, told", [*(("starter", *row) for row in IMAGES),
                                                   *(("starter_text", *row) for row in TEXTS)])
def test_settings_that_do_not_go_together_are_refused(recipe, options, told, here, capsys):
    assert told in refusal(capsys, options, recipe)
    assert not (here / "runs").exists()
