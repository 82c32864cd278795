"""Metrics of torchmetrics, pyiqa and imscore that need no weights, as rewards: run by hand, with these packages.

    pip install torchmetrics pyiqa imscore && pytest tests/extra/test_adapters.py
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from flowgrpo import rewards  # noqa: E402
from flowgrpo.contrib.metrics import IMSCORE, Imscore  # noqa: E402
from flowgrpo.rewards.reward import Batch, as_reward  # noqa: E402
from tests.helpers.refusals import message

GENERATOR = torch.Generator().manual_seed(0)
IMAGES, BASE = torch.rand(2, 3, 2, 3, 64, 64, generator=GENERATOR).flatten(1, 2)[:, :3]


def scored(name):
    reward = as_reward(rewards.find(name), name)
    return reward, reward(Batch(IMAGES, ["p"] * 3, [{}] * 3, base=BASE))


def test_torchmetrics_with_and_without_a_reference():
    from torchmetrics.functional.image import total_variation
    reward, scores = scored("torchmetrics:TotalVariation")
    torch.testing.assert_close(scores, -torch.stack([total_variation(picture[None]) for picture in IMAGES]))
    pictures = IMAGES.clone().requires_grad_()
    reward.origin(pictures, ["p"] * 3).sum().backward()
    assert reward.differentiable and pictures.grad.abs().sum() > 0
    from torchmetrics.functional.image import structural_similarity_index_measure as ssim
    reward, scores = scored("torchmetrics:StructuralSimilarityIndexMeasure")
    expected = [ssim(a[None], b[None], data_range=1.0) for a, b in zip(IMAGES, BASE)]
    torch.testing.assert_close(scores, torch.stack(expected))
    assert reward.reads == {"base"}


@pytest.mark.parametrize("name", ["FrechetInceptionDistance", "KernelInceptionDistance", "InceptionScore"])
def test_torchmetrics_of_sets(name):
    assert "measures sets of images" in message(rewards.find, f"torchmetrics:{name}")


@pytest.mark.parametrize("name, sign, reference", [("piqe", -1, False), ("entropy", 1, False), ("ssim", 1, True),
                                                   ("psnr", 1, True)])
def test_pyiqa(name, sign, reference):
    import pyiqa
    reward, scores = scored(f"pyiqa:{name}")
    own = pyiqa.create_metric(name)(IMAGES, BASE) if reference else pyiqa.create_metric(name)(IMAGES)
    torch.testing.assert_close(scores, sign * own.float().reshape(3))
    assert reward.reads == ({"base"} if reference else frozenset())


def test_imscore():
    from imscore.dummy.model import DummyReward
    scores = Imscore(metric="pickscore", parts=(DummyReward(),))(IMAGES, ["p"] * 3)
    torch.testing.assert_close(scores, IMAGES.mean((1, 2, 3)))


@pytest.mark.parametrize("name", IMSCORE)
def test_imscore_has_these_scorers(name):
    import importlib
    module, scorer, _ = IMSCORE[name]
    assert callable(getattr(importlib.import_module(f"imscore.{module}.model"), scorer).score)
