"""Autocast on a pretended GPU, for which torch has none: the operations are those of CUDA's autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

# Names of the operations in the lower precision and in fp32, as torch's documentation of autocast lists them.
LOWER = frozenset("""__matmul__ __rmatmul__ addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d conv_transpose3d einsum linear matmul mm multi_dot mv prelu""".split())
FULL = frozenset("""__pow__ __rdiv__ __rpow__ __rtruediv__ acos asin cdist cosh cosine_similarity cross_entropy cumprod
    cumsum dist erfinv exp expm1 group_norm kl_div l1_loss layer_norm log log10 log1p log2 log_softmax mse_loss norm
    normalize pow prod reciprocal renorm rsqrt sinh smooth_l1_loss softmax softmin softplus sum tan""".split())


class Autocast(TorchFunctionMode):
    """Casts of the tensors that operations take.

    As CUDA's, it casts each trained weight once and keeps it until the context ends.
    """

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype
        self.casts: dict[int, torch.Tensor] = {}  # by the weight's id

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if name in LOWER:
            args, kwargs = tree_map_only(torch.Tensor, self.lower, (args, kwargs))
        elif name in FULL:
            args, kwargs = tree_map_only(torch.Tensor, _full, (args, kwargs))
        return function(*args, **kwargs)

    def lower(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the lower precision."""
        if not tensor.is_floating_point() or tensor.dtype in (self.dtype, torch.float64):
            return tensor
        if not (tensor.requires_grad and tensor.is_leaf):
            return tensor.to(self.dtype)
        if id(tensor) not in self.casts:
            self.casts[id(tensor)] = tensor.to(self.dtype)
        return self.casts[id(tensor)]


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


@contextlib.contextmanager
def autocast(gpu: Any, dtype: torch.dtype = torch.bfloat16, enabled: bool = True) -> Iterator[None]:
    """Context manager: autocast of a pretended GPU, which knows it as its `autocast`."""
    before, gpu.autocast = gpu.autocast, Autocast(dtype) if enabled else None
    try:
        with gpu.autocast or torch._C.DisableTorchFunction():
            yield
    finally:
        gpu.autocast = before
