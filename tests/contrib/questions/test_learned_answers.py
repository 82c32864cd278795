"""A small network that answers questions: its probabilities, its folder, its loss, and the right answers themselves."""

import math

import numpy as np
import pytest
import torch
import train_starter_answers
from starter_scenes import is_reserved, sample_prompt
from train_starter_answers import ANSWERS, Catalogue, answer_loss

from flowgrpo.contrib.learned_rewards.preference import Aspect, Description, save
from flowgrpo.contrib.learned_rewards.preference_networks import with_text
from flowgrpo.contrib.questions import scene_answers
from flowgrpo.contrib.questions.question_answers import ByFolder
from flowgrpo.contrib.questions.questions import of_claims
from flowgrpo.contrib.questions.scene_answers import Thing, all_questions, read_question, things
from flowgrpo.errors import UserError
from flowgrpo.rewards import find
from flowgrpo.rewards.starter.scene import read
from flowgrpo.starter import scenes
from flowgrpo.tools.learned_rewards.training import Settings
from tests.helpers.refusals import message, refused

PROMPTS = ["a star", "three black rings", "a drawing of a ring above a cross", "a red circle and a blue star"]


@pytest.fixture(scope="module")
def answering(tmp_path_factory):
    """A network with chance weights, and its folder."""
    folder = tmp_path_factory.mktemp("answers")
    model = train_starter_answers.network([each.question for each in all_questions()], seed=3).eval()
    torch.nn.init.normal_(model.head[-1].weight)  # answers that differ
    save(folder, model, Description({answer: Aspect() for answer in ANSWERS}, {"kind": "film", "size": 64}))
    return model, folder


def pictures(count: int) -> torch.Tensor:
    return torch.randint(256, (count, 3, 64, 64), generator=torch.Generator().manual_seed(1)) / 255


# --- the reward ------------------------------------------------------------------------------------------------------
def probabilities(model, picture: torch.Tensor, question: str, choices: tuple[str, ...]) -> list[float]:
    """By the network alone, one question of one image, and exponentials over the choices."""
    words = model.tokenizer(question, return_tensors="pt")  # without padding
    with torch.no_grad():
        scores = model((picture[None] * 255).round().to(torch.uint8), words.input_ids, words.attention_mask)[0].tolist()
    worth = [math.exp(scores[ANSWERS.index(choice)]) for choice in choices]
    return [each / sum(worth) for each in worth]


def test_rewards_are_means_of_sigmoids(answering):
    model, folder = answering
    shown, mean, share = pictures(4), [], []
    for picture, prompt in zip(shown, PROMPTS):
        found = [(each, probabilities(model, picture, each.question, each.choices))
                 for each in of_claims(scenes.parse(prompt))]
        mean.append(np.mean([own[each.choices.index(each.answer)] for each, own in found]))
        share.append(np.mean([each.choices[int(np.argmax(own))] == each.answer for each, own in found]))
    reward = find("question_answers", {"by": str(folder), "score": "probability"})
    assert reward(shown, PROMPTS, [{}] * 4) == pytest.approx(mean, abs=1e-5) and np.ptp(mean) > 0
    assert find("question_answers", {"by": str(folder)})(shown, PROMPTS, [{}] * 4) == share
    question = of_claims(scenes.parse("a star"))[-1]  # whether there is a ring
    answers = ByFolder(str(folder), "probability")
    [[score]] = answers.model.scores(pictures(1), [question.question])[:, None].tolist()
    yes, no = (score[ANSWERS.index(each)] for each in ("yes", "no"))
    assert answers.right(pictures(1), [(0, question)]) == [pytest.approx(1 / (1 + math.exp(yes - no)), abs=1e-6)]


def test_principles_are_questions_to_every_image_and_a_logit_is_a_difference_of_scores(answering):
    """The same images under two principles: of yes and no, the score of one less that of the other."""
    model, folder = answering
    shown, asked_for = pictures(3), [each.question for each in of_claims(scenes.parse("a star"))[-2:]]
    found = []
    for principle in asked_for:
        reward = find("question_answers", {"by": str(folder), "score": "logit", "principles": [principle]})
        scores = ByFolder(str(folder), "logit").model.scores(shown, [principle] * 3)
        apart = (scores[:, ANSWERS.index("yes")] - scores[:, ANSWERS.index("no")]).tolist()
        found.append(reward(shown, ["any prompt at all"] * 3, [{}] * 3))
        assert found[-1] == pytest.approx(apart, abs=1e-4)
    assert found[0] != pytest.approx(found[1], abs=1e-2)
    both = find("question_answers", {"by": str(folder), "score": "logit", "principles": asked_for})
    assert both(shown, [""] * 3, [{}] * 3) == pytest.approx([(a + b) / 2 for a, b in zip(*found)], abs=1e-4)
    assert "expected a list of yes-or-no questions" in told({"by": str(folder), "principles": "is it red?"})


def test_a_image_looked_at_once_is_judged_as_if_looked_at_for_each_question(answering):
    model, _ = answering
    rows = model.rows(pictures(2).repeat_interleave(2, 0), PROMPTS)
    with torch.no_grad():
        both = model.score_features(model.image_features(rows["images"][::2]).repeat_interleave(2, 0), rows["ids"],
                                    rows["mask"])
        assert torch.allclose(both, model(**rows), atol=1e-6)


def told(arguments: dict) -> str:
    return message(find, "question_answers", arguments)


def test_wrong_folders_and_choices_are_told(answering, tmp_path):
    assert "expected vqa, judge or a folder with reward.json" in told({"by": str(tmp_path / "none")})
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "reward.json").write_text("{}")
    assert "expected what `flowgrpo reward train` wrote" in told({"by": str(tmp_path / "broken")})
    save(tmp_path / "liked", with_text("starter", 1, 64),
         Description({"overall": Aspect()}, {"kind": "film", "size": 64}))
    assert "scores overall, expected a network whose aspects are answers" in told({"by": str(tmp_path / "liked")})
    reward = find("question_answers", {"by": str(answering[1])})
    own = {"questions": [{"question": "What is it?", "answer": "a dog", "choices": ["a dog", "a cat"]}]}
    with pytest.raises(UserError, match="knows no answer 'a dog', which 'What is it\\?' offers, expected some of yes"):
        reward(pictures(1), ["a star"], [own])


# --- the right answers -----------------------------------------------------------------------------------------------
def claimed(claims: scenes.Claims, rng: np.random.Generator) -> list[Thing]:
    """Objects of which the claims are true: the first claim's lie in its relation to the second's."""
    line = np.array(scenes.RELATIONS.get(claims.relation, (1, 0))) * 10
    return [Thing(claim.shape, claim.colour or str(rng.choice(list(scenes.COLOURS))), tuple(32 + line * (1 - place)))
            for place, claim in enumerate(claims.objects) for _ in range(claim.count)]


@pytest.mark.parametrize("task", scenes.TASKS)
@pytest.mark.parametrize("held", [False, True])
def test_the_questions_of_every_task_have_the_prompts_answers_on_its_scenes(task, held):
    rng = np.random.default_rng(5)
    for _ in range(20):
        prompt, claims = sample_prompt(rng, task, held, is_reserved)
        rendered = things(read(scenes.render(claims, rng).transpose(2, 0, 1)))
        for question in of_claims(scenes.parse(prompt)):
            kind, answer = read_question(question.question)
            assert answer(claimed(claims, rng)) == answer(rendered) == question.answer
            assert set(question.choices) <= set(scene_answers.CHOICES[kind])


SEEN = [Thing("ring", "red", (10, 10)), Thing("ring", "blue", (12, 50)), Thing("star", "red", (40, 30)),
        Thing("cross", None, (40, 55))]


@pytest.mark.parametrize("question, answer", [
    ("Is there a ring in the picture?", "yes"), ("Is there a square in the picture?", "no"),
    ("How many things are in the picture?", "four"),
    ("Is there a red star in the picture?", "yes"), ("Is there a blue star in the picture?", "no"),
    ("How many rings are in the picture?", "two"), ("How many crosses are in the picture?", "one"),
    ("How many circles are in the picture?", "zero"), ("What color is the star?", "red"),
    ("What color are the rings?", None), ("What color is the cross?", None), ("What color is the square?", None),
    ("Where are the rings, seen from the star: left, right, above or below?", "left"),
    ("Where is the star, seen from the cross: left, right, above or below?", "above"),
    ("Where is the ring, seen from the cross: left, right, above or below?", None),  # one is left of it, one above
    ("Where is the star, seen from the square: left, right, above or below?", None),
    ("Is the cross below the star?", "yes"), ("Is the cross left of the star?", "no"),
    ("Is the square above the star?", None)])
def test_answers_by_hand(question, answer):
    seen = SEEN if "ring, seen from the cross" not in question else [
        Thing("ring", "red", (10, 50)), Thing("ring", "red", (40, 20)), SEEN[-1]]
    assert read_question(question)[1](seen) == answer


def test_every_question_is_read_and_every_other_refused():
    texts = [each.question for each in all_questions()]
    # 6 shapes, 36 with a colour, 6 numbers and that of all, 2 x 6 colours, 30 places, 120 relations
    assert len(texts) == len(set(texts)) == 211 and all(read_question(text) for text in texts)
    refused("no question about the starter's world", read_question, "Is there a dog in the picture?", error=ValueError)


# --- training --------------------------------------------------------------------------------------------------------
def test_the_loss_and_its_gradient_by_hand():
    """log 2 and 3 of what is allowed: log 4 - log 3 for the right one of odds 3 to 1; the mean of both for none."""
    scores = torch.tensor([[math.log(3), 0.0, 9.0], [math.log(3), 0.0, -9.0]], dtype=torch.float64)
    allowed = torch.tensor([[True, True, False]] * 2)
    for answers, expected in (((0, 0), math.log(4 / 3)), ((1, 1), math.log(4)),
                              ((0, -1), (math.log(4 / 3) * 3 + math.log(4)) / 4)):
        assert answer_loss(scores, allowed, torch.tensor(answers)).item() == pytest.approx(expected, abs=1e-10)
    scores = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    allowed = torch.tensor([[True] * 4 + [False] * 3, [False] * 3 + [True] * 4, [True] * 7, [True, True] + [False] * 5,
                            [True] * 7])
    answers = torch.tensor([2, 5, -1, -1, 0])
    [gradient] = torch.autograd.grad(answer_loss(scores, allowed, answers), scores)
    worth = scores.detach().exp() * allowed
    target = torch.nn.functional.one_hot(answers.clamp(min=0), 7).double()
    target[2], target[3] = 1 / 7, torch.tensor([0.5, 0.5, 0, 0, 0, 0, 0])
    assert torch.allclose(gradient, (worth / worth.sum(1, keepdim=True) - target) / 5, atol=1e-10, rtol=0)


def test_kinds_and_what_is_there_are_asked_in_their_shares():
    catalogue = Catalogue.of(all_questions())
    answers = catalogue.answers([SEEN])
    weights = catalogue.weights(answers)[0]
    kind, worth = scene_answers.KINDS.index("exists"), train_starter_answers.WORTH["exists"]
    right = [ANSWERS[number] if number >= 0 else None for number in answers[0]]
    yes = [i for i, each in enumerate(right) if catalogue.kinds[i] == kind and each == "yes"]
    no = [i for i, each in enumerate(right) if catalogue.kinds[i] == kind and each == "no"]
    assert len(yes) == 3 + 3 and len(no) == 42 - 6  # ring, star, cross; red ring, blue ring, red star
    assert weights[yes].tolist() == pytest.approx([worth * 0.65 / 6] * 6)
    assert weights[no].tolist() == pytest.approx([worth * 0.35 / 36] * 36)
    worths = train_starter_answers.WORTH  # the number of all has one question alone, whose answer is not "zero" here
    assert sum(worths.values()) == pytest.approx(1) == weights.sum().item() + 0.35 * worths["total"]


def test_choosing_by_the_answers(answering, tmp_path):
    """Of two prompts six images each: what `scene` says of the one with the best answers."""
    rng, prompts, made = np.random.default_rng(2), ["a red star"] * 6 + ["a ring and a cross"] * 6, []
    for i, prompt in enumerate(prompts):
        shown = scenes.render(scenes.parse(prompt if i % 2 else "a blue star"), rng)
        made.append((shown * 255).round().astype(np.uint8))
    train_starter_answers.keep(tmp_path / "drawn.npz", iter([(prompts, np.stack(made))]))
    rewards = find("question_answers", {"by": str(answering[1]), "score": "probability"})(
        torch.tensor(np.stack(made)).permute(0, 3, 1, 2) / 255, prompts, [{}] * 12)
    found = train_starter_answers.chosen(answering[1], tmp_path / "drawn.npz")
    best = [int(np.argmax(rewards[:6])), int(np.argmax(rewards[6:]))]
    assert found["drawn"]["mean"] == 0.5 and found["chosen"]["mean"] == sum(at % 2 for at in best) / 2
    assert found["gain"]["mean"] == found["chosen"]["mean"] - 0.5 and found["gain"]["prompts"] == 2


def test_a_network_learns_is_kept_and_tested(tmp_path):
    """From images to the table of accuracies, at a size that teaches next to nothing but what is mostly so."""
    file = tmp_path / "pictures" / "train_rendered.npz"
    train_starter_answers.keep(file, train_starter_answers.both_sides(train_starter_answers.rendered(0, False)), 200)
    shown = train_starter_answers.load(file)
    assert shown.images.shape == (200, 3, 64, 64) and len(shown.prompts) == len(shown.seen) == 200
    assert shown.seen[7] == things(read(shown.images[7] / 255))
    train_starter_answers.train(shown, tmp_path / "answers", Settings(epochs=2, batch=32), each=4)
    known = Description.read(tmp_path / "answers")
    assert tuple(known.aspects) == ANSWERS and 0.4 < known.measured["accuracy"] < 1
    found = train_starter_answers.tested(tmp_path / "answers", file)
    assert found["all"]["questions"] == found["as the prompt says"]["questions"] + found["otherwise"]["questions"] > 300
    assert 0 < found["all"]["mean"] < 1 and found["all"]["prompts"] > 100
