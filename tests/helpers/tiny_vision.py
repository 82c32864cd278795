"""Tiny random models that read images, of four families, with their processors, all built in code."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image

from flowgrpo.config.sections import Adapter, Text
from flowgrpo.starter.arithmetic import CHARACTERS
from flowgrpo.text.policies.image_lm import ImageLM
from flowgrpo.text.policies.vision_lm import VisionLM

SPECIAL = ["<pad>", "<s>", "</s>", "<image>", "<video>", "<look>", "<seen>", "<fake_token_around_image>",
           "<end_of_utterance>", "<global-img>", *(f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2))]
TEMPLATE = ("{{ bos_token }}{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == "
            "'image' %}<look><image><seen>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}")
TEXT = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            vocab_size=len(SPECIAL) + len(CHARACTERS))


def _tokenizer(**special: str):
    """A token per character, and those that stand for images; special: further names of tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({each: i for i, each in enumerate([*SPECIAL, *CHARACTERS])}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=128,
        extra_special_tokens={f"{name.strip('<>')}_token": name for name in SPECIAL[3:]} | special)


def llava():
    """CLIP and Llama: one size of image, 4 tokens, positions as of a text."""
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    eyes = CLIPVisionConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                            image_size=8, patch_size=4, projection_dim=16)
    processor = LlavaProcessor(CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}),
                               _tokenizer(), patch_size=4, vision_feature_select_strategy="default",
                               num_additional_image_tokens=1, chat_template=TEMPLATE)
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=eyes, text_config=LlamaConfig(**TEXT),
                                                      image_token_index=SPECIAL.index("<image>"), image_seq_length=4))
    return _stirred(model), processor


def qwen():
    """Qwen2.5-VL: images of any size, positions of rows and columns, and a type of every token."""
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    patches = dict(patch_size=4, temporal_patch_size=2, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024})
    processor = Qwen2_5_VLProcessor(Qwen2VLImageProcessor(**patches), _tokenizer(), Qwen2VLVideoProcessor(**patches),
                                    chat_template=TEMPLATE)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_parameters": rope},
        vision_config=dict(depth=2, hidden_size=16, intermediate_size=24, num_heads=2, patch_size=4,
                           temporal_patch_size=2, spatial_merge_size=2, window_size=16, fullatt_block_indexes=[1],
                           out_hidden_size=TEXT["hidden_size"]),
        image_token_id=SPECIAL.index("<image>"), video_token_id=SPECIAL.index("<video>"),
        vision_start_token_id=SPECIAL.index("<look>"), vision_end_token_id=SPECIAL.index("<seen>")))
    return _stirred(model), processor


def idefics():
    """Idefics3, as of SmolVLM: an image becomes tiles [1,N,3,H,W], and how many depends on its form."""
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessor,
        Idefics3Processor,
        LlamaConfig,
    )

    tiles = Idefics3ImageProcessor(size={"longest_edge": 16}, max_image_size={"longest_edge": 8})
    eyes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=8,
                patch_size=2)
    model = Idefics3ForConditionalGeneration(Idefics3Config(
        vision_config=eyes, text_config=LlamaConfig(**TEXT), scale_factor=2, pad_token_id=0,
        image_token_id=SPECIAL.index("<image>")))
    return _stirred(model), Idefics3Processor(tiles, _tokenizer(), image_seq_len=4, chat_template=TEMPLATE)


def janus():
    """Janus: one size of image, 4 tokens, and a `generate` of its own, which also draws images."""
    from transformers import (
        GenerationConfig,
        JanusConfig,
        JanusForConditionalGeneration,
        JanusImageProcessor,
        JanusProcessor,
        JanusVisionConfig,
        JanusVQVAEConfig,
        LlamaConfig,
    )

    width = TEXT["hidden_size"]
    model = JanusForConditionalGeneration(JanusConfig(
        text_config=LlamaConfig(**TEXT), image_token_id=SPECIAL.index("<image>"), tie_word_embeddings=False,
        vision_config=JanusVisionConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8,
                                        patch_size=4, mlp_ratio=2.0, projection_dim=width, depth=2, num_image_tokens=4),
        vq_config=JanusVQVAEConfig(embed_dim=8, num_embeddings=24, latent_channels=32, base_channels=32,
                                   channel_multiplier=[1, 1, 2], num_res_blocks=0, projection_dim=width,
                                   image_token_embed_dim=width, num_patches=2)))
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0,
                                               generation_kwargs={"boi_token_id": SPECIAL.index("<look>")})
    pictures = JanusImageProcessor(size={"height": 8, "width": 8}, min_size=1)
    tokenizer = _tokenizer(boi_token="<look>", eoi_token="<seen>")
    return _stirred(model), JanusProcessor(pictures, tokenizer, chat_template=TEMPLATE, num_image_tokens=4)


FAMILIES = {"llava": llava, "qwen": qwen, "idefics": idefics, "janus": janus}


def _stirred(model):
    """Weights far enough from 0 for distributions that are not flat, and for images that matter."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def picture(colour: str, size=(8, 8)) -> Image.Image:
    """A colour that grows brighter to one corner."""
    found = Image.new("RGB", size, colour)
    for x in range(size[0]):
        for y in range(size[1]):
            found.putpixel((x, y), tuple(min(255, (c + 9 * x + 5 * y) // 2) for c in found.getpixel((x, y))))
    return found


def files(folder: Path) -> list[str]:
    """Images of three sizes and colours, and no image."""
    for colour, size in (("red", (8, 8)), ("green", (24, 16)), ("blue", (16, 8))):
        picture(colour, size).save(folder / f"{colour}.png")
    return [str(folder / f"{colour}.png") for colour in ("red", "green", "blue")]


def policy(family: str, rank: int = 2, checkpointing: bool = False, loaded=None, **text: Any) -> VisionLM:
    torch.manual_seed(0)
    model, processor = loaded or FAMILIES[family]()
    return VisionLM(model, processor, Adapter(rank=rank), Text(**{"max_tokens": 6} | text), checkpointing=checkpointing)


def drawing(guidance: float = 3.0, rank: int = 2, loaded=None, conditional: bool = False, shown: float = 3.0,
            checkpointing: float = 0.0, answers: bool = False, **text: Any) -> ImageLM:
    """Janus as a policy of image tokens."""
    torch.manual_seed(0)
    model, processor = loaded or janus()
    return ImageLM(model, processor, Adapter(rank=rank), Text(generates="image", **text), guidance=guidance,
                   shown=shown, conditional=conditional, checkpointing=checkpointing, answers=answers)
