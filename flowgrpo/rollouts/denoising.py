"""Rollouts of a pipeline: sample an epoch's groups, and replay them.

Grids, noise and images are known here alone; the training loop knows of none of them.
Each group has a size, so that a run trains several resolutions and aspect ratios.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from flowgrpo.config.geometry import BatchShape
from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.processes import Processes
from flowgrpo.errors import UserError
from flowgrpo.log import PhaseTimer
from flowgrpo.methods import targets
from flowgrpo.methods.method import Method
from flowgrpo.policies.pipelines import encoded_prompts, probes
from flowgrpo.policies.pipelines.conditioning import Conditioning, Size
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.pipelines.probes import few_steps
from flowgrpo.rollouts import measured
from flowgrpo.rollouts.base import GroupSampler, TotalReward
from flowgrpo.rollouts.loss_inputs import LossInputs
from flowgrpo.rollouts.targets import Drawer, Replayed, target
from flowgrpo.samplers import cost, noise, reward_gradient
from flowgrpo.samplers.base_samples import BaseImages
from flowgrpo.samplers.grids import make_grid
from flowgrpo.samplers.noise import LEAST, deviation, message, quiet
from flowgrpo.samplers.rollout import Part, RolloutSpec, Seed
from flowgrpo.samplers.scheduler import Segment
from flowgrpo.types import Gaussian, Scored, unwrap


def draw_sizes(sizes: Sequence[Size], keys: Sequence[str], epoch: int, seed: int) -> list[Size]:
    """Return the (height, width) of each prompt's group in an epoch: all sizes are as likely.

    A pure function of its arguments: the same on every process, and after a resume.
    keys: of the prompts (`Prompt.key`). Groups of one prompt in an epoch have one size.
    """
    return [sizes[int.from_bytes(hashlib.sha256(f"{seed} {epoch} {key}".encode()).digest()[:8], "big") % len(sizes)]
            for key in keys]


def runs(sizes: Sequence[Size]) -> Iterator[tuple[range, Size]]:
    """Yield consecutive prompts of one size, and that size. sizes: of the prompts."""
    start = 0
    for size, same in itertools.groupby(sizes):
        stop = start + len(list(same))
        yield range(start, stop), size
        start = stop


def behind(seed: Seed, first: int) -> Seed:
    """Return the seeds of prompts whose first is the one at place `first`."""
    return seed if not first else lambda prompt, sample: seed(first + prompt, sample)


def shift_indices(part: Part, prompts: int, groups: int) -> Part:
    """Return the part of later prompts: its prompts and groups are counted from these."""
    if not prompts:
        return part
    taken = tuple(replace(one, prompts=one.prompts + prompts) for one in part.transitions)
    return replace(part, groups=range(part.groups.start + groups, part.groups.stop + groups),
                   prompts=part.prompts + prompts, transitions=taken)


def require_sizes(policy: PipelinePolicy, encode: Callable[[], Conditioning], sizes: Sequence[Size],
                  slices: int) -> None:
    """Raise UserError if the pipeline does not make images of these sizes: a step and an image of each are tried.

    encode: gives the conditioning of one prompt. slices: of every group over processes.
    """
    if not sizes:
        return
    name = type(policy.pipe).__name__
    if missing := {"height", "width"} - set(policy.accepts):
        raise UserError(f"image.sizes is set, but {name} takes no {min(missing)}: leave it out")
    if slices > 1:
        raise UserError("image.sizes is set, but groups are split over processes: use train.prompts that the "
                        "processes divide")
    conditioning, before = encode(), policy.evaluations
    if conditioning.inputs:
        raise UserError("image.sizes is set, but prompts bring images, whose size is theirs: leave it out")
    for size in sizes:
        if (made := _output_size(policy, replace(conditioning, sizes=[size]), name)) != size:
            raise UserError(f"image.sizes: {name} makes images of {made[0]} x {made[1]} where {size[0]} x {size[1]}"
                            " are asked for: use sizes that it makes, such as multiples of 16")
    policy.evaluations = before


def _output_size(policy: PipelinePolicy, conditioning: Conditioning, name: str) -> Size:
    """Return the height and width of an image after one step."""
    grid, timesteps = few_steps(policy, 2)
    try:
        x, _ = policy.run(Segment(grid, range(1), timesteps=timesteps), conditioning, None, policy.generators([0]))
        height, width = policy.decode(x, conditioning).shape[-2:]
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        [(height, width)] = conditioning.sizes
        raise UserError(f"image.sizes: {name} refuses {height} x {width} ({str(error).splitlines()[0][:200]}): use "
                        "sizes that it takes, or leave image.sizes out") from error
    return height, width


class DenoisingRollouts(GroupSampler[Conditioning]):
    """Grid, initial noises, rollouts and replays of a pipeline under a method.

    first: a prompt with which the pipeline's own grid is read. target: what the loss scores.
    """

    policy: PipelinePolicy
    drawer: Drawer | None = None  # what draws in the place of the pipeline: an engine

    def __init__(self, config: Config, policy: PipelinePolicy, method: Method, geometry: BatchShape,
                 processes: Processes, clock: PhaseTimer, first: Prompt):
        super().__init__(config, policy, method, geometry, processes, clock)
        self.first = first
        self.encode = encoded_prompts.prompt_cache(config, policy, policy.live)
        self.grid, self.timesteps = self.make_grid(config.train.steps)
        self.shift = config.train.own_shift
        self._base_images = dict[Size | None, BaseImages]()
        learned = method.denoising.learned_noise
        self.network = learned.network().to(policy.device) if learned else None
        if self.network is not None:
            policy.weights.add(noise.NAME, self.network)
        if method.denoising.preview:
            measured.require_previews(method.denoising.preview, policy)
        self.target, self.planned = target(self), dict[tuple[int, Size | None], list[RolloutSpec]]()
        self._grids: dict[Size | None, tuple[torch.Tensor, torch.Tensor | None]] = {None: (self.grid, self.timesteps)}
        self._require_noise()
        require_sizes(policy, lambda: self.conditioning([first]), config.image.sizes, geometry.slices)
        # Only what is given images can put them back in; edits replay nothing of the pipeline.
        if not isinstance(method.target, targets.LatentEdits) and (policy.given or first.brings is not None):
            probes.require_middle(policy, DenoisingRollouts.conditioning(self, [first]),
                                   probes.goes_on(method, self.explorations(0)))

    def _require_noise(self) -> None:
        """Print which steps of the run are not trained.

        Raises UserError for an epoch that has no others, and for a plan that the steps left by a strength do not fit.
        """
        train, method, found = self.config.train, self.method, dict[int, float]()
        given = self.grid, self.target.samples_per_prompt, self.shift
        if not method.scores_noise:
            return
        try:
            whole = replace(method.plan_explorations(*given, 0, self.config.seed, self.timesteps)[0], grid=self.grid)
        except ValueError as error:  # the configuration's own check knows train.steps alone
            raise UserError(f"a strength of {self.policy.strength:g} leaves {len(self.grid) - 1} of {train.steps} "
                            f"steps: {error}") from None
        if all(deviation(whole, step) >= LEAST for step in range(len(self.grid) - 2)):
            return
        for epoch in range(train.epochs):
            for spec in method.plan_explorations(*given, epoch, self.config.seed, self.timesteps):
                found |= {step: deviation(spec, step) for step in quiet(spec)}
            try:
                method.explorations(*given, epoch, self.config.seed, self.timesteps)
            except ValueError as error:
                raise UserError(f"epoch {epoch + 1}: {error}") from None
        if found and self.processes.first:
            print(message(found, len(self.grid) - 1), flush=True)

    @property
    def exact(self) -> float | None:
        return self.policy.exact if self.drawer is None else None

    def make_grid(self, steps: int, size: Size | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the grid [steps+1] of images of a size (None: the evaluation's), and its timesteps."""
        train, policy, of = self.config.train, self.policy, [] if size is None else [size]
        return make_grid(train.grid, steps, train.shift, policy.stock, policy.strength, lambda steps:
                         policy.stock_grid(replace(self.conditioning([self.first]), sizes=of), steps))

    def grid_of(self, size: Size | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the grid of the rollout's steps for images of a size; the pipeline's own may go by the size."""
        if size not in self._grids:
            self._grids[size] = self.make_grid(self.config.train.steps, size)
        return self._grids[size]

    def conditioning(self, batch: list[Prompt], epoch: int | None = None) -> Conditioning:
        """Encode prompts, each once, as they are sampled. epoch: whose sizes of images they get; None: the
        evaluation's."""
        with self.clock("encode"):
            encoded = self.encode([p.shown for p in batch], self._negatives(batch), [p.brings for p in batch])
            if self.config.train.pack and encoded.layout.mixed:
                raise UserError("train.pack is true, but the prompts' images differ in size, so that every row is a "
                                "call of its own: set it to false, or bring the images to one size")
            if self.config.train.pack and not self.policy.vector(encoded):
                raise UserError(f"train.pack is true, but {type(self.policy.pipe).__name__} takes one timestep per "
                                f"call at guidance {self.policy.guidance:g}: set it to false")
        if any(p.guided for p in batch):
            encoded = self._apply_guided_inputs(encoded, batch, epoch)
        if epoch is None or not self.config.image.sizes:
            return encoded
        return replace(encoded, sizes=draw_sizes(self.config.image.sizes, [p.unguided.key for p in batch], epoch,
                                                  self.config.seed))

    def _apply_guided_inputs(self, encoded: Conditioning, batch: list[Prompt], epoch: int | None) -> Conditioning:
        """Return the conditioning of prompts under other inputs than their own, with what the loss reads in place."""
        if any(p.guided and p.guided.scale is not None for p in batch):
            encoded = replace(encoded, scales=[self._scale(p) for p in batch])
        if any(p.learned is not p for p in batch) and not self.method.target.scores_sampling:
            encoded = replace(encoded, learned=self.conditioning([p.learned for p in batch], epoch))
        return encoded

    def prepare(self, batch: list[Prompt]) -> None:
        """Encode prompts into the memory of prompts, as many as it holds."""
        self.encode.prepare([p.text for p in batch], self._negatives(batch), [p.brings for p in batch])

    def _scale(self, prompt: Prompt) -> float:
        scale = prompt.guided.scale if prompt.guided else None
        return self.policy.guidance if scale is None else scale

    def _negatives(self, batch: list[Prompt]) -> list[str]:
        return [self.config.negative_prompt if p.negative is None else p.negative for p in batch]

    def explorations(self, epoch: int, size: Size | None = None) -> list[RolloutSpec]:
        """Return an epoch's grids, windows, kernels and solvers for images of a size; the last epoch's are kept."""
        if (epoch, size) not in self.planned:
            train, method = self.config.train, self.method
            if self.network is not None:
                learned = unwrap(method.denoising.learned_noise)
                method = method.having(kernel=learned.with_network(self.network, epoch, train.epochs))
            grid, timesteps = self.grid_of(size)
            specs = method.explorations(grid, self.target.samples_per_prompt, self.shift, epoch, self.config.seed,
                                        timesteps)
            self.planned = {key: planned for key, planned in self.planned.items() if key[0] == epoch}
            self.planned[epoch, size] = [self._slice(spec) for spec in specs]
        return self.planned[epoch, size]

    def splits(self, epoch: int) -> tuple[int, ...]:
        return self.explorations(epoch)[0].split_widths

    def _slice(self, spec: RolloutSpec) -> RolloutSpec:
        """Return the sampling of a slice of a group, whose samples have the initial noises that they have in it."""
        if self.geometry.slices == 1:
            return spec
        samples = self.geometry.group
        return replace(spec, group=samples, roots=samples if spec.alone else spec.roots, shared=not spec.alone)

    def sample(self, conditioning: Conditioning, epoch: int, judge: TotalReward,
               value: reward_gradient.Value | None = None, turn: int = 0
               ) -> Iterator[tuple[Part, list[torch.Tensor | None]]]:
        """Sample a group per prompt: yield the parts as they are finished, each with its images.

        Images [b,...] are on the CPU, once per granularity; None where no reward looks at them.
        judge: the total reward, by which a method with previews chooses its initial noises.
        value: the one whose gradient a method with `backprop` follows.
        turn: how often the epoch has drawn before.
        """
        seed, explorations = self.seeds(epoch, turn, len(conditioning.prompts)), self.explorations(epoch)
        lags = self.method.denoising.lag.most > 0
        if lags:
            self.old_policy.start_epoch(epoch)
        drawing = self.old_policy.drawing if lags else nullcontext
        if self.method.denoising.preview:
            with drawing():
                seed = measured.preview_seeds(self, conditioning, seed, judge)
        before = self.policy.evaluations
        parts = self._sample(conditioning, epoch, seed, judge)
        while True:
            with self.clock("rollout"), drawing():
                part = next(parts, None)
            if part is None:
                break
            sampled = self.policy.evaluations
            part = self._record(part, conditioning, epoch, seed)
            before += self.policy.evaluations - sampled  # they are the update's
            if self.method.credit.progress is not None:
                part = measured.score_predictions(self, part, conditioning, judge, self.method.credit.progress)
            if self.method.credit.advantage.reads_baseline:
                sampled = self.policy.evaluations
                part = measured.score_baselines(self, part, conditioning, judge)
                before += self.policy.evaluations - sampled  # it counts its own
            with self.clock("decode"):
                images = [self.decode(final, conditioning.rows(part.prompts)) if self.decodes else None
                            for final in part.finals]
            if images[0] is not None:
                part = self.target.score(part, images[0], value)
            sampled = self.policy.evaluations
            yield part, images
            before += self.policy.evaluations - sampled  # of the base, which counts its own
        self._count(self.policy.evaluations - before, explorations)

    def _record(self, part: Part, conditioning: Conditioning, epoch: int, seed: Seed) -> Part:
        """Return a sampled part with the transitions that are trained, which may be scored; all processes do alike."""
        learned = conditioning.learned or conditioning
        if self.method.target.scores_sampling:  # nothing is left to score
            return self.target.record(part, learned, epoch, seed)
        with self.processes.alike(lambda: (len(part.prompts), learned.scales and self.processes.rank)):
            return self.target.record(part, learned, epoch, seed)

    def _sample(self, conditioning: Conditioning, epoch: int, seed: Seed, judge: TotalReward) -> Iterator[Part]:
        """Sample a group per prompt, groups of different sizes by themselves."""

        def of_states(states: torch.Tensor, prompts: torch.Tensor, pool: int) -> torch.Tensor:
            return measured.score_states(self, states, prompts + first, conditioning, judge, pool)

        first, drawer = 0, self.drawer or self.target
        if not conditioning.sizes:
            yield from drawer.sample(conditioning, self.explorations(epoch), seed, of_states)
            return
        for prompts, size in runs(conditioning.sizes):
            of = conditioning.rows(torch.tensor([*prompts]))
            specs, first = self.explorations(epoch, size), prompts.start
            for part in drawer.sample(of, specs, behind(seed, prompts.start), of_states):
                yield shift_indices(part, prompts.start, prompts.start * len(specs))

    def base(self, part: Part, conditioning: Conditioning) -> torch.Tensor | None:
        """Return the base model's images [b,...] beside a part's, from the same initial noises, on the CPU.

        None for a part that came from none.
        """
        if part.seeds is None:
            return None
        before = self.policy.evaluations
        with self.clock("base"):
            size = conditioning.sizes[int(part.prompts[0])] if conditioning.sizes else None
            if size not in self._base_images:
                self._base_images[size] = BaseImages(self.policy, *self.grid_of(size), self.geometry, self.decode)
            images = self._base_images[size](part, conditioning)
        self.count(self.policy.evaluations - before)
        return images

    def decode(self, finals: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        """Images on the CPU, decoded in micro-batches."""
        rows = torch.arange(len(finals)).split(self.geometry.micro_batch)
        return torch.cat([self.policy.decode(finals[at], conditioning.rows(at)).cpu() for at in rows])

    def _count(self, spent: int, explorations: list[RolloutSpec]) -> None:
        """Count a rollout's evaluations, and those that shared prefixes saved."""
        self.count(spent)
        alone = cost.alone(explorations, self.geometry.prompts)
        shared = cost.rollout(explorations, self.geometry.prompts)
        spent *= self.processes.count
        self.saved_evaluations += round(spent * alone / shared) - spent

    def replay(self, part: Part, conditioning: Conditioning) -> Replayed:
        """Score a part's transitions under the present weights: (place in `part.transitions`, its rows, scores)."""
        return self.target.replay(part, conditioning)

    def loss_inputs(self, part: Part, conditioning: Conditioning, reference: list[Scored]) -> LossInputs:
        """Return what the surrogate reads in addition to ratio and advantage, in every batch of the part's replay."""
        return self.target.loss_inputs(part, conditioning, reference)

    def gather_groups(self, parts: list[Part], conditioning: Conditioning,
                      reference: Callable[[Part], list[Scored]]) -> None:
        """Gather what the loss of these parts compares, if their groups are split over processes; all call it."""
        if self.split_groups is not None:
            self.split_groups.gather((part, self.target.statistics(part, conditioning, reference(part)))
                                   for part in parts)

    def step_weights(self, parts: list[Part], epoch: int) -> dict[int, float]:
        """Return the method's weight of every step that the epoch trains, however the parts are dealt out."""
        grid, explorations = self.target.steps(epoch)
        if not explorations:
            return {0: 1.0}
        local = {step for part in parts for step in part.exploration.schedule.trained}
        trained = self.processes.total([step in local for step in range(len(grid) - 1)])
        steps = [step for step, count in enumerate(trained) if count]
        if not steps:
            return {}
        of = {step: exploration for exploration in explorations for step in exploration.schedule.trained}

        def transition(x: torch.Tensor, v: torch.Tensor, grid: torch.Tensor, i: int) -> Gaussian:
            # With the plan's factor on the noise of that step.
            return of[i].transition(x, v, grid, i)

        return dict(zip(steps, self.method.loss.step_weight(transition, grid, steps).tolist()))
