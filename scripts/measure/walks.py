"""Time to the first success of five users, in new folders outside of a clone, and what they stumble over.

    python scripts/measure/walks.py --flowgrpo ENV/bin/flowgrpo          # an installed flowgrpo; all five
    python scripts/measure/walks.py --flowgrpo ENV/bin/flowgrpo --walks artist engineer
    python scripts/measure/walks.py --table                              # only the table of docs/get_started/laptop.md

A walk is what a page tells its user to type. Each command has to end with exit code 0 and to leave what the page
promises. A stumble is another exit code, a missing result, a traceback or a warning, or 30 seconds without a line. The
notebook's walk needs nbclient and ipykernel beside flowgrpo. Seconds are of this machine and its load; CPU seconds are
of the commands alone. Results go to docs/data/walks.json, and the table into the page.
"""

import argparse
import json
import os
import platform
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, Queue

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts" / "docs"))
from revisions import commit  # noqa: E402 -- a script of the folder beside

KEPT, PAGE = ROOT / "docs" / "data" / "walks.json", ROOT / "docs" / "get_started" / "laptop.md"
BEGIN, END = "<!-- walks -->\n", "<!-- end of walks -->\n"
SILENT = 30.0  # seconds without a line
KERNEL = "[IPKernelApp] WARNING | Kernel is running over TCP"  # nbclient's way to start one, which no reader sees
STUMBLES = re.compile(r"Traceback|Warning|deprecated", re.I)
SMALL = "--train.epochs=3 --eval.prompts=12 --eval.steps=10"
REWARD = '''def red(images, prompts, metadata):
    """How red each image is. images: float [B, 3, H, W] in [0, 1]; returns B numbers."""
    r, g, b = images.mean((2, 3)).unbind(1)
    return (r - (g + b) / 2).tolist()
'''
# A cell each: the notebook of the documentation with few epochs.
NOTEBOOK = r'''import json, re, sys, nbformat
from nbclient import NotebookClient
read = nbformat.read(sys.argv[1], 4)
for cell in read.cells:
    cell.source = re.sub(r"^(EPOCHS|HELD_OUT) = \d+", lambda line: line[1] + " = 4", cell.source, flags=re.M)
done = NotebookClient(read, timeout=900, on_cell_executed=lambda cell, cell_index, execute_reply: print(
    "cell", cell_index, flush=True)).execute()
print("\n".join(output["text"] for cell in done.cells for output in cell.get("outputs", ())
                if output.output_type == "stream" and output.name == "stderr"))
'''


@dataclass(frozen=True)
class Step:
    """Command of a walk. leaves: a pattern of files that it writes. says: a regular expression of its output."""

    command: str
    leaves: str = ""
    says: str = ""


WALKS: dict[str, tuple[str, tuple[Step, ...]]] = {
    "artist": ("a LoRA for ComfyUI", (
        Step("flowgrpo list rewards style", says="likeness"),
        Step("flowgrpo check sd15_short --gpu 4090", says="^fits"),
        Step(f"flowgrpo train starter {SMALL}", leaves="runs/starter/report.html"),
        Step("flowgrpo export runs/starter", leaves="runs/starter/comfyui/*.safetensors"))),
    "researcher": ("a table of two methods", (
        Step("flowgrpo new method soft", leaves="soft.py"),
        Step("flowgrpo compare methods --methods mix_grpo+soft.py:soft,mix_grpo --reference mix_grpo --seeds 1 "
             "--evaluations 2500 --prompts 24 --points 1 --output bench", leaves="bench/results.md"))),
    "notebook": ("images before and after", (
        Step(f"python notebook.py {shlex.quote(str(ROOT / 'examples' / 'align.ipynb'))}",
             leaves="runs/notebook/before_after.png"),)),
    "engineer": ("a run on a reward of their own", (
        Step("flowgrpo list rewards http", says="http"),
        Step(f"flowgrpo train starter --reward=red.py:red --name=red {SMALL}", leaves="runs/red/summary.json"),
        Step("flowgrpo report runs/red", leaves="runs/red/report.html"))),
    "wheel": ("the demo", (
        Step("flowgrpo constraints", says="^torch=="),
        Step("flowgrpo docs get_started/laptop", says="# On a laptop"),
        Step(f"flowgrpo demo {SMALL}", leaves="runs/starter/before_after.png")))}


@dataclass
class Walk:
    """Result: wall and CPU seconds of each command, and the stumbles."""

    commands: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    stumbles: list[str] = field(default_factory=list)


def take(step: Step, folder: Path, flowgrpo: Path, walk: Walk) -> None:
    """Run a command in `folder` and note its seconds and stumbles."""
    words = shlex.split(step.command)
    first = {"flowgrpo": flowgrpo, "python": flowgrpo.parent / "python"}[words[0]]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    began, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    running = subprocess.Popen([first, *words[1:]], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT)
    assert running.stdout is not None
    lines: Queue[str | None] = Queue()
    stream = running.stdout
    threading.Thread(target=lambda: [*map(lines.put, stream), lines.put(None)], daemon=True).start()
    said, last = [], began
    while True:
        try:
            line = lines.get(timeout=1.0)
        except Empty:
            continue
        waited, last = time.monotonic() - last, time.monotonic()
        if waited > SILENT and words[0] == "flowgrpo":  # a notebook's bar is live, and no line of its client
            walk.stumbles.append(f"{step.command}: {waited:.0f} s without a line after {''.join(said[-1:]).strip()!r}")
        if line is None:
            break
        said.append(line)
    code, after = running.wait(), resource.getrusage(resource.RUSAGE_CHILDREN)
    walk.commands.append(step.command.replace(str(ROOT) + "/", ""))
    walk.seconds.append(round(time.monotonic() - began, 1))
    walk.cpu.append(round(after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime, 1))
    wrong = [f"exit code {code}: {''.join(said[-3:]).strip()}"] * (code != 0)
    wrong += [f"no {step.leaves}"] * (step.leaves != "" and not any(folder.glob(step.leaves)))
    wrong += [f"does not say {step.says}"] * (re.search(step.says, "".join(said), re.M) is None)
    wrong += [f"says {line.strip()}" for line in said if STUMBLES.search(line) and not line.startswith(KERNEL)]
    walk.stumbles += [f"{step.command}: {each}" for each in wrong]


def walked(name: str, flowgrpo: Path) -> Walk:
    """One user's walk, in a new folder."""
    walk = Walk()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "red.py").write_text(REWARD, encoding="utf-8")
        (folder / "notebook.py").write_text(NOTEBOOK, encoding="utf-8")
        for step in WALKS[name][1]:
            take(step, folder, flowgrpo, walk)
            print(f"{name}: {walk.seconds[-1]:.0f} s, {walk.cpu[-1]:.0f} s of CPU: {step.command}", flush=True)
    for stumble in walk.stumbles:
        print(f"{name} stumbles: {stumble}", flush=True)
    return walk


def surroundings() -> dict[str, str]:
    """What the seconds of a walk depend on."""
    load = f"load average {os.getloadavg()[2]:.0f}"
    return {"commit": commit(), "machine": f"{os.cpu_count()} CPU cores ({platform.machine()}), {load}"}


def table(kept: dict[str, dict]) -> str:
    """Section of the page: a row per user."""
    rows = [f"| {name} | {about} | {len(walk['commands'])} | {sum(walk['seconds']):.0f} | {sum(walk['cpu']):.0f} | "
            f"{len(walk['stumbles'])} |" for name, (about, _) in WALKS.items() if (walk := kept.get(name))]
    where, commits = (sorted({walk[name] for walk in kept.values()}) for name in ("machine", "commit"))
    return "\n".join((BEGIN + "| user | first success | commands | seconds | of CPU | stumbles |",
                      "|---|---|---|---|---|---|", *rows, "",
                      f"After the installation, by `scripts/measure/walks.py`: {'; '.join(where)}; commits "
                      f"{', '.join(commits)}.", END))


def main() -> None:
    """Walk, keep the results and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flowgrpo", type=Path, help="the command of an installation")
    parser.add_argument("--walks", nargs="+", choices=WALKS, default=list(WALKS))
    parser.add_argument("--table", action="store_true", help="only write the table anew")
    given = parser.parse_args()
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
    if not given.table:
        if given.flowgrpo is None:
            parser.error("--flowgrpo: expected the command of an installation, such as ENV/bin/flowgrpo")
        for name in given.walks:
            kept[name] = asdict(walked(name, given.flowgrpo.absolute())) | surroundings()
            KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    assert BEGIN in page and END in page, f"{PAGE} lost its marks {BEGIN.strip()} and {END.strip()}"
    page = page.partition(BEGIN)[0] + table(kept) + page.partition(END)[2]
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
