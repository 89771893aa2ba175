/* Memory of a thread's own, to work in: kept from one share to the next.
 *
 * Given back, it would come as new pages the next time, each of which costs a microsecond. */
#ifndef QUIRE_THREAD_MEMORY_H
#define QUIRE_THREAD_MEMORY_H

#include <stdint.h>
#include <stdlib.h>

/* At least so many bytes, at a line's start; what was given to this thread before is gone. A thread
 * of a pool lives as long as the process, so nobody frees it. */
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
