"""Measure this program on one GPU, in one command of at most nine minutes, and write a page about it.

    python scripts/gpu_report.py --output report         # on a machine with a GPU; nothing is downloaded
    python scripts/gpu_report.py --output report --tiny  # everything small, on the CPU: a test of the script

SD3.5-medium and FLUX.1-dev, with random weights of the published shapes: denoiser and pipeline without this program,
rollout, update and memory with it, variants of the arithmetic, and compiled. The starter is trained from start to
verdict. Sections have budgets of seconds. One that the clock leaves no room for is skipped, and the page says so.
`report.json` is written after every line, and `report.md` is made of it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Line = dict[str, Any]
# Without these nothing runs. The other packages that pyproject.toml names may be missing.
CORE = ("torch", "torchvision", "diffusers", "transformers", "accelerate", "peft", "safetensors", "numpy", "pillow",
        "pydantic", "pyyaml", "typer", "tqdm", "packaging", "filelock", "rich")
MORE = {"torchao": "previews in low precision"}


@dataclass(frozen=True)
class Section:
    """Part of the report. work: yields its lines. seconds: its budget."""

    name: str
    seconds: float
    work: Callable[[], Iterator[Line]]


class Report:
    """Lines of the sections, written as JSON and as a page after each; seconds: of all sections together."""

    def __init__(self, folder: Path, seconds: float, about: Line):
        self.folder, self.end = folder, time.monotonic() + seconds
        self.results: dict[str, Any] = {"about": about, "sections": []}
        folder.mkdir(parents=True, exist_ok=True)

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.end - time.monotonic()

    def run(self, section: Section) -> None:
        """Run a section within its budget. An error ends the section, not the report."""
        entry: dict[str, Any] = {"name": section.name, "lines": [], "note": None}
        self.results["sections"].append(entry)
        start = time.monotonic()
        if self.left() < section.seconds:
            entry["note"] = f"skipped: {self.left():.0f} s are left, and it may take {section.seconds:.0f} s"
        else:
            try:
                for line in section.work():
                    entry["lines"].append(line)
                    self.write()
                    if time.monotonic() - start > section.seconds:
                        entry["note"] = f"ended after its {section.seconds:.0f} s; further lines are left out"
                        break
            except Exception as error:  # of any library, out of memory too; the other sections go on
                entry["note"] = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        entry["seconds"] = round(time.monotonic() - start, 1)
        print(f"{section.name}: {len(entry['lines'])} lines, {entry['seconds']} s"
              + (f"; {entry['note']}" if entry["note"] else ""), flush=True)
        self.write()

    def write(self) -> None:
        (self.folder / "report.json").write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        (self.folder / "report.md").write_text(page(self.results), encoding="utf-8")


def page(results: dict[str, Any]) -> str:
    """Return the report as Markdown: a table for each section."""
    text = ["# What a GPU does", "", *(f"- {key}: {value}" for key, value in results["about"].items())]
    for section in results["sections"]:
        text += ["", f"## {section['name']}", ""] + ([section["note"], ""] if section["note"] else [])
        columns = list(dict.fromkeys(key for line in section["lines"] for key in line))
        if columns:
            text += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
            text += ["| " + " | ".join(cell(line.get(key)) for key in columns) + " |" for line in section["lines"]]
    return "\n".join(text) + "\n"


def cell(value: Any) -> str:
    """Return a value as a cell of a table."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")


def packages() -> dict[str, str | None]:
    """Return the version of every package that this program names, None where it is missing."""
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    block = project.split("dependencies = [", 1)[1].split("]", 1)[0]
    versions: dict[str, str | None] = {}
    for name in [*re.findall(r'"([\w-]+)', block), *MORE]:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions


def wheels() -> Iterator[str]:
    """Yield one line per package: its version, or that its wheel has to lie beside the script."""
    for name, present in packages().items():
        lost = "nothing runs" if name in CORE else f"{MORE[name]} are left out" if name in MORE else "not needed here"
        yield f"{name} {present}" if present else f"{name}: missing, bring its wheel (without it: {lost})"
    beside = importlib.util.find_spec("flow_grpo") is not None
    yield "flow_grpo: present" if beside else "flow_grpo: not importable; its steps are not compared"


def about(device: str) -> Line:
    """Return what the report is of: the device and the versions."""
    import torch

    gpu = torch.cuda.get_device_name() if device == "cuda" else f"none; {platform.processor() or platform.machine()}"
    return {"device": gpu, "cuda": torch.version.cuda, "python": platform.python_version(),
            "versions": ", ".join(f"{name} {present}" for name, present in packages().items() if present)}


def sections(device: str, tiny: bool, left: Callable[[], float]) -> Iterator[Section]:
    """Yield the sections in their order. A model is built when its first one runs, and freed after its last.

    left: the seconds that are left for all.
    """
    import gpu_sections as of

    yield Section("steps beside flow_grpo's", 10, lambda: of.beside_flow_grpo(device))
    for model in ("sd35_medium", "flux_dev"):
        bench = of.Bench(model, device, tiny)
        large = model == "flux_dev"
        for name, seconds, work in (
                ("denoiser and stock pipeline", 40, bench.stock), ("rollout, decoding and update", 60, bench.epoch),
                ("variants of the arithmetic", 40, bench.variants), ("host and GPU", 20, bench.host),
                ("synchronisations", 20, bench.synchronisations), ("micro-batches", 70 if large else 60, bench.sweep),
                ("previews in low precision", 30, bench.previews), ("compiled", 60 if large else 90, bench.compiled)):
            yield Section(f"{model}: {name}", seconds, work)
        bench.free()
    yield Section("starter, from start to verdict", 30, lambda: of.starter(device, tiny, left()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of report.json and report.md")
    parser.add_argument("--minutes", type=float, default=8.5, help="of all sections together")
    parser.add_argument("--only", default="", metavar="TEXT", help="sections whose name has this text in it")
    parser.add_argument("--tiny", action="store_true", help="small widths, on the CPU")
    args = parser.parse_args()
    for line in wheels():
        print(line)
    if lacking := [name for name, present in packages().items() if present is None and name in CORE]:
        print(f"nothing is measured without {', '.join(lacking)}")
        return 2
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as `flowgrpo train` does
    import torch

    from flowgrpo.device import rounded_products

    if not (args.tiny or torch.cuda.is_available()):
        print("torch sees no GPU: use --tiny for a test of this script on the CPU")
        return 2
    device = "cpu" if args.tiny else "cuda"
    report = Report(args.output, 60 * args.minutes, about(device))
    with rounded_products("bf16", device):
        for section in sections(device, args.tiny, report.left):
            if args.only in section.name:
                report.run(section)
    print(f"written: {report.folder / 'report.md'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
