"""Thread that scores the parts of a rollout, one after the other, while the next ones are sampled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from flowgrpo.device import current_gpu, use_gpu
from flowgrpo.distributed import signals
from flowgrpo.distributed.signals import Stop


class Scorer:
    """Context manager around a rollout. A reward that hangs holds neither a stop nor the end of the process.

    waits: calls begin with `results`, when nothing is sampled any more.

    At a stop the scores are dropped. At any other error the call that runs is waited for, and the rest is dropped.
    Without the context, `start` and `end` wait for nothing. after: a scorer whose calls come first.
    """

    def __init__(self, stop: Stop, waits: bool = False, after: Scorer | None = None):
        self.stop, self._closed, self._begun = stop, False, threading.Event()
        if not waits:
            self._begun.set()
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._idle = Future[None]()  # done at the thread's end
        self._after = None if after is None else after._idle

    def start(self) -> Scorer:
        """Start the thread."""
        threading.Thread(target=self._work, args=(current_gpu(),), daemon=True, name="rewards").start()
        return self

    def end(self, drop: bool = False) -> None:
        """End the thread behind the calls that were submitted; drop: behind the one that runs."""
        self._closed = drop
        self._begun.set()
        self._calls.put(None)

    def __enter__(self) -> Scorer:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(drop=kind is not None)
        if kind is None or issubclass(kind, Exception):
            signals.result(self._idle, self.stop.check)

    def submit(self, function: Callable[..., torch.Tensor], *arguments: Any) -> Future[torch.Tensor]:
        """Return the future of `function(*arguments)`."""
        future = Future[torch.Tensor]()
        self._calls.put((future, partial(function, *arguments)))
        return future

    def results(self, futures: list[Future[torch.Tensor]]) -> list[torch.Tensor]:
        """Return the results in order. Raises Stopped when a stop was requested."""
        self._begun.set()
        return [signals.result(future, self.stop.check) for future in futures]

    def _work(self, gpu: int | None) -> None:
        use_gpu(gpu)
        self._begun.wait()
        if self._after is not None:
            wait([self._after])
        while (call := self._calls.get()) is not None:
            if not self._closed:
                signals.complete(*call)
            del call  # and with it the tensors that it holds
        self._idle.set_result(None)
