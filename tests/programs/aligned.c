/* Waits with a stack pointer that ends in three zeroes (lib/aligned.h), and checks.
 *
 *   aligned MIB     says "round N" after each round, and never ends */
#include "../lib/aligned.h"
#include "../lib/t.h"

#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
    t_start();
    T_ASSERT(argc == 2, "how many MiB?");
    size_t bytes = strtoul(argv[1], NULL, 10) * MIB;
    char *memory = t_map(bytes);
    t_fill(memory, bytes, 9);
    uint64_t random = 1;
    for (unsigned long round = 1;; round++) {
        wait_aligned(0, 5000000);
        for (unsigned i = 0; i < 64; i++) {
            size_t page = t_next(&random) % (bytes / PAGE);
            t_check_page(memory + page * PAGE, 9, page);
        }
        printf("round %lu\n", round);
        fflush(stdout);
    }
}
