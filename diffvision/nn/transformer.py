"""The block of the paper's decoder: RMSNorm, attention, RMSNorm, SwiGLU, no biases (arXiv 2410.05258 section 2.2).

Its feed-forward may have another activation: `FEED_FORWARD` is the table of them. The decoder itself is in
`diffvision.models.language.decoder`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from diffvision import ops
from diffvision.nn.attention import AttentionLayer, Cache, Rotation
from diffvision.nn.linear import Linear
from diffvision.ops.autocast import cast_once

torch.fx.wrap("cast_once")  # one node to a tracer: autocast is that of the call


class SwiGLU(nn.Module):
    """LLaMA's feed-forward: `down(silu(gate(x)) * up(x))`, without biases (arXiv 2002.05202).

    Args:
        dim: width of the tokens, in and out.
        hidden_dim: width between; 8/3 of dim has the parameters of a plain MLP of four times the width.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory_kwargs: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.gate = Linear(dim, hidden_dim, **factory_kwargs)
        self.up = Linear(dim, hidden_dim, **factory_kwargs)
        self.down = Linear(hidden_dim, dim, **factory_kwargs)
        self.act: Callable[[Tensor], Tensor] = F.silu

    def forward(self, x: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        """Map [..., dim] to [..., dim]."""
        x = cast_once(x)
        return self.down(self.act(self.gate(x)) * self.up(x))


class PolyNorm(nn.Module):
    """Learned polynomial of normalised powers: `w1 norm(x^3) + w2 norm(x^2) + w3 norm(x) + b`.

    `norm(z) = z / sqrt(mean(z^2) + eps)` over the last axis. The weight [3] starts at 1/3 and the bias [1] at 0.

    Args:
        eps: added to the mean squares.

    Source: arXiv 2411.03884 (PolyCom); the order of the weights is that of its authors' code and of Motif's.
    """

    def __init__(
        self, eps: float = 1e-6, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(3, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to 1/3 and the bias to 0."""
        nn.init.constant_(self.weight, 1 / 3)
        nn.init.zeros_(self.bias)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        """Map [..., D] to [..., D] of the same dtype; the arithmetic is in float32 or better, for the sixth powers."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        with torch.autocast(x.device.type, enabled=False):
            one, two, three = (
                weight * F.rms_norm(power, power.shape[-1:], eps=self.eps)
                for weight, power in zip(self.weight.to(wide.dtype), (wide**3, wide**2, wide), strict=True)
            )
            return (one + two + three + self.bias.to(wide.dtype)).to(x.dtype)


class PolyNormGLU(SwiGLU):
    """Motif's feed-forward: `down(PolyNorm(gate(x)) * up(x))`, the linear maps without biases.

    The arguments are those of `SwiGLU`. Source: arXiv 2508.09148; MotifTechnologies/vllm.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, hidden_dim, device=device, dtype=dtype)
        self.act = PolyNorm(device=device, dtype=dtype)


FEED_FORWARD: dict[str, type[SwiGLU]] = {"silu": SwiGLU, "poly_norm": PolyNormGLU}
"""Activation -> the feed-forward that has it."""


class DecoderBlock(nn.Module):
    """Pre-norm block: `y = x + attn(norm1(x)); y + mlp(norm2(y))`.

    Args:
        attn: the attention, of any variant.
        dim: width of the tokens.
        mlp_dim: width within the feed-forward.
        activation: key of `FEED_FORWARD`.
        norm_eps: of both RMSNorms.
    """

    def __init__(
        self,
        attn: AttentionLayer,
        dim: int,
        mlp_dim: int,
        *,
        activation: str = "silu",
        norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.norm1 = nn.RMSNorm(dim, eps=norm_eps, **factory_kwargs)
        self.attn = attn
        self.norm2 = nn.RMSNorm(dim, eps=norm_eps, **factory_kwargs)
        self.mlp = FEED_FORWARD[activation](dim, mlp_dim, **factory_kwargs)

    def forward(
        self,
        x: Float[Tensor, "B N dim"],
        attn_mask: Tensor | ops.Documents | None = None,
        is_causal: bool = True,
        *,
        cache: Cache | None = None,
        rotation: Rotation | None = None,
    ) -> Float[Tensor, "B N dim"]:
        """Map [B, N, dim] to [B, N, dim]; the arguments are those of `AttentionLayer.forward`."""
        x = x + self.attn(self.norm1(x), attn_mask, is_causal, cache=cache, rotation=rotation)
        return x + self.mlp(self.norm2(x))
