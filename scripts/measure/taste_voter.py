"""A simulated user of the page of `flowgrpo taste`: does the model take on a taste that no reward of the run knows?

    python scripts/measure/taste_voter.py FOLDER --seeds 0 1 2
    python scripts/measure/taste_voter.py FOLDER --seeds 0 1 2 --voter random --label random
    python scripts/measure/taste_voter.py FOLDER --table                            the table of docs/taste.md

A row names its sessions by `--label`; the file has those of LABELS, the table those of SHOWN.

The hidden taste is z(scene_graded) + z(share of ink), larger shapes; 15 % of the votes are for another image, and two
images that are less than TIE apart are a tie. The user is another process, which reads the page's state and its
images over HTTP as a browser does. Measured are 240 held-out prompts with two noises each: how often the tuned
model's image is better than the base's from the same noise (ties one half), right images, edges and diversity.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "docs"))
from revisions import commit  # noqa: E402 -- a script of the folder beside

TIE, FLIPS = 0.25, 0.15
MODEL, SAMPLES = "starter_consistency", 2
ROOT = Path(__file__).parents[2]
PAGE, KEPT = ROOT / "docs" / "taste.md", ROOT / "docs" / "data" / "taste_sessions.jsonl"
OLD, EIGHT = "voted samples", "eight images, two passes"
LABELS = {"default": "the simulated user", "random": "votes at random",
          "always": "the same by any head", "always_random": "the same by any head, votes at random",
          "both": f"{OLD}, head and clicks", "slow": f"{OLD}, head and clicks, half of the rate",
          "eight": f"{OLD}, head and clicks, {EIGHT}", "head": f"{OLD}, head alone, {EIGHT}",
          "clicks": f"{OLD}, clicks alone, {EIGHT}", "eight_random": f"{OLD}, {EIGHT}, votes at random"}
SHOWN = ("default", "random")
HEAD = """| votes | commit | seeds | won | mean | right images | edges | variety | s per click |
|---|---|---|---|---:|---|---|---|---|
"""


# --- the hidden taste ------------------------------------------------------------------------------------------------

def ink(images: torch.Tensor) -> np.ndarray:
    """Return the share of each image that is no ground."""
    ground = images.flatten(2).median(-1).values[:, :, None, None]
    return ((images - ground).norm(dim=1) > 0.3).float().mean((1, 2)).numpy()


def utility(images: torch.Tensor, prompts: list[str], stats: list[float]) -> np.ndarray:
    """Return the taste for each image. stats: mean and deviation of both parts on the base's images."""
    from flowgrpo.rewards.starter.scene import scene_graded

    right = np.array(scene_graded(images, prompts))
    return (right - stats[0]) / stats[1] + (ink(images) - stats[2]) / stats[3]


# --- the user --------------------------------------------------------------------------------------------------------

def vote(address: str, clicks: int, seconds: float, seed: int, stats: list[float], kind: str, limit: float) -> None:
    """Vote until `clicks` questions have an answer or `limit` seconds are over, finish the session, and print how long
    was waited."""
    torch.set_num_threads(1)
    waits: list[float] = []
    checks = ties = 0

    def ask(path: str, content: Any = None) -> Any:
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(address + path, body, {"Content-Type": "application/json"})
        return json.loads(urllib.request.urlopen(request, timeout=60).read())

    state, end = ask("state"), time.monotonic() + limit
    while state["clicks"] < clicks and not state["ended"] and time.monotonic() < end:
        began = time.monotonic()
        while state["question"] is None and not state["ended"]:
            time.sleep(0.02)
            state = ask("state")
        waits.append(time.monotonic() - began)
        if state["ended"]:
            break
        began, question = time.monotonic(), state["question"]
        shown = [*range(question["count"])]
        files = [urllib.request.urlopen(f"{address}{question['name']}/{place}").read() for place in shown]
        pixels = [np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in files]
        images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 255
        worth = utility(images, [question["prompt"]] * len(shown), stats)
        rng = np.random.default_rng([1000 + seed, *map(ord, question["name"])])  # the same after a resume
        order, choice = np.argsort(-worth), int(rng.integers(len(shown)))
        if kind != "random":
            choice = int(order[rng.integers(1, len(shown))] if rng.random() < FLIPS else order[0])
            if worth.max() - worth.min() < TIE:
                choice, ties = "tie", ties + 1
        time.sleep(max(0.0, seconds - (time.monotonic() - began)))
        checks += ".c" in question["name"]
        state = ask("vote", {"question": question["name"], "shown": shown, "choice": choice})
    ask("finish", {})
    print(json.dumps({"clicks": state["clicks"], "checks": checks, "ties": ties, "against": state["against"],
                      "waited": sum(waits[20:]), "longest": max(waits[20:], default=0.0)}))


# --- measures --------------------------------------------------------------------------------------------------------

@torch.no_grad()
def images_of(lora: Path | None) -> torch.Tensor:
    """Return images [P * SAMPLES, 3, H, W] of the held-out prompts, by the model's own steps."""
    from flowgrpo.config.schema import Config
    from flowgrpo.policies import build, loading
    from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
    from flowgrpo.samplers.rollout import seeder

    config = Config(model=MODEL, precision="bf16")
    pipe = build.load(config)
    if lora is not None:
        loading.load_tuned(pipe, lora)
    policy = PipelinePolicy(pipe, None, precision="bf16", call=config.call)
    rows, seed, made = [(i, k) for i in range(len(held_out())) for k in range(SAMPLES)], seeder(7, 0), []
    for at in range(0, len(rows), 96):
        some = rows[at:at + 96]
        encoded = policy.encode([held_out()[i] for i, _ in some])
        made.append(policy.generate(encoded, policy.generators([seed(*row) for row in some]), 4, 1.0))
    return torch.cat(made)


def held_out() -> list[str]:
    from flowgrpo.data.prompts import STARTER, load_prompts

    return [prompt.text for prompt in load_prompts(STARTER / "held_out.jsonl")]


def edge_width(images: torch.Tensor) -> float:
    """Return the median width in pixels of the shapes' edges: 1 as drawn, 3 after a blur of one pixel."""
    from flowgrpo.rewards.starter import scene

    widths, compare = [], scene._compare

    def kept(*arguments: Any) -> Any:
        found = compare(*arguments)
        widths.append(float(found[2]))
        return found

    scene._compare = kept
    scene._read_once.cache_clear()
    try:
        for image in images:
            scene.read(image)
    finally:
        scene._compare = compare
    return float(np.median(widths))


def diversity(images: torch.Tensor) -> float:
    """Return the mean distance of the images of a prompt, over 16 x 16 pixels."""
    small = torch.nn.functional.avg_pool2d(images, 4).flatten(1).unflatten(0, (-1, SAMPLES))
    apart = torch.cdist(small, small)
    return float(apart.sum((1, 2)).mean() / (SAMPLES * (SAMPLES - 1)))


def measured(images: torch.Tensor, stats: list[float] | None = None) -> dict[str, Any]:
    """Return the measures of images. stats: of the base; None: these are its own."""
    from flowgrpo.rewards.starter.scene import scene, scene_graded

    prompts = [text for text in held_out() for _ in range(SAMPLES)]
    if stats is None:
        right, size = np.array(scene_graded(images, prompts)), ink(images)
        stats = [float(value) for value in (right.mean(), right.std(), size.mean(), size.std())]
    return {"stats": stats, "utility": utility(images, prompts, stats).tolist(),
            "strict": float(np.mean(scene(images, prompts))), "ink": float(ink(images).mean()),
            "edge": edge_width(images), "diversity": diversity(images)}


def base_of(folder: Path) -> dict[str, Any]:
    """Return the base's measures, kept in a file; with those of its images blurred with sigma .5."""
    from torchvision.transforms.functional import gaussian_blur

    file = folder / "base.json"
    if not file.is_file():
        images = images_of(None)
        blurred = edge_width(gaussian_blur(images, 5, 0.5))
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(measured(images) | {"blurred": blurred}))
    return json.loads(file.read_text())


def visible(now: list[float], base: list[float], rows: slice = slice(None)) -> float:
    """Return the share of images that are better than the base's; those that are less than TIE apart count one half.
    """
    apart = (np.array(now) - np.array(base)).reshape(-1, SAMPLES)[rows]
    return float(np.where(np.abs(apart) < TIE, 0.5, apart > 0).mean())


# --- the table -------------------------------------------------------------------------------------------------------

def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of sessions, a row per label: every seed's value, or the range of all seeds."""
    lines = []
    for label in SHOWN:
        if not (of := sorted((row for row in rows if row["label"] == label), key=lambda row: row["seed"])):
            continue
        won = [row["visible"] for row in of]
        right, edge, apart, spent = (_range([row[key] for row in of], form) for key, form in (
            ("strict", "+.3f"), ("edge", ".2f"), ("diversity", ".2f"), ("seconds_per_click", ".2f")))
        commits, seeds = ", ".join(sorted({row["commit"] for row in of})), ", ".join(str(row["seed"]) for row in of)
        lines.append(f"| {LABELS[label]} | {commits} | {seeds} | {', '.join(f'{each:.2f}' for each in won)} | "
                     f"{np.mean(won):.2f} | {right} | {edge} | {apart} | {spent} |")
    return HEAD + "\n".join(lines)


def _range(values: list[float], form: str) -> str:
    low, high = (format(value, form) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def write_table(folder: Path) -> None:
    """Write the last row of each label and seed of a folder to docs/data, and the table of all to docs/taste.md."""
    rows = {(row["label"], row["seed"]): row for file in (KEPT, folder / "rows.jsonl") if file.is_file()
            for row in map(json.loads, file.read_text().splitlines()) if row["label"] in LABELS}
    KEPT.write_text("".join(json.dumps(rows[key]) + "\n" for key in sorted(rows)))
    text = PAGE.read_text()
    begin, end = text.index(HEAD.splitlines()[0]), text.index("\n\n", text.index(HEAD.splitlines()[0]))
    PAGE.write_text(text[:begin] + table([*rows.values()]) + text[end:])


# --- a session -------------------------------------------------------------------------------------------------------

def session(folder: Path, name: str, seed: int, given: argparse.Namespace, base: dict[str, Any]) -> dict[str, Any]:
    """Run a session with a simulated user; return its row."""
    from flowgrpo.contrib.taste import session as of
    from flowgrpo.contrib.taste.loop import VOTES, Taste
    from flowgrpo.contrib.taste.votes import VoteLog
    from flowgrpo.tools.vote.live import LiveBallot
    from flowgrpo.tools.vote.server import address, server

    keys = dict(text.split("=", 1) for text in given.set)
    keys = {"seed": str(seed), "precision": "bf16"} | keys
    resume = (folder / name / VOTES).is_file()
    config = of.session_config(MODEL, "starter", None, folder / name, keys, resume)
    config.folder.mkdir(parents=True, exist_ok=True)
    kept = config.folder / "spent.json"
    before = json.loads(kept.read_text()) if kept.is_file() else 0.0
    live = LiveBallot(VoteLog(config.folder / VOTES), seed=seed)
    with server(live, 0) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        told = map(str, (given.clicks, given.seconds, seed, json.dumps(base["stats"]), given.voter, given.limit))
        user = subprocess.Popen([sys.executable, __file__, "vote", address(serving), *told], stdout=subprocess.PIPE,
                                text=True)
        began, wall = time.process_time(), time.monotonic()
        epochs = of.train(config, Taste(live, config.folder), resume)
        spent, wall = before + time.process_time() - began, time.monotonic() - wall
        kept.write_text(json.dumps(spent))
        said = json.loads(user.communicate()[0].splitlines()[-1])
        serving.shutdown()
    if said["clicks"] < given.clicks:
        return said
    of.finish(config, live.log, epochs)
    now = measured(images_of(config.folder), base["stats"])
    metrics = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    foretold = [row.get("taste/foretold") for row in metrics][1:]
    return {"name": name, "label": given.label, "commit": commit(), "set": given.set, "seed": seed,
            "resumed": resume, "visible": visible(now["utility"], base["utility"]),
            "visible_even": visible(now["utility"], base["utility"], slice(0, None, 2)),
            "visible_odd": visible(now["utility"], base["utility"], slice(1, None, 2)),
            "strict": now["strict"] - base["strict"], "edge": now["edge"] / base["edge"],
            "diversity": now["diversity"] / base["diversity"], "ink": now["ink"] / base["ink"],
            "seconds_per_click": spent / max(said["clicks"], 1), "wall": wall, "epochs": epochs,
            "foretold": float(np.nanmean(np.array(foretold, dtype=float))), "kl": metrics[-1].get("kl")} | said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--clicks", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=0.0, help="of the user per click")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds of a session, after which the same command "
                        "goes on with it")
    parser.add_argument("--voter", choices=("taste", "random"), default="taste")
    parser.add_argument("--set", nargs="*", default=[], help="keys of the run, such as train.lr=5e-4")
    parser.add_argument("--label", default="default")
    parser.add_argument("--table", action="store_true", help="write docs/taste.md's table of the folder's rows")
    given = parser.parse_args()
    if given.table:
        write_table(given.folder)
        return
    base = base_of(given.folder)
    print(f"base: strict {base['strict']:.3f}, edge {base['edge']:.3f}; blurred with sigma .5: edge "
          f"{base['blurred'] / base['edge']:.3f} of it", flush=True)
    for seed in given.seeds:
        row = session(given.folder, f"{given.label}-{seed}", seed, given, base)
        if "visible" not in row:
            print(f"{row['clicks']} of {given.clicks} clicks: the same command goes on", flush=True)
            return
        with (given.folder / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print("ROW", json.dumps({key: round(value, 3) if isinstance(value, float) else value
                                 for key, value in row.items()}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["vote"]:
        vote(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]), json.loads(sys.argv[6]), sys.argv[7],
             float(sys.argv[8]))
    else:
        main()
