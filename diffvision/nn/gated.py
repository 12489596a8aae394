"""Gated attention: a sigmoid gate on the output of plain attention, V1 or V2, right before its projection."""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from jaxtyping import Float
from torch import Tensor

from diffvision.nn.attention import Attention, AttentionLayer
from diffvision.nn.diff_attention import DiffAttention, DiffAttentionV2
from diffvision.nn.linear import Linear


class Gate(AttentionLayer):
    """A layer whose heads are multiplied by a gate of the query's token, after their norm.

        out = proj(head * sigmoid(gate(x)))

    The gate lets a token take little from all others, although the rows of a softmax sum to 1. In V1 and V2 it
    multiplies the difference. The arguments that are not named here are those of the layer without the gate.

    Args:
        gate: "element" for a number per channel of a head, as in timm, or "head" for one per head.

    Source: arXiv 2505.06708 (its position G1); with "element" `timm.layers.Attention(gated=True)`, weight by weight.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        gate: Literal["element", "head"] = "element",
        **settings: Any,
    ) -> None:
        if gate not in ("element", "head"):
            raise ValueError(f"gate must be 'element' or 'head', got {gate!r}")
        self._gate = gate
        super().__init__(dim, num_heads, num_kv_heads, **settings)

    def add_parameters(self, dim: int, factory_kwargs: dict[str, Any]) -> None:
        super().add_parameters(dim, factory_kwargs)
        rows = self.num_heads * (1 if self._gate == "head" else self.value_dim)
        self.gate = Linear(dim, rows, bias=self.q_proj.bias is not None, **factory_kwargs)

    @classmethod
    def extra_rows(cls, head_dim: int, **settings: Any) -> float:
        gate = 1 / cls.value_maps if settings.get("gate") == "head" else head_dim
        return super().extra_rows(head_dim) + gate

    def gates(self, x: Float[Tensor, "B N dim"]) -> Float[Tensor, "B H N 1"] | Float[Tensor, "B H N V"]:
        """Return the gates of each token and head, 0 to 1."""
        return self.gate(x).sigmoid().unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def modulate(self, heads: Tensor, x: Tensor) -> Tensor:
        return heads * self.gates(x)

    @classmethod
    @torch.no_grad()
    def from_standard(cls, layer: AttentionLayer, *, depth: int) -> Self:
        """Build the layer from a standard one, with the same function.

        A gate of the standard layer is kept. Otherwise gates are 1/2 (sigmoid of 0), and the projection is
        doubled.
        """
        new = super().from_standard(layer, depth=depth)
        if isinstance(layer, Gate):
            if layer.gate.out_features % (new.num_heads * new.value_dim) and new.num_heads != layer.num_heads:
                raise ValueError("V1 pairs heads, and each has a gate: adapt with method 'v2', or use gate='element'")
            new.gate = layer.gate
            return new
        for parameter in new.gate.parameters():
            parameter.zero_()
        new.proj.weight *= 2
        return new


class GatedAttention(Gate, Attention):
    """Plain attention with a gate."""

    variant, identifying_weight, new_parameters = "gated", "gate.weight", ("gate",)


class GatedDiffAttention(Gate, DiffAttention):
    """V1 with a gate after the norm of its heads and their factor."""

    variant, new_parameters = "v1_gated", ("gate", *DiffAttention.new_parameters)


class GatedDiffAttentionV2(Gate, DiffAttentionV2):
    """V2 with a gate on the difference."""

    variant, new_parameters = "v2_gated", ("gate", *DiffAttentionV2.new_parameters)
