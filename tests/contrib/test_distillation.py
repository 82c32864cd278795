"""Distillation beside a method: whose weights move, what is put back, and what a checkpoint keeps."""

import pytest
import torch
from safetensors.torch import load_file

from flowgrpo import rewards
from flowgrpo.errors import UserError
from flowgrpo.export import export
from flowgrpo.methods.setup import Setup
from flowgrpo.methods.validate import resolve
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.training import credit, extensions
from tests.helpers import loop, tiny, tiny_runs
from tests.helpers.refusals import message
from tests.helpers.tiny_runs import copies, next_epochs, same

SMALL = {"distil": {"batch": 8, "fake_updates": 2, "updates": 2, "fake_lr": 0.01}}


def trainer(method="dmd2", parts=SMALL, **options):
    made = tiny.trainer(method=method, parts=parts, train__steps=4, train__lr=1e-2, **options)
    return made, loop.extension(made, "MatchedStudent")


@torch.no_grad()
def move(values: dict[str, torch.Tensor]) -> None:
    """Add noise to the weights of the fake score, which starts as the base: B is zero."""
    for key, value in values.items():
        value += 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(len(key)))


def gradient(values) -> torch.Tensor:
    return torch.cat([value.grad.flatten() for value in values])


def test_every_step_of_the_rollout_gives_states_with_the_data_predicted_there():
    made, spent = trainer()
    epoch = loop.draw(made)
    spent.on_drawn(epoch)
    assert [*spent.states] == [0, 1, 2, 3] and {len(each.x) for each in spent.states.values()} == {8}
    spec, encoded = spent.spec, epoch.conditioning
    for step, each in spent.states.items():
        with torch.no_grad():
            v = made.policy.replay(encoded.rows(each.prompts), each.x, spec.grid, step, spec.timesteps)
        torch.testing.assert_close(each.clean, each.x - spec.grid[step] * v, rtol=0, atol=2e-5)
    # With all noise fresh, the next state is that data, noised: the last one's rest is what its step draws.
    torch.testing.assert_close(spent.states[3].clean, torch.cat([part.finals[0] for part in epoch.parts]))


def test_fake_score_and_student_learn_apart_and_the_base_stays():
    made, spent = trainer()
    before, base = copies(spent.live), tiny.weights(made.policy)
    epoch = loop.draw(made)
    spent.on_drawn(epoch)
    for value in made.policy.weights.parameters():
        value.grad = torch.ones_like(value)
    spent._gradient(spent.fake)
    assert same(copies(spent.live), before) and all((v.grad == 1).all() for v in made.policy.weights.parameters())
    assert all(value.grad is not None for value in spent.fake.values.values())
    spent.fake.optimizer.step()
    assert not same(copies(spent.fake.values), before) and same(copies(spent.live), before)
    kept = copies(spent.fake.values)
    made.optimization.zero_grad()
    spent.on_backward(0)
    assert same(copies(spent.fake.values), kept) and all(v.grad is not None for v in made.policy.weights.parameters())
    assert same(base, tiny.weights(made.policy))


@pytest.mark.fast
def test_equal_scores_give_no_gradient_and_the_weight_scales_it():
    made, spent = trainer()
    spent.on_drawn(loop.draw(made))
    tiny.stir(made.policy)
    spent.on_backward(0)  # the fake score is the base: B is zero
    assert all(not value.grad.any() for value in made.policy.weights.parameters())
    move(spent.fake.values)
    found = []
    for weight in (1.0, 2.5):
        object.__setattr__(spent.part, "weight", weight)
        made.optimization.zero_grad()
        spent.on_backward(0)
        found.append(gradient(made.policy.weights.parameters()))
    assert found[0].norm() > 0
    torch.testing.assert_close(found[1], 2.5 * found[0], rtol=1e-4, atol=1e-9)


def test_the_teacher_has_its_own_guidance_and_at_first_a_share_of_the_fake_score():
    found = []
    for change in ({}, {"scale": 3.0}, {"blend": 0.5, "blend_updates": 4}):
        made, spent = trainer(parts={"distil": {"batch": 8} | change}, train__guidance=1.0)
        spent.on_drawn(loop.draw(made))
        move(spent.fake.values)
        spent.on_backward(0)
        found.append(gradient(spent.live.values()))
    assert all((one - found[0]).norm() > 1e-3 * found[0].norm() for one in found[1:])
    x = spent.states[1]
    def scores(update):
        with spent._teacher(update), torch.no_grad():
            return made.policy.replay(spent.conditioning.rows(x.prompts), x.x, spent.spec.grid, 1)
    with spent.base(), torch.no_grad():
        base = made.policy.replay(spent.conditioning.rows(x.prompts), x.x, spent.spec.grid, 1)
    # Half of the LoRA at first, a quarter in the middle of the cosine, and none at its end.
    sizes = [(scores(update) - base).norm().item() for update in (0, 2, 4, 9)]
    assert sizes[0] > sizes[1] > 0 == sizes[2] == sizes[3] and abs(sizes[1] / sizes[0] - 0.5) < 0.1


def test_the_gradient_is_the_directions_by_a_finite_difference():
    """Along one weight: the sum of directions times the change of the data that the student predicts, over D."""
    made, spent = trainer()
    spent.on_drawn(loop.draw(made))
    tiny.stir(made.policy)
    move(spent.fake.values)
    spent.on_backward(3)
    directions: list = []  # at the weights as they are

    def value() -> float:
        total = 0.0
        for number, (step, states, noise, times, k) in enumerate(spent._chunks(1, 3)):
            encoded = spent.conditioning.rows(states.prompts)
            at, t = spent.spec.grid[step], times.grid[k].item()
            x0 = states.x - at * made.policy.replay(encoded, states.x, spent.spec.grid, step)
            if len(directions) <= number:
                x = (1 - t) * x0 + t * noise
                with made.policy.weights.base():
                    real = x - t * made.policy.replay(encoded, x, times.grid, k)
                with spent.worn(spent.fake.values):
                    fake = x - t * made.policy.replay(encoded, x, times.grid, k)
                size = (x0 - real).abs().flatten(1).mean(1)
                directions.append((fake - real) / size[:, None, None, None])
            total += (directions[number] * x0).double().flatten(1).mean(1).sum().item() / 8
        return total

    with torch.no_grad():
        value()
    tiny_runs.require_slope(spent.live, value)


def test_a_run_without_rewards_replays_nothing_and_one_with_them_adds_both():
    made, spent = trainer()
    assert [len(parts) for parts, _ in spent.add_steps([])] == []
    metrics = made.run_epoch()
    assert metrics["loss"] == 0 and metrics["distil/gap"] > 0 and metrics["trained_updates"] == 2
    rewarded, _ = trainer("dmdr")
    metrics = rewarded.run_epoch()
    assert "ratio/step_0" in metrics and metrics["distil/fake_loss"] > 0
    assert rewarded.optimization.update == 2 and rewarded.optimization.unscheduled == 1  # one step is the match's alone
    plain = tiny.trainer(method="dmdr", parts={"distil": None}, train__steps=4, train__lr=1e-2)
    plain.run_epoch()
    assert not same(copies(plain.policy.weights.named), copies(rewarded.policy.weights.named))


def test_a_checkpoint_has_the_fake_score_and_its_moments_and_goes_on_bit_by_bit(tmp_path):
    both = tiny_runs.assert_resumes(lambda: trainer("dmdr")[0], tmp_path, 1, 2)[:2]
    whole, resumed = (loop.extension(each, "MatchedStudent") for each in both)
    assert same(resumed.fake.values, whole.fake.values)


def test_a_surrogate_learns_what_earns_more_and_draws_the_student():
    made, spent = trainer("tdm_r1", {"distil": {"batch": 8, "fake_updates": 1, "surrogate_lr": 0.01, "reward": 3.0}})
    epoch = loop.draw(made)
    spent.on_drawn(epoch)
    epoch.parts = credit.compare(made, epoch)
    spent.on_credited(epoch)
    assert len(spent.groups) == 2 and all(abs(advantage.sum()) < 1e-4 for _, advantage, _ in spent.groups)
    alike = copies(spent.surrogate.values)
    made.optimization.zero_grad()
    spent.on_backward(0)  # the surrogate and the fake score are the base
    assert all(not value.grad.any() for value in made.policy.weights.parameters())

    def margin() -> float:
        """Mean of A (e_base - e) over both groups, at one time and noise: what the surrogate prefers."""
        times, total = spent._times(0), 0.0
        for samples, advantage, prompts in spent.groups:
            noise = torch.randn(samples.shape, generator=torch.Generator().manual_seed(3))
            with torch.no_grad():
                with spent.base():
                    base = spent._errors(samples, noise, prompts, times, 4)
                with spent.worn(spent.surrogate.values):
                    total += (advantage * (base - spent._errors(samples, noise, prompts, times, 4))).mean().item()
        return total

    assert margin() == 0
    for turn in range(12):
        spent._gradient(spent.surrogate, turn)
        spent.surrogate.step()
    assert margin() > 0 and not same(copies(spent.surrogate.values), alike)
    made.optimization.zero_grad()
    spent.on_backward(0)
    assert any(value.grad.any() for value in made.policy.weights.parameters())
    assert {key.split("/")[0] for key in spent.state()[0]} == {"fake", "surrogate"}
    assert "distil/surrogate_weight" in made.run_epoch() and made.optimization.update == 1


def test_the_reward_s_own_gradient_is_added():
    made, spent = trainer(parts={"distil": {"batch": 8, "ascent": 1.0}})
    spent.on_drawn(loop.draw(made))
    spent.on_backward(0)  # the scores agree, so that this is the reward's gradient alone
    before = copies(made.policy.weights.named)

    def reward() -> float:
        with torch.no_grad():
            found = [made.scoring.value(spent.own, states.prompts, made.policy.image(
                states.x - spent.spec.grid[step] * made.policy.replay(
                    spent.conditioning.rows(states.prompts), states.x, spent.spec.grid, step),
                spent.conditioning.rows(states.prompts))) for step, states, *_ in spent._chunks(1, 0)]
        return torch.cat(found).double().mean().item()

    slope = {key: value.grad for key, value in made.policy.weights.named.items()}
    size, values = sum(value.square().sum() for value in slope.values()).item(), []
    assert size > 0
    for step in (1.0, -1.0):
        made.policy.weights.load({key: before[key] - step * 0.01 / size**0.5 * slope[key] for key in before})
        values.append(reward())
    assert abs((values[0] - values[1]) / 0.02 / size**0.5 - 1) < 0.05  # the loss is minus the mean reward
    for reward in "jpeg_compressibility", {"jpeg_compressibility": 1.0, "scene_soft": 0.0}:
        with pytest.raises(UserError, match="parts.distil.ascent is 1, but no trained .* set it to 0"):
            settings = tiny.config(method="dmd2", parts={"distil": {"ascent": 1.0}}, reward=reward)
            composed = rewards.compose(settings.trained, settings.cache)
            extensions.check(Setup(settings, "pipeline", resolve(settings), trained=composed))


def test_the_student_is_an_ordinary_lora_and_comfyui_s_file_has_all_of_it(tmp_path):
    made, spent = trainer()
    made.run_epoch()
    made.policy.weights.save(tmp_path)
    model = tiny.save(tiny.sd3(), tmp_path / "model")
    (tmp_path / "config.yaml").write_text(made.config.model_copy(update={"model": str(model)}).yaml())
    own = load_file(tmp_path / LORA_FILE)
    assert len(own) == len(spent.live)  # the fake score is in no file
    [file] = export.lora(tmp_path, tmp_path / "student.safetensors")
    layers, sizes = load_file(file), []
    for values, up, down in ((own, ".lora_B.weight", ".lora_A.weight"),
                             (layers, ".lora_up.weight", ".lora_down.weight")):
        changes = [values[key] @ values[key.replace(up, down)] for key in values if key.endswith(up)]
        sizes.append(sum(change.double().square().sum().item() for change in changes))
    assert sizes[0] > 0 and abs(sizes[1] / sizes[0] - 1) < 1e-5


@pytest.mark.parametrize("text", ["base", "student"])
@pytest.mark.parametrize("method, of", [("dmd2", "MatchedStudent"), ("rlcm", "ConsistentStudent")])
def test_encoders_that_the_teacher_reads_too_have_the_reward_s_gradient_alone(method, of, text):
    kind = {"type": "ConsistencyDistillation", "updates": 2, "jumps": 5} if method == "rlcm" else {}
    made = tiny.trainer(method=method, parts={"distil": {"batch": 8, "text": text} | kind,
                                                    "adapted": {"encoders": True}},
                        train__steps=4, train__lr=1e-2, adapter__encoder_targets=["q_proj"])
    spent = loop.extension(made, of)
    spent.on_drawn(loop.draw(made))
    encoders = [value for key, value in made.policy.weights.named.items() if key not in spent.live]
    with torch.no_grad():
        for value in [*(spent.fake.values.values() if method == "dmd2" else ()), *encoders]:
            value += 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(value.numel()))
    for value in encoders:
        value.grad = torch.ones_like(value)
    spent.on_backward(0)
    assert encoders and all((value.grad == 1).all() == (text == "student") for value in encoders)
    assert any(value.grad.any() for value in spent.live.values())


def test_text_once_encodes_each_prompt_once_and_gives_the_same_outputs_without_the_encoders_gradient():
    made, spent = trainer("dmd2", SMALL | {"adapted": {"encoders": True}}, adapter__encoder_targets=["q_proj"])
    spent.on_drawn(loop.draw(made))
    of, spec, encoders = spent.states[1], spent.spec, []
    made.policy.pipe.text_encoder.register_forward_hook(lambda *_: encoders.append(1))
    given = made.policy.replay(spent.conditioning.rows(of.prompts), of.x, spec.grid, 1, spec.timesteps)
    alone, prompts = len(encoders), len(of.prompts.unique())
    assert alone % prompts == 0
    with made.policy.text_once():
        for turn in range(3):
            again = made.policy.replay(spent.conditioning.rows(of.prompts), of.x, spec.grid, 1, spec.timesteps)
            assert torch.equal(again, given) and len(encoders) == 2 * alone
    again.sum().backward()
    assert not any(value.grad is not None for key, value in made.policy.weights.named.items() if key not in spent.live)
    made.policy.replay(spent.conditioning.rows(of.prompts), of.x, spec.grid, 1, spec.timesteps)
    assert len(encoders) == 3 * alone


def test_the_student_has_a_share_of_the_learning_rate_and_resumes_with_it(tmp_path):
    """The first step of AdamW moves a weight by its rate: lr 1e-2 for an encoder, a quarter of it for the student."""
    parts = {"distil": SMALL["distil"] | {"updates": 1, "lr_share": 0.25}, "adapted": {"encoders": True}}
    (one, spent), (two, _) = (trainer("dmdr", parts, adapter__encoder_targets=["q_proj"], train__epochs=4)
                              for _ in range(2))
    before = copies(one.policy.weights.named)
    next_epochs(one, 1)
    moved = {key: (value - before[key]).abs().max().item() for key, value in one.policy.weights.named.items()
             if ".lora_B." in key}
    assert {key in spent.live for key, size in moved.items() if size > 0} == {True, False}
    for key, size in moved.items():
        assert size == pytest.approx(0 if size == 0 else 2.5e-3 if key in spent.live else 1e-2, rel=1e-3)
    tiny_runs.resume(one, two, tmp_path)
    for each in (one, two):
        next_epochs(each, 1)
    assert same(one.policy.weights.named, two.policy.weights.named)


def test_the_match_begins_after_some_epochs_and_the_reward_alone_trains_the_encoders_until_then():
    made, spent = trainer("dmdr", {"distil": SMALL["distil"] | {"after": 1, "text": "student", "updates": 3},
                                   "adapted": {"encoders": True}}, adapter__encoder_targets=["q_proj"])
    before, fake = copies(made.policy.weights.named), copies(spent.fake.values)
    metrics = made.run_epoch()
    assert "distil/gap" not in metrics and made.optimization.update == 1
    assert same(copies(spent.live), {key: before[key] for key in spent.live})
    assert same(copies(spent.fake.values), fake) and not same(copies(made.policy.weights.named), before)
    made.epoch = 1
    assert "distil/gap" in made.run_epoch() and made.optimization.update == 4
    assert not same(copies(spent.fake.values), fake)
    assert not same(copies(spent.live), {key: before[key] for key in spent.live})


def test_an_epoch_of_the_match_alone_leaves_the_encoders():
    made, spent = trainer("dmdr", {"distil": SMALL["distil"] | {"after": 1, "alone": 1, "text": "student"},
                                   "adapted": {"encoders": True}}, adapter__encoder_targets=["q_proj"])
    moved = []
    for made.epoch in range(3):
        before = copies(made.policy.weights.named)
        metrics = made.run_epoch()
        moved.append({key in spent.live for key, value in made.policy.weights.named.items()
                      if not torch.equal(value, before[key])})
        assert ("distil/gap" in metrics) == (made.epoch > 0)
        assert made.optimization.update == [1, 3, 5][made.epoch]
    assert moved == [{False}, {True}, {True, False}]


def test_micro_batches_change_no_batch():
    made, spent = trainer()
    spent.on_drawn(loop.draw(made))
    made.geometry.micro_batch = 3
    chunks = [*spent._chunks(0, 5)]
    noises = [noise for _, _, noise, _, _ in chunks]
    assert sum(map(len, noises)) == 8 and max(map(len, noises)) <= 3
    assert {step for step, *_ in chunks} == {0, 1, 2, 3} or len(chunks) < 4
    again = [*spent._chunks(0, 5)]
    assert all(torch.equal(one, other[2]) for one, other in zip(noises, again))
    assert not torch.equal(noises[0], next(spent._chunks(0, 6))[2])


AFTER = "after or alone, of a method that trains nothing but"


@pytest.mark.parametrize("options, told", [
    ({"precision": "fp16"}, "precision fp16"), ({"adapter__rank": 0}, "adapter.rank: 0"),
    ({"image__sizes": [[16, 16]]}, "image.sizes"),
    ({"parts": {"distil": {"text": "student"}}}, "text: student, where no text encoder"),
    ({"parts": {"distil": {"after": 1}}}, AFTER), ({"method": "tdm_r1", "parts": {"distil": {"alone": 2}}}, AFTER),
    ({"parts": SMALL | {"adapted": {"denoisers": False, "encoders": True}}}, "adapted.denoisers: false"),
    ({"method": "dmdr", "parts": {"distil": {"after": 9}}, "train__epochs": 9},
     "after is 9, but train.epochs is 9, so that nothing would be distilled")])
def test_what_does_not_go_is_refused_in_a_line(options, told):
    settings = tiny.config(**{"method": "dmd2", "parts": SMALL, "train__steps": 4} | options)
    assert told in message(extensions.check, Setup(settings, "pipeline", resolve(settings)))


def test_methods_without_a_rollout_of_their_own_read_no_distil():
    for method in ("diffusion_nft", "draft", "reinflow", "expo", "grpo"):
        settings = tiny.config(method=method, parts={"distil": {"type": "DistributionMatching"}})
        assert "reads no distil" in message(resolve, settings, "tokens" if method == "grpo" else "flow")
