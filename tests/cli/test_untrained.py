"""A run that trains nothing: exit code 3, and the reason in its last line, report, card and push."""

import json

from flowgrpo.cli import main

SAID = ("Nothing was trained in 1 epoch: same.py:same gave every sample 0.5. These are the weights that the run began "
        "with.")


def test_a_constant_reward_has_an_exit_code_of_its_own(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "same.py").write_text("def same(images, prompts):\n    return [0.5] * len(prompts)\n")
    small = ["--train.epochs=1", "--train.prompts=1", "--train.group=2", "--train.steps=4", "--eval.steps=1",
             "--eval.prompts=1", "--eval.rewards=[]", "--tracker=none", "--output=runs", "--method=mix_grpo",
             "--parts={plan: {size: 1}}", "--train.updates=1", "--train.lr=1e-3"]
    assert main(["train", "starter", "--reward=same.py:same", *small]) == 3
    said, out = SAID, capsys.readouterr()
    assert out.err.splitlines()[-1] == f"flowgrpo: {said}" and said in out.out and "was aligned to" not in out.out
    run = tmp_path / "runs" / "starter"
    assert json.loads((run / "summary.json").read_text())["trained"] == {"epochs": 0, "nothing": True, "said": [said]}
    assert main(["push", "runs/starter", "me/lora", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == said
    card = (run / "README.md").read_text()
    assert card.index("Nothing was trained in 1 epoch") < card.index("was to be aligned") < card.index("## Usage")
    assert said in (run / "report.html").read_text()
