"""Operations on a pretended GPU that torch's meta device lacks.

- Single kernels that it takes apart: attention and RMS normalisation.
- Autocast, with the operations of CUDA's.
- Values of small tensors: those that came from the host, and what is computed of them alone. So grids, time steps,
  masks and lengths have their values, and code that branches on them takes its true way.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

# torch's normalisation of CUDA gives its output and the rows' rstd; on meta it is seven operations.
_library = torch.library.Library("flowgrpo", "DEF")
_library.define("rms_norm(Tensor x, Tensor? weight) -> (Tensor, Tensor)")
_library.define("rms_norm_backward(Tensor grad, Tensor x, Tensor rstd, Tensor? weight, bool[2] needed)"
                " -> (Tensor, Tensor)")
_library.impl("rms_norm", lambda x, weight: (
    torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)), "Meta")
_library.impl("rms_norm_backward", lambda grad, x, rstd, weight, needed: (
    torch.empty_like(x) if needed[0] else x.new_empty(0),
    torch.empty_like(weight) if needed[1] else x.new_empty(0)), "Meta")


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        y, rstd = torch.ops.flowgrpo.rms_norm(x, weight)
        ctx.save_for_backward(x, rstd, weight)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        found = torch.ops.flowgrpo.rms_norm_backward(grad, *ctx.saved_tensors, ctx.needs_input_grad)
        return tuple(value if needed else None for value, needed in zip(found, ctx.needs_input_grad, strict=True))


_composite = F.rms_norm


def rms_norm(x: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
             ) -> torch.Tensor:
    """Normalisation as `F.rms_norm`: on meta one kernel each way, where CUDA has one."""
    if not x.is_meta or len(normalized_shape) != 1 or weight is not None and weight.dtype != x.dtype:
        return _composite(x, normalized_shape, weight, eps)
    return _RMSNorm.apply(x, weight)  # type: ignore[no-untyped-call]


def attention(gpu: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
              scale: float | None = None, enable_gqa: bool = False) -> torch.Tensor:
    """Attention as `F.scaled_dot_product_attention`: on meta flash attention without a mask, else the efficient kernel,
    which a GPU would take."""
    if gpu.autocast is not None:
        query, key, value = map(gpu.autocast.lower, (query, key, value))
    if not query.is_meta:
        return torch._C._nn.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal,
                                                         scale=scale, enable_gqa=enable_gqa)
    if query.ndim != 4:
        batch = query.shape[:-3]
        mask = None if attn_mask is None else _four(attn_mask)
        out = attention(gpu, _four(query), _four(key), _four(value), mask, dropout_p, is_causal, scale, enable_gqa)
        return out.view(*batch, *out.shape[1:]) if batch else out[0]
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    operations: Any = torch.ops.aten
    if attn_mask is None and query.dtype != torch.float32 and query.shape[-1] <= 256:
        return operations._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False,
                                                              scale=scale)[0]
    if attn_mask is not None:
        added = torch.zeros_like(attn_mask, dtype=query.dtype) if attn_mask.dtype == torch.bool else attn_mask
        attn_mask = added.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    return operations._scaled_dot_product_efficient_attention(query, key, value, attn_mask, torch.is_grad_enabled(),
                                                              dropout_p, is_causal, scale=scale)[0]


def _four(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[None] if tensor.ndim == 3 else tensor.flatten(0, -4)


# Names of the operations in the lower precision and in fp32, as torch's documentation of autocast lists them.
LOWER = frozenset("""__matmul__ __rmatmul__ addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d conv_transpose3d einsum linear matmul mm multi_dot mv prelu""".split())
FULL = frozenset("""__pow__ __rdiv__ __rpow__ __rtruediv__ acos asin cdist cosh cosine_similarity cross_entropy cumprod
    cumsum dist erfinv exp expm1 group_norm kl_div l1_loss layer_norm log log10 log1p log2 log_softmax mse_loss norm
    normalize pow prod reciprocal renorm rsqrt sinh smooth_l1_loss softmax softmin softplus sum tan""".split())


class Autocast(TorchFunctionMode):
    """Casts of the tensors that operations take. As CUDA's, it keeps that of a trained weight until the context ends.
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
            args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.float() if tensor.dtype in (
                torch.bfloat16, torch.float16) else tensor, (args, kwargs))
        return function(*args, **kwargs)

    def lower(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dtype in (self.dtype, torch.float64):
            return tensor
        if not (tensor.requires_grad and tensor.is_leaf):
            return tensor.to(self.dtype)
        if id(tensor) not in self.casts:
            self.casts[id(tensor)] = tensor.to(self.dtype)
        return self.casts[id(tensor)]


@contextlib.contextmanager
def autocast(gpu: Any, dtype: torch.dtype = torch.bfloat16, enabled: bool = True) -> Iterator[None]:
    """Context manager: autocast of a pretended GPU, which knows it as its `autocast`."""
    with patch.object(gpu, "autocast", Autocast(dtype) if enabled else None) as mode:
        with mode or torch._C.DisableTorchFunction():
            yield


LARGEST = 2**16  # values of a tensor that is followed
FACTORIES = frozenset(("arange", "zeros", "ones", "full", "scalar_tensor", "linspace"))


class HostValues:
    """Host copies of storages on the meta device."""

    def __init__(self) -> None:
        self._copies: dict[int, torch.UntypedStorage] = {}

    def read(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Value of a meta tensor, which shares its memory with that of its views; None if unknown."""
        copy = self._copies.get(tensor.untyped_storage()._cdata)
        if copy is None:
            return None
        empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return empty.set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())

    def set(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Remember the value of a whole new meta tensor."""
        storage = tensor.untyped_storage()
        if tensor.numel() > LARGEST or storage.nbytes() > 16 * LARGEST:
            return
        if storage._cdata not in self._copies:
            self._copies[storage._cdata] = torch.UntypedStorage(storage.nbytes(), device="cpu")
            weakref.finalize(storage, self._copies.pop, storage._cdata, None)
        known = self.read(tensor)
        assert known is not None
        known.copy_(value)

    def follow(self, function: Any, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], args: Any,
               kwargs: Any) -> None:
        """Compute the outputs' values, if all inputs have one; else forget those of outputs that were written."""
        known = all(tensor.untyped_storage()._cdata in self._copies for tensor in inputs)
        if known and (inputs or name in FACTORIES) and len(outputs) == 1 and outputs[0].numel() <= LARGEST:
            host = {"device": "cpu"} if "device" in kwargs else {}
            args, kwargs = tree_map_only(
                torch.Tensor, lambda tensor: self.read(tensor) if tensor.is_meta else tensor, (args, kwargs))
            result = function(*args, **kwargs | host)
            if torch.is_tensor(result):
                self.set(outputs[0], result)
        else:
            for tensor in outputs:
                self.forget(tensor)

    def forget(self, tensor: torch.Tensor) -> None:
        self._copies.pop(tensor.untyped_storage()._cdata, None)
