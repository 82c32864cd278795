"""Dry runs of a tiny pipeline: phases, memory, settings that fit, and bytes that a run keeps."""

import gc
import json

import pytest
import torch
from diffusers import SD3Transformer2DModel

from flowgrpo.cli import main
from flowgrpo.cli.dry_run import summary
from flowgrpo.config import load
from flowgrpo.contrib.taste import session
from flowgrpo.errors import UserError
from flowgrpo.gpus import BUS, CONTEXT, GIB, GPU, GPUS, GROWTH, HOST, LOADING, PLAN, SPARE
from flowgrpo.text import memory as text_memory
from flowgrpo.tools.check.tiny.parts import lively
from flowgrpo.tools.dry_run import estimate, fit, from_configs
from flowgrpo.tools.dry_run.estimate import dry_run
from flowgrpo.tools.dry_run.meta_gpu import Phase
from flowgrpo.tools.dry_run.repeats import Repeats
from flowgrpo.training import memory, sampling
from tests.helpers import tiny, tiny_text
from tests.helpers.refusals import error_line, message, printed

# All options of memory but quantised weights.
LOW = {"memory__encoders": "cpu", "memory__vae": "tiled", "memory__states": "cpu", "train__micro_batch": 1,
       "train__checkpointing": True}


def config(folder, **options):
    return tiny.config(folder, **{"model": str(folder / "model"), "precision": "bf16"} | options)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with the configuration files of a pipeline and without weights."""
    folder = tmp_path_factory.mktemp("dry")
    tiny.sd3().save_pretrained(folder / "model")
    for file in (folder / "model").rglob("*.safetensors"):
        file.unlink()
    return folder


def gpu(room):
    """An H100 on which tensors can take so many bytes."""
    return GPU((room + CONTEXT) / (1 - SPARE) / GIB, 989, 67, 3.35)


@pytest.mark.parametrize("of_files", [True, False])
def test_a_pipeline_without_weights_has_all_shapes(model, of_files):
    real = tiny.sd3().to(torch.bfloat16)
    made = from_configs.pipeline(str(model / "model"), torch.bfloat16) if of_files else from_configs.like(real)
    for name in ("transformer", "vae", "text_encoder"):
        ours, theirs = (dict(getattr(pipe, name).named_parameters()) for pipe in (made, real))
        assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in theirs.items()}
        assert all(value.is_meta and value.dtype == torch.bfloat16 for value in ours.values())
    assert made.scheduler.config.shift == 3.0 and not real.transformer.proj_out.weight.is_meta


def test_phases_and_reward_models_of_an_epoch(model):
    counts = dry_run(config(model, method="mix_grpo"))
    assert list(counts.phases) == ["encode", "rollout", "decode", "reward", "update"]
    assert all(phase.reserved >= phase.allocated > 0 for phase in counts.phases.values())
    assert counts.peak == max(phase.allocated for phase in counts.phases.values()) and not counts.rewards
    assert counts.phases["update"].flops > 0 and counts.seconds > counts.phases["rollout"].seconds > 0
    assert not counts.step_waits
    rewards = {"pickscore": 1.0, "first": {"use": "frames", "args": {"reward": "hpsv2.1"}}}
    options = config(model, reward=rewards, eval__rewards=["pickscore", "ocr"])
    assert dry_run(options).rewards == 2 * 4 * 0.986e9
    assert dry_run(options).peak > 2 * 4 * 0.986e9
    left = dry_run(options.having({"memory.rewards": "cpu"}))  # after an epoch is scored
    assert left.away == {"encode", "update"} and left.peak_bytes("encode") == left.phases["encode"].allocated
    assert left.peak == left.rewards + max(left.phases[name].allocated for name in left.phases.keys() - left.away)


def test_repeated_calls_count_what_they_would(model, monkeypatch):
    options = dict(method="flow_grpo", parts__kl__weight=0.1, train__guidance=2.0, train__micro_batch=2)
    short = dry_run(config(model, **options))
    monkeypatch.setattr(Repeats, "_once", lambda self, key, call: call())
    monkeypatch.setattr(Repeats, "backward", lambda self, loss: self._backward(loss))
    whole = dry_run(config(model, **options))
    for name, phase in whole.phases.items():
        assert short.phases[name].flops == phase.flops and short.phases[name].kernels == phase.kernels
        assert short.phases[name].seconds == pytest.approx(phase.seconds) and short.phases[name].waits == phase.waits
        assert short.phases[name].allocated == pytest.approx(phase.allocated, rel=0.01)
    assert (short.step_waits, short.replay_waits) == (whole.step_waits, whole.replay_waits)


def test_flops_of_a_rollout_are_those_of_its_evaluations(model):
    """Twice the rows cost twice, and guidance doubles them; a replay costs its forward and at most two more."""
    few, many, guided = (dry_run(config(model, method="flow_grpo", parts__kl__weight=0.0, train__group=group,
                                        train__guidance=guidance)).phases
                         for group, guidance in ((4, 1.0), (8, 1.0), (4, 2.0)))
    assert many["rollout"].flops == 2 * few["rollout"].flops and guided["rollout"].flops == 2 * few["rollout"].flops
    assert many["decode"].flops == 2 * few["decode"].flops == 2 * guided["decode"].flops
    trained = few["rollout"].flops * 5 / 6  # all steps but the last
    assert 2 * trained < few["update"].flops < 3 * trained


def test_epochs_that_are_drawn_ahead_cost_a_forward_pass_and_their_states(model):
    plain, one, three = (dry_run(config(model, method="flow_grpo", parts__kl__weight=0.0, train__prompts=4,
                                        train__staleness=count)) for count in (0, 1, 3))
    assert [*one.phases] == [*three.phases] == ["encode", "rollout", "decode", "reward", "rescore", "update"]
    assert one.phases["rescore"].flops == three.phases["rescore"].flops == plain.phases["rollout"].flops * 5 / 6
    assert one.seconds - plain.seconds == pytest.approx(one.phase_seconds("rescore"), rel=0.01)
    states = 4 * 4 * 6 * 4 * 8 * 8 * 2  # prompts, samples, recorded states, and bytes of one
    for name in plain.phases:
        waiting = (three.phases[name].allocated - one.phases[name].allocated) / 2
        assert states <= waiting < 4 * states, name
        assert one.phases[name].allocated - plain.phases[name].allocated == pytest.approx(waiting, rel=0.2)
    away = [dry_run(config(model, train__staleness=count, memory__states="cpu")) for count in (0, 1)]
    assert away[1].peak - away[0].peak < one.peak - plain.peak


def test_a_match_of_distributions_is_counted_once_an_epoch(model):
    """Its states are drawn from the whole epoch, so that more prompts make the rollout longer alone, and its fake
    score's values and moments are there from the beginning."""
    def phases(prompts, batch, rank, **distil):
        return dry_run(config(model, method="dmd2", train__steps=4, train__prompts=prompts, adapter__rank=rank,
                              parts__distil={"batch": batch, "fake_updates": 2, **distil})).phases

    few, many, twice = phases(4, 8, 4), phases(8, 8, 4), phases(4, 16, 4)
    assert many["rollout"].flops == 2 * few["rollout"].flops
    assert many["update"].flops == few["update"].flops > 0
    assert twice["update"].flops == pytest.approx(2 * few["update"].flops, rel=0.02)
    states = many["update"].allocated - few["update"].allocated
    assert states == phases(8, 8, 16)["update"].allocated - phases(4, 8, 16)["update"].allocated > 0
    assert phases(4, 8, 4, after=60)["update"].flops == few["update"].flops  # what has to fit is an epoch with it


def test_costs_grow_with_prompts_but_not_of_encoders(model):
    few, many = (dry_run(config(model, train__prompts=count)).phases for count in (4, 8))
    for name in ("rollout", "update"):
        assert many[name].flops == pytest.approx(2 * few[name].flops, rel=0.02)
    assert many["update"].allocated > few["update"].allocated  # their states
    assert dry_run(config(model, train__prompts=8), processes=2).phases["rollout"].flops == few["rollout"].flops
    few, many = (dry_run(config(model, train__prompts=count, memory__encoders="cpu")).phases["encode"]
                 for count in (4, 8))
    encoders = from_configs.pipeline(str(model / "model"), torch.bfloat16)
    moved = sum(p.numel() * p.element_size() for name in ("text_encoder", "text_encoder_2", "text_encoder_3")
                if getattr(encoders, name, None) is not None for p in getattr(encoders, name).parameters())
    assert many.fixed == few.fixed >= moved / BUS
    assert many.seconds - many.fixed == pytest.approx(2 * (few.seconds - few.fixed))


def test_phases_take_the_longer_side_and_a_first_epoch_more(model):
    """A tiny model's kernels are short, so that the host's time to start them decides; of a slow GPU its own does."""
    slow = GPU(1000.0, half=1e-6, single=1e-6, bandwidth=1.0)
    one, other = (dry_run(config(model), each) for each in (GPUS["H100"], slow))
    for name in ("rollout", "update"):
        assert one.phases[name].duration == one.phases[name].kernels * HOST > one.phases[name].seconds
        assert other.phases[name].duration == other.phases[name].seconds > other.phases[name].host
    assert one.seconds == pytest.approx(sum(phase.duration for phase in one.phases.values()))
    counts = dry_run(config(model))
    plans = (counts.first - LOADING - GROWTH * counts.peak / 2**30) / PLAN
    assert plans == pytest.approx(round(plans)) and 3 <= round(plans) <= 8  # forward, with a gradient, backward
    counts = dry_run(config(model, memory__states="cpu"))
    waits = counts.phases["rollout"].waits
    assert not [reason for reason in waits if reason.startswith("to the host: samplers/growth")]


def test_measured_factors_correct_phases_alone_and_name_cards_phases_and_commits(tmp_path):
    counts = estimate.Estimate({"rollout": Phase(seconds=10.0), "update": Phase(seconds=20.0)}, 0.0)
    table = tmp_path / "measured.json"
    table.write_text(json.dumps({"H100": {"StableDiffusionXLPipeline": {
        "rollout": 1.5, "update": 1.25, "commit": "0123456789abcdef"}}}))
    sdxl = "stabilityai/stable-diffusion-xl-base-1.0"
    found = counts.correct("NVIDIA H100", sdxl, table)
    assert found.seconds == 40.0 and (found.phase_seconds("rollout"), found.phase_seconds("update")) == (15.0, 25.0)
    assert found.basis == "computed, corrected by rollout 1.50, update 1.25 as measured on H100 at 01234567"
    for gpu, model in (("4090", sdxl), ("H100", "black-forest-labs/FLUX.1-dev"), ("H100", "a/folder")):
        other = counts.correct(gpu, model, table)
        assert other.seconds == 30.0 and other.basis == "computed, no measurement yet on this card"
    for card, pipelines in json.loads(estimate.MEASURED.read_text()).items():
        for pipeline, found in pipelines.items():
            factors = {name: value for name, value in found.items() if name in estimate.ORDER}
            assert card in GPUS and pipeline.endswith("Pipeline") and len(found["commit"]) == 40
            assert factors and all(0.5 < value < 10 for value in factors.values())


def test_seconds_per_click_by_hand():
    """A batch draws 12 s, and 56 images beside its 80; a head looks in three of four steps; eight rounds learn."""
    taken = {"encode": 2.0, "rollout": 8.0, "decode": 4.0, "update": 24.0}
    assert session.seconds_per_click(taken.__getitem__, 4) == pytest.approx(
        (2 + 12 * 136 / 80 + 6 + 8 * (2 + 8 + 6 + 24)) / 20)


def test_recorded_states_take_their_bytes_for_each_prompt():
    """Between dry runs of more prompts: 4 samples of 6 states, which are 4 x 32 x 32 in bf16."""
    peaks = [estimate.dry_run(tiny.config(method="flow_grpo", train__prompts=prompts, **IMAGES),
                              pipe=image_pipeline()).phases["update"].allocated for prompts in (2, 6)]
    assert (peaks[1] - peaks[0]) / 4 == near(4 * 7 * 4 * 32 * 32 * 2)


def test_an_old_policy_is_there_once_and_not_once_a_prompt(model):
    """Its copy is made in the first epoch, of which few prompts are run. A prompt has 4 samples, each with 6 states, 6
    targets and its end of 512 bytes, and 6 old velocities in fp32."""
    options = dict(method="diffusion_nft", train__micro_batch=4)
    few, many = (dry_run(config(model, train__prompts=count, adapter__rank=64, **options)).phases["rollout"].allocated
                 for count in (2, 8))
    plain, lagging = (dry_run(config(model, train__prompts=2, adapter__rank=64, parts__lag={"most": most}, **options)
                              ).phases["rollout"].allocated for most in (0.0, 0.9))
    each = (many - few) / 6
    assert each < lagging - plain and each == pytest.approx(4 * (13 * 512 + 6 * 1024), rel=0.05)


def test_options_of_memory_lower_the_phases_they_are_for(model):
    base = dry_run(config(model)).phases
    away = dry_run(config(model, memory__encoders="cpu")).phases
    assert away["encode"].allocated == pytest.approx(base["encode"].allocated, rel=0.02)
    assert away["rollout"].allocated < base["rollout"].allocated
    frozen = from_configs.pipeline(str(model / "model"), torch.bfloat16).transformer
    linear = [part.weight for part in frozen.modules() if isinstance(part, torch.nn.Linear)]
    for weights, share in (("int8", 0.5), ("nf4", 0.28)):
        lower = dry_run(config(model, memory__weights=weights)).phases["reward"].allocated
        saved = sum(2 * weight.numel() for weight in linear) * (1 - share) - max(2 * w.numel() for w in linear)
        assert base["reward"].allocated - lower == pytest.approx(saved, abs=512 * len(linear))
    turns = dry_run(config(model, memory__encoders="cpu", memory__denoiser="cpu")).phases
    weights, rounding = sum(p.numel() * p.element_size() for p in frozen.parameters()), 512 * len(linear) * 2
    assert away["encode"].allocated - turns["encode"].allocated == pytest.approx(weights, abs=rounding)
    assert turns["rollout"].allocated == pytest.approx(away["rollout"].allocated, rel=0.02)
    alone = dry_run(config(model, memory__encoders="ahead", cache="encoded")).phases
    vae = sum(p.numel() * p.element_size() for p in from_configs.pipeline(str(model / "model"), torch.bfloat16).vae.
              parameters())
    assert away["encode"].allocated - alone["encode"].allocated == pytest.approx(weights + vae, abs=2 * rounding)
    assert alone["rollout"].allocated == pytest.approx(away["rollout"].allocated, rel=0.02)
    waiting = dry_run(config(model, memory__offload="block_level", train__checkpointing=True)).phases
    blocks = [sum(p.numel() * p.element_size() for p in block.parameters()) for block in frozen.transformer_blocks]
    saved = base["reward"].allocated - waiting["reward"].allocated
    assert saved == pytest.approx(sum(blocks) - max(blocks), abs=rounding)
    shared = dry_run(config(model, memory__shard=True, train__prompts=4), processes=4).phases
    assert shared["reward"].allocated < dry_run(config(model, train__prompts=1)).phases["reward"].allocated + 2**18


@pytest.mark.parametrize("options, text", [
    ({"adapter__dora": True}, "does not cover adapter.dora"),
    ({"memory__context_parallel": 2}, "memory.context_parallel"),
    ({"parts__data__type": "FlowMatching"}, "supervised terms"), ({"train__pack": True}, "train.pack"),
    ({"model": "starter_text", "method": "grpo", "image__call": {}},
                                            "language models")])
def test_what_is_not_covered_is_refused(model, options, text):
    with pytest.raises(UserError, match=text):
        dry_run(config(model, **options))


def test_a_folder_without_a_pipeline_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert "no model_index.json in" in message(lambda: from_configs.pipeline(str(tmp_path), torch.bfloat16))


# --- settings that fit -----------------------------------------------------------------------------------------------
def test_settings_that_fit_or_nothing(model):
    recipe = config(model, method="flow_grpo", parts__kl__weight=0.0, train__micro_batch=8, train__group=8,
                    memory__encoders="cpu", memory__vae="sliced")
    counts = dry_run(recipe)
    less = dry_run(recipe.having({"train.checkpointing": True}))
    assert less.peak < counts.peak
    found, estimated = fit.nearest_settings(recipe, gpu((less.peak + counts.peak) / 2), counts)
    assert found == {"train.checkpointing": True} and estimated.peak == less.peak
    assert fit.nearest_settings(recipe, gpu(counts.peak), counts) == ({}, counts)
    recipe = config(model, **LOW)
    found, estimated = fit.nearest_settings(recipe, gpu(2**16), dry_run(recipe))
    assert found == {"memory.weights": "nf4", "memory.encoders": "ahead"} and estimated.above(2**16)


def test_batch_settings_are_the_largest_that_fit(model):
    recipe = config(model, method="flow_grpo", parts__kl__weight=0.0, train__group=8, train__steps=3)
    peaks = {size: dry_run(recipe.having({"train.micro_batch": size})).peak for size in (2, 8)}
    assert peaks[2] < peaks[8]
    assert fit.batch_settings(recipe, peaks[8], micro_batches=(2, 8)) == {"micro_batch": 8, "checkpointing": False}
    assert fit.batch_settings(recipe, 1000, micro_batches=(2,), checkpointing=(True,)) is None
    assert fit.batch_settings(recipe, peaks[2], micro_batches=(2, 8), checkpointing=(False,)) == {
        "micro_batch": 2, "checkpointing": False}
    auto = recipe.having({"train.micro_batch": "auto"})
    assert fit.settle(auto, gpu(peaks[8])).train.micro_batch == 8 and fit.settle(recipe, gpu(peaks[8])) is recipe
    assert fit.settle(auto, gpu(2**16)).train.micro_batch == 1, "the least, where nothing fits"


# --- the command -----------------------------------------------------------------------------------------------------
@pytest.fixture
def recipe(model, here):
    file = here / "recipe.yaml"
    file.write_text(config(model, reward="hpsv2.1", train__epochs=3_600_000, **LOW).yaml())
    return str(file)


def test_the_command_prints_phases_and_what_fits_and_takes_keys_that_override_the_recipe(recipe, capsys):
    page = printed(capsys, "check", "--recipe", recipe, "--gpu", "h200", "--verbose")
    assert "rollout" in page and "3.7 GiB of reward models" in page
    assert ": computed, no measurement yet on this card; " in page
    assert "0 per rollout step" in page and "does not fit" not in page
    seconds = dry_run(load(recipe), GPUS["H200"]).seconds
    assert seconds > 1e-3 and f"{1000 * seconds:,.1f} of all 3,600,000 epochs" in page
    assert main(["check", "--recipe", recipe, "--gpu", "h200", "--train.epochs=7", "--train.micro_batch", "2",
                 "--verbose"]) == 0
    page = capsys.readouterr().out
    assert "of all 7 epochs" in page and "2 at once" in page


REPORT = {"peak": 16.83, "room": 22.04, "hours": 41.9, "processes": 1, "gpu": "4090", "above": [], "nearest": None,
          "basis": "computed"}
NEAREST = {"settings": {"train.checkpointing": True}, "peak": 19.0, "seconds": 61.4, "enough": True}


@pytest.mark.parametrize("given, said", [
    ({}, "fits: 16.8 of 22.0 GiB, 42 h on one 4090 (computed)"),
    ({"hours": 1.64}, "fits: 16.8 of 22.0 GiB, 1.6 h on one 4090 (computed)"),
    ({"hours": 1375.5, "processes": 8, "gpu": "H100"}, "fits: 16.8 of 22.0 GiB, 1,376 h on 8 H100 (computed)"),
    ({"hours": 68.5417, "processes": 8, "gpu": "A100"}, "fits: 16.8 of 22.0 GiB, 69 h on 8 A100 (computed)"),
    ({"peak": 30.0, "above": ["rollout", "update"], "nearest": NEAREST},
     "does not fit: 30.0 of 22.0 GiB, 42 h on one 4090 (computed)\n"
     "rollout, update: with train.checkpointing: true it fits, in 19.0 GiB and 61 s")])
def test_the_first_line_says_whether_it_fits(given, said):
    assert summary(REPORT | given) == said


def test_the_command_says_it_first_and_the_rest_on_request(recipe, capsys):
    """Two lines, of which the first is the first of --verbose too."""
    lines = printed(capsys, "check", "--recipe", recipe, "--gpu", "h200").splitlines()
    peak, room = (number / 2**30 for number in (dry_run(load(recipe), GPUS["H200"]).peak, GPUS["H200"].room))
    assert lines[0].startswith(f"fits: {peak:.1f} of {room:.1f} GiB, ")
    assert lines[0].endswith(" h on one H200 (computed, no measurement yet on this card)")
    assert lines[1:] == ["--verbose: memory and seconds by phase, and what is counted"]


def test_a_model_of_few_steps_has_the_seconds_per_click_of_taste(recipe, model, capsys):
    (few := model / "tiny-turbo").symlink_to(model / "model")
    said = printed(capsys, "check", str(few), "--recipe", recipe, "--gpu", "h200").splitlines()[-2]
    sitting = session.of_recipe(load(recipe, {"model": str(few)}))
    counts = dry_run(sitting, GPUS["H200"])
    seconds = session.seconds_per_click(counts.phase_seconds, sitting.train.steps)
    assert seconds > 0.01 and said == (f"flowgrpo taste: {seconds:.1f} s per click, {counts.peak / 2**30:.1f} GiB "
                                       "(computed, no measurement yet on this card)")


def test_the_command_shows_what_it_does_and_answers_from_a_cache_the_second_time(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = ["check", "--recipe", recipe, "--gpu", "h200", "--verbose"]
    def answer(*more: str) -> tuple[str, str]:
        assert main([*asked, *more]) == 0
        return capsys.readouterr()
    first, again = answer(), answer()
    assert first.err == "dry run on H200, up to two minutes ...\n" and again.err == "" and again.out == first.out
    assert answer("--train.micro_batch=2").err == first.err  # another recipe
    for file in (tmp_path / "cache" / "flowgrpo").iterdir():
        file.write_text("{")
    assert answer() == first


def test_the_command_as_json_names_the_nearest_settings(recipe, model, capsys, monkeypatch):
    monkeypatch.setitem(GPUS, "4090", gpu(4 * 0.986e9 + 2**16))
    assert main(["check", str(model / "model"), "--recipe", recipe, "--gpu", "4090", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["gpu"] == "4090" and set(report["above"]) == set(report["phases"]) and not report["measured"]
    assert report["nearest"]["settings"]["memory.weights"] == "nf4" and not report["nearest"]["enough"]
    assert report["waits_per_step"] == {} and set(report["phases"]) <= set(estimate.ORDER)


def test_the_command_refuses_what_a_sharded_run_refuses(model, tmp_path, capsys):
    file = tmp_path / "sharded.yaml"
    file.write_text(config(model, memory__shard=True, memory__weights="int8").yaml())
    assert main(["check", "--trust", "--recipe", str(file), "--gpu", "h200", "--processes", "2"]) == 2
    assert "memory.shard is true, which does not go with memory.weights: int8" in capsys.readouterr().err


@pytest.mark.parametrize("arguments, text", [
    (["--gpu", "H100"], "give --recipe"), ([], "needs a MODEL"),
    (["--gpu", "H10", "--recipe", "x"], "whose numbers are not known"),
    (["--train.micro_bach=2"], "unknown option --train.micro_bach: did you mean '--train.micro_batch'?"),
    (["--gpus", "H100"], "unknown option --gpus: did you mean '--gpu'?"),
    (["starter", "--train.micro_batch=0"], "train.micro_batch"),
    (["starter", "2"], "expected one model, got starter and 2")])
def test_the_command_says_what_is_missing(arguments, text, capsys):
    assert text in error_line(capsys, "check", *arguments)


RANK = 32
CALL = {"max_sequence_length": 2, "height": 64, "width": 64}
IMAGES = dict(precision="bf16", image__call=CALL, adapter__rank=RANK, train__updates=2)


def near(count):
    return pytest.approx(count, rel=0.05)


def image_pipeline():
    """A tiny SD3 with a denoiser 128 wide, beside which the allocator's steps of 512 bytes are small."""
    pipe = tiny.sd3()
    pipe.register_modules(transformer=lively(SD3Transformer2DModel(
        sample_size=32, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=32,
        num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=128, pooled_projection_dim=32,
        pos_embed_max_size=16, qk_norm="rms_norm")))
    return pipe.to(torch.bfloat16)


def image_trainer(config):
    policy = tiny.PipelinePolicy(image_pipeline(), config.adapter, precision="bf16", call=CALL)
    return tiny.Trainer(config, tiny.Accelerator(cpu=True), policy, {"red": tiny.red},
                        ([tiny.Prompt(text) for text in tiny.PROMPTS], []))


def text_trainer(config):
    policy = tiny_text.CausalLM(*tiny_text.model(hidden_size=128, intermediate_size=256), config.adapter, config.text)
    return tiny_text.trainer(policy, adapter__rank=RANK, method=config.method)


def kept(make, config):
    """Return a trainer whose second epoch has been sampled, and the bytes of all tensors that are alive, by what they
    are: frozen weights, LoRA, what an update leaves, and what a rollout leaves."""
    with memory.Peak() as seen:
        def alive():
            gc.collect()
            return sum(seen._alive.values())
        trainer = make(config)
        weights = alive()
        trainer.run_epoch()
        updated = alive()
        epoch = sampling.draw(trainer)
        recorded = alive() - updated
    assert epoch.parts
    lora = sum(parameter.nbytes for parameter in trainer.policy.weights.parameters())
    return trainer, {"weights": weights - lora, "lora": lora, "optimizer": updated - weights, "states": recorded}


@pytest.mark.parametrize("method", ["flow_grpo", "diffusion_nft"])
def test_an_image_model_keeps_what_both_tables_say(method, monkeypatch):
    config = tiny.config(method=method, **IMAGES)
    trainer, found = kept(image_trainer, config)
    told = memory.memory(trainer.policy, config, trainer.policy.encode(["red"]))["update"]
    assert sum(told[name] for name in ("text encoders", "denoisers", "vae", "other")) == near(found["weights"])
    assert told["trained"] == found["lora"]
    assert told["gradients and optimizer"] + told.get("averages", 0) == near(found["optimizer"])
    assert told["recorded states"] == near(found["states"])
    clocks, extrapolated = [], estimate._extrapolate
    monkeypatch.setattr(estimate, "_extrapolate", lambda meta, clock, *counts: (
        clocks.append(clock), extrapolated(meta, clock, *counts))[1])
    estimate.dry_run(config, pipe=image_pipeline())
    assert clocks[0].began == near(found["weights"] + found["lora"] + found["optimizer"])
    assert clocks[0].drawn - clocks[0].began == near(found["states"])


def test_a_language_model_keeps_what_the_table_says():
    config = tiny_text.config(adapter__rank=RANK, method="grpo")
    trainer, found = kept(text_trainer, config)
    told = text_memory.memory(trainer.policy, config, trainer.policy.encode(["1+2="]))["update"]
    assert told["model"] == near(found["weights"]) and told["trained"] == found["lora"]
    assert told["gradients and optimizer"] == near(found["optimizer"])
    assert found["states"] < 0.01 * found["lora"]  # tokens and their log-probabilities
