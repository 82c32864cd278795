"""What a frozen denoiser sees of images: pooled states of its blocks, of transformers and U-Nets."""

import pytest
import torch

from flowgrpo.contrib.learned_rewards.denoiser_head import DenoiserHead, blocks, pooled, states
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.tools.check.tiny.images import FLUX_CALL, flux
from tests.helpers import tiny


def test_pooled_by_hand():
    tokens = torch.tensor([[[1.0, 0.0], [3.0, 0.0]]])
    assert pooled(tokens).tolist() == [[2, 0, 1, 0]]
    assert pooled(tokens.transpose(1, 2).reshape(1, 2, 1, 2)).tolist() == [[2, 0, 1, 0]]  # the same as a map [C, h, w]


@pytest.mark.parametrize("make, call, guidance", [
    (tiny.sd3, tiny.CALL, 1.0), (tiny.sd3, tiny.CALL, 3.0), (flux, FLUX_CALL, 1.0), (tiny.sd15, {}, 3.0)],
    ids=["transformer", "guided", "packed", "unet"])
def test_a_image_has_the_same_features_in_every_batch(make, call, guidance):
    policy = PipelinePolicy(make(), None, call=call, guidance=guidance)
    encoded = policy.encode(["red", "a cat", "red"])
    latents = policy.of_noise(encoded, policy.generators([0, 1, 2]), "latent")
    evaluations = policy.evaluations
    features = states(policy, latents, encoded)
    assert features.shape[0] == 3 and torch.isfinite(features).all() and policy.evaluations == evaluations
    alone = states(policy, latents[1:2], encoded.rows(torch.tensor([1])))
    assert torch.allclose(alone, features[1:2], atol=1e-4)
    assert (features[0] - features[2]).abs().max() > 1e-3  # another image of the same prompt
    assert not any(module._forward_hooks for module in blocks([*policy.denoisers.values()]))


def test_the_prompt_counts():
    policy = PipelinePolicy(tiny.sd3(), None, call=tiny.CALL)
    encoded = policy.encode(["red", "a cat"])
    latent = policy.of_noise(encoded.rows(torch.tensor([0])), policy.generators([0]), "latent")
    features = states(policy, latent.repeat(2, 1, 1, 1), encoded)
    assert (features[0] - features[1]).abs().max() > 1e-3


def test_a_head_scores_images_of_any_size():
    policy = PipelinePolicy(tiny.sd3(), None, call=tiny.CALL)
    pictures = torch.rand(2, 3, 16, 16)
    width = DenoiserHead(policy, 0).rows(pictures, ["red", "blue"])["features"].shape[1]
    head = DenoiserHead(policy, width)
    head.scale.fill_(2.0)
    head.weight[3] = 4.0
    rows = head.rows(pictures, ["red", "blue"])
    assert torch.allclose(head(**rows)[:, 0], 2 * rows["features"][:, 3].double())
    larger = torch.nn.functional.interpolate(pictures, (32, 32))
    assert torch.allclose(head.rows(larger, ["red", "blue"])["features"], rows["features"], atol=0.5)
