"""The text starter: what its card says of it, and that its recipe learns."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowgrpo.config import load
from flowgrpo.config.sections import Adapter, Text
from flowgrpo.data import splits
from flowgrpo.policies.language.causal_lm import CausalLM
from flowgrpo.policies.language.load import load_causal_lm
from flowgrpo.rewards.find import find
from flowgrpo.run import run
from flowgrpo.samplers.text.decoding import Decoding
from flowgrpo.starter import FOLDERS
from flowgrpo.starter.arithmetic import Problem, problems
from tests.helpers import tiny_text

RECIPE = "configs/starter_text.yaml"


def test_the_prompts_are_problems_with_their_answers_and_no_held_out_one_is_trained():
    train, held_out = splits.resolve(load(RECIPE))
    assert (len(train), len(held_out)) == (2000, 400)
    for prompt in train + held_out:
        a, b = map(int, prompt.text[:-1].replace("-", "+").split("+"))
        problem = Problem(a, "-" if "-" in prompt.text else "+", b)
        assert prompt.text == problem.prompt and prompt.metadata == {"answer": str(problem.answer),
                                                                     "task": problem.task}
        assert problem.held_out is (prompt in held_out)


@pytest.mark.parametrize("problem, answer, careless", [
    (Problem(23, "+", 48), 71, 61), (Problem(23, "+", 45), 68, 68), (Problem(52, "-", 17), 35, 45),
    (Problem(17, "-", 52), -35, 45), (Problem(12, "-", 34), -22, 22), (Problem(99, "+", 99), 198, 188),
    (Problem(5, "-", 5), 0, 0)])
def test_a_careless_pupil_forgets_to_carry_and_the_minus(problem, answer, careless):
    assert (problem.answer, problem.careless) == (answer, careless)


def test_the_model_is_small_and_answers_as_its_card_says():
    model = AutoModelForCausalLM.from_pretrained(FOLDERS["starter_text"])
    assert sum(parameter.numel() for parameter in model.parameters()) < 3e6
    assert AutoTokenizer.from_pretrained(FOLDERS["starter_text"]).decode([1, 3, 4, 2], skip_special_tokens=True) == "01"
    policy = CausalLM(*load_causal_lm("starter_text"), None, Text(max_tokens=5))
    asked = problems(held_out=True)[::8]
    right = [text == str(problem.answer) for text, problem in zip(
        policy.generate(policy.encode([problem.prompt for problem in asked]), policy.generators([0] * len(asked))),
        asked)]
    careless = [problem.careless == problem.answer for problem in asked]
    assert 0.3 < sum(right) / len(right) < 0.6
    assert sum(r == c for r, c in zip(right, careless)) / len(right) > 0.95  # right where there is nothing to forget


def test_the_reward_of_the_recipe_reads_the_answer():
    config = load(RECIPE)
    reward, prompts = find(config.reward), splits.resolve(config)[1][:50]
    told, metadata = [prompt.text for prompt in prompts], [prompt.metadata for prompt in prompts]
    assert list(reward([entry["answer"] for entry in metadata], told, metadata)) == [1.0] * 50
    assert list(reward([entry["answer"] + "1" for entry in metadata], told, metadata)) == [0.0] * 50


@pytest.mark.parametrize("method", ["grpo", "gspo", "ppo", "spo_tree", "s_grpo", "latr"])
def test_the_first_ratio_is_one(method, tmp_path):
    short = {"method": method, "parts": tiny_text.PARTS.get(method, {}), "output": str(tmp_path), "tracker": "none",
             "device": "cpu", "train.epochs": 1, "train.prompts": 8, "train.group": 8, "eval.prompts": 4}
    summary = run(load(RECIPE, short))
    assert summary["max_first_log_ratio"] <= 1e-5 and summary["updates"] == 1


def test_ten_epochs_of_the_recipe_raise_the_held_out_accuracy(tmp_path):
    torch.manual_seed(0)
    short = {"output": str(tmp_path), "tracker": "none", "device": "cpu", "train.epochs": 10, "eval.prompts": 100}
    summary = run(load(RECIPE, short))
    [before], [after] = summary["before"].values(), summary["after"].values()
    assert after > before + 0.1


def test_half_precision_replays_to_rounding():
    model, tokenizer = load_causal_lm("starter_text", "bf16")
    policy = CausalLM(model, tokenizer, Adapter(rank=4), Text(max_tokens=5), precision="bf16")
    asked = policy.encode(["23+48=", "5-66="] * 8)
    made = policy.sample(asked, Decoding(), policy.generators(range(16)), torch.zeros(16, dtype=torch.bool))
    again = policy.log_probs(asked, torch.arange(16), made.ids, made.mask, Decoding())
    assert (again.logp - made.logp).abs().max() < 8 * torch.finfo(torch.bfloat16).eps  # of values around 1
    assert all(parameter.dtype == torch.float32 for parameter in policy.weights.parameters())
