"""Pipelines without weights: every component from its configuration, on the meta device."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import torch

from flowgrpo import published
from flowgrpo.errors import UserError
from flowgrpo.log import quiet
from flowgrpo.policies.pipelines import modular
from flowgrpo.starter import FOLDERS
from flowgrpo.tools.dry_run.meta_gpu import META

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WEIGHTS = ["*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5", "*.onnx*", "*.gguf", "*.png",
           "*.jpg", "*.mp4"]
VISION_TOKENS = {"image": "<|image_pad|>", "video": "<|video_pad|>", "vision_start": "<|vision_start|>",
                 "vision_end": "<|vision_end|>"}
# The last message's text, as chat templates have it.
TEMPLATE = ("{% set content = messages[-1]['content'] %}{% if content is string %}{{ content }}"
            "{% else %}{% for part in content %}{{ part['text'] }}{% endfor %}{% endif %}")


def pipeline(model: str, dtype: torch.dtype) -> Any:
    """Pipeline with weights of this dtype and no values. model: a packaged configuration's hub id or pipeline class, a
    starter's name, a folder, or another hub id, of which configurations and tokenizers are fetched. UserError if there
    is no such pipeline."""
    known = None if Path(model).is_dir() else published.find(model)
    with quiet():
        pipe = _of_folder(_folder(model), dtype) if known is None else assemble(
            known, lambda name, kind, config: part(kind, config, dtype))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def like(pipe: Any) -> Any:
    """Loaded pipeline's twin on the meta device, in its dtypes."""
    loaded: dict[str, Any] = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    components = pipe.components | {name: _module(type(part), part.config, part.dtype) for name, part in loaded.items()}
    options = {key: value for key, value in pipe.config.items() if not key.startswith("_") and key not in components}
    with quiet():
        twin = type(pipe)(**components, **options)
    twin.set_progress_bar_config(disable=True)
    return twin


def _module(kind: Any, config: Any, dtype: torch.dtype) -> torch.nn.Module:
    """Model of a class of diffusers or transformers as they load it: of diffusers some modules stay in fp32."""
    if not hasattr(kind, "load_config"):
        with META:
            return kind._from_config(config, dtype=dtype)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with META:
            module = kind.from_config(dict(config))
    finally:
        torch.set_default_dtype(before)
    kept = getattr(module, "_keep_in_fp32_modules", None) or ()
    for key, parameter in module.named_parameters():
        if any(name in key.split(".") for name in kept):
            parameter.data = parameter.data.float()
    return module


# --- a packaged configuration ----------------------------------------------------------------------------------------

def assemble(known: published.Published, make: Callable[[str, str, dict[str, Any]], Any]) -> Any:
    """Published pipeline with stand-in tokenizers, its components made by `make(name, class, config)`."""
    components = {name: make(name, kind, config) for name, (kind, config) in known.parts.items()}
    tokenizers: dict[str, Any] = {name: tokenizer(length) for name, length in known.tokenizers.items()}
    cls = getattr(diffusers, known.pipeline)
    if known.processor:
        first = next(iter(tokenizers))  # in whose place it is, unless the class takes both
        tokenizers["processor" if "processor" in inspect.signature(cls).parameters else first] = _processor(
            known.processor, tokenizers[first], components["text_encoder"].config)
    if hasattr(cls, "default_blocks_name"):
        return modular.of_parts(cls, components | tokenizers)
    pipe = cls(**components, **tokenizers, **known.options)
    if cropped := getattr(pipe, "prompt_template_encode_start_idx", 0):  # tokens before the prompt; others follow it
        pipe.tokenizer.chat_template = "0 " * cropped + TEMPLATE + " 0"
    return pipe


def _processor(kind: str, tokens: PreTrainedTokenizerBase, config: Any) -> Any:
    """Processor of images of Qwen2-VL's family. The tokenizer learns the tokens of images, and the configuration of the
    text encoder their numbers."""
    import transformers

    tokens.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS.values())})
    for name, token in VISION_TOKENS.items():
        setattr(config, f"{name}_token_id", tokens.convert_tokens_to_ids(token))
    videos = getattr(transformers, kind.replace("Processor", "VideoProcessor"))
    return getattr(transformers, kind)(transformers.Qwen2VLImageProcessor(), tokens, videos(), chat_template=TEMPLATE)


def part(kind: str, config: dict[str, Any], dtype: torch.dtype) -> Any:
    """Component of a class of diffusers or transformers: a module without values, a scheduler or a guider. kind: name
    of the class; below diffusers with its module, such as pipelines.ltx2.LTX2TextConnectors."""
    import transformers

    module, _, name = kind.rpartition(".")  # of a class that diffusers does not name at its top
    library = importlib.import_module(f"diffusers.{module}") if module else \
        diffusers if hasattr(diffusers, kind) else transformers
    cls: Any = getattr(library, name)
    if not issubclass(cls, torch.nn.Module):
        return cls(**config)
    return _module(cls, cls.config_class(**config) if library is transformers else config, dtype)


def tokenizer(length: int) -> PreTrainedTokenizerBase:
    """Tokenizer whose tokens are words and punctuation marks; all but numbers below 100 are unknown."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = [*special.values(), *map(str, range(100))]
    tokens = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("<s>", 0), ("</s>", 2)]
    tokens.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=tokens, model_max_length=length, chat_template=TEMPLATE, **special)


# --- a folder's files ------------------------------------------------------------------------------------------------

def _folder(model: str) -> Path:
    if model in FOLDERS or Path(model).is_dir():
        return Path(FOLDERS.get(model, model))
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, ignore_patterns=WEIGHTS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(f"the configuration of {model!r} cannot be fetched ({str(error).splitlines()[0]}): give a "
                        f"folder that has it, or one of {', '.join(published.MODELS)}") from error


def _of_folder(folder: Path, dtype: torch.dtype) -> Any:
    index = folder / "model_index.json"
    if not index.is_file():
        raise UserError(f"no model_index.json in {folder}: a dry run needs the folder or hub id of a pipeline")
    described = diffusers.DiffusionPipeline.load_config(folder)
    cls = getattr(diffusers, described["_class_name"], None)
    if cls is None:
        raise UserError(f"diffusers has no {described['_class_name']}, which {index} names")
    parts = {name: value for name, value in described.items() if not name.startswith("_")}
    components = {name: _component(folder, name, value[0], value[1], dtype)
                  if isinstance(value, list) and len(value) == 2 else value for name, value in parts.items()}
    return cls(**components)


def _component(folder: Path, name: str, library: str | None, kind: str | None, dtype: torch.dtype) -> Any:
    if library is None or kind is None:
        return None
    import transformers

    cls = getattr({"diffusers": diffusers, "transformers": transformers}.get(library), kind, None)
    if cls is None:
        raise UserError(f"the component {name} is a {kind} of {library}, which a dry run cannot make")
    if not issubclass(cls, torch.nn.Module):
        return cls.from_pretrained(folder, subfolder=name)
    read = cls.load_config if library == "diffusers" else cls.config_class.from_pretrained
    return _module(cls, read(folder, subfolder=name), dtype)
