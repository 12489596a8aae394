"""Kernels that hold whole rows: every ViT and CLIP text, where the keys of a sequence fit into one tile.

With both maps' rows on chip the maps are subtracted before the one product with V: 8 N^2 D of matrix work a
differential head forward, as plain attention, and no second product to keep for backward. Backward recomputes the
weights from lse and takes D1, D2 as row sums of P * dP, so it needs neither the output nor the second map's. One
program per batch element and key/value head walks over the queries of its heads, so dk and dv stay in registers and
nothing is added twice:

- one pass for dq, dk and dv, 20 N^2 D, where dk1, dk2 and dv of all keys fit into the registers together;
- else one pass for dq, dk and one for dv, 24 N^2 D (both maps' scores twice). The other ways cost more: halves of the
  keys one after another need D1, D2 before the first half is done (a pass more, 26 to 28, or a second product saved by
  forward, 24 and its memory) and dq in float32 between the halves.
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

_INTEGERS = ["H", "G", "M", "N", "blocks"]


@triton.jit(do_not_specialize=_INTEGERS)
def forward(
    q, k, v, lam, mask, cu_q, cu_k, out, lse, scale, H, G, M, N, blocks,
    q_b, q_h, q_p, q_m, k_b, k_h, k_p, k_n, v_b, v_h, v_n, lam_b, lam_h, lam_m, mask_b, mask_h, mask_m, mask_n,
    out_b, out_h, out_m, lse_b, lse_h, lse_p,
    D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, SHARED: tl.constexpr,
    VARLEN: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a block of queries of one head against all its keys at once.

    Tiles are [keys, queries]. A warp owns 16 rows of a tile: with keys as rows the warps share a query's weights, and
    64 queries against 256 keys fit the registers twice, unlike the other way round.
    """
    program = tl.program_id(0)
    b, h = (program // blocks // H).to(tl.int64), (program // blocks % H).to(tl.int64)
    q_start, M = span(cu_q, b, M, VARLEN)
    k_start, N = span(cu_k, b, N, VARLEN)
    first = program % blocks * BLOCK_M
    if first >= M:
        return
    q += b * q_b + h * q_h + q_start * q_m
    k += b * k_b + (h // G) * k_h + k_start * k_n
    v += b * v_b + (h // G) * v_h + k_start * v_n
    if MASK != 0:
        mask += b * mask_b + h * mask_h
    rows = tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    queries = first + rows
    ok = queries < M
    keys_ok = allowed_keys(mask, keys, N, mask_n, MASK)
    pairs = allowed_pairs(mask, queries[None, :], keys[:, None], keys_ok[:, None], M, N, mask_m, mask_n, CAUSAL, MASK)
    values = load_rows(v, 0, keys, v_n, keys_ok, V, BLOCK_V)
    k1 = load_rows(k, 0, keys, k_n, keys_ok, D, BLOCK_D)
    s1 = tl.dot(k1, tl.trans(load_rows(q, first, rows, q_m, ok, D, BLOCK_D)), input_precision=PRECISION) * scale
    k2 = k1
    if not SHARED:
        k2 = load_rows(k + k_p, 0, keys, k_n, keys_ok, D, BLOCK_D)
    s2 = tl.dot(k2, tl.trans(load_rows(q + q_p, first, rows, q_m, ok, D, BLOCK_D)), input_precision=PRECISION) * scale
    s1 = tl.where(pairs, s1, float("-inf"))
    s2 = tl.where(pairs, s2, float("-inf"))
    top1 = tl.max(s1, 0)
    top2 = tl.max(s2, 0)
    top1 = tl.where(top1 == float("-inf"), 0.0, top1)
    top2 = tl.where(top2 == float("-inf"), 0.0, top2)
    p1 = tl.exp2(s1 - top1[None, :])
    p2 = tl.exp2(s2 - top2[None, :])
    total1 = tl.sum(p1, 0)
    total2 = tl.sum(p2, 0)
    weight = tl.load(lam + b * lam_b + h * lam_h + (q_start + queries).to(tl.int64) * lam_m, mask=ok, other=0.0)
    p = p1 * inverse(total1)[None, :] - p2 * (weight * inverse(total2))[None, :]
    result = tl.trans(tl.dot(tl.trans(values), p.to(values.dtype), input_precision=PRECISION))
    store_rows(out + b * out_b + h * out_h + q_start * out_m, first, rows, out_m, ok, result, V, BLOCK_V)
    if SAVE:
        lse += b * lse_b + h * lse_h + q_start
        tl.store(lse + queries, log2_sum(top1, total1), mask=ok)
        tl.store(lse + lse_p + queries, log2_sum(top2, total2), mask=ok)


@triton.jit(do_not_specialize=_INTEGERS)
def backward(
    q, k, v, lam, mask, cu_q, cu_k, grad, lse, dq, dk, dv, d2_rows, scale, grad_scale, H, G, M, N,
    q_b, q_h, q_p, q_m, k_b, k_h, k_p, k_n, v_b, v_h, v_n, lam_b, lam_h, lam_m, mask_b, mask_h, mask_m, mask_n,
    grad_b, grad_h, grad_m, lse_b, lse_h, lse_p, dq_b, dq_h, dq_p, dq_m, dk_b, dk_h, dk_p, dk_n, dv_b, dv_h, dv_n,
    D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, SHARED: tl.constexpr,
    VARLEN: tl.constexpr, PRECISION: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one key/value head. KEYS: dq, dk and D2; VALUES: dv. H counts key/value heads here.

    With keys as a tile's rows, 16 or 32 queries at a time already fill the tensor cores.
    """
    program = tl.program_id(0)
    b, kv = (program // H).to(tl.int64), (program % H).to(tl.int64)
    q_start, M = span(cu_q, b, M, VARLEN)
    k_start, N = span(cu_k, b, N, VARLEN)
    keys = tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    exist = keys < N
    k += b * k_b + kv * k_h + k_start * k_n
    v += b * v_b + kv * v_h + k_start * v_n
    k1 = load_rows(k, 0, keys, k_n, exist, D, BLOCK_D)
    k2 = k1
    if not SHARED:
        k2 = load_rows(k + k_p, 0, keys, k_n, exist, D, BLOCK_D)
    if KEYS:
        values = load_rows(v, 0, keys, v_n, exist, V, BLOCK_V)
        dk1 = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dk2 = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if VALUES:
        dvalues = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)

    blocks = (M + BLOCK_M - 1) // BLOCK_M
    for step in range(0, G * blocks):  # one loop over heads and queries, so that loads run ahead across heads
        h = kv * G + step // blocks
        first = step % blocks * BLOCK_M
        queries = first + rows
        ok = queries < M
        lse_h0 = lse + b * lse_b + h * lse_h + q_start
        lse1 = load_lse(lse_h0, queries, ok)
        lse2 = load_lse(lse_h0 + lse_p, queries, ok)
        weight = tl.load(lam + b * lam_b + h * lam_h + (q_start + queries).to(tl.int64) * lam_m, mask=ok, other=0.0)
        source = q + b * q_b + h * q_h + q_start * q_m
        q1 = load_rows(source, first, rows, q_m, ok, D, BLOCK_D)
        q2 = load_rows(source + q_p, first, rows, q_m, ok, D, BLOCK_D)
        g = load_rows(grad + b * grad_b + h * grad_h + q_start * grad_m, first, rows, grad_m, ok, V, BLOCK_V)
        mask_h0 = mask
        if MASK != 0:
            mask_h0 = mask + b * mask_b + h * mask_h
        keys_ok = allowed_keys(mask_h0, keys, N, mask_n, MASK)
        pairs = allowed_pairs(
            mask_h0, queries[None, :], keys[:, None], keys_ok[:, None], M, N, mask_m, mask_n, CAUSAL, MASK
        )
        p1 = tl.exp2(tl.dot(k1, tl.trans(q1), input_precision=PRECISION) * scale - lse1[None, :])
        p2 = tl.exp2(tl.dot(k2, tl.trans(q2), input_precision=PRECISION) * scale - lse2[None, :])
        p1 = tl.where(pairs, p1, 0.0)
        p2 = tl.where(pairs, p2, 0.0)
        if VALUES:
            p = p1 - p2 * weight[None, :]
            dvalues = tl.dot(p.to(g.dtype), g, dvalues, input_precision=PRECISION)
        if KEYS:
            dp = tl.dot(values, tl.trans(g), input_precision=PRECISION)
            d1 = tl.sum(p1 * dp, 0)
            d2 = tl.sum(p2 * dp, 0)
            tl.store(d2_rows + b * lse_b + h * lse_h + q_start + queries, d2, mask=ok)
            ds1 = (p1 * (dp - d1[None, :])).to(q1.dtype)
            ds2 = (p2 * weight[None, :] * (d2[None, :] - dp)).to(q1.dtype)
            dk1 = tl.dot(ds1, q1, dk1, input_precision=PRECISION)
            if SHARED:
                dk1 = tl.dot(ds2, q2, dk1, input_precision=PRECISION)
            else:
                dk2 = tl.dot(ds2, q2, dk2, input_precision=PRECISION)
            dq1 = tl.trans(tl.dot(tl.trans(k1), ds1, input_precision=PRECISION))
            dq2 = tl.trans(tl.dot(tl.trans(k2), ds2, input_precision=PRECISION))
            target = dq + b * dq_b + h * dq_h + q_start * dq_m
            store_rows(target, first, rows, dq_m, ok, dq1 * grad_scale, D, BLOCK_D)
            store_rows(target + dq_p, first, rows, dq_m, ok, dq2 * grad_scale, D, BLOCK_D)

    if KEYS:
        dk += b * dk_b + kv * dk_h + k_start * dk_n
        store_rows(dk, 0, keys, dk_n, exist, dk1 * grad_scale, D, BLOCK_D)
        if not SHARED:
            store_rows(dk + dk_p, 0, keys, dk_n, exist, dk2 * grad_scale, D, BLOCK_D)
    if VALUES:
        dv += b * dv_b + kv * dv_h + k_start * dv_n
        store_rows(dv, 0, keys, dv_n, exist, dvalues, V, BLOCK_V)
