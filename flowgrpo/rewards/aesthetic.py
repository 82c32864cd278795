"""Aesthetic quality of a picture: LAION's aesthetic predictors, small heads on a CLIP embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.rewards.local_model import Head, LocalModel, fill, pretrained, tensors
from flowgrpo.rewards.preprocessing import Preparation


@dataclass(frozen=True)
class Aesthetic(LocalModel):
    """LAION's aesthetic score, trained on ratings from 1 to 10: a head on an image's normalised CLIP embedding.

    Pictures are prepared by transformers' rules, as in DDPO and Flow-GRPO.

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

    def _loaded(self) -> tuple[Any, Any]:
        from transformers import CLIPVisionModelWithProjection

        head = made("aesthetic", tensors("aesthetic", self.head, self.head_revision, "head"), self.head)
        encoder = pretrained("aesthetic", CLIPVisionModelWithProjection, self.model, self.revision, "model")
        width, taken = encoder.visual_projection.out_features, next(head.parameters()).shape[1]
        if width != taken:
            raise UserError(f"reward 'aesthetic': {self.model} gives {width} numbers, but the head {self.head} takes "
                            f"{taken}: give the model that it was trained on")
        return encoder, head

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return self.batched(self._scores, images, prompts)

    def _scores(self, images: Tensor, prompts: list[str]) -> Tensor:
        encoder, head = self.models
        pictures = Preparation(encoder.config.image_size, crop="transformers")(images.to(self.device))
        embeddings = encoder(pixel_values=pictures.to(self.float_type)).image_embeds.float()
        return head(embeddings / embeddings.norm(dim=-1, keepdim=True))[:, 0]


def made(reward: str, state: dict[str, Tensor], where: str) -> torch.nn.Module:
    """Return the head of a checkpoint: a perceptron (`layers.0.weight` and so on) or a linear one (`weight`)."""
    state = {key.removeprefix("layers."): value for key, value in state.items()}
    first = state.get("0.weight", state.get("weight"))
    if first is None:
        raise UserError(f"reward {reward!r}: {where} has {', '.join(list(state)[:3]) or 'nothing'}, expected the "
                        "tensors of a perceptron (layers.0.weight) or of a linear head (weight, bias)")
    if "0.weight" in state:
        head = perceptron(first.shape[1])
    else:
        head, state = Head(torch.nn.Linear(first.shape[1], 1)), {f"0.{key}": value for key, value in state.items()}
    fill(reward, head, state, where)
    return head


HIDDEN = (1024, 128, 64, 16)  # widths of the perceptron shared by the aesthetic predictor and ImageReward


def perceptron(width: int) -> Head:
    """Build the head of the aesthetic predictor and of ImageReward: linear layers in sequence, without activations.

    Their trainings had dropout at 1, 3 and 5; the numbers of the layers are those of their checkpoints.
    """
    from torch.nn import Identity, Linear

    widths = (width, *HIDDEN, 1)
    layers = [Linear(*pair) for pair in zip(widths, widths[1:])]
    return Head(layers[0], Identity(), layers[1], Identity(), layers[2], Identity(), *layers[3:])
