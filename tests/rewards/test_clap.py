"""CLAP's cosine is transformers' own, of a sound that has its rate; a pipeline with sound gives it."""

import math

import pytest
import torch

from flowgrpo.config.sections import Adapter
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.rewards.clap import Clap, resampled
from flowgrpo.rewards.reward import Batch, as_reward
from flowgrpo.samplers.scheduler import Segment
from flowgrpo.tools.check import tiny
from flowgrpo.tools.check.tiny.parts import tokenizer
from tests.helpers.refusals import message

RATE, PROMPTS = 8000, ["rain", "a bell rings"]


@pytest.fixture(scope="module")
def parts():
    from transformers import ClapAudioConfig, ClapConfig, ClapFeatureExtractor, ClapModel, ClapTextConfig

    torch.manual_seed(0)
    tokens = tokenizer()
    text = ClapTextConfig(vocab_size=len(tokens), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                          intermediate_size=16, projection_dim=16, pad_token_id=tokens.pad_token_id,
                          max_position_embeddings=600)  # positions begin after the number of the padding
    audio = ClapAudioConfig(
        num_mel_bins=16, spec_size=64, window_size=4, patch_size=2, patch_stride=2, freq_ratio=2, hidden_size=32,
        patch_embeds_hidden_size=16, projection_dim=16, depths=[2, 2], num_attention_heads=[2, 2], num_hidden_layers=2)
    model = ClapModel(ClapConfig(text_config=text, audio_config=audio, projection_dim=16)).eval()
    extractor = ClapFeatureExtractor(feature_size=16, sampling_rate=RATE, hop_length=80, max_length_s=1,
                                     truncation="rand_trunc", frequency_max=RATE // 2, frequency_min=50)
    return model, tokens, extractor


@pytest.mark.parametrize(("rate", "wanted"), [(24000, 48000), (48000, 32000), (16000, 44100)])
def test_a_tone_keeps_its_frequency_at_another_rate(rate, wanted):
    """Whole periods of a sine: its values at the other times; a tone above half of the new rate is silent."""
    def tone(hertz, at):
        return torch.sin(2 * math.pi * hertz * torch.arange(at, dtype=torch.float64) / at)
    torch.testing.assert_close(resampled(tone(440, rate), rate, wanted), tone(440, wanted), rtol=0, atol=1e-9)
    assert resampled(tone(0.45 * 48000, 48000), 48000, 16000).abs().max() < 1e-9


def test_scores_are_the_cosines_of_transformers(parts):
    """Of both channels' mean, a second of it at most: `logits_per_audio` without its scale."""
    model, tokens, extractor = parts

    class Speaker:
        def sound(self, latents, prompts):
            return latents, RATE // 2

    sounds = torch.randn(2, 2, 2 * RATE // 2, generator=torch.Generator().manual_seed(1))
    found = as_reward(Clap(device="cpu", parts=parts), "clap")(Batch(
        sounds, PROMPTS, [{}, {}], latents=sounds, policy=Speaker()))
    heard = resampled(sounds.mean(1), RATE // 2, RATE)[:, :RATE]
    with torch.no_grad():
        features = extractor(list(heard.numpy()), sampling_rate=RATE, return_tensors="pt")
        out = model(**tokens(PROMPTS, padding=True, return_tensors="pt"), input_features=features["input_features"],
                    is_longer=torch.zeros(2, 1, dtype=torch.bool))
    expected = (out.logits_per_audio / model.logit_scale_a.exp()).diagonal()
    torch.testing.assert_close(torch.as_tensor(found), expected, rtol=0, atol=1e-6)


def test_a_pipeline_with_sound_gives_it_and_another_is_named():
    pipe, call = tiny.make("LTX2Pipeline")
    policy = PipelinePolicy(pipe, Adapter(rank=2), call=call)
    row = policy.encode(["rain"])
    noise = policy.run(Segment(torch.ones(1), range(0)), row, None, policy.generators([0]))[0]
    sound, rate = policy.sound(noise, ["rain"])
    assert rate == 16000 and sound.shape[:2] == (1, 2) and sound.isfinite().all() and sound.std() > 0
    silent, other = tiny.make("LTXPipeline")
    assert "makes no sound" in message(PipelinePolicy(silent, Adapter(rank=2), call=other).sound, noise, ["rain"])
