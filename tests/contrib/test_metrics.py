"""Metrics of other packages as rewards. The packages are not installed here: small ones of their shape stand in for
them. tests/extra/test_adapters.py has the real ones."""

import sys

import pytest
import torch

from flowgrpo import rewards
from flowgrpo.contrib.metrics import IMSCORE
from flowgrpo.rewards.reward import Batch, as_reward
from tests.helpers.refusals import message

IMAGES = torch.linspace(0, 1, 2 * 3 * 4 * 4).view(2, 3, 4, 4)
BASE = IMAGES.flip(0)
SOURCES = {
    "imscore/__init__.py": "", "imscore/pickscore/__init__.py": "",
    "imscore/pickscore/model.py": """
import torch
class PickScorer(torch.nn.Module):
    @classmethod
    def from_pretrained(cls, weights):
        made = cls()
        made.weights = weights
        return made
    def score(self, pixels, prompts):
        return pixels.mean((1, 2, 3)) + torch.tensor([float(len(prompt)) for prompt in prompts])
""",
    "pyiqa/default_model_configs.py": """
DEFAULT_CONFIGS = {"bright": {"metric_mode": "NR"}, "dark": {"metric_mode": "NR", "lower_better": True},
                   "far": {"metric_mode": "FR", "lower_better": True}, "fid": {"metric_mode": "NR"}}
""",
    "pyiqa/__init__.py": """
import torch
class Metric(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name
    def forward(self, images, reference=None):
        return ((images - reference).abs() if self.name == "far" else images).mean((1, 2, 3))[:, None]
def create_metric(name, as_loss, loss_reduction, device):
    assert as_loss and loss_reduction == "none"
    return Metric(name)
""",
    "torchmetrics/__init__.py": "",
    "torchmetrics/image.py": """
import torch
class Metric(torch.nn.Module):
    higher_is_better, is_differentiable = True, True
    def forward(self, *given):
        return self.update(*given)
class Bright(Metric):
    def update(self, img):
        assert len(img) == 1
        return img.mean()
class Far(Metric):
    higher_is_better, is_differentiable = False, False
    def update(self, preds, target):
        return (preds - target).abs().mean()
class Unsaid(Metric):
    higher_is_better = None
    def update(self, img):
        return img.mean()
class FrechetInceptionDistance(Metric):
    def update(self, imgs, real):
        return imgs.mean()
class Two(Metric):
    def update(self, img):
        return img.mean((0, 2, 3))
""",
    "torchmetrics/multimodal.py": """
from torchmetrics.image import Metric
class Texts(Metric):
    is_differentiable = False
    def update(self, source, target):
        return source.float().mean() + len(target[0])
"""}


@pytest.fixture
def packages(tmp_path, monkeypatch):
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("imscore", "pyiqa", "torchmetrics")]:
        del sys.modules[name]


def scored(name, args=None, pictures=IMAGES, base=BASE):
    reward = as_reward(rewards.find(name, args), name)
    return reward, reward(Batch(pictures, ["p", "pp"], [{}, {}], base=base))


@pytest.mark.parametrize("name", ["imscore:pickscore", "pyiqa:musiq", "torchmetrics:TotalVariation"])
def test_a_missing_package_is_told_with_its_command(name):
    package = name.partition(":")[0]
    told = message(rewards.find, name)
    assert told == f"reward {name!r} needs {package} (No module named {package!r}): pip install {package}"


@pytest.mark.parametrize("name, sign", [("pyiqa:bright", 1), ("pyiqa:dark", -1), ("torchmetrics:Bright", 1)])
def test_higher_is_better(packages, name, sign):
    reward, scores = scored(name, {"batch_size": 1})
    assert scores.tolist() == pytest.approx((sign * IMAGES.mean((1, 2, 3))).tolist())
    assert not reward.reads and reward.unit == "sample" and list(reward.judges) == ["image"]


@pytest.mark.parametrize("name", ["pyiqa:far", "torchmetrics:Far"])
def test_a_reference_is_the_bases_image(packages, name):
    reward, scores = scored(name)
    assert reward.reads == {"base"}
    assert scores.tolist() == pytest.approx((-(IMAGES - BASE).abs().mean((1, 2, 3))).tolist())
    assert scored(name, base=None)[1] == [None, None]


def test_packages_get_what_they_read_and_load_lazily(packages):
    reward, scores = scored("imscore:pickscore")
    assert scores.tolist() == pytest.approx((IMAGES.mean((1, 2, 3)) + torch.tensor([1.0, 2.0])).tolist())
    assert reward.origin.models[0].weights == IMSCORE["pickscore"][2]
    assert scored("imscore:pickscore", {"model": "mine"})[0].origin.models[0].weights == "mine"
    reward, scores = scored("torchmetrics:Texts")
    bytes_ = (IMAGES * 255).round().mean((1, 2, 3))
    assert scores.tolist() == pytest.approx((bytes_ + torch.tensor([1.0, 2.0])).tolist())
    with rewards.lazily():
        made = rewards.find("imscore:pickscore")
    assert made.parts is None and made.models and made.parts is not None


@pytest.mark.parametrize("name, follows, licence", [
    ("imscore:pickscore", True, "MIT,"), ("torchmetrics:Bright", True, "Apache-2.0,"),
    ("pyiqa:dark", True, "PolyForm-Noncommercial-1.0.0: not for commercial use;"),
    ("torchmetrics:Far", False, "Apache-2.0,")])
def test_gradients_reach_the_images_and_licences_are_stated_as_the_package_says(packages, name, follows, licence):
    pictures = IMAGES.clone().requires_grad_()
    reward, scores = scored(name, pictures=pictures)
    about = rewards.find(name).about
    assert about.licence == f"{licence} the weights' own" and about.needs == name.partition(":")[0]
    assert reward.differentiable == follows
    if follows:
        scores.sum().backward()
        assert pictures.grad.abs().min() > 0


@pytest.mark.parametrize("name, said", [
    ("imscore:pick", "imscore has no scorer 'pick': did you mean 'pickscore'?"),
    ("pyiqa:brigt", "pyiqa has no metric 'brigt': did you mean 'bright'?"),
    ("pyiqa:fid", "measures sets of images"), ("torchmetrics:FrechetInceptionDistance", "measures sets of images"),
    ("torchmetrics:Brigt", "torchmetrics has no image metric 'Brigt': did you mean 'Bright'?"),
    ("torchmetrics:Unsaid", "does not say whether higher is better: add args: {higher_is_better: true} or false"),
    ("pyiqa:", "unknown reward 'pyiqa:'")])
def test_what_cannot_be_a_reward_is_told(packages, name, said):
    assert said in message(rewards.find, name)


def test_what_a_class_does_not_say_or_returns_too_often(packages):
    _, scores = scored("torchmetrics:Unsaid", {"higher_is_better": False})
    assert scores.tolist() == pytest.approx((-IMAGES.mean((1, 2, 3))).tolist())
    assert "'torchmetrics:Two' has several values for an image" in message(scored, "torchmetrics:Two")
