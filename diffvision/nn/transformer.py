"""The block of the paper's decoder: RMSNorm, attention, RMSNorm, SwiGLU, no biases (arXiv 2410.05258 section 2.2).

The decoder itself is in `diffvision.models.language.decoder`.
"""

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

    def forward(self, x: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        """Map [..., dim] to [..., dim]."""
        x = cast_once(x)
        return self.down(F.silu(self.gate(x)) * self.up(x))


class DecoderBlock(nn.Module):
    """Pre-norm block: `y = x + attn(norm1(x)); y + mlp(norm2(y))`.

    Args:
        attn: the attention, of any variant.
        dim: width of the tokens.
        mlp_dim: width within the feed-forward.
        norm_eps: of both RMSNorms.
    """

    def __init__(
        self,
        attn: AttentionLayer,
        dim: int,
        mlp_dim: int,
        *,
        norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.norm1 = nn.RMSNorm(dim, eps=norm_eps, **factory_kwargs)
        self.attn = attn
        self.norm2 = nn.RMSNorm(dim, eps=norm_eps, **factory_kwargs)
        self.mlp = SwiGLU(dim, mlp_dim, **factory_kwargs)

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
