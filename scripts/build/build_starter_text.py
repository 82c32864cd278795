"""Build the text starter: a small Qwen3 that adds step by step, trained from scratch, with its tokenizer.

    python scripts/build/build_starter_text.py --out runs/starter_text          # about 15 minutes of one core
    python scripts/build/build_starter_text.py --out runs/starter_text --resume # go on after an interruption

It first learns from right solutions. Its last training texts are a careless pupil's, who slips in every digit fact at
a rate of its own (`starter_sums.py`): a fault that the model has for good, beside the right way, which it
still takes at times.
Prints pass@1, 4 and 16 and the greedy accuracy on held-out problems, by task; writes the model directory, and the
prompts for alignment. Seeds are fixed.
"""

import argparse
import json
import random
from collections import defaultdict
from math import comb
from pathlib import Path

import torch
from starter_sums import COUNTS, Problem, choose_problems, draw, solution
from tqdm import tqdm

from flowgrpo.starter.arithmetic import build_tokenizer

TOKENS = 16  # of the longest solution with its end
SAMPLES = 16
PROMPTS = {"train": (False, 2000), "held_out": (True, 400)}


def build_model(tokenizer):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id))


def batch(tokenizer, rows: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B,T] of prompts and solutions, and labels: -100 except of the solution and the end."""
    prompts, solutions = ([tokenizer.convert_tokens_to_ids(list(text)) for text in side] for side in zip(*rows))
    length = max(len(prompt) + len(text) for prompt, text in zip(prompts, solutions)) + 2
    ids = torch.full((len(rows), length), tokenizer.pad_token_id)
    labels = torch.full_like(ids, -100)
    for row, (prompt, text) in enumerate(zip(prompts, solutions)):
        start, full = 1 + len(prompt), [tokenizer.bos_token_id, *prompt, *text, tokenizer.eos_token_id]
        ids[row, :len(full)] = torch.tensor(full)
        labels[row, start:len(full)] = ids[row, start:len(full)]
    return ids, labels


def pupil(dice: random.Random, count: int, careless: bool) -> tuple[str, str]:
    """Return a training problem of `count` numbers, and its right or careless solution."""
    problem = draw(dice, False, count)
    return problem.prompt, solution(problem.careless(dice) if careless else problem.steps)


def train(args, tokenizer, model) -> None:
    """Right solutions for `steps`, then the careless pupil's for `careless_steps`; a checkpoint every 100."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1, betas=(0.9, 0.98))
    total, start, file = args.steps + args.careless_steps, 0, args.out / "training.pt"
    if args.resume and file.exists():
        state = torch.load(file, weights_only=True)  # our own file
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    for step in (bar := tqdm(range(start, total), initial=start, total=total, mininterval=5)):
        dice = random.Random(step)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1, (step + 1) / 200) * (1 - step / total)
        optimizer.zero_grad()
        for count in COUNTS:
            rows = [pupil(dice, count, step >= args.steps) for _ in range(args.batch // len(COUNTS))]
            ids, labels = batch(tokenizer, rows)
            loss = model(input_ids=ids, labels=labels).loss / len(COUNTS)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        bar.set_postfix(loss=f"{loss.item() * len(COUNTS):.4f}", refresh=False)
        if (step + 1) % 100 == 0 or step + 1 == total:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, file)


@torch.no_grad()
def solved(tokenizer, model, rows: list[Problem], sample: bool) -> list[bool]:
    """Return for each problem whether the answer is right, greedy or sampled at temperature 1."""
    asked = tokenizer([tokenizer.bos_token + row.prompt for row in rows], return_tensors="pt", padding=True)
    ids = model.generate(input_ids=asked["input_ids"], attention_mask=asked["attention_mask"], max_new_tokens=TOKENS,
                         do_sample=sample, top_k=0)
    texts = tokenizer.batch_decode(ids[:, asked["input_ids"].shape[1]:], skip_special_tokens=True)
    return [text.rpartition(";")[2] == str(row.answer) for row, text in zip(rows, texts)]


def accuracy(tokenizer, model, rows: list[Problem]) -> dict[str, dict[str, float]]:
    """Greedy accuracy and pass@k at temperature 1, of each task and of all."""
    torch.manual_seed(0)
    greedy = solved(tokenizer, model, rows, False)
    right = [sum(column) for column in zip(*(solved(tokenizer, model, rows, True) for _ in range(SAMPLES)))]
    tasks = defaultdict(list)
    for i, row in enumerate(rows):
        tasks[row.task].append(i)
        tasks["all"].append(i)
    table = {}
    for task, members in sorted(tasks.items()):
        table[task] = {"greedy": sum(greedy[i] for i in members) / len(members)} | {
            f"pass@{k}": sum(1 - comb(SAMPLES - right[i], k) / comb(SAMPLES, k) for i in members) / len(members)
            for k in (1, 4, 16)}
        table[task] |= {"none right": sum(right[i] == 0 for i in members) / len(members),
                        "all right": sum(right[i] == SAMPLES for i in members) / len(members)}
    return table


def write_prompts(folder: Path) -> None:
    for name, (held_out, count) in PROMPTS.items():
        lines = [json.dumps({"prompt": row.prompt, "metadata": {
            "answer": str(row.answer), "solution": solution(row.steps), "task": row.task}})
            for row in choose_problems(held_out, count, seed=0)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--steps", type=int, default=2000, help="with right solutions")
    parser.add_argument("--careless-steps", type=int, default=800, help="with the careless pupil's")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_prompts(args.out)
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} weights", flush=True)
    train(args, tokenizer, model)
    model.eval()
    model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")
    print("| | " + " | ".join(columns := ["greedy", "pass@1", "pass@4", "pass@16", "none right", "all right"]) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for task, shares in accuracy(tokenizer, model, choose_problems(True, 1000, seed=1)).items():
        print(f"| {task} | " + " | ".join(f"{shares[column]:.3f}" for column in columns) + " |", flush=True)


if __name__ == "__main__":
    main()
