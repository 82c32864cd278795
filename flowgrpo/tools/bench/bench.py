"""Bench (`flowgrpo compare methods`), from its first check to its page: processes that train in parallel; the progress
of all, and what the rest will take.

models.py has the settings that all methods share, plan.py the runs (a method, a seed, a rate, a clip), their
methods and budgets, worker.py the process that trains one, probe.py what it measures of a trained one, collect.py
results.json with its statistics, table.py and page.py the pages.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

from tqdm import tqdm

from flowgrpo.config.schema import Config
from flowgrpo.cores import SET_BY_USER, count
from flowgrpo.errors import UserError
from flowgrpo.nouns import quantity
from flowgrpo.storage import atomic, places
from flowgrpo.storage.json_files import read_lines
from flowgrpo.tools.bench import collect, page, table
from flowgrpo.tools.bench.plan import FACTORS, SWEEP, Plan, Request, Run, TooFew, begin

LOOK, QUIET = 1.0, 20.0  # seconds between looks at the progress, and between its lines
FEW = 3  # failures that end the bench if nothing has succeeded
FILES = "results.md", "results.csv", "results.tex", "results.json", "index.html", "curves.pdf"


class Workers(ThreadPoolExecutor):
    """Context manager: at most `jobs` processes of `worker` at a time, one for each task. When it ends, those that are
    still training save their last whole epoch.

    threads: of each, its share of the cores, and at most OMP_NUM_THREADS if it is set.
    """

    def __init__(self, jobs: int, folder: Path):
        super().__init__(jobs)
        self.jobs, self.folder, asked = jobs, folder, os.environ.get("OMP_NUM_THREADS", "")
        self.threads = max(min(count() // jobs, int(asked) if asked.isdecimal() else count()), 1)
        self.begun: list[subprocess.Popen[str]] = []
        self.closed = False

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.closed = True
        if kind is KeyboardInterrupt:
            print("interrupted: runs are saved; the same command goes on", flush=True)
        self.shutdown(wait=False, cancel_futures=True)
        for process in self.begun:
            _end(process)
        for process in self.begun:
            process.wait()

    def do(self, kind: str, config: Config, result: Path) -> str:
        """Do a task in a process of its own; return its error in one line, empty without one."""
        recipe, log = self.folder / "tasks" / f"{config.name}.yaml", log_of(config)
        atomic.write_text(recipe, config.yaml())
        atomic.make_folder(log.parent)
        with log.open("a") as printed:
            # a session of its own: Ctrl-C reaches the bench alone, which closes the input
            process = subprocess.Popen([sys.executable, "-m", "flowgrpo.tools.bench.worker", kind, recipe, result],
                                       text=True, env=os.environ | dict.fromkeys(SET_BY_USER, str(self.threads)),
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=printed,
                                       start_new_session=True)
        self.begun.append(process)
        if self.closed:
            _end(process)
        assert process.stdout
        error = process.stdout.read()
        return f"the process ended (exit code {process.returncode})" if process.wait() else error


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.close()


def log_of(config: Config) -> Path:
    return Path(config.output).parent / "logs" / f"{config.name}.log"


def trials(workers: Workers, configs: Sequence[Config]) -> list[dict[str, float]]:
    """Cost of an epoch of each configuration, measured once. Raises UserError with the first error."""
    files = [config.folder.with_suffix(".json") for config in configs]
    waiting = {workers.submit(workers.do, "trial", config, file): config for config, file in zip(configs, files)
               if not file.is_file()}
    for future, config in waiting.items():
        if error := future.result():
            raise UserError(f"method {config.method}: {error} (log: {log_of(config)})")
    return [json.loads(file.read_text()) for file in files]


def remaining(runs: Sequence[Run]) -> list[Run]:
    """Runs without a result, each once."""
    return [run for run in {run.folder: run for run in runs}.values() if not run.result.is_file()]


def perform(workers: Workers, runs: Sequence[Run]) -> dict[str, str]:
    """Train the runs without a result, unless the first FEW all fail; return errors by the run's label. A bar shows the
    epochs of all of them, without a terminal a line at times."""
    left = remaining(runs)
    waiting = {workers.submit(workers.do, "sweep" if run.column == SWEEP else "run", run.config, run.result): run
               for run in left}
    errors: dict[str, str] = {}
    done, said = 0, time.monotonic()
    with tqdm(total=sum(run.config.train.epochs for run in left), desc="epochs of all runs", unit="epoch",
              disable=None, dynamic_ncols=True) as bar:
        while waiting:
            ended, _ = wait(waiting, LOOK, FIRST_COMPLETED)
            if not bar.disable or time.monotonic() - said >= QUIET:
                trained, said = sum(len(read_lines(run.folder / "metrics.jsonl")) for run in left), time.monotonic()
                bar.update(trained - bar.n)
                if bar.disable:
                    print(f"{trained} of {bar.total} epochs of all runs", flush=True)
            for future in ended:
                run, done = waiting.pop(future), done + 1
                if error := future.result():
                    errors[run.label] = f"{error} (log: {log_of(run.config)})"
                print(f"{done} of {len(left)}: {run.label}{', failed: ' + error if error else ''}", flush=True)
            if len(errors) == done >= FEW:
                for future in waiting:
                    future.cancel()
                break
    return errors


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


def run(request: Request, jobs: int | None = None) -> None:
    """Run a bench, or what is left of it, and write FILES. jobs: runs at the same time; None: half of the cores. Raises
    UserError before anything is written for a request that cannot be run, and at the end if runs failed."""
    plan, fresh, output = Plan(request), not request.output.exists(), request.output
    try:
        with places.lock_run(output):
            begin(request)
            with Workers(jobs or max(count() // 2, 1), output) as workers:
                runs, errors = _train(plan, workers)
            results = collect.write(plan, runs, errors)
            if results["methods"]:
                for name, text in (("results.md", table.markdown), ("results.csv", table.as_csv),
                                   ("results.tex", table.latex), ("index.html", page.page)):
                    atomic.write_text(output / name, text(results))
                page.draw(results, output / "curves.pdf")
                table.print_tables(results)
                print(", ".join(str(output / name) for name in FILES), flush=True)
    except TooFew:  # by what was measured
        if fresh:
            atomic.remove(output)
        raise
    if errors:
        label, error = next(iter(errors.items()))
        raise UserError(f"{quantity(len(errors), 'run')} failed, the first one {label}: {error}: mend it, and the same "
                        "command goes on with what is left")


def _train(plan: Plan, workers: Workers) -> tuple[list[Run], dict[str, str]]:
    """All runs of a plan, trained, and the errors of failed ones by label."""
    from flowgrpo.tools.bench.probe import PROMPTS, SAMPLES

    request, jobs = plan.request, workers.jobs
    print(f"measuring an epoch of {plan.reference.label} ...", flush=True)
    entries = plan.unforeseen + [plan.reference] * (plan.reference not in plan.unforeseen)
    costs = trials(workers, [plan.trial(entry) for entry in entries])
    for entry, cost in zip(plan.unforeseen, costs):
        plan.learn(entry, int(cost["first"]), int(cost["following"]))
    published, sweep = plan.published_runs(), plan.sweep()
    best_factors = partial(collect.best_factors, measured=plan.of.measured)
    # What follows a sweep, as far as it is known; of methods without one yet, runs unlike the published.
    unknown = {run.entry.label: (max(FACTORS), 1.0) for run in sweep}
    likely = plan.confirming(unknown | best_factors(sweep))
    likely += plan.tuned_runs(unknown | best_factors([*sweep, *likely]))
    left = remaining(runs := [*published, *sweep, *likely])
    expected = seconds(runs, costs[entries.index(plan.reference)], request.evaluations,
                       (2 * request.points + 1) * PROMPTS * SAMPLES, jobs)
    kept = len(runs) - len(left)
    print(f"{request.model}: {quantity(len(plan.entries), 'method')}, {quantity(len(left), 'run')} of "
          f"{request.evaluations:,} evaluations{f' ({kept} more finished)' if kept else ''}, {jobs} at a time with "
          f"{quantity(workers.threads, 'thread')} each: {duration(expected)}", flush=True)
    errors = perform(workers, sweep) | perform(workers, published)
    confirming = plan.confirming(best_factors(sweep))
    errors |= perform(workers, confirming)
    tuned = plan.tuned_runs(best_factors([*sweep, *confirming]))
    errors |= perform(workers, tuned)
    return [*sweep, *published, *confirming, *tuned], errors
