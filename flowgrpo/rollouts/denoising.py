"""Rollouts of a pipeline: sample an epoch's groups, and replay them.

Grids, noise and images are known here alone; the training loop knows of none of them.
Each group has a size, so that a run trains several resolutions and aspect ratios.
Samples beside those that are trained are scored here too: previews, clean predictions, deterministic samples.
"""

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from flowgrpo.config.geometry import BatchShape
from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt, encodable
from flowgrpo.distributed.processes import Processes
from flowgrpo.errors import UserError
from flowgrpo.log import PhaseTimer
from flowgrpo.methods import targets
from flowgrpo.methods.method import Method
from flowgrpo.policies.pipelines import encoded_prompts, probes
from flowgrpo.policies.pipelines.conditioning import Conditioning, Size
from flowgrpo.policies.pipelines.image_latents import ImageEncoder
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.weights.low_precision import require_low_precision, with_quantised_weights
from flowgrpo.rollouts.base import GroupSampler, TotalReward
from flowgrpo.rollouts.targets import TARGETS, RecordedSteps
from flowgrpo.samplers import cost, reward_gradient
from flowgrpo.samplers.grids import make_grid
from flowgrpo.samplers.growth import BaseImages, deterministic
from flowgrpo.samplers.kernels import NOISE_NETWORK, Noisy
from flowgrpo.samplers.preview import contrasting, previews
from flowgrpo.samplers.rollout import LEAST, Part, RolloutSpec, Seed, deviation, quiet_steps
from flowgrpo.samplers.scheduler import Segment
from flowgrpo.types import Scored, unwrap

ON_DEVICE = 2**28  # bytes of a part's images that wait on the GPU for their rewards


def draw_sizes(sizes: Sequence[Size], keys: Sequence[str], epoch: int, seed: int) -> list[Size]:
    """The (height, width) of each prompt's group in an epoch: all sizes are as likely.

    A pure function of its arguments: the same on every process, and after a resume.
    keys: of the prompts (`Prompt.key`). Groups of one prompt in an epoch have one size.
    """
    return [sizes[int.from_bytes(hashlib.sha256(f"{seed} {epoch} {key}".encode()).digest()[:8], "big") % len(sizes)]
            for key in keys]


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
    grid, timesteps = probes.few_steps(policy, 2)
    for height, width in sizes:
        row = replace(conditioning, sizes=[(height, width)])
        try:
            x, _ = policy.run(Segment(grid, range(1), timesteps=timesteps), row, None, policy.generators([0]))
            policy.decode(x, row)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError) as error:
            raise UserError(f"image.sizes: {name} refuses {height} x {width} ({str(error).splitlines()[0][:200]}): use "
                            "sizes that it takes, or leave image.sizes out") from error
    policy.evaluations = before


class DenoisingRollouts(GroupSampler[Conditioning]):
    """Grid, initial noises, rollouts and replays of a pipeline under a method.

    first: a prompt with which the pipeline's own grid is read. target: what the loss scores.
    """

    policy: PipelinePolicy
    drawer: Any = None  # what samples in the place of the target: an engine

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
            policy.weights.add(NOISE_NETWORK, self.network)
        if method.denoising.preview:
            require_low_precision(method.denoising.preview.precision, policy.device)
        self.target: RecordedSteps = TARGETS[type(method.target)](self)
        self.planned = dict[tuple[int, Size | None], list[RolloutSpec]]()
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
                found |= {step: deviation(spec, step) for step in quiet_steps(spec)}
            try:
                method.explorations(*given, epoch, self.config.seed, self.timesteps)
            except ValueError as error:
                raise UserError(f"epoch {epoch + 1}: {error}") from None
        if found and self.processes.first:
            listed = ", ".join(f"{step} ({found[step]:.2g})" for step in sorted(found))
            print(f"of the steps 0 to {len(self.grid) - 2} these are not trained, their deviation is below {LEAST}: "
                  f"{listed}", flush=True)

    @property
    def exact(self) -> float | None:
        return self.policy.exact if self.drawer is None else None

    def make_grid(self, steps: int, size: Size | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Grid [steps+1] of images of a size (None: the evaluation's), and its timesteps."""
        train, policy, of = self.config.train, self.policy, [] if size is None else [size]
        return make_grid(train.grid, steps, train.shift, policy.stock, policy.strength, lambda steps:
                         policy.stock_grid(replace(self.conditioning([self.first]), sizes=of), steps))

    def grid_of(self, size: Size | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Grid of the rollout's steps for images of a size; the pipeline's own may go by the size."""
        if size not in self._grids:
            self._grids[size] = self.make_grid(self.config.train.steps, size)
        return self._grids[size]

    def conditioning(self, batch: list[Prompt], epoch: int | None = None) -> Conditioning:
        """Encode prompts, each once, as they are sampled. epoch: whose sizes of images they get; None: the
        evaluation's."""
        with self.clock("encode"):
            _, negatives, brought = encodable(batch, self.config.negative_prompt)
            encoded = self.encode([p.shown for p in batch], negatives, brought)
            if self.config.train.pack and encoded.mixed:
                raise UserError("train.pack is true, but the prompts' images differ in size, so that every row is a "
                                "call of its own: set it to false, or bring the images to one size")
            if self.config.train.pack and not self.policy.vector(encoded):
                raise UserError(f"train.pack is true, but {type(self.policy.pipe).__name__} takes one timestep per "
                                f"call at guidance {self.policy.guidance:g}: set it to false")
        # Prompts under other inputs than their own, with what the loss reads in place.
        if any(p.guided and p.guided.scale is not None for p in batch):
            encoded = replace(encoded, scales=[self.policy.guidance if p.guided is None or p.guided.scale is None
                                               else p.guided.scale for p in batch])
        if any(p.learned is not p for p in batch) and not self.method.target.scores_sampling:
            encoded = replace(encoded, learned=self.conditioning([p.learned for p in batch], epoch))
        if epoch is None or not self.config.image.sizes:
            return encoded
        return replace(encoded, sizes=draw_sizes(self.config.image.sizes, [p.unguided.key for p in batch], epoch,
                                                  self.config.seed))

    def prepare(self, batch: list[Prompt]) -> None:
        """Encode prompts into the memory of prompts, as many as it holds."""
        self.encode.prepare(*encodable(batch, self.config.negative_prompt))

    def explorations(self, epoch: int, size: Size | None = None) -> list[RolloutSpec]:
        """Epoch's grids, windows, kernels and solvers for images of a size; the last epoch's are kept."""
        if (epoch, size) not in self.planned:
            train, method = self.config.train, self.method
            if self.network is not None:
                learned = unwrap(method.denoising.learned_noise)
                kernel = Noisy(self.network, learned.low, learned.upper(epoch, train.epochs))
                method = method.having(kernel=kernel)
            grid, timesteps = self.grid_of(size)
            specs = method.explorations(grid, self.target.samples_per_prompt, self.shift, epoch, self.config.seed,
                                        timesteps)
            self.planned = {key: planned for key, planned in self.planned.items() if key[0] == epoch}
            if self.geometry.slices > 1:  # the samples of a slice have the initial noises that they have in its group
                samples = self.geometry.group
                specs = [replace(spec, group=samples, roots=samples if spec.alone else spec.roots,
                                 shared=not spec.alone) for spec in specs]
            self.planned[epoch, size] = specs
        return self.planned[epoch, size]

    def sample(self, conditioning: Conditioning, epoch: int, judge: TotalReward,
               value: reward_gradient.Value | None = None, turn: int = 0
               ) -> Iterator[tuple[Part, list[torch.Tensor | None]]]:
        """Yield the parts, each with the images [b,...] of `decode`, once per granularity; None where no reward looks
        at them. judge: also chooses the initial noises of a method with previews."""
        seed, explorations = self.seeds(epoch, turn, len(conditioning.prompts)), self.explorations(epoch)
        lags = self.method.denoising.lag.most > 0
        if lags:
            self.old_policy.start_epoch(epoch)
        drawing = self.old_policy.drawing if lags else nullcontext
        # A cheap preview chooses initial noises.
        if self.method.denoising.preview:
            with drawing():
                seed = self._preview_seeds(conditioning, seed, judge)
        spent, parts = 0, self._sample(conditioning, epoch, seed, judge)
        while True:
            before = self.policy.evaluations
            with self.clock("rollout"), drawing():
                part = next(parts, None)
            spent += self.policy.evaluations - before
            if part is None:
                break
            # The transitions that are trained; all processes do alike where they are scored now.
            learned = conditioning.learned or conditioning
            with nullcontext() if self.method.target.scores_sampling else self.processes.alike(
                    lambda: (len(part.prompts), learned.scales and self.processes.rank)):
                part = self.target.record(part, learned, epoch, seed)
            # Rewards of samples beside the part's own.
            if self.method.credit.progress is not None:
                part = self._score_predictions(part, conditioning, judge)
            if self.method.credit.advantage.reads_baseline:  # of the deterministic sample from each initial noise
                before = self.policy.evaluations
                with self.clock("rollout"), self.old_policy.drawing():
                    finals, prompts, at = deterministic(self.policy, conditioning, part, self.geometry.micro_batch)
                self.count(self.policy.evaluations - before)
                rewards = self._score_states(finals, prompts, conditioning, judge, 1).flatten()
                part = part.with_measured(baseline=rewards[at])
            with self.clock("decode"):
                images = [self.decode(final, conditioning.rows(part.prompts)) if self.decodes else None
                            for final in part.finals]
            if images[0] is not None:
                part = self.target.score(part, images[0], value)
            yield part, images
        # The rollout's cost, and what shared prefixes saved of it.
        self.count(spent)
        alone, shared = (count(explorations, self.geometry.prompts) for count in (cost.alone, cost.rollout))
        spent *= self.processes.count
        self.saved_evaluations += round(spent * alone / shared) - spent

    def _sample(self, conditioning: Conditioning, epoch: int, seed: Seed, judge: TotalReward) -> Iterator[Part]:
        """Sample a group per prompt, groups of different sizes by themselves."""

        def of_states(states: torch.Tensor, prompts: torch.Tensor, pool: int) -> torch.Tensor:
            return self._score_states(states, prompts + first, conditioning, judge, pool)

        first, drawer = 0, self.drawer or self.target
        if not conditioning.sizes:
            yield from drawer.sample(conditioning, self.explorations(epoch), seed, of_states)
            return
        for size, same in itertools.groupby(conditioning.sizes):  # consecutive prompts of one size
            prompts = torch.arange(first, first + len(list(same)))
            specs = self.explorations(epoch, size)
            for part in drawer.sample(conditioning.rows(prompts), specs,
                                      lambda prompt, sample: seed(first + prompt, sample), of_states):
                yield part.shifted(first * len(specs), first)  # it is counted from the first prompt of this size
            first += len(prompts)

    def _preview_seeds(self, conditioning: Conditioning, seed: Seed, judge: TotalReward) -> Seed:
        """Seeds of the noises whose cheap previews score best and worst."""
        preview, before = unwrap(self.method.denoising.preview), self.policy.evaluations
        with self.clock("preview"):
            grid, rows = self.make_grid(preview.steps), torch.arange(len(conditioning.prompts))
            with with_quantised_weights(self.policy, preview.precision):
                finals = previews(self.policy, conditioning, *grid, preview.pool, self.geometry.micro_batch, seed)
            self.count(self.policy.evaluations - before)
            of = conditioning.rows(rows.repeat_interleave(preview.pool))
            images = self.decode(finals, of) if self.decodes else None
        with self.clock("reward"):
            totals = judge(images, preview.pool, None, finals.float().cpu())
            chosen = contrasting(totals, self.config.train.group)
        return lambda prompt, sample: seed(prompt, int(chosen[prompt, sample]))

    def _score_predictions(self, part: Part, conditioning: Conditioning, judge: TotalReward) -> Part:
        """Part with the rewards of the clean predictions before its trained steps, which are let go."""
        transitions: Any = part.transitions  # of a pipeline
        values, leaves = [], len(part.prompts)
        for taken in transitions:
            together = len(taken.x) // len(part.groups)
            totals = self._score_states(unwrap(taken.clean), taken.prompts, conditioning, judge, together,
                                        unwrap(self.method.credit.progress).rewards)
            values.append(totals.flatten().repeat_interleave(leaves // len(taken.x)))
        let_go = tuple(replace(taken, clean=None) for taken in transitions)
        return replace(part, transitions=let_go).with_measured(predicted=torch.stack(values, 1))

    def _score_states(self, finals: torch.Tensor, prompts: torch.Tensor, conditioning: Conditioning,
                      judge: TotalReward, together: int, names: tuple[str, ...] = ()) -> torch.Tensor:
        """Total rewards [., together] of final states [n,*D] of the prompts [n]. names: of those that count."""
        with self.clock("decode"):
            finals = finals.to(self.policy.device)
            images = self.decode(finals, conditioning.rows(prompts)) if self.decodes else None
        with self.clock("reward"):
            return judge(images, together, prompts, finals.float().cpu(), names)

    def base(self, part: Part, conditioning: Conditioning) -> torch.Tensor | None:
        """Base model's images [b,...] from a part's initial noises, on the CPU; None for a part that came from none."""
        if part.seeds is None:
            return None
        before = self.policy.evaluations
        with self.clock("base"):
            size = conditioning.sizes[int(part.prompts[0])] if conditioning.sizes else None
            if size not in self._base_images:
                self._base_images[size] = BaseImages(self.policy, *self.grid_of(size), self.geometry,
                                                     lambda finals, rows: self.decode(finals, rows).cpu())
            images = self._base_images[size](part, conditioning)
        self.count(self.policy.evaluations - before)
        return images

    def decode(self, finals: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        """Images, decoded in micro-batches: on their GPU if all take at most ON_DEVICE bytes, else on the CPU."""
        rows = torch.arange(len(finals)).split(self.geometry.micro_batch)
        decoded = (self.policy.decode(finals[at], conditioning.rows(at)) for at in rows)
        return torch.cat([images if images.is_cuda and len(finals) * images[0].nbytes <= ON_DEVICE else images.cpu()
                          for images in decoded])

    def gather_groups(self, parts: list[Part], conditioning: Conditioning,
                      reference: Callable[[Part], list[Scored]]) -> None:
        if self.split_groups is not None:
            self.split_groups.gather((part, self.target.statistics(part, conditioning, reference(part)))
                                   for part in parts)

    def step_weights(self, parts: list[Part], epoch: int) -> dict[int, float]:
        grid, explorations = self.target.steps(epoch)
        if not explorations:
            return {0: 1.0}
        local = {step for part in parts for step in part.exploration.schedule.trained}
        trained = self.processes.total([step in local for step in range(len(grid) - 1)])
        steps = [step for step, count in enumerate(trained) if count]
        if not steps:
            return {}
        of = {step: exploration for exploration in explorations for step in exploration.schedule.trained}
        weights = self.method.loss.step_weight(lambda x, v, grid, i: of[i].transition(x, v, grid, i), grid, steps)
        return dict(zip(steps, weights.tolist()))


class RecordedRollouts(DenoisingRollouts):
    """Recorded pairs in place of samples, under a method that trains finals: nothing is drawn, and all else stays.
    The group of a prompt is its pair, encoded once."""

    @functools.cached_property
    def latents(self) -> ImageEncoder:
        return ImageEncoder(self.policy)

    def conditioning(self, batch: list[Prompt], epoch: int | None = None) -> Conditioning:
        pairs = [(prompt.metadata["chosen"], prompt.metadata["rejected"]) for prompt in batch]
        return replace(super().conditioning(batch, epoch), pairs=pairs)

    def sample(self, conditioning: Conditioning, epoch: int, judge: TotalReward,
               value: reward_gradient.Value | None = None, turn: int = 0
               ) -> Iterator[tuple[Part, list[torch.Tensor | None]]]:
        """Yield the pairs of the prompts, with their images [b,3,H,W] as the files have them. judge, value: unused."""
        self.old_policy.start_epoch(epoch)
        seed = self.seeds(epoch, turn, len(conditioning.prompts))
        for groups, prompts, _, _ in self.whole_groups(len(conditioning.prompts)):
            with self.clock("encode"):
                latents, images = zip(*(self.latents(path, conditioning.rows(torch.tensor([p])))
                                          for p in groups for path in conditioning.pairs[p]))
            part = Part(groups, prompts, None, (), (torch.cat(latents).to(self.policy.device),))
            yield self.target.record(part, conditioning, epoch, seed), [torch.stack(images)]


def make_rollouts(config: Config, policy: PipelinePolicy, method: Method, geometry: BatchShape, processes: Processes,
                  clock: PhaseTimer, first: Prompt) -> DenoisingRollouts:
    """Make what samples and replays a pipeline. first: a prompt, with which its own grid is read."""
    recorded = isinstance(method.target, targets.RecordedPairs)
    if recorded and policy.modality != "image":
        raise UserError(f"preferences is set, which brings images, but {type(policy.pipe).__name__} makes videos")
    kind = RecordedRollouts if recorded else DenoisingRollouts
    return kind(config, policy, method, geometry, processes, clock, first)
