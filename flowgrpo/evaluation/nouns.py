"""Names of samples, by the modality of a model."""

from __future__ import annotations

SAMPLE = {"image": "picture", "video": "clip", "text": "completion"}
