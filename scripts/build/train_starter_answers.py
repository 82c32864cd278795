"""Teach a small network to answer questions about the starter's images, and measure it on prompts never seen.

    python scripts/build/train_starter_answers.py --out runs/starter_answers   # resumes by stage

The images are those of train_starter_reward.py: rendered scenes, as their prompts say and with something wrong, the
same after the starter's autoencoder, and images that the starter drew. What is in them is read by the reward
`scene`, so the answers are the images', whatever their prompts say. Every epoch asks other questions.

Prompts of training are those that alignment may train on; those of the tests are the others, and the tests ask what
`question_answers` asks of such a prompt. Writes --out/pictures, the network's folder --out/answers for
`question_answers: {args: {by: FOLDER}}`, and --out/accuracy.json, which also says what choosing among the starter's
images by the answers does for `scene`. Seeds are fixed.
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from train_starter_reward import GROUP, drawn, rendered

from flowgrpo.contrib.learned_rewards.preference import FILE, Aspect, Description, save
from flowgrpo.contrib.learned_rewards.preference_networks import Film
from flowgrpo.contrib.questions.question_answers import ByFolder, QuestionAnswers
from flowgrpo.contrib.questions.questions import Question, of_claims
from flowgrpo.contrib.questions.scene_answers import CHOICES, KINDS, Thing, all_questions, read_question, things
from flowgrpo.evaluation.statistics import STUDENT, interval
from flowgrpo.rewards.starter.scene import read, scene
from flowgrpo.starter import scenes
from flowgrpo.tools.learned_rewards.training import Settings, fit, share

ANSWERS = tuple(dict.fromkeys(choice for choices in CHOICES.values() for choice in choices))
# The shares of the questions.
WORTH = {"exists": 0.2, "total": 0.15, "count": 0.2, "colour": 0.15, "where": 0.25, "related": 0.05}
POSITIVE = 0.65  # the share of a kind's questions that are about what is there
WIDTH, LAYERS, LONGEST = 96, 2, 20  # of the text encoder; tokens of a question
HELD = 20  # one prompt of so many is kept to choose the epoch by


# --- images --------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Shown:
    """N images uint8 [N, 3, 64, 64], the prompts that they were made of, and what is in them."""

    images: Tensor
    prompts: list[str]
    seen: list[list[Thing]]


def keep(file: Path, batches: Iterator[tuple[Sequence[str], np.ndarray]], most: int | None = None) -> None:
    """Write images, uint8 [B, 64, 64, 3] at a time, with their prompts and what is read of them."""
    texts, images, seen = [], [], []
    for prompts, made in batches:
        texts += prompts
        images.append(np.moveaxis(made, -1, 1))
        seen += [[asdict(each) for each in things(read(image / 255))] for image in torch.tensor(images[-1])]
        if most and len(texts) >= most:
            break
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".part").open("wb") as part:
        np.savez_compressed(part, images=np.concatenate(images)[:most],
                            told=json.dumps({"prompts": texts[:most], "seen": seen[:most]}))
    file.with_suffix(".part").rename(file)


def load(*files: Path) -> Shown:
    parts = [np.load(file, allow_pickle=False) for file in files]
    told = [json.loads(str(part["told"])) for part in parts]
    return Shown(torch.from_numpy(np.concatenate([part["images"] for part in parts])),
                 [prompt for part in told for prompt in part["prompts"]],
                 [[Thing(**each | {"centre": tuple(each["centre"])}) for each in seen]
                  for part in told for seen in part["seen"]])


def both_sides(batches: Iterator[tuple[list[str], list[np.ndarray]]]) -> Iterator[tuple[list[str], np.ndarray]]:
    return ((prompts * 2, np.concatenate(sides)) for prompts, sides in batches)


def build(folder: Path, args: argparse.Namespace) -> None:
    """File of images per kind to train with, and one to test with."""
    from flowgrpo.policies.pipelines.load import load_pipeline

    pipe = load_pipeline("starter")
    pipe.set_progress_bar_config(disable=True)
    sizes = {"train": (False, args.images // 2, args.drawn), "test": (True, args.test, args.test_drawn)}
    for seed, (name, (held, count, prompts)) in enumerate(sizes.items()):
        made = {"rendered": lambda at: both_sides(rendered(at, held)),
                "decoded": lambda at: both_sides(rendered(at, held, pipe.vae)),
                "drawn": lambda at: drawn(pipe, prompts, at, held, name)}
        for place, (kind, batches) in enumerate(made.items()):
            file = folder / f"{name}_{kind}.npz"
            if not file.exists():
                keep(file, batches(100 + 10 * seed + place), None if kind == "drawn" else count)
                print(f"{file}: {len(load(file).prompts)} images", flush=True)


# --- training --------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Catalogue:
    """Q questions: their texts, kinds [Q], which of A answers each may have [Q, A], and what tells the right one."""

    texts: list[str]
    kinds: Tensor
    allowed: Tensor
    right: list[Any]

    @classmethod
    def of(cls, questions: Sequence[Question]) -> Catalogue:
        read_all = [read_question(each.question) for each in questions]
        allowed = torch.tensor([[answer in CHOICES[kind] for answer in ANSWERS] for kind, _ in read_all])
        return cls([each.question for each in questions], torch.tensor([KINDS.index(kind) for kind, _ in read_all]),
                   allowed, [right for _, right in read_all])

    def answers(self, seen: Sequence[list[Thing]]) -> Tensor:
        """Right answers' numbers [N, Q], -1 for none."""
        numbers = {answer: number for number, answer in enumerate(ANSWERS)}
        return torch.tensor([[numbers.get(right(each), -1) for right in self.right] for each in seen])

    def weights(self, answers: Tensor) -> Tensor:
        """Return how often each question is put [N, Q]: kinds by WORTH, and within a kind POSITIVE for those
        that are not answered by no, zero or nothing."""
        nothing = torch.tensor([-1, ANSWERS.index("no"), ANSWERS.index("zero")])
        group = 2 * self.kinds + ~torch.isin(answers, nothing)
        sizes = torch.zeros(len(answers), 2 * len(KINDS)).scatter_add(1, group, torch.ones(group.shape))
        shares = torch.tensor([WORTH[kind] * part for kind in KINDS for part in (1 - POSITIVE, POSITIVE)])
        return shares[group] / sizes.gather(1, group)


def answer_loss(scores: Tensor, allowed: Tensor, answers: Tensor) -> Tensor:
    """Cross-entropy of the softmax over the allowed answers, the mean over B questions; a question without a right
    answer should leave all equally likely. scores [B, A]; allowed bool [B, A]; answers [B], -1 for none."""
    logs = scores.masked_fill(~allowed, -torch.inf).log_softmax(-1).masked_fill(~allowed, 0)
    even = allowed.to(scores) / allowed.sum(-1, keepdim=True)
    chosen = torch.nn.functional.one_hot(answers.clamp(min=0), scores.shape[-1]).to(scores)
    return -(torch.where(answers[:, None] < 0, even, chosen) * logs).sum(-1).mean()


def network(texts: Sequence[str], seed: int) -> Film:
    """Fresh network whose tokens are the words of these texts."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    split = pre_tokenizers.Whitespace()
    words = sorted({word for text in texts for word, _ in split.pre_tokenize_str(text.lower())})
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(["[pad]", "[unknown]", *words])},
                                       unk_token="[unknown]"))
    words.normalizer, words.pre_tokenizer = normalizers.Lowercase(), split
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[pad]", unk_token="[unknown]",
                                        model_max_length=LONGEST)
    config = CLIPTextConfig(vocab_size=words.get_vocab_size(), hidden_size=WIDTH, intermediate_size=2 * WIDTH,
                            num_hidden_layers=LAYERS, num_attention_heads=4, max_position_embeddings=LONGEST,
                            pad_token_id=0, bos_token_id=0, eos_token_id=0, architectures=["CLIPTextModel"])
    return Film(CLIPTextModel._from_config(config, attn_implementation="eager"), tokenizer, len(ANSWERS), scenes.SIZE)


def train(shown: Shown, output: Path, settings: Settings, each: int) -> None:
    """Train on `each` questions of every image in each epoch, and write the network's folder."""
    catalogue = Catalogue.of(all_questions())
    answers = catalogue.answers(shown.seen)
    weights, model = catalogue.weights(answers), network(catalogue.texts, settings.seed)
    told = model.rows(torch.zeros(len(catalogue.texts), 3, 1, 1), catalogue.texts)
    generator = torch.Generator().manual_seed(settings.seed)
    held = torch.tensor([zlib.crc32(prompt.encode()) % HELD == 0 for prompt in shown.prompts])

    def questions(of: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Batches of images [n], in random order, with questions of each [n, `each`]."""
        images = of.nonzero()[:, 0]
        images = images[torch.randperm(len(images), generator=generator)]
        asked = torch.multinomial(weights[images], each, generator=generator)
        return list(zip(images.split(settings.batch), asked.split(settings.batch)))

    def scores(at: Tensor, q: Tensor) -> Tensor:
        """[n * each, A]; an image is looked at once for all its questions."""
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.bf16):
            seen = model.image_features(shown.images[at]).repeat_interleave(each, 0)
            return model.score_features(seen, told["ids"][q.flatten()], told["mask"][q.flatten()]).float()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        at, q = batch
        return answer_loss(scores(at, q), catalogue.allowed[q.flatten()], answers[at[:, None], q].flatten())

    @torch.no_grad()
    def measured() -> tuple[float, float]:
        model.eval()
        found = torch.cat([scores(*part) for part in watched])
        allowed = torch.cat([catalogue.allowed[q.flatten()] for _, q in watched])
        right = torch.cat([answers[at[:, None], q].flatten() for at, q in watched])
        chosen = found.masked_fill(~allowed, -torch.inf).argmax(-1)
        return (chosen == right)[right >= 0].float().mean().item(), -answer_loss(found, allowed, right).item()

    watched = questions(held)
    best = fit(model, [questions(~held) for _ in range(settings.epochs)], loss, measured, settings)
    save(output, model, Description({answer: Aspect() for answer in ANSWERS}, {"kind": "film", "size": scenes.SIZE}, {
        "accuracy": measured()[0], "epoch": best, "each": each,
        "settings": {key: getattr(settings, key) for key in ("epochs", "batch", "lr", "seed", "bf16")},
        "questions": {"of an epoch": int((~held).sum()) * each, "held_out": int(held.sum()) * each}}))


# --- tests -----------------------------------------------------------------------------------------------------------

def tested(model: Path, file: Path) -> dict[str, Any]:
    """Share of right answers to the questions of the images' own prompts, with its interval over prompts: all;
    those whose right answer is the prompt's, and another; and by kind. What has no right answer is not asked."""
    shown, rows = load(file), []
    for row, (prompt, seen) in enumerate(zip(shown.prompts, shown.seen)):
        for question in of_claims(scenes.parse(prompt)):
            kind, answer = read_question(question.question)
            if answer(seen) in question.choices:
                rows.append((row, replace(question, answer=answer(seen)), kind, answer(seen) == question.answer))
    right = ByFolder(str(model), "share").right(shown.images / 255, [(row, question) for row, question, *_ in rows])
    parts = {"all": [True] * len(rows), "as the prompt says": [same for *_, same in rows],
             "otherwise": [not same for *_, same in rows]}
    parts |= {kind: [own == kind for _, _, own, _ in rows] for kind in KINDS if kind != "related"}
    return {name: _share([(mark, shown.prompts[row]) for mark, (row, *_), own in zip(right, rows, inside) if own])
            for name, inside in parts.items()}


def _share(marks: list[tuple[float, str]]) -> dict[str, Any]:
    return {"questions": len(marks), **share(*zip(*marks)).as_json()} if marks else {"questions": 0}


def chosen(model: Path, file: Path) -> dict[str, Any]:
    """Measure the gain of choosing by the answers: strict accuracy `scene` of the starter's images, of those
    that the reward likes best among the GROUP of a prompt, and the difference, with intervals over prompts."""
    shown = load(file)
    reward = QuestionAnswers(by=str(model), score="probability")
    scores = torch.tensor(reward(shown.images / 255, shown.prompts, [{}] * len(shown.prompts))).view(-1, GROUP)
    right = torch.tensor(scene(shown.images / 255, shown.prompts)).view(-1, GROUP)
    best = right.gather(1, scores.argmax(1, keepdim=True))
    return {"drawn": interval(right.numpy()).as_json(), "chosen": interval(best.numpy()).as_json(),
            "gain": interval((best - right.mean(1, keepdim=True)).numpy(), STUDENT).as_json()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/starter_answers"))
    parser.add_argument("--pictures", type=int, default=5_000, help="rendered and decoded, half each, to train with")
    parser.add_argument("--drawn", type=int, default=400, help="prompts of which the starter draws images")
    parser.add_argument("--test", type=int, default=300, help="rendered and decoded images each, to test with")
    parser.add_argument("--test-drawn", type=int, default=30, help="prompts of the drawn images to test with")
    parser.add_argument("--questions", type=int, default=6, help="per image and epoch")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=16, help="images per step")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--fp32", action="store_true", help="train in fp32; without: bf16")
    args = parser.parse_args()
    images, start = args.out / "pictures", time.time()
    if not (images / "test_drawn.npz").exists():  # the last that is written
        build(images, args)
        print(f"images made after {time.time() - start:.0f} s", flush=True)
    if not (args.out / "answers" / FILE).exists():
        train(load(*sorted(images.glob("train_*.npz"))), args.out / "answers", Settings(
            epochs=args.epochs, batch=args.batch, lr=args.lr, bf16=not args.fp32), args.questions)
        print(f"trained after {time.time() - start:.0f} s", flush=True)
    found = {kind: tested(args.out / "answers", images / f"test_{kind}.npz")
             for kind in ("rendered", "decoded", "drawn")}
    for kind, parts in found.items():
        for name, row in parts.items():
            print(f"{kind}, {name}: {row.get('mean', 0):.3f} of {row['questions']} answers right "
                  f"({row.get('low', 0):.3f} to {row.get('high', 0):.3f})")
    best = chosen(args.out / "answers", images / "test_drawn.npz")
    for name, row in best.items():
        print(f"scene, {name}: {row['mean']:.3f} ({row['low']:.3f} to {row['high']:.3f}), {row['prompts']} prompts")
    (args.out / "accuracy.json").write_text(json.dumps(found | {"best_of_group": best}, indent=2) + "\n")


if __name__ == "__main__":
    main()
