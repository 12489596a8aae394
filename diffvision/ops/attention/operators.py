"""Shared code of backends that register operators with torch: arguments, fake shapes, gradients and FLOPs.

torch's `FlopCounterMode` cannot look into an operator. The FLOPs are those of `eager`: dense, whether causal or masked
or not, and without what a backward pass computes again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


def attend(
    forward: Callable[..., tuple[Tensor, ...]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    *,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
    keep_up_to: int,
) -> Tensor:
    """Return the output of a CPU operator; half precision is computed in float32 and rounded once.

    `forward` takes q, k, v, lam [B, H, M, 1], mask, causal, scale, and whether to keep the maps, which it does for rows
    of at most `keep_up_to` keys. The other arguments are those of a backend's `diff_attention`.
    """
    work = torch.promote_types(q.dtype, torch.float32)
    scale = q.shape[4] ** -0.5 if scale is None else scale
    lam = lam.to(work).expand(q.shape[0], q.shape[1], q.shape[3], 1)
    keep = needs_gradients(q, k, v, lam) and k.shape[3] <= keep_up_to
    return forward(q.to(work), k.to(work), v.to(work), lam, mask, causal, scale, keep)[0].to(q.dtype)


def needs_gradients(*tensors: Tensor) -> bool:
    """Return whether a gradient of any tensor is recorded."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def new_output(q: Tensor, v: Tensor) -> Tensor:
    """Return an uninitialised [B, H, M, V] in the memory order [B, M, H, V], which merges heads without a copy."""
    (batch, heads, _, queries, _), size = q.shape, v.shape[3]
    # Not a transposed tensor: autograd would take it for a view, and refuse to change it in place.
    return q.new_empty_strided((batch, heads, queries, size), (queries * heads * size, size, heads * size, 1))


def register(
    name: str,
    forward: Any,
    backward: Any,
    outputs: Callable[..., tuple[Tensor, ...]],
    gradients: Callable[..., tuple[Tensor, ...]],
) -> None:
    """Give the two operators of a CPU backend, which `attend` calls, fake shapes, a gradient and a count of FLOPs.

    `backward` takes the gradient, forward's tensors and what it returned behind the output, causal and the scale.
    `outputs(q, k, v, keep)` and `gradients(q, k, v)` return empty tensors like the operators' results.
    """

    def save(ctx, inputs, output) -> None:
        q, k, v, lam, mask, ctx.causal, ctx.scale, _ = inputs
        ctx.save_for_backward(q, k, v, lam, mask, *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # zeros as large as the kept maps

    def differentiate(ctx, grad, *_):
        if grad is None:
            return (None,) * 8
        return *backward(grad, *ctx.saved_tensors, ctx.causal, ctx.scale), None, None, None, None

    forward.register_fake(lambda q, k, v, lam, mask, causal, scale, keep: outputs(q, k, v, keep))
    backward.register_fake(lambda grad, q, k, v, *_: gradients(q, k, v))
    forward.register_autograd(differentiate, setup_context=save)
    operators = torch.ops.diffvision
    register_flop_formula(getattr(operators, name), get_raw=True)(_count)
    register_flop_formula(getattr(operators, f"{name}_backward"), get_raw=True)(
        lambda grad, *inputs, **others: 2 * _count(*inputs, **others)
    )


def _count(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """Return 2 FLOPs a multiply-add of two maps' logits and of one product with the values."""
    batch, heads, maps, queries, size = q.shape
    pairs = batch * queries * k.shape[3]
    return 2 * pairs * heads * (maps * size + v.shape[3])
