"""RMS norm of the last axis, with a backward that passes over memory a third as often as torch's on a CPU."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from diffvision.ops.attention.choice import in_forward_mode
from diffvision.ops.autocast import without_autocast

# Numbers up to which torch's call is faster without gradients.
SMALL = 2**18


def rms_norm(x: Float[Tensor, "... D"], weight: Float[Tensor, "D"], eps: float | None) -> Float[Tensor, "... D"]:
    """Return `x / sqrt(mean(x**2) + eps) * weight` over the last axis, in x's dtype.

    torch fuses this on CUDA, and torch.compile anywhere; on a CPU its backward is a dozen passes, which made the norm
    of the heads a twelfth of a whole attention layer's time at 8 x 197 tokens of width 768.

    Args:
        x: [..., D].
        weight: [D], cast to x's dtype.
        eps: added to the mean square; the dtype's machine epsilon if None, as in torch.

    Raises:
        ValueError: the weight has another length.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {tuple(weight.shape)} must be as long as x's last axis, x is {tuple(x.shape)}")
    weight = weight.to(x.dtype)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    # ONNX's TorchScript exporter knows neither torch's rms_norm nor functions of ours, which have no forward mode.
    if torch.jit.is_tracing():
        return _formula(x, weight, eps)
    ours = not torch.compiler.is_compiling() and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    # For forward alone an autograd function would cost five times torch's call, and small calls count in decoding.
    small = ours and not torch.is_grad_enabled() and x.numel() <= SMALL
    if not small and in_forward_mode():
        return _formula(x, weight, eps)
    if not ours or not x.numel():
        with without_autocast(x.device.type):  # CUDA's returns float32 for half precision, a CPU's does not
            return F.rms_norm(x, weight.shape, weight, eps)
    if x.dim() > 2 and not x.is_contiguous() and (tokens := x.transpose(-3, -2)).is_contiguous():
        # Heads [B, H, N, D] that lie in memory as [B, N, H, D]: a third of the time.
        return rms_norm(tokens, weight, eps).transpose(-3, -2)
    if small:
        return F.rms_norm(x, weight.shape, weight, eps)
    return _RMSNorm.apply(x, weight, eps) if torch.is_grad_enabled() else _forward(x, weight, eps)


def _formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


# Results are changed in place: memory that is newly taken costs more than a pass over it. Autocast is off, which would
# take sums of products in half precision.


class _RMSNorm(torch.autograd.Function):
    generate_vmap_rule = True  # torch.func requires this and a separate setup_context

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _forward(x, weight, eps)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        x, weight, ctx.eps = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        with without_autocast(x.device.type):
            # Computed again, which costs one pass, so that a second derivative sees that it depends on x.
            inverse = _inverse(x, ctx.eps)
            terms = grad * x
            grad_weight = inverse.reshape(1, -1) @ terms.reshape(-1, weight.shape[0])
            along = (terms @ weight).unsqueeze(-1) * inverse**2 / x.shape[-1]  # the part of the gradient along x
            del terms  # its memory is taken for what follows
            return torch.addcmul(grad * weight, x, along, value=-1).mul_(inverse), grad_weight.view(-1), None


def _forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    with without_autocast(x.device.type):
        unit = x * _inverse(x, eps)
        try:
            return unit.mul_(weight)
        except RuntimeError:  # under vmap over the weights alone, unit has no batch dimension to write to
            return unit * weight


def _inverse(x: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(x**2) + eps), [..., 1]."""
    return (torch.linalg.vecdot(x, x).unsqueeze(-1) / x.shape[-1] + eps).rsqrt()
