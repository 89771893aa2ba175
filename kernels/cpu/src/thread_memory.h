/* Scratch memory of each thread, kept from one share to the next.
 *
 * If the memory were freed, it would be allocated again as new pages, each of which costs a microsecond. */
#ifndef QUIRE_THREAD_MEMORY_H
#define QUIRE_THREAD_MEMORY_H

#include <stdint.h>
#include <stdlib.h>

/* Returns at least `bytes` bytes, aligned to a cache line; the thread's earlier contents are lost. The memory
 * is never freed, because the threads of a pool live as long as the process. */
static char *thread_memory(int64_t bytes)
{
    static _Thread_local char *memory;
    static _Thread_local int64_t size;
    if (size < bytes) {
        free(memory);
        size = (bytes + 4095) / 4096 * 4096;
        memory = aligned_alloc(64, size);
    }
    return memory;
}

#endif
