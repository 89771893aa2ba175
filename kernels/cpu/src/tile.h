/* The matrix product that linear maps and attention use: a few rows times 16 or 32 columns.
 *
 * The sums stay in registers. Each element is one sum over k in ascending order, starting from what c
 * holds: it depends on no other row or column, nor on how many there are. */
#ifndef QUIRE_TILE_H
#define QUIRE_TILE_H

#include "simd.h"

/* As many sums as there are registers for. Without AVX-512 it is a guess: never timed there. */
#ifdef __AVX512F__
enum { TILE_ROWS = 12, TILE_VECTORS = 2 };
#else
enum { TILE_ROWS = 6, TILE_VECTORS = 1 };
#endif
enum { ROW_BASES = TILE_ROWS / 3 }; /* a row's address is one of these, plus 0, 1 or 2 strides */
enum { PANEL = 32 }; /* columns of a panel: what `tile_product` takes at most */
enum { RUN_STEPS = 128, RUN_BYTES = 64 * RUN_STEPS }; /* a run is memory that is fetched for later,
                                                         at most a cache line in a step */
enum { PREFETCH_BYTES = 8192 }; /* measured best for several rows; a quarter of it for one row */

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
enum { HAS_BF16_DOT = 1 };
#else
enum { HAS_BF16_DOT = 0 };
#endif

/* A step in k takes 4 bytes of each operand: a float, or two bf16 that are multiplied and added at
 * once. */
typedef enum { FLOATS, PAIRS } step_kind;

INLINE step_kind step_kind_of(dtype type) { return type == BF16 && HAS_BF16_DOT ? PAIRS : FLOATS; }

INLINE vf multiply_add(step_kind kind, const char *a, vf b, vf c)
{
#ifdef __AVX512BF16__
    if (kind == PAIRS) {
        int32_t pair;
        memcpy(&pair, a, sizeof pair);
        return (vf)_mm512_dpbf16_ps((__m512)c, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)b);
    }
#endif
    (void)kind;
    float x;
    memcpy(&x, a, sizeof x);
    return c + x * b;
}

/* What a tile multiplies: c[r][j] (+)= sum over k of a[r][k] * b[k][j]. */
struct product {
    const char *a;
    int64_t lda_bytes;
    const char *b;      /* [steps][ldb] of 4 bytes */
    int64_t ldb, steps;
    float *c;
    int64_t ldc;
    bool fresh;         /* c is written, not added to */
    int64_t ahead_bytes; /* how far ahead b is fetched from memory; 0: it is in a cache */
    const char *const *later; /* runs that are fetched instead, one after the other; or NULL */
    int64_t later_steps, later_bytes; /* steps that fetch one run, and bytes that a step fetches */
};

INLINE void tile_product(step_kind kind, int rows, int vectors, bool is_later,
                         const struct product *p)
{
    vf sum[TILE_ROWS][TILE_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = p->fresh ? (vf){0} : vf_load(p->c + r * p->ldc + v * LANES);
    const char *a[ROW_BASES];
    for (int i = 0; i < ROW_BASES; i++) {
        a[i] = p->a + 3 * i * p->lda_bytes;
        __asm__("" : "+r"(a[i])); /* or the compiler would keep a register for each row */
    }
    for (int64_t k = 0; k < p->steps;) {
        int64_t end = is_later ? min64(p->steps, k + p->later_steps) : p->steps;
        const char *later = is_later ? p->later[k / p->later_steps] : NULL;
        for (; k < end; k++) {
            const char *b = p->b + 4 * k * p->ldb;
            vf column[TILE_VECTORS];
            for (int v = 0; v < vectors; v++) {
                column[v] = vf_load((const float *)b + v * LANES);
                if (!is_later) __builtin_prefetch(b + p->ahead_bytes + 64 * v, 0, 2);
            }
            if (is_later) {
                __builtin_prefetch(later, 0, 2);
                later += p->later_bytes;
            }
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < vectors; v++)
                    sum[r][v] = multiply_add(kind, a[r / 3] + r % 3 * p->lda_bytes, column[v],
                                             sum[r][v]);
            for (int i = 0; i < ROW_BASES; i++) a[i] += 4;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) vf_store(p->c + r * p->ldc + v * LANES, sum[r][v]);
}

/* Compiles each number of rows on its own, so that the sums stay in registers. */
INLINE void any_rows(step_kind kind, int rows, int vectors, bool is_later, const struct product *p)
{
#define TILE_CASE(n) \
    case n: if (n <= TILE_ROWS) tile_product(kind, n, vectors, is_later, p); break;
    switch (rows) {
        TILE_CASE(1) TILE_CASE(2) TILE_CASE(3) TILE_CASE(4) TILE_CASE(5) TILE_CASE(6)
        TILE_CASE(7) TILE_CASE(8) TILE_CASE(9) TILE_CASE(10) TILE_CASE(11) TILE_CASE(12)
    }
#undef TILE_CASE
}

static void one_vector(step_kind kind, int rows, const struct product *p)
{
    if (kind == PAIRS) any_rows(PAIRS, rows, 1, false, p);
    else any_rows(FLOATS, rows, 1, false, p);
}

/* At most TILE_ROWS rows, all columns: a multiple of LANES. */
static void product(step_kind kind, int rows, int64_t columns, struct product p)
{
    int64_t j = 0;
    if (TILE_VECTORS == 2)
        for (; j + 2 * LANES <= columns; j += 2 * LANES, p.b += 8 * LANES, p.c += 2 * LANES) {
            if (kind == PAIRS && p.later) any_rows(PAIRS, rows, TILE_VECTORS, true, &p);
            else if (kind == PAIRS) any_rows(PAIRS, rows, TILE_VECTORS, false, &p);
            else any_rows(FLOATS, rows, TILE_VECTORS, false, &p);
        }
    for (; j < columns; j += LANES, p.b += 4 * LANES, p.c += LANES) one_vector(kind, rows, &p);
}

#endif
