"""Language models through the same loop: presets, their losses, micro-batches, a resumed run, and one's mistakes."""

import json

import pytest
import torch

from flowgrpo.cli import main
from flowgrpo.config import Config, load
from flowgrpo.methods import preset, presets, validate
from flowgrpo.policies.options import fitting
from flowgrpo.run import run
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.training import loading, sampling, state
from flowgrpo.training.metrics import UpdateStats
from flowgrpo.training.optimizer import decisions
from tests.helpers import loop, tiny, tiny_runs, tiny_text
from tests.helpers.refusals import refused
from tests.helpers.tiny_text import many
from tests.helpers.updates import assert_one_gradient, credited, moved_gradient

PRESETS = presets.presets_for("tokens")


def test_there_are_presets_for_texts_and_they_are_not_for_images():
    assert {"grpo", "dr_grpo", "gspo", "dpo"} < set(PRESETS) and not {"mix_grpo", "flow_grpo"} & set(PRESETS)
    for made, process, told in (
            (tiny_text.config(method="mix_grpo"), "tokens", "denoisers .*flowgrpo list methods"),
            (tiny.config(method="gspo"), "flow", "language models .*flowgrpo list methods"),
            # and not what a part lacks
            (tiny_text.config(method="mix_grpo", parts={"shaping": None}), "tokens", ".*, which this model is not"),
            (tiny.config(method="dpo", parts={"kernel": {"type": "CPS"}}), "flow", ".*, which this model is not")):
        refused(f"got a method of {told}", validate.resolve, made, process)


PARTS = tiny_text.PARTS | {"chord": {"data": {"source": {"type": "PassRate"}}}}  # no prompt brings an answer


def made(method, **options):
    return tiny_text.trainer(tiny_text.policy(), {"short": many}, method=method, parts=PARTS.get(method, {}), **options)


def test_a_presets_gradient_differs_from_its_parents():
    parents = {"dr_grpo": "grpo", "dapo": "grpo", "gspo": "grpo", "cispo": "dapo", "rloo": "dr_grpo",
               "reinforce_pp": "grpo", "remax": "rloo", "ppo": "grpo"}
    found = {method: moved_gradient(made(method)) for method in {*parents, *parents.values()}}
    for method, parent in parents.items():
        assert (found[method] - found[parent]).norm() > 1e-3 * found[parent].norm(), method


@pytest.mark.parametrize("method", PRESETS)
def test_micro_batches_change_no_gradient(method):
    assert_one_gradient([moved_gradient(made(method, train__micro_batch=size)) for size in (1, 3, 8)])


def test_grpos_loss_is_the_papers():
    """2402.03300, equations 3 and 4, from log-probabilities alone."""
    trainer = tiny_text.trainer(tiny_text.policy(), {"short": many}, train__micro_batch=8)
    batch = trainer.prompts[:2]
    parts, asked, scores = sampling.sample(trainer, batch)
    tiny_text.stir(trainer.policy, 0.05)
    [part] = loop.credit(trainer, parts, scores, [p.text for p in batch])
    [taken], stats = part.transitions, UpdateStats()
    trainer.kl_reference.start_epoch(loop.epoch(trainer), trainer.rollouts, 0, 1)
    total = []
    trainer.policy.backward = lambda loss: total.append(loss.detach())
    loop.backward(trainer, part, asked, {0: 1.0}, decisions([part], trainer.method.loss.reduction), stats)
    [(_, _, new)] = trainer.rollouts.replay(part, asked)
    with trainer.policy.reference():
        [(_, _, base)] = trainer.rollouts.replay(part, asked)
    new, base, old, mask = new.logp.detach().double(), base.logp.double(), taken.old.logp.double(), taken.old.mask
    rewards = scores[:, :, 0].double()
    advantage = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-8)).flatten()[:, None]
    ratio = (new - old).exp()
    objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) - 0.04 * (
        (base - new).exp() - 1 - (base - new))
    expected = -((objective * mask).sum(1) / mask.sum(1)).mean()
    assert sum(total).item() == pytest.approx(expected.item(), rel=1e-5)
    assert advantage.abs().max() > 0.5 and ratio[mask].max() > 1.01


@pytest.mark.fast
def test_baselines_and_endless_completions():
    trainer = tiny_text.trainer(tiny_text.policy(), {"short": many}, method="remax")
    asked = trainer.rollouts.conditioning(trainer.prompts[:2])
    greedy = trainer.policy.generate(asked, trainer.policy.generators([9, 9]))
    texts = [text for _, [own] in trainer.rollouts.sample(asked, 0, None) for text in own]
    assert texts[::4] == greedy and len(set(texts)) > 2
    parts, _ = credited(trainer)
    assert sum(len(part.transitions[0].ids) for part in parts) == 2 * 3
    def trained(truncated):
        trainer = tiny_text.trainer(tiny_text.policy(truncated=truncated), text__truncated=truncated)
        asked = trainer.rollouts.conditioning(trainer.prompts)
        drawn = [part.transitions[0] for part, _ in trainer.rollouts.sample(asked, 0, None)]
        return [torch.cat(each) for each in zip(*((taken.old.mask, taken.counts, (taken.ids == 2).any(1))
                                                  for taken in drawn))]
    (kept, every, ended), (masked, some, _) = trained("keep"), trained("mask")
    assert every.all() and 0 < ended.sum() < len(ended)
    assert torch.equal(some, ended) and torch.equal(masked, kept)


def test_token_counts_and_sampling_temperatures():
    told = []
    def counted(texts, prompts, metadata):
        told.extend(zip(texts, metadata))
        return [entry["completion_tokens"] for entry in metadata]
    trainer = tiny_text.trainer(rewards={"short": counted})
    parts, _, scores = sampling.sample(trainer, trainer.prompts[:2])
    lengths = torch.cat([part.leaves()["lengths"] for part in parts])
    assert torch.equal(scores.flatten(), lengths.float()) and len(set(lengths.tolist())) > 1
    assert all(entry["completion_tokens"] >= len(text) for text, entry in told)  # a token is a character, or special
    trainer = tiny_text.trainer(tiny_text.policy(), {"short": many}, parts={"decoding": {"temperature": 0.6}})
    assert trainer.method.rollout.decoding == Decoding(0.6)
    trainer.run_epoch()
    assert trainer.first_ratio.max_log_ratio <= 1e-5


@pytest.mark.parametrize("option, told", [
    ({"parts": {"kl": {"type": "GaussianKL", "weight": 0.1}}}, "use SampledKL"),
    ({"method": "remax", "parts": {"decoding": {"greedy": 4}}}, "4 greedy samples leave none"),
    ({"parts": {"decoding": {"temperature": 0}}}, "temperature is 0")])
def test_what_does_not_go_with_tokens_is_told_in_a_line(option, told):
    refused(told, validate.resolve, tiny_text.config(**option), "tokens")


def arguments(folder, **options):
    settings = tiny_text.config(folder, **options)
    return settings, dict(pipe=tiny_text.model(), functions={"short": tiny_text.short},
                          prompts=[tiny_text.Prompt(text) for text in tiny_text.PROMPTS])


def test_a_run_leaves_its_adapter_its_numbers_and_its_images(tmp_path):
    settings, given = arguments(tmp_path, eval__every=1)
    summary = run(settings, **given)
    told = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert told["unit"] == "tokens" and told["evaluation"]["of"] == "completions (greedy)"
    assert summary["max_first_log_ratio"] <= 1e-5
    for name in ("adapter_model.safetensors", "adapter_config.json", "before_after.png", "report.html", "before.json",
                 "samples/epoch-00001.png", "report/after.json"):
        assert (tmp_path / "run" / name).is_file(), name
    assert "text" in json.loads((tmp_path / "run" / "report" / "after.json").read_text())["cards"][0]


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path):
    folders = tiny_runs.whole_and_resumed(arguments, tmp_path, train__ema=0.5, eval__weights="ema")
    one, two = (folder / "adapter_model.safetensors" for folder in folders)
    assert one.read_bytes() == two.read_bytes()


def test_a_resumed_run_shares_prompts_as_it_began(tmp_path):
    first, last = (tiny_text.trainer(output=tmp_path) for _ in range(2))
    first.run_epoch()
    first.epoch, first.progress.saved_counters = 1, state.counters(first) | {"epoch": 1}
    assert first.policy.reason_not_shared(first.policy.encode(["1+2="])) == ""
    first.policy.load_state({}, {"apart": "the first prompt of the run said so"})
    state.save(first, tmp_path)
    state.restore(last, tmp_path / "checkpoints" / "epoch-00001")
    assert last.policy.reason_not_shared(last.policy.encode(["1+2="])) == "the first prompt of the run said so"


@pytest.mark.parametrize("settings, method", [
    ({"model": "starter_text"}, "grpo"), ({"model": "starter"}, "mix_grpo"), ({}, "mix_grpo"),
    ({"model": "starter_text", "method": "dr_grpo"}, "dr_grpo"),
    ({"model": "starter_text", "method": "mix_grpo"}, "mix_grpo")])
def test_the_default_method_fits_the_kind_of_the_model(settings, method):
    assert fitting(Config(**settings))[0].method == method


def test_the_default_method_of_a_folder_and_of_a_loaded_model(tmp_path):
    model, tokenizer = tiny_text.model()
    model.save_pretrained(tmp_path)
    assert fitting(Config(model=str(tmp_path)))[0].method == "grpo"
    assert fitting(Config(model="loaded"), (model, tokenizer))[0].method == "grpo"
    assert fitting(Config(model="loaded"), tiny.sd3())[0].method == "mix_grpo"


def test_a_language_model_without_a_method_or_a_template_trains(tmp_path, capsys):
    """By a file of questions and answers, as users have them."""
    (tmp_path / "own.jsonl").write_text("".join(json.dumps({"question": text, "answer": "3"}) + "\n"
                                                for text in tiny_text.PROMPTS))
    (tmp_path / "own.yaml").write_text(
        f"prompts: {tmp_path}/own.jsonl\noutput: {tmp_path}\nreward: exact_match\ntracker: none\ndevice: cpu\n"
        "precision: fp32\ntext: {max_tokens: 4}\nadapter: {rank: 2}\nheld_out: 0.4\n"
        "train: {epochs: 1, prompts: 2, group: 2, micro_batch: 4}\neval: {prompts: 1}\n")
    model, tokenizer = tiny_text.model()
    tokenizer.chat_template = None
    tiny_text.save(tmp_path / "model", (model, tokenizer))
    capsys.readouterr()
    assert main(["train", "--trust", str(tmp_path / "own.yaml"), f"--model={tmp_path / 'model'}"]) == 3
    out, err = capsys.readouterr()
    assert "method: grpo\n" in out and out.count("the tokenizer has no chat template, so prompts stay as they are") == 1
    assert load(tmp_path / "own" / "config.yaml").method == "grpo"
    assert err.startswith("epoch 1 of 1 (00:0") and "\r" not in err  # no terminal


@pytest.mark.parametrize("template, text, told", [
    (None, {}, True), (None, {"template": False}, False), ("{{ messages }}", {}, False)])
def test_a_missing_chat_template_is_told_once(template, text, told):
    policy = tiny_text.policy()
    policy.tokenizer.chat_template = template
    config = Config(model="folder", method="grpo", text=text)
    lines = [*loading.lines_after_loading(config, preset("grpo"), policy, [])]
    assert any("no chat template" in line for line in lines) == told
