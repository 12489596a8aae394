"""Blocks that stay in the processor's cache: the fast path on a CPU, with memory linear in the length.

Each block of queries computes both maps over all of its keys, subtracts them and multiplies by V once: 8 N^2 D of
matrix work as plain attention with the same parameters, where two calls of torch's kernels take 12 to 16. Backward
shares dP = dO V' and dV = P' dO between the maps. It recomputes the maps, except those of short rows, which are kept:

    dS1 = P1 (dP - rowsum(P1 dP))      dS2 = -lam P2 (dP - rowsum(P2 dP))      dlam = -rowsum(P2 dP)

-lam and the scale belong to a row: they are multiplied into the queries and the product, which are smaller than dS.

Half precision is computed in float32 and rounded once at the end.
"""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from diffvision.ops.attention.problem import Problem

# Scores of one map in a block, query rows of a block, and scores up to which whole samples share a block: the fastest,
# or nearly, from 17 to 4,096 keys when all were tried on two cores. Fewer rows would fit a smaller cache,
# but pack each key anew for too few of them.
BLOCK_SCORES = 2**19
BLOCK_ROWS = 256
JOINED_SCORES = 2**18

# Up to here the maps are kept for backward: an eighth less time, for less memory than the formula takes.
KEEP_MAPS_MAX_KEYS = 512

# From here on the sums of keys' and values' gradients have their keys side by side: their products are then faster by
# an eighth to a quarter, and for shorter rows slower by a tenth.
LONG_KEYS = 1024


def limit(problem: Problem) -> str | None:
    """Return why this backend cannot take the problem, or None."""
    if problem.device != "cpu":
        return f"it is for tensors on a CPU, these are on {problem.device}"
    if problem.dropout:
        return f"it draws no dropout, got {problem.dropout}"
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
    dropout: float,
) -> Tensor:
    """Arguments, shapes and result as `diffvision.ops.diff_attention`, already checked."""
    work = torch.promote_types(q.dtype, torch.float32)
    scale = q.shape[4] ** -0.5 if scale is None else scale
    lam = lam.to(work).expand(q.shape[0], q.shape[1], q.shape[3], 1)
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, lam))
    keep = grad and k.shape[3] <= KEEP_MAPS_MAX_KEYS
    out, _ = _forward(q.to(work), k.to(work), v.to(work), lam, mask, causal, scale, keep)
    return out.to(q.dtype)


class _Block(NamedTuple):
    """A part of a call that is computed at once, with the keys that its query rows may attend to.

    It is several whole samples, or consecutive query rows of some heads of one sample.
    """

    samples: slice
    heads: slice  # key/value heads
    rows: slice
    keys: slice  # from the first key to the last that any row may attend to
    masked_from: int = 0  # every row may attend to the columns before this one
    forbidden: Tensor | None = None  # broadcastable to [samples, heads, rows, columns from masked_from]
    may_be_dead: bool = False  # a row without any key is possible


def _blocks(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Iterator[_Block]:
    """Split a call into blocks, from the last rows to the first, since the last rows of a causal call need all keys.

    Sizes follow `JOINED_SCORES`, `BLOCK_ROWS` and `BLOCK_SCORES`, so that the scores of a block fit the CPU's cache.
    """
    (batch, heads, _, queries, _), keys = q.shape, k.shape[3]
    if not (batch and heads and queries and keys):
        return
    kv_heads, group = k.shape[1], heads // k.shape[1]
    samples_a_block = max(1, JOINED_SCORES // (heads * queries * keys))
    rows = min(queries, max(BLOCK_ROWS // group, 1))
    rows = -(-queries // -(-queries // rows))  # blocks of nearly equal size
    heads_a_block = min(kv_heads, max(2, BLOCK_SCORES // (group * rows * keys)))
    if samples_a_block > 1:
        rows, heads_a_block = queries, kv_heads
    past = keys - queries  # query i attends to keys up to i + past
    for sample, head in itertools.product(range(0, batch, samples_a_block), range(0, kv_heads, heads_a_block)):
        sample_slice = slice(sample, min(batch, sample + samples_a_block))
        head_slice = slice(head, min(kv_heads, head + heads_a_block))
        for lo in reversed(range(0, queries, rows)):
            hi = min(queries, lo + rows)
            end = max(0, min(keys, hi + past)) if causal else keys
            block = _Block(sample_slice, head_slice, slice(lo, hi), slice(0, end))
            if mask is not None or causal:
                block = _masked(block, mask, group, past if causal else None)
            yield block


def _masked(block: _Block, mask: Tensor | None, group: int, past: int | None) -> _Block:
    """Return the block with its mask; row i attends to keys up to i + past, or to all if past is None."""
    lo, hi, end, start, forbidden = block.rows.start, block.rows.stop, block.keys.stop, 0, None
    if mask is not None:
        forbidden = ~mask[block.samples if mask.shape[0] > 1 else slice(None)]
        forbidden = (
            forbidden[:, block.heads.start * group : block.heads.stop * group] if mask.shape[1] > 1 else forbidden
        )
        forbidden = forbidden[:, :, lo:hi] if mask.shape[2] > 1 else forbidden
        forbidden = forbidden[..., :end] if mask.shape[3] > 1 else forbidden.expand(-1, -1, -1, end)
    if past is not None:
        start = 0 if mask is not None else max(0, min(end, lo + past + 1))
        later = torch.ones(hi - lo, end - start, dtype=torch.bool).triu(lo + past + 1 - start)
        forbidden = later[None, None] if forbidden is None else forbidden | later
    dead = mask is not None or (past is not None and lo + past < 0)
    return block._replace(masked_from=start, forbidden=forbidden, may_be_dead=dead)


class _Scratch:
    """Memory that is reused by all blocks: page faults of newly allocated memory would double a block's time."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """Return an uninitialised tensor; the one taken before under the same name is overwritten."""
        size = math.prod(shape)
        if name not in self._held or self._held[name].numel() < size:
            self._held[name] = self._like.new_empty(size)
        return self._held[name][:size].view(shape)

    def sums(self, name: str, heads: int, keys: int, size: int) -> Tensor:
        """Return an uninitialised [heads, size, keys], in the memory order in which products are added fastest."""
        if keys >= LONG_KEYS:
            return self.take(name, heads, size, keys)
        return self.take(name, heads, keys, size).transpose(1, 2)


def _part(x: Tensor, kv_heads: int, block: _Block) -> Tensor:
    """Return a block's part of x [B, H, ...] as [S, K, G, ...]: K key/value heads, with the G heads of each."""
    return x.unflatten(1, (kv_heads, x.shape[1] // kv_heads))[block.samples, block.heads]


def _queries(q: Tensor, kv_heads: int, block: _Block) -> Tensor:
    """Return a block's queries [2, S * K, G * rows, D]: heads that share keys are more rows of one product."""
    return _part(q, kv_heads, block)[:, :, :, :, block.rows].permute(3, 0, 1, 2, 4, 5).flatten(3, 4).flatten(1, 2)


def _rows(x: Tensor, kv_heads: int, block: _Block) -> Tensor:
    """Return a block's rows of x [B, H, M, X] as [S * K, G * rows, X]."""
    return _part(x, kv_heads, block)[:, :, :, block.rows].flatten(2, 3).flatten(0, 1)


def _keys(k: Tensor, block: _Block) -> Tensor:
    """Return a block's keys [P, S * K, n, D]."""
    return k[block.samples, block.heads, :, block.keys].movedim(2, 0).flatten(1, 2)


def _values(v: Tensor, block: _Block) -> Tensor:
    """Return a block's values [S * K, n, V]."""
    return v[block.samples, block.heads, block.keys].flatten(0, 1)


def _fill_maps(maps: Tensor, q: Tensor, k: Tensor, scale: float, block: _Block) -> None:
    """Write both maps of a block [2, S * K, G * rows, n], of q [2, S * K, G * rows, D] and k [P, S * K, n, D]."""
    dead = block.forbidden.all(-1, keepdim=True) if block.forbidden is not None and block.may_be_dead else None
    for m in range(2):
        key = k[min(m, k.shape[0] - 1)].transpose(1, 2)
        scores = maps[m]
        torch.baddbmm(scores, q[m], key, beta=0, alpha=scale, out=scores)
        samples, rows = block.samples.stop - block.samples.start, block.rows.stop - block.rows.start
        heads = maps.shape[1] * maps.shape[2] // (samples * rows)
        by_head = maps[m].view(samples, heads, rows, maps.shape[3])
        if block.forbidden is not None:
            by_head[..., block.masked_from :].masked_fill_(block.forbidden, -torch.inf)
        torch.softmax(maps[m], -1, out=maps[m])
        if dead is not None and dead.any():
            by_head.masked_fill_(dead, 0.0)


@torch.library.custom_op("diffvision::diff_attention_blocked", mutates_args=(), device_types="cpu")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor, mask: Tensor | None, causal: bool, scale: float, keep: bool
) -> tuple[Tensor, Tensor]:
    """Return `diff_attention` in one working dtype, for lam [B, H, M, 1], and the maps of all blocks end to end."""
    kv_heads = k.shape[1]
    (out, kept), scratch, used = _new_outputs(q, k, v, keep), _Scratch(q), 0
    if k.shape[3] == 0:
        out.zero_()
    for block in _blocks(q, k, mask, causal):
        query, key, value = _queries(q, kv_heads, block), _keys(k, block), _values(v, block)
        shape = (*query.shape[:3], key.shape[2])
        maps = kept[used : used + math.prod(shape)].view(shape) if keep else scratch.take("maps", *shape)
        used += maps.numel()
        _fill_maps(maps, query, key, scale, block)
        difference = scratch.take("difference", *maps.shape[1:])
        torch.addcmul(maps[0], maps[1], _rows(lam, kv_heads, block), value=-1, out=difference)
        product = torch.bmm(difference, value, out=scratch.take("product", *query.shape[1:3], v.shape[3]))
        target = _part(out, kv_heads, block)[:, :, :, block.rows]
        target.copy_(product.view(target.shape))
    return out, kept


@torch.library.custom_op("diffvision::diff_attention_blocked_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    mask: Tensor | None,
    kept: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and lam (expanded)."""
    kv_heads = k.shape[1]
    grads, scratch, used = _new_gradients(q, k, v), _Scratch(q), 0
    grad_q, grad_k, grad_v, grad_lam = grads
    if not (q.shape[3] and k.shape[3]):
        for empty in grads:
            empty.zero_()
    for block in _blocks(q, k, mask, causal):
        query, key, value = _queries(q, kv_heads, block), _keys(k, block), _values(v, block)
        weight, outer = _rows(lam, kv_heads, block), _rows(grad, kv_heads, block)
        shape = (*query.shape[:3], key.shape[2])
        if kept.numel():
            maps = kept[used : used + math.prod(shape)].view(shape)
            used += maps.numel()
        else:
            maps = scratch.take("maps", *shape)
            _fill_maps(maps, query, key, scale, block)
        # A call's first block of some heads has all keys: its products overwrite the sums.
        first, last = block.rows.stop == q.shape[3], block.rows.start == 0
        sum_v = scratch.sums("v", shape[1], k.shape[3], v.shape[3])
        sums_k = [scratch.sums(f"k{m}", shape[1], *k.shape[3:]) for m in range(k.shape[2])]
        shared = torch.bmm(outer, value.transpose(1, 2), out=scratch.take("shared", *shape[1:]))  # dP = dO V'
        work = scratch.take("work", *shape[1:])
        torch.addcmul(maps[0], maps[1], weight, value=-1, out=work)
        _add_product(sum_v, outer, work, first)
        torch.mul(maps[1], shared, out=work)
        row_sums = work.sum(-1, keepdim=True)
        target = _part(grad_lam, kv_heads, block)[:, :, :, block.rows]
        target.copy_(row_sums.neg().view(target.shape))
        work.addcmul_(maps[1], row_sums, value=-1)
        for m in (1, 0):
            if m == 0:
                torch.ops.aten._softmax_backward_data.out(shared, maps[0], -1, maps.dtype, grad_input=work)
            factor = -scale * weight if m else scale
            key_map = min(m, k.shape[2] - 1)
            scaled = torch.mul(query[m], factor, out=scratch.take("scaled", *query.shape[1:]))
            _add_product(sums_k[key_map], scaled, work, first and (m == 1 or k.shape[2] == 2))
            product = torch.bmm(work, key[key_map], out=scratch.take("product", *query.shape[1:]))
            target = _part(grad_q, kv_heads, block)[:, :, :, m, block.rows]
            target.copy_(product.mul_(factor).view(target.shape))
        if last:
            for target, total in ((grad_v, sum_v), *((grad_k[:, :, m], total) for m, total in enumerate(sums_k))):
                target = target[block.samples, block.heads]
                target.copy_(total.transpose(1, 2).view(target.shape))
    return grads


def _add_product(total: Tensor, rows: Tensor, weights: Tensor, first: bool) -> None:
    """Add rows' [X, rows] weights [rows, n] to the first n columns of each head's sum [X, keys], or overwrite them."""
    columns = total[..., : weights.shape[2]]
    if columns.stride(2) == 1:
        torch.baddbmm(columns, rows.transpose(1, 2), weights, beta=0 if first else 1, out=columns)
    else:  # torch multiplies one head at a time into a transposed result
        columns = columns.transpose(1, 2)
        torch.baddbmm(columns, weights.transpose(1, 2), rows, beta=0 if first else 1, out=columns)


def _new_outputs(q: Tensor, k: Tensor, v: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """Return [B, H, M, V] in the memory order [B, M, H, V], which merges heads without a copy, and memory for maps."""
    (batch, heads, _, queries, _), size = q.shape, v.shape[3]
    # Not a transposed tensor: autograd would take it for a view, and refuse to change it in place.
    out = q.new_empty_strided((batch, heads, queries, size), (queries * heads * size, size, heads * size, 1))
    return out, q.new_empty(2 * q.shape[0] * q.shape[1] * q.shape[3] * k.shape[3] if keep else 0)


def _new_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lam = q.new_empty(q.shape[0], q.shape[1], q.shape[3], 1)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), lam


@_forward.register_fake
def _(q, k, v, lam, mask, causal, scale, keep):
    return _new_outputs(q, k, v, keep)


@_backward.register_fake
def _(grad, q, k, v, lam, mask, kept, causal, scale):
    return _new_gradients(q, k, v)


def _save(ctx, inputs, output) -> None:
    q, k, v, lam, mask, ctx.causal, ctx.scale, _ = inputs
    ctx.save_for_backward(q, k, v, lam, mask, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # zeros as large as the kept maps


def _differentiate(ctx, grad, _):
    if grad is None:
        return (None,) * 8
    grads = _backward(grad, *ctx.saved_tensors, ctx.causal, ctx.scale)
    return *grads, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
