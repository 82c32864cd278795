"""Calibration of a learning rate on problems whose signals are known in closed form."""

import math

import pytest
import torch
from numpy.polynomial.hermite_e import hermegauss

from flowgrpo.contrib.step_size import extension, signals

STATES, WIDTH = 12, 5


class Linear:
    """v(x) = W x, and transitions N(x + dt v(x), std^2), under AdamW at a rate that a calibration sizes.

    Its gradient has one size and turns in every update, so that each weight moves by the rate, and W stays as it is.
    """

    def __init__(self, floor: float = 0.0, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=generator)
        self.x = torch.randn(STATES, WIDTH, dtype=torch.float64, generator=generator)
        self.sign = torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=generator).sign()
        self.before, self.floor = self.weight, floor

    def step(self, rate: float) -> None:
        self.before, self.weight, self.sign = self.weight, self.weight + rate * self.sign, -self.sign
        self.change = self.weight - self.before

    def exact(self) -> float:
        """|dv| / |v| of the last step, as it is."""
        return ((self.x @ (self.weight - self.before).T).norm() / (self.x @ self.before.T).norm()).item()

    def measure(self, factor: float) -> float:
        self.weight = self.before + factor * self.change
        change, was = signals.relative([self.x @ self.before.T], [self.x @ self.weight.T])
        return math.hypot(math.sqrt(change / was), self.floor)


def calibrated(start: float, floor: float = 0.0, decay: float = 0.01, reach: float = 8.0):
    """A calibration from a learning rate, and the problem behind its updates."""
    updates = 12
    toy, found = Linear(floor), extension.Calibration(0.015, updates, reach)
    for update in range(updates):
        left, rate = 1 - decay * update, start * found.scale
        toy.step(rate * left)
        found(toy.measure, left, rate)
    return start * found.scale, found, toy


def test_relative_change_of_a_linear_velocity_is_that_of_its_weight():
    toy = Linear()
    toy.step(0.01)
    before, after = [toy.x @ toy.before.T], [toy.x @ toy.weight.T]
    change, was = signals.relative(before, after)
    assert math.sqrt(change / was) == pytest.approx(toy.exact(), rel=1e-12)
    assert signals.relative(before, [1.01 * before[0]]) == pytest.approx([1e-4 * was, was])


def test_z_of_tokens_is_that_of_the_exact_kl():
    """Two tokens of each completion are drawn from p, and every outcome counts as often as it is drawn."""
    p, q = (torch.tensor(row, dtype=torch.float64) for row in ([0.5, 0.3, 0.2], [0.45, 0.33, 0.22]))
    counts = (10 * p).round().long()
    drawn = torch.arange(3).repeat_interleave(counts)
    pairs = torch.cartesian_prod(drawn, drawn)
    total, rows = signals.divergence([p.log()[pairs]], [q.log()[pairs]])
    kl = 2 * (p * (p / q).log()).sum().item()
    assert rows == 100 and total / rows == pytest.approx(kl, rel=1e-12)


def test_z_of_a_gaussian_step_is_its_shift_over_its_deviation():
    """KL of N(m, s^2) to N(m + d, s^2) is d^2 / (2 s^2), so that sqrt(2 KL) is |d| / s."""
    d, s = 0.05, 0.7
    nodes, weights = (torch.tensor(values) for values in hermegauss(40))
    old = -nodes**2 / 2
    new = -(nodes - d / s)**2 / 2
    k3 = torch.expm1(new - old) - (new - old)
    kl = ((weights * k3).sum() / weights.sum()).item()
    assert math.sqrt(2 * kl) == pytest.approx(d / s, rel=1e-6)


@pytest.mark.parametrize("sizes, count, expected", [
    ([4], 2, [[0, 3]]), ([2, 2], 4, [[0, 1], [0, 1]]), ([2, 2], 9, [[0, 1], [0, 1]]), ([3, 0, 3], 2, [[0], [], [2]]),
    ([], 3, []), ([0], 3, [[]])])
def test_states_are_spread_evenly_over_all(sizes, count, expected):
    assert [rows.tolist() for rows in signals.spread(sizes, count)] == expected


def test_six_decades_of_starting_rates_end_at_the_same_rate():
    ends = [calibrated(10.0**power)[0] for power in range(-6, 1)]
    toy = Linear()
    toy.step(1.0)
    assert ends == pytest.approx([0.015 / toy.exact()] * 7, rel=0.02)
    assert max(ends) / min(ends) < 1.02


def test_the_first_step_itself_is_scaled_and_no_sample_is_lost():
    toy, found = Linear(), extension.Calibration(0.015, 12)
    toy.step(1.0)
    factor = found(toy.measure, 1.0, 1.0)
    assert toy.exact() == pytest.approx(0.015, rel=extension.NEAR - 1)
    torch.testing.assert_close(toy.weight, toy.before - factor * toy.sign)


@pytest.mark.parametrize("floor", [0.002, 0.008, 0.03])
def test_the_floor_of_rounding_is_measured_and_hardly_moves_the_rate(floor):
    """A step of 0.015 is read at 0.12, to which 0.03 of rounding adds 3 %."""
    clean, _, _ = calibrated(1e-4, decay=0.0)
    noisy, found, _ = calibrated(1e-4, floor, decay=0.0)
    assert found.floor == pytest.approx(floor, rel=0.02)
    assert noisy == pytest.approx(clean, rel=0.05)


def test_a_step_that_is_read_at_its_own_size_would_be_too_small():
    clean, _, _ = calibrated(1e-4, decay=0.0)
    assert calibrated(1e-4, 0.014, decay=0.0, reach=1.0)[0] < 0.6 * clean


def test_a_floor_above_half_of_what_is_read_is_seen_in_the_first_update():
    for floor, refused in ((0.05, False), (0.07, True)):
        toy, found = Linear(floor), extension.Calibration(0.015, 12, 8.0)
        toy.step(1e-3)
        found(toy.measure, 1.0, 1e-3)
        assert (found.floor > found.highest_floor) == refused


def test_a_signal_that_flattens_is_no_rounding():
    """0.3 tanh(8 * 0.015 / 0.3) is 5 % below 8 * 0.015, and of 0.045, three times too large, 31 %."""
    for start, rate in ((1.0, 0.0158), (0.045 / 0.015, 0.045)):
        found = extension.Calibration(0.015, 12, 8.0, scale=start, floor=0.0)
        found(lambda factor, rate=rate: 0.3 * math.tanh(factor * rate / 0.3), 1.0, 1e-3)
        assert found.floor < 0.6 * found.highest_floor
        assert found.scale / start == pytest.approx((0.015 / rate) ** 0.5, rel=0.21)


def test_the_rate_follows_steps_whose_signal_fades_as_adams_first_ones_do():
    """The signal of a rate falls to a seventh in the first updates, as on texts: the rate ends at seven times."""
    found, rate = extension.Calibration(0.4, 12), 1e-4
    for update in range(12):
        gain = 1000 * max(1.0, 7.0 * 0.6**update)
        found(lambda factor, gain=gain: factor * rate * found.scale * gain, 1.0, rate * found.scale)
    assert rate * found.scale * 1000 == pytest.approx(0.4, rel=0.1)


def test_what_is_kept_is_the_geometric_mean_of_the_second_half_since_one_reading_is_noisy():
    """Readings are 1.5 times too large and too small in turn. A target of 0.015 needs a scale of 1."""
    found, scales = extension.Calibration(0.015, 12, floor=0.0), []
    for update in range(12):
        noise = 1.5 if update % 2 else 1 / 1.5
        found(lambda factor, noise=noise: factor * 0.015 * found.scale * noise, 1.0, 1e-3)
        scales.append(found.scale)
    assert found.scale == pytest.approx(math.prod(found.scales) ** (1 / 6)) == pytest.approx(1.0, rel=0.02)
    assert scales[6:11] == found.scales[:5] and max(scales) / min(scales) > 1.2


def test_a_spike_is_cut_in_the_update_in_which_it_comes():
    toy, found = Linear(), extension.Calibration(0.015, 12)
    for update in range(4):
        rate = 1e-3 * found.scale
        toy.step(rate * (50 if update == 3 else 1))
        found(toy.measure, 1.0, rate)
    assert toy.exact() < 0.015 * extension.NEAR * 1.001


def test_a_step_that_is_not_finite_is_cut():
    def measure(factor: float) -> float:
        return 0.015 * factor * 1e4 if factor < 1e-3 else math.inf
    factor, signal = extension.sized(measure, 0.015)
    assert signal == measure(factor) == pytest.approx(0.015, rel=0.25)


def test_a_step_that_moves_nothing_stays_below_the_highest_rate():
    found = extension.Calibration(0.015, 12)
    found(lambda factor: 0.0, 1.0, 1e-3)
    assert 1e-3 * found.scale == pytest.approx(extension.HIGHEST)


def test_what_a_schedule_leaves_is_not_read_below_the_floor():
    found = extension.Calibration(0.015, 12, 8.0, scale=2.0, floor=0.01, done=5)
    found(lambda factor: 0.01, 0.05, 1e-3)
    assert found.scale == 2.0 and found.done == 6
