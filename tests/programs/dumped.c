/* A program with known variables of every kind of memory, and threads that stand in
 * functions of known names: what a core file of it must show.
 *
 *   dumped BOARD MODE [SIZE_MIB [FILE]]
 *
 * Variables and page contents carry the number of the moment: 1, and one more after
 * each order (`write`). Everything is as the board says in tests/lib/moment.py. */
#include "../lib/t.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct board {
    atomic_uint epoch, reports;
    atomic_ulong count, resumed_at;
    atomic_uint order, done, ready;
};

#define THREADS 3
/* Two pages of it are mapped; only the second one is written to. */
#define FILE_WORDS (2 * PAGE / sizeof(unsigned long))

static struct board *board;
unsigned long in_data = 0x5eed0001;
unsigned long in_bss;
const char in_text[] = "constant";
_Thread_local volatile unsigned long in_thread;
unsigned long *on_heap, *in_pages, *shared_words, *memory_file_words, *file_words;
unsigned long untouched_pages;
static size_t words;
static atomic_uint standing;

/* Stays in the kernel, with a known number in a register that no frame saves. */
static __attribute__((noinline)) void stand_still(unsigned long number)
{
    for (;;) {
        long answer = SYS_pause;
        __asm__ volatile("movq %1, %%xmm15\n\tsyscall"
                         : "+a"(answer)
                         : "r"(number)
                         : "rcx", "r11", "memory", "xmm15");
    }
}

#define THREAD(name, number)                                                            \
    static __attribute__((noinline)) void *name(void *unused)                           \
    {                                                                                   \
        (void)unused;                                                                   \
        in_thread = 0x7000 + number;                                                    \
        atomic_fetch_add(&standing, 1);                                                 \
        stand_still(0xf000 + number);                                                   \
        return NULL;                                                                    \
    }
THREAD(alpha_stands, 1)
THREAD(beta_stands, 2)
THREAD(gamma_stands, 3)

static void set_all(unsigned long moment)
{
    in_data = 0x5eed0000 + moment;
    in_bss = 0xb550000 + moment;
    *on_heap = 0x4ea90000 + moment;
    *shared_words = 0x54a60000 + moment;
    *memory_file_words = 0x3e3f0000 + moment;
    file_words[FILE_WORDS / 2] = 0xf11e0000 + moment;
    for (size_t i = 0; i < words; i++)
        in_pages[i] = moment << 32 | i;
}

static __attribute__((noinline)) void serve(void)
{
    unsigned long moment = 1;
    for (;;) {
        nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
        atomic_fetch_add(&board->count, 1);
        unsigned order = atomic_load(&board->order);
        if (order == 0 || order == atomic_load(&board->done))
            continue;
        set_all(++moment);
        atomic_store(&board->done, order);
    }
}

static void map_file(const char *path)
{
    int fd = T_SYS(open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    unsigned long content[FILE_WORDS];
    for (size_t i = 0; i < FILE_WORDS; i++)
        content[i] = 0xd15c0000 + i;
    T_ASSERT(write(fd, content, sizeof content) == sizeof content, "%s", t_error());
    file_words = T_SYS(mmap(NULL, sizeof content, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0));
    T_SYS(close(fd));
}

int main(int argc, char **argv)
{
    t_start();
    T_ASSERT(argc == 5, "usage: dumped BOARD MODE SIZE_MIB FILE");
    int fd = T_SYS(open(argv[1], O_RDWR | O_CLOEXEC));
    board = T_SYS(mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    T_SYS(close(fd));
    size_t bytes = strtoul(argv[3], NULL, 10) * MIB;
    words = bytes / sizeof(unsigned long);
    in_pages = t_map(bytes);
    untouched_pages = (unsigned long)t_map(64 * MIB);
    on_heap = malloc(sizeof *on_heap);
    shared_words = T_SYS(mmap(NULL, 3 * PAGE, PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    shared_words += PAGE / sizeof *shared_words;
    int memory = T_SYS(memfd_create("dumped", MFD_CLOEXEC));
    T_SYS(ftruncate(memory, 4 * PAGE));
    memory_file_words =
        T_SYS(mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 2 * PAGE));
    map_file(argv[4]);
    set_all(1);
    pthread_t threads[THREADS];
    void *(*bodies[THREADS])(void *) = {alpha_stands, beta_stands, gamma_stands};
    for (int t = 0; t < THREADS; t++)
        T_ASSERT(pthread_create(&threads[t], NULL, bodies[t], NULL) == 0, "no thread");
    while (atomic_load(&standing) < THREADS)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    t_ballast(bytes);
    t_wait_absent(in_pages, bytes, 50);
    atomic_store(&board->ready, 1);
    serve();
}
