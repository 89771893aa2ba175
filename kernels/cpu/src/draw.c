/* Draws tokens from logits. Symbols: S sequences, N of which draw, V vocabulary.
 *
 * A share is some rows, and each row is computed by itself. */
#include "simd.h"
#include "threads.h"

enum {
    LOGITS_WORTH_IT = 262144, /* more logits are worth waking a second thread */
    LEAST_TILE = 256,         /* tokens of the smallest tile; a multiple of LANES */
    MAX_TILES = 1024,
};

/* In row places[i], token t has the weight exp((logits[t] - the largest) / temperature[i]). The drawn
 * token is the first at which the running sum of weights, in token order, exceeds uniform[i] times the
 * sum of all weights. A row without a finite maximum gives token 0. */
struct draw {
    int64_t num_draws, num_tokens;
    const float *logits;      /* [S, V] */
    const int64_t *places;    /* [N] */
    const float *temperature; /* [N], above 0 */
    const double *uniform;    /* [N], in [0, 1) */
    int64_t *token_ids;       /* [N] */
    int64_t logits_stride;
};

typedef double vd __attribute__((vector_size(8 * LANES)));

/* e^x for x <= 0, with a relative error of at most 2e-7; 0 below 2^-126. */
INLINE vf exp_of(vf x)
{
    const vf round = vf_set(12582912.0f); /* 1.5 * 2^23: adding it leaves the nearest integer */
    vi in_range = x >= vf_set(-87.3365402f);
    x = vf_select(in_range, x, (vf){0});
    vf shifted = x * vf_set(1.44269504f) + round, n = shifted - round;
    vf f = x - n * vf_set(0.693145752f); /* log 2 in two parts: n times the first is exact */
    f = (f - n * vf_set(1.42860677e-6f)) * vf_set(1.44269504f);
    vi power = (vi)shifted - (vi)round;
    return (vf)((vi)exp2_of(power, f) & in_range);
}

/* Loads LANES logits from i on; logits past the end are -inf. */
INLINE vf load_logits(const float *logits, int64_t i, int64_t end)
{
    if (i + LANES <= end) return vf_load(logits + i);
    float lanes[LANES];
    for (int64_t j = 0; j < LANES; j++) lanes[j] = i + j < end ? logits[i + j] : -INFINITY;
    return vf_load(lanes);
}

INLINE vf weights_of(const float *logits, int64_t i, int64_t end, vf most, vf temperature)
{
    return exp_of((load_logits(logits, i, end) - most) / temperature);
}

/* The sum of the weights of tokens [start, end). */
static double sum_of(const float *logits, int64_t start, int64_t end, vf most, vf temperature)
{
    vd sums = {0};
    for (int64_t i = start; i < end; i += LANES)
        sums += __builtin_convertvector(weights_of(logits, i, end, most, temperature), vd);
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
    return sum;
}

/* The first token of the tile at which the running sum of weights exceeds `target`. If the sum never
 * does, the last token whose weight is not 0. This happens because `target` was computed from sums in
 * another order, which may differ in the last bits. */
static int64_t find(const float *logits, int64_t start, int64_t end, vf most, vf temperature,
                    double target)
{
    double sum = 0;
    int64_t last = start;
    for (int64_t i = start; i < end; i += LANES) {
        vf weights = weights_of(logits, i, end, most, temperature);
        for (int64_t lane = 0; lane < min64(LANES, end - i); lane++) {
            sum += weights[lane];
            if (sum > target) return i + lane;
            if (weights[lane] > 0) last = i + lane;
        }
    }
    return last;
}

static int64_t draw_token(const float *logits, int64_t num_tokens, float temperature,
                          double uniform)
{
    vf most = vf_set(-INFINITY);
    for (int64_t i = 0; i < num_tokens; i += LANES)
        most = vf_max(most, load_logits(logits, i, num_tokens));
    float largest = vf_reduce_max(most);
    if (!(largest > -INFINITY && largest < INFINITY)) return 0;
    most = vf_set(largest);
    vf divisor = vf_set(temperature);

    double sums[MAX_TILES], total = 0;
    int64_t tile = ceil_div(ceil_div(num_tokens, MAX_TILES), LEAST_TILE) * LEAST_TILE;
    int64_t num_tiles = ceil_div(num_tokens, tile), last = 0;
    for (int64_t t = 0; t < num_tiles; t++) {
        int64_t end = min64((t + 1) * tile, num_tokens);
        sums[t] = sum_of(logits, t * tile, end, most, divisor);
        total += sums[t];
        if (sums[t] > 0) last = t;
    }
    double target = uniform * total, before = 0;
    for (int64_t t = 0; t < last; t++) {
        if (before + sums[t] > target) {
            last = t;
            break;
        }
        before += sums[t];
    }
    int64_t end = min64((last + 1) * tile, num_tokens);
    return find(logits, last * tile, end, most, divisor, target - before);
}

int64_t quire_draw_count(const void *args)
{
    const struct draw *a = args;
    return shares_of(a->num_draws, 1);
}

void quire_draw_share(const void *args, int64_t share, int64_t num_shares)
{
    const struct draw *a = args;
    int64_t end = share_start(a->num_draws, share + 1, num_shares);
    for (int64_t i = share_start(a->num_draws, share, num_shares); i < end; i++)
        a->token_ids[i] = draw_token(a->logits + a->places[i] * a->logits_stride, a->num_tokens,
                                     a->temperature[i], a->uniform[i]);
}

void quire_draw(const struct draw *a)
{
    run_call(a->num_draws * a->num_tokens > LOGITS_WORTH_IT, quire_draw_share, quire_draw_count, a);
}
