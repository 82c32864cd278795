"""Rewards that compare a sample with the base model's sample of the same prompt and initial noise.

Such a reward has the attribute `base = True`, on function or class, and takes one more argument by name:
`reward(images, prompts, metadata, base=...)`. `base` holds the base's samples in the form of the first argument ([B, 3,
H, W], [B, F, 3, H, W]). It is None where there are none: for scored files, on a reward server, for a method's previews
and inside `frames`.
"""

from __future__ import annotations

from collections.abc import Mapping

from flowgrpo.errors import UserError


def sees_base(reward: object) -> bool:
    """True if a reward, or one with its rule, compares with the base's samples."""
    return getattr(reward, "base", False) is True


def require_base(rewards: Mapping[str, object], modality: str) -> None:
    """Raise UserError for the first reward that compares with the base's samples in a text run.

    Texts have no initial noise that two models could share.
    """
    for name, reward in rewards.items():
        if modality == "text" and sees_base(reward):
            raise UserError(f"reward {name!r} compares with the base's picture from the same noise (base = True), and "
                            "this model writes texts: take `base` away")
