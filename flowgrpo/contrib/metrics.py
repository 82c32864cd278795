"""Metrics of other packages as rewards: `imscore:NAME`, `pyiqa:NAME` and `torchmetrics:NAME`.

Higher is better in all of them: a metric of which lower is better is negated. A metric with a reference compares with
the base model's image of the same noise.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowgrpo.errors import UserError, nearest
from flowgrpo.packages import import_optional
from flowgrpo.rewards.about import About
from flowgrpo.rewards.local_model import LocalModel

# Scorers of imscore: module, class, default weights.
IMSCORE = {
    "aesthetic": ("aesthetic", "LAIONAestheticScorer", "RE-N-Y/laion-aesthetic"),
    "aesthetic_shadow": ("aesthetic", "ShadowAesthetic", "RE-N-Y/aesthetic-shadow-v2"),
    "clipscore": ("preference", "CLIPScore", "RE-N-Y/clipscore-vit-large-patch14"),
    "cyclereward": ("cyclereward", "CycleReward", "NagaSaiAbhinay/CycleReward-Combo"),
    "evalmuse": ("evalmuse", "EvalMuse", "RE-N-Y/evalmuse"),
    "hpsv2.1": ("hps", "HPSv2", "RE-N-Y/hpsv21"),
    "imagereward": ("imreward", "ImageReward", "RE-N-Y/ImageReward"),
    "mps": ("mps", "MPS", "RE-N-Y/mpsv1"),
    "pickscore": ("pickscore", "PickScorer", "RE-N-Y/pickscore"),
    "pickscore_siglip": ("preference", "SiglipPreferenceScorer", "RE-N-Y/pickscore-siglip"),
    "vqascore": ("vqascore", "VQAScore", "RE-N-Y/clip-t5-xxl"),
}
# Metrics of a set of images, which no single image has.
OF_SETS = ("InceptionScore", "PerceptualPathLength", "inception_score", "fid", "fid_dinov2", "sfid", "fid_clip")
OF_A_SET = "measures sets of images, and a reward scores one: choose another metric"
# Arguments by which torchmetrics takes images in [0, 1].
UNIT_RANGE: dict[str, dict[str, object]] = {
    "LearnedPerceptualImagePatchSimilarity": {"normalize": True},
    "PeakSignalNoiseRatio": {"data_range": 1.0}, "StructuralSimilarityIndexMeasure": {"data_range": 1.0},
    "MultiScaleStructuralSimilarityIndexMeasure": {"data_range": 1.0}}


@dataclass(frozen=True, kw_only=True)
class Adapted(LocalModel):
    """Base of the adapters.

    metric: its name in the package. options: further arguments of its constructor.
    sign: 1 where higher is better, -1 where lower is. base: the metric compares with the base's images.
    Raises UserError for a missing package, with the command that installs it, and for an unknown metric.
    """

    metric: str
    options: Mapping[str, Any] = field(default_factory=dict)
    sign: int = field(init=False, default=1)
    base: bool = field(init=False, default=False)
    licence: ClassVar[str]

    @property
    def about(self) -> About:
        return About(modality="image", range=(None, None), needs=self.reward, licence=self.licence)

    @property
    def who(self) -> str:
        return f"reward '{self.reward}:{self.metric}'"

    def _module(self, name: str) -> ModuleType:
        return import_optional(name, None, self.who)

    def __call__(self, images: Tensor, prompts: Sequence[str], base: Tensor | None = None) -> Tensor | list[None]:
        """B scores, None without the base's images that it compares with."""
        if not self.base:
            return self.sign * self.score_batches(self._placed, images, prompts)
        return [None] * len(prompts) if base is None else \
            self.sign * self.score_batches(self._placed, images, prompts, base)

    def _placed(self, images: Tensor, prompts: list[str], *references: Tensor) -> Tensor:
        pictures, *others = (each.to(self.device, self.float_type) for each in (images, *references))
        return self._scores(pictures, prompts, *others).reshape(len(prompts))

    def _scores(self, images: Tensor, prompts: list[str], reference: Tensor | None = None) -> Tensor:
        """Metric's own values, B numbers, of images [B, 3, H, W] in [0, 1]. reference: the base's, where `base`."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Imscore(Adapted):
    """Scorer of imscore. All are differentiable, and higher is better.

    model: other weights, a hub id or a folder.
    """

    model: str | None = None
    reward: ClassVar[str] = "imscore"
    licence: ClassVar[str] = "MIT, the weights' own"
    differentiable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.metric not in IMSCORE:
            raise UserError(f"{self.who}: imscore has no scorer {self.metric!r}{nearest(self.metric, list(IMSCORE))}")
        self._module("imscore")
        super().__post_init__()

    def _load(self) -> tuple[Any, ...]:
        module, name, weights = IMSCORE[self.metric]
        scorer = getattr(self._module(f"imscore.{module}.model"), name)
        return (scorer.from_pretrained(self.model or weights, **self.options),)

    def _scores(self, images: Tensor, prompts: list[str], reference: Tensor | None = None) -> Tensor:
        [scorer] = self.models
        return scorer.score(images, prompts)


@dataclass(frozen=True, kw_only=True)
class Pyiqa(Adapted):
    """Metric of pyiqa, by the name in its list of models. Its licence forbids commercial use.

    pyiqa says of which lower is better. Whether a metric has a gradient, a run's trial finds out.
    """

    reward: ClassVar[str] = "pyiqa"
    licence: ClassVar[str] = "PolyForm-Noncommercial-1.0.0: not for commercial use; the weights' own"
    differentiable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._module("pyiqa")
        known = self._module("pyiqa.default_model_configs").DEFAULT_CONFIGS
        if self.metric not in known:
            raise UserError(f"{self.who}: pyiqa has no metric {self.metric!r}{_near(self.metric, list(known))}")
        if self.metric in OF_SETS:
            raise UserError(f"{self.who} {OF_A_SET}")
        vars(self).update(sign=-1 if known[self.metric].get("lower_better") else 1,
                          base=known[self.metric].get("metric_mode") == "FR")
        super().__post_init__()

    def _load(self) -> tuple[Any, ...]:
        return (self._module("pyiqa").create_metric(self.metric, as_loss=True, loss_reduction="none",
                                                    device=torch.device(self.device or "cpu"), **self.options),)

    def _scores(self, images: Tensor, prompts: list[str], reference: Tensor | None = None) -> Tensor:
        [metric] = self.models
        return metric(images) if reference is None else metric(images, reference)


@dataclass(frozen=True, kw_only=True)
class Torchmetrics(Adapted):
    """Metric of torchmetrics: a class of `torchmetrics.image` or `torchmetrics.multimodal`.

    The class says whether higher is better and whether it is differentiable. higher_is_better: says it where the class
    does not. It scores one image at a time.
    """

    higher_is_better: bool | None = None
    reward: ClassVar[str] = "torchmetrics"
    licence: ClassVar[str] = "Apache-2.0, the weights' own"

    def __post_init__(self) -> None:
        metric = self._class()
        takes = list(inspect.signature(metric.update).parameters)[1:]
        if self.metric in OF_SETS or "real" in takes or not 1 <= len(takes) <= 2:
            raise UserError(f"{self.who} {OF_A_SET}")
        higher = metric.higher_is_better if self.higher_is_better is None else self.higher_is_better
        if higher is None:
            raise UserError(f"{self.who}: torchmetrics does not say whether higher is better: add args: "
                            "{higher_is_better: true} or false")
        vars(self).update(
            sign=1 if higher else -1, base=takes == ["preds", "target"],
            differentiable=bool(metric.is_differentiable), _prompted=len(takes) == 2 and takes[0] != "preds")
        super().__post_init__()

    def _class(self) -> Any:
        homes = [self._module("torchmetrics.image"), self._module("torchmetrics.multimodal")]
        found = next((getattr(home, self.metric) for home in homes if hasattr(home, self.metric)), None)
        if found is None or not inspect.isclass(found):
            known = [name for home in homes for name in dir(home) if inspect.isclass(getattr(home, name))]
            raise UserError(f"{self.who}: torchmetrics has no image metric {self.metric!r}{_near(self.metric, known)}")
        return found

    def _load(self) -> tuple[Any, ...]:
        return (self._class()(**UNIT_RANGE.get(self.metric, {}) | dict(self.options)),)

    def _scores(self, images: Tensor, prompts: list[str], reference: Tensor | None = None) -> Tensor:
        [metric] = self.models
        values = []
        for row, prompt in enumerate(prompts):
            image = images[row:row + 1]
            if vars(self)["_prompted"]:
                value = metric((image * 255).round().to(torch.uint8), [prompt])
            else:
                value = metric(image) if reference is None else metric(image, reference[row:row + 1])
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise UserError(f"{self.who} has several values for an image: choose options that leave one")
            values.append(value.reshape(()))
        return torch.stack(values)


def _near(name: str, known: list[str]) -> str:
    told = nearest(name, known)
    return told if told.startswith(":") else f", but {len(known)} others"
