"""Commit that a script's numbers are of."""

import subprocess
from pathlib import Path


def commit(folder: Path = Path(__file__).parent) -> str:
    """Return the short commit of a folder's repository, with `-dirty` where files differ; "unknown" without git."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
