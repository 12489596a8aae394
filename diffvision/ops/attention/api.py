"""`diff_attention`, `softmax_attention` and `diff_attention_varlen`: they check their arguments, and call a backend.

The choice is in `choice.py`, the computation in the backends' files.
"""

import itertools
import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffvision.ops.attention import choice, flex, sdpa, varlen
from diffvision.ops.attention.document_masks import Documents
from diffvision.ops.attention.problem import describe


def diff_attention(
    q: Float[Tensor, "B H 2 M D"],
    k: Float[Tensor, "B Hk P N D"],
    v: Float[Tensor, "B Hk N V"],
    lam: Float[Tensor, "..."] | float,
    *,
    causal: bool = False,
    mask: Bool[Tensor, "..."] | Documents | None = None,
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
        mask: boolean, True = may attend, broadcastable to [B, H, M, N]; combined with `causal` by AND. Or the
            `Documents` of B rows of M = N tokens, for which backends that take packed sequences need no mask.
        scale: of the logits; `D**-0.5` of one map if None.
        dropout: probability, drawn for each map separately (pass 0 in evaluation). In `eager` and `sdpa`, and of
            documents in `varlen`.
        backend: a name of `BACKENDS`, which never falls back to another, or "auto", which chooses by shape, dtype and
            device (see `supported_backends`).

    Returns:
        [B, H, M, V] in q's dtype. The difference's rows sum to 1 - lam and may be negative; a row that may not attend
        to any key is zeros, forward and backward.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, the backend is unknown, or it cannot take the call.

    Source: arXiv 2410.05258 equation 1; grouped heads as microsoft/unilm Diff-Transformer/multihead_flashdiff_1.py.
    """
    _check(q, k, v, lam, dropout, scale)
    if isinstance(lam, Tensor):
        _check_broadcast("lam", lam, (q.shape[0], q.shape[1], q.shape[3], 1))
    return attend(q, k, v, lam, causal=causal, mask=mask, scale=scale, dropout=dropout, backend=backend)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor | float,
    *,
    causal: bool = False,
    mask: Tensor | Documents | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Compute `diff_attention` for a layer, whose queries, keys, values and lambda need no check."""
    lam = torch.as_tensor(lam, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    if isinstance(mask, Documents):
        if (out := _packed_attention(q, k, v, lam, mask, causal, scale, dropout, backend)) is not None:
            return out
        mask = mask.mask()
    if mask is not None:
        mask = _check_mask(mask, q, k)
    name = choice.preferred if backend == "auto" else backend
    if name == "auto":
        name, _ = choice.rule(q.device.type, q.shape[3], k.shape[3], dropout)
    else:
        choice.require(name, describe(q, k, v, lam, causal=causal, mask=mask, dropout=dropout))
    module = choice.BACKENDS[name]
    return module.diff_attention(q, k, v, lam, causal=causal, mask=mask, scale=scale, dropout=dropout)


def softmax_attention(
    q: Float[Tensor, "B H M D"],
    k: Float[Tensor, "B Hk N D"],
    v: Float[Tensor, "B Hk N V"],
    *,
    causal: bool = False,
    mask: Bool[Tensor, "..."] | Documents | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B H M V"]:
    """Compute `softmax(q k' * D**-0.5) v`, the output of one map, by torch's attention and for values of any width.

    Args:
        q: queries [B, H, M, D].
        k: keys [B, Hk, N, D]; H is a multiple of Hk.
        v: values [B, Hk, N, V].
        causal: as in `diff_attention`, aligned to the last key.
        mask: as in `diff_attention`.
        dropout: probability of the map's entries.

    Returns:
        [B, H, M, V]; a row that may not attend to any key is zeros.
    """
    if isinstance(mask, Documents):
        problem = describe(q[:, :, None], k[:, :, None], v, 0.0, causal=causal, mask=None, dropout=dropout)
        if varlen.limit(problem._replace(packed=True)) is None:
            length, scale = q.shape[2], q.shape[3] ** -0.5
            q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
            lengths = (mask.ends, mask.ends, length, length)
            out = varlen.attend(q, k, v, *lengths, causal=causal, scale=scale, dropout=dropout)
            return out.unflatten(0, (-1, length)).transpose(1, 2)
        if choice.takes_blocks("auto", problem):
            return flex.softmax_attention(q, k, v, causal=causal, documents=mask)
        mask = mask.mask()
    return sdpa.softmax_attention(q, k, v, causal=causal, mask=mask, dropout=dropout)


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

    The layout is that of flash-attn's variable-length functions, and of a projection's output. `varlen` and
    `flash` compute all sequences in one launch. The other backends take them one by one on a CPU, and on other devices
    and in graphs padded to the longest, so that no step waits for the device.

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
    cu_seqlens_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    _check_packed(q, k, v, cu_seqlens, cu_seqlens_k)
    # One batch of all tokens, in the layout of `diff_attention`, as views.
    packed = (q.permute(1, 2, 0, 3)[None], k.permute(1, 2, 0, 3)[None], v.transpose(0, 1)[None])
    _check(*packed, lam, 0.0, scale)
    if isinstance(lam, Tensor):
        _check_broadcast("lam", lam, (q.shape[0], q.shape[1], 1))
    lam = torch.as_tensor(lam, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    lam = lam.reshape((1,) * (3 - lam.dim()) + lam.shape)
    if max_seqlen is None:
        max_seqlen = int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0
    if max_seqlen_k is None:
        max_seqlen_k = int(cu_seqlens_k.diff().max()) if len(cu_seqlens) > 1 else 0
    problem = describe(*packed, lam, causal=causal, mask=None, dropout=0.0)
    sequences = len(cu_seqlens) - 1
    problem = problem._replace(batch=sequences, queries=max_seqlen, keys=max_seqlen_k, packed=True)
    name, _ = choice.choose(backend, problem)
    module = choice.BACKENDS[name]
    lengths = (cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k)
    if hasattr(module, "diff_attention_varlen"):
        return module.diff_attention_varlen(q, k, v, lam, *lengths, causal=causal, scale=scale)
    reads_offsets = q.device.type == "cpu" and not torch.compiler.is_compiling()
    if not reads_offsets and 0 not in (q.shape[0], k.shape[0]):
        return _padded_attention(q, k, v, lam, *lengths, causal, scale, backend)
    out = []
    spans, spans_k = (itertools.pairwise(ends.tolist()) for ends in (cu_seqlens, cu_seqlens_k))
    for (q0, q1), (k0, k1) in zip(spans, spans_k, strict=True):
        sequence = (packed[0][:, :, :, q0:q1], packed[1][:, :, :, k0:k1], packed[2][:, :, k0:k1])
        rows = (lam[q0:q1] if lam.shape[0] > 1 else lam).transpose(0, 1)
        out.append(diff_attention(*sequence, rows, causal=causal, scale=scale, backend=backend)[0].transpose(0, 1))
    return torch.cat(out) if out else q.new_zeros(0, q.shape[1], v.shape[2])


def _padded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen: int,
    max_seqlen_k: int,
    causal: bool,
    scale: float | None,
    backend: str,
) -> Tensor:
    """Return `diff_attention_varlen` by one call, with a mask of keys, or of the pairs of a sequence if causal."""
    i, j, token = (torch.arange(n, device=q.device) for n in (max_seqlen, max_seqlen_k, q.shape[0]))
    lengths, lengths_k = cu_seqlens.diff()[:, None, None, None], cu_seqlens_k.diff()[:, None, None, None]
    mask = j < lengths_k
    if causal:
        mask = mask & (j <= i[:, None] + lengths_k - lengths)
    rows, rows_k = (cu_seqlens[:-1, None] + i) % q.shape[0], (cu_seqlens_k[:-1, None] + j) % k.shape[0]
    lam = (lam[rows] if lam.shape[0] > 1 else lam[None]).transpose(1, 2)
    maps = (q[rows].permute(0, 2, 3, 1, 4), k[rows_k].permute(0, 2, 3, 1, 4))  # what lies behind a sequence is masked
    out = diff_attention(*maps, v[rows_k].transpose(1, 2), lam, mask=mask, scale=scale, backend=backend)
    sequence = torch.searchsorted(cu_seqlens, token, right=True) - 1
    return out.transpose(1, 2)[sequence, token - cu_seqlens[sequence]]


def _packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    documents: Documents,
    causal: bool,
    scale: float | None,
    dropout: float,
    backend: str,
) -> Tensor | None:
    """Return `diff_attention` of rows of documents without a mask of pairs; None if the chosen backend needs one.

    A row's length stands for the longest document's, which is not known without waiting for the device.
    """
    length = q.shape[3]
    problem = describe(q, k, v, lam, causal=causal, mask=None, dropout=dropout)
    name, _ = choice.choose(backend, problem._replace(batch=len(documents.ends) - 1, packed=True))
    module = choice.BACKENDS[name]
    if not hasattr(module, "diff_attention_varlen"):
        if not choice.takes_blocks(backend, problem):
            return None
        return flex.diff_attention(q, k, v, lam, causal=causal, mask=documents, scale=scale, dropout=dropout)
    lam = lam.expand(q.shape[0], q.shape[1], length, 1).transpose(1, 2).flatten(0, 1)
    rows = (
        q.permute(0, 3, 1, 2, 4).flatten(0, 1),
        k.permute(0, 3, 1, 2, 4).flatten(0, 1),
        v.transpose(1, 2).flatten(0, 1),
    )
    lengths = (documents.ends, documents.ends, length, length)
    drop = {"dropout": dropout} if dropout else {}  # `varlen` alone takes any
    out = module.diff_attention_varlen(*rows, lam, *lengths, causal=causal, scale=scale, **drop)
    return out.unflatten(0, (-1, length)).transpose(1, 2)


def _check(q: Tensor, k: Tensor, v: Tensor, lam: Tensor | float, dropout: float, scale: float | None) -> None:
    """Raise a ValueError if the arguments do not fit each other."""
    for name, value in (("q", q), ("lam", lam)):
        number = isinstance(value, int | float) and name == "lam"
        if not number and (not isinstance(value, Tensor) or value.is_complex()):
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{name} must be a real tensor{' or number' if name == 'lam' else ''}, got {kind}")
    if not q.dtype.is_floating_point or q.dtype.itemsize < 2:
        raise ValueError(f"q, k and v must be floating point of 16 bits or more, got {q.dtype}: cast them first")
    wrong = ""  # the shapes are put into words for a wrong call only
    if q.dim() != 5 or k.dim() != 5 or v.dim() != 4 or q.shape[2] != 2 or k.shape[2] not in (1, 2):
        wrong = "expected q [B, H, 2, M, D], k [B, Hk, 2 or 1, N, D] and v [B, Hk, N, V]"
    elif q.shape[0] != k.shape[0] or q.shape[0] != v.shape[0] or q.shape[4] != k.shape[4]:
        wrong = "q, k and v need one batch size, and q and k one head size"
    elif k.shape[1] != v.shape[1] or k.shape[3] != v.shape[2]:
        wrong = "k and v need the same heads and length"
    elif 0 in (q.shape[1], k.shape[1], q.shape[4], v.shape[3]):
        wrong = "heads and head sizes must be 1 or more"
    elif q.shape[1] % k.shape[1]:
        wrong = f"{q.shape[1]} query heads cannot share {k.shape[1]} key/value heads evenly"
    if wrong:
        raise ValueError(f"{wrong}; got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if not (q.dtype == k.dtype == v.dtype) or not (q.device == k.device == v.device):
        raise ValueError(
            f"q, k and v need one dtype and device; got {q.dtype} on {q.device}, {k.dtype} on {k.device}, "
            f"{v.dtype} on {v.device}: cast or move them first"
        )
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")
    is_symbol = torch.compiler.is_compiling()
    if scale is not None and not is_symbol and not (isinstance(scale, int | float) and math.isfinite(scale)):
        raise ValueError(f"scale must be a finite number, or None for D**-0.5, got {scale!r}")


def _check_mask(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return a mask with all four axes, which backends and torch's kernels want; ValueError if it does not fit."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.device != q.device:
        got = f"{mask.dtype} on {mask.device}" if isinstance(mask, Tensor) else repr(mask)
        raise ValueError(
            f"mask must be a boolean tensor (True = may attend) on {q.device}, got {got}: pass `mask == 0` of a "
            "0/-inf one, and move it to q's device"
        )
    _check_broadcast("mask", mask, (q.shape[0], q.shape[1], q.shape[3], k.shape[3]))
    return mask.reshape((1,) * (4 - mask.dim()) + mask.shape)


def _check_packed(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> None:
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 3:
        raise ValueError(
            f"expected q [T, H, 2, D], k [S, Hk, 2 or 1, D] and v [S, Hk, V]; got q {tuple(q.shape)}, "
            f"k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
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
    fits = len(shape) <= len(target) and all(a in (1, b) for a, b in zip(shape[::-1], target[::-1], strict=False))
    if not fits:
        raise ValueError(f"{name} has shape {shape}: make it broadcast to {list(target)}")
