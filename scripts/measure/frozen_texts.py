"""Record the texts that a redesign must not change, and compare two records.

    python scripts/measure/frozen_texts.py record FOLDER           # lists, keys and resolved recipes
    python scripts/measure/frozen_texts.py compare BEFORE AFTER    # exit code 1 where they differ
    PYTHONPATH=scripts/measure python -m pytest -p frozen_texts --refusals FOLDER/refusals.txt tests

The last one records the messages of all errors that the tests expect.
`scripts/measure/compare_features.py` compares the bits of every feature.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def record_texts(folder: Path) -> None:
    """Write the lists that commands print and the resolved configuration of every recipe into a folder."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "NO_COLOR": "1"}
    for name in ("methods", "rewards", "recipes"):
        command = [sys.executable, "-m", "flowgrpo", "list", name]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment)
        (folder / f"list_{name}.txt").write_text(ended.stdout + ended.stderr)
    sys.path.insert(0, str(ROOT))
    from flowgrpo.config import load
    from flowgrpo.config.schema import Config
    from flowgrpo.errors import UserError

    resolved = []
    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        try:
            config = load(str(path)).model_dump(mode="json")
        except UserError:  # a file of other programs' settings, or a part of a recipe
            continue
        resolved.append(f"{path.relative_to(ROOT)} {json.dumps(config, sort_keys=True)}")
    (folder / "recipes.txt").write_text("\n".join(resolved) + "\n")
    keys = json.dumps(Config.model_json_schema(), indent=1, sort_keys=True, default=str)
    (folder / "keys.txt").write_text(keys)


def compare(before: Path, after: Path) -> int:
    """Print what differs between two records. Returns the number of differences."""
    differences = 0
    for path in sorted(before.iterdir()):
        other = after / path.name
        if not other.exists():
            continue
        one = set(path.read_text().splitlines())
        two = set(other.read_text().splitlines())
        changed = [f"- {line}" for line in sorted(one - two)] + [f"+ {line}" for line in sorted(two - one)]
        print(f"{path.name}: {len(changed)} differences", *changed, sep="\n    ")
        differences += len(changed)
    return differences


def pytest_addoption(parser: Any) -> None:
    """Add --refusals FILE to pytest: the file gets every message that `pytest.raises` caught."""
    parser.addoption("--refusals", default="refusals.txt")


def pytest_configure(config: Any) -> None:
    """Record the messages of the errors that `pytest.raises` catches, without paths and times."""
    from _pytest.raises import RaisesExc

    path = Path(config.getoption("--refusals")).resolve()
    original = RaisesExc.__exit__

    def leave(self: Any, kind: Any, error: Any, trace: Any) -> Any:
        if error is not None:
            text = re.sub(r"(/tmp|/var)/\S+|0x[0-9a-f]+|\d+\.\d+ s", "…", " ".join(f"{kind.__name__}: {error}".split()))
            with path.open("a") as file:
                file.write(text + "\n")
        return original(self, kind, error, trace)

    RaisesExc.__exit__ = leave  # type: ignore[method-assign]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    writer = actions.add_parser("record")
    writer.add_argument("folder", type=Path)
    reader = actions.add_parser("compare")
    reader.add_argument("before", type=Path)
    reader.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.action == "compare":
        return int(compare(options.before, options.after) > 0)
    options.folder.mkdir(parents=True, exist_ok=True)
    record_texts(options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
