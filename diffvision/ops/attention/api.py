"""`diff_attention` and `diff_attention_varlen`: arguments are checked, then a backend is chosen and called.

The choice is in `choice.py`, the computation in the backends' files.
"""

import itertools
import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffvision.ops.attention.choice import choose
from diffvision.ops.attention.problem import describe


def diff_attention(
    q: Float[Tensor, "B H 2 M D"],
    k: Float[Tensor, "B Hk P N D"],
    v: Float[Tensor, "B Hk N V"],
    lam: Float[Tensor, "..."] | float,
    *,
    causal: bool = False,
    mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Float[Tensor, "B H M V"]:
    """Compute `(softmax(q1 k1' * scale) - lam * softmax(q2 k2' * scale)) v`, the operation of differential attention.

    Queries, keys and values must be finite even where nothing may attend to them: as in torch's attention, a masked
    weight is zero, and zero times NaN is NaN. Fill padding and the unused room of a cache with zeros.

    Args:
        q: the two maps' queries [B, H, 2, M, D]; H differential heads.
        k: the two maps' keys [B, Hk, 2, N, D] (V1), or one key for both, [B, Hk, 1, N, D] (V2). H is a multiple of Hk;
            head h reads key/value head h // (H // Hk).
        v: values [B, Hk, N, V]; V is free (V1: 2D, V2: D).
        lam: broadcastable to [B, H, M, 1]: one number a layer, a head, or a token and head.
        causal: query i attends to keys up to i + N - M: aligned to the last key, as a cache of past keys needs it.
        mask: boolean, True = may attend, broadcastable to [B, H, M, N]; combined with `causal` by AND.
        scale: of the logits; `D**-0.5` of one map if None.
        dropout: probability, drawn for each map separately (pass 0 in evaluation). In `eager` and `sdpa` only.
        backend: a name of `BACKENDS`, which never falls back to another, or "auto", which chooses by shape, dtype and
            device (see `supported_backends`).

    Returns:
        [B, H, M, V] in q's dtype. The difference's rows sum to 1 - lam and may be negative; a row that may not attend
        to any key is zeros, forward and backward.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, the backend is unknown, or it cannot take the call.

    Source: arXiv 2410.05258 equation 1; grouped heads as microsoft/unilm Diff-Transformer/multihead_flashdiff_1.py.
    """
    lam = _as_lambda(lam, q)
    _check(q, k, v, lam, mask, dropout, scale)
    if mask is not None:  # backends and torch's kernels want all four axes
        mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    problem = describe(q, k, v, lam, causal=causal, mask=mask, dropout=dropout)
    module = choose(backend, problem)
    return module.diff_attention(q, k, v, lam, causal=causal, mask=mask, scale=scale, dropout=dropout)


def diff_attention_varlen(
    q: Float[Tensor, "T H 2 D"],
    k: Float[Tensor, "S Hk P D"],
    v: Float[Tensor, "S Hk V"],
    lam: Float[Tensor, "..."] | float,
    cu_seqlens: Int[Tensor, "B1"],
    *,
    cu_seqlens_k: Int[Tensor, "B1"] | None = None,
    max_seqlen: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    backend: str = "auto",
) -> Float[Tensor, "T H V"]:
    """Compute `diff_attention` of sequences of unequal length, packed one after another without padding.

    The layout is that of flash-attn's variable-length functions, and of a projection's output. `triton` and `flash`
    compute all sequences in one launch; the other backends take them one by one.

    Args:
        q: queries of all sequences [T, H, 2, D].
        k: keys [S, Hk, 2, D], or [S, Hk, 1, D] where both maps share them.
        v: values [S, Hk, V].
        lam: broadcastable to [T, H, 1].
        cu_seqlens: where each sequence of queries starts, and the end: int32 [B + 1], from 0 to T.
        cu_seqlens_k: the same of keys and values, from 0 to S; as the queries' if None.
        max_seqlen: the largest number of queries in a sequence. It is not checked; computing it waits for the device.
        max_seqlen_k: the largest number of keys in a sequence, not checked either.
        causal: within each sequence, aligned to its last key.
        scale: as in `diff_attention`.
        backend: as in `diff_attention`.

    Returns:
        [T, H, V] in q's dtype; zeros where a query has no key.

    Raises:
        ValueError: shapes or offsets do not fit, or the backend cannot take the call.
    """
    lam = _as_lambda(lam, q)
    cu_seqlens_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    _check_packed(q, k, v, lam, cu_seqlens, cu_seqlens_k)
    # One batch of all tokens, in the layout of `diff_attention`, as views.
    packed = (q.permute(1, 2, 0, 3)[None], k.permute(1, 2, 0, 3)[None], v.transpose(0, 1)[None])
    lam = lam.reshape((1,) * (3 - lam.dim()) + lam.shape)
    _check(*packed, lam.transpose(0, 1), None, 0.0, scale)
    if max_seqlen is None:
        max_seqlen = int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0
    if max_seqlen_k is None:
        max_seqlen_k = int(cu_seqlens_k.diff().max()) if len(cu_seqlens) > 1 else 0
    problem = describe(*packed, lam, causal=causal, mask=None, dropout=0.0)
    sequences = len(cu_seqlens) - 1
    problem = problem._replace(batch=sequences, queries=max_seqlen, keys=max_seqlen_k, packed=True)
    module = choose(backend, problem)
    if hasattr(module, "diff_attention_varlen"):
        lengths = (cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k)
        return module.diff_attention_varlen(q, k, v, lam, *lengths, causal=causal, scale=scale)
    out = []
    for (q0, q1), (k0, k1) in zip(_spans(cu_seqlens), _spans(cu_seqlens_k), strict=True):
        sequence = (packed[0][:, :, :, q0:q1], packed[1][:, :, :, k0:k1], packed[2][:, :, k0:k1])
        rows = (lam[q0:q1] if lam.shape[0] > 1 else lam).transpose(0, 1)
        out.append(diff_attention(*sequence, rows, causal=causal, scale=scale, backend=backend)[0].transpose(0, 1))
    return torch.cat(out) if out else q.new_zeros(0, q.shape[1], v.shape[2])


def _spans(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    ends = cu_seqlens.tolist()
    return list(itertools.pairwise(ends))


def _as_lambda(lam: Tensor | float, q: Tensor) -> Tensor:
    """Return lam as a tensor of at least float32 on q's device, after a check of the dtypes of both."""
    for name, value in (("q", q), ("lam", lam)):
        number = isinstance(value, int | float) and name == "lam"
        if not number and (not isinstance(value, Tensor) or value.is_complex()):
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{name} must be a real tensor{' or number' if name == 'lam' else ''}, got {kind}")
    if not q.dtype.is_floating_point or q.dtype.itemsize < 2:
        raise ValueError(f"q, k and v must be floating point of 16 bits or more, got {q.dtype}: cast them first")
    return torch.as_tensor(lam, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)


def _check(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor, mask: Tensor | None, dropout: float, scale: float | None
) -> None:
    if (wrong := _wrong_shapes(q, k, v)) is not None:  # the text is made for a wrong call only
        raise ValueError(f"{wrong}; got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if not (q.dtype == k.dtype == v.dtype) or not (q.device == k.device == v.device):
        raise ValueError(
            f"q, k and v need one dtype and device; got {q.dtype} on {q.device}, {k.dtype} on {k.device}, "
            f"{v.dtype} on {v.device}: cast or move them first"
        )
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")
    if scale is not None and not torch.compiler.is_compiling() and not _is_finite(scale):
        raise ValueError(f"scale must be a finite number, or None for D**-0.5, got {scale!r}")
    _check_broadcast("lam", lam, (q.shape[0], q.shape[1], q.shape[3], 1))
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.device != q.device:
            got = f"{mask.dtype} on {mask.device}" if isinstance(mask, Tensor) else repr(mask)
            raise ValueError(
                f"mask must be a boolean tensor (True = may attend) on {q.device}, got {got}: pass `mask == 0` of a "
                "0/-inf one, and move it to q's device"
            )
        _check_broadcast("mask", mask, (q.shape[0], q.shape[1], q.shape[3], k.shape[3]))


def _is_finite(scale: float) -> bool:
    return isinstance(scale, int | float) and math.isfinite(scale)


def _wrong_shapes(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return what is wrong with the shapes, None if nothing is."""
    if q.dim() != 5 or k.dim() != 5 or v.dim() != 4 or q.shape[2] != 2 or k.shape[2] not in (1, 2):
        return "expected q [B, H, 2, M, D], k [B, Hk, 2 or 1, N, D] and v [B, Hk, N, V]"
    (batch, heads, _, _, size), (kv_batch, kv_heads, _, keys, kv_size) = q.shape, k.shape
    if batch != kv_batch or batch != v.shape[0] or size != kv_size:
        return "q, k and v need one batch size, and q and k one head size"
    if kv_heads != v.shape[1] or keys != v.shape[2]:
        return "k and v need the same heads and length"
    if 0 in (heads, kv_heads, size, v.shape[3]):
        return "heads and head sizes must be 1 or more"
    if heads % kv_heads:
        return f"{heads} query heads cannot share {kv_heads} key/value heads evenly"
    return None


def _check_packed(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, cu_q: Tensor, cu_k: Tensor) -> None:
    shapes = f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 3:
        raise ValueError(f"expected q [T, H, 2, D], k [S, Hk, 2 or 1, D] and v [S, Hk, V]; {shapes}")
    _check_broadcast("lam", lam, (q.shape[0], q.shape[1], 1))
    for name, cu, total in (("cu_seqlens", cu_q, q.shape[0]), ("cu_seqlens_k", cu_k, k.shape[0])):
        if not isinstance(cu, Tensor):
            raise ValueError(f"{name} must be an int32 tensor, got {cu!r}: torch.tensor(..., dtype=torch.int32)")
        if cu.dtype != torch.int32 or cu.dim() != 1 or len(cu) < 1 or cu.device != q.device:
            raise ValueError(
                f"{name} must be int32 [sequences + 1] on {q.device}, got {cu.dtype} {list(cu.shape)} on {cu.device}: "
                f"cast it with .to({str(q.device)!r}, torch.int32)"
            )
        if len(cu) != len(cu_q):
            raise ValueError(f"{name} has {len(cu)} offsets and cu_seqlens {len(cu_q)}: one a sequence and the end")
        # Values are checked only if reading them does not wait for a device.
        if cu.device.type == "cpu" and not torch.compiler.is_compiling():
            ends = cu.tolist()
            if ends[0] != 0 or ends[-1] != total or sorted(ends) != ends:
                raise ValueError(f"{name} must rise from 0 to the number of tokens, {total}; got {ends}")


def _check_broadcast(name: str, tensor: Tensor, target: tuple[int, ...]) -> None:
    shape = tuple(tensor.shape)
    if shape == (1,):
        return
    fits = len(shape) <= len(target) and all(a in (1, b) for a, b in zip(shape[::-1], target[::-1], strict=False))
    if not fits:
        raise ValueError(f"{name} of shape {shape} does not broadcast to {list(target)}")
