"""`Problem`: the sizes, dtype and device of a call, by which backends accept or refuse it."""

from typing import NamedTuple

import torch
from torch import Tensor


class Problem(NamedTuple):
    """One call of `diff_attention`, described by everything but its values."""

    batch: int
    heads: int  # differential heads
    kv_heads: int
    queries: int
    keys: int
    head_dim: int  # D, one map's head
    value_dim: int  # V
    causal: bool = False
    masked: bool = False
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    grad: bool = True  # gradients are needed
    packed: bool = False  # sequences of unequal length without padding; queries and keys are the longest one's


def describe(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor | float, *, causal: bool, mask: Tensor | None, dropout: float
) -> Problem:
    """Return the `Problem` of these tensors (shapes as in `diff_attention`)."""
    return Problem(
        batch=q.shape[0],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        queries=q.shape[3],
        keys=k.shape[3],
        head_dim=q.shape[4],
        value_dim=v.shape[3],
        causal=causal,
        masked=mask is not None,
        dropout=dropout,
        dtype=q.dtype,
        device=q.device.type,
        grad=torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (q, k, v, lam)),
    )


def is_grouped(q: Tensor, k: Tensor) -> bool:
    """Return whether several query heads (axis 1) share one key/value head, as a bool and not a symbol."""
    if q.shape[1] != k.shape[1]:  # noqa: SIM103
        return True
    return False
