"""`flowgrpo verify`: the numbers of an engine that is right, and the name of each planted fault."""

import math

import pytest
import torch

from flowgrpo.cli import main
from flowgrpo.config.sections import Adapter
from flowgrpo.contrib.engine import verify
from flowgrpo.contrib.engine.client import Engine, EngineError
from flowgrpo.contrib.engine.lora import LoraSender
from flowgrpo.contrib.engine.verify import Asked, Row
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from tests.contrib.engine.server import TinyEngine, serving
from tests.helpers import tiny
from tests.helpers.refusals import error_line, message, refused

ASKED = Asked(("red", "blue"), count=2, steps=4)


def policy_of(precision="fp32"):
    """The pipeline that the engine serves, with a LoRA that tells."""
    policy = tiny.policy(tiny.sd3().to(dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[precision]),
                         precision=precision)
    return tiny.stir(policy, 0.5)


def rows(fault=None, asked=ASKED, precisions=("fp32",), lora=True, timeout=60.0):
    own = TinyEngine(tiny.sd3(), fault, slow=1.0)
    with serving(own) as url:
        engine = Engine(url, timeout, retries=0)
        return verify.rows(engine, policy_of, precisions, asked, LoraSender(engine) if lora else None)


def named(found):
    """The faults of the rows by (LoRA, batch), without what stands behind their names."""
    return {(row.lora, row.batch): [line.partition(":")[0] for line in row.found] for row in found if row.found}


@pytest.mark.parametrize("kind, level", [("sde", 0.7), ("cps", 0.5)])
def test_an_engine_that_is_right_has_rows_without_a_fault(kind, level):
    found = rows(asked=Asked(("red", "blue"), count=2, steps=4, kind=kind, level=level))
    assert [(row.precision, row.batch, row.lora) for row in found] == [
        ("fp32", 1, False), ("fp32", 2, False), ("fp32", 1, True), ("fp32", 2, True)]
    assert all(len(row.by_step) == 3 and row.largest < 2e-5 and not row.found for row in found)
    assert all(math.isclose(row.clips["PlainRatio"], 10 * row.largest) for row in found)


def test_clip_ranges_are_in_the_unit_of_each_log_ratio(own, url):
    """Of a gap dv in the velocities: the plain log-ratio z dm / s - (dm / s)^2 / 2 as a mean, Guard's z dm and twice
    s^2 times the plain one, at the step where each is largest."""
    with torch.no_grad():
        own.pipe.transformer.proj_out.weight.mul_(1 + 1e-3)  # as if the engine rounded
    policy, asked = policy_of(), Asked(("red",), count=1, steps=4)
    [row] = verify.rows(Engine(url), lambda _: policy, ("fp32",), asked, None)
    spec = verify.rollout_spec(policy, policy.encode(["red"], [""]), asked)
    stds = [spec.transition(*[torch.zeros(1, 1)] * 2, spec.grid, step).std.item() for step in spec.schedule.trained]
    plain = torch.tensor(row.by_step)
    assert row.clips["PlainRatio"] == pytest.approx(10 * plain.max().item())
    assert row.clips["SquaredErrorRatio"] == pytest.approx(20 * (torch.tensor(stds).square() * plain).max().item())
    assert 0 < row.clips["Guard"] < 10 * (1.1 * torch.tensor(stds) * plain).max().item() < row.clips["PlainRatio"]


def test_half_precision_shows_in_its_rows_alone():
    found = rows(precisions=("fp32", "bf16"), lora=False)
    exact, half = (max(row.largest for row in found if row.precision == name) for name in ("fp32", "bf16"))
    assert exact < 2e-5 and 1e-4 < half < 0.02 and not any(row.found for row in found)
    lines = verify.table(found)
    assert lines[-2].startswith(f"smallest clip range in bf16: {10 * half:.1e} of PlainRatio, ")


def test_a_model_without_a_flow_is_refused():
    policy = tiny.policy(tiny.sd15(), call={})
    assert "expected a flow" in message(lambda: verify.rollout_spec(policy, policy.encode(["red"]), ASKED))


# --- the faults, and where each shows --------------------------------------------------------------------------------
EVERY = [(False, 1), (False, 2), (True, 1), (True, 2)]
OF_TWO = [place for place in EVERY if place[1] > 1]
SHIFTED = ("sde", "wrong sigma", EVERY)


@pytest.mark.parametrize("fault, kind, name, places, told", [
    ("wrong sigma", *SHIFTED, ""), ("unsaid sigma", *SHIFTED, "sigmas of the shift 3.5 and sends others"),
    ("no LoRA", "sde", "another LoRA", EVERY[2:], "draws without the LoRA, from the base model"),
    ("bf16 states", "sde", "bf16 states", EVERY, ""),
    ("repeated seed", "sde", "repeated seed", OF_TWO, "samples 0 and 1 of 4 have one initial noise"),
    ("wrong kernel", "sde", "wrong kernel", EVERY, "draws by CPS"),
    ("wrong kernel", "cps", "wrong kernel", EVERY, "draws by FlowSDE"),
    ("shuffled batch", "sde", "shuffled batch", OF_TWO,
     "sample 0 of a request of 2 is sample 1 of those that come one by one"),
    ("mixed prompts", "sde", "shuffled batch", EVERY[:2], "sample 0, of prompt 0, was drawn for prompt 1")])
def test_a_fault_of_the_rows_is_named(fault, kind, name, places, told):
    found = rows(fault, Asked(("red", "blue"), count=2, steps=4, kind=kind), lora=fault != "mixed prompts")
    assert named(found) == {place: [name] for place in places}
    assert told in next(row for row in found if row.found).found[0]


def test_outputs_of_other_weights_are_named():
    with serving(TinyEngine(tiny.sd3(seed=1))) as url:
        found = verify.rows(Engine(url), policy_of, ("fp32",), ASKED, None)
    assert {name for names in named(found).values() for name in names} == {"other model outputs"}


@pytest.mark.parametrize("fault, options, told", [
    ("another LoRA", {}, "holds another LoRA"), ("dropped request", {}, "sent 1 of 2 samples"),
    ("time-out", {"lora": False, "timeout": 0.2}, "did not answer within 0.2 s")])
def test_a_fault_of_an_answer_is_named(fault, options, told):
    with pytest.raises(EngineError, match=told) as error:
        rows(fault, **options)
    assert error.value.fault == fault


def test_the_table_says_the_widest_ratio_of_each_precision():
    lines = verify.table([Row("fp32", 1, False, (1e-6, 2e-6), {"PlainRatio": 2e-5, "Guard": 3e-6}),
                          Row("bf16", 1, True, (1e-3, 5e-4), {"PlainRatio": 1e-2, "Guard": 2e-3}),
                          Row("bf16", 2, True, (1e-3, 5e-4), {"PlainRatio": 9e-3, "Guard": 4e-3})])
    assert lines == ["first |log ratio|, by step 0 to 1:",
                     "fp32, batch 1, base:     largest 2.0e-06; 1e-06 2e-06",
                     "bf16, batch 1, LoRA:     largest 1.0e-03; 1e-03 5e-04",
                     "bf16, batch 2, LoRA:     largest 1.0e-03; 1e-03 5e-04",
                     "smallest clip range in fp32: 2.0e-05 of PlainRatio, 3.0e-06 of Guard",
                     "smallest clip range in bf16: 1.0e-02 of PlainRatio, 4.0e-03 of Guard",
                     "a narrower one works where a run computes old log-probabilities again, as it does by itself"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tiny.sd3(), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("lora", [None, "random"])
def test_the_command_prints_the_rows(folder, lora, own, url, capsys):
    options = ["--precision=fp32", "--prompt=red", "--prompt=blue", "--train.steps=4", "--device=cpu",
               "--image.call={max_sequence_length: 2}", *([f"--lora={lora}"] if lora else [])]
    assert main(["verify", url, str(folder), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(": tiny, version 0.5.23") and lines[-2].startswith("smallest clip range in fp32: ")
    assert sum("LoRA:" in line for line in lines) == (2 if lora else 0) and own.lora == ""


def test_the_command_takes_a_lora_file_and_ends_with_2_at_a_fault(folder, tmp_path, capsys):
    policy = tiny.stir(tiny.policy(rank=3), 0.5)
    policy.weights.save(tmp_path / "lora")
    options = ["--precision=fp32", "--prompt=red", "--train.steps=4", "--device=cpu", "--count=1",
               "--image.call={max_sequence_length: 2}", f"--lora={tmp_path / 'lora'}"]
    with serving(TinyEngine(tiny.sd3(), "no LoRA")) as url:
        assert main(["verify", url, str(folder), *options]) == 2
    assert "fault: another LoRA: the engine draws without the LoRA" in capsys.readouterr().out
    with serving(TinyEngine(tiny.sd3(), "time-out", slow=1.0)) as url:
        assert main(["verify", url, str(folder), *options, "--timeout=0.2"]) == 2
    assert "flowgrpo: error: fault: time-out: " in capsys.readouterr().err


def test_a_lora_that_an_engine_changes_is_refused(tmp_path):
    PipelinePolicy(tiny.sd3(), Adapter(rank=2, dora=True), call=tiny.CALL).weights.save(tmp_path / "lora")
    assert "has use_dora, expected a plain LoRA" in message(lambda: verify.adapter_of(tmp_path / "lora"))
    (tmp_path / "other.safetensors").write_bytes(b"other")
    refused("expected a LoRA of a denoiser with its rank", verify.adapter_of, tmp_path / "other.safetensors")


@pytest.mark.parametrize("options, said", [
    (["--lora=nowhere"], "--lora nowhere: expected a folder with pytorch_lora_weights.safetensors"),
    (["extra"], "takes URL and MODEL, got extra too"), (["--train.stepss=2"], "unknown option --train.stepss")])
def test_a_slip_of_the_command_line_is_one_line(folder, options, said, capsys):
    error = error_line(capsys, "verify", "http://127.0.0.1:9", str(folder), *options)
    assert said in error
