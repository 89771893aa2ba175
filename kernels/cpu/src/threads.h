/* The interface between kernels and threads: work is cut into shares, which any thread can do.
 *
 * The threads are those of OpenMP, whose pool is torch's. Every kernel has three functions: quire_NAME
 * does all of the work, quire_NAME_count returns the number of shares to cut the work into, and
 * quire_NAME_share does one share. The caller owns the structure of arguments and all memory that it
 * points to.
 *
 * How work is cut never changes a result, because no sum crosses the border of a share. A share may be done
 * twice, even by two threads at once, and writes the same both times: a kernel reads nothing that it
 * writes, and stores only final results, each in one place. In C, two stores to the same place are a data
 * race even if the values are equal, and ThreadSanitizer would report them. On real CPUs the result is
 * correct, because both stores write the same bytes. */
#ifndef QUIRE_THREADS_H
#define QUIRE_THREADS_H

#include <stdbool.h>
#include <stdint.h>

/* Does share number `share` of `num_shares`. */
typedef void share_function(const void *args, int64_t share, int64_t num_shares);
/* Returns a number of shares, from 1 to MAX_SHARES, such that each share takes a few microseconds. */
typedef int64_t count_function(const void *args);

enum { MAX_SHARES = 256 };

/* The index of the first thing of share `share`, if `count` things are divided among the shares. The
 * share ends where share `share + 1` starts. */
static inline int64_t share_start(int64_t count, int64_t share, int64_t num_shares)
{
    return count * share / num_shares;
}

/* The number of shares for `count` things, if a share of fewer than `least` does not pay. */
static inline int64_t shares_of(int64_t count, int64_t least)
{
    int64_t shares = count / least;
    return shares < 1 ? 1 : shares > MAX_SHARES ? MAX_SHARES : shares;
}

struct call {
    share_function *share;
    count_function *count;
    const void *args;
    int64_t joins; /* whether each share of this call can begin as soon as the same share of the call
                      before is done; both calls are then cut into shares alike */
};

/* Calls in order. Unless it joins, a call begins when all calls before it are done. */
struct program {
    const struct call *calls;
    int64_t num_calls;
    int64_t num_apart; /* a call may overwrite what an earlier call reads or writes only if it comes
                          at least so many calls later; not less than the number of calls that
                          join one another */
};

void quire_run(const struct program *program);

/* Does one call on as many threads as the calling thread may use. If there is little work, the calling
 * thread does it alone, since waking other threads takes microseconds. */
static inline void run_call(bool is_worth_it, share_function *share, count_function *count,
                            const void *args)
{
    if (!is_worth_it) {
        share(args, 0, 1);
        return;
    }
    struct call call = {share, count, args, 0};
    quire_run(&(struct program){&call, 1, 1});
}

#endif
