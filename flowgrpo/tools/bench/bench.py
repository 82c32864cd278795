"""Bench (`flowgrpo compare methods`), from its first check to its page: workers in parallel share the tasks; the
progress of all, and what the rest will take.

models.py has the settings that all methods share, plan.py the runs (a method, a seed, a rate, a clip), their
methods and budgets, worker.py the process that trains them, probe.py what it measures of a trained one, collect.py
results.json with its statistics, table.py and page.py the pages.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from flowgrpo.config.schema import Config
from flowgrpo.cores import affinity
from flowgrpo.errors import UserError
from flowgrpo.nouns import quantity
from flowgrpo.storage import atomic, places
from flowgrpo.storage.json_files import read_lines
from flowgrpo.tools.bench import collect, page, table
from flowgrpo.tools.bench.plan import FACTORS, SWEEP, Plan, Request, Run, TooFew, begin

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
LOOK, QUIET = 1.0, 20.0  # seconds between looks at the progress, and between its lines
FEW = 3  # failures that end the bench if nothing has succeeded
FILES = "results.md", "results.csv", "results.tex", "results.json", "index.html", "curves.pdf"
Say = Callable[[str], None]


def cores() -> int:
    return len(affinity() or range(os.cpu_count() or 1))


def threads_each(jobs: int) -> int:
    """Threads of each of so many jobs: their share of the cores, and at most OMP_NUM_THREADS if it is set."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return max(min(cores() // jobs, int(asked) if asked.isdecimal() else cores()), 1)


class Worker:
    """Process of `worker`, that does a task at a time."""

    def __init__(self, threads: int):
        environment = os.environ | dict.fromkeys(THREADS, str(threads))
        # a session of its own: Ctrl-C reaches the bench alone, which closes the input
        self.process = subprocess.Popen([sys.executable, "-m", "flowgrpo.tools.bench.worker"], text=True,
                                        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        start_new_session=True)

    def do(self, task: dict[str, str]) -> str | None:
        """Do a task; return the error in one line, None without one."""
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(json.dumps(task) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except (BrokenPipeError, ValueError):
            answer = ""
        if not answer:
            return f"the process ended (exit code {self.process.wait()})"
        return json.loads(answer).get("error")

    def close(self) -> None:
        """End the input; a task that is going on is saved and interrupted."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()


class Workers:
    """Context manager: at most `jobs` workers, begun when they are needed; an ended one is replaced."""

    def __init__(self, jobs: int, folder: Path):
        self.jobs, self.folder = jobs, folder
        self.threads = threads_each(jobs)
        self.free: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
        self.begun: list[Worker] = []
        self.closed = False
        for _ in range(jobs):
            self.free.put(None)

    def __enter__(self) -> Workers:
        self.pool = ThreadPoolExecutor(self.jobs)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.closed = True
        if kind is KeyboardInterrupt:
            print("interrupted: runs are saved; the same command goes on", flush=True)
        self.pool.shutdown(wait=False, cancel_futures=True)
        for worker in self.begun:
            worker.close()
        for worker in self.begun:
            worker.process.wait()

    def submit(self, kind: str, config: Config, result: Path) -> Future[str | None]:
        """Give a task to the next free worker; the future has its error, None without one."""
        return self.pool.submit(self._do, kind, config, result)

    def _do(self, kind: str, config: Config, result: Path) -> str | None:
        worker = self.free.get()
        try:
            if self.closed:
                return "not begun"
            if worker is None or worker.process.poll() is not None:
                worker = Worker(self.threads)
                self.begun.append(worker)
            recipe = self.folder / "tasks" / f"{config.name}.yaml"
            atomic.write_text(recipe, config.yaml())
            return worker.do({"kind": kind, "config": str(recipe), "result": str(result), "log": str(log_of(config))})
        finally:
            self.free.put(worker)


def log_of(config: Config) -> Path:
    """File of what a run printed."""
    return Path(config.output).parent / "logs" / f"{config.name}.log"


def trials(workers: Workers, configs: Sequence[Config]) -> list[dict[str, float]]:
    """Cost of an epoch of each configuration, measured once. Raises UserError with the first error."""
    files = [config.folder.with_suffix(".json") for config in configs]
    waiting = {workers.submit("trial", config, file): config for config, file in zip(configs, files)
               if not file.is_file()}
    for future, config in waiting.items():
        if error := future.result():
            raise UserError(f"method {config.method}: {error} (log: {log_of(config)})")
    return [json.loads(file.read_text()) for file in files]


def remaining(runs: Sequence[Run]) -> list[Run]:
    """Runs without a result, each once."""
    return [run for run in {run.folder: run for run in runs}.values() if not run.result.is_file()]


def perform(workers: Workers, runs: Sequence[Run], log: Say) -> dict[str, str]:
    """Train the runs without a result, unless the first FEW all fail; return errors by the run's label."""
    left = remaining(runs)
    waiting = {workers.submit("sweep" if run.column == SWEEP else "run", run.config, run.result): run for run in left}
    errors: dict[str, str] = {}
    done = 0
    with _progress(left, log) as shown:
        while waiting:
            ended, _ = wait(waiting, LOOK, FIRST_COMPLETED)
            shown()
            for future in ended:
                run, done = waiting.pop(future), done + 1
                if error := future.result():
                    errors[run.label] = f"{error} (log: {log_of(run.config)})"
                log(f"{done} of {len(left)}: {run.label}{', failed: ' + error if error else ''}")
            if len(errors) == done >= FEW:
                for future in waiting:
                    future.cancel()
                break
    return errors


@contextlib.contextmanager
def _progress(runs: Sequence[Run], log: Say) -> Iterator[Callable[[], None]]:
    """Context manager: yield what updates a bar of all runs' epochs, without a terminal a line at times."""
    said = time.monotonic()
    with tqdm(total=sum(run.config.train.epochs for run in runs), desc="epochs of all runs", unit="epoch",
              disable=None, dynamic_ncols=True) as bar:
        def update_bar() -> None:
            nonlocal said
            if bar.disable and time.monotonic() - said < QUIET:
                return
            done, said = sum(len(read_lines(run.folder / "metrics.jsonl")) for run in runs), time.monotonic()
            if bar.disable:
                log(f"{done} of {bar.total} epochs of all runs")
            else:
                bar.update(done - bar.n)

        yield update_bar


def seconds(runs: Sequence[Run], trial: dict[str, float], evaluations: int, probed: int, jobs: int) -> float:
    """Expected seconds of the remaining runs, from a measured epoch. probed: a run's samples of the diversity."""
    total = 0.0
    for run in remaining(runs):
        every, epochs = run.config.eval.every, run.config.train.epochs
        measured = 2 + (epochs // every if every else 0)
        samples = measured * run.config.eval.prompts + (0 if run.column == SWEEP else probed)
        total += evaluations / trial["following"] * trial["seconds"] + samples * trial["measuring"]
    return total / jobs


def duration(seconds: float) -> str:
    """Seconds in words: "about 40 s", "about 12 min", "about 3.5 h"."""
    if seconds < 100:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 6000 else f"about {seconds / 3600:.1f} h"


@dataclass
class Bench:
    """Running bench: its plan, its workers, its finished runs, and the errors of failed runs by label."""

    plan: Plan
    workers: Workers
    runs: list[Run] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    def measure(self) -> dict[str, float]:
        """Cost of an epoch of the reference; learn that of the methods where it is not known."""
        plan = self.plan
        entries = plan.unforeseen + [plan.reference] * (plan.reference not in plan.unforeseen)
        costs = trials(self.workers, [plan.trial(entry) for entry in entries])
        for entry, cost in zip(plan.unforeseen, costs):
            plan.learn(entry, int(cost["first"]), int(cost["following"]))
        return costs[entries.index(plan.reference)]

    def choose_factors(self, sweep: list[Run]) -> dict[str, tuple[float, float]]:
        """Factors (lr, clip) that the finished runs of a sweep choose, by label."""
        return collect.best_factors(sweep, self.plan.of.measured)

    def train(self, runs: list[Run]) -> None:
        """Train the runs that are left; keep the errors."""
        self.runs += runs
        self.errors |= perform(self.workers, runs, lambda line: print(line, flush=True))


def run(request: Request, jobs: int | None = None) -> None:
    """Run a bench, or what is left of it, and write FILES. jobs: runs at the same time; None: half of the cores. Raises
    UserError before anything is written for a request that cannot be run, and at the end if runs failed."""
    plan, jobs, fresh = Plan(request), jobs or max(cores() // 2, 1), not request.output.exists()
    try:
        _run(plan, jobs)
    except TooFew:  # by what was measured
        if fresh:
            atomic.remove(request.output)
        raise


def _run(plan: Plan, jobs: int) -> None:
    request = plan.request
    with places.lock_run(request.output):
        begin(request)
        with Workers(jobs, request.output) as workers:
            bench = Bench(plan, workers)
            print(f"measuring an epoch of {plan.reference.label} ...", flush=True)
            cost = bench.measure()
            published, sweep = plan.published_runs(), plan.sweep()
            # What follows a sweep, as far as it is known; of methods without one yet, runs unlike the published.
            unknown = {run.entry.label: (max(FACTORS), 1.0) for run in sweep}
            likely = plan.confirming(unknown | bench.choose_factors(sweep))
            likely += plan.tuned_runs(unknown | bench.choose_factors([*sweep, *likely]))
            _announce(plan, [*published, *sweep, *likely], cost, jobs, workers.threads)
            bench.train(sweep)
            bench.train(published)
            bench.train(confirming := plan.confirming(bench.choose_factors(sweep)))
            bench.train(plan.tuned_runs(bench.choose_factors([*sweep, *confirming])))
        _finish(bench)


def _announce(plan: Plan, runs: list[Run], cost: dict[str, float], jobs: int, threads: int) -> None:
    from flowgrpo.tools.bench.probe import PROMPTS, SAMPLES

    left, request = remaining(runs), plan.request
    expected = duration(seconds(runs, cost, request.evaluations, (2 * request.points + 1) * PROMPTS * SAMPLES, jobs))
    kept = len(runs) - len(left)
    print(f"{request.model}: {quantity(len(plan.entries), 'method')}, {quantity(len(left), 'run')} of "
          f"{request.evaluations:,} evaluations{f' ({kept} more finished)' if kept else ''}, {jobs} at a time with "
          f"{quantity(threads, 'thread')} each: {expected}", flush=True)


def _finish(bench: Bench) -> None:
    """Write and print the results. Raises UserError if a run failed."""
    results, output = collect.write(bench.plan, bench.runs, bench.errors), bench.plan.request.output
    if results["methods"]:
        for name, text in (("results.md", table.markdown), ("results.csv", table.as_csv), ("results.tex", table.latex),
                           ("index.html", page.page)):
            atomic.write_text(output / name, text(results))
        page.draw(results, output / "curves.pdf")
        table.print_tables(results)
        print(", ".join(str(output / name) for name in FILES), flush=True)
    if bench.errors:
        label, error = next(iter(bench.errors.items()))
        raise UserError(f"{quantity(len(bench.errors), 'run')} failed, the first one {label}: {error}: mend it, and "
                        "the same command goes on with what is left")
