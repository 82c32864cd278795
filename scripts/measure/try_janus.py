"""Take a random Janus of Janus-Pro-1B's width through train, sample, eval, export and stock transformers, on a CPU.

    python scripts/measure/try_janus.py FOLDER [--layers 2] [--side 24]

The language model has width 2048, 16 heads and 102,400 words, the image head 16,384 tokens, the autoencoder the
published sizes; only the number of layers is smaller. side: tokens of an image's side; 24 is the published grid, 384
pixels.
"""

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

SPECIAL = ["<pad>", "<s>", "</s>", "<image>", "<boi>", "<eoi>", "<unk>"]
WORDS = "a an red green blue circle square star of photo picture and two".split()
TEMPLATE = ("{{ bos_token }}{% for message in messages %}{% for part in message['content'] %}"
            "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endfor %}")
REWARD = "def bright(images, prompts):\n    return images.mean((1, 2, 3)).tolist()\n"
STOCK = """
import sys, torch
from transformers import AutoModelForImageTextToText, AutoProcessor
folder = sys.argv[1]
processor, model = AutoProcessor.from_pretrained(folder), AutoModelForImageTextToText.from_pretrained(folder)
said = [{"role": "user", "content": [{"type": "text", "text": "a red circle"}]}]
inputs = processor.apply_chat_template(said, add_generation_prompt=True, tokenize=True, return_dict=True,
                                       return_tensors="pt", processor_kwargs={"generation_mode": "image"})
tokens = model.generate(**inputs, generation_mode="image", do_sample=True, top_k=0, guidance_scale=5.0)
print("stock transformers:", tuple(tokens.shape), tuple(model.decode_image_tokens(tokens).shape))
"""


def build(folder: Path, layers: int, side: int) -> None:
    """Write a random model with its processor to a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        GenerationConfig,
        JanusConfig,
        JanusForConditionalGeneration,
        JanusImageProcessor,
        JanusProcessor,
        JanusVisionConfig,
        JanusVQVAEConfig,
        LlamaConfig,
        PreTrainedTokenizerFast,
    )

    width, pixels = 2048, 16 * side
    text = LlamaConfig(vocab_size=102_400, hidden_size=width, intermediate_size=5632, num_hidden_layers=layers,
                       num_attention_heads=16, num_key_value_heads=16, max_position_embeddings=16_384, pad_token_id=0,
                       bos_token_id=1, eos_token_id=2)
    vision = JanusVisionConfig(hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16, image_size=pixels,
                               patch_size=16, mlp_ratio=4.0, projection_dim=width, depth=2,
                               num_image_tokens=side * side)
    vq = JanusVQVAEConfig(projection_dim=width, image_token_embed_dim=width, num_patches=side)
    torch.manual_seed(0)
    model = JanusForConditionalGeneration(JanusConfig(text_config=text, vision_config=vision, vq_config=vq,
                                                      image_token_id=3, tie_word_embeddings=False))
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0,
                                               generation_kwargs={"boi_token_id": 4})
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*SPECIAL, *WORDS])}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
                                        unk_token="<unk>", extra_special_tokens={
                                            "image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"})
    images = JanusImageProcessor(size={"height": pixels, "width": pixels}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    processor = JanusProcessor(images, tokenizer, chat_template=TEMPLATE, num_image_tokens=side * side)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"model: {count / 1e6:,.0f} million parameters, {side * side} image tokens", flush=True)


def step(name: str, *command: str) -> None:
    """Run a command, and print its last line, its seconds and the largest memory of all so far."""
    began = time.perf_counter()
    ended = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    lines = (ended.stdout.strip() or ended.stderr.strip()).splitlines() or [""]
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"{name}: exit code {ended.returncode}, {time.perf_counter() - began:.0f} s, {most:.1f} GiB at most: "
          f"{lines[-1]}", flush=True)
    if ended.returncode not in (0, 3):  # 3: nothing was trained
        sys.exit(ended.stderr[-2000:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--side", type=int, default=24)
    given = parser.parse_args()
    folder, model = given.folder, given.folder / "model"
    folder.mkdir(parents=True, exist_ok=True)
    build(model, given.layers, given.side)
    (folder / "bright.py").write_text(REWARD)
    (folder / "prompts.txt").write_text("a red circle\na blue star\ntwo green square\na photo of a star\n")
    (folder / "one.txt").write_text("a red circle\n")
    flowgrpo, run = ("-m", "flowgrpo"), str(folder / "runs" / "run")
    step("train", *flowgrpo, "train", f"--model={model}", "--method=grpo", "--text.generates=image",
         f"--prompts={folder / 'prompts.txt'}", f"--reward={folder / 'bright.py'}:bright", "--name=run",
         f"--output={folder / 'runs'}", "--device=cpu", "--precision=fp32", "--train.epochs=1", "--train.prompts=1",
         "--train.group=2", "--train.micro_batch=2", "--train.guidance=5", "--eval.guidance=5", "--eval.prompts=1",
         "--held_out=0.25", "--adapter.rank=4", "--tracker=none")
    step("sample", *flowgrpo, "sample", run, "--prompt", "a red circle", "--output", str(folder / "samples"))
    step("eval", *flowgrpo, "eval", run, "--suite", str(folder / "one.txt"), "--output", str(folder / "evaluated"),
         "--trust-run")
    step("export", *flowgrpo, "export", run, "--form", "merged", "--output", str(folder / "merged"))
    step("transformers", "-c", STOCK, str(folder / "merged"))


if __name__ == "__main__":
    main()
