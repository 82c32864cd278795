"""A simulated user of the page of `flowgrpo taste`: does the model take on a taste that no reward of the run knows?

    python scripts/measure/taste_voter.py FOLDER --seeds 0 1 2 --voter scripts/measure/tastes.py:blue
    python scripts/measure/taste_voter.py FOLDER --seeds 0 1 2 --voter random
    python scripts/measure/taste_voter.py FOLDER --voter mine.py:function           of an image and its prompt
    python scripts/measure/taste_voter.py FOLDER --table                            the table of docs/taste.md

The function takes an image [H, W, 3] in [0, 1] and its prompt, and returns a number. The user is another process, which
reads the page's state and its images over HTTP as a browser does, and chooses the best; a share of the votes (--flips)
is for another image. Voters without a taste: `random`, `first` (always the first place), `none` (never an image).

Measured are 240 held-out prompts with two noises each. *won* is how often the tuned model's image is better than the
base's from another noise, *paired* than the base's from the same noise; images less than TIE deviations of the base
apart count one half. Beside them right images, edges and diversity, and what the page itself said.
"""

import argparse
import io
import json
import runpy
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

TIE = 0.25
MODEL, SAMPLES = "starter_consistency", 2
ROOT = Path(__file__).parents[2]
PAGE, KEPT = ROOT / "docs" / "taste.md", ROOT / "docs" / "data" / "taste_sessions.jsonl"
NO_TASTE = ("random", "first", "none")
HEAD = """| taste | commit | seeds | won | mean | paired | right images | edges | variety | page | s per click |
|---|---|---|---|---:|---|---|---|---|---|---|
"""


# --- the taste -------------------------------------------------------------------------------------------------------

def taste(voter: str) -> Any:
    """Return the function FILE.py:NAME; of a voter without a taste one that sees no difference."""
    if voter in NO_TASTE:
        return lambda image, prompt: 0.0
    file, name = voter.rsplit(":", 1)
    return runpy.run_path(file)[name]


def utility(images: torch.Tensor, prompts: list[str], voter: str) -> np.ndarray:
    """Return the worth of each image [B, 3, H, W] to a voter."""
    function = taste(voter)
    pixels = images.permute(0, 2, 3, 1).double().numpy()
    return np.array([float(function(image, prompt)) for image, prompt in zip(pixels, prompts)])


# --- the user --------------------------------------------------------------------------------------------------------

def vote(address: str, clicks: int, seconds: float, seed: int, voter: str, flips: float, limit: float) -> None:
    """Vote until `clicks` questions have an answer or `limit` seconds are over, finish the session, and print how long
    was waited."""
    torch.set_num_threads(1)
    waits: list[float] = []
    checks = 0

    def ask(path: str, content: Any = None) -> Any:
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(address + path, body, {"Content-Type": "application/json"})
        return json.loads(urllib.request.urlopen(request, timeout=60).read())

    state, end = ask("state"), time.monotonic() + limit
    while state["clicks"] < clicks and state["live"] and time.monotonic() < end:
        began = time.monotonic()
        while state["question"] is None and state["live"]:
            time.sleep(0.02)
            state = ask("state")
        waits.append(time.monotonic() - began)
        if not state["live"]:
            break
        began, question = time.monotonic(), state["question"]
        shown = [*range(question["count"])]
        files = [urllib.request.urlopen(f"{address}{question['name']}/{place}").read() for place in shown]
        pixels = [np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in files]
        images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 255
        rng = np.random.default_rng([1000 + seed, *map(ord, question["name"])])  # the same after a resume
        if voter in NO_TASTE:
            choice: Any = {"random": int(rng.integers(len(shown))), "first": 0, "none": "tie"}[voter]
        else:
            order = np.argsort(-utility(images, [state["title"]] * len(shown), voter))
            choice = int(order[rng.integers(1, len(shown))] if rng.random() < flips else order[0])
        time.sleep(max(0.0, seconds - (time.monotonic() - began)))
        checks += ".c" in question["name"]
        state = ask("vote", {"question": question["name"], "shown": shown, "choice": choice})
    ask("finish", {})
    print(json.dumps({"clicks": state["clicks"], "checks": checks,
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


def measured(images: torch.Tensor, voter: str) -> dict[str, Any]:
    """Return the measures of images."""
    from flowgrpo.rewards.starter.scene import scene

    prompts = [text for text in held_out() for _ in range(SAMPLES)]
    return {"utility": utility(images, prompts, voter).tolist(), "strict": float(np.mean(scene(images, prompts))),
            "edge": edge_width(images), "diversity": diversity(images)}


def base_of(folder: Path, voter: str) -> dict[str, Any]:
    """Return the base's measures; its images are kept in a file."""
    file = folder / "base.pt"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(images_of(None), file)
    return measured(torch.load(file), voter)


def won(now: list[float], base: list[float], paired: bool = False) -> float:
    """Return the share of images that are better than the base's from the other noise of their prompt (paired: from the
    same one); those that are less than TIE deviations of the base apart count one half."""
    ours, theirs = (np.array(values).reshape(-1, SAMPLES) for values in (now, base))
    apart = (ours - (theirs if paired else theirs[:, ::-1])) / max(theirs.std(), 1e-9)
    return float(np.where(np.abs(apart) < TIE, 0.5, apart > 0).mean())


# --- the table -------------------------------------------------------------------------------------------------------

def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of sessions, a row per label: every seed's value, or the range of all seeds."""
    lines = []
    for label in sorted({row["label"] for row in rows}):
        of = sorted((row for row in rows if row["label"] == label), key=lambda row: row["seed"])
        right, edge, apart, spent = (_range([row[key] for row in of], form) for key, form in (
            ("strict", "+.3f"), ("edge", ".2f"), ("diversity", ".2f"), ("seconds_per_click", ".2f")))
        commits = ", ".join(sorted({row["commit"] for row in of}))
        seeds = ", ".join(str(row["seed"]) for row in of)
        each, paired = (", ".join(f"{row[key]:.2f}" for row in of) for key in ("won", "paired"))
        said = ", ".join(row["against"]["share"] if row["against"] else "-" for row in of)
        mean = np.mean([row["won"] for row in of])
        lines.append(f"| {label} | {commits} | {seeds} | {each} | {mean:.2f} | {paired} | {right} | {edge} | {apart} | "
                     f"{said} | {spent} |")
    return HEAD + "\n".join(lines)


def _range(values: list[float], form: str) -> str:
    low, high = (format(value, form) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def write_table(folder: Path) -> None:
    """Write the last row of each label and seed of a folder to docs/data, and the table of all to docs/taste.md."""
    rows = {(row["label"], row["seed"]): row for file in (KEPT, folder / "rows.jsonl") if file.is_file()
            for row in map(json.loads, file.read_text().splitlines())}
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
    from flowgrpo.storage.json_files import read_lines
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
        told = map(str, (given.clicks, given.seconds, seed, given.voter, given.flips, given.limit))
        user = subprocess.Popen([sys.executable, __file__, "vote", address(serving), *told], stdout=subprocess.PIPE,
                                text=True)
        began, wall = time.process_time(), time.monotonic()
        epochs = of.train(config, Taste(live, config.folder), resume)
        spent, wall = before + time.process_time() - began, time.monotonic() - wall
        kept.write_text(json.dumps(spent))
        said = json.loads(user.communicate()[0].splitlines()[-1]) | {"against": live.against()}
        serving.shutdown()
    if said["clicks"] < given.clicks:
        return said
    summary = of.finish(config, live.log, epochs)
    for sentence in of.sentences(config.folder, live.log, said["against"], summary):
        print(sentence, flush=True)
    now = measured(images_of(config.folder), given.voter) if summary else base
    metrics = read_lines(config.folder / "metrics.jsonl")
    began = next((row["taste/votes"] for row in metrics if row["trained_updates"]), None)
    last = metrics[-1] if metrics else {}  # of a session that ended in its first batch
    return {"name": name, "label": given.label, "commit": commit(), "set": given.set, "seed": seed,
            "flips": given.flips, "resumed": resume, "won": won(now["utility"], base["utility"]) if summary else 0.5,
            "paired": won(now["utility"], base["utility"], paired=True) if summary else 0.5,
            "strict": now["strict"] - base["strict"], "edge": now["edge"] / base["edge"],
            "diversity": now["diversity"] / base["diversity"], "seconds_per_click": spent / max(said["clicks"], 1),
            "wall": wall, "epochs": epochs, "trains_from": began, "evidence": last.get("taste/evidence"),
            "kl": last.get("kl")} | said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--clicks", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=0.0, help="of the user per click")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds of a session, after which the same command "
                        "goes on with it")
    parser.add_argument("--voter", default=str(Path(__file__).parent / "tastes.py:fits"),
                        help="FILE.py:function of an image and its prompt, random, first or none")
    parser.add_argument("--flips", type=float, default=0.25, help="share of the votes for another image")
    parser.add_argument("--set", nargs="*", default=[], help="keys of the run, such as train.lr=5e-4")
    parser.add_argument("--label", help="of the rows; by default the voter's name")
    parser.add_argument("--table", action="store_true", help="write docs/taste.md's table of the folder's rows")
    given = parser.parse_args()
    if given.table:
        write_table(given.folder)
        return
    given.label = given.label or given.voter.rpartition(":")[2]
    base = base_of(given.folder, given.voter)
    print(f"base: strict {base['strict']:.3f}, edge {base['edge']:.3f}", flush=True)
    for seed in given.seeds:
        row = session(given.folder, f"{given.label}-{seed}", seed, given, base)
        if "won" not in row:
            print(f"{row['clicks']} of {given.clicks} clicks: the same command goes on", flush=True)
            return
        with (given.folder / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print("ROW", json.dumps({key: round(value, 3) if isinstance(value, float) else value
                                 for key, value in row.items()}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["vote"]:
        vote(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]), sys.argv[6], float(sys.argv[7]),
             float(sys.argv[8]))
    else:
        main()
