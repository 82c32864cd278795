"""The documents say what the code does: keys, presets, parts and tests that they name exist."""

import json
import re
import runpy
import shlex
from pathlib import Path

import build_docs
import check_prose
import concepts_code
import pytest
import yaml

from flowgrpo import methods
from flowgrpo.cli import options
from flowgrpo.config import load
from flowgrpo.data.prompts import load_prompts
from flowgrpo.methods import keys_read, overlay, registry
from flowgrpo.policies import build
from tests.fuzz.targets import TARGETS
from tests.helpers import loop
from tests.helpers.commands import commands, leaf

ROOT = Path(__file__).parent.parent


FAMILIES = {file.name: file.read_text(encoding="utf-8") for file in sorted((ROOT / "docs" / "methods").glob("*.md"))}
INDEX = FAMILIES.pop("index.md")
SECTIONS = {part.split("\n")[0]: (file, part) for file, text in FAMILIES.items()
            for part in re.split("^## ", text, flags=re.M)[1:]}
PAGES = {name: text for name, (_, text) in SECTIONS.items()}
KINDS = {"flow": build.PIPELINE, "tokens": build.CAUSAL_LM, "masks": build.MASKED_LM,
         "image tokens": build.IMAGE_TOKENS}
INFERENCE = {"rlg"}  # no presets: nothing is trained
PRESETS = {name: text for name, text in PAGES.items() if name not in INFERENCE}


@pytest.mark.parametrize("target", build_docs.PAGES, ids=lambda path: path.name)
def test_generated_pages_are_current(target):
    assert target.read_text(encoding="utf-8") == build_docs.PAGES[target](), "run scripts/docs/build_docs.py"


def test_a_preset_without_a_section_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr(build_docs, "METHODS", ROOT / "docs" / "nowhere")
    with pytest.raises(SystemExit, match="the preset mix_grpo has no section: write `## mix_grpo` with its"):
        build_docs.page_of("mix_grpo")


def test_parts_presets_and_tables():
    page = (ROOT / "docs" / "reference" / "parts.md").read_text(encoding="utf-8")
    assert registry.MODULES.keys() == build_docs.PLACES.keys()
    assert [name for name in registry.TYPES if f"\n- `{name}`" not in page] == []
    assert PRESETS.keys() == methods.PRESETS.keys() and len(FAMILIES) <= 12
    assert [name for name, text in PAGES.items() if len(text.splitlines()) > 75] == []
    assert [name for name in methods.PRESETS if f"- [`{name}`]({SECTIONS[name][0]}#{name}): " not in INDEX] == []
    assert [name for name in INFERENCE if f"[`{name}`]({SECTIONS[name][0]}#{name})" not in INDEX] == []
    # Lay each over a method of pipelines, or over one of language models.
    text = (ROOT / "docs" / "credit.md").read_text(encoding="utf-8")
    shown = [yaml.safe_load(code) for line in re.findall(r"^- .*(?:\n  .*)*", text, re.M)
             for code in re.findall(r"`(\{\w+: \{.*?\})`", line)]
    assert len(shown) > 40
    for parts in shown:
        method = methods.preset("mix_grpo")
        method = method if method.parts().keys() >= parts.keys() else methods.preset("grpo")
        assert overlay.with_parts(method, parts) != method, parts


@pytest.mark.parametrize("name", PRESETS)
def test_a_section_has_its_papers_title_a_sentence_a_formula_and_the_command_of_its_recipe(name):
    heading, title, sentence, *_ = PRESETS[name].split("\n\n")
    assert heading == name and re.fullmatch(r"\[.{15,}\]\(https://arxiv\.org/abs/\d{4}\.\d{5}\)", title)
    assert re.match(r"[A-Z].*(?:[.:]|to|\*\*)$", sentence, re.S) and re.search(r"\$.*[=<>\\].*\$", PRESETS[name], re.S)
    assert f"```yaml\n# flowgrpo train {name}.yaml" in PRESETS[name]


def test_counts_of_the_text_are_those_of_what_they_count():
    """Pipeline classes of the first table of docs/pipelines.md, without their variants; kinds of generated inputs."""
    first = (ROOT / "docs" / "pipelines.md").read_text(encoding="utf-8").partition("Not supported:")[0]
    classes = set(re.findall(r"\w+Pipeline\b", "".join(re.findall(r"^\|.*\|.*\|(.*)\|$", first, re.M))))
    assert f"[{len(classes)} pipeline classes]" in (ROOT / "README.md").read_text(encoding="utf-8")
    kinds = f"generated inputs of {len(TARGETS)} kinds"
    assert kinds in (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")


def test_the_readme_the_tour_and_the_pages():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 110
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    assert [str(page) for page in pages if f": {page}\n" not in site] == []
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert tour_faults(page) == []
    for right, wrong, fault in (("  storage/ ", "  stores/ ", ["stores/", "storage/"]),
                                ("`STEPS` of", "`STEP` of", ["STEP"]),
                                ("#a-feature", "#features", ["#features"]),
                                ("(docs/pipelines.md)", "(docs/pipes.md)", ["docs/pipes.md"])):
        assert page.count(right) and tour_faults(page.replace(right, wrong)) == fault


@pytest.mark.parametrize("name", PRESETS)
def test_the_recipe_of_a_page_works(name, tmp_path):
    [block] = re.findall(r"```yaml\n(.*?)```", PRESETS[name], re.S)
    (tmp_path / "recipe.yaml").write_text(block)
    recipe = load(tmp_path / "recipe.yaml")
    host = methods.preset(recipe.method)
    process = next(process for process in KINDS if host.fits(process))
    assert name in recipe.method.split("+") and recipe.parts
    assert recipe.model.startswith("starter") or process == "masks"
    drawn = process == "flow" and recipe.preferences is None
    assert ({"steps", "group"} if drawn else {"group"}) <= recipe.train.model_fields_set
    keys_read.check(loop.setup(recipe, KINDS[process]))


def snippets() -> list[tuple[str, str]]:
    """(preset, its `parts: {...}`) of every page's text; those of the index are of mix_grpo."""
    texts = [(name, re.sub(r"```.*?```", "", text, flags=re.S)) for name, text in [*PAGES.items(), ("mix_grpo", INDEX)]]
    return [(name, found) for name, text in texts for found in re.findall(r"parts: \{(?:[^{}]|\{[^{}]*\})*\}", text)]


@pytest.mark.parametrize("name, snippet", snippets())
def test_the_parts_that_are_shown_can_be_set(name, snippet):
    method = methods.preset(name)
    assert overlay.with_parts(method, yaml.safe_load(snippet)["parts"]) != method


def formulas() -> list[tuple[str, str]]:
    """(page, LaTeX) of every formula, in a line or in a block."""
    found = []
    for page in (ROOT / "docs").rglob("*.md"):
        text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
        assert text.count("$$") % 2 == 0, page
        pairs = re.findall(r"\$\$(.*?)\$\$|\$([^$]+)\$", text, re.S)
        found += [(page.name, latex) for pair in pairs for latex in pair if latex]
    return found


def test_scripts_formulas_and_generator_notes():
    folder = ROOT / "scripts"
    named = re.findall(r"^\| `([\w/]+\.\w+)` \| \w", (folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    there = [str(path.relative_to(folder)) for path in folder.glob("*/*") if path.suffix in (".py", ".sh", ".yaml")]
    assert sorted(named) == sorted(there) and len(there) > 80
    assert [path.name for path in folder.iterdir() if path.is_file()] == ["README.md"]
    # `docs_site.py` writes them as MathML when the site is built, each formula between `qquad` for itself.
    assert len(formulas()) > 100
    for page, latex in formulas():
        for part in latex.split("\\qquad"):
            plain = re.sub(r"\\[{}]", "", part)
            assert plain.count("{") == plain.count("}") and len(re.findall(r"\\left\b", part)) == len(
                re.findall(r"\\right\b", part)) and "$" not in part, (page, part)
    texts = {str(page): page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md")}
    assert [page for page, text in texts.items() if "::test_" in text] == []
    assert {Path(page).name for page, text in texts.items() if "do not edit" in text[:600]} == set()


def test_pages_and_what_the_package_says_have_the_words_of_the_field(capsys):
    assert check_prose.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize("name, text, found", [
    ("cli.py", 'x = typer.Option(help="Pictures per prompt.")', ["'Pictures', expected 'image'"]),
    ("cli.py", '@app.command("a")\ndef a():\n    """Draw an image."""', ["'Draw', expected 'sample, generate'"]),
    ("errors.py", 'raise UserError(f"{x} is drawn: set image.height")', ["'drawn', expected 'sample, generate'"]),
    ("config.py", 'x = Field(0, description="texts, see `draws`")', ["'texts', expected 'completions, prompts'"]),
    ("evaluation/report/page.py", '"""Pictures."""\nx = "was only watched"', ["'watched', expected 'eval-only'"]),
    ("report.html", "<p>one standard deviation of it</p>", ["'deviation', expected 'std'"]),
    ("recipe.yaml", "# 96 pictures\nimage: {height: 64}", ["'pictures', expected 'image'"]),
    ("other.py", '"""Pictures."""\nx = "drawn"  # alone', [])])
def test_a_private_word_that_a_user_reads_is_found(name, text, found, tmp_path, monkeypatch):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
    monkeypatch.setattr(check_prose, "ROOT", tmp_path)
    assert [line.partition(": got ")[2] for line in check_prose.private(name)] == found


def test_every_promise_has_tests_that_exist():
    """docs/data/promises.tsv: kind (a promise of the page, a detail, a mended fault), what, and its tests."""
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    flat = " ".join(page.split())
    table = (ROOT / "docs" / "data" / "promises.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in table.splitlines()]
    assert [what for kind, what, _ in rows if kind == "promise" and f"- {what}" not in flat] == []
    assert page.count("\n- ") >= sum(kind == "promise" for kind, *_ in rows) > 30
    for _, what, named in rows:
        assert named, what
        for file, _, test in (name.partition("::") for name in named.split(", ") if name.startswith("tests/")):
            assert f"def {test}" in (ROOT / file).read_text(encoding="utf-8"), f"{file} has no {test}"


# `python -m flowgrpo`, `accelerate launch -m flowgrpo` and `NAME=VALUE flowgrpo` too
COMMAND = r"(?:[^`\n]*-m |(?:[A-Z_]+=\S+ )+)?flowgrpo [a-z-]+(?: [^`\n]*)?"
STAND_INS = {"N": "1", "RECIPE": "configs/starter.yaml", "--KEY=VALUE": "--train.lr=1e-4", "...": None, "&": None}


def command_lines() -> list[str]:
    """Those of all code blocks; of README.md and docs/get_started also those with arguments in the text, where
    `flowgrpo check` alone is a name."""
    first = [ROOT / "README.md", *sorted((ROOT / "docs" / "get_started").glob("*.md"))]
    texts = [page.read_text(encoding="utf-8") for page in [*first, *(ROOT / "docs").rglob("*.md")]]
    blocks = [block for text in texts for language, block in re.findall(r"^```(.*?)\n(.*?)^```$", text, re.S | re.M)
              if not language]
    plain = "\n".join(re.sub(r"^```.*?^```", "", text, flags=re.S | re.M) for text in texts[:len(first)])
    inline = [line for line in re.findall(f"`({COMMAND})`", plain) if leaf(line.partition("flowgrpo ")[2].split())[1]]
    return inline + [line for block in blocks for line in re.findall(f"^{COMMAND}(?:#.*)?$", block, re.M)]


def test_command_lines_are_found():
    assert {leaf(line.split()[1:])[0] for line in command_lines() if line.startswith("flowgrpo ")} == {
        "demo", "train", "check", "sample", "eval", "report", "export", "push", "new", "list methods", "list rewards",
        "list parts", "list prompts", "list runs", "compare grid", "compare vote", "compare methods", "reward score",
        "reward train", "reward serve", "reward label", "prompts encode", "prompts mix", "prompts write", "verify",
        "taste", "prepare", "reproduce"}
    assert any(line.startswith("accelerate launch") for line in command_lines())


@pytest.mark.parametrize("line", command_lines())
def test_command_lines_that_are_shown_parse(line):
    words = shlex.split(line.partition("flowgrpo ")[2], comments=True)
    name, arguments = leaf([STAND_INS.get(word, word) for word in words if STAND_INS.get(word, word)])
    context = commands()[name].make_context(name, arguments)
    if name in ("train", "prompts encode"):
        recipe, _ = options.recipe_and_options(context.params["arguments"])
        assert recipe is not None and load(ROOT / recipe if recipe.endswith(".yaml") else recipe)


def test_the_prompt_files_that_are_shown_hold_the_same(tmp_path):
    found = []
    for language, block in re.findall(r"^```(json|csv)\n(.*?)^```$", (ROOT / "docs" / "prompts.md").read_text(
            encoding="utf-8"), re.S | re.M):
        file = tmp_path / f"p.{language.replace('json', 'jsonl')}"
        file.write_text(block)
        found.append(load_prompts(file))
    lines, table = found
    assert lines == table and lines[0].metadata == {"task": "counting", "count": 2} and lines[1].negative == "blurry"


def test_scripts_and_links_lead_to_files():
    pages = [*ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "mkdocs.yml", *(ROOT / ".github").rglob("*.yml"),
             *(ROOT / "docs").rglob("*.md"), *(ROOT / "flowgrpo").rglob("*.md"), *(ROOT / "flowgrpo").rglob("*.py"),
             *(ROOT / "scripts").rglob("*.*"), *(ROOT / "configs").rglob("*.yaml")]
    for file in [page for page in pages if page.suffix != ".pyc"]:
        named = re.findall(r"(?<![\w/])scripts/[\w/]+\.(?:py|sh|json|txt|yaml)\b", file.read_text(encoding="utf-8"))
        assert [name for name in named if not (ROOT / name).is_file()
                and not (file.name == "published.py" and "convert_" in name)] == [], file
    for file in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        links = re.findall(r"\]\((?!https?:)([^)#]+)", file.read_text(encoding="utf-8"))
        assert [link for link in links if not (file.parent / link).exists()] == [], file


def tour_faults(page: str) -> list[str]:
    """Paths, links and names of the page that are not there, and folders that its tree leaves out."""
    tree = re.findall(r"```\nflowgrpo/\n(.*?)```", page, re.DOTALL)[0]
    inside = re.findall(r"(?<!\S)(\w+(?:/|\.py))(?=\s)", tree)
    paths = inside + re.findall(r"`((?:\w+/)+[\w./]*|\w+\.(?:py|md|toml|txt))`", page)
    faults = [path for path in paths
              if not any((ROOT / folder / path).exists() for folder in ("", "flowgrpo", "scripts/docs"))]
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page):
        file = ROOT / (target or "CONTRIBUTING.md")
        if not file.is_file():
            faults.append(target)
        elif anchor:
            titles = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            faults += [f"#{anchor}"] * (anchor not in {re.sub(r"[^\w ]", "", title.lower()).replace(" ", "-")
                                                       for title in titles})
    for name, path in re.findall(r"`([A-Z_]+)` of `([\w/]+\.py)`", page):
        faults += [name] * (not re.search(rf"^{name}\b", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE))
    rooms = [f"{path.name}/" for path in (ROOT / "flowgrpo").iterdir() if path.is_dir() and path.name[0] != "_"]
    roots = [f"{name}/" for name in ("configs", "docker", "docs", "examples", "scripts", "tests")]
    return faults + [room for room in rooms if room not in inside] + [root for root in roots if f"`{root}`" not in page]


def test_recipes_stay_short_and_load():
    for recipe in (ROOT / "configs").glob("*.yaml"):
        assert len(recipe.read_text().splitlines()) < 40 and load(recipe).name == recipe.stem


def test_the_tables_of_recipes_and_of_learning_rates_are_those_of_recipes_and_runs():
    """Written anew by `python scripts/docs/recipe_table.py --none`."""
    script = runpy.run_path(str(ROOT / "scripts" / "docs" / "recipe_table.py"))
    assert (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8") == script["page"]()
    # Written anew by `python scripts/measure/tune_rates.py --file docs/data/rates.json --table`.
    script = runpy.run_path(str(ROOT / "scripts" / "measure" / "tune_rates.py"))
    runs = json.loads((ROOT / "docs" / "data" / "rates.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "learning_rate.md").read_text(encoding="utf-8")
    assert script["summary"](runs) in page
    assert [run for run in runs if "dirty" in run["commit"]] == []


def test_counts_of_methods_and_launch_lines():
    """As `flowgrpo list methods` lists them; drakes is of language models."""
    from flowgrpo.cli.about import GROUPS, _presets
    recorded, finals, texts, overlays = ([row[0] for module in modules for row in _presets(module)]
                                         for modules in GROUPS.values())
    images, language = {*recorded, *finals} - {"drakes"}, {*texts, "drakes"}
    assert f"**{len(images)} methods for images and video, {len(language)} for language models, {len(overlays)} " \
        "modifiers.**" in (ROOT / "README.md").read_text(encoding="utf-8")
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "configs").rglob("*.yaml")]
    texts = [file.read_text(encoding="utf-8") for file in files]
    lines = [line for text in texts for line in re.findall("accelerate launch (-.*)", text)]
    assert len(lines) > 30
    alike = r"--multi_gpu --num_processes \d|--config_file configs/"
    assert [line for line in lines if not re.match(alike, line)] == []


def test_the_concepts_loop_and_the_gpu_table():
    """`python scripts/docs/concepts_code.py` writes it."""
    page = concepts_code.PAGE.read_text(encoding="utf-8")
    assert len(concepts_code.BLOCK.findall(page)) == 1 and concepts_code.written(page) == page
