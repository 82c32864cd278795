"""Trainable weights of a policy: a LoRA or all of its denoisers, their reference, moving average and files."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flowgrpo.config.sections import Adapter
from flowgrpo.device import free_memory
from flowgrpo.distributed.shards import is_shard, local
from flowgrpo.errors import UserError, nearest
from flowgrpo.log import quiet
from flowgrpo.policies.weights import adapters, lora_files, sharding
from flowgrpo.policies.weights.adapters import lora_layers
from flowgrpo.policies.weights.forwards import modules_of
from flowgrpo.policies.weights.lora_files import EXPERT, LORA_FILE, PEFT, PIPELINE, attach, ends, loader, save_stock
from flowgrpo.storage import atomic, paths

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

COPIES = 4  # of a trained parameter in fp32: value, gradient, AdamW's two moments
KEPT = 2**30  # bytes of trained weights whose averages stay on the device: of a LoRA, not of a whole denoiser


@contextlib.contextmanager
def disable_adapters(layers: Collection[LoraLayer]) -> Iterator[None]:
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@contextlib.contextmanager
def with_data(values: Iterable[tuple[torch.nn.Parameter, torch.Tensor]]) -> Iterator[None]:
    """Context manager: parameters have these tensors, which need not be of their shape, as their data."""
    values = list(values)
    kept = [parameter.data for parameter, _ in values]
    try:
        for parameter, value in values:
            parameter.data = value
        yield
    finally:
        for (parameter, _), data in zip(values, kept):
            parameter.data = data


class TrainableWeights:
    """Trainable parameters of a pipeline's modules, its denoisers or text encoders, in fp32.

    With `adapter.rank` >= 1 a LoRA by peft, its A gaussian and its B zero, so it starts as the base. With rank 0 all of
    the modules' weights, whose first values are kept on the CPU as the reference.

    unsharded: False if the caller shards the modules afterwards, and calls `hold` for all weights.
    Sharded weights have snapshots, averages and a reference of this process's rows only.
    """

    sharded = False  # each process holds only some rows of the weights

    def __init__(self, pipe: Any, modules: dict[str, torch.nn.Module], adapter: Adapter, unsharded: bool = True):
        self.pipe, self.modules, self.adapter = pipe, modules, adapter
        if adapter.rank:
            self._require_targets()
        for name, module in modules.items():
            if adapter.rank:
                self._add_lora(name, module)
            else:
                (module.float() if unsharded else module).requires_grad_(True)
        self.named: dict[str, torch.nn.Parameter] = {}
        self.lr_shares: dict[torch.nn.Parameter, float] = {}  # of the learning rate, 1 for others
        self.added: dict[str, torch.nn.Module] = {}
        self.first: dict[str, torch.Tensor] = {}  # of the parameters that no adapter can switch off, on the CPU
        if adapter.rank or unsharded:
            self.hold()
        if adapter.init is not None:
            path = Path(adapter.init)
            with self._beside(path, lora_files.INIT) as applied:
                self._require_start("adapter.init", path)
                lora_files.tell(f"adapter.init {applied}")
                values = lora_files.initial_values(path, self.named, self.layers())
            self.load(values)

    def hold(self) -> None:
        """Take the trainable parameters that the modules have now; without a LoRA their values are the reference."""
        self.named = {f"{name}.{key}": parameter for name, module in self.modules.items()
                      for key, parameter in module.named_parameters() if parameter.requires_grad}
        self.sharded = any(map(is_shard, self.named.values()))
        self.first = {} if self.adapter.rank else self.snapshot()

    def _require_targets(self) -> None:
        """Raise UserError for a name in a list of targets, other than the default one, that matches no module."""
        for option, encoders in (("targets", False), ("encoder_targets", True)):
            targets: list[str] = getattr(self.adapter, option)
            keys = [key for name, module in self.modules.items() if name.startswith("text_encoder") == encoders
                    for key in lora_files.layer_names(module)]
            lost = [target for target in targets if not any(ends(key, target) for key in keys)]
            if keys and targets != getattr(Adapter(), option) and 0 < len(lost) < len(targets):
                present = sorted({".".join(key.split(".")[-1 - key.split(".")[-1].isdigit():]) for key in keys})
                raise UserError(f"adapter.{option}: {lost[0]!r} matches no module of the {' or '.join(self.modules)}"
                                f"{nearest(lost[0], present)}")

    def _add_lora(self, name: str, module: Any) -> None:
        from peft import LoraConfig

        # An adapter of the user's own would be trained or saved along: name the call that takes it off.
        if present := adapters.adapter_configs(module):
            way_off = "load it anew, without its adapter"
            if name in getattr(self.pipe, "_lora_loadable_modules", ()):
                way_off = ("pipe.unload_lora_weights() takes it off (and pipe.fuse_lora() before that keeps what it "
                           "does)")
            elif hasattr(module, "delete_adapters"):  # a denoiser of diffusers
                way_off = f"pipe.{name}.delete_adapters({[*module.peft_config][0]!r}) takes it off"
            raise UserError(f"the {name} has an adapter already ({', '.join(present)}): {way_off}")
        adapters.remove(module)  # peft leaves empty layers of a deleted adapter
        # Targets are the ends of layers' names, as peft reads them; list them whole, to count what they cost.
        option = "encoder_targets" if name.startswith("text_encoder") else "targets"
        rank, targets = self.adapter.rank, getattr(self.adapter, option)
        keys = sorted(key for key in lora_files.layer_names(module) if any(ends(key, target) for target in targets))
        if targets == Adapter().targets and not any(ends(key, "to_q") for key in keys):
            # Queries have another name, such as `to_query`: the linear layers of classes of attention.
            keys = sorted({f"{place}.{key}" for place, part in module.named_modules()
                           if "Attention" in type(part).__name__
                           for key, layer in part.named_modules() if isinstance(layer, torch.nn.Linear)})
        if not keys:
            names = sorted({key.split(".")[-1] for key, m in module.named_modules() if isinstance(m, torch.nn.Linear)})
            raise UserError(f"adapter.{option} {targets} match no module of the {name}: its linear layers are called "
                            f"{', '.join(names)}")
        self._require_room([module.get_submodule(key) for key in keys])
        alpha: Any = self.adapter.alpha or (2 * rank**0.5 if self.adapter.rslora else 2 * rank)  # a scale of 2
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=keys, init_lora_weights="gaussian",
                            use_dora=self.adapter.dora, use_rslora=self.adapter.rslora,
                            base_model_name_or_path=self._base_name(module))
        adapters.add(module, config, "default")
        # The optimizer needs fp32: small updates vanish in bf16.
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()

    def _require_room(self, layers: Sequence[torch.nn.Module]) -> None:
        """Raise UserError for a rank whose LoRA does not fit into the memory of these layers' device."""
        places = {parameter.device for layer in layers for parameter in layer.parameters()}
        sides = sum(layer.in_features + layer.out_features if isinstance(layer, torch.nn.Linear) else
                    layer.weight[0].numel() + len(layer.weight) for layer in layers
                    if isinstance(layer, (torch.nn.Linear, torch.nn.Conv2d)))
        needed = self.adapter.rank * sides * 4 * COPIES
        for place in places:
            if place.type != "meta" and needed > (free := free_memory(place)):
                raise UserError(f"adapter.rank is {self.adapter.rank}, with which the LoRA and its optimizer take "
                                f"{needed / 2**30:,.0f} GiB, and the {place.type} has {free / 2**30:,.0f} GiB left: "
                                f"expected {max(free // (sides * 4 * COPIES), 1)} at most")

    def _require_start(self, setting: str, path: Path, ranks: bool = True) -> None:
        """Raise UserError as `lora_files.require_start` for the LoRA that is beside the live one."""
        others = {name: module for name, module in self._others().items() if name.startswith(lora_files.ENCODER)
                  or lora_layers(module)}
        layers = self.layers() | {f"{name}.{key}": layer for name, module in others.items()
                                  for key, layer in lora_layers(module).items()}
        init = lora_files.INIT
        own = {key: layer for key, layer in layers.items() if init in layer.lora_A}
        alphas = {layer.scaling[init] * layer.r[init] for layer in own.values()}
        start = lora_files.Start({key: layer.r[init] for key, layer in own.items()},
                                 alphas.pop() if len(alphas) == 1 else None,
                                 any(init in layer.lora_magnitude_vector for layer in own.values()))
        lora_files.require_start(setting, path, start, self.adapter, self.modules, self.modules | others, ranks)

    def soup(self, paths: Sequence[str], shares: Sequence[float]) -> dict[str, torch.Tensor]:
        """Values that act as the average of LoRAs at paths, or of whole models where no LoRA is trained. shares: of
        each, summing to 1; empty for equal ones. UserError for one of other layers or shapes."""
        weighted = []
        for path, weight in zip(map(Path, paths), [share * len(paths) for share in shares] or [1.0] * len(paths)):
            if not self.adapter.rank:
                whole = lora_files.whole_values(path, self.named)
                weighted.append({key: weight * value for key, value in whole.items()})
                continue
            with self._beside(path, lora_files.INIT):
                self._require_start("parts.reference.models", path, ranks=False)
                values = lora_files.initial_values(path, self.named, self.layers())
            weighted.append({key: value.cpu() * (weight if ".lora_B." in key else 1)  # of a LoRA its B alone
                             for key, value in values.items()})
        return self.average(weighted)

    def _others(self) -> dict[str, torch.nn.Module]:
        return {name: part for name, part in modules_of(self.pipe).items() if name not in self.modules}

    def _attach(self, path: Path, adapter: str) -> str:
        return attach(self.pipe, self.modules, path, adapter)

    @contextlib.contextmanager
    def _beside(self, path: Path, adapter: str) -> Iterator[str]:
        """Context manager: a LoRA from a path in addition to the live one, as an adapter of that name; what of it was
        applied, in words."""
        with with_data([(parameter, parameter.data) for parameter in self.named.values()]):
            try:
                yield self._attach(path, adapter)
            finally:
                with quiet():
                    for module in (*self.modules.values(), *self._others().values()):
                        adapters.delete(module, adapter)
                    for layer in self.layers().values():
                        layer.set_adapter("default")

    def _read_back(self, folder: Path) -> None:
        with self._beside(folder, "check"):
            for key, layer in self.layers().items():
                if not adapters.same(layer, "check"):
                    raise RuntimeError(f"{folder} does not give {key} back as it was saved")

    def _base_name(self, module: Any) -> str | None:
        """Model that the files of a LoRA name as its base; None for a pipeline's part."""
        return None

    def add(self, name: str, module: torch.nn.Module) -> None:
        """Train an extra module that is not one of the pipeline's: checkpoints hold it, `save` leaves it out."""
        added = {f"{name}.{key}": parameter for key, parameter in module.named_parameters()}
        self.added[name] = module
        self.named |= added
        self.first |= {key: parameter.detach().to("cpu", copy=True) for key, parameter in added.items()}

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.named.values())

    @contextlib.contextmanager
    def base(self) -> Iterator[None]:
        """Context manager: use the base model."""
        with disable_adapters(self.layers().values()), self.swap(self.first):
            yield

    def reference(self, held: Sequence[dict[str, torch.Tensor]] = ()) -> contextlib.AbstractContextManager[None]:
        """Context manager: use the average of the snapshots `held`, or the base model without any."""
        if not held:
            return self.base()
        average = self.average(held)
        if self.sharded:  # FSDP2 collects from memory of its own
            return self.swap(average)
        # They are not copied into place: a soup's LoRA has another rank.
        return with_data((parameter, average[key].to(parameter.device)) for key, parameter in self.named.items())

    def average(self, snapshots: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Values that act as the average of all snapshots: of whole weights their mean, of n LoRAs one of n times the
        rank, since the mean of the products B A is not the product of the means."""
        if len(snapshots) == 1:
            return snapshots[0]
        averages = {}
        for key in self.named:
            values = [snapshot[key] for snapshot in snapshots]
            averages[key] = torch.stack(values).mean(0) if ".lora_" not in key else torch.cat(values, 0) \
                if ".lora_A." in key else torch.cat(values, 1) / len(values)
        return averages

    @contextlib.contextmanager
    def swap(self, values: dict[str, torch.Tensor]) -> Iterator[None]:
        """Context manager: the parameters that `values` names have these values, such as a moving average."""
        kept = self.copies(values)
        self.load(values)
        try:
            yield
        finally:
            self.load(kept)

    @torch.no_grad()
    def load(self, values: dict[str, torch.Tensor]) -> None:
        for key, value in values.items():
            local(self.named[key]).copy_(value)

    def snapshot(self) -> dict[str, torch.Tensor]:
        return {key: local(parameter).detach().to("cpu", copy=True) for key, parameter in self.named.items()}

    def copies(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        return {key: local(self.named[key]).detach().clone() for key in keys}

    def copy_for_average(self) -> dict[str, torch.Tensor]:
        """Copy of the weights for an average of them: on their device if `large` is false, or on the CPU."""
        return self.snapshot() if self.large else self.copies(self.named)

    def place(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Move values of the weights to the device of `copy_for_average`."""
        if self.large:
            return {key: value.cpu() for key, value in values.items()}
        return {key: value.to(local(self.named[key]).device) for key, value in values.items()}

    @property
    def large(self) -> bool:
        """True if a copy of the weights takes more than KEPT bytes: room on the device, time to bring it."""
        return sum(local(parameter).nbytes for parameter in self.named.values()) > KEPT

    def save(self, folder: Path) -> str:
        """Write the files that stock diffusers loads, read a LoRA back and compare. Returns a sentence for the log.

        A LoRA goes to `pytorch_lora_weights.safetensors`, its scale in its B (`adapters.fold_alpha`), and rank, alpha
        and targets in its metadata; where stock diffusers has no loader of it, to a folder per module in peft's own
        format. All weights go to a folder per module. Every process calls this for sharded ones, and the first writes.
        """
        if not self.adapter.rank:
            modules: dict[str, Any] = self.modules
            for name, module in modules.items():
                if self.sharded:  # the first process gathers all weights
                    first = torch.distributed.get_rank() == 0
                    values = sharding.state_dict(module, keep=first)
                    if not first:
                        continue
                    module = sharding.twin(module, values)
                with atomic.filling(folder / name) as place:
                    module.save_pretrained(place, safe_serialization=True)
                    paths.readable(place)
            return f"saved all weights of {', '.join(self.modules)} to {folder}"
        # Each module's LoRA goes into the form of its loader: the pipeline's, an expert's own file, or peft's folder.
        by = {name: loader(self.pipe, name) for name in self.modules}
        named = [name for name, how in by.items() if how == PIPELINE]
        with atomic.filling(folder) as place:
            if named:
                save_stock(self.pipe, place, {name: name for name in named})
            for name in self.modules:
                if by[name] == EXPERT:
                    save_stock(self.pipe, place / name, {"transformer": name})
                elif by[name] == PEFT:
                    adapters.save(self.modules[name], place / name)
            paths.readable(place)
        # The files are loaded as a user would, in addition to the live adapter.
        self._read_back(folder)
        where = folder / LORA_FILE if named else folder
        return f"saved {where}; read back by {', '.join(sorted(set(by.values())))}: same weights, same scale"

    def layers(self) -> dict[str, LoraLayer]:
        return {f"{name}.{key}": layer for name, module in self.modules.items()
                for key, layer in lora_layers(module).items()}
