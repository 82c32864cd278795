"""Writes docs/pipelines.md: what `flowgrpo check` says of a tiny random instance of every pipeline class known here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent.parent / "docs" / "pipelines.md"
HEADINGS = ("pipeline", "drivable", "prediction", "guidance", "prompts per call", "denoisers", "LoRA loader",
            "replay error", "first log ratio", "gradient error", "reason")
INTRODUCTION = """# Pipelines

Written by `scripts/build_pipelines.py`: what `flowgrpo check NAME` says of a tiny random instance of each class, with
real diffusers code and no weights from anywhere. `tests/policies/pipelines/test_conformance.py` drives the same
instances. A class that is not listed may work all the same: `flowgrpo check MODEL` tells, of a hub id or a directory.

- *guidance*: what a step runs. With two calls, or a batch of twice the rows, guidance costs twice a plain step.
- *prompts per call*: pipelines for one prompt, or whose reference pictures all belong to one prompt, are called row by
  row.
- *LoRA loader*: what reads a saved LoRA into the stock pipeline. Where diffusers has no loader, `peft`'s own format is
  used: `inject_adapter_in_model` with the folder's `adapter_config.json`, then `set_peft_model_state_dict`.
- *replay error*, *first log ratio*: largest difference between a rollout and its replay before any update, in fp32, of
  a transition's mean and of its log-probability. *gradient error*: how far a small step along the gradient is from what
  it predicts.

"""


HAND_WRITTEN = "## Loading a model"  # heading of the part below the table, which is kept


def rows() -> list[dict[str, Any]]:
    from flowgrpo.check import tiny
    from flowgrpo.check.report import report

    return [report(name) for name in sorted({*tiny.factories(), *tiny.UNFIT}, key=str.lower)]


def line(told: dict[str, Any]) -> str:
    errors = ["" if told[key] is None else f"{told[key]:.0e}" for key in ("replay_error", "first_log_ratio",
                                                                          "gradient_error")]
    cells = [told["model"], "yes" if told["drivable"] else "no", told["prediction"] or "", told["guidance"] or "",
             told["prompts_per_call"] or "", ", ".join(told["denoisers"] or []),
             ", ".join(told["lora_loader"] or []), *errors, told["reason"] or ""]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def table(found: list[dict[str, Any]]) -> str:
    head = [f"| {' | '.join(HEADINGS)} |", "|" + " --- |" * len(HEADINGS)]
    return "\n".join([*head, *map(line, found)]) + "\n"


def main() -> None:
    found = rows()
    _, heading, below = TARGET.read_text(encoding="utf-8").partition(HAND_WRITTEN)
    TARGET.write_text(f"{INTRODUCTION}{table(found)}\n{heading}{below}", encoding="utf-8")
    drivable = sum(told["drivable"] for told in found)
    print(json.dumps({"classes": len(found), "drivable": drivable,
                      "not": {told["model"]: told["reason"] for told in found if not told["drivable"]}}, indent=2))


if __name__ == "__main__":
    main()
