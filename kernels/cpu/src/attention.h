/* The arguments of attention, its units of work, and where the keys and values of a sequence lie.
 *
 * Symbols: T tokens, S sequences, H query heads, HKV kv heads, D head dim of queries and keys, DV that
 * of values, B blocks, P block size, M max blocks per sequence. Strides are in elements. */
#ifndef QUIRE_ATTENTION_H
#define QUIRE_ATTENTION_H

#include "amx.h"
#include "kv_row.h"

enum {
    COLUMNS = 64,      /* positions of a tile */
    SPLIT = 512,       /* positions of a split; a multiple of COLUMNS */
    ITEM_ROWS = 96,    /* rows of an item, at most; a single token may have more */
#ifdef HAS_AMX
    BLOCK_ROWS = AMX_ROWS, /* rows of the largest product */
#else
    BLOCK_ROWS = TILE_ROWS,
#endif
};

struct attention {
    int64_t type, format; /* of the queries, and of the caches */
    int64_t num_seqs, num_tokens, num_heads, num_kv_heads, head_dim, value_dim, block_size;
    int64_t window;               /* positions that a token looks back, its own included; 0: all */
    const char *query;            /* [T, H, D] */
    const char *key_cache;        /* [B, P, HKV, D] */
    const char *value_cache;      /* [B, P, HKV, DV]; may be the keys' first DV numbers */
    const bf16 *key_scales, *value_scales; /* [B, P, HKV], or NULL: AS_IS */
    const int32_t *block_tables;  /* [S, M] */
    const int32_t *seq_lens;      /* [S] */
    const int32_t *query_start_loc; /* [S + 1], or NULL: one token each */
    const float *sinks;           /* [H], or NULL */
    char *out;                    /* [T, H, DV], contiguous */
    float *partials; /* memory for partial results, [splits * H][DV in whole vectors + 2] for each token
                        that attends to several splits and is lone: the only query token of its
                        sequence; or NULL */
    int64_t query_stride_t, query_stride_h;
    int64_t key_stride_b, key_stride_p, key_stride_h;
    int64_t value_stride_b, value_stride_p, value_stride_h;
    int64_t key_scale_stride_b, key_scale_stride_p, key_scale_stride_h;
    int64_t value_scale_stride_b, value_scale_stride_p, value_scale_stride_h;
    int64_t table_stride;
    double scale, softcap; /* softcap 0: none */
};

/* A unit of work: some tokens of a sequence, with the query heads of one kv head. Its rows are pairs of
 * token and head. */
struct item {
    int64_t seq, kv_head;
    int64_t token, num_tokens;        /* token is an index in the batch */
    int64_t position;                 /* of the first token */
    int64_t start, end;               /* positions of the keys: [start, end); a tile begins at `start` */
    float *partial;                   /* where the partial result goes; NULL: the result is complete */
};

/* The working memory of a thread, in thread_memory. `rows` is ITEM_ROWS, or the number of query heads of
 * a kv head if there are more. */
struct scratch {
    int64_t width; /* DV in whole vectors */
    int64_t steps; /* D in steps of the product with keys */
    char *query;   /* [rows][steps] of 4 bytes */
    char *keys;    /* [steps][COLUMNS] of 4 bytes */
    char *values;  /* [COLUMNS][width] floats, or [COLUMNS / 2][width] pairs of bf16 */
    float *scores; /* [BLOCK_ROWS][COLUMNS] */
    char *weights; /* [BLOCK_ROWS][COLUMNS] */
    char *dequantized; /* [COLUMNS][D + DV] of the model's format, D and DV in whole vectors;
                          NULL: AS_IS */
    char *zeros;   /* [max(D, DV)] of 4 bytes: read in place of positions that no row sees (`kv_tile`) */
    float *sum, *max;            /* [rows]: softmax's sum and maximum in the present split */
    float *acc;                  /* [rows][width] */
    float *all_sum, *all_max, *all_acc; /* the same over all splits so far */
};

/* Where the keys and values of a tile's positions are. Positions behind the window point at zeros, and so
 * do the positions with which the tile is filled up to `columns`. */
struct kv_tile {
    const char *keys[COLUMNS], *values[COLUMNS]; /* [D] and [DV] each */
    int64_t columns; /* a multiple of LANES; with AMX, of PANEL */
};

/* Whether values are the first numbers of their keys, as in multi-head latent attention. */
INLINE bool has_values_in_keys(const struct attention *a) { return a->value_cache == a->key_cache; }

INLINE int64_t group_of(const struct attention *a) { return a->num_heads / a->num_kv_heads; }

/* Whether attention uses AMX's products; then it does so for all rows, as AMX adds in another order than
 * AVX-512. With quantized KV, attention does not use AMX, because the choice of AMX was timed with bf16
 * KV only (kernels/cpu/amx_choice.py). */
#ifdef HAS_AMX
INLINE bool attends_with_amx(const struct attention *a)
{
    const int64_t whole = 2 * AMX_STEPS; /* k of an instruction; equals PANEL, so that the products
                                         with keys and with values both fill their registers */
    return quire_amx_uses >> AMX_ATTENTION & 1 && step_kind_of((dtype)a->type) == PAIRS &&
           a->format == AS_IS && a->head_dim % whole == 0 && a->value_dim % whole == 0;
}
#else
#define attends_with_amx(a) false
#endif

/* The index in the batch of a sequence's first token. */
INLINE int64_t query_start(const struct attention *a, int64_t seq)
{
    return a->query_start_loc ? a->query_start_loc[seq] : seq;
}

/* The first position that a token sees, rounded down to the start of a tile. */
INLINE int64_t first_seen(const struct attention *a, int64_t position)
{
    int64_t first = a->window ? max64(0, position - a->window + 1) : 0;
    return first / COLUMNS * COLUMNS;
}

/* Iterates over the slots of a sequence's positions, in the caches of one kv head. */
struct slots {
    const struct attention *a;
    const int32_t *block; /* the present position's entry in the block table */
    int64_t kv_head, num_left; /* num_left: slots of the block from the present one on */
    struct kv_row key, value;  /* of the present position */
    int64_t key_step, value_step; /* bytes to the next slot */
};

INLINE void enter_block(dtype type, struct slots *s, int64_t offset)
{
    const struct attention *a = s->a;
    int64_t bytes = kept_bytes(type, (kv_format)a->format), block = *s->block;
    s->num_left = a->block_size - offset;
    s->key.numbers = a->key_cache + (block * a->key_stride_b + s->kv_head * a->key_stride_h) * bytes +
                     offset * s->key_step;
    s->value.numbers = a->value_cache + offset * s->value_step +
                       (block * a->value_stride_b + s->kv_head * a->value_stride_h) * bytes;
    if (a->format == AS_IS) return;
    s->key.scale = a->key_scales + block * a->key_scale_stride_b +
                   offset * a->key_scale_stride_p + s->kv_head * a->key_scale_stride_h;
    s->value.scale = a->value_scales + block * a->value_scale_stride_b +
                     offset * a->value_scale_stride_p + s->kv_head * a->value_scale_stride_h;
}

/* Begins the iteration at a position, which the sequence must have. */
INLINE struct slots slots_from(dtype type, const struct attention *a, const struct item *item,
                               int64_t position)
{
    int64_t bytes = kept_bytes(type, (kv_format)a->format);
    const int32_t *table = a->block_tables + item->seq * a->table_stride;
    struct slots s = {.a = a, .block = table + position / a->block_size, .kv_head = item->kv_head,
                      .key_step = a->key_stride_p * bytes,
                      .value_step = a->value_stride_p * bytes};
    enter_block(type, &s, position % a->block_size);
    return s;
}

/* Goes to the next position, which the sequence must have. */
INLINE void next_slot(dtype type, struct slots *s)
{
    if (--s->num_left == 0) {
        s->block++;
        enter_block(type, s, 0);
        return;
    }
    s->key.numbers += s->key_step;
    s->value.numbers += s->value_step;
    if (s->a->format == AS_IS) return;
    s->key.scale += s->a->key_scale_stride_p;
    s->value.scale += s->a->value_scale_stride_p;
}

/* Finds the keys and values of positions [start, end), at most COLUMNS, in the model's format. Positions
 * that no token of the item sees are not read: behind a window, a block may belong to another
 * sequence. */
INLINE void find_tile(dtype type, const struct attention *a, const struct scratch *s,
                      const struct item *item, int64_t start, int64_t end, struct kv_tile *tile)
{
    const kv_format format = (kv_format)a->format;
    struct slots slots = slots_from(type, a, item, start);
    int64_t seen = end - start;
    int64_t behind = a->window ? item->position - a->window + 1 - start : 0;
    char *room = s->dequantized;
    /* AMX adds up 32 positions at once, and would add up fewer positions in another order. How many
     * positions the last tile has depends on how the prompt is cut into chunks, so the tile is filled up
     * with zeros. */
    const int64_t whole = attends_with_amx(a) ? PANEL : LANES;
    tile->columns = ceil_div(seen, whole) * whole;
    for (int64_t c = 0; c < seen; c++) {
        if (c > 0) next_slot(type, &slots);
        if (c < behind) {
            tile->keys[c] = tile->values[c] = s->zeros;
        } else if (format == AS_IS) {
            tile->keys[c] = slots.key.numbers;
            tile->values[c] = slots.value.numbers;
        } else {
            tile->keys[c] = dequantize_row(type, format, slots.key, a->head_dim, &room);
            tile->values[c] = has_values_in_keys(a)
                                  ? tile->keys[c]
                                  : dequantize_row(type, format, slots.value, a->value_dim, &room);
        }
    }
    for (int64_t c = seen; c < tile->columns; c++) tile->keys[c] = tile->values[c] = s->zeros;
}

/* Prefetches a tile that is needed soon, because rows lie too far apart for the CPU to predict them. */
INLINE void prefetch(dtype type, const struct attention *a, const struct item *item, int64_t start,
                     int64_t end)
{
    if (start >= end) return;
    struct slots slots = slots_from(type, a, item, start);
    int64_t bytes = kept_bytes(type, (kv_format)a->format);
    int64_t key_bytes = a->head_dim * bytes;
    int64_t value_bytes = has_values_in_keys(a) ? 0 : a->value_dim * bytes;
    for (int64_t position = start;;) {
        for (int64_t byte = 0; byte < key_bytes; byte += 64)
            __builtin_prefetch(slots.key.numbers + byte, 0, 2);
        for (int64_t byte = 0; byte < value_bytes; byte += 64)
            __builtin_prefetch(slots.value.numbers + byte, 0, 2);
        if (++position == min64(start + COLUMNS, end)) return;
        next_slot(type, &slots);
    }
}

#endif
