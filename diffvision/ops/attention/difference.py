"""The difference of two maps' outputs, for the backends that compute each map by a library's kernel."""

import torch
from torch import Tensor


def subtract(one: Tensor, two: Tensor, lam: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `one - lam * two` in a dtype; half precision is computed in float32 and rounded once.

    Args:
        one: the first map's output [B, H, M, V], or [T, H, V].
        two: the second map's.
        lam: float32 or better, broadcastable to them.
        dtype: of the result.
    """
    if one.dtype != dtype or dtype == lam.dtype or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return _formula(one, two, lam).to(dtype)
    return _Difference.apply(one, two, lam)


def _formula(one: Tensor, two: Tensor, lam: Tensor) -> Tensor:
    return one - lam * two


class _Difference(torch.autograd.Function):
    """The formula without float32 copies of its inputs, which on CUDA are most of its memory traffic."""

    @staticmethod
    def forward(one: Tensor, two: Tensor, lam: Tensor) -> Tensor:
        return torch.addcmul(one, two, lam, value=-1, out=torch.empty_like(one))

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        two, lam = ctx.saved_tensors
        grad_lam = -(grad.to(lam.dtype) * two).sum_to_size(lam.shape) if ctx.needs_input_grad[2] else None
        return grad, (grad * -lam).to(grad.dtype), grad_lam

    @staticmethod
    def vmap(info, in_dims, one: Tensor, two: Tensor, lam: Tensor) -> tuple[Tensor, int]:
        return torch.func.vmap(_formula, in_dims)(one, two, lam).to(one.dtype), 0
