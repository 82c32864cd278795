"""Table of `flowgrpo list rewards`, and scores of files for `flowgrpo reward score`."""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.signals import promptly
from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.rewards.failures import Failed
from flowgrpo.rewards.find import FACTS, find, locate, names, source
from flowgrpo.rewards.reward import about
from flowgrpo.rewards.score import columns

TITLES = ("of images and videos", "of texts", "of both", "of what the reward does not state")
AT_ONCE = 16  # files of one size that a reward sees together


def list_rewards() -> list[dict[str, Any]]:
    """Facts of every reward that has a name, None where it states none. No reward is instantiated.

    Facts of built-in rewards are read from a file, since their modules load torch. A package's reward that fails to
    import has its error under "broken", and does not hide the others.
    """
    rows = []
    for name in names():
        if (facts := FACTS.get(name)) is not None:
            limits = facts["range"] and tuple(facts["range"])
            known = About(facts["modality"], limits, facts["needs"], facts["licence"])
            does, found_by, broken = facts["does"], facts["found_by"], None
        else:
            found_by, broken = "", None
            try:
                known, does = described(locate(name))
            except UserError as error:
                known, does, broken = About(), "", str(error)
        rows.append({"name": name, "modality": known.modality, "range": known.range, "needs": known.needs,
                     "licence": known.licence, "installed": False if broken else known.installed, "does": does,
                     "found_by": found_by, "source": source(name), "broken": broken})
    return rows


def described(reward: object) -> tuple[About, str]:
    """(stated facts, first sentence of the docstring)."""
    first = " ".join((getattr(reward, "__doc__", None) or "").strip().partition("\n\n")[0].split())
    return about(reward), re.split(r"(?<=[^.][^.A-Z])\. (?=[A-Z`])", first)[0].rstrip(".")


def range_of(reward: dict[str, Any]) -> str:
    """Its lowest and highest score, such as "0 to inf"; empty where it states none."""
    return " to ".join(f"{limit if end is None else end:g}"
                       for limit, end in zip((-math.inf, math.inf), reward["range"] or ()))


def cells(reward: dict[str, Any]) -> list[str]:
    """Table row: name, what it does, and its facts where it states them: modality, range, needs, and the licence unless
    it is Apache-2.0."""
    needs = reward["needs"] and f"needs {reward['needs']}" + " (not installed)" * (reward["installed"] is False)
    licence = (reward["licence"] or "").removeprefix("Apache-2.0").removeprefix(", ")
    facts = [reward["modality"], range_of(reward), needs, licence]
    return [reward["name"], reward["does"], "broken" if reward["broken"] else ", ".join(filter(None, facts)) or "?"]


def score_files(name: str, arguments: dict[str, Any], files: Sequence[Path], prompts: Sequence[Prompt]
                ) -> list[float | Failed]:
    """Scores of files, each with its prompt, by the reward of that name; NaN where it does not apply.

    A file is an image; a folder of images, an animated GIF or WebP, or an .mp4 and its like, is a video; a .txt file a
    text.
    Raises UserError for an unreadable file, and as `find` and `score` do.
    """
    import torch

    from flowgrpo.rewards.preprocessing import read_output

    reward, outputs = find(name, arguments), [read_output(file) for file in files]
    scores: dict[int, float | Failed] = {}
    alike: dict[Any, list[int]] = defaultdict(list)
    for i, output in enumerate(outputs):
        alike[getattr(output, "shape", None)].append(i)
    for rows in alike.values():
        for some in (rows[start:start + AT_ONCE] for start in range(0, len(rows), AT_ONCE)):
            of = [prompts[i] for i in some]
            batch: Any = [outputs[i] for i in some]
            batch = torch.stack(batch) if torch.is_tensor(batch[0]) else batch
            [column] = promptly(partial(columns, {name: reward}, batch, [p.text for p in of], [p.metadata for p in of]))
            scores |= zip(some, column)
    return [scores[i] for i in range(len(files))]
