"""LoRA of a finished run as its files hold it: tensors by module, and each part's peft configuration."""

from pathlib import Path
from typing import Any

import torch

from flowgrpo.errors import UserError
from flowgrpo.files import tensors_of
from flowgrpo.policies.pipelines import edits
from flowgrpo.policies.weights import adapters
from flowgrpo.policies.weights.lora_files import LORA_FILE, below

Parts = dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]]
WRITTEN = "expected a file that `flowgrpo train` wrote"


def read(run: Path) -> Parts:
    """Run's LoRA by part: tensors by module, and the peft configuration.

    Reads diffusers' file, the second expert's separate file, or peft's file where diffusers has no loader.
    Raises UserError for a run without a LoRA, for weights that are not finite, and for a file that does not state its
    alpha.
    """
    parts = _stock(run / LORA_FILE) if (run / LORA_FILE).is_file() else {}
    for file in below(run, LORA_FILE):
        stock = _stock(file)
        if len(stock) != 1:
            raise UserError(f"{file} holds the LoRAs of {', '.join(stock)}, expected those of one part")
        [parts[file.parent.name]] = stock.values()
    for file in below(run, adapters.CONFIG):
        parts[file.parent.name] = tensors_of(file.with_name(adapters.WEIGHTS))[0], _of_peft(file)
    for tensors, _ in parts.values():
        adapters.require_read(run, tensors)
    if (run / adapters.CONFIG).is_file():
        raise UserError(f"the LoRA of {run} is of a language model, which ComfyUI does not load: use --form merged, or "
                        "the folder as it is with peft")
    if not parts:
        why = "it holds an edit policy, which no stock pipeline loads" if (run / edits.FILE).is_file() else \
            "a run with adapter.rank 0 has whole weights, which need no export"
        raise UserError(f"no LoRA in {run}: {why}")
    return parts


def describe_rank(run: Path) -> str:
    """Rank and alpha of a run's LoRA as its files have them, such as "rank 16, alpha 16"; empty without one.

    Raises UserError for a file that does not state them.
    """
    stock = [run / LORA_FILE, *below(run, LORA_FILE)]
    found = [adapter for file in stock if file.is_file() for _, adapter in _stock(file).values()]
    found += [_of_peft(file) for file in (run / adapters.CONFIG, *below(run, adapters.CONFIG))
              if file.is_file()]
    kinds = {"use_rslora": ", rsLoRA", "use_dora": ", DoRA"}
    return "; ".join(dict.fromkeys(
        f"rank {adapter.get('r', 'unknown')}, alpha {adapter['lora_alpha']:g}" + "".join(
            text for key, text in kinds.items() if adapter.get(key)) for adapter in found))


def scale(adapter: dict[str, Any], layer: str, rank: int) -> float:
    """Scale of a layer: alpha / rank, or alpha / sqrt(rank) for rsLoRA (2312.03732)."""
    from peft.utils.other import get_pattern_key

    own: dict[str, float] = adapter.get("alpha_pattern") or {}
    alpha = own.get(get_pattern_key([*own], layer)) or adapter["lora_alpha"]
    return alpha / (rank ** 0.5 if adapter.get("use_rslora") else rank)


def _stock(file: Path) -> Parts:
    tensors, metadata = tensors_of(file)
    said = adapters.said_of(file, metadata, whole=False)
    parts = dict.fromkeys(key.partition(".")[0] for key in tensors)
    loras: dict[str, Any] = {part: tuple({key.removeprefix(f"{part}."): value for key, value in those.items()
                             if key.startswith(f"{part}.")} for those in (tensors, said)) for part in parts}
    for _, adapter in loras.values():
        _require_scale(file, adapter)
    return loras


def _of_peft(file: Path) -> dict[str, Any]:
    return _require_scale(file, adapters.said_of(file.with_name(adapters.WEIGHTS), {}, whole=False))


def _require_scale(file: Path, adapter: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(adapter.get("lora_alpha"), (int, float)):
        raise UserError(f"{file} does not say its alpha: {WRITTEN}")
    return adapter
