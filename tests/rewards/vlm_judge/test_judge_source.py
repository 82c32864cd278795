"""Judges that see the source of an edit beside its output."""

import json

import pytest
import torch
from PIL import Image

from flowgrpo.contrib.criteria import JudgeRubric
from flowgrpo.contrib.edits import EditJudge
from flowgrpo.rewards.vlm_judge.judge import Judge, JudgePairs
from tests.helpers.chat_endpoint import ONE, QUICK, endpoint, opened, parts, said, shades
from tests.helpers.refusals import message
from tests.rewards.vlm_judge.test_judge import answered


@pytest.fixture
def sources(tmp_path):
    """Metadata of a prompt with one source image, with two, with a source video, and without."""
    for level in (40, 80):
        Image.new("RGB", (4, 4), (level,) * 3).save(tmp_path / f"{level}.png")
    (tmp_path / "clip").mkdir()
    for i in range(5):
        Image.new("RGB", (4, 4), (10 * i,) * 3).save(tmp_path / "clip" / f"{i}.png")
    one, two = str(tmp_path / "40.png"), str(tmp_path / "80.png")
    return [{"image": one}, {"image": one, "images": [one, two]}, {"video": str(tmp_path / "clip")}, {}]


def shown(body) -> tuple[list[str], list[int]]:
    """The labels of a question, and the levels of its images, in order."""
    levels = [opened(picture["url"]).getpixel((0, 0))[0] for picture in parts(body, "image_url")]
    return [text for text in parts(body, "text") if text.endswith(":")], levels


def test_sources_come_before_outputs(sources):
    with endpoint([said("Score: 5")]) as server:
        judge = Judge(url=server.url, show=["output", "source"], frames=2, concurrency=1, **QUICK)
        assert judge(shades(200, 200, 200, 200), ["p"] * 4, sources) == [5] * 4
        assert Judge(url=server.url, concurrency=1, **QUICK)(shades(200), ["p"], sources[:1]) == [5]
    assert [shown(body) for _, _, body in server.seen] == [
        (["Source:", "Output:"], [40, 200]), (["Source 1:", "Source 2:", "Output:"], [40, 80, 200]),
        (["Source:", "Output:"], [0, 40, 200]), ([], [200]), ([], [200])]
    with endpoint([said("Answer: 1"), said('{"1": "yes"}')]) as server:
        show = {"url": server.url, "show": ["source", "output"], **QUICK}
        assert JudgePairs(**show)(shades(100), shades(200), ["p"], sources[:1]) == [1]
        assert JudgeRubric(criteria=["kept"], **show)(shades(100), ["p"], sources[:1]) == [1]
    assert [shown(body) for _, _, body in server.seen] == [
        (["Source:", "Image 1:", "Image 2:"], [40, 100, 200]), (["Source:", "Output:"], [40, 100])]


def test_an_unreadable_source_is_one_line(tmp_path):
    with endpoint([said("5")]) as server:
        judge = Judge(url=server.url, show=["source", "output"], **QUICK)
        assert "a judge: the source under metadata.image cannot be shown" in message(
            judge, ONE, ["p"], [{"image": str(tmp_path / "no.png")}])
    assert "a judge has show ['sorce']: expected [output] or [output, source]" in message(Judge, show=["sorce"])


def marks(instruction, preservation, quality):
    return said(json.dumps({"instruction": instruction, "preservation": preservation, "quality": quality}))


@pytest.mark.parametrize("axis, expected", [("overall", 0.6), ("instruction", 0.9), ("preservation", 0.4),
                                            ("quality", 0.9)])
def test_an_edit_is_marked_by_three_axes(sources, axis, expected):
    with endpoint([marks(9, 4, 9)]) as server:
        judge = EditJudge(url=server.url, axis=axis, concurrency=1, **QUICK)
        values = judge(shades(100, 200), ["make it red", "p"], [sources[0], {}])
    assert values == [pytest.approx(expected), None] and len(server.seen) == 1
    labels, levels = shown(server.seen[0][2])
    assert (labels, levels) == (["Source:", "Output:"], [40, 100])
    assert "by this instruction: make it red" in parts(server.seen[0][2], "text")[-1]


def test_an_edit_without_all_marks_has_no_score(sources):
    with endpoint([marks(9, 11, 9), marks(9, 4, None), said("fine")]) as server:
        judge = EditJudge(url=server.url, concurrency=1, **QUICK)
        values = judge(torch.zeros(3, 3, 4, 4), ["p"] * 3, [sources[0]] * 3)
    assert answered(values) == ["failed"] * 3
    assert "axis is 'overal', expected overall, instruction, preservation, quality" in message(EditJudge, axis="overal")
