"""CLIP (2103.00020) as a reward: similarity to the prompt, LAION's aesthetic predictors on its embedding, and models of
human preference that were tuned from it: PickScore (2305.01569) and HPSv2 (2306.09341).
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo.data.open_image import require_open
from flowgrpo.errors import UserError
from flowgrpo.log import silence_errors
from flowgrpo.packages import import_optional
from flowgrpo.rewards.about import About, built_in
from flowgrpo.rewards.local_model import Head, ImageModel, fill, load_parts, load_pretrained, loading, tensors
from flowgrpo.rewards.preprocessing import Preparation, read_tensor, straight

SCORES = ("clipscore", "cosine")


class OpenClip(ImageModel):
    """Model of open_clip with its tokenizer."""

    @cached_property
    def prepare(self) -> Preparation:
        return preprocessing_of(self.models[0], self.reward)

    def _require(self, parts: tuple[Any, ...]) -> None:
        preprocessing_of(parts[0], self.reward)

    def _scores(self, images: Tensor, prompts: list[str]) -> Tensor:
        model, tokenizer = self.models
        return cosines(model, tokenizer, self.prepare(images.to(self.device)).to(self.float_type), prompts)


class PretrainedClip(OpenClip):
    """CLIP by weights that open_clip knows, or in a file; a subclass has `model` and `pretrained`."""

    model: str
    pretrained: str

    def _load(self) -> tuple[Any, Any]:
        open_clip = import_optional("open_clip", "clip", f"reward {self.reward!r}")
        with silence_errors("open_clip"), loading(
                f"reward {self.reward!r}: {self.model} with the weights {self.pretrained}",
                "open_clip.list_pretrained() names them all; args: {pretrained: FILE} takes a file of yours",
                self.pretrained):
            model = open_clip.create_model(self.model, pretrained=self.pretrained, require_pretrained=True)
            return model, open_clip.get_tokenizer(self.model)

    def features(self, images: Tensor) -> Tensor:
        """Unit-length embeddings of images [B, 3, H, W] -> [B, D] on the CPU."""
        return self.score_batches(lambda some, _: self.embed(some), images, [""] * len(images))

    def embed(self, images: Tensor) -> Tensor:
        """The same on the model's device, in one batch, with a gradient if required."""
        return self.encode_images(self.prepare(images.to(self.device)))

    def encode_images(self, pictures: Tensor) -> Tensor:
        """Embeddings of prepared images on the model's device [B, 3, size, size] -> [B, D]."""
        return self.models[0].encode_image(pictures.to(self.float_type), normalize=True)


@built_in("clip_score", "alignment prompt following clip similarity")
class ClipScore(PretrainedClip):
    """CLIPScore: 2.5 max(cos, 0) of an image's and its prompt's embedding, by the paper's model and prefix (section 3
    of 2104.08718). `clip_cosine` is the plain cosine by a larger model.

    model, pretrained: a model of open_clip with its tag or a file of weights (OpenAI's need a `-quickgelu` model).
    score: `clipscore` or `cosine`.
    prefix: put before each prompt. The paper scores captions of photographs; not every prompt asks for one.
    parts: model and tokenizer, ready-made. dtype (fp32), device and batch_size (32): as in `LocalModel`.
    Raises UserError if open_clip or the weights are missing.
    """

    model: str = "ViT-B-32-quickgelu"
    pretrained: str = "openai"
    score: str = "clipscore"
    prefix: str = "A photo depicts "
    reward, parameters = "clip_score", 151e6
    differentiable = True
    about = About(modality="image", range=(0, 2.5), needs="clip", licence="Apache-2.0, MIT weights")

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise UserError(f"reward {self.reward!r}: score is {self.score!r}, expected {' or '.join(SCORES)}")
        super().__post_init__()

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        similarities = super().__call__(images, [self.prefix + prompt for prompt in prompts])
        return similarities if self.score == "cosine" else 2.5 * similarities.clamp(min=0)


@built_in("clip_cosine", "alignment prompt following clip similarity")
class ClipCosine(ClipScore):
    """Cosine of an image's and its prompt's embedding by CLIP ViT-L/14, without a prefix.

    Arguments: as in `ClipScore`.
    """

    model: str = "ViT-L-14-quickgelu"
    score: str = "cosine"
    prefix: str = ""
    reward, parameters = "clip_cosine", 428e6
    about = About(modality="image", range=(-1, 1), needs="clip", licence="Apache-2.0, MIT weights")


def cosines(model: Any, tokenizer: Any, pictures: Tensor, prompts: list[str]) -> Tensor:
    """Cosine of each prepared image [B, 3, H, W] with its prompt under a model of open_clip -> [B].

    Without a graph torch's attention has another kernel; its numbers count in both cases.
    """
    exact: Tensor | None = None
    if pictures.requires_grad and torch.is_grad_enabled():
        with torch.no_grad():
            exact = cosines(model, tokenizer, pictures, prompts)
    shown = model.encode_image(pictures, normalize=True)
    said = model.encode_text(tokenizer(prompts).to(pictures.device), normalize=True)
    found = (shown.float() * said.float()).sum(-1)
    return found if exact is None else straight(exact, found)


def preprocessing_of(model: Any, reward: str) -> Preparation:
    """Preprocessing of a model of open_clip. Raises UserError for one that is not bicubic or not square."""
    config = getattr(model.visual, "preprocess_cfg", {})
    size = config.get("size", model.visual.image_size)
    sizes = {size} if isinstance(size, int) else set(size)
    if len(sizes) > 1 or config.get("interpolation", "bicubic") != "bicubic":
        raise UserError(f"reward {reward!r}: this model takes images of {size} pixels, scaled "
                        f"{config.get('interpolation')}: expected one that takes squares, scaled bicubic")
    known = {"mean": config.get("mean"), "deviation": config.get("std"), "fit": config.get("resize_mode")}
    return Preparation(sizes.pop(), **{key: value for key, value in known.items() if value is not None})


@built_in("subject_score", "style likeness person face character dreambooth example reference similar")
class SubjectScore(PretrainedClip):
    """CLIP-I: cosine of the embeddings of an image and of the subject's image that its prompt brings.

    key: metadata key of the subject's image, a path relative to the working folder; None for a prompt without one.
    `image` is the image that a prompt brings to an editing pipeline; in recorded pairs `chosen` is the subject too.
    model, pretrained and parts: as in `ClipScore`. dtype (fp32), device and batch_size (32): as in `LocalModel`.
    Raises UserError for an unreadable file, and if open_clip or the weights are missing.
    """

    key: str = "subject"
    model: str = "ViT-L-14-quickgelu"
    pretrained: str = "openai"
    reward, parameters = "subject_score", 428e6
    privileged = True  # reads files that metadata name
    about = About(modality="image", range=(-1, 1), needs="clip", licence="Apache-2.0, MIT weights")

    def __call__(self, images: Tensor, prompts: Sequence[str],  # type: ignore[override]  # reads metadata
                 metadata: Sequence[dict[str, Any]]) -> list[float | None]:
        rows = [i for i, entry in enumerate(metadata) if self.key in entry]
        if not rows:
            return [None] * len(prompts)
        similarities = self.score_batches(self._scores, images[rows], [metadata[i][self.key] for i in rows])
        scores = dict(zip(rows, similarities.tolist()))
        return [scores.get(i) for i in range(len(prompts))]

    def _scores(self, images: Tensor, paths: list[str]) -> Tensor:
        require_open()
        try:
            subjects = {path: read_tensor(path)[None] for path in dict.fromkeys(paths)}
        except UserError as error:
            raise UserError(f"reward 'subject_score': {error}") from None
        shown = self.embed(images)
        embeddings = torch.cat([self.embed(subject) for subject in subjects.values()])
        return (shown * embeddings[[list(subjects).index(path) for path in paths]]).sum(-1)


@built_in("aesthetic", "beauty beautiful pretty nice look style")
class Aesthetic(ImageModel):
    """LAION's aesthetic score, trained on ratings from 1 to 10: a head on an image's normalised CLIP embedding.

    Images are prepared by transformers' rules, as in DDPO and Flow-GRPO.

    head: a file, or `owner/name/file` on the hub. The default is the improved predictor (a perceptron, the file
    sac+logos+ava1-l14-linearMSE.pth of its repository); the linear heads of the first (sa_0_4_vit_l_14_linear.pth and
    others) are recognised by their tensors.
    model: the CLIP model that the head was trained on, a folder or hub id.
    revision, head_revision: of the hub.
    parts: CLIP model with projection and head, ready-made. dtype (fp32; the head's is always), device and batch_size
    (32): as in `LocalModel`.
    Raises UserError if the weights are unavailable or do not fit.
    """

    model: str = "openai/clip-vit-large-patch14"
    revision: str | None = None
    head: str = "trl-lib/ddpo-aesthetic-predictor/aesthetic-model.pth"
    head_revision: str | None = None
    reward, parameters = "aesthetic", 428e6
    differentiable = True
    about = About(modality="image", range=(None, None), needs="", licence="Apache-2.0, MIT weights")

    def _load(self) -> tuple[Any, Any]:
        head = make_head(tensors("aesthetic", self.head, self.head_revision, "head"), self.head)
        [encoder] = load_parts(self, "CLIPVisionModelWithProjection")
        width, taken = encoder.visual_projection.out_features, next(head.parameters()).shape[1]
        if width != taken:
            raise UserError(f"reward 'aesthetic': {self.model} gives {width} numbers, but the head {self.head} takes "
                            f"{taken}: give the model that it was trained on")
        return encoder, head

    def _scores(self, images: Tensor, prompts: list[str]) -> Tensor:
        encoder, head = self.models
        pictures = Preparation(encoder.config.image_size, crop="transformers")(images.to(self.device))
        embeddings = encoder(pixel_values=pictures.to(self.float_type)).image_embeds.float()
        return head(embeddings / embeddings.norm(dim=-1, keepdim=True))[:, 0]


def make_head(state: dict[str, Tensor], where: str) -> nn.Module:
    """Head of a checkpoint: a perceptron (`layers.0.weight` and so on) or a linear one (`weight`)."""
    state = {key.removeprefix("layers."): value for key, value in state.items()}
    first = state.get("0.weight", state.get("weight"))
    if first is None:
        raise UserError(f"reward 'aesthetic': {where} has {', '.join(list(state)[:3]) or 'nothing'}, expected the "
                        "tensors of a perceptron (layers.0.weight) or of a linear head (weight, bias)")
    if "0.weight" in state:
        head = perceptron(first.shape[1])
    else:
        head, state = Head(nn.Linear(first.shape[1], 1)), {f"0.{key}": value for key, value in state.items()}
    fill("aesthetic", head, state, where)
    return head


HIDDEN = (1024, 128, 64, 16)  # widths of the perceptron shared by the aesthetic predictor and ImageReward


def perceptron(width: int) -> Head:
    """Build the head of the aesthetic predictor and of ImageReward: linear layers without activations. Their trainings
    had dropout at 1, 3 and 5; the numbers of the layers are those of their checkpoints."""
    widths = (width, *HIDDEN, 1)
    layers = [nn.Linear(*pair) for pair in zip(widths, widths[1:])]
    return Head(layers[0], nn.Identity(), layers[1], nn.Identity(), layers[2], nn.Identity(), *layers[3:])


@built_in("pickscore", "human preference aesthetic beauty beautiful general quality")
class PickScore(ImageModel):
    """PickScore: the model's logit scale (100) times the cosine of image and prompt, around 15 to 25.

    This is the score of the paper and of its tables. Flow-GRPO trains with a 26th of it, so that it is near 1 like
    other rewards: `args: {divide: 26}`.

    model, revision: a CLIP model of transformers, a folder or hub id. tokenizer: the same.
    parts: model and tokenizer, ready-made. dtype (fp32), device and batch_size (32): as in `LocalModel`.
    Raises UserError if the weights are unavailable.
    """

    model: str = "yuvalkirstain/PickScore_v1"
    revision: str | None = None
    tokenizer: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    divide: float = 1.0
    reward, parameters = "pickscore", 986e6
    differentiable = True
    about = About(modality="image", range=(None, None), needs="", licence="Apache-2.0, MIT weights")

    def __post_init__(self) -> None:
        if not self.divide > 0:
            raise UserError(f"reward 'pickscore': divide is {self.divide}, expected a number above 0")
        super().__post_init__()

    def _load(self) -> tuple[Any, Any]:
        from transformers import AutoTokenizer, CLIPModel

        return (load_pretrained("pickscore", CLIPModel, self.model, self.revision, "model", beside=self.tokenizer),
                load_pretrained("pickscore", AutoTokenizer, self.tokenizer, None, "tokenizer"))

    def _scores(self, images: Tensor, prompts: list[str]) -> Tensor:
        model, tokenizer = self.models
        longest, size = model.config.text_config.max_position_embeddings, model.config.vision_config.image_size
        texts = tokenizer(prompts, padding=True, truncation=True, max_length=longest, return_tensors="pt")
        texts, prepare = texts.to(self.device), Preparation(size, crop="transformers")
        outputs = model(input_ids=texts.input_ids, attention_mask=texts.attention_mask,
                        pixel_values=prepare(images.to(self.device)).to(self.float_type))
        cosines = (outputs.image_embeds.float() * outputs.text_embeds.float()).sum(-1)
        return model.logit_scale.float().exp() * cosines / self.divide


@built_in("hpsv2.1", "human preference aesthetic beauty beautiful general quality")
class HpsV2(OpenClip):
    """HPSv2.1: the cosine of image and prompt, around 0.2 to 0.35; tables print it times 100.

    The whole image is scaled to 224 pixels and padded with black; nothing is cropped. As in the release
    (ResizeMaxSize of its open_clip/transform.py) floats are scaled, neither rounded nor clamped: edges overshoot.

    antialias: false scales without a filter, as the release did with torchvision before 0.17, on which tables of 2023
    were made: up to 200 of 255 levels away at sharp edges.
    checkpoint: a file, or `owner/name/file` on the hub. revision: of the hub.
    model: the architecture's name in open_clip.
    parts: model and tokenizer, ready-made. dtype (fp32), device and batch_size (32): as in `LocalModel`.
    Raises UserError if open_clip or the checkpoint is missing.
    """

    checkpoint: str = "xswu/HPSv2/HPS_v2.1_compressed.pt"
    revision: str | None = None
    model: str = "ViT-H-14"
    antialias: bool = True
    reward, parameters = "hpsv2.1", 986e6
    differentiable = True
    about = About(modality="image", range=(-1, 1), needs="clip", licence="Apache-2.0")

    @cached_property
    def prepare(self) -> Preparation:
        return Preparation(preprocessing_of(self.models[0], self.reward).size, "longest",
                           scaling="floats" if self.antialias else "unfiltered")

    def _load(self) -> tuple[Any, Any]:
        open_clip = import_optional("open_clip", "clip", f"reward {self.reward!r}")
        state = tensors(self.reward, self.checkpoint, self.revision, "checkpoint")
        model = open_clip.create_model(self.model, pretrained=None)
        fill(self.reward, model, state, self.checkpoint)
        return model, open_clip.get_tokenizer(self.model)


@built_in("hpsv2.0", "human preference aesthetic beauty")
class HpsV20(HpsV2):
    """HPSv2.0: as HPSv2.1, by the weights of the paper (2306.09341).

    Arguments: as in `HpsV2`.
    """

    checkpoint: str = "xswu/HPSv2/HPS_v2_compressed.pt"
    reward = "hpsv2.0"
