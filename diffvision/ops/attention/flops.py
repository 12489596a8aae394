"""What torch's `FlopCounterMode` counts for operators of ours, into which it cannot look: the formula's products.

They are counted as `eager` makes them, densely, causal or masked or not, and without what a backward computes again.
A counter knows the operators that exist when it begins; triton's are made by the first call.
"""

from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula


def count(forward: Any, backward: Any = None) -> None:
    """Register the operators of a backend, whose arguments begin with q, k and v, and in backward with a gradient."""
    register_flop_formula(forward, get_raw=True)(_forward)
    if backward is not None:
        register_flop_formula(backward, get_raw=True)(lambda grad, *inputs, **others: 2 * _forward(*inputs, **others))


def _forward(q: Tensor, k: Tensor, v: Tensor, *others: Any, **_: Any) -> int:
    """Return 2 FLOPs a multiply-add of two maps' logits and of one product with the values."""
    batch, heads, maps, queries, size = q.shape
    pairs = batch * queries * k.shape[3]
    match others:
        case (_, _, Tensor() as cu_q, Tensor() as cu_k, int(longest_q), int(longest_k), *_):  # packed sequences
            if isinstance(cu_q, FakeTensor) or cu_q.is_meta:
                pairs = (len(cu_q) - 1) * longest_q * longest_k
            else:
                pairs = int((cu_q.diff().double() @ cu_k.diff().double()).item())
    return 2 * pairs * heads * (maps * size + v.shape[3])
