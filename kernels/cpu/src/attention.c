/* Causal attention over the paged cache, read where it lies: decodes and chunks alike.
 *
 * A row (one head of one token) sees its keys in tiles of COLUMNS positions at multiples of it,
 * in ascending order, and in splits of SPLIT positions that are merged in ascending order. So its
 * result depends on its own sequence alone: not on the batch, on how the prompt was cut into
 * chunks, or on the number of threads. The sums are fp32; the products take the cache's dtype.
 *
 * Work is divided into items: a tile of query tokens of one sequence, for one kv head, and, where
 * a lone token looks back far, for one split. */
#include <stdlib.h>

#include "threads.h"
#include "tile.h"

enum {
    COLUMNS = 64,
    SPLIT = 512,       /* a multiple of COLUMNS */
    ITEM_ROWS = 96,    /* pay for laying out keys and values */
};
static const float NOTHING_SEEN = -1e30f; /* the running maximum before the first key */
static const float LOG2_E = 1.44269504f;

struct attention {
    int64_t type;
    int64_t num_seqs, num_tokens, num_heads, num_kv_heads, head_dim, block_size;
    int64_t window;               /* positions that a token looks back, its own included; 0: all */
    const char *query;            /* [T, H, D] */
    const char *key_cache;        /* [B, P, HKV, D] */
    const char *value_cache;      /* [B, P, HKV, D] */
    const int32_t *block_tables;  /* [S, M] */
    const int32_t *seq_lens;      /* [S] */
    const int32_t *query_start_loc; /* [S + 1], or NULL: one token each */
    const float *sinks;           /* [H], or NULL */
    char *out;                    /* [T, H, D], contiguous */
    float *partials; /* room for what splits of lone tokens give: [splits * H][D + 2] for each */
    int64_t query_stride_t, query_stride_h;
    int64_t key_stride_b, key_stride_p, key_stride_h;
    int64_t value_stride_b, value_stride_p, value_stride_h;
    int64_t table_stride;
    double scale, softcap; /* softcap 0: none */
};

struct item {
    int64_t seq, kv_head;
    int64_t token, num_tokens;        /* of the batch */
    int64_t position;                 /* of the first token */
    int64_t start, end;               /* positions to look at, [start, end); start at a tile */
    float *partial;                   /* where a split's result goes; NULL: to `out` */
};

/* What a thread works with; rows are padded to whole vectors. */
struct scratch {
    int64_t width; /* D in whole vectors */
    int64_t steps; /* D in steps of the product with keys */
    char *query;   /* [ITEM_ROWS][steps] of 4 bytes */
    char *keys;    /* [steps][COLUMNS] of 4 bytes */
    char *values;  /* [COLUMNS steps][width] of 4 bytes */
    float *scores; /* [TILE_ROWS][COLUMNS] */
    char *weights; /* [TILE_ROWS][COLUMNS] */
    float *sum, *max;            /* [rows]: of the present split */
    float *acc;                  /* [rows][width] */
    float *all_sum, *all_max, *all_acc; /* of the splits so far */
    void *memory;
};

INLINE int64_t group_of(const struct attention *a) { return a->num_heads / a->num_kv_heads; }
INLINE int64_t tokens_per_item(const struct attention *a) { return max64(1, ITEM_ROWS / group_of(a)); }

static void *take(char **memory, int64_t bytes)
{
    void *taken = *memory;
    *memory += ceil_div(bytes, 64) * 64;
    return taken;
}

static struct scratch make_scratch(dtype type, const struct attention *a)
{
    int64_t rows = max64(ITEM_ROWS, group_of(a));
    int64_t pair = step_kind_of(type) == PAIRS ? 2 : 1;
    struct scratch s = {.width = ceil_div(a->head_dim, LANES) * LANES,
                        .steps = ceil_div(a->head_dim, pair)};
    int64_t columns = ceil_div(s.steps, LANES) * LANES * COLUMNS;
    int64_t floats = rows * s.steps + columns + COLUMNS * s.width + 2 * TILE_ROWS * COLUMNS +
                     2 * rows * (s.width + 2) + 16 * LANES;
    s.memory = aligned_alloc(64, ceil_div(4 * floats, 64) * 64);
    char *at = s.memory;
    s.query = take(&at, 4 * rows * s.steps);
    s.keys = take(&at, 4 * columns);
    s.values = take(&at, 4 * COLUMNS * s.width);
    s.scores = take(&at, 4 * TILE_ROWS * COLUMNS);
    s.weights = take(&at, 4 * TILE_ROWS * COLUMNS);
    s.acc = take(&at, 4 * rows * s.width);
    s.all_acc = take(&at, 4 * rows * s.width);
    s.sum = take(&at, 4 * rows);
    s.max = take(&at, 4 * rows);
    s.all_sum = take(&at, 4 * rows);
    s.all_max = take(&at, 4 * rows);
    return s;
}

/* out[i][j] = rows[j][i] for 16 x 16 words. */
INLINE void transpose(const vi rows[LANES], int32_t *out, int64_t stride)
{
#ifdef __AVX512F__
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        __m512i low = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        __m512i high = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        __m512i low2 = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        __m512i high2 = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
        _mm512_storeu_si512(out + i * stride, _mm512_shuffle_i32x4(low, low2, 0x88));
        _mm512_storeu_si512(out + (i + 4) * stride, _mm512_shuffle_i32x4(high, high2, 0x88));
        _mm512_storeu_si512(out + (i + 8) * stride, _mm512_shuffle_i32x4(low, low2, 0xdd));
        _mm512_storeu_si512(out + (i + 12) * stride, _mm512_shuffle_i32x4(high, high2, 0xdd));
    }
#else
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) out[i * stride + j] = rows[j][i];
#endif
}

/* 16 steps of 4 bytes of a row of D elements, from step `step`; zeros past its end. */
INLINE vi load_steps(dtype type, const char *row, int64_t step, int64_t head_dim)
{
    if (step_kind_of(type) == PAIRS) {
        int64_t bytes = min64(64, 2 * head_dim - 4 * step);
        vi words = {0};
        if (bytes == 64) memcpy(&words, row + 4 * step, 64);
        else memcpy(&words, row + 4 * step, bytes);
        return words;
    }
    int64_t n = min64(LANES, head_dim - step);
    return (vi)(n == LANES ? load(type, row, step) : load_part(type, row, step, n));
}

/* Where the positions of a sequence lie in one head's caches, one after the other. */
struct slots {
    const int32_t *table;
    const char *keys, *values; /* of the head */
    const struct attention *a;
    int64_t block, offset; /* of the next position: a place in the table, a slot of that block */
};

INLINE void next_slot(dtype type, struct slots *s, const char **key, const char **value)
{
    const struct attention *a = s->a;
    int64_t block = s->table[s->block];
    *key = s->keys + (block * a->key_stride_b + s->offset * a->key_stride_p) * size_of(type);
    *value = s->values + (block * a->value_stride_b + s->offset * a->value_stride_p) * size_of(type);
    if (++s->offset == a->block_size) s->offset = 0, s->block++;
}

INLINE struct slots slots_from(dtype type, const struct attention *a, const struct item *item,
                               int64_t position)
{
    return (struct slots){
        .table = a->block_tables + item->seq * a->table_stride,
        .keys = a->key_cache + item->kv_head * a->key_stride_h * size_of(type),
        .values = a->value_cache + item->kv_head * a->value_stride_h * size_of(type),
        .a = a, .block = position / a->block_size, .offset = position % a->block_size};
}

/* Asks memory for a tile that is needed soon: rows lie too far apart for the CPU to guess them. */
INLINE void prefetch(dtype type, const struct attention *a, const struct item *item, int64_t start,
                     int64_t end)
{
    struct slots slots = slots_from(type, a, item, start);
    const char *key, *value;
    int64_t row_bytes = a->head_dim * size_of(type);
    for (int64_t position = start; position < min64(start + COLUMNS, end); position++) {
        next_slot(type, &slots, &key, &value);
        for (int64_t byte = 0; byte < row_bytes; byte += 64) {
            __builtin_prefetch(key + byte, 0, 2);
            __builtin_prefetch(value + byte, 0, 2);
        }
    }
}

/* Lays out 16 keys, from column c: transposed, so that a column of the product is a position. */
INLINE void lay_out_keys(dtype type, const struct scratch *s, const char *const *keys, int64_t c,
                         int64_t head_dim)
{
    for (int64_t step = 0; step < s->steps; step += LANES) {
        vi rows[LANES];
        for (int j = 0; j < LANES; j++)
            rows[j] = keys[j] ? load_steps(type, keys[j], step, head_dim) : (vi){0};
        transpose(rows, (int32_t *)s->keys + step * COLUMNS + c, COLUMNS);
    }
}

INLINE vu load_halves(const char *row, int64_t d, int64_t head_dim)
{
    vh halves = {0};
    if (row && d + LANES <= head_dim) memcpy(&halves, (const bf16 *)row + d, sizeof halves);
    else if (row) memcpy(&halves, (const bf16 *)row + d, 2 * (head_dim - d));
    return __builtin_convertvector(halves, vu);
}

/* Lays out 16 values, from position c: as they are, or two positions to a pair. */
INLINE void lay_out_values(dtype type, const struct scratch *s, const char *const *values,
                           int64_t c, int64_t head_dim)
{
    for (int j = 0; j < LANES; j += step_kind_of(type) == PAIRS ? 2 : 1) {
        for (int64_t d = 0; d < s->width; d += LANES) {
            if (step_kind_of(type) == PAIRS) {
                vu pairs = load_halves(values[j], d, head_dim) |
                           load_halves(values[j + 1], d, head_dim) << 16;
                memcpy(s->values + 4 * ((c + j) / 2 * s->width + d), &pairs, sizeof pairs);
            } else {
                vf row = {0};
                if (values[j] && d + LANES <= head_dim) row = load(type, values[j], d);
                else if (values[j]) row = load_part(type, values[j], d, head_dim - d);
                vf_store((float *)s->values + (c + j) * s->width + d, row);
            }
        }
    }
}

/* Lays out keys and values of the positions [start, end), at most COLUMNS, as `product` reads them;
 * those past the end, to the next 16, are zeros. */
INLINE void lay_out(dtype type, const struct attention *a, const struct scratch *s,
                    const struct item *item, int64_t start, int64_t end)
{
    struct slots slots = slots_from(type, a, item, start);
    const char *keys[COLUMNS] = {NULL}, *values[COLUMNS] = {NULL};
    for (int64_t c = 0; c < end - start; c++) next_slot(type, &slots, keys + c, values + c);
    for (int64_t c = 0; c < end - start; c += LANES) lay_out_keys(type, s, keys + c, c, a->head_dim);
    for (int64_t c = 0; c < end - start; c += LANES)
        lay_out_values(type, s, values + c, c, a->head_dim);
}

INLINE vf softcapped(vf x, float cap)
{
    vf power = x * (2.0f * LOG2_E / cap);
    power = -vf_max(-power, vf_set(-126.0f)); /* tanh is 1 there */
    return cap - 2.0f * cap / (vf_exp2(power) + 1.0f);
}

/* One row's scores to weights, given what it may see of this tile: columns [from, to). Updates its
 * maximum and sum, and scales what it has accumulated. */
INLINE void weigh_row(dtype type, const struct attention *a, const struct scratch *s, int64_t row,
                      const float *scores, char *weights, int64_t from, int64_t to)
{
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vf score[COLUMNS / LANES], most = vf_set(-INFINITY);
    for (int v = 0; v < COLUMNS / LANES; v++) {
        vf x = vf_load(scores + v * LANES) * (float)a->scale;
        if (a->softcap > 0) x = softcapped(x, (float)a->softcap);
        x = x * LOG2_E;
        if (from > v * LANES || to < (v + 1) * LANES) {
            vi column = lane + v * LANES;
            x = vf_select((column >= (int32_t)from) & (column < (int32_t)to), x,
                          vf_set(-INFINITY));
        }
        score[v] = x;
        most = vf_max(most, x);
    }
    float old_max = s->max[row], new_max = vf_reduce_max(most);
    if (new_max < old_max) new_max = old_max;
    vf sum = {0};
    for (int v = 0; v < COLUMNS / LANES; v++) {
        vf weight = vf_exp2(score[v] - new_max);
        sum += weight;
        store(step_kind_of(type) == PAIRS ? BF16 : F32, weights, v * LANES, weight);
    }
    s->max[row] = new_max;
    if (new_max != old_max) {
        float correction = exp2f(old_max - new_max);
        s->sum[row] *= correction;
        for (int64_t d = 0; d < s->width; d += LANES)
            vf_store(s->acc + row * s->width + d, vf_load(s->acc + row * s->width + d) * correction);
    }
    s->sum[row] += vf_reduce_add(sum);
}

/* All rows of an item over the positions [start, end) of one split, from nothing. */
INLINE void attend_split(dtype type, const struct attention *a, const struct scratch *s,
                         const struct item *item, int64_t start, int64_t end)
{
    const step_kind kind = step_kind_of(type);
    const int64_t group = group_of(a), num_rows = item->num_tokens * group;
    const int64_t pair = kind == PAIRS ? 2 : 1;
    for (int64_t row = 0; row < num_rows; row++) s->max[row] = NOTHING_SEEN, s->sum[row] = 0;
    memset(s->acc, 0, 4 * num_rows * s->width);
    for (int64_t tile = start; tile < end; tile += COLUMNS) {
        int64_t seen = min64(COLUMNS, end - tile);
        prefetch(type, a, item, tile + COLUMNS, item->end);
        lay_out(type, a, s, item, tile, tile + seen);
        for (int64_t block = 0; block < num_rows; block += TILE_ROWS) {
            int rows = (int)min64(TILE_ROWS, num_rows - block);
            int64_t first = item->position + block / group;
            int64_t last = item->position + (block + rows - 1) / group;
            if (tile > last || (a->window && tile + COLUMNS <= first - a->window + 1)) continue;
            int64_t columns = ceil_div(seen, LANES) * LANES;
            product(kind, rows, columns,
                    (struct product){.a = s->query + 4 * block * s->steps,
                                     .lda_bytes = 4 * s->steps, .b = s->keys, .ldb = COLUMNS,
                                     .steps = s->steps, .c = s->scores, .ldc = COLUMNS,
                                     .fresh = true});
            for (int r = 0; r < rows; r++) {
                int64_t position = item->position + (block + r) / group;
                int64_t from = a->window ? max64(0, position - a->window + 1 - tile) : 0;
                int64_t to = min64(seen, position + 1 - tile);
                weigh_row(type, a, s, block + r, s->scores + r * COLUMNS,
                          s->weights + r * COLUMNS * 4 / pair, from, to);
            }
            product(kind, rows, s->width,
                    (struct product){.a = s->weights, .lda_bytes = COLUMNS * 4 / pair,
                                     .b = s->values, .ldb = s->width, .steps = columns / pair,
                                     .c = s->acc + block * s->width, .ldc = s->width,
                                     .fresh = false});
        }
    }
}

/* Adds one row's result over a split to that over the splits before it. */
INLINE void merge_row(int64_t width, float *all_max, float *all_sum, float *all_acc, float max,
                      float sum, const float *acc)
{
    float most = *all_max > max ? *all_max : max;
    float old = exp2f(*all_max - most), new = exp2f(max - most);
    *all_max = most;
    *all_sum = *all_sum * old + sum * new;
    for (int64_t d = 0; d < width; d += LANES)
        vf_store(all_acc + d, vf_load(all_acc + d) * old + vf_load(acc + d) * new);
}

INLINE void finish_row(dtype type, const struct attention *a, int64_t token, int64_t head,
                       float max, float sum, const float *acc)
{
    float factor = 1.0f;
    if (a->sinks) {
        float sink = a->sinks[head] * LOG2_E, most = sink > max ? sink : max;
        factor = exp2f(max - most);
        sum = sum * factor + exp2f(sink - most);
    }
    factor = factor / sum;
    int64_t at = (token * a->num_heads + head) * a->head_dim;
    for (int64_t d = 0; d < a->head_dim; d += LANES) {
        int64_t n = min64(LANES, a->head_dim - d);
        vf y = vf_load(acc + d) * factor;
        if (n == LANES) store(type, a->out, at + d, y);
        else store_part(type, a->out, at + d, n, y);
    }
}

INLINE void copy_query(dtype type, const struct attention *a, const struct scratch *s,
                       const struct item *item)
{
    int64_t group = group_of(a);
    for (int64_t row = 0; row < item->num_tokens * group; row++) {
        int64_t token = item->token + row / group, head = item->kv_head * group + row % group;
        const char *from =
            a->query + (token * a->query_stride_t + head * a->query_stride_h) * size_of(type);
        char *to = s->query + 4 * row * s->steps;
        if (step_kind_of(type) == PAIRS) {
            memset(to + 4 * s->steps - 4, 0, 4);
            memcpy(to, from, 2 * a->head_dim);
        } else {
            for (int64_t d = 0; d < a->head_dim; d++)
                ((float *)to)[d] = type == BF16 ? bf16_to_float(((const bf16 *)from)[d])
                                                : ((const float *)from)[d];
        }
    }
}

INLINE void attend_item(dtype type, const struct attention *a, const struct scratch *s,
                        const struct item *item)
{
    const int64_t group = group_of(a), num_rows = item->num_tokens * group, width = s->width;
    copy_query(type, a, s, item);
    int64_t split_end = min64(item->end, (item->start / SPLIT + 1) * SPLIT);
    attend_split(type, a, s, item, item->start, split_end);
    const float *max = s->max, *sum = s->sum, *acc = s->acc;
    if (split_end < item->end) {
        memcpy(s->all_max, s->max, 4 * num_rows);
        memcpy(s->all_sum, s->sum, 4 * num_rows);
        memcpy(s->all_acc, s->acc, 4 * num_rows * width);
        while (split_end < item->end) {
            int64_t start = split_end;
            split_end = min64(item->end, start + SPLIT);
            attend_split(type, a, s, item, start, split_end);
            for (int64_t row = 0; row < num_rows; row++)
                merge_row(width, s->all_max + row, s->all_sum + row, s->all_acc + row * width,
                          s->max[row], s->sum[row], s->acc + row * width);
        }
        max = s->all_max, sum = s->all_sum, acc = s->all_acc;
    }
    for (int64_t row = 0; row < num_rows; row++) {
        if (item->partial) {
            float *partial = item->partial + row * (width + 2);
            partial[0] = max[row], partial[1] = sum[row];
            memcpy(partial + 2, acc + row * width, 4 * width);
        } else {
            finish_row(type, a, item->token + row / group, item->kv_head * group + row % group,
                       max[row], sum[row], acc + row * width);
        }
    }
}

/* Goes through the items of a batch in a fixed order. */
struct walk {
    int64_t seq, token, kv_head, start; /* the next item */
    int64_t num_partials;               /* rows of split results so far */
};

INLINE int64_t query_start(const struct attention *a, int64_t seq)
{
    return a->query_start_loc ? a->query_start_loc[seq] : seq;
}

/* The first position that a token sees, down to a tile's start. */
INLINE int64_t first_seen(const struct attention *a, int64_t position)
{
    int64_t first = a->window ? max64(0, position - a->window + 1) : 0;
    return first / COLUMNS * COLUMNS;
}

/* Whether a sequence's lone token looks back over more than one split. */
INLINE bool is_split(const struct attention *a, int64_t seq)
{
    int64_t len = a->seq_lens[seq], num_tokens = query_start(a, seq + 1) - query_start(a, seq);
    return num_tokens == 1 && len > 0 &&
           first_seen(a, len - 1) / SPLIT != (len - 1) / SPLIT;
}

/* The next item and its cost, rows times positions; false when there is none. */
static bool next_item(const struct attention *a, struct walk *w, struct item *item, int64_t *cost)
{
    for (; w->seq < a->num_seqs; w->seq++, w->token = 0) {
        int64_t begin = query_start(a, w->seq), end = query_start(a, w->seq + 1);
        int64_t len = a->seq_lens[w->seq], token = begin + w->token;
        if (len == 0 || token >= end) continue;
        int64_t num_tokens = min64(tokens_per_item(a), end - token);
        int64_t position = len - (end - token), last = position + num_tokens;
        bool split = is_split(a, w->seq);
        int64_t first = first_seen(a, position), start = max64(first, w->start);
        int64_t stop = split ? min64(last, (start / SPLIT + 1) * SPLIT) : last;
        *item = (struct item){.seq = w->seq, .kv_head = w->kv_head, .token = token,
                              .num_tokens = num_tokens, .position = position, .start = start,
                              .end = stop};
        *cost = (num_tokens * group_of(a) + 4) * (stop - start); /* 4: to lay out a position */
        w->num_partials += split ? group_of(a) : 0;
        w->start = stop;
        if (stop == last) {
            w->start = 0;
            if (++w->kv_head == a->num_kv_heads) w->kv_head = 0, w->token += num_tokens;
        }
        return true;
    }
    return false;
}

/* The splits of a lone token, merged in order; `partials` are those of its kv head. */
INLINE void merge_splits(dtype type, const struct attention *a, int64_t width,
                         const struct item *item, float *partials, int64_t num_splits)
{
    int64_t group = group_of(a), row_floats = width + 2;
    for (int64_t g = 0; g < group; g++) {
        float *all = partials + g * row_floats;
        for (int64_t split = 1; split < num_splits; split++) {
            const float *one = partials + (split * group + g) * row_floats;
            merge_row(width, all, all + 1, all + 2, one[0], one[1], one + 2);
        }
        finish_row(type, a, item->token, item->kv_head * group + g, all[0], all[1], all + 2);
    }
}

INLINE void attend_share(dtype type, const struct attention *a, int64_t total_cost,
                         bool has_splits, int worker, int num_workers)
{
    struct scratch s = make_scratch(type, a);
    int64_t begin = share_start(total_cost, worker, num_workers);
    int64_t end = share_start(total_cost, worker + 1, num_workers);
    struct walk w = {0};
    struct item item, next;
    int64_t before = 0, cost, next_cost, partial = 0, row_floats = s.width + 2;
    bool is_there = next_item(a, &w, &item, &cost);
    while (is_there && before < end) {
        int64_t num_partials = w.num_partials;
        is_there = next_item(a, &w, &next, &next_cost);
        if (before >= begin) {
            if (is_there) prefetch(type, a, &next, next.start, next.end);
            if (num_partials > partial) item.partial = a->partials + partial * row_floats;
            attend_item(type, a, &s, &item);
        }
        partial = num_partials;
        before += cost;
        item = next, cost = next_cost;
    }
    free(s.memory);
    if (!has_splits) return;
    if (num_workers > 1) {
#pragma omp barrier
    }
    struct walk again = {0};
    int64_t heads = 0, first = 0;
    while (next_item(a, &again, &item, &cost)) {
        if (again.num_partials == first || again.start != 0) continue; /* not a head's last split */
        int64_t num_splits = (again.num_partials - first) / group_of(a);
        if (heads++ % num_workers == worker)
            merge_splits(type, a, s.width, &item, a->partials + first * row_floats, num_splits);
        first = again.num_partials;
    }
}

/* Tokens that belong to no sequence, or to one of length 0, give zeros. */
static void clear_unowned(const struct attention *a)
{
    int64_t token_bytes = a->num_heads * a->head_dim * size_of((dtype)a->type), done = 0;
    for (int64_t seq = 0; seq < a->num_seqs; seq++) {
        if (a->seq_lens[seq] == 0) continue;
        int64_t start = query_start(a, seq);
        memset(a->out + done * token_bytes, 0, (start - done) * token_bytes);
        done = query_start(a, seq + 1);
    }
    memset(a->out + done * token_bytes, 0, (a->num_tokens - done) * token_bytes);
}

void quire_attention_share(const void *args, int worker, int num_workers)
{
    const struct attention *a = args;
    struct walk w = {0};
    struct item item;
    int64_t cost, total_cost = 0;
    while (next_item(a, &w, &item, &cost)) total_cost += cost;
    if (worker == 0) clear_unowned(a);
    BY_DTYPE(a->type, attend_share, a, total_cost, w.num_partials > 0, worker, num_workers);
}

void quire_attention(const struct attention *a) { in_parallel(true, quire_attention_share, a); }
