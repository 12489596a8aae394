"""RMS norm of the last axis, with a backward that passes over memory a third as often as torch's on a CPU."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Float[Tensor, "... D"], weight: Float[Tensor, "D"], eps: float | None) -> Float[Tensor, "... D"]:
    """`x / sqrt(mean(x**2) + eps) * weight` over the last axis, in x's dtype.

    torch fuses this on CUDA, and torch.compile anywhere; on a CPU its backward is a dozen passes, which made the norm
    of the heads a twelfth of a whole attention layer's time at 8 x 197 tokens of width 768.

    Args:
        x: [..., D].
        weight: [D], cast to x's dtype.
        eps: added to the mean square; the dtype's machine epsilon if None, as in torch.
    """
    weight = weight.to(x.dtype)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    ours = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    if ours and not torch.compiler.is_compiling() and x.numel():
        return _RMSNorm.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = torch.linalg.vecdot(x, x).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        unit = x * inverse
        terms = grad * unit
        grad_weight = terms.reshape(-1, len(weight)).sum(0)
        along = torch.matmul(terms, weight).div_(x.shape[-1]).unsqueeze(-1)  # the part of the gradient along x
        return (grad * weight).sub_(unit.mul_(along)).mul_(inverse), grad_weight, None
