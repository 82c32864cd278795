"""VBench's dimensions: formulas by hand, tiny random networks one frame at a time, and the package's process."""

import sys

import pytest
import torch
from torch.nn.functional import cosine_similarity
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from flowgrpo import rewards
from flowgrpo.contrib.vbench import dimensions
from flowgrpo.errors import UserError
from flowgrpo.rewards.preprocessing import DEVIATION, MEAN
from tests.helpers.refusals import message, refused

CLIPS = (torch.rand(2, 4, 3, 30, 45, generator=torch.Generator().manual_seed(2)) * 255).round() / 255


def scored(name: str, clips: torch.Tensor, **args) -> list[float]:
    count = len(clips)
    return rewards.score({name: rewards.find(name, args)}, clips, ["a cat"] * count, [{}] * count)[:, 0].tolist()


def test_flickering_and_consistency_by_hand():
    still = torch.full((3, 3, 4, 4), 0.2)
    blinking = torch.stack([torch.zeros(3, 4, 4), torch.ones(3, 4, 4), torch.zeros(3, 4, 4)])
    half = blinking.clone()
    half[..., :2] = 0  # half of the pixels blink
    step = torch.stack([torch.zeros(3, 4, 4), torch.full((3, 4, 4), 51 / 255), torch.full((3, 4, 4), 51 / 255)])
    assert scored("temporal_flickering", torch.stack([still, blinking, half, step])) == pytest.approx(
        [1.0, 0.0, 0.5, 1 - 0.2 / 2])
    one, two = [1.0, 0.0], [0.0, 2.0]
    features = torch.tensor([[one, one, one], [one, two, one], [one, [-3.0, 0.0], [-1.0, 0.0]]])
    # The second: (0 + 0) / 2, then (0 + 1) / 2. The third: opposite to the first counts as 0; then (1 + 0) / 2.
    assert dimensions.consistency(features).tolist() == [1.0, 0.25, 0.25]


def expected(clip: torch.Tensor, prepared, embedded) -> float:
    with torch.no_grad():
        rows = [embedded(prepared((frame * 255).round())[None])[0] for frame in clip]
    pairs = [(cosine_similarity(rows[i - 1], rows[i], 0).clamp(min=0)
              + cosine_similarity(rows[0], rows[i], 0).clamp(min=0)) / 2 for i in range(1, len(rows))]
    return sum(map(float, pairs)) / len(pairs)


def stirred(model):
    torch.manual_seed(4)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.2)
    return model.eval()


TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 56}


def networks() -> dict[str, torch.nn.Module]:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection, ViTConfig, ViTModel
    return {"subject_consistency": stirred(ViTModel(ViTConfig(image_size=224, **TINY), add_pooling_layer=False)),
            "background_consistency": stirred(CLIPVisionModelWithProjection(
                CLIPVisionConfig(image_size=224, projection_dim=8, **TINY)))}


def test_consistency_is_that_of_dino_and_clip():
    made, to_unit = networks(), transforms.Lambda(lambda x: x / 255)
    dino, clip = made.values()
    ways = {"subject_consistency": (
        [transforms.Resize(224, antialias=False), to_unit,
         transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))],
        lambda x: dino(pixel_values=x, interpolate_pos_encoding=True).last_hidden_state[:, 0]),
        "background_consistency": (
        [transforms.Resize(224, InterpolationMode.BICUBIC, antialias=False), transforms.CenterCrop(224), to_unit,
         transforms.Normalize(MEAN, DEVIATION)], lambda x: clip(pixel_values=x).image_embeds)}
    for name, (steps, embedded) in ways.items():
        hand = [expected(frames, transforms.Compose(steps), embedded) for frames in CLIPS]
        found = scored(name, CLIPS, parts=(made[name],), device="cpu", batch_size=3)
        assert found == pytest.approx(hand, abs=1e-4) and 0 < min(hand) and max(hand) < 0.9999


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_features_in_half_precision_are_near_fp32(dtype):
    for name in networks():
        half, full = (scored(name, CLIPS, parts=(networks()[name],), device="cpu", dtype=kind)
                      for kind in (dtype, "fp32"))
        assert half == pytest.approx(full, abs=0.02) and half != full


@pytest.mark.parametrize("name", ["temporal_flickering", "subject_consistency"])
def test_clips_of_one_frame_are_refused(name):
    args = {"parts": (torch.nn.Identity(),), "device": "cpu"} if name == "subject_consistency" else {}
    refused(rf"reward '{name}': got videos of shape \[2, 1, 3, 30, 45\], expected .* at "
            "least two frames", scored, name, CLIPS[:, :1], **args)


# --- the package -----------------------------------------------------------------------------------------------------
UTILS = '''
def init_submodules(dimensions):
    return {dimension: f"models of {dimension}" for dimension in dimensions}
'''
LIGHT = '''
import json
import cv2

def compute_NAME(listed, device, models):
    # Answers in the form of the package: the mean light of the first frame, in percent, the last video first.
    rows, videos = json.load(open(listed)), []
    assert device == "cpu" and models == "models of NAME" and all(row["dimension"] == ["NAME"] for row in rows)
    for row in rows[::-1]:
        for path in row["video_list"]:
            kept, frame = cv2.VideoCapture(path).read()
            videos.append({"video_path": path, "video_results": frame.mean() / 2.55})
    return 0.5, videos
'''
SCENE = '''
import json

def compute_scene(listed, device, models):
    return 0.5, [{"video_path": row["video_list"][0], "video_results": len(row["auxiliary_info"]["scene"]["scene"])}
                 for row in json.load(open(listed))]
'''
ACTION = '''
import json

def compute_human_action(listed, device, models):  # the package compares what follows "person is " in the file's name
    paths = [row["video_list"][0] for row in json.load(open(listed))]
    return 0.5, [{"video_path": path, "video_results":
                  path.split("/")[-1].lower().split("-")[0].split("person is ")[-1] == "riding bike"} for path in paths]
'''
COLOUR = '''
def compute_color(listed, device, models):
    return 1 / 0, []
'''
BROKEN = '''
def compute_temporal_style(listed, device, models):
    raise NotImplementedError("no weights")
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An interpreter that finds a package vbench with the real one's functions."""
    folder = tmp_path / "vbench"
    folder.mkdir()
    modules = {"__init__": "", "utils": UTILS, "scene": SCENE, "human_action": ACTION, "color": COLOUR,
               "temporal_style": BROKEN} | {name: LIGHT.replace("NAME", name)
                                            for name in ("imaging_quality", "motion_smoothness")}
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def by_package(dimension: str, clips: torch.Tensor, prompts: str, metadata: list[dict], **args) -> list[float]:
    reward = rewards.find("vbench", {"dimension": dimension, "device": "cpu", **args})
    return rewards.score({"vbench": reward}, clips, prompts.split(", "), metadata)[:, 0].tolist()


NAN, NO = float("nan"), [{}, {}]
GREY = torch.tensor([0.2, 0.8, 0.5])[:, None, None, None, None].expand(3, 3, 3, 32, 32)
COLOURED = {"auxiliary_info": {"color": {"color": "red"}}}


@pytest.mark.parametrize("dimension, clips, prompts, metadata, expected, off", [
    ("imaging_quality", GREY[:2], "a/b, a/b", NO, [0.2, 0.8], 0.02),
    ("motion_smoothness", GREY[:2], "a, a", NO, [20, 80], 2),  # as it is
    # Facts of a prompt are those of its metadata; without any nothing is run. No object has no colour.
    ("scene", CLIPS, "a jail, a cat", [{"auxiliary_info": {"scene": {"scene": {"scene": "jail"}}}}, COLOURED],
     [1, NAN], 0),
    ("scene", CLIPS, "a, b", NO, [NAN, NAN], 0), ("color", CLIPS, "a, b", [COLOURED] * 2, [NAN, NAN], 0),
    # The action of a person is in the file's name.
    ("human_action", CLIPS, "A person is riding bike, A person is cooking", NO, [1, 0], 0)])
def test_the_packages_scores_are_those_of_the_clips(package, dimension, clips, prompts, metadata, expected, off):
    assert by_package(dimension, clips, prompts, metadata) == pytest.approx(expected, abs=off, nan_ok=True)


def test_prompts_of_the_dimension_alone(package):
    metadata = [{"category": ["scene", "motion_smoothness"]}, {"category": ["scene"]}, {}]
    found = by_package("motion_smoothness", GREY[[2, 2, 2], :2], "a, b, c", metadata, listed=True)
    assert found == pytest.approx([50, NAN, NAN], abs=2, nan_ok=True)


def test_a_failure_of_the_package_has_its_message(package):
    with pytest.raises(UserError, match="vbench failed on temporal_style: NotImplementedError: no weights"):
        by_package("temporal_style", CLIPS, "a, b", NO)


def test_what_vbench_needs_is_told_at_the_start(tmp_path):
    assert "dimension is 'hue', expected subject_consistency, " in message(rewards.find, "vbench", {"dimension": "hue"})
    with pytest.raises(UserError, match="reward 'vbench': device is 'cuda:99', expected .*cpu: take one of these"):
        rewards.find("vbench", {"device": "cuda:99"})
    refused(f"{sys.executable} has no package vbench: python -m venv vbench && "
            r"vbench/bin/pip install vbench, and give args: \{python: vbench/bin/python\}", rewards.find, "vbench")
    with pytest.raises(UserError, match="nowhere/python does not run .*: python -m venv vbench"):
        rewards.find("vbench", {"python": f"{tmp_path}/nowhere/python"})
