"""`diff_attention` and `softmax_attention`: they check their arguments, and call a backend.

The choice is in `choice.py`, the computation in the backends' files.
"""

import math
from types import ModuleType

import torch
from jaxtyping import Bool, Float
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
        dropout: probability, drawn for each map separately by `eager` and `sdpa` (pass 0 in evaluation).
        backend: a name of `BACKENDS`, which never falls back to another, or "auto", which chooses by shape, dtype and
            device (`diffvision doctor` prints the choice for common shapes).

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
    scale = q.shape[4] ** -0.5 if scale is None else scale
    if isinstance(mask, Documents):
        problem = describe(q, k, v, lam, causal=causal, mask=None, dropout=dropout)
        name, _ = choice.choose(backend, problem._replace(batch=len(mask.ends) - 1, packed=True))
        if hasattr(module := choice.BACKENDS[name], "diff_attention_varlen"):
            return _attend_packed(module, q, k, v, lam, mask.ends, causal=causal, scale=scale)
        if choice.takes_blocks(backend, problem):
            return flex.diff_attention(q, k, v, lam, causal=causal, mask=mask, scale=scale, dropout=dropout)
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
            out = varlen.attend(q, k, v, mask.ends, length, causal=causal, scale=scale)
            return out.unflatten(0, (-1, length)).transpose(1, 2)
        if choice.takes_blocks("auto", problem):
            return flex.softmax_attention(q, k, v, causal=causal, documents=mask)
        mask = mask.mask()
    return sdpa.softmax_attention(q, k, v, causal=causal, mask=mask, dropout=dropout)


def _attend_packed(
    module: ModuleType, q: Tensor, k: Tensor, v: Tensor, lam: Tensor, ends: Tensor, *, causal: bool, scale: float
) -> Tensor:
    """Return `diff_attention` of rows of documents, by a backend that takes them end to end.

    A row's length stands for the longest document's, which is not known without waiting for the device.
    """
    length = q.shape[3]
    lam = lam.expand(q.shape[0], q.shape[1], length, 1).transpose(1, 2).flatten(0, 1)
    q, k = (t.permute(0, 3, 1, 2, 4).flatten(0, 1) for t in (q, k))
    v = v.transpose(1, 2).flatten(0, 1)
    out = module.diff_attention_varlen(q, k, v, lam, ends, length, causal=causal, scale=scale)
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


def _check_broadcast(name: str, tensor: Tensor, target: tuple[int, ...]) -> None:
    shape = tuple(tensor.shape)
    fits = len(shape) <= len(target) and all(a in (1, b) for a, b in zip(shape[::-1], target[::-1], strict=False))
    if not fits:
        raise ValueError(f"{name} has shape {shape}: make it broadcast to {list(target)}")
