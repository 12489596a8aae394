"""Two calls of torch's scaled_dot_product_attention and a subtraction.

torch's flash kernels take one size for queries, keys and values, and V1's values are twice as wide as its keys. For
unequal sizes, SDPA silently takes the MATH path on a CPU, which keeps every [M, N] map. Two rewrites make the sizes
equal: split the value head into halves (four calls, every map computed twice), or widen queries and keys with
zeros (two calls, the logits unchanged). Both do 16 N^2 D of matrix work; widening computes half as many exponentials
and was faster in all measurements (docs/benchmarks/speed.md). On CUDA the memory-efficient and cuDNN
kernels take unequal sizes as they are, if they are aligned. `plan_cuda` says what a call needs there.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from diffvision.ops.attention import difference
from diffvision.ops.attention.difference import in_one_layout, subtract, unbind_maps, widen
from diffvision.ops.attention.kernels import (
    compute_capability,
    has_little_shared_memory,
    is_enabled,
    without_cudnn,
)
from diffvision.ops.attention.problem import Problem, is_grouped

CUDNN_FIRST = (90, 100)  # the compute capabilities on which torch takes cuDNN's kernel before others


def limit(problem: Problem) -> str | None:
    """Return why this backend cannot take the problem; torch's attention takes every one."""
    return None


def diff_attention(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor, *, causal: bool, mask: Tensor | None, scale: float, dropout: float
) -> Tensor:
    """Arguments, shapes and result as `diffvision.ops.diff_attention`, already checked."""
    value_dim = v.shape[3]
    if scale <= 0:  # torch's causal kernel on a CPU multiplies its -inf by it
        q, scale = q * scale, 1.0
    if k.shape[3] == 0:  # zeros that depend on every input: torch's gradients without keys may be NaN
        zero = (k.sum() + v.sum()).to(q.dtype)
        return (q[:, :, 0, :, :1] * lam * 0 + zero).expand(*q.shape[:2], q.shape[3], value_dim).to(q.dtype)
    if causal:
        mask, causal = _torch_mask(mask, q.shape[3], k.shape[3], q.device)
    prepare = _for_cuda if q.is_cuda else _for_others
    q, k, v, kernels = prepare(q, k, v, mask, dropout)
    grouped = is_grouped(q, k)

    # One call a map: a single call over 2H heads would need the values (and V1's grouped keys) copied for each map.
    (q1, q2), (k1, k2) = unbind_maps(q), unbind_maps(k) * (2 // k.shape[2])
    settings: dict[str, Any] = {
        "attn_mask": mask,
        "dropout_p": dropout,
        "is_causal": causal,
        "scale": scale,
        "enable_gqa": grouped,
    }
    with kernels:
        first = F.scaled_dot_product_attention(q1, k1, v, **settings)
        second = F.scaled_dot_product_attention(q2, k2, v, **settings)
    out = subtract(first, second, lam, q.dtype)
    return out if out.shape[-1] == value_dim else out[..., :value_dim]


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, dropout: float) -> Tensor:
    """Arguments, shapes and result as `diffvision.ops.softmax_attention`."""
    scale, value_dim = q.shape[3] ** -0.5, v.shape[3]
    if causal:
        mask, causal = _torch_mask(mask, q.shape[2], k.shape[2], q.device)
    prepare = _for_cuda if q.is_cuda else _for_others
    q, k, v, kernels = prepare(q, k, v, mask, dropout)
    grouped = is_grouped(q, k)
    with kernels:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    if out.device.type in difference.AT_RISK:
        out = in_one_layout(out)
    return out if out.shape[-1] == value_dim else out[..., :value_dim]


class Plan(NamedTuple):
    """What a call on CUDA needs so that torch finds a kernel that keeps no [M, N] map and has right gradients."""

    widen: bool  # queries and keys to the size of the values
    repeat_heads: bool  # repeat keys and values for each query head of their group
    avoid_cudnn: bool


def plan_cuda(
    *,
    capability: int,
    version: tuple[int, int],
    half: bool,
    head_dim: int,
    value_dim: int,
    grouped: bool,
    masked: bool,
    queries: int,
    keys: int,
    grad: bool,
    dropout: bool,
) -> Plan:
    """Return what a call of torch's attention needs on a card.

    Values wider than keys go to cuDNN's kernel where torch takes it first, on 9.0 and 10.0: on an H200 it was faster
    than any other (docs/benchmarks/gpu.md). Elsewhere only the memory-efficient kernel takes them as they are. Widened
    keys go to the flash kernel, if it takes the call. That is expected to be faster and was not measured on any card.
    One query is not widened, because that would copy a whole cache for each token.

    Grouped heads: the memory-efficient kernel takes them from torch 2.15 on. In older releases the flash kernel is the
    only one known to: in half precision, for equal sizes without a mask. Otherwise torch computes every map.

    cuDNN's gradients may be NaN under a mask from torch 2.11 on (pytorch issue 196678), with a single query too
    (cudnn-frontend issue 1072), and no release is known to be right. It makes a plan for each pair of lengths, and
    decoding has another pair for every token.

    Args:
        capability: the card's compute capability, 90 for 9.0.
        version: torch's major and minor version.
        half: whether the dtype has 16 bits.
        head_dim: D.
        value_dim: V.
        grouped: whether several query heads read one key/value head.
        masked: whether torch is given a mask.
        queries: their number.
        keys: their number.
        grad: whether gradients are needed.
        dropout: whether dropout is drawn.
    """
    widen = head_dim < value_dim and capability not in CUDNN_FIRST and queries > 1
    repeat_heads = grouped and version < (2, 15)
    if widen or repeat_heads:
        flash = half and not masked and flash_takes(max(head_dim, value_dim), capability, grad=grad, dropout=dropout)
        widen = widen and flash
        repeat_heads = repeat_heads and not (flash and (widen or head_dim == value_dim))
    return Plan(
        widen=widen,
        repeat_heads=repeat_heads,
        avoid_cudnn=capability >= 90 and (queries != keys or (masked and grad and version >= (2, 11))),
    )


def flash_takes(size: int, capability: int, *, grad: bool, dropout: bool) -> bool:
    """Return whether torch's flash kernel takes heads of a size, in half precision and without a mask."""
    small = has_little_shared_memory(capability)  # which backward needs
    refused = small and grad and (192 < size <= 224 or (size > 224 and dropout))
    return 80 <= capability <= 121 and size <= 256 and not refused and is_enabled("flash")


_MAJOR, _MINOR = torch.__version__.split(".")[:2]
_VERSION = (int(_MAJOR), int(_MINOR))


def _for_others(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor, Tensor, AbstractContextManager]:
    """Do what `_for_cuda` does, for other devices: one size of queries, keys and values."""
    return (q, k, v, _ALL) if q.shape[-1] == v.shape[-1] else (*_equal_sizes(q, k, v), _ALL)


def _for_cuda(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor, Tensor, AbstractContextManager]:
    """Return queries, keys and values as the card's kernels take them, and the context to call torch's attention in.

    Heads are axis 1; queries, keys and values may have an axis of maps, and end in [.., N, D].
    """
    if q.shape[-1] % 8 or v.shape[-1] % 8:  # which the memory-efficient kernel does not take
        q, k, v = (_multiple_of_8(t) for t in (q, k, v))
    plan = plan_cuda(
        capability=compute_capability(q.device.index),
        version=_VERSION,
        half=q.dtype.itemsize == 2,
        head_dim=q.shape[-1],
        value_dim=v.shape[-1],
        grouped=is_grouped(q, k),
        masked=mask is not None,
        queries=q.shape[-2],
        keys=k.shape[-2],
        grad=torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        dropout=dropout > 0,
    )
    if plan.widen:
        q, k, v = _equal_sizes(q, k, v)
    if plan.repeat_heads:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return q, k, v, without_cudnn() if plan.avoid_cudnn else _ALL


def _equal_sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad queries, keys and values with zero columns to one size."""
    size = max(q.shape[-1], v.shape[-1])
    return widen(q, size), widen(k, size), widen(v, size)


def _multiple_of_8(t: Tensor) -> Tensor:
    """Pad the last axis with zero columns to a multiple of 8."""
    return widen(t, -(-t.shape[-1] // 8) * 8)


_ALL = nullcontext()


def _torch_mask(mask: Tensor | None, queries: int, keys: int, device: torch.device) -> tuple[Tensor | None, bool]:
    """Return a causal call's mask and `is_causal`, which torch aligns to the first key and we to the last."""
    if queries == 1 and mask is None:
        return None, False
    if queries == keys and mask is None:
        return None, True
    lower = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return (lower if mask is None else mask & lower), False
