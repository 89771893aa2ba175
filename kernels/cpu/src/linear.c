/* Linear maps with packed bf16 weights: x @ weight.T + bias; gated, also silu(gate) * up of the result.
 *
 * Symbols: m rows, K input features, N output features. A weight [N, K] is packed once, when it is
 * loaded, to panels [ceil(N / 32)][K / 2][32] of pairs (k, k + 1), so that what a thread reads is
 * contiguous. The sums are fp32, each over k in ascending order for any number of rows, so a row's result
 * depends on no other row. A unit of work is one panel for one part of the rows; a share is some units. */
#include "kv_ahead.h"
#include "thread_memory.h"

enum {
    CACHED_ROWS = 96,     /* of x at a time, so that they stay in the second-level cache */
    L1_WAYS = 8,          /* a first-level cache of 32 KiB: a guess, on which only copies depend */
    L1_SETS = 64,
    SHARE_BYTES = 49152,  /* of weights, about: two microseconds from memory */
    COPY_PANELS = 4,      /* fewer do not pay for copying rows */
    MIN_SHARES = 16,      /* of a map of many rows */
};

struct linear {
    int64_t num_rows, num_in, num_out; /* num_out: columns of `out` */
    const bf16 *x;                     /* [m, K] */
    const uint32_t *weight;
    const bf16 *bias; /* [N], or NULL */
    void *out;        /* [m, num_out]; rows may lie apart, as those of x */
    int64_t out_type; /* F32: rounded to bf16 all the same */
    int64_t x_stride, out_stride;
    int64_t is_gated; /* the weight is [gate; up], 2 * num_out; out = silu(gate) * up */
    struct kv_part next; /* what it fetches for the next attention */
};

INLINE vf biased(const struct linear *a, const float *sums, int64_t column, int64_t n)
{
    vf sum = vf_load(sums);
    if (!a->bias) return sum;
    return sum + (n == LANES ? load(BF16, a->bias, column) : load_part(BF16, a->bias, column, n));
}

INLINE void finish_row(dtype out_type, const struct linear *a, int64_t row, int64_t panel,
                       const float *sums, const float *up_sums)
{
    for (int64_t v = 0; v < PANEL; v += LANES) {
        int64_t column = panel * PANEL + v, n = min64(LANES, a->num_out - column);
        if (n <= 0) return;
        vf y = rounded(BF16, biased(a, sums + v, column, n));
        if (up_sums) {
            vf up = rounded(BF16, biased(a, up_sums + v, a->num_out + column, n));
            y = rounded(BF16, silu(y)) * up;
        }
        if (out_type == F32) y = rounded(BF16, y);
        int64_t at = row * a->out_stride + column;
        if (n == LANES) store(out_type, a->out, at, y);
        else store_part(out_type, a->out, at, n, y);
    }
}

/* Computes rows [row, end), at most CACHED_ROWS, of `panel`; `rows` is their x. The first tile of rows
 * prefetches the panel, the others what attention needs next. */
static void multiply_panel(const struct linear *a, int64_t row, int64_t end, const char *rows,
                           int64_t row_bytes, int64_t panel, struct kv_ahead *next)
{
    float sums[2][TILE_ROWS * PANEL] __attribute__((aligned(64)));
    int64_t num_parts = a->is_gated ? 2 : 1, num_panels = ceil_div(a->num_out, PANEL);
    int64_t steps = a->num_in / 2;
    int64_t num_tiles = ceil_div(end - row, TILE_ROWS), height = ceil_div(end - row, num_tiles);
    int64_t ahead_bytes = end - row == 1 ? PREFETCH_BYTES / 4 : PREFETCH_BYTES;
    int64_t num_runs = steps / RUN_STEPS, run_steps = num_runs ? ceil_div(steps, num_runs) : steps;
    for (int64_t r = row; r < end; r += height) {
        int n = (int)min64(height, end - r);
        for (int64_t part = 0; part < num_parts; part++) {
            const uint32_t *weight = a->weight + (panel + part * num_panels) * steps * PANEL;
            const char *later[MAX_RUNS];
            bool is_later = r > row && next_runs(next, num_runs, later);
            product(PAIRS, n, PANEL,
                    (struct product){.a = rows + (r - row) * row_bytes, .lda_bytes = row_bytes,
                                     .b = (const char *)weight, .ldb = PANEL, .steps = steps,
                                     .c = sums[part], .ldc = PANEL, .fresh = true,
                                     .ahead_bytes = r > row ? 0 : ahead_bytes,
                                     .later = is_later ? later : NULL,
                                     .later_steps = run_steps,
                                     .later_bytes = ceil_div(next->run_bytes, run_steps)});
        }
        for (int i = 0; i < n; i++) {
            const float *up = a->is_gated ? sums[1] + i * PANEL : NULL;
            if (a->out_type == F32) finish_row(F32, a, r + i, panel, sums[0] + i * PANEL, up);
            else finish_row(BF16, a, r + i, panel, sums[0] + i * PANEL, up);
        }
    }
}

/* How many lines, each `bytes` after the one before, the first-level cache can hold at once. */
INLINE int64_t lines_that_fit(int64_t bytes)
{
    int64_t sets = L1_SETS;
    for (int64_t lines = bytes / 64; lines % 2 == 0 && sets > 1; lines /= 2) sets /= 2;
    return bytes % 64 ? L1_SETS : sets * L1_WAYS;
}

/* Whether rows fall on the same few lines of the cache. Then they are copied to where they do not. */
INLINE bool needs_copy(const struct linear *a)
{
    return a->num_rows > L1_WAYS && lines_that_fit(a->x_stride * 2) < TILE_ROWS;
}

/* How many parts the rows are cut into; each panel of each part is a unit of work. */
INLINE int64_t num_parts_of(const struct linear *a, int64_t num_panels)
{
    int64_t num_parts = ceil_div(MIN_SHARES, num_panels);
    num_parts = min64(num_parts, a->num_rows / (2 * TILE_ROWS));
    return max64(num_parts, max64(1, ceil_div(a->num_rows, CACHED_ROWS)));
}

int64_t quire_linear_count(const void *args)
{
    const struct linear *a = args;
    int64_t num_panels = ceil_div(a->num_out, PANEL), panel_bytes = 2 * PANEL * a->num_in;
    int64_t least = max64(SHARE_BYTES / (panel_bytes * (a->is_gated ? 2 : 1)), 1);
    if (needs_copy(a)) least = max64(least, COPY_PANELS);
    return shares_of(num_panels * num_parts_of(a, num_panels), least);
}

void quire_linear_share(const void *args, int64_t share, int64_t num_shares)
{
    const struct linear *a = args;
    int64_t num_panels = ceil_div(a->num_out, PANEL), row_bytes = a->x_stride * 2;
    int64_t num_parts = num_parts_of(a, num_panels);
    int64_t unit = share_start(num_parts * num_panels, share, num_shares);
    int64_t last = share_start(num_parts * num_panels, share + 1, num_shares);
    int64_t copy_bytes = a->num_in * 2 + 64;
    char *copy = needs_copy(a) ? thread_memory(CACHED_ROWS * copy_bytes) : NULL;
    int64_t num_tiles = ceil_div(a->num_rows, TILE_ROWS);
    struct kv_ahead next =
        kv_ahead_of(&a->next, max64(0, num_tiles - num_parts), share, num_shares);
    while (unit < last) {
        int64_t part = unit / num_panels;
        int64_t panel = unit % num_panels, panel_end = min64(num_panels, panel + last - unit);
        int64_t row = a->num_rows * part / num_parts, end = a->num_rows * (part + 1) / num_parts;
        unit += panel_end - panel;
        for (; row < end; row += CACHED_ROWS) {
            int64_t n = min64(CACHED_ROWS, end - row), bytes = row_bytes;
            const char *rows = (const char *)(a->x + row * a->x_stride);
            if (copy) {
                for (int64_t r = 0; r < n; r++)
                    memcpy(copy + r * copy_bytes, rows + r * row_bytes, a->num_in * 2);
                rows = copy;
                bytes = copy_bytes;
            }
            for (int64_t p = panel; p < panel_end; p++)
                multiply_panel(a, row, row + n, rows, bytes, p, &next);
        }
    }
}

int64_t quire_has_linear(void) { return HAS_BF16_DOT; }

void quire_linear(const struct linear *a)
{
    run_call(true, quire_linear_share, quire_linear_count, a);
}
