"""Measures of sets of images: looks, FID, KID, and scores under shuffled prompts."""

import json
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter

from flowgrpo import rewards
from flowgrpo.cli import main
from flowgrpo.config import validate
from flowgrpo.config.reward_rules import WatchRule
from flowgrpo.data.prompts import Prompt
from flowgrpo.evaluation import distances, findings, looks
from flowgrpo.evaluation.distances import score_shuffled, shuffle, structure
from flowgrpo.evaluation.evaluate import evaluate
from flowgrpo.evaluation.looks import Looks
from flowgrpo.evaluation.report import report
from flowgrpo.evaluation.report.verdict import sentences
from flowgrpo.evaluation.statistics import blind, change
from flowgrpo.rewards import About
from flowgrpo.rewards.find import find
from flowgrpo.rewards.guards import edge_widths
from flowgrpo.rewards.starter import scene
from flowgrpo.starter import scenes
from tests.evaluation.test_images import make_run
from tests.helpers import tiny, tiny_runs
from tests.helpers.refusals import error_line


def rendered(count: int, seed: int, task: str = "two") -> torch.Tensor:
    rng = np.random.default_rng(seed)
    images = [scenes.render(scenes.sample_claims(rng, task), rng) for _ in range(count)]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float()


def blurred(images: torch.Tensor, sigma: float) -> torch.Tensor:
    return torch.from_numpy(gaussian_filter(images.numpy(), (0, 0, sigma, sigma)))


def photograph(side: int = 96, seed: int = 0) -> torch.Tensor:
    """Noise with the spectrum of photographs, amplitudes 1 / frequency, beside an edge."""
    generator = torch.Generator().manual_seed(seed)
    spectrum = torch.fft.fft2(torch.randn(3, side, side, generator=generator))
    frequency = torch.fft.fftfreq(side)[:, None].hypot(torch.fft.fftfreq(side)[None]).clamp(min=1 / side)
    image = torch.fft.ifft2(spectrum / frequency).real
    image = 0.5 + 0.1 * image / image.std()
    image[..., side // 2:] += 0.3
    return image.clamp(0, 1)[None]


def step(width: float, height: float = 0.8) -> torch.Tensor:
    """An edge with the profile of a Gaussian of that deviation; 0: between two pixels."""
    at = torch.arange(64, dtype=torch.float64) - 31.5
    line = (at > 0).double() if not width else 0.5 * (1 + torch.erf(at / width / 2**0.5))
    return (0.1 + height * line).expand(1, 3, 64, 64)


def test_edge_widths_by_hand_and_of_larger_images():
    assert edge_widths(step(0)).item() == pytest.approx(1)
    assert edge_widths(step(3)).item() == pytest.approx(6, rel=0.02)
    assert edge_widths(step(3, 0.1)).item() == pytest.approx(edge_widths(step(3)).item())
    assert math.isnan(edge_widths(torch.full((1, 3, 8, 8), 0.5)).item())
    assert math.isnan(edge_widths(torch.rand(1, 3, 2, 8)).item())
    crispness = find("crispness")
    assert crispness(torch.cat([step(0), torch.full((1, 3, 64, 64), 0.5)]), [""] * 2) == [pytest.approx(1), None]
    image = photograph(128)
    framed = torch.full_like(image, 0.5)
    framed[..., 32:96, 32:96] = image[..., 32:96, 32:96]
    laplacian = find("sharpness")
    for other in (framed, image * 0.6 + 0.2):
        assert edge_widths(other).item() == pytest.approx(edge_widths(image).item(), rel=0.1)
        assert laplacian(other, [""]).item() < 0.5 * laplacian(image, [""]).item()
    one, many = (scene.edge_widths(rendered(24, 3, task)) for task in ("single", "counting"))
    assert np.nanmean(one) == pytest.approx(np.nanmean(many), rel=0.03)


@pytest.mark.parametrize("images, widths", [
    (rendered(12, 1), edge_widths), (rendered(12, 1), lambda of: torch.tensor(scene.edge_widths(of))),
    (photograph(), edge_widths)])
def test_edge_widths_grow_with_blur_and_a_blur_of_half_a_pixel_is_above_the_limits(images, widths):
    base, *others = (widths(image).nanmean().item() for image in (
        images, *(blurred(images, sigma) for sigma in (0.25, 0.5, 1, 2))))
    assert base * 0.999 <= others[0] < others[1] < others[2] < others[3]
    assert others[1] / base > looks.WIDE


def test_contours_and_diversity_by_hand():
    assert find("scene_edge_width")(torch.full((1, 3, 64, 64), 0.9), ["x"]) == [None]
    [width] = find("scene_edge_width")(rendered(1, 2), ["x"])
    assert 0.8 < width < 1.5
    found = looks.features(rendered(2, 2), "starter")
    assert found[:, 0].tolist() == pytest.approx(scene.edge_widths(rendered(2, 2)))
    assert looks.features(rendered(2, 2), "other")[:, 0].tolist() == pytest.approx(edge_widths(rendered(2, 2)).tolist())
    black, white = torch.zeros(3, 16, 16), torch.ones(3, 16, 16)
    found = looks.features([black, white, white, white, black])
    assert looks.measure_looks(found, [0, 0, 1, 1, 2]).diversity == pytest.approx(0.5)  # 1 and 0; of one there is none
    assert looks.measure_looks(found, [0, 0, 1, 1, 2], [True, False, False]).diversity == 0
    assert math.isnan(looks.measure_looks(found, [0, 1, 2, 3, 4]).diversity)
    clip = torch.stack([black, white, black])
    assert looks.features(clip[None])[:, 1:].tolist() == looks.features([white])[:, 1:].tolist()


def test_shares_and_second_images():
    base = Looks(2.0, 0.4)
    assert Looks(2.5, 0.2).relative_to(base) == {"edge_width": 1.25, "diversity": 0.5}
    assert not any(one.relative_to(other) for one, other in (
        (Looks(), base), (Looks(1.0, 1.0), Looks()), (Looks(1.0, 1.0), Looks(0.0, 0.0))))
    assert looks.describe_looks({"edge_width": 1.25, "diversity": 0.5}) == [
        ("warn", "Edges are 1.25 times as wide as the base's: the images are blurred."),
        ("warn", "Images of a prompt are 0.50 times as far apart as the base's: they became alike.")]
    assert [tone for tone, _ in looks.describe_looks({"edge_width": 1.05, "diversity": 0.95})] == ["plain", "plain"]
    assert looks.describe_looks({}) == [] and looks.read(json.loads(json.dumps(base.as_json()))) == base
    assert looks.read(None).relative_to(base) == looks.read(Looks().as_json()).relative_to(base) == {}
    assert base.relative_to(base)["diversity"].certain  # without the prompts' values, the number alone counts
    assert [looks.twins(*given) for given in ((64, 1), (240, 1), (6, 1), (64, 2))] == [8, 30, 6, 0]


def looked(widths: list[float], apart: list[float | None]) -> Looks:
    return Looks(np.mean(widths), np.mean([value for value in apart if value is not None]),
                 {"edge_width": widths, "diversity": apart})


def test_looks_are_compared_by_prompts():
    """By hand: distances 0.4 become 0.3, with a change of 0.1 +- 0.08 of eight prompts: t is 1/4 per sqrt(8 - 1)."""
    none: list[float | None] = [None] * 8
    base = looked([2.0] * 16, [0.4] * 8 + none)
    sure, unsure = (looked([2.5] * 16, [0.3 + side * spread for side in (-1, 1)] * 4 + none) for spread in (0.02, 0.16))
    for now, certain in ((sure, True), (unsure, False)):
        now = looks.read(json.loads(json.dumps(now.as_json())))
        shares = now.relative_to(looks.read(json.loads(json.dumps(base.as_json()))))
        found = shares["diversity"]
        moved = change(np.full((8, 1), 0.4), np.array(now.of_prompts["diversity"][:8])[:, None])
        assert found == pytest.approx(0.75) and found.interval.prompts == 8 and found.certain is certain
        assert (found.interval.low, found.interval.high) == pytest.approx((1 + moved.low / 0.4, 1 + moved.high / 0.4))
        assert shares["edge_width"] == 1.25 and shares["edge_width"].certain
        ends = f"(95 %: {found.interval.low:.2f} to {found.interval.high:.2f})" + (
            ": they became alike." if certain else ", which may be chance.")
        assert looks.describe_looks(shares) == [
            ("warn", "Edges are 1.25 times as wide as the base's (95 %: 1.25 to 1.25): the images are blurred."),
            ("warn" if certain else "plain", f"Images of a prompt are 0.75 times as far apart as the base's {ends}")]
    few = looked([2.5] * 7, [0.2] * 7).relative_to(looked([2.0] * 7, [0.4] * 7))
    assert [(tone, text.partition("): ")[2]) for tone, text in looks.describe_looks(few)] == [
        ("plain", "too few prompts to tell (at least 8).")] * 2
    other = looked([2.5] * 7, [0.2] * 7).relative_to(base)  # of another number of prompts, the means
    assert other == pytest.approx({"edge_width": 1.25, "diversity": 0.5}) and other["diversity"].interval is None


def test_a_lost_prompt_keeps_its_place():
    found = looks.features(rendered(4, 2))
    whole, without = (looks.measure_looks(found, [0, 0, 1, 1], lost) for lost in ((), [False, True]))
    assert without.of_prompts == {name: [values[0], None] for name, values in whole.of_prompts.items()}
    shares = without.relative_to(whole)
    assert shares == {"edge_width": 1, "diversity": 1} and shares["diversity"].interval.prompts == 1


@pytest.mark.parametrize("samples", [1, 2])
def test_a_run_reports_the_looks_of_its_held_out_images(tmp_path, samples):
    config = tiny.config(tmp_path, train__epochs=2, train__lr=0.05, eval__every=1, eval__prompts=3, held_out=0.5,
                         eval__samples=samples, train__micro_batch=8)
    summary = tiny_runs.whole(config)
    before, after = (looks.read(summary["looks"][when]) for when in ("before", "after"))
    assert before.edge_width > 0 and before.diversity > 0
    stages = report.read_stages(config.folder)
    assert looks.read(stages[0]["looks"]) == before and looks.read(stages[-1]["looks"]) == after
    lines = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    share = after.relative_to(before)
    assert {key: lines[-1][f"of_base/{key}"] for key in ("edge_width", "diversity")} == pytest.approx(share)
    found = report.data(config.folder)
    [chart] = [chart for chart in found["charts"] if chart["title"] == "Looks, of the base"]
    assert [series["label"] for series in chart["series"]] == ["edge width", "diversity within a prompt"]
    assert all(series["y"][0] == 1 and series["x"] == [0, 1, 2, 2] for series in chart["series"])
    assert any(sentence["text"].startswith(f"Edges are {share['edge_width']:.2f} times as wide")
               for sentence in found["sentences"])


FEATURES = """
import torch

linear = torch.nn.Linear(12, 3)
network = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), linear, torch.nn.Tanh())
for i, weight in enumerate(network.parameters()):
    torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(i))

def features(images):
    return network(images)

def broken(images):
    return features(images) / 0
"""


def gaussian(mean, std, rotation=None, count=40, seed=0):
    """Points [count, D] whose sample mean and covariance are exactly `mean` and R diag(std^2) R^T."""
    points = torch.randn(count, len(mean), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    points = points - points.mean(0)
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(torch.cov(points.T)), points.T, upper=False).T
    scaled = white * torch.tensor(std, dtype=torch.float64)
    return (scaled if rotation is None else scaled @ rotation.T) + torch.tensor(mean, dtype=torch.float64)


@pytest.mark.fast
def test_fid_is_the_frechet_distance_of_gaussians():
    """|m1 - m2|^2 + |s1 - s2|^2, in any rotation: (3, -1, 2) apart, stds 1, 2, 0 and 2, 5, 1.

    A std of 0 is 1e-8 in float64: the root of a rounding of 1e-16.
    """
    rotation, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7)))
    for turned in (None, rotation):
        one = gaussian([0.0, 0.0, 0.0], [1.0, 2.0, 0.0], turned)
        other = gaussian([3.0, -1.0, 2.0], [2.0, 5.0, 1.0], turned, 60, 1)
        assert distances.fid(one, other) == pytest.approx(14 + 1 + 9 + 1, abs=1e-6)
        assert distances.fid(other, one) == pytest.approx(25, abs=1e-6)
        assert distances.fid(one, one) == pytest.approx(0, abs=1e-6)
    # The trace of (S1 S2)^(1/2) is the sum of the roots of the eigenvalues of S1 S2, as torchmetrics takes it.
    generator = torch.Generator().manual_seed(3)
    one, other = (torch.randn(50, 6, generator=generator) @ torch.randn(6, 6, generator=generator) for _ in range(2))
    first, second = torch.cov(one.double().T), torch.cov(other.double().T)
    root = torch.linalg.eigvals(first @ second).sqrt().real.sum()
    means = (one.double().mean(0) - other.double().mean(0)).square().sum()
    expected = float(means + first.trace() + second.trace() - 2 * root)
    assert distances.fid(one, other) == pytest.approx(expected, rel=1e-9)


def test_kid_is_the_unbiased_double_sum():
    generator = torch.Generator().manual_seed(5)
    one, other = torch.randn(5, 4, generator=generator), torch.randn(7, 4, generator=generator) + 0.3
    def kernel(x, y):
        return (sum(a * b for a, b in zip(x, y)) / 4 + 1) ** 3
    x, y = one.tolist(), other.tolist()
    within = [sum(kernel(p, q) for i, p in enumerate(z) for j, q in enumerate(z) if i != j) / (len(z) * (len(z) - 1))
              for z in (x, y)]
    across = sum(kernel(p, q) for p in x for q in y) / 35
    assert distances.kid(one, other) == pytest.approx(sum(within) - 2 * across, rel=1e-10)
    # Over many pairs of sets of one distribution its mean is 0, within five standard errors.
    draws = torch.randn(400, 2, 6, 3, generator=torch.Generator().manual_seed(0))
    found = torch.tensor([distances.kid(*pair) for pair in draws], dtype=torch.float64)
    assert found.mean().abs() < 5 * found.std() / 20 and (found < 0).any()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A finished run, and files beside it: a suite of twenty prompts and a network."""
    folder = tmp_path_factory.mktemp("world")
    make_run(folder / "run", tiny.save(tiny.sd3(), folder / "model"), 0.3)
    (folder / "suite.txt").write_text("".join(f"a red hat {i}\n" for i in range(20)))
    (folder / "network.py").write_text(FEATURES)
    return folder


def test_an_evaluation_compares_all_tuned_images_with_the_bases(world):
    """Added to a finished evaluation, it samples nothing again; a table's note and results.json have it."""
    given = (str(world / "run"), str(world / "suite.txt"), [f"{world}/run/bright.py:bright"], world / "out")
    assert "distances" not in evaluate(*given, base=True, steps=2)
    network = f"{world}/network.py:features"
    results = evaluate(*given, base=True, steps=2, features=network, distance=["fid", "kid"])
    extract = distances.guards.extractor(network)
    base, tuned = (torch.cat([extract(distances.guards.read_tensor(path)[None]).detach() for path in sorted(
        (world / "out" / "pictures" / arm).glob("*.png"))]) for arm in ("base", "tuned"))
    assert results["distances"] == {"features": network, "images": 20,
                                    "fid": pytest.approx(distances.fid(base, tuned), rel=1e-6),
                                    "kid": pytest.approx(distances.kid(base, tuned), rel=1e-6)}
    assert json.loads((world / "out" / "results.json").read_text())["distances"] == results["distances"]
    assert results["distances"]["fid"] > 0
    [note] = [note for note in findings.notes(results) if "to the base's, 20 each" in note]
    assert f"fid {results['distances']['fid']:.4g}, kid" in note


@pytest.mark.parametrize("options, told", [
    (["--distance=fid"], "--distance: is of the tuned images to the base's: add --base"),
    (["--distance=fid", "--base"], "--distance: is of the features of a network: add --features inception (those of "
     "published FID), --features clip, or "),
    (["--distance=fidd", "--base", "--features={network}"], "--distance: got 'fidd', expected fid or kid, or both"),
    (["--distance=kid", "--base", "--features={network}", "--suite={folder}/few.txt"],
     "--distance kid: got 3 images of each model, expected at least 20: raise --samples, or use a longer suite"),
    (["--distance=kid,fid", "--base", "--features={folder}/wide.py:features"],
     "--distance fid: got 20 images of each model, expected at least 49, one more than there are features: raise"),
    (["--distance=kid", "--base", "--features={folder}/network.py:broken", "--steps=1"],
     "--distance: --features returned nan or inf")])
def test_what_has_no_distance_is_one_line(options, told, world, tmp_path, capsys):
    (world / "few.txt").write_text("a\nb\nc\n")
    (world / "wide.py").write_text("def features(images):\n    return images[:, :, :4, :4].flatten(1)\n")
    given = [option.format(network=f"{world}/network.py:features", folder=world) for option in options]
    suite = [] if any(option.startswith("--suite") for option in given) else [f"--suite={world}/suite.txt"]
    reward = f"--rewards={world}/run/bright.py:bright"
    assert told in error_line(capsys, "eval", world / "run", reward, f"--output={tmp_path / 'out'}", *suite, *given)


POLICY = SimpleNamespace(device=torch.device("cpu"), fps=None)
PROMPTS = [Prompt(f"prompt {i}", metadata={"value": i, "even": i % 2 == 0}) for i in range(40)]
IMAGES = torch.arange(40.0).div(40)[:, None, None, None].expand(40, 3, 4, 4)


def fits(images, prompts, metadata):
    """1 for the image of its own prompt, less for others; draws from every random state."""
    random.random(), np.random.rand(), torch.rand(1)
    assert all(prompt == f"prompt {entry['value']}" for prompt, entry in zip(prompts, metadata))
    return [1 - abs(round(image.mean().item() * 40) - entry["value"]) / 40 for image, entry in zip(images, metadata)]


def unasked(**said):
    """A reward that says so of itself, and is not asked."""
    def reward(images, prompts, metadata, group=None, base=None):
        raise AssertionError("asked")
    vars(reward).update(said)
    return reward


def test_prompts_are_shuffled_and_none_gets_its_own():
    shuffled = shuffle({"fits": fits, "remote": unasked(about=About(needs="server")), "group": unasked(group=True),
                        "based": unasked(base=True)}, PROMPTS)
    assert [*shuffled] == ["fits"] and len(shuffled["fits"][1]) == 32
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    scores = score_shuffled(shuffled, [0, None, 20, 35], IMAGES[[0, 1, 20, 35]], POLICY)[:, 0]
    torch.testing.assert_close(scores, torch.tensor([1 - 16 / 40, math.nan, 1 - 16 / 40, math.nan]), equal_nan=True)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[:2]
    assert torch.equal(torch.get_rng_state(), states[2])
    reward = rewards.Composed(fits, WatchRule(when={"even": True}), name="fits")
    [(_, others)] = shuffle({"fits": reward}, PROMPTS).values()
    assert {i: other.metadata["value"] for i, other in others.items()} == {i: (i + 16) % 32 for i in range(0, 32, 2)}
    # Of 16 prompts that are 8, twice, another one is 7 or 9 away; of 7 prompts, and of one 16 times, there is none.
    [(_, others)] = shuffle({"fits": fits}, PROMPTS[:8] * 2).values()
    assert len(others) == 16 and all(other.metadata["value"] == (i + 7) % 8 for i, other in others.items())
    assert not shuffle({"fits": fits}, PROMPTS[:7])
    assert not shuffle({"fits": fits}, PROMPTS[:1] * 16)
    def fails(images, prompts, metadata):
        raise KeyError("value")
    assert score_shuffled(shuffle({"it": fails}, PROMPTS), [0, 1], IMAGES[:2], POLICY).isnan().all()


OWN = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]  # mean 0.35
SAME = ("reward 'x' gives images the same scores under other prompts ({} on 8 images): it does not tell whether an "
        "image fits its prompt")
MAY = ("reward 'x' may not tell whether an image fits its prompt: on 8 images {} under other prompts against {} under "
       "their own, a difference of {} (95 %); more eval.prompts narrow it")


@pytest.mark.parametrize("own, other, said", [
    (OWN, [0.1, 0.0, 0.3, 0.2, 0.5, 0.4, 0.7, 0.68], ("warn", SAME.format("0.360 against 0.350"))),
    ([0.5] * 8, [0.5] * 8, ("warn", SAME.format("0.500 against 0.500"))),
    ([1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0], [0.0] * 8,
     ("plain", MAY.format("0.000", "0.250", "-0.120 to +0.591"))),
    (OWN, OWN[::-1], ("plain", MAY.format("0.350", "0.350", "-0.511 to +0.511"))),
    (OWN, OWN, ("plain", "reward 'x' does not read the prompt: 8 images have the same scores under other prompts")),
    (OWN, [value - 0.1 for value in OWN], None), (OWN, [math.nan, *OWN[1:]], None), (OWN, [None, *OWN[1:]], None),
    ([1.0] * 8, [0.0] * 8, None)])
def test_what_a_reward_cannot_tell(own, other, said):
    assert blind({"x": own}, {"x": other}) == ([said] if said else [])
    shown = sentences(validate({}), [], [], {}, False, base={"scores": {"x": own}, "shuffled": {"x": other}})[1:]
    assert [(each["tone"], each["text"]) for each in shown] == ([(said[0], f"R{said[1][1:]}.")] if said else [])


def test_structure_is_ssim_of_pairs():
    """Of equal images 1; of black and white (0 0 + c1) (0 + c2) / ((1 + c1) (0 + c2)), c1 = 0.0001. Half a level does
    not count."""
    black = torch.zeros(1, 3, 12, 12)
    assert structure(black, black + 0.4 / 255) == {"ssim": 1.0, "images": 1}
    found = structure(torch.cat([black, black]), torch.cat([black, black + 1]))
    assert found == {"ssim": pytest.approx((1 + 1e-4 / 1.0001) / 2), "images": 2}
    [shown] = [each["text"] for each in sentences(validate({}), [], [], {}, True, {"structure": found})[1:]]
    assert shown == "Images have kept 0.50 of the base's structure (SSIM of the same prompts and seeds, 2 images)."
    # A chequerboard of single pixels and its negative are the same grey at half the size.
    board = (torch.arange(512)[:, None] + torch.arange(512)).remainder(2).float().expand(1, 3, -1, -1)
    assert structure(board, 1 - board) == {"ssim": pytest.approx(1.0), "images": 1}
    small = board[..., :64, :64]
    assert structure(small, 1 - small)["ssim"] < -0.9


@pytest.mark.parametrize("base, tuned", [
    (["a"], ["b"]), (torch.zeros(1, 2, 3, 12, 12), torch.zeros(1, 2, 3, 12, 12)), (torch.empty(0), torch.empty(0)),
    (torch.zeros(1, 3, 10, 12), torch.zeros(1, 3, 10, 12)), (torch.zeros(1, 3, 12, 12), torch.zeros(2, 3, 12, 12))])
def test_there_is_no_structure_of_texts_clips_or_small_images(base, tuned):
    assert structure(base, tuned) is None


REWARDS = '''
def bright(images, prompts):
    return images.mean((1, 2, 3))

seen = {}

def fits(images, prompts):
    """1 for an image under the first prompt with which it came."""
    return [float(seen.setdefault(image.numpy().tobytes(), prompt) == prompt) + 0.1 * float(image.mean())
            for image, prompt in zip(images, prompts)]
'''


def test_a_run_says_which_reward_does_not_read_the_prompt_and_how_like_the_bases_its_images_are(
        here, capsys):
    (here / "rewards.py").write_text(REWARDS)
    (here / "prompts.txt").write_text("".join(f"{count} {thing}\n" for count in "abc" for thing in (
        "star", "circle", "square", "cross")))
    assert main(["train", "starter", "--reward={rewards.py:bright: 1, rewards.py:fits: 1}", "--prompts=prompts.txt",
                 "--held_out=0.67", "--train.epochs=1", "--train.prompts=1", "--train.group=4", "--train.steps=4",
                 "--train.updates=1", "--train.lr=1e-2", "--method=mix_grpo", "--parts={plan: {size: 1}}",
                 "--eval.steps=2", "--eval.prompts=8", "--eval.grid=8", "--eval.rewards=[]", "--tracker=none",
                 "--output=runs", "--precision=fp32"]) == 0
    run, out = here / "runs" / "starter", capsys.readouterr().out
    said = "reward 'rewards.py:bright' does not read the prompt: 8 images have the same scores under other prompts"
    assert [line for line in out.splitlines() if "under other prompts" in line] == [said, f"R{said[1:]}."]
    base = json.loads((run / "before.json").read_text())
    assert base["shuffled"]["rewards.py:bright"] == base["scores"]["rewards.py:bright"]
    assert base["shuffled"]["rewards.py:fits"] == pytest.approx(
        [score - 1 for score in base["scores"]["rewards.py:fits"]])
    before, after = (torch.stack([torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) / 255
                                  for file in sorted((run / when).glob("[0-9]*.png"))]) for when in ("before", "after"))
    found = json.loads((run / "summary.json").read_text())["structure"]
    assert found == {"ssim": pytest.approx(structure(before, after)["ssim"], abs=1e-6), "images": 8}
    assert found["ssim"] < 0.999
    kept = f"have kept {found['ssim']:.2f} of the base's structure (SSIM of the same prompts and seeds, 8 images)."
    page = (run / "report.html").read_text()
    assert kept in out and kept in page and f"R{said[1:]}." in page
