"""The formula: the reference of every other backend, and the fast path for short rows on a CPU.

    out = (softmax(q1 k1' * scale) - lam * softmax(q2 k2' * scale)) v          (arXiv 2410.05258, equation 1)

Half precision is computed in float32, whatever autocast says, and rounded once at the end.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from diffvision.ops.attention.problem import Problem


def limit(problem: Problem) -> str | None:
    """Return why this backend cannot take the problem; it takes every one."""
    return None


def attention_maps(
    q: Float[Tensor, "B H P M D"],
    k: Float[Tensor, "B Hk Pk N D"],
    *,
    causal: bool = False,
    mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "B H P M N"]:
    """Return the softmax maps, for figures and for the formula below.

    Args:
        q: queries [B, H, P, M, D] of P maps (2 in differential attention).
        k: keys [B, Hk, P, N, D], or [B, Hk, 1, N, D] where the maps share one key; H is a multiple of Hk.
        causal: query i attends to keys up to i + N - M (aligned to the last key).
        mask: True = may attend, broadcastable to [B, H, M, N]; combined with `causal` by AND.
        scale: of the logits; D**-0.5 if None.

    Returns:
        [B, H, P, M, N], float32 for half-precision input. Rows sum to 1; a row that may not attend to any key is zeros.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries, keys = q.shape[3], k.shape[3]
    with torch.autocast(q.device.type, enabled=False):
        q, k = q.to(dtype) * (q.shape[4] ** -0.5 if scale is None else scale), k.to(dtype)
        if q.shape[1] != k.shape[1]:
            k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = q @ k.transpose(-1, -2)
    if causal:
        lower = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        if mask is None and queries <= keys:  # every row has a key
            return scores.masked_fill(~lower, -torch.inf).softmax(dim=-1)
        mask = lower if mask is None else mask & lower
    if mask is None:
        return scores.softmax(dim=-1)
    # [B, H, M, N] -> [B, H, 1, M, N]: the maps share the mask. The lowest finite number, and zeroing after, keep rows
    # without any key finite in forward and backward, where -inf would give NaN.
    mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape).unsqueeze(2)
    return scores.masked_fill(~mask, torch.finfo(dtype).min).softmax(dim=-1) * mask


def diff_attention(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor, *, causal: bool, mask: Tensor | None, scale: float, dropout: float
) -> Tensor:
    """Arguments, shapes and result as `diffvision.ops.diff_attention`, already checked."""
    maps = attention_maps(q, k, causal=causal, mask=mask, scale=scale)
    if dropout:
        maps = F.dropout(maps, dropout)
    one, two = maps.unbind(2)  # its backward is one copy; indexing twice would add two tensors that are half zeros
    difference, v = torch.addcmul(one, two, lam.to(maps.dtype), value=-1), v.to(maps.dtype)
    if q.shape[1] != v.shape[1]:
        v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    with torch.autocast(q.device.type, enabled=False):
        out = difference @ v
    return out.to(q.dtype)
