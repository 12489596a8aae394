/* Differential attention of float32 tensors on a CPU: both maps of some rows of one head, their difference and its
 * gradients, while they are in the processor's cache. The products are those of the BLAS that torch carries.
 *
 * out = (P1 - lam P2) V, with P the softmax of scale Q K'. Backward computes P again from the logarithms of the sums of
 * exponentials (or reads it, where it was kept), and shares dP = dO V' and dV = (P1 - lam P2)' dO between the maps:
 *
 *     dS1 = P1 (dP - rowsum(P1 dP))      dS2 = -lam P2 (dP - rowsum(P2 dP))      dlam = -rowsum(P2 dP)
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#define THREAD omp_get_thread_num()
#else
#define THREAD 0
#endif

/* sgemm of the Fortran interface: column-major matrices. */
typedef void (*Product)(const char *, const char *, const int *, const int *, const int *, const float *, const float *,
                        const int *, const float *, const int *, const float *, float *, const int *);

/* Strides count elements, of all axes but the last, whose stride is 1. Tensors have the shapes of
 * `diffvision.ops.diff_attention`; lam is [B, H, M], mask [B, H, M, N] of bytes, with zeros as strides where it is
 * broadcast; `logs` [B, H, 2, M] and `kept` [B, H, 2, M, N] are contiguous, and `scratch` is `threads` times
 * `4 * rows * keys` numbers. */
typedef struct {
    int64_t batch, heads, kv_heads, key_maps, queries, keys, head_dim, value_dim;
    int64_t rows, threads, causal;
    int64_t q_strides[4], k_strides[4], v_strides[3], lam_strides[3], mask_strides[4], out_strides[3];
    int64_t grad_q_strides[4], grad_k_strides[4], grad_v_strides[3];
    float scale;
    const float *q, *k, *v, *lam;
    const uint8_t *mask; /* NULL without one */
    float *logs, *kept;  /* `kept` is NULL where no maps are kept */
    float *scratch;
    float *out; /* in backward the output's gradient */
    float *grad_q, *grad_k, *grad_v, *grad_lam;
    Product product;
} Call;

/* Some rows of one head. */
typedef struct {
    int64_t sample, head, kv_head, first, rows, keys; /* `keys` up to the last that any row may attend to */
} Block;

/* C [m, n] = alpha A B + beta C of row-major matrices; A is transposed in memory if a_transposed, B alike. */
static void multiply(const Call *c, int a_transposed, int b_transposed, int64_t m, int64_t n, int64_t k, float alpha,
                     const float *a, int64_t a_stride, const float *b, int64_t b_stride, float beta, float *out,
                     int64_t out_stride) {
    int rows = (int)m, columns = (int)n, inner = (int)k;
    int a_step = (int)a_stride, b_step = (int)b_stride, out_step = (int)out_stride;
    c->product(b_transposed ? "T" : "N", a_transposed ? "T" : "N", &columns, &rows, &inner, &alpha, b, &b_step, a,
               &a_step, &beta, out, &out_step);
}

/* exp of x <= 0, off by 2 units in the last place; 0 below -87, NaN of NaN. Coefficients: Cephes, expf. */
static inline float exponential(float x) {
    float n = __builtin_rintf(x * 1.44269504088896341f);
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union {
        int32_t bits;
        float value;
    } power;
    power.bits = (int32_t)((uint32_t)((int32_t)n + 127) << 23);
    return x < -87.0f ? 0.0f : p * power.value;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* How many keys from the first on row `row` may attend to as far as `causal` says. */
static int64_t reach(const Call *c, int64_t row, int64_t keys) {
    int64_t last = row + c->keys - c->queries + 1;
    return !c->causal ? keys : last < 0 ? 0 : least(keys, last);
}

static Block block_of(const Call *c, int64_t sample, int64_t head, int64_t index) {
    int64_t first = index * c->rows, rows = least(c->rows, c->queries - first);
    return (Block){sample, head, head / (c->heads / c->kv_heads), first, rows, reach(c, first + rows - 1, c->keys)};
}

static const float *query_of(const Call *c, const Block *b, int map) {
    const int64_t *s = c->q_strides;
    return c->q + b->sample * s[0] + b->head * s[1] + map * s[2] + b->first * s[3];
}

static const float *key_of(const Call *c, const Block *b, int map) {
    const int64_t *s = c->k_strides;
    return c->k + b->sample * s[0] + b->kv_head * s[1] + (c->key_maps == 2 ? map * s[2] : 0);
}

static const float *value_of(const Call *c, const Block *b) {
    return c->v + b->sample * c->v_strides[0] + b->kv_head * c->v_strides[1];
}

static float *output_of(const Call *c, const Block *b) {
    return c->out + b->sample * c->out_strides[0] + b->head * c->out_strides[1] + b->first * c->out_strides[2];
}

/* Where the first row of a block lies in [B, H, 2, M], for the first map. */
static int64_t row_of(const Call *c, const Block *b) {
    return (b->sample * c->heads + b->head) * 2 * c->queries + b->first;
}

static float lambda_of(const Call *c, const Block *b, int64_t row) {
    const int64_t *s = c->lam_strides;
    return c->lam[b->sample * s[0] + b->head * s[1] + (b->first + row) * s[2]];
}

/* Writes the logits of a map, `stride` apart from row to row, into x; those that may not be attended to are -infinity
 * up to the last that `causal` allows. */
static void logits(const Call *c, const Block *b, int map, float *x, int64_t stride) {
    multiply(c, 0, 1, b->rows, b->keys, c->head_dim, c->scale, query_of(c, b, map), c->q_strides[3], key_of(c, b, map),
             c->k_strides[3], 0.0f, x, stride);
    if (!c->mask) return;
    const int64_t *s = c->mask_strides;
    for (int64_t i = 0; i < b->rows; i++) {
        const uint8_t *allowed = c->mask + b->sample * s[0] + b->head * s[1] + (b->first + i) * s[2];
        for (int64_t j = 0, n = reach(c, b->first + i, b->keys); j < n; j++)
            if (!allowed[j * s[3]]) x[i * stride + j] = -INFINITY;
    }
}

/* Whether a row may attend to any of its first n keys. */
static int has_key(const Call *c, const Block *b, int64_t row, int64_t n) {
    if (!c->mask) return n > 0;
    const int64_t *s = c->mask_strides;
    const uint8_t *allowed = c->mask + b->sample * s[0] + b->head * s[1] + (b->first + row) * s[2];
    for (int64_t j = 0; j < n; j++)
        if (allowed[j * s[3]]) return 1;
    return 0;
}

/* Makes n logits, at least one of them finite or NaN, their softmax; returns the logarithm of the sum of exponentials. */
static float softmax(float *x, int64_t n) {
    float top = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : top)
    for (int64_t j = 0; j < n; j++) top = x[j] > top ? x[j] : top;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < n; j++) {
        float e = exponential(x[j] - top);
        x[j] = e;
        sum += e;
    }
    float inverse = 1.0f / sum;
#pragma omp simd
    for (int64_t j = 0; j < n; j++) x[j] *= inverse;
    return top + logf(sum);
}

/* Writes the output, the logarithms, and the maps if they are to be kept. */
void diff_attention_forward(const Call *c) {
    int64_t blocks = (c->queries + c->rows - 1) / c->rows, size = c->rows * c->keys;
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)c->threads)
    for (int64_t task = 0; task < c->batch * c->heads * blocks; task++) {
        /* The longest blocks of causal attention first. */
        Block b = block_of(c, task / blocks / c->heads, task / blocks % c->heads, blocks - 1 - task % blocks);
        float *scratch = c->scratch + THREAD * 4 * size, *difference = scratch + 2 * size, *maps[2];
        int64_t stride = c->kept ? c->keys : b.keys, at = row_of(c, &b);
        if (b.keys == 0) {
            for (int64_t i = 0; i < b.rows; i++) {
                memset(output_of(c, &b) + i * c->out_strides[2], 0, c->value_dim * sizeof(float));
                c->logs[at + i] = c->logs[at + c->queries + i] = INFINITY;
            }
            continue;
        }
        for (int m = 0; m < 2; m++) {
            maps[m] = c->kept ? c->kept + (at + m * c->queries) * c->keys : scratch + m * size;
            logits(c, &b, m, maps[m], stride);
        }
        for (int64_t i = 0; i < b.rows; i++) {
            int64_t n = reach(c, b.first + i, b.keys);
            float *one = maps[0] + i * stride, *two = maps[1] + i * stride, *d = difference + i * b.keys;
            float weight = lambda_of(c, &b, i);
            if (!has_key(c, &b, i, n)) n = 0;
            c->logs[at + i] = n ? softmax(one, n) : INFINITY;
            c->logs[at + c->queries + i] = n ? softmax(two, n) : INFINITY;
            memset(one + n, 0, (b.keys - n) * sizeof(float));
            memset(two + n, 0, (b.keys - n) * sizeof(float));
#pragma omp simd
            for (int64_t j = 0; j < b.keys; j++) d[j] = one[j] - weight * two[j];
        }
        multiply(c, 0, 0, b.rows, c->value_dim, b.keys, 1.0f, difference, b.keys, value_of(c, &b), c->v_strides[2], 0.0f,
                 output_of(c, &b), c->out_strides[2]);
    }
}

/* Writes both maps and their difference of a row, and returns the row sums of P dP in `sums`. */
static void differentiate_row(const float *one, const float *two, const float *dp, float weight, int64_t n, float *p1,
                              float *p2, float *difference, float *sums) {
    float first = 0.0f, second = 0.0f;
#pragma omp simd reduction(+ : first, second)
    for (int64_t j = 0; j < n; j++) {
        float a = one[j], b = two[j];
        p1[j] = a;
        p2[j] = b;
        difference[j] = a - weight * b;
        first += a * dp[j];
        second += b * dp[j];
    }
    sums[0] = first;
    sums[1] = second;
}

/* The same of logits, whose maps are computed in their place. */
static void differentiate_logits(float *one, float *two, const float *logs, int64_t queries, const float *dp,
                                 float weight, int64_t n, float *difference, float *sums) {
    float first = 0.0f, second = 0.0f, log_one = logs[0], log_two = logs[queries];
#pragma omp simd reduction(+ : first, second)
    for (int64_t j = 0; j < n; j++) {
        float a = exponential(one[j] - log_one), b = exponential(two[j] - log_two);
        one[j] = a;
        two[j] = b;
        difference[j] = a - weight * b;
        first += a * dp[j];
        second += b * dp[j];
    }
    sums[0] = first;
    sums[1] = second;
}

/* Adds a block's part to the gradients of its keys and values, or overwrites them, and writes its queries' and lambda's.
 */
static void block_backward(const Call *c, const Block *b, float *scratch, int overwrite) {
    int64_t size = c->rows * c->keys, n = b->keys, at = row_of(c, b);
    float *maps[2] = {scratch, scratch + size}, *difference = scratch + 2 * size, *dp = scratch + 3 * size;
    const float *outer = output_of(c, b);
    float *grad_v = c->grad_v + b->sample * c->grad_v_strides[0] + b->kv_head * c->grad_v_strides[1];
    float *grad_lam = c->grad_lam + (b->sample * c->heads + b->head) * c->queries + b->first;
    float *grad_q[2], *grad_k[2];
    for (int m = 0; m < 2; m++) {
        const int64_t *s = c->grad_q_strides, *t = c->grad_k_strides;
        grad_q[m] = c->grad_q + b->sample * s[0] + b->head * s[1] + m * s[2] + b->first * s[3];
        grad_k[m] = c->grad_k + b->sample * t[0] + b->kv_head * t[1] + (c->key_maps == 2 ? m * t[2] : 0);
    }
    if (n == 0) { /* rows before the first key */
        for (int64_t i = 0; i < b->rows; i++) {
            for (int m = 0; m < 2; m++) memset(grad_q[m] + i * c->grad_q_strides[3], 0, c->head_dim * sizeof(float));
            grad_lam[i] = 0.0f;
        }
        return;
    }
    if (!c->kept)
        for (int m = 0; m < 2; m++) logits(c, b, m, maps[m], n);
    multiply(c, 0, 1, b->rows, n, c->value_dim, 1.0f, outer, c->out_strides[2], value_of(c, b), c->v_strides[2], 0.0f, dp,
             n);
    for (int64_t i = 0; i < b->rows; i++) {
        int64_t reached = reach(c, b->first + i, n);
        float *one = maps[0] + i * n, *two = maps[1] + i * n, *d = difference + i * n, *g = dp + i * n, sums[2];
        float weight = lambda_of(c, b, i), second = -c->scale * weight;
        if (c->kept) {
            const float *from = c->kept + (at + i) * c->keys;
            differentiate_row(from, from + c->queries * c->keys, g, weight, reached, one, two, d, sums);
        } else {
            differentiate_logits(one, two, c->logs + at + i, c->queries, g, weight, reached, d, sums);
        }
#pragma omp simd
        for (int64_t j = 0; j < reached; j++) {
            one[j] *= c->scale * (g[j] - sums[0]);
            two[j] *= second * (g[j] - sums[1]);
        }
        for (int k = 0; k < 3; k++)
            memset((k == 0 ? one : k == 1 ? two : d) + reached, 0, (n - reached) * sizeof(float));
        grad_lam[i] = -sums[1];
    }
    float beta = overwrite ? 0.0f : 1.0f;
    multiply(c, 1, 0, n, c->value_dim, b->rows, 1.0f, difference, n, outer, c->out_strides[2], beta, grad_v,
             c->grad_v_strides[2]);
    for (int m = 0; m < 2; m++) {
        multiply(c, 0, 0, b->rows, c->head_dim, n, 1.0f, maps[m], n, key_of(c, b, m), c->k_strides[3], 0.0f, grad_q[m],
                 c->grad_q_strides[3]);
        multiply(c, 1, 0, n, c->head_dim, b->rows, 1.0f, maps[m], n, query_of(c, b, m), c->q_strides[3],
                 m && c->key_maps == 1 ? 1.0f : beta, grad_k[m], c->grad_k_strides[3]);
    }
}

/* Writes the gradients of q, k, v and lam. A key/value head is one task, so that sums have one order. */
void diff_attention_backward(const Call *c) {
    int64_t blocks = (c->queries + c->rows - 1) / c->rows, group = c->heads / c->kv_heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)c->threads)
    for (int64_t task = 0; task < c->batch * c->kv_heads; task++) {
        int64_t sample = task / c->kv_heads, from = task % c->kv_heads * group;
        for (int64_t head = from; head < from + group; head++)
            for (int64_t index = blocks - 1; index >= 0; index--) { /* the last rows attend to all keys */
                Block b = block_of(c, sample, head, index);
                block_backward(c, &b, c->scratch + THREAD * 4 * c->rows * c->keys, head == from && index == blocks - 1);
            }
    }
}
