"""A model of four steps with a reward: five ways on the starter, over seeds.

    python scripts/measure/few_steps.py --output runs/few_steps                   # all arms, seeds 0, 1 and 2
    python scripts/measure/few_steps.py --output runs/few_steps --arms one --seeds 0
    python scripts/measure/few_steps.py --output runs/few_steps --picture one-seed0
    python scripts/measure/few_steps.py --output runs/few_steps --halves one-seed0
    python scripts/measure/few_steps.py --output runs/few_steps --exact rl-seed0

base          the starter in 4 steps
distilled     consistency distillation, without a reward
rl            the demo's reward training, measured in 20 steps, and with its weights in 4
rl_distilled  the demo first, then consistency distillation whose base is the tuned model (its LoRA is fused)
distilled_rl  consistency distillation first, then the reward trains the text encoders in the student's own steps
one           the recipe: all in one run

Every 4-step arm samples with fresh noise (FlowMatchLCMScheduler at sigma 1, .75, .5 and .25). Each row has the strict
accuracy on 180 held-out prompts, eight images each (two leave .02 of doubt in diversity), edge width and diversity as
shares of the 20-step starter's, and KID to its images (features: 16 x 16 miniatures; times 1000). Diversity is also a
share of the arm's own teacher's in 20 steps: of `one` the starter with the text encoders that the run trained, of
`rl_distilled` the tuned model, else the starter. Evaluations and the processor's seconds are of all runs of the arm.
Finished runs and measurements in --output are kept. The table goes to --output/table.md, the numbers to table.json.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from flowgrpo import rewards
from flowgrpo.config import load
from flowgrpo.data.prompts import STARTER, load_prompts
from flowgrpo.evaluation import distances, measured
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.rewards.guards import pixels
from flowgrpo.starter import CALL

RECIPE = Path(__file__).parents[2] / "configs" / "starter_4steps.yaml"
DEMO = Path(__file__).parents[2] / "configs" / "starter.yaml"
FOUR = ["--phases=[]", "--train.steps=4", "--train.shift=1.0"]
ALONE = [*FOUR, "--method=dmd2", "--reward=scene",
         "--parts={distil: {type: ConsistencyDistillation, jumps: 128, decay: 0.98, delta: 0.05, updates: 4}}",
         "--train.epochs=50", "--train.group=16", "--train.micro_batch=64", "--train.lr=3e-3"]
ENCODERS = [*FOUR, "--method=mix_grpo+grpo_guard+texforce", "--train.epochs=130", "--train.lr=3e-3",
            "--parts={kernel: {type: CPS, level: 1.0}, plan: {size: 3, order: frozen}, roots: 1, "
            "advantage: {order: advantages}}",
            "--adapter.targets=[to_q, to_k, to_v, to_out.0, add_q_proj, add_k_proj, add_v_proj, to_add_out]"]
# By arm: the runs that follow on each other, as (name, recipe, options, what starts from the run before).
ARMS: dict[str, list[tuple[str, Path, list[str], str]]] = {
    "base": [],
    "distilled": [("distilled", RECIPE, ALONE, "")],
    "rl": [("rl", DEMO, [], "")],
    "rl_distilled": [("rl", DEMO, [], ""), ("rl_distilled", RECIPE, ALONE, "load.lora")],
    "distilled_rl": [("distilled", RECIPE, ALONE, ""),
                     ("distilled_rl", RECIPE, ENCODERS, "load.lora")],
    "one": [("one", RECIPE, [], "")]}
PROMPTS, SAMPLES = 180, 8


def train(folder: Path, recipe: Path, options: list[str], seed: int) -> None:
    """Train the run in a folder unless it is finished, and note the processor's seconds of it."""
    if (folder / "summary.json").exists():
        return
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([sys.executable, "-m", "flowgrpo", "train", str(recipe), f"--seed={seed}", "--precision=bf16",
                    f"--output={folder.parent}", f"--name={folder.name}", *options], check=True)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    (folder / "processor.json").write_text(json.dumps({"seconds": round(spent)}))


def policy_of(run: Path | None, steps: int) -> PipelinePolicy:
    """The starter with what a run trained, and what that run began from; in few steps with fresh noise."""
    pipe = load_pipeline("starter", "bf16")
    if steps < 20:
        from diffusers import FlowMatchLCMScheduler

        pipe.scheduler = FlowMatchLCMScheduler.from_config(pipe.scheduler.config,
                                                           shift_terminal=1 / steps if steps > 1 else None)
    for number, folder in enumerate([] if run is None else [*earlier(run), run]):
        pipe.load_lora_weights(folder, adapter_name=f"run{number}")
        pipe.fuse_lora(adapter_names=[f"run{number}"])
        pipe.unload_lora_weights()
    return PipelinePolicy(pipe, None, precision="bf16", call=CALL)


def earlier(run: Path) -> list[Path]:
    """The runs whose weights are fused into the base of a run, first ones first."""
    return [Path(lora.path) for lora in load(run / "config.yaml").load.loras_with_scales]


def measure(run: Path | None, steps: int) -> dict[str, Any]:
    """Strict accuracy, looks and miniatures of one image per prompt [N, 768]."""
    prompts = measured.spread(load_prompts(STARTER / "held_out.jsonl"), PROMPTS)
    found = measured.measure(policy_of(run, steps), prompts, {"scene": rewards.find("scene")}, steps=steps,
                             guidance=1.0, samples=SAMPLES, micro_batch=60, keep=PROMPTS, model="starter")
    assert isinstance(found.images, torch.Tensor)
    return {"strict": found.mean()["scene"], "edge_width": found.looks.edge_width, "diversity": found.looks.diversity,
            "miniatures": pixels(found.images).tolist()}


def kept(file: Path, run: Path | None, steps: int) -> dict[str, Any]:
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(measure(run, steps)))
    return dict(json.loads(file.read_text()))


def spent(runs: list[Path]) -> tuple[int, int]:
    """Denoiser evaluations and the processor's seconds of runs, their evaluations included."""
    return (sum(json.loads((run / "summary.json").read_text())["denoiser_evaluations"] for run in runs),
            sum(json.loads((run / "processor.json").read_text())["seconds"] for run in runs
                if (run / "processor.json").exists()))


def rows(output: Path, arms: list[str], seeds: list[int]) -> list[dict[str, Any]]:
    teacher = kept(output / "measured" / "teacher.json", None, 20)
    told = [row("starter, 20 steps", "", teacher, teacher, (0, 0))]
    for arm in arms:
        for seed in seeds if ARMS[arm] else [0]:
            runs: list[Path] = []
            for name, recipe, options, start in ARMS[arm]:
                folder = output / f"{name}-seed{seed}"
                own = [f"--{start}=[{','.join(map(str, [*earlier(runs[-1]), runs[-1]]))}]"] if start else []
                train(folder, recipe, [*options, *own], seed)
                runs.append(folder)
            last = runs[-1] if runs else None
            for steps in (20, 4) if arm == "rl" else (4,):
                file = output / "measured" / f"{arm}-seed{seed}-{steps}.json"
                told.append(row(f"{arm}, {steps} steps", str(seed) if runs else "", kept(file, last, steps), teacher,
                                spent(runs)))
            taught = runs[0] if arm == "rl_distilled" else encoders(runs[0]) if arm == "one" else None
            own = kept(output / "measured" / f"{arm}-seed{seed}-teacher.json", taught, 20) if taught else teacher
            told[-1]["own"] = told[-1]["diversity"] * teacher["diversity"] / own["diversity"]
            print(told[-1], flush=True)
    return told


def encoders(run: Path) -> Path:
    """A folder beside a run with the LoRA of its text encoders alone."""
    from safetensors.torch import load_file, save_file

    file, alone = "pytorch_lora_weights.safetensors", run.with_name(f"{run.name}-encoders")
    alone.mkdir(exist_ok=True)
    save_file({key: value for key, value in load_file(run / file).items() if key.startswith("text_encoder")},
              alone / file)
    (alone / "config.yaml").write_text((run / "config.yaml").read_text())
    return alone


def row(arm: str, seed: str, found: dict[str, Any], teacher: dict[str, Any], cost: tuple[int, int]) -> dict[str, Any]:
    ours, theirs = (torch.tensor(each["miniatures"]) for each in (found, teacher))
    size = ours.shape[1] ** 0.5  # of a miniature, whose values `pixels` divides by it: the kernel expects them whole
    distance = distances.kid(ours * size, theirs * size)
    return {"arm": arm, "seed": seed, "strict": found["strict"], "evaluations": cost[0], "seconds": cost[1],
            "edges": found["edge_width"] / teacher["edge_width"],
            "diversity": found["diversity"] / teacher["diversity"], "own": math.nan, "kid": 1000 * distance}


def table(found: list[dict[str, Any]]) -> str:
    """Markdown table of the rows."""
    lines = ["| arm | seed | strict | edges | diversity | of its teacher's | KID x 1000 | evaluations | processor, s |",
             "|---|---|" + "---:|" * 7]
    return "\n".join(lines + [
        f"| {each['arm']} | {each['seed']} | {each['strict']:.3f} | {each['edges']:.3f} | {each['diversity']:.3f} | "
        f"{each['own']:.3f} | {each['kid']:.2f} | {each['evaluations']:,} | {each['seconds']:,} |" for each in found])


def picture(output: Path, name: str) -> None:
    """Images of six held-out prompts in 1, 2, 4 and 20 steps: of the starter above, of a run below."""
    prompts = measured.spread(load_prompts(STARTER / "held_out.jsonl"), 6)
    strips = []
    for run in (None, output / name):
        for steps in (1, 2, 4, 20):
            shown = measured.measure(policy_of(run, steps), prompts, {"scene": rewards.find("scene")}, steps=steps,
                                     guidance=1.0, samples=1, micro_batch=6, keep=6).images
            assert isinstance(shown, torch.Tensor)
            strips.append(torch.cat([*shown], 2))
    grid = torch.cat(strips, 1).clamp(0, 1).mul(255).round().byte().permute(1, 2, 0).numpy()
    Image.fromarray(grid).resize((2 * grid.shape[1], 2 * grid.shape[0]), Image.Resampling.NEAREST).save(
        output / f"{name}.png")


def halves(output: Path, name: str) -> None:
    """Print the strict accuracy of a run's text encoders without its denoiser's LoRA, and of the whole run."""
    for run in (encoders(output / name), output / name):
        for steps in (20, 4):
            print(f"{run.name}, {steps} steps: {measure(run, steps)['strict']:.3f}", flush=True)


@torch.no_grad()
def exact(run: Path, jumps: int = 16, seeds: tuple[int, ...] = (0, 1)) -> None:
    """Print what four steps could show: each of them goes to the data by Euler's steps of 1 / jumps of the run's own
    model, as a student without an error would; beside it one step each, and `jumps` and 20 of Euler's from noise."""
    policy, scene = policy_of(run, 20), rewards.find("scene")
    policy.guidance = 1.0
    four = [1.0, 0.75, 0.5, 0.25]
    config, prompts = policy.pipe.transformer.config, measured.spread(load_prompts(STARTER / "held_out.jsonl"), PROMPTS)

    def flow(x: torch.Tensor, encoded: Any, sigma: float, steps: int) -> torch.Tensor:
        grid = torch.linspace(sigma, 0, steps + 1, dtype=torch.float64)
        for k in range(steps):
            x = x - (grid[k] - grid[k + 1]).item() * policy.replay(encoded, x.to(policy.dtype), grid, k).float()
        return x

    for name, sigmas, each in (("20 steps", [1.0], 20), (f"{jumps} steps", [1.0], jumps),
                               ("4 steps", four, 0), ("4 exact steps", four, jumps)):
        right: list[float] = []
        for seed in seeds:
            draw = torch.Generator().manual_seed(seed)
            for batch in (prompts[at:at + 60] for at in range(0, len(prompts), 60)):
                encoded = policy.encode([prompt.text for prompt in batch])
                x0 = torch.zeros(len(batch), config.in_channels, config.sample_size, config.sample_size)
                for sigma in sigmas:
                    x = (1 - sigma) * x0 + sigma * torch.randn(x0.shape, generator=draw)
                    x0 = flow(x, encoded, sigma, max(1, round(each * sigma)))
                images = policy.image(x0.to(policy.dtype), encoded).clamp(0, 1)
                right += scene(images, [prompt.text for prompt in batch], [prompt.metadata for prompt in batch])
        print(f"{run.name}, {name}: {sum(right) / len(right):.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/few_steps"))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--picture", metavar="RUN", help="only draw RUN.png, of a finished run in --output")
    parser.add_argument("--halves", metavar="RUN", help="only measure RUN's text encoders without its other LoRA")
    parser.add_argument("--exact", metavar="RUN", help="only measure four steps of a run's model without their error")
    args = parser.parse_args()
    args.output = args.output.absolute()
    if args.exact:
        exact(args.output / args.exact)
        return
    if args.picture or args.halves:
        (picture if args.picture else halves)(args.output, args.picture or args.halves)
        return
    found = rows(args.output, args.arms, args.seeds)
    (args.output / "table.json").write_text(json.dumps(found, indent=2) + "\n")
    (args.output / "table.md").write_text(table(found) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
