"""Motion of clips, PIQE, and preservation of a source image: against computations by hand."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from torchvision.transforms.functional import to_tensor

from flowgrpo.contrib.edits import Preservation
from flowgrpo.contrib.pixels import along, distortion, piqe
from flowgrpo.errors import UserError
from flowgrpo.rewards.guards import ssim
from tests.helpers.refusals import message
from tests.helpers.tiny_scorers import as_pil
from tests.rewards.test_guards import landscape, spoilt
from tests.rewards.test_guards import scores_of as scores
from tests.rewards.test_video_motion import scored, square


def test_directions_of_clips_and_prompts():
    ways = ["right", "left", "up", "down", "right", "right"]
    clips = [square((3, 0))] * 4 + [square((2, 2)), square((0, 0))]
    right, left, up, down, diagonal, still = scored("flow_direction", clips, [{"direction": way} for way in ways])
    assert right > 0.95 and left < -0.95 and abs(up) < 0.15 and abs(down) < 0.15 and still == 0
    assert diagonal == pytest.approx(0.5**0.5, abs=0.1)
    clips = [square((0, 3))] * 2
    assert min(scored("flow_direction", clips, direction="down")) > 0.95
    asked, not_asked = scored("flow_direction", clips, [{"direction": "up"}, {}])
    assert asked < -0.95 and math.isnan(not_asked)
    with pytest.raises(UserError, match="the direction is 'sideways', expected left, right, up, down"):
        scored("flow_direction", clips, [{"direction": "sideways"}] * 2)


@pytest.mark.parametrize("moves, share", [
    ([(0.11, 0)] * 4, 1), ([(0.09, 0)] * 4, 0), ([(0, 0)] * 4, 0),  # a tenth of a pixel is no motion
    ([(3, 4), (0, 5)], 0.3), ([(3, 0), (-1, 0)], 0.5),  # longer moves count more
])
def test_the_share_of_the_motion_along_a_direction(moves, share):
    assert along(np.array(moves), np.array((1, 0))) == pytest.approx(share, abs=1e-12)


def block_by_block(light: np.ndarray) -> float:
    """PIQE as its paper tells it, one block after another."""
    weights = np.exp(-0.5 * (np.arange(-3, 4) / (7 / 6))**2)
    kernel = np.outer(weights, weights) / weights.sum()**2
    mean = ndimage.correlate(light, kernel, mode="nearest")
    deviation = np.sqrt(np.abs(ndimage.correlate(light**2, kernel, mode="nearest") - mean**2))
    normal, harms = (light - mean) / (deviation + 1), []
    for top in range(0, len(light), 16):
        for left in range(0, light.shape[1], 16):
            block = normal[top:top + 16, left:left + 16]
            variance = block.var(ddof=1)
            if variance <= 0.1:
                continue
            edges = [block[0], block[15], block[:, 0], block[:, 15]]
            artefact = any(edge[i:i + 6].std(ddof=1) < 0.1 for edge in edges for i in range(11))
            around = np.concatenate([block[:, :7].ravel(), block[:, 9:].ravel()]).std(ddof=1)
            ratio, sigma = block[:, 7:9].std(ddof=1) / around, variance**0.5
            noise = sigma > 2 * abs(sigma - ratio) / max(sigma, ratio)
            harms.append(artefact * (1 - variance) + noise * variance)
    return 100 * (sum(harms) + 1) / (len(harms) + 1)


def test_piqe_of_mirrored_and_spoilt_images():
    for light in spoilt().values():
        assert distortion(light) == pytest.approx(block_by_block(light), rel=1e-9)
    light = landscape()[:90, :85]
    padded = np.vstack([np.hstack([light, light[:, :-12:-1]]), np.hstack([light, light[:, :-12:-1]])[:-7:-1]])
    assert padded.shape == (96, 96) and distortion(light) == pytest.approx(block_by_block(padded), rel=1e-9)
    pictures = spoilt()
    noisy, clean, flat = scores(piqe, pictures["noisy"], pictures["clean"], np.full((96, 96), 128.0))
    assert flat == 0 and noisy < clean - 0.1 and 0 <= noisy and clean <= 1


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(0)
    path = str(tmp_path / "source.png")
    as_pil(torch.rand(3, 24, 24)).save(path)
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


def test_distances_of_colours_and_mistakes(source, tmp_path):
    picture, path = source
    shifted = picture * 0.5
    expected = 1 - (picture - shifted).double().square().mean().sqrt().item()
    assert Preservation(measure="distance")(shifted[None], ["p"], [{"image": path}]) == [pytest.approx(expected)]
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
