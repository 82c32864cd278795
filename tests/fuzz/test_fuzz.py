"""Hostile inputs: corpus and a few examples of each target; `make fuzz` runs many."""

import signal

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz import CORPUS
from tests.fuzz.battery import SECONDS, Hang, place
from tests.fuzz.targets import TARGETS, prepare, refused


@pytest.fixture
def late():
    """Turn a hang into an error."""
    def stop(*_):
        raise Hang(f"longer than {SECONDS} s")
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", TARGETS)
def test_a_few_examples_return_or_are_refused_in_one_line(name, tmp_path_factory, late):
    target = TARGETS[name]
    @settings(
        max_examples=6,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # a failure is shown as it was found: shrinking it would end as a hang
        suppress_health_check=list(HealthCheck))
    @given(target.strategy)
    def once(case):
        folder = tmp_path_factory.mktemp("case")
        prepare(folder)
        signal.alarm(SECONDS)
        assert refused(target, case, folder) in (True, False)
    once()


FILES = {
    "recipes": "recipes/*", "templates": "templates/*", "prompts txt": "prompts/*.txt", "prompts csv": "prompts/*.csv",
    "prompts jsonl": "prompts/*.jsonl", "prompts parquet": "prompts/*.parquet", "pairs": "pairs/*",
    "pictures": "pictures/*", "videos": "videos/*", "pictures to score": "pictures/*"}


@pytest.mark.parametrize("name", FILES)
def test_whole_files_of_the_corpus_are_read(name, tmp_path_factory, late):
    for file in sorted(CORPUS.glob(FILES[name])):
        folder, content = tmp_path_factory.mktemp("case"), file.read_bytes()
        prepare(folder)
        case = (
            content
            if name in ("recipes", "templates", "pairs")
            else (f"p{file.suffix}" if name.startswith("prompts") else file.suffix[1:], content))
        refusal = refused(TARGETS[name], case, folder)
        odd = name in ("recipes", "templates", "pairs") or file.stem == "clip"  # an image of several frames
        assert not refusal or odd, file


def test_a_failure_is_named_by_its_kind_and_line():
    from flowgrpo.data.sets import split
    with pytest.raises(Exception) as caught:
        split(None, 0.5, 0)
    assert place(caught.value).startswith(f"{type(caught.value).__name__} at sets.py:")


def test_a_folder_of_a_case_has_what_cases_name(tmp_path):
    prepare(tmp_path)
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "a.png").is_file()
