/* Has SIZE_MIB of memory and does nothing. */
#include "../lib/t.h"

#include <stdlib.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    T_ASSERT(argc == 2, "how many MiB?");
    size_t bytes = strtoul(argv[1], NULL, 10) * MIB;
    t_fill(t_map(bytes), bytes, 1);
    for (;;)
        pause();
}
