"""Images of files as latents: what the pipeline decodes is the image as its autoencoder keeps it."""

import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import to_tensor

from flowgrpo.policies.pipelines.frames import rgb
from flowgrpo.policies.pipelines.image_latents import START, ImageEncoder, mode, read, scale_latents
from flowgrpo.tools.check.tiny import make
from tests.helpers import tiny
from tests.helpers.refusals import message, refused


def saved(path, height=16, width=16, seed=0):
    """A colourful image in a file, and what it shows [3, height, width]."""
    values = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed))
    Image.fromarray(values.to(torch.uint8).numpy()).save(path)
    return str(path), values.permute(2, 0, 1) / 255


def policy_of(name):
    pipe, call = make(name)
    return tiny.policy(pipe, call=call)


def test_an_autoencoders_latents_by_its_config():
    z = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 2, 1, 2)
    torch.testing.assert_close(scale_latents(z, {"shift_factor": 0.5, "scaling_factor": 2.0}), 2 * z - 1)
    torch.testing.assert_close(scale_latents(z, {"scaling_factor": 3.0, "shift_factor": None}), 3 * z)
    moments = {"latents_mean": [1.0, 3.0], "latents_std": [0.5, 2.0]}
    wanted = torch.tensor([0.0, 2.0, 0.0, 0.5]).view(1, 2, 1, 2)  # (1-1)/.5, (2-1)/.5, (3-3)/2, (4-3)/2
    torch.testing.assert_close(scale_latents(z, moments), wanted)
    torch.testing.assert_close(scale_latents(z, moments | {"scaling_factor": 4.0}), 4 * wanted)


@pytest.mark.parametrize("name", [
    "StableDiffusion3Pipeline", "FluxPipeline", "QwenImagePipeline", "QwenImage21Pipeline"])
def test_a_round_trip_through_the_pipeline_is_one_through_its_autoencoder(name, tmp_path):
    """Packed or not, of images or of videos of one frame: pipelines' own decoding is the judge."""
    policy = policy_of(name)
    row, latents = policy.encode(["red"]), ImageEncoder(policy)
    drawn = policy.run(START, row, None, policy.generators([1]))[0]
    path, shown = saved(tmp_path / "a.png", *policy.decode(drawn, row).shape[-2:])
    latent, picture = latents(path, row)
    torch.testing.assert_close(picture, shown, atol=1e-6, rtol=0)
    assert latent.shape == drawn.shape and latent.dtype == drawn.dtype
    vae = policy.pipe.vae
    opaque = torch.ones(vae.config.get("in_channels", 3) - 3, *shown.shape[1:])
    with torch.no_grad():
        kept = vae.decode(mode(vae, 2 * torch.cat([shown, opaque])[None] - 1), return_dict=False)[0]
    kept = kept[:, :, 0] if kept.ndim == 5 else kept
    kept = rgb((kept / 2 + 0.5).clamp(0, 1), policy.pipe)
    torch.testing.assert_close(policy.decode(latent, row), kept, atol=1e-5, rtol=0)
    assert not torch.equal(policy.decode(latent, row), policy.decode(drawn, row))


def test_a_image_is_encoded_once(tmp_path):
    policy = tiny.policy()
    row, latents = policy.encode(["red"]), ImageEncoder(policy)
    first, second = (saved(tmp_path / f"{name}.png", seed=seed)[0] for seed, name in enumerate("ab"))
    encoded = []
    policy.pipe.vae.encoder.register_forward_hook(lambda *_: encoded.append(1))
    one, two = latents(first, row)[0], latents(second, row)[0]
    assert len(encoded) == 2 and not torch.equal(one, two)
    assert latents(first, row)[0] is one and len(encoded) == 2 and latents.known.keys() == {first, second}


def test_images_fill_the_runs_size(tmp_path):
    wide = torch.zeros(3, 8, 32)
    wide[0, :, 12:20] = 1  # red in the middle, which is kept; what stands over on both sides is cut off
    Image.fromarray((wide.permute(1, 2, 0) * 255).to(torch.uint8).numpy()).save(tmp_path / "wide.png")
    found = read(tmp_path / "wide.png", (16, 16))
    assert found.shape == (3, 16, 16) and torch.equal(found[1:], torch.zeros(2, 16, 16))
    assert found[0, :, 2:-2].min() > 0.9
    with Image.open(tmp_path / "wide.png") as picture:
        assert torch.equal(read(tmp_path / "wide.png", (8, 32)), to_tensor(picture))


def test_a_broken_image_is_told_in_one_line(tmp_path):
    (tmp_path / "a.png").write_text("no image")
    refused(r"preferences: .*a\.png cannot be read as an image \(it is damaged.*\)$", read, tmp_path / "a.png",
            (16, 16))


def test_a_pipeline_with_other_latents_is_refused(tmp_path):
    """Flux.2 folds and normalises its latents in a way of its own."""
    policy = policy_of("Flux2Pipeline")
    path, _ = saved(tmp_path / "a.png")
    refused("Flux2Pipeline cannot be encoded: .*use a method that samples its images", ImageEncoder(policy), path,
            policy.encode(["red"]))


def test_a_wrong_scale_is_found_out(tmp_path):
    """The autoencoder's config says one scale and the pipeline's decoding another."""
    policy = tiny.policy()
    path, _ = saved(tmp_path / "a.png")
    row, latents = policy.encode(["red"]), ImageEncoder(policy)
    latents.vae = tiny.sd3(seed=1).vae
    assert "it decodes what its autoencoder gives to another image" in message(latents, path, row)
