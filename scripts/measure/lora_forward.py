"""Gradients and first ratios of the starter's LoRA with peft's forward under autocast, and with ours, as a table.

    python scripts/measure/lora_forward.py

Both replay one rollout of mix_grpo, with the LoRA moved off its start. In fp32 the two forwards have to agree to
rounding. In bf16 each has an error beside fp32: the table gives the relative norm of the difference of gradients to
those in fp32, and the largest first |log ratio| when rollout and replay use that forward.
"""

from functools import partial

import torch
from common import FIXED, RECIPE, epoch_of, make_trainer

from flowgrpo.config import load
from flowgrpo.policies.weights.forwards import without_casts
from flowgrpo.train import Trainer
from flowgrpo.training import credit
from flowgrpo.training.metrics import UpdateStats

OPTIONS = {"train.prompts": "2", "train.group": "8", "train.micro_batch": "16", "device": "cpu", "parts": "{}",
           "method": "mix_grpo", "train.steps": "6"}


def trainer_of(precision: str, ours: bool) -> Trainer:
    """Return a trainer whose LoRA layers have our forward, or peft's, below fp32 under autocast."""
    torch.manual_seed(0)  # of the adapter's first weights
    trainer = make_trainer(load(RECIPE, FIXED | OPTIONS | {"precision": precision}))
    weights, driver = trainer.policy.weights, trainer.policy.driver
    layers = list(weights.layers().values())
    for layer in layers:
        vars(layer).pop("forward", None)
    if ours:
        without_casts(layers)
    driver.casts = precision != "fp32" and not ours
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return trainer


def gradient(trainer: Trainer) -> tuple[torch.Tensor, float]:
    """Return the flat gradient of one optimizer step, and the largest first |log ratio|."""
    batch = trainer.prompts[:2]
    conditioning = trainer.rollouts.conditioning(batch)
    parts = [part for part, _ in trainer.rollouts.sample(conditioning, 0, partial(trainer.scoring.total, batch))]
    trainer.first_ratio(parts, conditioning, print)
    advantage = torch.linspace(-1, 1, trainer.geometry.group).repeat(2)[:, None]
    scores = advantage.view(2, -1, 1).expand(-1, -1, len(trainer.scoring.weights))
    epoch = epoch_of(trainer, parts, conditioning, batch, scores)
    epoch.weights = trainer.rollouts.step_weights(parts, 0)
    trainer.kl_reference.start_epoch(epoch, trainer.rollouts, 0, 1)
    for part in credit.compare(trainer, epoch):
        trainer.backward(epoch, part, 1, UpdateStats())
    flat = torch.cat([parameter.grad.flatten() for parameter in trainer.policy.weights.parameters()])
    return flat, trainer.first_ratio.max_log_ratio


def main() -> None:
    print("| precision | forward | gradient beside fp32 with peft's | first \\|log ratio\\| |\n|---|---|---:|---:|")
    exact = None
    for precision, ours in (("fp32", False), ("fp32", True), ("bf16", False), ("bf16", True)):
        flat, ratio = gradient(trainer_of(precision, ours))
        exact = flat if exact is None else exact
        apart = ((flat - exact).norm() / exact.norm()).item()
        print(f"| {precision} | {'ours' if ours else 'peft'} | {apart:.1e} | {ratio:.1e} |", flush=True)


if __name__ == "__main__":
    main()
