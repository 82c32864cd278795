"""Workers that share a machine (pytest -n) leave each other its cores."""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, here and in subprocesses
