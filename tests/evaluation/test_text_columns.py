"""Pages of texts with columns of one kind: which texts stand where, as Markdown and as HTML."""

import html
import shutil

import pytest

from flowgrpo.cli import main
from flowgrpo.data import prompts
from flowgrpo.errors import UserError
from flowgrpo.evaluation import columns
from flowgrpo.evaluation.columns import write_page, write_table
from flowgrpo.evaluation.pages.grid import Row
from flowgrpo.policies import checkpoints
from flowgrpo.samplers.rollout import seeder
from flowgrpo.storage import checkpoint
from flowgrpo.text.policies import engines as texts
from flowgrpo.text.policies.causal_lm import CausalLM
from tests.helpers import tiny_text as tiny
from tests.text.test_text_evaluate import SHORT, finished, save


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a checkpoint of other weights than its result."""
    folder = tmp_path_factory.mktemp("columns")
    (folder / "short.py").write_text(SHORT)
    (folder / "prompts.txt").write_text("\n".join(tiny.PROMPTS))
    lm = save(folder / "lm", tiny.model())
    found = finished(folder / "run", tiny.policy(), model=str(lm), reward=f"{folder}/short.py:short",
                     prompts=str(folder / "prompts.txt"))
    own = tiny.stir(tiny.policy(), 0.6)
    weights = {f"weights/{key}": value for key, value in own.weights.snapshot().items()}
    checkpoint.save(found / "checkpoints", 3, weights, {}, 2)
    return found


def expected(run, own: CausalLM, seed: int = 0, temperature: float = 0.0) -> list[str]:
    own.text = own.text.model_copy(update={"eval_temperature": temperature})
    asked = [prompt.text for prompt in prompts.load_prompts(run.parent / "prompts.txt")]
    of = seeder(seed, 0)
    return own.generate(own.encode(asked), own.generators(of(i, 0) for i in range(len(asked))))


def drawn(run, kind, *values, tmp_path):
    """Names of the columns with their texts."""
    written = columns.columns(run, kind, values, run.parent / "prompts.txt", 6, 0, tmp_path / "page.png")
    assert [file.name for file in written] == ["page.md", "page.html"]
    lines = [line.strip("| \n").split(" | ") for line in written[0].read_text().splitlines()[2:]]
    assert lines[-1][0] == "mean of 6 prompts, 95 % interval" and "[" in lines[-1][1]
    page = written[1].read_text()
    found = {name: [line[i].partition("<br>")[0] for line in lines[2:-1]] for i, name in enumerate(lines[0])}
    assert all(f"<p>{html.escape(text)}</p>" in page for name in found for text in found[name] if name != "prompt")
    return found


def test_checkpoints_stand_between_base_and_result(run, tmp_path):
    found = drawn(run, "checkpoints", tmp_path=tmp_path)
    assert list(found) == ["prompt", "base", "epoch 3"] and found["prompt"] == tiny.PROMPTS
    config = checkpoints.run_config(run)
    assert found["base"] == expected(run, texts.load(config, None))
    assert found["epoch 3"] == expected(run, tiny.stir(tiny.policy(), 0.6)) != found["base"]


def test_runs_and_seeds(run, tmp_path):
    other = shutil.copytree(run, run.parent / "other", dirs_exist_ok=True)
    tiny.stir(tiny.policy(), 0.9).weights.save(other)
    recipe = other / "config.yaml"
    recipe.write_text(recipe.read_text().replace("name: run\n", "name: other\n"))
    own = texts.load(checkpoints.run_config(run), run)
    found = drawn(run, "runs", str(other), tmp_path=tmp_path)
    assert list(found) == ["prompt", "base", "run", "other"] and found["run"] == expected(run, own)
    assert found["other"] == expected(run, tiny.stir(tiny.policy(), 0.9)) != found["run"]
    found = drawn(run, "seeds", "4", "5", tmp_path=tmp_path)
    assert found == {"prompt": tiny.PROMPTS, "seed 4": expected(run, own, 4, 1.0),
                     "seed 5": expected(run, own, 5, 1.0)}
    assert found["seed 4"] != found["seed 5"]


def test_what_is_of_denoisers_is_told(run, tmp_path, capsys):
    with pytest.raises(UserError, match="--columns steps: is of denoisers"):
        columns.columns(run, "steps", ["3"], None, 2, 0, tmp_path / "page.png")
    assert main(["compare", "grid", str(run), "--columns", "seeds", "--values", "1,2", "--count", "1", "--trust-run",
                 "--output",
                 str(tmp_path / "one.png")]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "one.md"), str(tmp_path / "one.html")]


def test_a_table_says_what_its_texts_say(tmp_path):
    row = Row("a|b", ["x *y*\n<b>|", "2_3"], [{"folder/f.py:right": 0.5}, {"folder/f.py:right": 1.0}])
    told = write_table(tmp_path / "page.md", "title", ["one", "two"], [row]).read_text()
    assert told == ("# title\n\n| prompt | one | two |\n| --- | --- | --- |\n"
                    "| a\\|b | x \\*y\\*<br>&lt;b&gt;\\|<br>f.py:right 0.500 | 2\\_3<br>f.py:right 1.000 |\n")
    page = write_page(tmp_path / "page.html", "title", ["one", "two"], [row]).read_text()
    assert "<p>x *y*\n&lt;b&gt;|</p>" in page and '<dd class="rose">\u25b2 1.000</dd>' in page
    assert page.index("a|b") < page.index("x *y*")


def test_hostile_names_are_text_in_a_table_and_a_page(tmp_path):
    evil = "\x1b[2J](x) | <img src=y>\n# head"
    row = Row(evil, [evil], [{evil: 0.5}])
    table = write_table(tmp_path / "page.md", evil, [evil], [row]).read_text()
    page = write_page(tmp_path / "page.html", evil, [evil], [row]).read_text()
    assert "\x1b" not in table and "<img" not in table + page and "](x)" not in table.replace("\\](x)", "")
    assert [line[:2] for line in table.splitlines()] == ["# ", "", "| ", "| ", "| "]
