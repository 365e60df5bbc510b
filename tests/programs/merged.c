/* Memory that the kernel may merge with that of an equal program (KSM). Round after round
 * it looks at every byte; told to, it writes to every second page, which is its own again
 * then. */
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "../lib/t.h"

#ifndef PR_SET_MEMORY_MERGE
#define PR_SET_MEMORY_MERGE 67
#endif

enum { EQUAL_SEED = 7 };

int main(void) {
    t_start();
    if (prctl(PR_SET_MEMORY_MERGE, 1, 0, 0, 0) != 0) {
        t_gate("skip this kernel merges no program's pages (PR_SET_MEMORY_MERGE)");
        return 0;
    }
    size_t bytes = 64 * MIB;
    char *memory = t_map(bytes);
    t_fill(memory, bytes, EQUAL_SEED);
    uint64_t own_seed = EQUAL_SEED;
    for (;;) {
        for (size_t page = 0; page < bytes / PAGE; page++)
            t_check_page(memory + page * PAGE, page % 2 ? own_seed : EQUAL_SEED, page);
        const char *told = t_gate("round");
        if (strcmp(told, "end") == 0)
            break;
        if (strcmp(told, "write") == 0) {
            own_seed = 1000 + (uint64_t)getpid();
            for (size_t page = 1; page < bytes / PAGE; page += 2)
                t_fill_page(memory + page * PAGE, own_seed, page);
        }
    }
    t_done();
}
