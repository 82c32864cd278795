"""Rewards of packages that the tests' own extra does not bring: run by hand, with the extras svg and translation.

    pip install 'flowgrpo[svg,translation]' && pytest tests/extra/test_rewards_of_extras.py
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from flowgrpo import rewards  # noqa: E402
from flowgrpo.text.rewards.code_tests import render  # noqa: E402


def square(left: int, fill: str = "red") -> str:
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64" width="64" height="64">'
            f'<rect x="{left}" y="16" width="24" height="24" fill="{fill}"/></svg>')


def one(name, text, args=None, **metadata):
    found = rewards.score({"r": rewards.find(name, args)}, [text], ["p"], [metadata])[0, 0].item()
    return None if found != found else found


@pytest.fixture
def reference(tmp_path):
    from torchvision.transforms.functional import to_pil_image
    to_pil_image(render(square(8), 128, 128)).save(tmp_path / "a.png")
    return str(tmp_path / "a.png")


def test_renderings_features_and_length(reference):
    assert render(square(0), 64, 64)[:, 20, 4].tolist() == [1, 0, 0]
    values = [one("svg_render", code, image=reference) for code in
              (square(8), square(9), square(14), square(30), square(8, "blue"))]
    assert values[0] == 1 and values[:4] == sorted(values[:4], reverse=True) and len({*values}) == 5
    assert values[4] < 0.9
    def colour(pictures):
        return pictures.mean((2, 3)) - 0.5
    args = {"semantic": 1.0, "features": colour}
    values = [one("svg_render", code, args, image=reference) for code in (square(8), square(30), square(8, "blue"))]
    assert values[0] == pytest.approx(1) and values[1] > 0.99 and values[2] < 0.95
    for code in ("none", "<svg><rect", "<svg>&</svg>", f'<svg><image href="{reference}"/></svg>'):
        assert one("svg_render", code, image=reference) == 0
    assert one("svg_render", square(8)) is None
    args = {"brevity": 0.01, "longest": 1000}
    short, long = square(8), square(8).replace("/></svg>", " " * 100 + "/></svg>")
    first, second, other = (one("svg_render", code, args, image=reference) for code in (short, long, square(9)))
    assert first > second > other and first - second == pytest.approx(0.001, abs=1e-6)


def test_translations():
    assert one("translation", "<answer>the cat sat on the mat</answer>", answer="the cat sat on the mat") == 1
    args = {"metric": "bleu"}
    # 1-grams 5/5, 2-grams 3/4, 3-grams 2/3, 4-grams 1/2, brevity exp(1 - 6/5)
    found = one("translation", "the cat sat on mat", args, answer=["the cat sat on the mat"])
    assert found == pytest.approx((3 / 4 * 2 / 3 / 2) ** 0.25 * 2.718281828 ** -0.2, abs=1e-4)
    values = [one("translation", text, answer="the cat sat") for text in ("the cat sat", "the cat", "dog", "")]
    assert values == sorted(values, reverse=True) and values[0] == 1 and one("translation", "a") is None
