"""flowgrpo beside TRL's GRPOTrainer on the text starter: the same numbers, and seconds per optimizer step.

    pip install trl                     # for this script alone
    python scripts/measure/bench_text.py

Both train all weights of the same model on the same prompts, with the same group, batch and learning rate. For each
loss type TRL generates and scores a batch; of these very completions, with TRL's advantages and with old
log-probabilities that are moved by seeded noise, so that ratios differ from 1 and clips bite, both compute
log-probabilities and loss. Then both make optimizer steps in turns, sampling included; the ratio of their seconds is
told. Writes the table of docs/performance.md to the terminal.
"""

import argparse
import contextlib
import tempfile
import time
import warnings
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from flowgrpo.config import Config, validate
from flowgrpo.data import prompts, sets
from flowgrpo.samplers.rollout import Part
from flowgrpo.text.policies.causal_lm import CausalLM
from flowgrpo.text.policies.text_weights import load_causal_lm
from flowgrpo.text.samplers.language_model import TokenizedPrompts
from flowgrpo.train import Trainer
from flowgrpo.training import sampling
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.metrics import UpdateStats
from flowgrpo.training.optimizer import decisions
from flowgrpo.types import Completions, Scored

TOKENS, SEED = 16, 0
# TRL's names of the preset's loss.
LOSSES = {"grpo": {"loss_type": "grpo"}, "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
          "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
          "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}}


def exact(completions, prompts, metadata):
    """1 for the right answer, behind the last semicolon."""
    return [float(last(text) == entry["answer"]) for text, entry in zip(completions, metadata)]


def exact_for_trl(completions, answer, **_):
    """Same, as TRL asks for it: a completion is a conversation."""
    return [float(last(said[0]["content"]) == right) for said, right in zip(completions, answer)]


def last(text: str) -> str:
    return text.rpartition(";")[2].strip()


class CompletionBatch(GRPOTrainer):
    """TRL's trainer, that moves the old log-probabilities of its first loss and keeps what it computed."""

    kept: dict[str, Any] | None = None
    moved = False

    def _compute_loss(self, model, inputs):
        if not self.moved or self.kept is not None:
            return super()._compute_loss(model, inputs)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        width = inputs["completion_ids"].shape[1]
        logp = self._get_per_token_logps_and_entropies(model, ids, mask, width)[0].detach()
        noise = torch.randn(logp.shape, generator=torch.Generator().manual_seed(SEED)) / 4
        inputs["old_per_token_logps"] = logp + noise
        loss = super()._compute_loss(model, inputs)
        self.kept = inputs | {"logp": logp, "loss": loss.detach()}
        return loss


class Seconds(TrainerCallback):
    def __init__(self):
        self.each: list[float] = []

    def on_step_begin(self, *_, **__):
        self.start = time.perf_counter()

    def on_step_end(self, *_, **__):
        self.each.append(time.perf_counter() - self.start)


def theirs(args, method: str, steps: int, moved: bool) -> tuple[CompletionBatch, list[float]]:
    model, tokenizer = load_causal_lm("starter_text")
    rows = [{"prompt": [{"role": "user", "content": prompt.text}], "answer": prompt.metadata["answer"]}
            for prompt in prompts.load_prompts(prompts.STARTER / "text_train.jsonl")]
    seconds = Seconds()
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=args.prompts * args.group, num_generations=args.group,
            max_completion_length=TOKENS, temperature=1.0, learning_rate=args.lr, beta=0.0, max_steps=steps, seed=SEED,
            report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no",
            disable_tqdm=True, lr_scheduler_type="constant", logging_strategy="no", **LOSSES[method])
        trainer = CompletionBatch(model, exact_for_trl, args=settings, train_dataset=Dataset.from_list(rows),
                                  processing_class=tokenizer, callbacks=[seconds])
        trainer.moved = moved
        with contextlib.redirect_stdout(None):  # it prints its metrics
            trainer.train()
    return trainer, seconds.each


def ours(args, method: str) -> Trainer:
    config = settings(args, method)
    torch.manual_seed(SEED)
    policy = CausalLM(*load_causal_lm("starter_text"), config.adapter, config.text)
    return Trainer(config, Accelerator(cpu=True), policy, {"exact": exact}, sets.resolve(config))


def settings(args, method: str) -> Config:
    return validate({
        "model": "starter_text", "prompts": "starter_text", "reward": "exact", "method": method, "tracker": "none",
        "parts": {"kl": {"weight": 0.0}}, "adapter": {"rank": 0}, "text": {"max_tokens": TOKENS}, "seed": SEED,
        "train": {"prompts": args.prompts, "group": args.group, "micro_batch": args.prompts * args.group,
                  "lr": args.lr, "weight_decay": 0.0}})


def differences(args, method: str) -> tuple[float, float, float]:
    """(the largest difference of two log-probabilities, TRL's loss, ours)."""
    kept, trainer = theirs(args, method, 1, moved=True)[0].kept, ours(args, method)
    prompts = [row[mask.bool()] for row, mask in zip(kept["prompt_ids"], kept["prompt_mask"])]
    rows, short = torch.arange(len(prompts)), TOKENS - kept["completion_ids"].shape[1]
    ids, mask, old, logp = (torch.nn.functional.pad(kept[key], (0, short)) for key in
                            ("completion_ids", "completion_mask", "old_per_token_logps", "logp"))
    asked, mask = TokenizedPrompts([""] * len(prompts), prompts), mask.bool()
    part = Part(range(args.prompts), rows, None, (Completions(ids, rows, Scored(old.masked_fill(~mask, 0), mask)),), (),
                (kept["advantages"].flatten(),))
    [(_, _, new)] = trainer.rollouts.replay(part, asked)
    found: list[torch.Tensor] = []
    trainer.policy.backward = lambda loss: found.append(loss.detach())
    epoch = Epoch(sampling.empty_batch(trainer, 0), parts=[part], conditioning=asked, weights={0: 1.0})
    trainer.kl_reference.start_epoch(epoch, trainer.rollouts, 0, 1)
    trainer.backward(epoch, part, decisions([part], trainer.method.loss.reduction), UpdateStats())
    return (new.logp - logp)[mask].abs().max().item(), kept["loss"].item(), sum(found).item()


def seconds(args) -> tuple[float, float]:
    """Median seconds per optimizer step of TRL and of flowgrpo, in turns; the first steps of each turn do not count."""
    each: tuple[list[float], list[float]] = [], []
    for _ in range(args.turns):
        each[0].extend(theirs(args, "grpo", args.steps + 2, moved=False)[1][2:])
        trainer, own = ours(args, "grpo"), []
        for trainer.epoch in range(args.steps + 2):
            start = time.perf_counter()
            trainer.run_epoch()
            own.append(time.perf_counter() - start)
        each[1].extend(own[2:])
    return median(each[0]), median(each[1])


def main() -> None:
    warnings.simplefilter("ignore", FutureWarning)  # of TRL's use of transformers
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, default=15, help="timed optimizer steps per turn")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    print("| loss | largest difference of log-probabilities | TRL's loss | ours | difference |")
    print("|---|---:|---:|---:|---:|")
    for method in LOSSES:
        apart, their, own = differences(args, method)
        print(f"| {method} | {apart:.1e} | {their:.7f} | {own:.7f} | {abs(their - own):.1e} |", flush=True)
    their, own = seconds(args)
    print(f"\n{args.prompts} x {args.group} completions: TRL {their:.3f} s per optimizer step, flowgrpo {own:.3f} s, "
          f"ratio {their / own:.2f}")


if __name__ == "__main__":
    main()
