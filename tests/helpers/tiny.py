"""Tiny random pipelines, built in code: real diffusers classes with a few thousand weights and 16 x 16 images."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from flowgrpo.config import Config, load
from flowgrpo.config.sections import Adapter
from flowgrpo.data.prompts import Prompt
from flowgrpo.methods import preset
from flowgrpo.methods.overlay import with_parts
from flowgrpo.policies import build
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.rewards import differentiable
from flowgrpo.tools.check.tiny.images import FLUX_CALL, SD3_CALL, flux_parts, sd3_parts
from flowgrpo.tools.check.tiny.parts import assemble
from flowgrpo.tools.check.tiny.unets import SD_NOISE as SD15_NOISE  # noqa: F401 the tests read it here
from flowgrpo.tools.check.tiny.unets import pndm, sd15_parts
from flowgrpo.train import Trainer

LATENTS = (4, 8, 8)
CALL = SD3_CALL
PROMPTS = ["red", "blue", "green", "a cat", "two dogs", "old"]
PUT_BACK = "does not go on from the middle of its loop as the whole loop does"
# Classes that cannot be driven, and what `check` says of them.
UNFIT = {
    # They put their image back in after every step, under the noise of the whole run.
    "FluxInpaintPipeline": PUT_BACK,
    "Flux2KleinKVPipeline": PUT_BACK,  # it keeps what its first step reads of the reference
    "QwenImageInpaintPipeline": PUT_BACK,
    "StableDiffusionInpaintPipeline (4 channels)": PUT_BACK,
    "HiDreamImagePipeline": "a part of the model runs without gradients",  # its experts, outside of training mode
    "MiniMaxH3ModularPipeline": "steps with scheduler and audio_scheduler",
    "OmniGenPipeline": "has no encode_prompt",
    "StableDiffusionInstructPix2PixPipeline": "has no encode_prompt",
}


def sd3(seed: int = 0):
    return assemble("StableDiffusion3Pipeline", sd3_parts, {}, seed=seed)[0]


def flux(seed: int = 0, **given: Any):
    return assemble("FluxPipeline", partial(flux_parts, **given), {}, seed=seed)[0]


def sd15(scheduler=None, seed: int = 0):
    return assemble("StableDiffusionPipeline", lambda: sd15_parts(scheduler=scheduler or pndm()), {}, seed=seed)[0]


def save(pipe, folder: Path) -> Path:
    """The pipeline as a directory that `DiffusionPipeline.from_pretrained` reads, its absent parts named as such."""
    if hasattr(pipe, "_component_specs"):
        pipe.save_pretrained(str(folder), overwrite_modular_index=True)
        return folder
    pipe.save_pretrained(folder)
    index = json.loads((folder / "model_index.json").read_text())
    index |= {name: [None, None] for name, part in pipe.components.items() if part is None}
    (folder / "model_index.json").write_text(json.dumps(index))
    vae = json.loads((folder / "vae" / "config.json").read_text())
    if vae["_class_name"] == "AutoencoderTiny":  # it writes this key and does not take it
        vae.pop("block_out_channels", None)
    (folder / "vae" / "config.json").write_text(json.dumps(vae))
    return folder


def call_of(pipe) -> dict[str, Any]:
    return {"StableDiffusion3Pipeline": CALL, "FluxPipeline": FLUX_CALL}.get(type(pipe).__name__, {})


def policy(pipe=None, rank: int = 2, alpha: float | None = None, **options: Any) -> PipelinePolicy:
    pipe = pipe or sd3()
    return PipelinePolicy(pipe, Adapter(rank=rank, alpha=alpha), **{"call": call_of(pipe)} | options)


def stir(policy: PipelinePolicy, scale: float = 0.1) -> PipelinePolicy:
    """Move the trained weights off their start, where a LoRA is the base."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.weights.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return policy


def in_file(values: dict[str, torch.Tensor], scale: float = 2.0) -> dict[str, torch.Tensor]:
    """Values of a LoRA as its file has them, the scale in B: of an adapter without alpha it is 2."""
    return {key: value * scale if ".lora_B." in key else value for key, value in values.items()}


@differentiable
def red(images, prompts):
    """The mean of an image's red channel."""
    return images[:, 0].mean((1, 2))


def config(output: Path | str = "nowhere", **options: Any) -> Config:
    """A run of seconds: 2 prompts x 4 samples, 6 steps. An option train__lr is the configuration's train.lr."""
    small = dict(output=str(output), name="run", device="cpu", precision="fp32", tracker="none", reward="red",
                 held_out=0.3, image__call=CALL, adapter__rank=2, train__epochs=2, train__prompts=2, train__group=4,
                 train__micro_batch=4, train__steps=6, eval__steps=3, eval__guidance=1.0, eval__prompts=2)
    return load(None, {key.replace("__", "."): value for key, value in (small | options).items()})


def options(output: Path | str, **given: Any) -> dict[str, Any]:
    """What `flowgrpo.align` is given beside a model, rewards, prompts and a method, for a run as of `config`."""
    kept = config(output, **given).model_dump(exclude_unset=True)
    return {key: value for key, value in kept.items() if key not in ("reward", "method", "model", "prompts")}


def trainer(policy: PipelinePolicy | None = None, rewards=None, **options: Any) -> Trainer:
    """A Trainer as `train.run` makes it, on the tiny SD3."""
    settings = config(**options)
    torch.manual_seed(settings.seed)
    policy = policy or PipelinePolicy(sd3(), settings.adapter, precision=settings.precision,
                                      guidance=settings.train.guidance, call=CALL, memory=settings.memory,
                                      adapted=with_parts(preset(settings.method), settings.parts).rollout.adapted)
    return Trainer(settings, Accelerator(cpu=True), policy, rewards or {"red": red},
                   ([Prompt(text) for text in PROMPTS], []))


def trainer_of(settings: Config, rewards: dict[str, Any], prompts: list[Prompt], pipe: Any = None) -> Trainer:
    """A Trainer of a configuration on the tiny SD3, or on another pipeline."""
    torch.manual_seed(settings.seed)
    made = build.make_policy(settings, torch.device("cpu"), pipe or sd3())
    return Trainer(settings, Accelerator(cpu=True), made, rewards, (prompts, []))


def weights(policy: PipelinePolicy) -> dict[str, torch.Tensor]:
    """Copies of all weights of a pipeline."""
    return {f"{name}.{key}": held.clone() for name, module in policy.pipe.components.items()
            if isinstance(module, torch.nn.Module) for key, held in module.state_dict().items()}


def step_weights(trainer: Trainer, parts) -> dict[int, float]:
    """The method's weights of the steps that these parts train, in the trainer's epoch."""
    return trainer.rollouts.step_weights(parts, trainer.epoch)
