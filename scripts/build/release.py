"""Build the release of a commit into dist/, check it, and try its wheel in new environments outside of the clone.

    python scripts/build/release.py --url https://github.com/OWNER/flowgrpo     # `make release URL=...`
    python scripts/build/release.py --url ... --fill                            # before the commit that is tagged

The address fills what differs between a clone and a package index: links and images of README.md become absolute, the
metadata gets its URLs, and the notebooks install from it. `--fill` writes it into the checkout's notebooks alone, so
that Colab opens them from the tag. Needs the packages build and twine in the environment that runs it.
"""

import argparse
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "docs"))
import check_links  # noqa: E402 -- of the folder beside

ROOT = Path(__file__).parents[2]
CLONE = "python -m pip install -c constraints.txt -e .       # in a clone of this repository, Python 3.11 to 3.14"
PICTURES = (".png", ".jpg", ".svg", ".webp", ".gif")
# A run of every kind that the first page shows, small enough for two minutes on two cores.
SMALL = ("--train.epochs=1", "--train.prompts=2", "--train.group=4", "--eval.prompts=4", "--eval.steps=2")
TRIED = (("--help",), ("constraints",), ("docs", "rewards"), ("list", "recipes"), ("check", "starter"),
         ("check", "sdxl_24gb", "--gpu", "4090"), ("train", "starter", "--output=run", *SMALL),
         ("report", "run/starter"), ("export", "run/starter"))
LICENCES = ("LICENSE", "flowgrpo/data/packaged/LICENCES.md", "flowgrpo/starter/LICENCES.md")
CLICKS = 3


def exported(folder: Path) -> Path:
    """Unpack HEAD into `folder`, without what git ignores. SystemExit where the checkout has changes."""
    if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True).stdout:
        sys.exit("release: got a checkout with changes, expected a commit: commit or stash them")
    packed = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="tar")
    return folder


def absolute(text: str, url: str, tag: str) -> str:
    """README with links and images of `tag` at `url`, and the line that installs the release beside the clone's."""
    def link(found: re.Match[str]) -> str:
        opening, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found.group()
        kind = "raw" if target.endswith(PICTURES) else "blob"
        return f"{opening}({url}/{kind}/{tag}/{target})"

    assert CLONE in text, f"README.md lost its line {CLONE!r}"
    user = f"python -m pip install flowgrpo=={tag[1:]}"
    return re.sub(r"(\])\(([^()\s]+)\)", link, text.replace(CLONE, f"{user:<52}# or, in a clone:\n{CLONE}"))


def version_of(source: Path) -> str:
    """Version of a tree. SystemExit where its changelog or citation has another one."""
    [version] = re.findall(r'^__version__ = "(.+)"$', (source / "flowgrpo" / "version.py").read_text(encoding="utf-8"),
                           re.M)
    for name, line in (("CHANGELOG.md", f"## {version} "), ("CITATION.cff", f"version: {version}\n")):
        if f"\n{line}" not in (source / name).read_text(encoding="utf-8"):
            sys.exit(f"release: got {name} without the line {line.strip()!r} of flowgrpo/version.py: write it")
    return version


def fill_notebooks(source: Path, url: str, tag: str) -> None:
    """Write the address of `tag` into the line of each notebook that installs flowgrpo."""
    for notebook in sorted((source / "examples").glob("*.ipynb")):
        text, count = re.subn(r'REPOSITORY = \\"[^"]*\\"', f'REPOSITORY = \\\\"git+{url}@{tag}\\\\"',
                              notebook.read_text(encoding="utf-8"))
        assert count == 1, f"{notebook.name} lost its line REPOSITORY = "
        notebook.write_text(text, encoding="utf-8")


def prepare(source: Path, url: str) -> str:
    """Fill in the address of an exported tree; return its version. SystemExit where a link of README leads nowhere."""
    version = version_of(source)
    readme = source / "README.md"
    readme.write_text(absolute(readme.read_text(encoding="utf-8"), url, f"v{version}"), encoding="utf-8")
    if faults := check_links.of_address(readme.read_text(encoding="utf-8"), f"{url}/(?:blob|raw)/v{version}/", source):
        sys.exit("release: README.md has links that lead nowhere: " + ", ".join(faults))
    fill_notebooks(source, url, f"v{version}")
    pages = f"{url}/blob/v{version}"
    urls = "\n".join(("[project.urls]", f'Repository = "{url}"', f'Documentation = "{pages}/docs/index.md"',
                      f'Changelog = "{pages}/CHANGELOG.md"', f'Issues = "{url}/issues"'))
    project = source / "pyproject.toml"
    project.write_text(project.read_text(encoding="utf-8").replace("[project.scripts]", f"{urls}\n\n[project.scripts]"),
                       encoding="utf-8")
    return version


def contents(wheel: Path) -> dict[str, str]:
    """SHA-256 of every file of a wheel; its record, which hashes the others, is left out."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()
                if not name.endswith("/RECORD")}


def run(*command: str | Path, cwd: Path) -> None:
    """Run a command without the clone on its path; it prints what it prints. SystemExit where it fails."""
    print("release:", *command, flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if (code := subprocess.run(command, cwd=cwd, env=environment).returncode) != 0:
        sys.exit(f"release: exit code {code}")


def build(source: Path, output: Path) -> Path:
    """Build sdist and wheel, check that pip makes the same wheel, and both files' metadata; return the wheel."""
    run(sys.executable, "-m", "build", "--outdir", output, source, cwd=source)
    [wheel] = output.glob("*.whl")
    with tempfile.TemporaryDirectory() as other:
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", other, source, cwd=source)
        [same] = Path(other).glob("*.whl")
        built, by_pip = contents(wheel), contents(same)
    if different := sorted(name for name in built.keys() | by_pip.keys() if built.get(name) != by_pip.get(name)):
        sys.exit(f"release: the wheel out of the sdist and pip's differ in {', '.join(different)}")
    if lost := [name for name in LICENCES if not any(at.endswith(f".dist-info/licenses/{name}") for at in built)]:
        sys.exit(f"release: the wheel has no {', '.join(lost)}: see license-files of pyproject.toml")
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(output.iterdir()), cwd=source)
    return wheel


def taste(flowgrpo: Path, folder: Path) -> None:
    """A short session of `flowgrpo taste` over HTTP. SystemExit unless it ends in order with its votes as pairs.

    So few clicks are no evidence of a taste: the session trains nothing, and its exit code is 3.
    """
    print(f"release: {flowgrpo} taste, {CLICKS} clicks", flush=True)
    session = subprocess.Popen([flowgrpo, "taste", "starter_consistency", "--minutes=30", "--port=0", "--output=mine"],
                               cwd=folder, stdout=subprocess.PIPE, text=True)
    assert session.stdout is not None
    address = next((found[0] for line in session.stdout if (found := re.match(r"http://\S+", line))), None)
    if address is None:
        sys.exit("release: flowgrpo taste printed no address")

    def ask(path: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(address + path, body, {"Content-Type": "application/json"})
        return json.loads(urllib.request.urlopen(request, timeout=60).read())

    state = ask("state")
    while state["live"] and state["clicks"] < CLICKS:
        if (question := state["question"]) is None:
            time.sleep(0.2)
            state = ask("state")
            continue
        shown = [*range(question["count"])]
        for place in shown:
            assert urllib.request.urlopen(f"{address}{question['name']}/{place}", timeout=60).read(4) == b"\x89PNG"
        state = ask("vote", {"question": question["name"], "shown": shown, "choice": 0})
    ask("finish", {})
    print(session.stdout.read(), end="", flush=True)
    votes = len((folder / "mine" / "pairs.jsonl").read_text(encoding="utf-8").splitlines())
    if session.wait() != 3 or state["clicks"] != CLICKS or votes != 3 * CLICKS:  # of four images a click
        sys.exit(f"release: taste ended with exit code {session.returncode}, {state['clicks']} clicks, {votes} pairs")


def try_wheel(wheel: Path, python: str, folder: Path, *, demo: bool) -> Path:
    """Install the wheel with its own constraints into a new environment in `folder`, run its commands there, and
    return the environment's commands."""
    run(python, "-m", "venv", folder / "env", cwd=folder)
    with zipfile.ZipFile(wheel) as archive:
        (folder / "constraints.txt").write_bytes(archive.read("flowgrpo/constraints.txt"))
    bin = folder / "env" / "bin"
    run(bin / "python", "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt", wheel, cwd=folder)
    for arguments in (*TRIED, *((("demo",),) if demo else ())):
        run(bin / "flowgrpo", *arguments, cwd=folder)
    taste(bin / "flowgrpo", folder)
    return bin


def test_sdist(output: Path, bin: Path, folder: Path) -> None:
    """Run the fast tests of the unpacked sdist in an environment that has the wheel."""
    [packed] = output.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    source = folder / packed.name.removesuffix(".tar.gz")
    run(bin / "python", "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt", f"{source}[test,docs]",
        cwd=folder)
    run(bin / "python", "-m", "pytest", "-n", "2", "--dist", "loadgroup", "--tier", "fast", cwd=source)


def main() -> None:
    """Read the arguments, and build, check and try the release."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="address, such as https://github.com/OWNER/flowgrpo")
    parser.add_argument("--fill", action="store_true", help="write the address into the checkout's notebooks, and end")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters to try the wheel on")
    parser.add_argument("--demo", action=argparse.BooleanOptionalAction, default=True, help="run the whole demo too")
    parser.add_argument("--tests", action="store_true", help="run the sdist's fast tests too, on the first interpreter")
    given = parser.parse_args()
    url = given.url.rstrip("/")
    if given.fill:
        fill_notebooks(ROOT, url, f"v{version_of(ROOT)}")
        return
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary, "source")
        source.mkdir()
        version = prepare(exported(source), url)
        shutil.rmtree(given.output, ignore_errors=True)
        wheel = build(source, given.output.resolve())
    for place, python in enumerate(given.python):
        with tempfile.TemporaryDirectory() as temporary:
            bin = try_wheel(wheel, python, Path(temporary), demo=given.demo)
            if given.tests and place == 0:
                test_sdist(given.output, bin, Path(temporary))
    sizes = ", ".join(f"{file.name} {file.stat().st_size / 1e6:.1f} MB" for file in sorted(given.output.iterdir()))
    print(f"release: flowgrpo {version}: {sizes}")


if __name__ == "__main__":
    main()
