"""What `make release` and `make docs` check before anything is built or published: versions, links, notebooks."""

import json
import shutil
import tomllib
from pathlib import Path

import check_links
import pytest
import release

from flowgrpo.version import __version__

ROOT = Path(__file__).parents[1]
URL, TAG = "https://example.org/flowgrpo", f"v{__version__}"


def test_the_version_is_that_of_changelog_and_citation(tmp_path):
    assert release.version_of(ROOT) == __version__
    (tmp_path / "flowgrpo").mkdir()
    for name in ("flowgrpo/version.py", "CHANGELOG.md", "CITATION.cff"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CITATION.cff").write_text("version: 9.9.9\n")
    with pytest.raises(SystemExit, match=f"got CITATION.cff without the line 'version: {__version__}'"):
        release.version_of(tmp_path)


def test_links_of_the_released_readme_lead_to_files_of_the_tree():
    text = release.absolute((ROOT / "README.md").read_text(encoding="utf-8"), URL, TAG)
    base = f"{URL}/(?:blob|raw)/{TAG}/"
    assert f"({URL}/raw/{TAG}/docs/images/before_after.png)" in text and f"pip install flowgrpo=={__version__}" in text
    assert check_links.of_address(text, base, ROOT) == []
    wrong = f"{text}\n[gone]({URL}/blob/{TAG}/docs/gone.md#part) [near](docs/rewards.md) [other](https://example.com/x)"
    assert check_links.of_address(wrong, base, ROOT) == [f"{URL}/blob/{TAG}/docs/gone.md#part", "docs/rewards.md"]


def test_notebooks_install_from_the_address(tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for tag in ("v1.2.3", TAG):  # an address replaces an earlier one
        release.fill_notebooks(tmp_path, URL, tag)
    notebooks = sorted((tmp_path / "examples").glob("*.ipynb"))
    assert len(notebooks) == 4
    for notebook in notebooks:
        cells = ["".join(cell["source"]) for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]]
        [install] = [cell for cell in cells if "%pip install --quiet {REPOSITORY}" in cell]
        assert f'REPOSITORY = "git+{URL}@{TAG}"' in install


def test_the_wheel_gets_the_licences_of_code_prompts_and_weights():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert tuple(project["license-files"]) == release.LICENCES
    assert [name for name in release.LICENCES if not (ROOT / name).is_file()] == []
    told = (ROOT / "flowgrpo" / "starter" / "LICENCES.md").read_text(encoding="utf-8")
    folders = [folder.name for folder in (ROOT / "flowgrpo" / "starter").iterdir()
               if folder.is_dir() and any(folder.rglob("*.safetensors"))]
    assert len(folders) == 5 and [name for name in folders if f"`{name}/`" not in told] == []


def test_links_of_a_site_lead_to_its_pages_anchors_and_images(tmp_path):
    (tmp_path / "guide").mkdir()
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "index.html").write_text('<a href="guide/#part">1</a><a href="https://example.com/gone">2</a>'
                                         '<img src="a.png"><a href="#top" id="top">3</a><a href="guide/?q=1">4</a>')
    (tmp_path / "guide" / "index.html").write_text('<h2 id="part">.</h2><a href="../">up</a>')
    assert check_links.of_site(tmp_path) == []
    (tmp_path / "guide" / "index.html").write_text('<img src="../b.png"><a href="../#gone">1</a><a href="no/">2</a>')
    assert check_links.of_site(tmp_path) == ["guide/index.html -> ../b.png", "guide/index.html -> ../#gone",
                                             "guide/index.html -> no/", "index.html -> guide/#part"]
