"""A distilled sibling of the trained model beside a run: `eval.on`, and `train.sibling`, which keeps the gain there.

The sibling has the layers of the trained model, with other weights: W_sibling = W + difference. Its weights take the
place of the frozen ones below the LoRA, one pointer a weight, so that one denoiser more is in memory.

What keeps the gain:
- `replay`: a share of the epochs is sampled and trained on the sibling, on the grid of its own few steps;
- `orthogonal`: after every optimizer step each layer's LoRA B A becomes (1 - U U^T) B A (1 - V V^T), where U and V are
  the first singular vectors of the layer's difference, both of which the sibling uses.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from flowgrpo.config.schema import Config
from flowgrpo.contrib.features import EngineKeys, ForSiblingKeys, OnKeys, PhaseKeys
from flowgrpo.contrib.frontier import mean
from flowgrpo.errors import UserError
from flowgrpo.evaluation import held_out, kept
from flowgrpo.evaluation.measured import Measured
from flowgrpo.evaluation.siblings import SHOWN, Sibling, at_weight, sibling_of
from flowgrpo.methods import capabilities
from flowgrpo.methods.setup import Setup
from flowgrpo.policies.pipelines.call import at_guidance
from flowgrpo.policies.pipelines.load import DENOISERS, denoisers, load_pipeline
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.weights.forwards import replaced
from flowgrpo.policies.weights.lora_files import require_lora
from flowgrpo.policies.weights.trainable import lora_layers, with_data
from flowgrpo.storage.json_files import read_object
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension, Metrics, Run
from flowgrpo.training.memory import Measured as MeasuredMemory
from flowgrpo.training.state import SAMPLING
from flowgrpo.types import unwrap

NAME = "on"  # of the value by which `eval.best` keeps weights
GUIDANCE = "guidance_embedder"  # of weights that a sibling without a guidance lacks: what they add is 0 there
LARGE = 1024  # shorter side of a weight from which its first singular vectors are approximate
SPARE, POWERS = 8, 4  # of that approximation (Halko et al. 2011): further vectors, and iterations


def add(phases: dict[str, dict[str, int]], measured: MeasuredMemory) -> None:
    """Add the sibling's denoisers to all phases."""
    trained = {id(parameter) for parameter in measured.policy.weights.parameters()}
    size = sum(value.nbytes for module in measured.policy.denoisers.values() for value in module.parameters()
               if id(value) not in trained)
    for parts in phases.values():
        parts["sibling's denoiser"] = size


def setting(config: Config) -> Sibling:
    """The sibling of `eval.on`. Raises UserError as `sibling_of`."""
    on = unwrap(OnKeys.read(config).on)
    return sibling_of(config, on.model or config.model, on.lora, on.steps, on.guidance, on.scheduler,
                      on.lora_scale, "eval.on")


# --- weights ---------------------------------------------------------------------------------------------------------

def match(name: str, module: torch.nn.Module, other: torch.nn.Module) -> dict[str, Tensor]:
    """Values of a sibling's module for the frozen parameters of the trained one, by its names, where they differ.

    name: of the part. Raises UserError for weights that one of both lacks, or of another shape.
    """
    theirs: dict[str, Tensor] = dict(other.named_parameters())
    values = {}
    for key, own in module.named_parameters():
        if ".lora_" in key:
            continue
        plain = key.replace(".base_layer", "")
        value: Tensor | None = theirs.pop(plain, torch.zeros_like(own) if GUIDANCE in plain else None)
        if value is None or value.shape != own.shape:
            got = "has no such weight" if value is None else f"has it in the shape {list(value.shape)}"
            raise UserError(f"eval.on: the sibling's {name} is of another architecture: it {got} as {plain} "
                            f"{list(own.shape)}: measure it by `flowgrpo eval RUN --on MODEL`")
        if not torch.equal(value, own.detach().to(value)):
            values[key] = value.detach().to(own.device, own.dtype)
    if theirs:
        raise UserError(f"eval.on: the sibling's {name} has a weight {next(iter(theirs))}, which the trained model "
                        "lacks: name a LoRA of it under eval.on.lora, or use `flowgrpo eval RUN --on MODEL`")
    return values


def span(difference: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """First singular vectors U [m, k] and V [n, k] of a weight's difference [m, n, ...], k <= rank: those whose values
    are above rounding."""
    flat = difference.flatten(1).float()
    if min(flat.shape) > LARGE:
        with torch.random.fork_rng([flat.device] if flat.is_cuda else []):
            torch.manual_seed(0)
            u, sizes, v = torch.svd_lowrank(flat, q=min(rank + SPARE, *flat.shape), niter=POWERS)
    else:
        u, sizes, vt = torch.linalg.svd(flat, full_matrices=False)
        v = vt.T
    known = int((sizes[:rank] > sizes[0] * 1e-5).sum()) if len(sizes) else 0
    return u[:, :known].contiguous(), v[:, :known].contiguous()


@torch.no_grad()
def project(down: Tensor, up: Tensor, u: Tensor, v: Tensor) -> None:
    """Change A [r, n, ...] to A (1 - V V^T) and B [m, r, ...] to (1 - U U^T) B, in place: then U^T B A = 0 = B A V."""
    a, b = down.flatten(1), up.flatten(1)
    down -= ((a @ v) @ v.T).view_as(down)
    up -= (u @ (u.T @ b)).view_as(up)


class Worn:
    """Weights and scheduler of a sibling, which a policy has inside `on`.

    values: by part and name of the frozen parameters, those that differ.
    """

    def __init__(self, policy: PipelinePolicy, config: Config, sibling: Sibling):
        pipe = load_pipeline(sibling.model, config.precision, config.trust_remote_code, files=sibling.files(config),
                             only=DENOISERS, checker=False)
        others = denoisers(pipe)
        if others.keys() != policy.denoisers.keys():
            raise UserError(f"eval.on: {sibling.name} has the denoisers {', '.join(others)}, and the trained model has "
                            f"{', '.join(policy.denoisers)}: measure it by `flowgrpo eval RUN --on MODEL`")
        self.policy, self.scheduler = policy, pipe.scheduler
        self.values = {name: match(name, module, others[name]) for name, module in policy.denoisers.items()}
        if not any(self.values.values()):
            raise UserError(f"eval.on: {sibling.name} has the trained model's own weights: expected a distilled one")

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Context manager: the policy is the sibling, below its LoRA, with the sibling's scheduler for evaluations."""
        policy, stock = self.policy, self.policy.stock
        with with_data((policy.denoisers[name].get_parameter(key), value)
                       for name, values in self.values.items() for key, value in values.items()):
            try:
                policy.stock = policy.driver.stock = policy.pipe.scheduler = self.scheduler
                yield
            finally:
                policy.stock = policy.driver.stock = policy.pipe.scheduler = stock

    def spans(self, rank: int) -> dict[str, tuple[Tensor, Tensor]]:
        """`span` of every layer with a LoRA whose weight differs, by part and name. Raises UserError for none, and for
        a layer of which nothing is left."""
        found = {}
        for name, module in self.policy.denoisers.items():
            for key, layer in lora_layers(module).items():
                value = self.values[name].get(f"{key}.base_layer.weight")
                if value is None:
                    continue
                u, v = span(value - cast(Tensor, layer.get_base_layer().weight).detach(), rank)
                if u.shape[1] >= min(len(u), len(v)):
                    raise UserError(f"train.sibling_rank is {rank}, which leaves {name}.{key} no direction: expected "
                                    f"less than {min(len(u), len(v))}")
                found[f"{name}.{key}"] = u, v
        if not found:
            raise UserError("train.sibling is orthogonal, but the sibling differs in none of the layers with a LoRA: "
                            "use replay")
        return found


# --- the run ---------------------------------------------------------------------------------------------------------

class OnSibling(Extension):
    """Measurements of a run on its sibling, and what keeps the gain there.

    worn: None in a dry run. base: the sibling's own measurement; now: the last with the LoRA, and the change from it.
    """

    judges = (NAME,)
    needs = frozenset({capabilities.LORA, capabilities.WHOLE_WEIGHTS})

    def __init__(self, trainer: Run):
        super().__init__(trainer)
        config, self.policy = trainer.config, cast(PipelinePolicy, trainer.policy)
        self.sibling, self.settings = setting(config), ForSiblingKeys.read(config)
        self.weight = unwrap(OnKeys.read(config).on).weight
        dry = any(value.is_meta for module in self.policy.denoisers.values() for value in module.parameters())
        self.worn = None if dry else Worn(self.policy, config, self.sibling)
        self.spans = self.worn.spans(self.settings.sibling_rank) if self.worn and self.settings.sibling == \
            "orthogonal" else {}
        self.on_stepped()
        self.rollouts: Any = None
        if self.worn and self.settings.sibling == "replay":
            with self._replaying():
                self.rollouts = self._few_steps(trainer.rollouts)
        self.functions: Mapping[str, Any] = {}
        self.base: Measured | None = None
        self.metrics: Metrics = {}
        self.said: str | None = None

    # --- what a run must have ----------------------------------------------------------------------------------------

    @classmethod
    def enabled_by(cls, setup: Setup) -> str:
        way = ForSiblingKeys.read(setup.config).sibling
        return f"train.sibling is {way}" if way else "eval.on is set"

    @classmethod
    def missing(cls, setup: Setup) -> dict[str, str]:
        if ForSiblingKeys.read(setup.config).sibling != "replay":
            return {}
        why = "train.sibling: replay, whose epochs are in turn of two models"
        return {capabilities.RECORDABLE: why, capabilities.PRESENT_WEIGHTS: why, capabilities.ONE_POLICY: why}

    @classmethod
    def conflicts(cls, setup: Setup) -> dict[str, bool]:
        config = setup.config
        replays = ForSiblingKeys.read(config).sibling == "replay"
        return {"memory.weights other than full, to which no other weights are given": config.memory.weights != "full",
                "memory.offload, which moves the weights": config.memory.offload != "none",
                "a DoRA, whose lengths are of the trained model's weights": config.adapter.dora,
                "rollout.engine, which has the trained model": replays and EngineKeys.read(config).engine is not None,
                "phases, which make the rollouts anew": replays and bool(PhaseKeys.read(config).phases)}

    @classmethod
    def require(cls, setup: Setup) -> None:
        """Raise UserError for a sibling that is not known as one of few steps, or is the trained model itself."""
        if (lora := setting(setup.config).lora) is not None:
            require_lora("eval.on.lora", lora)

    # --- measurements ------------------------------------------------------------------------------------------------

    def on_base(self, measured: Measured, functions: Mapping[str, Any]) -> None:
        self.functions = functions
        with self.policy.reference():
            self.base = self._measure("before", False)

    def judge(self, measured: Measured) -> Metrics:
        """Mean weighted sum of the trained rewards on the sibling, over the held-out prompts."""
        trainer = self.trainer
        with trainer.policy.weights.swap(trainer.optimization.evaluated_weights()):
            found, base = self._measure(f"epoch {trainer.epoch}", False), unwrap(self.base)
        samples, weights = trainer.config.eval.samples, trainer.config.rewards
        now, was = (kept.totals(each.scores, weights, samples) for each in (found, base))
        self.metrics = {"on/gain": mean(now - was)} | {
            f"on/{name}": float(share) for name, share in found.looks.relative_to(base.looks).items()}
        return {NAME: mean(now)}

    def on_measured(self, measured: Measured) -> Metrics:
        return self.metrics

    def on_finished(self, measured: Measured) -> None:
        """Measure the reported prompts on the sibling, and write the result. measured: on the trained model."""
        trainer, config, run = self.trainer, self.trainer.config, self.trainer.config.folder
        base = self.base
        if base is None or trainer.progress.best.anew:  # other prompts than those on the way
            with self.policy.reference():
                base = self._measure("before, other prompts", True)
        found = self._measure("after", True)
        if not trainer.processes.first or not measured.prompts:
            return
        before = read_object(run / "before.json", "run the training anew", scores=dict)["scores"]
        own = {name: [float("nan") if value is None else value for value in values] for name, values in before.items()}
        result = kept.record(config, self.sibling, (own, measured.scores), base, {self.weight: found},
                                 held_out.seed(trainer, True))
        kept.write(run, result, base, {self.weight: found})
        self.said = kept.sentence(result)

    def summary(self) -> str | None:
        return self.said

    def _measure(self, title: str, reported: bool) -> Measured:
        """Measure the policy's present weights on the sibling. reported: the reported prompts, else those of
        evaluations on the way."""
        policy, evaluations = self.policy, self.policy.evaluations
        layers = [*policy.weights.layers().values()]
        weighted = contextlib.nullcontext() if self.weight == 1 else at_weight(layers, self.weight)
        with weighted, unwrap(self.worn).on():
            found = held_out.measure_side(
                cast(Any, self.trainer), dict(self.functions), f"{self.sibling.name}, {title}", policy.reference,
                reported=reported, drawn=(self.sibling.steps, self.sibling.guidance),
                keep=min(self.trainer.config.eval.grid, SHOWN))
        policy.evaluations = evaluations
        return found

    # --- what keeps the gain -----------------------------------------------------------------------------------------

    def replays(self, epoch: int) -> bool:
        """True for an epoch on the sibling: the first is on the trained model, and both take turns by their shares."""
        share = self.settings.sibling_share
        return self.settings.sibling == "replay" and int((epoch + 1) * share) > int(epoch * share)

    @contextlib.contextmanager
    def around_epoch(self) -> Iterator[None]:
        if self.worn is None or not self.replays(self.trainer.epoch):
            yield
            return
        trainer, own = self.trainer, cast(Any, self.trainer.rollouts)
        for name in ("decodes", "old_policy", *SAMPLING):
            setattr(self.rollouts, name, getattr(own, name))
        try:
            with self._replaying(), replaced("rollouts", (trainer, self.rollouts)):
                yield
        finally:
            for name in SAMPLING:
                setattr(own, name, getattr(self.rollouts, name))

    @contextlib.contextmanager
    def _replaying(self) -> Iterator[None]:
        with at_guidance(self.policy, self.sibling.guidance), unwrap(self.worn).on():
            yield

    def _few_steps(self, own: Any) -> Any:
        """Rollouts of the sibling on its own grid. Raises UserError where the method does not go with so few steps."""
        trainer, sibling = self.trainer, self.sibling
        config = trainer.config.having({"train.steps": sibling.steps, "train.grid": "stock",
                                        "train.guidance": sibling.guidance})
        try:
            return type(own)(config, self.policy, trainer.method, trainer.geometry, trainer.processes, trainer.clock,
                             first=trainer.prompts[0])
        except (UserError, ValueError) as error:
            raise UserError(f"train.sibling: replay at {sibling.steps} steps: {error}") from error

    def on_stepped(self) -> None:
        layers: Any = self.policy.weights.layers() if self.spans else {}
        for key, (u, v) in self.spans.items():
            down, up = layers[key].lora_A["default"].weight, layers[key].lora_B["default"].weight
            project(down, up, u.to(down), v.to(down))

    def on_trained(self, epoch: Epoch) -> Metrics:
        return {"on/epoch": float(self.replays(self.trainer.epoch))} if self.settings.sibling == "replay" else {}
