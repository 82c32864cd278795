"""Answers about own images by the weights that drew them: labels, losses by hand, runs, what is held out."""

import random
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from flowgrpo.config import load
from flowgrpo.config.reward_rules import WatchRule
from flowgrpo.contrib.questions import answer_losses
from flowgrpo.contrib.questions.answer_losses import (
    Asked,
    of_claims,
    of_scene,
    policy_gradient,
    reader_of,
    sample_questions,
)
from flowgrpo.contrib.questions.questions import Question, of_prompt
from flowgrpo.contrib.questions.scene_answers import Thing, read_question
from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.signals import Stop
from flowgrpo.errors import UserError
from flowgrpo.evaluation.measured import Measured
from flowgrpo.methods.supervised import SelfAnswers
from flowgrpo.methods.validate import resolve
from flowgrpo.rewards import compose
from flowgrpo.rollouts.data_losses import Example
from flowgrpo.starter import lattice, scenes
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.train import Trainer
from flowgrpo.training.sampling import Scorer
from tests.helpers import loop, tiny_runs, tiny_text
from tests.helpers import tiny_vision as tiny
from tests.helpers.refusals import message, refused

ASKED = [Prompt(f"{a}+1=", metadata={"questions": [
    {"question": f"{a}+1=", "answer": str(a + 1), "choices": ["2", "3", "4"]},
    {"question": f"{a}+0=", "answer": str(a), "choices": ["1", "2", "3"]}]}) for a in (1, 2, 3)]
ALL = {"right": 0.0}


def bright(images, prompts, metadata):
    """Mean of the pixels."""
    return [float(image.mean()) for image in images]


def config(method="unirl", data=None, **options):
    small = {"output": "nowhere", "name": "run", "device": "cpu", "precision": "fp32", "tracker": "none",
             "method": method, "reward": "bright", "text.generates": "image", "adapter.rank": 0, "train.epochs": 2,
             "train.prompts": 3, "train.group": 4, "train.micro_batch": 12, "train.lr": 1e-3, "eval.prompts": 2,
             "parts": {"data": {"batch": 6, "length": 2, "source": ALL} | (data or {})}}
    return load(None, small | options)


def trainer(method="unirl", data=None, rewards=None, **options) -> Trainer:
    settings = config(method, data, **options)
    torch.manual_seed(0)
    own = tiny_text.stir(tiny.drawing(guidance=1.0, shown=1.0, rank=0, answers=True), 0.02)
    return Trainer(settings, Accelerator(cpu=True), own, rewards or {"bright": bright}, (ASKED, ASKED[:1]))


def drawn(made: Trainer, count: int = 3) -> list[Example]:
    ids = made.policy.first + torch.arange(4 * count).view(count, 4)
    return [Example(prompt, row) for prompt, row in zip(ASKED, ids)]


def decoded(made: Trainer) -> torch.Tensor:
    return made.policy.decode(torch.stack([each.content for each in drawn(made)]))


def losses(made: Trainer, examples: list[Example], update: int = 0) -> torch.Tensor:
    loss = loop.term(made).loss
    return sum(loss(examples, range(len(examples)), update)) / loss.divisor(examples)


# --- questions -------------------------------------------------------------------------------------------------------
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
    assert of_prompt("a photograph of my cat", {}) is None
    # Of a prompt's own questions yes and no are equally likely, whatever there is more of.
    dice, asked = random.Random(0), Prompt("a red star")
    said = [of_claims(asked, dice)[1] for _ in range(400)]
    assert abs(said.count("yes") - said.count("no")) < 60 < said.count("yes") and said.count("red") > 60


def test_nothing_is_asked_of_images_that_cannot_be_read():
    rng = np.random.default_rng(0)
    objects = lattice.place(scenes.parse("a red star left of a blue ring"), rng)
    question, answer = of_scene(torch.from_numpy(lattice.paint(objects)), random.Random(1))
    assert read_question(question)[1]([Thing(*each) for each in objects]) == answer
    assert of_scene(torch.full((3, 64, 64), 0.96), random.Random(1)) is None
    # Beside a blob that is no object nothing is asked.
    grid = torch.from_numpy(lattice.paint(objects))
    grid[:, 30:34, 20:50] = 0.4
    assert of_scene(grid, random.Random(1)) is None


# --- losses by hand --------------------------------------------------------------------------------------------------
def answer_log_probs(made: Trainer, question: str, answer: str, picture: torch.Tensor) -> torch.Tensor:
    """log p of an answer and its end, by the stock model's own forward on one row."""
    own = made.policy
    image = answer_losses.as_processor_images(picture[None])[0]
    inputs = own.processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": question}]}],
        add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")
    said = torch.tensor([own.tokenizer(answer, add_special_tokens=False)["input_ids"] + [2]])
    ids = torch.cat([inputs["input_ids"], said], 1)
    logits = own.model(input_ids=ids, pixel_values=inputs["pixel_values"]).logits[0, -said.shape[1] - 1:-1].clone()
    logits[:, tiny.SPECIAL.index("<image>")] = -torch.inf
    return logits.log_softmax(-1).gather(1, said[0][:, None]).sum()


def test_the_loss_is_the_cross_entropy_of_the_right_answers():
    made = trainer("unirl_sft", {"images": 0.0})
    examples, pictures = drawn(made), decoded(made)
    seed = answer_losses.seed_of(made.config.seed, 0, 0)
    asked = sample_questions(made.method.loss.data, ASKED, pictures, random.Random(seed))
    assert [each.row for each in asked] == [0, 1, 2]
    by_hand = torch.stack([answer_log_probs(made, each.question, each.answer, pictures[each.row]) for each in asked])
    torch.testing.assert_close(losses(made, examples), -by_hand.mean(), rtol=1e-4, atol=1e-4)
    told = loop.term(made).loss.metrics(list)
    assert told["data/accuracy"] == pytest.approx(by_hand.exp().mean().item(), abs=1e-4)
    assert loop.term(made).loss.metrics(list) == {}  # nothing was asked since
    # Beside them, the images' own tokens.
    whole = trainer("unirl_sft", {"images": 2.0})
    ids = torch.stack([each.content for each in examples])
    own = whole.policy.log_probs(whole.rollouts.conditioning(ASKED), torch.arange(3), ids,
                                 torch.ones_like(ids, dtype=torch.bool), Decoding()).logp
    torch.testing.assert_close(losses(whole, examples), -by_hand.mean() - 2 * own.mean(), rtol=1e-4, atol=1e-4)


def test_answers_are_sampled_alike_and_their_gradient_by_hand():
    """Four answers, one right: advantages 3/4 and three times -1/4, without a division. A group of one kind teaches
    nothing."""
    logp = torch.tensor([[-1.0, -2.0, -3.0, -4.0], [-1.0, -1.0, -2.0, -2.0]], requires_grad=True)
    loss = policy_gradient(logp, torch.tensor([[1.0, 0, 0, 0], [1.0, 1, 1, 1]]))
    torch.testing.assert_close(loss, torch.tensor([-(0.75 * -1 - 0.25 * (-2 - 3 - 4)) / 4, 0.0]))
    loss.sum().backward()
    torch.testing.assert_close(logp.grad, torch.tensor([[-0.75, 0.25, 0.25, 0.25], [0.0] * 4]) / 4)
    made = trainer(data={"samples": 64, "length": 1})
    one, two, other = (losses(made, drawn(made), update).detach() for update in (0, 0, 1))
    assert torch.equal(one, two) and not torch.equal(one, other)


def test_the_weights_that_draw_are_those_that_answer():
    """The gradient of answers reaches the language model, and a step on answers alone changes what it draws."""
    made = trainer("unirl_sft", {"images": 0.0})
    loop.term(made)._backward(drawn(made), 0)
    named = made.policy.weights.named
    reached = {key for key, weight in named.items() if weight.grad is not None and weight.grad.abs().max() > 0}
    for part in ("language_model", "vision_model", "aligner", "lm_head"):
        assert any(part in key for key in reached), part
    assert not any("generation_head" in key for key in reached)
    given = made.policy.encode(["1+1="])
    before = made.policy.sample(given, Decoding(), made.policy.generators([1]), torch.tensor([False]))
    made.optimization.optimizer.step()
    with torch.no_grad():
        after = made.policy.log_probs(given, torch.tensor([0]), before.ids, before.mask, Decoding())
    assert (after.logp - before.logp).abs().max() > 1e-5
    assert reader_of(made.policy, 2) is loop.term(made).loss.reader


# --- runs ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["unirl", "unirl_sft"])
def test_two_epochs_of_both_tasks(method):
    made = trainer(method)
    metrics = tiny_runs.epochs(made, 2)
    assert all(0 <= epoch["data/accuracy"] <= 1 and epoch["data/loss"] == epoch["data/loss"] for epoch in metrics)
    # Twelve images an epoch: GRPO's are asked about in two steps of their own, the supervised in the one of the epoch.
    assert made.optimization.update == (2 * 3 if method == "unirl" else 2)


@pytest.mark.parametrize("samples", [0, 16])
def test_answers_are_learned_from_the_runs_own_images(samples):
    made = trainer(data={"samples": samples, "length": 1}, **{"train.lr": 3e-3})
    examples, begun = drawn(made), None
    for update in range(40):
        made.optimization.optimizer.zero_grad()
        loop.term(made)._backward(examples, update)
        made.optimization.optimizer.step()
        last = loop.term(made).loss.metrics(list)["data/accuracy"]
        begun = last if begun is None else begun
    assert begun < 0.4 and last > begun + 0.3


def composed(**arguments):
    return compose({"self_answers": WatchRule(args={"length": 1} | arguments)})


def test_a_runs_reward_is_the_answers_of_its_own_model():
    rewards = composed()
    made = trainer(rewards=rewards, reward={"self_answers": 1.0}, **{"eval.rewards": ["sharpness"]})
    pictures = decoded(made)
    metadata = [prompt.metadata for prompt in ASKED]
    asked = [Asked(row, each["question"], each["answer"]) for row, entry in enumerate(metadata)
             for each in entry["questions"]]
    right = answer_losses.check_answers(reader_of(made.policy, 1), asked, pictures)
    found = rewards["self_answers"].function(pictures, [prompt.text for prompt in ASKED], metadata, made.policy)
    assert found == [sum(right[i:i + 2]) / 2 for i in (0, 2, 4)]
    strict = composed(strict=0.75)["self_answers"].function(pictures, [prompt.text for prompt in ASKED], metadata,
                                                            made.policy)
    assert strict == [share / 4 + 0.75 * (share == 1) for share in found]
    assert made.scoring.waits and not trainer().scoring.waits
    with pytest.raises(UserError, match="a model that reads and generates images by the same weights, such as Janus"):
        rewards["self_answers"].function(pictures, ["1"], metadata, None)
    refused("which changes: set cache: false", compose, {"self_answers": WatchRule(cache=True)}, "folder")
    assert "condition is 'x' and length 1" in message(composed, condition="x")
    assert "strict is 2, expected 0 to 1" in message(composed, strict=2)


def test_a_resumed_run_answers_as_if_nothing_had_happened(tmp_path):
    _, _, [line] = tiny_runs.assert_resumes(lambda: trainer(data={"batch": 5}), tmp_path, 2, 1)
    assert {"data/loss", "data/accuracy", "reward/bright/mean"} <= line.keys()


def test_the_reward_reads_the_model_once_nothing_is_sampled_any_more():
    began, done = threading.Event(), Stop(False)
    with Scorer(done, waits=True) as scorer:
        future = scorer.submit(lambda: began.set() or torch.ones(1))
        assert not began.wait(0.05)
        assert scorer.results([future])[0].item() == 1.0


# --- what is held out ------------------------------------------------------------------------------------------------
def test_answers_about_held_out_images_are_measured_shown_and_hidden(monkeypatch):
    made, asked_about = trainer(), []
    monkeypatch.setattr(answer_losses, "sample_questions", lambda part, prompts, pictures, dice: (
        asked_about.append([prompt.text for prompt in prompts]) or sample_questions(part, prompts, pictures, dice)))
    watch = loop.extension(made, "HeldOutAnswers")
    pictures = decoded(made)
    measured = Measured(ASKED, {"bright": [1.0, -1.0, 1.0]}, pictures)
    watch.on_base(measured, {})
    watch.on_finished(measured)
    before, after = watch.found
    assert asked_about == [["1+1=", "3+1="]] * 2  # those that are found right, at least 0 here
    assert before == after and before.keys() == {"answers/right", "answers/hidden", "answers/imbalance"}
    assert before["answers/imbalance"] == pytest.approx(abs(1 / 3 - before["answers/right"]))
    assert watch.summary().startswith(
        f"held-out answers, {watch.asked} questions: right {before['answers/right']:.3f}, hidden ") and watch.asked > 0
    # The model's own judgement says nothing of its answers: the checker chooses the images.
    judged = watch.on_measured(Measured(ASKED, {"self_answers": [1.0, 0.5, 1.0], "bright": [-1.0, 1.0, 1.0]}, pictures))
    assert asked_about.pop() == ["2+1=", "3+1="]
    assert judged["answers/imbalance"] == pytest.approx(abs(1 / 3 - judged["answers/right"]))
    watch.found = [watch.on_measured(Measured([], {}, torch.empty(0)))]  # eval.prompts: 0
    assert watch.found == [{}] and watch.summary() is None
    watch.part = SelfAnswers(reader="scene")
    watch.on_measured(Measured([Prompt("a star"), Prompt("two rings")], {"bright": [1.0, 0.0]}, torch.empty(0)))
    assert asked_about[2] == ["a star", "two rings"] * 2
    assert "HeldOutAnswers" not in loop.names(trainer("grpo", parts={}))


def test_the_agreement_of_own_answers_with_a_checker_by_hand():
    """Of four samples both say 1 twice and neither says it once; a sample without a score counts in neither."""
    nan = float("nan")
    own = torch.tensor([[1.0, 1.0, 0.5, 1.0], [1.0, nan, 0.0, 0.0], [nan, nan, nan, nan]])
    checked = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, nan, 0.9], [1.0, 1.0, 1.0, 1.0]])
    torch.testing.assert_close(answer_losses.agreement(own, checked), torch.tensor([0.75, 0.5, nan]), equal_nan=True)


def watched():
    made = trainer(rewards=composed(length=2) | {"bright": bright}, reward={
        "self_answers": {"args": {"length": 2}}, "bright": {"weight": 0.0}}, **{"train.epochs": 40})
    return made, loop.extension(made, "HeldOutAnswers")


def test_epochs_show_the_agreement_and_warn_when_it_falls():
    made, watch = watched()
    told = []
    made.log = told.append
    metrics = made.run_epoch()
    assert metrics["answers/agreement"] == pytest.approx(np.mean(watch.agreed[0])) and len(watch.agreed[0]) == 3
    watch.agreed, rng = [], np.random.default_rng(0)
    for mean, warned in ((0.9, False), (0.9, False), (0.6, True)):
        watch.agreed += (mean + 0.1 * rng.standard_normal((10, 3))).tolist()
        watch.on_trained(None)
        assert bool(told) == warned, told
    first, now = (np.mean(watch.agreed[rows]) for rows in (slice(10), slice(-10, None)))
    assert f"and bright agree about {now:.2f} of the samples, at first about {first:.2f}" in told[0]
    assert watch.judge(Measured(ASKED, {"self_answers": [1.0, 0.0, 1.0], "bright": [1.0, 0.0, 0.5]}, torch.empty(0))) \
        == {"agreement": pytest.approx(2 / 3)}
    other = watched()[1]
    other.load_state({}, watch.state()[1])
    assert other.agreed == watch.agreed


def test_stopping_by_the_agreement_needs_a_checker():
    stop = {"eval.every": 1, "eval.stop": {"reward": "agreement", "patience": 2}}
    with pytest.raises(UserError, match="compares the reward 'self_answers' with a checker: got bright, expected both"):
        answer_losses.HeldOutAnswers.require(replace(loop.setup(config(**stop), "image_tokens"),
                                                     measured={"bright": None}))
    answer_losses.HeldOutAnswers.require(replace(loop.setup(config(**stop), "image_tokens"),
                                                 measured={"self_answers": None, "bright": None}))


# --- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options, told", [
    ({"source": {"path": "a.jsonl"}}, "learns only from the run's own images"),
    ({"source": {"failed": True, "solved": False, "mastered": False}}, "learns only from the run's own images"),
    ({"reader": "me"}, "reader is 'me'"), ({"samples": 1}, "samples is 1, expected")])
def test_parts_that_do_not_go_together(options, told):
    refused(told, resolve, config(data=options), "image tokens")


def test_answers_of_models_that_do_not_draw_and_rewards_without_a_checker_are_refused():
    assert SelfAnswers().source.right == 1.0 and not SelfAnswers().source.failed
    with pytest.raises(UserError, match="asks about images that the model generates by tokens: set text.generates"):
        resolve(config(**{"text.generates": "text"}), "tokens")
    refused("the prompt 'a cat' gives no question: expected metadata", of_claims, Prompt("a cat"), random.Random(0))
    alone = config(reward={"self_answers": 1.0})
    with pytest.raises(UserError, match="is the model's judgement of itself, .*: add another reward, or a checker to"):
        answer_losses.HeldOutAnswers.require(loop.setup(alone, "image_tokens"))
    answer_losses.HeldOutAnswers.require(loop.setup(config(
        reward={"self_answers": 1.0}, **{"eval.rewards": ["sharpness"]}), "image_tokens"))
