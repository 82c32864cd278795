"""Consistency distillation beside a method: its gradient, its average, and what a checkpoint keeps."""

import pytest
import torch
import torch.nn.functional as F

from flowgrpo.errors import UserError
from flowgrpo.methods.distillation import consistency_target
from tests.helpers import loop, tiny, tiny_runs
from tests.helpers.tiny_runs import copies, same

SMALL = {"distil": {"type": "ConsistencyDistillation", "batch": 8, "updates": 2, "jumps": 5}}


def trainer(method="rlcm", parts=SMALL, **options):
    made = tiny.trainer(method=method, parts=parts, train__steps=4, train__lr=1e-2, **options)
    return made, loop.extension(made, "ConsistentStudent")


def noised(student, update: int):
    """Yield the samples of the loss's own draws, a row of each time: its place, the time, the noised row and its
    conditioning."""
    (samples, of), grid, draw = student.samples, student.times(update).grid, student.draws(0, update)
    order = torch.randperm(8, generator=draw).tolist()
    at, noise = torch.randint(len(of), (8,), generator=draw), torch.randn(8, *samples.shape[1:], generator=draw)
    for row, k in enumerate(order):
        s = grid[k].item()
        x = (1 - s) * samples[at[row:row + 1]] + s * noise[row:row + 1]
        yield k, s, x, student.conditioning.rows(of[at[row:row + 1]])


def test_times_are_of_equal_slices_with_one_in_eleven_at_1_and_the_teacher_goes_a_jump():
    made, student = trainer()
    student.on_drawn(loop.draw(made))
    found = torch.stack([student.times(number).grid for number in range(400)])
    assert found.shape == (400, 17) and not found[:, 16].any()
    times, after = found[:, :8], found[:, 8:16]
    slices = torch.arange(8) * 1.1 / 8
    assert ((1.1 - slices - 1.1 / 8 - 1e-6 <= times) & (times <= 1.1 - slices) | (times == 0.02) | (times == 1)).all()
    assert (times == 1).float().mean().item() == pytest.approx(1 / 11, abs=0.01)
    torch.testing.assert_close(after, (times - 0.2).clamp(min=0))


def test_the_gradient_is_that_of_huber_s_loss_by_a_finite_difference():
    made, student = trainer(parts={"distil": SMALL["distil"] | {"weight": 2.0}})
    student.on_drawn(loop.draw(made))
    tiny.stir(made.policy)
    base = tiny.weights(made.policy)
    student.on_backward(3)
    assert same(base, tiny.weights(made.policy))

    def value() -> float:
        """Twice the mean loss of the samples; the average is the base, whose B is zero."""
        grid, total = student.times(3).grid, 0.0
        for k, s, x, encoded in noised(student, 3):
            u, later = made.policy.replay(encoded, x, grid, k), grid[8 + k].item()
            with made.policy.weights.base():
                v = made.policy.replay(encoded, x, grid, k)
                target = consistency_target(v, made.policy.replay(encoded, x - (s - later) * v, grid, 8 + k), s, later)
            total += 2 * F.huber_loss(u.double(), target.double(), delta=0.25).item() / 8
        return total

    tiny_runs.require_slope(student.live, value)


def test_a_pipeline_that_takes_one_time_a_call_has_the_same_gradient():
    found = []
    for vector in (True, False):
        made, student = trainer()
        if not vector:
            made.policy.vector = lambda conditioning: False
        student.on_drawn(loop.draw(made))
        tiny.stir(made.policy)
        student.on_backward(1)
        found.append(torch.cat([value.grad.flatten() for value in student.live.values()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-7)


def test_a_student_that_is_its_base_is_drawn_to_where_the_teacher_goes_and_away_from_nothing_at_the_end():
    """With one jump from every time to the data the target is the teacher's velocity, which the base has."""
    made, student = trainer()
    student.on_drawn(loop.draw(made))
    student.on_backward(0)
    assert any(value.grad.any() for value in student.live.values())
    object.__setattr__(student.part, "jumps", 1)
    made.optimization.zero_grad()
    student.on_backward(0)
    assert all(value.grad.abs().max() < 1e-6 for value in student.live.values())


def test_the_average_follows_the_student_from_a_tenth_on():
    _, student = trainer()
    start = copies(student.average)
    with torch.no_grad():
        for value in student.live.values():
            value.add_(1.0)
    student.prepare()
    for key, value in student.average.items():
        torch.testing.assert_close(value, start[key] + 0.9)  # 1 - 1/10
    student.prepare()
    for key, value in student.average.items():
        torch.testing.assert_close(value, start[key] + 0.9 + 0.1 * 9 / 11)  # 1 - 2/11 of what is left
    student.averaged = 10_000
    before = copies(student.average)
    student.prepare()
    for key, value in student.average.items():
        torch.testing.assert_close(value - before[key], 0.05 * (student.live[key] - before[key]))


def test_the_schedule_counts_the_method_s_steps_and_others_are_of_this_loss():
    made, student = trainer(parts={"distil": SMALL["distil"] | {"ascent": 1.0}})
    steps, ascent = [], student.ascent
    student.ascent = lambda *given: steps.append(made.optimization.update) or ascent(*given)
    metrics = made.run_epoch()
    assert metrics["distil/gap"] > 0 and "ratio/step_0" in metrics
    assert made.optimization.update == 2 and made.optimization.unscheduled == 1
    assert student.samples is None and set(steps) == {0}  # those of the loss alone do not follow the reward


def test_a_checkpoint_has_the_average_and_goes_on_bit_by_bit(tmp_path):
    both = tiny_runs.assert_resumes(lambda: trainer()[0], tmp_path, 1, 2)[:2]
    whole, resumed = (loop.extension(each, "ConsistentStudent") for each in both)
    assert same(resumed.average, whole.average) and resumed.averaged == whole.averaged == 6


def test_the_gradient_of_the_rewards_that_have_one_is_added():
    """Beside the loss' own: minus `ascent` times the reward's mean at the predicted data, by a finite difference."""
    found, two = [], {"red": tiny.red, "dark": lambda images, prompts: [-float(image.mean()) for image in images]}
    for ascent in (0.0, 2.0):
        made, student = trainer(parts={"distil": SMALL["distil"] | {"ascent": ascent}}, rewards=two,
                                reward={"red": 0.5, "dark": 3.0})
        student.on_drawn(loop.draw(made))
        tiny.stir(made.policy)
        student.on_backward(0)
        found.append({key: value.grad.clone() for key, value in student.live.items()})
    added = {key: found[1][key] - found[0][key] for key in found[0]}
    size, before = sum(value.square().sum() for value in added.values()).item() ** 0.5, copies(student.live)

    @torch.no_grad()
    def mean_red() -> float:
        """Mean of the predicted data of the samples."""
        grid = student.times(0).grid
        return sum(tiny.red(made.policy.image(x - s * made.policy.replay(encoded, x, grid, k), encoded), []).item()
                   for k, s, x, encoded in noised(student, 0)) / 8

    values = []
    for step in (0.01, -0.01):
        for key, value in student.live.items():
            value.data.copy_(before[key] - step / size * added[key])
        values.append(mean_red())
    assert 2.0 * 0.5 * (values[0] - values[1]) / 0.02 == pytest.approx(size, rel=0.05)


def test_a_model_that_predicts_noise_is_refused_in_a_line():
    with pytest.raises(UserError, match="predicts noise: expected a flow model; use DistributionMatching"):
        tiny_runs.trainer("vp", tiny_runs.config("vp", "rlcm", parts=SMALL))
