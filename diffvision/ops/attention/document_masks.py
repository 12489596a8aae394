"""Masks in the form that the operation takes, and `Documents`: packed rows, which some kernels take without a mask."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class Documents(NamedTuple):
    """The documents packed in a batch's rows, given in place of a mask: a token attends within its document.

    Backends for packed sequences and `flex` need no mask; for the others `mask` is computed.
    """

    numbers: Int[Tensor, "B N"]  # of each token's document; those of one document lie together
    ends: Int[Tensor, "S1"]  # int32, on the same device: see `document_ends`

    def mask(self) -> Bool[Tensor, "B 1 N N"]:
        """Return the mask of pairs."""
        return same_document(self.numbers)


def same_document(numbers: Int[Tensor, "B N"]) -> Bool[Tensor, "B 1 N N"]:
    """Return which pairs of a row's tokens are of one document."""
    return (numbers[:, :, None] == numbers[:, None, :])[:, None]


def document_ends(numbers: Int[Tensor, "B N"]) -> Int[Tensor, "S1"]:
    """Return the offset of each document with the rows laid end to end, and the end: int32, as `cu_seqlens` needs it.

    Their number depends on values. Call it while the batch is on the CPU, because on a GPU it waits for the device.
    """
    ends = numbers.new_ones(numbers.numel() + 1, dtype=torch.bool)
    ends[:-1] = first_tokens(numbers).flatten()
    return ends.nonzero().squeeze(1).to(torch.int32)


def first_tokens(numbers: Int[Tensor, "B N"]) -> Bool[Tensor, "B N"]:
    """Return whether a token is the first of its document in its row."""
    first = torch.ones_like(numbers, dtype=torch.bool)
    first[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return first


def boolean_mask(mask: Tensor | Documents | None) -> Tensor | None:
    """Return a mask as the operation takes it, from a boolean one or a float one of 0 and -inf (or the lowest number).

    Raises:
        ValueError: a float mask holds another number.
    """
    if mask is None:
        return None
    if isinstance(mask, Documents):
        return mask.mask()
    mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)  # torch's kernels want all four axes
    if mask.dtype == torch.bool:
        return mask
    attends = mask == 0
    lowest = torch.finfo(mask.dtype).min if mask.is_floating_point() else -torch.inf
    if not torch.compiler.is_compiling() and not (attends | (mask <= lowest)).all():
        raise ValueError(
            "a float attn_mask may hold 0 and -inf only, because differential maps take no bias: pass a boolean mask"
        )
    return attends
