"""Feature caches of rollouts: what they skip, when they are emptied, and the table of distances."""

import json
import re
import sys

import feature_caches
import pytest
import torch

from flowgrpo.config import load
from flowgrpo.config.sections import Adapter, Rollout
from flowgrpo.contrib.feature_cache import FeatureCache, RolloutCache
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.methods import keys_read
from flowgrpo.policies import build
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.samplers.grids import shift_grid
from flowgrpo.samplers.scheduler import Segment
from flowgrpo.tools.check import tiny as pipelines
from flowgrpo.training import extensions
from tests.helpers import loop, tiny, tiny_runs
from tests.helpers.refusals import refused

STEPS = 6
GRID = shift_grid(STEPS, 3.0)
KINDS = ("first_block", "taylorseer", "mag")


def policy(name: str = "FluxPipeline", guidance: float = 1.0) -> PipelinePolicy:
    pipe, call = pipelines.make(name)
    return tiny.stir(PipelinePolicy(pipe, Adapter(rank=2), call=call, guidance=guidance))


def drawn(made: PipelinePolicy, texts=("red", "blue"), steps=range(STEPS), latents=None) -> torch.Tensor:
    generators = made.generators(range(len(texts)))
    return made.run(Segment(GRID, steps), made.encode([*texts]), latents, generators)[0]


def cache_of(made: PipelinePolicy, kind: str = "first_block", **options) -> FeatureCache:
    return FeatureCache(made.denoisers, Rollout(cache=kind, **options), made.dtype)


# The blocks of a call, and how often a step calls the denoiser: Wan has a call for each of two CFG branches.
@pytest.mark.parametrize("name, guidance, blocks, branches", [
    ("FluxPipeline", 1.0, 2, 1), ("WanPipeline", 4.0, 2, 2), ("LTXPipeline", 4.0, 2, 1)])
def test_a_first_block_cache_skips_all_other_blocks_behind_the_first_step_of_every_branch(name, guidance, blocks,
                                                                                          branches):
    made = policy(name, guidance)
    plain, cache = drawn(made), cache_of(made, cache_threshold=1e9)
    made.driver.around_rollout = cache
    found = drawn(made)
    assert (cache.calls, cache.computed) == (branches * blocks * STEPS, branches * (blocks + STEPS - 1))
    assert 0 < (found - plain).norm() < plain.norm()
    assert torch.equal(drawn(made), found)  # it was empty again
    made.driver.around_rollout = idle = cache_of(made, cache_threshold=1e-9)
    assert torch.equal(drawn(made), plain) and idle.computed == idle.calls > 0  # one that skips nothing


@torch.no_grad()
def test_a_skipped_step_adds_what_the_blocks_behind_the_first_added_before():
    """Two steps of Flux: into `norm_out` of the second goes h(2) + (all blocks' - h)(1), h: the first block's output.
    """
    made = policy()
    flux = made.denoisers["transformer"]
    first, given, entered = flux.transformer_blocks[0], [], []
    handles = [first.register_forward_pre_hook(lambda _, args, kwargs: given.append((args, kwargs)), with_kwargs=True),
               flux.norm_out.register_forward_pre_hook(lambda _, args: entered.append(args[0]))]
    made.driver.around_rollout = cache_of(made, cache_threshold=1e9)
    drawn(made, steps=range(2))
    for handle in handles:
        handle.remove()
    with made.driver.attention():
        one, two = (first(*args, **kwargs)[1] for args, kwargs in given[-2:])
    full, skipped = entered[-2:]  # behind those of the encoding's trial
    assert torch.allclose(skipped, two + full - one, atol=1e-6) and not torch.allclose(skipped, full, atol=1e-3)


def test_every_kind_is_the_same_in_each_batch_whatever_went_before():
    made = policy()
    plain = drawn(made, ["blue"])
    for kind in KINDS:
        cache = cache_of(made, kind, **({} if kind == "taylorseer" else {"cache_threshold": 1.0}))
        if kind == "mag":
            made.driver.around_rollout = cache.measuring
            assert torch.equal(drawn(made, ["blue"]), plain)
            assert len(cache.ratios) == STEPS and cache.ratios[0] == 1 and len({*cache.ratios}) == STEPS
            cache.calls = cache.computed = 0
        made.driver.around_rollout = cache
        alone = drawn(made, ["blue"])
        assert 0 < cache.computed < cache.calls and not torch.equal(alone, plain), kind
        drawn(made, ["red", "green"])
        assert torch.equal(drawn(made, ["blue"]), alone), kind


def test_calls_of_one_step_and_errors_leave_no_cache():
    made = policy()
    parts = [part for module in made.denoisers.values() for part in module.modules()]
    before = [vars(part).get("forward") for part in parts]
    cache = made.driver.around_rollout = cache_of(made, cache_threshold=1e9)
    drawn(made, steps=range(1))
    assert not cache.calls
    drawn(made)
    assert cache.calls and [vars(part).get("forward") for part in parts] == before
    assert not any(module.is_cache_enabled for module in made.denoisers.values()) and not [*cache.hooks()]
    made = policy()
    made.driver.around_rollout = cache = cache_of(made)
    with pytest.raises(RuntimeError):
        drawn(made, latents=torch.zeros(2, 3, 5))
    made.driver.around_rollout = cache_of(made, cache_threshold=1e-9)
    assert torch.isfinite(drawn(made)).all() and not [*cache.hooks()]


# --- runs ------------------------------------------------------------------------------------------------------------
def red(outputs, prompts):
    """The mean of an image's red channel, or of a clip's."""
    return outputs[..., 0, :, :].flatten(1).mean(1)


def trainer(kind: str | None = "first_block", name: str = "FluxPipeline", method: str = "diffusion_nft", **options):
    pipe, call = pipelines.make(name)
    settings = tiny.config(method=method, train__lr=1e-2, image__call=call, rollout__cache=kind, **options)
    return tiny.trainer_of(settings, {"red": red}, [Prompt(text) for text in tiny.PROMPTS], pipe)


@pytest.mark.parametrize("name, guidance", [("FluxPipeline", 1.0), ("WanPipeline", 4.0)])
def test_an_epoch_draws_with_it_and_trains_scores_and_evaluates_without(name, guidance):
    made = trainer(name=name, train__guidance=guidance, rollout__cache_threshold=1e9)
    policy, cache = made.policy, loop.extension(made, "RolloutCache")
    conditioning = made.rollouts.conditioning(made.prompts[:1])
    x = policy.run(Segment(GRID, range(1)), conditioning, None, policy.generators([0]))[0]
    def outside() -> list[torch.Tensor]:
        with torch.no_grad():
            scored = [policy.replay(conditioning, x, GRID, step) for step in (2, 3)]
        return [*scored, policy.generate(conditioning, policy.generators([3]), 4, guidance)]
    before = outside()
    with cache.around_epoch():
        assert all(map(torch.equal, outside(), before))
    metrics = made.run_epoch()
    assert 0.5 < metrics["rollout/computed"] < 0.7  # of the two blocks of 6 steps: (1 + 6) / 12
    assert made.run_epoch()["rollout/computed"] == metrics["rollout/computed"]


def test_a_run_whose_cache_skips_nothing_is_bit_equal_to_one_without():
    with_it, without = trainer(rollout__cache_threshold=1e-9), trainer(None)
    assert "RolloutCache" not in loop.names(without)
    for made in (with_it, without):
        made.run_epoch()
    tiny_runs.assert_same_weights(with_it, without)
    assert with_it.policy.evaluations == without.policy.evaluations


def test_samples_of_a_run_are_those_of_the_cache_and_their_scores_those_of_the_plain_model():
    cached, plain = trainer(rollout__cache_threshold=1e9), trainer(None)
    with cached.extensions.around_epoch():
        epoch = loop.draw(cached)
    other = loop.draw(plain)
    assert [prompt.text for prompt in epoch.own] == [prompt.text for prompt in other.own]
    assert not torch.allclose(epoch.parts[0].finals[0], other.parts[0].finals[0])
    for part in epoch.parts:
        for k, rows, new in plain.rollouts.replay(part, other.conditioning):
            assert torch.equal(new.logp, part.transitions[k].old.logp[rows])


def test_ratios_of_mag_go_on_from_a_checkpoint(tmp_path):
    made, other = trainer("mag"), trainer("mag")
    one, two = (loop.extension(each, "RolloutCache") for each in (made, other))
    assert one.cache.ratios == two.cache.ratios and len(one.cache.ratios) == 6
    one.cache.ratios[2] += 0.5
    tiny_runs.resume(made, other, tmp_path)
    assert two.cache.ratios == one.cache.ratios


# --- refusals --------------------------------------------------------------------------------------------------------
FINALS = ("diffusion_nft", "awm", "dgpo", "crd", "diffusion_dpo")
COUPLED = ("flow_grpo", "mix_grpo", "dance_grpo", "alignprop", "reinflow")


@pytest.mark.parametrize("method", [*FINALS, *COUPLED])
def test_it_goes_with_methods_that_read_finals_alone(method):
    setup = loop.setup(tiny.config(method=method, rollout__cache="first_block"))
    if method in FINALS:
        return extensions.check(setup)
    refused("^rollout.cache is first_block, which does not go with a method that trains "
            ".*, which reads the steps of a rollout: leave one of them out$", extensions.check, setup)


@pytest.mark.parametrize("options, said", [
    (dict(memory__shard=True), "memory.shard, whose processes hold shares of the weights"),
    (dict(memory__context_parallel=2), "memory.context_parallel, whose processes would skip different steps"),
    (dict(memory__offload="block_level"), "memory.offload, whose blocks come in a fixed order"),
    (dict(train__compile=True), "train.compile, whose blocks are compiled without it"),
    (dict(rollout__engine="http://127.0.0.1:1"), "rollout.engine, which draws")])
def test_what_it_does_not_go_with_is_named(options, said):
    setup = loop.setup(tiny.config(method="diffusion_nft", rollout__cache="mag", **options))
    with pytest.raises(UserError, match=f"^rollout.cache is mag, which does not go with {re.escape(said)}: leave one"):
        extensions.require(RolloutCache, setup)


def test_refused_models_pairs_and_language_models():
    settings = tiny.config(method="diffusion_nft", rollout__cache="first_block")
    with pytest.raises(UserError, match="^rollout.cache: got SD3Transformer2DModel, expected a model with diffusers'"):
        extensions.check(loop.setup(settings, loaded=tiny.sd3()))
    for given, said in ((dict(method="diffusion_dpo", preferences="pairs.jsonl"), "so that no image is sampled"),
                        (dict(method="grpo", model="starter_text"), "which is about denoisers")):
        config = load(None, {"rollout.cache": "mag", "train.group": 2, **given})
        refused(f"^rollout.cache is .*{said}", lambda: keys_read.check(loop.setup(config, build.kind(config))))


@pytest.mark.parametrize("name, kind, said", [
    ("WanPipeline", "taylorseer", "but WanPipeline has no blocks that it knows"),
    ("Flux2Pipeline", "first_block", r"which diffusers cannot do for Flux2Pipeline \(No cache context is set"),
    ("ChromaPipeline", "mag", r"which diffusers cannot do for ChromaPipeline \(Model class")])
def test_what_diffusers_cannot_do_is_said_before_the_first_epoch(name, kind, said):
    refused(f"^rollout.cache is {kind}, {said}.*: use another, or leave it out$", trainer, kind, name)


def test_a_row_of_distances_and_the_page_of_the_numbers():
    found, text = json.loads(feature_caches.DATA.read_text()), feature_caches.PAGE.read_text()
    assert feature_caches.page(text, found) == text
    assert found["seeds"] == 3 and all(len(each["distances"]) == 3 for each in found["rows"])
    rows = [{"cache": "mag", "cache_threshold": 0.1, "skipped": 0.25, "distances": [0.1, 0.3, 0.2]},
            {"cache": "taylorseer", "cache_interval": 3, "skipped": 0.5, "distances": [0.0, 0.0, 0.0]}]
    assert feature_caches.table({"rows": rows}).splitlines()[2:] == [
        "| `mag` | `cache_threshold: 0.1` | 25% | 0.200 | 0.300 |",
        "| `taylorseer` | `cache_interval: 3` | 50% | 0.000 | 0.000 |"]
    assert feature_caches.distance(torch.tensor([1.0, 2.0]), torch.tensor([4.0, -2.0])) == pytest.approx(12.5**0.5)


def test_the_script_prints_a_table_of_a_recipe(monkeypatch, capsys):
    monkeypatch.setattr(feature_caches, "CASES", [{"cache": "first_block", "cache_threshold": 1e9}])
    monkeypatch.setattr(sys, "argv", ["feature_caches.py", "--repetitions", "1", "--write", "", "--option",
                                      "train.steps=3"])
    feature_caches.main()
    # Of 5 blocks all behind the first, at two of three steps: 8 of 15.
    assert "| `first_block` | `cache_threshold: 1e+09` | 53% | " in capsys.readouterr().out
