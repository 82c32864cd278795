"""Sources of prompts: decoded in full before a run, remembered, and replaced where they are damaged later."""

import json

import pytest
from PIL import Image

from flowgrpo.data import sources
from flowgrpo.data.prompts import load_prompts
from flowgrpo.errors import UserError


@pytest.fixture
def prompts(tmp_path):
    """Three prompts with an image each, and the function that cuts one off in the middle."""
    for name in "abc":
        Image.effect_noise((64, 64), 50).convert("RGB").save(tmp_path / f"{name}.jpg")
    lines = [json.dumps({"prompt": name, "image": f"{name}.jpg"}) for name in "abc"]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    return load_prompts(tmp_path / "p.jsonl")


def cut(prompt) -> None:
    from pathlib import Path
    path = Path(prompt.image)
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])


def test_a_cut_image_is_found_with_file_and_line(prompts, tmp_path):
    sources.require(prompts)
    cut(prompts[1])
    with pytest.raises(UserError) as caught:
        sources.require(prompts)
    assert str(caught.value).startswith(f"prompts {tmp_path}/p.jsonl, line 2, 'image': {tmp_path}/b.jpg cannot be read")
    cut(prompts[2])
    with pytest.raises(UserError, match=r"line 2, .*\(and 1 more of 3 prompts\)"):
        sources.require(prompts)
    assert sources.count_lost(prompts) == 2


def test_what_was_found_is_kept_beside_the_runs(prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MANY", 3)
    assert sources.decode(prompts, folder=tmp_path / "runs") == []
    kept = json.loads((tmp_path / "runs" / sources.FILE).read_text())
    assert [json.loads(state)[0] for state in kept if str(tmp_path) in state] == [
        str((tmp_path / f"{name}.jpg").resolve()) for name in "abc"]
    decoded = []
    monkeypatch.setattr(sources, "_known", {})
    monkeypatch.setattr(sources, "_verdict", decoded.append)
    sources.decode(prompts, folder=tmp_path / "runs")
    assert decoded == []
    cut(prompts[0])
    sources.decode(prompts, folder=tmp_path / "runs")
    assert [place[0] for place in decoded] == [prompts[0].image]


def test_another_prompt_stands_in_for_a_lost_one(prompts):
    cut(prompts[0])
    lost = [sources.fault(prompt) is not None for prompt in prompts]
    assert lost == [True, False, False]
    assert sources.stand_ins(prompts[:2], lost[:2], prompts) == [prompts[2], prompts[1]]
    assert sources.stand_ins(prompts[:1], [True], prompts) == [prompts[1]]
    cut(prompts[1])
    cut(prompts[2])
    with pytest.raises(UserError, match="no other prompt's files can be read"):
        sources.stand_ins(prompts[:1], [True], prompts)
