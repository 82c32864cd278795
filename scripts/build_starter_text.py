"""Build the text starter: a small Qwen3 that adds and subtracts, trained from scratch, with its tokenizer.

    python scripts/build_starter_text.py --out runs/starter_text          # about 10 minutes on 2 CPU cores
    python scripts/build_starter_text.py --out runs/starter_text --resume # go on after an interruption

It first learns from right answers. Its last training texts are a careless pupil's, who in four of five problems
forgets to carry and forgets the minus before the result: a fault that the model has for good, beside the right way,
which it knows as well.
Prints accuracy on held-out problems; writes the model directory, and the prompts for alignment. Seeds are fixed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tqdm import tqdm

from flowgrpo.starter.arithmetic import Problem, build_tokenizer, chosen, problems

LENGTH = 12  # start, 6 characters of a problem, 4 of its answer, end
CARELESS = 0.8
PROMPTS = {"train": (False, 2000), "held_out": (True, 400)}


def build_model(tokenizer):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id))


def batch(tokenizer, rows: list[tuple[Problem, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B,12] and labels: those of the answer and the end; the rest, and padding on the right, is -100."""
    ids = torch.full((len(rows), LENGTH), tokenizer.pad_token_id)
    labels = torch.full_like(ids, -100)
    for row, (problem, answer) in enumerate(rows):
        asked = [tokenizer.bos_token_id, *tokenizer.convert_tokens_to_ids(list(problem.prompt))]
        told = [*tokenizer.convert_tokens_to_ids(list(str(answer))), tokenizer.eos_token_id]
        ids[row, :len(asked) + len(told)] = torch.tensor(asked + told)
        labels[row, len(asked):len(asked) + len(told)] = torch.tensor(told)
    return ids, labels


def draw(generator: torch.Generator, pool: list[Problem], size: int, careless: float) -> list[tuple[Problem, int]]:
    """Problems with answers, the share `careless` of them as the pupil answers."""
    picked = torch.randint(len(pool), (size,), generator=generator).tolist()
    slips = (torch.rand(size, generator=generator) < careless).tolist()
    return [(pool[i], pool[i].careless if slip else pool[i].answer) for i, slip in zip(picked, slips)]


def train(args, tokenizer, model) -> None:
    """Right answers for `steps`, then the careless pupil's for `careless_steps`; a checkpoint every 500."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1, betas=(0.9, 0.98))
    total, start, file = args.steps + args.careless_steps, 0, args.out / "training.pt"
    if args.resume and file.exists():
        state = torch.load(file, weights_only=True)  # our own file
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    pool = problems(held_out=False)
    for step in (bar := tqdm(range(start, total), initial=start, total=total, mininterval=5)):
        generator = torch.Generator().manual_seed(step)
        rows = draw(generator, pool, args.batch, CARELESS if step >= args.steps else 0.0)
        ids, labels = batch(tokenizer, rows)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1, (step + 1) / 200) * (1 - step / total)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
        if (step + 1) % 500 == 0 or step + 1 == total:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, file)


@torch.no_grad()
def accuracy(tokenizer, model, rows: list[Problem], sample: bool) -> dict[str, float]:
    """The share of right answers per task and of all, greedy or sampled at temperature 1."""
    torch.manual_seed(0)
    asked = tokenizer([tokenizer.bos_token + row.prompt for row in rows], return_tensors="pt", padding=True)
    made = model.generate(input_ids=asked["input_ids"], attention_mask=asked["attention_mask"], max_new_tokens=5,
                          do_sample=sample, top_k=0)
    told = tokenizer.batch_decode(made[:, asked["input_ids"].shape[1]:], skip_special_tokens=True)
    right = {row: text == str(row.answer) for row, text in zip(rows, told)}
    tasks = {task: [right[row] for row in rows if row.task == task] for task in sorted({row.task for row in rows})}
    shares = {task: sum(values) / len(values) for task, values in tasks.items()}
    return {"all": sum(right.values()) / len(rows)} | shares


def write_prompts(folder: Path) -> None:
    for name, (held_out, count) in PROMPTS.items():
        lines = [json.dumps({"prompt": row.prompt, "metadata": {"answer": str(row.answer), "task": row.task}})
                 for row in chosen(held_out, count, seed=0)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--steps", type=int, default=3000, help="with right answers")
    parser.add_argument("--careless-steps", type=int, default=600, help="with the careless pupil's")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=False)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} weights", flush=True)
    train(args, tokenizer, model)
    model.eval()
    for sample in (False, True):
        found = accuracy(tokenizer, model, problems(held_out=True), sample)
        print("sampled" if sample else "greedy", found, flush=True)
    model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")
    write_prompts(args.out)


if __name__ == "__main__":
    main()
