/* Adds the products of LoRA adapters to a linear map: each row gets B A x of its adapter, B already scaled.
 *
 * Symbols: T rows, K input features, N output features, R ranks. A and B are packed like the weights of
 * linear.c. There are two kernels. low_rank_down computes A x, and may run beside the model's own map of
 * the same x. low_rank_up adds B A x to the result of that map, and writes the sum to other memory, since
 * a share may be done twice. Rows are processed in order of adapters, so that each weight is read for
 * several rows. Products are added up over k in ascending order, and A x, B A x and the final sum are
 * each rounded to bf16. So a row's result does not depend on other rows. */
#include "thread_memory.h"
#include "threads.h"
#include "tile.h"

enum {
    BLOCK_ROWS = 96,     /* rows at a time, so that B stays in a cache */
    SHARE_BYTES = 16384, /* about so many bytes of B, which take a microsecond from memory */
    ROW_BYTES = 256,     /* reading so many bytes of B takes as long as adding to 32 columns of a row */
    L1_WAYS = 8,         /* a guess; only copies of rows depend on it */
    L1_SET_BYTES = 4096, /* rows this far apart fall on the same lines of the first-level cache */
};

/* The weights that an adapter has for one map of a layer. */
struct low_rank {
    const uint32_t *down; /* A: [ceil(R / 32)][ceil(K / 2)][32] pairs */
    const uint32_t *up;   /* B: [ceil(N / 32)][R / 2][32] pairs */
    const int32_t *spans; /* [ceil(N / 32)][2]: for each panel of B, steps [first, end) of its R / 2
                             steps; all other steps are zero */
    int64_t num_ranks;    /* R, even; 0: the adapter does not change this map */
};

/* The rows of one adapter. */
struct group {
    int64_t first, end;          /* sorted by adapter */
    const struct low_rank *maps; /* of all layers; NULL: the rows have no adapter */
};

struct row_adapters {
    int64_t num_rows, num_groups;
    const int64_t *places; /* [T]: the index in the step of the i-th row in order of adapters;
                              NULL: the orders are the same */
    struct group groups[];
};

/* ranks[i] = A x[places[i]] */
struct low_rank_down {
    const struct row_adapters *rows;
    int64_t map; /* index in `maps` */
    int64_t num_in;
    const bf16 *x; /* [T, K] */
    bf16 *ranks;   /* [T, most R], sorted by adapter */
    int64_t x_stride, ranks_stride;
};

/* out[places[i]] = y, where y = alone[places[i]] + B ranks[i]. If gated, out[places[i]] =
 * silu(gate) * up, where [gate, up] = y. */
struct low_rank_up {
    const struct row_adapters *rows;
    int64_t map, num_out; /* num_out: columns of `out` */
    const bf16 *alone;    /* [T, N]: what the model's map gave */
    const bf16 *ranks;    /* [T, most R] */
    bf16 *out;            /* [T, num_out] */
    int64_t alone_stride, ranks_stride, out_stride;
    int64_t is_gated; /* N = 2 * num_out, a multiple of 2 * PANEL; else N = num_out */
};

INLINE int64_t place_of(const struct row_adapters *rows, int64_t i)
{
    return rows->places ? rows->places[i] : i;
}

/* Multiplies rows with bf16 weights, packed in pairs; `steps` counts pairs of k. If the CPU has no dot
 * product of bf16, the rows are floats. */
static void weights_product(int rows, int64_t columns, struct product p)
{
    if (HAS_BF16_DOT) {
        product(PAIRS, rows, columns, p);
    } else {
        p.steps *= 2;
        all_columns((struct tile){.kind = FLOATS, .format = HALVES}, rows, columns, p);
    }
}

static int64_t most_ranks(const struct row_adapters *rows, int64_t map)
{
    int64_t most = 0;
    for (int64_t g = 0; g < rows->num_groups; g++)
        if (rows->groups[g].maps) most = max64(most, rows->groups[g].maps[map].num_ranks);
    return most;
}

/* Returns rows [first, end) of x in order of adapters, at most TILE_ROWS. The returned rows are those in
 * x itself if they lie one after another and the product can take them as they are. Otherwise they are a
 * copy, with a zero after an odd number of features. */
static const char *tile_of_x(const struct low_rank_down *a, int64_t first, int64_t end,
                             int64_t *row_bytes)
{
    int64_t n = end - first, from = place_of(a->rows, first);
    bool is_dense = place_of(a->rows, end - 1) - from == n - 1; /* places ascend in a group */
    *row_bytes = 2 * a->x_stride;
    const bool is_odd = a->num_in % 2;
    if (HAS_BF16_DOT && !is_odd && is_dense && (n <= L1_WAYS || *row_bytes % L1_SET_BYTES))
        return (const char *)(a->x + from * a->x_stride);
    const int64_t bytes = HAS_BF16_DOT ? 2 : 4;
    *row_bytes = bytes * (a->num_in + is_odd) + 64;
    char *copy = thread_memory(TILE_ROWS * *row_bytes);
    for (int64_t i = 0; i < n; i++) {
        const bf16 *x = a->x + place_of(a->rows, first + i) * a->x_stride;
        char *to = copy + i * *row_bytes;
        if (HAS_BF16_DOT) memcpy(to, x, 2 * a->num_in);
        else floats_from_bf16((float *)to, x, a->num_in);
        memset(to + bytes * a->num_in, 0, bytes * is_odd);
    }
    return copy;
}

/* Computes A x for rows [first, end) of one group, at most TILE_ROWS: for each row, vectors
 * [vector, last) of its ranks. */
static void down_tile(const struct low_rank_down *a, const struct low_rank *weights, int64_t first,
                      int64_t end, int64_t vector, int64_t last)
{
    float sums[TILE_ROWS * PANEL] __attribute__((aligned(64)));
    int64_t steps = ceil_div(a->num_in, 2), per_panel = PANEL / LANES, row_bytes, n = end - first;
    const char *x = tile_of_x(a, first, end, &row_bytes);
    for (int64_t width; vector < last; vector += width) {
        width = min64(per_panel - vector % per_panel, last - vector);
        const uint32_t *weight = weights->down + vector / per_panel * steps * PANEL;
        weights_product((int)n, width * LANES,
                        (struct product){.a = x, .lda_bytes = row_bytes,
                                         .b = (const char *)(weight + vector % per_panel * LANES),
                                         .ldb = PANEL, .steps = steps, .c = sums, .ldc = PANEL,
                                         .fresh = true, .ahead_bytes = PREFETCH_BYTES / 4});
        int64_t column = vector * LANES, columns = min64(width * LANES, weights->num_ranks - column);
        for (int64_t i = 0; i < n; i++)
            for (int64_t v = 0; v < columns; v += LANES) {
                int64_t at = (first + i) * a->ranks_stride + column + v, left = columns - v;
                vf sum = vf_load(sums + i * PANEL + v);
                if (left >= LANES) store(BF16, a->ranks, at, sum);
                else store_part(BF16, a->ranks, at, left, sum);
            }
    }
}

/* A unit of work is one vector of ranks for one tile of rows. */
static int64_t down_units(const struct low_rank_down *a, int64_t num_vectors)
{
    return ceil_div(a->rows->num_rows, TILE_ROWS) * num_vectors;
}

int64_t quire_low_rank_down_count(const void *args)
{
    const struct low_rank_down *a = args;
    return shares_of(down_units(a, ceil_div(most_ranks(a->rows, a->map), LANES)), 1);
}

void quire_low_rank_down_share(const void *args, int64_t share, int64_t num_shares)
{
    const struct low_rank_down *a = args;
    const struct row_adapters *rows = a->rows;
    int64_t num_vectors = ceil_div(most_ranks(rows, a->map), LANES);
    int64_t num_units = down_units(a, num_vectors);
    share = num_shares - 1 - share; /* if units are fewer than shares, the first share now has a unit, and
                                       the last has none: while a thread works on an early share, others
                                       can take the later shares of its part */
    int64_t unit = share_start(num_units, share, num_shares);
    int64_t last_unit = share_start(num_units, share + 1, num_shares);
    while (unit < last_unit) {
        int64_t row = unit / num_vectors * TILE_ROWS, end = min64(row + TILE_ROWS, rows->num_rows);
        int64_t vector = unit % num_vectors, last = min64(num_vectors, vector + last_unit - unit);
        unit += last - vector;
        for (int64_t g = 0; g < rows->num_groups; g++) {
            const struct group *group = rows->groups + g;
            int64_t from = max64(row, group->first), to = min64(end, group->end);
            if (from >= to || !group->maps) continue;
            const struct low_rank *weights = group->maps + a->map;
            int64_t vectors = ceil_div(weights->num_ranks, LANES);
            if (vector < vectors) down_tile(a, weights, from, to, vector, min64(last, vectors));
        }
    }
}

/* n columns of a row from `at` on: the map's result, plus `added` unless that is NULL. */
INLINE vf adapted(const bf16 *alone, int64_t at, int64_t n, const float *added)
{
    vf y = n == LANES ? load(BF16, alone, at) : load_part(BF16, alone, at, n);
    return added ? rounded(BF16, y + rounded(BF16, vf_load(added))) : y;
}

/* Writes the results of one panel for a row. */
INLINE void finish_row(const struct low_rank_up *a, int64_t place, int64_t panel,
                       const float *added, const float *up_added)
{
    const bf16 *alone = a->alone + place * a->alone_stride;
    bf16 *out = a->out + place * a->out_stride;
    for (int64_t v = 0; v < PANEL; v += LANES) {
        int64_t column = panel * PANEL + v, n = min64(LANES, a->num_out - column);
        if (n <= 0) return;
        vf y = adapted(alone, column, n, added ? added + v : NULL);
        if (a->is_gated) {
            vf up = adapted(alone, a->num_out + column, n, up_added ? up_added + v : NULL);
            y = rounded(BF16, silu(y)) * up;
        }
        if (n == LANES) store(BF16, out, column, y);
        else store_part(BF16, out, column, n, y);
    }
}

/* Multiplies one panel of B with n rows of A x, from row `first` on. */
static void up_panel(const struct low_rank_up *a, const struct low_rank *weights, int64_t first,
                     int64_t n, int64_t panel, float *sums)
{
    const int32_t *span = weights->spans + 2 * panel;
    const uint32_t *weight = weights->up + (panel * weights->num_ranks / 2 + span[0]) * PANEL;
    const bf16 *ranks = a->ranks + first * a->ranks_stride + 2 * span[0];
    int64_t steps = span[1] - span[0], row_bytes = 2 * a->ranks_stride;
    const char *rows = (const char *)ranks;
    if (!HAS_BF16_DOT) {
        row_bytes = 8 * steps;
        float *floats = (float *)thread_memory(n * row_bytes);
        for (int64_t i = 0; i < n; i++)
            floats_from_bf16(floats + i * 2 * steps, ranks + i * a->ranks_stride, 2 * steps);
        rows = (const char *)floats;
    }
    weights_product((int)n, PANEL,
                    (struct product){.a = rows, .lda_bytes = row_bytes, .b = (const char *)weight,
                                     .ldb = PANEL, .steps = steps, .c = sums, .ldc = PANEL,
                                     .fresh = true, .ahead_bytes = PREFETCH_BYTES / 4});
}

/* Computes panels [panel, last) of rows [first, end) of one adapter, or of rows without an adapter
 * (NULL). All panels are computed for a few rows, then for the next rows, so that what is read and
 * written for a row lies side by side. */
static void up_rows(const struct low_rank_up *given, const struct low_rank *weights, int64_t first,
                    int64_t end, int64_t panel, int64_t last)
{
    const struct low_rank_up a = *given; /* a copy, so that the compiler knows no store changes it */
    float sums[2][TILE_ROWS * PANEL] __attribute__((aligned(64)));
    int64_t num_panels = ceil_div(a.num_out, PANEL);
    for (; first < end; first += TILE_ROWS) {
        int64_t n = min64(TILE_ROWS, end - first);
        for (int64_t p = panel; p < last; p++) {
            if (weights) up_panel(&a, weights, first, n, p, sums[0]);
            if (weights && a.is_gated) up_panel(&a, weights, first, n, num_panels + p, sums[1]);
            for (int64_t i = 0; i < n; i++) {
                const float *added = weights ? sums[0] + i * PANEL : NULL;
                const float *up_added = weights ? sums[1] + i * PANEL : NULL;
                finish_row(&a, place_of(a.rows, first + i), p, added, up_added);
            }
        }
    }
}

/* A unit of work is one panel for one block of rows. */
static int64_t num_blocks(const struct low_rank_up *a)
{
    return max64(1, ceil_div(a->rows->num_rows, BLOCK_ROWS));
}

int64_t quire_low_rank_up_count(const void *args)
{
    const struct low_rank_up *a = args;
    int64_t ranks = most_ranks(a->rows, a->map);
    int64_t rows = max64(1, min64(a->rows->num_rows, BLOCK_ROWS));
    int64_t unit_bytes = (2 * PANEL * ranks + rows * ROW_BYTES) * (a->is_gated ? 2 : 1);
    return shares_of(num_blocks(a) * ceil_div(a->num_out, PANEL), max64(1, SHARE_BYTES / unit_bytes));
}

void quire_low_rank_up_share(const void *args, int64_t share, int64_t num_shares)
{
    const struct low_rank_up *a = args;
    const struct row_adapters *rows = a->rows;
    int64_t num_panels = ceil_div(a->num_out, PANEL), num_units = num_blocks(a) * num_panels;
    int64_t unit = share_start(num_units, share, num_shares);
    int64_t last_unit = share_start(num_units, share + 1, num_shares);
    while (unit < last_unit) {
        int64_t row = unit / num_panels * BLOCK_ROWS, end = min64(row + BLOCK_ROWS, rows->num_rows);
        int64_t panel = unit % num_panels, last = min64(num_panels, panel + last_unit - unit);
        unit += last - panel;
        for (int64_t g = 0; g < rows->num_groups; g++) {
            const struct group *group = rows->groups + g;
            int64_t from = max64(row, group->first), to = min64(end, group->end);
            const struct low_rank *weights = group->maps ? group->maps + a->map : NULL;
            if (weights && !weights->num_ranks) weights = NULL;
            if (from < to) up_rows(a, weights, from, to, panel, last);
        }
    }
}

void quire_low_rank_down(const struct low_rank_down *a)
{
    run_call(true, quire_low_rank_down_share, quire_low_rank_down_count, a);
}

void quire_low_rank_up(const struct low_rank_up *a)
{
    run_call(true, quire_low_rank_up_share, quire_low_rank_up_count, a);
}
