/* The matrix product that linear maps and attention use: a few rows times some columns.
 *
 * The sums stay in registers. Each element is one sum over k in ascending order, starting from the number
 * in c. So an element does not depend on other rows or columns, nor on their number. */
#ifndef QUIRE_TILE_H
#define QUIRE_TILE_H

#include "simd.h"

/* A tile has as many sums as there are registers for: AVX-512 and NEON have 32 registers, AVX2 has 16. The
 * sizes for NEON and AVX2 are guesses: they were never timed on a CPU that has no more than these. */
#if defined(__AVX2__) && !defined(HAS_AVX512)
enum { TILE_ROWS = 6, TILE_VECTORS = 2 };
#else
enum { TILE_ROWS = 12, TILE_VECTORS = 2 };
#endif
enum { ROW_BASES = TILE_ROWS / 3 }; /* pointers to rows 0, 3, ...; other rows are 1 or 2 strides on */
enum { PANEL = 32 }; /* columns of a panel */
enum { RUN_STEPS = 128, RUN_BYTES = 64 * RUN_STEPS }; /* a run is memory that is fetched for later,
                                                         at most a cache line in a step */
enum { PREFETCH_BYTES = 8192 }; /* how far ahead, measured as best for several rows; for one, a quarter */

#if (defined(__AVX512BF16__) && defined(HAS_AVX512)) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
enum { HAS_BF16_DOT = 1 };
#else
enum { HAS_BF16_DOT = 0 };
#endif

/* A step in k takes 4 bytes of a row: one float, or two bf16 that are multiplied and added at once. */
typedef enum { FLOATS, PAIRS } step_kind;

INLINE step_kind step_kind_of(dtype type) { return type == BF16 && HAS_BF16_DOT ? PAIRS : FLOATS; }

INLINE vf multiply_add(step_kind kind, const char *a, vf b, vf c)
{
    if (HAS_BF16_DOT && kind == PAIRS) {
        int32_t pair;
        memcpy(&pair, a, sizeof pair);
#if defined(__AVX512BF16__)
        return (vf)_mm512_dpbf16_ps((__m512)c, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)b);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
        return (vf)vbfdotq_f32((float32x4_t)c, vreinterpretq_bf16_s32(vdupq_n_s32(pair)),
                               vreinterpretq_bf16_f32((float32x4_t)b));
#endif
    }
    float x;
    memcpy(&x, a, sizeof x);
    return c + x * b;
}

/* The layout of b. PLAIN is [steps][ldb] of 4 bytes, each step as `step_kind` takes it. The other layouts
 * are panels of weights, which are unpacked to PLAIN: HALVES is [K / 2][32][2] of bf16, and BYTES is
 * [K / 2][32][2] bytes. NIBBLES is [K / 8][32][2] words of 16 bits. The two words of a column hold four
 * pairs of k: nibble i of each word, counted from the lowest, belongs to pair i. E2M1 is like NIBBLES,
 * but the nibbles are numbers in the format e2m1. */
typedef enum { PLAIN, HALVES, BYTES, NIBBLES, E2M1 } b_format;

/* How much of a panel is unpacked in one turn: so many k (turn_k), in so many steps (turn_steps).
 * panel_bytes is the size of `num_in` k of a panel. */
INLINE int turn_k(b_format format) { return format == HALVES ? 2 : 8; }
INLINE int turn_steps(step_kind kind, b_format format)
{
    return format == PLAIN ? 1 : kind == PAIRS ? turn_k(format) / 2 : turn_k(format);
}
INLINE int64_t panel_bytes(b_format format, int64_t num_in)
{
    return num_in * PANEL * (format == NIBBLES || format == E2M1 ? 1 : format == BYTES ? 2 : 4) / 2;
}

/* Unpacks vector `v` of the columns of step `t` of a turn. */
INLINE vf unpacked(step_kind kind, b_format format, const char *b, int t, int v)
{
    if (format == PLAIN) return vf_load((const float *)b + v * LANES);
#if defined(__AVX512BF16__) && defined(HAS_AVX512)
    if (kind == PAIRS && format == BYTES) {
        const __m128i *at = (const __m128i *)(b + 64 * t + 32 * v);
        __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at)));
        __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at + 1)));
        return (vf)_mm512_cvtne2ps_pbh(high, low);
    }
    if (kind == PAIRS && (format == NIBBLES || format == E2M1)) {
        static const bf16 integers[32] __attribute__((aligned(64))) = { /* the numbers 0 to 15, twice */
            0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
            0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
            0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
        static const bf16 numbers[32] __attribute__((aligned(64))) = { /* the numbers of E2M1, twice */
            0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80,
            0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0, 0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
            0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
        __m512i words = _mm512_loadu_si512(b + 64 * v);
        return (vf)_mm512_permutexvar_epi16(
            _mm512_srli_epi16(words, 4 * t),
            _mm512_load_si512(format == E2M1 ? numbers : integers));
    }
#endif
    if (kind == PAIRS) { /* a number of 8 or 4 bits, as a float, is a bf16 followed by 16 zero bits */
        vu even = (vu)unpacked(FLOATS, format, b, 2 * t, v);
        vu odd = (vu)unpacked(FLOATS, format, b, 2 * t + 1, v);
        return (vf)(even >> 16 | odd);
    }
    if (format == BYTES) {
        typedef int16_t words __attribute__((vector_size(2 * LANES)));
        words pairs;
        memcpy(&pairs, b + 64 * (t / 2) + 2 * v * LANES, sizeof pairs);
        vi pair = __builtin_convertvector(pairs, vi);
        return __builtin_convertvector(t % 2 ? pair >> 8 : pair << 24 >> 24, vf);
    }
    vu pair;
    memcpy(&pair, b + 4 * v * LANES, sizeof pair);
    if (format == HALVES) return (vf)(t % 2 ? pair & 0xffff0000 : pair << 16);
    vu nibbles = pair >> (4 * (t / 2) + 16 * (t % 2)) & 15;
    return format == E2M1 ? vf_from_e2m1(nibbles) : __builtin_convertvector((vi)nibbles, vf);
}

/* The arguments of a product: c[r][j] (+)= sum over k of a[r][k] * b[k][j]. If there are scales, each group
 * of steps has its own sum, and c[r][j] = sum over groups g of (the group's sum) * scales[g][j] +
 * offsets[g][j] * a_sums[r][g], in ascending order. */
struct product {
    const char *a;
    int64_t lda_bytes;
    const char *b;
    int64_t ldb, steps; /* ldb of a panel: PANEL */
    float *c;
    int64_t ldc;
    bool fresh;         /* c is written, not added to */
    int64_t ahead_bytes; /* how far ahead b is fetched from memory; 0: it is in a cache */
    const char *const *later; /* runs that are fetched instead, one after the other; or NULL */
    int64_t later_steps, later_bytes; /* steps that fetch one run, and bytes that a step fetches */
    const char *scales;               /* [groups][PANEL]; or NULL */
    int64_t scale_bytes;              /* 2: scales are fp16; 1: scales are e8m0 */
    const fp16 *offsets;              /* [groups][PANEL]; or NULL */
    const float *a_sums;              /* [rows][groups], if there are offsets */
    int64_t group_steps, num_groups;
};

/* The properties for which a tile's product is compiled. */
struct tile {
    step_kind kind;
    b_format format;
    bool is_later, is_scaled;
};

INLINE vf scales_at(const struct product *p, int64_t i)
{
    const char *at = p->scales + i * p->scale_bytes;
    return p->scale_bytes == 1 ? vf_from_e8m0((const uint8_t *)at) : vf_from_fp16((const fp16 *)at);
}

/* Adds the scaled sums of a group to the totals, and begins the sums of the next group. */
INLINE void end_group(int rows, int vectors, const struct product *p, int64_t group,
                      vf sum[TILE_ROWS][TILE_VECTORS], vf total[TILE_ROWS][TILE_VECTORS])
{
    for (int v = 0; v < vectors; v++) {
        vf scale = scales_at(p, group * PANEL + v * LANES);
        for (int r = 0; r < rows; r++) {
            total[r][v] += sum[r][v] * scale;
            sum[r][v] = (vf){0};
        }
        if (!p->offsets) continue;
        vf offset = vf_from_fp16(p->offsets + group * PANEL + v * LANES);
        for (int r = 0; r < rows; r++)
            total[r][v] += p->a_sums[r * p->num_groups + group] * offset;
    }
}

INLINE void tile_product(struct tile tile, int rows, int vectors, const struct product *p)
{
    const int turn = turn_steps(tile.kind, tile.format);
    const bool is_unpacked = tile.is_scaled && tile.format == PLAIN; /* a panel, in a cache */
    const int64_t turn_bytes = is_unpacked            ? 4 * PANEL
                               : tile.format == PLAIN ? 4 * p->ldb
                                                      : panel_bytes(tile.format, turn_k(tile.format));
    const int64_t fetched =
        is_unpacked ? 0 : tile.format == PLAIN ? 4 * vectors * LANES : turn_bytes;
    vf sum[TILE_ROWS][TILE_VECTORS], total[TILE_ROWS][TILE_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            vf before = p->fresh ? (vf){0} : vf_load(p->c + r * p->ldc + v * LANES);
            sum[r][v] = tile.is_scaled ? (vf){0} : before;
            total[r][v] = before;
        }
    const char *a[ROW_BASES], *b = p->b;
    for (int i = 0; i < ROW_BASES; i++) {
        a[i] = p->a + 3 * i * p->lda_bytes;
        __asm__("" : "+r"(a[i])); /* or the compiler would keep a register for each row */
    }
    int64_t part = tile.is_later ? p->later_steps : tile.is_scaled ? p->group_steps : p->steps;
    for (int64_t k = 0; k < p->steps;) {
        int64_t end = min64(p->steps, k + part), group = k / part;
        const char *later = tile.is_later ? p->later[group] : NULL;
        for (; k < end; k += turn, b += turn_bytes) {
            if (tile.is_later) {
                __builtin_prefetch(later, 0, 2);
                later += p->later_bytes;
            } else {
                for (int64_t i = 0; i < fetched; i += 64)
                    __builtin_prefetch(b + p->ahead_bytes + i, 0, 2);
            }
#pragma GCC unroll 8
            for (int t = 0; t < turn; t++) {
                vf column[TILE_VECTORS];
                for (int v = 0; v < vectors; v++)
                    column[v] = unpacked(tile.kind, tile.format, b, t, v);
                for (int r = 0; r < rows; r++)
                    for (int v = 0; v < vectors; v++)
                        sum[r][v] =
                            multiply_add(tile.kind, a[r / 3] + r % 3 * p->lda_bytes + 4 * t,
                                         column[v], sum[r][v]);
            }
            for (int i = 0; i < ROW_BASES; i++) a[i] += 4 * turn;
        }
        if (tile.is_scaled) end_group(rows, vectors, p, group, sum, total);
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            vf_store(p->c + r * p->ldc + v * LANES, tile.is_scaled ? total[r][v] : sum[r][v]);
}

/* Calls tile_product with the number of rows as a constant, so that the compiler keeps the sums in
 * registers. */
INLINE void any_rows(struct tile tile, int rows, int vectors, const struct product *p)
{
#define TILE_CASE(n) \
    case n: if (n <= TILE_ROWS) tile_product(tile, n, vectors, p); break;
    switch (rows) {
        TILE_CASE(1) TILE_CASE(2) TILE_CASE(3) TILE_CASE(4) TILE_CASE(5) TILE_CASE(6)
        TILE_CASE(7) TILE_CASE(8) TILE_CASE(9) TILE_CASE(10) TILE_CASE(11) TILE_CASE(12)
    }
#undef TILE_CASE
}

INLINE void all_columns(struct tile tile, int rows, int64_t columns, struct product p)
{
    const int width = TILE_VECTORS * LANES;
    int64_t j = 0;
    for (; j + width <= columns; j += width, p.b += 4 * width, p.c += width)
        any_rows(tile, rows, TILE_VECTORS, &p);
    for (; j < columns; j += LANES, p.b += 4 * LANES, p.c += LANES) any_rows(tile, rows, 1, &p);
}

/* Multiplies at most TILE_ROWS rows with all columns, a multiple of LANES. b is PLAIN, without scales. */
static inline void product(step_kind kind, int rows, int64_t columns, struct product p)
{
    if (kind == PAIRS && HAS_BF16_DOT) all_columns((struct tile){.kind = PAIRS}, rows, columns, p);
    else all_columns((struct tile){.kind = FLOATS}, rows, columns, p);
}

#endif
