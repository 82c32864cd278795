"""Device memory of a language model's run per phase: weights, trained parameters, cache, measured activations."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from flowgrpo.config.geometry import geometry
from flowgrpo.config.schema import Config
from flowgrpo.text.policies.causal_lm import CausalLM
from flowgrpo.text.policies.image_lm import DECODED, ImageLM
from flowgrpo.text.policies.masked_lm import MaskedLM
from flowgrpo.text.policies.text_weights import cache_name
from flowgrpo.text.samplers.language_model import TokenizedPrompts
from flowgrpo.training.memory import FULL, activation_bytes, averages, tensor_bytes

SHORT, LONG = 4, 12  # tokens of the measured completions
CHUNK = 1024  # tokens whose logits are held at once (tokens.score)


def memory(policy: CausalLM, config: Config, conditioning: TokenizedPrompts, rewards: int = 0
           ) -> dict[str, dict[str, int]]:
    """Bytes on the device, by phase and part, for one process of the run `config`, with prompts like the first of
    `conditioning` and completions of `text.max_tokens`. Phases: rollout, update.
    rewards: bytes of reward models on the device, among them a pipeline that draws for `pictured`; with
    `memory.rewards: cpu` they are there in the rollout alone.

    The rollout draws `train.generation_batch` completions at once; a run that is out of memory draws fewer. Cache and
    activations are measured on short completions and grow linearly with the length. Attention that keeps a square of
    the length needs more; a prompt prefix shared by a group needs less. Temporary memory of kernels is not counted.
    """
    trained_ids = {id(parameter) for parameter in policy.weights.parameters()}
    frozen = [tensor for tensor in [*policy.model.parameters(), *policy.model.buffers()]
              if id(tensor) not in trained_ids]
    trained = sum(parameter.numel() for parameter in policy.weights.parameters()) * FULL
    held = {"model": tensor_bytes(frozen), "trained": trained} | averages(config, policy, trained)
    shape, row = geometry(config.train), conditioning.rows(torch.tensor([0]))
    rows, together = shape.micro_batch, min(shape.generation_batch, shape.samples)
    evaluations = policy.evaluations
    masked = isinstance(policy, MaskedLM)
    most = policy.grid if isinstance(policy, ImageLM) else config.text.max_tokens
    drawn = together * policy.rows_drawn
    cache = {} if masked else {"cache": drawn * _at(most, lambda length: _cache(policy, row, length))}
    if isinstance(policy, ImageLM):
        cache["decoder"] = min(together, DECODED) * _decoder(policy)
    activations = rows * _at(most, lambda length: _activations(policy, row, length))
    moments = {"adamw": 2 * trained, "adamw8bit": trained // 2}[config.train.optimizer]
    update = {"gradients and optimizer": trained + moments, "activations": activations}
    if not masked:  # a masked model's activations include its logits
        update["logits"] = 2 * 4 * policy.choices * min(rows * most, CHUNK)  # in fp32, before and after
    policy.evaluations = evaluations
    scoring = {"reward models": rewards} if rewards else {}
    staying = scoring if config.memory.rewards == "keep" else {}
    return {"rollout": held | cache | scoring, "update": held | update | staying}


def _at(most: int, size: Callable[[int], int]) -> int:
    short, long = size(SHORT), size(LONG)
    return short + (long - short) * (most - SHORT) // (LONG - SHORT)


def _tokens(policy: CausalLM, row: TokenizedPrompts, length: int) -> torch.Tensor:
    token = policy.mask if isinstance(policy, MaskedLM) else int(policy.probe(row)[-1])
    return torch.full((1, length), token, device=policy.device)


def _activations(policy: CausalLM, row: TokenizedPrompts, length: int) -> int:
    ids = _tokens(policy, row, length)
    with policy._arithmetic():
        if isinstance(policy, MaskedLM):
            prompts = policy._together(row, torch.tensor([0]))
            return activation_bytes([policy.model], lambda: policy._logits(prompts, ids))
        return activation_bytes([policy.model], lambda: policy.states_before(row, ids))


@torch.no_grad()
def _decoder(policy: ImageLM) -> int:
    """Bytes that decoding one image holds at once, at most: input and output of its largest layer, twice for the branch
    beside it."""
    sizes: list[int] = []

    def measure(_module: torch.nn.Module, given: Any, made: Any) -> None:
        sizes.append(tensor_bytes(value for value in (*given, made) if torch.is_tensor(value)))

    with ExitStack() as hooks:
        for module in policy.model.model.vqmodel.modules():
            if not [*module.children()]:
                hooks.enter_context(module.register_forward_hook(measure))
        policy.decode(torch.full((1, policy.grid), policy.first))
    return 2 * max(sizes)


@torch.no_grad()
def _cache(policy: CausalLM, row: TokenizedPrompts, length: int) -> int:
    """Bytes of one row's keys and values; 0 for a model that stores them in another form."""
    inputs, _ = policy._concatenate(row, _tokens(policy, row, length + 1))
    with policy._arithmetic():
        outputs = policy.body(**policy.read(inputs), use_cache=True, **policy._beside(row, inputs.shape[1]))
    layers = getattr(getattr(outputs, cache_name(policy.body), None), "layers", ())
    tensors = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    return tensor_bytes(tensor for tensor in tensors if torch.is_tensor(tensor))
