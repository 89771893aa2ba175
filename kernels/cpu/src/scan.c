/* The recurrences of Mamba layers and of gated delta nets, token by token.
 *
 * Symbols: S sequences, T tokens of each, H heads, P head dim, G groups of heads, N state size (a Mamba
 * head's state is [P, N]), HK heads of queries and keys, K their dim. All tensors are contiguous. A share
 * is some heads of some sequences, and each head is computed by itself. The arithmetic of a token does
 * not depend on how many tokens there are. */
#include "simd.h"
#include "thread_memory.h"
#include "threads.h"

enum {
    SHARE_NUMBERS = 16384,     /* of a share: some microseconds */
    NUMBERS_WORTH_IT = 131072, /* more numbers are worth waking a second thread */
};

/* state = state * exp(dt * a) + dt * x * b; out = (sum over N of state * c) + d * x. */
struct selective_scan {
    int64_t type, num_seqs, num_tokens, num_heads, head_dim, num_groups, width;
    int64_t a_width;    /* N, or 1 if `a` is the same for all N */
    const void *x;      /* [S, T, H, P] */
    const float *dt;    /* [S, T, H] */
    const float *a;     /* [H, a_width] */
    const void *b, *c;  /* [S, T, G, N] */
    const float *d;     /* [H] */
    const float *state; /* [S, H, P, N]; or null: zeros */
    void *out;          /* [S, T, H, P] */
    float *state_out;   /* [S, H, P, N] */
};

/* Loads LANES numbers from i on; numbers after the first `left` are 0. */
INLINE vf load_row(dtype type, const void *base, int64_t i, int64_t left)
{
    return left >= LANES ? load(type, base, i) : load_part(type, base, i, left);
}

INLINE void scan_head(dtype type, const struct selective_scan *a, int64_t seq, int64_t head)
{
    int64_t dim = a->head_dim, width = a->width, padded = ceil_div(width, LANES) * LANES;
    int64_t group = head / (a->num_heads / a->num_groups);
    int64_t first = (seq * a->num_heads + head) * dim * width; /* where this head's state begins */
    float *state = (float *)thread_memory((int64_t)sizeof(float) * padded * (dim + 3));
    float *b = state + dim * padded, *c = b + padded, *decay = c + padded;
    for (int64_t p = 0; p < dim; p++)
        for (int64_t n = 0; n < padded; n++)
            state[p * padded + n] =
                a->state && n < width ? a->state[first + p * width + n] : 0;
    for (int64_t t = 0; t < a->num_tokens; t++) {
        int64_t token = seq * a->num_tokens + t;
        int64_t row = (token * a->num_groups + group) * width;
        int64_t place = (token * a->num_heads + head) * dim;
        float dt = a->dt[token * a->num_heads + head];
        for (int64_t n = 0; n < padded; n += LANES) {
            vf_store(b + n, load_row(type, a->b, row + n, width - n));
            vf_store(c + n, load_row(type, a->c, row + n, width - n));
            vf of_a = a->a_width == 1 ? vf_set(a->a[head])
                                      : load_row(F32, a->a, head * width + n, width - n);
            vf_store(decay + n, vf_exp2(vf_set(dt * 1.44269504f) * of_a));
        }
        for (int64_t p = 0; p < dim; p++) {
            float x = load_part(type, a->x, place + p, 1)[0];
            vf in = vf_set(dt * x), sum = {0};
            for (int64_t n = 0; n < padded; n += LANES) {
                float *at = state + p * padded + n;
                vf s = vf_load(at) * vf_load(decay + n) + in * vf_load(b + n);
                vf_store(at, s);
                sum += s * vf_load(c + n);
            }
            store_part(type, a->out, place + p, 1, vf_set(vf_reduce_add(sum) + a->d[head] * x));
        }
    }
    for (int64_t p = 0; p < dim; p++)
        for (int64_t n = 0; n < width; n++)
            a->state_out[first + p * width + n] = state[p * padded + n];
}

static void scan_heads(dtype type, const struct selective_scan *a, int64_t start, int64_t end)
{
    for (int64_t i = start; i < end; i++) scan_head(type, a, i / a->num_heads, i % a->num_heads);
}

static int64_t numbers_of_head(const struct selective_scan *a)
{
    return a->num_tokens * a->head_dim * a->width;
}

int64_t quire_selective_scan_count(const void *args)
{
    const struct selective_scan *a = args;
    return shares_of(a->num_seqs * a->num_heads, ceil_div(SHARE_NUMBERS, numbers_of_head(a)));
}

void quire_selective_scan_share(const void *args, int64_t share, int64_t num_shares)
{
    const struct selective_scan *a = args;
    int64_t heads = a->num_seqs * a->num_heads;
    BY_DTYPE(a->type, scan_heads, a, share_start(heads, share, num_shares),
             share_start(heads, share + 1, num_shares));
}

void quire_selective_scan(const struct selective_scan *a)
{
    run_call(a->num_seqs * a->num_heads * numbers_of_head(a) > NUMBERS_WORTH_IT,
             quire_selective_scan_share, quire_selective_scan_count, a);
}

/* state = state * exp(g); state = state + k (v - k state) * beta; out = q state. First q and k are
 * divided by their Euclidean norms, and q is multiplied by `scale`. */
struct delta_scan {
    int64_t type, num_seqs, num_tokens, num_key_heads, num_heads, key_dim, head_dim;
    const void *q, *k;           /* [S, T, HK, K] */
    const void *v;               /* [S, T, H, P] */
    const float *g, *beta;       /* [S, T, H] */
    const float *state;          /* [S, H, K, P]; or null: zeros */
    void *out;                   /* [S, T, H, P] */
    float *state_out;            /* [S, H, K, P] */
    double scale;
};

/* Loads `width` numbers into `row`, divided by their Euclidean norm and multiplied by `scale`. `row` is
 * filled up with zeros to whole vectors. */
INLINE void load_direction(dtype type, const void *base, int64_t i, int64_t width, float scale,
                           float *row)
{
    vf squares = {0};
    for (int64_t n = 0; n < width; n += LANES) {
        vf numbers = load_row(type, base, i + n, width - n);
        vf_store(row + n, numbers);
        squares += numbers * numbers;
    }
    vf factor = vf_set(scale / sqrtf(vf_reduce_add(squares) + 1e-6f));
    for (int64_t n = 0; n < width; n += LANES) vf_store(row + n, vf_load(row + n) * factor);
}

INLINE void delta_head(dtype type, const struct delta_scan *a, int64_t seq, int64_t head)
{
    int64_t dim = a->head_dim, keys = a->key_dim, padded = ceil_div(dim, LANES) * LANES;
    int64_t key_head = head / (a->num_heads / a->num_key_heads);
    int64_t first = (seq * a->num_heads + head) * keys * dim; /* where this head's state begins */
    int64_t key_room = ceil_div(keys, LANES) * LANES;
    float *state = (float *)thread_memory((int64_t)sizeof(float) * (keys * padded + 2 * key_room));
    float *q = state + keys * padded, *k = q + key_room;
    for (int64_t i = 0; i < keys; i++)
        for (int64_t p = 0; p < padded; p++)
            state[i * padded + p] = a->state && p < dim ? a->state[first + i * dim + p] : 0;
    for (int64_t t = 0; t < a->num_tokens; t++) {
        int64_t token = seq * a->num_tokens + t;
        int64_t row = (token * a->num_key_heads + key_head) * keys;
        int64_t of_head = token * a->num_heads + head;
        load_direction(type, a->q, row, keys, (float)a->scale, q);
        load_direction(type, a->k, row, keys, 1, k);
        vf decay = vf_exp2(vf_set(a->g[of_head] * 1.44269504f)), beta = vf_set(a->beta[of_head]);
        for (int64_t p = 0; p < padded; p += LANES) {
            vf known = {0}, out = {0};
            for (int64_t i = 0; i < keys; i++) {
                vf s = vf_load(state + i * padded + p) * decay;
                vf_store(state + i * padded + p, s);
                known += s * vf_set(k[i]);
            }
            vf v = load_row(type, a->v, of_head * dim + p, dim - p), news = (v - known) * beta;
            for (int64_t i = 0; i < keys; i++) {
                vf s = vf_load(state + i * padded + p) + vf_set(k[i]) * news;
                vf_store(state + i * padded + p, s);
                out += s * vf_set(q[i]);
            }
            store_part(type, a->out, of_head * dim + p, min64(LANES, dim - p), out);
        }
    }
    for (int64_t i = 0; i < keys; i++)
        for (int64_t p = 0; p < dim; p++)
            a->state_out[first + i * dim + p] = state[i * padded + p];
}

static void delta_heads(dtype type, const struct delta_scan *a, int64_t start, int64_t end)
{
    for (int64_t i = start; i < end; i++) delta_head(type, a, i / a->num_heads, i % a->num_heads);
}

int64_t quire_delta_scan_count(const void *args)
{
    const struct delta_scan *a = args;
    int64_t numbers = a->num_tokens * a->key_dim * a->head_dim;
    return shares_of(a->num_seqs * a->num_heads, ceil_div(SHARE_NUMBERS, numbers));
}

void quire_delta_scan_share(const void *args, int64_t share, int64_t num_shares)
{
    const struct delta_scan *a = args;
    int64_t heads = a->num_seqs * a->num_heads;
    BY_DTYPE(a->type, delta_heads, a, share_start(heads, share, num_shares),
             share_start(heads, share + 1, num_shares));
}

void quire_delta_scan(const struct delta_scan *a)
{
    int64_t numbers = a->num_seqs * a->num_heads * a->num_tokens * a->key_dim * a->head_dim;
    run_call(numbers > NUMBERS_WORTH_IT, quire_delta_scan_share, quire_delta_scan_count, a);
}
