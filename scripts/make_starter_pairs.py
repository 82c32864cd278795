"""Preference pairs for the starter, labelled by the reward `scene`: a file of pairs and its pictures.

    python scripts/make_starter_pairs.py --out runs/starter_pairs    # a few minutes on 2 CPU cores
    flowgrpo train configs/starter_dpo.yaml                            # aligns the starter to them, and draws nothing

Drawn pairs are two pictures that the starter drew of one prompt, a right one and a wrong one; rendered pairs a scene as
its prompt says, against one in which something is wrong, both as the starter's autoencoder shows them. Prompts are
those that alignment may train on. Writes --out/pairs.jsonl and --out/pairs/*.png. The seed is fixed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from train_starter_reward import Pairs, drawn_pairs, rendered_pairs

from flowgrpo.policies.load import load_pipeline

SEED = 100  # other prompts and noises than those of the starter's learned reward


def make(folder: Path, prompts: int, rendered: int) -> Path:
    """The file of pairs: of so many prompts what the starter draws, and so many rendered pairs."""
    pipe = load_pipeline("starter")
    pipe.set_progress_bar_config(disable=True)
    into = Pairs(folder, "pairs")
    drawn_pairs(into, pipe, prompts, SEED, held=False)
    if rendered:
        rendered_pairs(into, rendered, SEED + 1, held=False, vae=pipe.vae)
    return into.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/starter_pairs"))
    parser.add_argument("--prompts", type=int, default=200, help="prompts of which the starter draws pairs")
    parser.add_argument("--rendered", type=int, default=0, help="rendered pairs beside them")
    args = parser.parse_args()
    path = make(args.out, args.prompts, args.rendered)
    print(f"{path}: {len(path.read_text().splitlines())} pairs")


if __name__ == "__main__":
    main()
