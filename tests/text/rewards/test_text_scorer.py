"""Text rewards that are learned: heads against closed forms, aspects, categories, pairs and degraded texts."""

import json

import pytest
import torch

from flowgrpo import rewards
from flowgrpo.__main__ import main
from flowgrpo.errors import UserError
from flowgrpo.text.rewards.embeddings import SemanticSimilarity, pooled
from flowgrpo.tools.learned_rewards.text_training import (
    LOGISTIC,
    PAIRS,
    SQUARED,
    LabelledText,
    Settings,
    degraded,
    fit,
    load_labelled,
    measured,
    train,
)
from tests.helpers import tiny_text


def written(path, lines):
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_a_ridge_head_by_hand():
    # x - 2 is -1, 0, 1 and y - 3 is -2, 0, 2: the weight is 4 / (2 + penalty), the intercept 3 - 2 times it.
    rows, labels = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([1.0, 3.0, 5.0])
    assert fit(rows, labels, 2.0, SQUARED).tolist() == pytest.approx([1, 1])
    head = fit(rows, labels, 1e-9, SQUARED)
    assert head.tolist() == pytest.approx([2, -1], abs=1e-6)
    assert measured(rows, labels, torch.tensor([1.0, 1.0]).double(), SQUARED) == pytest.approx(1 - 2 / 8)


def test_a_discriminators_head_has_no_gradient_left():
    rows = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = (rows[:, 0] > 0.2).double()
    head = fit(rows, labels, 0.5, LOGISTIC)
    error = torch.sigmoid(rows @ head[:-1] + head[-1]) - labels
    assert (rows.T @ error + 0.5 * head[:-1]).abs().max() < 1e-6 and error.sum().abs() < 1e-6
    pairs = fit(rows, torch.ones(12), 0.5, PAIRS)
    error = torch.sigmoid(rows @ pairs[:-1]) - 1
    assert (rows.T @ error + 0.5 * pairs[:-1]).abs().max() < 1e-6 and pairs[-1] == 0


WORDS = ["please", "thanks", "never", "stone", "river", "lamp", "chair", "wind"]


def texts(count: int = 60) -> list[dict]:
    """Texts whose labels are linear in their words: polite ones are helpful, "never" is unsafe."""
    generator, lines = torch.Generator().manual_seed(1), []
    for _ in range(count):
        words = [WORDS[at] for at in torch.randint(len(WORDS), (6,), generator=generator)]
        lines.append({"text": " ".join(words), "labels": {
            "helpful": words.count("please") + 0.5 * words.count("thanks"), "safe": -1.5 * words.count("never")}})
    return lines


def test_several_aspects_are_one_weighted_reward(tmp_path, capsys):
    data, file = written(tmp_path / "texts.jsonl", texts()), tmp_path / "reward.json"
    assert main(["reward", "train-text", str(data), "--output", str(file), "--penalty", "0.01", "--held-out",
                 "0.2"]) == 0
    assert "helpful" in capsys.readouterr().out
    known = json.loads(file.read_text())
    assert [row["value"] > 0.9 for row in known["measured"]["held_out"]] == [True, True]  # R2
    def score(**weights):
        reward = rewards.find("text_scorer", {"file": str(file), "weights": weights})
        return reward(["please thanks never", "stone river lamp"], ["", ""], [{}, {}])
    helpful, safe, both = score(helpful=1.0), score(safe=1.0), score(helpful=1.0, safe=2.0)
    assert both == pytest.approx([one + 2 * other for one, other in zip(helpful, safe)])
    assert helpful[0] > helpful[1] and both[0] < both[1]  # a weight turns the ranking round
    with pytest.raises(UserError, match="has no aspect 'save': did you mean 'safe'"):
        rewards.find("text_scorer", {"file": str(file), "weights": {"save": 1.0}})
    assert main(["reward", "train-text", str(data), "--output", str(file)]) == 2  # is there already


def test_a_discriminator_of_simple_texts_and_its_categories(tmp_path):
    hard = "notwithstanding the aforementioned contraindications patients exhibit {}"
    easy = "you may feel {} and that is fine"
    lines = [LabelledText(form.format(f"thing{number}"), {"simple": float(form is easy)}, category=category)
             for number in range(20) for form in (hard, easy) for category in ("", "letters")]
    results = train(lines, tmp_path / "reward.json", Settings(held_out=0.25))
    assert [(row[0], row[2], row[3]) for row in results] == [("", LOGISTIC, 1.0), ("letters", LOGISTIC, 1.0)]
    reward = rewards.find("text_scorer", {"file": str(tmp_path / "reward.json")})
    scores = reward([hard.format("pain"), easy.format("pain"), f"<think>{hard}</think>{easy}"], [""] * 3,
                    [{"category": "letters"}] * 3)
    assert scores[0] < 0 < scores[1] and scores[2] == pytest.approx(reward([easy], [""], [{}])[0], abs=1)


def test_a_category_without_a_head_has_no_score(tmp_path):
    lines = [LabelledText(f"word{number}", {"overall": number % 2}, category="a") for number in range(8)]
    train(lines, tmp_path / "reward.json", Settings())
    reward = rewards.find("text_scorer", {"file": str(tmp_path / "reward.json")})
    scores = reward(["word1"] * 3, [""] * 3, [{"category": "a"}, {"category": "b"}, {}])
    assert scores[0] is not None and scores[1:] == [None, None]


def test_originals_are_preferred_to_degraded_copies(tmp_path):
    one = "We add 3 and 4. That is 7. So the answer is 7."
    assert degraded(one, 0) in ("That is 7. So the answer is 7.", "We add 3 and 4. So the answer is 7.",
                                "We add 3 and 4. That is 7.")
    assert sorted(degraded(one, 1).split(". ")) != sorted(one.split(". ")) or degraded(one, 1) != one
    assert len(degraded(one, 1)) == len(one) and degraded(one, 2) != one
    assert degraded("no step here", 0) == "no ste" and degraded("7", 1)[0].isdigit()
    lines = [LabelledText(f"First take {number}. Then double it. So the answer follows.", prompt=f"p{number}")
             for number in range(100, 300)]
    [(_, aspect, measure, value, count)] = train(lines, tmp_path / "reward.json", Settings(degrade=True, held_out=0.2))
    assert (aspect, measure, count) == ("overall", PAIRS, 40)
    reward = rewards.find("text_scorer", {"file": str(tmp_path / "reward.json")})
    whole, cut = reward(["First take 9. Then double it. So the answer follows.", "First take 9. Then double it."],
                        ["", ""], [{}, {}])
    assert whole > cut and value > 0.5


@pytest.mark.parametrize("line, told", [
    ('{"text": "a", "chosen": "b"}', "expected either 'text', or 'chosen' and 'rejected'"),
    ('{"text": "a", "labels": {"x": "high"}}', "expected names and numbers under 'labels'"),
    ('{"text": "a", "label": {}}', "unknown key 'label': did you mean 'labels'"),
    ('{"text": ""}', "expected a text under 'text'")])
def test_wrong_lines(line, told, tmp_path):
    (tmp_path / "texts.jsonl").write_text(f'{{"text": "good"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(UserError, match=f"texts.jsonl, line 2: {told}"):
        load_labelled(tmp_path / "texts.jsonl")


def test_embeddings_are_means_of_the_states_of_a_texts_tokens():
    states = torch.tensor([[[3.0, 0.0], [1.0, 8.0], [9.0, 9.0]]])
    assert pooled(states, torch.tensor([[1, 1, 0]])).tolist() == [[pytest.approx(2 / 20 ** 0.5),
                                                                  pytest.approx(4 / 20 ** 0.5)]]
    model, tokenizer = tiny_text.model()
    reward = SemanticSimilarity(parts=(model.model, tokenizer), batch_size=1)
    scores = reward(["the answer is 12", "so\n<answer>7+8</answer>", "3"], [""] * 3,
                    [{"answer": "12"}, {"answer": ["1", "7+8"]}, {}])
    assert scores[:2] == [pytest.approx(1, abs=1e-5)] * 2 and scores[2] is None
    far = reward(["12"], [""], [{"answer": "99-66"}])[0]
    assert -1 <= far < 0.999
    together = SemanticSimilarity(parts=(model.model, tokenizer)).embedded(["1", "23+4"])
    torch.testing.assert_close(together, reward.embedded(["1", "23+4"]), rtol=0, atol=1e-5)
