"""DIFF V1 with other forms of lambda: one number per head, per token, or both, and two scalars per layer.

The layers take the arguments of `DiffAttention`, which has one lambda per layer from four vectors. The initial value
by depth is in `lambda_init.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from diffvision.nn.diff_attention import VECTORS, DiffAttention


class HeadLambda(DiffAttention):
    """V1 with a lambda of each head: `lambda + delta_h`, where delta has one number per head and starts from zero.

    Source: mrtanke/adaptive-differential-attention ("diff_headwise"), which says that this and the next two start as V1
    with the same weights.
    """

    variant = "v1_head"

    def add_parameters(self, dim: int, factory_kwargs: dict[str, Any]) -> None:
        super().add_parameters(dim, factory_kwargs)
        self.lambda_head = nn.Parameter(torch.empty(self.num_heads, **factory_kwargs))

    def reset_parameters(self) -> None:
        """Draw V1's vectors, and set the differences between heads to zero."""
        super().reset_parameters()
        nn.init.zeros_(self.lambda_head)

    def compute_lambda(self, x: Tensor | None = None) -> Float[Tensor, "1 H 1 1"]:
        """Return lambda of each head [1, H, 1, 1], in float32."""
        return super().compute_lambda() + self.lambda_head.float()[None, :, None, None]


class TokenLambda(DiffAttention):
    """V1 with a lambda of each token, shared by the heads: `lambda + x w`, where w has x's width and starts from zero.

    Source: mrtanke/adaptive-differential-attention ("diff_tokenwise").
    """

    variant, lambda_by_token = "v1_token", True

    def add_parameters(self, dim: int, factory_kwargs: dict[str, Any]) -> None:
        super().add_parameters(dim, factory_kwargs)
        self.lambda_token = nn.Parameter(torch.empty(self._lambdas_per_token(), dim, **factory_kwargs))

    def _lambdas_per_token(self) -> int:
        return 1

    def reset_parameters(self) -> None:
        """Draw V1's vectors, and set the differences between tokens to zero."""
        super().reset_parameters()
        nn.init.zeros_(self.lambda_token)

    def compute_lambda(self, x: Float[Tensor, "B N dim"]) -> Float[Tensor, "B H N 1"]:  # type: ignore[override]
        """Return lambda of each token [B, 1 or H, N, 1], in float32."""
        change = F.linear(x, self.lambda_token.to(x.dtype)).float()
        return super().compute_lambda() + change.transpose(1, 2).unsqueeze(-1)


class TokenHeadLambda(TokenLambda):
    """V1 with a lambda of each token and head: `lambda + (x W)_h`, where W starts from zero.

    Source: mrtanke/adaptive-differential-attention ("diff_token_headwise").
    """

    variant = "v1_token_head"

    def _lambdas_per_token(self) -> int:
        return self.num_heads


class DualLambda(DiffAttention):
    """V1 with two scalars per layer instead of four vectors: `exp(a) - exp(b) + lambda_init`, both from zero.

    Source: huggingface/pytorch-image-models timm/layers/diff_attention.py (dual_lambda).
    """

    variant, identifying_weight = "v1_dual", "lambda_a"

    def add_parameters(self, dim: int, factory_kwargs: dict[str, Any]) -> None:
        # V1's vectors are drawn and dropped, so that one seed gives both variants the same other weights.
        super().add_parameters(dim, factory_kwargs)
        super().reset_parameters()
        for name in VECTORS:
            delattr(self, name)
        self.lambda_a = nn.Parameter(torch.empty(1, **factory_kwargs))
        self.lambda_b = nn.Parameter(torch.empty(1, **factory_kwargs))

    def reset_parameters(self) -> None:
        """Set both scalars to zero."""
        nn.init.zeros_(self.lambda_a)
        nn.init.zeros_(self.lambda_b)

    def compute_lambda(self, x: Tensor | None = None) -> Float[Tensor, 1]:
        """Return the layer's lambda [1], in float32."""
        return self.lambda_a.float().exp() - self.lambda_b.float().exp() + self.lambda_init
