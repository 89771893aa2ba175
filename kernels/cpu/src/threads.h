/* What a kernel is to the threads of OpenMP, whose pool is torch's: shares that any of them can do.
 *
 * A share never changes a result: no sum is cut by it. It may be done twice, even at once, and
 * writes the same both times: nothing that a kernel writes is among what it reads, and it writes
 * results alone, so that who reads them sees no others. Two threads' plain stores to one place are a
 * data race in C, whatever they store, and ThreadSanitizer would say so. Here they are what CPUs make
 * of them: each byte is one or the other of two that are equal. */
#ifndef QUIRE_THREADS_H
#define QUIRE_THREADS_H

#include <stdbool.h>
#include <stdint.h>

/* Does share number `share` of `num_shares`. */
typedef void share_function(const void *args, int64_t share, int64_t num_shares);
/* How many shares, from 1 to MAX_SHARES, there should be: of some microseconds each. */
typedef int64_t count_function(const void *args);

enum { MAX_SHARES = 256 };

/* The first of `count` things that are share number `share`'s; its last ends where the next one's
 * start. */
static inline int64_t share_start(int64_t count, int64_t share, int64_t num_shares)
{
    return count * share / num_shares;
}

/* As many shares as `count` things of which `least` pay for being one. */
static inline int64_t shares_of(int64_t count, int64_t least)
{
    int64_t shares = count / least;
    return shares < 1 ? 1 : shares > MAX_SHARES ? MAX_SHARES : shares;
}

struct call {
    share_function *share;
    count_function *count;
    const void *args;
    int64_t joins; /* its shares follow those of the call before, which has as many: they need no
                      other ones of that call */
};

/* Calls, each of which may need all that the ones before it did. */
struct program {
    const struct call *calls;
    int64_t num_calls;
    int64_t num_apart; /* what a call reads or writes is changed by no call earlier than so many
                          after it; no fewer than join one another */
};

void quire_run(const struct program *program);

/* Does one call, on as many threads as the calling thread may use; on it alone if there is little
 * to do, since waking others takes microseconds. */
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
