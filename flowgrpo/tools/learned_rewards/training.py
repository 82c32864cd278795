"""Reward training on preference pairs of images or texts (Bradley and Terry 1952), as in VisionPrefer (2404.15100) and
Gen-Drive (2410.05582): `flowgrpo reward train`.

P(a preferred to b) = sigmoid(r_a - r_b) for each of A aspects. N pairs have margins r_chosen - r_rejected [N, A] and
verdicts [N, A]: 1 for chosen, 0 for rejected, 1/2 for a tie, NaN if a pair has no verdict on an aspect.
"""

import copy
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn
from torch.nn.functional import softplus
from tqdm import tqdm

from flowgrpo.contrib.learned_rewards.preference import FILE, Aspect, Description, Network, save
from flowgrpo.contrib.learned_rewards.preference_networks import ClipHead, Film, with_text
from flowgrpo.contrib.learned_rewards.text_network import TextHead, on_model
from flowgrpo.data.pairs import Pair, aspects
from flowgrpo.device import default_device
from flowgrpo.errors import UserError
from flowgrpo.evaluation.statistics import Interval, interval
from flowgrpo.log import bar
from flowgrpo.rewards.clip import ClipScore
from flowgrpo.rewards.preprocessing import read_tensor
from flowgrpo.storage import paths
from flowgrpo.storage.json_files import finite
from flowgrpo.types import unwrap

AT_ONCE = 64  # samples read, or scored without gradients, at once
B = TypeVar("B")  # a batch
Rows = dict[str, Tensor]  # of N pairs: [2, N, ...], the chosen first


@dataclass(frozen=True)
class Settings:
    """Settings of a reward's training.

    text: the source of the small network's text encoder: starter, or a pipeline's folder or hub id.
    size: the side of its images, pixels.
    clip: a model of open_clip in place of both, frozen, with the tag or file `pretrained`.
    model: a language model in place of all these, for pairs of texts; frozen: its head alone is trained.
    margins: weight of the pairs' margins: the chosen one is to be that much better (Llama 2, 2307.09288).
    patience: epochs without a better held-out accuracy after which training stops.
    batch: pairs per step.
    lr: peak learning rate, reached in a twentieth of the steps; it then falls to 0.
    bf16: the forward passes in training.
    device: None for a GPU if there is one.

    Raises UserError for one of clip and pretrained alone, for clip beside model, and for frozen without model.
    """

    text: str = "starter"
    size: int = 128
    clip: str | None = None
    pretrained: str | None = None
    model: str | None = None
    frozen: bool = False
    margins: float = 0.0
    epochs: int = 20
    patience: int = 4
    batch: int = 64
    lr: float = 1e-3
    seed: int = 0
    bf16: bool = False
    device: str | None = None

    def __post_init__(self) -> None:
        if (self.clip is None) != (self.pretrained is None):
            raise UserError("expected clip and pretrained together: the name of a model of open_clip, and its tag or "
                            "file of weights")
        if self.model is not None and self.clip is not None or self.frozen and self.model is None:
            raise UserError("expected a language model (model) without clip for pairs of completions, and frozen "
                            f"only with it: got model {self.model!r}, clip {self.clip!r}, frozen {self.frozen}")

    @property
    def network(self) -> dict[str, Any]:
        """Description of the network, as stored in `reward.json`."""
        if self.model is not None:
            return {"kind": "language", "model": self.model, "frozen": self.frozen}
        if self.clip is None:
            return {"kind": "film", "size": self.size}
        return {"kind": "clip", "model": self.clip, "pretrained": self.pretrained}


def bradley_terry(margins: Tensor, verdicts: Tensor) -> Tensor:
    """-y log sigmoid(d) - (1 - y) log sigmoid(-d), a scalar, the mean over the verdicts that are not NaN; of ties, y is
    1/2. Its gradient is (sigmoid(d) - y) / their number. margins, verdicts: [N, A]."""
    there = ~verdicts.isnan()
    d, y = margins[there], verdicts[there].to(margins)
    return (y * softplus(-d) + (1 - y) * softplus(d)).mean()


def right(margins: Tensor, verdicts: Tensor) -> Tensor:
    """1 where the preferred sample scores higher, 1/2 for equal scores, else 0, NaN for ties: [N, A] -> [N, A]."""
    sided = margins.sign() * (2 * verdicts - 1).sign()
    return torch.where(verdicts.isnan() | (verdicts == 0.5), torch.nan, (sided + 1) / 2)


def accuracy(margins: Tensor, verdicts: Tensor, prompts: Sequence[str]) -> Interval:
    """Share of pairs [N] ordered right, the mean of the prompts' means, with its 95 % interval over prompts."""
    return share(right(margins, verdicts).tolist(), prompts)


def share(marks: Sequence[float], prompts: Sequence[str]) -> Interval:
    """Mean of the prompts' means of marks [N], NaN left out, with its 95 % interval over prompts."""
    of = defaultdict(list)
    for prompt, value in zip(prompts, marks):
        of[prompt].append(value)
    longest = max(map(len, of.values()))
    return interval(np.array([values + [math.nan] * (longest - len(values)) for values in of.values()]))


def families(pairs: Sequence[Pair]) -> list[list[int]]:
    """The pairs' indices, grouped by shared samples, directly or through others."""
    # A short text may answer many prompts.
    sides = [[(pair.prompt, side) if isinstance(side, str) else side for side in (pair.chosen, pair.rejected)]
             for pair in pairs]
    places = {sample: place for place, sample in enumerate({sample for samples in sides for sample in samples})}
    chosen, rejected = zip(*([places[sample] for sample in samples] for samples in sides))
    joined = coo_array((np.ones(len(pairs)), (chosen, rejected)), shape=(len(places), len(places)))
    _, labels = connected_components(joined, directed=False)
    members = defaultdict(list)
    for number, place in enumerate(chosen):
        members[labels[place]].append(number)
    return list(members.values())


def batches(grouped: list[list[int]], size: int, rng: np.random.Generator) -> Iterator[list[int]]:
    """All pairs' indices in random order, `size` at a time or slightly more. Pairs that share a sample are in one
    batch: over several batches, such a sample is memorised."""
    batch: list[int] = []
    for at in rng.permutation(len(grouped)):
        batch += grouped[at]
        if len(batch) >= size:
            yield batch
            batch = []
    if batch:
        yield batch


def train(trained: Sequence[Pair], held: Sequence[Pair], output: Path, settings: Settings) -> dict[str, Interval]:
    """Train a reward on pairs, write its folder, and return its accuracy on the held-out pairs by aspect.

    The kept weights are those of the epoch with the best accuracy on these same pairs, ties broken by the loss.
    Raises UserError for an image, text encoder or model that cannot be read, as `aspects`, for a training that
    diverges, and if `output` already holds a reward.
    """
    if (output / FILE).exists():
        raise UserError(f"{output} holds a reward already: name another folder, or remove that one")
    paths.require_folder(output)
    names = aspects(trained, held)
    try:
        device = str(torch.empty(0, device=settings.device or default_device()).device)
    except (RuntimeError, AssertionError):
        raise UserError(f"device is {settings.device!r}, which torch {torch.__version__} cannot use here: leave it "
                        "out, or take cpu") from None
    apart = _apart(trained, names, settings.margins)
    torch.manual_seed(settings.seed)
    if settings.model is not None:
        network: Network = on_model(settings.model, len(names), settings.frozen)
    elif settings.clip is None:
        network = with_text(settings.text, len(names), settings.size)
    else:
        network = ClipHead(ClipScore(settings.clip, unwrap(settings.pretrained), device=device), len(names))
    network = network.to(device)
    if isinstance(network, Film):  # whose small text encoder truncates
        prompts = sorted({pair.prompt for pair in (*trained, *held)})
        if longer := sum(len(ids) > network.longest for ids in network.tokenizer(prompts).input_ids):
            tqdm.write(f"{longer} of {len(prompts)} prompts have more than the {network.longest} tokens that the text "
                       "encoder reads: what follows is not seen", file=sys.stderr)
    sides = [(_rows(network, side, title), torch.tensor([[pair.verdicts.get(name, math.nan) for name in names]
                                                         for pair in side]))  # NaN where a pair has no verdict
             for side, title in ((trained, "reading pairs"), (held, "reading held-out pairs"))]
    grouped, rng = families(trained), np.random.default_rng(settings.seed)
    epochs = [list(batches(grouped, settings.batch, rng)) for _ in range(settings.epochs)]

    def measured() -> tuple[float, float]:
        scores = _scores(network, sides[1][0], settings, device)
        margins = scores[0] - scores[1]
        return right(margins, sides[1][1]).nanmean().item(), -bradley_terry(margins, sides[1][1]).item()

    def loss(numbers: list[int]) -> Tensor:
        rows = {key: value[:, numbers].flatten(0, 1).to(device) for key, value in sides[0][0].items()}
        with torch.autocast(device.partition(":")[0], torch.bfloat16, enabled=settings.bf16):
            chosen, rejected = network(**rows).float().chunk(2)
        return bradley_terry(chosen - rejected - apart[numbers].to(device), sides[0][1][numbers].to(device))

    best = fit(network, epochs, loss, measured, settings)
    scores = _scores(network, sides[1][0], settings, device)
    accuracies = {name: accuracy((scores[0] - scores[1])[:, i], sides[1][1][:, i], [pair.prompt for pair in held])
                  for i, name in enumerate(names)}
    flat = scores.flatten(0, 1).double()
    scales = {name: Aspect(1.0, middle, spread or 1.0)
              for name, middle, spread in zip(names, flat.mean(0).tolist(), flat.std(0).tolist())}
    save(output, network, Description(scales, settings.network, {
        "accuracy": finite({name: result.as_json() for name, result in accuracies.items()}), "epoch": best,
        "pairs": {"train": len(trained), "held_out": len(held)}, "settings": asdict(settings)}))
    return accuracies


def _apart(pairs: Sequence[Pair], names: Sequence[str], weight: float) -> Tensor:
    """By how much chosen is to be better than rejected, weight * margin, 0 where a pair has none: [N, A]. Raises
    UserError for a weight where no pair has a margin."""
    if weight and not any(pair.margins for pair in pairs):
        raise UserError("--margins: no training pair has a margin: expected pairs of `flowgrpo reward label`, or leave "
                        "it out")
    return weight * torch.tensor([[pair.margins.get(name, 0.0) for name in names] for pair in pairs])


def _rows(network: Network, pairs: Sequence[Pair], title: str) -> Rows:
    """The network's inputs of the pairs' samples and prompts, on the CPU."""
    shown = [(pair.prompt, getattr(pair, side)) for side in ("chosen", "rejected") for pair in pairs]
    parts = []
    for at in bar(range(0, len(shown), AT_ONCE), title=title, unit="batch"):
        prompts, samples = zip(*shown[at:at + AT_ONCE])
        prepared: Any = samples if isinstance(network, TextHead) else \
            torch.cat([network.prepare(read_tensor(file)[None]) for file in samples])
        parts.append({key: value.cpu() for key, value in network.rows(prepared, prompts).items()})
    return {key: torch.cat([part[key] for part in parts]).unflatten(0, (2, len(pairs))) for key in parts[0]}


def fit(network: nn.Module, epochs: Sequence[Sequence[B]], loss_of: Callable[[B], Tensor],
        measured: Callable[[], tuple[float, float]], settings: Settings) -> int:
    """Train on the batches of each epoch, and load the best epoch's weights at the end; return that epoch, counted from
    1.

    loss_of: the loss of a batch.
    measured: (accuracy, minus the loss) on held-out data.

    Raises UserError if it diverges.
    """
    optimizer = torch.optim.AdamW(network.parameters(), lr=settings.lr, weight_decay=0.05)
    total, step = sum(map(len, epochs)), 0
    best: tuple[float, float, int, dict[str, Tensor]] = (-1.0, 0.0, 0, {})
    shown = tqdm(total=total, desc="training", unit="step", mininterval=1, disable=None)
    for epoch, parts in enumerate(epochs, 1):
        network.train()
        for numbers in parts:
            # A warm-up over a twentieth of the steps, and then down to 0.
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * min((step + 1) / max(total // 20, 1), 1 - step / total)
            loss = loss_of(numbers)
            if not loss.isfinite():
                raise UserError(f"training diverged in epoch {epoch}: lower the learning rate, {settings.lr:g}")
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            step += 1
            shown.update()
        score, negative = measured()
        shown.set_postfix(epoch=epoch, held_out=f"{score:.3f}", held_out_loss=f"{-negative:.3f}")
        if shown.disable:
            print(f"epoch {epoch} of {len(epochs)}: held_out={score:.3f}, held_out_loss={-negative:.3f}", flush=True)
        # Accuracy ties are common on few pairs: the loss decides among them.
        if (score, negative) > best[:2]:
            best = (score, negative, epoch, copy.deepcopy(network.state_dict()))
        elif epoch - best[2] >= settings.patience:
            break
    shown.close()
    network.load_state_dict(best[3])
    return best[2]


@torch.no_grad()
def _scores(network: nn.Module, rows: Rows, settings: Settings, device: str) -> Tensor:
    """[2, N, A] on the CPU."""
    network.eval()
    flat = {key: value.flatten(0, 1) for key, value in rows.items()}
    count = len(next(iter(flat.values())))
    scores = [network(**{key: value[at:at + AT_ONCE].to(device) for key, value in flat.items()}).float().cpu()
              for at in range(0, count, AT_ONCE)]
    return torch.cat(scores).unflatten(0, (2, -1))
