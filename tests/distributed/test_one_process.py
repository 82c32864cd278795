"""What is exact in one process alone is refused in two, in one line, before anything is loaded."""

import json
from pathlib import Path

import pytest

from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.training.checks import check
from tests.helpers import tiny, tiny_text
from tests.helpers.processes import together

REPLAY = {"parts": {"replay": {"type": "GroupReplay"}}}
# Options of a run, whether it is of texts, and what its message says.
CASES = {
    "ahead": (dict(train__staleness=1), False, None),
    "ahead, a row in two": (dict(train__staleness=1, memory__context_parallel=2), False, "train.staleness is 1, which "
                            "does not go with memory.context_parallel, whose first process scores: leave one"),
    "ahead, texts": (dict(train__staleness=2), True, None),
    "partial": (dict(text__over_provision=0.5), True,
                "text.over_provision is 0.5, which does not go with 2 processes: leave one of them out"),
    "replay": (REPLAY, False, "parts.replay is GroupReplay, which does not go with 2 processes, of which"),
    "replay, texts": (REPLAY, True, "parts.replay is GroupReplay, which does not go with 2 processes, of which"),
    "neither": ({}, False, None), "neither, texts": ({}, True, None)}


def one_of_two(folder: Path) -> None:
    """Check every case; each process leaves the messages."""
    said = {}
    for case, (options, of_texts, _) in CASES.items():
        made = tiny_text if of_texts else tiny
        function = tiny_text.short if of_texts else tiny.red
        settings = made.config(folder / "runs", model="tiny", reward="given", **options)
        try:
            checked = check(settings, pipe=tiny_text.model() if of_texts else tiny.sd3(), functions={"given": function},
                            prompts=[Prompt(text) for text in made.PROMPTS])
            said[case] = None
        except UserError as error:
            said[case] = str(error)
    rank = checked.accelerator.process_index
    (folder / f"{rank}.json").write_text(json.dumps(said))


@pytest.fixture(scope="module")
def messages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    together(one_of_two, 2, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_a_run_of_two_processes_is_refused_in_one_line(messages, case):
    *_, told = CASES[case]
    for said in messages:
        assert said[case] == told if told is None else said[case].startswith(told) and "\n" not in said[case]
