/* Keeps the threads of a program on CPUs of their own, and weights in the memory beside them.
 *
 * Worker `i` of a program runs on the i-th CPU. Threads of the pool stay on their CPU. The thread that
 * calls a program is worker 0, and stays on its CPU only while the program runs: it does other work, too,
 * and the threads that it starts would inherit the CPU. */
#ifndef QUIRE_PINNING_H
#define QUIRE_PINNING_H

#include <stdbool.h>
#include <stdint.h>

/* Sets the CPUs for programs with up to `count` workers. A program with more workers pins no thread, but
 * threads of the pool that are pinned stay where they are. Returns whether the system can pin so many
 * threads. No kernel may run during this call. */
bool quire_pin_threads(const int64_t *cpus, int64_t count);

/* Moves the calling thread, which is worker `worker`, to its CPU, if it has one. */
void pin_worker(int worker, int num_workers);

/* Lets worker 0, the calling thread, run again on all CPUs on which it could run before `pin_worker`. */
void unpin_caller(void);

#endif
