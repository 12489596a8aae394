"""Kernels for rows of any length: keys pass by in blocks, softmaxes are kept online (arXiv 2205.14135, 2307.08691).

Forward does 12 N^2 D of matrix work a differential head (both maps' scores, both products with V = 2D values): a
running maximum a map forbids subtracting the maps before the product. Backward does 28, or 32 where dk and dv of a
block of keys do not fit the registers together: a kernel for each side, which computes the scores again, so that no
number is added by two programs and every run gives the same.
Scores are kept in powers of two: `scale` already holds log2(e), except in what multiplies a gradient (`grad_scale`).
"""

import triton
import triton.language as tl

from diffvision.ops.attention.triton.tiles import (
    allowed_keys,
    allowed_pairs,
    inverse,
    load_lse,
    load_rows,
    log2_sum,
    span,
    store_rows,
)

_INTEGERS = ["H", "G", "M", "N", "blocks"]  # not worth a compilation for each divisibility


@triton.jit
def _online(s, scale, v, top, total, acc, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Add one key block of one map: weights relative to the running maximum, older sums scaled to the new one."""
    new = tl.maximum(top, tl.max(s, 1) * scale)
    base = new
    if MASKED:  # a row that has seen no key yet
        base = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s * scale - base[:, None])
    old = tl.exp2(top - base)
    acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision=PRECISION)
    return new, total * old + tl.sum(p, 1), acc


@triton.jit
def _forward_blocks(
    q, top, total, acc, k, v, mask, scale, queries, low, high, M, N, k_n, v_n, mask_m, mask_n,
    D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the key blocks from `low` to `high`. MASKED: some pairs may not attend."""
    columns = tl.arange(0, BLOCK_N)
    for start in range(low, high, BLOCK_N):
        keys_ok = None
        if MASKED:
            keys_ok = allowed_keys(mask, start + columns, N, mask_n, MASK)
        s = tl.dot(q, tl.trans(load_rows(k, start, columns, k_n, keys_ok, D, BLOCK_D)), input_precision=PRECISION)
        values = load_rows(v, start, columns, v_n, keys_ok, V, BLOCK_V)
        factor = scale
        if MASKED:
            keys = (start + columns)[None, :]
            exist = tl.expand_dims(keys_ok, 0)
            ok = allowed_pairs(mask, queries[:, None], keys, exist, M, N, mask_m, mask_n, CAUSAL, MASK)
            s, factor = s * scale, 1.0
            s = tl.where(ok, s, float("-inf"))
        top, total, acc = _online(s, factor, values, top, total, acc, MASKED, PRECISION)
    return top, total, acc


@triton.jit
def _forward_map(
    q, k, v, mask, scale, queries, full, end, M, N, k_n, v_n, mask_m, mask_n,
    D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return one map's product with the values and its lse; every query attends to the keys before `full`."""
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if MASK == 0:
        top, total, acc = _forward_blocks(
            q, top, total, acc, k, v, mask, scale, queries, 0, full, M, N, k_n, v_n, mask_m, mask_n,
            D, V, BLOCK_D, BLOCK_V, BLOCK_N, CAUSAL, MASK, PRECISION, False,
        )  # fmt: skip
    top, total, acc = _forward_blocks(
        q, top, total, acc, k, v, mask, scale, queries, full, end, M, N, k_n, v_n, mask_m, mask_n,
        D, V, BLOCK_D, BLOCK_V, BLOCK_N, CAUSAL, MASK, PRECISION, True,
    )  # fmt: skip
    return acc * inverse(total)[:, None], log2_sum(top, total)


@triton.jit(do_not_specialize=_INTEGERS)
def forward(
    q, k, v, lam, mask, cu_q, cu_k, out, o2, lse, scale, H, G, M, N, blocks,
    q_b, q_h, q_p, q_m, k_b, k_h, k_p, k_n, v_b, v_h, v_n, lam_b, lam_h, lam_m, mask_b, mask_h, mask_m, mask_n,
    out_b, out_h, out_m, lse_b, lse_h, lse_p,
    D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, SHARED: tl.constexpr,
    VARLEN: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a block of queries of one head: the second map first, then the first and the difference.

    Both maps side by side would need two accumulators [M, V], and a tensor core's warp owns 16 rows of a tile whatever
    the number of warps: for V = 256 they do not fit the registers. The second product waits in memory (`o2`, which
    backward wants anyway; in inference that is `out` itself), rounded to the inputs' type.
    """
    program = tl.program_id(0)
    block = program % blocks
    if CAUSAL:  # the heaviest first
        block = blocks - 1 - block
    b, h = (program // blocks // H).to(tl.int64), (program // blocks % H).to(tl.int64)
    q_start, M = span(cu_q, b, M, VARLEN)
    k_start, N = span(cu_k, b, N, VARLEN)
    first = block * BLOCK_M
    if first >= M:
        return
    q += b * q_b + h * q_h + q_start * q_m
    k += b * k_b + (h // G) * k_h + k_start * k_n
    v += b * v_b + (h // G) * v_h + k_start * v_n
    out += b * out_b + h * out_h + q_start * out_m
    o2 += b * out_b + h * out_h + q_start * out_m
    if MASK != 0:
        mask += b * mask_b + h * mask_h
    rows = tl.arange(0, BLOCK_M)
    queries = first + rows
    ok = queries < M
    end = N
    full = N
    if CAUSAL:  # the last row's last key, and the first row's
        end = tl.minimum(N, first + BLOCK_M + N - M)
        full = tl.maximum(0, tl.minimum(N, first + 1 + N - M))
    full = full // BLOCK_N * BLOCK_N
    if MASK != 0:
        full = 0
    if not SHARED:
        k2 = k + k_p
    else:
        k2 = k
    second, lse2 = _forward_map(
        load_rows(q + q_p, first, rows, q_m, ok, D, BLOCK_D), k2, v, mask, scale, queries, full, end, M, N,
        k_n, v_n, mask_m, mask_n, D, V, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N, CAUSAL, MASK, PRECISION,
    )  # fmt: skip
    store_rows(o2, first, rows, out_m, ok, second, V, BLOCK_V)
    tl.debug_barrier()  # what one thread wrote another may read below
    result, lse1 = _forward_map(
        load_rows(q, first, rows, q_m, ok, D, BLOCK_D), k, v, mask, scale, queries, full, end, M, N,
        k_n, v_n, mask_m, mask_n, D, V, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N, CAUSAL, MASK, PRECISION,
    )  # fmt: skip
    weight = tl.load(lam + b * lam_b + h * lam_h + (q_start + queries).to(tl.int64) * lam_m, mask=ok, other=0.0)
    result -= weight[:, None] * load_rows(o2, first, rows, out_m, ok, V, BLOCK_V).to(tl.float32)
    tl.debug_barrier()
    store_rows(out, first, rows, out_m, ok, result, V, BLOCK_V)
    if SAVE:
        lse += b * lse_b + h * lse_h + q_start
        tl.store(lse + queries, lse1, mask=ok)
        tl.store(lse + lse_p + queries, lse2, mask=ok)


@triton.jit(do_not_specialize=_INTEGERS)
def delta(
    out, o2, grad, lam, cu_q, result, H, M, blocks,
    out_b, out_h, out_m, grad_b, grad_h, grad_m, lam_b, lam_h, lam_m, lse_b, lse_h, lse_p,
    V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Compute row sums D1, D2 of dO times each map's product with V: D1 = rowsum(dO out) + lam D2."""
    program = tl.program_id(0)
    b, h = (program // blocks // H).to(tl.int64), (program // blocks % H).to(tl.int64)
    start, M = span(cu_q, b, M, VARLEN)
    first = program % blocks * BLOCK_M
    if first >= M:
        return
    rows = tl.arange(0, BLOCK_M)
    queries = first + rows
    ok = queries < M
    offset = b * out_b + h * out_h + start * out_m
    both = load_rows(out + offset, first, rows, out_m, ok, V, BLOCK_V).to(tl.float32)
    second = load_rows(o2 + offset, first, rows, out_m, ok, V, BLOCK_V).to(tl.float32)
    g = load_rows(grad + b * grad_b + h * grad_h + start * grad_m, first, rows, grad_m, ok, V, BLOCK_V).to(tl.float32)
    d2 = tl.sum(g * second, 1)
    weight = tl.load(lam + b * lam_b + h * lam_h + (start + queries).to(tl.int64) * lam_m, mask=ok, other=0.0)
    result += b * lse_b + h * lse_h + start
    tl.store(result + queries, tl.sum(g * both, 1) + weight * d2, mask=ok)
    tl.store(result + lse_p + queries, d2, mask=ok)


@triton.jit
def _keys_side(
    dk1, dk2, dv, k1, k2, values, q, grad, lam, lse, deltas, mask, scale, keys, keys_ok, low, high, M, N,
    q_p, q_m, grad_m, lam_m, lse_p, mask_m, mask_n,
    D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add query blocks from `low` to `high` to dk and dv. Tiles are [keys, queries], as both products need them."""
    rows = tl.arange(0, BLOCK_M)
    for start in range(low, high, BLOCK_M):
        queries = start + rows
        ok = queries < M
        lse1 = load_lse(lse, queries, ok)
        lse2 = load_lse(lse + lse_p, queries, ok)
        weight = tl.load(lam + queries.to(tl.int64) * lam_m, mask=ok, other=0.0)
        q1 = load_rows(q, start, rows, q_m, ok, D, BLOCK_D)
        q2 = load_rows(q + q_p, start, rows, q_m, ok, D, BLOCK_D)
        g = load_rows(grad, start, rows, grad_m, ok, V, BLOCK_V)
        p1 = tl.exp2(tl.dot(k1, tl.trans(q1), input_precision=PRECISION) * scale - lse1[None, :])
        p2 = tl.exp2(tl.dot(k2, tl.trans(q2), input_precision=PRECISION) * scale - lse2[None, :])
        if MASKED:
            pairs = allowed_pairs(
                mask, queries[None, :], keys[:, None], keys_ok[:, None], M, N, mask_m, mask_n, CAUSAL, MASK
            )
            p1 = tl.where(pairs, p1, 0.0)
            p2 = tl.where(pairs, p2, 0.0)
        p2 = p2 * weight[None, :]
        if VALUES:
            dv = tl.dot((p1 - p2).to(g.dtype), g, dv, input_precision=PRECISION)
        if KEYS:
            dp = tl.dot(values, tl.trans(g), input_precision=PRECISION)
            d1 = tl.load(deltas + queries, mask=ok, other=0.0)
            d2 = tl.load(deltas + lse_p + queries, mask=ok, other=0.0)
            dk1 = tl.dot((p1 * (dp - d1[None, :])).to(q1.dtype), q1, dk1, input_precision=PRECISION)
            ds2 = (p2 * (d2[None, :] - dp)).to(q1.dtype)
            if SHARED:
                dk1 = tl.dot(ds2, q2, dk1, input_precision=PRECISION)
            else:
                dk2 = tl.dot(ds2, q2, dk2, input_precision=PRECISION)
    return dk1, dk2, dv


@triton.jit(do_not_specialize=_INTEGERS)
def backward_keys(
    q, k, v, lam, mask, cu_q, cu_k, grad, lse, deltas, dk, dv, scale, grad_scale, H, G, M, N, blocks,
    q_b, q_h, q_p, q_m, k_b, k_h, k_p, k_n, v_b, v_h, v_n, lam_b, lam_h, lam_m, mask_b, mask_h, mask_m, mask_n,
    grad_b, grad_h, grad_m, lse_b, lse_h, lse_p, dk_b, dk_h, dk_p, dk_n, dv_b, dv_h, dv_n,
    D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, SHARED: tl.constexpr,
    VARLEN: tl.constexpr, PRECISION: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Compute dk (KEYS) and dv (VALUES) of a block of keys, over every query of every head that reads them.

    H counts key/value heads here.
    """
    program = tl.program_id(0)
    b, kv = (program // blocks // H).to(tl.int64), (program // blocks % H).to(tl.int64)
    q_start, M = span(cu_q, b, M, VARLEN)
    k_start, N = span(cu_k, b, N, VARLEN)
    first = program % blocks * BLOCK_N
    if first >= N:
        return
    columns = tl.arange(0, BLOCK_N)
    keys = first + columns
    k += b * k_b + kv * k_h + k_start * k_n
    v += b * v_b + kv * v_h + k_start * v_n
    dk += b * dk_b + kv * dk_h + k_start * dk_n
    dv += b * dv_b + kv * dv_h + k_start * dv_n
    begin = 0
    full = 0
    if CAUSAL:  # the first query that sees the first key, and the first that sees them all
        begin = tl.maximum(0, first + M - N) // BLOCK_M * BLOCK_M
        full = tl.minimum(M, tl.maximum(0, first + BLOCK_N - 1 + M - N))
        full = tl.maximum(begin, (full + BLOCK_M - 1) // BLOCK_M * BLOCK_M)

    keys_ok = keys < N
    # What a pass does not compute is never used, so it takes no register.
    dk1 = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dk2 = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dvalues = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    k1 = load_rows(k, first, columns, k_n, keys_ok, D, BLOCK_D)
    k2 = k1
    if not SHARED:
        k2 = load_rows(k + k_p, first, columns, k_n, keys_ok, D, BLOCK_D)
    values = load_rows(v, first, columns, v_n, keys_ok, V, BLOCK_V)
    for member in range(0, G):
        h = kv * G + member
        q_h0 = q + b * q_b + h * q_h + q_start * q_m
        grad_h0 = grad + b * grad_b + h * grad_h + q_start * grad_m
        lam_h0 = lam + b * lam_b + h * lam_h + q_start * lam_m
        lse_h0 = lse + b * lse_b + h * lse_h + q_start
        deltas_h0 = deltas + b * lse_b + h * lse_h + q_start
        mask_h0 = mask
        pairs_ok = keys_ok
        if MASK != 0:
            mask_h0 = mask + b * mask_b + h * mask_h
            pairs_ok = allowed_keys(mask_h0, keys, N, mask_n, MASK)
        if CAUSAL or MASK != 0:
            stop = full
            if MASK != 0:
                stop = M
            dk1, dk2, dvalues = _keys_side(
                dk1, dk2, dvalues, k1, k2, values, q_h0, grad_h0, lam_h0, lse_h0, deltas_h0, mask_h0, scale,
                keys, pairs_ok, begin, stop, M, N, q_p, q_m, grad_m, lam_m, lse_p, mask_m, mask_n,
                D, V, BLOCK_D, BLOCK_V, BLOCK_M, CAUSAL, MASK, SHARED, PRECISION, KEYS, VALUES, True,
            )  # fmt: skip
        if MASK == 0:
            dk1, dk2, dvalues = _keys_side(
                dk1, dk2, dvalues, k1, k2, values, q_h0, grad_h0, lam_h0, lse_h0, deltas_h0, mask_h0, scale,
                keys, pairs_ok, full, M, M, N, q_p, q_m, grad_m, lam_m, lse_p, mask_m, mask_n,
                D, V, BLOCK_D, BLOCK_V, BLOCK_M, CAUSAL, MASK, SHARED, PRECISION, KEYS, VALUES, False,
            )  # fmt: skip
    if KEYS:
        store_rows(dk, first, columns, dk_n, keys_ok, dk1 * grad_scale, D, BLOCK_D)
        if not SHARED:
            store_rows(dk + dk_p, first, columns, dk_n, keys_ok, dk2 * grad_scale, D, BLOCK_D)
    if VALUES:
        store_rows(dv, first, columns, dv_n, keys_ok, dvalues, V, BLOCK_V)


@triton.jit
def _queries_side(
    dq1, dq2, q1, q2, g, lse1, lse2, d1, d2, weight, k, v, mask, scale, queries, low, high, M, N,
    k_p, k_n, v_n, mask_m, mask_n,
    D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add key blocks from `low` to `high` to dq."""
    columns = tl.arange(0, BLOCK_N)
    for start in range(low, high, BLOCK_N):
        keys_ok = None
        if MASKED:
            keys_ok = allowed_keys(mask, start + columns, N, mask_n, MASK)
        k1 = load_rows(k, start, columns, k_n, keys_ok, D, BLOCK_D)
        k2 = k1
        if not SHARED:
            k2 = load_rows(k + k_p, start, columns, k_n, keys_ok, D, BLOCK_D)
        values = load_rows(v, start, columns, v_n, keys_ok, V, BLOCK_V)
        p1 = tl.exp2(tl.dot(q1, tl.trans(k1), input_precision=PRECISION) * scale - lse1[:, None])
        p2 = tl.exp2(tl.dot(q2, tl.trans(k2), input_precision=PRECISION) * scale - lse2[:, None])
        dp = tl.dot(g, tl.trans(values), input_precision=PRECISION)
        ds1 = p1 * (dp - d1[:, None])
        ds2 = p2 * weight[:, None] * (d2[:, None] - dp)
        if MASKED:
            keys = (start + columns)[None, :]
            exist = tl.expand_dims(keys_ok, 0)
            ok = allowed_pairs(mask, queries[:, None], keys, exist, M, N, mask_m, mask_n, CAUSAL, MASK)
            ds1 = tl.where(ok, ds1, 0.0)
            ds2 = tl.where(ok, ds2, 0.0)
        dq1 = tl.dot(ds1.to(k1.dtype), k1, dq1, input_precision=PRECISION)
        dq2 = tl.dot(ds2.to(k1.dtype), k2, dq2, input_precision=PRECISION)
    return dq1, dq2


@triton.jit(do_not_specialize=_INTEGERS)
def backward_queries(
    q, k, v, lam, mask, cu_q, cu_k, grad, lse, deltas, dq, scale, grad_scale, H, G, M, N, blocks,
    q_b, q_h, q_p, q_m, k_b, k_h, k_p, k_n, v_b, v_h, v_n, lam_b, lam_h, lam_m, mask_b, mask_h, mask_m, mask_n,
    grad_b, grad_h, grad_m, lse_b, lse_h, lse_p, dq_b, dq_h, dq_p, dq_m,
    D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, SHARED: tl.constexpr,
    VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq of a block of queries of one head, over all its keys."""
    program = tl.program_id(0)
    block = program % blocks
    if CAUSAL:
        block = blocks - 1 - block
    b, h = (program // blocks // H).to(tl.int64), (program // blocks % H).to(tl.int64)
    q_start, M = span(cu_q, b, M, VARLEN)
    k_start, N = span(cu_k, b, N, VARLEN)
    first = block * BLOCK_M
    if first >= M:
        return
    q += b * q_b + h * q_h + q_start * q_m
    k += b * k_b + (h // G) * k_h + k_start * k_n
    v += b * v_b + (h // G) * v_h + k_start * v_n
    grad += b * grad_b + h * grad_h + q_start * grad_m
    lse += b * lse_b + h * lse_h + q_start
    deltas += b * lse_b + h * lse_h + q_start
    if MASK != 0:
        mask += b * mask_b + h * mask_h
    rows = tl.arange(0, BLOCK_M)
    queries = first + rows
    ok = queries < M
    q1 = load_rows(q, first, rows, q_m, ok, D, BLOCK_D)
    q2 = load_rows(q + q_p, first, rows, q_m, ok, D, BLOCK_D)
    g = load_rows(grad, first, rows, grad_m, ok, V, BLOCK_V)
    lse1 = load_lse(lse, queries, ok)
    lse2 = load_lse(lse + lse_p, queries, ok)
    d1 = tl.load(deltas + queries, mask=ok, other=0.0)
    d2 = tl.load(deltas + lse_p + queries, mask=ok, other=0.0)
    weight = tl.load(lam + b * lam_b + h * lam_h + (q_start + queries).to(tl.int64) * lam_m, mask=ok, other=0.0)
    dq1 = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dq2 = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = N
    full = N
    if CAUSAL:
        end = tl.minimum(N, first + BLOCK_M + N - M)
        full = tl.maximum(0, tl.minimum(N, first + 1 + N - M))
    full = full // BLOCK_N * BLOCK_N
    if MASK != 0:
        full = 0
    else:
        dq1, dq2 = _queries_side(
            dq1, dq2, q1, q2, g, lse1, lse2, d1, d2, weight, k, v, mask, scale, queries, 0, full, M, N,
            k_p, k_n, v_n, mask_m, mask_n,
            D, V, BLOCK_D, BLOCK_V, BLOCK_N, CAUSAL, MASK, SHARED, PRECISION, False,
        )  # fmt: skip
    dq1, dq2 = _queries_side(
        dq1, dq2, q1, q2, g, lse1, lse2, d1, d2, weight, k, v, mask, scale, queries, full, end, M, N,
        k_p, k_n, v_n, mask_m, mask_n,
        D, V, BLOCK_D, BLOCK_V, BLOCK_N, CAUSAL, MASK, SHARED, PRECISION, True,
    )  # fmt: skip
    dq += b * dq_b + h * dq_h + q_start * dq_m
    store_rows(dq, first, rows, dq_m, ok, dq1 * grad_scale, D, BLOCK_D)
    store_rows(dq + dq_p, first, rows, dq_m, ok, dq2 * grad_scale, D, BLOCK_D)
