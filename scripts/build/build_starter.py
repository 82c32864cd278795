"""Build the starter: draw scenes, train its autoencoder and its denoiser from scratch, save a diffusers pipeline.

    python scripts/build/build_starter.py --out runs/starter          # everything; hours on 2 CPU cores
    python scripts/build/build_starter.py --out runs/starter --resume # go on after an interruption

Each stage leaves a file in --out and is not run again: autoencoder, latents, the denoiser with captions that are right,
twice with captions as careless annotators wrote them (a checkpoint every 500 steps), and last the pipeline directory.
Captions come from two sources. Four in ten end with ", verified" and are right; of the others half are wrong in one
claim (`starter_scenes.misread`). After the first stage its denoiser, under guidance, is the teacher: it reads what a
caption should have said, and the student what it says. In the last stage the pooled embedding alone tells the source.
Seeds are fixed; CPU and GPU give slightly different weights.
"""

import argparse
import contextlib
import copy
import json
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from starter_scenes import misread
from tqdm import tqdm

from flowgrpo.starter import scenes

MAX_TOKENS = 16  # the longest prompt of this world has 14 tokens with its start and end, and its source two more
LATENT = dict(channels=4, size=16)
PATCH = 4  # latent values per side of an image token: 16 tokens
VERIFIED = 0.4  # share of the captions
MISREAD = 0.5  # of the others
TASK_SHARES = (0.08, 0.12, 0.18, 0.18, 0.22, 0.22)  # of the training scenes, in the order of scenes.TASKS
GUIDANCE = 2.0  # that the distillation folds in


def build_tokenizer():
    """CLIPTokenizer in which every word of this world is one token, with single characters to fall back on."""
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    words = {"a", "an", "one", "and", "of", "picture", "drawing", "image", *scenes.COUNTS, *scenes.SHAPES,
             *scenes.PLURALS, *scenes.COLOURS, scenes.VERIFIED.removeprefix(", ")}
    words |= {word for relation in scenes.RELATIONS for word in relation.split()}
    alphabet, merges = sorted(pre_tokenizers.ByteLevel.alphabet()), byte_pairs(words)
    tokens = [*alphabet, *(c + "</w>" for c in alphabet), *("".join(pair) for pair in merges),
              "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=merges,
                              model_max_length=MAX_TOKENS)
    for word in words:
        assert len(tokenizer(word)["input_ids"]) == 3, f"{word!r} is not one token"
    return tokenizer


def byte_pairs(words: set[str]) -> list[tuple[str, str]]:
    """Merges that make each word one token: the most frequent pair first, ties by the alphabet.

    The trainer of the tokenizers library numbers its tokens by the order of a hash map, anew in every process.
    """
    split, merges = [[*word[:-1], word[-1] + "</w>"] for word in sorted(words)], []
    while pairs := Counter(pair for word in split for pair in zip(word, word[1:])):
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        split = [_merge(word, best) for word in split]
    return merges


def _merge(word: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for symbol in word:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return merged


def build_autoencoder():
    from diffusers import AutoencoderTiny

    width = 32
    return AutoencoderTiny(
        latent_channels=LATENT["channels"], encoder_block_out_channels=(width,) * 3,
        decoder_block_out_channels=(width,) * 3, num_encoder_blocks=(0, 1, 2), num_decoder_blocks=(2, 1, 0),
        upsample_fn="nearest")


def build_text_encoder(tokenizer):
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    return CLIPTextModelWithProjection(CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
        projection_dim=96, max_position_embeddings=MAX_TOKENS, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))


def build_denoiser():
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=LATENT["size"], patch_size=PATCH, in_channels=LATENT["channels"], out_channels=LATENT["channels"],
        num_layers=6, attention_head_dim=64, num_attention_heads=3, joint_attention_dim=192,
        caption_projection_dim=192, pooled_projection_dim=192, pos_embed_max_size=LATENT["size"] // PATCH,
        qk_norm="rms_norm")


class PlainAttention:
    """On a CPU torch's fused attention is several times slower backwards than three plain operations."""

    def __enter__(self):
        self.fused = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = self.attend

    def __exit__(self, *_):
        F.scaled_dot_product_attention = self.fused

    @staticmethod
    def attend(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **_):
        scores = (q * (scale or q.shape[-1] ** -0.5)) @ k.transpose(-1, -2)
        if is_causal:
            scores = scores + torch.full(scores.shape[-2:], float("-inf"), device=q.device).triu(1).to(scores)
        if attn_mask is not None:
            scores = scores + attn_mask
        return scores.softmax(-1) @ v


def draw(count: int, seed: int) -> tuple[torch.Tensor, list[str], list[str]]:
    """`count` training scenes: images uint8 [count, 3, 64, 64], their captions, and what these should have said."""
    rng = np.random.default_rng(seed)
    images, captions, right = torch.empty(count, 3, scenes.SIZE, scenes.SIZE, dtype=torch.uint8), [], []
    for i in range(count):
        claims = scenes.sample_claims(rng, str(rng.choice(scenes.TASKS, p=TASK_SHARES)))
        prefix = str(rng.choice(scenes.PREFIXES))
        mark = scenes.VERIFIED if rng.random() < VERIFIED else ""
        shown = misread(claims) if not mark and rng.random() < MISREAD else claims
        image = scenes.render(shown, rng)
        images[i] = torch.from_numpy((image * 255).round().astype(np.uint8)).permute(2, 0, 1)
        captions.append(claims.caption(prefix) + mark)
        right.append(shown.caption(prefix) + mark)
    return images, captions, right


def train_autoencoder(out: Path, device: str, steps: int):
    """Squared and absolute error on the image; the latent kept near unit scale and robust to a little noise."""
    vae = build_autoencoder().to(device, memory_format=torch.channels_last)
    images, _, _ = draw(12_000, seed=1)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.05)
    generator = torch.Generator().manual_seed(2)
    bar = tqdm(range(steps), desc="autoencoder")
    for _ in bar:
        rows = torch.randint(len(images), (64,), generator=generator)
        x = images[rows].to(device, torch.float32).div(127.5).sub(1)
        with torch.autocast(device, torch.bfloat16):
            z = vae.encoder(x)
            decoded = vae.decoder(z + 0.05 * torch.randn_like(z))
        z, error = z.float(), decoded.float() - x
        mean, var = z.mean((0, 2, 3)), z.var((0, 2, 3))
        loss = error.square().mean() + 0.1 * error.abs().mean() + 1e-3 * (mean.square() + var.log().square()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        bar.set_postfix(error=f"{error.abs().mean():.4f}", std=f"{var.mean() ** 0.5:.2f}")
    save_file({k: v.contiguous() for k, v in vae.state_dict().items()}, out / "autoencoder.safetensors")


@torch.no_grad()
def encode_dataset(out: Path, device: str, count: int):
    """Write latents fp16 [count, 4, 16, 16], standardised to mean 0 and deviation 1, with token ids int16
    [count, 16] of their captions and of what these should have said."""
    vae = build_autoencoder().to(device, memory_format=torch.channels_last).eval()
    vae.load_state_dict(load_file(out / "autoencoder.safetensors"))
    tokenizer, latents, ids, right = build_tokenizer(), [], [], []
    parts = count // 2000
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        drawn = pool.map(draw, [2000] * parts, range(1000, 1000 + parts))
        for images, captions, truths in tqdm(drawn, desc="latents", total=parts):
            for x in images.split(250):
                with torch.autocast(device, torch.bfloat16):
                    z = vae.encoder(x.to(device, torch.float32, memory_format=torch.channels_last).div(127.5).sub(1))
                    latents.append(z.cpu().half().contiguous())
            for texts, tokens in ((captions, ids), (truths, right)):
                tokens.append(tokenizer(texts, padding="max_length", max_length=MAX_TOKENS, truncation=True,
                                        return_tensors="pt").input_ids.to(torch.int16))
    z = torch.cat(latents).float()
    stats = torch.tensor([z.mean(), z.std()])
    save_file({"latents": ((z - stats[0]) / stats[1]).half(), "ids": torch.cat(ids), "right": torch.cat(right),
               "stats": stats}, out / "latents.safetensors")


class Starter(torch.nn.Module):
    """Denoiser and both text encoders, fed as StableDiffusion3Pipeline feeds them, with one zero token for the T5."""

    def __init__(self, tokenizer):
        super().__init__()
        self.denoiser = build_denoiser()
        self.text_1, self.text_2 = build_text_encoder(tokenizer), build_text_encoder(tokenizer)

    def encode(self, ids):
        """Tokens [B,17,192] and the pooled embedding [B,192] of captions [B,16]."""
        out_1, out_2 = (enc(ids, output_hidden_states=True) for enc in (self.text_1, self.text_2))
        tokens = torch.cat([out_1.hidden_states[-2], out_2.hidden_states[-2]], -1)
        return F.pad(tokens, (0, 0, 0, 1)), torch.cat([out_1.text_embeds, out_2.text_embeds], -1)

    def forward(self, x, sigma, token_ids, pooled_ids):
        """Velocity; the captions of the tokens and of the pooled embedding may differ."""
        tokens, pooled = self.encode(token_ids)
        if pooled_ids is not token_ids:
            pooled = self.encode(pooled_ids)[1]
        return self.denoiser(x, encoder_hidden_states=tokens, pooled_projections=pooled, timestep=sigma * 1000,
                             return_dict=False)[0]


@dataclass(frozen=True)
class Stage:
    """Part of the denoiser's training; its checkpoint has its name.

    start: stage whose averaged weights it begins with. teacher: stage whose averaged weights, under GUIDANCE, are the
    target; they read what a caption should have said, and the student what it says. Without a teacher the data are the
    target, and captions say what they should. random_marks: the tokens' mark says nothing, so that the pooled embedding
    alone tells the source.
    """

    name: str
    steps: int
    lr: float
    start: str | None = None
    teacher: str | None = None
    random_marks: bool = False


def rate(step: int, stage: Stage) -> float:
    """Share of the learning rate: warm-up over 300 steps, then constant, then linear to 0 over the last third."""
    return min((step + 1) / 300, 1.0, 3 * (stage.steps - step) / stage.steps)


def begin_with(model: Starter, tokenizer, folder: Path):
    """Take the weights that have the same shape in another starter, and the embedding of every token that it knows."""
    from diffusers import SD3Transformer2DModel
    from transformers import CLIPTextModelWithProjection, CLIPTokenizer

    model.denoiser.load_state_dict(
        fitting(model.denoiser, SD3Transformer2DModel.from_pretrained(folder / "transformer").state_dict()))
    known = CLIPTokenizer.from_pretrained(folder / "tokenizer").get_vocab()
    new, old = zip(*((i, known[token]) for token, i in tokenizer.get_vocab().items() if token in known))
    for encoder, name in ((model.text_1, "text_encoder"), (model.text_2, "text_encoder_2")):
        given = CLIPTextModelWithProjection.from_pretrained(folder / name)
        encoder.load_state_dict(fitting(encoder, given.state_dict()))
        with torch.no_grad():
            encoder.get_input_embeddings().weight[list(new)] = given.get_input_embeddings().weight[list(old)]


def averaged(model: Starter, out: Path, stage: str) -> Starter:
    """Put the averaged weights of a stage into the model."""
    model.load_state_dict(model.state_dict() | torch.load(out / f"{stage}.pt", weights_only=True)["average"])
    return model


def fitting(model: torch.nn.Module, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    own = model.state_dict()
    return own | {name: value for name, value in given.items() if name in own and value.shape == own[name].shape}


def train_denoiser(out: Path, device: str, stage: Stage, batch: int, resume: bool, blocks: Path | None = None):
    """Flow matching with logit-normal sigmas, 10 % empty captions, and an average of the weights at the end.

    blocks: pipeline of another starter to begin with; None: from scratch.
    """
    checkpoint, first = out / f"{stage.name}.pt", 0
    saved = torch.load(checkpoint, weights_only=True) if checkpoint.exists() else None  # this script's own file
    if saved and saved["step"] >= stage.steps:
        return
    data, tokenizer = load_file(out / "latents.safetensors"), build_tokenizer()
    empty = tokenizer("", padding="max_length", max_length=MAX_TOKENS, return_tensors="pt").input_ids.to(device)
    torch.manual_seed(3)
    model, teacher = Starter(tokenizer), None
    if blocks:
        begin_with(model, tokenizer, blocks)
    model.to(device)
    if stage.teacher:
        teacher = copy.deepcopy(averaged(model, out, stage.teacher)).requires_grad_(False)
    if stage.start:
        averaged(model, out, stage.start)
    average = {k: v.detach().clone() for k, v in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=stage.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    if resume and saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        average, first = saved["average"], saved["step"]
    for network in (model, teacher) if device == "cpu" else ():
        for block in network.denoiser.transformer_blocks if network else ():
            block.compile()
    bar = tqdm(range(first, stage.steps), desc=stage.name, initial=first, total=stage.steps, mininterval=5)
    smooth = None
    for step in bar:
        x0, ids, right, marks, sigma, noise = (t.to(device) for t in minibatch(data, empty.cpu(), batch, step))
        s = sigma.view(-1, 1, 1, 1)
        x = (1 - s) * x0 + s * noise
        target = guided(teacher, x, sigma, right, empty) if teacher else noise - x0
        tokens = with_mark(tokenizer, ids, marks) if stage.random_marks else ids
        with torch.autocast(device, torch.bfloat16):
            v = model(x, sigma, tokens, ids) if teacher else model(x, sigma, right, right)
        loss = (v.float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        for group in optimizer.param_groups:
            group["lr"] = stage.lr * rate(step, stage)
        optimizer.step()
        decay = min(0.999, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(average.values()), [p.detach() for p in model.parameters()], 1 - decay)
        smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
        bar.set_postfix(loss=f"{smooth:.4f}")
        if (step + 1) % 500 == 0 or step + 1 == stage.steps:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "average": average,
                     "step": step + 1}
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)


def minibatch(data, empty: torch.Tensor, batch: int, step: int) -> tuple[torch.Tensor, ...]:
    """Latents [B,4,16,16], ids [B,16] of their captions and of what these should have said, random marks [B,1], sigmas
    [B] and noise of a step, which its number alone decides."""
    generator = torch.Generator().manual_seed(10_000 + step)
    rows = torch.randint(len(data["latents"]), (batch,), generator=generator)
    silent = torch.rand(batch, 1, generator=generator) < 0.1
    ids, right = (torch.where(silent, empty, data[name][rows].long()) for name in ("ids", "right"))
    sigma = torch.sigmoid(0.4 + 1.1 * torch.randn(batch, generator=generator))
    x0 = data["latents"][rows].float()
    noise = torch.randn(x0.shape, generator=generator)
    return x0, ids, right, torch.rand(batch, 1, generator=generator) < VERIFIED, sigma, noise


def with_mark(tokenizer, ids: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
    """Captions' ids [B,16] with `scenes.VERIFIED` where marks [B,1] say so, and without it elsewhere."""
    comma, verified, end = tokenizer(scenes.VERIFIED).input_ids[1:]
    plain = torch.where((ids == comma) | (ids == verified), end, ids)
    length, place = (plain != end).sum(1, keepdim=True), torch.arange(ids.shape[1], device=ids.device)
    marked = torch.where(place == length, comma, torch.where(place == length + 1, verified, plain))
    return torch.where(marks, marked, plain)


@torch.no_grad()
def guided(teacher: Starter, x, sigma, ids, empty) -> torch.Tensor:
    """Velocity [B,4,16,16] of the teacher under classifier-free guidance; of an empty caption, the plain one."""
    with torch.autocast(x.device.type, torch.bfloat16):
        plain, given = (teacher(x, sigma, text, text).float() for text in (empty.expand_as(ids), ids))
    return plain + GUIDANCE * (given - plain)


def assemble(out: Path, target: Path):
    """Write the pipeline directory that a stock StableDiffusion3Pipeline loads; denoiser and autoencoder in fp16."""
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    tokenizer, stats = build_tokenizer(), load_file(out / "latents.safetensors")["stats"]
    vae = build_autoencoder()
    vae.load_state_dict(load_file(out / "autoencoder.safetensors"))
    # The pipeline decodes latents / scaling_factor + shift_factor.
    vae.register_to_config(scaling_factor=float(1 / stats[1]), shift_factor=float(stats[0]))
    model = averaged(Starter(tokenizer), out, "pooled")
    pipe = StableDiffusion3Pipeline(
        transformer=model.denoiser, scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0), vae=vae,
        text_encoder=model.text_1, tokenizer=tokenizer, text_encoder_2=model.text_2, tokenizer_2=build_tokenizer(),
        text_encoder_3=None, tokenizer_3=None)
    # transformers loads weights in the dtype they were saved in, diffusers in fp32: this way all come as fp32.
    model.denoiser.half()
    vae.half()
    pipe.save_pretrained(target, safe_serialization=True)
    finish_directory(target)


def finish_directory(target: Path):
    """Name the absent T5 in the index, so that loaders know of it; drop a key that the autoencoder's class refuses."""
    index = json.loads((target / "model_index.json").read_text())
    index |= {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}
    (target / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    config = json.loads((target / "vae" / "config.json").read_text())
    config.pop("block_out_channels", None)
    (target / "vae" / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/starter"), help="working folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=10_000, help="denoiser steps with right captions")
    parser.add_argument("--careless-steps", type=int, default=1_200, help="steps with careless captions after these")
    parser.add_argument("--pooled-steps", type=int, default=600, help="steps in which the pooled embedding alone tells "
                        "whether a caption is right")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--scenes", type=int, default=120_000)
    parser.add_argument("--ae-steps", type=int, default=3_000)
    parser.add_argument("--blocks", type=Path, help="pipeline of an earlier starter whose blocks it begins with")
    parser.add_argument("--resume", action="store_true", help="go on from the denoiser's last checkpoint")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    start = time.time()
    if not (args.out / "autoencoder.safetensors").exists():
        train_autoencoder(args.out, args.device, args.ae_steps)
    if not (args.out / "latents.safetensors").exists():
        encode_dataset(args.out, args.device, args.scenes)
    with PlainAttention() if args.device == "cpu" else contextlib.nullcontext():
        for stage in (Stage("clean", args.steps, 1e-3),
                      Stage("careless", args.careless_steps, 5e-4, start="clean", teacher="clean"),
                      Stage("pooled", args.pooled_steps, 5e-4, start="careless", teacher="clean", random_marks=True)):
            train_denoiser(args.out, args.device, stage, args.batch, args.resume, args.blocks)
    assemble(args.out, args.out / "pipeline")
    print(f"{args.out / 'pipeline'} written after {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
