"""Metrics of a run's scores and samples."""

from __future__ import annotations

import pytest
import torch

from flowgrpo.data.prompts import Prompt
from flowgrpo.run import run
from flowgrpo.training.scoring import diversity
from tests.helpers import tiny


def test_the_diversity_of_groups():
    pictures = torch.zeros(4, 3, 128, 128)
    pictures[1] = 1.0
    assert diversity(pictures, 2) == pytest.approx([0.5**0.5, 0.0]) and diversity(pictures, 1) == []
    assert diversity(["a", "a", "b", "a", "b", "c"], 3) == [0.5, 1.0]


@pytest.mark.fast
def test_a_learning_rate_of_1000_is_a_collapse_in_one_line(tmp_path, capsys):
    config = tiny.config(tmp_path, train__epochs=5, train__lr=1000.0)
    run(config, pipe=tiny.sd3(), functions={"red": tiny.red}, prompts=[Prompt(text) for text in tiny.PROMPTS])
    [line] = [line for line in capsys.readouterr().out.splitlines() if "alert, epoch" in line]
    assert line.startswith("alert, epoch 5: gradient norm ") and "diversity within a group" in line and "KL" in line
