"""Device memory of a run per phase: weights, trained parameters, recorded states, and measured activations. Weights of
a recipe's rewards: bytes, device, and whether they leave it between scorings.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flowgrpo.config import features
from flowgrpo.config.geometry import geometry
from flowgrpo.config.schema import Config
from flowgrpo.errors import UserError
from flowgrpo.methods import validate
from flowgrpo.methods.method import Method
from flowgrpo.policies.pipelines.conditioning import Conditioning
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.pipelines.probes import few_steps
from flowgrpo.policies.policy import Policy
from flowgrpo.policies.weights.forwards import blocks, modules_of
from flowgrpo.rewards.about import lazily
from flowgrpo.rewards.failures import relabel_errors
from flowgrpo.rewards.find import find
from flowgrpo.rewards.placement import weight_bytes
from flowgrpo.samplers.grids import make_grid
from flowgrpo.samplers.rollout import RolloutSpec
from flowgrpo.samplers.scheduler import Segment

FULL = 4  # bytes of a trained value, which is in fp32


@dataclass(frozen=True, eq=False)
class Measured:
    """Run whose memory is counted.

    recorded: bytes of what an epoch's rollout keeps on the device. activations: bytes that the replay of one row keeps
    for its backward.
    """

    policy: PipelinePolicy
    config: Config
    conditioning: Conditioning
    recorded: int
    activations: int


def memory(policy: PipelinePolicy, config: Config, conditioning: Conditioning, rewards: int = 0
           ) -> dict[str, dict[str, int]]:
    """Bytes on the device, by phase and part, for one process of the run `config` with the policy's pipeline.

    conditioning: that of one prompt. rewards: bytes of reward models on the device; with `memory.rewards: cpu` they are
    there in rollout and decode alone, as one part is scored while the next is sampled.
    The whole pipeline is in every phase: encode, rollout, decode, update. But offloaded text encoders count only in
    encode, where a denoiser that makes room for them does not, offloaded recorded states in none, and of offloaded
    blocks the largest. A feature adds what it keeps (`config.features`).
    Activations are those that one row's forward keeps for the backward, times the micro-batch; decoding is the peak of
    one. Not counted: temporary memory of kernels, and the one block that checkpointing recomputes at a time.
    """
    trained = sum(p.numel() for p in policy.weights.parameters()) * FULL
    held = _weights(policy) | {"trained": trained} | averages(config, policy, trained)
    # One state [1,*D], and the bytes that a replay of one row keeps for its backward.
    grid, timesteps = few_steps(policy, 2)
    x, _ = policy.run(Segment(grid, range(1), timesteps=timesteps), conditioning, None, policy.generators([0]))
    activations = activation_bytes(modules_of(policy.pipe).values(),
                                   lambda: policy.replay(conditioning, x, grid, 1, timesteps))
    kept_here = policy.states == policy.device
    recorded = _rollout_bytes(policy, config, conditioning, x) if kept_here else 0
    states = {"recorded states": recorded}
    rows = geometry(config.train).micro_batch
    moments = {"adamw": 2 * trained, "adamw8bit": trained // 2}[config.train.optimizer]
    update = {"gradients and optimizer": trained + moments, "activations": activations * rows}
    prompt = tensor_bytes(tensor for tensor in tree_leaves(conditioning.calls) if torch.is_tensor(tensor))
    later = held | ({} if policy.encoders.away is None else {"text encoders": 0})
    later["prompt embeddings"] = prompt * (geometry(config.train).prompts + rows)  # of the batch, and of one call
    first = held | ({} if policy.encoders.beside is None else {"denoisers": 0})
    scoring = {"reward models": rewards} if rewards else {}
    staying = scoring if config.memory.rewards == "keep" else {}
    ahead = {"text encoders": held["text encoders"]} if config.memory.encoders == "ahead" else None
    phases = {"encode": first | staying if ahead is None else ahead, "rollout": later | states | scoring,
              "decode": later | states | scoring | {"decoding": _decoding(policy, conditioning, x, rows)},
              "update": later | states | staying | update}
    for feature in features.active_features(config, validate.resolve(config, policy.process)):
        if feature.memory:
            features.at(feature.memory)(phases, Measured(policy, config, conditioning, recorded, activations))
    return phases


def averages(config: Config, policy: Policy, trained: int) -> dict[str, int]:
    """Bytes of the averages of the trained weights on the device: `train.ema` and an old policy; {} for none.
    trained: bytes of those weights. Averages of large ones wait on the host."""
    lag = validate.resolve(config, policy.process).rollout.lag
    count = 0 if policy.weights.large else bool(config.train.ema) + bool(lag.most)
    return {"averages": count * trained} if count else {}


def total(phase: dict[str, int]) -> float:
    return round(sum(phase.values()) / 2**30, 3)


def weights_gib(parts: Iterable[object]) -> float:
    modules = [part for part in parts if isinstance(part, torch.nn.Module)]
    return total({"": tensor_bytes(tensor for part in modules for tensor in [*part.parameters(), *part.buffers()])})


def _weights(policy: PipelinePolicy) -> dict[str, int]:
    """Bytes of the frozen weights: text encoders, denoisers, VAE, and the rest."""
    trained = {id(parameter) for parameter in policy.weights.parameters()}
    sizes = {"text encoders": 0, "denoisers": 0, "vae": 0, "other": 0}

    def bytes_frozen(part: torch.nn.Module) -> int:
        return tensor_bytes(tensor for tensor in [*part.parameters(), *part.buffers()] if id(tensor) not in trained)

    for name, module in modules_of(policy.pipe).items():
        kind = "denoisers" if name in policy.denoisers else "vae" if "vae" in name or name == "vqgan" else \
            "text encoders" if name.startswith("text_encoder") else "other"
        offloads = policy.offloads and name in policy.denoisers
        parts = [bytes_frozen(block) for block in blocks(module)] if offloads else []
        sizes[kind] += bytes_frozen(module) - sum(parts) + max(parts, default=0)
    return sizes


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of tensors, quantised ones as stored."""
    return sum(part.numel() * part.element_size() for tensor in tensors for part in _storage_tensors(tensor))


def _storage_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The stored tensors: of a quantised one its integers and their scales."""
    if hasattr(tensor, "__tensor_flatten__"):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    scales = getattr(getattr(tensor, "quant_state", None), "absmax", None)
    return [tensor] if scales is None else [tensor, scales]


def activation_bytes(modules: Iterable[torch.nn.Module], forward: Callable[[], torch.Tensor]) -> int:
    """The bytes that `forward` keeps for its backward, without the modules' weights."""
    weights = {part.untyped_storage().data_ptr() for module in modules for p in module.parameters()
               for part in _storage_tensors(p)}
    sizes: dict[int, int] = {}
    alive: list[torch.Tensor] = []  # a freed storage would pass its address on

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()  # the graph would hold the tensor, and the tensor the graph
        for storage in (part.untyped_storage() for part in _storage_tensors(tensor)):
            if storage.data_ptr() not in weights:
                sizes[storage.data_ptr()] = storage.nbytes()
                alive.append(tensor.detach())
        return tensor.detach()  # a node that keeps its own output would never be freed

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(sizes.values())


def _decoding(policy: PipelinePolicy, conditioning: Conditioning, x: torch.Tensor, rows: int) -> int:
    """The peak bytes of decoding `rows` rows: those of one row, plus the increment of a second for each other."""
    def peak(count: int) -> int:
        latents, of = torch.cat([x] * count), conditioning.rows(torch.zeros(count, dtype=torch.int64))
        with Peak() as seen:
            policy.decode(latents, of)
        return seen.most

    one, two = peak(1), peak(2)
    return one + (two - one) * (rows - 1)


class Peak(TorchDispatchMode):
    """Context manager: `most` is the peak number of bytes of newly made tensors."""

    supports_higher_order_operators = True  # such as flex_attention

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True: torch.compile works inside."""
        return True

    def __init__(self):
        super().__init__()
        self.most, self._alive = 0, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_leaves(output) if torch.is_tensor(leaf)):
            for storage in (part.untyped_storage() for part in _storage_tensors(tensor)):
                if storage._cdata not in self._alive:
                    self._alive[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self._alive.pop, storage._cdata, None)
        self.most = max(self.most, sum(self._alive.values()))
        return output


def _rollout_bytes(policy: PipelinePolicy, config: Config, conditioning: Conditioning, x: torch.Tensor) -> int:
    """Bytes of what an epoch's rollout keeps: the states around every trained step and at the end, each in the dtype of
    x, one state, and fp32 means of the old policy if the loss reads them."""
    train, (method, grid, explorations) = config.train, plan_first_epoch(policy, config, conditioning)
    noised = method.noising_spec(grid, train.group, 0, config.seed)
    if noised is not None:  # states, targets, old velocities, and finals of the sampled part
        times = len(noised.schedule.trained)
        counts = [(train.group * (2 * times + 1), train.group * times * noised.keep_means)]
    else:
        counts = [_per_group(exploration) for exploration in explorations]
    return train.prompts * sum(states * tensor_bytes([x]) + means * 4 * x.numel() for states, means in counts)


def plan_first_epoch(policy: PipelinePolicy, config: Config, conditioning: Conditioning
             ) -> tuple[Method, torch.Tensor, list[RolloutSpec]]:
    """The method of a run, its grid, and its explorations in the first epoch."""
    train, method = config.train, validate.resolve(config, policy.process)
    grid, timesteps = make_grid(train.grid, train.steps, train.shift, policy.stock, policy.strength,
                                partial(policy.stock_grid, conditioning))
    return method, grid, method.explorations(grid, train.group, train.own_shift, 0, config.seed, timesteps)


def _per_group(exploration: RolloutSpec) -> tuple[int, int]:
    """The number of recorded states and means of one prompt; x_next of one step is x of the next."""
    nodes, count, means, before = exploration.roots, 0, 0, None
    for step in range(exploration.steps):
        children = exploration.splits.get(step, 1)
        if step in exploration.schedule.trained:
            count += nodes * (step - 1 != before) + nodes * children
            means += nodes * children * exploration.keep_means
            before = step
        nodes *= children
    return count + len(exploration.strides) * exploration.group * (before != exploration.steps - 1), means


# --- rewards ---------------------------------------------------------------------------------------------------------

def reward_weights(config: Config) -> dict[str, dict[str, int] | None]:
    """The bytes by device of each reward of a recipe that has weights; None for one that cannot be made here."""
    sizes: dict[str, dict[str, int] | None] = {}
    for label, rule in (config.trained | config.extra_rewards).items():
        try:
            with lazily(), relabel_errors(label, rule.use):
                reward = find(rule.use or label, rule.args)
            sizes[label] = weight_bytes(reward)
        except UserError:
            sizes[label] = None
    return {label: size for label, size in sizes.items() if size != {}}


def on_device(sizes: dict[str, dict[str, int] | None], device: torch.device) -> int:
    """The bytes of rewards on one device; a name without an index is its first."""
    def same(name: str) -> bool:
        other = torch.device(name)
        return other.type == device.type and (other.index or 0) == (device.index or 0)

    return sum(size for of in sizes.values() for name, size in (of or {}).items() if same(name))


def describe_rewards(sizes: dict[str, dict[str, int] | None], config: Config) -> dict[str, Any]:
    """The report's entry of each reward: GiB, and its device; "unknown" for one that cannot be made here."""
    away = config.memory.rewards == "cpu"
    return {label: "unknown" if of is None else ", ".join(
        f"{size / 2**30:.3f} GiB on {name}"
        + ", which it leaves after scoring" * (away and torch.device(name) != torch.device("cpu"))
        for name, size in of.items()) for label, of in sizes.items()}


def parts_that_leave(config: Config) -> list[str]:
    """Parts that leave the device while they have nothing to do."""
    room = config.memory
    parts = {"text encoders": room.encoders == "cpu", "recorded states": room.states == "cpu",
             "reward models": room.rewards == "cpu"}
    return [part for part, leaves in parts.items() if leaves]


def memory_entries(recipe: Config | None, config: Config, device: torch.device,
                   phases: Callable[[int], dict[str, dict[str, int]]]) -> dict[str, Any]:
    """The report's entries of memory and of reward models.
    recipe: None for a check without one, whose rewards do not count. phases: bytes by phase and part, from those of
    the rewards on `device`."""
    sizes = reward_weights(recipe) if recipe else {}
    found = phases(on_device(sizes, device))
    told = {"rewards": describe_rewards(sizes, config), "leaves_device": parts_that_leave(config)}
    return {key: value for key, value in told.items() if value} | {
        "memory": {name: total(parts) for name, parts in found.items()},
        "memory_parts": {name: total({name: size}) for name, size in found["update"].items()}}
