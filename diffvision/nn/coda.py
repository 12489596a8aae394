"""CoDA: V2 whose second query is the first one, rotated by learned angles, so that it costs next to no parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from diffvision import ops
from diffvision.nn.attention import DifferentialLayer


class CodaAttention(DifferentialLayer):
    """Constrained orthogonal differential attention: the second map's query is the first one's, rotated.

        lambda = sigmoid(lambda_proj(x) + lambda_offset)                  one number a token and head
        head = RMSNorm((softmax(q k') - lambda softmax(R(theta) q k')) v)

    R turns each pair of channels (2i, 2i + 1) by a learned angle, after rotary embedding. The angles start at a
    quarter turn and lambda at sigmoid(-6), so that a layer begins as nearly plain attention with a norm of its heads.
    The arguments are those of `AttentionLayer`, with `head_norm=True` by default.

    Source: the package coda-gqa-l (class CoDAGQA, without its bounded caches); Zenodo 18804610.
    """

    variant, key_maps, value_maps, lambda_by_token = "coda", 1, 1, True
    identifying_weight, norm_eps = "theta", 1e-6
    no_adapting = ", but the norm of its heads changes every output"

    def __init__(
        self, dim: int, num_heads: int, num_kv_heads: int | None = None, *, head_norm: bool = True, **settings: Any
    ) -> None:
        self._group = 1
        super().__init__(dim, num_heads, num_kv_heads, head_norm=head_norm, **settings)
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, as channels turn in pairs, got {self.head_dim}")

    def add_parameters(self, dim: int, factory_kwargs: dict[str, Any]) -> None:
        """Make lambda's projection and offset [H], and the angles [H, D / 2]."""
        self.lambda_proj = nn.Linear(dim, self.num_heads, bias=False, **factory_kwargs)
        self.lambda_offset = nn.Parameter(torch.empty(self.num_heads, **factory_kwargs))
        self.theta = nn.Parameter(torch.empty(self.num_heads, self.head_dim // 2, **factory_kwargs))

    def reset_parameters(self) -> None:
        """Set the angles to a quarter turn and lambda's offset to -6."""
        nn.init.constant_(self.theta, math.pi / 2)
        nn.init.constant_(self.lambda_offset, -6.0)

    def _count_queries(self, num_heads: int) -> int:
        return num_heads  # the second query is the first one, rotated

    def _project(self, *tokens: Any, **settings: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Project as the base class does, and add each query's rotated one."""
        q, k, v = super()._project(*tokens, **settings)
        angles = self.theta.to(torch.promote_types(self.theta.dtype, torch.float32))[:, None, None, :]
        return torch.cat((q, ops.apply_rotary(q, angles.cos(), angles.sin())), dim=2), k, v

    def compute_lambda(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return lambda of each token and head [B, H, N, 1], between 0 and 1, in float32 or better."""
        logits = self.lambda_proj(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) + self.lambda_offset
        return logits.sigmoid().transpose(1, 2).unsqueeze(-1)

    @classmethod
    def extra_rows(cls, head_dim: int, **settings: Any) -> float:
        return 1  # the head's lambda
