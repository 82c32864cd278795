"""An engine of the tests: the HTTP API of SGLang-Diffusion 0.5.23 around a tiny diffusers pipeline, on the loopback.

It is written after that API and shares no code with the client. Samples come from the pipeline's own call, whose
scheduler draws the steps; its transitions are `FlowSDE` and `CPS`. A fault can be planted.
"""

import hashlib
import inspect
import json
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors.torch import save

from flowgrpo.samplers.kernels import CPS, FlowSDE
from tests.helpers import tiny
from tests.helpers.servers import running

# Fields of a request, with their defaults.
FIELDS: dict[str, Any] = {
    "prompt": None, "negative_prompt": None, "seed": None, "generator_device": "cuda", "width": None, "height": None,
    "num_inference_steps": None, "num_outputs_per_prompt": 1, "guidance_scale": None, "true_cfg_scale": None,
    "num_frames": None, "fps": None, "rollout": True, "rollout_sde_type": "sde", "rollout_noise_level": 0.7,
    "rollout_log_prob_no_const": False, "rollout_debug_mode": True, "rollout_return_denoising_env": False,
    "rollout_return_dit_trajectory": False, "rollout_sde_step_indices": None, "rollout_return_step_indices": None,
    "image_path": None, "suppress_logs": False, "extra_sampling_params": None}


def packed(value: Any) -> bytes:
    """A value in MessagePack."""
    if value is None or isinstance(value, bool):
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    if isinstance(value, int):
        return bytes([value]) if 0 <= value < 128 else struct.pack(">BQ", 0xcf, value) if value >= 0 else \
            struct.pack(">Bq", 0xd3, value)
    if isinstance(value, float):
        return struct.pack(">Bd", 0xcb, value)
    if isinstance(value, str):
        text = value.encode()
        return (bytes([0xa0 | len(text)]) if len(text) < 32 else struct.pack(">BI", 0xdb, len(text))) + text
    if isinstance(value, bytes):
        return struct.pack(">BI", 0xc6, len(value)) + value
    if isinstance(value, list):
        head = bytes([0x90 | len(value)]) if len(value) < 16 else struct.pack(">BI", 0xdd, len(value))
        return head + b"".join(map(packed, value))
    head = bytes([0x80 | len(value)]) if len(value) < 16 else struct.pack(">BI", 0xdf, len(value))
    return head + b"".join(packed(key) + packed(of) for key, of in value.items())


def tensor(value: torch.Tensor) -> dict[str, Any]:
    return {"__tensor__": True, "data": save({"t": value.contiguous()}), "shape": list(value.shape),
            "dtype": str(value.dtype)}


def engine_names(policy_weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """LoRA weights of a policy as they are in a file, by the names of `TinyEngine.held`."""
    return {key.removeprefix("transformer.").replace(".default.weight", ""): value
            for key, value in tiny.in_file(policy_weights).items()}


class Steps(FlowMatchEulerDiscreteScheduler):
    """The pipeline's scheduler, whose steps are those that a request asks for, and which records them."""

    def begin(self, asked: dict[str, Any], generators: list[torch.Generator], fault: str | None) -> None:
        self.asked, self.draws, self.fault = asked, generators, fault
        self.before, self.means, self.outputs, self.stds, self.logs = [], [], [], [], []

    def step(self, model_output, timestep, sample, return_dict=True, **_):
        if self.step_index is None:
            self._init_step_index(timestep)
        k, grid, asked = self.step_index, self.sigmas.cpu(), self.asked
        self._step_index += 1
        kind, chosen = asked["rollout_sde_type"], asked["rollout_sde_step_indices"]
        if kind == "ode" or chosen is not None and k not in chosen:
            mean, std = sample.float() + (grid[k + 1] - grid[k]) * model_output.float(), torch.zeros(())
        else:
            if self.fault == "wrong kernel":
                kind = {"sde": "cps", "cps": "sde"}[kind]
            kernel = {"sde": FlowSDE, "cps": CPS}[kind](asked["rollout_noise_level"])
            drawn = kernel(sample, model_output, grid, k)
            mean, std = drawn.mean, drawn.std
        noise = torch.stack([torch.randn(sample.shape[1:], generator=each) for each in self.draws])
        after = mean + std * noise
        logp = -noise.square() / 2 - std.log() - torch.tensor(2 * torch.pi).sqrt().log()
        logp = (logp if std > 0 else torch.zeros_like(logp)).flatten(1).mean(1)
        for kept, value in ((self.before, sample.float()), (self.means, mean), (self.outputs, model_output.float()),
                            (self.stds, std.expand(len(sample), 1)), (self.logs, logp)):
            kept.append(value)
        after = after.bfloat16() if self.fault == "bf16 states" else after
        self.last = after.to(sample.dtype)
        return (self.last,)


class TinyEngine:
    """State of the server: a pipeline, the LoRA that is set, and what is planted.

    seen: the requests, by path. asleep: its memory is released.
    """

    def __init__(self, pipe: Any, fault: str | None = None, slow: float = 0.0):
        self.pipe, self.fault, self.slow = pipe, fault, slow
        self.pipe.scheduler = Steps.from_config(pipe.scheduler.config)
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.asleep, self.failures, self.lora = False, 0, ""
        self.lock = threading.Lock()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """The status and the answer of a request, an object of JSON or bytes of MessagePack."""
        with self.lock:
            self.seen.append((path, body))
            if self.failures:
                self.failures -= 1
                return 503, {"detail": "warming up"}
            found = getattr(self, path.strip("/").replace("/", "_"), None)
            return (404, {"detail": "Not Found"}) if found is None else found(body)

    def model_info(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"model_path": "tiny", "task_type": "T2I"}

    def server_info(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"model_path": "tiny", "version": "0.5.23"}

    def v1_set_lora(self, body: dict[str, Any]) -> tuple[int, Any]:
        name = body["lora_nickname"]
        if self.lora:
            self.pipe.delete_adapters(self.lora)
        if self.fault != "another LoRA" or not self.lora:
            self.pipe.load_lora_weights(body["lora_path"], adapter_name=name)
        if self.fault == "another LoRA":
            with torch.no_grad():
                for key, value in self.pipe.transformer.named_parameters():
                    value.mul_(1.5 if "lora_A" in key else 1)
        self.lora = name
        return 200, {"status": "ok", "message": f"Successfully set LoRA adapter(s): {name}"}

    def v1_unmerge_lora_weights(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.lora:
            self.pipe.delete_adapters(self.lora)
        self.lora = ""
        return 200, {"status": "ok", "message": "Successfully unmerged LoRA weights"}

    def held(self) -> dict[str, torch.Tensor]:
        """Weights of the denoiser by the engine's names, such as to_q.lora_A."""
        found = {}
        for key, value in self.pipe.transformer.named_parameters():
            key = key.removesuffix(f".{self.lora}.weight") if "lora_" in key else key
            found[f"fused.{key}" if self.fault == "names" and "lora_" in key else key] = value.detach()
        return found

    def update_weights_from_tensor_checker(self, body: dict[str, Any]) -> tuple[int, Any]:
        own = {name: hashlib.sha256(str(value.dtype).encode() + repr(tuple(value.shape)).encode()
                                    + value.contiguous().numpy().tobytes()).hexdigest()
               for name, value in self.held().items()}
        expected = body["expected_named_tensors_sha256"]
        missing = [name for name in expected if name not in own]
        odd = [name for name in expected if name in own and own[name] != expected[name]]
        said = [f"missing {len(missing)} tensor(s): {missing[0]}"] if missing else []
        said += [f"checksum mismatch for {len(odd)} tensor(s): {odd[0]}"] if odd else []
        return (400, {"success": False, "message": "; ".join(said)}) if said else (
            200, {"success": True, "message": f"Verified {len(expected)} tensor(s)."})

    def get_weights_checksum(self, body: dict[str, Any]) -> tuple[int, Any]:
        content = hashlib.sha256()
        for name, value in sorted(self.held().items()):
            content.update(name.encode() + value.contiguous().numpy().tobytes())
        return 200, {name: content.hexdigest() for name in body["module_names"]}

    def release_memory_occupation(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.asleep = True
        return 200, {"success": True, "sleeping": True, "message": "released"}

    def resume_memory_occupation(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.asleep = False
        return 200, {"success": True, "sleeping": False, "message": "awake"}

    def rollout_generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.asleep:
            return 500, {"detail": "the engine sleeps"}
        if unknown := set(body) - set(FIELDS):
            return 400, {"detail": f"Invalid sampling params: {sorted(unknown)}"}
        time.sleep(self.slow if self.fault == "time-out" else 0)
        asked = FIELDS | body
        extra = dict(asked["extra_sampling_params"] or {})
        count = asked["num_outputs_per_prompt"]
        seeds = extra.pop("seed", None) or [asked["seed"] + place for place in range(count)]
        assert len(seeds) == count
        if self.fault == "repeated seed":
            seeds = [seeds[0]] * count
        results = self.drawn(asked, seeds, extra)
        if self.fault == "shuffled batch":
            results = results[::-1]
        if self.fault == "dropped request" and count > 1:
            results = results[:-1]
        if self.fault == "pickle":
            results[0]["rollout_log_probs"] = {"__tensor__": True, "data": b"\x80\x04cos\nsystem\n."}
        if self.fault == "no tensor":
            results[0]["dit_trajectory"] = None
        return 200, packed(results)

    def drawn(self, asked: dict[str, Any], seeds: list[int], extra: dict[str, Any]) -> list[dict[str, Any]]:
        """The answer for each seed."""
        steps, accepts = self.pipe.scheduler, inspect.signature(self.pipe.__call__).parameters
        names = ("width", "height", "num_frames", "num_inference_steps", "guidance_scale", "true_cfg_scale")
        given = {name: asked[name] for name in names if asked[name] is not None}
        if "negative_prompt" in accepts:
            given["negative_prompt"] = [asked["negative_prompt"] or ""] * len(seeds)
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        steps.set_shift({"wrong sigma": 5.0, "unsaid sigma": 3.5}.get(self.fault or "", steps.config.shift))
        steps.begin(asked, generators, self.fault)
        if self.lora and self.fault == "no LoRA":
            self.pipe.disable_lora()
        prompt = asked["prompt"] if self.fault != "mixed prompts" or asked["prompt"] == "blue" else "blue"
        with torch.no_grad():
            images = self.pipe([prompt] * len(seeds), generator=generators, output_type="pt", return_dict=False,
                               **given, **extra)[0]
        if self.lora and self.fault == "no LoRA":
            self.pipe.enable_lora()
        states = torch.stack([*steps.before, steps.last.float()], 1)
        kept = asked["rollout_return_step_indices"]
        states = states if kept is None else states[:, kept]
        sigmas = steps.sigmas
        if self.fault == "unsaid sigma":
            steps.set_shift(steps.config.shift)
            steps.set_timesteps(asked["num_inference_steps"])
            sigmas = steps.sigmas
        debug = {"rollout_prev_sample_means": steps.means, "rollout_noise_std_devs": steps.stds,
                 "rollout_model_outputs": steps.outputs}
        return [{"request_id": "0", "prompt": asked["prompt"], "seed": asked["seed"],
                 "generated_output": tensor(images[i]), "rollout_log_probs": tensor(torch.stack(steps.logs, 1)[i]),
                 "rollout_debug_tensors": {key: tensor(torch.stack(of, 1)[i]) for key, of in debug.items()}
                 if asked["rollout_debug_mode"] else None,
                 "denoising_env": None, "inference_time_s": 0.1, "peak_memory_mb": None,
                 "dit_trajectory": {"latents": tensor(states[i]), "timesteps": tensor(steps.timesteps),
                                    "sigmas": tensor(sigmas)}} for i in range(len(seeds))]


class Handler(BaseHTTPRequestHandler):
    engine: TinyEngine

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.send(*self.engine.answer(self.path, {}))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send(*self.engine.answer(self.path, json.loads(body or b"{}")))

    def send(self, status: int, answer: Any) -> None:
        kind = "application/msgpack" if isinstance(answer, bytes) else "application/json"
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except (BrokenPipeError, ConnectionResetError):  # the client did not wait
            pass


@contextmanager
def serving(engine: TinyEngine) -> Iterator[str]:
    """The URL of a server of the engine."""
    with running(ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"engine": engine}))) as server:
        yield f"http://127.0.0.1:{server.server_address[1]}"
