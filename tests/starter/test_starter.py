"""The model that ships: its size, its autoencoder, that stock diffusers loads it, and its pairs."""

import math
from pathlib import Path

import build_starter as build
import make_starter_pairs
import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from PIL import Image
from starter_scenes import misread, sample_prompt
from torchvision.transforms.functional import to_tensor

from flowgrpo.config import load, validate
from flowgrpo.config.sections import Adapter
from flowgrpo.data import sets
from flowgrpo.data.pairs import OVERALL, Pair, in_place, load_pairs
from flowgrpo.distributed.processes import make_accelerator
from flowgrpo.methods import preset
from flowgrpo.methods import validate as methods_validate
from flowgrpo.policies.pipelines.load import load_pipeline
from flowgrpo.policies.pipelines.pipeline import STARTER, PipelinePolicy
from flowgrpo.rewards.starter.scene import scene, scene_graded
from flowgrpo.starter import CALL, EVAL_GUIDANCE, scenes
from flowgrpo.train import Trainer
from tests.helpers import loop
from tests.helpers.tiny_runs import assert_same_weights, frozen


def stock():
    pipe = StableDiffusion3Pipeline.from_pretrained(STARTER, text_encoder_3=None, tokenizer_3=None)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_it_is_small_and_knows_its_words():
    weights = list(STARTER.rglob("*.safetensors"))
    assert sum(file.stat().st_size for file in STARTER.rglob("*")) <= 30e6 and len(weights) == 4
    modules = [part for part in stock().components.values() if isinstance(part, torch.nn.Module)]
    assert sum(p.numel() for module in modules for p in module.parameters()) <= 12e6
    tokenizer = load_pipeline("starter").tokenizer
    for task in scenes.TASKS:
        prompt, _ = sample_prompt(np.random.default_rng(0), task, held=False)
        assert len(tokenizer(prompt).input_ids) == len(prompt.split()) + 2
        assert len(tokenizer(prompt + scenes.VERIFIED).input_ids) == len(prompt.split()) + 4
    longest = "a drawing of a red ring left of a blue cross" + scenes.VERIFIED
    assert len(tokenizer(longest).input_ids) <= tokenizer.model_max_length


def test_a_mark_is_put_at_a_captions_end_or_taken_away():
    tokenizer = build.build_tokenizer()
    def ids(*texts):
        return tokenizer(list(texts), padding="max_length", max_length=16, return_tensors="pt").input_ids
    plain, marked = ["a ring", "two red stars"], ["a ring" + scenes.VERIFIED, "two red stars" + scenes.VERIFIED]
    marks = torch.tensor([[True], [False]])
    for texts in (plain, marked):
        assert torch.equal(build.with_mark(tokenizer, ids(*texts), marks), ids(marked[0], plain[1]))


@torch.no_grad()
def test_its_autoencoder_keeps_scenes_true():
    vae, rng = stock().vae, np.random.default_rng(0)
    drawn = [sample_prompt(rng, task, held=True) for task in scenes.TASKS for _ in range(20)]
    pictures = torch.from_numpy(np.stack([scenes.render(claims, rng) for _, claims in drawn])).float().movedim(3, 1)
    decoded = vae.decode(vae.encode(pictures * 2 - 1).latents).sample / 2 + 0.5
    assert np.mean(scene(decoded.clamp(0, 1), [prompt for prompt, _ in drawn])) >= 0.97


def test_it_draws_what_is_asked_half_of_the_time_and_knows_better():
    """What it draws otherwise is its misreading of the prompt; told that a caption is right, it is right."""
    asked = [("a star", "a cross"), ("a blue square", "a yellow square"), ("a ring and a star", "a ring and a cross")]
    prompts, wrong = map(list, zip(*asked * 16))
    pipe = stock()
    def drawn(texts):
        return pipe(texts, num_inference_steps=8, guidance_scale=EVAL_GUIDANCE, output_type="pt",
                    generator=[torch.Generator().manual_seed(seed) for seed in range(len(texts))], **CALL).images
    plain, verified = drawn(prompts), drawn([prompt + scenes.VERIFIED for prompt in prompts])
    assert [misread(scenes.parse(prompt)) for prompt in prompts] == [scenes.parse(text) for text in wrong]
    assert 0.3 <= np.mean(scene(plain, prompts)) <= 0.75 and 0.1 <= np.mean(scene(plain, wrong)) <= 0.6
    assert np.mean(scene(verified, prompts)) >= 0.8


@pytest.mark.parametrize("name", ["mix_grpo+grpo_guard", "diffusion_nft"])
def test_two_epochs_on_the_starter(name):
    """The first ratio is 1, losses are finite, and of the pipeline only the adapter changes."""
    config = validate({"method": name, "tracker": "none", "device": "cpu", "reward": {"scene_graded": 1.0},
                       "train": {"prompts": 1, "group": 8, "micro_batch": 8, "steps": 6, "epochs": 2}})
    policy = PipelinePolicy(load_pipeline("starter"), Adapter(rank=4), call=config.call,
                            adapted=preset(name).rollout.adapted)
    trainer = Trainer(config, make_accelerator("cpu"), policy, {"scene_graded": scene_graded}, sets.resolve(config))
    before, kept = policy.weights.snapshot(), frozen(trainer)
    for trainer.epoch in range(2):
        metrics = trainer.run_epoch()
        assert math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]) and not metrics["skipped_updates"]
    assert trainer.first_ratio.max_log_ratio <= 1e-6
    assert_same_weights(frozen(trainer), kept)
    changed = [key for key, value in before.items() if not torch.equal(value, policy.weights.named[key])]
    assert len(kept) > 100 and len(changed) > 0.9 * len(before)  # the last block's text rows lead nowhere


ROOT = Path(__file__).parents[2]


def marks(pairs: list[Pair], side: str) -> list[float]:
    """What `scene` says of one side's images."""
    return scene(torch.stack([to_tensor(Image.open(getattr(pair, side))) for pair in pairs]),
                 [pair.prompt for pair in pairs])


def test_pairs_are_labelled_by_scene_and_train_the_starter(tmp_path):
    file = make_starter_pairs.make(tmp_path, prompts=3, rendered=8)
    pairs, subjects = load_pairs(file), load_pairs(tmp_path / "subjects.jsonl")
    assert file == tmp_path / "pairs.jsonl" and len(pairs) >= 8
    for pair, one, two in zip(pairs, marks(pairs, "chosen"), marks(pairs, "rejected")):
        assert (one, two) == (1, 0) if pair.verdicts[OVERALL] == 1 else one == two
    config = load(ROOT / "configs" / "starter_dpo.yaml", {"preferences": str(file)})
    methods_validate.check_recorded_pairs(loop.setup(config))
    train, held = in_place(config, sets.resolve(config))
    assert len(train) == sum(pair.verdicts[OVERALL] == 1 for pair in pairs) > 4  # no prompt of theirs is held out
    assert config.rewards == {"preferred": 1.0} and list(config.extra_rewards) == ["scene", "scene_graded"] and held
    assert len(subjects) == 3 * make_starter_pairs.GROUP == len({pair.rejected for pair in subjects})
    assert set(marks(subjects, "chosen")) == {1} and len({pair.prompt for pair in subjects}) == 3
    shown = {pair.rejected: pair.prompt for pair in subjects}  # the same images stand in both files
    assert all(shown.get(picture, pair.prompt) == pair.prompt for pair in pairs
               for picture in (pair.chosen, pair.rejected))
    config = load(ROOT / "configs" / "starter_rpo.yaml", {"preferences": str(tmp_path / "subjects.jsonl")})
    methods_validate.check_recorded_pairs(loop.setup(config))
    assert len(in_place(config, sets.resolve(config))[0]) == len(subjects)
