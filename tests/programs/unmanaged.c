/* Memory of the kinds that a memory manager may leave alone, each MIB large, every
 * byte checked at the end:
 *
 *   unmanaged shared MIB    of a memory file, mapped by two processes
 *   unmanaged nameless MIB  shared without a file, mapped by two processes
 *   unmanaged private MIB   an executable mapping, and a private one of a memory file
 *
 * Gate "ready" when all of it is there. */
#include "../lib/t.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static char *map(size_t bytes, int protection, int flags, int file)
{
    char *memory = mmap(NULL, bytes, protection, flags, file, 0);
    T_ASSERT(memory != MAP_FAILED, "%s", t_error());
    return memory;
}

static int memory_file(size_t bytes)
{
    int file = T_SYS(memfd_create("unmanaged", 0));
    T_SYS(ftruncate(file, (off_t)bytes));
    return file;
}

int main(int count, char **arguments)
{
    t_start();
    T_ASSERT(count == 3, "unmanaged shared|nameless|private MIB");
    const char *kind = arguments[1];
    size_t bytes = strtoul(arguments[2], NULL, 10) * MIB;
    int both = PROT_READ | PROT_WRITE;
    if (strcmp(kind, "private") == 0) {
        char *code = map(bytes, both | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1);
        char *file = map(bytes, both, MAP_PRIVATE, memory_file(bytes));
        t_fill(code, bytes, 1);
        t_fill(file, bytes, 2);
        t_gate("ready");
        t_check(code, bytes, 1);
        t_check(file, bytes, 2);
        t_done();
    }
    bool named = strcmp(kind, "shared") == 0;
    char *memory = map(bytes, both, MAP_SHARED | (named ? 0 : MAP_ANONYMOUS),
                       named ? memory_file(bytes) : -1);
    t_fill(memory, bytes, 3);
    int ends[2];
    T_SYS(pipe(ends));
    int child = T_SYS(fork());
    if (child == 0) {
        t_check(memory, bytes, 3);
        char word;
        close(ends[1]);
        T_ASSERT(read(ends[0], &word, 1) == 0, "%s", t_error());
        _exit(0);
    }
    t_gate("ready");
    t_check(memory, bytes, 3);
    close(ends[1]);
    t_wait_child(child);
    t_done();
}
