/* Divides work over the threads of OpenMP, whose pool is torch's.
 *
 * A share never changes a result: no sum is cut by it. */
#ifndef QUIRE_THREADS_H
#define QUIRE_THREADS_H

#include <omp.h>
#include <stdint.h>

/* Runs `body` on as many threads as the calling thread may use, or on it alone if there is little
 * to do: waking others takes microseconds. `body` knows `worker` and `num_workers`. */
#define IN_PARALLEL(is_worth_it, body)                                      \
    do {                                                                    \
        if ((is_worth_it) && omp_get_max_threads() > 1) {                   \
            _Pragma("omp parallel")                                         \
            {                                                               \
                int worker = omp_get_thread_num();                          \
                int num_workers = omp_get_num_threads();                    \
                body;                                                       \
            }                                                               \
        } else {                                                            \
            int worker = 0, num_workers = 1;                                \
            body;                                                           \
        }                                                                   \
    } while (0)

/* The first of `count` things that are `worker`'s; its last ends where the next one's start. */
static inline int64_t share_start(int64_t count, int worker, int num_workers)
{
    return count * worker / num_workers;
}

#endif
