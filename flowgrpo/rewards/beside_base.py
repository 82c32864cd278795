"""Rewards that compare a sample with what the base model makes of the same prompt and the same initial noise.

Such a reward says so by an attribute, `base = True`, of function or class. It is called with one more argument, by its
name: `reward(images, prompts, metadata, base=...)`. `base` holds the base's samples, in the form of the reward's own
([B, 3, H, W], [B, F, 3, H, W]), or is None where nobody has drawn them: where files are scored, on a reward server, for
a method's previews and inside `frames`.
"""

from __future__ import annotations

from typing import Any

from flowgrpo.errors import UserError


def sees_base(reward: Any) -> bool:
    """Whether a reward, or one with its rule, compares with the base's samples."""
    return getattr(reward, "base", False) is True


def require_base(rewards: dict[str, Any], modality: str) -> None:
    """UserError for the first reward that compares with the base's samples where these are texts: they have no initial
    noise that two models could share."""
    for name, reward in rewards.items():
        if modality == "text" and sees_base(reward):
            raise UserError(f"reward {name!r} compares with the base's picture from the same noise (base = True), and "
                            "this model writes texts: take `base` away")
