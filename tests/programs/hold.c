/* A program with memory to care for, driven by the runner through the gate: it
 * fills, works on command and checks every byte at the end. Used where the case
 * is about the tenant (budgets, release, death of the daemon), not about what
 * the program calls.
 *
 *   hold SIZE_MIB         after the fill, gate "ready"; answers:
 *     check               reads and checks everything, then "ready" again
 *     write               writes a quarter anew, then "ready" again
 *     quarter N           from now on a thread reads and checks the quarter N (0 to 3)
 *                         over and over, then "ready" again
 *     quiet               no more, then "ready" again
 *     end                 checks everything and ends
 *   hold SIZE_MIB huge    the same in huge pages, as far as the kernel gives them
 *   hold SIZE_MIB load    two threads read, check and write until the gate
 *                         "running" is answered, then everything is checked
 *   hold SIZE_MIB forever as load, never ends
 *   hold SIZE_MIB short   fills, checks, ends: one of hundreds of tenants */
#include "../lib/t.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char *memory;
static size_t pages;
static unsigned char *version;
static atomic_bool stop;

static void check_page(size_t i) { t_check_page(memory + i * PAGE, 1 + version[i], i); }

static void write_page(size_t i)
{
    version[i]++;
    t_fill_page(memory + i * PAGE, 1 + version[i], i);
}

static void check_all(void)
{
    for (size_t i = 0; i < pages; i++)
        check_page(i);
}

static void *work(void *thread)
{
    uint64_t random = (uintptr_t)thread << 40;
    while (!atomic_load(&stop)) {
        size_t i = t_next(&random) % (pages / 2) * 2 + (uintptr_t)thread;
        check_page(i);
        if (random % 4 == 0)
            write_page(i);
    }
    return NULL;
}

static void *read_quarter(void *quarter)
{
    size_t first = pages / 4 * (uintptr_t)quarter;
    while (!atomic_load(&stop))
        for (size_t i = 0; i < pages / 4 && !atomic_load(&stop); i++)
            check_page(first + i);
    return NULL;
}

int main(int argc, char **argv)
{
    t_start();
    T_ASSERT(argc >= 2, "how many MiB?");
    const char *mode = argc > 2 ? argv[2] : "";
    pages = strtoul(argv[1], NULL, 10) * (MIB / PAGE);
    version = t_map(pages / PAGE * PAGE + PAGE);
    bool huge = !strcmp(mode, "huge");
    memory = huge ? t_map_huge(pages * PAGE) : t_map(pages * PAGE);
    t_fill(memory, pages * PAGE, 1);
    if (!strcmp(mode, "short")) {
        check_all();
        return 0;
    }
    if (*mode && !huge) {
        pthread_t threads[2];
        for (uintptr_t t = 0; t < 2; t++)
            T_ASSERT((errno = pthread_create(&threads[t], NULL, work, (void *)t)) == 0, "%s",
                     t_error());
        t_gate("running");
        while (!strcmp(mode, "forever"))
            pause();
        atomic_store(&stop, true);
        for (int t = 0; t < 2; t++)
            pthread_join(threads[t], NULL);
        check_all();
        t_done();
    }
    pthread_t reader;
    for (;;) {
        const char *answer = t_gate("ready");
        if (!strcmp(answer, "check"))
            check_all();
        else if (!strncmp(answer, "quarter ", 8)) {
            void *quarter = (void *)strtoul(answer + 8, NULL, 10);
            T_ASSERT((errno = pthread_create(&reader, NULL, read_quarter, quarter)) == 0, "%s",
                     t_error());
        } else if (!strcmp(answer, "quiet")) {
            atomic_store(&stop, true);
            pthread_join(reader, NULL);
            atomic_store(&stop, false);
        } else if (!strcmp(answer, "write")) {
            for (size_t i = 0; i < pages; i += 4)
                write_page(i);
        } else {
            break;
        }
    }
    check_all();
    t_done();
}
