"""What may not be attended changes nothing, not even where it is NaN.

A masked weight is zero, and zero times NaN is NaN: in torch's kernels, and in any product of a whole map with the
values, one bad number in padding spoils every row. Here bad tokens are zeroed before the backend sees them, and the
rows that do attend to one are made NaN after it, so that a real fault still shows.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def contained(attend: Attend, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None) -> Tensor:
    """`attend(q, k, v)` -> [B, H, M, V], with bad numbers kept to the rows that may attend to them.

    Args:
        attend: a backend's `diff_attention` with everything but these three given.
        q, k, v: as in `diff_attention`.
        causal, mask: the ones that `attend` applies; mask has four axes.
    """
    everything_is_attended = mask is None and (not causal or q.shape[3] == 1)
    if everything_is_attended or _all_finite(q, k, v):
        return attend(q, k, v)
    bad_query = ~q.isfinite().all(-1).all(2)  # [B, H, M]
    bad_key = ~(k.isfinite().all(-1).all(2) & v.isfinite().all(-1))  # [B, Hk, N]
    out = attend(
        q.masked_fill(bad_query[:, :, None, :, None], 0.0),
        k.masked_fill(bad_key[:, :, None, :, None], 0.0),
        v.masked_fill(bad_key[..., None], 0.0),
    )
    bad_key = bad_key.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    any_key = torch.ones_like(bad_key)
    spoiled = _reached(bad_key, q.shape[3], causal, mask) | bad_query & _reached(any_key, q.shape[3], causal, mask)
    return out.masked_fill(spoiled[..., None], torch.nan)


def _all_finite(*tensors: Tensor) -> bool:
    """Whether it is known, without waiting for a device and outside of a graph, that every number is finite."""
    if torch.compiler.is_compiling() or tensors[0].device.type != "cpu":
        return False
    # A sum is finite only if its terms are; an overflow merely takes the longer road.
    return all(bool(t.detach().sum().isfinite()) for t in tensors)


def _reached(flag: Tensor, queries: int, causal: bool, mask: Tensor | None) -> Tensor:
    """[B, H, M]: may the row attend to any key of those flagged in [B, H, N]?"""
    if mask is not None and mask.shape[2] != 1:
        keys = flag.shape[2]
        if causal:
            mask = mask & torch.ones(queries, keys, dtype=torch.bool, device=flag.device).tril(keys - queries)
        return (mask & flag[:, :, None]).any(-1)
    if mask is not None:
        flag = flag & mask[:, :, 0]
    if not causal:
        return flag.any(-1, keepdim=True).expand(-1, -1, queries)
    seen = flag.cumsum(-1) > 0  # by a query that reaches just this key
    past = flag.shape[2] - queries
    return seen[..., past:] if past >= 0 else F.pad(seen, (-past, 0))
