"""Two calls of torch's scaled_dot_product_attention and a subtraction.

torch's flash kernels take one size for queries, keys and values, and V1's values are twice as wide as its keys. For
unequal sizes, SDPA silently takes the MATH path on a CPU, which keeps every [M, N] map. Two rewrites make the sizes
equal: split the value head into halves (four calls, every map computed twice), or widen queries and keys with
zeros (two calls, the logits unchanged). Both do 16 N^2 D of matrix work; widening computes half as many exponentials
and was faster in all measurements (docs/benchmarks/speed.md). On CUDA the memory-efficient and cuDNN
kernels take unequal sizes as they are, if they are aligned.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from diffvision.ops.attention.difference import subtract
from diffvision.ops.attention.problem import Problem


def limit(problem: Problem) -> str | None:
    """Return why this backend cannot take the problem; torch's attention takes every one."""
    return None


def diff_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    *,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """Arguments, shapes and result as `diffvision.ops.diff_attention`, already checked."""
    head_dim, value_dim = q.shape[4], v.shape[3]
    scale = head_dim**-0.5 if scale is None else scale
    if scale <= 0:  # torch's causal kernel on a CPU multiplies its -inf by it
        q, scale = q * scale, 1.0
    if k.shape[3] == 0:  # zeros that depend on every input: torch's gradients without keys may be NaN
        zero = (k.sum() + v.sum()).to(q.dtype)
        return (q[:, :, 0, :, :1] * lam * 0 + zero).expand(*q.shape[:2], q.shape[3], value_dim).to(q.dtype)
    q, k, v = _equal_sizes(q, k, v)
    mask, causal = _torch_mask(mask, causal, q.shape[3], k.shape[3], q.device)

    # One call a map: a single call over 2H heads would need the values (and V1's grouped keys) copied for each map.
    def attend(m: int) -> Tensor:
        key = k[:, :, m if k.shape[2] == 2 else 0]
        grouped = bool(q.shape[1] != k.shape[1])  # a traced size is a tensor
        return F.scaled_dot_product_attention(
            q[:, :, m], key, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
        )

    return subtract(attend(0), attend(1), lam, q.dtype)[..., :value_dim]


def softmax_attention(
    q: Float[Tensor, "B H M D"],
    k: Float[Tensor, "B Hk N D"],
    v: Float[Tensor, "B Hk N V"],
    *,
    causal: bool = False,
    mask: Bool[Tensor, "..."] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B H M V"]:
    """Compute `softmax(q k' * D**-0.5) v`, the output of one map, by torch's attention and for values of any width.

    Args:
        q: queries [B, H, M, D].
        k: keys [B, Hk, N, D]; H is a multiple of Hk.
        v: values [B, Hk, N, V].
        causal: as in `diff_attention`, aligned to the last key.
        mask: as in `diff_attention`.
        dropout: probability of the map's entries.

    Returns:
        [B, H, M, V]; a row that may not attend to any key is zeros.
    """
    scale, value_dim, grouped = q.shape[3] ** -0.5, v.shape[3], bool(q.shape[1] != k.shape[1])
    mask, causal = _torch_mask(mask, causal, q.shape[2], k.shape[2], q.device)
    q, k, v = _equal_sizes(q, k, v)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return out[..., :value_dim]


def _equal_sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad queries, keys and values with zero columns to one size, unless the device's kernels need none."""
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    if head_dim == value_dim or (q.is_cuda and _align(head_dim, q.dtype) and _align(value_dim, q.dtype)):
        return q, k, v
    if head_dim < value_dim:
        widen = (0, value_dim - head_dim)
        return F.pad(q, widen), F.pad(k, widen), v
    return q, k, F.pad(v, (0, head_dim - value_dim))


def _align(size: int, dtype: torch.dtype) -> bool:
    return size * dtype.itemsize % 16 == 0


def _torch_mask(
    mask: Tensor | None, causal: bool, queries: int, keys: int, device: torch.device
) -> tuple[Tensor | None, bool]:
    """Return mask and causal for torch, whose `is_causal` is aligned to the first key and ours to the last."""
    if not causal or (queries == 1 and mask is None):
        return mask, False
    if queries == keys and mask is None:
        return None, True
    lower = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return (lower if mask is None else mask & lower), False
