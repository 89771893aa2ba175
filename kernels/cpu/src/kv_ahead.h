/* Prefetches the keys and values that attention reads next, while a linear map computes.
 *
 * A map of many rows reads its weights from memory once, for the first tile of rows. While it computes
 * the other tiles, memory is idle; but attention of many short sequences waits mostly for memory. So each
 * product of the other tiles prefetches some runs. A run is a part of a block's keys or values in one
 * layer, at most RUN_BYTES; a block consists of some runs of keys, and then as many of values.
 *
 * Prefetched memory goes to the second-level cache, and from there to the third. So at most MOST_BYTES
 * are prefetched for a layer. The KV that this step stores for prompts is not prefetched, except for a
 * last layer that computes only the tokens whose logits are wanted. */
#ifndef QUIRE_KV_AHEAD_H
#define QUIRE_KV_AHEAD_H

#include "attention.h"
#include "threads.h"

enum {
    MAX_RUNS = 256, /* of one product; a product that would prefetch more runs prefetches none */
    MOST_BYTES = 16 << 20,
};

/* The runs that one map prefetches. All runs of a layer form a list, from which the last map before the
 * attention prefetches the last runs, as many as it can. The map before it prefetches the runs before
 * those, and so on. Runs that are prefetched late are more likely to be still in a cache. */
struct kv_part {
    const struct attention *attention; /* NULL: nothing */
    int64_t num_runs, num_runs_after;  /* runs prefetched with each tile of rows but the first:
                                          by this map, and by the maps between it and the attention */
};

/* Iterates over runs: over all sequences in order, and over the blocks of each in order. */
struct kv_ahead {
    const struct attention *attention;
    int64_t num_left;
    int64_t num_of_side, run_bytes; /* num_of_side: runs of a block's keys, and as many of its values */
    int64_t seq, block, run;        /* the next run; `block` is an index in the sequence's block table */
};

/* How many positions of a sequence were stored before this step. */
INLINE int64_t stored_before(const struct attention *a, int64_t seq)
{
    return max64(0, a->seq_lens[seq] - (query_start(a, seq + 1) - query_start(a, seq)));
}

/* The blocks of a sequence that are worth prefetching: [first_block, end_block) of its table. */
INLINE int64_t first_block(const struct attention *a, int64_t seq)
{
    return a->window ? first_seen(a, stored_before(a, seq)) / a->block_size : 0;
}

INLINE int64_t end_block(const struct attention *a, int64_t seq)
{
    return (uint32_t)(stored_before(a, seq) + a->block_size - 1) / (uint32_t)a->block_size;
}

INLINE int64_t num_blocks_of(const struct attention *a, int64_t seq)
{
    return max64(0, end_block(a, seq) - first_block(a, seq));
}

/* Goes to the first block of sequence `seq`, or of the next sequence that has blocks to prefetch; there
 * must be one. */
INLINE void enter_seq(struct kv_ahead *ahead, int64_t seq)
{
    while (!num_blocks_of(ahead->attention, seq)) seq++;
    ahead->seq = seq;
    ahead->block = first_block(ahead->attention, seq);
}

/* Finds which runs a share of a map prefetches. `num_tiles` is the number of tiles of rows, without the
 * first tile of each part of the rows, which prefetches weights. */
static struct kv_ahead kv_ahead_of(const struct kv_part *part, int64_t num_tiles, int64_t share,
                                   int64_t num_shares)
{
    const struct attention *a = part->attention;
    struct kv_ahead ahead = {.attention = a};
    if (!a || num_tiles * part->num_runs == 0) return ahead;
    int64_t side_bytes = kept_bytes((dtype)a->type, (kv_format)a->format) *
                         max64(a->block_size * a->key_stride_p, a->num_kv_heads * a->key_stride_h);
    ahead.num_of_side = ceil_div(side_bytes, RUN_BYTES);
    ahead.run_bytes = ceil_div(side_bytes, ahead.num_of_side);

    int64_t num_blocks = 0, of_block = 2 * ahead.num_of_side;
    for (int64_t seq = 0; seq < a->num_seqs; seq++) num_blocks += num_blocks_of(a, seq);
    int64_t num_runs = num_blocks * of_block;
    int64_t skipped = max64(0, num_runs - MOST_BYTES / ahead.run_bytes);
    int64_t end = max64(skipped, num_runs - part->num_runs_after * num_tiles);
    int64_t count = min64(end - skipped, part->num_runs * num_tiles);
    int64_t first = end - count + share_start(count, share, num_shares);
    ahead.num_left = end - count + share_start(count, share + 1, num_shares) - first;
    if (ahead.num_left == 0) return ahead;

    int64_t block = first / of_block, seq = 0;
    for (; block >= num_blocks_of(a, seq); seq++) block -= num_blocks_of(a, seq);
    enter_seq(&ahead, seq);
    ahead.block += block;
    ahead.run = first % of_block;
    return ahead;
}

/* Finds the next `count` runs; if there are fewer, the last run is repeated. Returns false if there are
 * no more runs. */
static bool next_runs(struct kv_ahead *ahead, int64_t count, const char *runs[])
{
    const struct attention *a = ahead->attention;
    if (ahead->num_left == 0 || count < 1 || count > MAX_RUNS) return false;
    int64_t bytes = kept_bytes((dtype)a->type, (kv_format)a->format), found = 0;
    for (; found < count && ahead->num_left > 0; ahead->num_left--) {
        int64_t block = a->block_tables[ahead->seq * a->table_stride + ahead->block];
        int64_t side = ahead->run / ahead->num_of_side, part = ahead->run % ahead->num_of_side;
        runs[found++] = (side == 0 ? a->key_cache + block * a->key_stride_b * bytes
                                   : a->value_cache + block * a->value_stride_b * bytes) +
                        part * ahead->run_bytes;
        if (++ahead->run < 2 * ahead->num_of_side) continue;
        ahead->run = 0;
        if (++ahead->block == end_block(a, ahead->seq) && ahead->num_left > 1)
            enter_seq(ahead, ahead->seq + 1);
    }
    for (int64_t last = found - 1; found < count; found++) runs[found] = runs[last];
    return true;
}

#endif
