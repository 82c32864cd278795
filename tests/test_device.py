"""Free cores and threads, and copies to a GPU by pinned memory."""

import time
from dataclasses import replace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from flowgrpo import cores, device
from flowgrpo.cores import Reading, Threads, fitting, limits
from flowgrpo.device import matmul_precision, put_away, to_device, without_cudnn_attention
from flowgrpo.samplers.grids import shift_grid
from flowgrpo.samplers.scheduler import PolicyScheduler, Segment
from flowgrpo.types import RegressionTarget, Scored
from tests.helpers import tiny, tiny_text
from tests.helpers.refusals import refused


class Gpu(TorchFunctionMode):
    """Inside, tensors "on cuda" are on the CPU, and copies to there are counted as (by pinned memory, queued)."""

    def __init__(self):
        super().__init__()
        self.pinned, self.copies = [], []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.pin_memory:
            self.pinned.append(args[0].clone())
            return self.pinned[-1]
        if function is torch.Tensor.to and "cuda" in map(str, args[1:]):
            by = any(args[0] is each for each in self.pinned)
            self.copies.append((by, kwargs.get("non_blocking", False)))
            return args[0].clone()
        return function(*args, **kwargs)


SCORED = Scored(torch.ones(2, 1), torch.ones(2, 1, dtype=torch.bool), torch.ones(2, 1, 4), torch.ones(1))


@pytest.mark.parametrize("moved, copies", [
    (lambda: to_device(torch.ones(2), "cuda"), 1),
    (lambda: SCORED.to("cuda"), 3),  # its numbers stay
    (lambda: RegressionTarget(torch.ones(2, 1, 4), torch.ones(2, 1)).to("cuda"), 2),
    (lambda: to_device(torch.ones(2), "cpu"), 0)])
def test_a_copy_is_queued(moved, copies):
    with Gpu() as gpu:
        moved()
    assert gpu.copies == [(True, True)] * copies


class Away(TorchFunctionMode):
    """Inside, a tensor is on a GPU by its device; what is copied to the CPU is noted as (pinned, queued)."""

    def __init__(self, tensor):
        super().__init__()
        self.tensor, self.pinned, self.copies = tensor, False, []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function == torch.Tensor.device.__get__ and args[0] is self.tensor:
            return torch.device("cuda")
        if function is torch.empty_like:
            self.pinned = kwargs.pop("pin_memory", False)
        if function is torch.Tensor.copy_:
            self.copies.append((self.pinned, kwargs.get("non_blocking", False)))
        return function(*args, **kwargs)


def test_copies_and_schedulers_wait_for_nothing():
    tensor = torch.arange(3.0)
    with Away(tensor) as seen:
        found = put_away(tensor, torch.device("cpu"))
    assert seen.copies == [(True, True)] and torch.equal(found, tensor) and found is not tensor
    assert put_away(tensor, torch.device("cpu")) is tensor
    scheduler = PolicyScheduler.over(tiny.sd3().scheduler)
    scheduler.follow(Segment(shift_grid(4, 3.0), range(4)))
    with Gpu() as gpu:
        scheduler.set_timesteps(4, device="cuda")
    assert gpu.copies == [(True, True)] * 2
    torch.testing.assert_close(scheduler.sigmas, shift_grid(4, 3.0).float())
    values = torch.arange(4.0)
    with Gpu():
        assert torch.equal(to_device(values, "cuda"), values)
    assert to_device(values, "cpu") is values and to_device(values, None) is values


CUDNN, CUDA = torch.backends.cudnn, torch.backends.cuda
PRODUCTS = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
CONVOLUTIONS = lambda: CUDNN.allow_tf32, lambda allowed: setattr(CUDNN, "allow_tf32", allowed)
ATTENTION = CUDA.cudnn_sdp_enabled, CUDA.enable_cudnn_sdp


@pytest.mark.parametrize("setting, context, given, before, inside", [
    *((PRODUCTS, matmul_precision, *row) for row in (
        (("bf16", "cuda:1"), "highest", "high"), (("fp16", "cuda"), "highest", "high"),
        (("fp32", "cuda"), "highest", "highest"), (("bf16", "cpu"), "highest", "highest"),
        (("bf16", "cuda"), "medium", "medium"))),
    *((CONVOLUTIONS, matmul_precision, *row) for row in (
        (("fp32", "cuda:1"), True, False), (("bf16", "cuda"), True, True), (("fp32", "cpu"), True, True),
        (("fp32", "cuda"), False, False))),
    *((ATTENTION, without_cudnn_attention, *row) for row in (
        (("cuda:1",), True, False), (("cpu",), True, True), (("cuda",), False, False)))])
def test_settings_of_torch_on_a_gpu_hold_inside(setting, context, given, before, inside):
    """fp32 products are rounded below fp32 alone, convolutions are not, cuDNN's attention is off. A user's own setting
    stays; every one is restored, after an error too."""
    read, write = setting
    first = read()
    write(before)
    try:
        with pytest.raises(ArithmeticError), context(*given), context(*given):
            assert read() == inside
            assert setting != CONVOLUTIONS or CUDNN.conv.fp32_precision == ("tf32" if inside else "none")
            raise ArithmeticError
        assert read() == before
    finally:
        write(first)


def test_a_users_precision_of_one_operator_stays():
    CUDNN.conv.fp32_precision = "ieee"  # the older name raises RuntimeError from here on
    try:
        with matmul_precision("fp32", "cuda"):
            assert (CUDNN.conv.fp32_precision, CUDNN.rnn.fp32_precision) == ("ieee", "tf32")
        assert CUDNN.conv.fp32_precision == "ieee"
    finally:
        CUDNN.allow_tf32 = True


def test_a_language_model_on_a_gpu_computes_without_cudnns_attention():
    policy = tiny_text.policy()
    with policy._arithmetic():
        assert torch.backends.cuda.cudnn_sdp_enabled()
    policy.device = torch.device("cuda")
    with policy._arithmetic():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("error, full", [
    (torch.OutOfMemoryError("CUDA out of memory"), True), (MemoryError(), True), (RuntimeError("a mistake"), False),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True), (ValueError("DefaultCPUAllocator"), False)])
def test_errors_that_say_that_memory_ran_out(error, full):
    assert device.ran_out(error) == full


def test_memory_that_is_not_there_is_told():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert device.ran_out(caught.value)
    assert len(torch.Generator().get_state()) == device.GENERATOR
    device.require_generators(1000, "samples")
    told = "1,000,000,000 samples need 4,709 GiB .* ask for [0-9,]+ at most"
    refused(told, device.require_generators, 10**9, "samples")


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


def test_limits_of_control_groups(tmp_path):
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


def test_limits_of_control_groups_of_version_1(tmp_path):
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
    threads = Threads.for_device("cpu")
    torch.set_num_threads(threads.cores)
    yield threads.cores
    torch.set_num_threads(before)


def read_when(used: float, count: int) -> Reading:
    """A reading of 1,000 s ago, since which others have used this share of all cores."""
    now = cores.read()
    return replace(now, at=now.at - 1000, busy=now.busy - 1000 * count * used, groups=())


def test_a_busy_machine_leaves_one_thread_and_gives_the_others_back(several):
    with Threads.for_device("cpu") as threads:
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


def test_the_first_look_and_other_devices(several):
    threads, begun = Threads.for_device("cpu"), time.monotonic()
    assert 1 <= threads.recommend() <= several
    assert several == 1 or time.monotonic() - begun >= cores.SHORTEST
    assert threads.free <= several
    assert Threads.for_device("cuda").recommend() == Threads.for_device("mps").recommend() == several


@pytest.mark.parametrize("name", cores.SET_BY_USER)
def test_a_number_that_the_user_set_stays(name, several, monkeypatch):
    monkeypatch.setenv(name, "2")
    with Threads.for_device("cpu") as threads:
        threads._last = read_when(1.0, several)
        assert threads.look() is None and threads.use(1) is None and torch.get_num_threads() == several
