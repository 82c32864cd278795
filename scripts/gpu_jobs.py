"""One job of the GPU hour: a recipe with random weights of full size, and its measures.

    python scripts/gpu_jobs.py sdxl_24gb --device cuda      # prints a JSON line; scripts/gpu_hour.py calls it
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import bench_overhead
import one_pass_ratio
import torch
from gpu_clocks import GIB, peaks, timed
from gpu_models import PROMPTS, made_on
from gpu_results import REPETITIONS, ROOT, Job, manifest

from flowgrpo import rewards
from flowgrpo.check import tiny
from flowgrpo.check.tiny import texts
from flowgrpo.config import Config, load
from flowgrpo.data.prompts import Prompt
from flowgrpo.device import DTYPES
from flowgrpo.distributed.processes import make_accelerator
from flowgrpo.dry_run import estimate, from_configs
from flowgrpo.gpus import GPUS
from flowgrpo.policies import build
from flowgrpo.policies.policy import Policy
from flowgrpo.published import named
from flowgrpo.train import Trainer

SETTINGS = {"reward": "random", "train.prompts": "1", "train.updates": "1", "train.inner_epochs": "1", "held_out": "0",
            "tracker": "none", "eval.rewards": "[]", "precision": "bf16"}
TINY = {"train.group": "4", "train.micro_batch": "4", "adapter.rank": "2", "memory": "{}",
        "train.checkpointing": "false", "precision": "fp32"}
SIZES = {"height": "height", "width": "width", "num_frames": "frames"}  # of a tiny pipeline's call, as a recipe says


def config_of(job: Job, device: str, small: bool = False) -> Config:
    """Return a job's recipe as it is run: one prompt, one update, a random reward, and the job's overrides.

    small: everything tiny, as on a CPU.
    """
    text = job.model is not None
    more = {} if not small else TINY | ({"text.max_tokens": "8"} if text else {"picture": "{}"})
    settings = SETTINGS | {"device": device} | ({"eval.best": "null"} if text else {})
    given = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in job.set.items()}
    return load(ROOT / "configs" / f"{job.recipe}.yaml", settings | given | more)


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


def loaded(job: Job, config: Config, device: torch.device, small: bool, folder: Path) -> Any:
    """Return the pipeline of a job, or its (model, tokenizer), with random weights.

    Quantised weights are read from files, so that the pipeline is written to a folder and loaded as a run loads it.
    """
    dtype = DTYPES[config.precision]
    if job.model is not None:
        return texts.make("Qwen3ForCausalLM") if small else _language_model(job.model, device, dtype)
    if small:
        return tiny.make(_class(config))[0]
    pipe = filled(from_configs.pipeline(config.model, dtype), device, dtype)
    if config.memory.weights == "full":
        return pipe
    pipe.save_pretrained(folder)
    del pipe
    torch.cuda.empty_cache()
    return build.load(config.model_copy(update={"model": str(folder)}))


def _class(config: Config) -> str:
    known = named(config.model)
    assert known is not None, f"{config.model} is no published model"
    return known.pipeline


def _tiny_picture(config: Config) -> dict[str, Any]:
    """Return the section `picture` of a run of the tiny pipeline of a configuration's model."""
    call = tiny.make(_class(config))[1]
    return {SIZES[key]: value for key, value in call.items() if key in SIZES} | {
        "call": {key: value for key, value in call.items() if key not in SIZES}}


def _language_model(described: Any, device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokens = from_configs.tokenizer(described["max_position_embeddings"])
    ids = {f"{kind}_token_id": getattr(tokens, f"{kind}_token_id") for kind in ("pad", "bos", "eos")}
    with made_on(device, dtype):
        return Qwen3ForCausalLM(Qwen3Config(**described, **ids)).eval(), tokens


class Measured:
    """Trainers of a job over one policy, and its measures."""

    def __init__(self, config: Config, policy: Policy):
        self.config, self.policy, self.trainer = config, policy, _trainer(config, policy)

    def first_ratio(self) -> dict[str, Any]:
        """Return the largest first |log ratio| of the run's first epoch, and its limit."""
        if self.trainer.first_ratio.max_log_ratio is None:
            self.trainer.run_epoch()
        first = self.trainer.first_ratio
        return {"found": first.max_log_ratio, "limit": first.limit, "rescored": int(first.rescore)}

    def peak(self) -> dict[str, Any]:
        """Return the peak of an epoch after the first one, and that of the dry run."""
        predicted = estimate.dry_run(self.config, GPUS["H100"]).peak
        return {"measured_gib": self._epoch()[0], "predicted_gib": predicted / GIB}

    def memory(self) -> dict[str, Any]:
        """Return the peak of an epoch after the first one, and its seconds."""
        gib, seconds = self._epoch()
        return {"measured_gib": gib, "seconds": seconds}

    def epoch(self) -> dict[str, Any]:
        """Return the seconds of rollout and update, and those of their denoiser calls alone, in turns."""
        calls = bench_overhead.recorded(self.trainer)
        work = {"seconds": partial(bench_overhead.epoch, self.trainer),
                "bare_seconds": partial(bench_overhead.bare, self.trainer, calls)}
        found = bench_overhead.in_turns(work, REPETITIONS, self.policy.device)
        del calls
        return dict(found)

    def one_pass(self) -> dict[str, Any]:
        """Return the ratios of epochs that replay over those that do not."""
        train = self.config.train.model_copy(update={"one_pass": True})
        held = _trainer(self.config.model_copy(update={"train": train}), self.policy)
        one_pass_ratio.epoch_seconds(held)
        return {"ratios": one_pass_ratio.ratios(self.trainer, held, REPETITIONS)}

    def _epoch(self) -> tuple[float, float]:
        self.first_ratio()  # of the first epoch, which is not measured
        with peaks(self.policy.device) as line:
            seconds = timed(self.trainer.run_epoch, self.policy.device, 1, warm=0)
        return line.get("allocated GiB", 0.0), seconds


def _trainer(config: Config, policy: Policy) -> Trainer:
    functions = {"random": lambda samples, prompts: torch.rand(len(prompts)).tolist()}
    return Trainer(config, make_accelerator(str(policy.device)), policy,
                   rewards.compose(config.trained, config.cache, functions), ([Prompt(text) for text in PROMPTS], []))


def measured(job: Job, device: str, small: bool = False) -> dict[str, Any]:
    """Return the measures of a job by name; {"error": line} in the place of one that failed."""
    config, found = config_of(job, device, small), dict[str, Any]()
    if small and job.model is None:
        config = config.model_copy(update={"picture": type(config.picture)(**_tiny_picture(config))})
        job = replace(job, measures=tuple(name for name in job.measures if name != "peak"))  # of published shapes
    with TemporaryDirectory() as folder:
        policy: Any = build.make_policy(config, torch.device(device),
                                        loaded(job, config, torch.device(device), small, Path(folder)))
        jobs = Measured(config, policy)
        for name in job.measures:
            work: Callable[[], dict[str, Any]] = getattr(jobs, name)
            try:
                found[name] = work()
            except Exception as error:  # of any library; the other measures go on
                found[name] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=[job.name for job in manifest()])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small widths: a test of the script")
    args = parser.parse_args()
    [job] = [job for job in manifest() if job.name == args.job]
    print(json.dumps(measured(job, args.device, args.tiny)))


if __name__ == "__main__":
    main()
