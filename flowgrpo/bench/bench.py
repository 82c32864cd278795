"""Bench, from its first check to its page."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowgrpo.bench import collect, page, table
from flowgrpo.bench.plan import FACTORS, Plan, Request, Run, begin
from flowgrpo.bench.schedule import Workers, cores, duration, perform, remaining, seconds, trials
from flowgrpo.errors import UserError
from flowgrpo.nouns import counted
from flowgrpo.storage import atomic, lock


@dataclass
class Bench:
    """Running bench: its plan, its workers, its finished runs, and the errors of failed runs by label."""

    plan: Plan
    workers: Workers
    runs: list[Run] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    def measure(self) -> dict[str, float]:
        """Return the cost of an epoch of the reference; learn that of the methods where it is not known."""
        plan = self.plan
        entries = plan.unforeseen + [plan.reference] * (plan.reference not in plan.unforeseen)
        costs = trials(self.workers, [plan.trial(entry) for entry in entries])
        for entry, cost in zip(plan.unforeseen, costs):
            plan.learn(entry, int(cost["first"]), int(cost["following"]))
        return costs[entries.index(plan.reference)]

    def chosen(self, sweep: list[Run]) -> dict[str, tuple[float, float]]:
        """Return the factors (lr, clip) that the finished runs of a sweep choose, by label."""
        return collect.best_factors(sweep, self.plan.of.measured)

    def train(self, runs: list[Run]) -> None:
        """Train the runs that are left; keep the errors."""
        self.runs += runs
        self.errors |= perform(self.workers, runs, lambda line: print(line, flush=True))


def run(request: Request, jobs: int | None = None) -> None:
    """Run a bench, or what is left of it, and write results.md, results.json and index.html.

    jobs: runs at the same time; None: half of the cores.
    Raises UserError before anything is written for a request that cannot be run, and at the end if runs failed.
    """
    plan, jobs = Plan(request), jobs or max(cores() // 2, 1)
    with lock.held(request.output):
        begin(request)
        with Workers(jobs, request.output) as workers:
            bench = Bench(plan, workers)
            print(f"measuring an epoch of {plan.reference.label} ...", flush=True)
            cost = bench.measure()
            published, sweep = plan.published(), plan.sweep()
            _announce(plan, [*published, *sweep, *_likely(bench, sweep)], cost, jobs, workers.threads)
            bench.train(sweep)
            bench.train(published)
            bench.train(confirming := plan.confirming(bench.chosen(sweep)))
            bench.train(plan.tuned(bench.chosen([*sweep, *confirming])))
        _finish(bench)


def _likely(bench: Bench, sweep: list[Run]) -> list[Run]:
    """Return what follows a sweep, as far as it is known; of methods without one yet, runs unlike the published."""
    unknown = {run.entry.label: (max(FACTORS), 1.0) for run in sweep}
    confirming = bench.plan.confirming(unknown | bench.chosen(sweep))
    return [*confirming, *bench.plan.tuned(unknown | bench.chosen([*sweep, *confirming]))]


def _announce(plan: Plan, runs: list[Run], cost: dict[str, float], jobs: int, threads: int) -> None:
    from flowgrpo.bench.probe import PROMPTS, SAMPLES

    left, request = remaining(runs), plan.request
    expected = duration(seconds(runs, cost, request.evaluations, (2 * request.points + 1) * PROMPTS * SAMPLES, jobs))
    kept = len(runs) - len(left)
    print(f"{request.model}: {counted(len(plan.entries), 'method')}, {counted(len(left), 'run')} of "
          f"{request.evaluations:,} evaluations"
          f"{f' ({kept} more finished)' if kept else ''}, {jobs} at a time with {counted(threads, 'thread')} each: "
          f"{expected}",
          flush=True)


def _finish(bench: Bench) -> None:
    """Write and print the results. Raises UserError if a run failed."""
    results, output = collect.write(bench.plan, bench.runs, bench.errors), bench.plan.request.output
    if results["methods"]:
        atomic.write_text(output / "results.md", table.markdown(results))
        atomic.write_text(output / "index.html", page.page(results))
        table.shown(results)
        print(f"{output / 'results.md'}, {output / 'results.json'}, {output / 'index.html'}", flush=True)
    if bench.errors:
        label, error = next(iter(bench.errors.items()))
        raise UserError(f"{counted(len(bench.errors), 'run')} failed, the first one {label}: {error}: mend it, and "
                        "the same "
                        "command goes on with what is left")
