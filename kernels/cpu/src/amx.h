/* Products with Intel's AMX, which has eight matrix registers of 16 rows of 64 bytes.
 *
 * An instruction multiplies up to 16 rows of x with 16 columns of a panel (linear.c), over up to 32
 * values of k, and adds the products to 16 x 16 sums. For each sum, the instruction first adds up the
 * products of even k, in ascending order, and in the same way the products of odd k. Then it adds these
 * two numbers, and adds the result to the sum. So an element of the result does not depend on other rows,
 * nor on their number: a single row gets the same result as among many rows.
 *
 * These instructions have never run on a CPU: tests run them in an emulation in plain C, and a worker
 * checks and times them at its first start (kernels/cpu/amx_choice.py) before it uses them. */
#ifndef QUIRE_AMX_H
#define QUIRE_AMX_H

#include "tile.h"

#if defined(AMX_EMULATION)
#include AMX_EMULATION
#define HAS_AMX
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define HAS_AMX
#endif

enum { AMX_ROWS = 32 /* rows of two registers */, AMX_ATTENTION = 4 };

/* A set of bits: which operations in bf16 use AMX. Bit AMX_ATTENTION is for attention. The other bits are
 * for linear maps: bit i is for weights in the format i of `kept_as` (linear.c). MXFP4 weights have no
 * bit, because their maps never use AMX. The set never changes while a kernel runs. */
extern int64_t quire_amx_uses;

#ifdef HAS_AMX

enum { AMX_TILE_ROWS = 16, AMX_TILE_BYTES = 64, AMX_STEPS = 16 /* pairs of k */ };

/* Registers 0 to 3 hold sums [2][2], 4 and 5 hold rows of x, and 6 and 7 hold columns of the panel. */
struct amx_shape {
    int64_t rows, steps; /* rows of x; pairs of k that an instruction takes */
};

static _Thread_local struct amx_shape amx_configured;

/* A compiler barrier: all stores before it are in memory when the code after it begins. It is needed
 * because gcc's AMX functions do not tell the compiler what they read. */
INLINE void amx_sync(const void *read) { __asm__ volatile("" ::"r"(read) : "memory"); }

/* Sets up the registers for up to AMX_ROWS rows. An instruction then takes as many pairs of k as the
 * largest power of two that divides `steps`, but at most AMX_STEPS. */
static inline void amx_configure(int64_t rows, int64_t steps)
{
    steps = min64(AMX_STEPS, steps & -steps);
    if (rows == amx_configured.rows && steps == amx_configured.steps) return;
    amx_configured = (struct amx_shape){rows, steps};
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    const uint8_t first = min64(rows, AMX_TILE_ROWS), second = rows - first;
    const uint8_t height[8] = {first, first, second, second, first, second, steps, steps};
    for (int i = 0; i < 8; i++) {
        const int64_t row_bytes = i == 4 || i == 5 ? 4 * steps : AMX_TILE_BYTES;
        shape.rows[i] = height[i];
        shape.row_bytes[i] = height[i] ? row_bytes : 0;
    }
    amx_sync(&shape);
    _tile_loadconfig(&shape);
}

/* Called at the beginning of a share (threads.h), so that the next product sets up the registers again:
 * other code may have changed them since this thread's last share. */
INLINE void amx_begin(void) { amx_configured = (struct amx_shape){0}; }

/* Called at the end of a share: frees the registers, so that the system need not save them when the
 * thread loses its core. */
INLINE void amx_end(void) { _tile_release(); }

/* Adds the product over `steps` pairs of k to the sums in the registers. */
INLINE void amx_multiply(bool has_second, const struct product *p, const char *a, const char *b,
                         int64_t steps)
{
    const int64_t at_once = amx_configured.steps, b_bytes = 4 * p->ldb;
    for (int64_t k = 0; k < steps; k += at_once, a += 4 * at_once, b += at_once * b_bytes) {
        if (p->ahead_bytes)
            for (int64_t i = 0; i < at_once * b_bytes; i += 64)
                __builtin_prefetch(b + p->ahead_bytes + i, 0, 2);
        _tile_loadd(4, a, p->lda_bytes);
        _tile_loadd(6, b, b_bytes);
        _tile_loadd(7, b + AMX_TILE_BYTES, b_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (!has_second) continue;
        _tile_loadd(5, a + AMX_TILE_ROWS * p->lda_bytes, p->lda_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

INLINE void amx_zero(bool has_second)
{
    _tile_zero(0);
    _tile_zero(1);
    if (!has_second) return;
    _tile_zero(2);
    _tile_zero(3);
}

INLINE void amx_load(bool has_second, const float *c, int64_t ldc)
{
    const float *second = c + AMX_TILE_ROWS * ldc;
    _tile_loadd(0, c, 4 * ldc);
    _tile_loadd(1, c + AMX_TILE_ROWS, 4 * ldc);
    if (!has_second) return;
    _tile_loadd(2, second, 4 * ldc);
    _tile_loadd(3, second + AMX_TILE_ROWS, 4 * ldc);
}

INLINE void amx_store(bool has_second, float *c, int64_t ldc)
{
    float *second = c + AMX_TILE_ROWS * ldc;
    _tile_stored(0, c, 4 * ldc);
    _tile_stored(1, c + AMX_TILE_ROWS, 4 * ldc);
    if (has_second) {
        _tile_stored(2, second, 4 * ldc);
        _tile_stored(3, second + AMX_TILE_ROWS, 4 * ldc);
    }
    amx_sync(c);
}

/* Multiplies up to AMX_ROWS rows with the first PANEL columns of b, which is [steps][ldb] pairs. With AMX
 * it replaces `pairs_product` (linear.c). */
static inline void amx_product(int rows, const struct product *p)
{
    const bool has_second = rows > AMX_TILE_ROWS;
    amx_configure(rows, p->group_steps);
    amx_sync(p->c);
    if (p->fresh) amx_zero(has_second);
    else amx_load(has_second, p->c, p->ldc);
    amx_multiply(has_second, p, p->a, p->b, p->steps);
    amx_store(has_second, p->c, p->ldc);
}

/* Multiplies as `product` (tile.h) does, but up to AMX_ROWS rows with a multiple of PANEL columns. The
 * number of steps is a multiple of AMX_STEPS. */
static inline void amx_columns(int rows, int64_t columns, struct product p)
{
    p.group_steps = AMX_STEPS;
    for (int64_t j = 0; j < columns; j += PANEL, p.b += 4 * PANEL, p.c += PANEL)
        amx_product(rows, &p);
}

/* Multiplies rows with a panel that has scales; with AMX it replaces `scaled_pairs_product` (linear.c).
 * The sums of each group of steps are written to memory, and are scaled and added to the totals from
 * there. */
static inline void scaled_amx_product(int rows, const struct product *p)
{
    float sums[AMX_ROWS * PANEL] __attribute__((aligned(64)));
    const bool has_second = rows > AMX_TILE_ROWS;
    amx_configure(rows, p->group_steps);
    amx_sync(p->c);
    for (int64_t group = 0, k = 0; k < p->steps; group++, k += p->group_steps) {
        amx_zero(has_second);
        amx_multiply(has_second, p, p->a + 4 * k, p->b + 4 * PANEL * k, p->group_steps);
        amx_store(has_second, sums, PANEL);
        for (int64_t v = 0; v < PANEL; v += LANES) {
            vf scale = scales_at(p, group * PANEL + v), offset = {0};
            if (p->offsets) offset = vf_from_fp16(p->offsets + group * PANEL + v);
            for (int r = 0; r < rows; r++) {
                float *to = p->c + r * p->ldc + v;
                vf total = p->fresh && group == 0 ? (vf){0} : vf_load(to);
                total += vf_load(sums + r * PANEL + v) * scale;
                if (p->offsets) total += p->a_sums[r * p->num_groups + group] * offset;
                vf_store(to, total);
            }
        }
    }
}

#else

INLINE void amx_begin(void) {}
INLINE void amx_end(void) {}

#endif
#endif
