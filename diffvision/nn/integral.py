"""Integral attention: one softmax of the mean of two signals' logits, a control for the difference of two softmaxes."""

from __future__ import annotations

import torch
from torch import Tensor

from diffvision import ops
from diffvision.nn.attention import Attention, Inputs


class IntegralAttention(Attention):
    """Softmax of the mean of two logits, with V1's projections: half of the plain heads, each of two queries and keys.

        head = softmax((q1 k1' + q2 k2') / 2 * D**-0.5) v

    This is plain attention with heads of 2D and a scale smaller by sqrt(2), and is computed as such. As a control it
    has V1's heads and values, but neither a second softmax nor lambda. The arguments are those of `AttentionLayer`.

    Source: arXiv 2508.18387 (Integral Transformer) with two signals.
    """

    variant, query_maps, key_maps, value_maps = "integral", 2, 2, 2
    no_adapting = ", but its one map weights the values of two plain heads"

    def attend(self, inputs: Inputs) -> Tensor:
        _, q, k, v, mask, is_causal, dropout, _ = inputs
        q, k = (part.transpose(2, 3).flatten(3) for part in (q, k))
        return ops.softmax_attention(q * 2**-0.5, k, v, causal=is_causal, mask=mask, dropout=dropout)

    def combine(self, maps: Tensor, lam: Tensor | None, inputs: Inputs) -> Tensor:
        """Return the softmax of the mean logits: the geometric mean of both maps, its rows made to sum to 1."""
        logits = maps.clamp(min=torch.finfo(maps.dtype).tiny).log().mean(dim=2)
        return logits.softmax(-1) * (maps[:, :, 0] > 0)
