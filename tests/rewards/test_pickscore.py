"""PickScore on a tiny random model, against computations of its own, one image at a time."""

import numpy as np
import pytest
import torch

from flowgrpo.rewards.clip import PickScore
from tests.helpers.tiny_scorers import PROMPTS, by_pil, cropped_by_transformers, pictures


def pick_expected(model, tokenizer, images, prompts) -> list[float]:
    scores, fit = [], cropped_by_transformers(32)
    with torch.no_grad():
        for image, prompt in zip(images, prompts):
            ids = torch.tensor([tokenizer(prompt)["input_ids"]])  # alone, so without padding
            text = model.text_projection(model.text_model(input_ids=ids).last_hidden_state[0, ids.shape[1] - 1])
            seen = model.vision_model(pixel_values=by_pil(image, 32, fit)[None]).pooler_output
            shown = model.visual_projection(seen)[0]
            scores.append(np.exp(1.7) * torch.cosine_similarity(text, shown, dim=0).item())
    return scores


@pytest.mark.parametrize("batch", [1, 3, 32])
def test_pick_score_is_the_scaled_cosine(pick, batch):
    model, tokenizer, folder = pick
    images = pictures(5, 32, 67, seed=1)
    expected = pick_expected(model, tokenizer, images, PROMPTS)
    reward = PickScore(folder, tokenizer=folder, device="cpu", batch_size=batch)
    assert reward(images, PROMPTS).tolist() == pytest.approx(expected, abs=1e-4) and np.std(expected) > 0.05
    trained = PickScore(divide=26, device="cpu", parts=(model, tokenizer))
    assert trained(images, PROMPTS).tolist() == pytest.approx([value / 26 for value in expected], abs=1e-5)


def test_pick_score_cuts_long_prompts(pick):
    model, tokenizer, _ = pick
    long = " ".join(["two dogs"] * 40)
    [value] = PickScore(device="cpu", parts=(model, tokenizer))(pictures(1, 32, 32), [long]).tolist()
    assert np.isfinite(value)
