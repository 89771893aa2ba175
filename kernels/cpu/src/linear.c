/* Linear maps with packed weights: x @ weight.T + bias. From [gate, up] = x @ weight.T + bias, a gated
 * map computes silu(gate) * up.
 *
 * Symbols: m rows, K input features, N output features. A weight [N, K] is packed once, when it is
 * loaded, into panels of 32 output features (`b_format` in tile.h), so that a thread reads contiguous
 * memory. A weight is kept as plain numbers, or as quantized numbers q, each of which stands for
 * q * scale + offset. q is an integer of 8 or 4 bits, or a 4-bit float (MXFP4). For each output feature,
 * the input features are divided into groups. A group shares a scale and an offset, which are applied to
 * the sum over the group. bf16 can hold each q exactly, so multiplying q in bf16 loses nothing. Weights
 * in bf16 are kept in pairs of k. If the number of input features is odd, one feature is added: its
 * weights are zero, rows of x are copied with a zero at their end, and K counts it.
 *
 * x in bf16 is multiplied in bf16 if the CPU has a dot product for it, or else in fp32. The sums are
 * fp32, each over k in the same order for any number of rows, so a row's result does not depend on other
 * rows. For many rows, a panel is unpacked once into the form that the product takes; for few rows, it is
 * unpacked during the product. A unit of work is one panel for one part of the rows; a share is some
 * units. If AMX is on for a format of weights (`quire_amx_uses`), maps of x in bf16 with such weights use
 * AMX's products (amx.h) for any number of rows. Maps of an adapter never use AMX. */
#include "amx.h"
#include "kv_ahead.h"
#include "thread_memory.h"

enum {
    CACHED_ROWS = 96,     /* rows of x at a time, so that they stay in the second-level cache */
    CHUNK_BYTES = 16384,  /* of an unpacked chunk of a panel, which stays in the first-level cache */
    FUSED_ROWS = 36,      /* up to so many rows, each tile of rows unpacks the panel as it multiplies */
    L1_WAYS = 8,          /* a guess: a first-level cache of 32 KiB; only copies depend on it */
    L1_SETS = 64,
    SHARE_BYTES = 49152,  /* about so many bytes of weights, which take two microseconds from memory */
    COPY_PANELS = 4,      /* fewer panels are not worth copying rows */
    MIN_SHARES = 16,      /* of a map of many rows */
};

/* The storage format of weights. A panel of floats is [K][32]; the other formats are in `b_format`. */
typedef enum { FLOAT_WEIGHTS = 0, BF16_WEIGHTS = 1, INT8_WEIGHTS = 2, INT4_WEIGHTS = 3,
               MXFP4_WEIGHTS = 4 } kept_as;

struct linear {
    int64_t num_rows, num_in, num_out; /* num_out: columns of `out` */
    int64_t x_type, kept, out_type;    /* with x in bf16, `out` in F32 is rounded to bf16 all the same */
    const void *x;                     /* [m, x_width] */
    const char *weight;
    const void *scales;   /* fp16, or e8m0 of MXFP4: [panels][groups][32]; NULL for plain numbers */
    const fp16 *offsets;  /* as scales; or NULL */
    const void *bias;             /* [N] of x's type, or NULL */
    void *out;                    /* [m, num_out]; rows may lie apart, as those of x */
    int64_t group;                /* k of a group: K, or a multiple of 8; with offsets a multiple of 32 */
    int64_t x_stride, out_stride;
    int64_t x_width;  /* K, or K - 1 */
    int64_t is_gated; /* the weight is [gate; up], 2 * num_out; out = silu(gate) * up */
    int64_t is_low_rank; /* results have to equal those of low_rank.c to the bit, so AMX is not used */
    struct kv_part next; /* what the map prefetches for the next attention */
};

INLINE bool has_amx_products(const struct linear *a)
{
#ifdef HAS_AMX
    const bool is_used = a->kept != MXFP4_WEIGHTS && quire_amx_uses >> a->kept & 1;
    return is_used && a->x_type == BF16 && !a->is_low_rank;
#else
    return (void)a, false;
#endif
}

INLINE step_kind kind_of(const struct linear *a)
{
    if (has_amx_products(a)) return PAIRS;
    return a->kept == FLOAT_WEIGHTS ? FLOATS : step_kind_of((dtype)a->x_type);
}

/* How many rows a product takes at a time, of `num_rows` rows: AMX_ROWS with AMX. Without AMX, at most
 * TILE_ROWS, and such that all products have nearly the same number of rows. */
INLINE int64_t height_of(const struct linear *a, int64_t num_rows)
{
    return has_amx_products(a) ? AMX_ROWS : ceil_div(num_rows, ceil_div(num_rows, TILE_ROWS));
}

INLINE b_format format_of(const struct linear *a)
{
    if (a->kept == BF16_WEIGHTS) return kind_of(a) == PAIRS ? PLAIN : HALVES;
    return a->kept == INT8_WEIGHTS    ? BYTES
           : a->kept == INT4_WEIGHTS  ? NIBBLES
           : a->kept == MXFP4_WEIGHTS ? E2M1
                                      : PLAIN;
}

INLINE int64_t bytes_of_panel(const struct linear *a)
{
    return a->kept == FLOAT_WEIGHTS ? 4 * PANEL * a->num_in
                                    : panel_bytes(a->kept == BF16_WEIGHTS ? HALVES : format_of(a), a->num_in);
}

/* A block of rows of x, in the form that the product takes, and memory for multiplying them. */
struct rows {
    int64_t first, end;
    const char *x;
    int64_t x_bytes;     /* from one to the next */
    const float *sums;   /* [rows][groups]: sums of x over groups, if there are offsets */
    char *panel;         /* memory for an unpacked chunk of a panel; NULL: panels are PLAIN, or rows
                            are few */
};

INLINE vf biased(const struct linear *a, const float *sums, int64_t column, int64_t n)
{
    vf sum = vf_load(sums);
    if (!a->bias) return sum;
    dtype type = (dtype)a->x_type;
    return sum + (n == LANES ? load(type, a->bias, column) : load_part(type, a->bias, column, n));
}

INLINE void finish_row(dtype x_type, dtype out_type, const struct linear *a, int64_t row,
                       int64_t panel, const float *sums, const float *up_sums)
{
    for (int64_t v = 0; v < PANEL; v += LANES) {
        int64_t column = panel * PANEL + v, n = min64(LANES, a->num_out - column);
        if (n <= 0) return;
        vf y = rounded(x_type, biased(a, sums + v, column, n));
        if (up_sums) {
            vf up = rounded(x_type, biased(a, up_sums + v, a->num_out + column, n));
            y = rounded(x_type, silu(y)) * up;
        }
        if (out_type == F32) y = rounded(x_type, y);
        int64_t at = row * a->out_stride + column;
        if (n == LANES) store(out_type, a->out, at, y);
        else store_part(out_type, a->out, at, n, y);
    }
}

INLINE void unpack(step_kind kind, b_format format, const char *panel, int64_t length, char *out)
{
    const int64_t bytes = panel_bytes(format, turn_k(format));
    for (int64_t k = 0; k < length; k += turn_k(format), panel += bytes)
#pragma GCC unroll 8
        for (int t = 0; t < turn_steps(kind, format); t++)
            for (int v = 0; v < PANEL / LANES; v++, out += sizeof(vf))
                vf_store((float *)out, unpacked(kind, format, panel, t, v));
}

INLINE void panel_columns(struct tile tile, int rows, int vectors, struct product p)
{
    const int64_t bytes = tile.format == BYTES ? 2 * LANES : 4 * LANES;
    for (int64_t v = 0; v < PANEL / LANES; v += vectors) {
        any_rows(tile, rows, vectors, &p);
        p.b += vectors * bytes;
        p.c += vectors * LANES;
        if (tile.is_scaled) p.scales += vectors * LANES * p.scale_bytes;
        if (p.offsets) p.offsets += vectors * LANES;
    }
}

/* Multiplies some rows with all columns of a panel. With scales, registers hold two numbers for each
 * element, the sum of a group and the total. So a tile has only half as many elements. If the panel is
 * PLAIN, the tile has half the rows. If not, the tile has half the columns, because with half the rows
 * the panel would be unpacked twice. */
INLINE void panel_product(struct tile tile, int rows, struct product p)
{
    const bool is_half = tile.is_scaled && rows > TILE_ROWS / 2;
    if (is_half && tile.format == PLAIN) {
        int64_t first = rows - TILE_ROWS / 2;
        panel_columns(tile, TILE_ROWS / 2, TILE_VECTORS, p);
        p.a += TILE_ROWS / 2 * p.lda_bytes;
        p.c += TILE_ROWS / 2 * p.ldc;
        p.a_sums += TILE_ROWS / 2 * p.num_groups;
        panel_columns(tile, (int)first, TILE_VECTORS, p);
    } else if (is_half) {
        panel_columns(tile, rows, TILE_VECTORS / 2, p);
    } else {
        panel_columns(tile, rows, TILE_VECTORS, p);
    }
}

typedef void product_function(int rows, const struct product *p);

#define PANEL_PRODUCT(name, kind, format, is_later, is_scaled)                          \
    static void name(int rows, const struct product *p)                                 \
    {                                                                                   \
        panel_product((struct tile){kind, format, is_later, is_scaled}, rows, *p); \
    }
PANEL_PRODUCT(floats_product, FLOATS, PLAIN, false, false)
PANEL_PRODUCT(scaled_floats_product, FLOATS, PLAIN, false, true)
PANEL_PRODUCT(halves_as_floats_product, FLOATS, HALVES, false, false)
PANEL_PRODUCT(bytes_as_floats_product, FLOATS, BYTES, false, true)
PANEL_PRODUCT(nibbles_as_floats_product, FLOATS, NIBBLES, false, true)
PANEL_PRODUCT(e2m1_as_floats_product, FLOATS, E2M1, false, true)
PANEL_PRODUCT(pairs_product, PAIRS, PLAIN, false, false)
PANEL_PRODUCT(later_pairs_product, PAIRS, PLAIN, true, false)
PANEL_PRODUCT(scaled_pairs_product, PAIRS, PLAIN, false, true)
PANEL_PRODUCT(bytes_as_pairs_product, PAIRS, BYTES, false, true)
PANEL_PRODUCT(nibbles_as_pairs_product, PAIRS, NIBBLES, false, true)
PANEL_PRODUCT(e2m1_as_pairs_product, PAIRS, E2M1, false, true)

/* The function that multiplies with a panel of this format, or with an unpacked chunk of a panel. */
static product_function *product_of(const struct linear *a, b_format format, bool is_scaled)
{
#ifdef HAS_AMX
    if (has_amx_products(a)) return is_scaled ? scaled_amx_product : amx_product;
#endif
    if (HAS_BF16_DOT && kind_of(a) == PAIRS)
        return format == BYTES     ? bytes_as_pairs_product
               : format == NIBBLES ? nibbles_as_pairs_product
               : format == E2M1    ? e2m1_as_pairs_product
               : is_scaled         ? scaled_pairs_product
                                   : pairs_product;
    return format == BYTES     ? bytes_as_floats_product
           : format == NIBBLES ? nibbles_as_floats_product
           : format == E2M1    ? e2m1_as_floats_product
           : format == HALVES  ? halves_as_floats_product
           : is_scaled         ? scaled_floats_product
                               : floats_product;
}

static void unpack_panel(const struct linear *a, const char *panel, int64_t length, char *out)
{
    b_format format = format_of(a);
    if (kind_of(a) == PAIRS) {
        if (format == BYTES) unpack(PAIRS, BYTES, panel, length, out);
        else if (format == E2M1) unpack(PAIRS, E2M1, panel, length, out);
        else unpack(PAIRS, NIBBLES, panel, length, out);
    } else {
        if (format == BYTES) unpack(FLOATS, BYTES, panel, length, out);
        else if (format == E2M1) unpack(FLOATS, E2M1, panel, length, out);
        else if (format == NIBBLES) unpack(FLOATS, NIBBLES, panel, length, out);
        else unpack(FLOATS, HALVES, panel, length, out);
    }
}

/* Whether scales are applied to the sum of each group, because there are several groups, or offsets. If
 * not, the scale can be applied to the sum over all k. */
INLINE bool is_grouped(const struct linear *a) { return a->offsets || a->group < a->num_in; }

/* How many k of a panel are unpacked at a time; if there are several groups, whole groups. */
INLINE int64_t chunk_of(const struct linear *a)
{
    int64_t most = CHUNK_BYTES / PANEL / (kind_of(a) == PAIRS ? 2 : 4);
    if (is_grouped(a)) return a->group * max64(1, most / a->group);
    return min64(most, a->num_in);
}

/* Multiplies the sums of some rows by the scales of the columns, if there is only one group. */
static void scale_rows(const struct product *p, int64_t num_rows, float *sums)
{
    for (int64_t v = 0; v < PANEL; v += LANES) {
        vf scale = scales_at(p, v);
        for (int64_t at = v; at < num_rows * PANEL; at += PANEL)
            vf_store(sums + at, vf_load(sums + at) * scale);
    }
}

/* Multiplies many rows with a panel, which is unpacked a chunk at a time. While it multiplies with one
 * chunk, it prefetches the next. */
static void unpacked_product(const struct linear *a, const struct rows *rows, const char *weight,
                             struct product p)
{
    const int64_t num_rows = rows->end - rows->first, chunk = chunk_of(a);
    const int64_t step_k = kind_of(a) == PAIRS ? 2 : 1;
    const int64_t height = height_of(a, num_rows), num_tiles = ceil_div(num_rows, height);
    product_function *multiply = product_of(a, PLAIN, is_grouped(a));
    const struct product first = p;
    p.b = rows->panel, p.ahead_bytes = 0;
    for (int64_t k = 0; k < a->num_in; k += chunk) {
        int64_t length = min64(chunk, a->num_in - k), group = k / a->group;
        int64_t bytes = length * bytes_of_panel(a) / a->num_in, tile_bytes = bytes / num_tiles;
        unpack_panel(a, weight, length, rows->panel);
        weight += bytes;
        p.steps = length / step_k;
        p.fresh = k == 0;
        if (is_grouped(a)) p.scales = first.scales + group * PANEL * p.scale_bytes;
        if (a->offsets) p.offsets = first.offsets + group * PANEL;
        for (int64_t tile = 0; tile < num_tiles; tile++) {
            int64_t row = tile * height;
            for (int64_t i = 0; i < tile_bytes; i += 64)
                __builtin_prefetch(weight + tile * tile_bytes + i, 0, 2);
            p.a = first.a + row * rows->x_bytes + k / step_k * 4;
            p.c = first.c + row * PANEL;
            p.a_sums = first.a_sums + row * p.num_groups + group;
            multiply((int)min64(height, num_rows - row), &p);
        }
    }
    if (a->scales && !is_grouped(a)) scale_rows(&first, num_rows, first.c);
}

/* Computes a block of rows, at most CACHED_ROWS, for `panel`. The first tile of rows prefetches the panel;
 * the other tiles prefetch what attention needs next. */
static void multiply_panel(const struct linear *a, const struct rows *rows, int64_t panel,
                           struct kv_ahead *next)
{
    float sums[2][CACHED_ROWS * PANEL] __attribute__((aligned(64)));
    const int64_t num_rows = rows->end - rows->first, num_panels = ceil_div(a->num_out, PANEL);
    const int64_t height = height_of(a, num_rows);
    const int64_t num_parts = a->is_gated ? 2 : 1, num_groups = a->num_in / a->group;
    const int64_t step_k = kind_of(a) == PAIRS ? 2 : 1, steps = a->num_in / step_k;
    const int64_t num_runs = steps / RUN_STEPS, run_steps = num_runs ? ceil_div(steps, num_runs) : steps;
    const bool can_fetch = kind_of(a) == PAIRS && !a->scales && !has_amx_products(a);
    const bool is_lone = num_rows == 1 && a->kept == BF16_WEIGHTS;
    const int64_t scale_bytes = a->kept == MXFP4_WEIGHTS ? 1 : 2;
    product_function *multiply = product_of(a, format_of(a), a->scales);
    for (int64_t part = 0; part < num_parts; part++) {
        int64_t index = panel + part * num_panels, scale = index * num_groups * PANEL;
        struct product p = {.a = rows->x, .lda_bytes = rows->x_bytes,
                            .b = a->weight + index * bytes_of_panel(a), .ldb = PANEL,
                            .steps = steps, .c = sums[part], .ldc = PANEL, .fresh = true,
                            .ahead_bytes = is_lone ? PREFETCH_BYTES / 4 : PREFETCH_BYTES,
                            .later_steps = run_steps,
                            .later_bytes = ceil_div(next->run_bytes, run_steps),
                            .scales = a->scales ? (const char *)a->scales + scale * scale_bytes : NULL,
                            .scale_bytes = scale_bytes,
                            .offsets = a->offsets ? a->offsets + scale : NULL,
                            .a_sums = rows->sums, .group_steps = a->group / step_k,
                            .num_groups = num_groups};
        if (rows->panel) {
            unpacked_product(a, rows, p.b, p);
            continue;
        }
        for (int64_t r = 0; r < num_rows; r += height) {
            const char *later[MAX_RUNS];
            p.later = r > 0 && can_fetch && next_runs(next, num_runs, later) ? later : NULL;
            (p.later ? later_pairs_product : multiply)((int)min64(height, num_rows - r), &p);
            p.a += height * rows->x_bytes;
            p.c += height * PANEL;
            p.a_sums += height * num_groups;
            p.ahead_bytes = 0;
        }
    }
    for (int64_t r = 0; r < num_rows; r++) {
        const float *of_row = sums[0] + r * PANEL, *up = a->is_gated ? sums[1] + r * PANEL : NULL;
        if (a->x_type == F32) finish_row(F32, F32, a, rows->first + r, panel, of_row, up);
        else if (a->out_type == F32) finish_row(BF16, F32, a, rows->first + r, panel, of_row, up);
        else finish_row(BF16, BF16, a, rows->first + r, panel, of_row, up);
    }
}

/* How many cache lines that lie `bytes` apart the first-level cache can hold at once. */
INLINE int64_t lines_that_fit(int64_t bytes)
{
    int64_t sets = L1_SETS;
    for (int64_t lines = bytes / 64; lines % 2 == 0 && sets > 1; lines /= 2) sets /= 2;
    return bytes % 64 ? L1_SETS : sets * L1_WAYS;
}

/* Whether rows of x are copied: to convert them to floats, to add a zero at their end, or because they
 * fall on the same few lines of the cache. */
INLINE bool needs_copy(const struct linear *a)
{
    if ((a->x_type == BF16 && kind_of(a) == FLOATS) || a->x_width < a->num_in) return true;
    int64_t bytes = a->x_stride * size_of((dtype)a->x_type);
    return a->num_rows > L1_WAYS && lines_that_fit(bytes) < TILE_ROWS;
}

/* How many parts the rows are cut into; each panel of each part is a unit of work. */
INLINE int64_t num_parts_of(const struct linear *a, int64_t num_panels)
{
    int64_t num_parts = ceil_div(MIN_SHARES, num_panels);
    num_parts = min64(num_parts, a->num_rows / (has_amx_products(a) ? AMX_ROWS : 2 * TILE_ROWS));
    return max64(num_parts, max64(1, ceil_div(a->num_rows, CACHED_ROWS)));
}

/* The first row of a part. With AMX, all parts but the last consist of whole products. */
INLINE int64_t first_row_of(const struct linear *a, int64_t part, int64_t num_parts)
{
    int64_t row = a->num_rows * part / num_parts;
    return has_amx_products(a) ? min64(a->num_rows, ceil_div(row, AMX_ROWS) * AMX_ROWS) : row;
}

int64_t quire_linear_count(const void *args)
{
    const struct linear *a = args;
    int64_t num_panels = ceil_div(a->num_out, PANEL);
    int64_t least = max64(SHARE_BYTES / (bytes_of_panel(a) * (a->is_gated ? 2 : 1)), 1);
    if (needs_copy(a)) least = max64(least, COPY_PANELS);
    return shares_of(num_panels * num_parts_of(a, num_panels), least);
}

/* Copies a row of x into the form that the product takes. */
static void copy_row(const struct linear *a, const char *row, char *to)
{
    const bool is_converted = a->x_type == BF16 && kind_of(a) == FLOATS;
    const int64_t bytes = is_converted ? 4 : size_of((dtype)a->x_type);
    if (is_converted) floats_from_bf16((float *)to, (const bf16 *)row, a->x_width);
    else memcpy(to, row, a->x_width * bytes);
    memset(to + a->x_width * bytes, 0, (a->num_in - a->x_width) * bytes);
}

/* Writes the sum of a row of x over each group to `sums`. */
INLINE void sum_groups(dtype x_type, const struct linear *a, const char *row, float *sums)
{
    for (int64_t k = 0; k < a->num_in; k += a->group) {
        vf sum = {0};
        for (int64_t i = k; i < k + a->group; i += LANES) sum += load(x_type, row, i);
        *sums++ = vf_reduce_add(sum);
    }
}

void quire_linear_share(const void *args, int64_t share, int64_t num_shares)
{
    const struct linear *a = args;
    int64_t num_panels = ceil_div(a->num_out, PANEL), num_parts = num_parts_of(a, num_panels);
    int64_t unit = share_start(num_parts * num_panels, share, num_shares);
    int64_t last = share_start(num_parts * num_panels, share + 1, num_shares);
    int64_t num_groups = a->num_in / a->group, most = min64(a->num_rows, CACHED_ROWS);
    int64_t row_bytes = a->x_stride * size_of((dtype)a->x_type);
    bool is_copied = needs_copy(a);
    struct rows rows = {.x_bytes = row_bytes};
    if (is_copied) rows.x_bytes = a->num_in * (kind_of(a) == PAIRS ? 2 : 4) + 64;
    int64_t copy_bytes = is_copied ? ceil_div(most * rows.x_bytes, 64) * 64 : 0;
    int64_t sums_bytes = a->offsets ? ceil_div(most * num_groups * 4, 64) * 64 : 0;
    bool is_many = has_amx_products(a) || a->num_rows / num_parts > FUSED_ROWS;
    bool is_unpacked = format_of(a) != PLAIN && is_many;
    int64_t step_bytes = kind_of(a) == PAIRS ? 2 : 4;
    char *memory = thread_memory(copy_bytes + sums_bytes +
                                 (is_unpacked ? PANEL * chunk_of(a) * step_bytes : 0));
    float *sums = (float *)(memory + copy_bytes);
    rows.sums = sums;
    if (is_unpacked) rows.panel = memory + copy_bytes + sums_bytes;
    struct kv_ahead next = kv_ahead_of(
        &a->next, max64(0, ceil_div(a->num_rows, TILE_ROWS) - num_parts), share, num_shares);
    if (has_amx_products(a)) amx_begin();
    while (unit < last) {
        int64_t part = unit / num_panels;
        int64_t panel = unit % num_panels, panel_end = min64(num_panels, panel + last - unit);
        int64_t row = first_row_of(a, part, num_parts), end = first_row_of(a, part + 1, num_parts);
        unit += panel_end - panel;
        for (; row < end; row = rows.end) {
            rows.first = row, rows.end = min64(end, row + CACHED_ROWS);
            const char *x = (const char *)a->x + row * row_bytes;
            rows.x = is_copied ? memory : x;
            for (int64_t r = 0; r < rows.end - row; r++) {
                if (is_copied) copy_row(a, x + r * row_bytes, memory + r * rows.x_bytes);
                if (a->offsets)
                    BY_DTYPE(a->x_type, sum_groups, a, x + r * row_bytes, sums + r * num_groups);
            }
            for (int64_t p = panel; p < panel_end; p++) multiply_panel(a, &rows, p, &next);
        }
    }
    if (has_amx_products(a)) amx_end();
}

void quire_linear(const struct linear *a)
{
    run_call(true, quire_linear_share, quire_linear_count, a);
}

/* A separate map for each head: out[t, h] = map h of x[t, h]. */
struct linear_heads {
    int64_t num_heads, x_stride_h, out_stride_h, weight_bytes; /* bytes of the weight of one head */
    struct linear map; /* the map of head 0 */
};

static struct linear map_of_head(const struct linear_heads *a, int64_t head)
{
    struct linear map = a->map;
    map.x = (const char *)map.x + head * a->x_stride_h * size_of((dtype)map.x_type);
    map.weight += head * a->weight_bytes;
    map.out = (char *)map.out + head * a->out_stride_h * size_of((dtype)map.out_type);
    return map;
}

int64_t quire_linear_heads_count(const void *args)
{
    const struct linear_heads *a = args;
    int64_t least = max64(1, SHARE_BYTES / max64(1, a->weight_bytes));
    return shares_of(a->num_heads * quire_linear_count(&a->map), least);
}

void quire_linear_heads_share(const void *args, int64_t share, int64_t num_shares)
{
    const struct linear_heads *a = args;
    const int64_t num_of_head = quire_linear_count(&a->map), total = a->num_heads * num_of_head;
    int64_t at = share_start(total, share, num_shares), end = share_start(total, share + 1, num_shares);
    for (; at < end; at++) {
        const struct linear map = map_of_head(a, at / num_of_head);
        quire_linear_share(&map, at % num_of_head, num_of_head);
    }
}

void quire_linear_heads(const struct linear_heads *a)
{
    run_call(true, quire_linear_heads_share, quire_linear_heads_count, a);
}
