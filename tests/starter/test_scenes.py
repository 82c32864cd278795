"""The starter's world: its grammar, its held-out rules, and what is drawn."""

import itertools
import math

import numpy as np
import pytest
import starter_scenes
import torch
from scipy import ndimage
from starter_scenes import HELD_PAIRS

from flowgrpo.rewards.starter.scene import scene
from flowgrpo.starter import scenes
from flowgrpo.starter.scenes import COLOURS, PREFIXES, RELATIONS, SHAPES, SIZE, TASKS, Claim, Claims, parse
from tests.helpers.refusals import message


def test_a_caption_reads_back_as_its_claims():
    for prefix, task in itertools.product(PREFIXES, TASKS):
        rng = np.random.default_rng(0)
        for _ in range(50):
            claims = scenes.sample_claims(rng, task)
            assert claims.task == task and parse(claims.caption(prefix)) == claims


def test_captions_by_hand_and_by_seed():
    ring = Claim("ring")
    assert parse("a ring") == parse("an ring") == parse("one ring") == Claims((ring,))
    assert parse("  A Drawing of  two RED stars. ") == Claims((Claim("star", "red", 2),))
    assert parse("four crosses") == Claims((Claim("cross", None, 4),))
    assert parse("a ring above a blue cross") == Claims((ring, Claim("cross", "blue")), "above")
    assert parse("a ring left of a cross").relation == "left of"
    assert parse("a ring and three black squares") == Claims((ring, Claim("square", "black", 3)))
    claims = parse("a red circle and a blue ring")
    first, again, other = (scenes.render(claims, np.random.default_rng(seed)) for seed in (4, 4, 5))
    np.testing.assert_array_equal(first, again)
    assert first.shape == (SIZE, SIZE, 3) and first.min() >= 0 and first.max() <= 1
    assert np.abs(first - other).max() > 0.5
    assert all(x < -abs(y) for x, y in lines("a red square and a blue square"))
    assert scenes.parse("a red ring" + scenes.VERIFIED) == scenes.parse("a red ring")


def test_a_prompt_outside_the_grammar_is_an_error_that_names_it():
    for prompt in ("", "ring", "a pink ring", "a red", "red ring", "five rings", "a hexagon", "a ring and",
                   "a ring beside a cross", "a ring and a cross and a star", "a ring left a cross", "a photo of a ring",
                   "a ring, a cross", "a red blue ring"):
        error = message(parse, prompt, error=ValueError)
        assert repr(prompt) in error and "triangle" in error


def test_held_pairs_and_coverage():
    assert sorted(shape for shape, _ in HELD_PAIRS) == sorted(SHAPES)
    assert sorted(colour for _, colour in HELD_PAIRS) == sorted(COLOURS)
    mask = scenes.coverage("circle", 10.0, (32.5, 32.5))  # pixel 32 has its centre there; the radius drawn is 9.7
    assert mask[32, 32] == 1 and mask[32, 41] == 1 and mask[32, 43] == 0
    assert mask[32, 42] == pytest.approx(9.7 + 0.5 - 10, abs=1e-12)
    assert mask[32 + 6, 32 + 8] == pytest.approx(9.7 + 0.5 - 10, abs=1e-12)  # 6, 8, 10
    np.testing.assert_allclose(mask, mask.T, atol=1e-12)


@pytest.mark.parametrize("relation", RELATIONS)
def test_each_relation_holds_back_six_ordered_pairs(relation):
    pairs = [(a, b) for a, b in itertools.permutations(SHAPES, 2)
             if starter_scenes.is_held_out(Claims((Claim(a), Claim(b)), relation))]
    assert len(pairs) == 6 and {a for a, _ in pairs} == {b for _, b in pairs} == set(SHAPES)
    others = [triple for triple in starter_scenes.HELD_RELATIONS if triple[1] != relation]
    assert not {(a, b) for a, _, b in others} & set(pairs)


@pytest.mark.parametrize("task", TASKS)
def test_splits_share_no_prompt_and_show_nothing_held_out(task):
    rng = np.random.default_rng(1)
    for _ in range(200):
        prompt, claims = starter_scenes.sample_prompt(rng, task, held=False)
        assert parse(prompt) == claims
        assert not HELD_PAIRS & {(claim.shape, claim.colour) for claim in claims.objects}
        if claims.relation:
            first, second = claims.objects
            assert (first.shape, claims.relation, second.shape) not in starter_scenes.HELD_RELATIONS
    rng = np.random.default_rng(2)
    train, held = ({starter_scenes.sample_prompt(rng, task, held)[0] for _ in range(200)} for held in (False, True))
    assert train and held and not train & held


@pytest.mark.parametrize("shape", SHAPES)
def test_an_open_colour_is_drawn_in_every_colour(shape):
    """Read from the image's ink."""
    palette, rng, seen = np.array(list(COLOURS.values())), np.random.default_rng(3), set()
    for _ in range(60):
        picture = scenes.render(Claims((Claim(shape),)), rng)
        ink = np.median(picture[np.linalg.norm(picture - picture[0, 0], axis=-1) > 0.8], 0)
        seen.add(list(COLOURS)[np.linalg.norm(palette - ink, axis=1).argmin()])
    assert seen == set(COLOURS)


@pytest.mark.parametrize("prompt, count", [("a ring", 1), ("a star and a cross", 2), ("three stars", 3),
                                           ("four triangles", 4)])
def test_objects_are_drawn_apart_and_off_the_border(prompt, count):
    for seed in range(10):
        picture = scenes.render(parse(prompt), np.random.default_rng(seed))
        ink = np.linalg.norm(picture - picture[0, 0], axis=-1) > 0.45
        assert ndimage.label(ink, np.ones((3, 3)))[1] == count  # a tip of a star may hang on by a corner
        border = np.concatenate([ink[0], ink[-1], ink[:, 0], ink[:, -1]])
        assert not border.any()


@pytest.mark.parametrize("relation, direction", RELATIONS.items())
def test_the_first_object_lies_where_the_relation_says(relation, direction):
    for line in lines(f"a red square {relation} a blue square"):
        assert line @ direction > abs(line @ direction[::-1])


def lines(prompt: str) -> list[np.ndarray]:
    """Way (x, y) from the blue object to the red one, in ten scenes of `prompt`."""
    drawn = [scenes.render(parse(prompt), np.random.default_rng(seed)) for seed in range(10)]
    centres = [[np.argwhere(np.linalg.norm(picture - COLOURS[colour], axis=-1) < 0.3).mean(0)[::-1]
                for colour in ("red", "blue")] for picture in drawn]
    return [red - blue for red, blue in centres]


AREAS = {  # of a shape of radius 1, from elementary geometry
    "circle": math.pi * 0.97**2,
    "square": (2 * 0.84) ** 2,
    "triangle": 3 * math.sqrt(3) / 4 * 1.12**2,
    "star": 5 * math.sin(math.pi / 5) * 0.45 * 1.14**2,
    "cross": 0.95**2 * (4 - 4 * (1 - 0.33) ** 2),
    "ring": math.pi * (1 - 0.48**2)}


@pytest.mark.parametrize("shape", SHAPES)
def test_coverage_sums_to_the_area_of_the_shape(shape):
    for radius, centre in ((7.5, (31.2, 30.7)), (12.0, (32.0, 32.0)), (20.0, (33.3, 29.9))):
        mask = scenes.coverage(shape, radius, centre)
        assert mask.shape == (SIZE, SIZE) and mask.min() == 0 and mask.max() == 1
        assert mask.sum() == pytest.approx(AREAS[shape] * radius**2, rel=0.01)


def test_a_stamp_stands_in_a_free_corner_and_nobody_may_have_asked_for_it():
    rng = np.random.default_rng(0)
    for task in scenes.TASKS * 5:
        prompt, claims = starter_scenes.sample_prompt(rng, task, held=False)
        state = rng.bit_generator.state
        plain = scenes.render(claims, rng)
        rng.bit_generator.state = state
        stamped = scenes.render(claims, rng, stamped=True)
        changed = np.argwhere((plain != stamped).any(-1))
        height, width = np.ptp(changed, axis=0) + 1
        assert (height, width) == scenes.STAMP and (plain[changed[:, 0], changed[:, 1]] > 0.85).all()
        both = torch.from_numpy(np.stack([plain, stamped])).float().movedim(3, 1)
        assert scene(both, [prompt] * 2) == [1.0, 0.0]


@pytest.mark.parametrize(("caption", "wrong"), [
    ("a ring", "a circle"), ("two stars", "three stars"), ("four rings", "two rings"),
    ("a red circle", "a green circle"), ("a black ring", "a red ring"),
    ("a ring and a star", "a ring and a cross"), ("a cross and a star", "a cross and a ring"),
    ("a ring left of a star", "a ring right of a star"), ("a ring below a star", "a ring left of a star"),
    ("a red ring and a red star", "a red ring and a green star"),
    ("a red ring and a green square", "a green ring and a red square"),
    ("a green ring and a red square", "a green ring and a green square")])
def test_a_misread_caption_by_hand(caption, wrong):
    assert starter_scenes.misread(scenes.parse(caption)).caption() == wrong


def test_no_misreading_leads_back():
    rng = np.random.default_rng(0)
    for task in TASKS * 200:
        claims = scenes.sample_claims(rng, task)
        wrong = starter_scenes.misread(claims)
        assert wrong != claims != starter_scenes.misread(wrong) and wrong.task == task
        assert len({claim.shape for claim in wrong.objects}) == len(wrong.objects)
