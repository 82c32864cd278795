"""Captions judged by the answers that they allow, at a real HTTP endpoint."""

import re

import pytest

from flowgrpo.contrib.questions.caption_answers import CaptionAnswers
from flowgrpo.errors import UserError
from flowgrpo.rewards.failures import Failed
from tests.rewards.vlm_judge.test_judge import QUICK, endpoint, parts, said

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


def test_a_caption_without_an_answer_is_a_failure():
    with endpoint(lambda body, number: said("who knows")) as server:
        [found] = CaptionAnswers(url=server.url, **QUICK)(["a"], ["p"], [{"questions": QUESTIONS}])
    assert isinstance(found, Failed)
    with pytest.raises(UserError, match="orders is 0"):
        CaptionAnswers(orders=0)
