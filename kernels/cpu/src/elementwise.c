/* Norms, rotation, gating and gathering of rows.
 *
 * Symbols: T tokens, H heads, HKV kv heads, N width of a norm, D head dim, R rotated dims of a head,
 * I intermediate size. A share is some tokens or rows, and each is computed by itself. Strides are in
 * elements. */
#include "simd.h"
#include "threads.h"

enum {
    SHARE_ELEMS = 2048,    /* elements of a share, which take half a microsecond */
    ROWS_WORTH_IT = 16384, /* more elements are worth waking a second thread */
};

/* out[t, h] = weight * x[t, h] / sqrt(mean(x[t, h]^2) + eps), after x += residual if there is a residual.
 * x + residual is rounded to x's dtype. The quotient is rounded to the weight's dtype before it is
 * multiplied by the weight. */
struct rms_norm {
    int64_t type, weight_type; /* weight_type: as type, or F32 */
    int64_t num_tokens, num_heads, width;
    const void *x, *residual; /* [T, H, N]; residual may be NULL, then `total` is too */
    const void *weight;       /* [N] */
    void *out, *total;        /* [T, H, N], contiguous */
    int64_t x_stride_t, x_stride_h, residual_stride_t;
    double eps;
};

INLINE void norm_row(dtype type, dtype weight_type, const struct rms_norm *a, int64_t row)
{
    int64_t token = row / a->num_heads, head = row % a->num_heads, width = a->width;
    int64_t x = token * a->x_stride_t + head * a->x_stride_h;
    int64_t residual = token * a->residual_stride_t, out = row * width;
    int64_t full = width - width % LANES, rest = width % LANES;
    const void *total = a->x;
    int64_t total_at = x;
    vf squares[4] = {{0}};
    if (a->residual) {
        for (int64_t i = 0; i < full; i += LANES) {
            vf sum = load(type, a->x, x + i) + load(type, a->residual, residual + i);
            store(type, a->total, out + i, sum);
        }
        if (rest) {
            vf sum = load_part(type, a->x, x + full, rest) +
                     load_part(type, a->residual, residual + full, rest);
            store_part(type, a->total, out + full, rest, sum);
        }
        total = a->total;
        total_at = out;
    }
    for (int64_t i = 0; i < full; i += LANES) {
        vf v = load(type, total, total_at + i);
        squares[i / LANES % 4] += v * v;
    }
    vf tail = {0};
    if (rest) {
        tail = load_part(type, total, total_at + full, rest);
        squares[3] += tail * tail;
    }
    float sum = vf_reduce_add((squares[0] + squares[1]) + (squares[2] + squares[3]));
    vf inverse = vf_set(1.0f / sqrtf(sum / (float)width + (float)a->eps));
    for (int64_t i = 0; i < full; i += LANES) {
        vf normed = rounded(weight_type, load(type, total, total_at + i) * inverse);
        store(type, a->out, out + i, normed * load(weight_type, a->weight, i));
    }
    if (rest) {
        vf normed = rounded(weight_type, tail * inverse);
        store_part(type, a->out, out + full, rest,
                   normed * load_part(weight_type, a->weight, full, rest));
    }
}

INLINE void norm_tokens(dtype type, const struct rms_norm *a, int64_t start, int64_t end)
{
    for (int64_t row = start * a->num_heads; row < end * a->num_heads; row++) {
        if (a->weight_type == type)
            norm_row(type, type, a, row);
        else
            norm_row(type, F32, a, row);
    }
}

void quire_rms_norm_share(const void *args, int64_t share, int64_t num_shares)
{
    const struct rms_norm *a = args;
    BY_DTYPE(a->type, norm_tokens, a, share_start(a->num_tokens, share, num_shares),
             share_start(a->num_tokens, share + 1, num_shares));
}

static int64_t rms_norm_elems(const struct rms_norm *a)
{
    return a->num_tokens * a->num_heads * a->width;
}

int64_t quire_rms_norm_count(const void *args)
{
    return shares_of(rms_norm_elems(args), SHARE_ELEMS);
}

void quire_rms_norm(const struct rms_norm *a)
{
    run_call(rms_norm_elems(a) > ROWS_WORTH_IT, quire_rms_norm_share, quire_rms_norm_count, a);
}

/* (x1, x2) -> (x1 * cos - x2 * sin, x2 * cos + x1 * sin) for the halves of each head's first R dims;
 * the other dims are copied. cos and sin are rounded to the dtype; the results are rounded once. */
struct rotary {
    int64_t type;
    int64_t num_tokens, num_heads, num_kv_heads, head_dim, half; /* R / 2 */
    const void *query, *key;   /* [T, H, D], [T, HKV, D] */
    const float *cos_sin;      /* [max_pos, R] */
    const int64_t *positions;  /* [T] */
    void *query_out, *key_out; /* contiguous */
    int64_t query_stride_t, query_stride_h, key_stride_t, key_stride_h, cos_sin_stride;
};

INLINE void rotate_head(dtype type, const void *x, int64_t at, void *out, int64_t out_at,
                        const float *cos, const float *sin, int64_t half, int64_t dim)
{
    for (int64_t i = 0; i < half; i += LANES) {
        int64_t n = min64(LANES, half - i);
        if (n == LANES) {
            vf c = rounded(type, vf_load(cos + i)), s = rounded(type, vf_load(sin + i));
            vf x1 = load(type, x, at + i), x2 = load(type, x, at + half + i);
            store(type, out, out_at + i, x1 * c - x2 * s);
            store(type, out, out_at + half + i, x2 * c + x1 * s);
        } else {
            vf c = rounded(type, load_part(F32, cos, i, n));
            vf s = rounded(type, load_part(F32, sin, i, n));
            vf x1 = load_part(type, x, at + i, n), x2 = load_part(type, x, at + half + i, n);
            store_part(type, out, out_at + i, n, x1 * c - x2 * s);
            store_part(type, out, out_at + half + i, n, x2 * c + x1 * s);
        }
    }
    for (int64_t i = 2 * half; i < dim; i += LANES) {
        int64_t n = min64(LANES, dim - i);
        store_part(type, out, out_at + i, n, load_part(type, x, at + i, n));
    }
}

INLINE void rotate_tokens(dtype type, const struct rotary *a, int64_t start, int64_t end)
{
    int64_t dim = a->head_dim;
    for (int64_t t = start; t < end; t++) {
        const float *cos = a->cos_sin + a->positions[t] * a->cos_sin_stride, *sin = cos + a->half;
        for (int64_t h = 0; h < a->num_heads; h++)
            rotate_head(type, a->query, t * a->query_stride_t + h * a->query_stride_h,
                        a->query_out, (t * a->num_heads + h) * dim, cos, sin, a->half, dim);
        for (int64_t h = 0; h < a->num_kv_heads; h++)
            rotate_head(type, a->key, t * a->key_stride_t + h * a->key_stride_h, a->key_out,
                        (t * a->num_kv_heads + h) * dim, cos, sin, a->half, dim);
    }
}

void quire_rotary_share(const void *args, int64_t share, int64_t num_shares)
{
    const struct rotary *a = args;
    BY_DTYPE(a->type, rotate_tokens, a, share_start(a->num_tokens, share, num_shares),
             share_start(a->num_tokens, share + 1, num_shares));
}

static int64_t rotary_elems(const struct rotary *a)
{
    return a->num_tokens * (a->num_heads + a->num_kv_heads) * a->head_dim;
}

int64_t quire_rotary_count(const void *args)
{
    return shares_of(rotary_elems(args), SHARE_ELEMS);
}

void quire_rotary(const struct rotary *a)
{
    run_call(rotary_elems(a) > ROWS_WORTH_IT, quire_rotary_share, quire_rotary_count, a);
}

/* out[t, i] = silu(gate_up[t, i]) * gate_up[t, I + i]; SiLU is rounded before the product. */
struct silu_mul {
    int64_t type;
    int64_t num_tokens, width;
    const void *gate_up; /* [T, 2 * I] */
    void *out;           /* [T, I], contiguous */
    int64_t stride_t;
};

typedef enum { SILU, TANH_GELU } activation;

INLINE vf tanh_gelu(vf x)
{
    vf doubled = 1.59576912f * (x + 0.044715f * x * x * x); /* 2 * sqrt(2 / pi) */
    return x / sigmoid_divisor(doubled);
}

INLINE vf activated(activation which, vf x) { return which == SILU ? silu(x) : tanh_gelu(x); }

/* out[t, i] = activation(gate_up[t, i]) * gate_up[t, width + i] for tokens [start, end). */
INLINE void gate_tokens(dtype type, activation which, const void *gate_up, void *out, int64_t width,
                        int64_t stride_t, int64_t start, int64_t end)
{
    int64_t full = width - width % LANES, rest = width % LANES;
    for (int64_t t = start; t < end; t++) {
        int64_t gate = t * stride_t, up = gate + width, at = t * width;
        for (int64_t i = 0; i < full; i += LANES) {
            vf gated = rounded(type, activated(which, load(type, gate_up, gate + i)));
            store(type, out, at + i, gated * load(type, gate_up, up + i));
        }
        if (rest) {
            vf gated = rounded(type, activated(which, load_part(type, gate_up, gate + full, rest)));
            store_part(type, out, at + full, rest, gated * load_part(type, gate_up, up + full, rest));
        }
    }
}

void quire_silu_mul_share(const void *args, int64_t share, int64_t num_shares)
{
    const struct silu_mul *a = args;
    BY_DTYPE(a->type, gate_tokens, SILU, a->gate_up, a->out, a->width, a->stride_t,
             share_start(a->num_tokens, share, num_shares),
             share_start(a->num_tokens, share + 1, num_shares));
}

static int64_t silu_mul_elems(const struct silu_mul *a)
{
    return a->num_tokens * a->width;
}

int64_t quire_silu_mul_count(const void *args)
{
    return shares_of(silu_mul_elems(args), SHARE_ELEMS);
}

void quire_silu_mul(const struct silu_mul *a)
{
    run_call(silu_mul_elems(a) > ROWS_WORTH_IT, quire_silu_mul_share, quire_silu_mul_count, a);
}

/* out[t, i] = gelu(gate_up[t, i]) * gate_up[t, I + i], with GELU's tanh approximation, which is rounded
 * before the product. (1 + tanh(z)) / 2 is computed as the sigmoid of 2 z. */
struct tanh_gelu_mul {
    int64_t type;
    int64_t num_tokens, width;
    const void *gate_up; /* [T, 2 * I] */
    void *out;           /* [T, I], contiguous */
    int64_t stride_t;
};

void quire_tanh_gelu_mul_share(const void *args, int64_t share, int64_t num_shares)
{
    const struct tanh_gelu_mul *a = args;
    BY_DTYPE(a->type, gate_tokens, TANH_GELU, a->gate_up, a->out, a->width, a->stride_t,
             share_start(a->num_tokens, share, num_shares),
             share_start(a->num_tokens, share + 1, num_shares));
}

static int64_t tanh_gelu_mul_elems(const struct tanh_gelu_mul *a)
{
    return a->num_tokens * a->width;
}

int64_t quire_tanh_gelu_mul_count(const void *args)
{
    return shares_of(tanh_gelu_mul_elems(args), SHARE_ELEMS);
}

void quire_tanh_gelu_mul(const struct tanh_gelu_mul *a)
{
    run_call(tanh_gelu_mul_elems(a) > ROWS_WORTH_IT, quire_tanh_gelu_mul_share, quire_tanh_gelu_mul_count,
             a);
}

/* out[t, i] = (up + 1) * gate * sigmoid(alpha * gate), where gate = min(gate_up[t, i], limit), and up is
 * gate_up[t, I + i] cut to [-limit, limit]. It is computed in fp32 and rounded once. */
struct clamped_swiglu {
    int64_t type;
    int64_t num_tokens, width;
    const void *gate_up; /* [T, 2 * I] */
    void *out;           /* [T, I], contiguous */
    int64_t stride_t;
    double alpha, limit;
};

INLINE vf clamped_swiglu(const struct clamped_swiglu *a, vf gate, vf up)
{
    vf limit = vf_set((float)a->limit);
    gate = vf_select(gate > limit, limit, gate); /* NaN stays NaN */
    up = vf_select(up > limit, limit, vf_select(up < -limit, -limit, up));
    return (up + 1.0f) * (gate / sigmoid_divisor(gate * (float)a->alpha));
}

INLINE void swiglu_tokens(dtype type, const struct clamped_swiglu *a, int64_t start, int64_t end)
{
    int64_t full = a->width - a->width % LANES, rest = a->width % LANES;
    for (int64_t t = start; t < end; t++) {
        int64_t gate = t * a->stride_t, up = gate + a->width, out = t * a->width;
        for (int64_t i = 0; i < full; i += LANES)
            store(type, a->out, out + i,
                  clamped_swiglu(a, load(type, a->gate_up, gate + i), load(type, a->gate_up, up + i)));
        if (rest)
            store_part(type, a->out, out + full, rest,
                       clamped_swiglu(a, load_part(type, a->gate_up, gate + full, rest),
                                      load_part(type, a->gate_up, up + full, rest)));
    }
}

void quire_clamped_swiglu_share(const void *args, int64_t share, int64_t num_shares)
{
    const struct clamped_swiglu *a = args;
    BY_DTYPE(a->type, swiglu_tokens, a, share_start(a->num_tokens, share, num_shares),
             share_start(a->num_tokens, share + 1, num_shares));
}

static int64_t clamped_swiglu_elems(const struct clamped_swiglu *a)
{
    return a->num_tokens * a->width;
}

int64_t quire_clamped_swiglu_count(const void *args)
{
    return shares_of(clamped_swiglu_elems(args), SHARE_ELEMS);
}

void quire_clamped_swiglu(const struct clamped_swiglu *a)
{
    run_call(clamped_swiglu_elems(a) > ROWS_WORTH_IT, quire_clamped_swiglu_share,
             quire_clamped_swiglu_count, a);
}

/* out[n] = x[rows[n]]. */
struct gather {
    int64_t num_rows, row_bytes, stride_bytes; /* stride_bytes: from one row of x to the next */
    const char *x;
    const int64_t *rows; /* [N] */
    char *out;           /* [N, row_bytes] */
};

void quire_gather_share(const void *args, int64_t share, int64_t num_shares)
{
    const struct gather *a = args;
    int64_t end = share_start(a->num_rows, share + 1, num_shares);
    for (int64_t n = share_start(a->num_rows, share, num_shares); n < end; n++)
        memcpy(a->out + n * a->row_bytes, a->x + a->rows[n] * a->stride_bytes, a->row_bytes);
}

static int64_t gather_elems(const struct gather *a)
{
    return a->num_rows * a->row_bytes / 2; /* counted as bf16 */
}

int64_t quire_gather_count(const void *args)
{
    return shares_of(gather_elems(args), SHARE_ELEMS);
}

void quire_gather(const struct gather *a)
{
    run_call(gather_elems(a) > ROWS_WORTH_IT, quire_gather_share, quire_gather_count, a);
}
