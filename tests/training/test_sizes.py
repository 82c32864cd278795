"""Several sizes of images in one run: one per group, drawn by the seed, and each with its grid."""

import collections

import pytest
import torch
from safetensors.torch import load_file

from flowgrpo.config import load
from flowgrpo.data.prompts import Prompt
from flowgrpo.policies import build
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.rollouts.denoising import draw_sizes
from flowgrpo.run import run
from tests.helpers import loop, tiny, tiny_runs
from tests.helpers.refusals import refused

SIZES = [[16, 16], [8, 16], [16, 8]]


class Seen:
    """A reward that notes the sizes of the images of every batch."""

    def __init__(self):
        self.sizes = []

    def __call__(self, images, prompts):
        self.sizes.append(tuple(images.shape[-2:]))
        return images[:, 0].mean((1, 2))


def config(folder="nowhere", **options):
    return tiny.config(folder, **{"image__sizes": SIZES, "train__prompts": 4, "train__lr": 1e-2} | options)


def test_sizes_are_drawn_by_seed_epoch_and_prompt():
    sizes, keys = [(8, 8), (8, 16), (16, 8)], [f"prompt {i}" for i in range(600)]
    first = draw_sizes(sizes, keys, 3, 5)
    assert first == draw_sizes(sizes, keys, 3, 5) and first[10:] == draw_sizes(sizes, keys[10:], 3, 5)
    assert first != draw_sizes(sizes, keys, 4, 5) and first != draw_sizes(sizes, keys, 3, 6)
    counts = collections.Counter(first)
    assert len(counts) == 3 and min(counts.values()) > 150


def trainer(seen, pipe=None, **options):
    settings = config(**options)
    torch.manual_seed(0)
    policy = build.make_policy(settings, torch.device("cpu"), pipe or tiny.sd3())
    return tiny.Trainer(settings, tiny.Accelerator(cpu=True), policy, {"red": seen},
                        ([Prompt(text) for text in tiny.PROMPTS], []))


@pytest.mark.parametrize("method, micro_batch", [("mix_grpo", 4), ("mix_grpo", 16), ("diffusion_nft", 8),
                                                 ("flow_grpo", 8)])
def test_every_group_is_sampled_scored_and_learned_in_its_size(method, micro_batch):
    seen = Seen()
    made = trainer(seen, method=method, train__micro_batch=micro_batch)
    before = made.policy.weights.snapshot()
    epoch = loop.draw(made)
    parts, conditioning, keys = epoch.parts, epoch.conditioning, [prompt.key for prompt in epoch.groups.prompts]
    wanted = draw_sizes([tuple(size) for size in SIZES], keys, 0, made.config.seed)
    assert conditioning.sizes == wanted and len(set(wanted)) > 1
    sizes = [{wanted[int(place)] for place in part.prompts} for part in parts]
    assert all(len(of) == 1 for of in sizes) and [of.pop() for of in sizes] == seen.sizes
    assert [place for part in parts for place in part.groups] == [0, 1, 2, 3]
    for part, size in zip(parts, seen.sizes):
        assert part.finals[0].shape[-2:] == (size[0] // 2, size[1] // 2)
    metrics = made.run_epoch()
    assert made.first_ratio.max_log_ratio == 0 and metrics["grad_norm"] > 0
    assert any(not torch.equal(before[key], value) for key, value in made.policy.weights.snapshot().items())


def test_each_size_has_the_pipelines_own_grid():
    made = trainer(Seen(), tiny.flux(), train__grid="stock", image__call=tiny.FLUX_CALL)
    epoch = loop.draw(made)
    parts, conditioning = epoch.parts, epoch.conditioning
    grids = {}
    for part in parts:
        size = conditioning.sizes[int(part.prompts[0])]
        grids[size] = part.exploration.grid
        row = conditioning.rows(part.prompts[:1])
        assert torch.equal(grids[size], made.policy.stock_grid(row, made.config.train.steps))
    areas = {size[0] * size[1]: grid for size, grid in grids.items()}
    assert len(areas) == 2 and not torch.equal(*areas.values())
    made.run_epoch()
    assert made.first_ratio.max_log_ratio == 0


def test_a_resumed_run_draws_the_same_sizes(tmp_path):
    model, seen = tiny.save(tiny.sd3(), tmp_path / "model"), []
    def arguments(folder, **options):
        seen.append(Seen())
        return config(folder, model=str(model), **options), {
            "functions": {"red": seen[-1]}, "prompts": [*map(Prompt, tiny.PROMPTS)]}
    folders = tiny_runs.whole_and_resumed(arguments, tmp_path)
    tiny_runs.assert_same_weights(*(load_file(folder / LORA_FILE) for folder in folders))
    whole, parted, resumed = ({*each.sizes} for each in seen)
    assert whole == parted | resumed == {tuple(size) for size in SIZES}


def test_sizes_that_a_reward_or_the_pipeline_does_not_take_are_refused_before_the_run(tmp_path):
    def square(images, prompts):
        if images.shape[-1] != images.shape[-2]:
            raise ValueError("expected square pictures")
        return images[:, 0].mean((1, 2))
    settings = config(tmp_path, model=str(tiny.save(tiny.sd3(), tmp_path / "model")))
    refused("expected square pictures", run, settings, functions={"red": square}, prompts=[*map(Prompt, tiny.PROMPTS)])
    assert not (settings.folder / "before.json").exists()
    refused("image.sizes: StableDiffusion3Pipeline (refuses|makes)", trainer, Seen(), image__sizes=[[16, 16], [17, 16]])


def test_evaluations_take_the_first_size_or_the_one_that_is_stated():
    assert load(None, {"image.sizes": [[64, 48], [48, 64]]}).call["height"] == 64
    stated = load(None, {"image.sizes": [[64, 48], [48, 64]], "image.height": 96, "image.width": 96}).call
    assert stated["height"] == stated["width"] == 96
