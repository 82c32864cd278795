"""Report of a run: `report.html`, one self-contained file made from the run's folder. `flowgrpo report --live` serves
that of a running run to browsers of this machine.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections import defaultdict
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowgrpo import loopback
from flowgrpo.config import features
from flowgrpo.config.parse import load
from flowgrpo.config.schema import Config
from flowgrpo.escaped import fill
from flowgrpo.evaluation import kept, looks
from flowgrpo.evaluation.report import snapshots
from flowgrpo.evaluation.report.snapshots import CHOOSING
from flowgrpo.evaluation.report.verdict import changes, outcome, sentences
from flowgrpo.evaluation.runs import mean, require_format
from flowgrpo.evaluation.statistics import cells, decimals
from flowgrpo.storage import atomic
from flowgrpo.storage.json_files import read_lines, read_object
from flowgrpo.storage.places import run_of

if TYPE_CHECKING:
    from flowgrpo.evaluation.trainer import Trainer

FILE = "report.html"
EVERY = 10  # epochs between reports of a run without eval.every
STAGES = 40  # maximum number of slider positions
TEMPLATE = Path(__file__).with_name("report.html")


def during(trainer: Trainer, run: Path) -> bool:
    """Write the report of a running run, every eval.every epochs, or EVERY. Returns True if it was written."""
    due = trainer.processes.first and trainer.epoch % (trainer.config.eval.every or EVERY) == 0
    if due:
        snapshots.last(run, trainer)
        write(run)
    return due


def write(run: Path) -> Path:
    """Write `report.html` into a run's folder; returns its path. Raises UserError for a folder that is not a run."""
    with require_format(run):  # NaN has no form in the page
        text = page(data(run))
    atomic.write_text(run / FILE, text)
    return run / FILE


def page(content: dict[str, Any], live: bool = False) -> str:
    """HTML of a report's data, whose policy knows its one script by its hash. live: it asks its server for newer."""
    template = TEMPLATE.read_text(encoding="utf-8")
    script = hashlib.sha256(template.partition("<script>")[2].partition("</script>")[0].encode()).digest()
    return fill(TEMPLATE, TITLE=html.escape(content["title"]), DATA=embed(content), LIVE=" data-live" if live else "",
                CONNECT="; connect-src 'self'" if live else "", SCRIPT=base64.b64encode(script).decode())


def embed(content: dict[str, Any]) -> str:
    """JSON that is safe in a <script>: it neither ends the element nor reads as an address."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text.replace("://", ":\\/\\/")


def data(run: Path) -> dict[str, Any]:
    """All data of a report. Raises UserError for a folder that is not a run, and for a damaged file."""
    with require_format(run := run_of(run)):
        config, lines, stages = load(run / "config.yaml"), read_lines(run / "metrics.jsonl", *PLAIN), read_stages(run)
        last = _read(run / snapshots.FOLDER / "last.json", first_ratio=dict, best=list, worst=list)
        finished = bool(stages) and stages[-1]["name"] == "after"
        path, pair = parted(stages)
        reward_changes, summary = changes(config, pair), _read(run / "summary.json") if finished else {}
        ranges = _read(run / snapshots.FOLDER / "ranges.json")
        drawn = charts(config, lines, path, ranges)
        zeros = [chart["title"] for chart in drawn if chart["kind"] != "reward" and not any(
            any(series["y"]) if "y" in series else any(line.get(series["key"]) for line in lines)
            for series in chart["series"])]  # diagnostics that are 0 in every epoch are named alone
        nouns = {"sample": "image"} | _read(run / snapshots.FOLDER / "nouns.json")
        return {"title": config.name, "finished": finished,
                "sentences": sentences(config, lines, reward_changes, last, finished, summary,
                                       pair[0] if pair else None, shares(pair)[-1][1] if len(stages) > 1 else {},
                                       ranges, len(path) < len(stages), **nouns),
                "sample": nouns["sample"],
                "changes": [each.as_json() for each in reward_changes if each.count and lines],
                "tasks": {name: cells(rows) for name, rows in summary.get("compared", {}).items() if len(rows) > 1},
                "siblings": siblings(run), "digits": digits(stages, last),
                "metrics": columns(lines), "charts": [chart for chart in drawn if chart["title"] not in zeros],
                "zeros": zeros, "stages": thin(stages),
                "extremes": {key: last.get(key, []) for key in ("best", "worst")} | {"epoch": last.get("epoch")},
                "phases": phases(lines), "machine": _read(run / snapshots.FOLDER / "machine.json"),
                "config": config.yaml()}


def training_facts(config: Config, run: Path, errors: dict[str, str]) -> dict[str, Any]:
    """Entry `trained` of a run's summary: the number of epochs that trained, True if none did, and both in words.
    errors: as of `outcome`."""
    ended = outcome(config, read_lines(run / "metrics.jsonl", *PLAIN), errors,
                    _read(run / snapshots.FOLDER / "ranges.json"))
    return {"epochs": ended.epochs - len(ended.idle), "nothing": ended.nothing, "said": ended.sentences}


def source_mark(run: Path) -> str:
    """Mark of the report's source files: of names, sizes, inodes and times, where going back is a change as well."""
    marks: list[tuple[str, tuple[int, int, int] | None]] = []
    for file in (run / "config.yaml", run / "metrics.jsonl", *sorted((run / snapshots.FOLDER).glob("*.json")),
                 *sorted((run / kept.FOLDER).glob("*.json"))):
        try:
            facts = file.stat()
            marks.append((file.name, (facts.st_size, facts.st_ino, facts.st_mtime_ns)))
        except OSError:  # it is gone
            marks.append((file.name, None))
    return hashlib.sha256(repr(marks).encode()).hexdigest()[:32]


def siblings(run: Path) -> list[dict[str, Any]]:
    """Results on siblings of the run's model: a sentence, a table, and its page of images, empty without one."""
    shown = []
    for file, found in kept.read(run).items():
        page = file.with_suffix(".png")
        content = base64.b64encode(page.read_bytes()).decode("ascii") if page.is_file() else ""
        shown.append({"said": kept.sentence(found), "table": kept.table(found),
                      "page": content and f"data:image/png;base64,{content}"})
    return shown


def columns(lines: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Each metric's values, epoch by epoch; None where an epoch has none."""
    keys = dict.fromkeys(key for line in lines for key in line)
    return {key: [line.get(key) for line in lines] for key in keys}


def read_stages(run: Path) -> list[dict[str, Any]]:
    """Stages of the held-out prompts, in order: before, epochs, after. Of a run whose evaluations choose the weights:
    those on the prompts that choose, and at its end before and after on the others."""
    files = [file for file in (run / snapshots.FOLDER).glob("*.json") if file.stem not in snapshots.FACTS]
    stages = [_read(file, name=str, epoch=int, scores=dict, cards=list) for file in files]
    if any(stage["name"] == CHOOSING for stage in stages) and not any(stage["name"] == "after" for stage in stages):
        stages = [stage for stage in stages if stage["name"] != "before"]
    order = ("before", "after") if any(stage["name"] == CHOOSING for stage in stages) else ("after",)
    return sorted(stages, key=lambda stage: (stage["name"] in order, stage["epoch"]))


def parted(stages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Stages on the prompts of evaluations on the way, with the base, and base and last stage of what is reported."""
    apart = len(stages) > 2 and [stages[at]["name"] for at in (0, -2, -1)] == [CHOOSING, "before", "after"]
    return (stages[:-2], stages[-2:]) if apart else (stages, stages[:1] + stages[1:][-1:])


def shares(stages: list[dict[str, Any]]) -> list[tuple[int, dict[str, looks.Share]]]:
    """Each stage's epoch and its looks as shares of the first one's, the base's."""
    seen = [looks.read(stage.get("looks")) for stage in stages]
    return [(stage["epoch"], look.relative_to(seen[0])) for stage, look in zip(stages, seen)]


def digits(stages: list[dict[str, Any]], last: dict[str, Any]) -> dict[str, int]:
    """Decimals of each reward below the samples."""
    cards = [card for stage in stages for card in stage["cards"]] + last.get("best", []) + last.get("worst", [])
    names = dict.fromkeys(name for card in cards for name in card["scores"])
    return {name: decimals(card["scores"].get(name) for card in cards) for name in names}


def thin(stages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The slider's stages: at most STAGES on the way, evenly spaced, with the first and the last, and those on prompts
    that chose nothing. base: place of the base on the same prompts."""
    (path, _), names = parted(stages), {"before": "before training", CHOOSING: "before training",
                                        "after": "after training"}
    count = min(STAGES, len(path))
    shown = [(path[i * (len(path) - 1) // max(count - 1, 1)], 0) for i in range(count)]
    shown += [(stage, count) for stage in stages[len(path):]]
    return [{"label": names.get(stage["name"], f"epoch {stage['epoch']}")
             + ", other prompts" * (stage["name"] == "before" and base > 0), "cards": stage["cards"], "base": base}
            for stage, base in shown]


def _read(path: Path, **kinds: type) -> dict[str, Any]:
    return read_object(path, snapshots.MEND, **kinds) if path.is_file() else {}


# --- charts ----------------------------------------------------------------------------------------------------------

# Charts of several metrics: title, note, and the pattern of keys with a group for each curve's label.
GATHERED = (
    ("Mean ratio per step", "1 in every first update", r"ratio/(step_\d+)"),
    ("Clip fraction per step", "share of the decisions that the clip cut", r"clip_fraction/(step_\d+)"),
    ("Zero-variance groups", "share of the groups that teach nothing", r"reward/(.+)/zero_variance_groups"),
    ("Multipliers of the limits", "0 while a limit is kept", r"limit/(.+)/multiplier"),
    ("Violations of the limits", "mean reward beyond its limit; below 0 where it is kept", r"limit/(.+)/violation"),
    ("Failed samples per reward", "left out of their groups", r"reward/(.+)/failed"),
    ("Seconds per phase", "of an epoch", r"seconds/(.+)"),
    ("Peak memory", "of this process in {unit}", r"memory/(.+)"),
)
ALONE = {"clip_fraction": ("Clip fraction", "share of the decisions that the clip cut"),
         "log_ratio_max": ("Largest |log ratio|", "of an epoch"), "grad_norm": ("Gradient norm", "before clipping"),
         "loss": ("Loss", ""), "kl": ("KL to the reference", ""),
         "diversity": ("Diversity", "of the samples of a group"),
         "weights/change": ("Change of the weights", "of the layer that changed most, over a usual layer's size"),
         "trained_updates": ("Updates", "of an epoch, with a gradient"),
         "skipped_updates": ("Skipped updates", "so far: the gradient was not finite"),
         **{key: chart for feature in features.all() for key, chart in feature.charts.items()},
         "samples_per_second": ("Samples per second", "of all processes"),
         "evaluations_per_second": ("Evaluations per second", "rows through the network, of all processes"),
         "mfu": ("Share of the peak FLOP/s", "of the GPU"),
         "threads": ("Threads", "of the processor")}
BYTES = ("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)
PLAIN = ("epoch", "evaluations", "seconds")  # axes, not diagnostics; every line has them


def charts(config: Config, lines: list[dict[str, Any]], stages: list[dict[str, Any]],
           ranges: dict[str, list[float | None]]) -> list[dict[str, Any]]:
    """Chart for every reward and every diagnostic: {title, note, kind, series}, of a reward also its `range`. A series
    is {label} with the `key` of a metric, its deviation's key as `band` and the `size` of the unit, or with x and y."""
    reward_charts = [_reward(config, name, lines, stages, ranges.get(name))
                     for name in (config.trained | config.extra_rewards)]
    rest = [key for key in columns(lines) if key not in PLAIN
            and not re.fullmatch(rf"reward/.+/(mean|std)|held_out/.+|{looks.LOOKS}.+", key)]
    gathered = []
    for title, note, pattern in GATHERED:
        found = [(match[1], key) for key in rest if (match := re.fullmatch(pattern, key))]
        values = [line.get(key) or 0 for _, key in found for line in lines]
        if title.startswith("Failed") and not any(values):
            continue
        series: list[dict[str, Any]] = [{"label": label, "key": key} for label, key in sorted(
            found, key=lambda pair: _natural(pair[0]))]
        if "{unit}" in note:  # the largest unit that the largest value reaches
            unit, size = next((each for each in BYTES if max(values, default=0) >= each[1]), BYTES[-1])
            note, series = note.format(unit=unit), [one | {"size": size} for one in series]
        gathered.append({"title": title, "note": note, "kind": "steps" if "step" in pattern else "lines",
                         "series": series})
    alone = [key for key in rest if not any(re.fullmatch(pattern, key) for _, _, pattern in GATHERED)
             and any(isinstance(line.get(key), (int, float)) for line in lines)]
    single = [{"title": title, "note": note, "kind": "lines", "series": [{"label": key, "key": key}]}
              for key in sorted(alone, key=lambda key: (list(ALONE) + [key]).index(key))
              for title, note in [ALONE.get(key, (key, ""))]]
    points = shares(stages)
    drawn = {label: [(epoch, found[name]) for epoch, found in points if name in found]
             for name, label in ((looks.EDGES, "edge width"), (looks.APART, "diversity within a prompt"))}
    looked = {"title": "Looks, of the base", "kind": "lines",
              "note": "1 as the base; wider edges: blurred; less diversity: images of a prompt become alike",
              "series": [{"label": label, "x": [x for x, _ in curve], "y": [y for _, y in curve]}
                         for label, curve in drawn.items() if len(curve) > 1]}
    return [chart for chart in [*reward_charts, looked, *single, *gathered] if chart["series"]]


def _natural(label: str) -> tuple[str, int]:
    name, _, number = label.rpartition("_")
    return (name, int(number)) if number.isdigit() else ("", 0)


def _reward(config: Config, name: str, lines: list[dict[str, Any]], stages: list[dict[str, Any]],
            known: list[float | None] | None) -> dict[str, Any]:
    """A reward's chart: mean over the samples of each epoch, and on the held-out prompts.

    known: its range; else [0, 1] if all held-out scores lie there, or None.
    """
    scores = [score for stage in stages for score in stage["scores"].get(name, []) if score is not None]
    within = [0, 1] if scores and all(0 <= score <= 1 for score in scores) else None
    series: list[dict[str, Any]] = [
        {"label": "training samples", "key": f"reward/{name}/mean", "band": f"reward/{name}/std"}] \
        if any(f"reward/{name}/mean" in line for line in lines) else []
    # the last stage comes first: it does not replace the value of an epoch that was measured during training
    held = {stage["epoch"]: mean(stage["scores"].get(name, [])) for stage in reversed(stages)}
    held |= {line["epoch"]: line[key] for line in lines if line.get(key := f"held_out/{name}") is not None}
    points = sorted((epoch, value) for epoch, value in held.items() if value is not None)
    if points:
        series.append({"label": "held-out prompts", "x": [x for x, _ in points], "y": [y for _, y in points]})
    trained = name in config.trained and config.trained[name].direction
    return {"title": name, "note": f"trained on, {config.trained[name].strength}" if trained else "eval-only",
            "kind": "reward", "series": series, "range": known or within}


def phases(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of all epochs so far per phase, the longest first."""
    total: dict[str, float] = defaultdict(float)
    for line in lines:
        for key, value in line.items():
            if key.startswith("seconds/"):
                total[key.removeprefix("seconds/")] += value
    return {phase: round(value, 2) for phase, value in sorted(total.items(), key=lambda pair: -pair[1])}


def server(run: Path, port: int) -> ThreadingHTTPServer:
    """Server of `/`, the report, and `/data.json`, its data, both made on request. It serves nothing else.

    port: 0 takes a free one.
    Raises UserError if the port is taken, or the folder is not a run.
    """
    run = run_of(run)
    first = {"run": run, "last": json.dumps(data(run), allow_nan=False)}
    return loopback.listen(type("Handler", (Handler,), first), port)


class Handler(loopback.Handler):
    """Request handler for one run, which may change, be damaged or be deleted. last: JSON of its data when they could
    be made."""

    run: Path
    last: str

    def content(self) -> dict[str, Any]:
        """The report's data; where it cannot be made, that of the last time, with the fault under `notice`."""
        notice = None
        try:
            type(self).last = json.dumps(data(self.run), allow_nan=False)
        except Exception as error:  # of half-written, damaged and deleted files
            notice = f"Not up to date: {' '.join(str(error).split())[:300] or type(error).__name__}"
        return json.loads(self.last) | {"notice": notice}

    def get(self) -> None:
        if self.path not in ("/", "/data.json"):
            raise loopback.Refused(404, "no such page")
        version = f'"{source_mark(self.run)}"'
        if self.headers.get("If-None-Match") == version:
            self.send_response(304)
            self.end_headers()
            return
        content = self.content() | {"version": version}
        if self.path == "/":
            self.send(page(content, live=True).encode(), "text/html; charset=utf-8")
        else:
            self.send(json.dumps(content, allow_nan=False).encode(), "application/json; charset=utf-8")
