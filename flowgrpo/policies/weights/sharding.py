"""Sharding of a denoiser's weights over the processes, by FSDP2 (torch.distributed.fsdp.fully_shard).

Every process holds a part of each block and collects the rest while the block runs. Frozen weights stay in their
precision. A LoRA is not sharded. It is small, in fp32 over weights of any precision, and whole on every process. So its
gradients, averages, snapshots and files are those of an unsharded run.

Trained weights (`adapter.rank: 0`) are sharded in fp32, as are their gradients, moments, averages and snapshots. Blocks
are collected in the run's precision, and gradients are summed in fp32.

A block can be collected only if all processes run it. A process with less to replay runs an extra row with the others
and discards its output: `Lockstep`.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flowgrpo.device import free_memory
from flowgrpo.distributed.gradients import GradientSum
from flowgrpo.distributed.processes import Processes
from flowgrpo.distributed.shards import is_shard, local
from flowgrpo.errors import UserError
from flowgrpo.methods.setup import Setup, require_compatible
from flowgrpo.methods.targets import JointDensity, LatentEdits, RewardGradient
from flowgrpo.policies.weights.forwards import blocks

NODES = "nodes"  # the value of memory.shard that shards within each node
MOST = 0.9  # share of the memory that whole gradients may fill


def check(setup: Setup) -> None:
    """Raise UserError if weights are to be sharded, but not by the run's processes."""
    shard, count = setup.config.memory.shard, setup.all_processes
    if shard and count == 1:
        raise UserError(f"memory.shard is {str(shard).lower()}, but the run has one process: launch several "
                        "(accelerate launch --multi_gpu --num_processes N -m flowgrpo train RECIPE), or use "
                        "memory.shard: false")
    if shard == NODES:
        of_node(count, os.environ)


def require_shardable(setup: Setup) -> None:
    """Raise UserError for options that conflict with `memory.shard`."""
    config, method = setup.config, setup.method
    if not config.memory.shard:
        return
    preview = method.rollout.preview.precision if method.rollout.preview else "full"
    trained, setting = not config.adapter.rank, f"memory.shard is {str(config.memory.shard).lower()}"
    wrong = {"adapter.rank: 0 and train.optimizer: adamw8bit, which takes no shards: use adamw":
             trained and config.train.optimizer == "adamw8bit",
             "adapter.rank: 0 and precision: fp16: use bf16, or set a rank": trained and config.precision == "fp16",
             f"memory.weights: {config.memory.weights}, whose packed weights are not sharded: use full":
             config.memory.weights != "full",
             f"load.denoiser: {config.load.denoiser}, whose packed weights are not sharded: use a .safetensors file":
             config.load.gguf,
             f"parts.preview.precision: {preview}: use full": preview != "full",
             "adapter.dora, which reads whole weights: use false": config.adapter.dora,
             "train.compile: use false": config.train.compile,
             f"method {config.method}, whose graph has many steps: use another":
             isinstance(method.target, (JointDensity, RewardGradient)),
             f"method {config.method}, which trains nothing of the pipeline: use another":
             isinstance(method.target, LatentEdits),
             "train.pack, whose replays are batched by what each process has: use false": config.train.pack,
             "cache, from which some processes would read what others compute: leave it out": config.cache is not None}
    require_compatible(setting, wrong, ", or memory.shard: false")


def of_node(count: int, environment: Mapping[str, str]) -> int:
    """Number of processes of each node, from the launcher's LOCAL_WORLD_SIZE; count: of all nodes. UserError if nodes
    differ in it, or have one process each."""
    size = int(environment.get("LOCAL_WORLD_SIZE", count))
    if size < 2 or count % size:
        raise UserError(f"memory.shard is nodes, but of {count} processes this node has {size} (LOCAL_WORLD_SIZE): "
                        "expected two or more, and as many on every node; memory.shard: true shards over all processes")
    return size


def mesh(shard: bool | str, device: torch.device) -> DeviceMesh | None:
    """Mesh of processes over which weights are sharded, [processes], or with `nodes` [nodes, processes of a node],
    along the first of which shards are copied; None if they are not."""
    if not shard or not distributed.is_available() or not distributed.is_initialized() or \
            (count := distributed.get_world_size()) == 1:
        return None
    size = of_node(count, os.environ) if shard == NODES else count
    if size == count:
        return init_device_mesh(device.type, (count,))
    return init_device_mesh(device.type, (count // size, size), mesh_dim_names=("node", "process"))


def shard(module: torch.nn.Module, over: DeviceMesh, device: torch.device, whole: Iterable[torch.nn.Parameter],
          precision: torch.dtype) -> None:
    """Shard the weights of a denoiser in place, block by block, except those in `whole`; all of it moves to the device.

    Trained weights become fp32, block by block, and are collected in `precision`. Also left whole: scalars, and the
    weights of a block that are in another precision than most (norms that diffusers keeps in fp32), which older FSDP2
    cannot collect together.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    kept = set(whole) & set(module.parameters())
    trained = any(parameter.requires_grad for parameter in set(module.parameters()) - kept)
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(
        param_dtype=precision, reduce_dtype=torch.float32, cast_forward_inputs=False)} if trained else {}
    for part in [*blocks(module), module]:
        for tensor in (*part.parameters(), *part.buffers()) if trained else ():
            if tensor.is_floating_point() and tensor.dtype != torch.float32:
                tensor.data = tensor.data.float()
        kept |= _apart(part, kept)
        # Nothing stays collected between calls, not even the root: reading a state dict, as the saving process does
        # alone, frees it, and the next call would find it on some processes only.
        fully_shard(part, mesh=over, ignored_params=kept, reshard_after_forward=True, **options)
        if trained:  # gradients of all processes are added, not averaged: their losses have one divisor already
            sharded: Any = part
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_gradient_divide_factor(1.0)
    for parameter in kept:
        parameter.data = parameter.data.to(device)


class SumOnce(GradientSum):
    """Gradients of one sharded denoiser that stay whole until a step's last backward, where memory allows: each block
    is reduced once a step. A run's first step reduces all in every backward, and shows the memory that is left. So does
    one in which processes make different calls, of which some may have no last backward.
    """

    def __init__(self, processes: Processes, parameters: Sequence[torch.nn.Parameter], denoiser: torch.nn.Module):
        super().__init__(processes, parameters)
        self.denoiser: Any = denoiser
        self._reduces = True

    def before_backward(self, last: bool) -> None:
        lockstep, before = self.processes.lockstep, self._reduces
        self._reduces = last or not (self.once and lockstep is not None and lockstep.alike)
        if self._reduces != before:
            self.denoiser.set_requires_gradient_sync(self._reduces)

    def finish(self, log: Callable[[str], None]) -> None:
        assert self._reduces, "the last backward of a step was not known as such"
        super().finish(log)
        if self.once is not None:
            return
        device = self.processes.device
        # Whole gradients, and the two moments of AdamW that its first step makes.
        needed = 4 * sum(each.numel() + 2 * local(each).numel() for each in self.parameters if is_shard(each))
        free = MOST * free_memory(device) - (torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0)
        self.once = not self.processes.any(needed > free)
        if self.processes.first:
            log(f"memory.shard: gradients are reduced {'once per step' if self.once else 'in every backward'}: "
                f"whole ones take {needed / 2**30:.3g} GiB with the moments, of {max(free, 0) / 2**30:.3g} free")


def _apart(part: torch.nn.Module, kept: set[torch.nn.Parameter]) -> set[torch.nn.Parameter]:
    """Weights of a part that cannot be collected with its others."""
    left = {parameter for parameter in part.parameters() if parameter not in kept and not is_shard(parameter)}
    values: Counter[torch.dtype] = Counter()
    for parameter in left:
        values[parameter.dtype] += parameter.numel()
    most = max(values, key=values.__getitem__, default=None)
    return {parameter for parameter in left if parameter.ndim == 0 or parameter.dtype != most}


def state_dict(module: torch.nn.Module, keep: bool) -> dict[str, torch.Tensor]:
    """Whole weights of a sharded module on the CPU, collected one by one; every process calls it, and those with `keep`
    get them."""
    values: dict[str, torch.Tensor] = {}
    for key, tensor in module.state_dict().items():
        value = tensor.full_tensor() if is_shard(tensor) else tensor
        if keep:
            values[key] = value.detach().cpu()
    return values


def twin(module: Any, values: dict[str, torch.Tensor]) -> Any:
    """Unsharded module of diffusers with the same configuration as a sharded one, and these weights."""
    from accelerate import init_empty_weights
    from torch.distributed.fsdp import FSDPModule

    kind: Any = next(base for base in type(module).__mro__[1:] if base is not FSDPModule)
    with init_empty_weights():
        made = kind.from_config(module.config)
    made.load_state_dict(values, assign=True)
    return made
