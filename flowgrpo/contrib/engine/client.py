"""Client of the HTTP API of SGLang-Diffusion (0.5.23): rollouts, LoRAs, checksums, memory.

    POST /rollout/generate                      samples of one prompt, in MessagePack, tensors as safetensors
    POST /v1/set_lora, /v1/unmerge_lora_weights a LoRA from a folder that both can read, or none
    POST /update_weights_from_tensor_checker    SHA-256 of named tensors, compared by the server
    POST /get_weights_checksum                  one SHA-256 per module
    POST /release_memory_occupation, /resume_memory_occupation
    GET  /model_info, /server_info

Nothing that the server sends is executed: no pickle is read, and nothing of the server's package is imported.
MessagePack is read in the types of JSON and bytes: its extensions, which could be any type, are refused.
"""

import base64
import http.client
import io
import itertools
import json
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.escaped import one_line
from flowgrpo.nouns import quantity
from flowgrpo.rewards.remote.exchange import announce, as_json, split_address

DEPTH = 64  # of containers within each other
VALUES = 2**20  # of a message: each takes some hundred bytes in memory
CONSTANTS = {0xc0: None, 0xc2: False, 0xc3: True}
# By the first byte: the kind of a value, and the form of the number, or of the size, that follows.
KINDS = {first: (kind, f">{form}") for kind, least, forms in (
    ("bytes", 0xc4, "BHI"), ("number", 0xca, "fdBHIQbhiq"), ("text", 0xd9, "BHI"), ("list", 0xdc, "HI"),
    ("map", 0xde, "HI")) for first, form in enumerate(forms, least)}


def unpack(content: bytes) -> Any:
    """Value of a message. Raises ValueError for another form, for an extension, for bytes behind it, and for more than
    VALUES values."""
    stream, numbers = io.BytesIO(content), itertools.count(1)

    def take(size: int) -> bytes:
        if len(found := stream.read(size)) < size:
            raise ValueError(f"the message ends within a value, after {len(content)} bytes")
        return found

    def value(depth: int) -> Any:
        if depth > DEPTH:
            raise ValueError(f"the message has more than {DEPTH} containers within each other")
        if next(numbers) > VALUES:
            raise ValueError("the message has too many values")
        [first] = take(1)
        if first < 0x80 or first >= 0xe0:  # small integers
            return first if first < 0x80 else first - 256
        if first in CONSTANTS:
            return CONSTANTS[first]
        if first < 0xc0:  # short containers and texts, whose size is in the same byte
            kind = "map" if first < 0x90 else "list" if first < 0xa0 else "text"
            size = first & (0x1f if kind == "text" else 0x0f)
        elif first in KINDS:
            kind, form = KINDS[first]
            [size] = struct.unpack(form, take(struct.calcsize(form)))
        else:
            raise ValueError(f"the message has a value of the kind 0x{first:02x} at byte {stream.tell() - 1}")
        if kind == "number":
            return size
        if kind == "list":
            return [value(depth + 1) for _ in range(size)]
        if kind != "map":
            return take(size).decode() if kind == "text" else take(size)
        found = {}
        for _ in range(size):
            key = value(depth + 1)
            if not isinstance(key, (str, int)):
                raise ValueError(f"the message has a map whose key is of the type {type(key).__name__}")
            found[key] = value(depth + 1)
        return found

    found = value(0)
    if stream.tell() != len(content):
        raise ValueError(f"the message goes on behind its value, at byte {stream.tell()} of {len(content)}")
    return found


LARGEST = 2**34  # bytes of an answer's tensors
SMALL = 2**24  # bytes of an answer without tensors
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # dtypes of an answer's tensors
BLOCK = 2**20  # bytes of an answer between two looks at the time
ROLLOUT = "/rollout/generate"
CONNECT = 10.0  # seconds within which a live server accepts a connection


class EngineError(UserError):
    """Error of an engine, in one line. fault: its kind, as `verify` names it."""

    def __init__(self, fault: str, text: str):
        super().__init__(text)
        self.fault = fault


class _Passing(Exception):
    """One attempt that failed in a way that another may not."""


@dataclass(frozen=True)
class Request:
    """Samples of one prompt, drawn together. Steps count from 0 to T-1, states from 0 to T.

    seeds: of the samples. steps: T. sde: "sde", "cps" or "ode", and level: of the noise of the steps `noisy`.
    states: those that are sent back, ascending. means: means and model outputs of all steps are sent back too.
    further: guidance_scale, true_cfg_scale, height, width, num_frames and other arguments by the server's names.
    """

    prompt: str
    negative: str
    seeds: tuple[int, ...]
    steps: int
    sde: str
    level: float
    noisy: tuple[int, ...]
    states: tuple[int, ...]
    means: bool = False
    further: Mapping[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        rest = dict(self.further)
        own = {key: rest.pop(key) for key in NAMED if key in rest}
        if len(self.seeds) > 1:
            rest["seed"] = list(self.seeds)
        return own | {
            "prompt": self.prompt, "negative_prompt": self.negative, "seed": self.seeds[0],
            "num_outputs_per_prompt": len(self.seeds), "num_inference_steps": self.steps,
            "rollout": True, "rollout_sde_type": self.sde, "rollout_noise_level": self.level,
            "rollout_log_prob_no_const": self.sde == "ode", "rollout_debug_mode": self.means,
            "rollout_return_dit_trajectory": True,
            "rollout_sde_step_indices": list(self.noisy), "rollout_return_step_indices": list(self.states),
            "suppress_logs": True} | ({"extra_sampling_params": rest} if rest else {})


# Arguments that have a place of their own.
NAMED = ("guidance_scale", "true_cfg_scale", "height", "width", "num_frames", "fps")


@dataclass(frozen=True)
class Sample:
    """Sample of an engine.

    states: [K,*D], those asked for. logp: [T], of every step; of one without noise it says nothing. sigmas: [T+1].
    means, outputs: [T,*D], of the transitions and of the model, where asked for.
    """

    states: Tensor
    logp: Tensor
    sigmas: Tensor
    means: Tensor | None = None
    outputs: Tensor | None = None


class Engine:
    """Server at a URL.

    timeout: seconds for one request. retries: further attempts where the connection fails or the server answers 5xx,
    each after a wait of `wait` seconds, doubled each time.

    All methods raise EngineError in one line.
    """

    def __init__(self, url: str, timeout: float = 600.0, retries: int = 2, wait: float = 1.0):
        parts = split_address(url)
        if parts is None or parts.query or parts.username is not None or not url.isascii() or not url.isprintable() \
                or " " in url:
            raise UserError(f"rollout.engine is {url!r}: expected the address of an engine, such as "
                            "http://127.0.0.1:30000")
        self.url, self.timeout, self.retries, self.wait = url.rstrip("/"), timeout, retries, wait
        self._parts = parts
        announce("rollout.engine", ["prompts", "the folder of the LoRA"], [self.url])

    def rollout(self, request: Request) -> list[Sample]:
        """Samples of a request, in the order of its seeds."""
        answer = self._request("POST", ROLLOUT, request.body())
        if not isinstance(answer, list) or not all(isinstance(each, dict) for each in answer):
            raise EngineError("answer", f"{self.url}/rollout/generate answered {_kind(answer)}, expected a list of "
                                        "samples: is it an SGLang-Diffusion server of 0.5.23 or later?")
        if len(answer) != len(request.seeds):
            raise EngineError("dropped request", f"{self.url} sent {len(answer)} of {len(request.seeds)} samples of "
                              f"{request.prompt[:60]!r}: a request was dropped; see the server's log")
        return [self._sample(each, request) for each in answer]

    def set_lora(self, path: str, target: str) -> None:
        """Have the engine load the LoRA of a file or folder, unmerged: a merged one is rounded to the weights' dtype.

        target: "transformer" or "transformer_2".
        """
        self._request("POST", "/v1/set_lora", {"lora_nickname": f"flowgrpo_{target}", "lora_path": path,
                                               "target": target, "strength": 1.0, "merge_mode": "dynamic"})

    def unset_lora(self) -> None:
        self._request("POST", "/v1/unmerge_lora_weights", {"target": "all"})

    def compare_hashes(self, module: str, hashes: Mapping[str, str]) -> tuple[bool, str]:
        """(True if the engine's tensors have these SHA-256, by name; the engine's message)."""
        answer = self._ask("POST", "/update_weights_from_tensor_checker",
                           {"target_module": module, "expected_named_tensors_sha256": dict(hashes)}, refusals=(400,))
        return answer.get("success") is True, str(answer.get("message", ""))

    def checksum(self, modules: Sequence[str]) -> dict[str, str]:
        """The SHA-256 of all weights of modules, by their names."""
        answer = self._ask("POST", "/get_weights_checksum", {"module_names": list(modules)})
        if any(not isinstance(answer.get(name), str) for name in modules):
            raise EngineError("answer", f"{self.url}/get_weights_checksum sent none of {', '.join(modules)}")
        return {name: answer[name] for name in modules}

    def release(self) -> None:
        self._require_success("/release_memory_occupation")

    def resume(self) -> None:
        self._require_success("/resume_memory_occupation")

    def _require_success(self, path: str) -> None:
        answer = self._ask("POST", path, {})
        if answer.get("success") is not True:
            raise EngineError("answer", f"{self.url}{path} did not succeed: {answer.get('message', '')}")

    def info(self) -> dict[str, Any]:
        return self._ask("GET", "/model_info") | self._ask("GET", "/server_info")

    def _sample(self, answer: dict[str, Any], request: Request) -> Sample:
        if (prompt := answer.get("prompt")) != request.prompt:
            raise EngineError("shuffled batch", f"{self.url} sent a sample of {str(prompt)[:60]!r}, asked for "
                              f"{request.prompt[:60]!r}: the server mixes up its requests")
        for key in ("dit_trajectory", "rollout_debug_tensors"):
            if not isinstance(value := answer.get(key) or {}, dict):
                raise EngineError("answer", f"{self.url} sent {_kind(value)} as {key}, expected an object")
        trajectory, debug = answer.get("dit_trajectory") or {}, answer.get("rollout_debug_tensors") or {}
        states, logp, sigmas = (self._tensor(of.get(key), key) for of, key in (
            (trajectory, "latents"), (answer, "rollout_log_probs"), (trajectory, "sigmas")))
        # Check everything that arithmetic would take in silence: order, number, shape, finite values.
        listed, expected = trajectory.get("latent_step_indices"), list(request.states)
        if listed is not None and (sent := self._tensor(listed, "latent_step_indices", False).tolist()) != expected:
            raise EngineError("answer", f"{self.url} sent the states {str(sent)[:200]}, asked for {expected}")
        count = len(states) if states.ndim else 0
        if count != len(expected) or logp.shape != (request.steps,) or sigmas.shape != (request.steps + 1,):
            raise EngineError("answer", f"{self.url} sent {count} states, {logp.numel()} log-probabilities and "
                              f"{sigmas.numel()} sigmas, expected {len(expected)}, {request.steps} and "
                              f"{request.steps + 1}: does it take another number of steps?")
        if not (states.isfinite().all() and logp[list(request.noisy)].isfinite().all() and sigmas.isfinite().all()):
            raise EngineError("answer", f"{self.url} sent states, log-probabilities or sigmas that are not finite")
        further = [self._tensor(debug.get(key), key) if request.means else None
                   for key in ("rollout_prev_sample_means", "rollout_model_outputs")]
        whole = torch.Size((request.steps, *states.shape[1:]))
        for tensor in further:
            if tensor is not None and (tensor.shape != whole or not tensor.isfinite().all()):
                raise EngineError("answer", f"{self.url} sent means or outputs of the shape {list(tensor.shape)}, "
                                            f"expected {list(whole)}, all finite")
        return Sample(states, logp.float(), sigmas.float(), *further)

    def _tensor(self, value: Any, name: str, floats: bool = True) -> Tensor:
        """Tensor of an answer: bytes of safetensors, or their base64 of earlier releases."""
        data = value.get("data") if isinstance(value, dict) else None
        try:
            found = load(data if isinstance(data, bytes) else base64.b64decode(data or "", validate=True))["t"]
        except (SafetensorError, KeyError, ValueError, TypeError, AttributeError):
            raise EngineError("answer", f"{self.url} sent no tensor {name}: is it an SGLang-Diffusion server of 0.5.23 "
                                        "or later?") from None
        if floats and found.dtype not in FLOATS:
            raise EngineError("answer", f"{self.url} sent {name} in {str(found.dtype).removeprefix('torch.')}, "
                                        "expected float16, bfloat16, float32 or float64")
        return found

    def _ask(self, method: str, path: str, body: Any = None, refusals: tuple[int, ...] = ()) -> dict[str, Any]:
        """Answer that is an object. refusals: statuses whose answer is returned too."""
        answer = self._request(method, path, body, refusals)
        if not isinstance(answer, dict):
            raise EngineError("answer", f"{self.url}{path} answered {_kind(answer)}, expected an object")
        return answer

    def _request(self, method: str, path: str, body: Any, refusals: tuple[int, ...] = ()) -> Any:
        for asked in itertools.count(1):
            try:
                return self._once(method, path, body, refusals)
            except _Passing as error:
                if asked > self.retries:
                    raise EngineError("no answer", f"{self.url}{path}: {error} (asked {quantity(asked, 'time')}): is "
                                                   "the engine running there?") from None
            time.sleep(self.wait * 2 ** (asked - 1))

    def _once(self, method: str, path: str, body: Any, refusals: tuple[int, ...]) -> Any:
        parts, late = self._parts, time.monotonic() + self.timeout
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        sent = None if body is None else as_json("rollout.engine", "a request", body)
        connection = kind(parts.hostname or "", parts.port, timeout=min(CONNECT, self.timeout))
        try:
            # Connecting has a short limit of its own: a server that is down is found before the long one of an answer.
            try:
                connection.connect()
            except TimeoutError:
                raise _Passing(f"no connection within {CONNECT:g} s") from None
            connection.sock.settimeout(self.timeout)
            connection.request(method, parts.path.rstrip("/") + path, sent,
                               {"Content-Type": "application/json", "Accept": "application/msgpack, application/json"})
            answer = connection.getresponse()
            # Tensors come with samples alone: a longer answer of another kind is not read.
            largest = LARGEST if path == ROLLOUT and answer.status == 200 else SMALL
            content = self._content(answer, late, connection, largest)
        except TimeoutError:
            raise EngineError("time-out", f"{self.url}{path} did not answer within {self.timeout:g} s: raise "
                                          "rollout.timeout, or look at the server's log") from None
        except (OSError, http.client.HTTPException) as error:
            raise _Passing(str(error) or type(error).__name__) from None
        finally:
            connection.close()
        # A server that is starting or busy is asked again; another status is final.
        if answer.status >= 500 and answer.status not in refusals:
            raise _Passing(f"answered {answer.status}{_error_reason(content)}")
        if answer.status != 200 and answer.status not in refusals:
            cure = ": is it an SGLang-Diffusion server of 0.5.23 or later?" if answer.status in (404, 405) else ""
            raise EngineError("answer", f"{self.url}{path} answered {answer.status}{_error_reason(content)}{cure}")
        packed = "msgpack" in (answer.headers.get("Content-Type") or "")
        try:  # of a hostile server too: values are counted before they take memory
            if not packed and content.count(b",") > VALUES:
                raise ValueError("it has too many values")
            return unpack(content) if packed else json.loads(content)
        except (ValueError, RecursionError) as error:
            form = "MessagePack" if packed else "JSON"
            raise EngineError("answer", f"{self.url}{path}: its answer is no {form}: {error}") from None

    def _content(self, answer: http.client.HTTPResponse, late: float, connection: http.client.HTTPConnection,
                 largest: int) -> bytes:
        """Answer's bytes, `largest` at most. Raises TimeoutError when it is late."""
        found = bytearray()
        while (left := late - time.monotonic()) > 0:
            if connection.sock is not None:
                connection.sock.settimeout(left)
            block = answer.read(BLOCK)
            if not block and answer.length:  # what the header announced and did not come
                raise http.client.IncompleteRead(b"", answer.length)
            if not block:
                return bytes(found)
            found += block
            if len(found) > largest:
                raise EngineError("answer", f"{self.url} sends more than {largest / 2**20:,g} MiB in one answer")
        raise TimeoutError


def _error_reason(content: bytes) -> str:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return ""
    said = value if isinstance(value, dict) else {}
    text = said.get("detail") or said.get("message") or said.get("error")
    return f": {one_line(text)[:300]}" if text else ""


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return {dict: "an object", type(None): "null"}.get(type(value), f"a {type(value).__name__}")
