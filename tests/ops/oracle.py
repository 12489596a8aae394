"""Whether a backend computes the formula: output and gradients against float64, as close as plain attention is.

Bounds: the output is off by at most 2.5 times, gradients by at most 3 times the largest error that torch's attention
makes in the same dtype on the first map, and a rounding of the dtype.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from diffvision.ops import attention_maps, diff_attention

MAP_BYTES = 2**27  # of the maps that the formula keeps in float64
LEAST_ROWS = 8


class Inputs(NamedTuple):
    """q, k, v and lambda as `diff_attention` takes them."""

    q: Tensor  # [B, H, 2, M, D]
    k: Tensor  # [B, Hk, 2 or 1, N, D]
    v: Tensor  # [B, Hk, N, V]
    lam: Tensor


class Error(NamedTuple):
    """How far a result is from the formula's.

    Attributes:
        of: "output", or "gradient of q" and so on.
        size: the largest difference of an element.
        limit: the largest that is right.
        ratio: of the size to plain attention's own error; 0 for lambda's gradient, which plain attention lacks.
    """

    of: str
    size: float
    limit: float
    ratio: float = 0.0

    @property
    def is_wrong(self) -> bool:
        """Whether it is beyond the limit, or not a number."""
        return not self.size <= self.limit


def errors(
    backend: str,
    given: Inputs,
    generator: torch.Generator,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> Iterator[Error]:
    """Yield a backend's errors: of its output and, where inputs need gradients, of the gradient of each.

    The first and last samples and key/value heads are compared, and of long sequences only some rows, whose maps the
    formula can keep; gradients are those of a random number for each of these outputs. The backend computes all.

    Args:
        backend: its name.
        given: inputs of any dtype; a lambda or mask has four axes, or is one number.
        generator: chooses the rows and the numbers.
        causal: as in `diff_attention`.
        mask: as in `diff_attention`, with four axes.
    """
    q, k = given.q, given.k
    (batch, heads, _, queries, _), (kv_heads, keys, device) = q.shape, (k.shape[1], k.shape[3], q.device)
    group = heads // kv_heads
    some = _Part(
        _ends(batch, device),
        (_ends(kv_heads, device)[:, None] * group + torch.arange(group, device=device)).flatten(),
        _ends(kv_heads, device),
    )
    count = max(LEAST_ROWS, MAP_BYTES // (16 * len(some.samples) * len(some.heads) * max(1, keys)))
    rows = torch.randperm(queries, generator=generator)[:count].sort().values.to(device)
    allowed = None if mask is None else _pick(some.of_heads(mask), 2, rows)
    if causal:
        below = (torch.arange(keys, device=device) <= (rows + keys - queries)[:, None])[None, None]
        allowed = below if allowed is None else below & allowed

    out = diff_attention(*given, causal=causal, mask=mask, backend=backend)
    chosen = some.of_heads(out)[:, :, rows]
    weight = torch.randn(chosen.shape, generator=generator).to(device, out.dtype)
    wanted = [t for t in given if t.requires_grad]
    grads = torch.autograd.grad(chosen, wanted, weight) if wanted else ()

    few = [some.of_heads(q), some.of_keys(k), some.of_keys(given.v), some.of_heads(given.lam)]
    first, lam = few[0][:, :, :, rows], _pick(few[3], 2, rows)
    leaves = [t.detach().double().requires_grad_(bool(wanted)) for t in (first, few[1], few[2], lam)]
    true = diff_attention(*leaves, mask=allowed, backend="eager")
    plain, plain_grads = _plain_errors([first, few[1], few[2]], weight, allowed, grad=bool(wanted))
    size = _largest(chosen, true)
    yield Error("output", size, 2.5 * plain + rounding(q.dtype, true), _ratio(size, plain))
    if not wanted:
        return
    true_grads = torch.autograd.grad(true, leaves, weight.double())
    with torch.no_grad():
        # Where P (dP - rowsum(P dP)) cancels, in rows of one key for instance, it rounds as its terms do.
        largest_weight = attention_maps(leaves[0], leaves[1], mask=allowed).amax((2, 4))
        floor = rounding(q.dtype, largest_weight * (weight.double() * true).abs().sum(-1))
    got = [some.of_heads(grads[0]), some.of_keys(grads[1]), some.of_keys(grads[2])]
    whole = torch.zeros_like(got[0], dtype=torch.float64).index_copy(3, rows, true_grads[0])
    for name, one, want, base in zip("qkv", got, (whole, *true_grads[1:3]), plain_grads, strict=True):
        size = _largest(one, want)
        yield Error(f"gradient of {name}", size, 3 * base + 2 * floor, _ratio(size, base))
    # lambda's gradient sums over every row and column: relative to the sum of what it adds up.
    terms = (weight.double().abs() * (true.abs() + 1)).sum().item()
    size = _largest(_pick(some.of_heads(grads[3]), 2, rows), true_grads[3])
    yield Error("gradient of lambda", size, 4 * _unit(q.dtype) * terms)


class _Part(NamedTuple):
    """The samples, heads and key/value heads that are compared: those at both ends."""

    samples: Tensor
    heads: Tensor
    kv_heads: Tensor

    def of_heads(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor [B, H, ...], or of one that is broadcast to it."""
        return _pick(_pick(tensor, 0, self.samples), 1, self.heads)

    def of_keys(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor [B, Hk, ...]."""
        return _pick(_pick(tensor, 0, self.samples), 1, self.kv_heads)


def _ends(count: int, device: torch.device) -> Tensor:
    return torch.tensor(sorted({0, count - 1}), device=device)


def _pick(tensor: Tensor, axis: int, indices: Tensor) -> Tensor:
    """Return a part of a tensor of four axes or more along one of them, unless it is broadcast there."""
    return tensor.index_select(axis, indices) if tensor.dim() > 3 and tensor.shape[axis] > 1 else tensor


def rounding(dtype: torch.dtype, like: Tensor) -> float:
    """Return one rounding of the largest number: plain attention may happen to be exact, in a row of one key say."""
    largest = like.abs().max().item() if like.numel() else 0.0
    return _unit(dtype) * max(1.0, largest)


def _unit(dtype: torch.dtype) -> float:
    return 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps


def _plain_errors(
    given: list[Tensor], weight: Tensor, mask: Tensor | None, *, grad: bool
) -> tuple[float, tuple[float, ...]]:
    """Return plain attention's largest errors in the inputs' dtype on (q1, k1, v): of the output, of each gradient."""
    q, k, v = given
    group = q.shape[1] // k.shape[1]
    results = []
    for dtype in (q.dtype, torch.float64):
        leaves = [t.detach().to(dtype).requires_grad_(grad) for t in (q[:, :, 0], k[:, :, 0], v)]
        key, value = (t.repeat_interleave(group, dim=1) for t in leaves[1:])
        out = F.scaled_dot_product_attention(leaves[0], key, value, attn_mask=mask)
        if mask is not None:
            out = out.nan_to_num(0.0)
        results.append((out, torch.autograd.grad(out, leaves, weight.to(dtype)) if grad else ()))
    (out, grads), (true, true_grads) = results
    return _largest(out, true), tuple(_largest(a, b) for a, b in zip(grads, true_grads, strict=True))


def _largest(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).abs().max().item() if a.numel() else 0.0


def _ratio(size: float, base: float) -> float:
    return size / base if base else 0.0


def tensors(b=2, h=4, hk=None, m=7, n=7, d=8, v=16, keys=2, dtype=torch.float64, lam=(1,), device="cpu"):
    """q, k, v and lam, in memory as projections leave them: [B, M, H, 2, D]."""
    hk = h if hk is None else hk
    q, k = torch.randn(b, m, h, 2, d).permute(0, 2, 3, 1, 4), torch.randn(b, n, hk, keys, d).permute(0, 2, 3, 1, 4)
    made = [q, k, torch.randn(b, n, hk, v).transpose(1, 2), torch.rand(lam) + 0.2]
    return [t.to(device, dtype).requires_grad_() for t in made]


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
