"""Decoding: a few queries against a long cache of keys, without gradients.

One query leaves most of a GPU idle if a program takes all keys of a head, so the keys are split among programs, which
leave the running maximum, sum and product of both maps; a second small kernel joins them and subtracts. A program holds
the queries of every head that reads its key/value head, so a cache is read once: K1, K2 and V, for the group and both
maps. (Split keys as in "Flash-Decoding", crfm.stanford.edu/2023/10/12/flashdecoding.html.)
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffvision.ops.attention import operators

LOG2E = 1.4426950408889634
MIN_KEYS = 256  # of a split: fewer would cost more to join than they save
INTERPRETED_PROCESSORS = 4  # in place of a GPU's number where there is none


@triton.jit
def _tile(base, rows, rows_ok, stride, stride_inner, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows of a matrix as [rows, BLOCK], zeros where there are none."""
    columns = tl.arange(0, BLOCK)
    pointers = base + rows[:, None] * stride + columns[None, :] * stride_inner
    return tl.load(pointers, mask=rows_ok[:, None] & (columns < SIZE)[None, :], other=0.0)


@triton.jit
def _add(scores, top, total, product, values, PRECISION: tl.constexpr):
    """Add one block of keys to a map's running softmax. Scores are in base 2; -inf is a key not attended to."""
    new = tl.maximum(top, tl.max(scores, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)  # no key so far: exp2(-inf - -inf) would be NaN
    weights = tl.exp2(scores - safe[:, None])
    keep = tl.exp2(top - safe)
    total = total * keep + tl.sum(weights, 1)
    product = tl.dot(weights.to(values.dtype), values, product * keep[:, None], input_precision=PRECISION)
    return new, total, product


@triton.jit
def _split(
    q, k, v, mask, tops, totals, products,
    q_b, q_h, q_p, q_m, q_d, k_b, k_h, k_p, k_n, k_d, v_b, v_h, v_n, v_v, mask_b, mask_h, mask_m, mask_n,
    scale, HK, G, M, N, R, splits, keys_a_split,
    D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute both maps' partial softmax over the keys of one split, for the rows (head, query) of one kv head.

    tops, totals [splits, 2, R] and products [splits, 2, R, V] in float32; R = B * H * M.
    """
    split = tl.program_id(0) % splits
    head = tl.program_id(0) // splits  # all in the grid's first axis: the others end at 65,535
    b = (head // HK).to(tl.int64)
    kv = (head % HK).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    rows_ok = rows < G * M
    heads, queries = kv * G + rows // M, rows % M

    columns = tl.arange(0, BLOCK_D)
    pointers = q + b * q_b + (heads * q_h + queries * q_m)[:, None] + columns[None, :] * q_d
    there = rows_ok[:, None] & (columns < D)[None, :]
    q1 = tl.load(pointers, mask=there, other=0.0)
    q2 = tl.load(pointers + q_p, mask=there, other=0.0)
    k += b * k_b + kv * k_h
    v += b * v_b + kv * v_h

    top1 = tl.full([ROWS], float("-inf"), tl.float32)
    top2 = tl.full([ROWS], float("-inf"), tl.float32)
    total1 = tl.zeros([ROWS], tl.float32)
    total2 = tl.zeros([ROWS], tl.float32)
    product1 = tl.zeros([ROWS, BLOCK_V], tl.float32)
    product2 = tl.zeros([ROWS, BLOCK_V], tl.float32)
    first = split * keys_a_split
    last = tl.minimum(first + keys_a_split, N)
    for start in tl.range(first, last, BLOCK_N):
        inside = tl.arange(0, BLOCK_N)
        keys = start + inside
        keys_ok = keys < last
        here = tl.cast(start, tl.int64)
        k1 = _tile(k + here * k_n, inside, keys_ok, k_n, k_d, D, BLOCK_D)
        values = _tile(v + here * v_n, inside, keys_ok, v_n, v_v, V, BLOCK_V)
        scores1 = tl.dot(q1, tl.trans(k1), input_precision=PRECISION) * scale
        if SHARED:
            scores2 = tl.dot(q2, tl.trans(k1), input_precision=PRECISION) * scale
        else:
            k2 = _tile(k + k_p + here * k_n, inside, keys_ok, k_n, k_d, D, BLOCK_D)
            scores2 = tl.dot(q2, tl.trans(k2), input_precision=PRECISION) * scale
        allowed = rows_ok[:, None] & keys_ok[None, :]
        if CAUSAL:
            allowed = allowed & (keys[None, :] <= queries[:, None] + (N - M))
        if MASK:
            mask_rows = mask + b * mask_b + (heads * mask_h + queries * mask_m)[:, None]
            allowed = allowed & (tl.load(mask_rows + keys.to(tl.int64)[None, :] * mask_n, mask=allowed, other=0) != 0)
        scores1 = tl.where(allowed, scores1, float("-inf"))
        scores2 = tl.where(allowed, scores2, float("-inf"))
        top1, total1, product1 = _add(scores1, top1, total1, product1, values, PRECISION)
        top2, total2, product2 = _add(scores2, top2, total2, product2, values, PRECISION)

    row = ((b * HK + kv) * G * M + rows).to(tl.int64)
    one = tl.cast(split, tl.int64) * 2 * R + row
    tl.store(tops + one, top1, mask=rows_ok)
    tl.store(tops + one + R, top2, mask=rows_ok)
    tl.store(totals + one, total1, mask=rows_ok)
    tl.store(totals + one + R, total2, mask=rows_ok)
    columns = tl.arange(0, BLOCK_V)
    pointers = products + one[:, None] * V + columns[None, :]
    there = rows_ok[:, None] & (columns < V)[None, :]
    tl.store(pointers, product1, mask=there)
    tl.store(pointers + tl.cast(R, tl.int64) * V, product2, mask=there)


@triton.jit
def _joined(tops, totals, products, row, R, splits, V: tl.constexpr, BLOCK_V: tl.constexpr, SPLITS: tl.constexpr):
    """Compute a map's output of one row from its splits."""
    every = tl.arange(0, SPLITS)
    offsets = every.to(tl.int64) * 2 * R + row
    top = tl.load(tops + offsets, mask=every < splits, other=float("-inf"))
    highest = tl.max(top, 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.load(totals + offsets, mask=every < splits, other=0.0) * tl.exp2(top - highest), 0)
    columns = tl.arange(0, BLOCK_V)
    product = tl.zeros([BLOCK_V], tl.float32)
    for split in tl.range(0, splits):
        offset = tl.cast(split, tl.int64) * 2 * R + row
        weight = tl.exp2(tl.load(tops + offset) - highest)
        product += weight * tl.load(products + offset * V + columns, mask=columns < V, other=0.0)
    return product / tl.where(total == 0.0, 1.0, total)  # a row without any key: 0 / 1


@triton.jit
def _join(
    tops, totals, products, lam, out, lam_b, lam_h, lam_m, H, M, R, splits,
    V: tl.constexpr, BLOCK_V: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Write out [B, H, M, V] = first map's output - lam * second's, with a program a row."""
    row = tl.program_id(0).to(tl.int64)
    b, h, i = row // (H * M), row // M % H, row % M
    first = _joined(tops, totals, products, row, R, splits, V, BLOCK_V, SPLITS)
    second = _joined(tops, totals, products, row + R, R, splits, V, BLOCK_V, SPLITS)
    result = first - tl.load(lam + b * lam_b + h * lam_h + i * lam_m) * second
    columns = tl.arange(0, BLOCK_V)
    tl.store(out + row * V + columns, result.to(out.dtype.element_ty), mask=columns < V)


def decode(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor, *, causal: bool, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Compute `diffvision.ops.diff_attention`, already checked, for few queries and without gradients."""
    return _decode(q, k, v, lam, mask, causal, q.shape[4] ** -0.5 if scale is None else scale)


@torch.library.custom_op("diffvision::triton_decode", mutates_args=())
def _decode(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Attend in parallel over splits of the keys, and join the partial results."""
    batch, heads, _, queries, _ = q.shape
    kv_heads, keys, size = k.shape[1], k.shape[3], v.shape[3]
    out = q.new_empty(batch, heads, queries, size)
    if not out.numel():
        return out
    x = constants(q.dtype, q.shape[4], size, heads // kv_heads * queries, interpreted=not q.is_cuda)
    blocks = triton.cdiv(heads // kv_heads * queries, x["ROWS"])
    splits, keys_a_split = split_keys(keys, batch * kv_heads * blocks, x["BLOCK_N"], _processors(q.device))
    rows = batch * heads * queries
    empty = partial(torch.empty, dtype=torch.float32, device=q.device)
    tops, totals, products = empty(splits, 2, rows), empty(splits, 2, rows), empty(splits, 2, rows, size)
    # Fused multiplications and additions are triton's default, and from 3.9 a warning where that is not spelled out.
    options = {"num_warps": x.pop("num_warps"), "num_stages": x.pop("num_stages"), "enable_fp_fusion": True}
    seen: Tensor = q
    seen_strides: tuple[int, ...] = (0, 0, 0, 0)  # without a mask any pointer will do: it is not read
    if mask is not None:
        seen = mask.view(torch.uint8)
        seen_strides = mask.expand(batch, heads, queries, keys).stride()
    lam = lam.float().expand(batch, heads, queries, 1)
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        _split[(splits * batch * kv_heads, blocks)](
            q, k, v, seen, tops, totals, products, *q.stride(), *k.stride(), *v.stride(), *seen_strides,
            scale * LOG2E, kv_heads, heads // kv_heads, queries, keys, rows, splits, keys_a_split,
            CAUSAL=causal and queries > 1, MASK=mask is not None, SHARED=k.shape[2] == 1, **x, **options,
        )  # fmt: skip
        _join[(rows,)](
            tops, totals, products, lam, out, *lam.stride()[:3], heads, queries, rows, splits,
            V=size, BLOCK_V=x["BLOCK_V"], SPLITS=triton.next_power_of_2(splits), num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip
    return out


@_decode.register_fake
def _(q, k, v, lam, mask, causal, scale):
    return q.new_empty(q.shape[0], q.shape[1], q.shape[3], v.shape[3])


operators.count(torch.ops.diffvision.triton_decode)


def constants(
    dtype: torch.dtype, head_dim: int, value_dim: int, rows: int, *, interpreted: bool = False
) -> dict[str, Any]:
    """Return tiles, warps and stages of `_split` that keep its two products in Hopper's registers."""
    block_d, block_v = (max(16, triton.next_power_of_2(size)) for size in (head_dim, value_dim))
    most = 16 if dtype == torch.float32 or block_v > 128 else 32
    held = min(max(16, triton.next_power_of_2(rows)), most)
    if dtype == torch.float32:  # exact products hold their operands in registers too
        keys, warps, stages = 16, 8, 1
    else:
        keys, warps, stages = 32, 4 if held == 16 else 8, 3
    return {
        "D": head_dim,
        "V": value_dim,
        "BLOCK_D": block_d,
        "BLOCK_V": block_v,
        "ROWS": held,
        "BLOCK_N": 64 if interpreted else keys,  # an interpreter's cost is its steps
        "PRECISION": "ieee",
        "num_warps": warps,
        "num_stages": stages,
    }


def split_keys(keys: int, programs: int, block: int, processors: int) -> tuple[int, int]:
    """Return (splits, keys of each): two programs a processor if there are keys; all splits but the last are full."""
    wanted = max(1, min(-(-2 * processors // programs), keys // MIN_KEYS))
    each = -(-max(keys, 1) // wanted // block) * block
    return -(-max(keys, 1) // each), each


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
