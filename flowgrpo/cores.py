"""Processor cores that other programs leave to this one, and torch's threads on a CPU beside them.

torch's OpenMP threads wait for each other after every operation: where one has to share its core with another program,
an operation takes the time slices of both, 4 to 20 times as long. With one thread per free core it does not.
"""

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

SHORTEST = 0.2  # seconds between two readings: the system counts in hundredths
DOWN, UP = 0.5, 0.25  # of a core: what may lack for a thread in use, and for one more
WAITS = 3.0  # seconds of waiting per second of work that others are taken to have, at most
SET_BY_USER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
CGROUPS = Path("/sys/fs/cgroup")
SELF = Path("/proc/self")


@dataclass(frozen=True)
class Reading:
    """Seconds of processors so far.

    at: the clock. busy: of the cores that this process may use, by all programs. own: by this process.
    tasks: (ran, waited for a core) of each of its threads, by number.
    groups: (cores of the limit, used) of every control group around it that has a limit.
    """

    at: float
    busy: float
    own: float
    tasks: Mapping[int, tuple[float, float]]
    groups: tuple[tuple[float, float], ...] = ()

    def free_since(self, before: "Reading", cores: int) -> float:
        """Number of cores that were free for this process since `before`, those that it used itself included."""
        seconds, own = self.at - before.at, self.own - before.own
        both = self.tasks.keys() & before.tasks.keys()
        ran, waited = (sum(self.tasks[task][i] - before.tasks[task][i] for task in both) for i in (0, 1))
        # Other programs want the cores that they used, and those that they waited for, taken to be as many as here.
        waits = min(waited / ran, WAITS) if ran > seconds / 10 else 0.0
        load = max(self.busy - before.busy - own, 0.0) / seconds * (1 + waits)
        limits = [limit - max(used - was - own, 0.0) / seconds
                  for (limit, used), (_, was) in zip(self.groups, before.groups)]
        return min([cores - load, *limits])


def read() -> Reading:
    """Read the processors' times. What a system does not tell counts as nothing."""
    import psutil

    times, allowed = psutil.cpu_times(percpu=True), affinity()
    own = psutil.Process().nice()
    polite = isinstance(own, int) and own > 0  # programs that step back count beside one that does so too
    busy = sum(of.user + of.system + (of.nice if polite and hasattr(of, "nice") else 0.0) +
               sum(getattr(of, name, 0.0) for name in ("irq", "softirq", "steal"))
               for core, of in enumerate(times) if allowed is None or core in allowed)
    tasks = {}
    for folder in (SELF / "task").glob("[0-9]*"):  # none but on Linux
        with suppress(OSError, ValueError):  # it ended, or the kernel does not count
            ran, waited = (folder / "schedstat").read_text().split()[:2]
            tasks[int(folder.name)] = int(ran) / 1e9, int(waited) / 1e9
    return Reading(time.monotonic(), busy, time.process_time(), tasks, tuple(limits()))


def affinity() -> set[int] | None:
    """Numbers of the cores that this process may use; None where the system does not say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def count() -> int:
    """Number of cores that this process may use."""
    return len(affinity() or range(os.cpu_count() or 1))


def limits(root: Path = CGROUPS, own: Path = SELF / "cgroup") -> Iterator[tuple[float, float]]:
    """Yield (cores, seconds used) of this process's control groups that have a limit, inmost first. root: where they
    are mounted, of version 2, or with a folder per controller of version 1. own: /proc/self/cgroup."""
    places = dict.fromkeys([""])
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):
                names = path.strip("/").split("/")
                places = {"/".join(names[:depth]): None for depth in range(len(names), -1, -1)} | places
    for place in places:
        with suppress(OSError, ValueError, KeyError):
            limit, period = (root / place / "cpu.max").read_text().split()
            used = dict(line.split() for line in (root / place / "cpu.stat").read_text().splitlines())["usage_usec"]
            if limit != "max":
                yield int(limit) / int(period), int(used) / 1e6
        with suppress(OSError, ValueError):
            folder = root / "cpu" / place
            quota, length = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if quota > 0:
                yield quota / length, int((root / "cpuacct" / place / "cpuacct.usage").read_text()) / 1e9


class Threads:
    """torch's threads in this process: as many as cores are free, and at most those that it had when it began.

    With OMP_NUM_THREADS or MKL_NUM_THREADS set, the user's number stays. As a context manager: restored at the end.
    """

    def __init__(self, fixed: bool) -> None:
        self.most, self.fixed = torch.get_num_threads(), fixed
        self.cores = count()
        self.free = float(self.cores)
        self._last: Reading | None = None

    @classmethod
    def for_device(cls, device: torch.device | str) -> "Threads":
        """Threads of work on a device: on another one than the CPU they stay."""
        return cls(torch.device(device).type != "cpu" or any(os.environ.get(name) for name in SET_BY_USER))

    def __enter__(self) -> "Threads":
        return self

    def __exit__(self, *_: object) -> None:
        if not self.fixed:
            torch.set_num_threads(self.most)

    def recommend(self) -> int:
        """Number of threads that suits the cores that were free since the last call; at the first, within SHORTEST."""
        now = torch.get_num_threads()
        if self.fixed or (self.most == 1 and now == 1):
            return now
        if self._last is None:
            self._last = read()
            time.sleep(SHORTEST)
        if time.monotonic() - self._last.at < SHORTEST:
            return now
        before, self._last = self._last, read()
        self.free = self._last.free_since(before, self.cores)
        return fitting(self.free, now, self.most)

    def use(self, count: int, why: str = "") -> str | None:
        """Let torch use `count` threads; return a line on a change. why: its reason; the free cores by default."""
        now = torch.get_num_threads()
        if self.fixed or count == now:
            return None
        torch.set_num_threads(count)
        why = why or f"{max(self.free, 0):.1f} of {self.cores} cores are free; OMP_NUM_THREADS sets a fixed number"
        return f"threads: {count} in place of {now} ({why})"

    def look(self) -> str | None:
        """Let torch use the number of threads that suits the free cores; return a line on a change."""
        return self.use(self.recommend())


def fitting(free: float, now: int, most: int) -> int:
    """Number of threads, from 1 to `most`, for so many free cores; now: those in use, kept if in doubt."""
    fit = math.floor(free + DOWN)
    if fit > now:
        fit = max(now, math.floor(free + UP))
    return max(1, min(fit, most))
