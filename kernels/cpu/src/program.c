/* Runs the calls of a program in one parallel region, and waits for no thread that lost its core.
 *
 * Waking a sleeping thread takes as long as a small kernel, and a decode step of one token has more
 * than a hundred kernels. Other processes take a core for hundreds of microseconds, as long as a
 * layer takes. So all threads stay in one parallel region, and each thread does the same for every call:
 *
 *   1. It does its own part, which is shares that lie side by side in memory.
 *   2. It takes shares of other parts that no thread has begun.
 *   3. It waits until all shares are done. If a share takes too long, it does that share itself.
 *
 * A thread that gets its core back writes again what another thread has already written, and then
 * continues at the current call. Any thread can do any share, so no share waits for one particular
 * thread.
 *
 * A late thread may still be at an early call, so a call that reuses the memory of that call must not
 * begin. `num_apart` tells how far apart such calls are, and `place` where each thread is. */
#include <limits.h>
#include <omp.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>

#include "pinning.h"
#include "threads.h"

#ifdef __clang__
#error "gcc is needed: clang's OpenMP calls functions of libomp, and torch brings only libgomp along"
#endif

enum {
    MIN_PATIENCE_NS = 10000,
    REST_NS = 20000,
    SPINS_PER_LOOK = 16, /* how often a waiting thread spins between two looks at the clock */
    FAR_TOO_LONG = 16,   /* a multiple of the time that is too long */
    NO_SHARE = -1,
    NOWHERE = INT_MAX, /* later than any call */
};

struct worker {
    /* The shares of the worker's part that no thread has taken, [first, end) of call `call`, packed as
     * (1 + call) << 32 | first << 16 | end. If `call` is earlier than the present call, no share of the
     * present call is taken yet. */
    _Atomic uint64_t left __attribute__((aligned(64)));
    /* The earliest call for which the worker may still write; NOWHERE: none. */
    _Atomic int place __attribute__((aligned(64)));
};

struct run {
    const struct program *program;
    int num_workers;
    struct worker *workers;
    _Atomic int present __attribute__((aligned(64))); /* all calls before this one are done */
    /* For each share, `done` is 1 + the last call for which the share is done, and `redone` is 1 + the last
     * call for which a waiting thread has begun to do it again. */
    _Atomic int done[MAX_SHARES] __attribute__((aligned(64)));
    _Atomic int redone[MAX_SHARES];
};

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

/* Gives up the core for a while, so that the late thread can have it. */
static void rest(void)
{
    nanosleep(&(struct timespec){.tv_nsec = REST_NS}, NULL);
}

/* The first call after `call` that does not join it. */
static int next_call(const struct program *program, int call)
{
    do call++;
    while (call < program->num_calls && program->calls[call].joins);
    return call;
}

/* Takes a share of the part of worker `owner`: from the front if the part is the caller's own, or else
 * from the end. */
static int take(struct run *run, int call, int num_shares, int owner, int num_parts, bool is_own)
{
    const uint64_t name = (uint64_t)call + 1;
    uint64_t left = atomic_load(&run->workers[owner].left), first, end, others;
    do {
        if (left >> 32 > name) return NO_SHARE; /* the whole call is done already */
        if (left >> 32 == name) {
            first = left >> 16 & 0xffff, end = left & 0xffff;
        } else {
            first = share_start(num_shares, owner, num_parts);
            end = share_start(num_shares, owner + 1, num_parts);
        }
        if (first == end) return NO_SHARE;
        others = name << 32 | (first + is_own) << 16 | (end - !is_own);
    } while (!atomic_compare_exchange_weak(&run->workers[owner].left, &left, others));
    return (int)(is_own ? first : end - 1);
}

/* Does a share, perhaps as the second thread to do it. Returns how many nanoseconds it took. */
static int64_t do_share(struct run *run, int call, int share, int num_shares)
{
    const struct program *program = run->program;
    int64_t began = now_ns();
    for (int i = call, end = next_call(program, call); i < end; i++)
        program->calls[i].share(program->calls[i].args, share, num_shares);
    int done = atomic_load(&run->done[share]);
    while (done <= call && !atomic_compare_exchange_weak(&run->done[share], &done, call + 1)) {}
    return now_ns() - began;
}

/* Waits until a share is done, but no longer than `patience_ns`. Returns whether it is done. */
static bool is_done_within(struct run *run, int call, int share, int64_t patience_ns)
{
    if (atomic_load(&run->done[share]) > call) return true;
    for (int64_t began = now_ns(); now_ns() - began < patience_ns;)
        for (int spin = 0; spin < SPINS_PER_LOOK; spin++) {
            if (atomic_load(&run->done[share]) > call) return true;
#ifdef __x86_64__
            __builtin_ia32_pause();
#endif
        }
    return false;
}

/* Waits until a share is done; if this takes too long, does the share. Of several waiting threads, the
 * first does the share. The others would take memory bandwidth from the first, so they wait longer
 * (FAR_TOO_LONG) before they do the share, too. */
static void await(struct run *run, int call, int share, int num_shares, int64_t patience_ns)
{
    if (is_done_within(run, call, share, patience_ns)) return;
    int redone = atomic_load(&run->redone[share]);
    bool is_first = redone <= call &&
                    atomic_compare_exchange_strong(&run->redone[share], &redone, call + 1);
    if (!is_first && is_done_within(run, call, share, FAR_TOO_LONG * patience_ns)) return;
    do_share(run, call, share, num_shares);
}

/* Works until a call, and the calls that join it, are done. `patience_ns` is how long to wait for another
 * worker's share: twice as long as the last own share took. */
static void work_on(struct run *run, int call, int worker, int64_t *patience_ns)
{
    const struct call *first = run->program->calls + call;
    int num_shares = (int)first->count(first->args);
    int num_parts = num_shares < run->num_workers ? num_shares : run->num_workers;
    int64_t took_ns = 0;
    for (int i = 0, share; i < num_parts; i++) {
        int owner = (worker + i) % num_parts;
        while ((share = take(run, call, num_shares, owner, num_parts, owner == worker)) != NO_SHARE)
            took_ns = do_share(run, call, share, num_shares);
    }
    if (took_ns) *patience_ns = 2 * took_ns > MIN_PATIENCE_NS ? 2 * took_ns : MIN_PATIENCE_NS;
    for (int share = 0; share < num_shares; share++)
        await(run, call, share, num_shares, *patience_ns);
}

static void work(struct run *run, int worker)
{
    const struct program *program = run->program;
    int64_t patience_ns = MIN_PATIENCE_NS;
    _Atomic int *place = &run->workers[worker].place;
    for (int call; (call = atomic_load(&run->present)) < program->num_calls;) {
        /* The place is stored before a share is taken, so that no thread goes on to a call that reuses
         * the memory of this call. */
        atomic_store(place, call);
        int next = next_call(program, call);
        /* This thread may do all calls before `next`, so even the last of them must be less than
         * `num_apart` calls ahead of each late thread. */
        for (int i = 0; i < run->num_workers && program->num_apart < next; i++)
            while (atomic_load(&run->workers[i].place) < next - program->num_apart) rest();
        work_on(run, call, worker, &patience_ns);
        while (call < next && !atomic_compare_exchange_weak(&run->present, &call, next)) {}
    }
    atomic_store(place, NOWHERE);
}

void quire_run(const struct program *program)
{
    int num_workers = omp_get_max_threads();
    if (num_workers == 1 ||
        (program->num_calls == 1 && program->calls->count(program->calls->args) == 1)) {
        for (int i = 0; i < program->num_calls; i++)
            program->calls[i].share(program->calls[i].args, 0, 1);
        return;
    }
    struct worker workers[num_workers];
    for (int i = 0; i < num_workers; i++) {
        atomic_init(&workers[i].left, 0);
        atomic_init(&workers[i].place, NOWHERE);
    }
    struct run run = {program, num_workers, workers, 0, {0}, {0}};
#pragma omp parallel num_threads(num_workers)
    {
        pin_worker(omp_get_thread_num(), num_workers);
        work(&run, omp_get_thread_num());
    }
    unpin_caller();
}
