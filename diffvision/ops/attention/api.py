"""The one operation: arguments checked once, a backend chosen, one call."""

from types import ModuleType

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from diffvision.ops.attention import eager, sdpa
from diffvision.ops.attention.problem import Problem, describe

# name -> module that has `limit(problem) -> reason or None` and
# `diff_attention(q, k, v, lam, *, causal, mask, scale, dropout) -> out`
BACKENDS: dict[str, ModuleType] = {"eager": eager, "sdpa": sdpa}

# On a CPU the plain formula wins for short rows: it computes each map once and multiplies by V once. The crossing lies
# between 577 and 1,024 keys (docs/benchmarks/attention.md); below it, because the formula keeps its maps for backward.
EAGER_MAX_KEYS_CPU = 512


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
    """`(softmax(q1 k1' * scale) - lam * softmax(q2 k2' * scale)) v`, the operation of every differential attention.

    Args:
        q: the two maps' queries [B, H, 2, M, D]; H differential heads.
        k: the two maps' keys [B, Hk, 2, N, D] (V1), or one key for both, [B, Hk, 1, N, D] (V2). H is a multiple of Hk;
            head h reads key/value head h // (H // Hk).
        v: values [B, Hk, N, V]; V is free (V1: 2D, V2: D).
        lam: broadcastable to [B, H, M, 1]: one number a layer, a head, or a token and head.
        causal: query i attends to keys up to i + N - M: aligned to the last key, so a cache of past keys just works.
        mask: boolean, True = may attend, broadcastable to [B, H, M, N]; combined with `causal` by AND.
        scale: of the logits; `D**-0.5` of one map if None.
        dropout: probability, drawn for each map by itself (pass 0 in evaluation). In `eager` and `sdpa` only.
        backend: a name of `BACKENDS`, which never falls back to another, or "auto", which chooses by shape, dtype and
            device (see `supported_backends`).

    Returns:
        [B, H, M, V] in q's dtype. The difference's rows sum to 1 - lam and may be negative; a row that may attend to
        nothing is zeros.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, an unknown backend, or a limit of the one asked for.

    Source: arXiv 2410.05258 equation 1; grouped heads as microsoft/unilm Diff-Transformer/multihead_flashdiff_1.py.
    """
    lam = torch.as_tensor(lam, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    _check(q, k, v, lam, mask, dropout)
    if mask is not None:  # backends and torch's kernels want all four axes
        mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    problem = describe(q, k, v, lam, causal=causal, mask=mask, dropout=dropout)
    if backend == "auto":
        backend = _choose(problem)
    elif backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}: choose one of {', '.join(BACKENDS)}, or 'auto'")
    elif (reason := BACKENDS[backend].limit(problem)) is not None:
        raise ValueError(f"backend {backend!r} cannot take this call: {reason}; use another, or backend='auto'")
    return BACKENDS[backend].diff_attention(q, k, v, lam, causal=causal, mask=mask, scale=scale, dropout=dropout)


def supported_backends(problem: Problem) -> dict[str, str]:
    """What "auto" would choose for a problem, and why the others were passed over.

    Returns:
        backend name -> a sentence that starts with "chosen", "passed over" or "cannot"; the chosen one comes first.
    """
    chosen = _choose(problem)
    reasons = {chosen: f"chosen: {_why(chosen, problem)}"}
    for name, module in BACKENDS.items():
        if name != chosen:
            reason = module.limit(problem)
            reasons[name] = f"cannot: {reason}" if reason else f"passed over: {chosen} is faster here"
    return reasons


def _choose(problem: Problem) -> str:
    # A compiled or exported graph must not depend on a length that may be symbolic.
    if problem.device == "cpu" and not torch.compiler.is_compiling() and problem.keys <= EAGER_MAX_KEYS_CPU:
        return "eager"
    return "sdpa"


def _why(chosen: str, problem: Problem) -> str:
    if chosen == "eager":
        return f"on a CPU the plain formula is the fastest up to {EAGER_MAX_KEYS_CPU} keys"
    if problem.device == "cpu":
        return f"above {EAGER_MAX_KEYS_CPU} keys torch's blocked kernel is faster and keeps no maps"
    return "torch's fused kernels keep no maps"


def _check(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, mask: Tensor | None, dropout: float) -> None:
    shapes = f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 5 or k.dim() != 5 or v.dim() != 4 or q.shape[2] != 2 or k.shape[2] not in (1, 2):
        raise ValueError(f"expected q [B, H, 2, M, D], k [B, Hk, 2 or 1, N, D] and v [B, Hk, N, V]; {shapes}")
    if q.shape[0] != k.shape[0] or q.shape[0] != v.shape[0] or q.shape[4] != k.shape[4]:
        raise ValueError(f"q, k and v need one batch size, and q and k one head size; {shapes}")
    if k.shape[1] != v.shape[1] or k.shape[3] != v.shape[2]:
        raise ValueError(f"k and v need the same heads and length; {shapes}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key/value heads evenly; {shapes}")
    if not (q.dtype == k.dtype == v.dtype) or not (q.device == k.device == v.device):
        raise ValueError(
            f"q, k and v need one dtype and device; got {q.dtype} on {q.device}, {k.dtype} on {k.device}, "
            f"{v.dtype} on {v.device}: cast or move them first"
        )
    if not q.dtype.is_floating_point:
        raise ValueError(f"q, k and v must be floating point, got {q.dtype}")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")
    _check_broadcast("lam", lam, (q.shape[0], q.shape[1], q.shape[3], 1))
    if mask is not None:
        if mask.dtype != torch.bool:
            raise ValueError(
                f"mask must be boolean (True = may attend), got {mask.dtype}: pass `mask == 0` of a 0/-inf one"
            )
        _check_broadcast("mask", mask, (q.shape[0], q.shape[1], q.shape[3], k.shape[3]))


def _check_broadcast(name: str, tensor: Tensor, target: tuple[int, ...]) -> None:
    own = tuple(tensor.shape)
    fits = len(own) <= len(target) and all(a in (1, b) for a, b in zip(own[::-1], target[::-1], strict=False))
    if not fits:
        raise ValueError(f"{name} of shape {own} does not broadcast to {list(target)}")
