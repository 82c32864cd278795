"""Process of `vbench_package.VBench`: scores the videos of a folder by the package vbench. It imports nothing else.

    python vbench_child.py FOLDER    # reads FOLDER/asked.json and FOLDER/videos, writes FOLDER/answer.json
"""

from __future__ import annotations

import json
import os
import sys


def main(folder: str) -> None:
    """Write the score of each video of `folder`, by its file name."""
    import vbench

    with open(os.path.join(folder, "asked.json")) as file:
        asked = json.load(file)
    bench = vbench.VBench(asked["device"], os.path.join(os.path.dirname(vbench.__file__), "VBench_full_info.json"),
                          os.path.join(folder, "results"))
    dimension = asked["dimension"]
    bench.evaluate(videos_path=os.path.join(folder, "videos"), name="run", prompt_list=asked["prompts"],
                   dimension_list=[dimension], mode="custom_input")
    with open(os.path.join(folder, "results", "run_eval_results.json")) as file:
        _, videos = json.load(file)[dimension]
    scores = {os.path.basename(video["video_path"]): float(video["video_results"]) for video in videos}
    with open(os.path.join(folder, "answer.json"), "w") as file:
        json.dump(scores, file)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose modules are not the package's
    main(sys.argv[1])
