"""Preservation of a source image outside of the edited region."""

import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import to_tensor

from flowgrpo.contrib.edits import Preservation
from flowgrpo.errors import UserError
from flowgrpo.rewards.guards import ssim
from tests.helpers.refusals import message
from tests.rewards.test_clip import saved


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(0)
    path = saved(tmp_path / "source.png", torch.rand(3, 24, 24))
    return to_tensor(Image.open(path)), path


def test_an_unchanged_image_scores_1_and_noise_next_to_0(source):
    picture, path = source
    other = torch.rand(3, 24, 24)
    same, changed, none = Preservation()(torch.stack([picture, other, other]), ["p"] * 3,
                                         [{"image": path}, {"image": path}, {}])
    assert same == pytest.approx(1) and abs(changed) < 0.3 and none is None


def test_ssim_is_that_of_a_window_written_out():
    torch.manual_seed(1)
    one, two = torch.rand(2, 11, 11, dtype=torch.float64)
    places = torch.arange(11.0, dtype=torch.float64) - 5
    weights = torch.exp(-(places[:, None] ** 2 + places**2) / (2 * 1.5**2))
    weights /= weights.sum()
    a, b = (weights * one).sum(), (weights * two).sum()
    va, vb = (weights * (one - a) ** 2).sum(), (weights * (two - b) ** 2).sum()
    covariance = (weights * (one - a) * (two - b)).sum()
    expected = ((2 * a * b + 1e-4) * (2 * covariance + 9e-4)) / ((a**2 + b**2 + 1e-4) * (va + vb + 9e-4))
    torch.testing.assert_close(ssim(one, two), expected[None, None])


@pytest.mark.parametrize("measure", ["ssim", "distance"])
def test_what_the_mask_marks_may_change(source, measure, tmp_path):
    picture, path = source
    edited, mask = picture.clone(), Image.new("L", (24, 24))
    edited[:, :8] = 1 - edited[:, :8]
    mask.paste(255, (0, 0, 24, 13))  # beyond the edit, by half a window
    mask.save(tmp_path / "mask.png")
    reward = Preservation(measure=measure)
    entry = {"image": path}
    masked, plain = reward(torch.stack([edited, edited]), ["p"] * 2, [entry | {"mask": str(tmp_path / "mask.png")},
                                                                      entry])
    assert masked == pytest.approx(1) and plain < 0.9
    Image.new("L", (24, 24), 255).save(tmp_path / "all.png")
    assert reward(edited[None], ["p"], [entry | {"mask": str(tmp_path / "all.png")}]) == [None]


def test_distance_is_a_root_mean_square_of_colours(source):
    picture, path = source
    shifted = picture * 0.5
    expected = 1 - (picture - shifted).double().square().mean().sqrt().item()
    assert Preservation(measure="distance")(shifted[None], ["p"], [{"image": path}]) == [pytest.approx(expected)]


def test_mistakes_are_one_line(source, tmp_path):
    assert "measure is 'lpips', expected ssim or distance" in message(Preservation, measure="lpips")
    with pytest.raises(UserError, match="got images of 8 x 8 pixels, expected 11 x 11 or more"):
        Preservation()(torch.zeros(1, 3, 8, 8), ["p"], [{"image": source[1]}])
    with pytest.raises(UserError, match=r"reward 'preservation': .*no\.png cannot be read as an image"):
        Preservation()(torch.zeros(1, 3, 16, 16), ["p"], [{"image": str(tmp_path / "no.png")}])


def test_a_source_that_the_pipeline_squeezed_is_compared_squeezed(tmp_path):
    from flowgrpo.data.images import fit_of, read_image
    from flowgrpo.policies.pipelines.prompt_inputs import watch
    from flowgrpo.tools.check import tiny as pipelines
    wide = Image.new("RGB", (300, 40), "red")
    wide.paste((0, 0, 255), (200, 0, 300, 40))
    wide.save(tmp_path / "wide.png")
    squeezed = to_tensor(wide.resize((64, 64), Image.Resampling.LANCZOS))
    given = squeezed[None], ["p"], [{"image": str(tmp_path / "wide.png")}]
    assert Preservation()(*given)[0] < 0.9 and Preservation(fit="squeeze")(*given)[0] == pytest.approx(1)
    pipe, _ = pipelines.make("WanImageToVideoPipeline")
    watch(pipe)
    pipe.video_processor.preprocess(read_image(tmp_path / "wide.png"), height=64, width=64)
    assert fit_of(tmp_path / "wide.png", (64, 64)) == "squeeze" and fit_of(tmp_path / "wide.png", (32, 64)) == "crop"
    assert Preservation()(*given)[0] == pytest.approx(1)
    assert Preservation(fit="crop")(*given)[0] < 0.9
    assert "fit is 'pad', expected squeeze, crop or nothing" in message(Preservation, fit="pad")
