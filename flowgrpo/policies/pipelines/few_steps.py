"""Models of few steps (LCM, Turbo, Lightning, schnell, ...): how they are known, and the defaults that fit them.

A distilled model is sampled in 1 to 8 steps without classifier-free guidance, or with one that its network reads. It
is known by its scheduler and its configuration, and by the names of its repository, denoiser and fused LoRAs.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowgrpo.config.schema import Config
from flowgrpo.config.sections import Load
from flowgrpo.policies.pipelines.load import index_ahead
from flowgrpo.policies.sources import described
from flowgrpo.starter import MERGED

# In names of models and of files.
QUICK = re.compile(r"turbo|lightning|schnell|sprint|step-?distill|lightx2v|hyper-?(sd|flux)|"
                   r"(?<![a-z])(lcm|tcd|pcm|tmd|tdm|dmd2?)(?![a-z])", re.I)
COUNT = re.compile(r"(?<!\d)(\d{1,2})[-_ ]?steps?(?![a-z])", re.I)
STEPS = {"z-image-turbo": 8, "sprint": 2}  # of cards whose name does not tell; others: USUAL
USUAL, MOST = 4, 16
SCHEDULERS = re.compile(r"LCM|TCD|SCM")  # classes that step from one estimate of the data to the next
EMBEDDED = {  # pipelines of whole models whose network reads a guidance, by their names
    r"(?<![a-z])lcm(?![a-z])(?!.*lora).*(xl|ssd)": "StableDiffusionXLPipeline",
    r"(?<![a-z])lcm(?![a-z])(?!.*lora)": "LatentConsistencyModelPipeline",
    r"sana.?sprint": "SanaSprintPipeline", r"flux(?!.*schnell)": "FluxPipeline"}
LEVEL = 0.8  # of CPS: an SDE step whose noise stays that of the next noise level, however long it is


@dataclass(frozen=True)
class Facts:
    """Facts of a pipeline: its class, scheduler, and the configurations of its denoisers.

    names: of the repository, and of files that change its denoiser. index: of model_index.json.
    """

    names: Sequence[str] = ()
    pipeline: str = ""
    scheduler: str = ""
    grid: Mapping[str, Any] = field(default_factory=dict)
    unet: Mapping[str, Any] | None = None
    transformer: Mapping[str, Any] | None = None
    index: Mapping[str, Any] = field(default_factory=dict)

    @property
    def why(self) -> str | None:
        """Return why the pipeline is taken for one of few steps; None for another."""
        if SCHEDULERS.search(self.scheduler):
            return f"its scheduler is a {self.scheduler}"
        if self.unet is not None and self.grid.get("timestep_spacing") == "trailing" and not self.grid.get(
                "rescale_betas_zero_snr"):
            return "its scheduler spaces timesteps from the last one (trailing)"
        if self.index.get("is_distilled"):
            return "it is distilled"
        if self.pipeline == "FluxPipeline" and not (self.transformer or {"guidance_embeds": True}).get(
                "guidance_embeds"):
            return "its transformer has no guidance, as that of FLUX schnell"
        named = next((name for name in self.names if QUICK.search(name)), None)
        return None if named is None else "by its name" if named == self.names[0] else f"by the name {named}"

    @property
    def steps(self) -> int:
        """Return the model's own number of steps, 2 at least, since the last step of a rollout is never trained."""
        for name in reversed(self.names):
            if (found := COUNT.search(name)) and int(found[1]) <= MOST:
                return max(2, int(found[1]))
        named = " ".join(self.names).lower()
        return next((steps for part, steps in STEPS.items() if part in named), USUAL)

    @property
    def guidance(self) -> float:
        """Return the scale of the model's card: 1, none, or its pipeline's own where the network reads it."""
        if any(re.search(r"z-?image", name, re.I) for name in (self.pipeline, *self.names)):
            return 0.0  # its guidance is off at 0
        import diffusers

        read = (self.unet or {}).get("time_cond_proj_dim") or (self.transformer or {}).get("guidance_embeds")
        pipeline = self.pipeline
        if not pipeline and self.names:  # its files are not here
            read = pipeline = next((of for name, of in EMBEDDED.items() if re.search(name, self.names[0], re.I)), "")
        call = getattr(getattr(diffusers, pipeline, None), "__call__", None)
        own = inspect.signature(call).parameters.get("guidance_scale") if read and call is not None else None
        return float(own.default) if own is not None and isinstance(own.default, (int, float)) else 1.0

    @property
    def flow(self) -> bool:
        """Return True for a flow. Of a model whose files are not here it is guessed: noise is predicted by those whose
        name says SD or SDXL."""
        if self.scheduler:
            return "FlowMatch" in self.scheduler or bool(self.grid.get("use_flow_sigmas")) \
                or self.grid.get("prediction_type") == "flow_prediction"
        return not re.search(r"sdxl|(?<![a-z])sd(?!3)|stable-diffusion(?!-?3)|lcm", " ".join(self.names), re.I)

    @property
    def method(self) -> str:
        """Return the method that trains every one of the model's own steps."""
        named = self.scheduler or " ".join(self.names).upper()
        if SCHEDULERS.search(named):
            return "rlcm"
        return "flow_grpo" if self.flow else "ddpo"


def of_pipe(pipe: Any, model: str, files: Load = Load()) -> Facts:
    unet, transformer = (dict(part.config) if (part := getattr(pipe, name, None)) is not None else None
                         for name in ("unet", "transformer"))
    return Facts(_names(model, files), type(pipe).__name__, type(pipe.scheduler).__name__, dict(pipe.scheduler.config),
                 unet, transformer, dict(pipe.config))


def ahead(model: str, files: Load = Load()) -> Facts:
    """Return the facts of a model that is not loaded yet: those of its files on this machine, else its names."""
    index = index_ahead(model, files)
    if not index:
        return Facts(_names(model, files), scheduler=str(files.scheduler.get("class", "")), grid=files.scheduler)
    folder = Path(index["_folder"])
    grid = described(MERGED.get(model, folder) / "scheduler" / "scheduler_config.json") | files.scheduler
    scheduler = str(files.scheduler.get("class", grid.get("_class_name", "")))
    unet, transformer = (described(folder / name / "config.json") or None for name in ("unet", "transformer"))
    return Facts(_names(model, files), str(index.get("_class_name")), scheduler, grid, unet, transformer, index)


def _names(model: str, files: Load) -> list[str]:
    """Return the names by which a model may be known, the model's own first. A file's folder counts for its name."""
    others = (files.denoiser, *(lora.path for lora in files.loras_with_scales))
    return [Path(model).name, *("/".join(Path(path).parts[-2:]) for path in others if path)]


def few_step_config(config: Config, facts: Facts) -> Config:
    """Return a configuration whose absent keys are those of a model of few steps: method, steps, grid and guidance.
    Parts that name a plan are of the default method, which then stays; recorded pairs are trained without steps."""
    train, changes = config.train, dict[str, Any]()
    own: dict[str, Any] = {key: getattr(train if key in train.model_fields_set else facts, key)
                           for key in ("steps", "guidance")}
    grid = {} if "shift" in train.model_fields_set else {"grid": "stock"}
    for name, wanted in (("train", {} if config.preferences else own | grid), ("eval", own)):
        section = getattr(config, name)
        changes[name] = section.model_copy(update={key: value for key, value in wanted.items()
                                                   if key not in section.model_fields_set})
    if "method" not in config.model_fields_set and "plan" not in config.parts:
        changes["method"] = facts.method
        if facts.method == "flow_grpo":
            changes["parts"] = {"kernel": {"type": "CPS", "level": LEVEL}} | config.parts
    return config.model_copy(update=changes)


def describe_changes(before: Config, after: Config) -> str:
    """Describe in words what `few_step_config` set; empty for nothing."""
    pairs: list[tuple[str, object, object]] = [("method", before.method, after.method)]
    if before.parts.get("kernel") != after.parts.get("kernel"):
        pairs.append(("parts.kernel CPS", None, LEVEL))
    pairs += [(f"{name}.{key}", getattr(getattr(before, name), key), getattr(getattr(after, name), key))
              for name, keys in (("train", ("steps", "guidance", "grid")), ("eval", ("steps", "guidance")))
              for key in keys]
    return ", ".join(f"{key} {new:g}" if isinstance(new, float) else f"{key} {new}"
                     for key, old, new in pairs if old != new)
