"""Sections of gpu_report.py, which yield lines: of a model with random weights, of one step, and of the starter."""

from __future__ import annotations

import gc
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import epoch_of, updated
from gpu_clocks import GIB, Line, detached, peaks, profiled, repeated, timed, waits
from gpu_models import MODELS, PROMPTS, made_on

from flowgrpo import rewards
from flowgrpo.check.memory import memory
from flowgrpo.config import Config, load
from flowgrpo.data.prompts import Prompt
from flowgrpo.device import DTYPES
from flowgrpo.distributed.processes import make_accelerator
from flowgrpo.gaussian import log_prob, sample
from flowgrpo.policies.build import make_policy
from flowgrpo.policies.weights.checkpointing import checkpoint_blocks
from flowgrpo.policies.weights.compiled import compile_blocks
from flowgrpo.policies.weights.forwards import without_casts
from flowgrpo.policies.weights.low_precision import LOWEST, capability, quantised
from flowgrpo.samplers.growth import explore
from flowgrpo.samplers.kernels import FlowSDE
from flowgrpo.samplers.rollout import seeder
from flowgrpo.train import Trainer
from flowgrpo.training.throughput import Throughput

CONFIGS = Path(__file__).parent.parent / "configs"
SETTINGS = {"reward": "random", "train.prompts": "1", "train.updates": "1", "train.steps": "6", "held_out": "0",
            "tracker": "none", "eval.rewards": "[]", "memory.encoders": "keep", "train.checkpointing": "false",
            "precision": "bf16"}
SMALL = {"layers": 1, "heads": 1, "width": 32}
TINY = {"picture": "{height: 32, width: 32, call: {max_sequence_length: 16}}",
        "train.group": "2", "train.micro_batch": "2", "adapter.rank": "2"}
SWEEP = (4, 8, 16, 32)  # rows in a call


# --- a model ---------------------------------------------------------------------------------------------------------

class Bench:
    """Model of MODELS with its recipe, first alone, then as the policy of a trainer. Sections run in their order."""

    def __init__(self, model: str, device: str, tiny: bool):
        self.name, self.tiny, self.device = model, tiny, torch.device(device)
        group = load(CONFIGS / f"{model}.yaml").train.micro_batch
        settings = SETTINGS | {"device": device, "train.group": str(group)} | (TINY if tiny else {})
        self.config: Config = load(CONFIGS / f"{model}.yaml", settings)
        self.rows = self.config.train.micro_batch
        self.bare = 0.0  # seconds of a denoiser's call

    @cached_property
    def pipe(self) -> Any:
        with made_on(self.device, DTYPES[self.config.precision]):
            pipe = MODELS[self.name](**(SMALL if self.tiny else {}))
        pipe.set_progress_bar_config(disable=True)
        for part in pipe.components.values():
            if isinstance(part, torch.nn.Module):
                part.eval().requires_grad_(False)
        return pipe

    @cached_property
    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs of a denoiser's call, as the stock pipeline makes it."""
        calls: list[Any] = []
        hook = self.pipe.transformer.register_forward_pre_hook(
            lambda _, args, kwargs: calls.append(detached((args, kwargs))), with_kwargs=True)
        self._draw(steps=2)
        hook.remove()
        return calls[0]

    @cached_property
    def trainer(self) -> Trainer:
        functions = {"random": lambda images, prompts: torch.rand(len(prompts)).tolist()}
        return Trainer(self.config, make_accelerator(str(self.device)),
                       make_policy(self.config, self.device, self.pipe),
                       rewards.compose(self.config.trained, self.config.cache, functions),
                       ([Prompt(text) for text in PROMPTS], []))

    @cached_property
    def conditioning(self) -> Any:
        return self.trainer.rollouts.conditioning(self.trainer.prompts[:1])

    def free(self) -> None:
        """Forget the model."""
        for name in ("pipe", "call", "trainer", "conditioning"):
            self.__dict__.pop(name, None)
        self.parts = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # --- pieces of work ---

    def _draw(self, steps: int) -> None:
        picture, guidance = self.config.picture, self.config.train.guidance
        with torch.no_grad():
            self.pipe(PROMPTS[:1] * self.rows, height=picture.height, width=picture.width, guidance_scale=guidance,
                      num_inference_steps=steps, output_type="latent", return_dict=False, **picture.call)

    def _forward(self) -> None:
        args, kwargs = self.call
        with torch.no_grad(), self._arithmetic():
            self.pipe.transformer(*args, **kwargs)

    def _arithmetic(self) -> Any:
        return self.trainer.policy.driver.arithmetic() if "trainer" in self.__dict__ else torch.no_grad()

    def _rollout(self) -> None:
        trainer = self.trainer
        self.parts = list(explore(trainer.policy, self.conditioning, trainer.rollouts.explorations(0), self.rows,
                                  seeder(self.config.seed, 0)))

    def _decode(self) -> None:
        for part in self.parts:
            for at in torch.arange(len(part.prompts)).split(self.rows):
                self.trainer.policy.decode(part.finals[0][at], self.conditioning.rows(part.prompts[at]))

    def _update(self) -> Line:
        group = self.config.train.group
        signs = (1 - 2.0 * (torch.arange(group) % 2)).view(1, group, 1).expand(-1, -1, len(self.config.rewards))
        batch = self.trainer.prompts[:1]
        return updated(self.trainer, epoch_of(self.trainer, self.parts, self.conditioning, batch, signs))

    def _over(self, seconds: float) -> float | None:
        """Return a call's seconds over those of a bare one, None if that was not measured."""
        return seconds / self.bare if self.bare else None

    @property
    def steps(self) -> int:
        """Steps of one update: those that the rollout recorded."""
        return len(self.parts[0].transitions)

    # --- sections ---

    def stock(self) -> Iterator[Line]:
        """Yield figures of the model without this program: no adapter, no autocast."""
        rows, weights = self.rows, sum(p.numel() for p in self.pipe.transformer.parameters())
        args, kwargs = self.call
        calls = self.config.train.steps
        with peaks(self.device) as line:
            self.bare = timed(self._forward, self.device)
        yield {"what": "denoiser's call", "rows": rows, "seconds": self.bare, "ms per row": 1e3 * self.bare / rows,
               "billions of weights": weights / 1e9} | line
        with peaks(self.device) as line:
            seconds = timed(partial(self._draw, calls), self.device, 2)
        yield {"what": f"pipeline's call, {calls} steps", "rows": rows, "seconds": seconds,
               "ms per row": 1e3 * seconds / rows, "over its denoiser's calls": seconds / (calls * self.bare)} | line

    def epoch(self) -> Iterator[Line]:
        """Yield rollout, decoding and update, beside the bare calls and the estimate of `flowgrpo check`."""
        trainer, estimate = self.trainer, memory(self.trainer.policy, self.config, self.conditioning)
        throughput = Throughput(trainer.config, trainer.policy, trainer.processes)
        meter, peak = throughput.meter, throughput.peak
        for what in ("rollout", "decode", "update"):
            work = getattr(self, f"_{what}")
            work()  # the first update looks at the first ratio, and makes the optimizer's state
            before = meter.total if meter else 0.0
            with peaks(self.device) as line:
                seconds = timed(work, self.device, 2, warm=0)
            if meter and peak and what != "decode":
                line["share of the GPU's peak"] = (meter.total - before) / 2 / seconds / peak
            calls = {"rollout": self.config.train.steps}.get(what, 0)
            yield {"what": what, "rows": self.rows, "seconds": seconds,
                   "ms per row and step": 1e3 * seconds / self.rows / {"update": self.steps}.get(what, calls or 1),
                   "over bare calls": self._over(seconds / calls) if calls else None} | line | {
                   "estimated GiB": sum(estimate[what].values()) / GIB}
        yield {"what": "first |log ratio|", "value": trainer.first_ratio.max_log_ratio,
               "limit": trainer.first_ratio.limit, "old scores computed again": trainer.first_ratio.rescore}

    def variants(self) -> Iterator[Line]:
        """Yield the LoRA's own forward, as a run has it, and peft's under autocast; then the first is restored."""
        policy = self.trainer.policy
        layers = list(policy.weights.layers().values())
        for what, casts in (("own LoRA forward", False), ("autocast and peft's", True)):
            for layer in layers if casts else ():
                vars(layer).pop("forward", None)
            policy.driver.casts = casts
            with peaks(self.device) as line:
                forward, rollout = timed(self._forward, self.device), timed(self._rollout, self.device, 2)
                update = timed(self._update, self.device, 2)
            yield {"what": what, "denoiser's call, s": forward, "over the bare call": self._over(forward),
                   "rollout, s": rollout, "update, s": update} | line
        policy.driver.casts = not without_casts(layers)

    def host(self) -> Iterator[Line]:
        """Yield the kernels' seconds beside those of a call; what a share lacks to 1 is the host's."""
        for what, work in (("denoiser's call", self._forward), ("rollout", self._rollout), ("update", self._update)):
            seconds = timed(work, self.device, 2)
            line: Line = {"what": what, "seconds": seconds}
            if self.device.type == "cuda":
                kernels, busy = profiled(work)
                line |= {"kernels": kernels, "seconds of kernels": busy, "share of kernels": busy / seconds}
            yield line

    def synchronisations(self) -> Iterator[Line]:
        """Yield the places where the host waits for the GPU, of torch's debug mode."""
        if self.device.type != "cuda":
            yield {"phase": "none without a GPU"}
            return
        for what in ("rollout", "update"):
            for place, count in waits(getattr(self, f"_{what}")).most_common(8) or [("nowhere", 0)]:
                yield {"phase": what, "place": place, "times": count}

    def sweep(self) -> Iterator[Line]:
        """Yield one forward, and one with its backward, by rows and by checkpointing."""
        module, policy = self.pipe.transformer, self.trainer.policy
        args, kwargs = self.call
        of = len(args[0] if args else kwargs["hidden_states"])
        for recomputes in (False, True):
            if recomputes:
                checkpoint_blocks(module, policy.driver.attention)
            for rows in SWEEP[:2] if self.tiny else SWEEP:
                rows *= of // self.rows  # guidance is a second row
                inputs = repeated(args, rows, of), repeated(kwargs, rows, of)
                line = {"rows": rows, "checkpointing": recomputes}
                try:
                    with peaks(self.device) as most:
                        forward = timed(partial(self._once, inputs, False), self.device, 2)
                        both = timed(partial(self._once, inputs, True), self.device, 2)
                except torch.OutOfMemoryError:
                    yield line | {"note": "out of memory"}
                    break
                yield line | {"forward, ms per row": 1e3 * forward / rows,
                              "with backward, ms per row": 1e3 * both / rows} | most
        module.disable_gradient_checkpointing()

    def _once(self, inputs: tuple[tuple[Any, ...], dict[str, Any]], backward: bool) -> None:
        policy = self.trainer.policy
        with torch.set_grad_enabled(backward), policy.driver.arithmetic(), policy.driver.attention():
            out = self.pipe.transformer(*inputs[0], **inputs[1])[0]
            if backward:
                out.float().square().mean().backward()
                for parameter in policy.weights.parameters():
                    parameter.grad = None

    def previews(self) -> Iterator[Line]:
        """Yield a denoiser's call in every precision that the device has."""
        here = capability(self.device)
        for precision in ("full", *(name for name, lowest in LOWEST.items() if here >= lowest)):
            with peaks(self.device) as line, quantised(self.trainer.policy, precision):
                seconds = timed(self._forward, self.device)
            yield {"precision": precision, "seconds": seconds, "over the bare call": self._over(seconds)} | line

    def compiled(self) -> Iterator[Line]:
        """Yield calls of blocks that are compiled in place, so that this section is the last of a model."""
        policy = self.trainer.policy
        compile_blocks(self.pipe.transformer, "eager" if self.tiny else "inductor")
        policy.compiled = True
        first = timed(self._forward, self.device, 1, warm=0)
        seconds = timed(self._forward, self.device)
        yield {"what": "denoiser's call", "first, s": first, "seconds": seconds,
               "over the bare call": self._over(seconds)}
        for what in ("rollout", "update"):
            work = getattr(self, f"_{what}")
            first = timed(work, self.device, 1, warm=0)
            with peaks(self.device) as line:
                seconds = timed(work, self.device, 2, warm=0)
            yield {"what": what, "first, s": first, "seconds": seconds} | line
        for precision in [name for name, lowest in LOWEST.items() if capability(self.device) >= lowest][:1]:
            with quantised(policy, precision):
                first = timed(self._forward, self.device, 1, warm=0)
                seconds = timed(self._forward, self.device)
            yield {"what": f"denoiser's call in {precision}", "first, s": first, "seconds": seconds,
                   "over the bare call": self._over(seconds)}


# --- beside the models -----------------------------------------------------------------------------------------------

def beside_flow_grpo(device: str) -> Iterator[Line]:
    """Yield seconds of a stochastic step, and of flow_grpo's with its log-probability where that is importable."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10, device=device)
    grid, step, level = scheduler.sigmas.cpu(), 4, 0.7
    x, v = (torch.randn(24, 16, 64, 64, device=device) for _ in range(2))
    kernel, where = FlowSDE(level), torch.device(device)

    def drawn() -> torch.Tensor:
        gaussian = kernel(x, v, grid, step)
        after = sample(gaussian, torch.randn_like(x))
        log_prob(gaussian, after)
        return gaussian.mean

    seconds = timed(drawn, where)
    yield {"what": "this program's step and log-probability", "ms": 1e3 * seconds}
    try:
        theirs = importlib.import_module("flow_grpo.diffusers_patch.sd3_sde_with_logprob").sde_step_with_logprob
    except ImportError:
        yield {"what": "flow_grpo is not importable: no ratio"}
        return
    step_of = partial(theirs, scheduler, v, scheduler.timesteps[[step] * len(x)], x, noise_level=level)
    mean = step_of()[2]
    yield {"what": "flow_grpo's", "ms": 1e3 * (other := timed(step_of, where)), "ours over theirs": seconds / other,
           "largest difference of means": (drawn() - mean).abs().max().item()}


def starter(device: str, tiny: bool, limit: float) -> Iterator[Line]:
    """Yield the seconds of `flowgrpo train configs/starter.yaml`, in a process of its own that has `limit` seconds."""
    short = ["--train.epochs=1", "--train.group=4", "--eval.prompts=2", "--eval.steps=2", "--eval.grid=1"]
    with TemporaryDirectory() as folder:
        start = time.perf_counter()
        command = [sys.executable, "-m", "flowgrpo", "train", str(CONFIGS / "starter.yaml"), f"--device={device}",
                   f"--output={folder}", "--name=starter", "--tracker=none", *(short if tiny else [])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, cwd=CONFIGS.parent)
        seconds = time.perf_counter() - start
        if done.returncode:
            yield {"what": "starter", "note": f"exit code {done.returncode}: {done.stderr.strip()[-200:]}"}
            return
        summary = json.loads((Path(folder) / "starter" / "summary.json").read_text(encoding="utf-8"))
    yield {"what": "starter", "seconds to the verdict": seconds, "epochs": summary["epochs"]} | {
        f"{name}, {when}": summary[when][name] for name in list(summary["after"])[:2] for when in ("before", "after")}
