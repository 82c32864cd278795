"""Free cores from readings worked by hand, limits of control groups, and torch's threads that follow."""

import time
from dataclasses import replace

import pytest
import torch

from flowgrpo import cores
from flowgrpo.cores import Reading, Threads, fitting, limits

BEFORE = Reading(10.0, 100.0, 5.0, {1: (1.0, 0.0), 2: (1.0, 0.0), 9: (4.0, 0.0)})


@pytest.mark.parametrize("busy, own, tasks, groups, free", [
    (0.0, 0.0, {}, (), 2.0),  # nothing runs
    (4.0, 4.0, {}, (), 2.0),  # this process alone
    (2.0, 0.0, {}, (), 1.0),  # another one on one core
    (4.0, 2.0, {1: (2.0, 1.0), 2: (2.0, 1.0)}, (), 0.0),  # two others, which wait half of the time, as this one does
    (4.0, 1.4, {1: (2.4, 0.7)}, (), 2.0 - 1.3 * 1.5),
    (4.0, 4.0, {}, ((1.5, 4.0),), 1.5),  # a container of its own
    (4.0, 4.0, {}, ((8.0, 4.0), (2.0, 6.0)), 1.0),  # another program in the outer group, on one core
    (0.1, 0.2, {}, (), 2.0),  # the two clocks do not agree
])
def test_free_cores_of_two(busy, own, tasks, groups, free):
    """In two seconds; thread 9 has ended, and 3 began in between."""
    after = Reading(12.0, 100.0 + busy, 5.0 + own, {3: (9.0, 9.0), **tasks}, groups)
    before = replace(BEFORE, groups=tuple((limit, 0.0) for limit, _ in groups))
    assert after.free_since(before, 2) == pytest.approx(free)


@pytest.mark.parametrize("free, now, most, threads", [
    (2.0, 2, 2, 2), (1.6, 2, 2, 2), (1.4, 2, 2, 1), (-3.0, 2, 2, 1), (1.6, 1, 2, 1), (1.8, 1, 2, 2), (64.0, 8, 8, 8),
    (5.6, 8, 8, 6), (7.8, 2, 8, 8), (3.6, 3, 8, 3), (3.8, 2, 8, 4)])
def test_threads_that_fit(free, now, most, threads):
    """A thread in use may lack half a core, and one more a quarter, so that they do not swing."""
    assert fitting(free, now, most) == threads


def group(folder, limit, used):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.max").write_text(limit + "\n")
    (folder / "cpu.stat").write_text(f"usage_usec {used}\nuser_usec 0\n")


def test_limits_of_control_groups_of_both_versions(tmp_path):
    """Those of the process's own group and of all around it; "max" is none."""
    group(tmp_path, "400000 100000", 9_000_000)
    group(tmp_path / "a", "max 100000", 5)
    group(tmp_path / "a" / "b", "50000 100000", 2_000_000)
    own = tmp_path / "cgroup"
    own.write_text("0::/a/b\n")
    assert [*limits(tmp_path, own)] == [(0.5, 2.0), (4.0, 9.0)]
    own.write_text("0::/../../outside\n")  # of a container that sees its own group alone
    assert [*limits(tmp_path, own)] == [(4.0, 9.0)]
    assert [*limits(tmp_path / "none", tmp_path / "none")] == []
    for controller, name, value in (("cpu", "cpu.cfs_quota_us", "150000"), ("cpu", "cpu.cfs_period_us", "100000"),
                                    ("cpuacct", "cpuacct.usage", "3000000000")):
        (tmp_path / controller / "job").mkdir(parents=True, exist_ok=True)
        (tmp_path / controller / "job" / name).write_text(value)
    (tmp_path / "cgroup").write_text("4:memory:/other\n1:cpu,cpuacct:/job\n")
    assert [*limits(tmp_path, tmp_path / "cgroup")] == [(1.5, 3.0)]


@pytest.fixture
def several(monkeypatch):
    """torch with as many threads as there are cores, and no choice of the user's."""
    before = torch.get_num_threads()
    for name in cores.SET_BY_USER:
        monkeypatch.delenv(name, raising=False)
    threads = Threads.of("cpu")
    torch.set_num_threads(threads.cores)
    yield threads.cores
    torch.set_num_threads(before)


def read_when(used: float, count: int) -> Reading:
    """A reading of 1,000 s ago, since which others have used this share of all cores."""
    now = cores.read()
    return replace(now, at=now.at - 1000, busy=now.busy - 1000 * count * used, groups=())


def test_a_busy_machine_leaves_one_thread_and_gives_the_others_back(several):
    with Threads.of("cpu") as threads:
        threads.most = 4
        torch.set_num_threads(4)
        threads.cores, threads._last = 4, read_when(1.0, 4)
        line = threads.look()
        assert torch.get_num_threads() == 1
        assert line == "threads: 1 in place of 4 (0.0 of 4 cores are free; OMP_NUM_THREADS sets a fixed number)"
        threads._last = read_when(0.25, 4)
        assert threads.look().startswith("threads: 3 in place of 1 (3.0 of 4 cores are free;")
        assert threads.look() is None  # too soon
        assert threads.use(2, "as epoch 7 had") == "threads: 2 in place of 3 (as epoch 7 had)"
    assert torch.get_num_threads() == 4


def test_the_first_look_takes_a_fifth_of_a_second(several):
    threads, begun = Threads.of("cpu"), time.monotonic()
    assert 1 <= threads.wished() <= several
    assert several == 1 or time.monotonic() - begun >= cores.SHORTEST
    assert threads.free <= several


@pytest.mark.parametrize("name", cores.SET_BY_USER)
def test_a_number_that_the_user_set_stays(name, several, monkeypatch):
    monkeypatch.setenv(name, "2")
    with Threads.of("cpu") as threads:
        threads._last = read_when(1.0, several)
        assert threads.look() is None and threads.use(1) is None and torch.get_num_threads() == several


def test_another_device_leaves_the_threads(several):
    assert Threads.of("cuda").wished() == Threads.of("mps").wished() == several
