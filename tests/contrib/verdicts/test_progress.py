"""Progress: failures by their distance to the successes of their group, by hand."""

import math

import torch

from flowgrpo import rewards
from flowgrpo.contrib.verdicts import progress
from tests.helpers.tables import close, f64


def test_failures_are_paid_by_their_nearness_to_a_success():
    """Distances 1 and 3 to the success: z is -1 and 1."""
    apart = f64([[0, 1, 3], [1, 0, 2], [3, 2, 0]])
    near, far = (0.8 / (1 + math.exp(z)) for z in (-1, 1))
    close(progress(torch.tensor([True, False, False]), apart, 0.8), [1, near, far], 1e-7)
    close(progress(torch.tensor([False] * 3), apart, 0.8), [0, 0, 0])
    close(progress(torch.tensor([True] * 3), apart, 0.8), [1, 1, 1])


def test_progress_of_texts_and_of_images():
    def right(outputs, prompts):
        return [float(text == "a b") if isinstance(text, str) else float(text.mean() == 1) for text in outputs]
    found = rewards.score({"r": rewards.find("progress", {"rewards": [right]})}, ["a b", "a c", "d e", "f", "g", "h"],
                          ["p"] * 6, [{}] * 6, 3)[:, 0].tolist()
    assert found[0] == 1 and 0 < found[2] < found[1] < 0.8 and found[3:] == [0, 0, 0]
    pictures = torch.stack([torch.full((3, 16, 16), value) for value in (1.0, 0.9, 0.1)])
    reward = rewards.find("progress", {"rewards": [right]})
    found = rewards.score({"r": reward}, pictures, ["p"] * 3, [{}] * 3, 3)[:, 0].tolist()
    assert found[0] == 1 and 0 < found[2] < found[1] < 0.8
