/* Linear maps whose weights are integers of 8 or 4 bits: x @ weight.T + bias, x in bf16.
 *
 * A group of input features of one output feature shares a scale and perhaps an offset: weight =
 * q * scale + offset. bf16 holds each q exactly, so the products are those of the integers; scale and
 * offset are applied to a group's fp32 sums. Every sum is over k in ascending order for any number of
 * rows, so a row's result depends on no other row.
 *
 * Symbols, panels, units of work and shares are those of linear.c. A panel of 8 bits is [K / 2][32]
 * pairs of bytes; one of 4 bits [K / 8][2][16] pairs of 16-bit words, whose four nibbles, lowest first,
 * belong to four steps. It needs the CPU's dot product of bf16; without it the functions do nothing, and
 * Python does not call them (quire_has_linear). */
#include "thread_memory.h"
#include "threads.h"
#include "tile.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) /* as HAS_BF16_DOT */

enum {
    CACHED_ROWS = 96, /* of x at a time, so that they stay in the second-level cache */
    CHUNK = 128,      /* most k of a panel that are unpacked at a time, into the first-level cache */
    SHARE_BYTES = 49152, /* of weights, about */
    MIN_SHARES = 16,  /* of a map of many rows */
    FUSED_ROWS = 36,  /* up to so many rows, each tile of them unpacks the weights as it multiplies */
    UNROLL = 4,       /* steps at a time; K is a multiple of their 8 input features */
};

struct quantized {
    int64_t bits, num_rows, num_in, num_out;
    int64_t group; /* k of a group; at 4 bits at most CHUNK */
    const bf16 *x; /* [m, K] */
    const char *weight;
    const bf16 *scales;  /* [panels][groups][32] */
    const bf16 *offsets; /* the same, or NULL */
    const bf16 *bias;    /* [N], or NULL */
    bf16 *out;           /* [m, N] */
    int64_t x_stride;
};

/* Vector `v` of a panel's step `4 * quad + t`: 16 columns of two integers each, in bf16. */
INLINE vf unpacked(int64_t bits, const char *panel, int64_t quad, int t, int v)
{
    if (bits == 8) {
        const __m128i *at = (const __m128i *)(panel + 64 * (UNROLL * quad + t) + 32 * v);
        __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at)));
        __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at + 1)));
        return (vf)_mm512_cvtne2ps_pbh(high, low);
    }
    static const bf16 integers[32] __attribute__((aligned(64))) = { /* -8 to 7, twice */
        0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040,
        0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000,
        0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    __m512i words = _mm512_loadu_si512(panel + 128 * quad + 64 * v);
    return (vf)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * t),
                                        _mm512_load_si512(integers));
}

/* `product` for at most TILE_ROWS rows, unpacking as it goes. */
INLINE void fused_product(int64_t bits, int rows, const char *panel, const struct product *p)
{
    vf sum[TILE_ROWS][TILE_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < TILE_VECTORS; v++) sum[r][v] = (vf){0};
    for (int64_t quad = 0; quad < p->steps / UNROLL; quad++)
#pragma GCC unroll 4
        for (int t = 0; t < UNROLL; t++) {
            const char *x = p->a + 4 * (UNROLL * quad + t);
            for (int v = 0; v < TILE_VECTORS; v++) {
                vf column = unpacked(bits, panel, quad, t, v);
                for (int r = 0; r < rows; r++)
                    sum[r][v] = multiply_add(PAIRS, x + r * p->lda_bytes, column, sum[r][v]);
            }
            if (bits == 8 || t % 2 == 0)
                __builtin_prefetch(panel + PREFETCH_BYTES + 8 * bits * (UNROLL * quad + t));
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < TILE_VECTORS; v++)
            vf_store(p->c + r * p->ldc + v * LANES, sum[r][v]);
}

static void few_rows(int64_t bits, int rows, const char *panel, const struct product *p)
{
#define ROWS_CASE(n)                                  \
    case n:                                           \
        if (bits == 8) fused_product(8, n, panel, p); \
        else fused_product(4, n, panel, p);           \
        break;
    switch (rows) {
        ROWS_CASE(1) ROWS_CASE(2) ROWS_CASE(3) ROWS_CASE(4) ROWS_CASE(5) ROWS_CASE(6)
        ROWS_CASE(7) ROWS_CASE(8) ROWS_CASE(9) ROWS_CASE(10) ROWS_CASE(11) ROWS_CASE(12)
    }
#undef ROWS_CASE
}

static void unpack(int64_t bits, const char *panel, int64_t steps, float *out)
{
    for (int64_t quad = 0; quad < steps / UNROLL; quad++)
        for (int t = 0; t < UNROLL; t++)
            for (int v = 0; v < TILE_VECTORS; v++, out += LANES)
                vf_store(out, bits == 8 ? unpacked(8, panel, quad, t, v)
                                        : unpacked(4, panel, quad, t, v));
}

/* The sum over each group of a row of x. */
static void sum_groups(const struct quantized *a, const char *x, float *sums)
{
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    for (int64_t k = 0; k < a->num_in; k += a->group) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t i = k; i < k + a->group; i += 32)
            sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(x + 2 * i), ones);
        *sums++ = vf_reduce_add((vf)sum);
    }
}

/* All of a block's rows, at most CACHED_ROWS, times one panel. */
static void multiply_panel(const struct quantized *a, int64_t panel, int64_t row, int64_t n,
                           const char *x, int64_t x_bytes, const float *x_sums)
{
    float chunk[CHUNK / 2 * PANEL] __attribute__((aligned(64)));
    float part[CACHED_ROWS * PANEL], total[CACHED_ROWS * PANEL] __attribute__((aligned(64)));
    int64_t num_groups = a->num_in / a->group, height = ceil_div(n, ceil_div(n, TILE_ROWS));
    bool is_fused = n <= FUSED_ROWS;
    int64_t most = is_fused ? a->group : CHUNK;
    memset(total, 0, n * PANEL * sizeof *total);
    for (int64_t k = 0, length; k < a->num_in; k += length) {
        int64_t group = k / a->group;
        length = min64(most, (group + 1) * a->group - k);
        const char *weight = a->weight + (panel * a->num_in + k) * PANEL * a->bits / 8;
        if (!is_fused) unpack(a->bits, weight, length / 2, chunk);
        for (int64_t r = 0; r < n; r += height) {
            int rows = (int)min64(height, n - r);
            struct product p = {.a = x + r * x_bytes + 2 * k, .lda_bytes = x_bytes,
                                .b = (const char *)chunk, .ldb = PANEL, .steps = length / 2,
                                .c = part + r * PANEL, .ldc = PANEL, .fresh = k % a->group == 0};
            if (is_fused) few_rows(a->bits, rows, weight, &p);
            else product(PAIRS, rows, PANEL, p);
        }
        if ((k + length) % a->group) continue;
        int64_t at = (panel * num_groups + group) * PANEL;
        for (int v = 0; v < PANEL; v += LANES) {
            vf scale = load(BF16, a->scales, at + v);
            vf offset = a->offsets ? load(BF16, a->offsets, at + v) : (vf){0};
            for (int64_t r = 0; r < n; r++) {
                vf sum = vf_load(total + r * PANEL + v) + vf_load(part + r * PANEL + v) * scale;
                if (a->offsets) sum += offset * x_sums[r * num_groups + group];
                vf_store(total + r * PANEL + v, sum);
            }
        }
    }
    for (int64_t v = 0, lanes; v < PANEL; v += LANES) {
        int64_t column = panel * PANEL + v;
        if ((lanes = min64(LANES, a->num_out - column)) <= 0) break;
        vf bias = a->bias ? load_part(BF16, a->bias, column, lanes) : (vf){0};
        for (int64_t r = 0; r < n; r++) {
            int64_t at = (row + r) * a->num_out + column;
            vf y = vf_load(total + r * PANEL + v) + bias;
            if (lanes == LANES) store(BF16, a->out, at, y);
            else store_part(BF16, a->out, at, lanes, y);
        }
    }
}

/* How many rows are a block; each panel of each block is a unit of work. */
static int64_t block_rows(const struct quantized *a, int64_t num_panels)
{
    int64_t height = a->num_rows * num_panels / MIN_SHARES;
    return max64(2 * TILE_ROWS, min64(height, CACHED_ROWS));
}

int64_t quire_quantized_count(const void *args)
{
    const struct quantized *a = args;
    int64_t num_panels = ceil_div(a->num_out, PANEL);
    int64_t panel_bytes = PANEL * a->num_in * a->bits / 8;
    int64_t num_blocks = ceil_div(a->num_rows, block_rows(a, num_panels));
    return shares_of(num_panels * num_blocks, max64(SHARE_BYTES / panel_bytes, 1));
}

void quire_quantized_share(const void *args, int64_t share, int64_t num_shares)
{
    const struct quantized *a = args;
    int64_t num_panels = ceil_div(a->num_out, PANEL), num_groups = a->num_in / a->group;
    int64_t height = block_rows(a, num_panels);
    int64_t num_units = num_panels * ceil_div(a->num_rows, height);
    int64_t unit = share_start(num_units, share, num_shares);
    int64_t last = share_start(num_units, share + 1, num_shares), copied = -1;
    /* A copy of the rows, a little longer, so that they do not fall on the same lines of a cache. */
    int64_t x_bytes = 2 * a->num_in + 64;
    char *x = thread_memory(height * (x_bytes + num_groups * (int64_t)sizeof(float)));
    float *x_sums = (float *)(x + height * x_bytes);
    for (; unit < last; unit++) {
        int64_t row = unit / num_panels * height, n = min64(height, a->num_rows - row);
        for (int64_t r = 0; r < n && copied != row; r++) {
            memcpy(x + r * x_bytes, a->x + (row + r) * a->x_stride, 2 * a->num_in);
            if (a->offsets) sum_groups(a, x + r * x_bytes, x_sums + r * num_groups);
        }
        copied = row;
        multiply_panel(a, unit % num_panels, row, n, x, x_bytes, x_sums);
    }
}

void quire_quantized(const struct quantized *a)
{
    run_call(true, quire_quantized_share, quire_quantized_count, a);
}

#else

int64_t quire_quantized_count(const void *args)
{
    (void)args;
    return 1;
}

void quire_quantized_share(const void *args, int64_t share, int64_t num_shares)
{
    (void)args, (void)share, (void)num_shares;
}

void quire_quantized(const void *a) { (void)a; }

#endif
