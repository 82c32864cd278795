"""Writes docs/pipelines.md: what `flowgrpo check` says of a tiny random instance of every pipeline class known here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent.parent / "docs" / "pipelines.md"
HEADINGS = ("pipeline", "drivable", "prediction", "guidance", "LoRA loader", "reason")
INTRODUCTION = """# Pipelines

You can align any class of this table without adapter code. Each row is what `flowgrpo check NAME` says of a tiny random
instance, with real diffusers code and no weights (`scripts/build_pipelines.py`). A class that is not listed may work
too: `flowgrpo check MODEL` tells, for a hub id or a directory.

- *guidance*: what a step runs. With two calls, or a batch of twice the rows, guidance costs twice a plain step.
- *LoRA loader*: what reads a saved LoRA into the stock pipeline. Where diffusers has no loader, `peft`'s own format is
  used: `inject_adapter_in_model` with the folder's `adapter_config.json`, then `set_peft_model_state_dict`.
- In all rows with yes, rollout and replay agree before any update: their log-ratio is below 1e-6 in fp32.

"""


HAND_WRITTEN = "## Loading a model"  # heading of the part below the table, which is kept


def rows() -> list[dict[str, Any]]:
    from flowgrpo.check import tiny
    from flowgrpo.check.report import report

    return [report(name) for name in sorted({*tiny.factories(), *tiny.UNFIT}, key=str.lower)]


def line(told: dict[str, Any]) -> str:
    cells = [told["model"], "yes" if told["drivable"] else "no", told["prediction"] or "", told["guidance"] or "",
             ", ".join(told["lora_loader"] or []), told["reason"] or ""]
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
