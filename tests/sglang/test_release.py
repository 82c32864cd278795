"""Requests and answers of `contrib/engine` by the classes of SGLang 0.5.23 itself, from its unpacked wheel.

`make test-all` unpacks the wheel without its dependencies. FLOWGRPO_SGLANG names the folder; otherwise the installed
package is taken. The classes need pydantic alone, the rest is read as source: the package's own imports need a GPU's
libraries.
"""

import ast
import dataclasses
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flowgrpo.contrib.engine import client
from flowgrpo.contrib.engine.client import Engine
from tests.contrib.engine.server import FIELDS, TinyEngine, packed, serving
from tests.contrib.engine.test_client import request
from tests.helpers import tiny

VERSION = "0.5.23"
ENTRIES = "multimodal_gen/runtime/entrypoints"


@cache
def package() -> Path:
    """The folder of the package sglang."""
    if given := os.environ.get("FLOWGRPO_SGLANG"):
        return Path(given) / "sglang"
    found = importlib.util.find_spec("sglang")
    assert found and found.origin, "FLOWGRPO_SGLANG names no folder, and sglang is not installed: use make test-all"
    return Path(found.origin).parent


def source(name: str) -> ast.Module:
    return ast.parse((package() / name).read_text(encoding="utf-8"))


@cache
def module(name: str) -> ModuleType:
    """A module of the package by its file, whose imports are torch's, pydantic's and safetensors' alone."""
    spec = importlib.util.spec_from_file_location(f"sglang_{Path(name).stem}", package() / name)
    assert spec and spec.loader
    made = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def function(name: str, file: str, **known: Any) -> Any:
    """A function of the package's source that calls nothing of the package but `known`."""
    [node] = [each for each in ast.walk(source(file)) if isinstance(each, ast.FunctionDef) and each.name == name]
    space = dict(known)
    exec(compile(ast.Module([node], []), file, "exec", dont_inherit=True), space)
    return space[name]


def fields(cls: str, file: str) -> dict[str, str]:
    """Annotated fields of a class in the package's source, with their types as written."""
    [node] = [each for each in ast.walk(source(file)) if isinstance(each, ast.ClassDef) and each.name == cls]
    return {each.target.id: ast.unparse(each.annotation) for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}


def routes() -> set[str]:
    """Paths of the package's routers that the client asks, by method."""
    found = set()
    for file in ("post_training/rollout_api.py", "post_training/weights_api.py", "openai/common_api.py",
                 "http_server.py"):
        tree = source(f"{ENTRIES}/{file}")
        prefixes = {keyword.value.value for call in ast.walk(tree) if isinstance(call, ast.Call)
                    and getattr(call.func, "id", "") == "APIRouter" for keyword in call.keywords
                    if keyword.arg == "prefix"} or {""}
        for node in ast.walk(tree):
            for mark in getattr(node, "decorator_list", []):
                if isinstance(mark, ast.Call) and getattr(mark.func, "attr", "") in ("get", "post") \
                        and isinstance(mark.args[0], ast.Constant):
                    found |= {f"{mark.func.attr.upper()} {prefix}{mark.args[0].value}" for prefix in prefixes | {""}}
    return found


class Release(TinyEngine):
    """The tests' engine, whose requests and answers go through the release's own classes."""

    def rollout_generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        classes = module(f"{ENTRIES}/post_training/io_struct.py")
        asked = classes.RolloutRequest.model_validate(body)
        assert body.keys() <= classes.RolloutRequest.model_fields.keys()
        build = function("_build_sampling_kwargs", f"{ENTRIES}/post_training/rollout_api.py",
                         RolloutRequest=classes.RolloutRequest)
        self.sampling = build(asked)
        status, answer = super().rollout_generate({key: value for key, value in asked.model_dump().items()
                                                   if key in FIELDS})
        if status != 200:
            return status, answer
        samples = [classes.RolloutResponse(**self._written(sample)) for sample in client.unpack(answer)]
        return 200, packed([sample.model_dump() for sample in samples])

    def _written(self, value: Any) -> Any:
        """The answer with tensors as the release writes them."""
        write = module(f"{ENTRIES}/post_training/utils.py")
        if isinstance(value, dict) and value.get("__tensor__"):
            return write._maybe_serialize(write.bytes_to_tensor(value["data"]))
        return {key: self._written(each) for key, each in value.items()} if isinstance(value, dict) else value

    def update_weights_from_tensor_checker(self, body: dict[str, Any]) -> tuple[int, Any]:
        request = module(f"{ENTRIES}/post_training/io_struct.py").UpdateWeightFromTensorCheckerReqInput(**body)
        return super().update_weights_from_tensor_checker(dataclasses.asdict(request))

    def get_weights_checksum(self, body: dict[str, Any]) -> tuple[int, Any]:
        request = module(f"{ENTRIES}/post_training/io_struct.py").GetWeightsChecksumReqInput(**body)
        return super().get_weights_checksum(dataclasses.asdict(request))

    def v1_set_lora(self, body: dict[str, Any]) -> tuple[int, Any]:
        assert body.keys() <= fields("SetLoraReq", f"{ENTRIES}/control_requests.py").keys()
        return super().v1_set_lora(body)


def test_the_release_has_the_clients_paths():
    [about] = package().parent.glob(f"sglang-{VERSION}*.dist-info")
    assert about.is_dir()
    asked = {"POST /rollout/generate", "POST /v1/set_lora", "POST /v1/unmerge_lora_weights",
             "POST /update_weights_from_tensor_checker", "POST /get_weights_checksum",
             "POST /release_memory_occupation", "POST /resume_memory_occupation", "GET /model_info",
             "GET /server_info"}
    assert asked <= routes()


@pytest.mark.parametrize("changes", [{}, {"seeds": (5,), "states": (1, 2, 4), "means": False}, {"sde": "cps"},
                                     {"sde": "ode", "noisy": ()}])
def test_samples_pass_the_releases_request_and_response(changes):
    own = Release(tiny.sd3())
    with serving(own) as url:
        samples = Engine(url).rollout(request(**changes))
    plain = TinyEngine(tiny.sd3())
    with serving(plain) as url:
        expected = Engine(url).rollout(request(**changes))
    for one, other in zip(samples, expected, strict=True):
        assert torch.equal(one.states, other.states) and torch.equal(one.logp, other.logp)
        assert torch.equal(one.sigmas, other.sigmas) and (one.means is None) == (other.means is None)


def test_the_arguments_of_a_sampling_have_places_in_the_release():
    own = Release(tiny.sd3())
    with serving(own) as url:
        Engine(url).rollout(request())
    known = fields("SamplingParams", "multimodal_gen/configs/sample/sampling_params.py")
    assert own.sampling["seed"] == [3, 2**60] and "list[int]" in known["seed"]
    # `max_sequence_length` is an argument of the pipeline, not of all of them.
    assert own.sampling.keys() - {"max_sequence_length"} <= known.keys()


def test_weights_loras_and_memory_pass_the_releases_requests():
    own = Release(tiny.sd3())
    with serving(own) as url:
        engine = Engine(url)
        assert engine.checksum(["transformer"]).keys() == {"transformer"}
        equal, said = engine.compare_hashes("transformer", {"proj_out.bias": "0" * 64})
        assert not equal and "checksum mismatch" in said
        engine.release()
        engine.resume()
        engine.unset_lora()
    assert {path for path, _ in own.seen} == {
        "/get_weights_checksum", "/update_weights_from_tensor_checker", "/release_memory_occupation",
        "/resume_memory_occupation", "/v1/unmerge_lora_weights"}


def test_a_lora_is_set_by_arguments_of_the_releases_route():
    seen = []

    class Kept(Engine):
        def _request(self, method: str, path: str, body: Any = None, refusals: tuple[int, ...] = ()) -> Any:
            seen.append(body)

    Kept("http://127.0.0.1:1").set_lora("folder", "transformer")
    [route] = [node for node in ast.walk(source(f"{ENTRIES}/openai/common_api.py"))
               if isinstance(node, ast.AsyncFunctionDef) and node.name == "set_lora"]
    known = {argument.arg: ast.unparse(argument.annotation) for argument in route.args.args}
    assert seen[0].keys() <= known.keys() == fields("SetLoraReq", f"{ENTRIES}/control_requests.py").keys()
    assert seen[0]["merge_mode"] == "dynamic"
