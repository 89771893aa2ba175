/* kv_ahead.h, for a test: what one share of a map fetches. */
#include "kv_ahead.h"

const int64_t constants[] = {RUN_STEPS, MAX_RUNS, PANEL};

/* Writes the runs' addresses to `runs`, as products of `count` runs each ask for them; how many. */
int64_t all_runs(const struct attention *attention, int64_t num_runs, int64_t num_runs_after,
                 int64_t num_tiles, int64_t share, int64_t num_shares, int64_t count,
                 const char **runs, int64_t *run_bytes)
{
    struct kv_part part = {attention, num_runs, num_runs_after};
    struct kv_ahead ahead = kv_ahead_of(&part, num_tiles, share, num_shares);
    int64_t found = 0;
    *run_bytes = ahead.run_bytes;
    while (next_runs(&ahead, count, runs + found)) found += count;
    return found;
}
