"""Questions of a prompt and captions: a reward of the answers that an image or a caption allows."""

import json
import re

import pytest
import torch

from flowgrpo.contrib.questions.caption_answers import CaptionAnswers
from flowgrpo.contrib.questions.question_answers import QuestionAnswers, find_choice
from flowgrpo.contrib.questions.questions import Question, of_claims, of_clauses, of_list, plural, writer
from flowgrpo.rewards import find, score
from flowgrpo.rewards.failures import Failed, Tally
from flowgrpo.rewards.vlm_judge.client import Answer
from flowgrpo.starter.scenes import parse
from tests.helpers.chat_endpoint import QUICK, endpoint, level_of, parts, said, shades
from tests.helpers.refusals import message, refused
from tests.helpers.tiny_blip import normalised, pictures
from tests.rewards.conftest import answering  # noqa: F401 a fixture

YES_NO, PLACES = ("yes", "no"), ("left", "right", "above", "below")
TWO = Question("How many dogs are there?", "two", ("one", "two", "three"))
SAID = {"question": TWO.question, "answer": TWO.answer, "choices": list(TWO.choices)}


# --- questions -------------------------------------------------------------------------------------------------------
def test_clauses_and_places_of_geneval_become_questions():
    found = of_clauses({"include": [{"class": "bench", "count": 2}, {"class": "umbrella", "count": 1, "color": "red",
                                                                     "position": ["left of", 0]}],
                        "exclude": [{"class": "bench", "count": 3}, {"class": "dog", "count": 1}]})
    colours = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
    assert found == [
        Question("How many benches are in the picture?", "two", ("zero", "one", "two", "three", "four")),
        Question("Is there an umbrella in the picture?", "yes", YES_NO),
        Question("What color is the umbrella?", "red", colours),
        Question("Where is the umbrella, seen from the bench: left, right, above or below?", "left", PLACES),
        Question("Is there a dog in the picture?", "no", YES_NO)]
    found = of_clauses({"include": [{"class": "dog", "count": 1}, {"class": "dog", "count": 2, "color": "red"},
                                    {"class": "cat", "count": 1, "position": ["left of", 0]}]})
    assert [(each.question, each.answer) for each in found] == [
        ("How many dogs are in the picture?", "three"), ("Is there a cat in the picture?", "yes")]
    many = {"dog": "dogs", "bus": "buses", "toothbrush": "toothbrushes", "person": "people", "knife": "knives",
            "berry": "berries", "toy": "toys", "sheep": "sheep"}
    assert {noun: plural(noun) for noun in many} == many


@pytest.mark.parametrize("prompt, number, expected, others", [
    ("a star", "one", [("How many stars are in the picture?", "one")], "circle square triangle cross ring"),
    ("three black rings", "three", [
        ("How many rings are in the picture?", "three"), ("What color are the rings?", "black")],
     "circle square triangle star cross"),
    ("a drawing of a ring above a cross", "two", [
        ("How many rings are in the picture?", "one"), ("How many crosses are in the picture?", "one"),
        ("Where is the ring, seen from the cross: left, right, above or below?", "above")],
     "circle square triangle star"),
    ("a red star and a blue star", "two", [("How many stars are in the picture?", "two")],
     "circle square triangle cross ring"),
    ("two red stars and a ring", "three", [
        ("How many stars are in the picture?", "two"), ("How many rings are in the picture?", "one"),
        ("What color are the stars?", "red")], "circle square triangle cross")])
def test_prompts_of_the_starters_world_become_questions(prompt, number, expected, others):
    absent = [(f"Is there a {shape} in the picture?", "no") for shape in others.split()]
    total = [("How many things are in the picture?", number)]
    assert [(each.question, each.answer) for each in of_claims(parse(prompt))] == total + expected + absent


@pytest.mark.parametrize("entries", [
    [], "What?", [3], [{"question": "What?"}], [{"question": "What?", "answer": "red"}],
    [{"question": "What?", "answer": "a", "choices": ["a", "a"]}],
    [{"question": "What?", "answer": "a", "choices": ["a", 1]}], [{"question": "What?", "answer": "a", "choices": 1}],
    [{"question": " ", "answer": "yes"}], [{"question": "x" * 201, "answer": "yes"}]])
def test_what_is_no_question_is_refused(entries):
    assert "expected" in message(of_list, entries)


@pytest.mark.parametrize("text, count", [
    (json.dumps([SAID]), 1), (f"```json\n{json.dumps([SAID, SAID | {'answer': 'four'}])}\n```", 1),
    (f"<think>{{}}</think>Here: {json.dumps(SAID)} {{\"question\": 1}} {{broken", 1), ("None.", 0), ("", 0),
    ("I'm sorry, but I can't help with that. " + json.dumps(SAID), 0)])
def test_the_proper_questions_of_a_models_answer_are_read(text, count):
    parse = writer({}).parse
    assert parse(Answer(text)) == [TWO] * count
    assert parse(Answer(text, cut=True)) == parse(Answer(text, refused=True)) == []


@pytest.mark.parametrize("text, choice", [
    ("two", "two"), ("Answer: two", "two"), ("There are 2.", "two"), ("One or two? Answer: Three.", "three"),
    ("<think>one</think>**Two**", "two"), ("one or two", None), ("twofold", None), ("", None), ("four", None),
    ("I cannot answer. two", None)])
def test_the_choice_of_an_answer(text, choice):
    assert find_choice(text, TWO.choices) == choice


# --- by a model here -------------------------------------------------------------------------------------------------
def probability(model, texts, queries, image: torch.Tensor, question: str, answer: str) -> float:
    """The geometric mean over the answer's tokens, by transformers' own forward, one token at a time."""
    asked = f"Question: {question} Short answer:"
    wanted, logarithm = texts(answer)["input_ids"], 0.0
    for i, token in enumerate(wanted):
        with torch.no_grad():
            logits = model(pixel_values=normalised(image)[None].float(),
                           input_ids=torch.tensor([[39] * 3 + texts(asked)["input_ids"]]),
                           qformer_input_ids=torch.tensor([queries(asked)["input_ids"]]),
                           decoder_input_ids=torch.tensor([[0, *wanted[:i]]])).logits
        logarithm += logits[0, -1].double().log_softmax(-1)[token].item()
    return torch.tensor(logarithm / len(wanted)).exp().item()


def test_the_probability_and_the_share_of_right_answers(answering):  # noqa: F811
    """Words that the tiny model knows; of each image other questions, one of them with three choices."""
    asked = [[{"question": "is this a cat", "answer": "yes"}, {"question": "is this red", "answer": "no"}],
             [{"question": "a cube or a ball", "answer": "ball", "choices": ["cube", "ball", "cat"]}],
             [{"question": "two dogs on a mat", "answer": "yes"}, {"question": "is this blue", "answer": "red",
                                                                   "choices": ["blue", "red"]}]]
    images, settings = pictures(3, seed=4), {"dtype": "fp32", "device": "cpu", "batch_size": 2, "parts": answering}
    metadata = [{"questions": each} for each in asked]
    of = [[{choice: probability(*answering, image, each["question"], choice) for choice in each.get("choices", YES_NO)}
           for each in own] for image, own in zip(images, asked)]
    mean = [sum(found[each["answer"]] for found, each in zip(*both)) / len(both[0]) for both in zip(of, asked)]
    right = [sum(max(found, key=found.get) == each["answer"] for found, each in zip(*both)) / len(both[0])
             for both in zip(of, asked)]
    found = QuestionAnswers(score="probability", vqa=settings)(images, [""] * 3, metadata)
    assert found == pytest.approx(mean, rel=1e-4) and len(set(found)) == 3
    assert QuestionAnswers(vqa=settings)(images, [""] * 3, metadata) == right


# --- by a judge ------------------------------------------------------------------------------------------------------
def test_a_judge_answers_questions_of_templates():
    """It takes the image's level for the number of stars, and says nothing of colours."""
    def reply(body, number):
        [question] = parts(body, "text")
        return said(f"Answer: {level_of(body)}" if "How many" in question else "I do not know")
    with endpoint(reply) as server:
        reward = find("question_answers", {"by": "judge", "judge": {"url": server.url, **QUICK}})
        prompts = ["two stars", "three stars", "three red stars", "a star"]
        tally = Tally()
        own = {"questions": [{"question": "Is it red?", "answer": "yes"}]}
        found = score({"qa": reward}, shades(2, 2, 3, 0), prompts, [{}, {}, {}, own], tally=tally)[:, 0]
    assert found[:3].tolist() == [1, 0, 1] and found[3].isnan() and tally.failed == {"qa": 1}
    assert "no answer to a question of the prompt 'a star'" in tally.said["qa"]
    asked = [parts(body, "text")[0] for _, _, body in server.seen]
    # Two numbers and five other shapes of three prompts, a colour, and one of its own.
    assert len(asked) == 3 * 7 + 1 + 1 and ("How many stars are in the picture?\nChoose one of: zero, one, two, three, "
                                            "four. End with a line `Answer: CHOICE`.") in asked


def test_a_writer_is_asked_once_per_prompt_and_kept(tmp_path):
    def reply(body, number):
        [question] = parts(body, "text")
        if "Answer with JSON alone" in question:
            return said("no idea" if "fog" in question else json.dumps([SAID | {"question": "How many dogs in 'it'?"}]))
        return said("two")
    with endpoint(reply) as server:
        settings = {"by": "judge", "judge": {"url": server.url, **QUICK}, "writer": {"url": server.url, **QUICK},
                    "file": str(tmp_path / "kept" / "questions.jsonl")}
        reward = QuestionAnswers(**settings)
        prompts = ["two dogs run", "fog", "two dogs run"]
        first, fog, third = reward(shades(1, 2, 3), prompts, [{}] * 3)
        assert first == third == 1 and "no questions of the prompt 'fog'" in str(fog) and isinstance(fog, Failed)
        assert len(server.seen) == 4  # two prompts, two images
        assert reward(shades(1), prompts[:1], [{}]) == [1] and len(server.seen) == 5
        assert QuestionAnswers(**settings)(shades(1), prompts[:1], [{}]) == [1] and len(server.seen) == 6
        (tmp_path / "kept" / "questions.jsonl").write_text('{"prompt": "x"}\n')
        refused("line 1: .*: remove the line", QuestionAnswers, **settings)


@pytest.mark.parametrize("arguments, told", [
    ({"by": "me"}, "by is 'me' and score 'share', expected vqa, judge or a folder with reward.json"),
    ({"score": "mean"}, "score 'mean', expected"),
    ({"by": "judge", "score": "probability"}, "the latter two not of a judge"),
    ({"by": "judge", "file": "x.jsonl"}, "give writer, or leave it out"),
    ({"by": "judge", "judge": {"template": "Is it so?"}}, "names no {question}")])
def test_mistakes_are_told_in_one_line(arguments, told):
    assert told in message(find, "question_answers", arguments)


def test_missing_questions_weights_and_answers():
    refused(r"^reward 'question_answers': /no/folder cannot be loaded .*: fetch it and "
            r"give its folder as args: \{vqa: \{model: FOLDER\}\}$", QuestionAnswers, vqa={"model": "/no/folder"})
    reward = QuestionAnswers(by="judge")
    refused("no question can be made of the prompt 'fog': give metadata", reward, shades(1), ["fog"], [{}])
    with endpoint(lambda body, number: said("who knows")) as server:
        [found] = CaptionAnswers(url=server.url, **QUICK)(["a"], ["p"], [{"questions": QUESTIONS}])
    assert isinstance(found, Failed)
    assert "orders is 0" in message(CaptionAnswers, orders=0)


QUESTIONS = [{"question": "How many dogs?", "answer": "two", "choices": ["one", "two", "three", "four"]},
             {"question": "Which colour?", "answer": "red", "choices": ["red", "blue", "green", "grey"]}]


def reader(body, number):
    """A model that answers what the caption says, and else takes the choice that is listed first."""
    caption, question = parts(body, "text")[0].split("</completion>\n")
    listed = re.search(r"Choose one of: (.*?)\.", question)[1].split(", ")
    return said(f"Answer: {next((choice for choice in listed if choice in caption), listed[0])}")


def test_the_share_of_questions_that_a_caption_answers():
    with endpoint(reader) as server:
        reward = CaptionAnswers(url=server.url, orders=4, **QUICK)
        texts = ["two red dogs", "two dogs", "", "blue</completion> red"]
        found = reward(texts, ["p"] * 4, [{"questions": QUESTIONS}] * 4)
        # Without a caption every answer is one of four, in each place once: chance. Red stands before blue in 3 of 4.
        assert found == [1, 0.625, 0.25, 0.5]
        assert reward(["a"], ["p"], [{}]) == [None]
        count = len(server.seen)
        assert CaptionAnswers(url=server.url, **QUICK)(["one red dog"], ["p"], [{"questions": QUESTIONS}]) == [0.5]
    assert count == 32 and len(server.seen) == 34
    assert all("image" not in str(body) for _, _, body in server.seen)
