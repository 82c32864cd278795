"""Before and after: the same held-out prompts and seeds through the pipeline's own scheduler, scored and shown.

The base is measured first, with the same sampler and guidance as the tuned model, so that what is reported is the gain
over what a user had, on prompts that were never trained on.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tqdm import tqdm

from flowgrpo import data, rewards
from flowgrpo.config import Config
from flowgrpo.console import plain_console
from flowgrpo.evaluation import album, report
from flowgrpo.evaluation.clips import tall, untall
from flowgrpo.evaluation.grid import Row, draw_grid
from flowgrpo.evaluation.read_back import read_object
from flowgrpo.finite import finite
from flowgrpo.processes import Processes
from flowgrpo.reward_rule import WatchRule
from flowgrpo.samplers.rollout import seeder

EVAL_SEED = 20_000  # evaluation noise does not depend on the run's seed, so that runs are compared on the same pictures


@dataclass(frozen=True)
class Measured:
    """Held-out scores: prompts [N], scores by reward name [N], pictures [n,3,H,W], clips [n,F,3,H,W] or texts of some,
    evenly over them; failed: on how many of the N each reward failed, where its rule says to skip these.

    A score that does not apply is NaN, and may be given as the null that JSON has for it.
    """

    prompts: list[data.Prompt]
    scores: dict[str, list[float]]
    pictures: torch.Tensor | list[str]
    failed: dict[str, int] = field(default_factory=dict)

    def __post_init__(self):
        object.__setattr__(self, "scores", {name: [math.nan if value is None else value for value in values]
                                            for name, values in self.scores.items()})

    def mean(self) -> dict[str, float]:
        return {name: _mean(values) for name, values in self.scores.items()}

    def by_task(self, name: str) -> dict[str, float]:
        """The mean of one reward per `task` in the prompts' metadata, as text; empty where they have none."""
        tasks = defaultdict(list)
        for prompt, score in zip(self.prompts, self.scores[name]):
            if "task" in prompt.metadata:
                tasks[str(prompt.metadata["task"])].append(score)
        return {task: _mean(values) for task, values in tasks.items()}


def _mean(values: list[float]) -> float:
    """The mean of the scores that apply (NaN: does not); NaN where none does."""
    applicable = [value for value in values if not math.isnan(value)]
    return sum(applicable) / len(applicable) if applicable else math.nan


def spread(prompts: list[data.Prompt], count: int) -> list[data.Prompt]:
    """At most `count` prompts, evenly over the list."""
    return [prompts[i] for i in evenly(len(prompts), count)]


def evenly(total: int, count: int) -> list[int]:
    """At most `count` of `total` places, evenly over them."""
    count = min(count, total)
    return [i * total // count for i in range(count)]


def measure(policy, prompts: list[data.Prompt], functions: dict[str, Any], *, steps: int, guidance: float, samples: int,
            micro_batch: int, negative: str = "", keep: int = 0, title: str = "evaluating", encode=None,
            processes: Processes = Processes(), reference: Callable[[], Any] | None = None) -> Measured:
    """Generate `samples` pictures per prompt with the pipeline's own scheduler, or texts, and score them.

    keep: of how many prompts, evenly over them, the first picture is kept; encode: what encodes prompts, in
    place of `policy.encode`; processes: those that share the work, and all get what was found. reference: inside of
    what it gives the policy is its base, whose pictures from the same seeds go to rewards that compare with them; None:
    it is its base already.
    """
    encode = encode or policy.encode
    seed, kept = seeder(EVAL_SEED, 0), set(evenly(len(prompts), keep))
    rows = [(i, k) for i in range(len(prompts)) for k in range(samples)]
    own, scores, pictures, tally = processes.own(rows), [torch.empty(0, len(functions))], [], rewards.Tally()
    hidden, compared = None if processes.first else True, any(map(rewards.sees_base, functions.values()))
    with processes.together(), tqdm(total=len(own), desc=title, unit="picture", leave=False, disable=hidden) as bar:
        for start in range(0, len(own) if processes.turns is None else processes.most(rows), micro_batch):
            own_batch = own[start:start + micro_batch]
            batch = own_batch or rows[:1]  # weights that are shared out are collected by all, or by none
            of = [prompts[i] for i, _ in batch]
            conditioning = encode([p.text for p in of], [negative if p.negative is None else p.negative for p in of],
                                  [p.image for p in of])
            seeds = [seed(i, k) for i, k in batch]
            made, base = _with_base(partial(_generate, policy, conditioning, seeds, steps, guidance), reference,
                                    compared)
            if not own_batch:
                continue
            scores.append(rewards.score(functions, made, [p.text for p in of], [p.metadata for p in of],
                                        tally=tally, base=base))
            pictures += [picture for (i, k), picture in zip(batch, made) if k == 0 and i in kept]
            bar.update(len(batch))
    columns = processes.gather(torch.cat(scores)).T.tolist()
    return Measured([prompts[i] for i, _ in rows], dict(zip(functions, columns)),
                    processes.gather_samples(pictures),
                    dict(zip(functions, processes.total([tally.failed[name] for name in functions]))))


def _generate(policy, conditioning, seeds: list[int], steps: int, guidance: float) -> Any:
    return policy.generate(conditioning, policy.generators(seeds), steps, guidance)


def _with_base(draw: Callable[[], Any], reference: Callable[[], Any] | None, compared: bool) -> tuple[Any, Any]:
    """What is drawn, and what the base draws, where that is compared: of a base its own."""
    made = draw()
    if not compared or reference is None:
        return made, made if compared else None
    with reference():
        return made, draw()


def _measure(trainer, functions, title: str, reference: Callable[[], Any] | None = None) -> Measured:
    settings, config = trainer.config.eval, trainer.config
    return measure(trainer.policy, spread(trainer.held_out, settings.prompts), functions, steps=settings.steps,
                   guidance=settings.guidance, samples=settings.samples, micro_batch=config.train.micro_batch,
                   negative=config.negative_prompt, keep=settings.grid, title=title, encode=trainer.explorer.encode,
                   processes=trainer.processes, reference=reference)


def before(trainer, functions: dict[str, Any], folder: Path, reuse: bool) -> Measured:
    """The base's scores, measured once per run: a resumed run reads them back, if it measures in the same way."""
    from torchvision.transforms.functional import to_tensor

    path, evaluations = folder / "before.json", trainer.policy.evaluations
    settings = measured_how(trainer.config, spread(trainer.held_out, trainer.config.eval.prompts), functions)
    known = read_object(path, "remove it, and the base is measured again") if reuse and path.exists() else {}
    if known.get("settings") != settings:
        if reuse and {**known.get("settings", {}), "grid": settings["grid"]} != settings:
            trainer.best.forget()
        with trainer.policy.reference():
            found = _measure(trainer, functions, "held-out prompts, before")
        trainer.policy.evaluations = evaluations
        if trainer.processes.first:
            write_before(folder, found, settings)
        return found
    prompts = spread(trainer.held_out, trainer.config.eval.prompts)
    kept = [untall(to_tensor(Image.open(file).convert("RGB")), known.get("frames"))
            for file in sorted((folder / "before").glob("*.png"))]
    return Measured([p for p in prompts for _ in range(trainer.config.eval.samples)], known["scores"],
                    known["texts"] or (torch.stack(kept) if kept else torch.empty(0)), known["failed"])


def measured_how(config: Config, prompts: list[data.Prompt], functions: dict[str, Any]) -> dict[str, Any]:
    """What the base's scores depend on, as it comes back from JSON."""
    of = config.model_dump(mode="json", include={"model", "precision", "negative_prompt", "picture", "text"})
    told = of | config.eval.model_dump(mode="json", exclude={"every", "best", "stop", "weights"}) | {
        "rewards": rules(functions), "shown": [[p.text, p.negative, p.image, p.metadata] for p in prompts]}
    return json.loads(json.dumps(told, default=str))


def rules(functions: dict[str, Any]) -> dict[str, Any]:
    """What is said of each reward that its scores depend on; what is done to them in training is none of it."""
    said = {name: getattr(reward, "rule", WatchRule()).model_dump(mode="json") for name, reward in functions.items()}
    return {name: {key: rule[key] for key in ("use", "args", "when")} for name, rule in said.items()}


def write_before(folder: Path, found: Measured, settings: dict[str, Any]) -> None:
    """The base's samples, its scores, and how they were measured."""
    from torchvision.utils import save_image

    texts, frames = found.pictures if isinstance(found.pictures, list) else None, None
    if texts is None:
        shutil.rmtree(folder / "before", ignore_errors=True)
        (folder / "before").mkdir()
        frames = found.pictures.shape[1] if found.pictures.ndim == 5 else None
        for i, picture in enumerate(found.pictures):
            save_image(tall(picture), folder / "before" / f"{i:03d}.png")
    told = {"settings": settings, "scores": found.scores, "failed": found.failed, "frames": frames, "texts": texts}
    (folder / "before.json").write_text(json.dumps(finite(told)))


def finish(trainer, functions: dict[str, Any], folder: Path, base: Measured) -> dict[str, Any]:
    """Save the result, measure it, draw before beside after, and write `summary.json`."""
    config, policy, first = trainer.config, trainer.policy, trainer.processes.first
    [evaluations] = trainer.processes.total([policy.evaluations])
    with policy.weights.swapped(trainer.best.weights or trainer.evaluated_weights()):
        said = policy.weights.save(folder) if first else ""
        after = _measure(trainer, functions, "held-out prompts, after", policy.reference)
    summary = {
        "name": config.name, "model": config.model, "method": config.method, "seed": config.seed,
        "evaluation": {"prompts": len(base.prompts), "samples": config.eval.samples, "steps": config.eval.steps,
                       "guidance": config.eval.guidance, "seed": EVAL_SEED, "of": described(policy, config)},
        "before": base.mean(), "after": after.mean(),
        "tasks": {name: {"before": base.by_task(name), "after": after.by_task(name)} for name in functions},
        "seconds": round(trainer.seconds, 1), "epochs": trainer.epoch, "updates": trainer.update,
        "kept": trainer.best.told(), "denoiser_evaluations": evaluations, "unit": policy.unit,
        "sampled_pictures": trainer.sampled,
        "rollout_evaluations_per_picture": round(trainer.explorer.rollout_evaluations / max(trainer.sampled, 1), 3),
        "rollout_evaluations_saved_by_sharing": trainer.explorer.saved_evaluations,
        "max_first_log_ratio": trainer.first_ratio.found, "skipped_updates": trainer.skipped,
        "reward_wait_seconds": round(trainer.reward_wait_seconds, 1),
        "reward_failures": {"trained": trainer.scoring.reward_failures, "before": base.failed, "after": after.failed},
        "rewards": {"trained": config.rewards, "measured": list(functions)}}
    if first:
        draw_pairs(folder / "before_after.png", base, after)
        (folder / "summary.json").write_text(json.dumps(finite(summary), indent=2) + "\n")
        album.stage(folder, "after", trainer.best.best.epoch if trainer.best.weights else trainer.epoch, after)
        album.last(folder, trainer)
        report.write(folder)
        print_report(summary, said, folder)
    return summary


def described(policy, config) -> str:
    """What is evaluated, and how it is sampled, in words."""
    if policy.modality == "text":
        warm = config.text.eval_temperature
        return f"texts (temperature {warm:g})" if warm else "texts (greedy)"
    return f"pictures ({config.eval.steps} steps, guidance {config.eval.guidance:g})"


def draw_pairs(path: Path, base: Measured, after: Measured, names: tuple[str, str] = ("before", "after")) -> None:
    """The grid PNG: base and tuned pictures of the same prompts and seeds, with their scores."""
    rows = [Row(text, [old, new], [was, now]) for (text, old, was), (_, new, now) in zip(cards(base), cards(after))]
    draw_grid(path, names, rows)


def cards(found: Measured) -> list[tuple[str, torch.Tensor, dict[str, float]]]:
    """Prompt, picture and scores of the pictures that were kept."""
    prompts = list({id(prompt): prompt for prompt in found.prompts}.values())
    samples = len(found.prompts) // len(prompts)
    return [(prompts[i].text, picture, {name: values[i * samples] for name, values in found.scores.items()})
            for i, picture in zip(evenly(len(prompts), len(found.pictures)), found.pictures)]


def sample_pictures(trainer, functions: dict[str, Any], folder: Path) -> dict[str, float]:
    """Held-out scores during training, with a grid of pictures per epoch in `samples/`."""
    evaluations = trainer.policy.evaluations
    with trainer.policy.weights.swapped(trainer.evaluated_weights()):
        found = _measure(trainer, functions, f"held-out prompts, epoch {trainer.epoch}", trainer.policy.reference)
    trainer.policy.evaluations = evaluations
    if trainer.processes.first:
        (folder / "samples").mkdir(exist_ok=True)
        rows = [Row(text, [picture], [scores]) for text, picture, scores in cards(found)]
        draw_grid(folder / "samples" / f"epoch-{trainer.epoch:05d}.png", [f"epoch {trainer.epoch}"], rows)
        album.stage(folder, f"epoch-{trainer.epoch:05d}", trainer.epoch, found)
    return {f"held_out/{name}": value for name, value in found.mean().items()}


def print_report(summary: dict[str, Any], said: str, folder: Path) -> None:
    """The table that ends a run: held-out accuracy per task, before and after."""
    from rich.table import Table

    console = plain_console()
    for name in summary["before"]:
        table = Table(title=f"{name} on {summary['evaluation']['prompts']} held-out {summary['evaluation']['of']}")
        for heading in ("task", "before", "after", "change"):
            table.add_column(heading, justify="left" if heading == "task" else "right")
        tasks = summary["tasks"][name]
        lines = [(task, tasks["before"][task], tasks["after"][task]) for task in tasks["before"]]
        for task, old, new in [*lines, ("all", summary["before"][name], summary["after"][name])]:
            cells = ["-" if math.isnan(value) else format(value, how)
                     for value, how in ((old, ".3f"), (new, ".3f"), (new - old, "+.3f"))]
            table.add_row(task, *cells, end_section=task != "all" and task == lines[-1][0],
                          style="bold" if task == "all" else "")
        console.print(table)
    first = "-" if summary["max_first_log_ratio"] is None else f"{summary['max_first_log_ratio']:.1e}"
    console.print(f"{summary['seconds']:.0f} s, {summary['denoiser_evaluations']:,} {summary['unit']} "
                  f"({summary['rollout_evaluations_per_picture']:.2f} per sample in the rollout; shared "
                  f"prefixes saved {summary['rollout_evaluations_saved_by_sharing']:,}), "
                  f"largest first |log ratio| {first}", highlight=False)
    if summary["kept"]:
        console.print(summary["kept"], highlight=False)
    console.print(said, highlight=False)
    console.print(f"before and after: {folder / 'before_after.png'}; report: {folder / report.FILE}", highlight=False)
