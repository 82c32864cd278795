"""Distance of samples that are drawn with a feature cache from those without: `rollout.cache`.

    python scripts/measure/feature_caches.py                               # the video starter, on the CPU: some minutes
    python scripts/measure/feature_caches.py --recipe configs/flux_dev.yaml --device cuda --write ""

The distance is the root mean square difference of the images, over that of images of different seeds: 0 is the same
image, 1 as far as another sample. The table has the mean and the largest of the seeds. `--write` names the JSON that
docs/performance.md shows.
"""

import json
from pathlib import Path
from typing import Any

import torch
from common import make_trainer, measuring, options

from flowgrpo.config import load
from flowgrpo.contrib.feature_cache import RolloutCache
from flowgrpo.train import Trainer

ROOT = Path(__file__).parents[2]
VIDEO, DATA = ROOT / "configs" / "starter_video.yaml", ROOT / "docs" / "data" / "feature_caches.json"
CASES = [*({"cache": "first_block", "cache_threshold": threshold} for threshold in (0.05, 0.1, 0.2, 0.4)),
         *({"cache": "taylorseer", "cache_interval": interval} for interval in (2, 3, 5)),
         *({"cache": "mag", "cache_threshold": threshold} for threshold in (0.06, 0.12, 0.24))]
PAGE, BEGIN, END = ROOT / "docs" / "performance.md", "<!-- distances: begin -->", "<!-- distances: end -->"
PROMPTS, SAMPLES = 4, 2


def images(trainer: Trainer, seed: int) -> torch.Tensor:
    """Return the images [P*SAMPLES,...] of the first prompts, in one batch."""
    rollouts: Any = trainer.rollouts
    policy, spec = rollouts.policy, rollouts.explorations(0)[0]
    rows = torch.arange(PROMPTS).repeat_interleave(SAMPLES)
    conditioning = rollouts.conditioning(trainer.prompts[:PROMPTS]).rows(rows)
    generators = policy.generators(range(1000 * seed, 1000 * seed + len(rows)))
    finals, _ = policy.run(spec.task(0, spec.steps, generators), conditioning, None, generators)
    return rollouts.decode(finals, conditioning)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the root mean square difference of images."""
    return (one - other).square().mean().sqrt().item()


def row(case: dict[str, Any], given: dict[str, Any], recipe: Path, seeds: int) -> dict[str, Any]:
    """Return what a cache skips, and how far its samples are, for each seed."""
    settings = {f"rollout.{name}": value for name, value in case.items()}
    trainer = make_trainer(load(recipe, given | settings))
    [extension] = [each for each in trainer.extensions.present if isinstance(each, RolloutCache)]
    distances, before = [], extension.cache.calls
    assert not before
    for seed in range(seeds):
        plain = images(trainer, seed)
        apart = distance(plain, plain.view(PROMPTS, SAMPLES, *plain.shape[1:]).roll(1, 1).view_as(plain))
        with extension.around_epoch():
            distances.append(distance(images(trainer, seed), plain) / apart)
    skipped = 1 - extension.cache.computed / extension.cache.calls
    return case | {"skipped": round(skipped, 4), "distances": [round(each, 4) for each in distances]}


def table(found: dict[str, Any]) -> str:
    """Return the rows as a table of Markdown."""
    lines = ["| cache | setting | blocks skipped | distance, mean | distance, largest seed |",
             "|---|---|---:|---:|---:|"]
    for each in found["rows"]:
        name, value = next((key, each[key]) for key in ("cache_threshold", "cache_interval") if key in each)
        distances = each["distances"]
        lines.append(f"| `{each['cache']}` | `{name}: {value:g}` | {each['skipped']:.0%} | "
                     f"{sum(distances) / len(distances):.3f} | {max(distances):.3f} |")
    return "\n".join(lines)


def page(text: str, found: dict[str, Any]) -> str:
    """Return the page with the table of the numbers."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(found)}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = measuring(__doc__)
    parser.set_defaults(repetitions=3)
    parser.add_argument("--recipe", type=Path, default=VIDEO)
    parser.add_argument("--cases", nargs="+", choices=["first_block", "taylorseer", "mag"],
                        default=["first_block", "taylorseer", "mag"])
    parser.add_argument("--write", default=str(DATA), help="file of the numbers; empty: none")
    args = parser.parse_args()
    given = {"method": "diffusion_nft", "parts": "{}", "device": args.device, "train.steps": "20"}
    given |= options(args.option)
    found: dict[str, Any] = {"recipe": args.recipe.stem, "steps": int(given["train.steps"]), "seeds": args.repetitions,
                             "samples": PROMPTS * SAMPLES, "rows": []}
    for case in CASES:
        try:
            if case["cache"] in args.cases:
                found["rows"].append(row(case, given, args.recipe, args.repetitions))
        except ValueError as error:
            print(f"{case['cache']}: {error}")
    print(table(found))
    if args.write:
        Path(args.write).write_text(json.dumps(found, indent=1) + "\n")
        if Path(args.write) == DATA:
            PAGE.write_text(page(PAGE.read_text(), found))


if __name__ == "__main__":
    main()
