/* Causal attention over the paged cache, read in place, for decodes and chunks of prompts.
 *
 * A row is one head of one token. The positions of a sequence are divided into tiles of COLUMNS
 * positions, and into splits of SPLIT positions, both counted from position 0. A row attends to its tiles
 * in ascending order. It has one result for each split, and these results are merged in ascending order.
 * So the result of a row depends only on its own sequence: not on the batch, not on how the prompt was
 * cut into chunks, and not on the number of threads. Sums are fp32. Products are of bf16 numbers if the
 * queries are bf16 and the CPU has a dot product of bf16, or else of fp32 numbers. For a product in bf16,
 * the attention weights are rounded to bf16, but softmax's sum adds the weights before they are rounded.
 *
 * If attention uses AMX's products (amx.h), it does so for all rows, also for the rows of a decode. A
 * product of few rows gives the same sums as a product of many rows, and positions that a row does not
 * see add zeros. The weights are rounded as with AVX-512, so their error is the same.
 *
 * Work is divided into items (attention_walk.h). An item is some query tokens of one sequence, with the
 * query heads of one kv head. If a sequence has only one query token, and this token attends to several
 * splits, each split is an item of its own. The items have a fixed order, and each has a cost. The total
 * cost is cut into equal ranges, one for each share, and a share has the items that begin within its
 * range. An item of a split stores partial results: softmax's maximum and sum, and the accumulator. A
 * second kernel, merge_splits, merges the partial results and writes the result to `out`. */
#include "attention_few.h"
#include "attention_walk.h"
#include "thread_memory.h"
#include "threads.h"

enum {
    SHARE_COST = 2048, /* the least cost of a share: some microseconds */
    PASSING_COST = 64, /* the least cost of a share for each sequence, as it may skip all sequences */
    MERGED_HEADS = 32, /* the least number of heads of a share of merge_splits */
};

static const float NOTHING_SEEN = -1e30f; /* the running maximum before the first key */
static const float LOG2_E = 1.44269504f;

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
    struct scratch s = {.width = ceil_div(a->value_dim, LANES) * LANES,
                        .steps = ceil_div(a->head_dim, pair)};
    int64_t columns = ceil_div(s.steps, LANES) * LANES * COLUMNS;
    int64_t dequantized = COLUMNS * (ceil_div(a->head_dim, LANES) * LANES + s.width);
    int64_t zeros = max64(a->head_dim, a->value_dim);
    int64_t floats = rows * s.steps + columns + COLUMNS * s.width + 2 * BLOCK_ROWS * COLUMNS +
                     2 * rows * (s.width + 2) + dequantized + zeros + 16 * LANES;
    char *at = thread_memory(4 * floats);
    s.query = take(&at, 4 * rows * s.steps);
    s.keys = take(&at, 4 * columns);
    s.values = take(&at, 4 * COLUMNS * s.width);
    s.scores = take(&at, 4 * BLOCK_ROWS * COLUMNS);
    s.weights = take(&at, 4 * BLOCK_ROWS * COLUMNS);
    s.dequantized = a->format == AS_IS ? NULL : take(&at, 4 * dequantized);
    s.zeros = memset(take(&at, 4 * zeros), 0, 4 * zeros);
    s.acc = take(&at, 4 * rows * s.width);
    s.all_acc = take(&at, 4 * rows * s.width);
    s.sum = take(&at, 4 * rows);
    s.max = take(&at, 4 * rows);
    s.all_sum = take(&at, 4 * rows);
    s.all_max = take(&at, 4 * rows);
    return s;
}

INLINE vf softcapped(vf x, float cap)
{
    vf power = x * (2.0f * LOG2_E / cap);
    power = -vf_max(-power, vf_set(-126.0f)); /* tanh is 1 there */
    return cap - 2.0f * cap / (vf_exp2(power) + 1.0f);
}

/* Turns the scores of one row into weights; the row sees columns [from, to) of this tile. Updates the
 * row's maximum and sum, and rescales its accumulator. */
INLINE void weigh_row(dtype type, const struct attention *a, const struct scratch *s, int64_t row,
                      const float *scores, char *weights, int64_t from, int64_t to)
{
    const vi lane = vi_lanes();
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

/* Turns the scores of some rows of an item into weights, for one tile with the positions
 * [start, start + seen). */
INLINE void weigh_tile(dtype type, const struct attention *a, const struct scratch *s,
                       const struct item *item, int64_t start, int64_t seen, int64_t first_row,
                       int rows)
{
    const int64_t pair = step_kind_of(type) == PAIRS ? 2 : 1, group = group_of(a);
    for (int r = 0; r < rows; r++) {
        int64_t position = item->position + (first_row + r) / group;
        int64_t from = a->window ? max64(0, position - a->window + 1 - start) : 0;
        int64_t to = min64(seen, position + 1 - start);
        weigh_row(type, a, s, first_row + r, s->scores + r * COLUMNS,
                  s->weights + r * COLUMNS * 4 / pair, from, to);
    }
}

#ifdef HAS_AMX
INLINE void multiply(const struct attention *a, step_kind kind, int rows, int64_t columns,
                     struct product p)
{
    if (attends_with_amx(a)) amx_columns(rows, columns, p);
    else product(kind, rows, columns, p);
}
#else
#define multiply(a, ...) product(__VA_ARGS__)
#endif

/* Lays out a tile for the product, and lets all rows of an item attend to the tile. */
INLINE void attend_many(dtype type, const struct attention *a, const struct scratch *s,
                        const struct item *item, const struct kv_tile *tile, int64_t start,
                        int64_t seen)
{
    const step_kind kind = step_kind_of(type);
    const int64_t pair = kind == PAIRS ? 2 : 1, group = group_of(a);
    const int64_t num_rows = item->num_tokens * group;
    const int64_t height = attends_with_amx(a) ? AMX_ROWS : TILE_ROWS;
    lay_out(a, s, tile);
    for (int64_t block = 0; block < num_rows; block += height) {
        int rows = (int)min64(height, num_rows - block);
        int64_t first = item->position + block / group;
        int64_t last = item->position + (block + rows - 1) / group;
        if (start > last || (a->window && start + COLUMNS <= first - a->window + 1)) continue;
        multiply(a, kind, rows, tile->columns,
                 (struct product){.a = s->query + 4 * block * s->steps,
                                  .lda_bytes = 4 * s->steps, .b = s->keys, .ldb = COLUMNS,
                                  .steps = s->steps, .c = s->scores, .ldc = COLUMNS,
                                  .fresh = true});
        weigh_tile(type, a, s, item, start, seen, block, rows);
        multiply(a, kind, rows, s->width,
                 (struct product){.a = s->weights, .lda_bytes = COLUMNS * 4 / pair,
                                  .b = s->values, .ldb = s->width, .steps = tile->columns / pair,
                                  .c = s->acc + block * s->width, .ldc = s->width,
                                  .fresh = false});
    }
}

/* Lets all rows of an item attend to the positions [start, end), which are in one split, starting from
 * empty sums. */
INLINE void attend_split(dtype type, const struct attention *a,
                         const struct scratch *s, const struct item *item, int64_t start,
                         int64_t end)
{
    const int64_t num_rows = item->num_tokens * group_of(a);
    for (int64_t row = 0; row < num_rows; row++) s->max[row] = NOTHING_SEEN, s->sum[row] = 0;
    memset(s->acc, 0, 4 * num_rows * s->width);
    for (int64_t at = start; at < end; at += COLUMNS) {
        struct kv_tile tile;
        int64_t seen = min64(COLUMNS, end - at);
        prefetch(type, a, item, at + COLUMNS, item->end);
        find_tile(type, a, s, item, at, at + seen, &tile);
        if (is_for_few(type, a, num_rows)) {
            score_few(num_rows, s, &tile);
            weigh_tile(type, a, s, item, at, seen, 0, (int)num_rows);
            add_few(num_rows, s, &tile);
        } else {
            attend_many(type, a, s, item, &tile, at, seen);
        }
    }
}

/* Merges a row's result over one split into its result over the splits before. */
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
    int64_t at = (token * a->num_heads + head) * a->value_dim;
    for (int64_t d = 0; d < a->value_dim; d += LANES) {
        int64_t n = min64(LANES, a->value_dim - d);
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

/* Merges the splits of a lone token in order, for the heads of one kv head, and writes the result.
 * `partials` has the results of these splits; `all` is memory for one row. */
INLINE void merge_splits(dtype type, const struct attention *a, int64_t width, int64_t token,
                         int64_t kv_head, const float *partials, int64_t num_splits, float *all)
{
    int64_t group = group_of(a), row_floats = width + 2;
    for (int64_t g = 0; g < group; g++) {
        memcpy(all, partials + g * row_floats, 4 * row_floats);
        for (int64_t split = 1; split < num_splits; split++) {
            const float *one = partials + (split * group + g) * row_floats;
            merge_row(width, all, all + 1, all + 2, one[0], one[1], one + 2);
        }
        finish_row(type, a, token, kv_head * group + g, all[0], all[1], all + 2);
    }
}

/* Computes the items that begin within this share's range of the total cost. */
INLINE void attend_share(dtype type, const struct attention *a, int64_t total_cost, int64_t share,
                         int64_t num_shares)
{
    struct scratch s = make_scratch(type, a);
    int64_t begin = share_start(total_cost, share, num_shares);
    int64_t end = share_start(total_cost, share + 1, num_shares), row_floats = s.width + 2;
    struct walk w = {0};
    struct item item, next;
    skip_seqs(a, &w, begin);
    int64_t before = w.cost, partial = w.num_partials;
    bool is_there = next_item(a, &w, &item);
    if (attends_with_amx(a)) amx_begin();
    while (is_there && before < end) {
        int64_t after = w.cost, num_partials = w.num_partials;
        is_there = next_item(a, &w, &next);
        if (before >= begin) {
            if (is_there) prefetch(type, a, &next, next.start, next.end);
            if (num_partials > partial) item.partial = a->partials + partial * row_floats;
            attend_item(type, a, &s, &item);
        }
        partial = num_partials;
        before = after;
        item = next;
    }
    if (attends_with_amx(a)) amx_end();
}

INLINE void merge_share(dtype type, const struct attention *a, int64_t share, int64_t num_shares)
{
    int64_t width = ceil_div(a->value_dim, LANES) * LANES, heads = 0;
    const float *partials = a->partials;
    float *all = (float *)thread_memory(4 * (width + 2));
    for (int64_t seq = 0; seq < a->num_seqs; seq++) {
        int64_t num_splits = num_splits_of(a, seq), head_floats = num_splits * group_of(a) * (width + 2);
        for (int64_t h = 0; h < a->num_kv_heads && num_splits > 1; h++, partials += head_floats)
            if (heads++ % num_shares == share)
                merge_splits(type, a, width, query_start(a, seq), h, partials, num_splits, all);
    }
}

/* Writes zeros for tokens that belong to no sequence, or to a sequence of length 0. */
static void clear_unowned(const struct attention *a)
{
    int64_t token_bytes = a->num_heads * a->value_dim * size_of((dtype)a->type), done = 0;
    for (int64_t seq = 0; seq < a->num_seqs; seq++) {
        if (a->seq_lens[seq] == 0) continue;
        int64_t start = query_start(a, seq);
        memset(a->out + done * token_bytes, 0, (start - done) * token_bytes);
        done = query_start(a, seq + 1);
    }
    memset(a->out + done * token_bytes, 0, (a->num_tokens - done) * token_bytes);
}

static int64_t total_cost(const struct attention *a)
{
    struct walk w = {0};
    skip_seqs(a, &w, INT64_MAX);
    return w.cost;
}

int64_t quire_attention_count(const void *args)
{
    const struct attention *a = args;
    return shares_of(total_cost(a), max64(SHARE_COST, PASSING_COST * a->num_seqs));
}

void quire_attention_share(const void *args, int64_t share, int64_t num_shares)
{
    const struct attention *a = args;
    if (share == 0) clear_unowned(a);
    BY_DTYPE(a->type, attend_share, a, total_cost(a), share, num_shares);
}

int64_t quire_merge_splits_count(const void *args)
{
    const struct attention *a = args;
    return shares_of(a->num_seqs * a->num_heads, MERGED_HEADS);
}

void quire_merge_splits_share(const void *args, int64_t share, int64_t num_shares)
{
    const struct attention *a = args;
    BY_DTYPE(a->type, merge_share, a, share, num_shares);
}

void quire_merge_splits(const struct attention *a)
{
    run_call(true, quire_merge_splits_share, quire_merge_splits_count, a);
}

void quire_attention(const struct attention *a)
{
    run_call(true, quire_attention_share, quire_attention_count, a);
    if (a->partials) quire_merge_splits(a);
}
