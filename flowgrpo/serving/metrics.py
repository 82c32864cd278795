"""Metrics of a reward server in Prometheus' text form."""

from __future__ import annotations

from collections import Counter

KIND = "text/plain; version=0.0.4; charset=utf-8"
BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)  # seconds


class Metrics:
    """Counts of scoring requests.

    in_flight: begun and not answered yet. queue: complete ones that wait for their turn.
    """

    def __init__(self) -> None:
        self.in_flight = self.queue = 0
        self._statuses: Counter[int] = Counter()
        self._within = [0] * len(BOUNDS)
        self._seconds = 0.0

    def add(self, status: int, seconds: float) -> None:
        """Count an answered request. seconds: from its headers to its answer."""
        self._statuses[status] += 1
        self._seconds += seconds
        for place, bound in enumerate(BOUNDS):
            self._within[place] += seconds <= bound

    def text(self) -> str:
        """Return all metrics."""
        count = sum(self._statuses.values())
        lines = ["# TYPE flowgrpo_reward_requests_total counter",
                 *(f'flowgrpo_reward_requests_total{{status="{status}"}} {number}'
                   for status, number in sorted(self._statuses.items())),
                 "# TYPE flowgrpo_reward_in_flight gauge", f"flowgrpo_reward_in_flight {self.in_flight}",
                 "# TYPE flowgrpo_reward_queue_length gauge", f"flowgrpo_reward_queue_length {self.queue}",
                 "# TYPE flowgrpo_reward_seconds histogram",
                 *(f'flowgrpo_reward_seconds_bucket{{le="{bound:g}"}} {number}'
                   for bound, number in zip(BOUNDS, self._within)),
                 f'flowgrpo_reward_seconds_bucket{{le="+Inf"}} {count}',
                 f"flowgrpo_reward_seconds_sum {self._seconds:.6f}", f"flowgrpo_reward_seconds_count {count}"]
        return "\n".join(lines) + "\n"
