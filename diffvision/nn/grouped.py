"""Grouped differential attention: several signal heads share one noise head, which is subtracted from each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffvision.nn.diff_attention import DiffAttention


class GroupedDiffAttention(DiffAttention):
    """GDA: V1 with one noise head for `signal_ratio` signal heads.

        head_i = RMSNorm((softmax(q_i k1') - lambda softmax(n_g k2')) v) * (1 - lambda_init)    g = i // signal_ratio

    `q_proj` has H + H / signal_ratio rows of D: for each group its signal heads and then its noise head. Keys come in
    pairs and values are 2D wide, as in V1; there are at most as many key/value heads as groups. A ratio of
    1 is V1 itself. The arguments that are not named here are those of `DiffAttention`.

    Args:
        num_heads: signal heads, which are those of the output.
        num_kv_heads: key/value heads, a divisor of the number of groups; one for each group if None.
        signal_ratio: signal heads per noise head (the paper's models have 3 or 4).

    Source: arXiv 2510.06949; the layout of MotifTechnologies' Motif-2 (num_noise_heads, k_ratio 1).
    """

    variant, new_parameters, recorded = "gda", (), ("lambda_init", "signal_ratio")

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        signal_ratio: int = 2,
        **settings: Any,
    ) -> None:
        if signal_ratio < 1 or num_heads % signal_ratio:
            raise ValueError(
                f"num_heads ({num_heads}) must be a positive multiple of signal_ratio ({signal_ratio}): that many "
                "signal heads share a noise head"
            )
        self._groups, self._group = num_heads // signal_ratio, signal_ratio + 1
        num_kv_heads = self._groups if num_kv_heads is None else num_kv_heads
        if num_kv_heads < 1 or self._groups % num_kv_heads:
            raise ValueError(
                f"num_kv_heads ({num_kv_heads}) must divide the {self._groups} groups of heads: a group reads one "
                "key/value head"
            )
        super().__init__(dim, num_heads, num_kv_heads, **settings)
        self.signal_ratio = signal_ratio

    def _count_queries(self, num_heads: int) -> int:
        return num_heads + self._groups

    def _project(self, *tokens: Any, **settings: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Project as the base class does, and repeat the noise query of a group for its signal heads."""
        grouped, k, v = super()._project(*tokens, **settings)
        signal, noise = grouped.split((self.signal_ratio, 1), dim=2)
        return torch.stack((signal, noise.expand_as(signal)), dim=3).flatten(1, 2), k, v

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, signal_ratio={self.signal_ratio}"
