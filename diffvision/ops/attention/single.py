"""The backend for one query per head, as in decoding with a cache: three small products that read the values once.

In a group of heads that share keys, their queries are the rows of one product. The whole call is a dozen of torch's
operations, so that most of its time goes into reading the keys and values.
"""

import torch
from torch import Tensor

from diffvision.ops.attention.problem import Problem
from diffvision.ops.autocast import without_autocast


def limit(problem: Problem) -> str | None:
    """Return why this backend cannot take the problem, or None."""
    if problem.queries != 1:
        return f"it takes one query per head, not {problem.queries}"
    if problem.dropout:
        return "it draws no dropout"
    return None


def diff_attention(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor, *, causal: bool, mask: Tensor | None, scale: float, dropout: float
) -> Tensor:
    """Arguments, shapes and result as `diffvision.ops.diff_attention`, already checked; one query sees all keys."""
    (batch, heads, _, _, size), (_, kv_heads, key_maps, keys, _) = q.shape, k.shape
    group, dtype = heads // kv_heads, torch.promote_types(q.dtype, torch.float32)
    rows, products = q.to(dtype), batch * kv_heads * key_maps
    if group > 1:
        rows = rows.view(batch, kv_heads, group, 2, size).transpose(2, 3)
    with without_autocast(q.device.type):
        # Few calls: each costs as much as a small product. baddbmm with nothing to add is bmm with a factor.
        scores = torch.baddbmm(
            rows.new_empty(1),
            rows.reshape(products, group * 2 // key_maps, size),  # one key for both maps: not copied for each
            k.to(dtype).reshape(products, keys, size).mT,
            beta=0,
            alpha=scale,
        )
        scores = scores.view(batch * kv_heads, 2, group, keys)
        if mask is not None:
            mask = mask.expand(batch, heads, 1, keys).reshape(batch * kv_heads, 1, group, keys)
            scores = scores.masked_fill(~mask, torch.finfo(dtype).min)
        maps = scores.softmax(-1)
        if mask is not None:
            maps = maps * mask  # a row without any key is zeros
        if lam.dim() > 1:  # not one number, which is broadcast
            lam = lam.expand(batch, heads, 1, 1).reshape(batch * kv_heads, group, 1)
        one, two = maps.unbind(1)
        values = v.to(dtype).reshape(batch * kv_heads, keys, v.shape[3])
        out = torch.bmm(torch.addcmul(one, two, lam, value=-1), values)
        return out.view(batch, heads, 1, v.shape[3]).to(q.dtype)
