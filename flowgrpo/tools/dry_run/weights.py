"""Weights on a pretended GPU: a policy's, as a recipe stores them, shares them out, and sends text encoders away; and
bytes of the reward models that stay there."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch

from flowgrpo.config.schema import Config
from flowgrpo.config.sections import Memory
from flowgrpo.device import DTYPES
from flowgrpo.errors import UserError
from flowgrpo.policies.weights.forwards import blocks
from flowgrpo.rewards.find import locate
from flowgrpo.rewards.local_model import LocalModel
from flowgrpo.tools.dry_run.meta_gpu import MetaGPU

STORED = {"full": 1.0, "int8": 0.5, "fp8": 0.5, "nf4": 0.28}  # bytes of a linear layer's weight, as a share of two


def hold(meta: MetaGPU, policy: Any, memory: Memory, processes: int) -> Any:
    """Count a policy's weights; return its text encoders, which come and go without copies. processes: over which
    `memory.shard` shares weights of the denoisers."""
    encoders, turns, ahead = policy.encoders, memory.denoiser == "cpu", memory.encoders == "ahead"
    stored, count = STORED[memory.weights], processes if memory.shard else 1
    # Weights that wait on the host take room only while their block is computed.
    if memory.offload != "none":
        for module in policy.denoisers.values():
            for block in blocks(module):  # of what waits on the host, the largest that comes at a time: a whole block
                meta.hold(_frozen_tensors([block]), 0.0)
                meta.spare = max(meta.spare, round(stored * _bytes(_frozen_tensors([block]))))
    if count > 1 and not policy.weights.adapter.rank:
        _shard_trained(meta, policy, count)
    for module in policy.denoisers.values():
        _hold_denoiser(meta, module, stored, count)
    parts = [part for part in policy.pipe.components.values() if isinstance(part, torch.nn.Module)]
    meta.hold(_tensors(part for part in parts if encoders.here or part not in encoders.modules))

    # Encoders come and go as a run moves them; with `ahead` nothing else is on the device beside them.
    others = _tensors(part for part in parts if part not in [*encoders.modules, *policy.denoisers.values()])

    def load() -> None:
        if not encoders.here:
            tensors = _tensors(encoders.modules)
            if turns or ahead:
                meta.drop(_frozen_tensors(policy.denoisers.values()))
            if ahead:
                meta.drop(others)
            meta.hold(tensors)
            meta.bus(_bytes(tensors), fixed=True)
            encoders.here = True

    def leave() -> None:
        if encoders.here and encoders.away is not None:
            meta.drop(_tensors(encoders.modules))
            encoders.here = False
            if turns or ahead:
                for module in policy.denoisers.values():
                    _hold_denoiser(meta, module, stored, count)
                meta.hold([*_frozen_tensors(policy.denoisers.values()), *(others if ahead else [])])
            if turns:
                meta.bus(round(stored * _bytes(_frozen_tensors(policy.denoisers.values()))), fixed=True)

    encoders.load, encoders.offload = load, leave
    return encoders


def _hold_denoiser(meta: MetaGPU, module: torch.nn.Module, stored: float, processes: int) -> None:
    """Count a denoiser's frozen weights: linear layers as they are stored, and all of them shared over processes. A
    quantised layer is restored for its product, and two shared blocks are collected at a time."""
    linear = [part.weight for key, part in module.named_modules()
              if isinstance(part, torch.nn.Linear) and "lora_" not in key]
    if stored < 1:
        meta.hold(linear, stored / processes)
        meta.spare = max(meta.spare, *(_bytes([weight]) for weight in linear))
    if processes > 1:
        blocks = [block for part in module.modules() if isinstance(part, torch.nn.ModuleList) for block in part]
        meta.hold((p for p in module.parameters() if not p.requires_grad), 1 / processes)
        meta.spare = max(meta.spare, *(round(2 * stored * _bytes(_tensors([block]))) for block in blocks))


def _shard_trained(meta: MetaGPU, policy: Any, processes: int) -> None:
    """Count trained weights, and what is made of them, as shards in fp32; the tensors are as they are collected. Two
    blocks are collected at a time. The gradients of one wait for their sum, which is in fp32."""
    weights = policy.weights
    for parameter in weights.parameters():
        parameter.data = parameter.data.to(policy.dtype)
        parameter.register_post_accumulate_grad_hook(lambda summed: meta.shard([summed.grad]))
    meta.part = torch.float32.itemsize / policy.dtype.itemsize / processes
    meta.shard(weights.parameters())
    for block in (block for module in policy.denoisers.values() for block in blocks(module)):
        meta.spare = max(meta.spare, 3 * _bytes(_tensors([block])) + 4 * sum(p.numel() for p in block.parameters()))
    weights.copies = meta.sharding()(weights.copies)  # each call enters the context


def _frozen_tensors(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    return [tensor for tensor in _tensors(modules) if not tensor.requires_grad]


def _tensors(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def reward_bytes(config: Config) -> float:
    """Bytes of a recipe's rewards, trained and measured; a model that several of them use counts once each."""
    rules = config.trained | config.extra_rewards
    names = {inner for name, rule in rules.items() for inner in (rule.use or name, *_inner(rule.args))}
    return sum(map(_bytes_of, names))


def _bytes_of(name: str) -> float:
    """Bytes of a reward's default checkpoint in its default dtype; 0 for a reward without one."""
    try:
        thing = locate(name)
    except UserError:
        return 0
    if not (inspect.isclass(thing) and issubclass(thing, LocalModel) and thing.parameters is not None):
        return 0
    return thing.parameters * DTYPES[inspect.signature(thing).parameters["dtype"].default].itemsize


def _inner(value: Any) -> Iterable[str]:
    """Yield the rewards that a reward's arguments name."""
    if isinstance(value, dict):
        named = [value.get("reward"), value.get("use")]
        listed = value.get("rewards")
        yield from (name for name in (*named, *(listed if isinstance(listed, list) else ())) if isinstance(name, str))
        value = [*value.values()]
    for inner in value if isinstance(value, list) else ():
        yield from _inner(inner)
