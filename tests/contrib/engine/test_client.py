"""The client of an engine: MessagePack, requests and their answers, and what it says where a server fails."""

import copy
import hashlib
import math
import re
import socket
import struct

import pytest
import torch
from safetensors.torch import save

from flowgrpo import gaussian
from flowgrpo.contrib.engine import client, lora
from flowgrpo.contrib.engine.client import Engine, EngineError, Request
from flowgrpo.errors import UserError
from flowgrpo.samplers.kernels import CPS, FlowSDE
from tests.contrib.engine.server import TinyEngine, engine_names, packed, serving
from tests.helpers import tiny
from tests.helpers.refusals import message, refused

VALUES = [None, True, False, 0, 127, 128, 2**63, -1, -2**40, 0.5, "", "a" * 40, "ü", b"", b"\x00" * 300, [], [1, [2]],
          {"a": {"b": [1.5, None]}}, list(range(20)), {str(k): k for k in range(20)}]
# By the specification of MessagePack, forms that the server of the tests does not write.
FORMS = [(b"\xff", -1), (b"\xe0", -32), (b"\xcc\xff", 255), (b"\xcd\x01\x00", 256), (b"\xce\x00\x01\x00\x00", 65536),
         (b"\xd0\x80", -128), (b"\xd1\xff\x00", -256), (b"\xd2\xff\xff\xff\xfe", -2), (b"\xca\x3f\x80\x00\x00", 1.0),
         (b"\xd9\x01a", "a"), (b"\xda\x00\x01a", "a"), (b"\xc4\x01a", b"a"), (b"\xc5\x00\x01a", b"a"),
         (b"\xdc\x00\x01\x07", [7]), (b"\xde\x00\x01\xa1a\x07", {"a": 7})]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_message_is_read(value):
    assert client.unpack(packed(value)) == value


@pytest.mark.parametrize("content, value", FORMS)
def test_every_form_of_a_value_is_read(content, value):
    found = client.unpack(content)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("content, why", [
    (b"", "ends within"), (b"\xa3ab", "ends within"), (b"\xcf\x00", "ends within"), (b"\x92\x01", "ends within"),
    (b"\x01\x02", "goes on behind"), (b"\xd4\x01\x00", "kind 0xd4"), (b"\xc1", "kind 0xc1"),
    (b"\x81\xc0\x01", "key is of the type NoneType"), (b"\x91" * 100 + b"\x01", "more than 64"),
    (struct.pack(">BI", 0xdd, 2**32 - 1), "ends within"), (b"\xa1\xff", "utf-8")])
def test_other_bytes_are_refused(content, why):
    refused(why, client.unpack, content, error=ValueError)


def request(**changes):
    given = dict(prompt="red", negative="", seeds=(3, 2**60), steps=4, sde="sde", level=0.7, noisy=(0, 1, 2),
                 states=(0, 1, 2, 3, 4), means=True, further={"guidance_scale": 1.0, **tiny.CALL})
    return Request(**{**given, **changes})


@pytest.mark.parametrize("sde, kernel", [("sde", FlowSDE(0.7)), ("cps", CPS(0.7))])
def test_samples_and_their_log_probabilities_are_those_of_the_kernel(url, sde, kernel):
    samples = Engine(url).rollout(request(sde=sde))
    assert len(samples) == 2 and not torch.equal(samples[0].states[0], samples[1].states[0])
    for sample in samples:
        assert sample.states.shape == (5, *tiny.LATENTS) and sample.sigmas[0] == 1 and sample.sigmas[-1] == 0
        for step in range(3):
            x = sample.states[step][None]
            drawn = kernel(x, sample.outputs[step][None], sample.sigmas, step)
            assert torch.allclose(drawn.mean[0], sample.means[step], atol=1e-6)
            expected = gaussian.log_prob(drawn, sample.states[step + 1][None])
            assert abs(float(expected) - float(sample.logp[step])) < 1e-5


def test_a_request_has_every_seed_and_the_states_come_back(url):
    [every] = Engine(url).rollout(request(seeds=(1,)))
    [some] = Engine(url).rollout(request(seeds=(1,), states=(1, 2, 4), means=False))
    assert torch.equal(some.states, every.states[[1, 2, 4]]) and some.means is None
    body = request().body()
    assert body["seed"] == 3 and body["extra_sampling_params"] == {"seed": [3, 2**60], "max_sequence_length": 2}
    assert body["num_outputs_per_prompt"] == 2 and body["guidance_scale"] == 1.0
    assert "extra_sampling_params" not in request(seeds=(3,), further={"height": 16}).body()


@pytest.mark.parametrize("fault, kind, said", [
    ("dropped request", "dropped request", "sent 1 of 2 samples of 'red': a request was dropped"),
    ("no tensor", "answer", "sent no tensor latents"),
    ("pickle", "answer", "sent no tensor rollout_log_probs"),
    ("time-out", "time-out", "did not answer within 0.3 s: raise rollout.timeout")])
def test_a_server_that_fails_is_named_in_one_line(fault, kind, said):
    with serving(TinyEngine(tiny.sd3(), fault, slow=1.0)) as url:
        engine = Engine(url, timeout=0.3 if fault == "time-out" else 60.0)
        with pytest.raises(EngineError, match=said) as error:
            engine.rollout(request())
    assert error.value.fault == kind and "\n" not in str(error.value)


def test_busy_absent_and_refusing_servers(url, own):
    own.failures = 2
    assert len(Engine(url, wait=0.01).rollout(request())) == 2
    own.failures = 3
    with pytest.raises(EngineError, match=r"answered 503: warming up \(asked 3 times\): is the engine running"):
        Engine(url, wait=0.01).rollout(request())
    own.seen.clear()
    with pytest.raises(EngineError, match="answered 404: Not Found: is it an SGLang-Diffusion server"):
        Engine(url)._request("POST", "/v2/other", {})
    assert len(own.seen) == 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(EngineError, match=r"refused.*\(asked 2 times\)"):
            Engine(f"http://127.0.0.1:{free.getsockname()[1]}", retries=1, wait=0.01).info()


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://host", "http://user:word@host", "http://host:0",
    "http://[::1", "http://h\u00f6st:1", "http://h ost:1", "http://h:99999", "http://h\n:1"])
def test_an_address_of_another_form_is_refused(url):
    refused("rollout.engine is .*: expected the address of an engine", Engine, url)


def test_memory_is_released_and_a_hash_is_of_dtype_shape_and_bytes(url):
    engine = Engine(url, retries=0)
    engine.release()
    assert "the engine sleeps" in message(engine.rollout, request(), error=EngineError)
    engine.resume()
    assert engine.rollout(request()) and engine.info()["version"] == "0.5.23"
    value = torch.tensor([[1.0, 2.0]], dtype=torch.float32)
    expected = hashlib.sha256(b"torch.float32(1, 2)" + struct.pack("<ff", 1, 2)).hexdigest()
    assert lora.sha256(value) == expected
    assert lora.sha256(value.bfloat16()) != expected and lora.sha256(value.T) != expected


@pytest.mark.parametrize("fault", [None, "names"])
def test_a_lora_is_sent_where_it_changed_and_compared(fault, tmp_path):
    own, policy = TinyEngine(tiny.sd3(), fault), tiny.stir(tiny.policy())
    with serving(own) as url:
        sender = lora.LoraSender(Engine(url), str(tmp_path))
        assert sender.sync(policy.pipe, ["transformer"]) and not sender.sync(policy.pipe, ["transformer"])
        first = [each.name for each in tmp_path.iterdir()]
        sender.require_held()
        tiny.stir(policy)
        assert sender.sync(policy.pipe, ["transformer"])
        assert first == ["000001"] and [each.name for each in tmp_path.iterdir()] == ["000002"]
        held = own.held()
        for name, value in engine_names(policy.weights.named).items():
            assert torch.equal(held[f"fused.{name}" if fault else name], value)
        own.v1_unmerge_lora_weights({})  # another client
        assert "another LoRA than the one that was sent" in message(sender.require_held, error=EngineError)
        sender.close()
    assert not [*tmp_path.iterdir()] and [path for path, _ in own.seen].count("/v1/set_lora") == 2


@pytest.mark.parametrize("fault", ["another LoRA", "names"])
def test_a_lora_that_the_engine_did_not_take_is_named(fault, tmp_path):
    own, policy = TinyEngine(tiny.sd3(), fault), tiny.stir(tiny.policy())
    with serving(own) as url:
        sender = lora.LoraSender(Engine(url), str(tmp_path))
        if fault == "names":  # its checksum alone tells
            own.v1_set_lora = lambda body: (200, {"status": "ok"})
        with pytest.raises(EngineError, match="holds another LoRA than .*000001") as error:
            sender.sync(policy.pipe, ["transformer"])
    assert error.value.fault == "another LoRA"


# --- answers of a hostile server --------------------------------------------------------------------------------------
def tensor_of(value, **changes):
    return {"data": save({"t": value})} | changes


def without(key):
    return lambda sample: sample["dit_trajectory"].pop(key)


def states(value):
    return lambda sample: sample["dit_trajectory"].update(latents=tensor_of(value))


STATES = torch.zeros(5, 1, 4, 4)
SENT = {"prompt": "red", "rollout_log_probs": tensor_of(torch.zeros(4)),
        "dit_trajectory": {"latents": tensor_of(STATES), "sigmas": tensor_of(torch.linspace(1, 0, 5))}}


@pytest.mark.parametrize("change, told", [
    (lambda sample: sample.update(dit_trajectory=[1]), "sent a list of 1 as dit_trajectory, expected an object"),
    (lambda sample: sample.update(dit_trajectory="x"), "sent a str as dit_trajectory, expected an object"),
    (lambda sample: sample.update(rollout_debug_tensors=7), "sent a int as rollout_debug_tensors"),
    (lambda sample: sample.update(dit_trajectory=None), "sent no tensor latents"),
    (lambda sample: sample["dit_trajectory"].update(latents={"data": 7}), "sent no tensor latents"),
    (lambda sample: sample["dit_trajectory"].update(latents={"data": b"\xff"}), "sent no tensor latents"),
    (states(torch.tensor(1.0)), "sent 0 states"),
    (states(STATES.to(torch.float8_e4m3fn)), "sent latents in float8_e4m3fn, expected float16, bfloat16, float32"),
    (states(STATES.long()), "sent latents in int64"), (states(STATES.bool()), "sent latents in bool"),
    (states(STATES.to(torch.complex64)), "sent latents in complex64"),
    (states(STATES * math.nan), "sent states, log-probabilities or sigmas that are not finite"),
    (lambda sample: sample["dit_trajectory"].update(sigmas=tensor_of(torch.full((5,), math.nan))),
     "sent states, log-probabilities or sigmas that are not finite"),
    (lambda sample: sample.update(rollout_log_probs=tensor_of(torch.zeros(4).to(torch.float8_e5m2))),
     "sent rollout_log_probs in float8_e5m2"),
    (lambda sample: sample["dit_trajectory"].update(latent_step_indices=tensor_of(torch.zeros(2, 2))),
     "sent the states"),
    (without("sigmas"), "sent no tensor sigmas")])
def test_a_sample_of_another_form_is_a_line(change, told):
    engine, good = Engine("http://127.0.0.1:1"), copy.deepcopy(SENT)
    assert engine._sample(copy.deepcopy(SENT), request(means=False)).states.shape == STATES.shape
    change(good)
    refused(re.escape(told), engine._sample, good, request(means=False), error=EngineError)


@pytest.mark.parametrize("means, told", [
    (torch.zeros(3, 1, 4, 4), "of the shape [3, 1, 4, 4], expected [4, 1, 4, 4], all finite"),
    (torch.zeros(4, 4, 4), "of the shape [4, 4, 4]"), (torch.tensor(0.0), "of the shape []"),
    (torch.full((4, 1, 4, 4), math.nan), "expected [4, 1, 4, 4], all finite")])
def test_means_of_another_form_are_a_line(means, told):
    sent = SENT | {"rollout_debug_tensors": {"rollout_prev_sample_means": tensor_of(means),
                                             "rollout_model_outputs": tensor_of(torch.zeros(4, 1, 4, 4))}}
    refused(re.escape(told), Engine("http://127.0.0.1:1")._sample, sent, request(), error=EngineError)


def test_a_success_is_true_and_no_text(monkeypatch):
    engine = Engine("http://127.0.0.1:1")
    monkeypatch.setattr(engine, "_request", lambda *_, **__: {"success": "false", "message": "m"})
    assert engine.compare_hashes("transformer", {}) == (False, "m")
    assert "/release_memory_occupation did not succeed: m" in message(engine.release, error=EngineError)


def test_messages_of_many_values_and_what_json_lacks():
    refused("too many values", client.unpack, struct.pack(">BI", 0xdd, 2**21) + b"\xc0" * 2**21, error=ValueError)
    with pytest.raises(UserError, match="rollout.engine: a request is not JSON"):
        Engine("http://127.0.0.1:1").rollout(request(further={"guidance_scale": math.nan}))
