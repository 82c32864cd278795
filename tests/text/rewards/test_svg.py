"""SVG code as a reward: which code is rendered, and the likeness of images by hand. The renderer: tests/extra."""

import pytest
import torch

from flowgrpo.text.rewards.code_tests import alike, similarity, sound, svg_of

RECT = '<svg><rect width="1"/></svg>'


@pytest.mark.parametrize("text, code", [
    (f"so: ```svg\n{RECT}\n```", RECT), (f"<svg>a</svg> {RECT} done", RECT), (f"<think>{RECT}</think>none", None),
    ("<svg>", None), ("", None)])
def test_the_code_of_a_completion(text, code):
    assert svg_of(text) == code


@pytest.mark.parametrize("inside, kept", [
    ('<use href="#a"/>', True), ('<image href="data:image/png;base64,AA"/>', True), ('<rect fill="url(#g)"/>', True),
    ("<rect fill=\"url( '#g' )\"/>", True), ('<image href="data:image/svg+xml;base64,AA"/>', False),
    ('<image href="/tmp/a.png"/>', False), ('<image xlink:href = \'file:///a\'/>', False),
    ('<image href="http://x"/>', False), ('<image href=a.png />', False), ("<!ENTITY a 'b'>", False),
    ("<style>@import 'a.css'</style>", False), ('<rect fill="url(http://x)"/>', False),
    ('<use href="#a"/>' * 65, False),
    ("a" * 2000, False)])
def test_code_that_names_something_outside_or_repeats_too_much_is_not_rendered(inside, kept):
    assert sound(f"<svg>{inside}</svg>", 1500) == kept


def test_the_likeness_of_images():
    black, white = torch.zeros(3, 4, 4), torch.ones(3, 4, 4)
    half = torch.zeros(3, 4, 4)
    half[..., 2:] = 1
    assert [similarity(black, other, 0) for other in (black, white)] == [1, 0]
    assert similarity(black, half, 0) == pytest.approx(1 - 0.5**0.5) and similarity(black, half, 1) == 0
    assert similarity(half, half, 0.5) == 1 and similarity(half, 1 - half, 1) == 0  # steps of the other sign
    shifted = [similarity(half, half.roll(by, -1), 0.5) for by in (0, 1, 2)]
    assert shifted == sorted(shifted, reverse=True) and len(set(shifted)) == 3


@pytest.mark.parametrize("one, other, expected", [
    ([1, 0], [3, 0], 1), ([1, 0], [-1, 0], 0), ([1, 0], [0, 2], 1 - 0.5**0.5), ([0, 0], [0, 0], 1)])
def test_the_likeness_of_features(one, other, expected):
    assert alike(torch.tensor([one]).float(), torch.tensor([other]).float()) == pytest.approx(expected)
