/* Very many small mappings: what an allocator has that puts a guard between any two
 * of its blocks. They must be able to leave, and come back as they were. */
#include "../lib/t.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define TOTAL (48 * MIB)

static char *block(size_t bytes)
{
    char *start = T_SYS(mmap(NULL, bytes + PAGE, PROT_NONE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    T_SYS(mprotect(start + PAGE, bytes, PROT_READ | PROT_WRITE));
    return start + PAGE;
}

static void wait_absent(char **blocks, size_t count, size_t bytes)
{
    for (size_t absent = 0; !t_native() && absent < TOTAL / PAGE / 2;) {
        absent = 0;
        for (size_t i = 0; i < count; i++)
            absent += t_absent(blocks[i], bytes);
        t_press();
    }
}

int main(int argc, char **argv)
{
    t_start();
    T_ASSERT(argc == 2, "how many pages a block?");
    size_t bytes = strtoul(argv[1], NULL, 10) * PAGE;
    size_t count = TOTAL / bytes;
    char **blocks = T_SYS(mmap(NULL, count * sizeof *blocks, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    t_ballast(8 * MIB);
    for (size_t i = 0; i < count; i++)
        t_fill(blocks[i] = block(bytes), bytes, i);
    for (unsigned round = 0; round < 2; round++) {
        wait_absent(blocks, count, bytes);
        for (size_t i = round; i < count; i++)
            t_check(blocks[i], bytes, i);
    }
    /* Half of them go, others come in their places. */
    for (size_t i = 0; i < count; i += 2)
        T_SYS(munmap(blocks[i] - PAGE, bytes + PAGE));
    for (size_t i = 0; i < count; i += 2)
        t_fill(blocks[i] = block(bytes), bytes, count + i);
    wait_absent(blocks, count, bytes);
    for (size_t i = 0; i < count; i++)
        t_check(blocks[i], bytes, i % 2 ? i : count + i);
    t_done();
}
