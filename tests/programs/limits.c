/* What the kernel cannot do with an evicted page. Each case shows one limit of
 * docs/limits.md: without Strata the operation works, with it and on an evicted
 * page it does not. A limit that is gone fails its case, so that the page is
 * kept true. (The futex limits are in futex.c.) */
#include "../lib/t.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define BYTES (48 * MIB)
#define PAGES (BYTES / PAGE)

static char *memory;

/* What a debugger reads through. */
static void proc_mem(void)
{
    int fd = T_SYS(open("/proc/self/mem", O_RDONLY));
    size_t refused = 0;
    for (size_t i = 0; i < PAGES; i += 7) {
        char page[PAGE];
        ssize_t got = pread(fd, page, PAGE, (off_t)(uintptr_t)(memory + i * PAGE));
        if (got == (ssize_t)PAGE) {
            t_check_page(page, 1, i);
        } else {
            T_ASSERT(errno == EIO, "%s", t_error());
            refused++;
        }
    }
    T_ASSERT(t_native() ? refused == 0 : refused > 0, "%zu reads refused", refused);
    t_check(memory, BYTES, 1);
}

/* A program that wants a userfaultfd of its own on memory that Strata has. */
static void own_userfaultfd(void)
{
    int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        t_gate("skip userfaultfd(2) is not allowed here");
        _exit(0);
    }
    struct uffdio_api api = {.api = UFFD_API};
    T_SYS(ioctl(fd, UFFDIO_API, &api));
    struct uffdio_register range = {.range = {(uintptr_t)memory, BYTES},
                                    .mode = UFFDIO_REGISTER_MODE_MISSING};
    int result = ioctl(fd, UFFDIO_REGISTER, &range);
    if (t_native())
        T_ASSERT(result == 0, "%s", t_error());
    else
        T_ASSERT(result == -1 && errno == EBUSY, "%d, %s", result, t_error());
    close(fd);
    t_check(memory, BYTES, 1);
}

static atomic_int leaving;

static void *leave(void *word)
{
    syscall(SYS_set_tid_address, word);
    atomic_store(&leaving, gettid());
    syscall(SYS_exit, 0);
    return NULL;
}

/* The word that the kernel clears when a thread ends (the C library's own are
 * never evicted; this program chose another). */
static void clear_tid(void)
{
    char *page = t_next_absent(memory, BYTES, memory);
    T_ASSERT(page, "no page is out");
    size_t index = (size_t)(page - memory) / PAGE;
    pthread_t thread;
    T_ASSERT((errno = pthread_create(&thread, NULL, leave, page)) == 0, "%s", t_error());
    pthread_detach(thread);
    char path[64];
    struct stat status;
    while (atomic_load(&leaving) == 0)
        sched_yield();
    snprintf(path, sizeof path, "/proc/self/task/%d", atomic_load(&leaving));
    while (stat(path, &status) == 0)
        sched_yield();
    if (t_native())
        T_ASSERT(*(int *)page == 0, "not cleared");
    else
        t_check_page(page, 1, index); /* if not: the limit is gone, change docs/limits.md */
}

/* Dies; the runner looks for evicted pages in what was dumped. */
static void core_dump(void)
{
    struct rlimit limit = {RLIM_INFINITY, RLIM_INFINITY};
    if (setrlimit(RLIMIT_CORE, &limit) != 0) {
        t_gate("skip no core may be dumped");
        _exit(0);
    }
    char line[64];
    snprintf(line, sizeof line, "at %p", (void *)memory);
    t_gate(line);
    abort();
}

int main(int argc, char **argv)
{
    t_start();
    T_ASSERT(argc > 1, "which case?");
    memory = t_map(BYTES);
    t_fill(memory, BYTES, 1);
    t_wait_absent(memory, BYTES, 30);
    if (!strcmp(argv[1], "proc-mem"))
        proc_mem();
    else if (!strcmp(argv[1], "own-userfaultfd"))
        own_userfaultfd();
    else if (!strcmp(argv[1], "clear-tid"))
        clear_tid();
    else if (!strcmp(argv[1], "core-dump"))
        core_dump();
    else
        t_fail("no case '%s'", argv[1]);
    t_done();
}
