/* Keeps the threads of a program on CPUs of their own, and weights in the memory beside them. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* for cpu_set_t */
#endif
#include "pinning.h"

#include <string.h>

#include "threads.h"

enum { NO_CPU = -1 };

static int64_t num_pinned; /* 0: threads are not pinned */

#ifdef __linux__
#include <sched.h>

static int pinned_cpus[MAX_SHARES];
static _Thread_local int own_cpu = NO_CPU; /* the CPU on which a thread of the pool is */
static _Thread_local bool is_away;         /* whether a caller has to go back to its CPUs */
static _Thread_local cpu_set_t allowed;    /* the CPUs on which the caller could run before */

static bool move_to(int cpu)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    return sched_setaffinity(0, sizeof set, &set) == 0; /* 0: the calling thread */
}

bool quire_pin_threads(const int64_t *cpus, int64_t count)
{
    if (count > MAX_SHARES) return false;
    for (int64_t i = 0; i < count; i++)
        if (cpus[i] < 0 || cpus[i] >= CPU_SETSIZE) return false;
    for (int64_t i = 0; i < count; i++) pinned_cpus[i] = (int)cpus[i];
    num_pinned = count;
    return true;
}

void pin_worker(int worker, int num_workers)
{
    if (num_workers > num_pinned) return;
    const int cpu = pinned_cpus[worker];
    if (worker == 0)
        is_away = (is_away || sched_getaffinity(0, sizeof allowed, &allowed) == 0) && move_to(cpu);
    else if (own_cpu != cpu && move_to(cpu))
        own_cpu = cpu;
}

void unpin_caller(void)
{
    if (is_away && sched_setaffinity(0, sizeof allowed, &allowed) == 0) is_away = false;
}

#else

bool quire_pin_threads(const int64_t *cpus, int64_t count) { return (void)cpus, count == 0; }
void pin_worker(int worker, int num_workers) { (void)worker, (void)num_workers; }
void unpin_caller(void) {}

#endif

/* Memory whose pages have not been used yet, for panels of weights. A system with several nodes of memory
 * takes a page from the node of the thread that first writes to it. So each worker writes to the panels
 * that it will read in linear.c. Gated maps are an exception: there a worker reads one part of each half
 * of the panels, so some of them may lie on another node. */
struct first_touch {
    char *memory;
    int64_t num_panels, panel_bytes;
};

int64_t quire_first_touch_count(const void *args)
{
    return shares_of(((const struct first_touch *)args)->num_panels, 1);
}

void quire_first_touch_share(const void *args, int64_t share, int64_t num_shares)
{
    const struct first_touch *a = args;
    int64_t first = share_start(a->num_panels, share, num_shares);
    int64_t end = share_start(a->num_panels, share + 1, num_shares);
    memset(a->memory + first * a->panel_bytes, 0, (end - first) * a->panel_bytes);
}

/* Does nothing if threads are not pinned, because then any thread may read the panels. */
void quire_first_touch(const struct first_touch *a)
{
    if (num_pinned) run_call(true, quire_first_touch_share, quire_first_touch_count, a);
}
