/* Runs the calls of a program in one parallel region, and waits for no thread that lost its core.
 *
 * Waking a sleeping thread takes as long as a small kernel; a decode step of one token has more than
 * a hundred. And other processes take a core for hundreds of microseconds, as long as a layer takes.
 * So no worker has a part of its own. It takes the next share of the present call that nobody has,
 * and, when all are taken but some take longer than they should, does these again. Whoever had them
 * will write once more what is there, and go on with the call that is the present one by then. */
#include <limits.h>
#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>

#include "threads.h"

enum {
    MIN_PATIENCE_NS = 10000,
    SPINS_PER_LOOK = 16, /* at the clock */
    NOWHERE = INT_MAX,
};

/* What a worker may be writing to: nothing of a call before this one. */
struct place {
    _Atomic int call; /* NOWHERE: it computes nothing */
} __attribute__((aligned(64)));

struct run {
    const struct program *program;
    int num_workers;
    struct place *places; /* of each worker */
    /* The present call << 32 | its number of shares << 16 | how often one was asked for. */
    _Atomic uint64_t ticket __attribute__((aligned(64)));
    _Atomic int num_done __attribute__((aligned(64))); /* shares of the present call */
    _Atomic int done[MAX_SHARES]; /* 1 + the last call of which this share is done */
};

struct piece {
    int call, share, num_shares; /* there is none if `share` is not below `num_shares` */
};

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

/* The first call that does not join `call`. */
static int next_call(const struct program *program, int call)
{
    do call++;
    while (call < program->num_calls && program->calls[call].joins);
    return call;
}

static void compute(const struct program *program, struct piece p)
{
    for (int i = p.call, end = next_call(program, i); i < end; i++)
        program->calls[i].share(program->calls[i].args, p.share, p.num_shares);
}

/* Makes `call` the present one; its first share is the caller's. */
static struct piece begin(struct run *run, int call, struct place *own)
{
    const struct program *program = run->program;
    struct piece first = {.call = call};
    atomic_store(&own->call, call);
    if (call < program->num_calls) {
        for (int i = 0; i < run->num_workers; i++) /* who is so late that it may still be reading */
            while (atomic_load(&run->places[i].call) <= call - program->num_apart) sched_yield();
        first.num_shares = (int)program->calls[call].count(program->calls[call].args);
    }
    atomic_store(&run->num_done, 0);
    atomic_store(&run->ticket, (uint64_t)call << 32 | (uint64_t)first.num_shares << 16 | 1);
    return first;
}

/* Asks for a share of the present call. */
static struct piece take(struct run *run, struct place *own)
{
    /* Said before it is asked: the share will be one of this call, or of a later one. */
    atomic_store(&own->call, (int)(atomic_load(&run->ticket) >> 32));
    uint64_t ticket = atomic_fetch_add(&run->ticket, 1);
    return (struct piece){ticket >> 32, ticket & 0xffff, ticket >> 16 & 0xffff};
}

/* Does a share, perhaps not as the only one; whether it was the last that was missing. */
static bool do_share(struct run *run, struct piece p)
{
    compute(run->program, p);
    int done = atomic_load(&run->done[p.share]);
    while (done <= p.call)
        if (atomic_compare_exchange_weak(&run->done[p.share], &done, p.call + 1))
            return atomic_fetch_add(&run->num_done, 1) + 1 == p.num_shares;
    return false;
}

static bool is_over(struct run *run, int call)
{
    return (int)(atomic_load(&run->ticket) >> 32) != call;
}

/* Waits for the end of a call all of whose shares are taken; helps those who take too long. Whether
 * it did the last that was missing. */
static bool wait_or_help(struct run *run, struct piece p, int64_t patience_ns)
{
    for (int64_t began = now_ns(); now_ns() - began < patience_ns;)
        for (int spin = 0; spin < SPINS_PER_LOOK; spin++) {
            if (is_over(run, p.call)) return false;
#ifdef __x86_64__
            __builtin_ia32_pause();
#endif
        }
    for (p.share = 0; p.share < p.num_shares; p.share++)
        if (atomic_load(&run->done[p.share]) <= p.call && do_share(run, p)) return true;
    while (!is_over(run, p.call)) sched_yield(); /* somebody is at beginning the next one */
    return false;
}

static void work(struct run *run, struct place *own)
{
    const struct program *program = run->program;
    int64_t patience_ns = MIN_PATIENCE_NS;
    for (;;) {
        struct piece p = take(run, own);
        if (p.call >= program->num_calls) break;
        bool is_last;
        if (p.share < p.num_shares) {
            int64_t began = now_ns();
            is_last = do_share(run, p);
            int64_t twice_ns = 2 * (now_ns() - began);
            patience_ns = twice_ns > MIN_PATIENCE_NS ? twice_ns : MIN_PATIENCE_NS;
        } else {
            is_last = wait_or_help(run, p, patience_ns);
        }
        while (is_last) {
            p = begin(run, next_call(program, p.call), own);
            is_last = p.num_shares > 0 && do_share(run, p);
        }
    }
    atomic_store(&own->call, NOWHERE);
}

void quire_run(const struct program *program)
{
    int num_workers = omp_get_max_threads();
    int64_t num_shares = program->calls->count(program->calls->args);
    if (num_workers == 1 || (program->num_calls == 1 && num_shares == 1)) {
        for (int i = 0; i < program->num_calls; i++)
            program->calls[i].share(program->calls[i].args, 0, 1);
        return;
    }
    struct place places[num_workers];
    for (int i = 0; i < num_workers; i++) atomic_init(&places[i].call, NOWHERE);
    struct run run = {program, num_workers, places, (uint64_t)num_shares << 16, 0, {0}};
#pragma omp parallel num_threads(num_workers)
    work(&run, places + omp_get_thread_num());
}
