/* Moves and resizes memory of which the advisor watches parts, so that the kernel has
 * many mappings where the program made one: mremap takes only one at a time. */
#include "../lib/t.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define BYTES (48 * MIB)

static unsigned mappings_of(const char *start, size_t bytes)
{
    char line[512];
    unsigned count = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    T_ASSERT(maps, "no memory map");
    while (fgets(line, sizeof line, maps)) {
        unsigned long from, to;
        if (sscanf(line, "%lx-%lx", &from, &to) == 2 && from < (unsigned long)start + bytes &&
            to > (unsigned long)start)
            count++;
    }
    fclose(maps);
    return count;
}

int main(void)
{
    t_start();
    char *grown = t_map(BYTES), *moved = t_map(BYTES), *shrunk = t_map(BYTES);
    char *place = T_SYS(mmap(NULL, BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    t_fill(grown, BYTES, 1);
    t_fill(moved, BYTES, 2);
    t_fill(shrunk, BYTES, 3);
    t_gate("ready");
    T_ASSERT(mappings_of(grown, BYTES) > 8, "nothing of it is watched");
    T_ASSERT(mappings_of(moved, BYTES) > 8, "nothing of it is watched");

    grown = T_SYS(mremap(grown, BYTES, 2 * BYTES, MREMAP_MAYMOVE));
    t_check(grown, BYTES, 1);
    t_check_zero(grown + BYTES, BYTES);
    T_ASSERT(T_SYS(mremap(moved, BYTES, BYTES, MREMAP_MAYMOVE | MREMAP_FIXED, place)) == place,
             "moved elsewhere");
    t_check(place, BYTES, 2);
    T_ASSERT(T_SYS(mremap(shrunk, BYTES, BYTES / 2, 0)) == shrunk, "moved");
    t_check(shrunk, BYTES / 2, 3);
    /* What is not mapped is refused as ever. */
    T_ASSERT(mremap(moved, BYTES, 2 * BYTES, MREMAP_MAYMOVE) == MAP_FAILED, "of a hole");

    t_gate("moved");
    t_check(grown, BYTES, 1);
    t_check_zero(grown + BYTES, BYTES);
    t_check(place, BYTES, 2);
    t_check(shrunk, BYTES / 2, 3);
    t_done();
}
