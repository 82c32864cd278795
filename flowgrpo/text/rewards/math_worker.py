"""Process that runs math-verify for `numeric.MathAnswer`: `math_worker.py MEMORY_IN_MIB SECONDS`.

It prints "ready", or the reason why it is not. Then it answers each line [key, answer] with "yes" or "no", and [key,
null] with whether the key is readable. It ends with its standard input, and by itself if a question takes much too
long.
"""

import contextlib
import json
import os
import re
import signal
import sys
from typing import Any

OPEN = re.compile(r"\s*(?:[<>\u2264\u2265\u2260]|\\(?:[lg]eq?|[lg]t|neq?)\b)")


def is_correct(key: str, answer: str | None) -> bool:
    """True if an answer equals the key, or, for None, if the key is readable."""
    from math_verify import parse, verify
    from sympy.core.relational import Relational

    reference = parse(key, fallback_mode="no_fallback", parsing_timeout=None)
    if answer is None or not reference:
        return bool(reference)
    found = parse(answer, parsing_timeout=None)
    related = isinstance(reference[0], Relational) or OPEN.match(str(reference[-1]))
    return bool(found and (related or not is_open(found)) and verify(reference, found, timeout_seconds=None))


def is_open(parsed: list[Any]) -> bool:
    """True for what math-verify takes for its right side though that is no answer: an equation still to be solved, 2x =
    18, or untrue, 17 = 18, an equation among words, and an inequality without its left side, > 18."""
    from sympy import Eq, Number
    from sympy.core.relational import Relational
    from sympy.logic.boolalg import And
    from sympy.sets.sets import Set

    text, found = str(parsed[-1]), parsed[0]
    if OPEN.match(text):
        return True
    equations = [part for part in (found.args if isinstance(found, And) else [found]) if isinstance(part, Eq)]
    for left, right in (equation.args for equation in equations):
        if left.is_number and right.is_number:
            if abs((left - right).evalf()) > max(1, abs(right.evalf())) / 100:
                return True
        elif left.free_symbols and left.atoms(Number) - {1, -1}:
            return True
    among_words = not equations and not isinstance(found, (str, Relational, Set, And))
    return among_words and "=" in re.sub(r"\{[^{}]*\}", "", text)


def main(memory: int, seconds: float) -> None:
    """Answer line after line of standard input; memory: MiB at most, seconds: for one answer."""
    log, sys.stdout = sys.stdout, sys.stderr  # packages' prints must not count as answers
    try:
        import math_verify  # noqa: F401  (slow import)
    except ImportError as error:
        print(json.dumps(f"it cannot import math_verify: {error}"), file=log, flush=True)
        return
    with contextlib.suppress(ImportError, OSError, ValueError):  # a system without this limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory * 2**20,) * 2)
    print(json.dumps("ready"), file=log, flush=True)
    for line in sys.stdin:
        _end_after(seconds + 10)
        try:
            right = is_correct(*json.loads(line))
        except Exception:  # untrusted text can raise anything
            right = False
        _end_after(0)
        print(json.dumps("yes" if right else "no"), file=log, flush=True)


def _end_after(seconds: float) -> None:
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


if __name__ == "__main__":
    here = os.path.dirname(os.path.realpath(__file__))  # keeps packages from importing our modules in place of theirs
    sys.path[:] = [place for place in sys.path if os.path.realpath(place) != here]
    main(int(sys.argv[1]), float(sys.argv[2]))
