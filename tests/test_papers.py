"""Tables of published settings beside our recipes': each of ours is the recipe's, and each difference has a reason."""

import re
import sys
from pathlib import Path

import pytest

from flowgrpo.config.geometry import geometry
from flowgrpo.methods import keys_read
from flowgrpo.methods.setup import Setup
from flowgrpo.policies import build

sys.path.append(str(Path(__file__).parents[1] / "scripts" / "docs"))

import paper_tables  # noqa: E402

RECIPES = [(paper, task) for paper, facts in paper_tables.papers().items() for task in facts["recipes"]]


def test_the_page_is_current():
    assert paper_tables.PAGE.read_text(encoding="utf-8") == paper_tables.page(), "run scripts/docs/paper_tables.py"


def test_every_recipe_has_its_table():
    files = {file.stem for file in paper_tables.FOLDER.glob("*.yaml")}
    assert files == {f"{paper}_{task}" for paper, task in RECIPES}


@pytest.mark.parametrize("paper, task", RECIPES)
def test_a_recipe_has_keys_that_are_read_and_shares_its_samples_among_eight(paper, task):
    config, method = paper_tables.recipe(paper, task)
    keys_read.check(Setup(config, build.PIPELINE, method))
    shape = geometry(config.train, paper_tables.GPUS)
    assert paper_tables.GPUS * shape.prompts == config.train.prompts


@pytest.mark.parametrize("paper, task, key, ours", [
    ("flow_grpo", "geneval", "train.guidance", 4.5), ("flow_grpo", "pickscore", "parts.kl.weight", 0.001),
    ("flow_grpo", "ocr", "parts.advantage.scale", "batch"), ("mix_grpo", "flux", "parts.plan.size", 4),
    ("mix_grpo", "flux", "reward", "hpsv2.1, pickscore, imagereward"), ("diffusion_nft", "ocr", "parts.lag.after", 75),
    ("diffusion_nft", "geneval", "parts.surrogate.beta", 1.0), ("diffusion_nft", "ocr", "gpus", 8)])
def test_a_value_is_that_of_the_resolved_recipe(paper, task, key, ours):
    assert paper_tables.value(key, *paper_tables.recipe(paper, task)) == ours


def test_costs_are_those_of_a_dry_run_and_what_one_gpu_cannot_do_is_said(monkeypatch):
    """246.8 s, 1,000 epochs, 8 GPUs: 68.6 h, 548 GPU-hours."""
    assert set(paper_tables.costs()) == {f"{paper}_{task}" for paper, task in RECIPES}
    text = paper_tables.cost("flow_grpo", "geneval")
    assert re.search(r" 6\d\.\d GiB each, 247 s an epoch, 69 h for 1,000 epochs, 548 GPU-hours\. That is too long "
                     "for one GPU", text)
    known = paper_tables.costs()
    known["flow_grpo_geneval"] |= {"epochs": 10}
    monkeypatch.setattr(paper_tables, "costs", lambda: known)
    with pytest.raises(ValueError, match="its costs are of 10 epochs, and it has 1000: run scripts/"):
        paper_tables.cost("flow_grpo", "geneval")


def test_a_difference_needs_a_reason(monkeypatch):
    changed = paper_tables.papers()
    row = next(row for row in changed["flow_grpo"]["rows"] if row[1] == "train.lr")
    row[2] = 1e-4
    monkeypatch.setattr(paper_tables, "papers", lambda: changed)
    with pytest.raises(ValueError, match="flow_grpo_ocr: learning rate is 0.0001 there and 0.0003 here: write why"):
        paper_tables.rows("flow_grpo", "ocr")
