"""The rewards of the starter's scenes: hard, graded, soft, and of the style."""

from dataclasses import replace

import numpy as np
import pytest
import show_scene_reward as show
import torch
from scipy.ndimage import gaussian_filter

from flowgrpo.rewards import find, require_gradient, score
from flowgrpo.rewards.starter import scene_soft as soft
from flowgrpo.rewards.starter.scene import _read_once, read, scene, scene_graded
from flowgrpo.rewards.starter.scene_soft import overlaps, reference, scene_soft, scene_style
from flowgrpo.starter import scenes
from flowgrpo.starter.scenes import COLOURS, RELATIONS, SHAPES, SIZE, TASKS, Claims, coverage, parse
from tests.helpers.refusals import message


def draw(*objects, ground: float = 0.96) -> torch.Tensor:
    """An image [3, 64, 64] of (shape, colour, centre) or (shape, colour, centre, radius), later ones on top."""
    picture = np.full((3, SIZE, SIZE), ground)
    for shape, colour, centre, *radius in objects:
        mask = coverage(shape, radius[0] if radius else 9.0, centre)
        paint = np.array(COLOURS.get(colour, colour))[:, None, None]
        picture = picture * (1 - mask) + paint * mask
    return torch.from_numpy(picture).float()


def both(picture, prompt: str) -> tuple[float, float]:
    picture = torch.as_tensor(picture).float()
    (strict,), (graded,) = scene(picture[None], [prompt]), scene_graded(picture[None], [prompt])
    assert 0 <= graded <= 1 and strict == float(graded == 1)
    return strict, graded


LEFT, RIGHT, TOP, BOTTOM = (16, 32), (48, 32), (32, 16), (32, 48)
RING_STAR = draw(("ring", "red", LEFT), ("star", "blue", RIGHT))


# --- drawn scenes ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def drawn() -> list[show.Scene]:
    return show.draw(300, seed=10)


def scores(pictures, prompts) -> tuple[np.ndarray, np.ndarray]:
    pictures = torch.from_numpy(np.stack(list(pictures)))
    graded = np.array(scene_graded(pictures, prompts))
    assert graded.min() >= 0 and graded.max() <= 1
    strict = (graded == 1).astype(float)
    assert scene(pictures[:50], prompts[:50]) == strict[:50].tolist()
    return strict, graded


def test_true_captions_are_accepted_in_all_tasks_of_both_splits(drawn):
    strict, _ = scores([s.image for s in drawn], [s.prompt for s in drawn])
    for task in TASKS:
        assert strict[[s.claims.task == task for s in drawn]].mean() >= 0.99


@pytest.mark.parametrize("sigma, blur", [(0.02, 0.0), (0.03, 0.0), (0.0, 0.5), (0.02, 0.5)])
def test_a_little_noise_and_blur_are_forgiven(drawn, sigma, blur):
    rng = np.random.default_rng(11)
    pictures = [show.noisy(show.blurred(s.image, blur), sigma, rng) for s in drawn]
    assert scores(pictures, [s.prompt for s in drawn])[0].mean() >= 0.97


@pytest.mark.parametrize("change", show.CHANGES)
def test_one_changed_fact_is_refused_and_costs_much_but_not_all(drawn, change):
    pictures, prompts = zip(*show.changed(drawn, change, seed=12))
    assert len(pictures) >= 50
    strict, graded = scores(pictures, prompts)
    assert strict.mean() <= 0.01
    assert 0.2 < graded.mean() < 0.75


@pytest.mark.parametrize("damage", ["blur 3 px", "noise 0.3", "empty"])
def test_images_without_readable_objects_are_worth_nothing(drawn, damage):
    rng = np.random.default_rng(13)
    strict, graded = scores([show.DAMAGES[damage](s.image, rng) for s in drawn], [s.prompt for s in drawn])
    assert strict.max() == 0 and graded.mean() < 0.01 and graded.max() < 0.15


def test_images_that_lost_their_fullest_half_are_refused(drawn):
    # A triangle cut level is a smaller triangle, and rightly accepted.
    rest = [s for s in drawn if s.claims.objects != (replace(s.claims.objects[0], shape="triangle", count=1),)]
    assert len(rest) > 250
    strict, graded = scores([show.half_cut(s.image) for s in rest], [s.prompt for s in rest])
    assert strict.max() == 0 and graded.mean() < 0.25


def test_the_reward_falls_with_blur_and_is_gone_at_two_and_a_half_pixels(drawn):
    prompts = [s.prompt for s in drawn]
    means = [np.mean(scene_graded(np.stack([show.blurred(s.image, sigma) for s in drawn]), prompts))
             for sigma in (0.5, 1.0, 1.5, 2.0, 2.5)]
    assert means == sorted(means, reverse=True)
    assert means[0] > 0.99 and 0.1 < means[2] < 0.7 and means[4] < 0.05


def test_another_scenes_caption_earns_less_than_one_wrong_fact(drawn):
    prompts = [s.prompt for s in drawn]
    strict, graded = scores([s.image for s in drawn], prompts[1:] + prompts[:1])
    assert strict.mean() < 0.05 and graded.mean() < 0.35


# --- images made by hand -------------------------------------------------------------------------------------------
def test_objects_are_read_largest_first():
    for shape in SHAPES:
        for colour in COLOURS:
            (found,) = read(draw((shape, colour, (30.3, 34.8), 11.0))).objects
            assert (found.shape, found.colour) == (shape, colour)
            contrast = np.linalg.norm(0.96 - np.array(COLOURS[colour]))
            standing_out = np.count_nonzero(coverage(shape, 11.0, (30.3, 34.8)) > 0.45 / contrast)
            assert found.area == pytest.approx(standing_out, abs=3)  # the very tips of a star may be apart
            rise = 0.22 * 11 if shape == "triangle" else 0  # its centroid lies below the centre it is drawn at
            assert found.centre == pytest.approx((30.3, 34.8 + rise), abs=0.15)
            assert np.sort(found.shapes)[-2] < 0.2 and np.sort(found.colours)[-2] == 0
    found = read(draw(("square", "red", LEFT, 7.0), ("square", "blue", RIGHT, 12.0),
                      ("star", "green", (32, 54), 7.0))).objects
    assert [(f.shape, f.colour) for f in found] == [("square", "blue"), ("square", "red"), ("star", "green")]


@pytest.mark.parametrize("first, second, relation", [
    (LEFT, RIGHT, "left of"), (RIGHT, LEFT, "right of"), (TOP, BOTTOM, "above"), (BOTTOM, TOP, "below"),
    ((16, 20), (46, 44), "left of"), ((20, 16), (44, 46), "above")])  # mostly
def test_relations(first, second, relation):
    picture = draw(("ring", "red", first), ("star", "blue", second))
    for claimed, reverse in [("left of", "right of"), ("right of", "left of"), ("above", "below"), ("below", "above")]:
        assert both(picture, f"a ring {claimed} a star")[0] == (claimed == relation)
        assert both(picture, f"a star {reverse} a ring")[0] == (claimed == relation)


def test_relations_by_direction():
    grades = []
    for angle in np.radians([0, 60, 90, 120, 180]):
        line = 15 * np.array([-np.cos(angle), np.sin(angle)])
        picture = draw(("ring", "red", 32 + line), ("star", "blue", 32 - line))
        grades.append(both(picture, "a ring left of a star")[1])
    assert grades[0] == 1 and all(a > b + 0.05 for a, b in zip(grades, grades[1:])) and grades[-1] > 0


def test_graded_values_and_relations_by_hand():
    picture = draw(("ring", "red", LEFT), ("ring", "blue", RIGHT))
    for prompt, true in (("a red ring left of a blue ring", 1), ("a blue ring left of a red ring", 0),
                         ("a ring left of a ring", 1), ("a ring right of a ring", 1), ("a ring above a ring", 0),
                         ("a ring right of a red ring", 1), ("a ring left of a red ring", 0)):
        assert both(picture, prompt)[0] == true
    for second, true in (((20, 50), 1), ((50, 12), 0)):
        picture = draw(("ring", "red", LEFT), ("ring", "red", second, 7.0), ("star", "blue", (50, 32)))
        assert both(picture, "two rings left of a star")[0] == true
    # Floors of 0.25: a wrong colour leaves 1/4 of an object, a missing object nothing, an extra one shares.
    for prompt, grade in (("a green ring and a blue star", (0.25 + 1) / 2), ("a ring", 1 / 2),
                          ("a green cross and a blue star", (0.25 * 0.25 + 1) / 2), ("a ring and two stars", 2 / 3)):
        assert both(RING_STAR, prompt)[1] == pytest.approx(grade)
    assert both(RING_STAR, "a ring right of a star")[1] == pytest.approx(0.25, abs=1e-3)
    assert both(draw(("ring", "red", LEFT)), "a ring left of a star")[1] == pytest.approx(0.25 / 2)


@pytest.mark.parametrize("prompt, true", [
    ("a ring and a star", 1), ("a star and a ring", 1), ("a red ring and a blue star", 1),
    ("a ring and a blue star", 1), ("a blue ring and a red star", 0), ("a red ring and a blue cross", 0),
    ("a ring", 0), ("a blue star", 0), ("two rings", 0), ("two rings and a star", 0), ("a ring and two stars", 0)])
def test_two_objects_by_hand(prompt, true):
    assert both(RING_STAR, prompt)[0] == true


def test_counts_and_extra_objects():
    places = [(14, 14), (50, 14), (14, 50), (50, 50)]
    for shown in (1, 2, 3, 4):
        picture = draw(*[("square", "green", place) for place in places[:shown]])
        for word, claimed in {"one": 1, "two": 2, "three": 3, "four": 4}.items():
            strict, graded = both(picture, f"{word} square" + "s" * (claimed > 1))
            assert strict == (shown == claimed)
            assert graded == pytest.approx(min(shown, claimed) / max(shown, claimed))
    for extra in (("circle", "black", (54, 54), 3.0), ("star", "red", (50, 50)), ("circle", (0.5, 0.5, 0.5), (50, 50))):
        strict, graded = both(draw(("ring", "red", LEFT), extra), "a ring")
        assert strict == 0 and graded < 0.85
    picture = draw(("ring", "red", LEFT), ("star", (0.85, 0.85, 0.85), RIGHT))
    assert len(read(picture).objects) == 1
    assert both(picture, "a ring")[0] == both(picture, "a ring and a star")[0] == 0


def test_shapes_and_stripes_that_are_no_object():
    for colour in ("red", "blue"):
        merged = draw(("circle", "red", (24, 32)), ("circle", colour, (39, 32)))
        (found,) = read(merged).objects
        assert found.shape is None
        assert both(merged, "two circles")[1] < 0.2 and both(merged, "a circle and a square")[1] < 0.2
    for shape in SHAPES:
        assert both(draw((shape, "red", (2, 32), 12.0)), f"a {shape}")[0] == 0
    # Cyan, magenta and yellow: each channel is light in two stripes of three.
    picture = draw(("ring", "red", (48, 32)))
    for channel in range(3):
        picture[:, 16 + 6 * channel:22 + 6 * channel, 8:26] = 0.96
        picture[channel, 16 + 6 * channel:22 + 6 * channel, 8:26] = 0.0
    stripes = read(picture).objects[0]
    assert (stripes.shape, stripes.colour, stripes.area) == (None, None, 18 * 18)
    assert both(picture, "a ring")[1] == pytest.approx(0.5) == both(picture, "a ring and a square")[1]


def test_paints_that_are_no_colour():
    picture = draw(("circle", "red", (32, 32), 12.0))
    picture[:, :, 32:] = draw(("circle", "blue", (32, 32), 12.0))[:, :, 32:]
    (found,) = read(picture).objects
    assert found.shape is None and found.colour is None and both(picture, "a circle")[1] < 0.2
    for paint in ((0.5, 0.5, 0.5), (0.1, 0.8, 0.85), (1.0, 0.5, 0.6)):
        picture = draw(("square", paint, (32, 32)))
        (found,) = read(picture).objects
        assert (found.shape, found.colour) == ("square", None)
        strict, graded = both(picture, "a square")
        assert strict == 0 and graded < 0.8
    red, blue = np.array(COLOURS["red"]), np.array(COLOURS["blue"])
    grades = [both(draw(("star", tuple(red + t * (blue - red)), (32, 32), 12.0)), "a blue star")[1]
              for t in (0, 0.4, 0.7, 0.75, 0.8, 1)]
    assert grades == sorted(grades) and grades[0] == pytest.approx(0.25) and grades[-1] == 1
    assert len({round(grade, 3) for grade in grades}) >= 4


def test_stretched_turned_and_cut_shapes_are_refused():
    circle = draw(("circle", "red", (32, 32), 12.0))
    square = draw(("square", "red", (32, 32), 12.0))
    wide = torch.nn.functional.interpolate(circle[None, :, 8:56], size=(64, 64), mode="bilinear")[0]
    assert both(wide, "a circle")[0] == 0
    axis = torch.arange(64) - 31.5
    diamond = torch.where(axis[:, None].abs() + axis.abs() < 14, square[:, 32:33, 32:33], square[:, :1, :1])
    for shape in SHAPES:
        assert both(diamond, f"a {shape}")[0] == 0
        upside_down = draw((shape, "red", (32, 32), 12.0)).flip(1)
        assert both(upside_down, f"a {shape}")[0] == (shape not in ("triangle", "star"))
        cut = draw((shape, "red", (32, 32), 12.0))
        cut[:, :, 32:] = 0.96
        strict, graded = both(cut, f"a {shape}")
        assert strict == 0 and graded < 0.3


@pytest.mark.parametrize("name", ["white", "grey", "black", "checks", "stripes", "fine checks", "slope", "hue", "noise",
                                  "soft noise"])
def test_images_of_nothing_are_worth_nothing(name):
    rng = np.random.default_rng(14)
    y, x = np.mgrid[:SIZE, :SIZE]
    clouds = show.blurred(rng.normal(0.8, 3, (1, SIZE, SIZE)), 3)[0]
    plane = {
        "white": np.ones((SIZE, SIZE)), "grey": np.full((SIZE, SIZE), 0.5), "black": np.zeros((SIZE, SIZE)),
        "checks": (x // 8 + y // 8) % 2, "stripes": x // 6 % 2, "fine checks": (x + y) % 2, "slope": x / 63,
        "hue": x / 63, "noise": rng.random((SIZE, SIZE)), "soft noise": np.clip(clouds, 0, 1)}[name]
    picture = np.broadcast_to(plane, (3, SIZE, SIZE)).astype(np.float32).copy()
    if name == "hue":
        picture[1:] = 0.9
    for shape in SHAPES:
        for colour in COLOURS:
            assert both(picture, f"a {colour} {shape}")[1] < 0.02
        assert both(picture, f"a {shape} and three black crosses")[1] < 0.02


def test_the_ground_must_be_light_even_and_clean():
    objects, prompt = (("ring", "red", LEFT), ("star", "blue", RIGHT)), "a ring and a star"
    assert both(draw(*objects, ground=0.90), prompt)[0] == 1
    for ground in (0.6, 0.3, 0.0):
        assert both(draw(*objects, ground=ground), prompt)[1] < 0.05
    tinted, half = RING_STAR.clone(), RING_STAR.clone()
    tinted[2] *= 0.85
    half[:, :28][half[:, :28] > 0.9] -= 0.14
    assert both(tinted, prompt)[0] == both(half, prompt)[0] == 0 and read(RING_STAR).ground == 1
    grounds = []
    for step in (8, 5, 4, 3):
        specks = RING_STAR.clone()
        specks[:, 2:62:step, 2:62:step] *= 0.5
        assert both(specks, prompt)[0] == 0
        grounds.append(read(specks).ground)
    assert grounds == sorted(grounds, reverse=True) and 0.5 < grounds[0] < 1 and grounds[-1] < 0.1


# --- the call --------------------------------------------------------------------------------------------------------
def test_rows_are_scored_alone_and_each_image_once():
    pictures = torch.stack([RING_STAR, draw(("square", "green", (32, 32))), RING_STAR])
    prompts = ["a ring left of a star", "a green square", "a square"]
    assert scene(pictures, prompts) == [1.0, 1.0, 0.0]
    assert scene(pictures.to(torch.bfloat16), prompts, [{}] * 3) == [1.0, 1.0, 0.0]
    assert scene_graded(pictures.numpy(), prompts, metadata=None) == scene_graded(pictures, prompts)
    assert scene_graded(pictures[2:], prompts[2:]) == scene_graded(pictures, prompts)[2:]
    assert all(type(score) is float for score in scene(pictures, prompts) + scene_graded(pictures, prompts))
    assert scene(pictures[:0], []) == []
    pictures, prompts = torch.stack([RING_STAR, draw(("square", "green", (32, 32)))]), ["a ring", "a green square"]
    _read_once.cache_clear()
    assert scene(pictures, prompts) == [0.0, 1.0] and scene_graded(pictures, prompts)[0] < 1
    assert (_read_once.cache_info().misses, _read_once.cache_info().hits) == (2, 2)


def test_wrong_calls_are_errors_of_one_line():
    picture = RING_STAR[None]
    for images, prompts, words in [
        (picture, ["a photo of a dog"], "cannot read the prompt 'a photo of a dog'"),
        (picture, ["a ring", "a star"], "got 1 images and 2 prompts"),
        (picture[:, :, :32], ["a ring"], "expected [B, 3, 64, 64]"),
        (picture[0], ["a ring"], "expected [B, 3, 64, 64]"),
        (picture * 255, ["a ring"], "expected [0, 1]"),
        (picture * 2 - 1, ["a ring"], "expected [0, 1]"),
        (picture * float("nan"), ["a ring"], "expected [0, 1]")]:
        assert words in message(scene, images, prompts, error=ValueError)


def changed(claims: Claims, rng: np.random.Generator) -> Claims:
    """The claims with one fact changed: a shape, a colour, the number or the relation."""
    first, *others = claims.objects
    kinds = ["shape"] + ["colour"] * bool(first.colour) + ["number"] * (claims.task == "counting")
    kind = str(rng.choice(kinds + ["relation"] * bool(claims.relation)))
    if kind == "relation":
        return replace(claims, relation=str(rng.choice([each for each in RELATIONS if each != claims.relation])))
    free = {"shape": [each for each in SHAPES if each not in {claim.shape for claim in claims.objects}],
            "colour": [each for each in COLOURS if each != first.colour],
            "number": [each for each in (2, 3, 4) if each != first.count]}[kind]
    new = rng.choice(free)
    other = replace(first, **{"count" if kind == "number" else kind: int(new) if kind == "number" else str(new)})
    return replace(claims, objects=(other, *others))


def render_scenes(prompts: list[Claims], rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(np.stack([scenes.render(claims, rng) for claims in prompts])).float().movedim(3, 1)


@torch.no_grad()
def test_true_images_beat_those_with_one_fact_changed():
    """All of 204 pairs, of every task and kind of change; of 240 others all were right too."""
    rng = np.random.default_rng(7)
    claims = [scenes.sample_claims(rng, TASKS[i % len(TASKS)]) for i in range(204)]
    prompts = [each.caption() for each in claims]
    true = scene_soft(render_scenes(claims, rng), prompts)
    false = scene_soft(render_scenes([changed(each, rng) for each in claims], rng), prompts)
    assert (true > false).double().mean() >= 0.99
    assert true.min() > 0.5 and 0.7 < true.mean() <= true.max() <= 1 and false.min() >= 0 and false.mean() < 0.35


@pytest.mark.parametrize("prompt", ["a circle", "a red star", "three rings", "a cross left of a star",
                                    "a blue square and a black ring"])
def test_every_image_has_a_gradient(prompt):
    rng = np.random.default_rng(0)
    pictures = torch.stack([torch.ones(3, 64, 64), torch.full((3, 64, 64), 0.95), torch.zeros(3, 64, 64),
                            torch.from_numpy(rng.random((3, 64, 64))).float(), *render_scenes([parse(prompt)], rng)])
    pictures.requires_grad_()
    scores = scene_soft(pictures, [prompt] * len(pictures))
    scores.sum().backward()
    assert scores.isfinite().all() and pictures.grad.isfinite().all()
    assert (pictures.grad.flatten(1).norm(dim=1) > 1e-6).all()


def test_the_gradient_is_that_of_finite_differences():
    rng = np.random.default_rng(1)
    prompt, direction = "a red star left of a ring", torch.from_numpy(rng.standard_normal((3, 64, 64)))
    picture = render_scenes([parse(prompt)], rng)[0].double()
    def along(shift: float) -> float:
        return scene_soft((picture + shift * direction)[None], [prompt]).item()
    given = picture.clone().requires_grad_()
    scene_soft(given[None], [prompt]).backward()
    assert (given.grad * direction).sum().item() == pytest.approx((along(1e-7) - along(-1e-7)) / 2e-7, rel=1e-5)


def test_following_the_gradient_repaints_an_object():
    """A blue circle becomes a red one, as which the exact reward sees it too."""
    picture = render_scenes([parse("a blue circle")], np.random.default_rng(3)).requires_grad_()
    assert scene(picture, ["a blue circle"]) == [1.0]
    optimizer = torch.optim.Adam([picture], lr=0.03)
    for _ in range(40):
        optimizer.zero_grad()
        (-scene_soft(picture, ["a red circle"])).sum().backward()
        optimizer.step()
        with torch.no_grad():
            picture.clamp_(0, 1)
    assert scene(picture, ["a red circle"]) == [1.0] and scene_soft(picture, ["a red circle"]).item() > 0.75


def test_soft_maps_and_overlaps_by_hand():
    ground, red = torch.full((3,), 0.95, dtype=torch.float64), torch.tensor(COLOURS["red"], dtype=torch.float64)
    pictures = torch.stack([ground, red, (ground + red) / 2])[:, :, None, None].expand(3, 3, 2, 2)
    expected = 1 / (1 + np.exp(-np.array([-0.5, 0.5, 0.0]) / 0.12))
    np.testing.assert_allclose(soft.membership(pictures)[:, 0, 0, 0], expected, atol=1e-10)
    far = ((red - 0.95).square().sum() / 0.35**2).item()
    np.testing.assert_allclose(soft.foreground(pictures)[:2, 0, 0], [0.0, far**2 / (far**2 + 1)], atol=1e-10)
    # Of a square of one of the radii with its own template, in place and moved, summed pixel by pixel.
    radius = 7.3 * 1.11**3
    mask = torch.from_numpy(coverage("square", radius, (30.5, 22.5)))
    for x, y in ((30, 22), (33, 20)):
        template = torch.from_numpy(coverage("square", radius, (x + 0.5, y + 0.5)))
        disc = torch.from_numpy(coverage("circle", 1.25 * radius / 0.97, (x + 0.5, y + 0.5)))
        found = overlaps(mask[None] / 2, mask)[0, SHAPES.index("square"), 3, y, x]
        union = template.sum() + (mask * (disc - template).clamp(min=0)).sum()
        torch.testing.assert_close(found, (mask * template).sum() / 2 / union, rtol=0, atol=1e-10)
    every = overlaps(mask[None] / 2, mask)[0]
    for shape, radius, y, x in ((0, 0, 0, 0), (1, 7, 63, 0), (4, 7, 0, 63), (5, 2, 63, 63), (2, 3, 30, 20)):
        found = soft.overlap(mask / 2, mask, shape, radius, y, x)
        torch.testing.assert_close(found, every[shape, radius, y, x], rtol=0, atol=1e-10)


def test_soft_and_style_are_rewards_like_others():
    reward = find("scene_soft")
    require_gradient({"scene_soft": reward})
    picture = render_scenes([parse("a red star")], np.random.default_rng(0))
    found = score({"soft": reward}, picture, ["a red star"], [{}])
    assert found.shape == (1, 1) and found[0, 0].item() == pytest.approx(scene_soft(picture, ["a red star"]).item())
    assert "got images of shape" in message(lambda: scene_soft(torch.ones(1, 3, 32, 32), ["a star"]), error=ValueError)
    assert scene_soft(torch.ones(0, 3, 64, 64), []).shape == (0,)
    assert find("scene_style") is scene_style
    assert "scene_style got images of shape [3, 64, 64], expected [B, 3, H, W]" in message(
        scene_style, torch.zeros(3, 64, 64), [""], error=ValueError)


def rendered(count: int, seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    images = [scenes.render(scenes.sample_claims(rng, "two"), rng) for _ in range(count)]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float()


@pytest.mark.fast
def test_style_gradients_by_hand():
    image = np.zeros((1, 3, 3, 3))
    image[0, :, 0, 1] = 0.3  # right of the first pixel and below it: (0.3, 0), (-0.3, -0.3), (0, 0), (0, 0)
    for step in (0.3, 0.1):
        expected = np.histogram([step, step * 2**0.5, 0, 0], [0.0, *np.geomspace(0.01, 1.5, 12)])[0] / 4
        assert soft.gradients(image) == pytest.approx(expected[None])
        image[0, 1:] = 0  # of one channel in three: a third of the length
    assert scene_style(torch.full((1, 3, 8, 8), 0.9), [""]) == pytest.approx([reference()[0][0]**0.5])
    assert reference()[0].sum() == pytest.approx(1)


@pytest.mark.fast
def test_style_is_lowered_by_noise_blur_and_grain():
    images = rendered(16, seed=7)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    blurred = torch.from_numpy(gaussian_filter(images.numpy(), (0, 0, 1.5, 1.5)))
    same, grain, blur = (np.mean(scene_style(each, [""] * 16)) for each in (
        images, (images + 0.03 * noise).clamp(0, 1), blurred))
    assert same > 0.95 and blur < 0.5 * same and grain < 0.25
    # A model's images have a grain, which a blur removes: that alone would raise the score.
    noise = 0.004 * torch.randn(16, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    grainy = (torch.from_numpy(gaussian_filter(rendered(16, 9).numpy(), (0, 0, 0.6, 0.6))) + noise).clamp(0, 1)
    scores = [np.mean(scene_style(torch.from_numpy(gaussian_filter(grainy.numpy(), (0, 0, sigma, sigma))), [""] * 16))
              for sigma in (0, 0.5, 1, 2)]
    assert scores == sorted(scores, reverse=True) and scores[0] > 1.05 * scores[1] > 1.3 * scores[2]
    images = rendered(4, seed=8)
    plain = scene_style(images, [""] * 4)
    assert scene_style(images[:, [1, 2, 0]], ["a red ring"] * 4) == pytest.approx(plain)
    assert scene_style(1 - images, [""] * 4) == pytest.approx(plain, abs=1e-3)
    assert scene_style(images.transpose(2, 3), [""] * 4) == pytest.approx(plain, abs=0.02)
