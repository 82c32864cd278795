"""Preference pairs for the starter, labelled by the reward `scene`: two files of pairs and their images.

    python scripts/build/make_starter_pairs.py --out runs/starter_pairs    # a few minutes on 2 CPU cores
    flowgrpo train configs/starter_dpo.yaml                            # aligns the starter to pairs.jsonl
    flowgrpo train configs/starter_rpo.yaml                            # to subjects.jsonl; neither run draws anything

pairs.jsonl: two images that the starter drew of one prompt, a right one and a wrong one; with --rendered also scenes
as their prompts say, against ones in which something is wrong, both as the starter's autoencoder shows them.
subjects.jsonl, as RPO wants it: of every image that the starter drew a scene as its prompt says, the subject's
image, against the drawn one, right or not. Prompts are those that alignment may train on. Writes the images to
--out/pairs and --out/subjects. The seed is fixed. Says what the drawing cost, in denoiser evaluations.
"""

import argparse
from pathlib import Path

import numpy as np
from train_starter_reward import GROUP, STEPS, Pairs, contrast, kept_groups, rendered_pairs

from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.starter import scenes

SEED = 100  # other prompts and noises than those of the starter's learned reward


def make(folder: Path, prompts: int, rendered: int) -> Path:
    """File of pairs: of so many prompts what the starter draws, and so many rendered pairs; subjects beside it."""
    pipe = load_pipeline("starter")
    pipe.set_progress_bar_config(disable=True)
    into, subjects, rng = Pairs(folder, "pairs"), Pairs(folder, "subjects"), np.random.default_rng(SEED + 2)
    for prompt, paths, right in kept_groups(into, pipe, prompts, SEED, held=False):
        contrast(into, prompt, paths, right)
        for path in paths:
            subjects.add(prompt, subjects.keep(scene_of(prompt, rng)), path, (1, 0))
    if rendered:
        rendered_pairs(into, rendered, SEED + 1, held=False, vae=pipe.vae)
    subjects.write()
    return into.write()


def scene_of(prompt: str, rng: np.random.Generator) -> np.ndarray:
    """Image uint8 [64, 64, 3] as the prompt says."""
    return (scenes.render(scenes.parse(prompt), rng) * 255).round().astype(np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/starter_pairs"))
    parser.add_argument("--prompts", type=int, default=300, help=f"prompts, of each of which it draws {GROUP} images")
    parser.add_argument("--rendered", type=int, default=0, help="rendered pairs beside those")
    args = parser.parse_args()
    path = make(args.out, args.prompts, args.rendered)
    for file in (path, path.with_name("subjects.jsonl")):
        print(f"{file}: {len(file.read_text().splitlines())} pairs")
    print(f"drawn with {args.prompts * GROUP * STEPS:,} denoiser evaluations")


if __name__ == "__main__":
    main()
