"""The kernels as operators of torch: whole in compiled and exported graphs, with fake shapes and a gradient."""

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from diffvision.ops.attention import operators
from diffvision.ops.attention.shared_memory import is_hopper, shared_memory
from diffvision.ops.attention.triton import launch
from diffvision.ops.attention.triton.launch import Inputs, Sequences

# `keep` names what the forward operator saves for its backward: "nothing" in inference, where the kernel is chosen by
# length when it runs; "rows" is lse, for the whole-row kernels; "streaming" is lse and the second map's product.


@torch.library.custom_op("diffvision::triton_attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    mask: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    longest_q: int,
    longest_k: int,
    causal: bool,
    scale: float,
    keep: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out [B, H, M, V], lse [B, H, 2, M] float32 and the second map's product [B, H, M, V], or empty ones."""
    out, lse, o2 = _forward_empty(q, v, cu_q is not None, keep)
    x = _inputs(q, k, v, lam, mask, cu_q, cu_k, longest_q, longest_k, causal, scale)
    whole = keep == "rows" or (keep == "nothing" and fits_rows(q, k, v, longest_q, longest_k, backward=False))
    kept = None if keep == "nothing" else lse
    if whole:
        launches = launch.forward_rows(x, out, kept)
    else:
        launches = launch.forward_streaming(x, out, o2 if keep == "streaming" else None, kept)
    launch.run(launches, q.device)
    return out, lse, o2


@attention.register_fake
def _(q, k, v, lam, mask, cu_q, cu_k, longest_q, longest_k, causal, scale, keep):
    return _forward_empty(q, v, cu_q is not None, keep)


@torch.library.custom_op("diffvision::triton_attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    mask: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    out: Tensor,
    lse: Tensor,
    o2: Tensor,
    longest_q: int,
    longest_k: int,
    causal: bool,
    scale: float,
    keep: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv and deltas [B, H, 2, M] float32, whose second plane is D2 = -dlam of each row."""
    packed = cu_q is not None
    dq, dk, dv, deltas = _backward_empty(q, k, v, packed)
    x = _inputs(q, k, v, lam, mask, cu_q, cu_k, longest_q, longest_k, causal, scale)
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    if keep == "rows":
        launches = launch.backward_rows(x, grad, lse, deltas, (dq, dk, dv))
    else:
        launches = launch.backward_streaming(x, grad, out, o2, lse, deltas, (dq, dk, dv))
    launch.run(launches, q.device)
    return dq, dk, dv, deltas


@attention_backward.register_fake
def _(grad, q, k, v, lam, mask, cu_q, cu_k, out, lse, o2, longest_q, longest_k, causal, scale, keep):
    return _backward_empty(q, k, v, cu_q is not None)


def _setup_context(ctx, inputs, output):
    q, k, v, lam, mask, cu_q, cu_k, *ctx.settings = inputs
    out, lse, o2 = output
    ctx.mark_non_differentiable(lse, o2)
    ctx.set_materialize_grads(False)
    # The whole-row backward needs no output: not saving it lets the caller's layer free it.
    ctx.save_for_backward(q, k, v, lam, mask, cu_q, cu_k, out if ctx.settings[-1] == "streaming" else None, lse, o2)


def _backward(ctx, grad, *_):
    q, k, v, lam, mask, cu_q, cu_k, out, lse, o2 = ctx.saved_tensors
    no_gradients = (None,) * 8
    if grad is None:
        return None, None, None, None, *no_gradients
    out = o2 if out is None else out  # unread
    dq, dk, dv, deltas = attention_backward(grad, q, k, v, lam, mask, cu_q, cu_k, out, lse, o2, *ctx.settings)
    dlam = -deltas[:, :, 1, :, None]
    return dq, dk, dv, dlam.sum_to_size(lam.shape), *no_gradients


attention.register_autograd(_backward, setup_context=_setup_context)
operators.count(torch.ops.diffvision.triton_attention, torch.ops.diffvision.triton_attention_backward)


def fits_rows(q: Tensor, k: Tensor, v: Tensor, longest_q: int, longest_k: int, *, backward: bool) -> bool:
    """Whether the whole-row kernels take the call: short keys, and few enough queries for one program a head.

    A symbolic length is not short: its graph must serve every length, as the streaming kernels do.
    """
    sizes = (q.shape[4], v.shape[3], 1 if k.shape[2] == 1 else 2, q.element_size())
    limit = launch.rows_limit(*sizes, shared_memory(q.device), backward=backward)
    return statically_known_true(longest_k <= limit) and statically_known_true(longest_q <= 1024)


def _forward_empty(q: Tensor, v: Tensor, packed: bool, keep: str) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate results. Packed sequences may end before their tensor does: it is zeros there."""

    def make() -> Tensor:
        made = operators.new_output(q, v)
        return made.zero_() if packed else made

    out = make()
    o2 = make() if keep == "streaming" else q.new_empty(0)
    lse = (q.new_zeros if packed else q.new_empty)(0 if keep == "nothing" else q.shape[:4], dtype=torch.float32)
    return out, lse, o2


def _backward_empty(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate gradients in the memory order of their inputs, unless the last axis is scattered."""

    def like(t: Tensor) -> Tensor:
        make = torch.zeros_like if packed else torch.empty_like
        made = make(t)
        return made if made.stride(-1) == 1 else make(t, memory_format=torch.contiguous_format)

    deltas = (q.new_zeros if packed else q.new_empty)(q.shape[:4], dtype=torch.float32)
    return like(q), like(k), like(v), deltas


def _inputs(q, k, v, lam, mask, cu_q, cu_k, longest_q, longest_k, causal, scale) -> Inputs:
    """Return the tensors as the kernels read them: last dimension contiguous, lambda and mask expanded."""
    q, k, v = (t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in (q, k, v))
    lam = lam.expand(q.shape[0], q.shape[1], q.shape[3], 1)
    if mask is not None:
        mask = mask.expand(q.shape[0], q.shape[1], q.shape[3], k.shape[3])
    packed = None if cu_q is None else Sequences(cu_q, cu_k, longest_q, longest_k)
    return Inputs(q, k, v, lam, mask, causal, scale, shared_memory(q.device), is_hopper(q.device), packed)
