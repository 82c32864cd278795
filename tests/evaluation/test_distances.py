"""FID and KID of two sets of images: against closed forms, by hand, and in `flowgrpo eval`."""

import json

import pytest
import torch

from flowgrpo.cli import main
from flowgrpo.evaluation import distances, findings
from flowgrpo.evaluation.evaluate import evaluate
from tests.evaluation.test_images import make_run
from tests.helpers import tiny

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


def test_fid_of_gaussians_with_common_axes_is_the_distance_of_means_and_stds():
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


def test_fid_of_other_covariances_has_the_eigenvalues_of_their_product():
    """The trace of (S1 S2)^(1/2) is the sum of the roots of the eigenvalues of S1 S2, as torchmetrics takes it."""
    generator = torch.Generator().manual_seed(3)
    one, other = (torch.randn(50, 6, generator=generator) @ torch.randn(6, 6, generator=generator) for _ in range(2))
    first, second = torch.cov(one.double().T), torch.cov(other.double().T)
    root = torch.linalg.eigvals(first @ second).sqrt().real.sum()
    means = (one.double().mean(0) - other.double().mean(0)).square().sum()
    expected = float(means + first.trace() + second.trace() - 2 * root)
    assert distances.fid(one, other) == pytest.approx(expected, rel=1e-9)


def test_kid_is_the_double_sum_without_the_diagonal():
    generator = torch.Generator().manual_seed(5)
    one, other = torch.randn(5, 4, generator=generator), torch.randn(7, 4, generator=generator) + 0.3
    def kernel(x, y):
        return (sum(a * b for a, b in zip(x, y)) / 4 + 1) ** 3
    x, y = one.tolist(), other.tolist()
    within = [sum(kernel(p, q) for i, p in enumerate(z) for j, q in enumerate(z) if i != j) / (len(z) * (len(z) - 1))
              for z in (x, y)]
    across = sum(kernel(p, q) for p in x for q in y) / 35
    assert distances.kid(one, other) == pytest.approx(sum(within) - 2 * across, rel=1e-10)


def test_kid_is_unbiased():
    """Over many pairs of sets of one distribution its mean is 0, within five standard errors."""
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
    assert main(["eval", str(world / "run"), reward, f"--output={tmp_path / 'out'}", *suite, *given]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("flowgrpo: error")]
    assert told in line
