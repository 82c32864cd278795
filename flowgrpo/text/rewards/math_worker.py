"""Process that runs math-verify for `math_answer.MathAnswer`: `math_worker.py MEMORY_IN_MIB SECONDS`.

It prints "ready", or the reason why it is not. Then it answers each line [key, answer] with "yes" or "no", and [key,
null] with whether the key is readable. It ends with its standard input, and by itself if a question takes much too
long.
"""

from __future__ import annotations

import json
import os
import signal
import sys


def is_correct(key: str, answer: str | None) -> bool:
    """True if an answer equals the key, or, for None, if the key is readable."""
    from math_verify import parse, verify

    reference = parse(key, fallback_mode="no_fallback", parsing_timeout=None)
    if answer is None or not reference:
        return bool(reference)
    return verify(reference, parse(answer, parsing_timeout=None), timeout_seconds=None)


def main(memory: int, seconds: float) -> None:
    """Answer line after line of standard input; memory: MiB at most, seconds: for one answer."""
    log, sys.stdout = sys.stdout, sys.stderr  # packages' prints must not count as answers
    try:
        import math_verify  # noqa: F401  (slow import)
    except ImportError as error:
        print(json.dumps(f"it cannot import math_verify: {error}"), file=log, flush=True)
        return
    _limit(memory * 2**20)
    print(json.dumps("ready"), file=log, flush=True)
    for line in sys.stdin:
        _end_after(seconds + 10)
        try:
            right = is_correct(*json.loads(line))
        except Exception:  # untrusted text can raise anything
            right = False
        _end_after(0)
        print(json.dumps("yes" if right else "no"), file=log, flush=True)


def _limit(size: int) -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    except (ImportError, OSError, ValueError):  # a system without this limit
        pass


def _end_after(seconds: float) -> None:
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


if __name__ == "__main__":
    here = os.path.dirname(os.path.realpath(__file__))  # keeps packages from importing our modules in place of theirs
    sys.path[:] = [place for place in sys.path if os.path.realpath(place) != here]
    main(int(sys.argv[1]), float(sys.argv[2]))
