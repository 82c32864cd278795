"""Examples of a run's supervised term: recorded ones, and those that the run collects, verified explanations among
them: the policy writes an answer while it reads a right and a wrong one of its own. All processes hold the same.
"""

import random
from collections.abc import Iterator, Sequence
from statistics import mode
from typing import Any, cast

import torch
from torch import Tensor

from flowgrpo.curriculum.epoch_batch import EpochBatch
from flowgrpo.data.pairs import OVERALL, load_demonstrations, load_pairs, without_ties
from flowgrpo.data.prompts import Prompt, answer_of, as_line, of_records
from flowgrpo.errors import UserError
from flowgrpo.methods.supervised import DataLoss, Explained, NextToken, PassRate, PicturePairs, PreferencePairs
from flowgrpo.rollouts.data_losses import Example
from flowgrpo.samplers.rollout import Part, seeder
from flowgrpo.training.credit import slices
from flowgrpo.training.extension import Run
from flowgrpo.types import Completions

TURN = 7_000  # separates the draws of explanations from those of an epoch's samples


class Examples:
    """Examples of a run.

    collected: those of a `PassRate`, the newest last. recorded: by the text of a prompt. marked: what was collected at
    the end of the last whole epoch, which a checkpoint holds.
    """

    def __init__(self, part: DataLoss, run: Run):
        source, text = part.source, isinstance(part, (NextToken, PreferencePairs))
        self.source, self.run, self.text = source, run, text
        self.recorded: dict[str, list[Example]] = {}
        for example in self._read(source.path, isinstance(part, (PreferencePairs, PicturePairs))):
            self.recorded.setdefault(example.prompt.text, []).append(example)
        self.collected: list[Example] = []
        self.marked: list[Example] = []
        if not isinstance(source, PassRate) and not self.recorded:
            cure = ", or give the prompts an answer" if text else ""
            raise UserError("parts.data.source is Recorded, but nothing is recorded for a training prompt: set its "
                            f"path to a .jsonl file of demonstrations{cure}")

    def _read(self, path: str, of_pairs: bool) -> Iterator[Example]:
        """Yield the recorded examples, or pairs that are no ties, without those of held-out prompts.
        path: of a file; empty: the answers in the training prompts' metadata, for a language model.
        Raises UserError for images in a file for a language model, and for answers in one for a pipeline."""
        prompts, text = self.run.prompts, self.text
        known, unseen = {prompt.text: prompt for prompt in prompts}, {prompt.text for prompt in self.run.held_out}
        for pair in without_ties(load_pairs(path, text)) if of_pairs else ():
            if pair.prompt not in unseen:
                margin = pair.margins.get(OVERALL, 1.0)
                yield Example(known.get(pair.prompt, Prompt(pair.prompt)), str(pair.chosen),
                              margin if margin > 0 else 1.0, rejected=str(pair.rejected))
        if not path and text and not of_pairs:
            yield from (Example(prompt, answer) for prompt in prompts if (answer := answer_of(prompt)) is not None)
        for record in load_demonstrations(path) if path and not of_pairs else ():
            content = record.text if text else record.image
            if content is None:
                got, expected = ("an image", "a text") if text else ("a text", "an image")
                raise UserError(f"demonstrations {path}: the prompt {record.prompt[:60]!r} has {got}, expected "
                                f"{expected} for this model")
            if record.prompt not in unseen:
                yield Example(known.get(record.prompt, Prompt(record.prompt)), str(content), record.reward,
                              record.source)

    @property
    def pool(self) -> list[Example]:
        if isinstance(self.source, PassRate):
            return self.collected
        return [example for examples in self.recorded.values() for example in examples]

    def sample(self, count: int, update: int) -> list[Example]:
        """`count` different examples, or all if there are fewer, by the run's seed and the step."""
        pool = self.pool
        return random.Random(f"data/{self.run.config.seed}/{update}").sample(pool, min(count, len(pool)))

    def pop(self, count: int, update: int) -> list[Example]:
        """Remove `count` collected examples and return them, by the run's seed and the step, so that a batch mixes
        prompts; none if there are fewer."""
        if len(self.collected) < count:
            return []
        batch = self.sample(count, update)
        gone = {id(example) for example in batch}
        self.collected = [example for example in self.collected if id(example) not in gone]
        return batch

    # --- collection --------------------------------------------------------------------------------------------------

    def collect(self, epoch_batch: EpochBatch, totals: Tensor, parts: Sequence[Part]) -> None:
        """Classify an epoch's prompts by their pass rates, and add what they give.
        totals: [groups,G] of all processes, in the order of their groups, NaN where no reward applies. parts: of this
        process, with all of its groups."""
        if not isinstance(self.source, PassRate):
            return
        processes, geometry = self.run.processes, self.run.geometry
        prompts = {prompt.key: prompt for prompt in epoch_batch.prompts}
        index = {key: place for place, key in enumerate(prompts)}
        # Count the right and the scored samples of every prompt, over all processes.
        first = epoch_batch.turn == 1
        own = processes.own(geometry.repeat_per_slice(epoch_batch.prompts)) if first else epoch_batch.own()
        local = processes.own(slices(totals, geometry.slices))
        of_group = [index[own[int(place)].key] for part in parts for place in part.prompts[::geometry.group]]
        right = local >= self.source.right
        counts = torch.stack([torch.tensor(of_group), right.sum(1), (~local.isnan()).sum(1)], 1)
        passed = torch.zeros(len(index), 2, dtype=torch.int64)
        gathered = processes.gather(counts)
        passed.index_add_(0, gathered[:, 0], gathered[:, 1:])
        # Collect the samples that the source can take for examples: the right ones, or explanations made of both.
        winners = self._winners(of_group, right, parts)
        if isinstance(self.source, Explained):
            losers = self._winners(of_group, ~right & ~local.isnan(), parts)
            winners = {place: self._explain(self.source, prompt, place, winners.get(place, []), losers.get(place, []))
                       for place, prompt in enumerate(prompts.values())}
        # The newest epoch decides: what an earlier one collected of the same prompt goes.
        for (key, prompt), (good, count) in zip(prompts.items(), passed.tolist()):
            takes = self.source.takes(good, count)
            if count:
                self.collected = [example for example in self.collected if example.prompt.key != key]
            if takes == "recorded":
                self.collected += self.recorded.get(prompt.text, [])
            elif takes == "own":
                self.collected += [Example(prompt.unguided, content) for content in winners.get(index[key], [])]
        self.collected = self.collected[-self.source.kept:]

    def _winners(self, of_group: list[int], right: Tensor, parts: Sequence[Part]) -> dict[int, list[Tensor]]:
        """The right samples of all processes by the indices of their prompts; right: bool [n,G], of this process's
        groups."""
        contents, indices = [], []
        for part in parts:
            good = right[part.groups.start:part.groups.stop].flatten().cpu()
            # Final states [b,*D], or tokens [b,L] with -1 where none counts.
            [*_, last] = part.transitions or (None,)
            tokens = last.ids.masked_fill(~last.old.mask, -1) if isinstance(last, Completions) else None
            contents.append((part.finals[0].detach() if tokens is None else tokens).cpu()[good])
            indices.append(torch.tensor(of_group)[part.groups.start:part.groups.stop].repeat_interleave(
                right.shape[1])[good])
        gathered, at = (self.run.processes.gather(torch.cat(values)) for values in (contents, indices))
        winners: dict[int, list[Tensor]] = {}
        for content, place in zip(gathered, at.tolist()):
            content = content[content >= 0] if self.text else content.clone()
            if content.numel():
                winners.setdefault(place, []).append(content)
        return winners

    def _explain(self, source: Explained, prompt: Prompt, place: int, right: Sequence[Tensor], wrong: Sequence[Tensor]
                 ) -> list[Tensor]:
        """The first explanation of a prompt whose total reward reaches `source.right`, as tokens [n], in a list; none
        if none does, if a side has no sample, or if the richer prompt does not fit the model's context.
        place: of the prompt in its epoch. right, wrong: tokens of its samples."""
        run, policy, tries = self.run, cast(Any, self.run.policy), source.tries
        texts = [str(policy.tokenizer.decode(ids, skip_special_tokens=True)) for ids in (*right[:1], *wrong)]
        if not right or not wrong:
            return []
        shown = source.template.format(prompt=prompt.text, right=texts[0], wrong=mode(texts[1:]))
        try:
            policy.require_context([shown])
        except UserError:
            return []
        seed = seeder(run.config.seed, run.epoch, TURN + place * tries)
        sampled = policy.sample(policy.encode([shown] * tries, images=[prompt.brings] * tries),
                                run.method.generation.decoding,
                                policy.generators(seed(0, number) for number in range(tries)),
                                torch.zeros(tries, dtype=torch.bool))
        totals = run.scoring.total([prompt], sampled.texts, tries)[0]
        fits = [number for number, total in enumerate(totals.tolist())
                if total >= source.right and sampled.mask[number].any()]
        return [sampled.ids[number][sampled.mask[number]].cpu() for number in fits[:1]]

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {str(i): example.content for i, example in enumerate(self.marked)
                   if isinstance(example.content, Tensor)}
        lines = [{"prompt": as_line(example.prompt), "reward": example.reward, "source": example.source}
                 | ({} if str(i) in tensors else {"content": example.content})
                 for i, example in enumerate(self.marked)]
        return tensors, {"collected": lines}

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Restore the collected examples of a checkpoint; if there are none, start anew."""
        lines = values.get("collected", [])
        prompts = of_records([line["prompt"] for line in lines])
        self.collected = [Example(prompt, line["content"] if "content" in line else tensors[str(i)], line["reward"],
                                  line["source"]) for i, (prompt, line) in enumerate(zip(prompts, lines))]
        self.mark()

    def mark(self) -> None:
        """Take what is collected for a checkpoint, at the end of an epoch."""
        self.marked = list(self.collected)
