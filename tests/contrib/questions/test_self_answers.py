"""Answers of the denoiser that draws: labels of prompts, the loss by hand, one set of weights, runs that learn both."""

from __future__ import annotations

import threading

import pytest
import torch

from flowgrpo.config.reward_rules import WatchRule
from flowgrpo.contrib.questions.answer_losses import policy_gradient, questions_of
from flowgrpo.contrib.questions.questions import Question, of_prompt
from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.signals import Stop
from flowgrpo.errors import UserError
from flowgrpo.methods.supervised import SelfAnswers
from flowgrpo.methods.validate import resolve
from flowgrpo.policies import checkpoints
from flowgrpo.policies.pipelines import picture_reader
from flowgrpo.rewards import compose, find
from flowgrpo.rollouts.data_losses import Example
from flowgrpo.storage import checkpoint
from flowgrpo.training import state
from flowgrpo.training.sampling import Scorer
from tests.helpers import loop, tiny, tiny_runs

COLOURS = ("red", "green", "blue")
ASKED = [Prompt(colour, metadata={"questions": [
    {"question": "What color is it?", "answer": colour, "choices": [*COLOURS]},
    {"question": "Is it red?", "answer": "yes" if colour == "red" else "no"}]}) for colour in COLOURS]
ALL = {"right": 0.0, "mastered": True}


def trainer(data=None, rewards=None, kind: str = "flow", **options):
    data = {"type": "SelfAnswers", "batch": 3, "source": ALL} | (data or {})
    settings = tiny_runs.config(kind, "mix_grpo" if kind == "flow" else "ddpo", {"data": data}, **options)
    rewards = {"score": tiny.red} if rewards is None else rewards
    if kind == "flow":
        return tiny.trainer_of(settings, rewards, ASKED)
    made = tiny_runs.trainer(kind, settings.model_copy(update={"parts": {}}))
    return type(made)(settings, made.accelerator, made.policy, rewards, (ASKED, []))


def drawn(places=range(3)) -> list[Example]:
    """Pictures of one value each, which tell their prompts apart."""
    return [Example(ASKED[i], torch.full(tiny.LATENTS, float(i) - 1.0)) for i in places]


def losses(made, examples, update: int = 0) -> torch.Tensor:
    loss = loop.term(made).loss
    return sum(loss(examples, range(len(examples)), update)) / loss.divisor(examples)


# --- labels and losses by hand ---------------------------------------------------------------------------------------

def test_the_prompts_claims_are_the_labels():
    own = {"questions": [{"question": "Is it?", "answer": "no"}]}
    assert of_prompt("a red star", own) == [Question("Is it?", "no")]
    clauses = {"include": [{"class": "dog", "count": 2}]}
    assert [(each.question, each.answer) for each in of_prompt("two dogs", clauses)] == [
        ("How many dogs are in the picture?", "two")]
    answers = {each.question: each.answer for each in of_prompt("a red star", {})}
    assert answers["What color is the star?"] == "red" and answers["How many things are in the picture?"] == "one"
    assert answers["Is there a ring in the picture?"] == "no"
    assert "Is there a star in the picture?" not in answers
    both = of_prompt("a red star", {}, present=True)
    assert both[-1] == Question("Is there a star in the picture?", "yes") and len(both) == len(answers) + 1
    assert questions_of(Prompt("a red star")) == both
    assert of_prompt("a photograph of my cat", {}) is None


def test_the_loss_is_the_cross_entropy_over_the_choices():
    """At first all choices are equally likely: (3 log 3 + 3 log 2) / 6. Odds of 3 for red: -log(3/5) and -log(1/5)."""
    made = trainer()
    head = loop.term(made).loss.head
    torch.testing.assert_close(losses(made, drawn()).detach(), torch.tensor([3.0, 2.0]).log().mean())
    with torch.no_grad():
        head.out.bias[head.answers["red"]] = torch.tensor(3.0).log()
    found = -torch.tensor([3 / 5, 1 / 2, 1 / 5, 1 / 2, 1 / 5, 1 / 2]).log().mean()
    torch.testing.assert_close(losses(made, drawn()).detach(), found)
    assert losses(made, drawn([0])) < losses(made, drawn([2]))
    weighed = trainer({"beta": 0.5})
    half = [Example(ASKED[0], drawn()[0].content, reward=0.5)]
    torch.testing.assert_close(losses(weighed, half), losses(trainer(), drawn([0])) / torch.e)


def test_the_policy_gradient_of_answers_by_hand():
    """Four answers to a question, one right: rewards 1, 0, 0, 0 have the mean 1/4 and the deviation 1/2, so that the
    advantages are 3/2 and three times -1/2. A group of one kind teaches nothing."""
    logp = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]).log().requires_grad_()
    drawn = torch.tensor([[1, 0, 0, 2], [0, 0, 2, 2]])
    loss = policy_gradient(logp, drawn, torch.tensor([1, 1]))
    half, quarter = torch.tensor([0.5, 0.25]).log()
    torch.testing.assert_close(loss, torch.stack([-(1.5 * quarter - half - 0.5 * quarter) / 4, torch.zeros(())]))
    loss.sum().backward()
    torch.testing.assert_close(logp.grad, torch.tensor([[0.25, -0.375, 0.125], [0.0, 0.0, 0.0]]))


def test_answers_are_drawn_alike_for_a_step_and_anew_for_the_next():
    made = trainer({"samples": 8})
    one, two, other = (losses(made, drawn(), update).detach() for update in (0, 0, 1))
    assert torch.equal(one, two) and not torch.equal(one, other)


# --- one set of weights ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["flow", "vp"])
def test_the_weights_that_draw_are_those_that_answer(kind):
    """The gradient of the answers reaches the denoiser's LoRA, and a step on answers alone changes what it draws."""
    made = trainer({"balance": {"rl": 0.0, "data": 1.0}}, kind=kind)
    head, named = loop.term(made).loss.head, made.policy.weights.named
    with torch.no_grad():
        torch.nn.init.normal_(head.out.weight)
    loop.term(made)._backward(drawn(), 0)
    of_denoiser = [key for key, parameter in named.items() if ".lora_B." in key and parameter.grad is not None
                   and parameter.grad.abs().max() > 1e-7]
    assert len(of_denoiser) > 3
    x, conditioning = torch.randn(1, *tiny.LATENTS), made.rollouts.conditioning(ASKED[:1])
    times = head.reader.times

    def velocity() -> torch.Tensor:
        with torch.no_grad():
            return made.policy.replay(conditioning, x, times.grid, 0, times.timesteps)

    before = velocity()
    made.optimization.optimizer.step()
    assert (velocity() - before).abs().max() > 1e-5


def test_the_picture_is_read_clean_and_under_the_empty_prompt():
    made = trainer()
    reader, seen = loop.term(made).loss.head.reader, []
    made.rollouts.conditioning(ASKED[:1])  # a first call tries the pipeline
    made.policy.denoisers["transformer"].register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    latents = torch.randn(2, *tiny.LATENTS)
    made.policy.guidance = 3.0
    with torch.no_grad():
        states = reader(latents)
    [call] = seen
    assert states.shape == (2, 16, 16) and reader.width == 16 and made.policy.guidance == 3.0
    torch.testing.assert_close(call["hidden_states"], 0.9 * latents)
    torch.testing.assert_close(call["timestep"], torch.full((2,), 100.0))
    empty = made.policy.encode([""]).calls[0][0]
    torch.testing.assert_close(call["encoder_hidden_states"], empty.expand(2, -1, -1))


# --- runs ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("samples", [0, 16])
def test_the_answers_are_learned_from_the_runs_own_pictures(samples):
    """Chance is (1/3 + 1/2) / 2; trained on its collected pictures, the denoiser answers all of them."""
    made = trainer({"samples": samples, "batch": 6}, train__lr=1e-2, adapter__rank=4)
    loop.term(made).examples.collected = drawn()
    begun = None
    for update in range(60):
        made.optimization.optimizer.zero_grad()
        loop.term(made)._backward(loop.term(made).examples.drawn(3, update), update)
        made.optimization.optimizer.step()
        last = loop.term(made).loss.metrics(list)["data/accuracy"]
        begun = last if begun is None else begun
    assert begun < 0.7 and last == 1.0
    assert loop.term(made).loss.metrics(list) == {}  # nothing was asked since


def composed(**arguments):
    return compose({"self_answers": WatchRule(args=arguments)})


def test_a_runs_reward_is_the_answers_of_its_own_model():
    rewards = composed(score="probability")
    made = trainer(rewards=rewards, reward={"self_answers": 1.0})
    head = loop.term(made).loss.head
    with torch.no_grad():
        head.out.bias[head.answers["red"]] = torch.tensor(3.0).log()
    latents, metadata = torch.stack([each.content for each in drawn()]), [prompt.metadata for prompt in ASKED]
    found = rewards["self_answers"].function(latents, list(COLOURS), metadata, made.policy)
    assert found == pytest.approx([(3 / 5 + 1 / 2) / 2, (1 / 5 + 1 / 2) / 2, (1 / 5 + 1 / 2) / 2])
    share = find("self_answers")
    # Red is the likeliest colour, yes and no tie.
    assert share(latents, list(COLOURS), metadata, made.policy) == [0.5, 0.0, 0.0]
    with pytest.raises(UserError, match="the run's own answers know no 'Is it new"):
        share(latents[:1], ["red"], [{"questions": [{"question": "Is it new?", "answer": "yes"}]}], made.policy)


@pytest.mark.parametrize("samples", [0, 4])
def test_two_epochs_of_both_tasks(samples):
    made = trainer({"samples": samples}, composed(score="probability"), reward={"self_answers": 1.0})
    frozen = tiny_runs.frozen(made)
    metrics = tiny_runs.epochs(made, 2)
    assert all(0 <= epoch["data/accuracy"] <= 1 and epoch["data/examples"] > 0 for epoch in metrics)
    assert metrics[0]["reward/self_answers/mean"] == pytest.approx(5 / 12)  # of chance, before anything is learned
    assert metrics[1]["reward/self_answers/mean"] != metrics[0]["reward/self_answers/mean"]
    assert metrics[1]["reward/self_answers/std"] > 0
    after = tiny_runs.frozen(made)
    assert all(torch.equal(after[key], frozen[key]) for key in frozen)


def test_a_resumed_run_answers_as_if_nothing_had_happened(tmp_path):
    made, other = (trainer(rewards=composed(score="probability"), reward={"self_answers": 1.0}) for _ in range(2))
    tiny_runs.epochs(made, 2)
    made.epoch, made.progress.saved_counters = 2, state.counters(made) | {"epoch": 2}
    state.save(made, tmp_path)
    state.restore(other, checkpoint.latest(tmp_path / "checkpoints"))
    whole, resumed = made.run_epoch(), other.run_epoch()
    for key in ("data/loss", "data/accuracy", "reward/self_answers/mean"):
        assert whole[key] == resumed[key]
    held = other.policy.weights.named
    assert all(torch.equal(parameter, held[key]) for key, parameter in made.policy.weights.named.items())
    assert any(key.startswith(f"{picture_reader.NAME}.") for key in held)
    plain = tiny.policy().weights  # of the pipeline alone, which draws without the head
    checkpoints.take(plain, made.config, checkpoint.latest(tmp_path / "checkpoints"))
    saved, _ = checkpoint.load(checkpoint.latest(tmp_path / "checkpoints"))
    assert plain.named and all(torch.equal(parameter, saved[f"weights/{key}"]) for key, parameter in
                               plain.named.items())


def test_the_reward_reads_the_model_once_nothing_is_sampled_any_more():
    began, done = threading.Event(), Stop(False)
    with Scorer(done, waits=True) as scorer:
        future = scorer.submit(lambda: began.set() or torch.ones(1))
        assert not began.wait(0.05)
        assert scorer.results([future])[0].item() == 1.0
    assert trainer(rewards=composed(), reward={"self_answers": 1.0}).scoring.waits and not trainer().scoring.waits


# --- what is refused -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("options, told", [
    ({"source": {"type": "Recorded", "path": "a.jsonl"}}, "learns only from the run's own images"),
    ({"source": {"failed": True, "solved": False, "mastered": False}}, "learns only from the run's own images"),
    ({"time": 1.0}, "time is 1.0"), ({"samples": 1}, "samples 1, expected"),
    ({"condition": "{source}{prompt}"}, "under the empty prompt")])
def test_parts_that_do_not_go_together(options, told):
    with pytest.raises(UserError, match=told):
        resolve(tiny_runs.config("flow", "mix_grpo", {"data": {"type": "SelfAnswers"} | options}))


def test_runs_without_questions_or_answers_are_refused():
    assert SelfAnswers().source.right == 1.0 and not SelfAnswers().source.failed
    settings = tiny_runs.config("flow", "mix_grpo", {"data": {"type": "SelfAnswers"}})
    with pytest.raises(UserError, match="the prompt 'a cat' gives no question: expected metadata"):
        tiny.trainer_of(settings, {"score": tiny.red}, [Prompt("a cat")])
    rewards = composed()
    tiny.trainer_of(tiny_runs.config("flow", "mix_grpo", reward={"self_answers": 1.0}), rewards, ASKED)
    with pytest.raises(UserError, match="learned no answers here: set parts.data"):
        rewards["self_answers"].function(torch.zeros(1, *tiny.LATENTS), ["red"], [ASKED[0].metadata])
    with pytest.raises(UserError, match="which changes: set cache: false"):
        compose({"self_answers": WatchRule(cache=True)}, "folder")
    with pytest.raises(UserError, match="Linear has no last layer proj_out or conv_out"):
        picture_reader.last_layer(torch.nn.Linear(2, 2))
    with pytest.raises(UserError, match="score is 'mark' and batch_size 32"):
        find("self_answers", {"score": "mark"})
