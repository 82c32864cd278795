"""Runs whose samples an engine draws: what is replayed, what is sent, what is refused."""

import pytest
import torch
from safetensors.torch import load as load_tensors

import flowgrpo
from flowgrpo.config import load
from flowgrpo.contrib.engine import sampler
from flowgrpo.contrib.engine.client import EngineError
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.methods import keys_read, validate
from flowgrpo.methods.setup import Setup
from flowgrpo.rollouts.denoising import DenoisingRollouts
from flowgrpo.tools.check.tiny import make
from flowgrpo.training import extensions, sampling
from tests.contrib.engine.server import TinyEngine, engine_names, serving, tensor
from tests.helpers import tiny
from tests.helpers.refusals import message, refused

ALONE = {"roots": None}


def trainer(url, stirred=True, **options):
    usual = dict(method="flow_grpo", train__grid="stock", rollout__engine=url, train__steps=4, train__lr=1e-2)
    made = tiny.trainer(**usual | options)
    if stirred:
        tiny.stir(made.policy)
    return made


def drawn(made):
    """The parts of an epoch, and the conditioning of its prompts."""
    with made.extensions.around_epoch():
        parts, conditioning, _ = sampling.sample(made, made.prompts[:2])
    return parts, conditioning


def gap(made, part, conditioning):
    """The largest difference of the replay's log-probabilities and the recorded ones."""
    with torch.no_grad():
        return max(float((new.logp - part.transitions[k].old.logp[rows]).abs().max())
                   for k, rows, new in made.rollouts.replay(part, conditioning))


@pytest.mark.parametrize("options", [
    dict(parts=ALONE), dict(parts={**ALONE, "kernel": {"type": "CPS", "level": 0.8}}),
    dict(parts={**ALONE, "plan": {"type": "Sliding", "size": 2}}), dict(parts=ALONE, train__guidance=3.0),
    dict(parts={**ALONE, "kl": {"type": "GaussianKL", "weight": 0.1}}),
    dict(method="flow_grpo+grpo_guard", parts=ALONE), dict(parts=ALONE, train__micro_batch=3)], ids=repr)
def test_a_replay_gives_the_log_probabilities_of_the_engine(url, options):
    made = trainer(url, **options)
    parts, conditioning = drawn(made)
    assert sum(len(part.prompts) for part in parts) == 8 and all(part.seeds is None for part in parts)
    assert max(gap(made, part, conditioning) for part in parts) < 2e-5
    for part in parts:
        for one, other in zip(part.transitions, part.transitions[1:]):
            assert other.step != one.step + 1 or one.x_next is other.x
    finals = torch.cat([part.finals[0] for part in parts])
    assert len(finals.flatten(1).unique(dim=0)) == 8


@pytest.mark.parametrize("name", ["FluxPipeline", "HunyuanVideoPipeline"], ids=["flux", "video"])
def test_packed_latents_and_clips_are_replayed(name):
    """FLUX packs its latents and has its guidance embedded, HunyuanVideo draws clips."""
    (pipe, call), other = make(name), make(name)[0]
    call = {("num_frames" if key == "frames" else key): value for key, value in call.items()}
    policy = tiny.stir(tiny.policy(pipe, call=call))
    with serving(TinyEngine(other)) as address:
        own = trainer(address, stirred=False, policy=policy, parts=ALONE, image__call=call)
        conditioning = own.rollouts.conditioning(own.prompts[:2])
        parts = [part for part, _ in own.rollouts.sample(conditioning, 0, None)]
    assert max(gap(own, part, conditioning) for part in parts) < 2e-5
    assert sum(len(part.finals[0]) for part in parts) == 8


@pytest.mark.fast
def test_the_engine_has_the_lora_of_every_epoch_and_the_update_changes_the_weights(url, own):
    made = trainer(url, parts=ALONE)
    before = {key: value.clone() for key, value in made.policy.weights.named.items()}
    for made.epoch in range(3):
        held = {key: value.clone() for key, value in made.policy.weights.named.items()}
        made.run_epoch()
        found = own.held()
        for key, value in engine_names(held).items():  # the weights that the epoch began with
            assert torch.equal(found[key], value)
        assert made.first_ratio.max_log_ratio < 2e-5
    assert any(not torch.equal(value, before[key]) for key, value in made.policy.weights.named.items())
    assert made.rollouts.rollout_evaluations == 3 * 8 * 4
    made.extensions.close()


def test_rollouts_of_final_states_are_ode_steps(url, own):
    made = trainer(url, method="diffusion_nft", train__lr=1e-3)
    metrics = made.run_epoch()
    asked = [body for path, body in own.seen if path == "/rollout/generate"]
    assert {body["rollout_sde_type"] for body in asked} == {"ode"} and metrics["skipped_updates"] == 0
    assert all(body["rollout_return_step_indices"] == [4] for body in asked)


def test_memory_is_released_between_rollouts(url, own):
    made = trainer(url, parts=ALONE, rollout__release=True)
    own.asleep = True
    made.run_epoch()
    paths = [path for path, _ in own.seen]
    assert own.asleep and paths.index("/resume_memory_occupation") < paths.index("/v1/set_lora")
    assert paths[-1] == "/release_memory_occupation"


def test_an_old_policy_that_draws_is_what_the_engine_gets(url, own):
    made = trainer(url, method="diffusion_nft", parts={"lag": {"start": 1.0, "most": 1.0}})
    first = {key: value.clone() for key, value in made.policy.weights.named.items()}
    for made.epoch in range(2):
        made.run_epoch()
    found = own.held()
    assert all(torch.equal(found[key], value) for key, value in engine_names(first).items())
    assert not all(torch.equal(value, first[key]) for key, value in made.policy.weights.named.items())


def test_an_engine_in_half_precision_does_not_stop_a_run_in_fp32(url, own, capsys):
    own.fault = "bf16 states"
    made = trainer(url, parts=ALONE)
    made.run_epoch()
    assert made.first_ratio.rescore and "computed again as the replay does" in capsys.readouterr().out


@pytest.mark.parametrize("fault, said", [
    ("no LoRA", "replay and rollout disagree"), ("wrong kernel", "replay and rollout disagree"),
    ("unsaid sigma", "replay and rollout disagree"), ("wrong sigma", "samples on other sigmas than the pipeline"),
    ("another LoRA", "holds another LoRA")])
def test_an_engine_that_draws_from_another_policy_stops_the_run(url, own, fault, said):
    own.fault = fault
    made = trainer(url, parts=ALONE, stirred=False)
    tiny.stir(made.policy, 1.0)
    refused(said, made.run_epoch)


def test_an_engine_of_another_size_is_named(url, own):
    own.pipe.transformer.config.sample_size = own.pipe.default_sample_size = 4
    made = trainer(url, parts=ALONE)
    assert "states have the shape [4, 4, 4], the pipeline's [4, 8, 8]" in message(made.run_epoch, error=EngineError)


def test_one_sample_of_another_size_is_named(url, own):
    whole = own.drawn
    def cut(*asked):
        answers = whole(*asked)
        states = load_tensors(answers[-1]["dit_trajectory"]["latents"]["data"])["t"]
        answers[-1]["dit_trajectory"]["latents"] = tensor(states[..., :4])
        return answers
    own.drawn = cut
    with pytest.raises(EngineError, match=r"states have the shape \[4, 8, 4\], the pipeline's \[4, 8, 8\]"):
        trainer(url, parts=ALONE).run_epoch()


@pytest.mark.parametrize("options, said", [
    (dict(train__grid="shifted"), "given sigmas: set train.grid: stock"),
    (dict(method="mix_grpo", parts={"plan": {"size": 2}}), "a shared initial noise: set parts.roots: null"),
    (dict(method="branch_grpo", parts={"plan": {"splits": [0, 2]}}), "trees"),
    (dict(method="dance_grpo", parts=ALONE), "the kernel DanceSDE: it draws by FlowSDE or CPS"),
    (dict(parts={**ALONE, "tail": 0.5, "plan": {"type": "Sliding", "size": 1}}), "given sigmas: set parts.tail: 1"),
    (dict(parts={**ALONE, "plan": {"type": "Sliding", "size": 1}, "solver": {"type": "DPMSolver2M"}}),
      "the solver DPMSolver2M: it takes Euler steps"),
    (dict(parts={**ALONE, "strides": [1, 2]}), "samples that are finished on several grids"),
    (dict(parts={**ALONE, "progress": {"type": "Progress"}}), "clean predictions on the way"),
    (dict(parts={**ALONE, "advantage": {"type": "SameNoise"}}), "draws from the same initial noise"),
    (dict(parts={**ALONE, "rehearsal": {"type": "Rehearsal", "weight": 0.1}}), "draws from the base model"),
    (dict(method="alignprop", parts={"backprop": {"checkpointing": False}}), "trains a reward's gradient"),
    (dict(method="sol_rl", parts={"preview": {"pool": 6, "steps": 2}}), "parts.preview"),
    (dict(parts=ALONE, adapter__rank=0), "adapter.rank: 0"), (dict(parts=ALONE, adapter__dora=True), "adapter.dora"),
    (dict(parts=ALONE, train__one_pass=True), "train.one_pass")], ids=repr)
def test_what_a_stock_engine_cannot_do_is_refused_in_one_line(options, said):
    usual = dict(method="flow_grpo", train__grid="stock", train__steps=4)
    settings = tiny.config(**usual | options)
    made = tiny.trainer(**usual | options)
    needs = [*sampler.of_method(settings, made.method)]
    for spec in made.rollouts.explorations(0):
        needs += sampler.of_rollout(spec, made.rollouts.grid)
    assert any(said in need for need in needs), needs
    refused("rollout.engine: a stock engine does not do .*; or leave rollout.engine out", sampler.require, iter(needs))


def far(images, prompts, base):
    """How far an image is from the base model's."""
    return (images - torch.stack(list(base))).abs().mean((1, 2, 3))


@pytest.mark.parametrize("facts, said", [
    (dict(all_processes=2), "got 2 processes, expected 1"),
    (dict(trained={"far": far}), "the reward 'far' compares with the base model's sample"),
    (dict(split=([Prompt("red", image="a.png")], [])), "prompts bring images or other inputs"),
    (dict(), "given sigmas: set train.grid: stock")],
    ids=["processes", "reward", "images", "grid"])
def test_a_run_is_refused_before_its_model_is_loaded(facts, said):
    settings = tiny.config(method="flow_grpo", train__grid="stock" if facts else "shifted",
                           rollout__engine="http://127.0.0.1:9")
    method = validate.resolve(settings, "flow").having(roots=None)
    refused(said, extensions.check, Setup(settings, "pipeline", method, **facts))


def test_a_key_of_an_engine_without_one_is_refused():
    settings = load(None, {"rollout.release": True})
    with pytest.raises(UserError, match="rollout.release is True, but the pipeline itself draws"):
        keys_read.check(Setup(settings, "pipeline", tiny.trainer().method))
    assert DenoisingRollouts.drawer is None


def test_a_whole_run_trains_by_the_engine_and_goes_on_after_its_end(tmp_path, own, url):
    options = dict(method="flow_grpo", parts=ALONE, held_out=0.3, output=str(tmp_path), name="run", tracker="none",
                   device="cpu", precision="fp32", rollout={"engine": url, "folder": str(tmp_path / "loras")},
                   image={"call": tiny.CALL}, adapter={"rank": 2},
                   eval={"steps": 3, "guidance": 1.0, "prompts": 2})
    train = dict(epochs=1, prompts=2, group=4, micro_batch=4, steps=4, grid="stock", guidance=1.0)
    for epochs in (1, 2):
        flowgrpo.align(tiny.sd3(), tiny.red, tiny.PROMPTS, resume=epochs > 1, train=train | {"epochs": epochs},
                       **options)
    asked = [body for path, body in own.seen if path == "/rollout/generate"]
    assert sum(body["num_outputs_per_prompt"] for body in asked) == 2 * 8
    assert len({tuple(body["extra_sampling_params"]["seed"]) for body in asked}) == len(asked) == 4
    assert not [*(tmp_path / "loras").iterdir()]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
