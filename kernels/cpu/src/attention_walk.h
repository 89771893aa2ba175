/* Divides a batch's attention into items of work, in a fixed order, each with its cost. */
#ifndef QUIRE_ATTENTION_WALK_H
#define QUIRE_ATTENTION_WALK_H

#include "attention.h"

INLINE int64_t tokens_per_item(const struct attention *a)
{
    return max64(1, ITEM_ROWS / group_of(a));
}

/* Iterates over the items of a batch in a fixed order. */
struct walk {
    int64_t seq, token, kv_head, start; /* the next item */
    int64_t num_partials;               /* rows of split results so far */
    int64_t cost;                       /* of the items so far */
};

/* How many splits the lone query token of a sequence attends to; each of them is an item of its own. It
 * is 1 if the sequence has several query tokens, because their items are not split. */
INLINE int64_t num_splits_of(const struct attention *a, int64_t seq)
{
    int64_t len = a->seq_lens[seq], num_tokens = query_start(a, seq + 1) - query_start(a, seq);
    if (num_tokens != 1 || len == 0) return 1;
    return (len - 1) / SPLIT - first_seen(a, len - 1) / SPLIT + 1;
}

/* The cost of an item whose tokens attend to `num_positions` positions. A row that attends to one
 * position costs 1. */
INLINE int64_t cost_of(const struct attention *a, int64_t num_tokens, int64_t num_positions)
{
    return (num_tokens * group_of(a) + 4) * num_positions; /* 4 is the cost of laying out a position */
}

/* The cost of all items of a sequence. */
static int64_t cost_of_seq(const struct attention *a, int64_t seq)
{
    int64_t left = query_start(a, seq + 1) - query_start(a, seq), len = a->seq_lens[seq], cost = 0;
    if (len == 0) return 0;
    for (int64_t num_tokens; left > 0; left -= num_tokens) {
        int64_t position = len - left;
        num_tokens = min64(tokens_per_item(a), left);
        cost += cost_of(a, num_tokens, position + num_tokens - first_seen(a, position));
    }
    return cost * a->num_kv_heads;
}

/* Skips whole sequences, as long as the cost of all items so far stays at most `cost`. */
static void skip_seqs(const struct attention *a, struct walk *w, int64_t cost)
{
    for (int64_t of_seq, num_splits; w->seq < a->num_seqs; w->seq++, w->cost += of_seq) {
        of_seq = cost_of_seq(a, w->seq);
        if (w->cost + of_seq > cost) return;
        num_splits = num_splits_of(a, w->seq);
        w->num_partials += num_splits > 1 ? num_splits * a->num_heads : 0;
    }
}

/* Finds the next item. Returns false if there are no more items. */
static bool next_item(const struct attention *a, struct walk *w, struct item *item)
{
    for (; w->seq < a->num_seqs; w->seq++, w->token = 0) {
        int64_t begin = query_start(a, w->seq), end = query_start(a, w->seq + 1);
        int64_t len = a->seq_lens[w->seq], token = begin + w->token;
        if (len == 0 || token >= end) continue;
        int64_t num_tokens = min64(tokens_per_item(a), end - token);
        int64_t position = len - (end - token), last = position + num_tokens;
        bool split = num_splits_of(a, w->seq) > 1;
        int64_t first = first_seen(a, position), start = max64(first, w->start);
        int64_t stop = split ? min64(last, (start / SPLIT + 1) * SPLIT) : last;
        *item = (struct item){.seq = w->seq, .kv_head = w->kv_head, .token = token,
                              .num_tokens = num_tokens, .position = position, .start = start,
                              .end = stop};
        w->cost += cost_of(a, num_tokens, stop - start);
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

#endif
