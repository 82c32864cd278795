"""Language models in the files of transformers and peft: loading, and trainable weights."""

import contextlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flowgrpo import hub
from flowgrpo.config.sections import Load
from flowgrpo.device import DTYPES
from flowgrpo.errors import UserError
from flowgrpo.log import quiet
from flowgrpo.nouns import quantity
from flowgrpo.packages import import_failure
from flowgrpo.policies.weights import adapters
from flowgrpo.policies.weights.trainable import TrainableWeights
from flowgrpo.starter import FOLDERS
from flowgrpo.storage import atomic, paths


def present(model: torch.nn.Module, targets: list[str]) -> list[str]:
    """The targets that name a module of the model; all of them if none does."""
    names = {key.rpartition(".")[2] for key, _ in model.named_modules()}
    return [target for target in targets if target in names] or targets


class TextWeights(TrainableWeights):
    """Trainable weights of a language model: a LoRA, or all, in the files that transformers and peft read.

    pipe: its tokenizer or processor, which is saved with all weights.
    """

    def save(self, folder: Path) -> str:
        """Write `adapter_model.safetensors` and `adapter_config.json`, or all weights as a model folder, read them back
        and compare. Returns a sentence for the log."""
        module: Any = self.modules["model"]
        if not self.adapter.rank:
            with atomic.filling(folder / "model") as place:
                module.save_pretrained(place)
                paths.readable(place)
                self.pipe.save_pretrained(place)
            return f"saved all weights to {folder / 'model'}"
        with atomic.filling(folder) as place:
            adapters.save(module, place, wrapped=True)
            paths.readable(place / adapters.WEIGHTS)
        self._read_back(folder)
        return f"saved {folder / adapters.WEIGHTS}; read back by peft: same weights, same scale"

    def _others(self) -> dict[str, torch.nn.Module]:
        return {}

    def _attach(self, path: Path, adapter: str) -> str:
        attach(self.modules["model"], path, adapter)
        count = sum(adapter in layer.lora_A for layer in self.layers().values())
        return f"{path}: LoRA applied to {quantity(count, 'layer')}"

    def _base_name(self, module: Any) -> str | None:
        return getattr(module, "name_or_path", None)


def attach(model: torch.nn.Module, folder: Path, adapter: str = "default") -> None:
    """Load the LoRA of a folder into a language model, as an adapter of that name. Raises UserError if it fails."""
    try:
        with quiet():
            adapters.load(model, folder, adapter)
    except UserError:
        raise
    except Exception as error:  # third-party files can raise anything
        why = import_failure(error) or " ".join(str(error).split())[:200]
        raise UserError(f"{folder} does not load into {type(model).__name__}: {why}") from error


def load_causal_lm(model: str, precision: str = "fp32", trust_remote_code: bool = False,
                   classes: Sequence[str] = ("AutoModelForCausalLM", "AutoTokenizer"), files: Load = Load()
                   ) -> tuple[Any, Any]:
    """Load (model, tokenizer): a starter's name, a directory or a hub id.
    classes: of transformers; of masked models also one with its own code, if allowed. files: variant and revision.
    Raises UserError if it does not load."""
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    source, masked = FOLDERS.get(model, model), classes[0] == "AutoModelForMaskedLM"
    try:
        with quiet():
            body, reader = (getattr(transformers, name) for name in classes)
            common: dict[str, Any] = {"trust_remote_code": trust_remote_code}
            if files.revision is not None:
                common["revision"] = files.revision
            if masked:
                known = transformers.AutoConfig.from_pretrained(source, **common).architectures or []
                body = body if any(name.endswith("ForMaskedLM") for name in known) else transformers.AutoModel
            return (body.from_pretrained(source, dtype=DTYPES[precision], variant=files.variant, **common),
                    reader.from_pretrained(source, **common))
    except Exception as error:  # third-party model files can raise anything
        folder = "a directory with a config.json and a tokenizer, or a hub id"
        raise (hub.load_error(error, model, "masked language model",
                              f"{folder}; one with its own code needs trust_remote_code: true") if masked else
               hub.load_error(error, model, "language model", f"starter_text, {folder}")) from error


def special_tokens(model: Any, tokenizer: Any, template: bool | None = None) -> tuple[list[int], int]:
    """The tokens that end a completion, and the padding token. Raises UserError if none ends one.
    Either those of the model's generation config or the tokenizer's end it (TRL#7039): a ChatML fine-tune often changes
    one alone. The first is written behind a given answer: the chat template's, unless template is False, or the
    tokenizer's."""
    config = getattr(model, "generation_config", None)  # a model without `generate` has none
    known = config.eos_token_id if config else None
    ends = dict.fromkeys([tokenizer.eos_token_id, *(known if isinstance(known, (list, tuple)) else [known])])
    ends.pop(None, None)
    if not ends:
        raise UserError("neither the model nor its tokenizer says which token ends a completion: set the tokenizer's "
                        "eos_token")
    answer, written = "flowgrpo", ""
    with contextlib.suppress(Exception):  # a template can be missing, or raise anything
        turns = [{"role": "user", "content": answer}, {"role": "assistant", "content": answer}]
        written = "" if template is False else tokenizer.apply_chat_template(turns, tokenize=False)
    behind = tokenizer(written.rpartition(answer)[2], add_special_tokens=False)["input_ids"]
    ordered = list(dict.fromkeys([*(token for token in behind if token in ends), *ends]))
    return ordered, ordered[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def plain_generation(model: Any, ends: list[int], padding: int) -> None:
    """Drop a model's own temperature, cuts and penalties, which a replay would not apply."""
    from transformers import GenerationConfig

    if getattr(model, "generation_config", None) is None:
        return
    own = getattr(model.generation_config, "generation_kwargs", None)  # how a model draws images
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=padding,
                                               bos_token_id=model.generation_config.bos_token_id,
                                               **({"generation_kwargs": own} if own else {}))


def cache_name(decoder: Any) -> str:
    """The name of the cache in a decoder's arguments and outputs: transformers renames it to `cache`, and drops
    `past_key_values` in 5.40."""
    return "cache" if "cache" in inspect.signature(type(decoder).forward).parameters else "past_key_values"
