"""Check that a language model can be trained: sample, replay and differentiate a few tokens."""

import itertools
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image

from flowgrpo.config.geometry import geometry
from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.device import DTYPES
from flowgrpo.distributed.processes import Processes
from flowgrpo.log import PhaseTimer
from flowgrpo.policies import build, options
from flowgrpo.policies.policy import resolve_precision
from flowgrpo.samplers.rollout import Part
from flowgrpo.text import memory as text_memory
from flowgrpo.text.policies import kinds
from flowgrpo.text.policies.causal_lm import CausalLM
from flowgrpo.text.rollouts.recorded import make_rollouts
from flowgrpo.text.samplers.language_model import TokenizedPrompts
from flowgrpo.tools.check import replays, tiny
from flowgrpo.training import memory
from flowgrpo.types import Completions, Scored

PROMPT, TOKENS, GROUP = "1+2=", 8, 2
KINDS = {build.CAUSAL_LM: "causal language model", build.VISION_LM: "language model that reads images",
         build.MASKED_LM: "masked language model", build.IMAGE_TOKENS: "language model that draws images"}
# Reported fields of a language model.
FIELDS = ("precision", "kind", "class", "weights", "tokenizer", "vocabulary", "chat_template", "end_tokens",
          "pad_token", "parameters", "trained_parameters", "lora_parameters", "lora_targets", "prompt_tokens",
          "shared_prefix", "head_alone", "completion_tokens", "first_log_ratio", "lora_grad", "gradient_error",
          "memory", "memory_parts", "rewards", "leaves_device", "code_boundary", "notes")


def drive(model: str | tuple[Any, Any], recipe: Config | None, device: str, result: dict[str, Any]) -> None:
    """Fill `result` step by step (fields: `report.report`). Raises the error that stops the model."""
    config = recipe or Config(method="grpo", precision="fp32", adapter={"rank": replays.RANK})
    config = config.model_copy(update={"preferences": None, "labels": "file"})  # a check draws its samples
    config, precision = resolve_precision(config, device, None if isinstance(model, str) else model)
    config = config.model_copy(update={"model": model if isinstance(model, str) else type(model[0]).__name__})
    if not isinstance(model, str):
        loaded = model
    elif not tiny.is_language_model(model) or Path(model).exists():
        loaded = kinds.load(config)
    else:
        network, reader = tiny.make_language_model(model)
        loaded = network.to(DTYPES[config.precision]), reader  # type: ignore[arg-type]  # its decorator has no types
    kind = build.kind(config, loaded)
    result |= {"precision": precision, "kind": KINDS[kind], "class": type(loaded[0]).__name__,
               "weights": memory.weights_gib(loaded)}
    replays.require_whole({"model": loaded[0]})
    method = options.check_method(config, kind, device)
    # A policy of two short completions: what a report says of it needs no more.
    torch.manual_seed(0)  # initial adapter weights, so that a report is repeatable
    policy = kinds.make_policy(_brief(config), loaded, config.adapter, device)
    result |= _reader(policy) | _sizes(policy, config)
    # The processor takes more than a file.
    image: Any = Image.linear_gradient("L").resize((64, 64)).convert("RGB") if kind == build.VISION_LM else None
    first = Prompt(PROMPT, image=image)
    rollouts = make_rollouts(_brief(config), policy, method, geometry(_brief(config).train), Processes(), PhaseTimer(),
                             first)
    conditioning = rollouts.conditioning([first])
    result["prompt_tokens"] = len(conditioning.ids[0])
    if kind != build.MASKED_LM:
        apart = policy.reason_not_shared(conditioning)
        result |= {"shared_prefix": f"no: {apart}" if apart else True, "head_alone": policy.head_alone(conditioning)}
    judge: Any = None  # nothing is scored
    [(part, _)] = rollouts.sample(conditioning, 0, judge)
    [taken] = part.transitions
    result |= {"completion_tokens": int(taken.old.mask.sum(1).max()), "first_log_ratio": 0.0}
    for _, rows, new in rollouts.replay(part, conditioning):
        off = (new.logp - taken.old.logp[rows].to(new.logp.device)).abs().max().item()
        result["first_log_ratio"] = max(result["first_log_ratio"], off)
        (new.logp * new.mask).sum().backward()
    replays.require_equal(policy.exact, result)
    result["lora_grad"] = replays.gradient_norm([policy.model], policy.weights)
    if policy.dtype == torch.float32 and not config.adapter.dora:
        given = _with_prompt_tokens(policy, part, conditioning)
        replays.check_gradient(lambda: torch.cat([
            new.logp.double().square().mean(1) for *_, new in rollouts.replay(given, conditioning)]).mean(),
            policy.weights, result)
    with TemporaryDirectory() as folder:
        policy.weights.save(Path(folder))  # reads the file back and raises if it differs
    result |= memory.memory_entries(recipe, config, policy.device, lambda held: text_memory.memory(
        policy, config, conditioning, held))


def _brief(config: Config) -> Config:
    return config.having({"text.max_tokens": TOKENS, "text.truncated": "keep", "train.prompts": 1,
                          "train.group": GROUP, "train.micro_batch": GROUP, "train.updates": 1})


def _reader(policy: CausalLM) -> dict[str, Any]:
    reader, tokens = policy.tokenizer, policy.tokenizer.convert_ids_to_tokens
    pads = reader.pad_token_id is not None
    template = getattr(getattr(policy, "processor", None), "chat_template", None)  # only a processor may have one
    return {"tokenizer": type(reader).__name__, "vocabulary": len(reader),
            "chat_template": bool(template or getattr(reader, "chat_template", None)),
            "end_tokens": [f"{token} ({number})" for token, number in zip(tokens(policy.ends), policy.ends)],
            "pad_token": f"{tokens(policy.padding)} ({policy.padding})" + ("" if pads else ", the end's: it has none")}


def _sizes(policy: CausalLM, config: Config) -> dict[str, Any]:
    names = {key.split(".lora_")[0] for key in policy.weights.named}
    added = sum(parameter.numel() for parameter in policy.weights.parameters())
    total = sum(parameter.numel() for parameter in policy.model.parameters())
    if not config.adapter.rank:
        return {"parameters": total, "trained_parameters": added}
    return {"parameters": total - added, "lora_parameters": added,
            "lora_targets": sorted({name.rpartition(".")[2] for name in names})}


def _with_prompt_tokens(policy: CausalLM, part: Part, conditioning: TokenizedPrompts) -> Part:
    """Part with the prompt's text, or a few image tokens, repeated, in place of the sampled tokens. If a model is sure
    of its own tokens, log-probabilities of 0 say nothing about their gradient."""
    [taken] = part.transitions
    assert isinstance(taken, Completions)
    text = itertools.cycle(policy.tokenizer(PROMPT, add_special_tokens=False)["input_ids"] if policy.modality == "text"
                           else policy.probe(conditioning).tolist())
    ids = torch.tensor([list(itertools.islice(text, taken.ids.shape[1]))]).expand_as(taken.ids).contiguous()
    old = Scored(torch.zeros(ids.shape), torch.ones_like(ids, dtype=torch.bool))
    return replace(part, transitions=(replace(taken, ids=ids, old=old),))
