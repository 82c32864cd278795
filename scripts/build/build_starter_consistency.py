"""Distil the starter into a consistency model: a LoRA that draws in four evaluations.

    python scripts/build/build_starter_consistency.py --out flowgrpo/starter/consistency     # a minute of one CPU core

Consistency distillation in latent space (LCM, 2310.04378, algorithm 1) on the flow x_s = (1-s) x0 + s noise, where the
consistency function f(x, s) = x - s u(x, s) is x itself at s = 0: u, the network, becomes the mean velocity of the
teacher's trajectory from s down to 0. One Euler step of the starter leads from s to s' = s - 1/N; there an
average of the student's weights says f, and the student's f at s is drawn to it. Divided by s, the target of u is
((s - s') v_teacher + s' u_average) / s, a mean of the two velocities: so all s count alike.

The student's weights are W + B A. A and B are what is trained, but the network sees their sum, as fast as the starter.
"""

import argparse
import contextlib
import copy
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from build_starter import PlainAttention, draw
from safetensors.torch import save_file
from tqdm import tqdm

from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.starter import CALL, EVAL


class LowRank:
    """LoRA on every linear layer of a module, as factors beside weights that hold the sum."""

    def __init__(self, module: torch.nn.Module, rank: int):
        layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)}
        module.requires_grad_(False)
        self.weights = {name: layer.weight.requires_grad_() for name, layer in layers.items()}
        self.base = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.down = {name: torch.nn.Parameter(torch.randn(min(rank, *weight.shape), weight.shape[1]).to(weight)
                                              / math.sqrt(weight.shape[1])) for name, weight in self.weights.items()}
        self.up = {name: torch.nn.Parameter(weight.new_zeros(len(weight), len(self.down[name])))
                   for name, weight in self.weights.items()}

    def parameters(self) -> list[torch.nn.Parameter]:
        return [*self.down.values(), *self.up.values()]

    @torch.no_grad()
    def chain(self) -> None:
        """Factors' gradients, from those of the weights."""
        for name, weight in self.weights.items():
            self.down[name].grad, self.up[name].grad = self.up[name].T @ weight.grad, weight.grad @ self.down[name].T
            weight.grad = None

    @torch.no_grad()
    def write(self) -> None:
        """Weights of the present factors."""
        for name, weight in self.weights.items():
            weight.copy_(self.base[name] + self.up[name] @ self.down[name])

    def save(self, path: Path) -> None:
        """LoRA in fp16, as a stock pipeline loads it: scale 1, that of a file that names no other."""
        factors = {"lora_A": self.down, "lora_B": self.up}
        save_file({f"transformer.{name}.{kind}.weight": values[name].detach().cpu().half().contiguous()
                   for kind, values in factors.items() for name in self.weights}, path)


@torch.no_grad()
def encode_dataset(pipe, count: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents [count,4,16,16] of training images, as the pipeline's denoiser sees them, and of their captions tokens
    [count,N,D] and pooled embeddings [count,D]."""
    images, captions, _ = draw(count, seed=5000)
    latents = torch.cat([pipe.vae.encode(part.to(device, torch.float32).div(127.5).sub(1)).latents
                         for part in tqdm(images.split(250), desc="latents")])
    parts = [captions[start:start + 250] for start in range(0, count, 250)]
    found = [pipe.encode_prompt(part, None, None, do_classifier_free_guidance=False, **CALL)
             for part in tqdm(parts, desc="prompts")]
    tokens, pooled = torch.cat([each[0] for each in found]), torch.cat([each[2] for each in found])
    return (latents - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor, tokens, pooled


def velocity(denoiser: torch.nn.Module, x: torch.Tensor, s: torch.Tensor, tokens: torch.Tensor, pooled: torch.Tensor):
    with torch.autocast(x.device.type, torch.bfloat16):
        return denoiser(x, encoder_hidden_states=tokens, pooled_projections=pooled, timestep=s.flatten() * 1000,
                        return_dict=False)[0].float()


@torch.no_grad()
def mean_velocity(teacher, average, x: torch.Tensor, s: torch.Tensor, tokens, pooled, jumps: int):
    """Return the student's target at the states x [B,4,16,16] of times s [B,1,1,1]: the way to the average's f at s',
    where one step of the teacher leads, over s."""
    after = (s - 1 / jumps).clamp(min=0)
    v = velocity(teacher, x, s, tokens, pooled)
    u = velocity(average, x - (s - after) * v, after, tokens, pooled)
    return ((s - after) * v + after * u) / s


def distil(pipe, data, device: str, steps: int, batch: int, jumps: int, rank: int, lr: float, decay: float) -> LowRank:
    """Train the LoRA: uniform times, one in eleven at pure noise, Huber's loss, a rate that falls to 0 over the last
    half."""
    teacher = pipe.transformer.eval().requires_grad_(False)
    student, average = copy.deepcopy(teacher), copy.deepcopy(teacher)
    lora = LowRank(student, rank)
    latents, tokens, pooled = data
    optimizer = torch.optim.AdamW(lora.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    bar, smooth = tqdm(range(steps), desc="distillation", mininterval=10), None
    for step in bar:
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(len(latents), (batch,), generator=generator)
        s = (1.1 * torch.rand(batch, 1, 1, 1, generator=generator)).clamp(0.02, 1).to(device)
        noise = torch.randn(batch, *latents.shape[1:], generator=generator).to(device)
        x, read = (1 - s) * latents[rows] + s * noise, (tokens[rows], pooled[rows])
        target = mean_velocity(teacher, average, x, s, *read, jumps)
        loss = F.huber_loss(velocity(student, x, s, *read), target, delta=0.25)
        loss.backward()
        lora.chain()
        torch.nn.utils.clip_grad_norm_(lora.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / 20, 1.0, 2 * (steps - step) / steps)
        optimizer.step()
        lora.write()
        torch._foreach_lerp_([average.get_parameter(f"{name}.weight") for name in lora.weights],
                             [weight.detach() for weight in lora.weights.values()],
                             1 - min(decay, (1 + step) / (10 + step)))
        smooth = loss.item() if smooth is None else 0.95 * smooth + 0.05 * loss.item()
        bar.set_postfix(loss=f"{smooth:.5f}")
    return lora


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/starter_consistency"), help="folder of what is written")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--jumps", type=int, default=10, help="N: teacher's steps from noise to data")
    parser.add_argument("--rank", type=int, default=12)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--decay", type=float, default=0.95, help="of the average that the target is read from")
    parser.add_argument("--scenes", type=int, default=1_000)
    args = parser.parse_args()
    from diffusers import FlowMatchLCMScheduler

    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    start, pipe = time.time(), load_pipeline("starter")
    pipe.to(args.device)
    data = encode_dataset(pipe, args.scenes, args.device)
    with PlainAttention() if args.device == "cpu" else contextlib.nullcontext():
        lora = distil(pipe, data, args.device, args.steps, args.batch, args.jumps, args.rank, args.lr, args.decay)
    lora.save(args.out / LORA_FILE)
    # Of four steps the last is at 1/4, not beside 0, where a step changes nothing.
    steps = EVAL["starter_consistency"]["num_inference_steps"]
    FlowMatchLCMScheduler(shift_terminal=1 / steps).save_pretrained(args.out / "scheduler")
    print(f"{args.out} written after {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
