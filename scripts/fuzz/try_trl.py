"""Run example scripts of TRL here by exchanging the import: `from trl` becomes `from flowgrpo.trl`.

    git clone https://github.com/huggingface/trl
    python scripts/fuzz/try_trl.py trl            # all of SCRIPTS, on tiny stand-ins of their models and data

Nothing else of a script is changed. Its model and data set are folders of their names in a temporary working
directory: a random Qwen3 of 2 layers with a character tokenizer, and 8 problems. Arguments make it short. Prints a line
per script with its method, rewards and exit code, and ends with 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHORT = ["--max_steps", "1", "--per_device_train_batch_size", "2", "--num_generations", "2", "--max_completion_length",
         "8", "--use_cpu", "--run_name", "run", "--output_dir", "out"]
# Script: its arguments. rloo.py takes none: its settings are in it.
SCRIPTS = {
    "gspo.py": ["--model_name_or_path", "Qwen/Qwen3-0.6B", "--learning_rate", "1e-5", "--dtype", "bfloat16",
                "--use_peft", "--lora_target_modules", "q_proj", "v_proj", "--log_completions",
                "--importance_sampling_level", "sequence", "--epsilon", "3e-4", "--epsilon_high", "4e-4", "--beta",
                "0.0", "--loss_type", "grpo", "--gradient_accumulation_steps", "2", "--steps_per_generation", "4",
                *SHORT],
    "grpo_continuous_batching.py": ["--model_name_or_path", "Qwen/Qwen3-0.6B", "--use_peft", "--log_completions",
                                    *SHORT],
    "rloo.py": []}
PROBLEM = {"problem": "1+2=", "question": "1+2=", "solution": "\\boxed{3}", "answer": "#### 3", "messages": []}


def stand_ins(folder: Path) -> None:
    """Write the model and the data sets of the scripts into a folder, under their names on the hub."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    signs = ["<pad>", "<eos>", *sorted(set(map(chr, range(32, 127))) | {"\n"})]
    made = Tokenizer(models.WordLevel({sign: place for place, sign in enumerate(signs)}, unk_token="<pad>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{% for turn in messages %}{{ turn['content'] }}\n{% endfor %}"
    config = Qwen3Config(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=2048,
                         eos_token_id=1, pad_token_id=0)
    model = folder / "Qwen" / "Qwen3-0.6B"
    Qwen3ForCausalLM(config).save_pretrained(model)
    tokenizer.save_pretrained(model)
    for name, splits in (("AI-MO/NuminaMath-TIR", ("train", "test")), ("openai/gsm8k", ("main/train", "main/test"))):
        for split in splits:
            file = folder / name / f"{split}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            first = 1000 * split.endswith("test")  # no problem is on both sides
            rows = [PROBLEM | {"problem": f"{first + number}+2=", "question": f"{first + number}+2="}
                    for number in range(160)]
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "openai" / "gsm8k" / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train.jsonl\n"
        "  - split: test\n    path: main/test.jsonl\n---\n")


def exchanged(text: str) -> str:
    """Return a script with this package in place of TRL."""
    return re.sub(r"^from trl(?=[ .])", "from flowgrpo.trl", text, flags=re.M)


def ran(clone: Path, name: str, folder: Path) -> int:
    """Run a script in a folder; print a line, and return its exit code."""
    (folder / name).write_text(exchanged((clone / "examples" / "scripts" / name).read_text()))
    settings = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache"),
                             "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, name, *SCRIPTS[name]], cwd=folder, env=settings, capture_output=True,
                          text=True)
    summaries = sorted(folder.glob("*/*/summary.json"), key=lambda path: path.stat().st_mtime)
    found = json.loads(summaries[-1].read_text()) if summaries and not done.returncode else {}
    print(f"{name}: exit code {done.returncode}, {found.get('method')}, {found.get('rewards', {}).get('trained')}, "
          f"{found.get('epochs')} rounds", flush=True)
    if done.returncode:
        print("\n".join((done.stdout + done.stderr).splitlines()[-12:]))
    return done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, help="a clone of TRL")
    parser.add_argument("scripts", nargs="*", help=f"of {', '.join(SCRIPTS)}; none: all")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stand_ins(Path(folder))
        return int(any([ran(given.clone.resolve(), name, Path(folder)) for name in given.scripts or SCRIPTS]))


if __name__ == "__main__":
    sys.exit(main())
