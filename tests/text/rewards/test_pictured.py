"""Reward of a rewritten prompt: the image reward, for the user's prompt, of what a frozen pipeline draws from it."""

import pytest
import torch

from flowgrpo import rewards
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.evaluation.report import snapshots
from flowgrpo.evaluation.samplers import draw_one
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.rewards import Batch
from flowgrpo.samplers.rollout import noise_seed
from flowgrpo.text.rewards.pictured import Pictured, rewritten
from flowgrpo.types import Completion
from tests.helpers import tiny, tiny_text

STEPS = {"num_inference_steps": 2, "guidance": 2.0}


def painter() -> PipelinePolicy:
    return PipelinePolicy(tiny.sd3(), None, call=tiny.CALL)


@pytest.fixture(scope="module")
def policy():
    return painter()


def reward(policy, function=tiny.red, **options) -> Pictured:
    return Pictured([function], pipeline="tiny", parts=(policy,), **{"steps": 2, "guidance": 2.0} | options)


def drawn(text: str, prompt: str, number: int = 0, epoch: int | None = None) -> torch.Tensor:
    """The stock pipeline's own image of a text from the noise of a prompt."""
    return draw_one(tiny.sd3(), Prompt(text), noise_seed(0, epoch, prompt, number), STEPS | tiny.CALL)


def judged(images, prompts, metadata):
    """The red of an image, and what the reward was asked about."""
    return [float(red) + 10 * len(prompt) + 100 * entry["n"]
            for red, prompt, entry in zip(tiny.red(images, prompts), prompts, metadata)]


def test_scores_of_users_prompts_and_equal_texts(policy):
    texts = ["a cat", "a dog", "a cat", "<think>a hat?</think> old ", "hm <answer>a dog</answer>"]
    prompts, metadata = ["red", "red", "red", "blue", "blue"], [{"n": n} for n in (0, 1, 0, 0, 0)]
    values = reward(policy, judged, images=2, batch_size=3)(Batch(texts, prompts, metadata))
    clean = ["a cat", "a dog", "a cat", "old", "a dog"]
    direct = [sum(drawn(text, prompt, number)[0].mean().item() for number in range(2)) / 2 + 10 * len(prompt)
              + 100 * entry["n"] for text, prompt, entry in zip(clean, prompts, metadata)]
    assert values == pytest.approx(direct, abs=2e-5)
    assert values[0] == values[2] and abs(values[3] - values[4]) > 1e-3
    before = policy.evaluations
    texts = [Completion("7", 1), Completion("7", 2), Completion("8", 1), Completion("7", 1)]
    scores = rewards.score({"r": reward(policy, guidance=1.0)}, texts, ["a"] * 3 + ["b"], [{}] * 4, 2)
    assert scores[0] == scores[1] and len(scores.unique()) == 3
    assert policy.evaluations - before == 3 * 2  # three images of two steps


def test_noise_is_of_the_epoch_and_the_prompt_alone(policy):
    function = reward(policy)
    rewards.require_memory({"r": function}, 2)  # it reads the epoch alone
    def of(epoch=None, function=function):
        return rewards.score({"r": function}, ["a cat"], ["red"], [{}], epoch=epoch).item()
    held_out, third = of(), of(3)
    assert third == pytest.approx(drawn("a cat", "red", epoch=3)[0].mean().item(), abs=2e-5)
    assert abs(of(4) - third) > 1e-4 and of(3) == third
    assert of() == held_out and abs(held_out - third) > 1e-4
    assert of(3, reward(policy, noise="prompt")) == held_out
    nested = rewards.find("tiered", {"rewards": [function]})
    assert of(3, nested) == third and of(4, nested) != third


def test_weights_missing_scores_and_failures(policy):
    def some(images, prompts):
        return [None if prompt == "blue" else 1.0 for prompt in prompts]
    def fails(images, prompts):
        return [rewards.Failed("no answer") if prompt == "blue" else 2.0 for prompt in prompts]
    both = Pictured([some, fails], [0.5, 3.0], pipeline="tiny", parts=(policy,), steps=1)
    [red, blue] = both(Batch(["a", "b"], ["red", "blue"], [{}] * 2))
    assert red == 6.5 and isinstance(blue, rewards.Failed)
    one = Pictured([some], pipeline="tiny", parts=(policy,), steps=1, images=2)
    assert one(Batch(["a", "b"], ["red", "blue"], [{}] * 2)) == [1.0, None]


def test_the_report_shows_the_image_beside_the_text(policy):
    text = Completion("a cat", 3)
    rewards.score({"r": reward(policy)}, [text], ["red"], [{}])
    torch.testing.assert_close(text.image, drawn("a cat", "red"), atol=2e-5, rtol=0)
    card = snapshots.sample_as_json(text)
    assert card["text"] == "a cat" and card["picture"].startswith("data:image/webp;base64,")
    assert snapshots.content(card) == "a cat" and snapshots.sample_as_json(Completion("a cat", 3)) == {"text": "a cat"}


def test_an_enhancer_learns_the_one_token_that_is_right():
    """The right image is that of the text "7": the share of "7" rises, with another pipeline's weights untouched."""
    policy = painter()
    right = {prompt: drawn("7", prompt) for prompt in tiny_text.PROMPTS}
    frozen = tiny.weights(policy)
    def same(images, prompts):
        return [float((image - right[prompt]).abs().max() < 1e-3) for image, prompt in zip(images, prompts)]
    trainer = tiny_text.trainer(rewards={"short": reward(policy, same, noise="prompt")}, text__max_tokens=1,
                                train__prompts=6, train__group=12, train__micro_batch=72, train__epochs=5,
                                parts={"kl": {"weight": 0.0}})
    means = []
    for trainer.epoch in range(5):
        means.append(trainer.run_epoch()["reward/short/mean"])
    assert means[0] < 0.2 and means[-1] > 0.4, means
    assert all(torch.equal(held, frozen[name]) for name, held in tiny.weights(policy).items())


@pytest.mark.parametrize("completion, text", [("a cat\n", "a cat"), ("<think>hm</think>\n\na cat", "a cat"),
                                              ("So: <answer>a\ncat</answer>.", "a\ncat"), ("<think>a cat", ""),
                                              ("#### a cat", "#### a cat")])
def test_rewritten(completion, text):
    assert rewritten(completion) == text


@pytest.mark.parametrize("options, said", [
    ({"images": 0}, "images is 0, expected 1 or more"),
    ({"call": {"num_inference_steps": 2}}, "call is .*, expected none of prompt, negative_prompt, num_inference_steps"),
    ({"noise": "step"}, "noise is 'step', expected epoch or prompt"),
    ({"weights": [1, 2]}, "weights is .* expected 1, one per reward"), ({"rewards": ["exact_match"]}, "of images"),
    ({"batch_size": 0}, "batch_size is 0"), ({"dtype": "int4"}, "dtype is 'int4'"),
    ({"pipeline": "no/such/folder/here"}, "no/such/folder/here")])
def test_what_is_refused(options, said):
    with pytest.raises(UserError, match=said):
        rewards.find("pictured", {"rewards": [tiny.red], "pipeline": "starter", "parts": (None,)} | options | (
            {"parts": None} if "pipeline" in options else {}))


def test_a_recipe_names_it(tmp_path):
    """From a folder, with the arguments of a recipe; the starter's card has steps and guidance."""
    tiny.save(tiny.sd3(), tmp_path / "tiny")
    made = rewards.find("pictured", {"rewards": [tiny.red], "pipeline": str(tmp_path / "tiny"), "call": tiny.CALL,
                                     "steps": 2, "guidance": 2.0})
    assert made(Batch(["a cat"], ["red"], [{}])) == pytest.approx([drawn("a cat", "red")[0].mean().item()], abs=2e-5)
    assert rewards.about(made).modality == "text" and made.painter._settings(made.painter.models[0]) == (2, 2.0)
    plain = Pictured([tiny.red], pipeline="tiny", parts=made.painter.parts).painter
    assert plain._settings(*plain.models) == (28, 7.0)
    card = Pictured([tiny.red], pipeline="starter", parts=made.painter.parts).painter
    assert card._settings(*card.models) == (20, 1.0)
