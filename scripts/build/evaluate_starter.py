"""Accuracy of the starter on its prompts, and the highest accuracy that its autoencoder allows.

    python scripts/build/evaluate_starter.py                        # the packaged model
    python scripts/build/evaluate_starter.py runs/starter/pipeline --samples 16 --json card.json
    python scripts/build/evaluate_starter.py --suffix ", verified"  # prompts as captions of its training ended

The share of held-out prompts of which the strict reward `scene` finds every claim true, per task and overall (the mean
over tasks), for several guidance scales and numbers of steps, with the pipeline's own scheduler and fixed seeds. With
several samples also pass@k: the chance that one of k images is right (Codex, 2107.03374). The ceiling is the share
for rendered scenes that go through the autoencoder and back.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from starter_scenes import sample_prompt

from flowgrpo import rewards
from flowgrpo.config.sections import Adapter
from flowgrpo.data.prompts import STARTER, Prompt, load_prompts
from flowgrpo.device import DTYPES
from flowgrpo.evaluation import measured
from flowgrpo.evaluation.findings import pass_at_k
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.starter import CALL, scenes

GUIDANCE, STEPS = (1.0, 1.5, 2.0, 3.0), (8, 20)
CEILING_WANTED = 0.97


def accuracy(policy: PipelinePolicy, prompts: list[Prompt], steps: int, guidance: float, samples: int,
             micro_batch: int) -> dict[str, dict[str, float]]:
    """pass@k by k = 1, 4, 16, ... up to `samples`: strict accuracy per task and, under `all`, their mean."""
    found = measured.measure(policy, prompts, {"scene": rewards.find("scene")}, steps=steps, guidance=guidance,
                             samples=samples, micro_batch=micro_batch, title=f"{steps} steps, guidance {guidance:g}")
    right = np.array(found.scores["scene"]).reshape(len(prompts), samples).sum(1).astype(int).tolist()
    tasks = np.array([prompt.metadata["task"] for prompt in prompts])
    rows = {}
    for k in (4**power for power in range(samples.bit_length()) if 4**power <= samples):
        solved = np.array([pass_at_k(samples, count, k) for count in right])
        by_task = {task: float(solved[tasks == task].mean()) for task in scenes.TASKS if (tasks == task).any()}
        rows[f"pass@{k}"] = {**by_task, "all": float(np.mean(list(by_task.values())))}
    return rows


@torch.no_grad()
def ceiling(pipe, count: int, seed: int = 4) -> dict[str, float]:
    """Strict accuracy of `count` rendered held-out scenes, before and after the autoencoder."""
    rng, scene = np.random.default_rng(seed), rewards.find("scene")
    drawn = [sample_prompt(rng, scenes.TASKS[i % len(scenes.TASKS)], held=True) for i in range(count)]
    images = torch.tensor(np.stack([scenes.render(claims, rng) for _, claims in drawn])).float().permute(0, 3, 1, 2)
    captions = [caption for caption, _ in drawn]
    decoded = torch.cat([pipe.vae.decode(pipe.vae.encode(part * 2 - 1).latents).sample for part in images.split(32)])
    shares = {"rendered": images, "decoded": (decoded / 2 + 0.5).clamp(0, 1)}
    return {name: float(np.mean(scene(shown, captions))) for name, shown in shares.items()}


def table(rows: list[dict]) -> str:
    """Markdown table of accuracies: a line per sampler and k."""
    names = [*scenes.TASKS, "all"]
    lines = ["| steps | guidance | | " + " | ".join(names) + " |", "|---:|---:|---|" + "---:|" * len(names)]
    for row in rows:
        for k, found in row["accuracy"].items():
            cells = [str(row["steps"]), f"{row['guidance']:g}", k, *(f"{found[name]:.3f}" for name in names)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="starter", help="starter or a directory (default: starter)")
    parser.add_argument("--guidance", type=float, nargs="+", default=GUIDANCE)
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS)
    parser.add_argument("--samples", type=int, default=1, help="images per prompt")
    parser.add_argument("--suffix", default="", help="ends every prompt")
    parser.add_argument("--prompts", type=int, default=240, help="prompts, evenly over the held-out file")
    parser.add_argument("--ceiling", type=int, default=300, help="scenes that go through the autoencoder")
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    args = parser.parse_args()

    pipe = load_pipeline(args.model)
    through = ceiling(pipe, args.ceiling)
    print(f"{args.ceiling} rendered scenes: {through['rendered']:.3f} correct as drawn, {through['decoded']:.3f} after "
          f"the autoencoder ({CEILING_WANTED} wanted)\n")
    if args.precision != "fp32":
        pipe = load_pipeline(args.model, args.precision)
    policy = PipelinePolicy(pipe, Adapter(rank=0), device=args.device, precision=args.precision, call=CALL)
    prompts = [replace(prompt, text=prompt.text + args.suffix)
               for prompt in measured.spread(load_prompts(STARTER / "held_out.jsonl"), args.prompts)]
    rows = [{"steps": steps, "guidance": guidance,
             "accuracy": accuracy(policy, prompts, steps, guidance, args.samples, args.micro_batch)}
            for steps in args.steps for guidance in args.guidance]
    print(table(rows))
    best = max(rows, key=lambda row: row["accuracy"]["pass@1"]["all"])
    print(f"\nbest: {best['accuracy']['pass@1']['all']:.3f} with {best['steps']} steps and guidance "
          f"{best['guidance']:g}, {len(prompts)} prompts x {args.samples} images")
    if args.json:
        told = {"model": args.model, "prompts": len(prompts), "samples": args.samples, "ceiling": through, "rows": rows}
        args.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
