"""Build the video starter: draw clips, train its autoencoder and its denoiser from scratch, save a diffusers pipeline.

    python scripts/build/build_starter_video.py --out runs/starter_video           # everything
    python scripts/build/build_starter_video.py --out runs/starter_video --resume  # go on after an interruption

Each stage leaves a file in --out and is not run again: autoencoder, its decoder alone, latents, denoiser (these but the
latents with a checkpoint every 100 steps), and last the pipeline directory itself, whose accuracy per task is printed.
Nearly half of the denoiser's clips are jolted on the way, as filmed by hand, which no caption mentions. The autoencoder
has to keep 97 % of drawn clips true, or nothing is built on it. Seeds are fixed; CPU and GPU give slightly different
weights.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import starter_clips
import torch
from build_starter import rate
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from flowgrpo import rewards
from flowgrpo.config.sections import Adapter
from flowgrpo.data.prompts import STARTER, load_prompts
from flowgrpo.evaluation import measured
from flowgrpo.policies.pipelines.call import plain_on_cpu
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.starter import VIDEO_CALL, motion
from flowgrpo.starter.scenes import COLOURS, SHAPES, SIZE

MAX_TOKENS = VIDEO_CALL["max_sequence_length"]  # the longest prompt of this world has 7 tokens with its end
CHANNELS, PATCH = 12, 4  # of a latent; pixels per side of what the autoencoder takes as one
JOLTED = 0.46  # of the denoiser's clips
NOISE = 0.05  # deviation of the autoencoder's posterior
CEILING = 0.97  # share of drawn clips that have to stay true through the autoencoder
TEXT_WIDTH = 96


def build_tokenizer():
    """T5 tokenizer in which every word of this world is one token, with single characters to fall back on."""
    from transformers import T5Tokenizer

    words = sorted({"a", *SHAPES, *COLOURS, *(word for phrases in motion.PHRASES.values() for phrase in phrases
                                                    for word in phrase.split())})
    letters = [chr(code) for code in range(33, 127)]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"▁{word}", -1.0) for word in words), ("▁", -10.0),
              *((letter, -10.0) for letter in letters)]
    tokenizer = T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=MAX_TOKENS)
    for word in words:
        assert len(tokenizer(word)["input_ids"]) == 2, f"{word!r} is not one token"
    return tokenizer


def build_autoencoder(mean=(0.0,) * CHANNELS, std=(1.0,) * CHANNELS):
    """5 frames of 64 x 64 pixels -> 3 of 8 x 8: the first alone, the others by two."""
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=24, decoder_base_dim=32, z_dim=CHANNELS, dim_mult=[1, 1], num_res_blocks=1, is_residual=True,
        temperal_downsample=[True], patch_size=PATCH, in_channels=3 * PATCH**2, out_channels=3 * PATCH**2,
        scale_factor_temporal=2, scale_factor_spatial=8, latents_mean=list(mean), latents_std=list(std))


def build_text_encoder(tokenizer):
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(UMT5Config(
        vocab_size=len(tokenizer), d_model=TEXT_WIDTH, d_kv=24, d_ff=192, num_layers=2, num_heads=4, dropout_rate=0.0,
        relative_attention_num_buckets=8, relative_attention_max_distance=16, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id))


def build_denoiser():
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=6, attention_head_dim=32, in_channels=CHANNELS, out_channels=CHANNELS,
        text_dim=TEXT_WIDTH, freq_dim=128, ffn_dim=384, num_layers=5, rope_max_seq_len=32)


def draw(count: int, seed: int, jolted: float = 0.0) -> tuple[torch.Tensor, list[str]]:
    """`count` training clips: frames uint8 [count, F, 3, 64, 64] and their prompts; none is held out. jolted: the share
    of clips with a jolt."""
    rng, known = np.random.default_rng(seed), starter_clips.clips(held=False)
    frames, prompts = torch.empty(count, starter_clips.FRAMES, 3, SIZE, SIZE, dtype=torch.uint8), []
    for i in range(count):
        clip = known[rng.integers(len(known))]
        drawn = starter_clips.render(clip, rng, rng.random() < jolted)
        frames[i] = torch.from_numpy((255 * drawn).round().astype(np.uint8))
        prompts.append(clip.caption(rng.integers(starter_clips.STYLES)))
    return frames, prompts


def shown(frames: torch.Tensor) -> torch.Tensor:
    """Bytes [B, F, 3, H, W] as the autoencoder takes them: [B, 3, F, H, W] in [-1, 1]."""
    return frames.float().div(127.5).sub(1).transpose(1, 2)


def decode(vae, z: torch.Tensor) -> torch.Tensor:
    """`vae.decode`, without the clamp at the end that has no gradient."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

    vae.clear_cache()
    z, parts = vae.post_quant_conv(z), []
    for i in range(z.shape[2]):
        vae._conv_idx = [0]
        parts.append(vae.decoder(z[:, :, i:i + 1], feat_cache=vae._feat_map, feat_idx=vae._conv_idx,
                                 first_chunk=i == 0))
    return unpatchify(torch.cat(parts, 2), PATCH)


def windows(frames: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Cut the darkest of three random windows [B, F, 3, 32, 32] from clips [B, F, 3, 64, 64], mostly empty frames."""
    side = SIZE // 2
    corners = torch.randint(0, SIZE - side + 1, (len(frames), 3, 2), generator=generator).tolist()
    cut = [[clip[..., y:y + side, x:x + side] for y, x in row] for clip, row in zip(frames, corners)]
    return torch.stack([min(row, key=lambda window: window.float().mean()) for row in cut])


def train_autoencoder(out: Path, device: str, steps: int, batch: int, resume: bool, name: str, lr: float, seed: int,
                      start: str | None = None):
    """Squared and absolute error on the frames; the latent kept near unit scale and robust to a little noise. Four
    fifths of the steps see windows, which cost a quarter, the last whole frames, a quarter as many. start: the stage
    that it begins with; then the encoder stays as it is."""
    torch.manual_seed(0)
    vae = load_autoencoder(out, device, start) if start else build_autoencoder().to(device)
    frames = draw(4_000, seed, jolted=0.25)[0]
    trained = [p for part in ([vae.decoder, vae.post_quant_conv] if start else [vae]) for p in part.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    checkpoint, first = out / f"{name}.pt", 0
    if resume and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)  # this script's own file
        vae.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    bar = tqdm(range(first, steps), desc=name, initial=first, total=steps, mininterval=5)
    for step in bar:
        generator = torch.Generator().manual_seed(20_000 * seed + step)
        cut = step < 0.8 * steps
        x = frames[torch.randint(len(frames), (batch if cut else batch // 4,), generator=generator)]
        x = shown(windows(x, generator) if cut else x).to(device)
        with torch.autocast(device, torch.bfloat16):
            with torch.set_grad_enabled(not start):
                z = vae._encode(x)[:, :CHANNELS].float()
            error = decode(vae, z + NOISE * torch.randn(z.shape, generator=generator).to(device)).float() - x
        mean, var = z.mean((0, 2, 3, 4)), z.var((0, 2, 3, 4))
        loss = error.square().mean() + 0.1 * error.abs().mean() + 1e-3 * (mean.square() + var.log().square()).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / 50, 1.0, (steps - step) / (0.6 * steps))
        optimizer.step()
        bar.set_postfix(error=f"{error.detach().abs().mean():.4f}", std=f"{var.detach().mean() ** 0.5:.2f}")
        if (step + 1) % 100 == 0:
            keep(checkpoint, {"model": vae.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1})
    with torch.no_grad():  # the posterior's deviation is what it was trained with
        vae.quant_conv.weight[CHANNELS:] = 0
        vae.quant_conv.bias[CHANNELS:] = 2 * np.log(NOISE)
    save_file({k: v.contiguous() for k, v in vae.state_dict().items()}, out / f"{name}.safetensors")


def keep(path: Path, state: dict):
    """Write a checkpoint; a kill in the middle leaves the one before."""
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


@torch.no_grad()
def ceiling(vae, count: int) -> dict[str, float]:
    """Share of `count` drawn held-out clips that the strict rewards find true after the autoencoder."""
    rng, held = np.random.default_rng(4), starter_clips.clips(held=True)
    drawn = [held[i % len(held)] for i in range(count)]
    frames = torch.from_numpy(np.stack([starter_clips.render(clip, rng) for clip in drawn])).float()
    made = torch.cat([vae.decode(vae.encode(part.transpose(1, 2) * 2 - 1).latent_dist.mean).sample
                      for part in frames.split(50)]).transpose(1, 2)
    scores = rewards.score({name: rewards.find(name) for name in ("motion", "appearance")}, made / 2 + 0.5,
                           [clip.caption() for clip in drawn], [{}] * count)
    return dict(zip(("motion", "appearance"), scores.mean(0).tolist()))


@torch.no_grad()
def encode_dataset(vae, out: Path, device: str, count: int):
    """Latents fp16 [count, 12, 3, 8, 8], standardised per channel, with the prompts' token ids."""
    tokenizer, latents, ids = build_tokenizer(), [], []
    for part in tqdm(range(count // 1000), desc="latents", mininterval=5):
        frames, prompts = draw(1000, 1000 + part, JOLTED)
        for x in frames.split(100):
            with torch.autocast(device, torch.bfloat16):
                latents.append(vae.encode(shown(x).to(device)).latent_dist.mean.cpu().half())
        ids.append(tokens(tokenizer, prompts))
    z = torch.cat(latents).float()
    stats = torch.stack([z.mean((0, 2, 3, 4)), z.std((0, 2, 3, 4))])
    mean, std = stats.view(2, 1, CHANNELS, 1, 1, 1)
    z = ((z - mean) / std).half()
    save_file({"latents": z, "ids": torch.cat(ids), "stats": stats}, out / "latents.safetensors")


def tokens(tokenizer, prompts: list[str]) -> torch.Tensor:
    return tokenizer(prompts, padding="max_length", max_length=MAX_TOKENS, return_tensors="pt").input_ids


class Starter(torch.nn.Module):
    """Denoiser and text encoder, fed as WanPipeline feeds them: embeddings of the padding are zero."""

    def __init__(self, tokenizer):
        super().__init__()
        self.denoiser, self.text, self.pad = build_denoiser(), build_text_encoder(tokenizer), tokenizer.pad_token_id

    def forward(self, x, sigma, ids):
        mask = ids != self.pad
        embeds = self.text(ids, mask).last_hidden_state * mask[..., None]
        return self.denoiser(x, sigma * 1000, embeds, return_dict=False)[0]


def train_denoiser(out: Path, device: str, steps: int, batch: int, resume: bool, lr: float = 1.5e-3):
    """Flow matching with logit-normal sigmas, 10 % empty prompts, and an average of the weights at the end."""
    drawn, tokenizer = load_file(out / "latents.safetensors"), build_tokenizer()
    empty = tokens(tokenizer, [""])
    torch.manual_seed(3)
    model = Starter(tokenizer).to(device)
    average = {k: v.detach().clone() for k, v in model.named_parameters()}
    optimizers = denoiser_optimizers(model, lr)
    checkpoint, first = out / "denoiser.pt", 0
    saved = torch.load(checkpoint, weights_only=True) if checkpoint.exists() else None  # this script's own file
    if saved and saved["step"] >= steps:
        return
    if resume and saved:
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"]):
            optimizer.load_state_dict(state)
        average, first = saved["average"], saved["step"]
    if device == "cpu":
        for block in model.denoiser.blocks:
            block.compile()
    bar, smooth = tqdm(range(first, steps), desc="denoiser", initial=first, total=steps, mininterval=5), None
    for step in bar:
        generator = torch.Generator().manual_seed(10_000 + step)
        rows = torch.randint(len(drawn["latents"]), (batch,), generator=generator)
        x0, ids = drawn["latents"][rows].float(), drawn["ids"][rows]
        ids = torch.where(torch.rand(batch, 1, generator=generator) < 0.1, empty, ids)
        sigma = torch.sigmoid(0.4 + 1.1 * torch.randn(batch, generator=generator))
        noise = torch.randn(x0.shape, generator=generator)
        x0, ids, sigma, noise = (t.to(device) for t in (x0, ids, sigma, noise))
        s = sigma.view(-1, 1, 1, 1, 1)
        with torch.autocast(device, torch.bfloat16):
            v = model((1 - s) * x0 + s * noise, sigma, ids)
        loss = (v.float() - (noise - x0)).square().mean()
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = optimizer.defaults["lr"] * rate(step, steps)
            optimizer.step()
        decay = min(0.998, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(average.values()), [p.detach() for p in model.parameters()], 1 - decay)
        smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
        bar.set_postfix(loss=f"{smooth:.4f}")
        if (step + 1) % 100 == 0 or step + 1 == steps:
            keep(checkpoint, {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers],
                              "average": average, "step": step + 1})


def denoiser_optimizers(model: Starter, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, which needs fewer steps, and AdamW for the rest."""
    matrices = [p for p in model.denoiser.blocks.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    return [torch.optim.Muon(matrices, lr=2 * lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)]


def load_autoencoder(out: Path, device: str, stage: str = "decoder", *stats):
    vae = build_autoencoder(*stats).to(device).eval()
    vae.load_state_dict(load_file(out / f"{stage}.safetensors"))
    return vae


def assemble(out: Path, target: Path):
    """Write the pipeline directory that a stock WanPipeline loads; denoiser and autoencoder in fp16."""
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

    tokenizer, stats = build_tokenizer(), load_file(out / "latents.safetensors")["stats"]
    model = Starter(tokenizer)
    average = torch.load(out / "denoiser.pt", weights_only=True)["average"]
    model.load_state_dict(model.state_dict() | average)
    # transformers loads weights in the dtype they were saved in, diffusers in fp32: this way all come as fp32.
    vae = load_autoencoder(out, "cpu", "decoder", *stats.tolist()).half()
    pipe = WanPipeline(
        transformer=model.denoiser.half(), scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0), tokenizer=tokenizer,
        vae=vae, text_encoder=model.text, transformer_2=None)
    pipe.save_pretrained(target, safe_serialization=True)


def report(model: str, device: str, guidance: list[float], steps: int, count: int):
    """Print the accuracies per task on held-out prompts, with the pipeline's own scheduler."""
    policy = PipelinePolicy(load_pipeline(model), Adapter(rank=0), device=device, call=VIDEO_CALL)
    prompts = measured.spread(load_prompts(STARTER / "video_held_out.jsonl"), count)
    functions = {name: rewards.find(name) for name in ("motion", "motion_graded", "appearance")}
    print("| guidance | reward | " + " | ".join((*starter_clips.TASKS, "all")) + " |")
    print("|" + "---|" * (len(starter_clips.TASKS) + 3))
    for scale in guidance:
        found = measured.measure(policy, prompts, functions, steps=steps, guidance=scale, samples=1, micro_batch=64)
        for name, mean in found.mean().items():
            told = [*(found.by_task(name)[task] for task in starter_clips.TASKS), mean]
            print(f"| {scale:g} | {name} | " + " | ".join(f"{value:.3f}" for value in told) + " |", flush=True)


def write_prompts(folder: Path):
    """video_train.jsonl and video_held_out.jsonl: every clip of the world said in every style, on its side."""
    for name, held in (("video_train", False), ("video_held_out", True)):
        lines = [{"prompt": clip.caption(style), "metadata": {"task": clip.task, "motion": clip.motion}}
                 for clip in starter_clips.clips(held) for style in range(starter_clips.STYLES)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/starter_video"), help="working folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=2_600, help="denoiser steps")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--clips", type=int, default=16_000)
    parser.add_argument("--ae-steps", type=int, default=1_500)
    parser.add_argument("--decoder-steps", type=int, default=2_000)
    parser.add_argument("--ae-batch", type=int, default=32)
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0, 2.0, 3.0, 4.0, 6.0],
                        help="of the report at the end")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--prompts", action="store_true", help="only write the prompt files of the package")
    args = parser.parse_args()
    if args.prompts:
        return write_prompts(STARTER)
    args.out.mkdir(parents=True, exist_ok=True)
    start = time.time()
    for name, steps, lr, seed, before in (("autoencoder", args.ae_steps, 3e-3, 1, None),
                                          ("decoder", args.decoder_steps, 2e-3, 2, "autoencoder")):
        if not (args.out / f"{name}.safetensors").exists():
            train_autoencoder(args.out, args.device, steps, args.ae_batch, args.resume, name, lr, seed, before)
    kept = ceiling(load_autoencoder(args.out, "cpu"), 210)
    print(f"true after the autoencoder: {kept}", flush=True)
    if min(kept.values()) < CEILING:
        raise SystemExit(f"expected {CEILING} at least: remove {args.out}/decoder.*, raise --decoder-steps")
    if not (args.out / "latents.safetensors").exists():
        encode_dataset(load_autoencoder(args.out, args.device), args.out, args.device, args.clips)
    with plain_on_cpu(torch.device(args.device)):
        train_denoiser(args.out, args.device, args.steps, args.batch, args.resume)
    assemble(args.out, args.out / "pipeline")
    print(f"{args.out / 'pipeline'} written after {time.time() - start:.0f} s", flush=True)
    report(str(args.out / "pipeline"), args.device, args.guidance, steps=20, count=126)


if __name__ == "__main__":
    main()
