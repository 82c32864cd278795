"""Options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from flowgrpo.errors import UserError

Precision = Literal["auto", "fp32", "bf16", "fp16"]
PRECISION = "Of weights and arithmetic, auto for what suits the device. Without: the run's, or auto."
EPOCH = "Of a run: the checkpoint of this epoch, in place of its result."
RUN = "The folder of a finished run, or one of its checkpoints, RUN/checkpoints/epoch-N."
RLG = "Draw with base + W * (tuned - base): 0 the base, 1 the tuned model, above 1 beyond it (RLG). Other weights " \
      "run the denoiser twice as often."


def one_weight(text: str | None) -> float | None:
    """Return the single weight of --rlg."""
    weights = weights_of(text)
    if len(weights) > 1:
        raise UserError(f"--rlg: got {text!r}, expected one number from 0 up")
    return weights[0] if weights else None


def weights_of(text: str | None) -> list[float]:
    """Parse the weights of --rlg.
    Raises UserError for anything but finite numbers from 0 up."""
    try:
        weights = [] if text is None else [float(value) for value in text.split(",")]
    except ValueError:
        weights = [-1.0]
    if not all(0 <= weight < float("inf") for weight in weights):
        raise UserError(f"--rlg: got {text!r}, expected numbers from 0 up")
    return weights


def asked_rewards(text: str) -> list[str] | dict[str, Any]:
    """Parse --rewards: names as `A,B`, or a YAML file of rules by name, as under `eval.rewards`."""
    if not text.endswith((".yaml", ".yml")):
        return [name.strip() for name in text.split(",") if name.strip()]
    from flowgrpo.config import parse

    rules = parse.read_yaml(Path(text))
    if not rules:
        raise UserError(f"{text}: expected rewards with their rules, such as geneval: {{args: {{score: graded}}}}")
    return parse.validate({"eval": {"rewards": rules}}, where=text).eval.rewards


def made_with(reward: str, args: str) -> dict[str, Any]:
    """Parse the arguments of a reward from YAML."""
    from flowgrpo.config import parse

    return parse.validate({"reward": {reward: {"args": parse.parse_value("args", args)}}}).trained[reward].args
