/* A program as databases and runtimes are: of eight TiB that it reserves it uses
 * the beginning, here and there.
 *
 *   reserve SIZE_MIB      fills, gate "ready"; then reads and checks until the next
 *                         gate's answer, "map"; with so many more mappings as a
 *                         process has when it has many, gate "mapped", and ends */
#include "../lib/t.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

#define RESERVED (8ul << 40)
#define MAPPINGS 20000

static char *memory;
static size_t pages;
static atomic_bool stop;

/* Every second page of the first third, every one of the rest. */
static char *page(size_t i) { return memory + (i < pages / 3 ? 2 * i : i + pages / 3) * PAGE; }

static void *read_all(void *unused)
{
    uint64_t random = 1;
    while (!atomic_load(&stop)) {
        size_t i = t_next(&random) % pages;
        t_check_page(page(i), 1, i);
    }
    return unused;
}

int main(int argc, char **argv)
{
    t_start();
    T_ASSERT(argc == 2, "how many MiB?");
    pages = strtoul(argv[1], NULL, 10) * (MIB / PAGE);
    memory = mmap(NULL, RESERVED, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    T_ASSERT(memory != MAP_FAILED, "%s", t_error());
    for (size_t i = 0; i < pages; i++)
        t_fill_page(page(i), 1, i);
    pthread_t reader;
    T_ASSERT(pthread_create(&reader, NULL, read_all, NULL) == 0, "no thread");
    t_gate("ready");
    char *many = t_map(2 * MAPPINGS * PAGE);
    for (size_t i = 0; i < MAPPINGS; i++)
        T_SYS(mprotect(many + 2 * i * PAGE, PAGE, PROT_NONE));
    t_gate("mapped");
    atomic_store(&stop, true);
    pthread_join(reader, NULL);
    for (size_t i = 0; i < pages; i++)
        t_check_page(page(i), 1, i);
    t_done();
}
