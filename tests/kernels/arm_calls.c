/* Calls kernels of a library for the process that started it: reads calls on standard input, and
 * answers on standard output (tests/kernels/on_arm.py).
 *
 * A call is the function's name in 64 bytes, then the number of words of its structure and the words,
 * then the number of pieces of memory, and for each its address in the caller, its bytes, and their
 * content. Words that are addresses in these pieces are replaced by ours. The answer is the content of
 * all pieces. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_WORDS = 256, MAX_PIECES = 64, ALIGN = 4096 };

struct piece {
    int64_t address, bytes;
    char *memory;
};

static void take(void *to, size_t bytes)
{
    if (fread(to, 1, bytes, stdin) != bytes) exit(2);
}

static int64_t take_number(int64_t most)
{
    int64_t number;
    take(&number, sizeof number);
    if (number < 0 || number > most) exit(3);
    return number;
}

/* Memory that lies on cache lines as the caller's does; what lies behind it is not zero. */
static char *memory_like(int64_t address, int64_t bytes)
{
    const int64_t before = address % ALIGN, all = (before + bytes + ALIGN) / ALIGN * ALIGN;
    char *memory = aligned_alloc(ALIGN, all);
    memset(memory, 0x7f, all);
    return memory + before;
}

int main(int argc, char **argv)
{
    void *library = argc == 2 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    for (char name[64]; fread(name, 1, sizeof name, stdin) == sizeof name;) {
        int64_t words[MAX_WORDS];
        const int64_t num_words = take_number(MAX_WORDS);
        take(words, num_words * sizeof *words);
        struct piece pieces[MAX_PIECES];
        const int64_t num_pieces = take_number(MAX_PIECES);
        for (struct piece *p = pieces; p < pieces + num_pieces; p++) {
            p->address = take_number(INT64_MAX);
            p->bytes = take_number(INT64_MAX);
            p->memory = memory_like(p->address, p->bytes);
            take(p->memory, p->bytes);
        }
        for (int64_t *word = words; word < words + num_words; word++)
            for (struct piece *p = pieces; p < pieces + num_pieces; p++)
                if (*word >= p->address && *word < p->address + p->bytes) {
                    *word = (int64_t)(intptr_t)p->memory + (*word - p->address);
                    break;
                }
        void (*function)(const void *) = (void (*)(const void *))dlsym(library, name);
        if (!function) return 4;
        function(words);
        for (struct piece *p = pieces; p < pieces + num_pieces; p++) {
            fwrite(p->memory, 1, p->bytes, stdout);
            free(p->memory - p->address % ALIGN);
        }
        fflush(stdout);
    }
    return 0;
}
