/* A program as a client sees it: it looks at a page every so many milliseconds, any page of
 * its memory, and notes the longest time between two looks beyond those. Every byte is checked.
 *
 *   pauses BOARD SIZE_MIB REST_MS
 *
 * BOARD is a file that runner and program map shared. At gate "running" the answer ends it. */
#include "../lib/t.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* The layout is known to tests/cases/takeover_times.py. */
struct board {
    atomic_ulong looks;      /* so many there were */
    atomic_ulong longest_ns; /* between two of them, less the rest, since the runner set it to 0 */
};

static struct board *board;
static char *memory;
static size_t pages;
static uint64_t rest_ns;
static atomic_bool stop;

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static void *look(void *unused)
{
    uint64_t random = (uint64_t)getpid() << 32, last = now_ns();
    while (!atomic_load(&stop)) {
        size_t i = t_next(&random) % pages;
        t_check_page(memory + i * PAGE, 1, i);
        uint64_t now = now_ns();
        if (now - last > atomic_load(&board->longest_ns) + rest_ns)
            atomic_store(&board->longest_ns, now - last - rest_ns);
        last = now;
        atomic_fetch_add(&board->looks, 1);
        nanosleep(&(struct timespec){.tv_nsec = (long)rest_ns}, NULL);
    }
    return unused;
}

int main(int argc, char **argv)
{
    t_start();
    T_ASSERT(argc == 4, "which board, how many MiB, and how long between two looks?");
    rest_ns = strtoul(argv[3], NULL, 10) * 1000000;
    int fd = T_SYS(open(argv[1], O_RDWR | O_CLOEXEC));
    board = T_SYS(mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    close(fd);
    pages = strtoul(argv[2], NULL, 10) * (MIB / PAGE);
    memory = t_map(pages * PAGE);
    t_fill(memory, pages * PAGE, 1);
    pthread_t looker;
    T_ASSERT((errno = pthread_create(&looker, NULL, look, NULL)) == 0, "%s", t_error());
    t_gate("running");
    atomic_store(&stop, true);
    pthread_join(looker, NULL);
    t_check(memory, pages * PAGE, 1);
    t_done();
}
