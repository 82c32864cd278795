"""Model card of a finished run: hub metadata, a usage snippet, the licence, results, and its facts: prompts, rewards,
method, versions, hashes, cost, images before and after, and the settings that matter.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flowgrpo.config.reward_rules import WatchRule
from flowgrpo.config.schema import Config
from flowgrpo.data import sets
from flowgrpo.escaped import code, code_block, line, markdown
from flowgrpo.escaped import table as table_of
from flowgrpo.evaluation import kept
from flowgrpo.evaluation.image_files import weight_files
from flowgrpo.evaluation.pages import figures
from flowgrpo.evaluation.pages.sources import FOLDER as SOURCES
from flowgrpo.evaluation.report import snapshots
from flowgrpo.evaluation.report.verdict import untrained_lines
from flowgrpo.evaluation.statistics import ALL, decimals, digits_of, format_interval, format_value
from flowgrpo.export import run_lora
from flowgrpo.export.usage import snippet, task
from flowgrpo.files import metadata_of, text_of
from flowgrpo.nouns import SAMPLE, quantity
from flowgrpo.policies import sources
from flowgrpo.rewards.find import ALIASES, BUILT_IN
from flowgrpo.starter import FOLDERS
from flowgrpo.storage import atomic
from flowgrpo.storage.json_files import read_lines, read_object
from flowgrpo.storage.manifest import sha256
from flowgrpo.version import __version__

FOLDER, PAIRS = "images", 4  # of the gallery, in the run's folder
IMAGE = "data:image/webp;base64,"
OF_WEIGHTS = ("model", "checkpoint", "head", "revision", "head_revision")
TOKENS = "tokens"  # unit of a language model's count
HUB_ID = r"[\w.-]+/[\w.-]+"
LICENCES = ("license", "license_name", "license_link")
PROMPTS = {"image": "a photo of a cat", "clip": "a cat walks", "completion": "Hello"}


@dataclass(frozen=True)
class Pair:
    """Samples of a prompt before and after: paths of images relative to the run, or texts.

    brought: what the prompt brings, as keys of a prompt file with such paths.
    """

    prompt: str
    before: str
    after: str
    drawn: bool
    brought: tuple[tuple[str, str], ...] = ()


def gallery(run: Path) -> list[Pair]:
    """Write images of the first held-out prompts, before and after, to `images/`; return them, or texts."""
    files = [run / snapshots.FOLDER / f"{name}.json" for name in ("before", "after")]
    sides = [read_object(file, snapshots.MEND).get("cards", []) if file.is_file() else [] for file in files]
    for old in (*(run / FOLDER).glob("[ab]*-[0-9].webp"), *(run / FOLDER).glob("source-[0-9]-*")):
        old.unlink()
    pairs = []
    for number, (before, after) in enumerate(list(zip(*sides))[:PAIRS]):
        # What the prompt brings, by key and number.
        stems = {file: file.stem.split("-")[1:] for file in (run / SOURCES).glob(f"{number:03d}-*")}
        brought = []
        for file, (key, *_) in sorted(stems.items(), key=lambda item: (item[1][0], int("".join(item[1][1:]) or 0))):
            path = f"{FOLDER}/source-{number}-{file.name.partition('-')[2]}"
            atomic.write_bytes(run / path, file.read_bytes())
            brought.append((key, path))
        drawn = "text" not in before
        shown = []
        for name, card in (("before", before), ("after", after)):
            shown.append(f"{FOLDER}/{name}-{number}.webp" if drawn else line(card["text"]))
            if drawn:
                atomic.write_bytes(run / shown[-1], base64.b64decode(card["picture"].removeprefix(IMAGE)))
        pairs.append(Pair(line(before["prompt"]), shown[0], shown[1], drawn, tuple(brought)))
    return pairs


def prompts(config: Config) -> str:
    """Table of the prompts' sides: set or file, number of lines, SHA-256; and that a test set was trained on."""
    known = sets.SETS.get(config.prompts)
    shared = isinstance(config.held_out, float)
    held_out = known.held_out if known and known.held_out and shared else config.held_out
    sides = {"training": known.train if known else config.prompts,
             "held out": f"{held_out:.0%} of these" if isinstance(held_out, float) else held_out}
    name = config.prompts if known else line(Path(config.prompts).name)
    rows = []
    for side, place in sides.items():
        file, facts = Path(place), ["-" if "of these" not in str(place) else str(place), "-"]
        if file.is_file():
            content = file.read_bytes()
            facts = [f"{sum(bool(row.strip()) for row in content.splitlines()):,}",
                     f"`{hashlib.sha256(content).hexdigest()}`"]
        rows.append([side, code(name if side == "training" or known else Path(str(place)).name), *facts])
    if isinstance(held_out, float) and Path(config.prompts).is_file():
        for row, part in zip(rows, sets.resolve(config)):
            row[2] = f"{len(part):,}"
    note = f"**{markdown(sets.caution(config.prompts))}.**\n\n" if config.train_on_test_set else ""
    return note + table_of([["split", "set", "number", "SHA-256"], *rows])


def _version(label: str, rule: WatchRule) -> str:
    name = rule.use or label
    of = ", ".join(f"{key} {code(str(rule.args[key]))}" for key in OF_WEIGHTS if key in rule.args)
    if name in BUILT_IN or name in ALIASES:
        return f"flowgrpo {__version__}" + (f", {of}" if of else "")
    file = Path(name.rpartition(":")[0])
    if file.suffix == ".py":
        return f"SHA-256 of the file `{sha256(file)}`" if file.is_file() else "in a file of its author"
    return of or "of an installed package, a folder or an address"


def _machine(run: Path) -> dict[str, Any]:
    file = run / snapshots.FOLDER / "machine.json"
    return read_object(file, snapshots.MEND) if file.is_file() else {}


def cost(summary: dict[str, Any], run: Path) -> str:
    """Training's cost as measured: samples, evaluations, hours of the devices."""
    machine = _machine(run)
    processes = int(machine.get("processes", 1))
    hours = summary["seconds"] * processes / 3600
    samples = summary.get("samples", summary.get("sampled_pictures"))  # the key's name before
    drawn = f"{quantity(samples, 'sample')}, " if samples is not None else ""
    on = f" of {processes} x {markdown(machine['device'])}" if "device" in machine else ""
    return (f"{drawn}{summary['denoiser_evaluations']:,} {summary['unit']}, {summary['seconds']:,.0f} s of training "
            f"({hours:.3g} hours{on})")


def text(config: Config, summary: dict[str, Any], run: Path, place: str) -> str:
    """The card, whose gallery is written to the run. place: what the snippet loads the weights from."""
    lora, licence, pairs = has_lora(config, run), licence_of(config.model), gallery(run)
    drawn = "video" if (run / "before_after.webp").is_file() else "image"
    sample = SAMPLE[config.text.generates if summary["unit"] == TOKENS else drawn]
    front = yaml.safe_dump(metadata(config, licence, sample, lora, pairs), sort_keys=False).rstrip()
    prompt, brought = (pairs[0].prompt, pairs[0].brought) if pairs else (PROMPTS[sample], ())
    page = "before_after.webp" if (run / "before_after.webp").is_file() else "before_after.png"
    first = "".join(f"**{markdown(sentence)}**\n\n" for sentence in untrained_lines(summary))
    doing = "was to be trained" if summary.get("trained", {}).get("nothing") else "trained"
    machine = _machine(run) or {"flowgrpo": __version__}
    made_with = ", ".join(f"{key} {markdown(str(value))}" for key, value in machine.items()
                          if key not in ("system", "cores"))
    siblings = "\n".join(
        f"- {markdown(kept.sentence(found))} (95 % interval, {found['prompts']} held-out prompts)"
        for found in kept.read(run).values())
    hashes = "\n".join(f"- {code(file.relative_to(run).as_posix())}: `{sha256(file)}`" for _, file in weight_files(run))
    comfyui = " and ".join(code(file.relative_to(run).as_posix()) for file in sorted(run.glob("comfyui/*.safetensors")))
    sourced = any(pair.brought for pair in pairs)
    samples = [[markdown(pair.prompt), *[" ".join(f"![{key}]({file})" for key, file in pair.brought)] * sourced,
                *(f"![]({side})" if pair.drawn else markdown(side) for side in (pair.before, pair.after))]
               for pair in pairs]
    table = [table_of([["prompt", *["source"] * sourced, "before", "after"], *samples])] if pairs else []
    parts = {
        "": f"{first}{code(config.model)} {doing} by flowgrpo with {code(config.method)} on {_reward_sum(config)}."
            f"{_base(config)}",
        "Usage": code_block(snippet(config, run, place, prompt, brought), "python"),
        "Result": "\n\n".join([results(config, summary), *filter(None, [siblings]), *table,
                               f"{code(page)} shows a {sample} of held-out prompts before and after training, with "
                               "its scores, and the means of all held-out prompts:",
                               f"![The same prompts and seeds before and after]({page})",
                               "![Rewards over training](curves.png)"]),
        "Prompts": prompts(config),
        "Rewards": "\n".join(f"- {code(label)}{', eval-only' * (label not in config.rewards)}: {_version(label, rule)}"
                             for label, rule in (config.trained | config.extra_rewards).items()),
        "Training": f"{settings(config, summary, run)}\n\nMade with: {made_with}.\n\nAll settings "
                    "are in `config.yaml`, the numbers of each epoch in `metrics.jsonl`.",
        "Files": f"For ComfyUI: {comfyui}, at strength 1. All other programs: the files below.\n\n" * bool(comfyui)
                 + f"SHA-256 of the weights:\n\n{hashes}",
        "Limits": limits(config, summary),
        "Licence": _licence(config, licence)}
    body = "\n\n".join((f"## {head}\n\n" if head else "") + part for head, part in parts.items())
    return f"---\n{front}\n---\n\n# {markdown(config.name)}\n\n{body}\n"


def limits(config: Config, summary: dict[str, Any]) -> str:
    """Return what the measurements do not say."""
    eval_only = [name for name in config.extra_rewards if name not in config.rewards]
    hacking = f"{', '.join(map(code, eval_only))} {'was' if len(eval_only) == 1 else 'were'} eval-only." if eval_only \
        else "All of these rewards were trained on, and `eval.rewards` named no other to measure, so that reward " \
        "hacking would not show in them."
    return "\n".join([
        f"- Measured on {summary['evaluation']['prompts']} held-out {summary['evaluation']['of']} of one set of "
        "prompts; other prompts and other settings of the sampler were not measured.",
        f"- {hacking}",
        f"- The weights are for {code(config.model)} only, and have its biases and limits besides.",
        "- Nothing was done for safety: what the base generates, these weights generate too."])


def _licence(config: Config, licence: dict[str, str]) -> str:
    base = f"Of the base model {code(config.model)}: {_terms(licence)}. These weights are derived from it."
    if not licence:
        base = (f"Of the base model {code(config.model)}: unknown, since neither its folder nor its card here names "
                "one. These weights are derived from it: look its licence up before you share or use them.")
    begun, fused = config.adapter.init, [lora.path for lora in config.load.loras_with_scales]
    others = [("the LoRA", begun, ", from which the training began"), ("the denoiser", config.load.denoiser, ""),
              *(("the LoRA", path, ", which is part of the base") for path in fused)]
    return "\n\n".join([base, *(f"Of {what} {code(place)}{role}: {_terms(licence_of(place))}."
                                for what, place, role in others if place)])


def _terms(licence: dict[str, str]) -> str:
    return " ".join(code(licence[key]) for key in LICENCES[:2] if key in licence) or "licence not stated"


def _base(config: Config) -> str:
    base = sources.base(config.model, config.load)
    told = "" if base == f"`{config.model}`" else \
        f"\n\nIts base is {base}: on another base the weights do something else."
    if config.adapter.init is not None:
        told += f"\n\nIt began from the LoRA {code(config.adapter.init)} (adapter.init), which it holds."
    return told


def metadata(config: Config, licence: dict[str, str], sample: str, lora: bool, pairs: Sequence[Pair] = ()
             ) -> dict[str, Any]:
    """Hub's metadata. A base model that is no hub id has no entry, since the hub would refuse it."""
    of_tokens = sample == "completion" or config.text.generates == "image"
    library = "diffusers" if not of_tokens else "peft" if lora else "transformers"
    on_hub = re.fullmatch(HUB_ID, config.model) and not Path(config.model).is_dir() and not sources.is_file(
        config.model)
    base = {"base_model": config.model, "base_model_relation": "adapter" if lora else "finetune"} if on_hub else {}
    # The hub's gallery of tuned samples, with the source of each that has one.
    widget = [({"src": pair.brought[0][1], "prompt": pair.prompt} if pair.brought else {})
              | {"text": pair.prompt, "output": {"url" if pair.drawn else "text": pair.after}} for pair in pairs]
    return {**base, "library_name": library, "license": "other", **licence,
            "pipeline_tag": task(config, sample, pairs[0].brought if pairs else ()),
            "tags": ["flowgrpo", "reinforcement-learning", *(["lora"] if lora else [])],
            **({"widget": widget} if pairs else {})}


def licence_of(place: str) -> dict[str, str]:
    """Licence of a model or LoRA: of its file's metadata (modelspec), of the card in its folder or beside its file, or
    of its card in the hub's cache on this machine. Raises UserError for a card that is no UTF-8."""
    path, file = Path(FOLDERS.get(place, place)), None
    if path.is_file() or path.is_dir():
        if path.suffix == ".safetensors" and (said := metadata_of(path).get("modelspec.license", "").strip()):
            return {"license": "other", "license_name": line(said)}
        file = (path if path.is_dir() else path.parent) / "README.md"
    elif re.fullmatch(HUB_ID, place):
        from huggingface_hub import try_to_load_from_cache

        known = try_to_load_from_cache(place, "README.md")
        file = Path(known) if isinstance(known, str) else None
    front = re.match(r"---\s*\n(.*?)\n---", text_of(file), re.S) if file and file.is_file() else None
    try:
        entries = yaml.safe_load(front[1]) if front else {}
    except yaml.YAMLError:
        entries = {}
    named = isinstance(entries, dict) and isinstance(entries.get("license"), str)
    return {key: line(str(entries[key])) for key in LICENCES if key in entries} if named else {}


def has_lora(config: Config, run: Path) -> bool:
    """True for a run with a LoRA, in place of whole weights or an edit policy."""
    from flowgrpo.policies.pipelines import edits

    return config.adapter.rank > 0 and not (run / edits.FILE).is_file()


def results(config: Config, summary: dict[str, Any]) -> str:
    """Table of held-out means, with intervals where the run has them, and what they are means of."""
    evaluation, compared = summary["evaluation"], summary.get("compared", {})
    lines = [["reward", "before", "after", "change", "trained on"]]
    for name, before in summary["before"].items():
        if name in compared:
            of_all = compared[name][ALL]
            digits = digits_of({ALL: of_all})
            row = [format_interval(of["mean"], of["low"], of["high"], digits, "+" * (key == "change"))
                   for key, of in of_all.items()]
        else:
            after = summary["after"][name]
            change = None if before is None or after is None else after - before
            digits = decimals([before, after], [change])
            row = [format_value(before, digits), format_value(after, digits), format_value(change, digits, "+")]
        lines.append([markdown(name), *row, "yes" if name in config.rewards else "no"])
    table = table_of(lines, ["---", "---:", "---:", "---:", "---"])
    methods = dict.fromkeys(rows[ALL]["before"]["method"] for rows in compared.values())
    scheduler = "" if summary["unit"] == TOKENS else ", with the pipeline's own scheduler"
    intervals = f" 95 % intervals: {', '.join(methods)}." if methods else ""
    anew = f", {evaluation['anew']}" if evaluation.get("anew") else ""
    return f"{table}\n\nMeans over {evaluation['prompts']} held-out {evaluation['of']}{scheduler}{anew}.{intervals}"


def settings(config: Config, summary: dict[str, Any], run: Path) -> str:
    train, writes = config.train, summary["unit"] == TOKENS
    sampling = f"up to {config.text.max_tokens} tokens" if writes else f"{train.steps}, guidance {train.guidance:g}"
    if config.text.generates == "image":
        sampling = f"images by tokens, guidance {train.guidance:g}"
    none = "none: all weights" if config.adapter.rank == 0 else "none: an edit policy"
    adapter = run_lora.describe_rank(run) if has_lora(config, run) else none
    batch = f"{quantity(train.prompts, 'prompt')} x {quantity(train.group, 'sample')} each"
    epochs = f"{summary['epochs']}, {batch}; {quantity(summary['updates'], 'update')}"
    measured, rate = summary["evaluation"]["of"], "auto" if train.calibration else f"{train.lr:g}"
    parts = yaml.safe_dump(config.parts, default_flow_style=True, width=10_000).strip() if config.parts else ""
    method = code(config.method) + (f" with {code(parts)}" if parts else "")
    rows = {"method": method, "rewards": _reward_sum(config), "sample with": measured,
            "epochs": epochs, "completions" if writes else "steps in training": sampling, "LoRA": adapter,
            "learning rate": f"{rate}, {train.schedule}", "precision": config.precision,
            "cost": cost(summary, run),
            "seed": str(summary["seed"])}
    return "\n".join(["| setting | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _reward_sum(config: Config) -> str:
    rules = config.trained.items()
    terms = [code(name) if rule.weight == 1 else f"{rule.weight:g} {code(name)}"
             for name, rule in rules if rule.limit is None]
    limited = [f"{code(name)} {rule.limit}" for name, rule in rules if rule.limit is not None]
    return " + ".join(terms) + (f" with {', '.join(limited)}" if limited else "")


def curves(run: Path, path: Path, unit: str) -> None:
    """Plot the mean of every reward of a run against the count of a unit, one colour each, held-out means as dots."""
    lines = read_lines(run / "metrics.jsonl", "evaluations")
    with figures.figure_style() as pyplot:
        figure, axes = pyplot.subplots(figsize=(7, 4))
        styles: dict[str, dict[str, Any]] = {}
        for key, series in points(lines).items():
            kind, _, reward = key.partition("/")
            turn, number = divmod(len(styles), len(figures.COLOURS))  # colours first, then dashes
            style = styles.setdefault(reward, {"color": figures.COLOURS[number],
                                               "ls": figures.DASHES[turn % len(figures.DASHES)]})
            name = reward.rpartition("/")[2]
            held_out = kind == "held_out"
            axes.plot(*zip(*series), **(style | ({"ls": "", "marker": "o"} if held_out else {})),
                      label=f"{name}, held out" if held_out else name)
        axes.set(xlabel=unit, ylabel="mean reward")
        if styles:
            figure.legend(loc="outside lower left", ncols=min(3, len(axes.lines)))
        figures.save(figure, path)


def points(lines: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return the (evaluations, mean) points of every reward in `metrics.jsonl`, as `reward/NAME` for training and
    `held_out/NAME`. Lines where a reward applied to nothing are skipped."""
    series: dict[str, list[tuple[int, float]]] = {}
    for entry in lines:
        for key, value in entry.items():
            mean = key.startswith("reward/") and key.endswith("/mean")
            if (mean or key.startswith("held_out/")) and value is not None:
                series.setdefault(key.removesuffix("/mean"), []).append((entry["evaluations"], value))
    return series
