"""Kinds of language models: which a config.json describes, and how one is loaded and becomes a policy."""

from pathlib import Path
from typing import Any

import torch

from flowgrpo import hub
from flowgrpo.config.schema import Config
from flowgrpo.config.sections import Adapter
from flowgrpo.data import provenance
from flowgrpo.errors import UserError
from flowgrpo.methods import validate
from flowgrpo.methods.supervised import SelfAnswers
from flowgrpo.policies import build, sources
from flowgrpo.policies.build import CAUSAL_LM, IMAGE_TOKENS, MASKED_LM, VISION_LM
from flowgrpo.starter import FOLDERS
from flowgrpo.text.policies.causal_lm import CausalLM
from flowgrpo.text.policies.image_lm import ImageLM
from flowgrpo.text.policies.masked_lm import MaskedLM
from flowgrpo.text.policies.text_weights import load_causal_lm
from flowgrpo.text.policies.vision_lm import VisionLM

DRAWING = ("janus",)  # families of language models with an image head
IN_TEXT = ("emu3", "chameleon", "glm_image")  # those that draw with tokens of their texts' vocabulary
DIFFUSION = ("llada", "dream")  # families of masked language models whose classes are not called ForMaskedLM


def kind_of(described: dict[str, Any], draws: str = "text") -> str:
    """The kind of language model of a config.json, from the names of its classes and its family.
    draws: what its completions are. Raises UserError for an image of a model without an image head."""
    if draws == "image":
        if described.get("model_type") not in DRAWING:
            name = (described.get("architectures") or ["the model"])[0]
            why = ("draws images with tokens of its texts, whose places and line ends are not known here"
                   if described.get("model_type") in IN_TEXT else "has no image head")
            raise UserError(f"text.generates is 'image', but {name} {why}: expected JanusForConditionalGeneration, or "
                            "leave text.generates out")
        return IMAGE_TOKENS
    if reads_images(described):
        return VISION_LM
    family, classes = str(described.get("model_type") or ""), described.get("architectures") or ()
    masked = family.lower() in DIFFUSION or any(name.endswith("ForMaskedLM") for name in classes)
    return MASKED_LM if masked else CAUSAL_LM


def reads_images(described: dict[str, Any]) -> bool:
    """True if transformers lists this config.json's model for image and text to text."""
    from transformers.models.auto import modeling_auto

    both = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    for name in described.get("architectures") or ():
        alone = name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()  # some stand in both lists
        return name in both.values() and ("vision_config" in described or not alone)
    return described.get("model_type") in both and "vision_config" in described


def load(config: Config) -> tuple[Any, Any]:
    """Load a language model with its tokenizer, or processor if it reads images. Raises UserError if it fails."""
    provenance.require_place(config.model)
    sources.require(config.model, config.load)
    hub.require(config.model)
    kind_of_model = build.kind(config)
    classes = MaskedLM.classes if kind_of_model == MASKED_LM else CausalLM.classes
    folder = Path(FOLDERS.get(config.model, config.model))
    if kind_of_model in (VISION_LM, IMAGE_TOKENS) or kind_of_model != MASKED_LM and \
            not folder.is_dir() and reads_images(build.on_hub(config.model, config.load.revision)):
        classes = VisionLM.classes
    return load_causal_lm(config.model, config.precision, config.trust_remote_code, classes, files=config.load)


def make_policy(config: Config, loaded: tuple[Any, Any], adapter: Adapter | None,
                device: str | torch.device = "cpu") -> CausalLM:
    """The policy of a loaded language model and its tokenizer or processor.
    adapter: what is trained of it, None for nothing."""
    settings: dict[str, Any] = dict(device=device, precision=config.precision,
                                    checkpointing=config.train.recompute_share)
    if build.kind(config, loaded) == MASKED_LM:
        unmasking: Any = validate.resolve(config, "masks").rollout.decoding
        return MaskedLM(*loaded, adapter, config.text, unmasking, **settings)
    if not hasattr(loaded[1], "image_processor"):
        return CausalLM(*loaded, adapter, config.text, **settings)
    if build.kind(config, loaded) != IMAGE_TOKENS:
        return VisionLM(*loaded, adapter, config.text, **settings)
    method = validate.resolve(config, build.process(IMAGE_TOKENS))
    target: Any = method.target  # `ImageTokens`
    # Where the method asks about its images, weights that only answers go through are trained as well.
    return ImageLM(*loaded, adapter, config.text, guidance=config.train.guidance, shown=config.eval.guidance,
                   conditional=target.scores == "conditional", answers=isinstance(method.loss.data, SelfAnswers),
                   **settings)
