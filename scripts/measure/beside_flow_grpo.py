"""Seconds of an epoch of this program over those of one of flow_grpo's own functions.

    git clone https://github.com/yifan123/flow_grpo CLONE
    python scripts/measure/beside_flow_grpo.py CLONE            # the starter, on the CPU: three cases, some minutes

This program's epochs replay, or have `train.one_pass`.

Both sides train the starter with a LoRA of the same layers and rank, for the same prompts, steps, groups, micro-batches
and guidance, without decoding, rewards and text encoders. Theirs is the stock pipeline, sampled by their
`pipeline_with_logprob`, then, as in their `train_sd3.py`, for every trained step their `sde_step_with_logprob`, the
clipped loss and its backward, and one optimizer step. The file `train_sd3.py` cannot be imported: its loop is written
anew here, without its logging. "Same arithmetic" is theirs with this program's attention and contiguous inputs of a
CPU.

First the script counts the rows that go through the denoiser on both sides, and compares log-probabilities of the same
steps. Then the epochs run in turns in one process, and a repetition divides the fastest of both sides. On a CPU they
run on one thread, and their seconds are the processor's: other load on the machine then counts little.
"""

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from bench_overhead import bare, recorded
from common import RECIPE, make_trainer, measuring, options
from one_pass_ratio import CASES, SMALL, epoch_seconds

sys.path.append(str(Path(__file__).parents[1] / "docs"))

from revisions import commit  # noqa: E402
from torch import Tensor  # noqa: E402

from flowgrpo.config import load  # noqa: E402
from flowgrpo.errors import UserError  # noqa: E402
from flowgrpo.log import PhaseTimer  # noqa: E402
from flowgrpo.policies import build  # noqa: E402
from flowgrpo.policies.pipelines.call import plain_on_cpu  # noqa: E402
from flowgrpo.policies.weights.forwards import contiguous_inputs  # noqa: E402
from flowgrpo.samplers.growth import explore  # noqa: E402
from flowgrpo.samplers.rollout import Part, seeder  # noqa: E402
from flowgrpo.train import Trainer  # noqa: E402

REPOSITORY, FOLDER = "yifan123/flow_grpo", "flow_grpo/diffusers_patch"
# Samples have initial noises of their own, as theirs; no group has equal rewards, of which nothing would be trained.
SAME = {"parts.roots": "null", "reward": "places", "precision": "fp32"}
CLIP, TOLERANCE = 1e-4, 1e-5
RATIOS = {"replay / theirs": ("replay", "theirs"), "one pass / theirs": ("one_pass", "theirs"),
          "replay / theirs, same arithmetic": ("replay", "same"),
          "one pass / theirs, same arithmetic": ("one_pass", "same"),
          "bare calls / theirs, same arithmetic": ("bare", "same")}


def places(images: Any, prompts: list[str]) -> list[float]:
    """Return the place of each image in its batch, as a reward."""
    return [float(place) for place in range(len(prompts))]


# --- their side ------------------------------------------------------------------------------------------------------

class RewardFunctions(NamedTuple):
    """Functions of flow_grpo: a rollout, and a step with its log-probability."""

    rollout: Callable[..., Any]
    step: Callable[..., Any]


def functions(clone: Path) -> RewardFunctions:
    """Import the functions of a clone. Raises UserError for a folder without them."""
    fix = f"expected a clone of {REPOSITORY}: git clone https://github.com/{REPOSITORY}"
    if not (clone / FOLDER).is_dir():
        raise UserError(f"{clone} has no folder {FOLDER}, {fix}")
    sys.path.insert(0, str(clone.resolve()))
    found = []
    for module, name in (("sd3_pipeline_with_logprob", "pipeline_with_logprob"),
                         ("sd3_sde_with_logprob", "sde_step_with_logprob")):
        try:
            found.append(getattr(importlib.import_module(f"{FOLDER.replace('/', '.')}.{module}"), name))
        except (AttributeError, ImportError) as error:
            raise UserError(f"{clone}: {error}, {fix}") from None
    return RewardFunctions(*found)


class Peer:
    """Stock pipeline of a trainer's recipe with a LoRA by peft, and the epochs of flow_grpo with it.

    prompts: what `encode_prompt` returned for every sample. arithmetic: with this program's on a CPU.
    """

    def __init__(self, theirs: RewardFunctions, trainer: Trainer, prompts: tuple[Tensor | None, ...], arithmetic: bool):
        from peft import LoraConfig, get_peft_model

        config, device = trainer.config, trainer.policy.device
        self.theirs, self.config, self.arithmetic = theirs, config, arithmetic
        [exploration] = trainer.rollouts.explorations(0)
        self.steps, self.trained = exploration.steps, exploration.schedule.trained
        self.level = exploration.kernel.level
        self.pipe = pipe = build.load(config)
        pipe.to(device)
        pipe.set_progress_bar_config(disable=True)
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, shift=config.train.shift)
        pipe.vae.decode = lambda latents, **_: (latents,)  # decoding is left out
        rank = config.adapter.rank
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, init_lora_weights="gaussian",
                          target_modules=config.adapter.targets)
        pipe.transformer = get_peft_model(pipe.transformer.requires_grad_(False), lora)
        if arithmetic:
            contiguous_inputs([pipe.transformer], device)
        self.weights = [weight for weight in pipe.transformer.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(self.weights, lr=config.train.lr)
        self.sigmas = torch.linspace(1, 1 / self.steps, self.steps).tolist()
        pipe.scheduler.set_timesteps(sigmas=self.sigmas, device=device)
        self.prompts, self.guided = prompts, config.train.guidance > 1

    def around(self) -> AbstractContextManager[None]:
        """Return what surrounds the denoiser's calls."""
        return plain_on_cpu(self.pipe.device) if self.arithmetic else nullcontext()

    def epoch(self) -> None:
        """Sample all prompts, and train on the samples."""
        with self.around():
            self.update(self.rollout())

    def rollout(self) -> dict[str, Tensor]:
        """Return the samples [n,...]: states before and after every step, their log-probabilities, and the rows of
        their prompts."""
        config, batches = self.config.train, []
        self.pipe.transformer.eval()
        for rows in torch.arange(config.prompts * config.group).split(config.micro_batch):
            names = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
            given = {name: None if value is None else value[rows] for name, value in zip(names, self.prompts)}
            _, states, scores = self.theirs.rollout(
                self.pipe, **given, num_inference_steps=self.steps, sigmas=self.sigmas, noise_level=self.level,
                guidance_scale=config.guidance, output_type="latent")
            latents = torch.stack(states, dim=1)
            batches.append({"before": latents[:, :-1], "after": latents[:, 1:], "scores": torch.stack(scores, dim=1),
                            "timesteps": self.pipe.scheduler.timesteps.repeat(len(rows), 1), "rows": rows})
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    def update(self, samples: dict[str, Tensor]) -> None:
        """Make one optimizer step on the samples, a batch of one trained step at a time; half have an advantage of 1,
        half of -1."""
        count = len(samples["rows"])
        samples |= {"advantages": 1 - 2.0 * (torch.arange(count) % 2).to(samples["before"].device)}
        order = torch.randperm(count)
        batches = [{name: value[rows] for name, value in samples.items()}
                   for rows in order.split(self.config.train.micro_batch)]
        self.pipe.transformer.train()
        for batch in batches:
            for step in self.trained:
                loss = self.loss(batch, step) / (len(batches) * len(self.trained))
                loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self, batch: dict[str, Tensor], step: int) -> Tensor:
        """Return the clipped loss of one step of a batch."""
        new = self.score(batch["rows"], *(batch[name][:, step] for name in ("timesteps", "before", "after")))
        ratio, advantages = torch.exp(new - batch["scores"][:, step]), batch["advantages"]
        return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()

    def score(self, rows: Tensor, timesteps: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """Return their log-probability [n] of a step under the present weights."""
        prompt, negative, pooled, negative_pooled = (None if each is None else each[rows] for each in self.prompts)
        copies = 2 if self.guided else 1
        output = self.pipe.transformer(
            hidden_states=torch.cat([before] * copies), timestep=torch.cat([timesteps] * copies),
            encoder_hidden_states=torch.cat([negative, prompt]) if self.guided else prompt,
            pooled_projections=torch.cat([negative_pooled, pooled]) if self.guided else pooled, return_dict=False)[0]
        if self.guided:
            without, given = output.chunk(2)
            output = without.detach() + self.config.train.guidance * (given - without.detach())
        return self.theirs.step(self.pipe.scheduler, output.float(), timesteps, before.float(),
                                prev_sample=after.float(), noise_level=self.level)[1]


# --- the same work ---------------------------------------------------------------------------------------------------

@contextmanager
def counted(module: torch.nn.Module) -> Iterator[dict[str, int]]:
    """Context manager: count the rows that go through a denoiser, and those with a backward."""
    rows = {"forward": 0, "backward": 0}

    def count(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Tensor, ...]) -> None:
        size = len(args[0] if args else kwargs["hidden_states"])
        rows["forward"] += size
        if output[0].requires_grad:
            output[0].register_hook(lambda _: rows.update(backward=rows["backward"] + size))

    hook = module.register_forward_hook(count, with_kwargs=True)
    try:
        yield rows
    finally:
        hook.remove()


def work(module: torch.nn.Module, epoch: Callable[[], Any]) -> dict[str, int]:
    """Return the rows of an epoch."""
    with counted(module) as rows:
        epoch()
    return rows


def require_same_work(found: dict[str, dict[str, int]], states: int) -> None:
    """Raise UserError unless all sides do the same work. states: rows of the trained steps, which one pass saves."""
    expected = dict.fromkeys(found, found["theirs"])
    expected["one_pass"] = found["theirs"] | {"forward": found["theirs"]["forward"] - states}
    for side, rows in found.items():
        if rows != expected[side]:
            raise UserError(f"{side}: {rows} rows, expected {expected[side]} beside flow_grpo's functions: leave out "
                            "the options that change what is sampled or trained")


def require_same_scores(peer: Peer, part: Part) -> float:
    """Return the largest difference of log-probabilities of a part's recorded steps, theirs less ours, by the same
    weights. Raises UserError above TOLERANCE."""
    largest = 0.0
    for taken in part.transitions:
        timesteps = peer.pipe.scheduler.timesteps[taken.step].repeat(len(taken.x_next))
        with torch.no_grad(), peer.around():
            theirs = peer.score(torch.arange(len(taken.x_next)), timesteps, taken.x[taken.parent], taken.x_next)
        largest = max(largest, (theirs - taken.old.logp[:, 0]).abs().max().item())
    if not largest <= TOLERANCE:
        raise UserError(f"log-probabilities differ by {largest:.3g}, expected {TOLERANCE:g} at most: {REPOSITORY} at "
                        "this commit has another step or another mean than this program, so take another commit")
    return largest


# --- the clock -------------------------------------------------------------------------------------------------------

class Processor(PhaseTimer):
    """Seconds of this process's processor by phase of an epoch."""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.phase, start = phase, time.process_time()
        try:
            yield
        finally:
            self.seconds[phase] += time.process_time() - start


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of a call: the processor's, or with a GPU those that pass."""
    if device.type == "cpu":
        start = time.process_time()
        run()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


class Case:
    """Sides of one case, which do the same work: functions that run an epoch and return its seconds."""

    def __init__(self, theirs: RewardFunctions, given: dict[str, str]):
        self.replaying, self.held = (make_trainer(load(RECIPE, given | {"train.one_pass": value}), {"places": places})
                                     for value in ("false", "true"))
        trainer, shape = self.replaying, self.replaying.geometry
        for each in (self.replaying, self.held) if trainer.policy.device.type == "cpu" else ():
            each.clock = each.rollouts.clock = Processor()
        conditioning = trainer.rollouts.conditioning(trainer.prompts[:shape.prompts])
        [prompts] = conditioning.rows(torch.arange(shape.prompts).repeat_interleave(shape.group)).calls
        self.peers = {name: Peer(theirs, trainer, prompts, name == "same") for name in ("theirs", "same")}
        parts = explore(trainer.policy, conditioning, trainer.rollouts.explorations(0), shape.samples,
                        seeder(trainer.config.seed, 0))
        self.difference = max(require_same_scores(self.peers["theirs"], part) for part in parts)
        self.rows = self._rows()
        device, calls = trainer.policy.device, recorded(trainer)
        self.sides: dict[str, Callable[[], float]] = {
            "bare": partial(seconds, partial(bare, trainer, calls), device),
            "replay": partial(epoch_seconds, trainer), "one_pass": partial(epoch_seconds, self.held)}
        self.sides |= {name: partial(seconds, peer.epoch, device) for name, peer in self.peers.items()}

    def _rows(self) -> dict[str, dict[str, int]]:
        """Return the rows of an epoch of each side. Raises UserError if they differ."""
        found = {}
        for name, trainer in (("replay", self.replaying), ("one_pass", self.held)):
            epoch_seconds(trainer)  # the first one also checks the ratio
            found[name] = work(*trainer.policy.denoisers.values(), partial(epoch_seconds, trainer))
        found |= {name: work(peer.pipe.transformer, peer.epoch) for name, peer in self.peers.items()}
        peer = self.peers["theirs"]
        states = self.replaying.geometry.samples * len(peer.trained)
        require_same_work(found, 2 * states if peer.guided else states)
        return found

    def repetition(self, epochs: int) -> dict[str, float]:
        """Return the seconds of every side's fastest epoch, all sides in turns, each of them first in its turn."""
        names, taken = list(self.sides), {name: [] for name in self.sides}
        for turn in range(epochs):
            for name in names[turn % len(names):] + names[:turn % len(names)]:
                taken[name].append(self.sides[name]())
        return {name: min(values) for name, values in taken.items()}


def line(case: str, found: list[dict[str, float]]) -> str:
    """Return a row of the table: of every ratio its median and all repetitions."""
    ratios = [[each[side] / each[other] for each in found] for side, other in RATIOS.values()]
    cells = (f"{median(each):.2f} ({', '.join(f'{ratio:.2f}' for ratio in each)})" for each in ratios)
    return f"| {case} | {' | '.join(cells)} |"


def main() -> int:
    parser = measuring(__doc__)
    parser.set_defaults(repetitions=3)
    parser.add_argument("clone", type=Path, metavar="CLONE", help=f"folder with a clone of {REPOSITORY}")
    parser.add_argument("--cases", nargs="+", choices=[*CASES], default=[*CASES])
    parser.add_argument("--epochs", type=int, default=5, help="epochs of every side in a repetition")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    try:
        theirs = functions(args.clone)
        print(f"{REPOSITORY} {commit(args.clone)}; this program {commit(RECIPE.parent)}; {args.device}, "
              f"{torch.get_num_threads()} threads, {time.strftime('%Y-%m-%d')}")
        rows = []
        for name in args.cases:
            case = Case(theirs, SMALL | CASES[name] | SAME | {"device": args.device} | options(args.option))
            print(f"{name}: {case.rows} rows, log-probabilities differ by {case.difference:.1e}", flush=True)
            rows.append(line(name, [case.repetition(args.epochs) for _ in range(args.repetitions)]))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"| case | {' | '.join(RATIOS)} |\n|---{'|---:' * len(RATIOS)}|", *rows, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
