"""Time a step of GRPO on a language model beside TRL's GRPOTrainer: the same prompts, lengths and sizes, on a CPU.

    python scripts/measure/compare_trl.py models/smollm2 --trl-python OTHER/bin/python --repeats 3

Both train a LoRA of rank 32 on every linear layer in fp32, without a KL, with one update a step, in one batch, on the
first of the packaged word problems. The reward counts different characters, so that every group has a gradient. A step
is what lies between two calls of the reward: an update and the next completions. The first step is left out. Runs
alternate. Seconds are the processor's, so that other work on the machine counts little; ratios are printed, since they
alone carry over. `letters` are those of a completion. TRL needs an environment of its own with `trl` and this package.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STAMPS = "FLOWGRPO_COMPARE_STAMPS"
SYSTEM = "Write one short calculation, such as 3 * 4 = 12."
RANK, RATE, PROMPTS, GROUP = 32, 1e-5, 3, 8


def stamp(texts: list[str]) -> list[float]:
    """Note the processor's time and the peak of memory, and return the scores."""
    with open(os.environ[STAMPS], "a", encoding="utf-8") as file:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        file.write(json.dumps({"processor": time.process_time(), "peak": peak,
                               "letters": sum(map(len, texts)) / len(texts)}) + "\n")
    return [len(set(text)) / 100 for text in texts]


def characters(completions: list[str], prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    """Reward of flowgrpo."""
    return stamp(completions)


def problems(count: int) -> list[str]:
    """Return the first training problems."""
    from flowgrpo.data import sets

    return [prompt.text for prompt in sets.load(sets.SETS["word_problems"].train)[:count]]


def ours(model: Path, steps: int, tokens: int, folder: Path) -> None:
    """Train by flowgrpo."""
    from flowgrpo.cli import main as flowgrpo

    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in problems(PROMPTS * steps + 1)))
    code = flowgrpo(["train", str(ROOT / "configs" / "smollm2_135m.yaml"), f"--model={model}", f"--prompts={file}",
                     f"--held_out={1 / (PROMPTS * steps + 1)}", f"--reward={Path(__file__).resolve()}:characters",
                     f"--text.max_tokens={tokens}", f"--text.system={SYSTEM}", f"--adapter.rank={RANK}",
                     "--precision=fp32", "--device=cpu",
                     f"--train.epochs={steps}", f"--train.prompts={PROMPTS}", f"--train.group={GROUP}",
                     f"--train.micro_batch={PROMPTS * GROUP}", f"--train.lr={RATE}", "--train.updates=1",
                     "--eval.prompts=1", "--eval.grid=1", "--tracker=none", f"--output={folder}", "--name=ours"])
    sys.exit(code)


def theirs(model: Path, steps: int, tokens: int, folder: Path) -> None:
    """Train by TRL."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return stamp([each[0]["content"] for each in completions])

    asked = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
             for text in problems(PROMPTS * steps)]
    settings = GRPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP, max_completion_length=tokens, max_steps=steps, learning_rate=RATE, beta=0.0,
        num_iterations=1, temperature=1.0, gradient_checkpointing=False, logging_steps=steps, report_to="none",
        save_strategy="no", dataloader_pin_memory=False, seed=0)
    GRPOTrainer(AutoModelForCausalLM.from_pretrained(model, dtype="float32"), reward_funcs=reward, args=settings,
                train_dataset=Dataset.from_dict({"prompt": asked}),
                processing_class=AutoTokenizer.from_pretrained(model),
                peft_config=LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear")).train()


def run(side: str, python: str, given: argparse.Namespace) -> dict[str, float]:
    """Train by one of the two in a process of its own; return seconds of a step, peak in GiB, letters of a text."""
    with tempfile.TemporaryDirectory() as folder:
        stamps = Path(folder) / "stamps.jsonl"
        subprocess.run([python, __file__, str(given.model.resolve()), f"--side={side}", f"--steps={given.steps}",
                        f"--tokens={given.tokens}", f"--folder={folder}"], check=True, stdout=subprocess.DEVNULL,
                       env=os.environ | {STAMPS: str(stamps), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
        lines = [json.loads(line) for line in stamps.read_text().splitlines()]
    lines = lines[-given.steps:] if side == "theirs" else training(lines, given.steps)
    gaps = [after["processor"] - before["processor"] for before, after in zip(lines[1:], lines[2:])]
    return {"seconds": statistics.median(gaps), "peak": lines[-1]["peak"],
            "letters": statistics.mean(line["letters"] for line in lines)}


def table(found: list[dict[str, Any]]) -> str:
    """Return the repetitions as Markdown."""
    lines = ["| repetition | flowgrpo, s | TRL, s | TRL / flowgrpo | flowgrpo, GiB | TRL, GiB | TRL / flowgrpo |",
             "|---:|---:|---:|---:|---:|---:|---:|"]
    for each in found:
        ours, theirs = each["ours"], each["theirs"]
        lines.append(f"| {each['repeat'] + 1} | {ours['seconds']:.1f} | {theirs['seconds']:.1f} | {each['time']:.2f} | "
                     f"{ours['peak']:.1f} | {theirs['peak']:.1f} | {each['memory']:.2f} |")
    return "\n".join(lines)


def training(lines: list[dict[str, float]], steps: int) -> list[dict[str, float]]:
    """Return the calls of the training: an evaluation of one text is before and after it."""
    return lines[1:1 + steps]


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--trl-python", default=sys.executable, help="the interpreter of TRL's environment")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--side", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        {"ours": ours, "theirs": theirs}[given.side](given.model, given.steps, given.tokens, given.folder)
        return
    done: list[dict[str, Any]] = []
    for number in range(given.repeats):
        found = {"ours": run("ours", sys.executable, given), "theirs": run("theirs", given.trl_python, given)}
        done.append({"repeat": number, **found, "time": found["theirs"]["seconds"] / found["ours"]["seconds"],
                     "memory": found["theirs"]["peak"] / found["ours"]["peak"]})
        print(json.dumps(done[-1]), flush=True)
    print(table(done))


if __name__ == "__main__":
    main()
