"""Tiny networks of BLIP and images for them."""

import torch

from flowgrpo.rewards import image_reward
from flowgrpo.rewards.preprocessing import DEVIATION, MEAN
from tests.helpers.tiny_scorers import PROMPTS


def pictures(count: int, seed: int = 0) -> torch.Tensor:
    levels = torch.randint(0, 256, (count, 3, 16, 16), generator=torch.Generator().manual_seed(seed))
    return levels.float() / 255


def normalised(images: torch.Tensor) -> torch.Tensor:
    """Images that have the model's size already."""
    return (images.double() - torch.tensor(MEAN)[:, None, None].double()) / torch.tensor(
        DEVIATION)[:, None, None].double()


def word_tokenizer(template: str, marks: list[str], words: list[str]):
    """A tokenizer of whole words; the marks first, the one at 0 pads."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    known = {word: i for i, word in enumerate([*marks, *words])}
    core = Tokenizer(models.WordLevel(known, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    used = [(word, known[word]) for word in template.split() if word in known]
    core.post_processor = processors.TemplateProcessing(template, special_tokens=used)
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=marks[0], unk_token="?")


WORDS = sorted({word for prompt in PROMPTS for word in prompt.split()})
WIDE, NARROW, HEADS = 24, 16, 2  # of the vision transformer, of the text encoder
TINY_VISION = {"hidden_size": WIDE, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS,
               "image_size": 16, "patch_size": 8}
TINY_TEXT = {"vocab_size": 40, "hidden_size": NARROW, "intermediate_size": 32, "num_hidden_layers": 2,
             "num_attention_heads": HEADS, "max_position_embeddings": 35}


def released() -> dict[str, torch.Tensor]:
    """A random checkpoint under the release's names, with tensors that only its training needed."""
    made = torch.Generator().manual_seed(11)
    state = {}

    def linear(name: str, out: int, into: int) -> None:
        state[f"{name}.weight"] = torch.randn(out, into, generator=made) * into ** -0.5
        state[f"{name}.bias"] = torch.randn(out, generator=made) * 0.3

    def norm(name: str, width: int) -> None:
        state[f"{name}.weight"] = 1 + 0.3 * torch.randn(width, generator=made)
        state[f"{name}.bias"] = 0.3 * torch.randn(width, generator=made)

    eye, text = "blip.visual_encoder", "blip.text_encoder"
    state[f"{eye}.cls_token"], state[f"{eye}.pos_embed"] = torch.randn(1, 1, WIDE), torch.randn(1, 5, WIDE)
    state[f"{eye}.patch_embed.proj.weight"] = torch.randn(WIDE, 3, 8, 8, generator=made) * 0.05
    state[f"{eye}.patch_embed.proj.bias"] = torch.randn(WIDE, generator=made)
    for i in range(2):
        for name, out, into in (("attn.qkv", 3 * WIDE, WIDE), ("attn.proj", WIDE, WIDE), ("mlp.fc1", 48, WIDE),
                                ("mlp.fc2", WIDE, 48)):
            linear(f"{eye}.blocks.{i}.{name}", out, into)
        norm(f"{eye}.blocks.{i}.norm1", WIDE), norm(f"{eye}.blocks.{i}.norm2", WIDE)
    norm(f"{eye}.norm", WIDE)
    state[f"{text}.embeddings.position_ids"] = torch.arange(35)[None]
    state[f"{text}.embeddings.word_embeddings.weight"] = torch.randn(40, NARROW, generator=made)
    state[f"{text}.embeddings.position_embeddings.weight"] = torch.randn(35, NARROW, generator=made)
    norm(f"{text}.embeddings.LayerNorm", NARROW)
    for i in range(2):
        layer = f"{text}.encoder.layer.{i}"
        for kind, into in (("attention", NARROW), ("crossattention", WIDE)):
            linear(f"{layer}.{kind}.self.query", NARROW, NARROW)
            linear(f"{layer}.{kind}.self.key", NARROW, into), linear(f"{layer}.{kind}.self.value", NARROW, into)
            linear(f"{layer}.{kind}.output.dense", NARROW, NARROW), norm(f"{layer}.{kind}.output.LayerNorm", NARROW)
        linear(f"{layer}.intermediate.dense", 32, NARROW), linear(f"{layer}.output.dense", NARROW, 32)
        norm(f"{layer}.output.LayerNorm", NARROW)
    widths = (NARROW, 1024, 128, 64, 16, 1)
    for layer, into, out in zip((0, 2, 4, 6, 7), widths, widths[1:]):
        linear(f"mlp.layers.{layer}", out, into)
    state |= {"blip.visual_encoder_m.norm.weight": torch.ones(WIDE), "blip.text_decoder.cls.bias": torch.ones(3),
              "blip.image_queue": torch.ones(4, 2), "blip.temp": torch.ones(())}
    return state


def tiny_network(state: dict[str, torch.Tensor]) -> torch.nn.ModuleDict:
    parts = image_reward.network(TINY_VISION, TINY_TEXT)
    parts.load_state_dict(image_reward.rename_tensors(state))
    return parts


QUESTION = "is this {} ? yes or no"
