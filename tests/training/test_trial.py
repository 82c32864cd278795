"""The trial of rewards before a run: what it finds, what it asks for, and that nothing of it stays."""

import json
import random
import re
import shutil
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from flowgrpo import rewards
from flowgrpo.config import load
from flowgrpo.config.reward_rules import Retry, RewardRule
from flowgrpo.config.sections import Adapter, Text
from flowgrpo.data.prompts import Prompt
from flowgrpo.rewards import About, Failed, differentiable
from flowgrpo.rewards.remote.exchange import Later, Service, Unanswered, brief
from flowgrpo.rewards.vlm_judge.judge import Judge, JudgePairs
from flowgrpo.run import run
from flowgrpo.storage import paths
from flowgrpo.text.policies.masked_lm import MaskedLM
from flowgrpo.text.rewards.embeddings import letters
from flowgrpo.training import metrics, state, trial
from tests.helpers import loop, tiny, tiny_dna, tiny_runs, tiny_text
from tests.helpers.chat_endpoint import endpoint, said
from tests.helpers.processes import free_ports
from tests.helpers.refusals import message, refused

TEXTS = [Prompt(text) for text in tiny_text.PROMPTS]


class Seen:
    """A reward that keeps what it is called with."""

    def __init__(self, answer=lambda images: [0.5] * len(images), **said):
        self.answer, self.calls = answer, []
        vars(self).update(said)

    def __call__(self, outputs, prompts, metadata, *group, **base):
        self.calls.append(SimpleNamespace(outputs=outputs[:] if isinstance(outputs, list) else outputs.clone(),
                                          prompts=prompts, metadata=metadata, group=group, base=base))
        return self.answer(outputs)


def tried(functions, watched=None, rules=None, make=tiny, **options):
    """The trial alone, of rewards by name; returns the trainer."""
    settings = {"reward": {name: 1.0 for name in functions}} | options
    made = {name: rewards.Composed(reward, (rules or {}).get(name, RewardRule())) for name, reward in functions.items()}
    trainer = make.trainer(rewards=made, **settings)
    trainer.held_out = [Prompt("held out", metadata={"kind": "held"}), Prompt("the other")]
    trial.require(trainer, made | (watched or {}))
    return trainer


def told(*given, **options) -> str:
    return message(tried, *given, **options)


async def later(images, prompts):
    return [0.5] * len(prompts)


BROKEN = {
    "raises": (lambda images, prompts: 1 / 0, "raised on 2 samples (first prompt of the batch: 'red'): ZeroDivision"),
    "one number": (lambda images, prompts: [0.5], "returned 1 value: expected 2 numbers"),
    "strings": (lambda images, prompts: ["a", "b"], "returned 'a', expected a finite number"),
    "nan": (lambda images, prompts: [0.1, float("nan")], "returned nan, expected a finite number, or None where it "
            "does not apply (prompt: 'blue')"),
    "inf": (lambda images, prompts: [0.1, float("inf")], "returned inf, expected a finite number"),
    "None": (lambda images, prompts: None, "returned None: expected 2 numbers"),
    "meta": (lambda images, prompts: torch.empty(2, device="meta"), "returned Tensor without values: expected 2"),
    "sparse": (lambda images, prompts: torch.ones(2).to_sparse(), "returned Tensor without values: expected 2"),
    "shape": (lambda images, prompts: images.mean((2, 3)), "returned the shape [2, 3]: expected 2 numbers"),
    "a generator": (lambda images, prompts: (0.5 for _ in prompts), "returned <generator object"),
    "a set": (lambda images, prompts: {0.5, 1.0}, "expected 2 numbers, one per sample"),
    "beyond float": (lambda images, prompts: [10**400] * 2, "expected a finite number"),
    "async": (later, "is an `async def`: expected a function that returns a number per sample"),
    "None each": (lambda images, prompts: [None] * len(prompts), "no sample of 2 prompts had a score from 'mine'")}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_reward_is_told_before_anything_is_measured_or_written(case, tmp_path):
    broken, line = BROKEN[case]
    settings = tiny.config(tmp_path, reward="mine", eval__rewards=["watched"])
    watched = Seen()
    said = message(tiny_runs.whole, settings, {"mine": broken, "watched": watched})
    assert line in said and "'mine'" in said
    assert not settings.folder.exists() and len(watched.calls) <= 1


def test_a_watched_reward_is_tried_on_held_out_prompts_and_samples_have_the_form_of_those_of_a_run():
    assert "reward 'seen' returned 1 value: expected 2 numbers, one per sample (first prompt: 'held out')" in told(
        {"red": tiny.red}, {"seen": lambda images, prompts: [1.0]})
    seen, watched = Seen(), Seen()
    trainer = tried({"mine": seen}, {"watched": watched})
    assert trainer.policy.evaluations == 0 and trainer.scoring._tally.failed == {}
    [call], [further] = seen.calls, watched.calls
    assert call.prompts == tiny.PROMPTS[:2] and further.prompts == ["held out", "the other"]
    assert further.metadata == [{"kind": "held"}, {}]
    own = trainer.rollouts.conditioning(trainer.prompts[:2])
    real = trainer.policy.generate(own, trainer.policy.generators([0, 1]), 2, 1.0)
    assert call.outputs.shape == real.shape and call.outputs.dtype == real.dtype and call.outputs.device == real.device
    assert 0 <= call.outputs.min() < call.outputs.max() <= 1 and not torch.equal(*call.outputs)


def test_nothing_that_a_reward_does_to_its_samples_is_seen_by_another():
    def careless(images, prompts, metadata):
        images.zero_()
        metadata[0].clear()
        return [0.5] * len(prompts)
    seen, watched = Seen(), Seen()
    trainer = tried({"careless": careless, "seen": seen}, {"clears": careless, "watched": watched})
    assert seen.calls[0].outputs.max() > 0 and watched.calls[0].outputs.max() > 0
    assert watched.calls[0].metadata[0] == {"kind": "held"} == trainer.held_out[0].metadata


def test_a_route_is_kept_to():
    seen, never = Seen(), Seen()
    rules = {"mine": RewardRule(when={"kind": "b"}), "never": RewardRule(when={"kind": "c"})}
    made = {name: rewards.Composed(each, rules[name]) for name, each in (("mine", seen), ("never", never))}
    trainer = tiny.trainer(rewards=made, reward={"mine": 1.0, "never": 1.0})
    trainer.prompts = [Prompt("one", metadata={"kind": "a"}), Prompt("two", metadata={"kind": "b"})]
    trial.require(trainer, {})
    assert [call.prompts for call in seen.calls] == [["two", "two"]] and never.calls == []


def test_a_reward_that_sees_groups_is_given_one():
    grouped, pairs = Seen(group=True), Seen(pairwise=True)
    tried({"grouped": grouped, "pairs": pairs})
    [call] = grouped.calls
    assert call.group == (4,) and call.prompts == ["red"] * 4 and len(call.outputs.unique(dim=0)) == 4
    assert len(pairs.calls[0].prompts) == 6  # the pairs of four
    assert "'grouped' returned 1 value: expected 4 numbers" in told(
        {"grouped": Seen(lambda outputs: [1.0], group=True)})


def test_a_server_is_asked_once_and_a_reward_that_compares_with_the_base_has_one():
    remote = About(needs="server")
    alone, grouped, pairs, plain = (Seen(about=remote, **said) for said in (
        {}, {"group": True}, {"pairwise": True}, {"made_of": []}))
    tried({"alone": alone, "grouped": grouped, "pairs": pairs, "made": Seen(made_of=[plain])})
    assert [len(each.calls[0].prompts) for each in (alone, grouped, pairs)] == [1, 4, 1]
    assert rewards.slow(Seen(made_of=[plain])) and not rewards.slow(Seen()) and plain.calls == []
    far = Seen(base=True)
    tried({"far": far})
    [call] = far.calls
    assert torch.equal(call.base["base"], call.outputs)


def test_failures_follow_their_policy(capsys):
    def failing(images, prompts):
        raise OSError("away")
    trainer = tried({"mine": failing}, rules={"mine": RewardRule(on_error="skip")})
    assert "reward 'mine' failed on a trial sample, which a run leaves out and counts: reward 'mine' raised" in \
        capsys.readouterr().out
    assert trainer.scoring._tally.failed == {} and trainer.scoring.reward_failures == {}
    seen = Seen(lambda images: 1 / 0)
    assert "ZeroDivisionError" in told({"mine": seen}, rules={"mine": RewardRule(on_error=Retry(retry=9, wait=1e6))})
    assert len(seen.calls) == 2
    tried({"mine": Seen(lambda images: [Failed("no answer"), 1.0])})
    assert "on a trial sample, which a run leaves out and counts: no answer" in capsys.readouterr().out
    hanging = threading.Event()
    assert "hangs on 2 samples (first prompt of the batch: 'red'): no answer within 0.1 s" in told(
        {"mine": Seen(lambda images: hanging.wait(60))}, rules={"mine": RewardRule(timeout=0.1)})
    hanging.set()


def test_a_slow_reward_is_told_each_time_the_wait_doubles(capsys, monkeypatch):
    monkeypatch.setattr(trial, "PATIENCE", 0.05)
    notices, ended = [], time.monotonic() + 60

    def slow(images, prompts):
        while len(notices) < 3 and time.monotonic() < ended:
            notices.extend(line for line in capsys.readouterr().out.splitlines() if "has judged" in line)
            time.sleep(0.01)
        return images[:, 0].mean((1, 2))
    tried({"mine": slow})
    assert [re.fullmatch(r"reward 'mine' has judged 2 samples for (\S+) s: if it hangs, set its timeout, .*", line)[1]
            for line in notices[:3]] == ["0.05", "0.1", "0.2"]


def kept(images, prompts):
    return images.mean((1, 2, 3))


def test_no_score_is_kept(tmp_path):
    made = rewards.compose({"kept": RewardRule(cache=True)}, str(tmp_path), {"kept": kept})
    trial.require(tiny.trainer(rewards=made), {})
    assert made["kept"].kept._with("SELECT * FROM scores") == []


def test_none_for_the_first_prompts_alone_is_no_mistake():
    some = Seen(lambda images: [None, None] if len(images) == 2 else [0.5] * len(images))
    refused("no sample of 2 prompts had a score from 'mine': .* got such as 'red'", tried, {"mine": some})
    tried({"mine": Seen(lambda images: [None, 0.5])})
    tried({"mine": Seen(lambda images: [None, None]), "red": tiny.red})


@pytest.mark.parametrize("make", [tiny, tiny_text])
def test_a_run_is_the_same_with_and_without_a_trial(make):
    """Also of a reward that draws random numbers from everywhere."""
    def noisy(outputs, prompts):
        return [len(prompt) + random.random() + np.random.rand() + torch.rand(()).item() for prompt in prompts]
    found = []
    for first in (True, False):
        random.seed(3), np.random.seed(3), torch.manual_seed(3)
        trainer = make.trainer(rewards={"noisy": noisy}, reward="noisy")
        random.seed(3), np.random.seed(3), torch.manual_seed(3)
        if first:
            trial.require(trainer, {"other": noisy})
        epochs = [{key: value for key, value in trainer.run_epoch().items() if "seconds" not in key}
                  for trainer.epoch in (0, 1)]
        found.append((epochs, trainer.policy.evaluations, trainer.policy.weights.snapshot()))
    (one, count, weights), (other, again, compared) = found
    assert json.dumps(one) == json.dumps(other) and count == again
    tiny_runs.assert_same_weights(weights, compared)


# --- gradients -------------------------------------------------------------------------------------------------------
FOLLOWED = {"method": "draft", "train__steps": 4}


@pytest.mark.parametrize("reward, line", [
    (lambda images, prompts: torch.ones(len(images), requires_grad=True), "its numbers do not depend on what it is"),
    (lambda images, prompts: images.detach().mean((1, 2, 3)), "returned numbers without a gradient"),
    (lambda images, prompts: images.mean((1, 2, 3)).tolist(), "is differentiable and returned a list"),
    (lambda images, prompts: (images * 0).sum((1, 2, 3)).sqrt(), "its gradient holds NaN or an infinity"),
    (lambda images, prompts: 1 / 0, "raised on 2 samples")])
def test_a_gradient_has_to_reach_the_images(reward, line):
    assert line in told({"mine": differentiable(reward)}, **FOLLOWED)


def test_gradients_that_flow_and_those_of_tokens():
    trainer = tried({"mine": differentiable(lambda images, prompts: images.mean((1, 2, 3)))}, **FOLLOWED)
    assert trainer.epoch == trainer.optimization.update == 0  # the trial leaves the run as it was
    def own(reward):
        policy = MaskedLM(*tiny_dna.model(steps=0), Adapter(rank=2), Text(max_tokens=tiny_dna.LENGTH))
        trainer = tiny.trainer(policy, {"mine": reward}, method="drakes", reward="mine",
                               text__max_tokens=tiny_dna.LENGTH)
        trainer.prompts = [Prompt("="), Prompt("==")]
        return trainer
    trial.require(own(differentiable(lambda texts, prompts: letters(texts, "AG").sum((1, 2)))), {})
    for blind, line in ((lambda texts, prompts: torch.ones(len(texts), requires_grad=True), "do not depend on what it"),
                        (lambda texts, prompts: letters(texts, "AG").detach().sum((1, 2)), "without a gradient")):
        refused(line, trial.require, own(differentiable(blind)), {})


# --- texts -----------------------------------------------------------------------------------------------------------
def test_completions_are_short(tmp_path):
    seen = Seen()
    trainer = tried({"mine": seen}, make=tiny_text, text__max_tokens=40)
    [call] = seen.calls
    assert call.prompts == tiny_text.PROMPTS[:2] and trainer.policy.text.max_tokens == 40
    assert [0 < entry["completion_tokens"] <= trial.TOKENS for entry in call.metadata] == [True, True]


def test_a_prompt_without_room_and_a_chat_template_that_fails_are_told():
    line = told({"mine": Seen()}, make=tiny_text, text__max_tokens=59)
    assert "the prompt '5;66=' has 6 tokens and its completion up to 59, but the model's context is 64 tokens" in line
    model, tokenizer = tiny_text.model()
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    refused("the chat template of .* fails on the prompt '1.2=' .no system role.: set",
            tiny_text.policy((model, tokenizer)).encode, ["1+2="])
    model, tokenizer = tiny_text.model()
    tokenizer.pad_token = model.generation_config.pad_token_id = None
    assert tiny_text.policy((model, tokenizer)).padding == tokenizer.eos_token_id


# --- what is not in this process -------------------------------------------------------------------------------------
PATIENT = {"model": "m", "retries": 99, "wait": 1e6}


def test_a_judge_or_reward_server_that_is_not_there_is_told_at_once_under_every_policy():
    url = f"http://127.0.0.1:{free_ports(1)[0]}"  # where nothing listens
    for on_error in ("raise", "skip", Retry(retry=9, wait=1e6)):
        line = told({"mine": Judge(url=f"{url}/v1", **PATIENT)}, rules={"mine": RewardRule(on_error=on_error)})
        assert line.startswith(f"a judge: {url}/v1/chat/completions gave no answer (ConnectError")
        assert line.endswith("is a server running there, and is the URL right?")
    refused(f"{url}/info gave no answer .ConnectError.* is a server running there", rewards.find, f"{url}/mine",
            {"retries": 99, "wait": 1e6})


@pytest.mark.parametrize("status, line", [
    ((404, {}, {"error": {"message": "no model m"}}), "answered 404: no model m (is the url that of the API"),
    ((401, {}, b""), "answered 401: set key_env"), ((200, {}, b"<html>"), "gave no proper answer: no chat completion"),
])
def test_a_judge_that_refuses_is_told_after_one_question(status, line):
    with endpoint([status]) as server:
        assert line in told({"mine": Judge(url=server.url, **PATIENT)}, rules={"mine": RewardRule(on_error="skip")})
    assert len(server.seen) == 1


def test_a_judge_is_asked_one_question_and_one_of_pairs_of_one_pair(capsys):
    with endpoint([said("Score: 7")]) as server:
        tried({"mine": Judge(url=server.url, **PATIENT)})
        assert [path for path, *_ in server.seen] == ["/v1/chat/completions"]
        tried({"pairs": JudgePairs(url=server.url, **PATIENT)})
    assert len(server.seen) == 3 and "'pairs' failed on a trial sample" in capsys.readouterr().out  # in both orders


def test_a_busy_service_is_asked_again():
    def service(**options) -> Service:
        return Service("it", ["a", "b"], timeout=1, headers={}, **{"retries": 3, "wait": 0} | options)
    def attempts(error: Exception, **options) -> int:
        asked = []
        def attempt(url: str):
            asked.append(url)
            raise error
        with brief(), pytest.raises(Failed, match=f".asked {options.get('told', 5)} times?"):
            service(**{key: value for key, value in options.items() if key != "told"}).try_urls(attempt)
        return len(asked)
    assert attempts(Unanswered("503")) == 5
    assert attempts(Unanswered("503"), wait=1e6, told=1) == 1
    assert attempts(Later("429", 0.001), wait=0.001) == 5


# --- disk, tracker ---------------------------------------------------------------------------------------------------


def test_the_room_that_checkpoints_take_is_asked_for(tmp_path, monkeypatch):
    """As much as what is kept and one more; what an earlier part of the run left is there already."""
    trainer = tiny.trainer(output=tmp_path, train__keep=2, train__epochs=9, train__save_every=1, train__ema=0.9)
    trainer.run_epoch()
    whole = state.room(trainer)
    state.save(trainer, trainer.config.folder)
    [file] = trainer.config.folder.rglob("state.safetensors")
    assert whole == pytest.approx(3 * sum(each.nbytes for each in load_file(file).values()), rel=0.01)
    assert state.room(trainer) == whole - sum(each.stat().st_size for each in file.parent.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    line = told({"red": tiny.red}, output=tmp_path / "not" / "there")
    assert line.startswith(f"{tmp_path}/not/there/run has room for 1,000 bytes, but the run's checkpoints take ")
    paths.require_room(tmp_path, 1000, "a file")


def test_a_tracker_without_its_package_or_its_key(tmp_path, monkeypatch):
    config = load(None, {"tracker": "wandb", "output": str(tmp_path), "device": "cpu"})
    monkeypatch.setattr("sys.path", [each for each in __import__("sys").path])
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert "tracker is 'wandb', but its package is not installed: pip install wandb" in message(run, config)
    (tmp_path / "wandb.py").write_text("class api:\n    api_key = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "tracker is 'wandb', but it has no key: `wandb login`" in message(metrics.check, loop.setup(config))
    monkeypatch.setenv("WANDB_MODE", "offline")
    metrics.check(loop.setup(config))
