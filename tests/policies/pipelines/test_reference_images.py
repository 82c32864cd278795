"""Reference images: one per prompt, seen by that prompt alone, and encoded once."""

import pytest
import torch
from diffusers import AutoencoderTiny
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKLOutput
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image

from flowgrpo.config.sections import Adapter
from flowgrpo.policies.pipelines.call import EncoderCache
from flowgrpo.policies.pipelines.call import join as join_rows
from flowgrpo.policies.pipelines.conditioning import PromptCache, digest, join
from flowgrpo.policies.pipelines.pipeline import PLACED, PipelinePolicy
from flowgrpo.policies.pipelines.probes import other
from flowgrpo.samplers.grids import shift_grid
from flowgrpo.samplers.scheduler import Segment
from flowgrpo.tools.check import tiny
from tests.helpers.refusals import message


def policy(name="FluxKontextPipeline", **more):
    pipe, call = tiny.make(name)
    return PipelinePolicy(pipe, Adapter(rank=2), call=call | more, guidance=2.0)


@pytest.fixture(scope="module")
def kontext():
    return policy()


@pytest.fixture
def files(tmp_path):
    for name in ("red", "blue"):
        Image.new("RGB", (16, 16), name).save(tmp_path / f"{name}.png")
    return [str(tmp_path / f"{name}.png") for name in ("red", "blue")]


def output(policy, conditioning, rows=2):
    x = torch.ones(rows, 16, 16) * 0.5
    with torch.no_grad():
        return policy.replay(conditioning, x, shift_grid(3, 3.0), 1)


def test_every_row_sees_the_image_of_its_prompt(kontext, files):
    conditioning = kontext.encode(["a", "a"], images=files)
    assert [image.getpixel((0, 0)) for image in conditioning.inputs["image"]] == [(255, 0, 0), (0, 0, 255)]
    together = output(kontext, conditioning)
    assert (together[0] - together[1]).abs().max() > 1e-3
    swapped = output(kontext, conditioning.rows(torch.tensor([1, 0])))
    torch.testing.assert_close(swapped, together.flip(0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["FluxKontextPipeline", "QwenImageEditPipeline"])
@pytest.mark.parametrize("encoder", [True, False])
def test_images_of_other_shapes_change_nobodys_row(name, encoder, tmp_path):
    """These pipelines bring all images of a call to the shape of the first one."""
    for file, size in (("square", (16, 16)), ("wide", (64, 16))):
        noise = torch.rand(*size[::-1], 3, generator=torch.Generator().manual_seed(size[0]))
        Image.fromarray((255 * noise).byte().numpy()).save(tmp_path / f"{file}.png")
    live, images = policy(name), [str(tmp_path / "square.png"), str(tmp_path / "wide.png")]
    encode = PromptCache(live) if encoder else live.encode
    task = Segment(shift_grid(3, 3.0), range(3))
    def drawn(rows: list[int]) -> torch.Tensor:
        conditioning = encode(["a"] * len(rows), [""] * len(rows), [images[i] for i in rows])
        return live.run(task, conditioning, None, live.generators(rows))[0]
    together = drawn([0, 1])
    for row in (0, 1):
        torch.testing.assert_close(together[row], drawn([row])[0], rtol=0, atol=1e-5)


def test_what_is_learned_of_prompts_without_images_is_not_said_of_those_with(tmp_path):
    live = policy("Flux2KleinPipeline")
    live.given.clear()
    live.encode(["a"])
    files = [str(tmp_path / f"{name}.png") for name in ("red", "blue")]
    for file, colour in zip(files, ("red", "blue")):
        Image.new("RGB", (64, 64), colour).save(file)
    assert not live.encode_prompt.one_per_call
    assert live.encode(["a", "b"], images=files).one_per_call and live.encode_prompt.one_per_call
    assert not live.encode(["a", "b"]).one_per_call


@pytest.mark.parametrize("name, argument, value", [
    ("StableDiffusion3Pipeline", "skip_guidance_layers", [0]), ("Lumina2Pipeline", "cfg_trunc_ratio", 0.5),
    ("CogVideoXPipeline", "use_dynamic_cfg", True), ("StableDiffusionControlNetPipeline", "control_guidance_end", 0.5)])
def test_guidance_that_goes_by_the_place_in_the_loop_is_refused(name, argument, value):
    assert f"`image`: {argument} goes by the place in the loop of {name}" in message(policy, name, **{argument: value})
    neutral = PLACED[argument]
    assert policy(name, **{argument: neutral}).call[argument] == neutral


def test_a_prompt_without_a_image_has_that_of_the_call(kontext, files):
    own = kontext.given["image"]
    conditioning = kontext.encode(["a", "a"], images=[files[0], None])
    assert conditioning.inputs["image"][1] is own and kontext.encode(["a"]).inputs["image"] == [own]


def test_images_are_encoded_once_and_not_again_in_a_replay(files, monkeypatch):
    live, rows, encode = policy(), [], AutoencoderTiny.encode
    def counted(vae, x, *args, **kwargs):
        rows.append(len(x))
        return encode(vae, x, *args, **kwargs)
    monkeypatch.setattr(AutoencoderTiny, "encode", counted)
    conditioning = live.encode(["a", "b"], images=files)
    rows.clear()
    first = output(live, conditioning)
    assert rows == []  # both were encoded on the way
    assert torch.equal(output(live, conditioning), first) and rows == []
    live.encode(["c"], images=[Image.new("RGB", (16, 16), "green")])
    assert rows == [1]


def test_the_encoder_keeps_prompts_with_different_images_apart(kontext, files, tmp_path):
    encoder = PromptCache(kontext, tmp_path / "cache")
    both = encoder(["a", "a"], ["", ""], files)
    assert len(both.inputs["image"]) == 2
    again = PromptCache(kontext, tmp_path / "cache")(["a", "a"], ["", ""], files)
    assert digest(again.inputs) == digest(both.inputs) != digest(encoder(["a", "a"], ["", ""], files[:1] * 2).inputs)
    assert all(torch.equal(a, b) for a, b in zip(again.calls[0], both.calls[0], strict=True))


def test_mistakes_with_images_are_told(files):
    live = policy("FluxPipeline")
    assert "FluxPipeline takes no image, but a prompt brings one" in message(live.encode, ["a"], images=files[:1])
    bare = policy(image=None)
    bare.given.clear()
    told = message(bare.encode, ["a", "b"], images=[files[0], None])
    assert "some prompts of a batch bring an `image` and others do not" in told
    apart = [bare.encode(["a"]), bare.encode(["a"], images=files[:1])]
    assert "bring a reference image and others do not" in message(join, apart)


@pytest.mark.parametrize("name, apart", [("FluxKontextPipeline", False), ("Flux2KleinPipeline", True)])
def test_pipelines_that_share_their_images_among_prompts_are_called_for_each(name, apart):
    live = policy(name)
    live.encode(["a"])
    assert live.encode_prompt.one_per_call == apart


def test_the_other_image_is_the_negative():
    black = Image.new("RGB", (2, 2), "black")
    assert other(black).getpixel((0, 0)) == (255, 255, 255)
    assert [each.getpixel((1, 1)) for each in other([black, other(black)])] == [(255,) * 3, (0,) * 3]
    assert torch.equal(other(torch.tensor([[1.0, 2.0]])), torch.tensor([[2.0, 1.0]]))


def test_inside_a_memo_a_distribution_gives_its_mean_and_outside_a_sample():
    parameters = torch.cat([torch.full((1, 2, 4, 4), 3.0), torch.zeros(1, 2, 4, 4)], 1)  # mean 3, deviation 1
    given = DiagonalGaussianDistribution(parameters)
    with EncoderCache({})():
        assert torch.equal(given.sample(), torch.full((1, 2, 4, 4), 3.0))
    assert given.sample(torch.Generator().manual_seed(0)).std() > 0.5


def test_rows_of_an_encoding_are_joined_in_every_form():
    one, two = torch.ones(1, 4, 2, 2), torch.zeros(1, 4, 2, 2)
    assert torch.equal(join_rows([(one,), (two,)])[0], torch.cat([one, two]))
    found = join_rows([AutoencoderKLOutput(latent_dist=DiagonalGaussianDistribution(each)) for each in (one, two)])
    assert torch.equal(found.latent_dist.mean, torch.cat([one, two])[:, :2])


def test_a_digest_tells_what_differs():
    values = [torch.zeros(2), torch.zeros(2, 1), torch.zeros(2, dtype=torch.float16), [0, 0], "00", None,
              Image.new("RGB", (2, 1)), {"a": torch.zeros(2)}, {"b": torch.zeros(2)}]
    assert len({digest(value) for value in values}) == len(values)
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
