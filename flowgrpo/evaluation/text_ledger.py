"""What an evaluation of a language model has done so far: the ledger of pictures, with a line for each text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flowgrpo.evaluation.ledger import Ledger, Place, append, entries
from flowgrpo.types import Completion


class TextLedger(Ledger):
    """The folder of an evaluation of texts, as one process writes it: `texts-RANK.jsonl` beside its scores."""

    def __init__(self, folder: Path, rank: int = 0):
        super().__init__(folder, rank)
        self.written = folder / f"texts-{rank}.jsonl"
        self._texts: dict[Place, Completion] | None = None

    def has(self, place: Place) -> bool:
        """Whether the text is there, of this process or of an earlier call."""
        if self._texts is None:
            self._texts = self._read_texts()
        return place in self._texts

    def told(self, place: Place) -> str:
        """The text itself."""
        return str(self.load(place))

    def save(self, place: Place, text: Completion) -> None:
        """Add a line."""
        append(self.written, {"place": place, "text": str(text), "tokens": text.tokens})
        if self._texts is not None:
            self._texts[place] = text

    def load(self, place: Place) -> Completion:
        """The text, of any process."""
        if not self.has(place):
            self._texts = self._read_texts()  # others have written since
        return self._texts[place]

    def batch(self, places: Sequence[Place]) -> list[Completion]:
        """Several texts, as rewards take them."""
        return [self.load(place) for place in places]

    def _read_texts(self) -> dict[Place, Completion]:
        return {Place(*entry["place"]): Completion(entry["text"], entry["tokens"])
                for entry in entries(self.folder, "texts-*.jsonl")}
