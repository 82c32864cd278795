"""Share of sessions of `flowgrpo taste` without a taste that would train the model: at most 5 % by Ville's bound.

    python scripts/measure/taste_without.py FOLDER ...        # of sessions, whose features are read
    python scripts/measure/taste_without.py FOLDER ... --sessions 400 --clicks 200 --seed 0

A session is one of the folders, with its batches in a random order and its images in random places, as the page shows
them. The clicks choose at random, always the first place, or the places in turn. The head learns as in a session.
"""

import argparse
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from flowgrpo.contrib.learned_rewards.denoiser_head import EVIDENCE
from flowgrpo.contrib.taste.head import Belief, observe
from flowgrpo.contrib.taste.loop import FEATURES, read_features
from flowgrpo.contrib.taste.votes import Vote

WAYS = ("random", "first", "in turn")


def evidence(batches: list[torch.Tensor], way: str, clicks: int, rng: np.random.Generator) -> float:
    """The largest capital of a session. batches: features [Q, n, F] of each."""
    order = rng.permutation(len(batches))
    first = batches[order[0]]
    belief, asked = Belief(first, [first.shape[-1] - EVIDENCE, EVIDENCE]), 0
    for batch in order:
        votes = []
        for features in batches[batch]:
            shown = tuple(rng.permutation(len(features)).tolist())
            place = {"random": int(rng.integers(len(shown))), "first": 0, "in turn": asked % len(shown)}[way]
            votes.append(observe(features, Vote(shown, shown[place])))
            asked += 1
        belief.learn([vote for vote in votes if vote is not None][:clicks - belief.votes])
        if belief.convinced or belief.votes >= clicks:
            break
    return belief.evidence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--sessions", type=int, default=400)
    parser.add_argument("--clicks", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    drawn = [[read_features(folder, batch) for batch in range(len([*(folder / FEATURES).iterdir()]))]
             for folder in given.folders]
    trained = Counter[str]()
    for number in range(given.sessions):
        way = WAYS[number % len(WAYS)]
        rng = np.random.default_rng([given.seed, number])
        found = evidence(drawn[rng.integers(len(drawn))], way, given.clicks, rng)
        trained[way] += found >= 20
        if found >= 20 or number % 20 == 19:
            print(f"{number + 1} sessions, {sum(trained.values())} would train", flush=True)
    print({way: f"{trained[way]} of {(given.sessions - place + 2) // 3}" for place, way in enumerate(WAYS)})


if __name__ == "__main__":
    main()
