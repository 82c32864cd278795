"""CLAP (2211.06687) as a reward: does a clip sound as its prompt says?

    reward:
      hpsv2.1: {weight: 1.0, use: frames, args: {reward: hpsv2.1}}
      clap: {weight: 1.0}

The sound is decoded from the clean latents by the pipeline that is trained, so that it has one beside its pictures.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowgrpo.rewards.about import About, built_in
from flowgrpo.rewards.local_model import LocalModel, load_parts


def resampled(sound: Tensor, rate: int, wanted: int) -> Tensor:
    """Sound [..., N] at another rate [..., round(N wanted / rate)], without what is above half of the lower one."""
    if rate == wanted:
        return sound
    count = round(sound.shape[-1] * wanted / rate)
    spectrum = torch.fft.rfft(sound.double())[..., :count // 2 + 1]
    return (torch.fft.irfft(spectrum, n=count) * (count / sound.shape[-1])).to(sound.dtype)


@built_in("clap")
class Clap(LocalModel):
    """CLAP: cosine of a clip's sound and its prompt, for pipelines that make both, such as LTX-2.

    Channels are averaged, the sound is brought to the model's rate, and its beginning counts, as long as the model
    hears (10 seconds).
    model, revision: a ClapModel of transformers with its processor, a folder or a name on the hub.
    parts: model, tokenizer and feature extractor, ready-made. dtype (fp32), device and batch_size (32): as in
    `LocalModel`.
    Raises UserError for a pipeline without sound, and if the weights are missing.
    """

    model: str = "laion/clap-htsat-unfused"
    revision: str | None = None
    reward, parameters, scores, reads_policy = "clap", 153e6, "latents", True
    about = About(modality="video", range=(-1, 1), needs="", licence="Apache-2.0")

    def _load(self) -> tuple[Any, ...]:
        return load_parts(self, "ClapModel", "AutoTokenizer", "ClapFeatureExtractor")

    def __call__(self, latents: Tensor, prompts: Sequence[str], policy: Any) -> Tensor:
        return self.score_batches(partial(self._cosines, policy=policy), latents, prompts)

    def _cosines(self, latents: Tensor, prompts: list[str], policy: Any) -> Tensor:
        """Cosines [B] of prompts and of the sounds that the policy makes of latents."""
        model, tokenizer, extractor = self.models
        sound, rate = policy.sound(latents, prompts)
        sounds = resampled(sound.mean(1), rate, extractor.sampling_rate)
        length = int(extractor.max_length_s * extractor.sampling_rate)
        read = extractor([sound[:length].numpy() for sound in sounds], sampling_rate=extractor.sampling_rate,
                         return_tensors="pt")
        longer = torch.zeros(len(sounds), 1, dtype=torch.bool, device=self.device)  # nothing is cut at random
        audio = model.get_audio_features(read["input_features"].to(self.device, self.float_type), longer)
        words = tokenizer(prompts, padding=True, truncation=True, return_tensors="pt").to(self.device)
        text = model.get_text_features(**words)
        return (audio.pooler_output.float() * text.pooler_output.float()).sum(-1)
