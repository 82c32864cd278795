"""Pipeline's `encode_prompt` as its own call uses it: number of calls, arguments and results."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from flowgrpo.errors import UserError
from flowgrpo.policies.generators import generators
from flowgrpo.policies.pipelines.call import PipelineCall
from flowgrpo.policies.pipelines.conditioning import Conditioning, gathered
from flowgrpo.policies.weights.memory_options import Encoders
from flowgrpo.samplers.scheduler import Segment

Kinds = frozenset[tuple[str, bool]]


class EncodePrompt:
    """Encodes prompts by calls of the pipeline with no steps to do, and keeps what its `encode_prompt` returns there.

    encoders: which have to be here; live: they are trained (TexForce, 2311.15657), and gradients go through.
    """

    def __init__(self, driver: PipelineCall, encoders: Encoders, live: bool):
        self.driver, self.encoders, pipe = driver, encoders, driver.pipe
        # Some are written to run without gradients.
        self._encode = inspect.unwrap(type(pipe).encode_prompt).__get__(pipe) if live else pipe.encode_prompt
        self.apart: bool | None = None  # whether the pipeline takes one prompt per call; known after `learn`
        self._shared: tuple[tuple[bool, ...], ...] = ()
        self._learned: dict[Kinds, tuple[bool, tuple[tuple[bool, ...], ...]]] = {}  # by kinds of pictures
        self._bare = False

    def knows(self, plain: Conditioning) -> bool:
        """Return True once it has learned from prompts with such pictures, or from prompts without any."""
        return _kinds(plain) in self._learned

    def learn(self, twice: Conditioning, guidance: float, stay_apart: Callable[[], bool]) -> None:
        """Find out which values serve all prompts, and whether a call may bring several prompts with their pictures.

        twice: one prompt, two times, not yet encoded. stay_apart: whether each sees its own picture."""
        self.apart = None
        try:
            # Lengths alone would not tell: 77 tokens may meet 77 prompts. What grows with the prompts is theirs.
            one, two = self._calls(twice.rows(torch.tensor([0])), guidance), self._calls(twice, guidance)
            self._shared = tuple(tuple(map(_shared, *values)) for values in zip(one, two, strict=True))
            self.apart = bool(twice.inputs) and not stay_apart()
        except torch.OutOfMemoryError:
            raise
        # What a pipeline for one prompt may raise; if it is something else, the next call raises it again.
        except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            self.apart = True
        self._learned[_kinds(twice)] = self.apart, self._shared

    def __call__(self, plain: Conditioning, guidance: float) -> Conditioning:
        """Return the prompts' conditioning, with the values of `encode_prompt`."""
        self.apart, self._shared = self._learned.get(_kinds(plain), (self.apart, self._shared))
        if not self.apart and not (plain.inputs and (plain.mixed or plain.differ)):
            calls = self._calls(plain, guidance)
            per_prompt = tuple(tuple(value is not None and not shared for value, shared in zip(values, shares))
                               for values, shares in zip(calls, self._shared, strict=True))
            return replace(plain, calls=calls, per_prompt=per_prompt, bare=self._bare)
        plain = replace(plain, apart=True, listed=not self.apart)
        rows = [self._calls(plain.rows(torch.tensor([i])), guidance) for i in range(len(plain.prompts))]
        calls = tuple(tuple(map(list, zip(*values))) for values in zip(*rows, strict=True))
        return replace(plain, calls=calls, per_prompt=tuple((True,) * len(values) for values in calls), bare=self._bare)

    def anew(self, conditioning: Conditioning, guidance: float) -> Conditioning:
        """Return the same rows as the present text encoders encode them, with gradients where they are enabled.

        Every prompt is encoded once, however many rows it has, and by itself: rollout and replay so compute the same
        numbers, whatever their batches. UserError where no gradient gets through.
        """
        rows = list(zip(conditioning.prompts, conditioning.negatives,
                        zip(*([id(picture) for picture in values] for values in conditioning.inputs.values()))
                        if conditioning.inputs else [()] * len(conditioning.prompts), strict=True))
        first = {row: rows.index(row) for row in rows}
        plain = replace(conditioning, calls=(), per_prompt=(), parts=(), sizes=[])
        plain = plain.rows(torch.tensor(list(first.values())))
        parts = [self(plain.rows(torch.tensor([at])), guidance) for at in range(len(first))]
        if torch.is_grad_enabled() and not any(_in_graph(call) for one in parts for call in one.calls):
            raise UserError(f"encode_prompt of {type(self.driver.pipe).__name__} gives no gradient of its text "
                            "encoders: train the denoiser alone, parts: {adapted: {encoders: false, denoisers: true}}")
        places = {row: place for place, row in enumerate(first)}
        encoded = gathered(parts, conditioning.masks, pad=False)
        return replace(encoded.rows(torch.tensor([places[row] for row in rows])), sizes=conditioning.sizes,
                       scales=conditioning.scales)

    def _calls(self, plain: Conditioning, guidance: float) -> tuple[tuple[Any, ...], ...]:
        """Return the values of each call of `encode_prompt` during a pipeline call without steps."""
        calls: list[tuple[Any, ...]] = []

        def remember(*args: Any, **kwargs: Any) -> Any:
            if not self.encoders.here:
                self.encoders.come()
            values = self._encode(*args, **kwargs)
            self._bare = not isinstance(values, tuple)
            calls.append((values,) if self._bare else values)
            return values

        # Under guidance in either phase the negative embeddings have to be there.
        self.driver.once(plain, Segment(torch.ones(1), range(0)), remember, max(guidance, 2.0),
                         generator=generators(range(len(plain.prompts))))
        if not calls:
            raise UserError(f"{type(self.driver.pipe).__name__} does not call its encode_prompt: its conditioning "
                            "cannot be cached")
        return tuple(calls)


def _kinds(plain: Conditioning) -> Kinds:
    """Return the names of what prompts bring, and which of it are several pictures per prompt."""
    return frozenset((name, isinstance(values[0], (list, tuple))) for name, values in plain.inputs.items())


def _shared(one: Any, two: Any) -> bool:
    """Return True if a value of `encode_prompt` is the same for one prompt and for two, and so serves all prompts.

    Raises ValueError if it grows with them without a row for each: bounds of sequences, rows in another dimension.
    """
    if not torch.is_tensor(one) and not isinstance(one, list):
        return False
    shapes = [value.shape if torch.is_tensor(value) else (len(value),) for value in (one, two)]
    if shapes[0] != shapes[1] and (len(one), len(two), *shapes[0][1:]) != (1, 2, *shapes[1][1:]):
        raise ValueError(f"encode_prompt gives {list(shapes[0])} for one prompt and {list(shapes[1])} for two")
    return shapes[0] == shapes[1]


def _in_graph(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_in_graph, value))
    return torch.is_tensor(value) and value.requires_grad
