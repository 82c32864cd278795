"""Repeated calls of a policy, which are counted and not run: a denoiser's forward, a replay with its backward, a
decoding. A call repeats another if its tensors have the same shapes and dtypes, and its other arguments are equal."""

import functools
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from flowgrpo.policies.pipelines.rlg import inside
from flowgrpo.tools.dry_run.meta_gpu import MetaGPU, Phase, Shape


class Repeats:
    """Calls of a policy on a pretended GPU.

    steps: of its rollouts. replays: with a backward. step_waits: reasons for the host to wait in the steps.
    forwards: of the replays, whose graphs keep `kept` bytes together, and one of them `graph` bytes at most.
    """

    def __init__(self, gpu: MetaGPU, policy: Any):
        self.gpu, self.policy = gpu, policy
        self.steps = self.replays = 0
        self.step_waits: Counter[str] = Counter()
        self.forwards, self.kept, self.graph = Phase(), 0, 0
        self._graphs: dict[Any, int] = {}  # bytes of the graph of a replay
        self._calls: dict[Any, tuple[Phase, Any]] = {}
        self._backwards: dict[Any, tuple[Phase, list[torch.nn.Parameter]]] = {}
        self._replayed: tuple[Any, int] = None, 0  # key of the last replay, and bytes in use before it
        self._layers = list(policy.weights.layers().values())
        for module in policy.denoisers.values():
            for part in module.modules() if policy.driver.casts else ():  # a backward may call it again
                part.forward = inside(lambda: policy.driver.arithmetic() if gpu.autocast is None else nullcontext(),
                                      part.forward)
            module.forward = self._forward(module, module.forward)
        self._run, self._decode, self._replay, self._backward = \
            policy.run, policy.decode, policy.replay, policy.backward
        policy.run, policy.decode, policy.replay, policy.backward = self.run, self.decode, self.replay, self.backward

    def _once(self, key: Any, call: Callable[[], Any]) -> Any:
        """The call's outputs; of a repeated one they are new tensors of the same shapes."""
        if key in self._calls:
            work, shapes = self._calls[key]
            self.gpu.repeat(work)
            return tree_map_only(Shape, Shape.empty, shapes)
        with self.gpu.measure() as work:
            outputs = call()
        self._calls[key] = work, tree_map_only(torch.Tensor, Shape.of_tensor, outputs)
        return outputs

    def _forward(self, module: torch.nn.Module, forward: Callable) -> Callable:
        @functools.wraps(forward)  # pipelines look at its arguments
        def answer(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                return forward(*args, **kwargs)
            if self.gpu.autocast is not None:  # it casts a denoiser's weights in the first of the calls it surrounds
                for part in module.modules():
                    if isinstance(part, (torch.nn.Linear, torch.nn.modules.conv._ConvNd)):
                        for parameter in part.parameters():
                            self.gpu.autocast.lower(parameter)
            adapted = not any(layer.disable_adapters for layer in self._layers)
            return self._once((id(module), adapted, _key(args, kwargs)), lambda: forward(*args, **kwargs))
        return answer

    def decode(self, latents: torch.Tensor, conditioning: Any) -> Any:
        return self._once(("decode", _key(latents)), lambda: self._decode(latents, conditioning))

    def run(self, task: Any, *args: Any, **kwargs: Any) -> Any:
        with self.gpu.measure(waits=self.step_waits):
            result = self._run(task, *args, **kwargs)
        self.steps += len(task.steps)
        return result

    def replay(self, conditioning: Any, x: torch.Tensor, grid: torch.Tensor, step: Any, timesteps: Any = None) -> Any:
        if not torch.is_grad_enabled():
            return self._replay(conditioning, x, grid, step, timesteps)
        self.replays += 1
        if not self.policy.weights.adapter.rank:  # the first replay of an update is to stand for the others
            self._hold_gradients(self.policy.weights.parameters())
        boundary = self.policy.pipe.config.get("boundary_ratio")  # between two denoisers, which share the grid
        first = boundary is not None and bool((grid[step] >= boundary).all())
        key = "replay", _key(conditioning.calls, x), first
        before = self.gpu.memory.in_use
        self._replayed = key, before
        with self.gpu.measure() as work:
            output = self._once(key, lambda: self._replay(conditioning, x, grid, step, timesteps))
        self.forwards.add(work)
        graph = self._graphs.setdefault(key, self.gpu.memory.in_use - before)  # a first call alone keeps it
        self.kept, self.graph = self.kept + graph, max(self.graph, graph)
        return output

    def backward(self, loss: torch.Tensor) -> None:
        key, before = self._replayed
        if key not in self._backwards:
            with self.gpu.measure(before) as work:
                self._backward(loss)
            reached = [part for part in self.policy.weights.parameters() if part.grad is not None]
            self._backwards[key] = work, reached
            return
        work, reached = self._backwards[key]
        self.gpu.repeat(work)
        gradients = [part.grad for part in reached if part.grad is not None]
        self._once(("sum", len(gradients)), lambda: [gradient.add_(gradient) for gradient in gradients] and None)
        self._hold_gradients(reached)

    def _hold_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        with self.gpu.sharding():
            for part in parameters:
                part.grad = torch.empty_like(part) if part.grad is None else part.grad


def _key(*values: Any) -> tuple[Any, ...]:
    return tuple(Shape.of_tensor(leaf) if torch.is_tensor(leaf) else
                 leaf if isinstance(leaf, (int, float, str)) else type(leaf) for leaf in tree_leaves(values))
