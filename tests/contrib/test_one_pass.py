"""Updates that read the graphs of the rollout, and the scripts that measure them."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import beside_flow_grpo
import one_pass_ratio
import pytest
import torch

from flowgrpo.config import load
from flowgrpo.contrib.one_pass import HeldGrower, HeldPart, HeldSteps, OnePass
from flowgrpo.data.prompts import Prompt
from flowgrpo.methods import keys_read
from flowgrpo.samplers import growth
from flowgrpo.samplers.grids import shift_grid
from flowgrpo.samplers.growth import replay
from flowgrpo.samplers.kernels import Euler, FlowSDE
from flowgrpo.samplers.plans import Schedule
from flowgrpo.samplers.rollout import RolloutSpec, seeder
from flowgrpo.samplers.scheduler import StepRecord, noise_like
from flowgrpo.training import credit, extensions, memory, sampling
from tests.helpers import features, golden_files, loop, tiny, tiny_runs, tiny_text
from tests.helpers.refusals import message, refused


@pytest.fixture
def policy():
    return tiny.stir(tiny.policy())


def spec(roots=4, trained=(1, 2), group=4, **more):
    """Four steps, of which two are trained; fewer roots than samples split at the first of them."""
    return RolloutSpec(shift_grid(4, 3.0), Schedule(trained, trained), FlowSDE(), Euler(), group, roots, **more)


def explored(policy, exploration, micro_batch, held=True):
    conditioning = policy.encode(["red", "blue"])
    parts = list(growth.explore(policy, conditioning, [exploration], micro_batch, seeder(7, 0),
                                grower=HeldGrower if held else None))
    return conditioning, parts


def read(part, conditioning, micro_batch):
    """A part's scores from its graphs."""
    return part.held.score(part, conditioning, micro_batch)


def gradient(policy, replayed, part, weights):
    """Gradient of a weighted sum of a part's log-probabilities, as one vector."""
    for parameter in policy.weights.parameters():
        parameter.grad = None
    for k, rows, new in replayed:
        (new.logp[:, 0] * weights[k][rows]).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in policy.weights.parameters()])


def alike(found, expected):
    assert expected.norm() > 0 and torch.allclose(found, expected, rtol=1e-5, atol=1e-6 * expected.abs().max())


# Independent samples, a shared initial noise, all steps, a first step that is trained, and micro-batches that cut
# groups.
CASES = [(spec(), 4), (spec(roots=1), 4), (spec(trained=(0, 1, 2)), 8), (spec(roots=2), 3), (spec(), 3),
         (spec(roots=1, keep_means=True, score_means=True), 2)]


@pytest.mark.parametrize("exploration, micro_batch", CASES)
@pytest.mark.parametrize("pipe", [tiny.sd3, tiny.flux])
def test_samples_are_those_without_graphs_and_the_gradient_is_that_of_a_replay(pipe, exploration, micro_batch):
    policy = tiny.stir(tiny.policy(pipe()))
    conditioning, parts = explored(policy, exploration, micro_batch)
    _, plain = explored(policy, exploration, micro_batch, held=False)
    for part, other in zip(parts, plain, strict=True):
        assert isinstance(part, HeldPart) and part.held is not None and part.held.covers(part)
        assert all(torch.equal(*pair) for pair in zip(part.finals, other.finals))
        weights = [torch.linspace(-1, 2, len(taken.parent)) for taken in part.transitions]
        for taken, of in zip(part.transitions, other.transitions, strict=True):
            assert all(torch.equal(getattr(taken, name), getattr(of, name)) for name in ("x", "x_next", "parent"))
            assert torch.equal(taken.old.logp, of.old.logp) and not taken.old.logp.requires_grad
        expected = gradient(policy, replay(policy, conditioning, other, micro_batch), other, weights)
        before = policy.evaluations
        found = gradient(policy, read(part, conditioning, micro_batch), part, weights)
        assert policy.evaluations == before and not part.held.outputs and not part.held.covers(part)
        alike(found, expected)


class Line:
    """Model whose output is w * x; its transitions and gradients are known in closed form."""

    def __init__(self):
        self.device = self.states = torch.device("cpu")
        self.w = torch.tensor(0.3, requires_grad=True)

    def generators(self, seeds):
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    def sampling(self):
        return torch.no_grad()

    def replay(self, conditioning, x, grid, step, timesteps=None):
        return self.w * x

    def run(self, task, conditioning, latents, generators, x0=None):
        x = noise_like(torch.empty(len(conditioning.prompts), 3), generators) if latents is None else latents
        for i in task.steps:
            assert i not in task.stochastic
            x = task.solver(x, self.w.detach() * x, task.grid, i, None)
        return x, StepRecord()


class Texts(list):
    prompts = property(lambda self: self)

    def rows(self, index):
        return Texts(self[i] for i in index.tolist())


def test_the_gradient_of_a_line_is_that_of_the_closed_form():
    """d log N(x'; mean, std) / d w = mean over values of (x' - mean) / std^2 * dmean/dv * x."""
    model, exploration = Line(), spec()
    [part] = growth.explore(model, Texts(["a"]), [exploration], 4, seeder(3, 0), grower=HeldGrower)
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0])
    expected = 0.0
    for taken in part.transitions:
        transition = exploration.transition(taken.x, 0.3 * taken.x, exploration.grid, taken.step)
        slope = exploration.slope(taken.step)
        score = ((taken.x_next - transition.mean) / transition.std**2 * slope * taken.x).mean(1)
        expected += (-advantages * score).sum().item()
    for k, rows, new in read(part, Texts(["a"]), 4):
        (-advantages[rows] * new.logp[:, 0]).sum().backward()
    assert model.w.grad.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("exploration, micro_batch", CASES)
def test_a_part_without_some_samples_keeps_the_graphs_of_the_others(policy, exploration, micro_batch):
    conditioning, [part, *_] = explored(policy, exploration, micro_batch)
    _, [plain, *_] = explored(policy, exploration, micro_batch, held=False)
    advantages = [torch.arange(len(taken.parent)) + 1.0 for taken in part.transitions]
    keep = [torch.arange(len(taken.parent)) % 3 != 1 for taken in part.transitions]
    keep[0][:] = False  # a step of which nothing is left
    left, other = (each.with_advantages(advantages, keep) for each in (part, plain))
    assert [taken.step for taken in left.transitions] == [taken.step for taken in part.transitions[1:]]
    assert {*left.held.outputs} == {taken.step for taken in left.transitions}
    weights = [each[at] for each, at in zip(advantages, keep)][1:]
    expected = gradient(policy, replay(policy, conditioning, other, micro_batch), other, weights)
    found = gradient(policy, read(left, conditioning, micro_batch), left, weights)
    alike(found, expected)
    assert part.with_advantages(advantages, [torch.zeros_like(at) for at in keep]) is None


def trainer(kind="flow", method="mix_grpo", **options):
    return tiny_runs.trainer(kind, tiny_runs.config(kind, method, train__updates=1, **options))


METHODS = ["mix_grpo", "flow_grpo", "flow_grpo_fast", "mix_grpo+grpo_guard", "branch_grpo", "tree_rpo", "dance_grpo",
           "tempflow_grpo", "granular_grpo", "pref_grpo", "mix_grpo_flash", "flow_grpo+flow_dppo", "rlcm",
           "mix_grpo+mopps"]


@pytest.mark.parametrize("kind, method", [("flow", name) for name in METHODS] + [("vp", "ddpo"), ("vp", "b2_diffurl")])
def test_golden_runs_are_equal_with_one_pass_on_and_off(kind, method):
    found = {}
    for one_pass in (False, True):
        made = trainer(kind, method, train__one_pass=one_pass)
        lines = tiny_runs.epochs(made)
        found[one_pass] = lines, made.policy.weights.snapshot(), made.policy.evaluations
        assert all((line.get("one_pass/states", 0) > 0) is one_pass for line in lines)
        assert made.first_ratio.max_log_ratio <= 1e-5
    (off, weights, calls), (on, others, fewer) = found[False], found[True]
    for line, other in zip(off, on, strict=True):
        own = golden_files.selected(method, line)
        for key, value in golden_files.selected(method, other).items():
            assert value == pytest.approx(own[key], rel=2e-3, abs=5e-5), key
    assert fewer < calls
    tiny_runs.assert_same_weights(weights, others, rtol=1e-3, atol=2e-5)


BESIDE = ["phases_of_prompts", "phases_of_sizes", "two_sizes", "extrapolate", "self_teacher", "supervised",
          "supervised_apart", "limit", "base_pictures", "progress", "previews", "reference_credit"]


@pytest.mark.parametrize("feature", BESIDE)
def test_rare_features_of_the_loop_train_alike_beside_it(feature):
    made = [features.trainer("image", *names, epochs=3) for names in ([feature], [feature, "one_pass"])]
    for each in made:
        tiny_runs.next_epochs(each, 3)
    tiny_runs.assert_same_weights(*made, rtol=1e-3, atol=2e-5)


def test_the_first_update_has_the_replays_gradient_and_a_ratio_of_exactly_one():
    gradients = []
    for one_pass in (False, True):
        made = trainer(train__one_pass=one_pass)
        seen = []
        loop.watch(made, on_gradients=lambda update, made=made, seen=seen: seen.append(torch.cat([
            p.grad.flatten() for p in made.policy.weights.parameters()])))
        before = made.rollouts.target
        line = made.run_epoch()
        assert not one_pass or line["log_ratio_max"] == 0
        assert made.rollouts.target is before and not isinstance(before, HeldSteps)  # outside of an epoch
        gradients += seen
    replayed, held = gradients  # on a CPU the steps without a graph read a folded LoRA, which rounds otherwise
    assert torch.allclose(held, replayed, rtol=1e-4, atol=1e-5 * replayed.abs().max()) and held.norm() > 0


def test_half_precision_has_a_ratio_of_exactly_one_and_scores_nothing_again():
    made = tiny.trainer(method="mix_grpo", parts={"plan": {"size": 2}}, precision="bf16", train__one_pass=True,
                        policy=tiny.policy(tiny.sd3().to(torch.bfloat16), precision="bf16"))
    lines = tiny_runs.epochs(made)
    assert [line["log_ratio_max"] for line in lines] == [0, 0] and made.first_ratio.rescore is False
    assert made.first_ratio.max_log_ratio is not None and lines[0]["grad_norm"] > 0


def test_a_rollout_that_a_replay_does_not_repeat_stops_the_run():
    made = trainer(train__one_pass=True)
    generator = torch.Generator().manual_seed(1)
    made.policy.pipe.transformer.register_forward_hook(
        lambda module, given, output: (output[0] + 1e-2 * torch.randn(output[0].shape, generator=generator),))
    assert "replay and rollout disagree" in message(made.run_epoch)


def test_a_kl_with_the_base_model_is_that_of_a_replay():
    found = []
    for one_pass in (False, True):
        made = trainer(train__one_pass=one_pass, parts={"kl": {"weight": 0.1}})
        found.append([line["kl"] for line in tiny_runs.epochs(made)])
    assert found[1] == pytest.approx(found[0], rel=1e-3) and found[0][0] > 0


def test_an_update_that_is_repeated_replays_what_it_has_read():
    """As behind an out-of-memory error in the middle of an update: the gradient is made anew."""
    made = trainer(train__one_pass=True)
    extension = loop.extension(made, "OnePass")
    with extension.around_epoch():
        epoch = sampling.draw(made)
        extension.on_drawn(epoch)
        epoch.parts = credit.compare(made, epoch)
        epoch.weights = made.rollouts.step_weights(epoch.parts, 0)
        made.kl_reference.start_epoch(epoch, made.rollouts, 0, 1)
        gradients = []
        for _ in range(2):
            before = made.policy.evaluations
            made.gradient(epoch, epoch.parts, 10)
            gradients.append((torch.cat([p.grad.flatten() for p in made.policy.weights.parameters()]),
                              made.policy.evaluations - before))
    (first, none), (again, some) = gradients
    assert none == 0 < some and torch.allclose(first, again, rtol=1e-5, atol=1e-6 * first.abs().max())


def test_a_part_whose_reading_broke_off_is_read_again_from_its_beginning(policy):
    exploration, weights = spec(), [torch.linspace(-1, 2, 8), torch.linspace(1, 3, 8)]
    conditioning, [part] = explored(policy, exploration, 8)
    part = replace(part, advantages=tuple(weights), rewards=tuple(weights))
    _, [plain] = explored(policy, exploration, 8, held=False)
    expected = gradient(policy, replay(policy, conditioning, plain, 8), plain, weights)
    next(read(part, conditioning, 3))  # as where memory runs out behind the first rows
    found = gradient(policy, read(part, conditioning, 2), part, weights)
    alike(found, expected)


@pytest.mark.parametrize("options", [{"train__checkpointing": True}, {"train__guidance": 3.0},
                                     {"train__micro_batch": 3}, {"memory__states": "cpu"}], ids=str)
def test_options_of_a_run_train_alike_beside_it(options):
    made = [trainer(train__one_pass=one_pass, **options) for one_pass in (False, True)]
    for each in made:
        tiny_runs.epochs(each)
    tiny_runs.assert_same_weights(*made, rtol=1e-3, atol=2e-5)


REFUSED = [
    ({"train.inner_epochs": 2}, "train.inner_epochs 2, which trains a sample again"),
    ({"train.updates": 2}, "train.updates 2, which trains samples by other weights than drew them"),
    ({"train.staleness": 1}, "train.staleness, whose samples earlier weights drew"),
    ({"train.pack": True}, "train.pack, which is about replays"),
    ({"adapter.rank": 0}, "adapter.rank: 0, which trains all weights in place of a LoRA"),
    ({"memory.offload": "block_level"}, "memory.offload or memory.denoiser, whose weights come and go"),
    ({"memory.shard": True}, "memory.shard, whose processes hold shares of the weights"),
    ({"memory.context_parallel": 2}, "memory.context_parallel, whose processes share every call"),
    ({"method": "diffusion_nft"}, "a method that trains noised finals"),
    ({"method": "refl"}, "a method that trains a reward's gradient"),
    ({"parts.redraw": {"type": "DynamicSampling"}}, "parts.redraw, which replaces groups by their rewards"),
    ({"parts.expansion": {"type": "Expansion", "text": "{prompt}, red"}}, "parts.expansion, whose samples are drawn "
     "under other prompts"),
    ({"parts.replay": {"type": "GroupReplay"}}, "parts.replay, which trains samples of earlier epochs"),
    ({"parts.rehearsal": {"type": "Rehearsal"}}, "parts.rehearsal, which replays samples of the base model"),
    ({"parts.adapted": {"encoders": True}}, "text encoders that are trained")]


@pytest.mark.parametrize("options, reason", REFUSED)
def test_what_it_does_not_go_with_is_refused_in_one_line_and_auto_is_false_there(options, reason):
    given = {key.replace(".", "__"): value for key, value in options.items() if not key.startswith("parts.")}
    parts = {key.removeprefix("parts."): value for key, value in options.items() if key.startswith("parts.")}
    def config(one_pass):
        return tiny.config(**dict(method="flow_grpo", train__prompts=4, parts=parts, train__one_pass=one_pass) | given)
    setup = loop.setup(config(True), kind="pipeline", prompts=[Prompt("red")])
    error = message(extensions.require, OnePass, setup)
    assert error == f"train.one_pass is true, which does not go with {reason}: leave one of them out"
    extensions.require(OnePass, replace(setup, config=config("auto")))
    assert reason in [*extensions.obstacles(OnePass, replace(setup, config=config("auto")))]


def test_what_it_goes_with_is_not_refused():
    for method in METHODS:
        setup = loop.setup(tiny_runs.config("flow", method, train__updates=1), kind="pipeline")
        assert not [*extensions.obstacles(OnePass, setup)]


@pytest.mark.parametrize("prompts, lines", [(2, "true"), (10**7, "false")])
def test_auto_follows_the_memory_that_the_graphs_take(prompts, lines, capsys):
    settings = tiny.config(method="mix_grpo", parts={"plan": {"size": 2}}, reward="scene", train__one_pass="auto")
    settings = settings.model_copy(update={"train": settings.train.model_copy(update={"prompts": prompts})})
    made = tiny.trainer_of(settings, {"scene": tiny.red}, [Prompt("red"), Prompt("blue")])
    assert loop.extension(made, "OnePass").holds is (lines == "true")
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("train.one_pass")]
    assert line.startswith(f"train.one_pass: {lines} (auto: ") and line.endswith("90% of the free memory)")


def test_auto_is_false_in_a_run_that_it_does_not_go_with(capsys):
    made = tiny.trainer(method="flow_grpo", train__one_pass="auto", train__inner_epochs=2)
    assert not loop.extension(made, "OnePass").holds
    assert "train.one_pass: false (auto: train.inner_epochs 2, which trains a sample again)" in capsys.readouterr().out
    assert made.run_epoch()["one_pass/states"] == 0


def test_estimates_count_graphs_and_language_models_have_none():
    policy = tiny.policy()
    conditioning = policy.encode(["red"])
    plain, held = (memory.memory(policy, tiny.config(method="mix_grpo", parts={"plan": {"size": 2}},
                                                     train__one_pass=one_pass), conditioning)
                   for one_pass in (False, True))
    one = plain["update"]["activations"] // 4  # of a micro-batch of 4
    states = 2 * (1 + 4)  # two prompts, whose samples share the state before their first draw
    for name in ("rollout", "decode", "update"):
        assert held[name]["graphs of the rollout"] == one * states
    assert held["update"]["activations"] == 0 and held["encode"] == plain["encode"]
    settings = tiny_text.config(train__one_pass=True)
    assert "train.one_pass is set, which is about denoisers" in message(keys_read.require_kind, settings, "causal_lm")


# A step of Flow-GRPO (2505.05470, eq. 9) and a rollout of such steps, with the signatures of its code.
STEP = """
import math
import torch

def sde_step_with_logprob(scheduler, velocity, timestep, x, noise_level=0.7, prev_sample=None):
    [step] = {scheduler.index_for_timestep(t) for t in timestep}
    s, after, second = (scheduler.sigmas[k] for k in (step, step + 1, 1))
    g2, d = noise_level**2 * s / (1 - (s if s < 1 else second)), after - s
    mean = x * (1 + g2 / (2 * s) * d) + velocity * (1 + g2 * (1 - s) / (2 * s)) * d
    std = (-g2 * d) ** 0.5
    drawn = mean + std * torch.randn_like(x) if prev_sample is None else prev_sample
    score = -((drawn - mean) / std) ** 2 / 2 - std.log() - math.log(2 * math.pi) / 2
    return drawn, score.mean((1, 2, 3)), mean, std
"""
ROLLOUT = """
import torch
from .sd3_sde_with_logprob import sde_step_with_logprob

@torch.no_grad()
def pipeline_with_logprob(self, prompt_embeds, pooled_prompt_embeds, sigmas, noise_level, **_):
    self.scheduler.set_timesteps(sigmas=sigmas)
    states, scores = [torch.randn(len(prompt_embeds), 4, 16, 16)], []
    for t in self.scheduler.timesteps:
        x = states[-1]
        velocity = self.transformer(hidden_states=x, timestep=t.expand(len(x)), encoder_hidden_states=prompt_embeds,
                                    pooled_projections=pooled_prompt_embeds, return_dict=False)[0]
        x, score, _, _ = sde_step_with_logprob(self.scheduler, velocity, t[None], x, noise_level)
        states.append(x)
        scores.append(score)
    return x, states, scores
"""
SMALL = ["--cases", "window_2_of_6", "--repetitions=1", "--epochs=1", "--option", "train.group=2", "--option",
         "train.micro_batch=2"]


@pytest.fixture
def clone(monkeypatch, tmp_path) -> Path:
    folder = tmp_path / beside_flow_grpo.FOLDER
    folder.mkdir(parents=True)
    (folder / "sd3_sde_with_logprob.py").write_text(STEP)
    (folder / "sd3_pipeline_with_logprob.py").write_text(ROLLOUT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("flow_grpo", "flow_grpo.diffusers_patch", "flow_grpo.diffusers_patch.sd3_sde_with_logprob",
                 "flow_grpo.diffusers_patch.sd3_pipeline_with_logprob"):
        monkeypatch.setitem(sys.modules, name, None)  # to be taken away at the end
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def ran(monkeypatch, capsys, *words: str) -> tuple[int, list[str]]:
    monkeypatch.setattr(sys, "argv", ["beside_flow_grpo.py", *words])
    code, said = beside_flow_grpo.main(), capsys.readouterr()
    return code, said.out.splitlines() + said.err.splitlines()[-1:] * (code == 2)


def test_both_sides_do_the_same_work_and_every_ratio_is_printed(clone, monkeypatch, capsys):
    """Two prompts of two samples, six steps, two of them trained: 24 rows are sampled, 8 replayed."""
    code, lines = ran(monkeypatch, capsys, str(clone), *SMALL)
    assert code == 0 and lines[0].startswith("yifan123/flow_grpo unknown; this program ")
    replayed = "{'forward': 32, 'backward': 8}"
    assert lines[1].startswith(f"window_2_of_6: {{'replay': {replayed}, 'one_pass': {{'forward': 24, 'backward': 8}}, "
                               f"'theirs': {replayed}, 'same': {replayed}}} rows, log-probabilities differ by ")
    cells = lines[4].split("|")[1:-1]
    assert len(lines) == 5 and cells[0] == " window_2_of_6 " and len(cells) == 1 + len(beside_flow_grpo.RATIOS)
    assert all(float(cell.split()[0]) > 0 for cell in cells[1:])


@pytest.mark.parametrize("file, text, words, told", [
    ("sde", STEP.replace("score.mean(", "score.sum("), SMALL,
     "^log-probabilities differ by .*expected 1e-05 at most"),
    ("sde", STEP, [*SMALL, "--option", "parts.roots=1"],  # a shared first noise
     "^replay: {'forward': 28, 'backward': 6} rows, expected {'forward': 32, "),
    ("pipeline", "", [], "has no attribute 'pipeline_with_logprob', expected a clone of yifan123/flow_grpo")],
    ids=["another mean", "other work", "no such function"])
def test_what_is_not_comparable_ends_before_any_clock(file, text, words, told, clone, monkeypatch, capsys):
    (clone / beside_flow_grpo.FOLDER / f"sd3_{file}_with_logprob.py").write_text(text)
    code, lines = ran(monkeypatch, capsys, str(clone), *words)
    assert code == 2 and len(lines) == 1 + bool(words) and re.search(told, lines[-1])


@pytest.mark.fast
def test_rows_of_repetitions_and_of_saved_steps():
    theirs = {"forward": 32, "backward": 8}
    found = {"one_pass": {"forward": 24, "backward": 8}, "theirs": theirs}
    beside_flow_grpo.require_same_work(found, 8)
    refused("one_pass: .* rows, expected {'forward': 28, ", beside_flow_grpo.require_same_work, found, 4)
    found = [{"replay": replay, "one_pass": 1.0, "bare": 3.0, "theirs": 2.0, "same": 2.0} for replay in (1.0, 3.0, 2.0)]
    assert beside_flow_grpo.line("all_of_10", found) == (
        "| all_of_10 | 1.00 (0.50, 1.50, 1.00) | 0.50 (0.50, 0.50, 0.50) | 1.00 (0.50, 1.50, 1.00) | "
        "0.50 (0.50, 0.50, 0.50) | 1.50 (1.50, 1.50, 1.50) |")
    assert one_pass_ratio.line("all_of_10", [1.4, 1.0, 1.25]) == "| all_of_10 | 1.25 | 1.40, 1.00, 1.25 |"
    made = [trainer(train__one_pass=one_pass) for one_pass in (False, True)]
    found = one_pass_ratio.ratios(*made, repetitions=2)
    assert len(found) == 2 and min(found) > 0 and [each.epoch for each in made] == [2, 2]


def test_a_folder_without_flow_grpo(monkeypatch, capsys, tmp_path):
    code, [line] = ran(monkeypatch, capsys, str(tmp_path))
    assert code == 2 and line == (f"{tmp_path} has no folder flow_grpo/diffusers_patch, expected a clone of "
                                  "yifan123/flow_grpo: git clone https://github.com/yifan123/flow_grpo")


@pytest.mark.parametrize("case", one_pass_ratio.CASES)
def test_every_case_is_a_run_with_and_without_it(case):
    config = load(one_pass_ratio.RECIPE, one_pass_ratio.SMALL | one_pass_ratio.CASES[case] | {"train.one_pass": "true"})
    assert config.train.one_pass is True and extensions.require(OnePass, loop.setup(config, "pipeline")) is None
