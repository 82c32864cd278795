"""VQAScore on a tiny random BLIP, against the network written out, one image at a time."""

import numpy as np
import pytest
import torch

from flowgrpo.errors import UserError
from flowgrpo.rewards.find import find
from flowgrpo.rewards.vqa_score import VqaScore
from tests.helpers.tiny_blip import PROMPTS, QUESTION, normalised, pictures


def answered(model, texts, queries, image: torch.Tensor, prompt: str, answer: str) -> float:
    """One image: transformers' own forward with placeholders for the image; one token of the answer at a time."""
    question = QUESTION.replace("{}", prompt)
    ids = torch.tensor([[39] * 3 + texts(question)["input_ids"]])
    asked = torch.tensor([queries(question)["input_ids"]])
    wanted, product = texts(answer)["input_ids"], 1.0
    for i, token in enumerate(wanted):
        with torch.no_grad():
            logits = model(pixel_values=normalised(image)[None].float(), input_ids=ids, qformer_input_ids=asked,
                           decoder_input_ids=torch.tensor([[0, *wanted[:i]]])).logits
        product *= torch.softmax(logits[0, -1].double(), -1)[token].item()
    return product ** (1 / len(wanted))


@pytest.mark.parametrize("batch, answer", [(1, "yes"), (2, "yes"), (32, "yes"), (32, "no or yes")])
def test_vqa_score_is_the_probability_of_the_answer(answering, batch, answer):
    images = pictures(5, seed=1)
    expected = [answered(*answering, image, prompt, answer) for image, prompt in zip(images, PROMPTS)]
    reward = VqaScore(question=QUESTION, answer=answer, dtype="fp32", device="cpu", batch_size=batch, parts=answering)
    found = reward(images, PROMPTS)
    assert found.tolist() == pytest.approx(expected, rel=1e-4)
    assert np.std(expected) / np.mean(expected) > 0.01 and 0 < found.min() and found.max() < 1


def test_a_prompt_with_braces_is_asked_as_it_is(answering):
    reward = VqaScore(question=QUESTION, dtype="fp32", device="cpu", parts=answering)
    assert reward(pictures(1), ["a {cube} of {}"]).shape == (1,)


@pytest.mark.parametrize("name, arguments, told", [
    ("imagereward", {"checkpoint": "/no/ImageReward.pt"}, "/no/ImageReward.pt cannot be loaded .*: fetch it and give"),
    ("vqascore", {"model": "/no/folder"}, "/no/folder cannot be loaded .*: fetch it and give its folder as args"),
    ("vqascore", {"question": "Is it so?"}, "question is 'Is it so.', expected one with {} for the prompt"),
    ("vqascore", {"dtype": "int8"}, "dtype is 'int8', expected fp32, bf16, fp16"),
])
def test_mistakes_are_told_in_one_line(name, arguments, told):
    with pytest.raises(UserError, match=told) as error:
        find(name, arguments)
    assert "\n" not in str(error.value) and name in str(error.value)


def test_a_model_that_only_decodes_is_refused(answering):
    class Decoder:
        config = type("Config", (), {"use_decoder_only_language_model": True})

    with pytest.raises(UserError, match="no InstructBLIP on an encoder-decoder"):
        VqaScore(parts=(Decoder(), *answering[1:]))
