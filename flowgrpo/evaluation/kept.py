"""Result of a run's LoRA on a distilled sibling of its model (siblings.py): how much of the gain is kept.

Kept is the gain on the sibling over the gain on the run's own model at its own steps, paired by prompt
(`statistics.ratio`). A gain is the change of the weighted sum of the trained rewards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowgrpo.config.schema import Config
from flowgrpo.config.sections import Fused, Load
from flowgrpo.evaluation.looks import APART, EDGES
from flowgrpo.evaluation.statistics import ALL, STUDENT, Interval, Scores, cell, change, format_value, ratio
from flowgrpo.storage import atomic
from flowgrpo.storage.json_files import finite, read_object

if TYPE_CHECKING:
    from flowgrpo.evaluation.measured import Measured

FOLDER = "on"  # of the results, in the run's folder


@dataclass(frozen=True)
class Sibling:
    """Distilled model and how it is sampled.

    model: folder, hub id or a packaged model's name. lora: a file that is fused into it first, such as Lightning's,
    times a scale.
    scheduler: keys that change its scheduler, as `load.scheduler`.
    """

    model: str
    steps: int
    guidance: float
    lora: str | None = None
    scale: float = 1.0
    scheduler: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " + ".join(Path(place).name for place in (self.model, self.lora) if place)

    def files(self, config: Config) -> Load:
        """Section `load` of this model: that of the run, if it is the run's own model, with its LoRA fused in."""
        files = config.load if self.model == config.model else Load()
        fused = [Fused(path=self.lora, scale=self.scale)] if self.lora else []
        return files.model_copy(update={"lora": [*files.lora, *fused],
                                        "scheduler": {**files.scheduler, **self.scheduler}})


def totals(scores: Mapping[str, Sequence[float]], weights: Mapping[str, float], samples: int) -> np.ndarray:
    """Weighted sum of the trained rewards of each prompt [N], a mean over its samples; NaN where none applies. A reward
    that does not apply to a sample adds nothing to it."""
    values = np.array([scores[name] for name in weights if name in scores], dtype=np.float64)
    factors = np.array([weight for name, weight in weights.items() if name in scores])
    sums = np.where(np.isnan(values).all(0), np.nan, np.nansum(values * factors[:, None], 0)).reshape(-1, samples)
    count = (~np.isnan(sums)).sum(1)
    return np.where(count, np.nansum(sums, 1) / np.maximum(count, 1), np.nan)


def record(config: Config, sibling: Sibling, own: tuple[Mapping[str, Sequence[float]], Mapping[str, Sequence[float]]],
           base: Measured, worn: Mapping[float, Measured], seed: int) -> dict[str, Any]:
    """Result in its JSON form.

    own: scores before and after training on the run's own model, at its own steps. base: measurement of the sibling;
    worn: of the sibling with the LoRA, by the LoRA's weight; all of the same prompts and seeds.
    """
    from flowgrpo.evaluation.pages.before_after import arrays

    samples = config.eval.samples
    before, after = (totals(scores, config.rewards, samples) for scores in own)
    first, measured = totals(base.scores, config.rewards, samples), []
    for weight, found in worn.items():
        gain = totals(found.scores, config.rewards, samples) - first
        compared = Scores({"before": arrays(base), "after": arrays(found)}, {ALL: list(range(len(first)))})
        shares = found.looks.relative_to(base.looks)
        measured.append({
            "weight": weight, "gain": gain_of(first, first + gain).as_json(),
            "kept": ratio(after - before, gain).as_json(),
            "rewards": {name: rows[ALL] for name, rows in compared.rows().items()},
            "of_base": {name: share.interval.as_json() for name, share in shares.items() if share.interval}})
    return finite({
        "model": sibling.model, "lora": sibling.lora, "scheduler": dict(sibling.scheduler), "name": sibling.name,
        "steps": sibling.steps, "guidance": sibling.guidance, "prompts": len(first), "samples": samples, "seed": seed,
        "own": {"model": config.model, "steps": config.eval.steps, "guidance": config.eval.guidance,
                "gain": gain_of(before, after).as_json()}, "weights": measured})


def gain_of(before: np.ndarray, after: np.ndarray) -> Interval:
    return change(before[:, None], after[:, None], STUDENT)


# --- in words --------------------------------------------------------------------------------------------------------

def sentence(found: Mapping[str, Any]) -> str:
    """The result in words, the weight nearest to 1 first, so that none is chosen by its result:
    "on NAME at 4 steps: kept 0.79 [0.57, 1.05] of the gain; 0.94 with the LoRA at 0.5"."""
    place = f"on {found['name']} at {found['steps']} step{'s' * (found['steps'] != 1)}"
    first, *others = sorted(found["weights"], key=lambda each: abs(each["weight"] - 1))
    low = found["own"]["gain"]["low"]
    if low is None or not low > 0 or first["kept"]["mean"] is None:
        return f"{place}: no gain to keep"
    weight = "" if first["weight"] == 1 else f" with the LoRA at {first['weight']:g}"
    return "; ".join([f"{place}: kept {cell(first['kept'], 2)} of the gain{weight}",
                      *(f"{each['kept']['mean']:.2f} with the LoRA at {each['weight']:g}" for each in others)])


def table(found: Mapping[str, Any]) -> list[list[str]]:
    """Headings and a line per weight: the gain, what is kept, each reward, and shares of the sibling's looks."""
    names = list(found["weights"][0]["rewards"])
    lines = [["weight", "gain", "kept", *names, "edge width", "diversity"]]
    for each in found["weights"]:
        lines.append([f"{each['weight']:g}", cell(each["gain"], 3, "+"), cell(each["kept"], 2),
                      *(f"{format_value(of['before']['mean'], 3)} to {format_value(of['after']['mean'], 3)}"
                        for of in each["rewards"].values()),
                      *(cell(each["of_base"][name], 2) if name in each["of_base"] else "-" for name in (EDGES, APART))])
    return lines


def read(run: Path) -> dict[Path, dict[str, Any]]:
    return {file: read_object(file, "remove it, and measure it again", name=str, weights=list, own=dict)
            for file in sorted((run / FOLDER).glob("*.json"))}


def write(run: Path, found: Mapping[str, Any], base: Measured, worn: Mapping[float, Measured]) -> Path:
    """Write a result to the returned path, with a page: the sibling's images beside those with the LoRA."""
    from flowgrpo.evaluation.pages.before_after import draw_measured

    path = run / FOLDER / (re.sub(r"[^\w.-]+", "_", str(found["name"])) + ".json")
    atomic.make_folder(path.parent)
    atomic.write_text(path, json.dumps(found, indent=2) + "\n")
    tuned = {f"with the LoRA at {weight:g}": measured for weight, measured in worn.items()}
    draw_measured(path.with_suffix(".png"), {str(found["name"]): base} | tuned)
    return path
