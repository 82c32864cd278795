"""Writes docs/pipelines.md: what `flowgrpo check` says of a tiny random instance of every pipeline class known here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[2] / "docs" / "pipelines.md"
INTRODUCTION = """# Pipelines

You can align any class of the first table without adapter code. It states what `flowgrpo check NAME` says of a tiny
random instance, with real diffusers code and no weights: rollout and replay agree before any update, with a log-ratio
below 1e-6 in fp32. `flowgrpo check MODEL` tests a class that is not listed.

With two calls, or a batch of twice the rows, guidance costs twice a plain step. `load_lora_weights` reads a saved LoRA
into the stock pipeline. A dagger marks classes without it, which need peft: `inject_adapter_in_model` with the folder's
`adapter_config.json`, then `set_peft_model_state_dict`. The second expert of Wan takes
`load_lora_weights(load_into_transformer_2=True)` too.

"""


HAND_WRITTEN = "## Loading a model"  # heading of the part below the table, which is kept


def rows() -> list[dict[str, Any]]:
    from flowgrpo.tools.check import tiny
    from flowgrpo.tools.check.report import report

    return [report(name) for name in sorted({*tiny.factories(), *tiny.UNFIT}, key=str.lower)]


def table(found: list[dict[str, Any]]) -> str:
    """Return the supported pipelines by prediction and guidance, then the others with what stops them."""
    groups: dict[tuple[str, str], list[str]] = {}
    for told in found:
        if told["supported"]:
            groups.setdefault((told["prediction"], told["guidance"]), []).append(named(told))
    lines = ["| prediction | guidance | pipelines |", "| --- | --- | --- |"]
    lines += [f"| {prediction} | {guidance} | {', '.join(names)} |"
              for (prediction, guidance), names in sorted(groups.items())]
    lines += ["", "Not supported:", "", "| pipeline | reason |", "| --- | --- |"]
    reasons: dict[str, list[str]] = {}
    for told in found:
        if not told["supported"]:
            reasons.setdefault(in_short(told["model"], told["reason"]), []).append(told["model"])
    lines += [f"| {', '.join(names)} | {reason} |" for reason, names in reasons.items()]
    return "\n".join(lines) + "\n"


def in_short(name: str, reason: str) -> str:
    """Return a reason that classes can share: without the class's name and how far it is off."""
    plain = re.sub(rf"^{name.partition(' ')[0]} (?=\w)", "", reason)
    return re.sub(r", but \d+% off(?=:)", "", plain)


def named(told: dict[str, Any]) -> str:
    """Return a pipeline's name, with a dagger where diffusers has no loader of its LoRAs."""
    return told["model"] + "\u2020" * (not any("load_lora_weights" in loader for loader in told["lora_loader"] or []))


def main() -> None:
    found = rows()
    _, heading, below = TARGET.read_text(encoding="utf-8").partition(HAND_WRITTEN)
    TARGET.write_text(f"{INTRODUCTION}{table(found)}\n{heading}{below}", encoding="utf-8")
    supported = sum(told["supported"] for told in found)
    print(json.dumps({"classes": len(found), "supported": supported,
                      "not": {told["model"]: told["reason"] for told in found if not told["supported"]}}, indent=2))


if __name__ == "__main__":
    main()
