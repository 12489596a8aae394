"""Fused kernels in Triton: both maps in one pass, forward and backward, without a map in memory.

Triton and the kernels are imported by the first call that needs them. On a CPU they run only in Triton's interpreter
(TRITON_INTERPRET=1, set before triton is imported), to test the kernels.
"""

import importlib.util
import os

import torch
from torch import Tensor

from diffvision.ops.attention.operators import needs_gradients
from diffvision.ops.attention.problem import Problem
from diffvision.ops.attention.shared_memory import KIB, LEAST, compute_capability, shared_memory

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
    """Return why the kernels cannot run on a problem's device, or None."""
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
    if (capability := compute_capability()) < (8, 0):
        return f"it needs a CUDA device of capability 8.0 or more, this one has {capability[0]}.{capability[1]}"
    if (shared := shared_memory(torch.device("cuda"))) < LEAST:
        return f"its tiles need {LEAST // KIB} KiB of shared memory a program, this device allows {shared // KIB}"
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
    if few_queries and many_keys and not needs_gradients(q, k, v, lam):
        from diffvision.ops.attention.triton.decode import decode

        return decode(q, k, v, lam, causal=causal, mask=mask, scale=scale)
    return _call(q, k, v, lam, mask, None, None, queries, keys, causal, scale)


def diff_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """Arguments, shapes and result as `diffvision.ops.diff_attention_varlen`, already checked.

    Rows beyond the last sequence are zeros.
    """
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
    """Call the kernels; what they save is chosen by whether gradients are needed."""
    from diffvision.ops.attention.triton.ops import attention, fits_rows

    scale = q.shape[4] ** -0.5 if scale is None else float(scale)
    if scale < 0:  # the running maximum is taken before scaling
        q, scale = -q, -scale
    keep = "nothing"
    if needs_gradients(q, k, v, lam):
        keep = "rows" if fits_rows(q, k, v, longest_q, longest_k, backward=True) else "streaming"
    return attention(q, k, v, lam.float(), mask, cu_q, cu_k, longest_q, longest_k, causal, scale, keep)[0]
