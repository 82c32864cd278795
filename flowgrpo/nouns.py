"""Names of samples, by the modality of a model, and of counted things. Loads no torch."""

from collections.abc import Sequence

SAMPLE = {"image": "image", "video": "clip", "text": "completion"}


def inflect(count: int, noun: str) -> str:
    """Regular noun in the number that goes with a count."""
    return noun if count == 1 else f"{noun}s"


def quantity(count: int, noun: str) -> str:
    """Count with its regular noun: 1 prompt, 2 prompts."""
    return f"{count} {inflect(count, noun)}"


def join_words(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
