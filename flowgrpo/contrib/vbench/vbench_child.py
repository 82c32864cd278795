"""Process of `dimensions.VBench`: scores the videos of a folder by the package vbench. It imports nothing else.

    python vbench_child.py FOLDER    # reads FOLDER/asked.json and FOLDER/videos, writes FOLDER/answer.json
"""

from __future__ import annotations

import importlib
import json
import os
import sys


def main(folder: str) -> None:
    """Write the score of each video of `folder` that the package judges, by its file name."""
    with open(os.path.join(folder, "asked.json")) as file:
        asked = json.load(file)
    dimension = asked["dimension"]
    rows = [{"prompt_en": video["prompt"], "dimension": [dimension],
             "video_list": [os.path.join(folder, "videos", name)],
             **({"auxiliary_info": video["facts"]} if video["facts"] else {})}
            for name, video in asked["videos"].items()]
    listed = os.path.join(folder, "full_info.json")
    with open(listed, "w") as file:
        json.dump(rows, file)
    models = importlib.import_module("vbench.utils").init_submodules([dimension])[dimension]
    compute = getattr(importlib.import_module(f"vbench.{dimension}"), f"compute_{dimension}")
    try:
        _, videos = compute(listed, asked["device"], models)
    except ZeroDivisionError:  # `color` divides by the number of videos that show the object
        videos = []
    scores = {os.path.basename(video["video_path"]): float(video["video_results"]) for video in videos}
    with open(os.path.join(folder, "answer.json"), "w") as file:
        json.dump(scores, file)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose modules are not the package's
    main(sys.argv[1])
