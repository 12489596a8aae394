"""Two maps' outputs and their difference, for the backends that compute a map by a library's kernel."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

AT_RISK = ("cuda",)  # types of devices on which a kernel may misread a gradient (see `in_one_layout`)


def compute_maps(attend: Callable[[Tensor, Tensor], Tensor], q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return each map's output by `attend(queries, keys)`: one call where the maps share their key, else two.

    Heads are axis 1, the maps of q and k axis 2.
    """
    if k.shape[2] == 1:  # a head's two maps become adjacent heads, which read the same key/value head
        first, second = attend(q.flatten(1, 2), k.squeeze(2)).unflatten(1, (-1, 2)).unbind(2)
        return first, second
    (q1, q2), (k1, k2) = q.unbind(2), k.unbind(2)
    return attend(q1, k1), attend(q2, k2)


def unbind_maps(t: Tensor) -> tuple[Tensor, ...]:
    """Return the maps [B, H, N, D] of queries or keys [B, H, P, N, D].

    Their gradient is one copy, in the memory order of a projection [B, N, H, P, D]. That of an index would be a tensor
    of zeros for each map, and their sum.
    """
    return tuple(one.transpose(1, 2) for one in t.permute(0, 3, 1, 2, 4).unbind(3))


def widen(t: Tensor, size: int) -> Tensor:
    """Pad the last axis with zeros to a size."""
    return t if t.shape[-1] == size else F.pad(t, (0, size - t.shape[-1]))


def in_one_layout(out: Tensor) -> Tensor:
    """Return a map's output whose gradient will reach the kernel in the memory order [B, N, H, V], whatever follows.

    cuDNN's backward pass keeps a plan that holds the strides of the output's gradient, and finds it by the sizes and
    the strides of queries, keys and values alone (`run_cudnn_SDP_bprop` in torch's aten/src/ATen/native/cudnn/MHA.cpp,
    with cuDNN 9.5.1 and later). A second gradient in another layout is then read with the strides of the first: on an
    H100 and an H200, with torch 2.11, the gradients of a DINT layer were wrong by 12 to 72%.
    """
    return _OneLayout.apply(out) if _is_at_risk(out) and out.requires_grad else out


def _is_at_risk(out: Tensor) -> bool:
    return out.device.type in AT_RISK and out.itemsize == 2 and out.dim() == 4


def _by_token(grad: Tensor) -> Tensor:
    """[B, H, N, V] in the memory order of a projection's input: no copy where it has it, as behind a layer's heads."""
    return grad.transpose(1, 2).contiguous().transpose(1, 2)


class _OneLayout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return _by_token(grad)


def subtract(one: Tensor, two: Tensor, lam: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `one - lam * two` in a dtype; half precision is computed in float32 and rounded once.

    Args:
        one: the first map's output [B, H, M, V], or [T, H, V].
        two: the second map's.
        lam: float32 or better, broadcastable to them.
        dtype: of the result.
    """
    if one.dtype == dtype == lam.dtype:
        return torch.addcmul(one, two, lam, value=-1)
    if one.dtype != dtype or torch.compiler.is_compiling() or torch.jit.is_tracing():
        one, two = in_one_layout(one), in_one_layout(two)
        return torch.addcmul(one, two, lam, value=-1).to(dtype)
    return _Difference.apply(one, two, lam)


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
        grad = _by_token(grad) if _is_at_risk(grad) else grad
        grad_lam = -(grad.to(lam.dtype) * two).sum_to_size(lam.shape) if ctx.needs_input_grad[2] else None
        return grad, (grad * -lam).to(grad.dtype), grad_lam

    @staticmethod
    def vmap(info, in_dims, one: Tensor, two: Tensor, lam: Tensor) -> tuple[Tensor, int]:
        return torch.func.vmap(lambda one, two, lam: one - lam * two, in_dims)(one, two, lam).to(one.dtype), 0
