"""Runs on recorded pairs of images and of texts: what is trained on, what it teaches, and that no sampler runs."""

import json
import math

import pytest
import torch
from accelerate import Accelerator

from flowgrpo.config import Config, load
from flowgrpo.data.pairs import Pair, in_place, load_pairs
from flowgrpo.data.prompts import Prompt
from flowgrpo.evaluation import run_rewards
from flowgrpo.methods import validate
from flowgrpo.methods.validate import resolve
from flowgrpo.objectives.ratios import error
from flowgrpo.objectives.sequence_losses import PairLoss
from flowgrpo.rewards.pairwise import preferred
from flowgrpo.run import run
from flowgrpo.text.policies.causal_lm import CausalLM
from flowgrpo.text.targets import RecordedCompletions
from flowgrpo.train import Trainer
from flowgrpo.training import sampling
from tests.helpers import loop, tiny, tiny_text
from tests.helpers.refusals import message, refused
from tests.policies.pipelines.test_image_latents import saved
from tests.test_train import align, epoch, gradient, metrics

DPO = dict(method="diffusion_dpo", train__group=2)
SHARED = dict(parts__times={"shared": True})  # one noise for both images of a pair


def pairs_file(folder, *lines: tuple[str, str, str], verdicts: dict[int, str] | None = None):
    """A file of pairs (prompt, chosen, rejected) beside the images that it names, which are noise."""
    for seed, name in enumerate(sorted({name for _, *names in lines for name in names})):
        saved(folder / name, seed=seed)
    records = [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in lines]
    for line, verdict in (verdicts or {}).items():
        records[line]["aspects"] = {"overall": verdict}
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    return str(folder / "pairs.jsonl")


def trainer(file: str, **options) -> Trainer:
    """A Trainer on the tiny SD3, off the base, on the pairs of a file."""
    settings = tiny.config(preferences=file, **DPO | options)
    torch.manual_seed(settings.seed)
    policy = tiny.stir(tiny.policy(memory=settings.memory))
    return Trainer(settings, Accelerator(cpu=True), policy, {"preferred": preferred}, in_place(settings, ([], [])))


# --- what a file of pairs says ---------------------------------------------------------------------------------------
def test_a_prompt_per_pair_with_what_is_known_of_its_text(tmp_path):
    file = pairs_file(tmp_path, ("red", "a.png", "b.png"), ("blue", "b.png", "a.png"), ("red", "b.png", "c.png"),
                      ("old", "a.png", "c.png"), ("green", "a.png", "c.png"),
                      verdicts={1: "rejected", 2: "tie"})
    split = [Prompt("red", "dull", {"task": "colour"}, weight=2.0)], [Prompt("old")]
    told = [{"chosen": f"{tmp_path}/{one}.png", "rejected": f"{tmp_path}/{two}.png", "preferred": verdict}
            for one, two, verdict in (("a", "b", 1), ("a", "b", 1), ("a", "c", 1), ("b", "c", 0.5), ("b", "a", 0))]
    red = Prompt("red", "dull", {"task": "colour"} | told[0], weight=2.0)
    train, held = in_place(load(None, {"preferences": file}), split)
    assert held is split[1] and train == [red, Prompt("blue", metadata=told[1]), Prompt("green", metadata=told[2])]
    assert [prompt.metadata for prompt in train] == [red.metadata, told[1], told[2]]
    every, _ = in_place(load(None, {"preferences": file, "labels": "rewards"}), split)
    assert [prompt.text for prompt in every] == ["red", "blue", "red", "green"]
    assert every[2].metadata == {"task": "colour"} | told[3] and every[1].metadata == told[4]  # in the file's order
    assert in_place(Config(), split) is split


def test_pairs_of_held_out_prompts_alone_are_refused(tmp_path):
    file = pairs_file(tmp_path, ("red", "a.png", "b.png"), ("old", "a.png", "b.png"), verdicts={0: "tie"})
    refused("every pair is a tie or one of a held-out prompt, which leaves none", in_place,
            load(None, {"preferences": file}), ([], [Prompt("old")]))


def test_who_labels_is_trained_on_and_the_rest_is_measured():
    plain = load(None, {"reward": "{scene: 2.0, jpeg_compressibility: 0.1}", "eval.rewards": "[scene, sharpness]"})
    assert (list(plain.trained), list(plain.extra_rewards)) == (["scene", "jpeg_compressibility"], ["sharpness"])
    by_file = plain.model_copy(update={"preferences": "pairs.jsonl"})
    assert by_file.rewards == {"preferred": 1.0}
    assert list(by_file.extra_rewards) == ["scene", "jpeg_compressibility", "sharpness"]
    by_rewards = by_file.model_copy(update={"labels": "rewards"})
    assert (by_rewards.trained, by_rewards.extra_rewards) == (plain.trained, plain.extra_rewards)
    of_eval = list(run_rewards.rewards_by_name(by_file, []))
    assert of_eval == ["scene", "jpeg_compressibility", "sharpness"]
    assert "'preferred' compares the samples of a group" in message(run_rewards.rewards_by_name, by_file, ["preferred"])
    told = [{"preferred": verdict} for verdict in (1.0, 1.0, 0.0, 0.0, 0.5, 0.5)]
    assert preferred(torch.zeros(6, 3, 2, 2), ["a"] * 6, told, 2) == [1, 0, 0, 1, 0.5, 0.5]
    for metadata, group in (([{}, {}], 2), (told[:3], 3)):
        refused("'preferred' is what a file says of recorded pairs", preferred, None, ["a"] * group, metadata, group)


@pytest.mark.parametrize("options, told", [
    ({"method": "flow_grpo"}, "method flow_grpo trains steps of sampling one, or edits"),
    ({"method": "draft"}, "method draft trains steps of sampling one"),
    ({"method": "expo"}, "method expo trains steps of sampling one, or edits of sampled ones: use a method of noised"),
    ({"method": "rpo"}, "labels is 'file', but method rpo samples labels from rewards"),
    ({"method": "sol_rl+diffusion_dpo"}, "chooses among previews of sampled ones: leave sol_rl out"),
    ({"method": "diffusion_dpo", "train.group": 4}, "train.group is 4, but preferences brings pairs: set train.group"),
    ({"method": "diffusion_dpo", "labels": "rewards", "parts.surrogate.similarity": 1}, "pulls to what the file calls"),
    ({"method": "diffusion_dpo", "preferences": None, "labels": "rewards"},
     "labels is 'rewards', but preferences is not set")])
def test_what_does_not_go_with_recorded_pairs_is_refused(options, told):
    not_recorded(told, options)


def not_recorded(told: str, options: dict, kind: str | None = None) -> None:
    config = load(None, {"method": "dpo", "preferences": "pairs.jsonl", "train.group": 2} | options)
    refused(told, validate.check_recorded_pairs, loop.setup(config, kind))


# --- what it teaches -------------------------------------------------------------------------------------------------
def test_recorded_pairs_train_as_drawn_ones_do(tmp_path):
    """The images that a rollout drew, at the same noise and times: the same scores and the same gradient."""
    online = tiny.trainer(tiny.stir(tiny.policy()), **DPO)
    parts, conditioning, grouped = sampling.sample(online, online.prompts[:2])
    drawn = list(loop.credit(online, parts, grouped, conditioning.prompts))
    better = ["chosen" if one > two else "rejected" for one, two in grouped[..., 0].tolist()]
    names = [("a.png", "b.png"), ("c.png", "d.png")]
    lines = [(online.prompts[i].text, *names[i]) for i in (0, 1)]
    file = pairs_file(tmp_path, *lines, verdicts=dict(enumerate(better)))
    offline = trainer(file, labels="rewards", reward={"preferred": 1.0})  # the file's order, which is that of drawing
    files = [str(tmp_path / name) for pair in names for name in pair]
    [part] = drawn
    offline.rollouts.latents.known |= dict(zip(files, part.finals[0].split(1)))
    recorded, paired = epoch(offline)
    for one, two in zip(part.transitions, recorded[0].transitions, strict=True):
        assert torch.equal(one.x, two.x) and torch.equal(one.x_next, two.x_next)
        assert torch.equal(one.old.logp, two.old.logp)
    wanted = gradient(online, drawn, conditioning)
    assert wanted.norm() > 1e-3
    torch.testing.assert_close(gradient(offline, recorded, paired), wanted, rtol=1e-5, atol=1e-8)


def test_a_pair_of_equal_images_teaches_nothing(tmp_path):
    file = pairs_file(tmp_path, ("red", "a.png", "b.png"))
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes())
    same = trainer(file, train__prompts=1, **SHARED)
    other = trainer(pairs_file(tmp_path, ("red", "a.png", "c.png")), train__prompts=1, **SHARED)
    flat, steep = (gradient(each, *epoch(each)).norm() for each in (same, other))
    assert flat < 1e-5 * steep  # float32: what is left is rounding


def margins(trainer: Trainer) -> torch.Tensor:
    """The implicit reward of the first image of each pair less that of the second, over beta, at a noise that is not
    trained on: [pairs], the mean over the times."""
    before, trainer.epoch = trainer.epoch, 1000
    [part], conditioning, _ = sampling.sample(trainer, trainer.prompts)
    trainer.epoch = before
    def errors() -> torch.Tensor:
        return torch.stack([error(new).detach().flatten() for _, _, new in trainer.rollouts.replay(part, conditioning)])
    now = errors()
    with trainer.policy.reference():
        gained = errors() - now
    return (gained[:, ::2] - gained[:, 1::2]).mean(0)


def test_training_moves_the_implicit_reward_to_the_preferred(tmp_path):
    file = pairs_file(tmp_path, ("red", "a.png", "b.png"), ("blue", "c.png", "d.png"), verdicts={1: "rejected"})
    run = trainer(file, train__epochs=40, train__lr=0.01, parts__surrogate={"beta": 10.0}, **SHARED)
    with torch.no_grad():
        for parameter in run.policy.weights.parameters():
            parameter.mul_(1e-3)  # next to the base, where margins are 0
    at_first = margins(run)
    assert at_first.abs().max() < 1e-3
    losses = []
    for run.epoch in range(40):
        losses.append(run.run_epoch()["loss"])
    assert run.prompts[1].metadata["chosen"] == str(tmp_path / "d.png")  # as the file prefers it
    assert margins(run).min() > 0.02
    assert abs(losses[0] - math.log(2)) < 1e-2 and sum(losses[-10:]) / 10 < 0.68
    assert run.rollouts.rollout_evaluations == 0 and len(run.rollouts.latents.known) == 4


# --- a whole run -----------------------------------------------------------------------------------------------------
def test_a_run_measures_and_saves_as_ever(tmp_path):
    file = pairs_file(tmp_path, *((text, "a.png", "b.png") for text in tiny.PROMPTS))
    settings = tiny.config(tmp_path, preferences=file, **DPO, train__steps=10, eval__every=1, train__lr=0.05)
    summary = align(settings)
    assert summary["before"].keys() == summary["after"].keys() == {"red"} and summary["before"] != summary["after"]
    assert summary["rewards"] == {"trained": {"preferred": 1.0}, "measured": ["red"]}
    assert summary["rollout_evaluations_per_sample"] == 0 and summary["max_first_log_ratio"] <= 1e-6
    lines = metrics(settings.folder)
    assert [line["reward/preferred/mean"] for line in lines] == [0.5, 0.5] and "held_out/red" in lines[-1]
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert (settings.folder / "report.html").exists() and (settings.folder / "before_after.png").exists()
    assert load(settings.folder / "config.yaml") == settings
    refused("method mix_grpo trains steps of sampling one", align,
            tiny.config(tmp_path, preferences=file, train__group=2))


RIGHT = [("1+2=", "3", "4"), ("33+4=", "37", "1"), ("5;66=", ";61", "61"), ("7+8=", "15", "78")]
TEXT_DPO = dict(method="dpo", train__group=2, train__prompts=4, train__micro_batch=8, train__updates=1)


def text_pairs(folder, lines=RIGHT) -> str:
    rows = [dict(zip(("prompt", "chosen", "rejected"), line)) for line in lines]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "pairs.jsonl")


def text_trainer(file: str, **options) -> Trainer:
    settings = tiny_text.config(preferences=file, **TEXT_DPO | options)
    torch.manual_seed(settings.seed)
    policy = CausalLM(*tiny_text.model(), settings.adapter, settings.text)
    return Trainer(settings, Accelerator(cpu=True), policy, {"preferred": preferred},
                   in_place(settings, ([], []), text=True))


def test_a_file_of_texts_and_its_mistakes(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "", "margins": {"overall": 2, "tone": -0.5},
                                "aspects": {"tone": "rejected"}}))
    assert load_pairs(file, text=True) == [Pair("a", "b", "", {"overall": 1.0, "tone": 0.0},
                                                {"overall": 2.0, "tone": -0.5})]
    assert "no image at" in message(load_pairs, file)
    for row, told in (({"chosen": "b", "rejected": "b"}, "chosen and rejected are the same text, b"),
                      ({"chosen": 1, "rejected": "b"}, "expected a text under 'chosen', got 1"),
                      ({"chosen": "b\0", "rejected": "b"}, "the text under 'chosen' holds"),
                      ({"chosen": "a", "rejected": "b", "margins": {"tone": "1"}}, "finite numbers under 'margins'")):
        file.write_text(json.dumps({"prompt": "a"} | row))
        refused(told, load_pairs, file, text=True)


def test_the_recorded_texts_are_the_groups_with_their_log_probabilities(tmp_path):
    run = text_trainer(text_pairs(tmp_path))
    assert isinstance(run.method.target, RecordedCompletions)
    [part], conditioning, scores = sampling.sample(run, run.prompts)
    [taken] = part.transitions
    told = {(prompt, chosen, rejected) for prompt, chosen, rejected in RIGHT}
    texts = run.policy.detokenize(taken.ids, taken.old.mask, [""] * len(taken.ids))
    assert {(prompt.text, texts[2 * i], texts[2 * i + 1]) for i, prompt in enumerate(run.prompts)} == told
    ends = taken.ids.gather(1, taken.old.mask.sum(1, keepdim=True) - 1)[:, 0]
    assert (ends == run.policy.ends[0]).all() and scores[..., 0].tolist() == [[1, 0]] * 4
    [(_, _, new)] = run.rollouts.replay(part, conditioning)
    torch.testing.assert_close(new.logp.detach(), taken.old.logp, rtol=0, atol=1e-5)
    assert run.rollouts.rollout_evaluations == 0 and run.policy.evaluations > 0


def shown(losses: torch.Tensor, mask: torch.Tensor) -> float:
    """The metric `loss` of the losses [pairs]: a mean over tokens, mask [2 * pairs, L]."""
    lengths = mask.sum(1).view(-1, 2).sum(1)
    return ((losses * lengths).sum() / lengths.sum()).item()


def text_margins(run: Trainer) -> tuple[torch.Tensor, torch.Tensor]:
    """log p of the chosen texts less that of the rejected ones, less the same of the base: [pairs]; and the mask."""
    [part], conditioning, _ = sampling.sample(run, run.prompts)
    [(_, _, new)] = run.rollouts.replay(part, conditioning)
    with run.policy.reference():
        [(_, _, base)] = run.rollouts.replay(part, conditioning)
    gained = (new.logp - base.logp).sum(1).detach()
    return gained[::2] - gained[1::2], new.mask


@pytest.mark.parametrize("parts", [{}, {"surrogate": {"form": "squared"}}, {"surrogate": {"likelihood": 0.1}}])
def test_training_moves_the_texts_apart_by_the_loss_of_the_paper(tmp_path, parts):
    run = text_trainer(text_pairs(tmp_path), parts=parts, train__epochs=6, train__lr=0.02)
    losses = []
    for run.epoch in range(6):
        apart, mask = text_margins(run)
        losses.append(run.run_epoch()["loss"])
        if not parts:  # 2305.18290, equation 7
            expected = shown(torch.nn.functional.softplus(-0.1 * apart), mask)
            assert losses[-1] == pytest.approx(expected, abs=1e-5)
    assert losses[-1] < losses[0] and text_margins(run)[0].min() > 0.5


def test_simpo_reads_no_reference_and_starts_at_its_margin(tmp_path):
    run = text_trainer(text_pairs(tmp_path), method="simpo")
    [part], conditioning, _ = sampling.sample(run, run.prompts)
    [(_, _, new)] = run.rollouts.replay(part, conditioning)
    mean = new.logp.detach().sum(1) / new.mask.sum(1)
    expected = shown(torch.nn.functional.softplus(1.0 - 2.0 * (mean[::2] - mean[1::2])), new.mask)
    assert not run.method.compares_with_reference and run.run_epoch()["loss"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("options, told", [
    ({"method": "remax"}, "keeps 1 greedy samples and 0 answers per group"),
    ({"text.engine_precision": "bf16"}, "text.engine or text.engine_precision is set too"),
    ({"train.group": 4}, "train.group is 4, but preferences brings pairs: set train.group: 2")])
def test_what_does_not_go_with_recorded_texts_is_refused(options, told):
    not_recorded(told, {"model": "starter_text"} | options, "causal_lm")


def test_masked_models_sampling_parts_and_long_texts_are_refused(tmp_path):
    not_recorded("trains traces of an unmasking, which recorded completions have none of", {}, "masked_lm")
    drawn = load(None, {"method": "dpo", "preferences": "p.jsonl", "train.group": 2, "parts.spread.type": "StepGroups"})
    assert "trains recorded pairs of completions reads no spread" in message(resolve, drawn, "tokens")
    run = text_trainer(text_pairs(tmp_path, [("1+2=", "1234567", "4")]), train__prompts=1)
    assert ("the chosen text of the prompt '1+2=' has 8 tokens, its end included, and text.max_tokens is 6"
            in message(run.rollouts.require, run.prompts))


def test_a_whole_run_measures_the_rewards_and_draws_nothing_to_train_on(tmp_path):
    settings = tiny_text.config(
        tmp_path, model="starter_text", preferences=text_pairs(tmp_path), prompts="starter_text", reward="exact_match",
        text__max_tokens=5, held_out=0.1, train__epochs=1, eval__grid=2, **TEXT_DPO)
    assert resolve(settings, "tokens").loss.surrogate == PairLoss()
    assert run(settings)["rewards"] == {"trained": {"preferred": 1.0}, "measured": ["exact_match"]}
    [line] = metrics(settings.folder)
    assert line["loss"] == pytest.approx(math.log(2), abs=1e-6) and line["reward/preferred/mean"] == 0.5
