"""Rewards of texts learned from pairs: training, the folder as a reward, margins, and mistakes."""

import json
import random

import pytest
import torch

from flowgrpo import rewards
from flowgrpo.cli import main
from flowgrpo.contrib.learned_rewards.preference import TextPreference
from flowgrpo.data.pairs import Pair
from flowgrpo.tools.learned_rewards.training import Settings, _apart, families
from flowgrpo.tools.learned_rewards.training import train as train_reward


def sums(count: int, seed: int) -> list[Pair]:
    """Pairs whose better text has more sevens; the aspect `short` prefers the other one where it is shorter."""
    rng, pairs = random.Random(seed), []
    for number in range(count):
        prompt = f"{number % 90 + 1}+{rng.randrange(10)}="
        worse = "".join(rng.choice("123") for _ in range(rng.randrange(1, 4)))
        pairs.append(Pair(prompt, worse + "7", worse, {"overall": 1.0, "short": 0.0}, {"overall": 2.0}))
    return pairs


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A folder of a reward that was trained on separable texts, and its accuracies."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("learned") / "reward"
    held = [Pair("95" + pair.prompt, *pair_sides(pair), pair.verdicts) for pair in sums(20, 9)]
    return folder, train_reward(sums(96, 1), held, folder, Settings(model="starter_text", epochs=6, lr=1e-3, batch=16,
                                                                    device="cpu"))


def pair_sides(pair: Pair) -> tuple:
    return pair.chosen, pair.rejected


def test_a_reward_orders_separable_texts_by_aspect(learned):
    folder, accuracies = learned
    assert {name: result.mean for name, result in accuracies.items()} == {"overall": 1.0, "short": 1.0}
    reward, short = rewards.find(f"{folder}:overall", {"device": "cpu"}), rewards.find(f"{folder}:short",
                                                                                    {"device": "cpu"})
    assert isinstance(reward, TextPreference) and reward.about.modality == "text"
    table = rewards.score({"a": reward, "b": short}, ["27", "2", "137", "13"], ["8+1="] * 4, [{}] * 4)
    assert (table[::2, 0] > table[1::2, 0] + 0.5).all() and (table[::2, 1] < table[1::2, 1] - 0.5).all()


def test_the_folder_needs_no_other_model_and_batches_change_nothing(learned):
    folder, _ = learned
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


def test_margins_of_scores_and_batches_of_one_prompt():
    pairs = [Pair("a", "b", "c", margins={"overall": 2.0, "short": -1.0}), Pair("a", "b", "d")]
    assert _apart(pairs, ["overall", "short"], 0.5).tolist() == [[1.0, -0.5], [0.0, 0.0]]
    assert _apart(pairs[1:], ["overall"], 0.0).tolist() == [[0.0]]
    pairs = [Pair("a", "1", "2"), Pair("b", "1", "2"), Pair("a", "2", "3")]
    assert families(pairs) == [[0, 2], [1]]


@pytest.mark.parametrize("options, told", [
    (["--model", "starter_text", "--margins", "1"], "--margins: no training pair has a margin"),
    (["--frozen"], "no image at"),
    (["--model", "starter_text", "--clip", "x", "--pretrained", "y"], "expected a language model (model) without clip"),
    (["--model", "nowhere/at/all"], "expected starter_text, or a folder or hub id of a language model")])
def test_mistakes_are_one_line(tmp_path, capsys, options, told):
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}+1=", "chosen": "7", "rejected": "1"}) + "\n"
                            for n in range(8)))
    assert main(["reward", "train", str(file), "--output", str(tmp_path / "reward"), "--held-out", "0.5",
                 *options]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert told in error
