"""Trackers: name, id, configuration, metrics and samples that a run sends, and the id that a resumed run keeps."""

import importlib.machinery
import io
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flowgrpo.evaluation.report import report, snapshots
from flowgrpo.training import metrics
from tests.helpers import ffmpeg, tiny, tiny_runs, tiny_text
from tests.helpers.refusals import refused


def train(output, resume=False, **options):
    return tiny_runs.whole(tiny.config(output, train__group=3, train__prompts=1, train__save_every=1, eval__every=1,
                                       **options), resume=resume)


class Board:
    """Imitation of Weights & Biases or Trackio, as far as a run uses them; it records their calls in order."""

    def __init__(self, name: str):
        self.begun, self.logged, self.alerts, self.ended = [], [], [], 0
        self.module = ModuleType(name)
        self.module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.module.init, self.module.Image, self.module.Table = self.init, self.image, dict

    def init(self, **settings):
        self.begun.append(settings)
        return SimpleNamespace(log=lambda values, step: self.logged.append((step, values)), finish=self.finish,
                               alert=lambda **alert: self.alerts.append(alert))

    def image(self, picture, caption):
        return caption, np.asarray(picture)

    def finish(self):
        self.ended += 1

    def keys(self, *beginnings: str) -> list[tuple[int, str]]:
        return [(step, key) for step, values in self.logged for key in values if key.startswith(beginnings)]


@pytest.fixture
def board(request, monkeypatch):
    imitated = Board(request.param)
    monkeypatch.setitem(sys.modules, request.param, imitated.module)
    return imitated


def stored(folder, name: str) -> list[dict]:
    return json.loads((folder / "report" / f"{name}.json").read_text())["cards"]


@pytest.mark.parametrize("board", ["wandb"], indirect=True)
def test_weights_and_biases_gets_the_run_and_goes_on_with_it(board, tmp_path):
    train(tmp_path, tracker="wandb", name="first", train__epochs=1)
    train(tmp_path, resume=True, tracker="wandb", name="first", train__epochs=3)
    first, second = board.begun
    assert (first["project"], first["name"], first["resume"]) == ("flowgrpo", "first", "allow")
    assert len(first["id"]) == 8 and second["id"] == first["id"] and board.ended == 2
    assert [each["config"]["train"]["epochs"] for each in board.begun] == [1, 3]
    assert board.keys("reward/red/mean") == [(epoch, "reward/red/mean") for epoch in (1, 2, 3)]
    assert board.keys("before", "best", "worst", "after") == [
        (0, "before"), (1, "after"), (1, "best"), (1, "worst"), (2, "best"), (2, "worst"), (3, "after"), (3, "best"),
        (3, "worst")]
    steps = [step for step, _ in board.logged]
    assert steps == sorted(steps)  # an earlier step would be dropped
    [(_, values)] = [logged for logged in board.logged if logged[0] == 3 and "after" in logged[1]]
    for (caption, picture), card in zip(values["after"], stored(tmp_path / "first", "after"), strict=True):
        assert caption == f"{card['prompt']} (red {card['scores']['red']:.3g})"
        assert picture.shape == (16, 16, 3) and picture.dtype == np.uint8
        assert (picture == np.asarray(snapshots.content(card))).all()


@pytest.mark.parametrize("board", ["trackio"], indirect=True)
def test_trackio_knows_a_run_by_a_name_of_its_own(board, tmp_path):
    train(tmp_path, tracker="trackio", train__epochs=1)
    [begun] = board.begun
    assert begun["name"] == f"run-{json.loads((tmp_path / 'run' / 'tracker.json').read_text())['id']}"
    assert set(begun) == {"project", "name", "config", "resume"}
    count = len(stored(tmp_path / "run", "before"))
    assert board.keys("before") == [(0, f"before/{number}") for number in range(1, count + 1)] and count == 2


def test_tensorboard_gets_images_and_the_configuration(tmp_path):
    train(tmp_path, tracker="tensorboard", train__epochs=1)
    train(tmp_path, resume=True, tracker="tensorboard", train__epochs=2)
    folder = tmp_path / "run"
    events = EventAccumulator(str(folder / "events"), size_guidance={"images": 0, "scalars": 0, "tensors": 0}).Reload()
    def in_time(found):
        """Events in the order of their time: files of one second are read in the order of their names."""
        return sorted(found, key=lambda event: event.wall_time)
    assert [event.step for event in in_time(events.Scalars("reward/red/mean"))] == [1, 2]
    assert [event.step for event in in_time(events.Scalars("held_out/red"))] == [0, 1, 2]
    for tag in events.Tags()["scalars"]:
        steps = [event.step for event in in_time(events.Scalars(tag))]
        assert steps == sorted(set(steps)), tag
    assert {tag.partition("/")[0] for tag in events.Tags()["images"]} == {"before", "after", "best", "worst"}
    last = in_time(events.Images("after/1"))[-1]
    (tmp_path / "after.png").write_bytes(last.encoded_image_string)
    assert last.step == 2
    with Image.open(tmp_path / "after.png") as picture:
        assert (np.asarray(picture) == np.asarray(snapshots.content(stored(folder, "after")[0]))).all()
    texts = {tag: [event.tensor_proto.string_val[0].decode()
                   for event in in_time(events.Tensors(f"{tag}/text_summary"))]
             for tag in ("run", "config", "before/samples")}
    assert len(texts["run"]) == 2 and len({*texts["run"]}) == 1 and texts["run"][0].startswith("run (")
    assert texts["config"][-1].replace("\n    ", "\n").strip() == (folder / "config.yaml").read_text().strip()
    assert texts["before/samples"][0].startswith(f"1. {stored(folder, 'before')[0]['prompt']} (red 0.")


@pytest.mark.parametrize("every, steps", [(0, [0, 2]), (1, [0, 1, 2]), (3, [0, 2])])
def test_held_out_means_are_scalars_before_and_after(every, steps, tmp_path):
    config = tiny.config(tmp_path, train__group=3, train__prompts=1, eval__every=every, tracker="tensorboard")
    summary = tiny_runs.whole(config)
    found = EventAccumulator(str(config.folder / "events")).Reload().Scalars("held_out/red")
    assert [event.step for event in found] == steps
    assert [found[0].value, found[-1].value] == pytest.approx([summary["before"]["red"], summary["after"]["red"]])


@pytest.mark.parametrize("board", ["wandb"], indirect=True)
def test_a_symptom_is_alerted_once_and_the_report_says_the_same(board, tmp_path, capsys):
    config = tiny.config(tmp_path, train__group=3, train__prompts=1, train__epochs=6, tracker="wandb")
    tiny_runs.whole(config, {"red": lambda images, prompts: [0.5] * len(prompts)})
    text = "100 % of the groups of 5 epochs have equal rewards and teach nothing: look at the prompts' difficulty, "
    [line] = [line for line in capsys.readouterr().out.splitlines() if "alert, epoch" in line]
    assert line.startswith(f"alert, epoch 5: {text}")
    [alert] = board.alerts
    assert alert["title"] == "equal rewards at epoch 5" and alert["text"].startswith(text) and alert["level"] == "WARN"
    assert f"Equal rewards: {text}" in json.dumps(report.data(config.folder)["sentences"])


@pytest.mark.parametrize("board", ["wandb", "trackio"], indirect=True)
@pytest.mark.parametrize("encoded", [True, False])
def test_a_clip_is_a_video(board, encoded, tmp_path, monkeypatch):
    if encoded:
        ffmpeg.install(tmp_path / "bin", monkeypatch)
    else:
        ffmpeg.remove(monkeypatch)
    content, ending = sent_clip(tmp_path, tracker=board.module.__name__), "mp4" if encoded else "gif"
    board.module.Video = lambda value, caption, format=None: (
        value.read() if format else Path(value).read_bytes(), caption, format or Path(value).suffix[1:])
    content()
    [(step, values)] = board.logged
    kept, caption, form = values["before"][0] if board.module.__name__ == "wandb" else values["before/1"]
    assert (step, caption, form) == (0, "a dot (red 0.5)", ending)
    assert kept == ffmpeg.BYTES if encoded else Image.open(io.BytesIO(kept)).n_frames == 3


def sender(config, sample, **card):
    """A function that sends a stored clip or text to the run's tracker."""
    accelerator = SimpleNamespace(is_main_process=True, trackers=[])
    metrics.start(accelerator, config)
    snapshots.write(config.folder / "report" / "before.json", {"cards": [card | snapshots.sample_as_json(sample)]})
    return lambda: metrics.show(accelerator, config.folder, 0, "before")


def sent_clip(folder, **options):
    """Return a function that sends a stored clip of three frames to the tracker."""
    clip = torch.tensor([0.0, 1.0, 0.2])[:, None, None, None].expand(3, 3, 8, 8)
    return sender(tiny.config(folder, **options), clip, prompt="a dot", scores={"red": 0.5})


def test_tensorboard_gets_a_clip_as_a_gif(tmp_path):
    sent_clip(tmp_path, tracker="tensorboard")()
    events = EventAccumulator(str(tmp_path / "run" / "events"), size_guidance={"images": 0}).Reload()
    [event] = events.Images("before/1")
    clip = Image.open(io.BytesIO(event.encoded_image_string))
    assert (clip.format, clip.n_frames, event.width, event.height) == ("GIF", 3, 8, 8)


@pytest.mark.parametrize("board", ["wandb"], indirect=True)
def test_texts_are_a_table(board, tmp_path):
    sender(tiny_text.config(tmp_path, tracker="wandb"), "2", prompt="1+1=", scores={"short": 0.5, "other": None})()
    assert board.logged == [(0, {"before": {"columns": ["prompt", "text"], "data": [["1+1= (short 0.5)", "2"]]}})]


@pytest.mark.parametrize("board", ["wandb"], indirect=True)
def test_a_new_run_in_a_folder_has_a_new_id_and_a_tracker_that_does_not_start_is_told(board, tmp_path):
    config = tiny.config(tmp_path, tracker="wandb")
    first = metrics.identity(config, resumed=False)
    assert metrics.identity(config, resumed=True) == first
    assert metrics.identity(config, resumed=False) != first
    other = metrics.identity(tiny.config(tmp_path, tracker="trackio"), resumed=True)  # another tracker's id is unknown
    assert other != first and metrics.identity(config, resumed=True) != first
    def refuse(**settings):
        raise RuntimeError("401\nunauthorised")
    board.module.init = refuse
    refused("tracker 'wandb' does not start .RuntimeError: 401 unauthorised.: set tracker", metrics.start,
            SimpleNamespace(is_main_process=True, trackers=[]), config)


def test_other_processes_open_no_tracker(tmp_path):
    accelerator = SimpleNamespace(is_main_process=False, trackers=[])
    metrics.start(accelerator, tiny.config(tmp_path, tracker="tensorboard"))
    assert accelerator.trackers == [] and not (tmp_path / "run").exists()
