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
from tests.helpers.refusals import message

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


def test_consistency_is_that_of_dino_and_clip():
    from transformers import ViTConfig, ViTModel
    model = stirred(ViTModel(ViTConfig(image_size=224, **TINY), add_pooling_layer=False))
    prepared = transforms.Compose([transforms.Resize(224, antialias=False), transforms.Lambda(lambda x: x / 255),
                                   transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])
    hand = [expected(clip, prepared, lambda x: model(pixel_values=x, interpolate_pos_encoding=True
                                                     ).last_hidden_state[:, 0]) for clip in CLIPS]
    found = scored("subject_consistency", CLIPS, parts=(model,), device="cpu", batch_size=3)
    assert found == pytest.approx(hand, abs=1e-4)
    assert 0 < min(hand) and max(hand) < 0.9999
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection
    model = stirred(CLIPVisionModelWithProjection(CLIPVisionConfig(image_size=224, projection_dim=8, **TINY)))
    prepared = transforms.Compose([transforms.Resize(224, InterpolationMode.BICUBIC, antialias=False),
                                   transforms.CenterCrop(224), transforms.Lambda(lambda x: x / 255),
                                   transforms.Normalize(MEAN, DEVIATION)])
    hand = [expected(clip, prepared, lambda x: model(pixel_values=x).image_embeds) for clip in CLIPS]
    found = scored("background_consistency", CLIPS, parts=(model,), device="cpu", batch_size=3)
    assert found == pytest.approx(hand, abs=1e-4)
    assert 0 < min(hand) and max(hand) < 0.9999


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_features_in_half_precision_are_near_fp32(dtype):
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection, ViTConfig, ViTModel
    def networks():
        return {"subject_consistency": stirred(ViTModel(ViTConfig(image_size=224, **TINY), add_pooling_layer=False)),
                "background_consistency": stirred(CLIPVisionModelWithProjection(
                    CLIPVisionConfig(image_size=224, projection_dim=8, **TINY)))}
    for name, network in networks().items():
        half, full = (scored(name, CLIPS, parts=(part,), device="cpu", dtype=kind)
                      for part, kind in ((networks()[name], dtype), (network, "fp32")))
        assert half == pytest.approx(full, abs=0.02) and half != full


@pytest.mark.parametrize("name", ["temporal_flickering", "subject_consistency"])
def test_clips_of_one_frame_are_refused(name):
    args = {"parts": (torch.nn.Identity(),), "device": "cpu"} if name == "subject_consistency" else {}
    with pytest.raises(UserError, match=rf"reward '{name}': got videos of shape \[2, 1, 3, 30, 45\], expected .* at "
                                        "least two frames"):
        scored(name, CLIPS[:, :1], **args)


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


def by_package(dimension: str, clips: torch.Tensor, prompts: list[str], metadata: list[dict], **args) -> list[float]:
    reward = rewards.find("vbench", {"dimension": dimension, "device": "cpu", **args})
    return rewards.score({"vbench": reward}, clips, prompts, metadata)[:, 0].tolist()


def test_the_packages_scores_are_those_of_the_clips(package):
    grey = torch.tensor([0.2, 0.8])[:, None, None, None, None].expand(2, 3, 3, 32, 32)
    assert by_package("imaging_quality", grey, ["a/b", "a/b"], [{}, {}]) == pytest.approx([0.2, 0.8], abs=0.02)
    assert by_package("motion_smoothness", grey, ["a"] * 2, [{}, {}]) == pytest.approx([20, 80], abs=2)  # as it is


def test_facts_of_the_prompt_are_those_of_its_metadata(package):
    facts = {"auxiliary_info": {"scene": {"scene": {"scene": "jail"}}}}
    found = by_package("scene", CLIPS, ["a jail", "a cat"], [facts, {"auxiliary_info": {"color": {"color": "red"}}}])
    assert found[0] == 1 and found[1] != found[1]
    assert all(score != score for score in by_package("scene", CLIPS, ["a", "b"], [{}, {}]))  # nothing is run


def test_prompts_of_the_dimension_alone(package):
    grey, name = torch.full((3, 2, 3, 32, 32), 0.5), "motion_smoothness"
    metadata = [{"category": ["scene", name]}, {"category": ["scene"]}, {}]
    found = by_package(name, grey, ["a", "b", "c"], metadata, listed=True)
    assert found[0] == pytest.approx(50, abs=2) and found[1] != found[1] and found[2] != found[2]


def test_the_action_of_a_person_is_in_the_files_name(package):
    prompts = ["A person is riding bike", "A person is cooking"]
    assert by_package("human_action", CLIPS, prompts, [{}, {}]) == [1, 0]


def test_no_object_has_no_colour(package):
    facts = {"auxiliary_info": {"color": {"color": "red"}}}
    assert all(score != score for score in by_package("color", CLIPS, ["a", "b"], [facts] * 2))


def test_a_failure_of_the_package_has_its_message(package):
    with pytest.raises(UserError, match="vbench failed on temporal_style: NotImplementedError: no weights"):
        by_package("temporal_style", CLIPS, ["a", "b"], [{}, {}])


def test_what_vbench_needs_is_told_at_the_start(tmp_path):
    assert "dimension is 'hue', expected subject_consistency, " in message(rewards.find, "vbench", {"dimension": "hue"})
    with pytest.raises(UserError, match="reward 'vbench': device is 'cuda:99', expected .*cpu: take one of these"):
        rewards.find("vbench", {"device": "cuda:99"})
    with pytest.raises(UserError, match=f"{sys.executable} has no package vbench: python -m venv vbench && "
                                        r"vbench/bin/pip install vbench, and give args: \{python: vbench/bin/python\}"):
        rewards.find("vbench")
    with pytest.raises(UserError, match="nowhere/python does not run .*: python -m venv vbench"):
        rewards.find("vbench", {"python": f"{tmp_path}/nowhere/python"})
