/* Divides work over the threads of OpenMP, whose pool is torch's.
 *
 * Each kernel has a function that does one worker's share. A share never changes a result: no sum
 * is cut by it. Token t of T has the same worker in every kernel that shares out tokens. */
#ifndef QUIRE_THREADS_H
#define QUIRE_THREADS_H

#include <omp.h>
#include <stdbool.h>
#include <stdint.h>

typedef void share_function(const void *args, int worker, int num_workers);

/* The first of `count` things that are `worker`'s; its last ends where the next one's start. */
static inline int64_t share_start(int64_t count, int worker, int num_workers)
{
    return count * worker / num_workers;
}

/* Does all shares, on as many threads as the calling thread may use; on it alone if there is little
 * to do, since waking others takes microseconds. */
static inline void in_parallel(bool is_worth_it, share_function *share, const void *args)
{
    if (!is_worth_it || omp_get_max_threads() == 1) {
        share(args, 0, 1);
        return;
    }
#pragma omp parallel
    share(args, omp_get_thread_num(), omp_get_num_threads());
}

#endif
