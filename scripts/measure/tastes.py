"""Tastes of the simulated user of taste_voter.py: each takes an image [H, W, 3] in [0, 1] and its prompt, and returns a
number, larger for a better image."""

import numpy as np


def ink(image: np.ndarray) -> np.ndarray:
    """Return the mask [H, W] of what is no ground."""
    ground = np.median(image.reshape(-1, 3), 0)
    return np.asarray(np.linalg.norm(image - ground, axis=2) > 0.3)


def fits(image: np.ndarray, prompt: str) -> float:
    """The image shows what its prompt asks for: the starter's own reader of images."""
    import torch

    from flowgrpo.rewards.starter.scene import scene_graded

    return float(scene_graded(torch.from_numpy(image).permute(2, 0, 1)[None].float(), [prompt])[0])


def large(image: np.ndarray, prompt: str) -> float:
    return float(ink(image).mean())


def blue(image: np.ndarray, prompt: str) -> float:
    inked = image[ink(image)]
    return float((inked[:, 2] - inked[:, :2].mean(1)).mean()) if len(inked) else -1.0


def left(image: np.ndarray, prompt: str) -> float:
    columns = np.nonzero(ink(image))[1]
    return -float(columns.mean()) / image.shape[1] if len(columns) else -1.0


def one_colour(image: np.ndarray, prompt: str) -> float:
    inked = image[ink(image)]
    return -float(inked.std(0).mean()) if len(inked) else -1.0
