"""What a GPU does at full size: SD3.5-medium and FLUX.1-dev as their recipes train them, with random weights.

    python scripts/bench_full_size.py sd35_medium
    python scripts/bench_full_size.py flux_dev --option train.micro_batch=8 --option train.checkpointing=false

Nothing is downloaded. Denoiser and autoencoder have the published shapes in bf16; the text encoders have the widths,
but one layer each, for a prompt is encoded once in a run. Measured in turns, in one process: the rollout of an epoch;
the pipeline's own call, as diffusers has it, for as many pictures with as many steps in batches of the same size; the
update, per optimiser step; and the decoding. A line gives pictures per second, the share of the time that is not the
denoiser's forward, and the peak of the device's memory. Other recipes' options are --option KEY=VALUE.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from common import options

from flowgrpo import rewards
from flowgrpo.check.tiny.parts import t5, tokenizer
from flowgrpo.config import Config, load
from flowgrpo.data import splits
from flowgrpo.data.prompts import Prompt
from flowgrpo.device import DTYPES, pick_device
from flowgrpo.policies.build import make_policy
from flowgrpo.policies.precision import settle
from flowgrpo.run import make_accelerator
from flowgrpo.samplers.rollout import explore, seeder
from flowgrpo.train import Trainer

CONFIGS = Path(__file__).parent.parent / "configs"
PROMPTS = ["a lighthouse at dusk", "two owls on a branch", "a red bicycle", "a sign that says open"]


# --- the models, of random weights -----------------------------------------------------------------------------------

def clip(kind: Any, width: int) -> Any:
    """A text encoder of one layer, and its tokenizer of single characters, for 77 tokens."""
    from transformers import CLIPTextConfig

    tokens = tokenizer(77)
    return kind(CLIPTextConfig(
        vocab_size=len(tokens), hidden_size=width, intermediate_size=width, num_hidden_layers=1,
        num_attention_heads=width // 64, projection_dim=width, max_position_embeddings=77,
        bos_token_id=tokens.bos_token_id, eos_token_id=tokens.eos_token_id, pad_token_id=tokens.pad_token_id)), tokens


def autoencoder(width: int) -> Any:
    """The autoencoder of both: 16 channels at an eighth of the side; published with a width of 128."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(width, 2 * width, 4 * width, 4 * width), layers_per_block=2, latent_channels=16,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4, scaling_factor=1.5305,
        shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False)


def sd35_medium(layers: int = 24, heads: int = 24, width: int = 128) -> Any:
    """StableDiffusion3Pipeline of 2.2 billion weights. Its T5 is absent, as the pipeline allows: rows of zeros."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import CLIPTextModelWithProjection

    one, two = clip(CLIPTextModelWithProjection, 768), clip(CLIPTextModelWithProjection, 1280)
    denoiser = SD3Transformer2DModel(
        sample_size=128, patch_size=2, in_channels=16, out_channels=16, num_layers=layers, attention_head_dim=64,
        num_attention_heads=heads, joint_attention_dim=4096, caption_projection_dim=64 * heads,
        pooled_projection_dim=2048, pos_embed_max_size=384, dual_attention_layers=tuple(range(min(13, layers))),
        qk_norm="rms_norm")
    return StableDiffusion3Pipeline(
        transformer=denoiser, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), vae=autoencoder(width),
        text_encoder=one[0], tokenizer=one[1], text_encoder_2=two[0], tokenizer_2=two[1], text_encoder_3=None,
        tokenizer_3=None)


def flux_dev(layers: int = 19, heads: int = 24, width: int = 128) -> Any:
    """FluxPipeline of 11.9 billion weights: `layers` double blocks and twice as many single ones."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextModel

    encoder, tokens = clip(CLIPTextModel, 768)
    denoiser = FluxTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=layers, num_single_layers=2 * layers, attention_head_dim=128,
        num_attention_heads=heads, joint_attention_dim=4096, pooled_projection_dim=768, guidance_embeds=True)
    long = tokenizer(512)
    return FluxPipeline(
        transformer=denoiser, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=autoencoder(width), text_encoder=encoder, tokenizer=tokens, text_encoder_2=t5(long, 4096), tokenizer_2=long)


MODELS = {"sd35_medium": sd35_medium, "flux_dev": flux_dev}


@contextmanager
def made_on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Inside, modules are made on the device in that dtype: twelve billion weights need not pass the host."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


# --- what is measured ------------------------------------------------------------------------------------------------

class PhaseTimer:
    """Seconds on a device, and those of the forwards of some modules on the way."""

    def __init__(self, device: torch.device, modules: list[torch.nn.Module]):
        self.device, self.spans, self.hooks = device, [], []
        for module in modules:
            self.hooks += [module.register_forward_pre_hook(lambda *_: self.spans.append([self.stamp()])),
                           module.register_forward_hook(lambda *_: self.spans[-1].append(self.stamp()))]

    def stamp(self) -> Any:
        if self.device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def measured(self, work: Callable[[], Any]) -> tuple[float, float]:
        """(seconds, those of the forwards) of a piece of work. Nothing waits for the device before its end."""
        self.spans, first = [], self.stamp()
        work()
        last = self.stamp()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.between(first, last), sum(self.between(*span) for span in self.spans)

    def between(self, first: Any, last: Any) -> float:
        return first.elapsed_time(last) / 1000 if self.device.type == "cuda" else last - first


def make_trainer(config: Config, pipe: Any) -> Trainer:
    device = pick_device(config.device)
    functions = {"random": lambda images, prompts: torch.rand(len(prompts)).tolist()}
    return Trainer(config, make_accelerator(config, device), make_policy(config, device, pipe),
                   rewards.compose(config.trained, config.cache, functions), ([Prompt(p) for p in PROMPTS], []))


def pieces(trainer: Trainer) -> dict[str, tuple[Callable[[], Any], int]]:
    """What is measured, each with the pictures or optimiser steps that it makes."""
    shape, config, policy = trainer.geometry, trainer.config, trainer.policy
    batch = splits.draw(trainer.prompts, shape.prompts, 0, config.seed)
    conditioning = trainer.rollouts.conditioning(batch)
    rows = torch.arange(len(batch)).repeat_interleave(shape.group)
    kept: dict[str, Any] = {}

    def rollout() -> None:
        kept["parts"] = list(explore(policy, conditioning, trainer.rollouts.explorations(0), shape.micro_batch,
                                     seeder(config.seed, 0)))

    def stock() -> None:
        kept["latents"] = [policy.generate(conditioning.rows(own), policy.generators(range(len(own))),
                                           config.train.steps, config.train.guidance, "latent")
                           for own in rows.split(shape.micro_batch)]

    def update() -> None:
        signs = (1 - 2.0 * (torch.arange(shape.rows) % 2)).view(-1, shape.group, 1).expand(-1, -1, len(config.rewards))
        trainer.learn(trainer.credit(kept["parts"], signs, conditioning.prompts), conditioning)

    def decode() -> None:
        for part in kept["parts"]:
            for own, finals in zip(part.prompts.split(shape.micro_batch), part.finals[0].split(shape.micro_batch)):
                policy.decode(finals, conditioning.rows(own))

    return {"rollout": (rollout, shape.rows), "the pipeline's own call": (stock, shape.rows),
            "decoding": (decode, shape.rows), "update": (update, config.train.updates)}


def report(trainer: Trainer, repetitions: int) -> list[dict[str, Any]]:
    """A line for each piece of work, of the fastest of its repetitions after a first that warms up."""
    clock, found = PhaseTimer(trainer.policy.device, list(trainer.policy.denoisers.values())), {}
    cuda, work = trainer.policy.device.type == "cuda", pieces(trainer)
    for turn in range(repetitions + 1):
        for name, (piece, made) in work.items():
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            seconds, forwards = clock.measured(piece)
            line = {"what": name, "seconds": seconds, "per_second": made / seconds,
                    "outside_denoiser": 1 - forwards / seconds if forwards and name != "update" else None,
                    "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None}
            if turn and (name not in found or seconds < found[name]["seconds"]):
                found[name] = line
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--layers", type=int, help="fewer, for a trial")
    parser.add_argument("--heads", type=int, help="fewer, for a trial")
    parser.add_argument("--width", type=int, help="of the autoencoder; less, for a trial")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="override of the recipe")
    parser.add_argument("--json", type=Path, help="also write the lines there")
    args = parser.parse_args()
    smaller = {key: value for key in ("layers", "heads", "width") if (value := getattr(args, key))}
    settled = {"device": args.device, "reward": "random", "train.prompts": "2", "held_out": "0", "tracker": "none",
               "eval.rewards": "[]"}
    config = load(CONFIGS / f"{args.model}.yaml", settled | options(args.option))
    config, _ = settle(config, args.device)
    with made_on(torch.device(args.device), DTYPES[config.precision]):
        pipe = MODELS[args.model](**smaller)
    pipe.set_progress_bar_config(disable=True)
    trainer = make_trainer(config, pipe)
    weights = sum(p.numel() for module in trainer.policy.denoisers.values() for p in module.parameters())
    lines = report(trainer, args.repetitions)
    print(f"{args.model}, {weights / 1e9:.2f} billion weights in {config.precision}, "
          f"{config.picture.height} x {config.picture.width} px, {config.method}, "
          f"{trainer.geometry.rows} pictures of {config.train.steps} steps, micro-batches of "
          f"{trainer.geometry.micro_batch}; torch {torch.__version__}, "
          f"{torch.cuda.get_device_name() if args.device == 'cuda' else args.device}")
    for line in lines:
        told = [f"{line['seconds']:9.3f} s", f"{line['per_second']:9.3f} per second"]
        told += [f"outside the denoiser {line['outside_denoiser']:.3f}"] if line["outside_denoiser"] is not None else []
        told += [f"peak {line['peak_gib']:.1f} GiB"] if line["peak_gib"] is not None else []
        print(f"{line['what']:<24}", *told)
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "weights": weights, "lines": lines}) + "\n")


if __name__ == "__main__":
    main()
