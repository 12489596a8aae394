"""Tensors rounded to what low-bit attention kernels and quantised caches hold, and returned as floats.

Each function rounds and scales back in one step ("fake quantisation"): the result is what the kernel computes with,
apart from the order of its sums. Scales stay in float32, as in the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32  # numbers that share a scale in a quantised cache (KIVI's default)


def to_integers(x: Tensor, bits: int, dims: int | tuple[int, ...]) -> Tensor:
    """Round to 2 ** bits - 1 even levels from -a to a, a the largest absolute value along `dims`.

    Halves are rounded away from zero, as SageAttention's kernels do.

    Args:
        x: any shape.
        bits: of a signed integer, such as 8 (levels -127 to 127).
        dims: axes along which numbers share a scale.
    """
    highest = 2 ** (bits - 1) - 1
    step = (x.abs().amax(dim=dims, keepdim=True) / highest).clamp(min=torch.finfo(x.dtype).tiny)
    levels = x / step
    return (levels + levels.sign() / 2).trunc().clamp(-highest, highest) * step


def to_float8(x: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """Round to float8 (e4m3), the largest absolute value along `dims` scaled to 448, the largest that it has."""
    highest = torch.finfo(torch.float8_e4m3fn).max
    scale = (x.abs().amax(dim=dims, keepdim=True) / highest).clamp(min=torch.finfo(x.dtype).tiny)
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def by_block(x: Tensor, bits: int, rows: int) -> Tensor:
    """Round each block of rows to integers with one scale, as SageAttention does with q (128 rows) and k (64).

    Args:
        x: [..., N, D]; the last block may have fewer rows.
        bits: as `to_integers`.
        rows: tokens a block.
    """
    return torch.cat([to_integers(block, bits, (-2, -1)) for block in x.split(rows, dim=-2)], dim=-2)


def smoothed(k: Tensor) -> Tensor:
    """Subtract the mean over tokens from keys [..., N, D], each map's and head's its own.

    A row of logits changes by one number, which softmax does not see; what the channels have in common is not rounded
    (SageAttention, arXiv 2410.02367).
    """
    return k - k.mean(dim=-2, keepdim=True)


def by_group(x: Tensor, bits: int, dim: int) -> Tensor:
    """Round each group of `GROUP` numbers along an axis to 2 ** bits levels from its least to its largest.

    KIVI (arXiv 2402.02750) groups tokens for keys, one channel at a time, and channels for values, one token at a time.

    Args:
        x: any shape; the last group may be smaller.
        bits: of an unsigned integer.
        dim: the axis.
    """

    def rounded(group: Tensor) -> Tensor:
        least, largest = group.aminmax(dim=dim, keepdim=True)
        step = ((largest - least) / (2**bits - 1)).clamp(min=torch.finfo(x.dtype).tiny)
        return least + ((group - least) / step).round() * step

    return torch.cat([rounded(group) for group in x.split(GROUP, dim=dim)], dim=dim)
