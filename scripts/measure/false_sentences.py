"""How often a report says something false of a run that changed nothing, by the package's own functions.

    python scripts/measure/false_sentences.py [--runs 1000]

Three tables, in % of simulated runs. A score is a prompt's level plus noise: normal, skewed (exponential less 1, of the
tuned weights alone), or verdicts of 0 and 1. `seeds`: the noise is of the seeds. `prompts`: it is what a checkpoint
does to a prompt, whatever the seed, as of a language model that decodes greedily; its mean over all prompts is 0.

1. "rose", of the trained reward, where the best of 1, 5 and 20 evaluations is kept: reported from the evaluation that
   chose it, from new seeds on its prompts, and from new prompts and seeds, as runs do.
2. "Possible reward hacking", where the trained reward rose indeed and 1 to 10 eval-only ones changed nothing: each at
   95 %, and as reports do (Holm).
3. "became alike" and "are blurred", of smooth random images, from 8 and more prompts with two images.
"""

import argparse
from collections.abc import Sequence

import numpy as np
import torch

from flowgrpo.config import validate
from flowgrpo.config.sections import Eval
from flowgrpo.data.prompts import Prompt
from flowgrpo.evaluation import looks
from flowgrpo.evaluation.measured import halves
from flowgrpo.evaluation.report import verdict
from flowgrpo.training.best import BestWeights

PROMPTS, NOISES, EVALUATIONS, EVAL_ONLY = (20, 24, 32, 64), ("normal", "skewed", "verdicts"), (1, 5, 20), (1, 3, 6, 10)
RULES = ("same", "new seeds", "new prompts")
LINES = [{"epoch": 1, "evaluations": 1, "seconds": 1.0}]  # metrics of a run, as far as the sentences need them


CONFIG = validate({"reward": {"trained": 1.0}})


def noise(rng: np.random.Generator, kind: str, shape: Sequence[int]) -> np.ndarray:
    """Noise of mean 0 and deviation 0.5; of verdicts the probability that one is changed is 0.3."""
    if kind == "verdicts":
        return rng.random(shape) < 0.3
    return 0.5 * (rng.normal(size=shape) if kind == "normal" else rng.exponential(size=shape) - 1)


def scores(level: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """Levels [N] with noise [..., N]; a verdict that is changed is the other one."""
    return np.where(moved, 1 - level, level) if moved.dtype == bool else level + moved


def levels(rng: np.random.Generator, kind: str, shape: Sequence[int]) -> np.ndarray:
    return rng.integers(0, 2, shape).astype(float) if kind == "verdicts" else rng.normal(size=shape)


def texts(was: dict[str, np.ndarray], now: dict[str, np.ndarray]) -> list[str]:
    """Sentences of a report on these scores [N] by reward; `trained` is trained on."""
    return [each["text"] for each in verdict.sentences(CONFIG, LINES, changes(was, now), {}, True)]


def changes(was: dict[str, np.ndarray], now: dict[str, np.ndarray]) -> list[verdict.Change]:
    return verdict.changes(CONFIG, [{"scores": {name: values.tolist() for name, values in of.items()}}
                                    for of in (was, now)])


def rises(rng: np.random.Generator, kind: str, prompts: int, evaluations: int, persistent: bool) -> dict[str, bool]:
    """One run that keeps the best of its evaluations; True by the rule that reports it where it is said to have risen.
    """
    held = [Prompt(str(i)) for i in range(2 * prompts)]
    choosing, reported = ([int(prompt.text) for prompt in side] for side in halves(held))
    level, shape = levels(rng, kind, [2 * prompts]), (evaluations, 2 * prompts)
    first = noise(rng, kind, shape)
    again = first if persistent else noise(rng, kind, shape)
    best = BestWeights(Eval(best="trained"))
    for epoch, found in enumerate(scores(level, first)[:, choosing].mean(1), 1):
        best.see({"held_out/trained": float(found)}, epoch, dict)
    kept = best.best.epoch - 1
    ways = {"same": (first, choosing), "new seeds": (again, choosing), "new prompts": (again, reported)}
    said = {rule: texts({"trained": level[rows]}, {"trained": scores(level, moved[kept])[rows]})
            for rule, (moved, rows) in ways.items()}
    return {rule: any(text.startswith("trained") and " rose " in text for text in said[rule]) for rule in RULES}


def hacked(rng: np.random.Generator, kind: str, prompts: int, eval_only: int) -> tuple[bool, bool]:
    """One run whose trained reward rose: is an eval-only reward said to have fallen, each at 95 %, and as reports do?
    """
    was = {f"eval-only {i}": levels(rng, kind, [prompts]) for i in range(eval_only)}
    now = {name: scores(level, noise(rng, kind, [prompts])) for name, level in was.items()}
    start = rng.normal(size=prompts)
    said = texts(was | {"trained": start}, now | {"trained": start + 1 + 0.1 * rng.normal(size=prompts)})
    return (any(each.change.high < 0 for each in changes(was, now)),
            any(text.startswith("Possible reward hacking") for text in said))


def image(generator: torch.Generator, scene: torch.Tensor) -> torch.Tensor:
    """A smooth random image of a prompt's scene, with a strength of its own."""
    own = torch.nn.functional.interpolate(torch.randn(1, 3, 4, 4, generator=generator), size=64, mode="bilinear")[0]
    return (0.5 + 0.12 * (scene + own * (0.6 + 0.8 * torch.rand(1, generator=generator)))).clamp(0, 1)


def warned(generator: torch.Generator, prompts: int) -> tuple[list[str], bool]:
    """One run whose images are as the base's: the warnings on looks, and whether the means alone would warn."""
    scenes = torch.nn.functional.interpolate(torch.randn(prompts, 3, 4, 4, generator=generator), size=64,
                                             mode="bilinear")
    places = [i for i in range(prompts) for _ in range(2)]
    base, now = (looks.measure_looks(looks.features([image(generator, scenes[i]) for i in places]), places)
                 for _ in range(2))
    shares = now.relative_to(base)
    return ([text for tone, text in looks.describe_looks(shares) if tone == "warn"],
            shares[looks.APART] < looks.ALIKE or shares[looks.EDGES] > looks.WIDE)


def percent(values: Sequence[bool]) -> str:
    return f"{100 * np.mean(values):.1f}"


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    for line in (heads, ["---:"] * len(heads), *rows):
        print(f"| {' | '.join(map(str, line))} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    runs, rows = range(parser.parse_args().runs), []
    for persistent in (False, True):
        for kind in NOISES:
            for count in PROMPTS:
                for evaluations in EVALUATIONS:
                    rng = np.random.default_rng([1, persistent, NOISES.index(kind), count, evaluations])
                    said = [rises(rng, kind, count, evaluations, persistent) for _ in runs]
                    rows.append(["prompts" if persistent else "seeds", kind, count, evaluations,
                                 *(percent([each[rule] for each in said]) for rule in RULES)])
    table(["noise of", "noise", "prompts", "evaluations", *RULES], rows)
    rows = []
    for kind in NOISES:
        for count in PROMPTS:
            for eval_only in EVAL_ONLY:
                rng = np.random.default_rng([2, NOISES.index(kind), count, eval_only])
                rows.append([kind, count, eval_only,
                             *map(percent, zip(*(hacked(rng, kind, count, eval_only) for _ in runs)))])
    table(["noise", "prompts", "eval-only rewards", "each at 95 %", "Holm"], rows)
    generator, rows = torch.Generator().manual_seed(3), []
    for count in (8, 16, 32):
        found = [warned(generator, count) for _ in runs]
        rows.append([count, percent([means for _, means in found]), percent([bool(said) for said, _ in found])])
    table(["prompts with two images", "means alone", "with intervals"], rows)


if __name__ == "__main__":
    main()
