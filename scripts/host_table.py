"""Tables of the recipes' sizes on disk in docs/get_started and docs/distributed.md, computed from parameter counts.

    python scripts/host_table.py             # for one GPU and for eight

Nothing is downloaded or measured: the models' configurations are those of flowgrpo/published.py.
"""

from __future__ import annotations

from pathlib import Path

import recipe_downloads
import torch
from recipe_table import rewards

from flowgrpo.config import load
from flowgrpo.config.schema import Config
from flowgrpo.dry_run import from_configs
from flowgrpo.methods.overlay import preset, with_parts
from flowgrpo.policies.pipelines.load import denoisers
from flowgrpo.policies.weights.trainable import TrainableWeights

ROOT = Path(__file__).parent.parent
PAGES = {ROOT / "docs" / "get_started" / "one_gpu.md": "24gb",
         ROOT / "docs" / "distributed.md": "8x80"}
SIZES = ["| recipe | model | rewards | disk in all |", "|---|" + "---:|" * 3]
BEGIN, END = "<!-- sizes: begin -->\n", "<!-- sizes: end -->\n"
MOMENTS = {"adamw": 2.0, "adamw8bit": 0.5}  # AdamW's two, in copies of the fp32 weights


def recipes(ending: str) -> list[str]:
    """Return the recipes whose names end so."""
    return sorted(file.stem for file in (ROOT / "configs").glob(f"*_{ending}.yaml"))


def config_of(name: str) -> Config:
    return load(ROOT / "configs" / f"{name}.yaml")


def adapter_billions(config: Config) -> float:
    """Return the parameters of a recipe's LoRA, in 10^9, on a pipeline without values."""
    pipe = from_configs.pipeline(config.load.config or config.model, torch.bfloat16)
    weights = TrainableWeights(pipe, denoisers(pipe), config.adapter.model_copy(update={"init": None}))
    return sum(parameter.numel() for parameter in weights.named.values()) / 1e9


def copies(config: Config) -> float:
    """Return how many fp32 copies of the LoRA a checkpoint holds: the weights, the optimizer's moments, and where the
    recipe has them the average, the old policy and the best weights."""
    lag = with_parts(preset(config.method), config.parts).denoising.lag.most > 0
    return 1 + MOMENTS[config.train.optimizer] + sum(map(bool, (config.train.ema, lag, config.eval.best)))


def size_row(name: str) -> str:
    """Return a recipe's row of sizes in GB.

    Model and rewards are stored at two bytes per parameter; `train.keep` checkpoints and the LoRA are kept.
    """
    config = config_of(name)
    model, adapter = recipe_downloads.of_model(config.model), adapter_billions(config)
    judged = sum(map(recipe_downloads.of_reward, {*rewards(config.trained | config.watched)}))
    checkpoint = 4 * adapter * copies(config)
    disk = 2 * (model + judged) + config.train.keep * checkpoint + 4 * adapter
    return f"| `{name}` | {2 * model:.1f} | {2 * judged:.1f} | {disk:.1f} |"


def sizes(ending: str) -> str:
    """Return the table of sizes of the recipes whose names end so."""
    return "\n".join([*SIZES, *(size_row(name) for name in recipes(ending))]) + "\n"


def write(page: Path, table: str) -> None:
    """Replace what stands between the page's two marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(before + BEGIN + table + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    for page, ending in PAGES.items():
        write(page, sizes(ending))
