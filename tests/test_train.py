"""The loop: what it learns, what it leaves alone, what it writes."""

import json
import threading
from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import load_file

import flowgrpo
from flowgrpo.arguments import OMITTED, build_config
from flowgrpo.config import Config, load
from flowgrpo.data.prompts import Prompt, load_prompts
from flowgrpo.data.sets import SPLIT_SEED, split
from flowgrpo.errors import UserError
from flowgrpo.evaluation import held_out
from flowgrpo.evaluation.measured import EVAL_SEED
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.run import run
from flowgrpo.samplers.growth import replay
from flowgrpo.samplers.plans import Schedule
from flowgrpo.samplers.rollout import seeder
from flowgrpo.storage import checkpoint
from flowgrpo.training import sampling
from flowgrpo.training.metrics import UpdateStats
from flowgrpo.training.optimizer import chunks, decisions, rate
from tests.helpers import loop, tiny, tiny_text
from tests.helpers.refusals import message, refused
from tests.helpers.tiny_runs import assert_same_weights
from tests.helpers.tiny_runs import lines as metrics


def prompts() -> list[Prompt]:
    return [Prompt(text, metadata={"task": "long" if " " in text else "short"}) for text in tiny.PROMPTS]


def align(settings, functions=None, pipe=None):
    """A whole run on the tiny SD3."""
    return run(settings, pipe=pipe or tiny.sd3(), functions=functions or {"red": tiny.red}, prompts=prompts())


def epoch(trainer):
    """One epoch's parts, each transition with its advantage, and the conditioning, before any update."""
    parts, conditioning, grouped = sampling.sample(trainer, trainer.prompts[:trainer.geometry.prompts])
    return list(loop.credit(trainer, parts, grouped, conditioning.prompts)), conditioning


def still(parts):
    """The parts with all advantages 0."""
    return [replace(part, advantages=tuple(torch.zeros_like(each) for each in part.advantages)) for part in parts]


def gradient(trainer, parts, conditioning, count=None) -> torch.Tensor:
    """The gradient of these parts' loss, one flat tensor."""
    trainer.optimization.optimizer.zero_grad()
    for part in parts:
        weights = tiny.step_weights(trainer, parts)
        loop.backward(trainer, part, conditioning, weights, count or decisions(parts), UpdateStats())
    return torch.cat([p.grad.flatten() for p in trainer.policy.weights.parameters() if p.grad is not None])


def test_a_gradient_too_small_for_fp16_is_followed():
    """Divided by as many decisions as a large run has, it would be 0 in fp16; it is what it is of few, but smaller."""
    policy = tiny.policy(tiny.sd3().to(torch.float16), precision="fp16")
    trainer = tiny.trainer(tiny.stir(policy), precision="fp16", parts__plan__size=1)
    parts, conditioning, grouped = sampling.sample(trainer, trainer.prompts[:1])
    credited = list(loop.credit(trainer, parts, grouped, conditioning.prompts))
    of_few, of_many = (gradient(trainer, credited, conditioning, count) for count in (10**4, 10**6))
    torch.testing.assert_close(of_many * 100, of_few, rtol=0.1, atol=0.02 * of_few.abs().max().item())
    assert of_many.norm() / trainer.optimization.scaler.get_scale() < 6e-8  # the smallest number of fp16
    before = trainer.policy.weights.snapshot()
    trainer.optimization.step()
    assert any(not torch.equal(before[key], each) for key, each in trainer.policy.weights.snapshot().items())
    assert (trainer.optimization.update, trainer.optimization.skipped) == (1, 0)


def test_a_gradient_that_overflows_fp16_halves_the_scale():
    policy = tiny.policy(tiny.sd3().to(torch.float16), precision="fp16")
    trainer = tiny.trainer(policy, precision="fp16")
    scale = trainer.optimization.scaler.get_scale()
    for parameter in trainer.policy.weights.parameters():
        parameter.grad = torch.full_like(parameter, torch.inf)
    trainer.optimization.step()  # as where another process had a gradient, and this one no sample
    assert (trainer.optimization.update, trainer.optimization.skipped) == (0, 1)
    assert trainer.optimization.scaler.get_scale() == scale / 2


# --- one epoch -------------------------------------------------------------------------------------------------------
def test_a_part_is_scored_while_the_next_one_is_sampled():
    """The reward of the first part does not answer before the denoiser works on the second one."""
    decoded, begun, scored = threading.Event(), threading.Event(), []
    def patient(images, prompts):
        scored.append((begun.wait(60), len(prompts)))  # a trainer that waits for it here would never begin
        return tiny.red(images, prompts)
    trainer = tiny.trainer(rewards={"red": patient})
    trainer.policy.pipe.vae.decoder.register_forward_hook(lambda *_: decoded.set())
    trainer.policy.pipe.transformer.register_forward_pre_hook(lambda *_: begun.set() if decoded.is_set() else None)
    parts, _, scores = sampling.sample(trainer, trainer.prompts[:2])
    assert len(parts) == 2 and scored == [(True, 4), (True, 4)] and scores.isfinite().all()


# --- one whole run ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A run of 30 epochs with everything that a run can leave behind."""
    output = tmp_path_factory.mktemp("runs")
    settings = tiny.config(output, tracker="tensorboard", train__epochs=30, train__group=6, train__micro_batch=12,
                           train__steps=5, train__lr=0.05, parts__plan__size=2, parts__plan__every=5, eval__every=10,
                           eval__rewards=["green"], eval__samples=2, adapter__alpha=3.0)
    pipe = tiny.sd3()
    before = {key: value.clone() for key, value in every_weight(pipe)}
    summary = align(settings, {"red": tiny.red, "green": lambda images, prompts: images[:, 1].mean((1, 2))}, pipe)
    return settings, summary, settings.folder, pipe, before


def every_weight(pipe):
    for name, module in pipe.components.items():
        if isinstance(module, torch.nn.Module):
            for key, value in [*module.named_parameters(), *module.named_buffers()]:
                yield f"{name}.{key.replace('.base_layer', '')}", value.detach()


def test_whole_run_logs_rises_and_changes_what_is_trained(whole_run):
    _, summary, folder, pipe, before = whole_run
    curve = [line["reward/red/mean"] for line in metrics(folder)]
    assert sum(curve[-5:]) / 5 > sum(curve[:5]) / 5 + 0.02
    assert summary["after"]["red"] > summary["before"]["red"] + 0.02
    lines = metrics(folder)
    assert [line["epoch"] for line in lines] == list(range(1, 31))
    for line in lines:
        assert all(torch.tensor(float(value)).isfinite() for value in line.values() if isinstance(value, (int, float)))
        assert {"loss", "grad_norm", "log_ratio_max", "clip_fraction", "reward/red/std", "seconds", "evaluations",
                "seconds/rollout", "seconds/update", "skipped_updates"} <= set(line)
        assert "mfu" not in line and line["memory/host"] > 10 * 2**20  # on a CPU
        assert line["samples_per_second"] > 0 and line["evaluations_per_second"] > line["samples_per_second"]
    assert lines[0]["log_ratio_max"] <= 1e-6
    assert {line["epoch"] for line in lines if "held_out/red" in line} == {10, 20, 30}
    after = dict(every_weight(pipe))
    lora = {key for key in after if "lora_" in key}
    assert after.keys() - lora == before.keys() and lora
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert sum(after[key].abs().max() > 0 for key in lora if "lora_B" in key) > 10
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    [file] = folder.rglob("events.out.tfevents*")
    events = EventAccumulator(str(file)).Reload()
    logged = {event.step: event.value for event in events.Scalars("reward/red/mean")}
    assert logged == {line["epoch"]: pytest.approx(line["reward/red/mean"], abs=1e-6) for line in metrics(folder)}


def test_what_a_run_leaves_behind(whole_run):
    settings, _, folder, _, _ = whole_run
    assert load(folder / "config.yaml") == settings
    for file in (LORA_FILE, "before_after.png", "metrics.jsonl", "summary.json", "before.json",
                 "samples/epoch-00010.png", "checkpoints/epoch-00030/state.safetensors"):
        assert (folder / file).stat().st_size > 100, file
    assert list(folder.rglob("events.out.tfevents*"))
    trained = {key.split(".", 1)[1].replace(".default", ""): value for key, value in
               ((key.removeprefix("weights/"), value) for key, value in checkpoint.load(
                   checkpoint.latest(folder / "checkpoints"))[0].items() if key.startswith("weights/"))}
    saved = {key.removeprefix("transformer."): value for key, value in load_file(folder / LORA_FILE).items()}
    trained = tiny.in_file(trained, 1.5)
    assert_same_weights(saved, trained)


def test_the_summary_says_what_happened(whole_run):
    settings, summary, folder, _, _ = whole_run
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert summary["evaluation"]["prompts"] == 4 and summary["evaluation"]["samples"] == 2  # 2 prompts, twice each
    assert set(summary["before"]) == set(summary["after"]) == {"red", "green"}
    tasks = summary["tasks"]["red"]
    assert tasks["before"].keys() == tasks["after"].keys() <= {"long", "short"}
    assert (summary["epochs"], summary["updates"], summary["skipped_updates"]) == (30, 30, 0)
    assert summary["samples"] == 30 * 12 and summary["max_first_log_ratio"] <= 1e-6
    assert summary["rewards"] == {"trained": {"red": 1.0}, "measured": ["red", "green"]}
    assert summary["method"] == "mix_grpo" and summary["seed"] == 0
    # 5 steps, a window of 2 that starts at step 0, 1 and 2 (for 5 epochs each, twice); 2 prompts of 6 samples, which
    # are one row per prompt up to and with the window's first step.
    rollouts = 10 * sum(2 * (first + 1) + 12 * (5 - first - 1) for first in (0, 1, 2))
    assert summary["rollout_evaluations_per_sample"] == pytest.approx(rollouts / 360, abs=1e-3)
    assert summary["rollout_evaluations_saved_by_sharing"] == 30 * 60 - rollouts
    # Every epoch replays the window: 2 rows at its first step, 12 at the second; the first epoch does so once more, for
    # the first ratio.
    assert summary["denoiser_evaluations"] == rollouts + 31 * (2 + 12)


def test_the_lora_makes_the_difference_that_was_measured(whole_run):
    """The stock pipeline, its own scheduler and the file: the scores of the summary, from the same seeds."""
    settings, summary, folder, _, _ = whole_run
    held_out = split(prompts(), settings.held_out, SPLIT_SEED)[1]
    rows = [(i, k) for i in range(len(held_out)) for k in range(2)]
    seed, stock = seeder(EVAL_SEED, 0), tiny.sd3()
    for when in ("before", "after"):
        pictures = stock([held_out[i].text for i, _ in rows], num_inference_steps=3, guidance_scale=1.0,
                         generator=[torch.Generator().manual_seed(seed(i, k)) for i, k in rows], output_type="pt",
                         **tiny.CALL).images
        assert tiny.red(pictures, None).mean().item() == pytest.approx(summary[when]["red"], abs=1e-5)
        if when == "before":
            stock.load_lora_weights(folder)


# --- gradients -------------------------------------------------------------------------------------------------------
@pytest.mark.fast
@pytest.mark.parametrize("method", ["mix_grpo", "flow_grpo", "mix_grpo+grpo_guard"])
def test_the_gradient_does_not_depend_on_the_micro_batch(method):
    found = []
    for micro_batch in (12, 6, 2, 5):  # 2 groups of 6: both together, one by one, and in batches of a part
        trainer = tiny.trainer(method=method, train__group=6, train__micro_batch=micro_batch)
        tiny.stir(trainer.policy)
        parts, conditioning = epoch(trainer)
        assert len(parts) == (1 if micro_batch == 12 else 2)
        found.append(gradient(trainer, parts, conditioning))
    scale = found[0].abs().max()
    assert scale > 1e-3
    for other in found[1:]:
        torch.testing.assert_close(other / scale, found[0] / scale, rtol=0, atol=1e-5)


def test_updates_part_the_gradient_by_the_decisions_they_hold():
    trainer = tiny.trainer(train__prompts=3, train__group=4, train__micro_batch=4)
    tiny.stir(trainer.policy)
    parts, conditioning = epoch(trainer)
    whole = gradient(trainer, parts, conditioning)
    shares = chunks(parts, 2)
    assert [[part.groups for part in share] for share in shares] == [[range(0, 1), range(2, 3)], [range(1, 2)]]
    pieces = [gradient(trainer, share, conditioning) * len(share) / 3 for share in shares]
    torch.testing.assert_close(sum(pieces), whole, rtol=1e-4, atol=1e-6)


def test_decisions_are_counted_and_parts_dealt_out_evenly():
    parts, _ = epoch(tiny.trainer(train__micro_batch=3))
    assert decisions(parts) == 8 * 4 and decisions(parts[1:]) == 4 * 4
    assert chunks(list(range(7)), 3) == [[0, 3, 6], [1, 4], [2, 5]]
    assert chunks([1, 2], 3) == [[1], [2]] and chunks([], 3) == []


def test_a_better_sample_becomes_more_likely_and_a_worse_one_less():
    trainer = tiny.trainer(train__lr=1e-3, train__micro_batch=8)
    tiny.stir(trainer.policy)
    parts, conditioning = epoch(trainer)
    [part] = parts
    def logp():
        with torch.no_grad():
            return [new.logp[:, 0] for _, _, new in replay(trainer.policy, conditioning, part, 8)]
    before = logp()
    gradient(trainer, parts, conditioning)
    trainer.optimization.step()
    assert sum((a * (after - old)).mean() for a, after, old in zip(part.advantages, logp(), before)) > 0


def test_the_kl_pulls_back_to_the_base():
    found = {}
    for weight in (0.0, 0.01):
        trainer = tiny.trainer(parts__kl__weight=weight, train__lr=1e-3)
        tiny.stir(trainer.policy)
        parts, conditioning = epoch(trainer)
        found[weight] = gradient(trainer, still(parts), conditioning)
    assert found[0.0].abs().max() == 0 and found[0.01].abs().max() > 1e-4
    def output():
        with torch.no_grad():
            return trainer.policy.replay(conditioning, torch.ones(2, *tiny.LATENTS), trainer.rollouts.grid, 1)
    def distance():
        with trainer.policy.reference():
            base = output()
        return (output() - base).square().mean()
    first = distance()
    for _ in range(5):
        gradient(trainer, still(parts), conditioning)
        trainer.optimization.step()
    assert distance() < first


def test_a_gradient_that_is_not_finite_is_skipped_and_counted():
    trainer = tiny.trainer(train__ema=0.5)
    before = trainer.policy.weights.snapshot()
    average = {key: value.clone() for key, value in trainer.optimization.ema.items()}
    handle = trainer.policy.weights.parameters()[-1].register_hook(lambda grad: grad * float("inf"))
    found = trainer.run_epoch()
    assert found["skipped_updates"] == trainer.optimization.skipped == 1 and trainer.optimization.update == 0
    assert_same_weights(trainer, before)
    assert_same_weights(trainer.optimization.ema, average)
    handle.remove()
    trainer.run_epoch()
    assert (trainer.optimization.skipped, trainer.optimization.update) == (1, 1)
    assert any((before[key] != value).any() for key, value in trainer.policy.weights.snapshot().items())


# --- selection, updates, rates, averages -----------------------------------------------------------------------------
def test_best_and_worst_are_trained_and_the_others_cost_nothing():
    trainer = tiny.trainer(parts__selection={"type": "BestWorst", "n": 2}, train__group=6, train__micro_batch=12)
    found = trainer.run_epoch()
    rollout, replay = 2 + 12 * 5, 2 + 4 * 3  # 2 prompts at the first of 6 steps; then 4 of 12 rows are replayed
    assert trainer.policy.evaluations == rollout + 2 * replay  # for the first ratio and for the update
    assert found["log_ratio_max"] <= 1e-6 and trainer.optimization.update == 1


def test_the_transitions_that_are_kept_are_the_ones_that_were_chosen():
    trainer = tiny.trainer(method="flow_grpo+grpo_guard", parts__selection={"type": "BestWorst", "n": 2})
    parts, conditioning, grouped = sampling.sample(trainer, trainer.prompts[:2])
    all_of_them, advantage = parts[1], trainer.method.credit.advantage(grouped, [1.0])[1]
    [_, kept] = loop.credit(trainer, parts, grouped, conditioning.prompts)
    chosen = [advantage.argmin().item(), advantage.argmax().item()]
    assert kept.advantages[0].tolist() == advantage[sorted(chosen)].tolist()
    for before, after in zip(all_of_them.transitions, kept.transitions):
        assert torch.equal(after.old.logp, before.old.logp[sorted(chosen)])
        assert torch.equal(after.old.mean, before.old.mean[sorted(chosen)])
        assert torch.equal(after.x, before.x[sorted(chosen)])


def test_a_transition_has_the_advantage_of_the_mean_of_the_images_below_it():
    trainer = tiny.trainer(train__group=4)
    schedule = Schedule((0, 1, 2), (0, 1, 2), children=(2, 1, 2))
    trainer.method = trainer.rollouts.method = trainer.method.having(plan=lambda *_: schedule)
    parts, conditioning, _ = sampling.sample(trainer, trainer.prompts[:2])
    grouped = torch.tensor([[1.0, 3, 5, 9], [0, 0, 0, 4]])[..., None]
    credited = loop.credit(trainer, parts, grouped, conditioning.prompts)
    advantages = [torch.cat(each) for each in zip(*(part.advantages for part in credited))]
    half = 0.5**0.5  # two nodes a prompt: of values 2 and 7, then 0 and 2
    torch.testing.assert_close(advantages[0], torch.tensor([-half, half, -half, half]))
    assert torch.equal(advantages[1], advantages[0])
    torch.testing.assert_close(advantages[2], trainer.method.credit.advantage(grouped, [1.0]).flatten())


def test_a_run_in_which_no_group_differs_changes_nothing(tmp_path):
    settings = tiny.config(tmp_path, reward="same", parts__selection={"type": "DropZeroVariance"})
    summary = align(settings, {"same": lambda images, prompts: [0.5] * len(prompts)})
    assert (summary["updates"], summary["max_first_log_ratio"]) == (0, None)
    assert summary["before"] == summary["after"] == {"same": 0.5}
    saved = load_file(settings.folder / LORA_FILE)
    assert all(value.abs().max() == 0 for key, value in saved.items() if "lora_B" in key)


def test_a_reward_may_not_apply(tmp_path):
    settings = tiny.config(tmp_path, reward={"red": 1.0, "cats": 1.0}, train__epochs=3)
    def cats(images, prompts):
        return [tiny.red(images, prompts)[i].item() if "cat" in prompt else None for i, prompt in enumerate(prompts)]
    summary = align(settings, {"red": tiny.red, "cats": cats})
    assert summary["updates"] == 3 and summary["skipped_updates"] == 0
    assert json.dumps(metrics(settings.folder), allow_nan=False)  # null, never NaN


def test_updates_and_inner_epochs_count(tmp_path):
    trainer = tiny.trainer(train__updates=2, train__inner_epochs=3)
    found = trainer.run_epoch()
    assert trainer.optimization.update == 6 and trainer.optimization.total_updates == 2 * 3 * 2
    assert found["log_ratio_max"] > 1e-6  # from the second update on the policy is another one


def test_learning_rates_and_nan_ratios():
    train = tiny.config(train__warmup=4, train__schedule="linear").train
    assert [rate(u, 8, train) for u in range(8)] == [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]
    train = tiny.config(train__schedule="cosine").train
    assert [round(rate(u, 4, train), 6) for u in range(5)] == [1.0, 0.853553, 0.5, 0.146447, 0.0]
    train = tiny.config(train__warmup=2).train
    assert [rate(u, 9, train) for u in (0, 1, 2, 8)] == [0.5, 1.0, 1.0, 1.0]
    trainer = tiny.trainer()
    parts, conditioning = epoch(trainer)
    parts[0].transitions[2].old.logp[1] = float("nan")
    assert "the first |log ratio| is nan" in message(trainer.first_ratio, parts, conditioning, print)


def test_the_average_is_what_is_saved_where_it_is_asked_for(tmp_path):
    settings = tiny.config(tmp_path, train__ema=0.9999, eval__weights="ema")
    align(settings)
    state, _ = checkpoint.load(checkpoint.latest(settings.folder / "checkpoints"))
    saved = {f"transformer.{key.removeprefix('transformer.')}": value
             for key, value in load_file(settings.folder / LORA_FILE).items()}
    for room, same in (("ema", True), ("weights", False)):
        held = tiny.in_file({key.removeprefix(f"{room}/").replace(".default", ""): value
                             for key, value in state.items() if key.startswith(f"{room}/")})
        assert held.keys() == saved.keys()
        assert all(torch.equal(held[key], saved[key]) for key in held) == same
    # After two updates the average already has most of the training, of which it would hold 2e-4 without a warm-up.
    summary = json.loads((settings.folder / "summary.json").read_text())
    assert summary["kept"] is None and "moving average" not in (settings.folder / "report.html").read_text()


@pytest.mark.parametrize("share, weights, said", [
    (0.5, "ema", None), (1.0, "ema", None), (0.2, "current", None),
    (0.123, "ema", "the saved weights are the moving average, which holds 12 % of what was trained so far: lower "
                   "train.ema (0.9), train longer, or set eval.weights: current")])
def test_an_average_that_holds_less_than_half_of_the_training_is_told(share, weights, said):
    settings = Config.model_validate({"train": {"ema": 0.9}, "eval": {"weights": weights}})
    assert held_out.describe_average(settings, share) == said


@pytest.mark.fast
def test_nondeterministic_denoisers_are_refused(tmp_path):
    pipe = tiny.sd3()
    pipe.transformer.register_forward_hook(lambda _, inputs, out: (out[0] + 1e-3 * torch.randn_like(out[0]),))
    with pytest.raises(UserError, match="the first .log ratio. is .*, expected at most 1.0e-06: replay and rollout"):
        align(tiny.config(tmp_path), pipe=pipe)
    assert (tmp_path / "run" / "checkpoints" / "epoch-00000").is_dir()


# --- the first ratio -------------------------------------------------------------------------------------------------
def test_in_half_precision_old_scores_are_computed_as_the_replay_does(tmp_path, capsys):
    policy = tiny.stir(tiny.policy(tiny.sd3().to(torch.bfloat16), precision="bf16", guidance=3.0), 0.3)
    trainer = tiny.trainer(policy, precision="bf16", train__lr=1e-30, train__micro_batch=8,
                           method="mix_grpo+grpo_guard", parts__selection={"type": "BestWorst", "n": 2})
    parts, conditioning = epoch(trainer)
    parts[0].transitions[0].old.logp[2] += 1e-4  # as another batch size does on an accelerator
    check = trainer.first_ratio
    again = check(parts, conditioning, print)
    std = parts[0].transitions[0].old.std.flatten()[0].item()  # Guard's log-ratio is the difference times it
    assert check.rescore and check.max_log_ratio == pytest.approx(1e-4 * std, rel=0.1)
    assert "computed again as the replay does: 0.0e+00" in capsys.readouterr().out
    first, was = again[0].transitions[0], parts[0].transitions[0]
    assert first.x is was.x and not first.old.logp.requires_grad
    for trainer.epoch in (1, 2):  # and so in every later epoch
        assert trainer.run_epoch()["log_ratio_max"] == 0


# --- memory, Python --------------------------------------------------------------------------------------------------
def out_of_memory(pipe, call: int):
    """Let the denoiser run out of memory from the call of that number on."""
    seen = []
    def refuse(module, inputs):
        seen.append(0)
        if len(seen) >= call:
            raise torch.OutOfMemoryError("tried to allocate 2.00 GiB\nand much more")
    pipe.transformer.register_forward_pre_hook(refuse)
    return pipe


def test_out_of_memory_says_what_to_lower_and_saves_whole_epochs(tmp_path):
    # The trial of `latents`; 2 held-out prompts, twice for looks, 3 steps each; an epoch in 2 micro-batches.
    calls = 2 + 2 * 3 + (4 * 2 + 2 * 2 + 2 * 2)
    settings = tiny.config(tmp_path, train__steps=4, parts__plan__size=2, train__epochs=5)
    with pytest.raises(UserError, match="out of memory in the update with train.micro_batch 1 .tried to allocate"):
        align(settings, pipe=out_of_memory(tiny.sd3(), calls + 4 * 2 + 1))
    assert [path.name for path in (settings.folder / "checkpoints").iterdir()] == ["epoch-00001"]


def test_an_epoch_that_breaks_after_an_update_is_not_saved_as_a_whole_one(tmp_path):
    settings = tiny.config(tmp_path, train__steps=4, parts__plan__size=2, train__epochs=5, train__updates=2)
    calls = 2 + 2 * 3 + (4 * 2 + 2 * 2 + 2)  # to the second half of the first epoch's updates
    assert "out of memory" in message(lambda: align(settings, pipe=out_of_memory(tiny.sd3(), calls + 1)))
    assert not (settings.folder / "checkpoints").exists()


def bluish(images, prompts, metadata):
    return images[:, 2].mean((1, 2))


@pytest.mark.fast
def test_align_from_python_is_the_same_with_the_same_seed(tmp_path):
    prompts = ["red", "blue", "green", "old"]
    summary = flowgrpo.align(tiny.sd3(), bluish, prompts, method="dance_grpo", **tiny.options(tmp_path))
    assert summary["method"] == "dance_grpo" and summary["updates"] == 2
    assert summary["rewards"]["trained"] == {"bluish": 1.0} and summary["model"] == "StableDiffusion3Pipeline"
    assert (tmp_path / "run" / LORA_FILE).exists()
    for name in ("a", "b"):
        align(tiny.config(tmp_path, name=name, seed=11))
    assert_same_weights(*(load_file(tmp_path / name / LORA_FILE) for name in ("a", "b")))


def test_align_goes_on_where_it_failed(tmp_path, capsys):
    given = dict(prompts=["red", "blue", "green", "old"], **tiny.options(tmp_path))
    whole = flowgrpo.align(tiny.sd3(), bluish, **given | {"name": "whole"})
    pipe, calls = tiny.sd3(), []
    def failing(images, prompts, metadata):
        calls.append(prompts)
        if len(calls) == 5:  # the trial, the base, two parts of the first epoch, and the second epoch's first
            raise OSError("unreachable")
        return bluish(images, prompts, metadata)
    assert "unreachable" in message(flowgrpo.align, pipe, {failing: 1.0}, **given)
    assert checkpoint.latest(tmp_path / "run" / "checkpoints").name == "epoch-00001"
    assert "epoch 1 is saved in" in "".join(capsys.readouterr())
    assert flowgrpo.align(pipe, {failing: 1.0}, resume=True, **given)["updates"] == whole["updates"] == 2
    assert_same_weights(*(load_file(tmp_path / name / LORA_FILE) for name in ("run", "whole")))


def test_align_takes_several_rewards_a_prompt_file_and_a_list_with_metadata(tmp_path):
    (tmp_path / "p.txt").write_text("red\nblue\ngreen\nold\n")
    summary = flowgrpo.align(tiny.sd3(), {bluish: 0.5, tiny.red: 2.0}, tmp_path / "p.txt", **tiny.options(tmp_path))
    assert summary["rewards"]["trained"] == {"bluish": 0.5, "red": 2.0}
    seen = []
    def counted(images, prompts, metadata):
        seen.extend(metadata)
        return [float(each.get("count", 0)) for each in metadata]
    listed = [{"prompt": "red", "metadata": {"count": 1}}, {"prompt": "blue", "weight": 2}, "green",
              Prompt("old", metadata={"count": 3})]
    flowgrpo.align(tiny.sd3(), {counted: 1.0}, listed, **tiny.options(tmp_path))
    assert {"count": 1} in seen and {"count": 3} in seen and {} in seen
    assert load_prompts(tmp_path / "run" / "prompts.jsonl") == [
        Prompt("red", metadata={"count": 1}), Prompt("blue", weight=2), Prompt("green"),
        Prompt("old", metadata={"count": 3})]


@pytest.mark.fast
def test_rewards_of_one_name_and_groups_that_agree(tmp_path, capsys):
    def same(images, prompts):
        return [0.5] * len(prompts)
    options = tiny.options(tmp_path)
    options["train"] = options["train"] | {"epochs": 2}
    flowgrpo.align(tiny.sd3(), {same: 1.0}, ["red", "blue", "green", "old"], **options)
    said = capsys.readouterr()
    assert (said.out + said.err).count("in every group all samples earn the same, so nothing is learned") == 1
    with pytest.raises(UserError, match="two have the same name"):
        flowgrpo.align(tiny.sd3(), {lambda i, p: [0.0]: 1.0, lambda i, p: [1.0]: 1.0}, ["a", "b"], **options)


@dataclass
class Bright:
    """A reward that cannot be a key of a dictionary."""

    channel: int = 0

    def __call__(self, images, prompts):
        return images[:, self.channel].mean((1, 2))


@pytest.mark.parametrize("given, told", [
    ({"rewards": ["scene", "red"]}, "rewards: got list ['scene', 'red'], expected a name, a function, or a dictionary"),
    ({"rewards": {3: 1.0}}, "rewards: got int 3, expected a name"),
    ({"rewards": None}, "rewards: got NoneType None, expected a name"),
    ({"rewards": {}}, "the options: reward: got {}, expected at least 1 item"),
    ({"rewards": Bright(), "prompts": ["a", 3]}, "prompts: got int 3, expected a file, or a list of strings or "
     "dictionaries"),
    ({"prompts": None}, "prompts: got NoneType None, expected a file"),
    ({"prompts": ["a", {"prompt": "b", "metdata": {}}]}, "prompts list, line 2: unknown key 'metdata'"),
    ({"prompts": [{"prompt": "b", "metadata": {"at": {3}}}]}, "prompts list, line 1: expected metadata that JSON can"),
    ({"model": 3}, "model: got int 3, expected a name, a folder, a loaded pipeline, or a tuple of"),
    ({"model": ("gpt", "gpt")}, "model: got tuple ('gpt', 'gpt'), expected a name"),
    ({"model": torch.nn.Linear(1, 1)}, "model: got Linear Linear(in_features=1")])
def test_arguments_of_another_type_are_told(given, told, tmp_path):
    assert message(lambda: flowgrpo.align(**{"model": "starter", "output": str(tmp_path)} | given)).startswith(told)
    assert not list(tmp_path.iterdir())


def test_a_recipe_is_the_base_of_the_arguments():
    def of(*given, recipe="starter", **options):
        return build_config(*[*given, *[OMITTED] * (4 - len(given))], recipe, options)[0]
    assert of() == load("starter")
    assert of(name="mine", train={"epochs": 3}) == load("starter", {"name": "mine", "train.epochs": 3})
    other = of("model", {bluish: 0.5}, ["red"], "flow_grpo")
    assert (other.model, other.method, other.parts, other.name) == ("model", "flow_grpo", {}, "starter")
    assert other.rewards == {"bluish": 0.5} and other.train == load("starter").train
    assert "align: got no model and no recipe: expected one of them" in message(of, recipe=None)
    assert "no recipe 'startr': did you mean 'starter'" in message(of, recipe="startr")


@pytest.mark.parametrize("wrong, told", [
    ({"rewards": "motion"}, "reward 'motion' judges video, but what is generated here is image"),
    ({"adapter": {"targets": ["to_qq"]}}, "match no module of the transformer"),
    ({"image": {"call": tiny.CALL, "height": 17}}, "refuses its arguments")])
def test_a_run_that_fails_leaves_the_pipeline_as_it_was(wrong, told, tmp_path):
    pipe, given = tiny.sd3(), {"rewards": bluish, "prompts": ["red", "blue", "green", "old"]} | tiny.options(tmp_path)
    before = every_weight(tiny.sd3())
    refused(told, flowgrpo.align, pipe, **given | wrong)
    assert all(key == was and torch.equal(now, value) for (key, now), (was, value) in
               zip(every_weight(pipe), before, strict=True))
    assert not pipe.transformer._forward_pre_hooks
    assert flowgrpo.align(pipe, **given)["updates"] == 2


@pytest.mark.parametrize("options", [{}, {"train": {"checkpointing": True}}])
def test_a_second_run_on_a_pipeline_begins_with_the_base(options, tmp_path):
    given = {"rewards": bluish, "prompts": ["red", "blue", "green", "old"]} | tiny.options(tmp_path)
    given["train"] = given["train"] | options.get("train", {})
    pipe, fresh = tiny.sd3(), tiny.sd3()
    flowgrpo.align(pipe, **given | {"seed": 5, "name": "first"})
    hooks = len(pipe.transformer._forward_pre_hooks)
    assert [*pipe.transformer.peft_config] == ["default"]
    for each, name in ((pipe, "second"), (fresh, "alone")):
        flowgrpo.align(each, **given | {"name": name})
    assert_same_weights(*(load_file(tmp_path / name / LORA_FILE) for name in ("second", "alone")))
    assert len(pipe.transformer._forward_pre_hooks) == hooks


def test_how_an_adapter_is_taken_off_is_told_and_true_and_a_loaded_lora_stays(tmp_path):
    pipe = tiny.sd3()
    count = len(tiny.policy(pipe).weights.named)
    assert "adapter already (default): pipe.unload_lora_weights() takes it off" in message(tiny.policy, pipe)
    for take_off in (pipe.unload_lora_weights, lambda: pipe.transformer.delete_adapters("default")):
        take_off()
        assert len(tiny.policy(pipe).weights.named) == count
    loaded = tiny_text.model()
    count = len(tiny_text.policy(loaded).weights.named)
    refused("the model has an adapter .*: load it anew, without its adapter", tiny_text.policy, loaded)
    assert len(tiny_text.policy(tiny_text.model()).weights.named) == count
    given, pipe = {"rewards": bluish, "prompts": ["red", "blue", "green", "old"]} | tiny.options(tmp_path), tiny.sd3()
    flowgrpo.align(pipe, **given)
    pipe.unload_lora_weights()
    pipe.load_lora_weights(tmp_path / "run", adapter_name="default")
    assert "adapter already" in message(flowgrpo.align, pipe, **given)


def test_a_reward_need_not_be_hashable(tmp_path):
    with pytest.raises(UserError, match="no model 'startr', and no folder of that name: did you mean 'starter'"):
        flowgrpo.align("startr", Bright(), ["a", "b"], **tiny.options(tmp_path))


def test_a_run_of_all_weights(tmp_path):
    settings = tiny.config(tmp_path, adapter__rank=0, train__lr=1e-3)
    summary = align(settings)
    loaded = type(tiny.sd3().transformer).from_pretrained(settings.folder / "transformer")
    base = dict(tiny.sd3().transformer.named_parameters())
    assert summary["updates"] == 2 and any((base[key] != value).any() for key, value in loaded.named_parameters())


def test_a_run_outside_of_the_main_thread(tmp_path):
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(align, tiny.config(tmp_path)).result()["updates"] == 2
