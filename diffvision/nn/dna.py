"""DnA: plain attention plus a softmax of negated logits, with separate queries and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from diffvision import ops
from diffvision.nn.attention import AttentionLayer, Inputs


class DenoisingAttention(AttentionLayer):
    """Denoising attention: each head adds what its negative queries attend to least.

        head = softmax(q1 k') v1 + s softmax(-q2 k') v2                                s is learned for each head

    The two queries of a head are adjacent in `q_proj`'s rows, and the two values of a key/value head in `v_proj`'s. The
    equation of the paper subtracts the second term and its code adds it: negated rows of `v_proj` turn one into the
    other, so the sign means nothing. s starts at 1/2. The arguments are those of `AttentionLayer`.

    Source: arXiv 2606.27372; github.com/rjccv/DnA, class DenoisingAttention.
    """

    variant, query_maps, key_maps, value_maps, values_per_head = "dna", 2, 1, 1, 2
    identifying_weight = "negative_scale"
    no_maps = "denoising attention weights two values with two maps, which make no one map"

    def add_parameters(self, dim: int, factory_kwargs: dict[str, Any]) -> None:
        """Make s [H]."""
        self.negative_scale = nn.Parameter(torch.empty(self.num_heads, **factory_kwargs))

    def reset_parameters(self) -> None:
        """Set s to a half."""
        nn.init.constant_(self.negative_scale, 0.5)

    def attend(self, inputs: Inputs) -> Tensor:
        _, q, k, v, mask, is_causal, dropout, _ = inputs
        settings = {"causal": is_causal, "mask": mask, "dropout": dropout}
        (one, two), (first, second) = q.unbind(2), v.chunk(2, dim=-1)
        k = k.squeeze(2)
        added = ops.softmax_attention(-two, k, second, **settings)
        return ops.softmax_attention(one, k, first, **settings) + self.negative_scale.to(v.dtype)[:, None, None] * added

    def combine(self, maps: Tensor, lam: Tensor | None, inputs: Inputs) -> Tensor:
        raise ValueError(self.no_maps)

    @classmethod
    def extra_rows(cls, head_dim: int, **settings: Any) -> float:
        return 2 * head_dim  # a second query and a second value
