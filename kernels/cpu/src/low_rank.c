/* What LoRA adapters add to a linear map: to the rows of each adapter B A x, scaled as B is.
 *
 * A and B are packed as the weights of linear.c are. Two calls: the first computes A x, beside the
 * model's own map of the same x; the second adds B A x to what that map gave, and writes the sum to
 * a place of its own: it may be done twice. Rows are taken by adapter, so that each weight is read
 * for several of them. Every sum is over k in ascending order, and A x, B A x and the sum are each
 * rounded to bf16, so a row's result does not depend on its company. */
#include "thread_memory.h"
#include "threads.h"
#include "tile.h"

enum {
    CACHED_ROWS = 96,    /* of A x at a time, so that they stay in the first-level cache */
    SHARE_BYTES = 16384, /* of B, about: a microsecond from memory */
    ROW_BYTES = 128,     /* what adding 32 columns to a row costs, in such bytes */
    L1_WAYS = 8,
    L1_SET_BYTES = 4096, /* rows so far apart fall on the same lines of the first-level cache */
};

/* An adapter's part of one map of a layer. */
struct low_rank {
    const uint32_t *down; /* A: [ceil(R / 32)][K / 2][32] pairs */
    const uint32_t *up;   /* B: [ceil(N / 32)][R / 2][32] pairs */
    const int32_t *spans; /* [ceil(N / 32)][2]: of R / 2 those steps, a half-open interval, outside
                             of which a panel of B is zero */
    int64_t num_ranks;    /* R, even; 0: it adds nothing to this map */
};

/* Rows of one adapter. */
struct group {
    int64_t first, end;          /* in the order by adapter */
    const struct low_rank *maps; /* of all layers; NULL: the rows have no adapter */
};

struct row_adapters {
    int64_t num_rows, num_groups;
    const int64_t *places; /* [T]: of each row in the order by adapter that in the step; NULL: the
                              same */
    struct group groups[];
};

/* ranks[i] = A x[places[i]] */
struct low_rank_down {
    const struct row_adapters *rows;
    int64_t map; /* its place in `maps` */
    int64_t num_in;
    const bf16 *x; /* [T, K] */
    bf16 *ranks;   /* [T, most R], in the order by adapter */
    int64_t x_stride, ranks_stride;
};

/* out[places[i]] = alone[places[i]] + B ranks[i] */
struct low_rank_up {
    const struct row_adapters *rows;
    int64_t map, num_out;
    const bf16 *alone; /* [T, N]: what the model's map gave */
    const bf16 *ranks; /* [T, most R] */
    bf16 *out;         /* [T, N] */
    int64_t alone_stride, ranks_stride, out_stride;
};

INLINE int64_t place_of(const struct row_adapters *rows, int64_t i)
{
    return rows->places ? rows->places[i] : i;
}

static int64_t most_ranks(const struct row_adapters *rows, int64_t map)
{
    int64_t most = 0;
    for (int64_t g = 0; g < rows->num_groups; g++)
        if (rows->groups[g].maps) most = max64(most, rows->groups[g].maps[map].num_ranks);
    return most;
}

/* Rows [first, end) of x in the order by adapter, at most TILE_ROWS: where they are, if they lie
 * one after another, else a copy. */
static const char *tile_of_x(const struct low_rank_down *a, int64_t first, int64_t end,
                             int64_t *row_bytes)
{
    int64_t n = end - first, from = place_of(a->rows, first);
    bool is_dense = place_of(a->rows, end - 1) - from == n - 1; /* places ascend in a group */
    *row_bytes = 2 * a->x_stride;
    if (is_dense && (n <= L1_WAYS || *row_bytes % L1_SET_BYTES))
        return (const char *)(a->x + from * a->x_stride);
    *row_bytes = 2 * a->num_in + 64;
    char *copy = thread_memory(TILE_ROWS * *row_bytes);
    for (int64_t i = 0; i < n; i++)
        memcpy(copy + i * *row_bytes, a->x + place_of(a->rows, first + i) * a->x_stride,
               2 * a->num_in);
    return copy;
}

/* Of rows [first, end) of one group, at most TILE_ROWS, the ranks of some vectors. */
static void down_tile(const struct low_rank_down *a, const struct low_rank *weights, int64_t first,
                      int64_t end, int64_t vector, int64_t last)
{
    float sums[TILE_ROWS * PANEL] __attribute__((aligned(64)));
    int64_t steps = a->num_in / 2, per_panel = PANEL / LANES, row_bytes, n = end - first;
    const char *x = tile_of_x(a, first, end, &row_bytes);
    for (int64_t width; vector < last; vector += width) {
        width = min64(per_panel - vector % per_panel, last - vector);
        const uint32_t *weight = weights->down + vector / per_panel * steps * PANEL;
        product(PAIRS, (int)n, width * LANES,
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

/* Vectors of ranks of each tile of rows are units of work. */
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
    share = num_shares - 1 - share; /* of fewer units than shares the first of some shares are one:
                                       what is begun early can be made up for */
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

INLINE void add_vector(const struct low_rank_up *a, int64_t place, int64_t column, vf added)
{
    int64_t from = place * a->alone_stride + column, to = place * a->out_stride + column;
    int64_t n = a->num_out - column;
    added = rounded(BF16, added);
    if (n >= LANES) store(BF16, a->out, to, load(BF16, a->alone, from) + added);
    else if (n > 0) store_part(BF16, a->out, to, n, load_part(BF16, a->alone, from, n) + added);
}

static void copy_panel(const struct low_rank_up *a, int64_t first, int64_t end, int64_t panel)
{
    int64_t column = panel * PANEL, bytes = 2 * min64(PANEL, a->num_out - column);
    for (int64_t i = first; i < end; i++) {
        int64_t place = place_of(a->rows, i);
        memcpy(a->out + place * a->out_stride + column, a->alone + place * a->alone_stride + column,
               bytes);
    }
}

/* Rows [first, end) of one group: one panel of their outputs. */
static void up_panel(const struct low_rank_up *a, const struct low_rank *weights, int64_t first,
                     int64_t end, int64_t panel)
{
    float sums[TILE_ROWS * PANEL] __attribute__((aligned(64)));
    const int32_t *span = weights->spans + 2 * panel;
    const uint32_t *weight = weights->up + (panel * weights->num_ranks / 2 + span[0]) * PANEL;
    for (int64_t row = first; row < end; row += TILE_ROWS) {
        int64_t n = min64(TILE_ROWS, end - row);
        product(PAIRS, (int)n, PANEL,
                (struct product){.a = (const char *)(a->ranks + row * a->ranks_stride + 2 * span[0]),
                                 .lda_bytes = 2 * a->ranks_stride, .b = (const char *)weight,
                                 .ldb = PANEL, .steps = span[1] - span[0], .c = sums, .ldc = PANEL,
                                 .fresh = true,
                                 .ahead_bytes = row > first ? 0 : PREFETCH_BYTES / 4});
        for (int64_t i = 0; i < n; i++)
            for (int64_t v = 0; v < PANEL; v += LANES)
                add_vector(a, place_of(a->rows, row + i), panel * PANEL + v,
                           vf_load(sums + i * PANEL + v));
    }
}

/* Panels of each block of rows are units of work. */
static int64_t num_blocks(const struct low_rank_up *a)
{
    return max64(1, ceil_div(a->rows->num_rows, CACHED_ROWS));
}

int64_t quire_low_rank_up_count(const void *args)
{
    const struct low_rank_up *a = args;
    int64_t ranks = most_ranks(a->rows, a->map);
    int64_t rows = max64(1, min64(a->rows->num_rows, CACHED_ROWS));
    int64_t unit_bytes = 2 * PANEL * ranks + rows * (LANES * ranks + ROW_BYTES);
    return shares_of(num_blocks(a) * ceil_div(a->num_out, PANEL), max64(1, SHARE_BYTES / unit_bytes));
}

void quire_low_rank_up_share(const void *args, int64_t share, int64_t num_shares)
{
    const struct low_rank_up *a = args;
    const struct row_adapters *rows = a->rows;
    int64_t num_panels = ceil_div(a->num_out, PANEL), num_units = num_blocks(a) * num_panels;
    int64_t last = share_start(num_units, share + 1, num_shares);
    for (int64_t unit = share_start(num_units, share, num_shares); unit < last; unit++) {
        int64_t row = unit / num_panels * CACHED_ROWS, panel = unit % num_panels;
        int64_t end = min64(row + CACHED_ROWS, rows->num_rows);
        for (int64_t g = 0; g < rows->num_groups; g++) {
            const struct group *group = rows->groups + g;
            int64_t from = max64(row, group->first), to = min64(end, group->end);
            if (from >= to) continue;
            const struct low_rank *weights = group->maps ? group->maps + a->map : NULL;
            if (weights && weights->num_ranks) up_panel(a, weights, from, to, panel);
            else copy_panel(a, from, to, panel);
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
