"""Whether a backend computes the formula: output and gradients against float64, as close as plain attention is.

Bounds: the output is off by at most 2.5 times, gradients by at most 3 times the largest error that torch's attention
makes in the same dtype on the first map, and a rounding of the dtype.
"""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from diffvision.ops import attention_maps, diff_attention
from diffvision.ops.attention import Problem
from diffvision.tuning.inputs import Inputs, Packed, choose_attend

MAP_BYTES = 2**27  # of the maps that the formula keeps in float64
LEAST_ROWS = 8


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


def find_mistake(backend: str, problem: Problem, *, compiled: bool = False, seed: int = 0) -> str | None:
    """Return what is wrong with a backend's numbers for a problem, None if nothing is.

    It is asked for the problem itself, of which samples, heads and rows at both ends are compared, and for odd lengths
    next to it, unequal ones where the problem is causal, with two samples and key/value heads at most and a lambda for
    each query and head; with a mask, for one of keys and one of any pairs, in which a row has no key.
    """
    if compiled:
        torch.compiler.reset()  # it keeps a few graphs of one function, and then refuses
    generator = torch.Generator().manual_seed(seed)
    for number, case in enumerate(_sizes(problem, generator)):
        if case.packed:
            found = _packed_errors(backend, case, generator, compiled=compiled)
        else:
            given = Inputs.random(case, generator)
            given = given.with_lambdas(generator) if number else given
            found = itertools.chain.from_iterable(
                errors(backend, given, generator, causal=case.causal, mask=mask, compiled=compiled)
                for mask in _masks(case, generator)
            )
        for error in found:
            if error.is_wrong:
                sizes = f"{case.queries} queries and {case.keys} keys"
                return f"its {error.of} is off by {error.size:.2g} with {sizes}, where {error.limit:.2g} is right"
    return None


def errors(
    backend: str,
    given: Inputs,
    generator: torch.Generator,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    compiled: bool = False,
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
        compiled: within torch.compile.
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

    out = choose_attend(compiled)(given, backend, causal=causal, mask=mask)
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


def _packed_errors(backend: str, problem: Problem, generator: torch.Generator, *, compiled: bool) -> Iterator[Error]:
    """Yield errors of packed sequences, each compared with the formula; limits are multiples of one rounding."""
    given = Packed.random(problem, generator)
    out = choose_attend(compiled)(given, backend, causal=problem.causal, longest=problem.queries)
    weight = torch.randn(out.shape, generator=generator).to(out)
    leaves = [t.detach().double().requires_grad_(problem.grad) for t in given[:4]]
    parts = []
    for start, end in itertools.pairwise(given.ends.tolist()):
        q, k = (t[start:end].permute(1, 2, 0, 3)[None] for t in leaves[:2])
        lam = leaves[3][start:end].transpose(0, 1) if leaves[3].dim() == 3 else leaves[3]
        values = leaves[2][start:end].transpose(0, 1)[None]
        parts.append(diff_attention(q, k, values, lam, causal=problem.causal, backend="eager")[0].transpose(0, 1))
    true = torch.cat(parts)
    few = 16 * max(rounding(problem.dtype, true), 2e-6)
    yield Error("output", _largest(out, true), few)
    if problem.grad:
        grads = torch.autograd.grad(out, given[:4], weight)
        true_grads = torch.autograd.grad(true, leaves, weight.double())
        for name, got, want in zip(("q", "k", "v", "lambda"), grads, true_grads, strict=True):
            terms = math.sqrt(want.numel()) if name == "lambda" and want.numel() == 1 else 1.0
            yield Error(f"gradient of {name}", _largest(got, want), terms * 16 * rounding(problem.dtype, want))


def _sizes(problem: Problem, generator: torch.Generator) -> Iterator[Problem]:
    """Yield a problem, and one of an odd length in the same range with few samples and heads."""
    group, kv_heads = problem.heads // problem.kv_heads, min(problem.kv_heads, 2)
    few = problem._replace(batch=min(problem.batch, 2), kv_heads=kv_heads, heads=group * kv_heads)
    yield few if problem.packed else problem
    if problem.keys > 2:
        low = problem.keys // 2
        odd = low + int(torch.randint(0, problem.keys - low, (1,), generator=generator)) | 1
        queries = 1 if problem.queries == 1 else odd
        if problem.causal and not problem.packed and queries > 2:  # as behind a cache
            queries -= queries // 3
        yield few._replace(queries=queries, keys=odd)


def _masks(problem: Problem, generator: torch.Generator) -> Iterator[Tensor | None]:
    """Yield the masks to test: none, or one over keys and one over pairs with a row that sees nothing."""
    if not problem.masked:
        yield None
        return
    shape = (problem.batch, 1, problem.queries, problem.keys)
    keys = torch.rand(problem.batch, 1, 1, problem.keys, generator=generator) > 1 / 3
    pairs = torch.rand(shape, generator=generator) > 1 / 3
    pairs[0, :, 0] = False
    yield from (keys.to(problem.device), pairs.to(problem.device))


def _largest(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).abs().max().item() if a.numel() else 0.0


def _ratio(size: float, base: float) -> float:
    return size / base if base else 0.0
