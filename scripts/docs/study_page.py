"""Section of the study of parts in docs/bench.md, from docs/data/studies.json.

    python scripts/docs/study_page.py           # tests/test_study.py reports a page that is not current
    python scripts/docs/study_page.py --details  # prints all rows, their settings and what was seen
    python scripts/docs/study_page.py --results runs/study/results.json --tried runs/tried/results.json  # new ones

Rows that are not among the new ones stay; p-values are corrected over all of them.
"""

import argparse
import json
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "measure"))

import build_docs  # noqa: E402
from study_rows import ROWS  # noqa: E402
from study_settings import IMAGES, POOLS, SCENES, TEXTS, Options, Row  # noqa: E402
from study_statistics import accuracies, merged, named, table, tried  # noqa: E402

from flowgrpo.methods import PRESETS, registry  # noqa: E402
from flowgrpo.rewards import BUILT_IN  # noqa: E402
from flowgrpo.storage import atomic  # noqa: E402
from flowgrpo.tools.bench import models  # noqa: E402

QUOTE = '"'
ROOT = Path(__file__).parents[2]
PAGE, DATA = ROOT / "docs" / "bench.md", ROOT / "docs" / "data" / "studies.json"
BEGIN, END = "<!-- studies: begin -->\n", "<!-- studies: end -->\n"
HEAD = """{summary}

{surest}

{limits}
"""
SMALL = 'Small models, short runs and few seeds: "nothing was shown" is not "no effect".'
ALL = "`python scripts/docs/study_page.py --details` prints all rows with their settings."
SETUP = """
## Setup

- **Texts.** {text_epochs} epochs of {text_prompts} prompts with {text_group} samples, {text_updates} updates each: GRPO
  without a KL, at a learning rate of {text_lr} that falls to 0. That is three tenths of the samples of
  `configs/starter_text.yaml`. Runs that would draw more samples have 10 epochs. Both runs of a pair have the same seed.
- **Prompts.** `all`: those of the text recipe, without its validation prompts. `five numbers`: {fives} sums drawn for
  this study, and others for its measurements. `three in four mastered`: {known} sums that the base hardly ever gets
  wrong, beside a third as many of the recipe's; measured as `all`.
- **Settings.** Learning rate and updates of texts were chosen on validation prompts, for the run without. The first 16
  rows, those of texts without a setting in brackets, have published settings or such that fit a run of this length. The
  rows of `three in four mastered` were added after the first three rows had shown nothing.
{later}- **Without.** The run above, without the part. [Settings of each row](#settings-of-each-row) says where both
  runs differ from it, and where the part belongs to it, so that the run without is the changed one.
{bases}- **Quantities.** Accuracy is greedy, on {measured} held-out prompts. Entropy and KL to the base are of whole
  completions, in nats, on {sampled} of them with {samples} samples each at temperature 1.
{images}- **Test.** p is that of [the bench](bench.md#statistical-test), a bootstrap over prompts and seeds, paired by
  prompt. `Holm` has the correction for all rows. `Welch` is the t-test on the means of seeds, without a correction.
- **Verdict.** `helps` is p below 0.05 with every seed better than its pair, `hurts` with every seed worse.
  This rule was set when six rows were known.
- **Cost**: tokens through the model in training, or evaluations of the denoiser, as a ratio to the run without.

## Results

Means over seeds, with the lowest and the highest in brackets; `seeds` are those that are better with the part.
"""
LATER = ("- **Later rows.** All rows with a setting in brackets, and those of images, were added after those 16 were "
         "known. Earlier rows of the same part stay. {chosen}")
TRIED = ("Settings were chosen on validation prompts, with a seed of their own, [among "
         "these](#settings-that-were-tried).")
FIXED = "Their settings were set before their first run, and no other was tried."
PICTURED = ("- **Images.** {epochs} epochs of {prompts} prompts with {group} samples, on the prompts of the image "
            "recipe (`scenes`), by {shared}. Accuracy is strict, of one image for each of {count} held-out prompts, "
            "in {steps} steps at guidance {guidance:g}. Diversity is the distance between the {copies} images of a "
            "prompt, on {pictured} prompts; the KL to the base is that of whole samples of `flow_grpo`, on the same.")
COMPARED = "On validation prompts, with one seed that no row above has; `held-out row` is one of the table above."
CHANGED = ("`with` is what the run with the part adds to the run without; `both` is what the two runs change in the "
           "settings above; `without` is changed in the run without alone, where the part belongs to the settings. "
           "`published` stands for the method's own part.")
LIMITS = """
## Limits

- Small models and short runs: a part that shows nothing here can help elsewhere, and the reverse.
- Three seeds find large effects alone, and `not shown` is not `no effect`. With so few seeds the bootstrap is too sure
  of itself; Welch's test is stricter.
- Rows of a pool share their run without, so one weak seed of it favours all of them.
- Parts whose claim is about seconds, memory or several machines are not in the table.
"""


def page(results: dict[str, Any]) -> str:
    """Return the section of a study's results: what the rows say together, and which parts helped most surely."""
    return HEAD.format(**facts(results))


def written(text: str, results: dict[str, Any]) -> str:
    """Return the page's text with the section of these results between its two marks."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + page(results) + END + rest.partition(END)[2]


def surest(rows: list[dict[str, Any]]) -> str:
    """Return the rows that help after the correction over all rows, in words."""
    sure = [f"{linked(row)} ({row['pool']})" for row in rows if row["verdict"] == 1 and row["holm"] < 0.05]
    return f"Helped after the correction: {', '.join(sure) or 'none'}."


def details(results: dict[str, Any]) -> str:
    """Return all rows of a study, their settings, what was seen, and the settings that were tried."""
    lines = table(results["rows"])
    if others := accuracies(results["rows"]):
        lines += ["", "Accuracy of the rows with another quantity:", "", *others]
    known = {row.key: row for row in ROWS}
    lines += ["", "## Settings of each row", "", wrapped(CHANGED), "", *settings(results["rows"], known)]
    lines += ["", "## What was seen", ""]
    for result in results["rows"]:
        row = known[result["name"], result["setting"], result["pool"]]
        said = f"- **{named(result)}**, {result['pool']}. Claim: {row.claim}. {row.seen}"
        lines.append(wrapped(said, indent="  "))
    if results["tried"]:
        lines += ["", "## Settings that were tried", "", COMPARED, "", *tried(results["tried"], known)]
    told = facts(results)
    return SETUP.format(**told) + "\n".join(["", *lines, ""]) + LIMITS


def settings(results: list[dict[str, Any]], known: dict[tuple[str, str, str], Row]) -> list[str]:
    """Return the lines of a table of what the runs of every row change in the settings of their world."""
    lines = ["| part | prompts | with | both | without |", "|---|---|---|---|---|"]
    for result in results:
        row = known[result["name"], result["setting"], result["pool"]]
        lines.append(f"| {' | '.join([linked(result), result['pool'], *map(shown, sides(row))])} |")
    return lines


def sides(row: Row) -> tuple[Options, Options, Options]:
    """Return what the run with the part changes, what both runs change, and what the run without changes."""
    changes, having, without = dotted(row.base or {}), dotted(row.options), dotted(row.without)
    own = {key: value for key, value in having.items() if without.get(key) != value}
    both = {key: value for key, value in changes.items() if having.get(key) == value}
    return (own if row.rlg is None else own | {"--rlg": row.rlg}, both,
            {key: value for key, value in changes.items() if key not in both})


def shown(options: Options) -> str:
    """Return options as code, empty without one; a part that is taken away is the preset's own."""
    said = json.dumps(options)[1:-1].replace(QUOTE, "").replace("null", "published")
    return f"`{said}`" if said else ""


def linked(result: dict[str, Any]) -> str:
    """Return the part of a row with a link to its page, or to its place among the parts or the rewards."""
    name, text = result["name"], named(result)
    if name in PRESETS:
        return f"[{text}](methods/{build_docs.page_of(name)})"
    if name in registry.TYPES:
        return f"[{text}](reference/parts.md#{registry.PLACES[name].replace('.', '')})"
    return f"[{text}](reward_catalogue.md#all-rewards)" if name in BUILT_IN else text


def dotted(options: Options) -> Options:
    """Return options with their parts under keys of their own, `parts.NAME`."""
    parts = {f"parts.{name}": part for name, part in options.get("parts", {}).items()}
    return parts | {key: value for key, value in options.items() if key != "parts"}


def facts(results: dict[str, Any]) -> dict[str, Any]:
    """Return what the texts of the page name."""
    keys, pictured = ("epochs", "prompts", "group"), of_images(results)
    images = {key: IMAGES[f"train.{key}"] for key in keys} | {
        "count": len(models.split(IMAGES["model"])["held_out"]), "steps": IMAGES["eval.steps"],
        "guidance": IMAGES["eval.guidance"], **dict(zip(("pictured", "copies"), results["pictured"])),
        "shared": shown({key: value for key, value in dotted(IMAGES).items()
                         if key.partition(".")[0] in ("method", "parts", "reward", "adapter", "train")
                         and key not in {f"train.{name}" for name in keys}})}
    later = pictured or any(row["setting"] for row in results["rows"])
    return {**{key: results[key] for key in ("seeds", "fives", "known")}, "measured": results["prompts"],
            "summary": wrapped(summary(results)), "surest": wrapped(surest(results["rows"])),
            "limits": wrapped(f"{SMALL} {commits(results)} {ALL}"),
            **dict(zip(("sampled", "samples"), results["sampled"])),
            **{f"text_{key}": TEXTS[f"train.{key}"] for key in (*keys, "updates", "lr")},
            "later": bullet(LATER.format(chosen=TRIED if results["tried"] else FIXED)) if later else "",
            "bases": bullet("- **Base.** Accuracy before training: " + ", ".join(
                f"{value:.3f} on `{pool}`" for pool, value in results["bases"].items()) + "."),
            "images": bullet(PICTURED.format(**images)) if pictured else ""}


def bullet(text: str) -> str:
    """Return a bullet in lines."""
    return wrapped(text, indent="  ") + "\n"


def of_images(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the image starter."""
    return [row for row in results["rows"] if row["pool"] == POOLS[SCENES]]


def summary(results: dict[str, Any]) -> str:
    """Return the result of a study in words."""
    rows, pictured = results["rows"], of_images(results)
    helping = [row for row in rows if row["verdict"] == 1]
    also = " or the [image starter](starter.md#images)" if pictured else ""
    share = f" ({sum(row in pictured for row in helping)} of {len(pictured)} on images)" if pictured else ""
    return (f"Does a part do what its paper claims? Each row trains the [text starter](starter.md#language-models)"
            f"{also} with and without one part, with {results['seeds']} seeds. The part helped in {len(helping)} of "
            f"{len(rows)} rows{share}, with {len({row['name'] for row in helping})} different parts. It hurt in "
            f"{sum(row['verdict'] == -1 for row in rows)}, and nothing was shown in "
            f"{sum(row['verdict'] == 0 for row in rows)}. After Holm's correction over all rows, "
            f"{sum(row['holm'] < 0.05 for row in helping)} of the {len(helping)} are below 5 %; in Welch's test, "
            f"{sum(row['welch'] < 0.05 for row in helping)}.")


def commits(results: dict[str, Any]) -> str:
    """Return the commits of the package that the rows were run with, in words."""
    counts = Counter(" and ".join(row["commits"]) for row in results["rows"])
    return (f"One core, fp32. Commits of the package: "
            f"{', '.join(f'{commit} ({count} of the rows)' for commit, count in counts.items())}.")


def wrapped(text: str, indent: str = "") -> str:
    """Return a paragraph in lines of at most 120 characters."""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="results.json of a study, taken to docs/data/studies.json")
    parser.add_argument("--tried", type=Path, help="the same of settings on validation prompts")
    parser.add_argument("--details", action="store_true", help="print all rows")
    args = parser.parse_args()
    known = json.loads(DATA.read_text(encoding="utf-8"))
    if args.details:
        print(details(known))
        return
    if args.results:
        new = json.loads(args.results.read_text(encoding="utf-8"))
        known = new | {"tried": known["tried"], "bases": known.get("bases", {}) | new["bases"],
                       "rows": merged(known["rows"], new["rows"])}
    if args.tried:
        known["tried"] = json.loads(args.tried.read_text(encoding="utf-8"))["rows"]
    atomic.write_text(DATA, json.dumps(known, indent=1) + "\n")
    results = json.loads(DATA.read_text(encoding="utf-8"))
    atomic.write_text(PAGE, written(PAGE.read_text(encoding="utf-8"), results))


if __name__ == "__main__":
    main()
