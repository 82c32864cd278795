"""`train.lr: auto` in runs of tiny models: sized steps, the rate that is found, resume, and what is refused."""

import pytest
import torch

from flowgrpo.config.sections import AutoRate
from flowgrpo.contrib.step_size.extension import NEAR, StepSize
from flowgrpo.errors import UserError
from flowgrpo.training import state
from flowgrpo.training.optimizer import rate
from tests.helpers import loop, tiny, tiny_runs, tiny_text
from tests.helpers.tiny_runs import next_epochs

IMAGE = dict(method="mix_grpo", parts={"plan": {"size": 2}}, train__epochs=16, train__micro_batch=8)
TEXT = dict(train__epochs=16)


def run(kind: str, lr="auto", **options):
    """A trainer of a tiny model that keeps the lines it prints."""
    made = tiny.trainer(train__lr=lr, **IMAGE | options) if kind == "image" else \
        tiny_text.trainer(train__lr=lr, **TEXT | options)
    made.lines = []
    made.log = made.lines.append
    return made


def moves(made) -> list[float]:
    """Signals of the updates of a trainer's next epochs, as they come."""
    found, sizing, held = [], loop.extension(made, "StepSize"), {}
    def before(update: int) -> None:
        held["signal"], held["reading"] = sizing.signal, sizing.signal.read()
    def behind() -> None:
        found.append(held["signal"].size(*held["signal"].sums(held["reading"], held["signal"].read())))
    loop.watch(made, on_gradients=before, on_stepped=behind)
    return found


@pytest.mark.parametrize("kind, target", [("image", 0.015), ("text", 0.2)])
def test_the_first_update_moves_the_samples_by_the_target(kind, target):
    made = run(kind)
    found = moves(made)
    made.run_epoch()
    assert found[0] == pytest.approx(target, rel=NEAR - 1)


@pytest.mark.parametrize("lr, image, text", [("auto", 12, 64), ({"states": 5}, 5, 5)])
def test_a_reading_has_twelve_states_or_sixty_four_completions(lr, image, text):
    """Of each kind an epoch has more states, and 80 completions."""
    read = []
    for made in (run("image", lr, train__group=8), run("text", lr, train__prompts=20)):
        loop.watch(made, on_gradients=lambda update, made=made: read.append(
            sum(map(len, loop.extension(made, "StepSize").signal.read()))))
        made.run_epoch()
    assert read == [image, text]


@pytest.mark.parametrize("kind", ["image", "text"])
def test_a_run_forgets_the_rate_it_begins_with(kind):
    ends = []
    for start in (1e-6, 1e-3, 1.0):
        made = run(kind, {"start": start, "updates": 4})
        ends.append(next_epochs(made, 5)[-1]["step_size/rate"])
    assert max(ends) / min(ends) < 1.3


def test_the_rate_is_kept_behind_the_calibration_and_follows_the_schedule():
    made = run("image", {"updates": 2}, train__schedule="linear")
    lines = next_epochs(made, 4)
    assert [line["step_size/rate"] for line in lines[1:]] == [lines[1]["step_size/rate"]] * 3
    assert [sorted(key for key in line if "step_size" in key) for line in lines] == [
        ["step_size/floor", "step_size/moved", "step_size/rate"]] * 2 + [["step_size/rate"]] * 2
    train, optimization = made.config.train, made.optimization
    used = lines[-1]["step_size/rate"] * rate(3, optimization.total_updates, train)
    assert [group["lr"] for group in optimization.optimizer.param_groups] == pytest.approx([used])
    [told] = [line for line in made.lines if line.startswith("train.lr")]
    assert told.startswith(f"train.lr: {lines[-1]['step_size/rate']:.3g} (auto: after 2 updates, relative change of")


def test_a_calibration_ends_and_costs_nothing_then():
    made, plain = run("image", {"updates": 2}), run("image", 1e-3)
    for each in (made, plain):
        next_epochs(each, 2)
        each.spent = each.policy.evaluations
        next_epochs(each, 1)
    assert made.spent > plain.spent
    assert made.policy.evaluations - made.spent == plain.policy.evaluations - plain.spent


def test_the_moving_average_is_of_sized_weights():
    made = run("image", train__ema=0.5, eval__weights="ema")
    first = {key: value.clone() for key, value in made.optimization.ema.items()}
    made.run_epoch()
    for key, value in made.policy.weights.snapshot().items():
        torch.testing.assert_close(made.optimization.ema[key], first[key].lerp(value, 0.5))


def test_a_sized_step_is_that_of_the_rate_which_is_found():
    """A run with the first update's own rate as a number makes the same step: Adam's direction has no rate in it."""
    made = run("image", {"start": 1e-5})
    made.run_epoch()
    plain = run("image", 1e-5 * loop.extension(made, "StepSize").calibration.scale)
    plain.run_epoch()
    for key, value in made.policy.weights.snapshot().items():
        torch.testing.assert_close(value, plain.policy.weights.snapshot()[key], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", ["image", "text"])
@pytest.mark.parametrize("done", [2, 4])
def test_a_resumed_run_is_the_same(kind, done, tmp_path):
    made, other = (run(kind, {"updates": 3}) for _ in range(2))
    next_epochs(made, done)
    state.save(made, tmp_path)
    state.restore(other, tmp_path / "checkpoints" / f"epoch-{done:05d}")
    assert next_epochs(made, 2) == next_epochs(other, 2)
    for key, tensor in made.policy.weights.snapshot().items():
        assert torch.equal(tensor, other.policy.weights.snapshot()[key])


def test_a_floor_above_the_target_is_refused_in_one_line():
    made = run("text", {"target": 1e-9})
    with pytest.raises(UserError, match=r"^train.lr is auto, but only rounding gives a sqrt\(2 KL\) of a completion "
                       r"of \S+, expected at most 1e-09, 1 times the target: set precision: fp32, or train.lr to a "
                       r"number$"):
        made.run_epoch()


def test_half_precision_finds_the_rate_of_full_precision():
    """Read at its own size, the step would show rounding for a part, and the rate be a quarter lower."""
    found = []
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        torch.manual_seed(0)
        policy = tiny.policy(tiny.sd3().to(dtype), precision=precision)
        made = run("image", {"target": 0.01, "updates": 3, "start": 1e-6}, policy=policy, precision=precision)
        found.append(next_epochs(made, 3)[-1])
    assert found[1]["step_size/rate"] == pytest.approx(found[0]["step_size/rate"], rel=0.1)


def test_several_updates_of_an_epoch_are_measured_one_by_one():
    made = run("text", {"updates": 4}, train__updates=2, train__inner_epochs=2)
    found = moves(made)
    next_epochs(made, 1)
    assert loop.extension(made, "StepSize").calibration.done == len(found) == 4
    assert max(found) < 3.1 * 0.2


@pytest.mark.parametrize("method", ["flow_grpo", "diffusion_nft", "awm"])
def test_methods_of_images_can_be_calibrated(method):
    made = tiny_runs.trainer("flow", tiny_runs.config("flow", method, train__lr="auto"))
    [first, _] = tiny_runs.epochs(made)
    assert first["step_size/moved"] == 0.015 and first["step_size/floor"] < 0.15 * 8 * 0.015


def test_updates_without_a_gradient_size_nothing():
    made = tiny.trainer(rewards={"red": lambda images, prompts: [0.0] * len(prompts)}, train__lr="auto", **IMAGE)
    [line] = next_epochs(made, 1)
    assert line["step_size/rate"] == AutoRate().start and loop.extension(made, "StepSize").calibration.done == 0


def test_a_number_needs_none_of_it():
    assert "StepSize" not in loop.names(run("image", 1e-3))
    assert run("image", 1e-3).config.train.first_lr == 1e-3


@pytest.mark.parametrize("options, named", [
    ({"method": "expo"}, "a method that trains latent edits"), ({"method": "draft"}, "a method that trains a reward's"),
    ({"train__warmup": 4}, "train.warmup 4"), ({"memory__shard": True}, "memory.shard"),
    ({"phases": [{"at": 1, "set": {"train.lr": 1e-3}}]}, "phases that set train.lr")])
def test_what_cannot_be_calibrated_is_refused(options, named):
    with pytest.raises(UserError, match=f"^train.lr is auto, which does not go with {named}.*a number, or leave"):
        StepSize.require(loop.setup(tiny.config(train__lr="auto", **options)))
