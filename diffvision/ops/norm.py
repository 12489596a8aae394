"""RMS norm over the last axis; its backward pass reads memory a third as often as torch's on a CPU."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad

from diffvision.ops.autocast import without_autocast

# Types of devices whose autocast leaves torch's call alone; CUDA's returns float32 for half precision.
LEFT_ALONE = ("cpu",)
# Numbers up to which torch's call is faster, without gradients and with them.
SMALL, SMALL_TRAINED = 2**18, 2**15


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
    if torch.compiler.is_compiling():
        with without_autocast(x.device.type):
            return F.rms_norm(x, weight.shape, weight, eps)
    if x.dim() > 2 and not x.is_contiguous() and (tokens := x.transpose(-3, -2)).is_contiguous():
        # Heads [B, H, N, D] that lie in memory as [B, N, H, D]: torch would copy them, and the result once more.
        return rms_norm(tokens, weight, eps).transpose(-3, -2)
    ours = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    if forward_ad._current_level >= 0:  # torch.func.jvp, which operators of ours and of CUDA do not know
        return _formula(x, weight, eps)
    # An autograd function costs 0.1 ms by itself, and small calls count in decoding.
    if ours and x.numel() > (SMALL_TRAINED if torch.is_grad_enabled() else SMALL):
        return _RMSNorm.apply(x, weight, eps) if torch.is_grad_enabled() else _forward(x, weight, eps)
    if x.device.type in LEFT_ALONE:
        return F.rms_norm(x, weight.shape, weight, eps)
    with without_autocast(x.device.type):
        return F.rms_norm(x, weight.shape, weight, eps)


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
