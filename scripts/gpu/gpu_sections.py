"""Sections of gpu_minutes.py, by name: functions that yield lines. This process prints them as JSON.

    python scripts/gpu/gpu_sections.py epochs clocks --rehearse      # gpu_minutes.py calls it
"""

import argparse
import gc
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(1, str(ROOT / "scripts" / "measure"))

import bench_overhead  # noqa: E402
import one_pass_ratio  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from common import epoch_of, make_trainer, updated  # noqa: E402

from flowgrpo import gpus, rewards  # noqa: E402
from flowgrpo.cli import main as main_of_flowgrpo  # noqa: E402
from flowgrpo.config import Config, load  # noqa: E402
from flowgrpo.data.prompts import Prompt  # noqa: E402
from flowgrpo.device import DTYPES, matmul_precision  # noqa: E402
from flowgrpo.distributed.processes import make_accelerator  # noqa: E402
from flowgrpo.errors import UserError  # noqa: E402
from flowgrpo.policies import build  # noqa: E402
from flowgrpo.policies.weights.checkpointing import checkpoint_blocks  # noqa: E402
from flowgrpo.policies.weights.forwards import (  # noqa: E402
    compile_blocks,  # noqa: E402
    fuse_norms,
    without_casts,
)
from flowgrpo.policies.weights.low_precision import LOWEST, capability  # noqa: E402
from flowgrpo.published import find  # noqa: E402
from flowgrpo.samplers.growth import explore  # noqa: E402
from flowgrpo.samplers.rollout import seeder  # noqa: E402
from flowgrpo.tools.check import tiny  # noqa: E402
from flowgrpo.tools.dry_run import from_configs  # noqa: E402
from flowgrpo.train import Trainer  # noqa: E402
from flowgrpo.training.throughput import peak  # noqa: E402

Line = dict[str, Any]
GIB = 2**30
PROMPTS = ["a lighthouse at dusk", "two owls on a branch", "a red bicycle", "a sign that says open"]
VERSIONS = ("torch", "diffusers", "transformers", "accelerate", "peft", "torchao", "bitsandbytes", "triton")
SHAPE = {"reward": "random", "train.prompts": "1", "train.updates": "1", "train.inner_epochs": "1", "held_out": "0",
         "tracker": "none", "eval.rewards": "[]", "precision": "bf16", "eval.best": "null"}
# What is run of a recipe, and the same with everything tiny.
RECIPES = {"sd35_medium": {"train.group": "8", "train.micro_batch": "8", "train.steps": "6"},
           "flux_dev": {"train.group": "4", "train.micro_batch": "4"},
           "sdxl": {"train.group": "4", "train.micro_batch": "4", "train.steps": "10"},
           "wan21_1b": {"train.group": "4", "train.micro_batch": "2", "train.steps": "10"},
           "qwen3_0_6b": {"train.prompts": "4", "text.max_tokens": "256"}}
TINY = {"train.group": "2", "train.micro_batch": "2", "train.steps": "5", "adapter.rank": "2", "memory": "{}",
        "train.checkpointing": "false", "precision": "fp32"}
QWEN3: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "tie_word_embeddings": True}
STARTER = {"train.prompts": "1", "train.group": "8", "train.micro_batch": "8", "train.updates": "1", "tracker": "none",
           "train.lr": "1e-3", "eval.best": "null", "held_out": "0"}


DIFFERED = (("starter_text", "sdpo"), ("starter_text", "grpo+llds"), ("starter_video", "b2_diffurl"))


class Machine:
    """What the sections run on. rehearsed: tiny models on a CPU. clone: of flow_grpo."""

    rehearsed, clone = False, Path("")

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.rehearsed else "cuda")


HERE = Machine()


# --- clocks ----------------------------------------------------------------------------------------------------------

def wait() -> None:
    if HERE.device.type == "cuda":
        torch.cuda.synchronize()


def clock(work: Callable[[], Any], times: int = 1) -> float:
    """Return the least seconds of a piece of work, to the end of its last kernel."""
    taken = []
    for _ in range(times):
        wait()
        start = time.perf_counter()
        work()
        wait()
        taken.append(time.perf_counter() - start)
    return min(taken)


def host(work: Callable[[], Any]) -> float:
    """Return the seconds in which the host starts the kernels of a piece of work."""
    wait()
    start = time.perf_counter()
    work()
    taken = time.perf_counter() - start
    wait()
    return taken


@contextmanager
def memory() -> Iterator[Line]:
    """Context manager: the line has the peak and what the allocator took from the device; empty without a GPU.

    The allocator keeps its blocks: with an empty cache, what is timed would pay for its growth again.
    """
    line: Line = {}
    if HERE.device.type != "cuda":
        yield line
        return
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats().get("num_device_alloc", 0)
    yield line
    line |= {"peak GiB": torch.cuda.max_memory_allocated() / GIB,
             "reserved GiB": torch.cuda.max_memory_reserved() / GIB,
             "device allocations": torch.cuda.memory_stats().get("num_device_alloc", 0) - before}


def flops(work: Callable[[], Any]) -> float:
    """Return the FLOPs of a piece of work."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        work()
    return float(counter.get_total_flops())


# --- models of random weights ----------------------------------------------------------------------------------------

@contextmanager
def made_on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Context manager: modules are made on the device in that dtype: billions of weights need not pass the host."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def config_of(recipe: str, device: str, small: bool, **changes: str) -> Config:
    """Return a recipe as it is run. small: everything tiny."""
    text = RECIPES[recipe].get("text.max_tokens") is not None
    given = SHAPE | {"device": device} | RECIPES[recipe] | (TINY if small else {})
    if small:
        given |= {"text.max_tokens": "8", "parts": "{}"} if text else {"image": "{}", "parts": "{}"}
    for key in ("train.steps", "memory") if text else ():
        given.pop(key, None)
    return load(ROOT / "configs" / f"{recipe}.yaml", given | changes)


def filled(pipe: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a pipeline without values with random ones, on the device: its modules are made anew."""
    parts = {name: _filled(part, device, dtype) if isinstance(part, torch.nn.Module) else part
             for name, part in pipe.components.items()}
    options = {key: value for key, value in pipe.config.items() if not key.startswith("_") and key not in parts}
    made = type(pipe)(**parts, **options)
    made.set_progress_bar_config(disable=True)
    return made


def _filled(module: Any, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    with made_on(device, dtype):
        made = type(module).from_config(module.config) if hasattr(type(module), "load_config") \
            else type(module)._from_config(module.config, dtype=dtype)
    return made.eval().requires_grad_(False)


def pipeline_of(config: Config) -> str:
    """Return the class of a recipe's pipeline, or of its language model."""
    known = find(config.model)
    return "Qwen3ForCausalLM" if known is None else known.pipeline


def loaded(config: Config) -> Any:
    """Return the recipe's pipeline, or (model, tokenizer), with random weights."""
    dtype = DTYPES[config.precision]
    if find(config.model) is not None:
        return tiny.make(pipeline_of(config))[0].to(dtype) if HERE.rehearsed else \
            filled(from_configs.pipeline(config.model, dtype), HERE.device, dtype)
    if HERE.rehearsed:
        return tiny.make_language_model("Qwen3ForCausalLM")
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokens = from_configs.tokenizer(QWEN3["max_position_embeddings"])
    ids = {f"{kind}_token_id": getattr(tokens, f"{kind}_token_id") for kind in ("pad", "bos", "eos")}
    with made_on(HERE.device, dtype):
        return Qwen3ForCausalLM(Qwen3Config(**QWEN3, **ids)).eval(), tokens


def trainer_of(config: Config, policy: Any) -> Trainer:
    functions = {"random": lambda samples, prompts: torch.rand(len(prompts)).tolist()}
    return Trainer(config, make_accelerator(str(policy.device)), policy,
                   rewards.compose(config.trained, config.cache, functions), ([Prompt(text) for text in PROMPTS], []))


class Bench:
    """Recipe with a model of random weights, and pieces of its epoch."""

    def __init__(self, recipe: str, made: Callable[[Config], Any] = loaded, **changes: str):
        config = config_of(recipe, str(HERE.device), HERE.rehearsed, **changes)
        if HERE.rehearsed and find(config.model) is not None:
            config = config.model_copy(update={"image": type(config.image)(**_tiny_image(config))})
        self.config, self.recipe = config, recipe
        policy: Any = build.make_policy(config, HERE.device, made(config))
        self.policy, self.trainer = policy, trainer_of(config, policy)
        self.conditioning = None if policy.modality == "text" else \
            self.trainer.rollouts.conditioning(self.trainer.prompts[:1])

    @property
    def module(self) -> Any:
        return next(iter(self.policy.denoisers.values()))

    def rollout(self) -> None:
        trainer = self.trainer
        self.parts = list(explore(trainer.policy, self.conditioning, trainer.rollouts.explorations(0),
                                  trainer.geometry.micro_batch, seeder(self.config.seed, 0)))

    def update(self) -> None:
        group = self.config.train.group
        signs = (1 - 2.0 * (torch.arange(group) % 2)).view(1, group, 1).expand(-1, -1, len(self.config.rewards))
        updated(self.trainer, epoch_of(self.trainer, self.parts, self.conditioning, self.trainer.prompts[:1], signs))

    def warm(self, what: str) -> Line:
        """Return the seconds of rollout and update, behind one of each."""
        self.rollout()
        self.update()
        with memory() as line:
            taken = {"rollout s": clock(self.rollout, 2), "rollout's host s": host(self.rollout),
                     "update s": clock(self.update, 2), "update's host s": host(self.update)}
        return {"variant": what} | taken | line

    def epochs(self, count: int) -> Iterator[Line]:
        """Yield a run's first epochs, by phase."""
        for number in range(1, count + 1):
            with memory() as line:
                seconds = clock(self.trainer.run_epoch)
            phases = {f"{key.removeprefix('seconds/')} s": value for key, value in self.trainer.clock.pop().items()}
            self.trainer.epoch += 1
            yield {"epoch": number, "seconds": seconds} | phases | line
        yield {"recipe": self.recipe, "pipeline": pipeline_of(self.config),
               "first log ratio": self.trainer.first_ratio.max_log_ratio, "limit": self.trainer.first_ratio.limit,
               "computed again": self.trainer.first_ratio.rescore}


def _tiny_image(config: Config) -> dict[str, Any]:
    """Return the section `image` of a run of the tiny pipeline of a configuration's model."""
    sizes = {"height": "height", "width": "width", "num_frames": "frames"}
    call = tiny.make(pipeline_of(config))[1]
    return {sizes[key]: value for key, value in call.items() if key in sizes} | {
        "call": {key: value for key, value in call.items() if key not in sizes}}


@cache
def medium() -> Bench:
    return Bench("sd35_medium")


# --- 1 and 2: SD 3.5 medium ------------------------------------------------------------------------------------------

def epochs() -> Iterator[Line]:
    yield from medium().epochs(3)


def clocks() -> Iterator[Line]:
    """Yield what the machine needs for a launch, a product, and the growth of the allocator."""
    x, count = torch.ones(64, device=HERE.device), 20_000 if HERE.device.type == "cuda" else 500
    n = 8192 if HERE.device.type == "cuda" else 256

    def launches() -> None:
        for _ in range(count):
            x.add_(1)

    launches()
    yield {"what": "a launch", "host us": host(launches) / count * 1e6, "us": clock(launches) / count * 1e6}
    a = torch.randn(n, n, device=HERE.device, dtype=torch.bfloat16)
    first = clock(lambda: a @ a)
    yield {"what": f"a product of {n}", "first s": first, "TFLOP/s": 2 * n**3 / clock(lambda: a @ a, 5) / 1e12}
    for gib in (1, 16) if HERE.device.type == "cuda" else ():
        torch.cuda.empty_cache()
        yield {"what": f"{gib} GiB more of the allocator", "seconds": clock(
            lambda gib=gib: torch.empty(gib * GIB, dtype=torch.uint8, device=HERE.device))}


def attention() -> Iterator[Line]:
    """Yield first and later calls of attention at the model's lengths, by backend."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    # Rows that the model never has, and others for cuDNN, which may be the default: plans are kept by shape.
    large = HERE.device.type == "cuda"
    for name, kernel, rows in (("default", None, 14), ("flash", SDPBackend.FLASH_ATTENTION, 14),
                               ("cudnn", SDPBackend.CUDNN_ATTENTION, 15)):
        for tokens in (1357, 1024):
            shape = (rows, tokens, 24, 64) if large else (2, tokens // 64, 2, 64)
            q, k, v = (torch.randn(*shape, device=HERE.device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
                       for _ in range(3))
            forward, out = partial(F.scaled_dot_product_attention, q, k, v), list[torch.Tensor]()
            back: Callable[[], None] = lambda out=out: out[0].sum().backward(retain_graph=True)  # noqa: E731
            try:
                with sdpa_kernel(kernel) if kernel else nullcontext():
                    with torch.no_grad():
                        still = clock(forward)
                    first = clock(lambda out=out, forward=forward: out.append(forward())), clock(back)
                    with torch.no_grad():
                        later = clock(forward, 5)
                    yield {"backend": name, "tokens": shape[1], "first s": still, "first with a graph s": first[0],
                           "first backward s": first[1], "forward s": later, "backward s": clock(back, 5),
                           "chosen": type(out[0].grad_fn).__name__}
            except RuntimeError as error:
                yield {"backend": name, "tokens": shape[1], "error": str(error).partition(".")[0]}


def calls() -> Iterator[Line]:
    """Yield the denoiser's calls of an epoch without this program, and rollout and update with it, beside the peak."""
    bench = medium()
    recorded = bench_overhead.recorded(bench.trainer)
    forwards = [call for call in recorded if not call[3]][:bench.config.train.steps]
    rest = [call for call in recorded if not call[3]][len(forwards):] + [call for call in recorded if call[3]]
    most = peak(torch.cuda.get_device_name(), torch.bfloat16) if HERE.device.type == "cuda" else None
    bench.rollout()
    for what, some, work in (("rollout", forwards, bench.rollout), ("update", rest, bench.update)):
        bare = partial(bench_overhead.bare, bench.trainer, some)
        count = flops(bare)
        for name, each in ((f"bare calls of the {what}", bare), (what, work)):
            each()
            seconds = clock(each, 2)
            yield {"what": name, "calls": len(some), "seconds": seconds, "host s": host(each), "TFLOP": count / 1e12,
                   "share of the peak": count / seconds / most if most else None}


def kernels() -> Iterator[Line]:
    """Yield the kernels of one forward and one replay: an epoch's would take minutes to read."""
    from torch.profiler import ProfilerActivity, profile

    bench, cuda = medium(), HERE.device.type == "cuda"
    recorded = bench_overhead.recorded(bench.trainer)
    for what in ("forward", "replay"):
        some = [call for call in recorded if call[3] == (what == "replay")][:1]
        bare = partial(bench_overhead.bare, bench.trainer, some)
        seconds = clock(bare, 2)
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
            bare()
            wait()
        found = seen.key_averages()
        took = {event.key: event.self_device_time_total if cuda else event.self_cpu_time_total for event in found}
        yield {"what": what, "seconds": seconds, "kernels": sum(event.count for event in found),
               "seconds of kernels": sum(took.values()) / 1e6}
        for event in sorted(found, key=lambda event: -took[event.key])[:15 if cuda else 3]:
            yield {"of": what, "kernel": event.key[:90], "times": event.count, "ms": took[event.key] / 1e3}


# --- 3: variants -----------------------------------------------------------------------------------------------------

def variants() -> Iterator[Line]:
    """Yield rollout and update as they are, and with one thing as it was."""
    bench = medium()
    layers = list(bench.policy.weights.layers().values())
    yield bench.warm("as it is")
    torch.backends.cuda.enable_cudnn_sdp(False)
    yield bench.warm("without cuDNN's attention")
    torch.backends.cuda.enable_cudnn_sdp(True)
    normal = {module: vars(module).pop("forward") for module in bench.module.modules()
              if type(module).__name__ == "RMSNorm" and "forward" in vars(module)}
    yield bench.warm("diffusers' RMS normalisation")
    fuse_norms(bench.module, HERE.device)
    assert len(normal) == sum("forward" in vars(module) for module in normal)
    for layer in layers:
        vars(layer).pop("forward", None)
    bench.policy.driver.casts = True
    yield bench.warm("peft's LoRA under autocast")
    bench.policy.driver.casts = not without_casts(layers)


def compiled() -> Iterator[Line]:
    """Yield compiled blocks, also with checkpointing, and how often they were compiled again behind a first epoch.

    Blocks are compiled in place, so that this section is the last of its model.
    """
    bench = medium()
    graphs = torch._dynamo.utils.counters["stats"]
    compile_blocks(bench.module, "eager" if HERE.rehearsed else "inductor")
    bench.policy.compiled = True
    kinds = ("compiled", "compiled, checkpointing")
    for what in kinds[1:] if HERE.rehearsed else kinds:  # tracing a graph is what takes its time
        if what != "compiled":
            checkpoint_blocks(bench.module, bench.policy.driver.attention, True)
        first = {"first rollout s": clock(bench.rollout), "first update s": clock(bench.update)}
        before = graphs["unique_graphs"]
        yield bench.warm(what) | first | {"graphs": before, "compiled again": graphs["unique_graphs"] - before}


# --- 4: what failed --------------------------------------------------------------------------------------------------

def _starter(recipe: str, method: str, precision: str, device: torch.device, parts: str = "{}") -> Trainer:
    given = STARTER | {"method": method, "precision": precision, "device": str(device), "parts": parts}
    lengths = ("8", "3") if HERE.rehearsed else ("16", "6")
    given |= {"text.max_tokens": lengths[0]} if recipe == "starter_text" else {"train.steps": lengths[1]}
    given |= {"train.group": "4", "train.micro_batch": "4"} if HERE.rehearsed else {}
    return make_trainer(load(ROOT / "configs" / f"{recipe}.yaml", given))


def _first_epoch(trainer: Trainer) -> Line:
    with matmul_precision(trainer.config.precision, trainer.policy.device):
        return trainer.run_epoch()


def faults() -> Iterator[Line]:
    """Yield previews in low precision, and first ratios with and without TF32 convolutions."""
    pool = 8 if HERE.rehearsed else 96
    trainer = _starter("starter", "sol_rl+diffusion_nft", "bf16", HERE.device, f"{{preview: {{pool: {pool}}}}}")
    metrics = _first_epoch(trainer)
    yield {"case": "sol_rl+diffusion_nft in bf16", "loss": metrics.get("loss"), "finite": all(
        weight.isfinite().all().item() for weight in trainer.policy.weights.parameters())}
    for method in ("diffusion_dpo", "rpo"):
        trainer = _starter("starter_video", method, "fp32", HERE.device)
        metrics = _first_epoch(trainer)
        yield {"case": f"{method} of videos in fp32", "loss": metrics.get("loss"),
               "first log ratio": trainer.first_ratio.max_log_ratio, "limit": trainer.first_ratio.limit}


def beside_cpu() -> Iterator[Line]:
    """Yield first epochs of a GPU and a CPU in fp32, of the methods that differed."""
    for recipe, method in DIFFERED:
        try:
            trainers = [_starter(recipe, method, "fp32", device) for device in (torch.device("cpu"), HERE.device)]
            weights = trainers[0].policy.weights.snapshot()
            trainers[1].policy.weights.load(weights)  # devices draw other first weights
            both = [_first_epoch(trainer) for trainer in trainers]
        except UserError as error:
            yield {"method": method, "error": str(error)[:200]}
            continue
        yield {"method": method, **{f"{key}, {place}": metrics.get(key) for key in ("loss", "grad_norm")
                                    for place, metrics in zip(("CPU", "GPU"), both, strict=True)}}


# --- 5: beside flow_grpo ---------------------------------------------------------------------------------------------

def beside_flow_grpo() -> Iterator[Line]:
    """Yield epochs of this program over those of flow_grpo's functions."""
    if not HERE.clone.name:
        yield {"note": "no clone of flow_grpo was given: --clone FOLDER"}
        return
    command = [sys.executable, str(ROOT / "scripts" / "measure" / "beside_flow_grpo.py"), str(HERE.clone), "--device",
               HERE.device.type, *(["--epochs=1", "--repetitions=1", "--cases=window_2_of_6"] if HERE.rehearsed
                                   else ["--epochs=3", "--repetitions=2"])]
    done = subprocess.run(command, capture_output=True, text=True)
    rows = [line.strip("|").split("|") for line in done.stdout.splitlines() if line.startswith("|")]
    if done.returncode or len(rows) < 3:
        raise RuntimeError(done.stderr.strip()[-300:])
    names = [name.strip() for name in rows[0]]
    yield from (dict(zip(names, (value.strip() for value in row), strict=True)) for row in rows[2:])


# --- 6: memory, endings, weights -------------------------------------------------------------------------------------

def one_pass() -> Iterator[Line]:
    """Yield epochs that replay over those that do not."""
    bench = Bench("sd35_medium", **{"method": "mix_grpo", "parts": "{plan: {size: 2}}"})
    train = bench.config.train.model_copy(update={"one_pass": True})
    held = trainer_of(bench.config.model_copy(update={"train": train}), bench.policy)
    for trainer in (bench.trainer, held):
        one_pass_ratio.epoch_seconds(trainer)
    found = one_pass_ratio.ratios(bench.trainer, held, 2)
    yield {"what": "replay over one pass", "ratios": ", ".join(f"{ratio:.2f}" for ratio in found)}


def out_of_memory() -> Iterator[Line]:
    """Yield the micro-batch that is left of one that does not fit; on a CPU the first update fails by plan."""
    rows = 4 if HERE.rehearsed else 64
    bench = Bench("sd35_medium", **{"train.group": str(rows), "train.micro_batch": str(rows)})
    said: list[str] = []
    bench.trainer.log = said.append
    if HERE.rehearsed:
        backward, left = bench.trainer.backward, [1]

        def fails(*args: Any) -> None:
            if left and left.pop():
                raise torch.OutOfMemoryError("CUDA out of memory. Planted")
            backward(*args)

        bench.trainer.backward = fails  # type: ignore[method-assign]
    with memory() as line:
        bench.trainer.run_epoch()
    yield {"micro-batch": rows, "left": bench.trainer.geometry.micro_batch,
           "said": next((text for text in said if "out of memory" in text), "nothing")[:150]} | line


def quantised() -> Iterator[Line]:
    """Yield epochs with weights of fewer bits, which are read from files."""
    here = capability(HERE.device)
    forms = [name for name in ("int8", "fp8", "nf4") if name == "int8" or here >= LOWEST.get(name, (7, 5))]
    with TemporaryDirectory() as folder:
        for form in forms:
            try:
                bench = Bench("sd35_medium", partial(_from_files, Path(folder)), **{"memory.weights": form})
                first, *_ = bench.epochs(1)
                yield {"weights": form} | first
            except (UserError, ImportError) as error:
                yield {"weights": form, "error": " ".join(str(error).split())[:200]}
            bench = None  # type: ignore[assignment]
            gc.collect()


def _from_files(folder: Path, config: Config) -> Any:
    if not (folder / "model_index.json").exists():
        loaded(config).save_pretrained(folder)
        gc.collect()
    return build.load(config.model_copy(update={"model": str(folder)}))


def killed() -> Iterator[Line]:
    """Yield what a run has that is killed behind its second epoch and resumed."""
    count = 3
    with TemporaryDirectory() as folder:
        run = Path(folder) / "starter"
        given = [f"--output={folder}", "--name=starter", f"--device={HERE.device.type}", "--tracker=none",
                 "--train.save_every=1", f"--train.epochs={count}", "--train.prompts=1", "--train.group=4",
                 "--train.micro_batch=4", "--train.updates=1", "--train.lr=1e-3", "--train.steps=4", "--eval.prompts=2",
                 "--eval.steps=2", "--eval.grid=1"]
        command = ["train", str(ROOT / "configs" / "starter.yaml"), *given]
        # A fork has its packages loaded, which saves most of a rehearsal; the state of a GPU does not outlive one.
        processes = get_context("fork" if HERE.rehearsed else "spawn")
        process = processes.Process(target=_command, args=(command,))
        start = time.perf_counter()
        process.start()
        while process.is_alive() and _lines(run / "metrics.jsonl") < 2:  # the first epoch is saved then
            time.sleep(0.02)
        process.kill()
        process.join()
        before = _lines(run / "metrics.jsonl")
        again = processes.Process(target=_command, args=([*command, "--resume"],))
        again.start()
        again.join()
        yield {"epochs before": before, "exit code": again.exitcode, "epochs": _lines(run / "metrics.jsonl"),
               "expected": count, "seconds": time.perf_counter() - start}


def _command(arguments: list[str]) -> None:
    """Run a command of this program in a process of its own, which prints nothing."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    torch.set_num_threads(1)  # those of a forked process's parent are gone
    sys.exit(main_of_flowgrpo(arguments))


def _lines(file: Path) -> int:
    return file.read_text(encoding="utf-8").count("\n") if file.exists() else 0


# --- 7: other models -------------------------------------------------------------------------------------------------

def flux_dev() -> Iterator[Line]:
    yield from Bench("flux_dev").epochs(2)


def sdxl() -> Iterator[Line]:
    yield from Bench("sdxl").epochs(2)


def wan21_1b() -> Iterator[Line]:
    yield from Bench("wan21_1b").epochs(2)


def qwen3_0_6b() -> Iterator[Line]:
    yield from Bench("qwen3_0_6b").epochs(2)


# --- the process -----------------------------------------------------------------------------------------------------

def about() -> Line:
    """Return what results are of: device, versions, and what others hold of the GPU. SystemExit without a GPU."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    line: Line = {"device": f"a CPU with {os.cpu_count()} cores", "card": None, "beside_gib": 0, "versions": versions}
    if HERE.rehearsed:
        return line
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU: expected one, or --rehearse for a test of the script on the CPU")
    free, whole = torch.cuda.mem_get_info()
    versions |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
    name = torch.cuda.get_device_name()
    line |= {"device": name, "beside_gib": round(max((whole - free) / GIB - 1, 0), 1)}
    try:
        return line | {"card": gpus.gpu_key(re.sub(r"\b(SXM\d?|HBM\w*|PCIe)\b", "", name))}
    except UserError:  # a card whose numbers are not known; it has no factors
        return line


def log(section: str, **values: Any) -> None:
    print(json.dumps({"section": section} | values), flush=True)


def tell(section: str) -> None:
    """Run a section and print its lines. An error ends it alone."""
    note, begun = None, time.perf_counter()
    log(section, begin=True)
    try:
        for line in globals()[section]():
            log(section, line={key: float(f"{value:.5g}") if isinstance(value, float) else value
                               for key, value in line.items()})
    except Exception as error:  # of any library, out of memory too; the other sections go on
        note = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    gc.collect()
    log(section, end=True, note=note, seconds=round(time.perf_counter() - begun, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--clone", type=Path, default=Path(""))
    args = parser.parse_args()
    HERE.rehearsed, HERE.clone = args.rehearse, args.clone
    print(json.dumps({"about": about()}), flush=True)
    with matmul_precision("bf16", HERE.device):
        for section in args.sections:
            tell(section)


if __name__ == "__main__":
    main()
