"""torch's attention over packed sequences, `torch.nn.attention.varlen`: its flash kernel, without a mask.

It takes one size for queries, keys and values: they are widened with zeros. cuDNN's kernel, which takes others, is
avoided for the reason that `sdpa` gives.
"""

import importlib.util
import inspect
from functools import cache

import torch
from torch import Tensor

from diffvision.ops.attention.difference import compute_maps, subtract, widen
from diffvision.ops.attention.kernels import compute_capability, is_enabled, without_cudnn
from diffvision.ops.attention.problem import Problem, is_grouped

DTYPES = (torch.float16, torch.bfloat16)
MAX_SIZE = 256  # of a head in the flash kernel
NEEDED = ("scale", "window_size", "enable_gqa")  # arguments that earlier releases lack


def limit(problem: Problem) -> str | None:
    """Return why this backend cannot take the problem, or None."""
    p = problem
    if not p.packed:
        return "it takes packed documents alone; use sdpa, or pass Documents as mask"
    if p.device != "cuda":
        return f"torch's varlen attention runs on cuda, not on {p.device}"
    if p.dtype not in DTYPES:
        return f"dtype {p.dtype}: it takes float16 and bfloat16; cast, or use autocast"
    if p.dropout:
        return "it draws no dropout"
    if max(p.head_dim, p.value_dim) > MAX_SIZE:
        return f"head size {p.head_dim} and value size {p.value_dim}: it takes up to {MAX_SIZE}"
    if not _is_there():
        return f"torch {torch.__version__} has no varlen attention with grouped heads; update torch"
    if compute_capability() < 80:
        return "its flash kernel needs compute capability 8.0 or more"
    if not is_enabled("flash"):
        return "torch's flash attention is disabled"
    return None


@torch.compiler.assume_constant_result
def _is_there() -> bool:
    return _find()


@cache
def _find() -> bool:
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention.varlen import varlen_attn

    return set(NEEDED) <= inspect.signature(varlen_attn).parameters.keys()


def diff_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor, ends: Tensor, length: int, *, causal: bool, scale: float
) -> Tensor:
    """Return `diff_attention` of sequences packed one after another, already checked and within `limit`.

    Queries are [T, H, 2, D], keys [T, Hk, P, D], values [T, Hk, V], lam [T, H, 1]; `ends` are where each sequence
    starts, and the end, int32; none is longer than `length`. The result is [T, H, V].
    """
    first, second = compute_maps(lambda q, k: attend(q, k, v, ends, length, causal=causal, scale=scale), q, k)
    return subtract(first, second, lam, q.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, length: int, *, causal: bool, scale: float) -> Tensor:
    """Return the output of one map [T, H, V], of queries [T, H, D], keys [T, Hk, D] and values [T, Hk, V]."""
    from torch.nn.attention.varlen import varlen_attn

    value_dim = v.shape[-1]
    size = -(-max(q.shape[-1], value_dim) // 8) * 8
    if scale <= 0:
        q, scale = q * scale, 1.0
    q, k, v = (widen(t, size) for t in (q, k, v))
    window = (-1, 0) if causal else (-1, -1)
    with without_cudnn():
        out = varlen_attn(
            q, k, v, ends, ends, length, length, scale=scale, window_size=window, enable_gqa=is_grouped(q, k)
        )
    assert isinstance(out, Tensor)  # no log-sum-exp was asked for
    return out[..., :value_dim]
