"""Report of `flowgrpo check`.

Keys of a pipeline, None where the check did not come that far:
- model; supported: None for a diffusers class without a tiny instance, and if memory ran out; reason: one line, if
  not supported; precision: with the reason if it is chosen.
- pipeline, scheduler, prediction, few_steps (why it is taken for a model of few steps, whose card has steps and
  guidance), weights (GiB of all parts), denoisers, parameters, lora_parameters, lora_targets;
  lora_loader: the function that loads each trained module's LoRA into the stock pipeline.
- conditioning (arguments that differ between prompts), prompts_per_call, guidance.
- At the recipe's guidance: timesteps_per_call (`train.pack` works), sample_shape, latent_shape; replay_error:
  largest difference of a transition's mean between rollout and replay; first_log_ratio: largest |log ratio| of the
  replay, which has to be 0; lora_grad: norm of the adapter's gradient; gradient_error: relative error of a finite
  difference along the gradient, in fp32, not for a DoRA.
- memory: GiB by phase, for the recipe, see training/memory.py; memory_parts: GiB by part, of the update.
- evaluations_per_sample, evaluations_per_sample_shared: of a rollout of the recipe's first epoch, without and
  with shared prefixes, guidance included. Without a recipe: mix_grpo, 10 steps, 12 images per prompt, averaged
  over the window's places; of a model of few steps its own defaults.
- rewards: GiB of the weights of each reward of the recipe, and their device; leaves_device: what leaves the device
  while it has nothing to do (`memory`).
- notes: facts that the recipe's options leave unknown.

Additional keys of a language model: kind, class, tokenizer, vocabulary, chat_template (present or not), end_tokens,
pad_token; prompt_tokens, completion_tokens: of a prompt and the longest of its two completions; trained_parameters
if all are trained; unless masked: shared_prefix (a group's prompt is read once; otherwise "no" with the reason) and
head_alone (logits are the head's, so only those of sampled tokens are computed). code_boundary: boundaries on this
machine for the reward `code_run`, or why there is none.
"""

from pathlib import Path
from typing import Any

import torch

from flowgrpo import hub
from flowgrpo.config.schema import Config
from flowgrpo.device import matmul_precision, ran_out
from flowgrpo.errors import UserError
from flowgrpo.policies import build, sources
from flowgrpo.starter import FOLDERS
from flowgrpo.tools.check import tiny
from flowgrpo.tools.check.loading import Unknown
from flowgrpo.tools.check.pipelines import drive

# Reported fields of a pipeline; `language.FIELDS` are those of a language model.
FIELDS = ("precision", "pipeline", "scheduler", "prediction", "weights", "few_steps", "denoisers", "parameters",
          "lora_parameters", "lora_targets", "lora_loader", "conditioning", "prompts_per_call", "guidance",
          "timesteps_per_call", "sample_shape", "latent_shape", "replay_error", "first_log_ratio", "lora_grad",
          "gradient_error", "memory", "memory_parts", "rewards", "leaves_device", "evaluations_per_sample",
          "evaluations_per_sample_shared", "notes")


def report(model: str | tuple[Any, Any], config: Config | None = None, device: str | None = None) -> dict[str, Any]:
    """Drive `model` through a rollout, a replay and a gradient, and return the report.

    model: `starter`, a directory, a hub id, the name of a diffusers or transformers class (a tiny random instance is
    built), a loaded (pipeline, arguments of its call), or a loaded (language model, tokenizer or processor).
    config: a recipe, for the pipeline's arguments, adapter, precision, guidance, checkpointing and memory estimate.
    None: the defaults, in fp32.
    device: cpu, cuda, or None for cuda if present.
    Raises UserError if the device is absent.
    The keys of the report are those of the module's docstring.
    """
    named = model if isinstance(model, str) else type(model[0]).__name__
    result: dict[str, Any] = {"model": named, "supported": False, "reason": None}
    fields: tuple[str, ...] = FIELDS
    present = ["cuda"] * torch.cuda.is_available() + ["cpu"]
    if device and device not in present:
        raise UserError(f"--device is {device!r}, but the check runs on {' or '.join(present)} here: take one of these")
    device = device or present[0]
    try:
        with torch.random.fork_rng(), matmul_precision("fp32", device):
            # A language model: a loaded one, the name of a transformers class or family, a folder or a hub id.
            text = hasattr(model[0], "get_input_embeddings") if not isinstance(model, str) else \
                not model.endswith("Pipeline") and (tiny.is_language_model(model) or build.writes(model))
            if text:
                from flowgrpo.text.rewards.sandbox.choose import describe_boundary as boundaries
                from flowgrpo.tools.check import language as language

                fields = language.FIELDS
                result["code_boundary"] = boundaries()
                language.drive(model, config, device, result)
            else:
                drive(model, config, device, result)
        result |= {"supported": True, "notes": _notes(config) or None}
    except (Unknown, hub.Unreachable) as error:
        result |= {"supported": None, "reason": str(error)}
    except Exception as error:  # third-party pipelines can raise anything; the error is the answer
        message = " ".join(str(error).split()) or "no message"
        if ran_out(error):
            weights = f", where the weights alone take {result['weights']} GiB" if "weights" in result else ""
            options = "" if "kind" in result else ", memory.weights: int8, memory.encoders: cpu, smaller images"
            result |= {"supported": None, "reason": (
                f"memory ran out on {device}{weights}, so that nothing is known: give a --recipe with precision: bf16, "
                f"train.checkpointing, train.micro_batch: 1{options}, or take "
                + ("--device cpu" if device == "cuda" else "a machine with more"))}
        else:
            result["reason"] = message if isinstance(error, UserError) else f"{type(error).__name__}: {message}"
    return dict.fromkeys((*result, *fields)) | result


def of_class(model: str) -> bool:
    """True for the name of a class of which a tiny random instance is made."""
    return model not in FOLDERS and not Path(model).exists() and (
        model in tiny.factories() or tiny.is_language_model(model))


def _notes(config: Config | None) -> list[str]:
    if config is None:
        return []
    untold = {"the gradient's error is left out: with adapter.dora peft holds the norms of the weights constant in the "
              "backward": config.adapter.dora,
              "memory is of one process that holds all weights: memory.shard leaves each its share of the denoisers":
              config.memory.shard}
    notes = [note for note, applies in untold.items() if applies]
    if config.load.lora or config.load.denoiser is not None:
        notes.append(f"the LoRA's base is {sources.base(config.model, config.load)}")
    return notes
