"""Build the unified starter: a small Janus that draws scenes by image tokens and answers questions about images.

    python scripts/build/build_starter_unified.py --out runs/starter_unified            # about an hour of one core
    python scripts/build/build_starter_unified.py --out runs/starter_unified --minutes 10  # stop then; again: continues

Stages, each with a checkpoint every 50 steps: the decoder of the image tokens, by regression, since a token of this
world says which quarter of which object stands there (`flowgrpo.starter.lattice`); the language model, which learns
captions to tokens and questions about images to answers, with one set of weights; the vision tower, whose features
become the words of what stands in a cell, and its place; questions for what is there; both tasks again; the folder, in
bf16, with its processor. It draws about half of the images right, and answers nearly all questions. Prints the accuracy
of images by task, and of answers to balanced questions by kind, with the images shown and hidden. Seeds are fixed, and
one thread computes: one machine builds the same weights again.
"""

import argparse
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from flowgrpo.contrib.questions.scene_answers import CHOICES, Thing, read_question, sample_question
from flowgrpo.rewards.starter.scene import scene
from flowgrpo.starter import lattice, scenes

TOKENS = lattice.SIDE ** 2
CODES = 1 + 4 * len(scenes.SHAPES) * len(scenes.COLOURS)  # of image tokens; 0 is the ground
SPECIAL = ("<pad>", "<bos>", "<eos>", "<boi>", "<eoi>", "<image>", "<user>", "<assistant>")
PAD, BOS, EOS, BOI, EOI, IMAGE, USER, ASSISTANT = range(len(SPECIAL))
WIDTH, LAYERS = 96, 3
TASK_SHARES = (0.08, 0.12, 0.18, 0.18, 0.22, 0.22)  # of the training scenes, in the order of scenes.TASKS
EASY_SHARES = (0.25, 0.35, 0.25, 0.05, 0.05, 0.05)  # of the first EASY of the steps
EASY = 0.27
GROUND_WEIGHT = 0.3  # of the ground's tokens, beside 1 of an object's
DRAWING_WEIGHT = 4.0  # of the loss of drawing, beside 1 of answering's
UNCONDITIONAL = 0.1  # share of captions that are hidden, so that guidance has its other half
TEMPLATE = ("{{ bos_token }}{% for message in messages %}"
            "{{ '<user>' if message['role'] == 'user' else '<assistant>' }}"
            "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
            "{% for part in message['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] }}"
            "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")


# --- the model -------------------------------------------------------------------------------------------------------

def words() -> list[str]:
    """All words of captions, questions and answers, sorted."""
    text = ("a an one and of picture drawing image is there in the how many are thing things what color where seen "
            "from or ? , :").split()
    texts = (*scenes.COUNTS, *scenes.SHAPES, *scenes.PLURALS, *scenes.COLOURS, *scenes.RELATIONS,
             *(answer for answers in CHOICES.values() for answer in answers))
    return sorted({*text, *(word for text in texts for word in text.split())})


def build_processor() -> Any:
    """JanusProcessor whose tokens are the words of this world."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import JanusImageProcessor, JanusProcessor, PreTrainedTokenizerFast

    vocabulary = {word: at for at, word in enumerate((*SPECIAL, *words(), "<unknown>"))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    inner.normalizer, inner.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    inner.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unknown>",
        padding_side="left",
        extra_special_tokens={"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"})
    size = {"height": scenes.SIZE, "width": scenes.SIZE}
    return JanusProcessor(JanusImageProcessor(size=size, min_size=1, image_mean=[0.5] * 3, image_std=[0.5] * 3),
                          tokenizer, chat_template=TEMPLATE, num_image_tokens=TOKENS)


def code_vectors() -> np.ndarray:
    """Meaning of each token, float32 [codes, 14] of length 1: ground or not, the shape, the quarter, the colour."""
    rows = [[1.0] + [0.0] * 13]
    for shape in np.eye(len(scenes.SHAPES)):
        for colour in scenes.COLOURS.values():
            rows += [[0.0, *shape, *quarter, *(2 * np.array(colour) - 1)] for quarter in np.eye(4)]
    vectors = np.array(rows, np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def build_model(words: int) -> Any:
    """Janus of small width. words: size of its vocabulary.

    Image tokens begin with vectors that say what they are, for the decoder as for the language model. transformers
    draws most weights with a deviation of .02, by which so narrow a model reads neither captions nor images: the
    vision tower and the aligner are drawn anew by fan-in, and the others have configurations for it.
    """
    from transformers import (
        GenerationConfig,
        JanusConfig,
        JanusForConditionalGeneration,
        JanusVisionConfig,
        JanusVQVAEConfig,
        LlamaConfig,
    )

    heads = WIDTH // 32
    text = LlamaConfig(
        vocab_size=words, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=384,
        initializer_range=WIDTH**-0.5, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
        tie_word_embeddings=False)
    vision = JanusVisionConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=heads, image_size=scenes.SIZE,
        patch_size=lattice.CELL, mlp_ratio=2.0, projection_dim=WIDTH, depth=2, num_image_tokens=TOKENS)
    tokens = JanusVQVAEConfig(
        embed_dim=code_vectors().shape[1], num_embeddings=CODES, latent_channels=32, base_channels=32,
        channel_multiplier=[1, 1, 1, 2], num_res_blocks=0, initializer_range=0.06, projection_dim=WIDTH,
        image_token_embed_dim=WIDTH, num_patches=lattice.SIDE)
    model: Any = JanusForConditionalGeneration(JanusConfig(
        text_config=text, vision_config=vision, vq_config=tokens, image_token_id=IMAGE, tie_word_embeddings=False))
    model.generation_config = GenerationConfig(
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, generation_kwargs={"boi_token_id": BOI})
    with torch.no_grad():
        for part in (*model.model.vision_model.modules(), *model.model.aligner.modules()):
            if isinstance(part, (torch.nn.Linear, torch.nn.Conv2d)):
                part.weight.normal_(0, part.weight[0].numel()**-0.5)
            elif isinstance(part, torch.nn.Embedding):
                part.weight.normal_(0, 0.3)
        codes = torch.from_numpy(code_vectors())
        model.model.vqmodel.quantize.embedding.weight.copy_(codes)
        model.model.generation_embeddings.weight.copy_(codes)
    return model


# --- training --------------------------------------------------------------------------------------------------------

def scatter(rng: np.random.Generator, share: float) -> list[lattice.Placed]:
    """Any objects in this share of the places of a grid, for images of every fullness."""
    cell = lattice.CELL
    left, top = cell * rng.integers(0, 2, 2)
    return [(str(rng.choice(scenes.SHAPES)), str(rng.choice(list(scenes.COLOURS))), (int(x), int(y)))
            for y in range(cell + top, scenes.SIZE - cell + 1, 2 * cell)
            for x in range(cell + left, scenes.SIZE - cell + 1, 2 * cell) if rng.random() < share]


def image_tokens(objects: Sequence[lattice.Placed]) -> np.ndarray:
    """Tokens int64 [64] of an image, row by row."""
    grid = np.zeros((lattice.SIDE, lattice.SIDE), np.int64)
    for shape, colour, (x, y) in objects:
        first = 1 + 4 * (scenes.SHAPES.index(shape) * len(scenes.COLOURS) + list(scenes.COLOURS).index(colour))
        row, column = y // lattice.CELL, x // lattice.CELL
        grid[row - 1:row + 1, column - 1:column + 1] = first + np.arange(4).reshape(2, 2)
    return grid.reshape(-1)


@dataclass
class Stage:
    """Steps of AdamW with a checkpoint; loss: of a step's number. Stops the script at `deadline`, in seconds."""

    file: Path
    model: torch.nn.Module
    parameters: list[torch.nn.Parameter]
    loss: Callable[[int], Tensor]
    steps: int
    lr: float
    fade: float  # how steeply the rate falls to its last twentieth

    def run(self, deadline: float) -> None:
        betas = (0.9, 0.98)
        optimizer, start = torch.optim.AdamW(self.parameters, self.lr, weight_decay=0.01, betas=betas), 0
        if self.file.exists():
            state = torch.load(self.file, weights_only=True)  # our own file
            self.model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            start = state["step"]
        shown = 0.0
        for step in (bar := tqdm(range(start, self.steps), initial=start, total=self.steps, mininterval=20)):
            rate = min(1, (step + 1) / 50) * max(0.05, min(1, self.fade * (1 - step / self.steps)))
            for group in optimizer.param_groups:
                group["lr"] = self.lr * rate
            torch.manual_seed(step)
            loss = self.loss(step)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            optimizer.step()
            shown = 0.95 * (shown or loss.item()) + 0.05 * loss.item()
            bar.set_postfix(loss=f"{shown:.4f}", refresh=False)
            if (late := time.monotonic() > deadline) or (step + 1) % 50 == 0 or step + 1 == self.steps:
                torch.save({"model": self.model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1},
                           part := self.file.with_suffix(".part"))
                part.rename(self.file)
            if late and step + 1 < self.steps:
                raise SystemExit(f"{self.file.stem}: stopped after {step + 1} of {self.steps} steps; run it again")


def decoding(tokens: Any, steps: int) -> Callable[[int], Tensor]:
    """Loss of decoding images of every fullness: GroupNorm makes a colour depend on how full the image is."""
    def loss(step: int) -> Tensor:
        rng = np.random.default_rng((1, step))
        full = rng.uniform(0.05, 0.5, 8) if step < 0.7 * steps else np.full(8, 0.15)
        drawn = [scatter(rng, share) for share in full]
        target = torch.from_numpy(np.stack([lattice.paint(objects) for objects in drawn])) * 2 - 1
        grids = torch.from_numpy(np.stack([image_tokens(objects) for objects in drawn]))
        with torch.autocast("cpu", torch.bfloat16):
            image = tokens.decode(grids).float()
        weight = 1 + 4 * ((target - 2 * lattice.GROUND + 1).abs().amax(1, keepdim=True) > 0.05)
        return (weight * ((image - target).square() + 0.1 * (image - target).abs())).mean()

    return loss


def naming(model: Any, tokenizer: Any) -> Callable[[int], Tensor]:
    """Loss of naming what stands in each cell of an image: the vision tower's features there become the sum of the
    embeddings of its shape's and colour's words and of its place, and zeros on the ground, so that words find what they
    name. A place is (x, y) in [-1, 1] along two axes that are orthogonal to all of these words."""
    table = model.get_input_embeddings().weight.detach()
    shapes, colours = (table[tokenizer.convert_tokens_to_ids(list(names))].clone()
                       for names in (scenes.SHAPES, scenes.COLOURS))
    named = (shapes[:, None] + colours).flatten(0, 1)
    others = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))
    axes = torch.linalg.qr(torch.cat([shapes, colours, others]).T).Q.T[-2:] * shapes.norm(dim=1).mean()
    cells = torch.linspace(-1, 1, lattice.SIDE)
    places = torch.cartesian_prod(cells, cells).flip(1) @ axes  # row by row

    def loss(step: int) -> Tensor:
        rng = np.random.default_rng((3, step))
        drawn = [scatter(rng, share) for share in rng.uniform(0.05, 0.3, 16)]
        grids = torch.from_numpy(np.stack([image_tokens(objects) for objects in drawn]))
        images = torch.from_numpy(np.stack([lattice.paint(objects) for objects in drawn]))
        found = model.model.get_image_features(images * 2 - 1).pooler_output
        wanted = torch.where(grids[..., None] > 0, named[(grids - 1).clamp(min=0) // 4] + places, 0.0)
        return (found - wanted).square().sum(-1).mean()

    return loss


@dataclass(frozen=True)
class Lessons:
    """Loss of drawing `captions` scenes and of answering `asked` questions about each of `images` others.

    With `model.probes`, linear maps of the states behind the first two layers, the places of two shapes are read from
    their words in a question about both, and the difference of these places where the answer begins. Without that the
    model does not learn these questions in so few steps.
    """

    model: Any
    tokenizer: Any
    steps: int
    captions: int
    images: int
    asked: int
    easy: float = EASY
    weight: float = DRAWING_WEIGHT
    first: int = 0  # number of the first step, which says what is drawn
    only: str = ""  # the kind of the questions; "" for all

    def __call__(self, step: int) -> Tensor:
        rng, dice = np.random.default_rng((2, self.first + step)), random.Random(self.first + step)
        shares = EASY_SHARES if step < self.easy * self.steps else TASK_SHARES
        drawn = []
        for _ in range(max(self.captions, self.images)):
            claims = scenes.sample_claims(rng, str(rng.choice(scenes.TASKS, p=shares)))
            drawn.append((claims.caption(str(rng.choice(scenes.PREFIXES))), lattice.place(claims, rng)))
        loss = self.weight * self.drawing(drawn[:self.captions], dice) if self.captions else 0
        shown = [objects if at % 2 else mixed(rng) for at, (_, objects) in enumerate(drawn[:self.images])]
        return loss + self.answering(shown, dice)

    def drawing(self, drawn: Sequence[tuple[str, list[lattice.Placed]]], dice: random.Random) -> Tensor:
        grids = torch.from_numpy(np.stack([image_tokens(objects) for _, objects in drawn]))
        rows = [caption_ids(self.tokenizer, caption) for caption, _ in drawn]
        rows = [row if dice.random() > UNCONDITIONAL else [at if at in (BOS, BOI) else PAD for at in row]
                for row in rows]
        images = self.model.prepare_embeddings_for_image_generation(grids[:, :-1])
        texts = self.model.get_input_embeddings()(padded(rows, PAD))
        lengths = [len(row) for row in rows]
        given = [torch.cat([text[:length], image.to(text)]) for text, image, length in zip(texts, images, lengths)]
        states = self.model.model.language_model(
            inputs_embeds=torch.nn.utils.rnn.pad_sequence(given, batch_first=True), use_cache=False).last_hidden_state
        places = torch.tensor(lengths)[:, None] - 1 + torch.arange(TOKENS)
        states = states.gather(1, places[..., None].expand(-1, -1, WIDTH))
        losses = F.cross_entropy(self.model.model.generation_head(states).float().flatten(0, 1), grids.flatten(),
                                 reduction="none")
        weights = torch.where(grids.flatten() > 0, 1.0, GROUND_WEIGHT)
        return (losses * weights).sum() / weights.sum()

    def answering(self, shown: Sequence[list[lattice.Placed]], dice: random.Random) -> Tensor:
        """Questions of one image stand behind it in one row, but each sees the image and itself only, at the places
        that it has where it is asked by itself: otherwise one answer tells another."""
        rows, labels, places, parts = [], [], [], []
        named, apart = [], []  # (row, column, place) of words, and (row, column, difference) of answers
        for number, objects in enumerate(shown):
            row = [BOS, USER, BOI, *[IMAGE] * TOKENS, EOI]
            label, place, part = [-100] * len(row), [*range(head := len(row))], [0] * len(row)
            for at in range(self.asked):
                question, answer = sample_question(seen(objects), dice, self.only)
                spoken = self.tokenizer.tokenize(question)
                asked = [*self.tokenizer.convert_tokens_to_ids(spoken), ASSISTANT]
                if read_question(question)[0] in ("where", "related"):
                    two = [(column, middle(objects, word)) for column, word in enumerate(spoken, len(row))
                           if word in scenes.SHAPES or word in scenes.PLURALS]
                    named += [(number, *each) for each in two]
                    apart.append((number, len(row) + len(spoken), two[0][1] - two[1][1]))
                said = [self.tokenizer.convert_tokens_to_ids(answer), EOS]
                row += [*asked, *said]
                label += [-100] * len(asked) + said
                place += range(head, head + len(asked) + 2)
                part += [at + 1] * (len(asked) + 2)
            rows.append(row)
            labels.append(label)
            places.append(place)
            parts.append(part)
        images = torch.from_numpy(np.stack([lattice.paint(objects) for objects in shown]))
        ids, wanted, part = padded(rows, PAD), padded(labels, -100)[:, 1:], padded(parts, -1)
        before = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        visible = before & ((part[:, None] == part[..., None]) | (part[:, None] == 0))
        found = self.model.model.language_model(
            inputs_embeds=with_images(self.model, ids, images), attention_mask=visible[:, None],
            position_ids=padded(places, 0), use_cache=False, output_hidden_states=True)
        states = found.last_hidden_state[:, :-1]
        loss = F.cross_entropy(self.model.lm_head(states[wanted != -100]).float(), wanted[wanted != -100])
        if hasattr(self.model, "probes") and apart:
            for probe, layer, targets in zip(self.model.probes, found.hidden_states[1:], (named, apart)):
                at, column, values = zip(*targets)
                read = probe(layer[torch.tensor(at), torch.tensor(column)])
                loss = loss + F.mse_loss(read, torch.tensor(np.stack(values), dtype=torch.float32))
        return loss


def middle(objects: Sequence[lattice.Placed], word: str) -> np.ndarray:
    """Mean place of the objects of a shape, (x, y) in [-1, 1]. word: its name, or its plural."""
    places = [centre for shape, _, centre in objects if shape == scenes.PLURALS.get(word, word)]
    return np.mean(places, axis=0) / (scenes.SIZE / 2) - 1


def mixed(rng: np.random.Generator) -> list[lattice.Placed]:
    """Two to five objects of different shapes: of most pairs one can ask for the direction."""
    shapes = rng.choice(scenes.SHAPES, rng.integers(2, 6), replace=False)
    return lattice.place(scenes.Claims(tuple(scenes.Claim(str(shape)) for shape in rng.permutation(shapes))), rng)


def padded(rows: Iterable[list[int]], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, value)


def caption_ids(tokenizer: Any, caption: str) -> list[int]:
    return [BOS, USER, *tokenizer.convert_tokens_to_ids(tokenizer.tokenize(caption)), ASSISTANT, BOI]


def question_ids(tokenizer: Any, question: str) -> list[int]:
    """Tokens of a question about an image."""
    asked = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(question))
    return [BOS, USER, BOI, *[IMAGE] * TOKENS, EOI, *asked, ASSISTANT]


def image_of(image: np.ndarray) -> Any:
    """Image of an image float [3,64,64] in [0, 1]."""
    from PIL import Image

    return Image.fromarray((image.transpose(1, 2, 0) * 255).round().astype(np.uint8))


def seen(objects: Sequence[lattice.Placed]) -> list[Thing]:
    return [Thing(shape, colour, centre) for shape, colour, centre in objects]


def with_images(model: Any, ids: Tensor, images: Tensor) -> Tensor:
    """Embeddings of ids [B,T], with B images [B,3,64,64] in [0, 1] at their places."""
    states = model.model.get_image_features(images * 2 - 1).pooler_output
    given = model.get_input_embeddings()(ids)
    return given.masked_scatter((ids == IMAGE)[..., None], states.to(given.dtype))


# --- accuracy --------------------------------------------------------------------------------------------------------

@torch.no_grad()
def images_right(model: Any, tokenizer: Any, prompts: Sequence[str]) -> dict[str, list[float]]:
    """Verdicts of `scene` on an image of each prompt, by task, drawn without guidance."""
    torch.manual_seed(0)
    found = defaultdict(list)
    for at in range(0, len(prompts), 100):
        some = prompts[at:at + 100]
        grids = sample(model, [caption_ids(tokenizer, prompt) for prompt in some])
        images = model.decode_image_tokens(grids).permute(0, 3, 1, 2).float().add(1).div(2).clamp(0, 1)
        for prompt, right in zip(some, scene(images, some)):
            found["all"].append(right)
            found[scenes.parse(prompt).task].append(right)
    return found


def sample(model: Any, rows: list[list[int]]) -> Tensor:
    """Tokens [B,64] drawn behind these prompts."""
    length = max(map(len, rows))
    ids = torch.tensor([[PAD] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    given, cache, drawn = model.get_input_embeddings()(ids), None, []
    for _ in range(TOKENS):
        made = model.model.language_model(
            inputs_embeds=given, attention_mask=mask, past_key_values=cache, use_cache=True,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, -given.shape[1]:])
        cache = made.past_key_values
        chances = model.model.generation_head(made.last_hidden_state[:, -1]).float().softmax(-1)
        drawn.append(torch.multinomial(chances, 1))
        given = model.prepare_embeddings_for_image_generation(drawn[-1])
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
    return torch.cat(drawn, 1)


@torch.no_grad()
def answers_right(model: Any, tokenizer: Any, prompts: Sequence[str], hidden: bool) -> dict[str, list[float]]:
    """Whether the likeliest word is the right answer to two balanced questions about a scene of each prompt, by kind.

    hidden: about an empty ground in its place.
    """
    rng, dice, found = np.random.default_rng(3), random.Random(3), defaultdict(list)
    for prompt in prompts:
        objects = lattice.place(scenes.parse(prompt), rng)
        image = torch.from_numpy(lattice.paint([] if hidden else objects))[None]
        for _ in range(2):
            question, answer = sample_question(seen(objects), dice)
            ids = torch.tensor([question_ids(tokenizer, question)])
            state = model.model.language_model(
                inputs_embeds=with_images(model, ids, image), use_cache=False).last_hidden_state[:, -1]
            right = float(model.lm_head(state).argmax() == tokenizer.convert_tokens_to_ids(answer))
            found["all"].append(right)
            found[read_question(question)[0]].append(right)
    return found


def held_out_prompts() -> list[str]:
    """Prompts of the packaged held-out file."""
    import json

    import flowgrpo.starter

    lines = (Path(flowgrpo.starter.__file__).parent / "held_out.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def tables(model: Any, tokenizer: Any) -> None:
    prompts = held_out_prompts()
    for said, found in (("images", images_right(model, tokenizer, prompts)),
                        ("answers", answers_right(model, tokenizer, prompts, False)),
                        ("answers, images hidden", answers_right(model, tokenizer, prompts, True))):
        print(f"{said}: " + ", ".join(f"{name} {np.mean(marks):.3f} of {len(marks)}" for name, marks in found.items()),
              flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so many, to go on at the next call")
    parser.add_argument("--decoder-steps", type=int, default=1200)
    parser.add_argument("--steps", type=int, default=700, help="of the language model")
    parser.add_argument("--captions", type=int, default=48, help="per step")
    parser.add_argument("--images", type=int, default=12, help="per step, that are asked about")
    parser.add_argument("--asked", type=int, default=3, help="questions about each")
    parser.add_argument("--seeing-steps", type=int, default=3000, help="of the vision tower alone")
    parser.add_argument("--looking-steps", type=int, default=150, help="of questions for what is there, alone")
    parser.add_argument("--last-steps", type=int, default=1000, help="of both tasks behind it")
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    processor = build_processor()
    model = build_model(len(processor.tokenizer))
    tokens = model.model.vqmodel.requires_grad_(False)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} weights", flush=True)
    trained = [*tokens.decoder.parameters(), *tokens.post_quant_conv.parameters()]
    for parameter in trained:
        parameter.requires_grad_(True)
    Stage(args.out / "decoder.pt", tokens, trained, decoding(tokens, args.decoder_steps), args.decoder_steps, 2e-3,
          1.5).run(deadline)
    tokens.requires_grad_(False)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    lessons = Lessons(model, processor.tokenizer, args.steps, args.captions, args.images, args.asked)
    Stage(args.out / "language.pt", model, learned, lessons, args.steps, args.lr, 1.6).run(deadline)
    eyes = [*model.model.vision_model.parameters(), *model.model.aligner.parameters()]
    with torch.no_grad():
        model.model.aligner.hidden_layers[-1].weight.mul_(0.1)  # features of about the size of words
    Stage(args.out / "eyes.pt", model, eyes, naming(model, processor.tokenizer), args.seeing_steps, 1e-3, 1.6
          ).run(deadline)
    looking = Lessons(model, processor.tokenizer, args.looking_steps, 0, 12, 12, easy=0, first=4000, only="exists")
    Stage(args.out / "looking.pt", model, learned, looking, args.looking_steps, 1e-3, math.inf).run(deadline)
    torch.manual_seed(1)
    model.probes = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 2) for _ in range(2))
    learned += model.probes.parameters()
    lessons = Lessons(model, processor.tokenizer, args.last_steps, 16, 32, 16, easy=0, weight=1.0, first=5000)
    Stage(args.out / "both.pt", model, learned, lessons, args.last_steps, 1e-3, 1.6).run(deadline)
    del model.probes
    model.eval().to(torch.bfloat16).save_pretrained(args.out / "model")
    processor.save_pretrained(args.out / "model")
    tables(model.float(), processor.tokenizer)


if __name__ == "__main__":
    main()
