"""A kernel in C for CPUs, which this machine's compiler builds: a block's maps, difference and gradients in one pass.

`kernel.c` is the computation, `build.py` compiles and loads it; here it becomes operations of torch. `"auto"` takes it
only where `diffvision tune` found it right and the fastest. Half precision is computed in float32 and rounded once.
"""

import ctypes

import torch
from torch import Tensor

from diffvision.ops.attention import operators
from diffvision.ops.attention.native.build import kernel, reason_against
from diffvision.ops.attention.problem import Problem

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Query rows of a block, so many that a map has about this many scores: the fastest, or nearly, from 77 to 4,096 keys
# when 64, 128 and 256 rows were tried on one core. More rows of a causal call compute more that is masked.
BLOCK_SCORES = 2**18
LEAST_ROWS, MOST_ROWS = 64, 256
CAUSAL_BLOCKS = 8

# Up to here the maps are kept for backward, as in `blocked`: it is an eighth faster, for less memory than the formula.
KEEP_MAPS_MAX_KEYS = 768


def limit(problem: Problem) -> str | None:
    """Return why this backend cannot take the problem, or None."""
    if problem.device != "cpu":
        return f"it is for tensors on a CPU, these are on {problem.device}"
    if problem.dtype not in DTYPES:
        return f"dtype {problem.dtype}: it takes float32, float16 and bfloat16"
    if problem.dropout:
        return f"it draws no dropout, got {problem.dropout}"
    return reason_against() or None


def diff_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    *,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """Arguments, shapes and result as `diffvision.ops.diff_attention`, already checked."""
    return operators.attend(
        _forward, q, k, v, lam, causal=causal, mask=mask, scale=scale, keep_up_to=KEEP_MAPS_MAX_KEYS
    )


class _Call(ctypes.Structure):
    """The structure of the same name in `kernel.c`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "key_maps", "queries", "keys")),
        *((name, ctypes.c_int64) for name in ("head_dim", "value_dim", "rows", "threads", "causal")),
        *((f"{name}_strides", ctypes.c_int64 * axes) for name, axes in (("q", 4), ("k", 4), ("v", 3), ("lam", 3))),
        *((f"{name}_strides", ctypes.c_int64 * axes) for name, axes in (("mask", 4), ("out", 3))),
        *((f"grad_{name}_strides", ctypes.c_int64 * axes) for name, axes in (("q", 4), ("k", 4), ("v", 3))),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "lam", "mask", "logs", "kept", "scratch", "out")),
        *((name, ctypes.c_void_p) for name in ("grad_q", "grad_k", "grad_v", "grad_lam", "product")),
    ]


def _call(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, **others: Tensor
) -> tuple[_Call, list[Tensor]]:
    """Return the kernel's argument, and the tensors that it has the addresses of, which must live as long."""
    (batch, heads, _, queries, size), (kv_heads, key_maps, keys) = q.shape, k.shape[1:4]
    rows = min(MOST_ROWS, max(LEAST_ROWS, BLOCK_SCORES // keys))
    if causal:
        rows = min(rows, max(LEAST_ROWS, queries // CAUSAL_BLOCKS))
    rows = min(rows, queries)
    tasks = batch * kv_heads if "grad_k" in others else batch * heads * -(-queries // rows)
    threads = min(tasks, torch.get_num_threads())
    call = _Call(batch, heads, kv_heads, key_maps, queries, keys, size, v.shape[3], rows, threads, causal)
    call.scale, call.product = scale, kernel().sgemm
    given = {"q": _rows_of(q), "k": _rows_of(k), "v": _rows_of(v), **others}
    given["scratch"] = q.new_empty(threads * 4 * rows * keys)
    if mask is not None:
        given["mask"] = mask.expand(batch, heads, queries, keys)
    for name, tensor in given.items():
        setattr(call, name, tensor.data_ptr())
        if hasattr(call, f"{name}_strides"):
            strides = getattr(call, f"{name}_strides")
            strides[:] = tensor.stride()[: len(strides)]
    return call, list(given.values())


def _rows_of(x: Tensor) -> Tensor:
    """Return a tensor whose last two axes are a row-major matrix, as the matrix product wants them."""
    is_matrix = x.stride(-1) == 1 and x.shape[-1] <= x.stride(-2) < 2**31
    # Not `contiguous`, which leaves the stride of an axis of one as it is.
    return x if is_matrix else x.clone(memory_format=torch.contiguous_format)


def _is_empty(q: Tensor, k: Tensor) -> bool:
    return q.numel() == 0 or k.numel() == 0


@torch.library.custom_op("diffvision::diff_attention_native", mutates_args=(), device_types="cpu")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor, mask: Tensor | None, causal: bool, scale: float, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `diff_attention`, for lam [B, H, M, 1], the logarithms of the sums of exponentials, and the maps."""
    out, logs, kept = _new_outputs(q, k, v, keep)
    if _is_empty(q, k):
        return out.zero_(), logs, kept
    maps = {"kept": kept} if keep else {}
    call, _held = _call(q, k, v, mask, causal, scale, lam=lam, logs=logs, out=out, **maps)
    kernel().forward(ctypes.byref(call))
    return out, logs, kept


@torch.library.custom_op("diffvision::diff_attention_native_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    mask: Tensor | None,
    logs: Tensor,
    kept: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and lam (expanded)."""
    grads = _new_gradients(q, k, v)
    if _is_empty(q, k):
        for empty in grads:
            empty.zero_()
        return grads
    made = dict(zip(("grad_q", "grad_k", "grad_v", "grad_lam"), grads, strict=True))
    maps = {"kept": kept} if kept.numel() else {}
    call, _held = _call(q, k, v, mask, causal, scale, lam=lam, logs=logs, out=_rows_of(grad), **made, **maps)
    kernel().backward(ctypes.byref(call))
    return grads


def _new_outputs(q: Tensor, k: Tensor, v: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for the output, the logarithms of the sums [B, H, 2, M], and the maps."""
    logs = q.new_empty(q.shape[0], q.shape[1], 2, q.shape[3])
    return operators.new_output(q, v), logs, q.new_empty(logs.numel() * k.shape[3] if keep else 0)


def _new_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return memory for the gradients, those of q, k and v with a token's heads side by side, as projections write."""
    made = []
    for like in (q, k, v):
        heads, tokens = like.shape[1:-2], like.shape[-2]
        order = like.new_empty(like.shape[0], tokens, *heads, like.shape[-1])
        made.append(order.movedim(1, -2))
    return made[0], made[1], made[2], q.new_empty(q.shape[0], q.shape[1], q.shape[3], 1)


operators.register("diff_attention_native", _forward, _backward, _new_outputs, _new_gradients)
