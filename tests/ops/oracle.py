"""Whether a backend computes the formula: output and gradients against float64, as close as plain attention is.

Bounds: the output is off by at most 2.5 times, gradients by at most 3 times the largest error that torch's attention
makes in the same dtype on the first map, and a rounding of the dtype.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from diffvision.ops import attention_maps, diff_attention


class Error(NamedTuple):
    """How far a result is from the formula's."""

    of: str  # "output", "gradient of q", ...
    size: float  # the largest difference of an element
    limit: float  # the largest that is right

    @property
    def is_wrong(self) -> bool:
        """Whether it is beyond the limit, or not a number."""
        return not self.size <= self.limit


def errors(backend: str, given: list[Tensor], *, causal: bool = False) -> list[Error]:
    """Return a backend's errors: of its output, and of the gradient of each input.

    Args:
        backend: its name.
        given: q, k, v and lam as `diff_attention` takes them, which need gradients. Every query sees a key.
        causal: as in `diff_attention`.
    """
    dtype = given[0].dtype
    out = diff_attention(*given, causal=causal, backend=backend)
    weight = torch.randn(out.shape).to(out)
    grads = torch.autograd.grad(out, given, weight)
    leaves = [t.detach().double().requires_grad_() for t in given]
    true = diff_attention(*leaves, causal=causal, backend="eager")
    true_grads = torch.autograd.grad(true, leaves, weight.double())
    plain, plain_grads = _plain_errors(*given[:3], weight, causal)
    with torch.no_grad():
        # Where P (dP - rowsum(P dP)) cancels, in rows of one key for instance, it rounds as its terms do.
        largest_weight = attention_maps(*leaves[:2], causal=causal).amax((2, 4))
        floor = rounding(dtype, largest_weight * (weight.double() * true).abs().sum(-1))
    found = [Error("output", largest(out, true), 2.5 * plain + rounding(dtype, true))]
    for name, grad, true_grad, base in zip("qkv", grads[:3], true_grads[:3], plain_grads, strict=True):
        found.append(Error(f"gradient of {name}", largest(grad, true_grad), 3 * base + 2 * floor))
    # lambda's gradient sums over every row and column: relative to the sum of what it adds up.
    terms = (weight.double().abs() * (true.abs() + 1)).sum().item()
    return [*found, Error("gradient of lambda", largest(grads[3], true_grads[3]), 4 * _unit(dtype) * terms)]


def rounding(dtype: torch.dtype, like: Tensor) -> float:
    """Return one rounding of the largest number: plain attention may happen to be exact, in a row of one key say."""
    return _unit(dtype) * max(1.0, like.abs().max().item())


def _unit(dtype: torch.dtype) -> float:
    return 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps


def _plain_errors(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, causal: bool) -> tuple[float, list[float]]:
    """Return plain attention's largest errors in the inputs' dtype on (q1, k1, v): of the output, of each gradient."""
    queries, keys = q.shape[3], k.shape[3]
    lower = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    results = []
    for dtype in (q.dtype, torch.float64):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (q[:, :, 0], k[:, :, 0], v)]
        out = F.scaled_dot_product_attention(*leaves, attn_mask=lower if causal else None)
        results.append((out, torch.autograd.grad(out, leaves, weight.to(dtype))))
    (out, grads), (true, true_grads) = results
    return largest(out, true), [largest(a, b) for a, b in zip(grads, true_grads, strict=True)]


def largest(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two tensors."""
    return (a.double() - b.double()).abs().max().item()


def tensors(b=2, h=4, hk=None, m=7, n=7, d=8, v=16, keys=2, dtype=torch.float64, lam=(1,), device="cpu"):
    """q, k, v and lam (of at least float32), in memory as projections leave them: [B, M, H, 2, D]."""
    hk = h if hk is None else hk
    q, k = torch.randn(b, m, h, 2, d).permute(0, 2, 3, 1, 4), torch.randn(b, n, hk, keys, d).permute(0, 2, 3, 1, 4)
    made = [t.to(device, dtype) for t in (q, k, torch.randn(b, n, hk, v).transpose(1, 2))]
    lam = (torch.rand(lam) + 0.2).to(device, torch.promote_types(dtype, torch.float32))
    return [t.requires_grad_() for t in (*made, lam)]


PROBLEMS = {
    "v1": {},
    "v1 grouped": {"hk": 2},
    "v1 of one size": {"v": 8},
    "v1 wide": {"d": 128, "v": 256, "m": 3, "n": 3, "h": 2},
    "v1 uneven": {"d": 104, "v": 250, "m": 3, "n": 3, "h": 2},
    "v2": {"keys": 1, "v": 8},
    "v2 grouped": {"hk": 2, "keys": 1, "v": 8},
    "odd value size": {"v": 5},
    "value wider and odd": {"v": 19, "d": 6},
    "lam per head": {"lam": (4, 1, 1)},
    "lam per sample": {"lam": (2, 4, 1, 1)},
    "lam per token": {"lam": (2, 4, 7, 1)},
    "one token": {"m": 1, "n": 1},
    "a cache of keys": {"m": 3, "n": 9},
    "one query, many keys": {"m": 1, "n": 9, "hk": 2},
    "one query, v2, lam per head": {"m": 1, "n": 9, "keys": 1, "v": 8, "lam": (2, 4, 1, 1)},
    "more queries than keys": {"m": 9, "n": 4, "lam": (2, 4, 9, 1)},
    "no keys": {"n": 0, "hk": 2},
    "long before the first key": {"b": 1, "h": 10, "hk": 2, "m": 232, "n": 93, "d": 24, "v": 5, "keys": 1},
}


def masks(q, k):
    """A mask of each kind; in one a row has no key."""
    (b, h), m, n = q.shape[:2], q.shape[3], k.shape[3]
    full = torch.rand(b, h, m, n) > 0.4
    full[0, :, m // 2] = False
    padding = torch.arange(n) < torch.arange(n, n - b, -1)[:, None, None, None]
    return {"full": full, "of all heads": full[:, :1], "of keys": padding, "of one row": full[:1, :1, :1]}
