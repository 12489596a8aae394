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
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from diffvision.ops.attention.problem import Problem

# Scores of one map in a block, query rows of a block, and scores up to which whole samples share a block: the fastest,
# or nearly, from 17 to 4,096 keys when all were tried on two cores. Fewer rows would fit a smaller cache,
# but pack each key again for too few of them.
BLOCK_SCORES = 2**19
BLOCK_ROWS = 256
JOINED_SCORES = 2**18

# Causal calls have at least so many blocks, if not of fewer than half of `BLOCK_ROWS`: the keys after a block's last
# row are left out.
CAUSAL_BLOCKS = 8

# Up to here the maps are kept for backward: a sixth less time, for less memory than the formula takes. At 1,024 keys
# new pages of memory cost what it saves.
KEEP_MAPS_MAX_KEYS = 768

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
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor, *, causal: bool, mask: Tensor | None, scale: float, dropout: float
) -> Tensor:
    """Arguments, shapes and result as `diffvision.ops.diff_attention`, already checked."""
    work = torch.promote_types(q.dtype, torch.float32)
    lam = lam.to(work).expand(q.shape[0], q.shape[1], q.shape[3], 1)
    needs_gradients = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, lam))
    keep = needs_gradients and k.shape[3] <= KEEP_MAPS_MAX_KEYS
    return _forward(q.to(work), k.to(work), v.to(work), lam, mask, causal, scale, keep)[0].to(q.dtype)


class _Heads(NamedTuple):
    """What is computed with the same keys: several whole samples, or some key/value heads of one sample."""

    samples: slice
    heads: slice

    def of(self, x: Tensor, kv_heads: int) -> Tensor:
        """Return the part of x [B, H, ...] as [S, K, G, ...]: K key/value heads, with the G heads of each."""
        return x.unflatten(1, (kv_heads, x.shape[1] // kv_heads))[self.samples, self.heads]


class _Rows(NamedTuple):
    """Consecutive queries of all samples and heads, with the keys that they may attend to."""

    rows: slice
    keys: int  # up to the last that any row may attend to
    masked_from: int = 0  # every row may attend to the columns before this one
    forbidden: Tensor | None = None  # broadcastable to [S, heads, rows, columns from masked_from]
    may_lack_keys: bool = False  # a row without any key is possible

    def with_mask(self, mask: Tensor | None, part: _Heads, group: int) -> "_Rows":
        """Restrict the rows to some samples and heads, and forbid the keys that a mask forbids there too."""
        if mask is None:
            return self
        forbidden = ~mask[part.samples if mask.shape[0] > 1 else slice(None)]
        if mask.shape[1] > 1:
            forbidden = forbidden[:, part.heads.start * group : part.heads.stop * group]
        forbidden = forbidden[:, :, self.rows] if mask.shape[2] > 1 else forbidden
        forbidden = forbidden[..., : self.keys] if mask.shape[3] > 1 else forbidden.expand(-1, -1, -1, self.keys)
        if self.forbidden is not None:
            forbidden = forbidden | F.pad(self.forbidden, (self.masked_from, 0))
        return self._replace(masked_from=0, forbidden=forbidden, may_lack_keys=True)


def _blocks(q: Tensor, k: Tensor, causal: bool) -> tuple[list[_Heads], list[_Rows]]:
    """Split a call: the blocks are all rows of the first heads, from the last row to the first, then those of the next.

    The last rows of a causal call need all keys. Sizes follow `JOINED_SCORES`, `BLOCK_ROWS` and `BLOCK_SCORES`, so that
    the scores of a block fit the CPU's cache.
    """
    (batch, heads, _, queries, _), kv_heads, keys = q.shape, k.shape[1], k.shape[3]
    if not (batch and heads and queries and keys):
        return [], []
    group, past = heads // kv_heads, keys - queries  # query i attends to keys up to i + past
    samples_a_block = max(1, JOINED_SCORES // (heads * queries * keys))
    rows = min(BLOCK_ROWS, max(BLOCK_ROWS // 2, queries // CAUSAL_BLOCKS)) if causal else BLOCK_ROWS
    rows = min(queries, max(rows // group, 1))
    rows = -(-queries // -(-queries // rows))  # blocks of nearly equal size
    heads_a_block = min(kv_heads, max(2, BLOCK_SCORES // (group * rows * keys)))
    if samples_a_block > 1:
        rows, heads_a_block = queries, kv_heads
    parts = [
        _Heads(slice(sample, min(batch, sample + samples_a_block)), slice(head, min(kv_heads, head + heads_a_block)))
        for sample, head in itertools.product(range(0, batch, samples_a_block), range(0, kv_heads, heads_a_block))
    ]
    blocks = []
    for lo in reversed(range(0, queries, rows)):
        block = _Rows(slice(lo, min(queries, lo + rows)), keys)
        if causal:
            end = max(0, min(keys, block.rows.stop + past))
            start = max(0, min(end, lo + past + 1))
            later = torch.ones(block.rows.stop - lo, end - start, dtype=torch.bool).triu(lo + past + 1 - start)
            block = _Rows(block.rows, end, start, later[None, None], lo + past < 0)
        blocks.append(block)
    return parts, blocks


class _Scratch:
    """Memory that is reused by all blocks: page faults of newly allocated memory would double a block's time."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """Return an uninitialised tensor, which shares memory with earlier ones of the same name."""
        size = math.prod(shape)
        if name not in self._held or self._held[name].numel() < size:
            self._held[name] = self._like.new_empty(size)
        return self._held[name][:size].view(shape)

    def pack(self, name: str, x: Tensor) -> Tensor:
        """Return a contiguous copy."""
        return self.take(name, *x.shape).copy_(x)

    def sums(self, name: str, heads: int, keys: int, size: int) -> Tensor:
        """Return an uninitialised [heads, size, keys], in the memory order in which products are added fastest."""
        if keys >= LONG_KEYS:
            return self.take(name, heads, size, keys)
        return self.take(name, heads, keys, size).transpose(1, 2)


def _fill_maps(maps: Tensor, q: Tensor, k: Tensor, samples: int, block: _Rows) -> None:
    """Write both maps of a block [2, X, G * rows, n], of scaled q [2, X, G * rows, D] and k [P, X, n, D], X = S * K."""
    scores = maps.flatten(0, 1)
    if k.shape[0] == 2:
        torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), out=scores)
    else:
        for m in range(2):
            torch.bmm(q[m], k[0].transpose(1, 2), out=maps[m])
    if block.forbidden is None:
        torch.softmax(scores, -1, out=scores)
        return
    rows = block.rows.stop - block.rows.start
    by_head = maps.view(2, samples, maps.shape[1] * maps.shape[2] // (samples * rows), rows, block.keys)
    by_head[..., block.masked_from :].masked_fill_(block.forbidden, -torch.inf)
    torch.softmax(scores, -1, out=scores)
    if block.may_lack_keys and (dead := block.forbidden.all(-1, keepdim=True)).any():
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
    parts, blocks = _blocks(q, k, causal)
    for part in parts:
        query, key, value, weight = _tensors(q, k, v, lam, part, scratch if len(blocks) > 1 else None)
        target = part.of(out, kv_heads)
        for unmasked in blocks:
            block = unmasked.with_mask(mask, part, query.shape[2])
            rows, end = block.rows, block.keys
            scaled = _scale_queries(query, rows, scale, scratch)
            shape = (*scaled.shape[:3], end)
            maps = kept[used : used + math.prod(shape)].view(shape) if keep else scratch.take("maps", *shape)
            used += maps.numel()
            _fill_maps(maps, scaled, key[:, :, :end], target.shape[0], block)
            difference = scratch.take("difference", *shape[1:])
            torch.addcmul(maps[0], maps[1], weight[:, :, rows].flatten(1, 2), value=-1, out=difference)
            product = torch.bmm(difference, value[:, :end], out=scratch.take("product", *shape[1:3], v.shape[3]))
            of_rows = target[:, :, :, rows]
            of_rows.copy_(product.view(of_rows.shape))
    return out, kept


def _scale_queries(query: Tensor, rows: slice, scale: float, scratch: _Scratch) -> Tensor:
    """Return a block's queries times the scale [2, S * K, G * rows, D]: heads of the same keys share a product."""
    part = query[:, :, :, rows]
    return torch.mul(part, scale, out=scratch.take("q", *part.shape)).flatten(2, 3)


def _tensors(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor, part: _Heads, scratch: _Scratch | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a part's queries [2, S * K, G, M, D], keys [P, S * K, N, D], values [S * K, N, V], lam [S * K, G, M, 1].

    With scratch the keys and values are copied to it, for the products of several blocks: a projection writes a token's
    heads side by side.
    """
    query = part.of(q, k.shape[1]).permute(3, 0, 1, 2, 4, 5).flatten(1, 2)
    key, value = k[part.samples, part.heads].movedim(2, 0), v[part.samples, part.heads]
    if scratch is not None:
        key, value = scratch.pack("k", key), scratch.pack("v", value)
    return query, key.flatten(1, 2), value.flatten(0, 1), part.of(lam, k.shape[1]).flatten(0, 1)


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
    if not (q.shape[3] and k.shape[3]):
        for empty in grads:
            empty.zero_()
    parts, blocks = _blocks(q, k, causal)
    for part in parts:
        query, key, value, weight = _tensors(q, k, v, lam, part, scratch if len(blocks) > 1 else None)
        outer = part.of(grad, kv_heads).flatten(0, 1)
        grad_q, grad_lam = part.of(grads[0], kv_heads), part.of(grads[3], kv_heads)
        heads, keys = value.shape[:2]
        sum_v = scratch.sums("sum_v", heads, keys, v.shape[3])
        sums_k = [scratch.sums(f"sum_k{m}", heads, keys, k.shape[4]) for m in range(k.shape[2])]
        for unmasked in blocks:
            # The first block has all keys: its products overwrite the sums.
            first, block = unmasked is blocks[0], unmasked.with_mask(mask, part, query.shape[2])
            rows, end = block.rows, block.keys
            scaled, block_outer = _scale_queries(query, rows, scale, scratch), outer[:, :, rows].flatten(1, 2)
            negative, shape = weight[:, :, rows].flatten(1, 2).neg(), (*scaled.shape[:3], end)
            if kept.numel():
                maps = kept[used : used + math.prod(shape)].view(shape)
                used += maps.numel()
            else:
                maps = scratch.take("maps", *shape)
                _fill_maps(maps, scaled, key[:, :, :end], grad_q.shape[0], block)
            shared = scratch.take("shared", *shape[1:])  # dP = dO V'
            torch.bmm(block_outer, value[:, :end].transpose(1, 2), out=shared)
            work = scratch.take("work", *shape[1:])
            torch.addcmul(maps[0], maps[1], negative, out=work)
            _add_product(sum_v, block_outer, work, first)
            torch.mul(maps[1], shared, out=work)
            row_sums = work.sum(-1, keepdim=True)
            of_rows = grad_lam[:, :, :, rows]
            torch.neg(row_sums.view(of_rows.shape), out=of_rows)
            work.addcmul_(maps[1], row_sums, value=-1)
            for m in (1, 0):
                if m == 0:
                    torch.ops.aten._softmax_backward_data.out(shared, maps[0], -1, maps.dtype, grad_input=work)
                factor = scale * negative if m else scale
                key_map = min(m, k.shape[2] - 1)
                key_rows = scaled[1].mul_(negative) if m else scaled[0]
                _add_product(sums_k[key_map], key_rows, work, first and (m == 1 or k.shape[2] == 2))
                product = torch.bmm(work, key[key_map, :, :end], out=scratch.take("product", *scaled.shape[1:]))
                of_rows = grad_q[:, :, :, m, rows]
                of_rows.copy_(product.mul_(factor).view(of_rows.shape))
        sums = [(grads[2], sum_v), *((grads[1][:, :, m], total) for m, total in enumerate(sums_k))]
        for target, total in sums:
            of_part = target[part.samples, part.heads]
            of_part.copy_(total.transpose(1, 2).view(of_part.shape))
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
    """Return memory for the output and for the maps."""
    (batch, heads, _, queries, _), keys, size = q.shape, k.shape[3], v.shape[3]
    # In the memory order [B, M, H, V], which merges heads without a copy; not a transposed tensor, which autograd would
    # take for a view, and refuse to change in place.
    strides = (queries * heads * size, size, heads * size, 1)
    out = q.new_empty_strided((batch, heads, queries, size), strides)
    return out, q.new_empty(2 * batch * heads * queries * keys if keep else 0)


def _new_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lam = q.new_empty(q.shape[0], q.shape[1], q.shape[3], 1)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), lam


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, lam, mask, ctx.causal, ctx.scale, _ = inputs
    ctx.save_for_backward(q, k, v, lam, mask, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # zeros as large as the kept maps


def _differentiate(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 8
    return *_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.scale), None, None, None, None


def _count(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """Return 2 FLOPs a multiply-add of two maps' logits and of one product with the values.

    They are those of `eager`, for torch's counter, which cannot look into an operator: dense, whether causal or masked
    or not, and without what the backward pass computes again.
    """
    batch, heads, maps, queries, size = q.shape
    return 2 * batch * queries * k.shape[3] * heads * (maps * size + v.shape[3])


_forward.register_fake(lambda q, k, v, lam, mask, causal, scale, keep: _new_outputs(q, k, v, keep))
_backward.register_fake(lambda grad, q, k, v, *_: _new_gradients(q, k, v))
_forward.register_autograd(_differentiate, setup_context=_save)
register_flop_formula(torch.ops.diffvision.diff_attention_blocked, get_raw=True)(_count)
register_flop_formula(torch.ops.diffvision.diff_attention_blocked_backward, get_raw=True)(
    lambda grad, *inputs, **others: 2 * _count(*inputs, **others)
)
