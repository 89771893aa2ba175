/* Runs many kernels in one parallel region: between them threads meet, and do not sleep.
 *
 * Waking a sleeping thread takes as long as a small kernel; a decode step of one token has more than
 * a hundred. */
#include <limits.h>
#include <stdatomic.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#include "threads.h"

enum { MAX_SPINS = 1000 }; /* some 20 microseconds; then another process may have the core */

struct call {
    share_function *share;
    const void *args;
    int64_t waits; /* whether it needs what other workers did in the calls before */
};

struct program {
    const struct call *calls;
    int64_t num_calls;
};

/* Where the workers of a run meet: none goes on before all are there. */
struct meeting {
    _Atomic int num_there;
    _Atomic int number; /* of meetings that are over */
    _Atomic int num_asleep;
};

static void sleep_while(struct meeting *m, int number)
{
#ifdef __linux__
    atomic_fetch_add(&m->num_asleep, 1);
    while (atomic_load(&m->number) == number)
        syscall(SYS_futex, &m->number, FUTEX_WAIT_PRIVATE, number, NULL, NULL, 0);
    atomic_fetch_sub(&m->num_asleep, 1);
#else
    while (atomic_load(&m->number) == number) sched_yield();
#endif
}

static void meet(struct meeting *m, int num_workers)
{
    int number = atomic_load(&m->number);
    if (atomic_fetch_add(&m->num_there, 1) + 1 == num_workers) {
        atomic_store(&m->num_there, 0);
        atomic_store(&m->number, number + 1);
#ifdef __linux__
        if (atomic_load(&m->num_asleep))
            syscall(SYS_futex, &m->number, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#endif
        return;
    }
    for (int spins = 0; atomic_load(&m->number) == number; spins++) {
        if (spins == MAX_SPINS) {
            sleep_while(m, number);
            return;
        }
#ifdef __x86_64__
        __builtin_ia32_pause();
#endif
    }
}

struct run {
    const struct program *program;
    struct meeting *meeting;
};

static void run_share(const void *args, int worker, int num_workers)
{
    const struct run *run = args;
    for (int64_t i = 0; i < run->program->num_calls; i++) {
        const struct call *call = run->program->calls + i;
        if (call->waits && num_workers > 1) meet(run->meeting, num_workers);
        call->share(call->args, worker, num_workers);
    }
}

void quire_run(const struct program *program)
{
    struct meeting meeting = {0};
    in_parallel(true, run_share, &(struct run){program, &meeting});
}
