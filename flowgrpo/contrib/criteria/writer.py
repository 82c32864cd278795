"""Language models behind a judge's endpoint that write what a reward reads of a prompt, once per prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from flowgrpo.errors import UserError
from flowgrpo.escaped import one_line
from flowgrpo.rewards.vlm_judge.client import Answer, Endpoint, user
from flowgrpo.storage import atomic

T = TypeVar("T")


class CachedWriter(Generic[T]):
    """Language model that writes entries for prompts, once per prompt; a subclass reads them.

    endpoint: arguments of `client.Endpoint`.
    file: a .jsonl that caches the entries, None to cache them in memory only.
    template: the instruction, with {prompt}.
    noun: what the entries are, and their key in the file.
    Raises UserError for a template without {prompt}, and for a broken file.
    """

    noun: str

    def __init__(self, endpoint: dict[str, Any], file: str | None, template: str) -> None:
        if "{prompt}" not in template:
            raise UserError("a writer's template names no {prompt}, expected it where the prompt belongs")
        self.endpoint, self.template = Endpoint(**endpoint), template
        self.file = Path(file).expanduser() if file else None
        self.known = self._read(self.file) if self.file and self.file.is_file() else {}

    def read(self, entries: object) -> list[T]:
        """Return the entries of the file. Raises UserError for others."""
        raise NotImplementedError

    def written_in(self, answer: Answer) -> list[T]:
        """Return the valid entries in a model's answer; none if it declined or was cut off."""
        raise NotImplementedError

    def plain(self, entry: T) -> Any:
        """Return an entry for the file."""
        raise NotImplementedError

    def __call__(self, prompts: Sequence[str]) -> dict[str, list[T]]:
        """Return the entries of every prompt; none for one without a valid entry from the model."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self.known]
        answers = self.endpoint.ask(
            lambda i: user([{"type": "text", "text": self.template.replace("{prompt}", new[i])}]), len(new))
        written = {prompt: entries for prompt, answer in zip(new, answers) if (entries := self.written_in(answer))}
        self.known |= written
        if written and self.file:
            atomic.make_folder(self.file.parent)
            atomic.append_line(self.file, "\n".join(
                json.dumps({"prompt": prompt, self.noun: [self.plain(entry) for entry in entries]})
                for prompt, entries in written.items()))
        return {prompt: self.known.get(prompt, []) for prompt in prompts}

    def _read(self, file: Path) -> dict[str, list[T]]:
        known = {}
        for count, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            try:
                entry = json.loads(line)
                known[entry["prompt"]] = self.read(entry[self.noun])
            except (ValueError, KeyError, TypeError, UserError) as error:
                raise UserError(f"{self.noun} {file}, line {count}: {one_line(error)}: remove the line, and they "
                                "are written anew") from None
        return known
