"""Show what the scene reward can tell apart: true captions, captions with one fact changed, damaged images.

    python scripts/build/show_scene_reward.py              # 2,000 scenes of all tasks, both splits; about half a minute
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy import ndimage
from starter_scenes import sample_prompt

from flowgrpo.rewards.starter.scene import scene_graded
from flowgrpo.starter.scenes import COLOURS, COUNTS, RELATIONS, SHAPES, SIZE, TASKS, Claim, Claims, render


@dataclass(frozen=True)
class Scene:
    """Image float32 [3, 64, 64], its prompt, what the prompt claims, and the same with the colours drawn."""

    image: np.ndarray
    prompt: str
    claims: Claims
    shown: Claims


def draw(count: int, seed: int) -> list[Scene]:
    """`count` scenes, going round the tasks and, within each, the two splits."""
    rng = np.random.default_rng(seed)
    scenes = []
    for i in range(count):
        prompt, claims = sample_prompt(rng, TASKS[i % len(TASKS)], held=i // len(TASKS) % 2 == 1)
        objects = tuple(replace(c, colour=c.colour or str(rng.choice(list(COLOURS)))) for c in claims.objects)
        shown = replace(claims, objects=objects)
        image = render(shown, rng).transpose(2, 0, 1).astype(np.float32)
        scenes.append(Scene(image, prompt, claims, shown))
    return scenes


# --- captions with exactly one fact changed; nothing where a scene has no such fact ----------------------------------

def _replaced(claims: Claims, i: int, **fact) -> Claims:
    objects = list(claims.objects)
    objects[i] = replace(objects[i], **fact)
    return replace(claims, objects=tuple(objects))


def _other(rng: np.random.Generator, options, *taken) -> str:
    return str(rng.choice([option for option in options if option not in taken]))


def other_shape(scene: Scene, i: int, rng: np.random.Generator) -> Claims:
    return _replaced(scene.claims, i, shape=_other(rng, SHAPES, scene.claims.objects[i].shape))


def other_colour(scene: Scene, i: int, rng: np.random.Generator) -> Claims:
    return _replaced(scene.claims, i, colour=_other(rng, COLOURS, scene.shown.objects[i].colour))


def other_count(scene: Scene, i: int, rng: np.random.Generator) -> Claims:
    counts = [n for n in (1, *COUNTS.values()) if n != scene.claims.objects[i].count]
    return _replaced(scene.claims, i, count=int(rng.choice(counts)))


def other_relation(scene: Scene, i: int, rng: np.random.Generator) -> Claims | None:
    relation = scene.claims.relation
    return replace(scene.claims, relation=_other(rng, RELATIONS, relation)) if relation else None


def dropped_object(scene: Scene, i: int, rng: np.random.Generator) -> Claims | None:
    return Claims((scene.claims.objects[i],)) if len(scene.claims.objects) == 2 else None


def added_object(scene: Scene, i: int, rng: np.random.Generator) -> Claims | None:
    first = scene.claims.objects[0]
    return Claims((first, Claim(_other(rng, SHAPES, first.shape)))) if len(scene.claims.objects) == 1 else None


CHANGES: dict[str, Callable[[Scene, int, np.random.Generator], Claims | None]] = {
    "another shape": other_shape, "another colour": other_colour, "another count": other_count,
    "another relation": other_relation, "object dropped": dropped_object, "object added": added_object}


def changed(scenes: list[Scene], change: str, seed: int) -> Iterator[tuple[np.ndarray, str]]:
    """Each scene's image with a caption in which `change` was made to one of its claims, where it can be made."""
    rng = np.random.default_rng(seed)
    for scene in scenes:
        claims = CHANGES[change](scene, int(rng.integers(len(scene.claims.objects))), rng)
        if claims:
            yield scene.image, claims.caption()


# --- damaged images ------------------------------------------------------------------------------------------------

def blurred(image: np.ndarray, sigma: float) -> np.ndarray:
    return ndimage.gaussian_filter(image, (0, sigma, sigma), mode="nearest")


def noisy(image: np.ndarray, sigma: float, rng: np.random.Generator) -> np.ndarray:
    return np.clip(image + rng.normal(0, sigma, image.shape), 0, 1).astype(np.float32)


def empty(image: np.ndarray) -> np.ndarray:
    """Ground alone."""
    return np.broadcast_to(image[:, :1, :1], image.shape)


def half_cut(image: np.ndarray) -> np.ndarray:
    """Image without its fullest half: objects are missing or cut through."""
    half = SIZE // 2
    halves = [(slice(None), *part) for part in (np.s_[:half, :], np.s_[half:, :], np.s_[:, :half], np.s_[:, half:])]
    ink = np.abs(image - image[:, :1, :1])
    fullest = max(halves, key=lambda part: ink[part].sum())
    cut = image.copy()
    cut[fullest] = image[:, :1, :1]
    return cut


DAMAGES: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    "noise 0.02, blur 0.5 px": lambda image, rng: noisy(blurred(image, 0.5), 0.02, rng),
    "blur 1 px": lambda image, rng: blurred(image, 1),
    "blur 2 px": lambda image, rng: blurred(image, 2),
    "blur 3 px": lambda image, rng: blurred(image, 3),
    "noise 0.3": lambda image, rng: noisy(image, 0.3, rng),
    "fullest half blanked": lambda image, rng: half_cut(image),
    "empty": lambda image, rng: empty(image),
}


# --- the table -------------------------------------------------------------------------------------------------------

def row(label: str, images, prompts) -> str:
    graded = np.array(scene_graded(np.stack(images), prompts))
    # `scene` is 1 exactly where `scene_graded` is, so that one reading serves both.
    return f"| {label} | {len(graded)} | {(graded == 1).mean():.3f} | {graded.mean():.3f} |"


def table(scenes: list[Scene], seed: int) -> Iterator[str]:
    images, prompts = [s.image for s in scenes], [s.prompt for s in scenes]
    rng = np.random.default_rng(seed)
    yield "| images and captions | number | strict | graded |\n|---|---|---|---|"
    yield row("true caption", images, prompts)
    for task in TASKS:
        part = [s for s in scenes if s.claims.task == task]
        yield row(f"true caption, {task}", [s.image for s in part], [s.prompt for s in part])
    for change in CHANGES:
        yield row(change, *zip(*changed(scenes, change, seed)))
    yield row("another scene's caption", images, prompts[1:] + prompts[:1])
    for damage, apply in DAMAGES.items():
        yield row(damage, [apply(image, rng) for image in images], prompts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for line in table(draw(args.scenes, args.seed), args.seed):
        print(line, flush=True)


if __name__ == "__main__":
    main()
