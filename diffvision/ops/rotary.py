"""Rotary position embedding on interleaved pairs (0, 1), (2, 3), ... as the paper's code has it.

Source: arXiv 2104.09864 equation 34; microsoft/unilm Diff-Transformer/kernel/rotary.py with interleaved=True.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def rotary_tables(
    positions: Int[Tensor, "... N"], head_dim: int, theta: float = 10_000.0
) -> tuple[Float[Tensor, "... N half"], Float[Tensor, "... N half"]]:
    """Return cosines and sines of every position's angles.

    Args:
        positions: integer positions [..., N], counted from 0.
        head_dim: D of the heads to rotate (one map's), even.
        theta: base of the frequencies, theta**(-2i / D).

    Returns:
        cos and sin, float32 [..., N, D / 2] (float64 inside, so that far positions stay exact).

    Raises:
        ValueError: an odd head_dim.
    """
    if head_dim % 2:
        raise ValueError(f"rotary embedding turns pairs and needs an even head_dim, got {head_dim}")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions.double().unsqueeze(-1) * theta**-exponents
    return angles.cos().float(), angles.sin().float()


def apply_rotary(
    x: Float[Tensor, "... N D"], cos: Float[Tensor, "... N half"], sin: Float[Tensor, "... N half"]
) -> Float[Tensor, "... N D"]:
    """Rotate each pair (2i, 2i + 1) of x by its position's angle i, in float32 or better; return x's dtype."""
    if (
        # One complex product has half the calls, which count in a step of decoding. Graphs and gradients do without
        # complex numbers, which inductor and exports take badly.
        not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and x.dtype == cos.dtype == torch.float32
        and x.device.type == "cpu"
        and x.is_contiguous()
        and x.storage_offset() % 2 == 0
    ):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).to(x.dtype)
