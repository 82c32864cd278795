"""The notebooks of examples/ in a Jupyter kernel, with few epochs, and what a cell shows."""

import json
import re
from pathlib import Path
from queue import Empty

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))
SMALL = {"EPOCHS": 2, "HELD_OUT": 2}


def small(notebook: Path) -> nbformat.NotebookNode:
    """A notebook with the small numbers."""
    read = nbformat.read(notebook, 4)
    for cell in read.cells:
        assert not cell.get("outputs")
        cell.source = re.sub(r"^(EPOCHS|HELD_OUT) = \d+", lambda line: f"{line[1]} = {SMALL[line[1]]}", cell.source,
                             flags=re.M)
    return read


def test_the_notebooks_are_found():
    assert [path.stem for path in NOTEBOOKS] == ["align", "compare_methods", "custom_reward", "language_model"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_one_bar_a_run(notebook, tmp_path):
    done = NotebookClient(small(notebook), timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    runs = [*(tmp_path / "runs").iterdir()]
    assert runs and all((run / "summary.json").is_file() for run in runs)
    [trained] = [cell for cell in done.cells if cell.cell_type == "code" and "flowgrpo.align(" in cell.source]
    shown = [output.data.get("text/html", "") for output in trained.outputs if output.output_type == "display_data"]
    bars = [html for html in shown if "<pre>training: 100%" in html]
    assert len(bars) == len(runs) and all("<polyline" in bar and "reward/" in bar for bar in bars)
    printed = "".join(output.text for output in trained.outputs if output.output_type == "stream")
    assert "epoch 1 of 2" not in printed and "saved runs/" in printed and "IProgress" not in printed


def outputs(client, code: str, on_message=lambda content: None) -> list[dict]:
    """The contents of all messages of a cell; `on_message` sees each as it comes."""
    asked, found = client.execute(code), []
    while True:
        try:
            message = client.get_iopub_msg(timeout=900)
        except Empty:
            raise AssertionError(f"no answer within 15 minutes: {found}") from None
        if message["parent_header"].get("msg_id") != asked:
            continue
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            return found
        found.append(message["content"])
        on_message(message["content"])


def test_an_error_is_one_line_a_stop_a_sentence_and_the_run_goes_on(tmp_path):
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(tmp_path))
    try:
        run = ("flowgrpo.align('starter', rewards='scene', method='flow_grpo', name='run', resume={1}, "
               "train=dict(epochs={0}, prompts=2, group=4, steps=2), eval=dict(prompts=2, steps=2))")
        wrong = outputs(client, "import flowgrpo; flowgrpo.align('starter', rewards='scen')")
        [error] = [content for content in wrong if "traceback" in content]
        [line] = error["traceback"]
        assert line.startswith("flowgrpo: error: unknown reward 'scen'")

        pressed = []

        def stop(content: dict) -> None:
            if "1/1000" in json.dumps(content) and not pressed:
                pressed.append(True)
                manager.interrupt_kernel()

        stopped = outputs(client, run.format(1000, False), stop)
        [error] = [content for content in stopped if "traceback" in content]
        assert error["traceback"] == ['flowgrpo: stopped; the same call with resume="auto" goes on from what was saved']
        outputs(client, "saved = len(open('runs/run/metrics.jsonl').readlines())")
        outputs(client, f"summary = {run.format('saved + 1', repr('auto'))}")
        shown = outputs(client, "print(summary.metrics().index[-1] - saved)")
        assert not any("traceback" in content for content in shown)
        assert shown[-1]["text"].strip().endswith("1")
        table = outputs(client, "summary")[-1]["data"]["text/html"]
        assert "<td>scene</td>" in table and "data:image/png;base64," in table
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
