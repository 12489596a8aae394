"""Fused kernels in Triton: both maps in one pass, forward and backward, without a map in memory.

Triton and the kernels are imported by the first call that needs them. On a CPU they run only in Triton's interpreter
(TRITON_INTERPRET=1, set before triton is imported), to test the kernels.
"""

import importlib.util
import os

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffvision.ops.attention.problem import Problem

MAX_HEAD_DIM, MAX_VALUE_DIM = 128, 256  # what one program's tiles may hold
DECODE_MAX_QUERIES, DECODE_MIN_KEYS = 16, 512  # few queries, many keys: the keys are split among programs
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def limit(problem: Problem) -> str | None:
    """Return why this backend cannot take the problem, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if (reason := _device_limit(problem)) is not None:
        return reason
    if problem.dtype not in DTYPES:
        return f"its kernels compute in float32, bfloat16 or float16, not {problem.dtype}"
    if problem.head_dim > MAX_HEAD_DIM or problem.value_dim > MAX_VALUE_DIM:
        return (
            f"head size {problem.head_dim} and value size {problem.value_dim} go beyond {MAX_HEAD_DIM} and "
            f"{MAX_VALUE_DIM}, the limits of its tiles"
        )
    if problem.dropout > 0:
        return f"it has no dropout, got {problem.dropout}"
    return None


def _device_limit(problem: Problem) -> str | None:
    if problem.device == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "it needs a CUDA device (on a CPU it runs only in Triton's interpreter, TRITON_INTERPRET=1)"
        if problem.dtype == torch.bfloat16:
            return "bfloat16 needs a GPU: the interpreter's bfloat16 products are wrong"
        return None
    if problem.device != "cuda":
        return f"it needs a CUDA device, not {problem.device}"
    if torch.version.hip is not None:
        return "its kernels were never run on an AMD GPU"
    if not torch.cuda.is_available():
        return "no CUDA device is available"
    if (capability := torch.cuda.get_device_capability()) < (8, 0):
        return f"it needs a CUDA device of capability 8.0 or more, this one has {capability[0]}.{capability[1]}"
    return None


def diff_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    *,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
    dropout: float = 0.0,
) -> Tensor:
    """Arguments, shapes and result as `diffvision.ops.diff_attention`, already checked."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy, which takes long

    lam = lam.reshape((1,) * (4 - lam.dim()) + lam.shape)
    queries, keys = q.shape[3], k.shape[3]
    few_queries = statically_known_true(queries <= DECODE_MAX_QUERIES)
    many_keys = statically_known_true(keys >= DECODE_MIN_KEYS)
    if few_queries and many_keys and not _wants_gradients(q, k, v, lam):
        from diffvision.ops.attention.triton.decode import decode

        return decode(q, k, v, lam, causal=causal, mask=mask, scale=scale)
    return _call(q, k, v, lam, mask, None, None, queries, keys, causal, scale)


def diff_attention_varlen(
    q: Float[Tensor, "T H 2 D"],
    k: Float[Tensor, "S Hk P D"],
    v: Float[Tensor, "S Hk V"],
    lam: Float[Tensor, "..."],
    cu_seqlens_q: Int[Tensor, "B+1"],
    cu_seqlens_k: Int[Tensor, "B+1"],
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Float[Tensor, "T H V"]:
    """Compute differential attention of packed sequences; no sequence attends to another.

    Args:
        q: queries of all sequences [T, H, 2, D].
        k: keys [S, Hk, 2, D], or [S, Hk, 1, D] where both maps share them.
        v: values [S, Hk, V].
        lam: broadcastable to [T, H, 1].
        cu_seqlens_q: int32 on q's device; sequence i is rows cu_seqlens_q[i] to cu_seqlens_q[i + 1].
        cu_seqlens_k: the same of keys and values.
        max_seqlen_q: the largest number of queries in a sequence. It is not checked: that would wait for the device.
        max_seqlen_k: the largest number of keys in a sequence, not checked either.
        causal: aligned to each sequence's last key.
        scale: of the logits; D**-0.5 if None.

    Returns:
        [T, H, V] in q's dtype; zeros in rows beyond the last sequence.

    Raises:
        ValueError: shapes do not fit, or these kernels cannot take the call.
    """
    lam = torch.as_tensor(lam, dtype=torch.float32, device=q.device)
    _check_packed(q, k, v, lam, cu_seqlens_q, cu_seqlens_k, causal)
    lam = lam.reshape((1,) * (3 - lam.dim()) + lam.shape)
    out = _call(
        q.permute(1, 2, 0, 3)[None],
        k.permute(1, 2, 0, 3)[None],
        v.transpose(0, 1)[None],
        lam.transpose(0, 1)[None],
        None,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        causal,
        scale,
    )
    return out[0].transpose(0, 1)


def _call(q, k, v, lam, mask, cu_q, cu_k, longest_q, longest_k, causal, scale) -> Tensor:
    from diffvision.ops.attention.triton.ops import attention, fits_rows

    scale = q.shape[4] ** -0.5 if scale is None else float(scale)
    if scale < 0:  # the running maximum is taken before scaling
        q, scale = -q, -scale
    keep = "nothing"
    if _wants_gradients(q, k, v, lam):
        keep = "rows" if fits_rows(q, k, v, longest_q, longest_k) else "streaming"
    return attention(q, k, v, lam.float(), mask, cu_q, cu_k, longest_q, longest_k, causal, scale, keep)[0]


def _wants_gradients(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _check_packed(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, cu_q: Tensor, cu_k: Tensor, causal: bool) -> None:
    shapes = f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 3 or q.shape[2] != 2 or k.shape[2] not in (1, 2):
        raise ValueError(f"expected q [T, H, 2, D], k [S, Hk, 2 or 1, D] and v [S, Hk, V]; {shapes}")
    if k.shape[:2] != v.shape[:2] or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise ValueError(f"k and v need the same rows and heads, q and k one head size, H a multiple of Hk; {shapes}")
    if not (q.dtype == k.dtype == v.dtype):
        raise ValueError(f"q, k and v need one dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if cu.dtype != torch.int32 or cu.dim() != 1 or cu.shape != cu_q.shape or cu.device != q.device:
            raise ValueError(f"{name} must be int32 [B + 1] on {q.device}, got {cu.dtype} {tuple(cu.shape)}")
    shape, target = tuple(lam.shape), (q.shape[0], q.shape[1], 1)
    if len(shape) > 3 or any(a not in (1, b) for a, b in zip(shape[::-1], target[::-1], strict=False)):
        raise ValueError(f"lam of shape {shape} does not broadcast to {list(target)}")
    rows, heads, _, head_dim = q.shape
    problem = Problem(
        1, heads, k.shape[1], rows, k.shape[0], head_dim, v.shape[2], k.shape[2] == 1, causal,
        dtype=q.dtype, device=q.device.type,
    )  # fmt: skip
    if (reason := limit(problem)) is not None:
        raise ValueError(f"diff_attention_varlen cannot take this call: {reason}")
