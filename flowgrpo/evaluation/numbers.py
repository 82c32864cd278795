"""Numbers as text: one number of decimals for all values of a reward."""

from __future__ import annotations

import math
from collections.abc import Iterable

MOST = 6  # decimals


def decimals(values: Iterable[float | None], changes: Iterable[float | None] = ()) -> int:
    """Return the decimals for a column of values: three significant digits of the largest value, two of the largest
    change, at least 3 below 10 and 1 above, at most MOST. None and NaN count for nothing."""
    largest, moved = _largest(values), _largest(changes)
    digits = 1 if largest >= 10 else max(2 - _exponent(largest), 3) if largest else 3
    return min(max(digits, 1 - _exponent(moved) if moved else 0), MOST)


def _largest(values: Iterable[float | None]) -> float:
    return max((abs(value) for value in values if value is not None and math.isfinite(value)), default=0.0)


def _exponent(value: float) -> int:
    return math.floor(math.log10(value))


def fixed(value: float | None, digits: int, sign: str = "") -> str:
    """Return a value with so many decimals, a dash for None and NaN. sign: "+" for changes."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value if round(value, digits) else 0.0:{sign if round(value, digits) else ''}.{digits}f}"


def ranged(mean: float | None, low: float | None, high: float | None, digits: int, sign: str = "") -> str:
    """Return a mean with its interval in brackets, if it has one."""
    return f"{fixed(mean, digits, sign)} {bounds(low, high, digits, sign)}".strip()


def bounds(low: float | None, high: float | None, digits: int, sign: str = "") -> str:
    """Return an interval in brackets, an empty text if there is none."""
    return "" if fixed(low, digits) == "-" else f"[{fixed(low, digits, sign)}, {fixed(high, digits, sign)}]"
