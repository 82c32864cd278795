"""Teach a network what the reward `scene` prefers, from pairs of images alone, and measure it on prompts never seen.

    python scripts/build/train_starter_reward.py --out runs/starter_reward  # pairs, training, accuracy; resumes

Three kinds of pairs, each labelled by `scene` (a tie where both are right or both wrong):

- rendered: a scene as its prompt says, against one with a fact changed, a stamp, noise, blur, or a part missing;
- decoded: the same after the starter's autoencoder, whose traces generated images bear;
- drawn: two images that the starter drew of one prompt.

Prompts of training are those that alignment may train on; those of the tests are the others. Writes --out/pairs, the
reward's folder --out/reward, and --out/accuracy.json. Seeds are fixed.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from show_scene_reward import CHANGES, Scene, blurred, empty, half_cut, noisy
from starter_scenes import is_reserved, sample_prompt
from torchvision.transforms.functional import to_tensor
from tqdm import tqdm

from flowgrpo.contrib.learned_rewards.preference import Preference
from flowgrpo.data.pairs import OVERALL, load_pairs, split
from flowgrpo.rewards.starter.scene import scene
from flowgrpo.starter import CALL, EVAL_GUIDANCE, scenes
from flowgrpo.tools.learned_rewards.training import Settings, accuracy, train

CHANGED, STAMPED, TIES = 0.75, 0.10, 0.15  # shares of rendered pairs; the rest of the wrong images is damaged
MOST = 4  # objects that fit into an image
TOGETHER, GROUP, STEPS = 128, 6, 6  # images at once; images per prompt, and steps, of those that the starter draws


class Pairs:
    """File of pairs and the PNG files beside it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.lines, self.count = folder, name, [], 0
        (folder / name).mkdir(parents=True, exist_ok=True)

    def keep(self, image: np.ndarray) -> str:
        """Write an image uint8 [64, 64, 3] -> its path, relative to the folder."""
        path = f"{self.name}/{self.count:06d}.png"
        self.count += 1
        Image.fromarray(image).save(self.folder / path)
        return path

    def add(self, prompt: str, first: str, second: str, right: tuple[float, float]) -> None:
        """Add a pair of kept images, of which the right one is chosen."""
        chosen, rejected = (first, second) if right[0] >= right[1] else (second, first)
        tie = {"aspects": {OVERALL: "tie"}} if right[0] == right[1] else {}
        self.lines.append(json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected, **tie}))

    def write(self) -> Path:
        path = self.folder / f"{self.name}.jsonl"
        path.write_text("\n".join(self.lines) + "\n")
        return path


def eight_bit(images: np.ndarray) -> np.ndarray:
    """[..., 3, 64, 64] in [0, 1] -> uint8 [..., 64, 64, 3]."""
    return np.moveaxis((np.clip(images, 0, 1) * 255).round().astype(np.uint8), -3, -1)


def verdicts(images: np.ndarray, prompts: list[str]) -> list[float]:
    """Return the verdict of `scene` on images uint8 [B, 64, 64, 3]."""
    return scene(torch.from_numpy(images).permute(0, 3, 1, 2) / 255, prompts)


def scene_pair(rng: np.random.Generator, task: str, held: bool) -> tuple[str, np.ndarray, np.ndarray]:
    """Prompt, an image [3, 64, 64] of it, and another in which something is wrong."""
    prompt, claims = sample_prompt(rng, task, held, is_reserved)
    shown = replace(claims, objects=tuple(replace(claim, colour=claim.colour or str(rng.choice(list(scenes.COLOURS))))
                                          for claim in claims.objects))
    first = _rendered(shown, rng)
    kind = rng.random()
    if kind < CHANGED:
        return prompt, first, _rendered(_changed(Scene(first, prompt, shown, shown), rng), rng)
    second = _rendered(shown, rng, stamped=kind < CHANGED + STAMPED)
    return prompt, first, second if kind < CHANGED + STAMPED else _damaged(second, rng)


def _rendered(claims: scenes.Claims, rng: np.random.Generator, stamped: bool = False) -> np.ndarray:
    return scenes.render(claims, rng, stamped).transpose(2, 0, 1).astype(np.float32)


def _changed(drawn: Scene, rng: np.random.Generator) -> scenes.Claims:
    """Claims with one fact changed, any of those that the scene has."""
    names = list(CHANGES)
    while True:
        change = CHANGES[names[int(rng.integers(len(names)))]]
        claims = change(drawn, int(rng.integers(len(drawn.claims.objects))), rng)
        if claims and sum(claim.count for claim in claims.objects) <= MOST:
            return claims


def _damaged(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    kind = int(rng.integers(4))
    if kind == 0:
        return noisy(image, float(rng.uniform(0.08, 0.3)), rng)
    return blurred(image, float(rng.uniform(1.2, 3))) if kind == 1 else (half_cut, empty)[kind - 2](image)


@torch.no_grad()
def decoded(images: np.ndarray, vae, generator: torch.Generator) -> np.ndarray:
    """Images [B, 3, 64, 64] through the autoencoder, with up to 0.3 of noise on the latent of each."""
    latents = vae.encode(torch.from_numpy(images) * 2 - 1).latents
    level = 0.3 * torch.rand(len(latents), 1, 1, 1, generator=generator)
    noise = torch.randn(latents.shape, generator=generator)
    return (vae.decode(latents + level * noise).sample / 2 + 0.5).numpy()


def rendered(seed: int, held: bool, vae=None) -> Iterator[tuple[list[str], list[np.ndarray]]]:
    """Without end: TOGETHER prompts, their images, and others of them in which something is wrong, uint8."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    while True:
        drawn = [scene_pair(rng, scenes.TASKS[i % len(scenes.TASKS)], held) for i in range(TOGETHER)]
        both = [np.stack([pair[side] for pair in drawn]) for side in (1, 2)]
        yield ([prompt for prompt, _, _ in drawn],
               [eight_bit(side if vae is None else decoded(side, vae, generator)) for side in both])


def rendered_pairs(into: Pairs, count: int, seed: int, held: bool, vae=None) -> None:
    """`count` pairs of rendered scenes, with an autoencoder after it; of ties no more than a share of TIES."""
    batches, ties, made = rendered(seed, held, vae), 0, 0
    with tqdm(total=count, desc=into.name, mininterval=2) as bar:
        while made < count:
            prompts, both = next(batches)
            for prompt, *images, one, two in zip(prompts, *both, *(verdicts(side, prompts) for side in both)):
                tie = one == two
                if made < count and (not tie or ties < TIES * count):
                    into.add(prompt, *map(into.keep, images), (one, two))
                    made, ties = made + 1, ties + tie
                    bar.update()


def drawn(pipe, prompts: int, seed: int, held: bool, told: str) -> Iterator[tuple[list[str], np.ndarray]]:
    """Draw GROUP images, uint8, of each prompt, some prompts at a time, each as often as its images."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    texts = [sample_prompt(rng, scenes.TASKS[i % len(scenes.TASKS)], held, is_reserved)[0]
             for i in range(prompts)]
    together = TOGETHER // GROUP
    for at in tqdm(range(0, prompts, together), desc=f"{told}, drawn", mininterval=2):
        each = [text for text in texts[at:at + together] for _ in range(GROUP)]
        made = pipe(each, num_inference_steps=STEPS, guidance_scale=EVAL_GUIDANCE, output_type="np",
                    generator=generator, **CALL).images
        yield each, (made * 255).round().astype(np.uint8)


def kept_groups(into: Pairs, pipe, prompts: int, seed: int, held: bool) -> Iterator[tuple[str, list[str], list[float]]]:
    """Yield all drawn images: (a prompt, its images' paths, what `scene` says of them)."""
    for each, images in drawn(pipe, prompts, seed, held, into.name):
        yield from _groups(each, [into.keep(image) for image in images], verdicts(images, each))


def drawn_pairs(into: Pairs, pipe, prompts: int, seed: int, held: bool) -> None:
    """Draw GROUP images of each prompt by the starter; every right one beside every wrong one."""
    for prompt, paths, right in kept_groups(into, pipe, prompts, seed, held):
        contrast(into, prompt, paths, right)


def contrast(into: Pairs, prompt: str, paths: list[str], right: list[float]) -> None:
    """Add a pair of every right image of a prompt and every wrong one."""
    for i, j in ((i, j) for i in range(len(paths)) for j in range(len(paths)) if right[i] > right[j]):
        into.add(prompt, paths[i], paths[j], (right[i], right[j]))


def _groups(*columns: list) -> Iterator[tuple[str, list, list]]:
    for at in range(0, len(columns[0]), GROUP):
        yield columns[0][at], columns[1][at:at + GROUP], columns[2][at:at + GROUP]


def build(folder: Path, args: argparse.Namespace) -> None:
    """All files of pairs: train, and one per kind to test with."""
    from flowgrpo.policies.pipelines.load import load_pipeline

    pipe = load_pipeline("starter")
    pipe.set_progress_bar_config(disable=True)
    sets = {"train": (False, args.pairs // 2, args.pairs // 2, args.drawn),
            "test_rendered": (True, args.test, 0, 0), "test_decoded": (True, 0, args.test, 0),
            "test_drawn": (True, 0, 0, args.test_drawn)}
    for seed, (name, (held, rendered, through, drawn)) in enumerate(sets.items()):
        if (folder / f"{name}.jsonl").exists():
            continue
        into = Pairs(folder, name)
        rendered_pairs(into, rendered, 10 * seed, held)
        rendered_pairs(into, through, 10 * seed + 1, held, pipe.vae)
        drawn_pairs(into, pipe, drawn, 10 * seed + 2, held)
        print(f"{into.write()}: {len(into.lines)} pairs", flush=True)


def tested(reward: Path, file: Path) -> dict:
    """Accuracy of a reward on a file of pairs, with its interval over prompts."""
    pairs, learned = load_pairs(file), Preference(str(reward))
    scores = [learned.scores(torch.stack([to_tensor(Image.open(getattr(pair, side))) for pair in pairs]),
                             [pair.prompt for pair in pairs]) for side in ("chosen", "rejected")]
    marks = torch.tensor([[pair.verdicts[OVERALL]] for pair in pairs])
    found = accuracy((scores[0] - scores[1])[:, 0], marks[:, 0], [pair.prompt for pair in pairs])
    return {"preferences": int((marks != 0.5).sum()), **found.as_json()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/starter_reward"))
    parser.add_argument("--pairs", type=int, default=25_000, help="rendered and decoded ones, half each, to train with")
    parser.add_argument("--drawn", type=int, default=300, help="prompts of which the starter draws pairs")
    parser.add_argument("--test", type=int, default=400, help="rendered and decoded pairs each, to test with")
    parser.add_argument("--test-drawn", type=int, default=40, help="prompts of the drawn pairs to test with")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--fp32", action="store_true", help="train in fp32; without: bf16")
    args = parser.parse_args()
    pairs, start = args.out / "pairs", time.time()
    if not (pairs / "test_drawn.jsonl").exists():  # the last that is written
        build(pairs, args)
        print(f"pairs made after {time.time() - start:.0f} s", flush=True)
    if not (args.out / "reward" / "reward.json").exists():
        train(*split(load_pairs(pairs / "train.jsonl"), 0.1), args.out / "reward", Settings(
            size=scenes.SIZE, epochs=args.epochs, batch=args.batch, lr=args.lr, bf16=not args.fp32))
        print(f"trained after {time.time() - start:.0f} s", flush=True)
    found = {name: tested(args.out / "reward", pairs / f"test_{name}.jsonl")
             for name in ("rendered", "decoded", "drawn")}
    for name, row in found.items():
        print(f"{name}: {row['mean']:.3f} of pairs ranked right ({row['low']:.3f} to {row['high']:.3f}), "
              f"{row['preferences']} preferences of {row['prompts']} prompts")
    (args.out / "accuracy.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
