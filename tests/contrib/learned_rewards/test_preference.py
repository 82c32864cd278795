"""Rewards of images and texts learned from pairs: the loss, the file of pairs, training, and the folder as a reward."""

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import train_starter_reward
from PIL import Image
from safetensors.torch import load_file
from starter_scenes import is_reserved
from torchvision.transforms.functional import to_tensor
from torchvision.utils import save_image

from flowgrpo import rewards
from flowgrpo.cli import main
from flowgrpo.contrib.learned_rewards.denoiser_head import DenoiserHead, blocks, pool, states
from flowgrpo.contrib.learned_rewards.preference import Aspect, Description, Preference, TextPreference, save
from flowgrpo.contrib.learned_rewards.preference_networks import ClipHead, with_text
from flowgrpo.data.pairs import Pair, aspects, load_pairs, split
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.rewards.clip import ClipScore
from flowgrpo.rewards.starter.scene import scene
from flowgrpo.starter.scenes import PREFIXES, SHAPES, parse
from flowgrpo.tools.learned_rewards.training import Settings, _apart, accuracy, batches, bradley_terry, families, right
from flowgrpo.tools.learned_rewards.training import train as train_reward
from tests.helpers import tiny
from tests.helpers.refusals import only_line as told
from tests.rewards.conftest import tiny as tiny_clip  # noqa: F401 a fixture

NAN = math.nan


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


# --- the loss --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("margin, verdict, loss", [
    (0.0, 1.0, 0.6931471805599453),    # log 2, whoever is preferred
    (0.0, 0.5, 0.6931471805599453),
    (1.0, 1.0, 0.31326168751822286),   # -log sigmoid(1) = log(1 + exp(-1))
    (1.0, 0.0, 1.3132616875182228),    # the same plus 1
    (1.0, 0.5, 0.8132616875182228),    # the mean of both
    (-2.0, 0.0, 0.12692801104297252),  # log(1 + exp(-2))
    (-800.0, 1.0, 800.0),              # no infinity
])
def test_the_loss_by_hand(margin, verdict, loss):
    assert bradley_terry(column(margin), column(verdict)).item() == pytest.approx(loss, abs=1e-10)


def test_pairs_say_the_same_in_either_order_and_only_preferences_count():
    margins = torch.tensor([[1.0, 5.0], [-2.0, 0.0]], dtype=torch.float64, requires_grad=True)
    loss = bradley_terry(margins, torch.tensor([[1.0, NAN], [0.0, 0.5]]))
    assert loss.item() == pytest.approx((0.31326168751822286 + 0.12692801104297252 + math.log(2)) / 3, abs=1e-10)
    [gradient] = torch.autograd.grad(loss, margins)
    assert gradient[0, 1] == 0 and gradient[1, 1] == 0 and (gradient[:, 0] != 0).all()  # absent, and a tie at a tie
    margins, verdicts = torch.randn(30, 2, dtype=torch.float64), torch.tensor([0.0, 0.5, 1.0, NAN]).repeat(15)
    verdicts = verdicts.reshape(30, 2)
    assert bradley_terry(margins, verdicts).item() == pytest.approx(bradley_terry(-margins, 1 - verdicts).item(),
                                                                     abs=1e-12)
    assert torch.equal(right(margins, verdicts).nan_to_num(9), right(-margins, 1 - verdicts).nan_to_num(9))
    margins, verdicts = column(2, -1, 0, 3, -4), column(1, 1, 0, 0.5, NAN)
    assert right(margins, verdicts)[:, 0].nan_to_num(9).tolist() == [1, 0, 0.5, 9, 9]
    found = accuracy(margins[:, 0], verdicts[:, 0], ["a", "a", "b", "c", "c"])
    assert found.mean == 0.5 and found.prompts == 2  # of a and b, each of which has 1/2


def test_the_gradient_is_logistic_regression_s():
    generator = torch.Generator().manual_seed(0)
    chosen, rejected = torch.randn(2, 40, 5, dtype=torch.float64, generator=generator)
    verdicts = torch.tensor([0.0, 0.5, 1.0])[torch.randint(3, (40,), generator=generator)].double()
    weight = torch.randn(5, dtype=torch.float64, generator=generator, requires_grad=True)
    loss = bradley_terry((chosen @ weight - rejected @ weight)[:, None], verdicts[:, None])
    [gradient] = torch.autograd.grad(loss, weight)
    difference = (chosen - rejected).numpy()
    probability = 1 / (1 + np.exp(-difference @ weight.detach().numpy()))
    assert np.abs(gradient.numpy() - difference.T @ (probability - verdicts.numpy()) / 40).max() < 1e-10


# --- pairs -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path):
    for name in ("a.png", "b.png", "c.png"):
        save_image(torch.rand(3, 8, 8), tmp_path / name)
    return tmp_path


def line(**more) -> str:
    return json.dumps({"prompt": "p", "chosen": "a.png", "rejected": "b.png"} | more)


def test_a_file_of_pairs(folder):
    file, given = folder / "pairs.jsonl", {"colour": "rejected", "shape": "tie", "overall": "tie"}
    file.write_text("\n".join([line(), "", line(prompt=" q ", aspects=given), line(aspects={"shape": "chosen"})]))
    pairs = load_pairs(file)
    assert pairs[0] == Pair("p", folder / "a.png", folder / "b.png") and [pair.prompt for pair in pairs] == [*"pqp"]
    assert [pair.verdicts for pair in pairs] == [{"overall": 1.0}, {"overall": 0.5, "colour": 0.0, "shape": 0.5},
                                                 {"overall": 1.0, "shape": 1.0}]


@pytest.mark.parametrize("wrong, expected", [
    ("{", "not valid JSON"),
    ("[1]", "expected an object with the keys prompt, chosen and rejected, got [1]"),
    (line(choosen="a.png"), "unknown key 'choosen': did you mean 'chosen'?"),
    (line(prompt=" "), "expected a text under 'prompt', got ' '"),
    (line(chosen=None), "expected the path of an image under 'chosen', got None"),
    (line(rejected="d.png"), "no image at"),
    (line(rejected="a.png"), "chosen and rejected are the same image, a.png"),
    (line(aspects=["colour"]), "expected an object of names and verdicts under 'aspects', got ['colour']"),
    (line(aspects={"colour": "first"}), "aspect 'colour': expected \"chosen\", \"rejected\" or \"tie\", got 'first'"),
    (line(aspects={"a:b": "tie"}), "the aspect 'a:b' is no name")])
def test_a_mistake_in_a_line_is_told_with_its_place(folder, wrong, expected, capsys):
    file = folder / "pairs.jsonl"
    file.write_text(f"{line()}\n\n{wrong}\n{line()}\n")
    assert told(capsys, "reward", "train", file, "--output",
                folder / "r").startswith(f"flowgrpo: error: pairs {file}, line 3: {expected}")


def test_mistakes_in_a_whole_file(folder, capsys):
    file, train = folder / "pairs.jsonl", ["reward", "train", folder / "pairs.jsonl", "--output", folder / "r"]
    assert "no such file" in told(capsys, *train)
    file.write_text("\n")
    assert "the file holds no pair" in told(capsys, *train)
    file.write_bytes(b"\xff\n")
    assert "not UTF-8 text" in told(capsys, *train)
    assert "expected a .jsonl file, got '.txt'" in told(capsys, "reward", "train", "a.txt", "--output", folder / "r")
    file.write_text(f"{line()}\n{line(prompt='q')}\n")
    assert "expected a share between 0 and 1" in told(capsys, *train, "--held-out", "1.5")
    assert "holds out every pair" in told(capsys, *train, "--held-out", file)
    file.write_text(f"{line()}\n{line(prompt='q', aspects={'dull': 'tie'})}\n{line(prompt='r')}\n")
    assert "aspect 'dull': no training pair prefers a side in it" in told(capsys, *train)
    file.write_text("\n".join(line(prompt=p, aspects={"overall": "tie"}) for p in "pq") + f"\n{line(prompt='r')}")
    held = folder / "held.jsonl"
    held.write_text(line(prompt="q", aspects={"overall": "tie"}))
    assert "none of the held-out pairs prefers a side" in told(capsys, *train, "--held-out", held)


def test_no_prompt_is_on_both_sides(folder):
    pairs = [Pair(f"p{i % 7}", folder / "a.png", folder / "b.png") for i in range(30)]
    train, held = split(pairs, 0.3)
    assert {pair.prompt for pair in train} | {pair.prompt for pair in held} == {f"p{i}" for i in range(7)}
    assert len({pair.prompt for pair in held}) == 2 and len(train) + len(held) == 30
    assert not {pair.prompt for pair in train} & {pair.prompt for pair in held} and split(pairs, 0.3) == (train, held)
    file = folder / "held.jsonl"
    file.write_text(line(prompt="p1") + "\n" + line(prompt="new"))
    train, held = split(pairs, str(file))
    assert [pair.prompt for pair in held] == ["p1", "new"] and {f"p{i}" for i in (0, 2, 3, 4, 5, 6)} == {
        pair.prompt for pair in train}
    assert aspects(train, held) == ["overall"]


def test_pairs_that_share_a_image_stand_in_one_batch():
    names = ["ab", "cd", "bc", "ef", "eg", "hi", "jk", "lm"]
    pairs = [Pair("p", Path(one), Path(two)) for one, two in names]
    grouped = families(pairs)
    assert sorted(grouped) == [[0, 1, 2], [3, 4], [5], [6], [7]]
    assert families([Pair("a", "1", "2"), Pair("b", "1", "2"), Pair("a", "2", "3")]) == [[0, 2], [1]]  # of one prompt
    for seed in range(20):
        parts = list(batches(grouped, 2, np.random.default_rng(seed)))
        assert sorted(sum(parts, [])) == list(range(8))
        assert all(len(part) >= 2 for part in parts[:-1])
        assert all(sum(set(group) <= set(part) for part in parts) == 1 for group in grouped)


# --- training, and the folder as a reward ----------------------------------------------------------------------------
PAINT = {"red": (0.9, 0.1, 0.1), "blue": (0.1, 0.1, 0.9)}


def squares(folder: Path) -> Path:
    """96 pairs: the image whose colour the prompt names is preferred, and in `light` the lighter one."""
    generator, lines = torch.Generator().manual_seed(0), []
    for i, (prefix, shape, colour) in enumerate((p, s, c) for p in PREFIXES for s in SHAPES for c in PAINT):
        for dark in (0, 1):
            for side, paint in enumerate([colour, *(c for c in PAINT if c != colour)]):
                light = torch.tensor(PAINT[paint])[:, None, None] * (0.4 if side == dark else 1.0)
                noise = 0.05 * torch.rand(3, 16, 16, generator=generator)
                save_image((light + noise).clamp(0, 1), folder / f"{i}-{dark}-{side}.png")
            verdict = {} if i % 3 == 0 else {"aspects": {"light": "rejected" if dark == 0 else "chosen"}}
            lines.append(line(prompt=f"{prefix}a {colour} {shape}", chosen=f"{i}-{dark}-0.png",
                              rejected=f"{i}-{dark}-1.png", **verdict))
    file = folder / "pairs.jsonl"
    file.write_text("\n".join(lines))
    return file


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A trained reward's folder with two aspects, made by the command, the pairs' file, and the rewards as trained."""
    folder = tmp_path_factory.mktemp("toy")
    file = squares(folder)
    assert main(["reward", "train", str(file), "--output", str(folder / "reward"), "--size", "16", "--batch", "16",
                 "--epochs", "30", "--lr", "3e-3", "--patience", "10", "--device", "cpu"]) == 0
    return folder / "reward", file


def some(file: Path) -> tuple[torch.Tensor, list[str]]:
    pairs = load_pairs(file)[::9]
    return torch.stack([to_tensor(Image.open(pair.chosen)) for pair in pairs]), [pair.prompt for pair in pairs]


def test_a_separable_set_is_learned(learned):
    record = json.loads((learned[0] / "reward.json").read_text())
    assert {name: each["mean"] for name, each in record["measured"]["accuracy"].items()} == {"overall": 1, "light": 1}
    assert record["network"] == {"kind": "film", "size": 16}
    assert record["measured"]["pairs"] == {"train": 86, "held_out": 10}  # 5 of 48 prompts
    assert not [file for file in learned[0].rglob("*") if file.suffix in (".bin", ".pt", ".pkl")]


def test_the_folder_is_a_reward(learned, monkeypatch, capsys):
    folder, file = learned
    monkeypatch.chdir(folder.parent)
    images, prompts = some(file)
    both, overall, light = (rewards.find(name)(images, prompts) for name in ("./reward", "./reward:overall",
                                                                             "reward:light"))
    assert torch.allclose(both, overall + light, atol=1e-9) and both.std() > 0
    weighted = rewards.find("./reward", {"weights": {"overall": 2.0, "light": -0.5}})(images, prompts)
    assert torch.allclose(weighted, 2 * overall - light / 2, atol=1e-9)
    assert torch.equal(rewards.find("./reward", {"weights": {"light": 1.0}})(images, prompts), light)
    assert rewards.about(rewards.find("./reward")).modality == "image"
    for colour in ("red", "blue"):
        assert main(["reward", "score", "./reward:overall", "0-0-0.png", "0-0-1.png", "--prompt", f"a {colour} circle",
                     "--json"]) == 0
        red, blue = (row["score"] for row in json.loads(capsys.readouterr().out)["scores"])
        assert (red > blue) == (colour == "red") and red != blue


def test_mistakes_with_the_folder(learned, monkeypatch, capsys, tmp_path):
    folder, file = learned
    monkeypatch.chdir(folder.parent)
    score = ["0-0-0.png", "--prompt", "a red circle"]
    assert "has no aspect 'lihgt': did you mean 'light'?" in told(capsys, "reward", "score", "./reward:lihgt", *score)
    assert "no reward.json in it" in told(capsys, "reward", "score", str(tmp_path), *score)
    assert "unknown reward 'rewart:light'" in told(capsys, "reward", "score", "rewart:light", *score)
    assert "has no aspect 'colour'" in told(capsys, "reward", "score", "./reward", *score, "--args",
                                            "{weights: {colour: 1}}")
    assert "holds a reward already" in told(capsys, "reward", "train", file, "--output", "reward")
    (tmp_path / "reward.json").write_text('{"form": 9}')
    assert "expected what `flowgrpo reward train` wrote" in told(capsys, "reward", "score", str(tmp_path), *score)
    (tmp_path / "reward.json").write_text((folder / "reward.json").read_text())
    assert "train it again, or copy its whole folder" in told(capsys, "reward", "score", str(tmp_path), *score)


def written(network, folder: Path, kind: dict) -> tuple[Preference, torch.Tensor]:
    """A network's reward as read from the folder that it is saved in, and its scores of some images before that."""
    save(folder, network, Description({"overall": Aspect(), "light": Aspect()}, kind))
    with torch.no_grad():
        return Preference(str(folder), device="cpu"), network.eval()(**network.rows(network.prepare(IMAGES), WORDS))


IMAGES, WORDS = torch.rand(3, 3, 24, 32, generator=torch.Generator().manual_seed(1)), ["a ring", "a red star", "x"]


def test_scores_are_the_same_bit_for_bit_after_loading(tmp_path):
    torch.manual_seed(0)
    reward, before = written(with_text("starter", 2, 16), tmp_path, {"kind": "film", "size": 16})
    assert torch.equal(reward.scores(IMAGES, WORDS), before) and before.shape == (3, 2) and before.std() > 0
    assert torch.equal(reward(IMAGES, WORDS), before.double().sum(1))
    assert not torch.allclose(reward.scores(IMAGES, WORDS[1:] + WORDS[:1]), before)  # the prompt matters


@pytest.fixture(scope="module")
def clip(tiny_clip) -> dict[str, str]:  # noqa: F811
    """A tiny model that open_clip knows by the name, and a file of weights, as the arguments of ClipScore."""
    return {"model": "tiny-clip-of-tests", "pretrained": tiny_clip[2]}


def test_a_head_on_clip_keeps_the_head_alone(clip, tmp_path):
    network = ClipHead(ClipScore(**clip, device="cpu"), 2)
    reward, before = written(network, tmp_path, {"kind": "clip", **clip})
    assert torch.equal(reward.scores(IMAGES, WORDS), before) and before.std() > 0
    assert {key.partition(".")[0] for key in load_file(tmp_path / "network.safetensors")} == {"head"}


def test_a_head_on_clip_is_trained_and_clip_is_not(clip, learned, tmp_path):
    train, held = split(load_pairs(learned[1]), 0.1)
    found = train_reward(train, held, tmp_path / "r", Settings(clip=clip["model"], pretrained=clip["pretrained"],
                                                               epochs=3, device="cpu"))
    assert found.keys() == {"overall", "light"} and found["overall"].prompts == 5
    reward = Preference(str(tmp_path / "r"), aspect="overall", device="cpu")
    images, prompts = some(learned[1])
    fresh = ClipHead(ClipScore(**clip, device="cpu"), 2)
    rows = fresh.rows(fresh.prepare(images), prompts)["features"]
    network = reward.parts[0]
    assert torch.equal(network.rows(network.prepare(images), prompts)["features"], rows)
    assert reward(images, prompts).std() > 0


def test_mistakes_in_options_and_images(folder, capsys):
    file = folder / "pairs.jsonl"
    file.write_text("\n".join(line(prompt=p) for p in ("a ring", "a star", "a ring and " + 20 * "so ")))
    train = ["reward", "train", file, "--output", folder / "r"]
    assert "expected clip and pretrained together" in told(capsys, *train, "--clip", "ViT-B-32")
    assert "device is 'abacus', which torch" in told(capsys, *train, "--device", "abacus")
    (folder / "b.png").write_text("no image")
    assert main([str(each) for each in train]) == 2
    said = capsys.readouterr().err
    assert "1 of 3 prompts have more than the 16 tokens" in said
    assert f"{folder / 'b.png'} cannot be read" in said.splitlines()[-1]
    assert not (folder / "r").exists()


@pytest.mark.parametrize("held", [False, True])
def test_the_starter_s_pairs_are_labelled_by_the_scene_reward(tmp_path, held):
    into = train_starter_reward.Pairs(tmp_path, "pairs")
    train_starter_reward.rendered_pairs(into, 40, 0, held)
    pairs = load_pairs(into.write())
    prompts = [pair.prompt for pair in pairs]
    chosen, rejected = (scene(torch.stack([to_tensor(Image.open(getattr(pair, side))) for pair in pairs]), prompts)
                        for side in ("chosen", "rejected"))
    assert [(1 + a - b) / 2 for a, b in zip(chosen, rejected)] == [pair.verdicts["overall"] for pair in pairs]
    assert len(pairs) == 40 and 0 < sum(a == b for a, b in zip(chosen, rejected)) <= 6
    begins = [max((prefix for prefix in PREFIXES if prompt.startswith(prefix)), key=len) for prompt in prompts]
    assert {is_reserved(parse(prompt), prefix) for prompt, prefix in zip(prompts, begins)} == {held}


def test_help_and_mistakes_come_before_torch(folder):
    code = "import sys, flowgrpo.cli as c; r = c.main(sys.argv[1:]); print('torch' in sys.modules); sys.exit(r or 0)"
    (folder / "pairs.jsonl").write_text("{")
    for arguments, status in ((["--help"], 0), ([str(folder / "pairs.jsonl"), "--output", "r"], 2)):
        done = subprocess.run([sys.executable, "-c", code, "reward", "train", *arguments], capture_output=True,
                              text=True)
        assert done.returncode == status, done.stderr
        assert done.stdout.splitlines()[-1] == "False"


def sums(count: int, seed: int) -> list[Pair]:
    """Pairs whose better text has more sevens; the aspect `short` prefers the other one where it is shorter."""
    rng, pairs = random.Random(seed), []
    for number in range(count):
        prompt = f"{number % 90 + 1}+{rng.randrange(10)}="
        worse = "".join(rng.choice("123") for _ in range(rng.randrange(1, 4)))
        pairs.append(Pair(prompt, worse + "7", worse, {"overall": 1.0, "short": 0.0}, {"overall": 2.0}))
    return pairs


@pytest.fixture(scope="module")
def learned_texts(tmp_path_factory):
    """A folder of a reward that was trained on separable texts, and its accuracies."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("learned") / "reward"
    held = [Pair("95" + pair.prompt, pair.chosen, pair.rejected, pair.verdicts) for pair in sums(20, 9)]
    return folder, train_reward(sums(96, 1), held, folder, Settings(model="starter_text", epochs=6, lr=1e-3, batch=16,
                                                                    device="cpu"))


def test_a_reward_orders_separable_texts_by_aspect(learned_texts):
    folder, accuracies = learned_texts
    assert {name: result.mean for name, result in accuracies.items()} == {"overall": 1.0, "short": 1.0}
    reward, short = (rewards.find(f"{folder}:{aspect}", {"device": "cpu"}) for aspect in ("overall", "short"))
    assert isinstance(reward, TextPreference) and reward.about.modality == "text"
    table = rewards.score({"a": reward, "b": short}, ["27", "2", "137", "13"], ["8+1="] * 4, [{}] * 4)
    assert (table[::2, 0] > table[1::2, 0] + 0.5).all() and (table[::2, 1] < table[1::2, 1] - 0.5).all()


def test_the_folder_needs_no_other_model_and_batches_change_nothing(learned_texts):
    folder, _ = learned_texts
    known = json.loads((folder / "reward.json").read_text())
    assert known["network"] == {"kind": "language", "model": "starter_text", "frozen": False}
    assert (folder / "language_model" / "config.json").is_file() and (folder / "tokenizer").is_dir()
    one, all_ = (TextPreference(str(folder), device="cpu", batch_size=size) for size in (1, 64))
    texts, prompts = ["27", "2", "1337"], ["8+1=", "10+1=", "3+4="]
    torch.testing.assert_close(one(texts, prompts), all_(texts, prompts), rtol=1e-4, atol=1e-4)


def test_a_frozen_model_trains_its_head_alone_and_is_loaded_by_its_name(tmp_path):
    train_reward(sums(24, 1), sums(6, 2), tmp_path / "reward", Settings(
        model="starter_text", frozen=True, epochs=3, lr=3e-2, batch=8, device="cpu"))
    assert not (tmp_path / "reward" / "language_model").exists()
    assert (tmp_path / "reward" / "network.safetensors").stat().st_size < 5000
    reward = TextPreference(str(tmp_path / "reward"), "overall", device="cpu")
    assert reward(["127", "12"], ["4+4="] * 2).diff() < 0


def test_margins_of_scores():
    pairs = [Pair("a", "b", "c", margins={"overall": 2.0, "short": -1.0}), Pair("a", "b", "d")]
    assert _apart(pairs, ["overall", "short"], 0.5).tolist() == [[1.0, -0.5], [0.0, 0.0]]
    assert _apart(pairs[1:], ["overall"], 0.0).tolist() == [[0.0]]


@pytest.mark.parametrize("options, told", [
    (["--model", "starter_text", "--margins", "1"], "--margins: no training pair has a margin"),
    (["--frozen"], "no image at"),
    (["--model", "starter_text", "--clip", "x", "--pretrained", "y"], "expected a language model (model) without clip"),
    (["--model", "nowhere/at/all"], "expected starter_text, or a folder or hub id of a language model")])
def test_mistakes_are_one_line(tmp_path, capsys, options, told):
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}+1=", "chosen": "7", "rejected": "1"}) + "\n" for n in range(8)))
    assert main(["reward", "train", str(file), "--output", str(tmp_path / "reward"), "--held-out", "0.5",
                 *options]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert told in error


def test_pooled_states_and_prompts_count():
    tokens = torch.tensor([[[1.0, 0.0], [3.0, 0.0]]])
    assert pool(tokens).tolist() == [[2, 0, 1, 0]]
    assert pool(tokens.transpose(1, 2).reshape(1, 2, 1, 2)).tolist() == [[2, 0, 1, 0]]  # the same as a map [C, h, w]
    policy = PipelinePolicy(tiny.sd3(), None, call=tiny.CALL)
    encoded = policy.encode(["red", "a cat"])
    latent = policy.of_noise(encoded.rows(torch.tensor([0])), policy.generators([0]), "latent")
    features = states(policy, latent.repeat(2, 1, 1, 1), encoded)
    assert (features[0] - features[1]).abs().max() > 1e-3


@pytest.mark.parametrize("make, call, guidance", [
    (tiny.sd3, tiny.CALL, 1.0), (tiny.sd3, tiny.CALL, 3.0), (tiny.flux, tiny.FLUX_CALL, 1.0), (tiny.sd15, {}, 3.0)],
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
