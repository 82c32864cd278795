"""Before and after: score and show the same held-out prompts and seeds with the pipeline's own scheduler.

The base is measured first, with the same sampler and guidance as the tuned model. The reported gain is thus over the
user's starting point, on prompts never trained on. Where evaluations choose the weights, it is on prompts and seeds
that chose nothing (`sides`).
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowgrpo import rewards
from flowgrpo.config.parse import migrate
from flowgrpo.config.reward_rules import WatchRule
from flowgrpo.config.schema import Config
from flowgrpo.data.open_image import open_checked, rgb
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.escaped import plain
from flowgrpo.evaluation import image_files, looks
from flowgrpo.evaluation.measured import ANEW_SEED, EVAL_SEED, Measured, evenly, halves, measure, readable, spread
from flowgrpo.evaluation.pages.before_after import draw_measured, image_prompts
from flowgrpo.evaluation.pages.clips import save_clip, tall, untall
from flowgrpo.evaluation.report import report, snapshots
from flowgrpo.evaluation.report.snapshots import CHOOSING
from flowgrpo.evaluation.statistics import ALL, LEAST, Rows, Scores, blind, cells, show
from flowgrpo.evaluation.trainer import Trainer
from flowgrpo.log import plain_console
from flowgrpo.nouns import SAMPLE, inflect, quantity
from flowgrpo.policies.pipelines.frames import clips_of
from flowgrpo.policies.policy import Policy
from flowgrpo.policies.weights.adapters import require_saved
from flowgrpo.storage import atomic
from flowgrpo.storage.json_files import finite, read_object


def sides(trainer: Trainer) -> tuple[list[Prompt], list[Prompt]]:
    """Held-out prompts that evaluations on the way measure, and those that are reported before and after.

    They are the same, unless the evaluations choose the weights (`eval.best`, `eval.stop`, a guard's window): the best
    of many measurements is high by luck too. New seeds alone leave what a checkpoint does to these very prompts, which
    is all there is where a language model decodes greedily: of 20 checkpoints without an effect the best is said to
    have risen in a third of all runs (scripts/measure/false_sentences.py). Hence the prompts are parted (`halves`), and
    the reported ones have seeds of their own. It costs one more measurement of the base.
    """
    both = (trainer.held_out, trainer.held_out)
    one, other = (spread(side, trainer.config.eval.prompts)
                  for side in (halves(trainer.held_out) if trainer.progress.best.anew else both))
    return one, other


def measure_side(trainer: Trainer, functions: dict[str, Any], title: str,
                 reference: Callable[[], AbstractContextManager[None]] | None = None, shuffle: Collection[str] = (),
                 reported: bool = True, drawn: tuple[int, float] | None = None, keep: int | None = None) -> Measured:
    """reported: measure the reported prompts, else those of evaluations on the way. drawn: steps and guidance, in place
    of the recipe's. keep: number of prompts whose image is kept; None: `eval.grid`."""
    settings, config = trainer.config.eval, trainer.config
    steps, guidance = drawn or (settings.steps, settings.guidance)
    keep = settings.grid if keep is None else keep
    prompts = sides(trainer)[reported]
    frames = settings.frames or config.call.get("num_frames")
    sound, lost = readable(prompts, frames, trainer.processes, title)
    with clips_of(trainer.policy, settings.frames):
        measured = trainer.with_oom_retry(lambda: measure(
            trainer.policy, sound, functions, steps=steps,
            guidance=guidance, samples=settings.samples, micro_batch=trainer.geometry.micro_batch,
            negative=config.negative_prompt, keep=keep, title=title, encode=trainer.rollouts.encode,
            prepare=trainer.rollouts.prepare, processes=trainer.processes, reference=reference,
            others=shuffle, model=config.model, run_seed=seed(trainer, reported)), "evaluation")
    return measured.without(prompts, lost, keep) if any(lost) else measured


def seed(trainer: Trainer, reported: bool) -> int:
    return ANEW_SEED if reported and trainer.progress.best.anew else EVAL_SEED


def before(trainer: Trainer, functions: dict[str, Any], folder: Path, reuse: bool) -> Measured:
    """The base's scores on the prompts of evaluations on the way, measured once per run and kept as its first stage: a
    resumed run that measures in the same way reads them back."""
    anew, (choosing, reported) = trainer.progress.best.anew, sides(trainer)
    if trainer.processes.first:
        snapshots.write(folder / snapshots.FOLDER / "ranges.json",
                        {name: rewards.about(reward).range for name, reward in functions.items()})
        if anew:
            few = f"; a change is told from {LEAST} on: give more held-out prompts" * (len(reported) < LEAST)
            print(f"held-out prompts: {len(choosing)} choose the weights; at the end {len(reported)} others, with "
                  f"other seeds, measure these and the base{few}", flush=True)
        else:
            for file in (folder / f"{CHOOSING}.json", folder / snapshots.FOLDER / f"{CHOOSING}.json"):
                file.unlink(missing_ok=True)
    return _base(trainer, functions, folder, reuse, CHOOSING if anew else "before")


def _base(trainer: Trainer, functions: dict[str, Any], folder: Path, reuse: bool, name: str) -> Measured:
    """The base's scores on the reported prompts, `before`, or on those that choose, and keep them as a stage."""
    path, evaluations, reported = folder / f"{name}.json", trainer.policy.evaluations, name == "before"
    start = reported != trainer.progress.best.anew  # the run's first measurement
    settings = measurement_settings(trainer.config, sides(trainer)[reported], functions, seed(trainer, reported))
    known = read_object(path, "remove it, and the base is measured again") if reuse and path.exists() else {}
    was, edited = migrate(known.get("settings", {})), rewards.edited_rewards(known.get("code", {}), functions)
    if was:  # a key that an earlier measurement lacks had its default
        was = {"seed": EVAL_SEED} | was | {
            section: Config.model_fields[section].default.model_dump(mode="json") | was.get(section, {})
            for section in ("image", "text")}
    if edited and trainer.processes.first and start:
        print(f"resumed with reward: the file of {', '.join(edited)} has changed, so that the base is measured again",
              flush=True)
    if was == settings and not edited and (kept := _read_before(trainer, folder, known, name)):
        if trainer.processes.first:
            snapshots.stage(folder, name, 0, kept)
        return kept
    if reuse and start and (edited or {**was, "grid": settings["grid"]} != settings):
        trainer.progress.best.forget()
    with trainer.policy.reference():
        measured = measure_side(trainer, functions, f"{'' if start else 'other '}held-out prompts, before",
                                shuffle=[name for name in functions if name in trainer.config.trained],
                                reported=reported)
    trainer.policy.evaluations = evaluations
    if trainer.processes.first:
        write_before(folder, measured, settings, rewards.code_hashes(functions), name)
        for _, said in blind(measured.scores, measured.shuffled) if start else ():
            print(said, flush=True)
        snapshots.stage(folder, name, 0, measured)
    return measured


def _read_before(trainer: Trainer, folder: Path, known: dict[str, Any], name: str) -> Measured | None:
    """The base's samples and scores as `write_before` wrote them; None, with a line, for damaged images."""
    from torchvision.transforms.functional import to_tensor

    prompts, images, kept = sides(trainer)[name == "before"], torch.empty(0), []
    try:
        for file in sorted((folder / name).glob("[0-9]*.png")):
            with open_checked(file) as image:
                kept.append(untall(to_tensor(rgb(image)), known.get("frames")))
        images = torch.stack(kept) if kept else images
        shown = len(evenly(len(prompts), trainer.config.eval.grid))
        if not known.get("texts") and len(kept) != shown:
            raise ValueError(f"{len(kept)} images, expected {shown}")
    except (UserError, RuntimeError, ValueError, TypeError) as error:  # torch's, for other shapes
        if trainer.processes.first:
            print(f"{folder / name} is damaged ({' '.join(str(error).split())[:120]}): the base is measured again",
                  flush=True)
        return None
    return Measured([p for p in prompts for _ in range(trainer.config.eval.samples)], known["scores"],
                    known["texts"] or images, known["failed"], trainer.policy.fps, known.get("shuffled") or {},
                    looks=looks.read(known.get("looks")))


def measurement_settings(config: Config, prompts: list[Prompt], functions: dict[str, Any], seed: int = EVAL_SEED
                         ) -> dict[str, Any]:
    """Settings that the base's scores depend on, in their JSON form."""
    of = config.model_dump(mode="json", include={"model", "precision", "negative_prompt", "image", "text"})
    settings = of | config.eval.model_dump(mode="json", exclude={"every", "best", "stop", "weights"}) | {
        "rewards": rules(functions), "shown": [[p.text, p.negative, p.image, p.metadata] for p in prompts],
        "seed": seed}
    return json.loads(json.dumps(settings, default=str))


def rules(functions: dict[str, Any]) -> dict[str, Any]:
    """Each reward's rule as far as its scores depend on it; training options are left out."""
    said = {name: getattr(reward, "rule", WatchRule()).model_dump(mode="json") for name, reward in functions.items()}
    return {name: {key: rule[key] for key in ("use", "args", "when")} for name, rule in said.items()}


def write_before(folder: Path, measured: Measured, settings: dict[str, Any], code: dict[str, str] | None = None,
                 name: str = "before") -> None:
    """Write the base's samples to the folder `name`, and to NAME.json its scores, the settings of the measurement, and
    the hashes of the rewards' files."""
    from torchvision.utils import save_image

    texts, frames = measured.images if isinstance(measured.images, list) else None, None
    if texts is None:
        (folder / f"{name}.json").unlink(missing_ok=True)  # first, as it says that the samples are there
        atomic.remove(folder / name)
        atomic.make_folder(folder / name)
        frames = measured.images.shape[1] if measured.images.ndim == 5 else None
        for i, image in enumerate(measured.images):
            with atomic.replacing(folder / name / f"{i:03d}.png") as file:
                save_image(tall(image), file, format="png")
            if frames is not None:
                save_clip(folder / name / f"{i:03d}.webp", image, fps=measured.fps)
    content = {"settings": settings, "code": code or {}, "scores": measured.scores, "failed": measured.failed,
               "frames": frames, "texts": texts, "shuffled": measured.shuffled, "looks": measured.looks.as_json()}
    atomic.write_text(folder / f"{name}.json", json.dumps(finite(content)))


def finish(trainer: Trainer, functions: dict[str, Any], folder: Path, base: Measured, began: float, resumed: bool
           ) -> dict[str, Any]:
    """Save the result, measure it, draw before/after pairs, and write `summary.json`.

    base: as of `before`. began: time.perf_counter() when the run, or its resumption, began.
    """
    # The saved weights are measured, which need not be the last ones.
    config, policy, first, progress = trainer.config, trainer.policy, trainer.processes.first, trainer.progress
    [evaluations] = trainer.processes.total([policy.evaluations])
    change = progress.change(trainer.processes)
    with policy.weights.swap(progress.best.weights or trainer.optimization.evaluated_weights()):
        share = progress.change(trainer.processes) / change if change and not progress.best.weights else 1.0
        require_saved(policy.weights.named, trainer.epoch, trainer.processes.any)
        said = policy.weights.save(folder) if first or policy.weights.sharded else ""
        if progress.best.anew:
            base = _base(trainer, functions, folder, True, "before")
        after = measure_side(trainer, functions, f"{'other ' * progress.best.anew}held-out prompts, after",
                             policy.reference)
        trainer.extensions.on_finished(after)
    base, (choosing, reported) = base.beside(after), sides(trainer)
    anew = f"measured anew on {'prompts and ' * (choosing != reported)}seeds that chose nothing" \
        if progress.best.anew else None
    summary = {
        "name": config.name, "model": config.model, "method": config.method, "seed": config.seed,
        "evaluation": {"prompts": len(base.prompts), "lost": sum(after.lost), "samples": config.eval.samples,
                       "steps": config.eval.steps, "guidance": config.eval.guidance, "seed": seed(trainer, True),
                       "anew": anew, "of": describe_sampling(policy, config, len(base.prompts))},
        "before": base.mean(), "after": after.mean(),
        "tasks": {name: {"before": base.by_task(name), "after": after.by_task(name)} for name in functions},
        "compared": compare_rewards(base, after, config.eval.samples),
        "structure": after.structure(base),
        "looks": {"before": base.looks.means(), "after": after.looks.means(), "of_base": {
            name: share.interval.as_json() for name, share in after.looks.relative_to(base.looks).items()
            if share.interval}},
        "seconds": round(progress.seconds, 1), "epochs": trainer.epoch, "updates": trainer.optimization.update,
        "kept": "; ".join(filter(None, [
            progress.best.summary(), describe_average(config, share), *trainer.extensions.summary()])) or None,
        "denoiser_evaluations": evaluations, "unit": policy.unit,
        "samples": progress.sampled,
        "rollout_evaluations_per_sample": round(trainer.rollouts.rollout_evaluations / max(progress.sampled, 1), 3),
        "rollout_evaluations_saved_by_sharing": trainer.rollouts.saved_evaluations,
        "max_first_log_ratio": trainer.first_ratio.max_log_ratio, "skipped_updates": trainer.optimization.skipped,
        "reward_wait_seconds": round(progress.reward_seconds, 1),
        "reward_failures": {"trained": trainer.scoring.reward_failures, "before": base.failed, "after": after.failed,
                            "errors": trainer.scoring.errors},
        "rewards": {"trained": config.rewards, "measured": list(functions)}}
    # Files: the pairs, the summary, the last stage of the report, and the report, whose sentences are printed.
    if first:
        summary["trained"] = report.training_facts(config, folder, trainer.scoring.errors)
        if base.prompts:  # pairs, the samples after training, and what their prompts bring
            names, of = ("before", "after"), image_prompts(base)
            brought = image_files.save_sources(folder, of, base.images)
            if not isinstance(after.images, list):
                image_files.save_rows(folder / "after", after.images, after.fps)
            draw_measured(folder / "before_after.png", dict(zip(names, (base, after))), image_files.facts(
                folder, names, of, () if isinstance(after.images, list) else names, brought, model=config.model,
                seed=seed(trainer, True),
                call={"num_inference_steps": config.eval.steps, "guidance": config.eval.guidance}))
        summary |= {"total_seconds": round(time.perf_counter() - began, 1), "resumed": resumed}
        atomic.write_text(folder / "summary.json", json.dumps(finite(summary), indent=2) + "\n")
        snapshots.stage(folder, "after", progress.best.best.epoch if progress.best.weights else trainer.epoch, after)
        snapshots.last(folder, trainer)
        report.write(folder)
        print_report(summary, said, folder, [each["text"] for each in report.data(folder)["sentences"]])
    return summary


def describe_average(config: Config, share: float) -> str | None:
    """Describe a saved moving average that holds only this share of the change of the weights; None from half on."""
    if config.eval.weights != "ema" or share >= 0.5:
        return None
    return (f"the saved weights are the moving average, which holds {100 * share:.2g} % of what was trained so far: "
            f"lower train.ema ({config.train.ema:g}), train longer, or set eval.weights: current")


def compare_rewards(base: Measured, after: Measured, samples: int) -> dict[str, Rows]:
    """For each reward a row per `task` of the prompts' metadata, and one of all prompts, the last.

    samples: per prompt. A row has the intervals `before`, `after` and `change` as dictionaries.
    """
    tasks = defaultdict(list)
    for number, prompt in enumerate(base.prompts[::samples]):
        if "task" in prompt.metadata:
            tasks[str(prompt.metadata["task"])].append(number)
    return Scores({arm: {name: np.array(values).reshape(-1, samples) for name, values in measured.scores.items()}
                   for arm, measured in (("before", base), ("after", after))},
                  {**tasks, ALL: list(range(len(base.prompts) // samples))}).rows()


def describe_sampling(policy: Policy, config: Config, count: int) -> str:
    """Describe in words the evaluated samples, `count` of them, and their sampling."""
    warm, draws = config.text.eval_temperature, policy.modality != "text"
    warm = float(draws) if warm is None else warm
    text = f"temperature {warm:g}" if warm else "greedy"
    frames = "" if config.eval.frames is None else f"{quantity(config.eval.frames, 'frame')}, "
    drawn = f"{frames}{quantity(config.eval.steps, 'step')}, guidance {config.eval.guidance:g}"
    if policy.unit == "tokens":
        drawn = f"{text}, guidance {config.eval.guidance:g}" if draws else text
    return f"{inflect(count, SAMPLE[policy.modality])} ({drawn})"


def sample_images(trainer: Trainer, functions: dict[str, Any], folder: Path) -> Measured:
    """Measure held-out scores during training, and write a grid page per epoch to `samples/`; return the scores."""
    evaluations = trainer.policy.evaluations
    with trainer.policy.weights.swap(trainer.optimization.evaluated_weights()):
        measured = measure_side(trainer, functions, f"held-out prompts, epoch {trainer.epoch}",
                                trainer.policy.reference, reported=False)
    trainer.policy.evaluations = evaluations
    if trainer.processes.first:
        draw_measured(folder / "samples" / f"epoch-{trainer.epoch:05d}.png", {f"epoch {trainer.epoch}": measured})
        snapshots.stage(folder, f"epoch-{trainer.epoch:05d}", trainer.epoch, measured)
    return measured


def print_report(summary: dict[str, Any], said: str, folder: Path, verdict: Sequence[str] = ()) -> None:
    """Print the end of a run: tables of held-out rewards per task, costs, what was saved (`said`), files, verdict."""
    console, of = plain_console(), summary["evaluation"]
    for name, tasks in summary["compared"].items():
        caption = "; ".join(filter(None, [f"95 % intervals: {tasks[ALL]['before']['method']}", of.get("anew")]))
        show(console, f"{name} on {of['prompts']} held-out {of['of']}", caption,
             ("task", "before", "after", "change"), cells(tasks), rule=True)
    first = "-" if summary["max_first_log_ratio"] is None else f"{summary['max_first_log_ratio']:.1e}"
    since, epochs = ("since it was resumed", " of all epochs") if summary["resumed"] else (
        "in all, with loading and evaluation", "")
    console.print(f"{summary['total_seconds']:.0f} s {since}, {summary['seconds']:.0f} s of training{epochs}; "
                  f"{summary['denoiser_evaluations']:,} {summary['unit']} "
                  f"({summary['rollout_evaluations_per_sample']:.2f} per sample in the rollout; shared "
                  f"prefixes saved {summary['rollout_evaluations_saved_by_sharing']:,}), "
                  f"largest first |log ratio| {first}", highlight=False)
    if skipped := summary["skipped_updates"]:
        console.print(f"{skipped} updates were skipped, because the gradient was not finite, and {summary['updates']} "
                      "were made", highlight=False)
    if summary["kept"]:
        console.print(summary["kept"], highlight=False)
    console.print(said, highlight=False)
    pairs = f"before and after: {folder / 'before_after.png'}; " if of["prompts"] else ""
    console.print(f"{pairs}report: {folder / report.FILE}", highlight=False)
    for sentence in verdict:
        console.print(plain(sentence), highlight=False)
