/* A batch's attention as items of work, in a fixed order. */
#ifndef QUIRE_ATTENTION_WALK_H
#define QUIRE_ATTENTION_WALK_H

#include "attention.h"

INLINE int64_t tokens_per_item(const struct attention *a)
{
    return max64(1, ITEM_ROWS / group_of(a));
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

#endif
