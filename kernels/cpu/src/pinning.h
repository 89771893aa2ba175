/* Keeps the threads of a program on CPUs of their own, and weights in the memory beside them.
 *
 * Worker `i` of a program runs on the i-th CPU. Threads of the pool stay there. The thread that calls a
 * program is worker 0, and is there only for as long as the program runs: it does other work, too, and the
 * threads that it starts would inherit the CPU. */
#ifndef QUIRE_PINNING_H
#define QUIRE_PINNING_H

#include <stdbool.h>
#include <stdint.h>

/* Names the CPUs from now on, for programs of up to `count` workers. Programs of more pin no thread, but
 * threads of the pool that are pinned stay where they are. Returns whether the system can do it, for so
 * many. No kernel may run meanwhile. */
bool quire_pin_threads(const int64_t *cpus, int64_t count);

/* Moves the calling thread, which is this worker, to its CPU, if there is one. */
void pin_worker(int worker, int num_workers);

/* Lets worker 0 run again where it could before `pin_worker`. */
void unpin_caller(void);

#endif
