"""Functions that the kernels share: a program's sequence, tiles read through strides, and the mask."""

import triton
import triton.language as tl

# How a call is masked. A mask that is the same for every query (key padding) is read as one row of bytes, and masked
# keys and values are then never read; any other mask is read tile by tile.
NO_MASK, KEY_MASK, FULL_MASK = 0, 1, 2


@triton.jit
def span(cu_seqlens, sequence, length, VARLEN: tl.constexpr):
    """Return first row and number of rows of a sequence; without packing every batch element starts at row 0."""
    if VARLEN:
        start = tl.load(cu_seqlens + sequence)
        return start.to(tl.int64), tl.load(cu_seqlens + sequence + 1) - start
    else:
        return 0, length


@triton.jit
def load_rows(base, first, rows, stride, ok, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows `first + rows` as [rows, BLOCK]; zeros where `ok` is false and beyond SIZE. `ok` None: all rows exist.

    The block's first row is added to the pointer in 64 bits; inside the block 32 bits are enough.
    """
    columns = tl.arange(0, BLOCK)
    pointers = base + tl.cast(first, tl.int64) * stride + rows[:, None] * stride + columns[None, :]
    if SIZE == BLOCK:
        if ok is None:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=ok[:, None], other=0.0)
    else:
        if ok is None:
            return tl.load(pointers, mask=(columns < SIZE)[None, :], other=0.0)
        else:
            return tl.load(pointers, mask=ok[:, None] & (columns < SIZE)[None, :], other=0.0)


@triton.jit
def store_rows(base, first, rows, stride, ok, tile, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store a tile of rows, without its padding."""
    columns = tl.arange(0, BLOCK)
    pointers = base + tl.cast(first, tl.int64) * stride + rows[:, None] * stride + columns[None, :]
    mask = ok[:, None]
    if SIZE != BLOCK:
        mask = mask & (columns < SIZE)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def allowed_keys(mask, keys, N, mask_n, MASK: tl.constexpr):
    """Return which keys exist and are no padding, [keys]."""
    ok = keys < N
    if MASK == 1:
        ok = ok & (tl.load(mask + keys.to(tl.int64) * mask_n, mask=ok, other=0) != 0)
    return ok


@triton.jit
def allowed_pairs(mask, queries, keys, keys_ok, M, N, mask_m, mask_n, CAUSAL: tl.constexpr, MASK: tl.constexpr):
    """Return which pairs may attend; `queries` and `keys` are 2-D, a column and a row or the reverse."""
    ok = keys_ok
    if CAUSAL:
        ok = ok & (keys <= queries + (N - M))
    if MASK == 2:
        pointers = mask + queries.to(tl.int64) * mask_m + keys.to(tl.int64) * mask_n
        ok = ok & (tl.load(pointers, mask=(queries < M) & (keys < N), other=0) != 0)
    return ok


@triton.jit
def load_lse(base, rows, ok):
    """Load a map's log2-sum-exp2; +inf, which makes weights 0, for rows that do not exist or have no key (-inf)."""
    lse = tl.load(base + rows, mask=ok, other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse)


@triton.jit
def log2_sum(top, total):
    """Return top + log2(total), and -inf for a row without any key."""
    empty = total == 0.0
    return tl.where(empty, float("-inf"), top + tl.log2(tl.where(empty, 1.0, total)))


@triton.jit
def inverse(total):
    """Return 1 / total, and 0 for a row without any key."""
    return tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total))
