"""State of a run: the content of a checkpoint, and its restoration. Parts of a rollout that wait to be trained are
stored as tensors and JSON values.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from flowgrpo import types
from flowgrpo.device import free_memory
from flowgrpo.distributed import shards
from flowgrpo.errors import UserError
from flowgrpo.policies.weights import adapters
from flowgrpo.rollouts.base import GroupSampler
from flowgrpo.samplers.rollout import Part
from flowgrpo.storage import checkpoint
from flowgrpo.storage.checkpoint import Tensors, within
from flowgrpo.storage.places import checkpoints
from flowgrpo.training.extension import Run

LARGE = 2**28  # bytes of a process's tensors; a smaller checkpoint is written without a thread
SNAPSHOTS = ("weights", "ema", "old", "best", "reference")  # parts of a checkpoint that have the weights' names
SAMPLING = ("rollout_evaluations", "saved_evaluations")
# Counters of a checkpoint, with the attribute of the run that has each.
COUNTERS = {"epoch": "epoch", "update": "optimization.update", "skipped": "optimization.skipped",
            checkpoint.UNSTEADY: "optimization.unsteady", "reduces_once": "optimization.gradients.once",
            "sampled": "progress.sampled", "seconds": "progress.seconds",
            "reward_wait_seconds": "progress.reward_seconds", "unmeasured": "progress.evaluation_due",
            **{name: f"rollouts.{name}" for name in SAMPLING}, "reward_failures": "scoring.reward_failures"}
NUMBER = (int, float)
REQUIRED: dict[str, type | tuple[type, ...]] = {  # values of checkpoints, with their types; None: where they have it
    **dict.fromkeys(COUNTERS, (*NUMBER, NoneType)), **dict.fromkeys(SAMPLING, NUMBER),
    "epoch": int, "update": (int, NoneType), "memory": dict, "reward_failures": dict, "evaluations": NUMBER,
    "rescore": bool, "micro_batch": (list, NoneType), "generation_batch": (list, NoneType),
    "first_log_ratio": (*NUMBER, NoneType),
    "loss_scale": (dict, NoneType)}
KINDS = {kind.__name__: kind for kind in (types.Transitions, types.Completions, types.Traces, types.Segmented)}


def counters(trainer: Run) -> dict[str, Any]:
    """The counters of a run, apart from its weights: the same on all processes."""
    [evaluations] = trainer.processes.total([trainer.policy.evaluations])
    return {key: attrgetter(place)(trainer) for key, place in COUNTERS.items()} | {
        "evaluations": evaluations,
        "micro_batch": [trainer.config.train.micro_batch, trainer.geometry.micro_batch],
        "generation_batch": [trainer.config.train.generation_batch, trainer.geometry.lowered_generation],
        "first_log_ratio": trainer.first_ratio.max_log_ratio, "rescore": trainer.first_ratio.rescore,
        "loss_scale": trainer.optimization.scaler.state_dict(), "memory": copy.deepcopy(trainer.memory)}


def stateful(trainer: Run) -> dict[str, checkpoint.Stateful]:
    """The parts of a run that keep a state of their own, by their names in a checkpoint."""
    parts: dict[str, checkpoint.Stateful] = {
        "old": trainer.rollouts.old_policy, "best": trainer.progress.best, "reference": trainer.kl_reference}
    return parts | trainer.rollouts.stateful() | trainer.extensions.stateful()


def contents(trainer: Run) -> tuple[checkpoint.Tensors, dict[str, Any]]:
    """The (tensors, values) of a checkpoint as of the end of the last whole epoch; of shards, this process's."""
    states = {name: part.state() for name, part in stateful(trainer).items()}
    tensors = trained(trainer, {name: kept for name, (kept, _) in states.items()})
    return tensors, trainer.progress.saved_counters | {name: values for name, (_, values) in states.items()}


def trained(trainer: Run, further: Mapping[str, Tensors]) -> Tensors:
    """The weights, their average and the optimizer's state, and further tensors by name, in a checkpoint's names."""
    return checkpoint.joined({"weights": trainer.policy.weights.named, "ema": trainer.optimization.ema or {}, **further,
                              "optimizer": checkpoint.optimizer_tensors(trainer.optimization.optimizer)})


def save(trainer: Run, folder: Path, wait: bool = True) -> None:
    """Write a checkpoint as of the end of the last whole epoch: the first process, and each the shards that it holds.
    wait: until all processes are here; without them, sharded weights cannot be saved, and nothing is written.
    Raises UserError for weights that are not finite on any process."""
    require_finite(trainer, wait)
    processes, sharded = trainer.processes, trainer.policy.weights.sharded
    if sharded and not wait:
        return
    for write in writes(trainer, folder / "checkpoints"):
        with processes.collective() if sharded else nullcontext():  # if a process fails, all leave: it is no checkpoint
            write()
    if wait and not sharded:
        processes.wait()  # a process that left would have the others ended, in the midst of writing


def save_epoch(trainer: Run, folder: Path, last: bool) -> None:
    """Save a checkpoint as of the end of the last whole epoch; a thread writes a large one while training goes on.
    last: return when it is written.
    Raises the error of an earlier write, and UserError for weights that are not finite."""
    processes, saving, sharded = trainer.processes, trainer.progress.saving, trainer.policy.weights.sharded
    saving.look(wait=True)
    # All decide alike, by the processes that write: a thread needs a copy, which has to fit into the host's memory.
    small = False
    if not last and (processes.first or sharded):
        size = sum(shards.local(tensor).nbytes for tensor in contents(trainer)[0].values())
        small = size < LARGE or 2 * size > available_memory()
    if last or processes.any(small):
        save(trainer, folder)
        return
    require_finite(trainer)
    saving.start(writes(trainer, folder / "checkpoints", copied=True))


def available_memory() -> int:
    """Bytes of the host's memory that this process can have beside those that it holds."""
    import psutil

    return free_memory("cpu") - psutil.Process().memory_info().rss


def writes(trainer: Run, place: Path, copied: bool = False) -> list[Callable[[], object]]:
    """This process's writes of a checkpoint, each of which begins when all processes are done with the one before. Of
    sharded weights every process calls it: the first one that holds a shard writes that, and then the first process
    the tensors that are not sharded, and the values.
    copied: they write copies in the host's memory, which training does not change."""
    processes, epoch, sharded = trainer.processes, trainer.epoch, trainer.policy.weights.sharded
    if not (processes.first or sharded):
        return []
    if sharded:
        with processes.collective():
            if processes.first:
                checkpoint.begin(place, epoch)
    tensors, values = contents(trainer)
    owners = {key: owner(trainer, key, tensor.ndim) if sharded else None for key, tensor in tensors.items()}
    rows = {key: shards.local(tensors[key]) for key, parameter in owners.items() if parameter is not None}
    whole = {key: tensor for key, tensor in tensors.items() if owners[key] is None}
    if copied:
        rows, whole = ({key: tensor.detach().to("cpu", copy=True) for key, tensor in some.items()}
                       for some in (rows, whole))
        values = copy.deepcopy(values)
    steps: list[tuple[bool, Callable[[], object]]] = [(processes.first, partial(
        checkpoint.save, place, epoch, whole, values, trainer.config.train.keep, begun=sharded))]
    if sharded:
        index, count, holds = shards.place(next(parameter for parameter in owners.values() if parameter is not None))
        steps.insert(0, (holds, partial(checkpoint.save_shard, place, epoch, rows, index, count)))
    return [write if own else lambda: None for own, write in steps]  # else another process writes


def require_finite(trainer: Run, wait: bool = True, epoch: int | None = None) -> None:
    """Raise UserError if trained weights or their moving average are not finite. wait: on any process; all call it."""
    weights = {**trainer.policy.weights.named, **(trainer.optimization.ema or {})}
    adapters.require_saved(weights, trainer.epoch if epoch is None else epoch, trainer.processes.any if wait else bool)


def owner(trainer: Run, key: str, dimensions: int) -> torch.Tensor | None:
    """The sharded parameter whose rows a checkpoint's tensor has; None for a tensor that is not sharded."""
    weights, (room, name) = trainer.policy.weights, key.split("/", 1)
    if room == "optimizer" and dimensions:
        parameter = weights.parameters()[int(name.split(".")[0])]
    elif room in SNAPSHOTS and (last := name.rsplit("/", 1)[-1]) in weights.named:
        parameter = weights.named[last]
    else:
        return None
    return parameter if shards.is_shard(parameter) else None


def room(trainer: Run) -> int:
    """The bytes that a run's checkpoints will take in addition to the present ones: weights, averages and snapshots of
    them, and the optimizer's state, for `keep` checkpoints and one that is being written."""
    train, weights = trainer.config.train, list(trainer.policy.weights.named.values())
    one = sum(tensor.numel() * tensor.element_size() for tensor in weights)
    averages = (trainer.optimization.ema is not None) + (trainer.progress.best.best.reward is not None)
    snapshots = averages + len(trainer.kl_reference.snapshots)
    moments = sum(tensor.numel() for tensor in weights) * (2 if train.optimizer == "adamw8bit" else 8)
    folders = checkpoints(trainer.config.folder / "checkpoints").values()
    kept = [file for folder in folders for file in folder.iterdir()]
    written = min(train.keep, -(-train.epochs // train.save_every)) + 1
    return max(written * (one * (1 + snapshots) + moments) - sum(file.stat().st_size for file in kept), 0)


def restore(trainer: Run, folder: Path) -> None:
    """Load the state of a whole checkpoint (`checkpoint.newest_whole`). Raises UserError if it is of other weights, or
    its state does not fit the run."""
    try:
        _restore(trainer, folder)
    except (UserError, torch.OutOfMemoryError):
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise checkpoint.unreadable(folder, error) from None


def _restore(trainer: Run, folder: Path) -> None:
    # Nothing is replaced before the checkpoint is known to be of these weights.
    weights, shapes = trainer.policy.weights, checkpoint.shapes(folder)
    live = {f"weights/{key}": parameter.shape for key, parameter in weights.named.items()}
    if live != {key: shape for key, shape in shapes.items() if key.startswith("weights/")}:
        raise UserError(f"--resume: {folder} holds other weights than are trained now: keep model and adapter as "
                        "in the run's config.yaml, or give the run another name")
    # Read the tensors, of sharded ones the rows of this process, and group them by the part that has them.
    owners = {key: owner(trainer, key, len(shape)) for key, shape in shapes.items()}

    def rows(key: str) -> slice | None:
        parameter = owners[key]
        return None if parameter is None else shards.rows(parameter)

    tensors, state = checkpoint.load(folder, rows, verify=False)
    taken: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        room, key = name.split("/", 1)
        parameter = owners[name] if room == "optimizer" else None
        taken[room][key] = tensor if parameter is None else shards.like(tensor, parameter)
    for room in ("weights", "ema"):
        if broken := adapters.odd(taken[room]):
            raise ValueError(f"{room}/{broken} holds NaN or an infinity")
    # Weights, optimizer and average; then the parts with a state of their own.
    weights.load(taken["weights"])
    checkpoint.load_optimizer(trainer.optimization.optimizer, taken["optimizer"])
    if trainer.optimization.ema is not None:
        trainer.optimization.ema = weights.place(taken["ema"]) or weights.copy_for_average()
    for name, part in stateful(trainer).items():
        part.load_state(taken[name], {"epoch": state["epoch"]} | state.get(name, {}))
    # Counters, and what they depend on.
    for key, place in COUNTERS.items():
        holder, _, name = place.rpartition(".")
        setattr(attrgetter(holder)(trainer) if holder else trainer, name, state.get(key, 0))
    for size in ("micro_batch", "generation_batch"):  # as the run lowered them when it was out of memory
        configured, lowered = state.get(size) or (None, None)
        if lowered is not None and configured == getattr(trainer.config.train, size):
            setattr(trainer.geometry, size, lowered)
    trainer.policy.evaluations = state["evaluations"] if trainer.processes.first else 0
    trainer.first_ratio.max_log_ratio, trainer.first_ratio.rescore = state["first_log_ratio"], state["rescore"]
    if trainer.optimization.scaler.is_enabled() and state.get("loss_scale"):
        trainer.optimization.scaler.load_state_dict(state["loss_scale"])
    trainer.memory.clear()
    trainer.memory |= copy.deepcopy(state["memory"])
    trainer.progress.saved_counters = state


def tensors_of(taken: Any) -> Tensors:
    """The tensors of a record, on the CPU, by field; those of its score under `old.`."""
    values = {field.name: getattr(taken, field.name) for field in fields(taken) if field.name != "old"}
    values |= {f"old.{field.name}": getattr(taken.old, field.name) for field in fields(taken.old)}
    return {name: value.detach().cpu() for name, value in values.items() if isinstance(value, Tensor)}


def record_of(kind: str, step: int, given: Tensors) -> Any:
    rest: dict[str, Any] = {name: value for name, value in given.items() if not name.startswith("old.")}
    return KINDS[kind](**rest | ({"step": step} if kind == "Transitions" else {}),
                       old=types.Scored(**within(given, "old.")))


def store_part(part: Part) -> tuple[Tensors, dict[str, Any]]:
    """The (tensors, values) of a sampled part, which has no advantages yet."""
    single = {"prompts": part.prompts} | ({} if part.seeds is None else {"seeds": part.seeds}) | part.measured
    tensors = {name: value.cpu().clone() for name, value in single.items()}
    tensors |= {f"final.{place}": final.cpu().clone() for place, final in enumerate(part.finals)}
    for place, taken in enumerate(part.transitions):
        tensors |= {f"{place}.{name}": value.clone() for name, value in tensors_of(taken).items()}
    steps = [[type(taken).__name__, taken.step] for taken in part.transitions]
    return tensors, {"groups": [part.groups.start, part.groups.stop], "steps": steps, "finals": len(part.finals)}


def restore_part(tensors: Tensors, values: dict[str, Any], rollouts: GroupSampler[Any], epoch: int) -> Part:
    """The part of `stored`. epoch: the one that drew it."""
    transitions = tuple(record_of(kind, step, within(tensors, f"{place}."))
                        for place, (kind, step) in enumerate(values["steps"]))
    specs = rollouts.explorations(epoch)
    measured = {name: value for name, value in tensors.items() if "." not in name}  # others are of a step or a final
    return Part(range(*values["groups"]), measured.pop("prompts"), specs[0] if specs else None, transitions,
                tuple(tensors[f"final.{place}"] for place in range(values["finals"])),
                seeds=measured.pop("seeds", None), measured=measured)
