/* Guard regions (MADV_GUARD_INSTALL, Linux 6.13) on evicted pages: what was there is
 * gone, a guard faults until it is removed, and then there is zero. The kernel tells
 * no userfaultfd of any of it. */
#include "../lib/t.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#define MADV_GUARD_REMOVE 103
#endif

#define BYTES (32 * MIB)
#define PAGES (BYTES / PAGE)
#define RUN (500 * PAGE)
#define WIPED (2 * MIB)

static char *memory;
static sigjmp_buf back;

static void faulted(int signal)
{
    (void)signal;
    siglongjmp(back, 1);
}

/* Whether a page can be read. */
static bool readable(const char *page)
{
    if (sigsetjmp(back, 1))
        return false;
    (void)*(const volatile char *)page;
    return true;
}

static int advise_vector(void *start, size_t bytes, int advice)
{
    /* In three parts, one of them of no length. */
    struct iovec ranges[] = {
        {start, PAGE}, {start, 0}, {(char *)start + PAGE, bytes - PAGE}};
    int self = (int)T_SYS(syscall(SYS_pidfd_open, getpid(), 0));
    long done = syscall(SYS_process_madvise, self, ranges, COUNT(ranges), advice, 0);
    int kept = errno;
    close(self);
    errno = kept;
    return done == (long)bytes ? 0 : -1;
}

static int advise_by_number(void *start, size_t bytes, int advice)
{
    return (int)syscall(SYS_madvise, start, bytes, advice);
}

/* Past the C library. */
static int advise_raw(void *start, size_t bytes, int advice)
{
#ifdef __x86_64__
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "0"((long)SYS_madvise), "D"(start), "S"(bytes), "d"((long)advice)
                     : "rcx", "r11", "memory");
    return (int)result;
#else
    return advise_by_number(start, bytes, advice);
#endif
}

typedef int (*advise_t)(void *, size_t, int);

/* Guards over evicted pages, removed: zero. */
static void there_and_back(advise_t advise, size_t first)
{
    char *run = memory + first * PAGE;
    T_SYS(advise(run, RUN, MADV_GUARD_INSTALL));
    for (size_t i = 0; i < RUN; i += 7 * PAGE)
        T_ASSERT(!readable(run + i), "guard %zu can be read", i / PAGE);
    T_SYS(advise(run, RUN, MADV_GUARD_REMOVE));
    t_check_zero(run, RUN);
    t_check_page(memory + (first - 1) * PAGE, 1, first - 1);
    t_check_page(run + RUN, 1, first + RUN / PAGE);
}

/* Guards between pages that are read in order, while they are evicted and brought
 * back: none of them is lost, and what is under them does not come back. */
static void between(void)
{
    for (size_t i = 1; i < PAGES; i += 2)
        T_SYS(madvise(memory + i * PAGE, PAGE, MADV_GUARD_INSTALL));
    for (unsigned round = 0; round < 3; round++) {
        for (size_t i = 0; i < PAGES; i += 2)
            t_check_page(memory + i * PAGE, 1, i);
        for (size_t i = 1; i < PAGES; i += 2)
            T_ASSERT(!readable(memory + i * PAGE), "guard %zu is gone", i);
        /* Of the half that is no guards; the page table has guards. */
        t_wait_absent(memory, BYTES, 25);
    }
    for (size_t i = 1; i < PAGES; i += 2)
        T_SYS(madvise(memory + i * PAGE, PAGE, MADV_GUARD_REMOVE));
    for (size_t i = 0; i < PAGES; i++)
        i % 2 ? t_check_zero(memory + i * PAGE, PAGE) : t_check_page(memory + i * PAGE, 1, i);
}

/* What the kernel refuses is refused, and only what it made guards of is lost. */
static void refused(void)
{
    char *start = memory + 1000 * PAGE;
    T_SYS(mlock(start + 100 * PAGE, PAGE));
    int result = madvise(start, 200 * PAGE, MADV_GUARD_INSTALL);
    T_ASSERT(result == -1 && errno == EINVAL, "over locked memory: %d", result);
    for (size_t i = 0; i < 200; i++)
        T_ASSERT(readable(start + i * PAGE) == (i >= 100), "page %zu", i);
    T_SYS(munlock(start + 100 * PAGE, PAGE));
    T_SYS(madvise(start, 200 * PAGE, MADV_GUARD_REMOVE));
    t_check_zero(start, 100 * PAGE);
    for (size_t i = 100; i < 200; i++)
        t_check_page(start + i * PAGE, 1, 1000 + i);

    start = memory + 4000 * PAGE;
    T_SYS(munmap(start + 50 * PAGE, 10 * PAGE));
    result = madvise(start, 100 * PAGE, MADV_GUARD_INSTALL);
    T_ASSERT(result == -1 && errno == ENOMEM, "over a hole: %d", result);
    T_ASSERT(!readable(start) && !readable(start + 99 * PAGE), "no guards around a hole");
    madvise(start, 100 * PAGE, MADV_GUARD_REMOVE);
    t_check_zero(start, 50 * PAGE);
    t_check_zero(start + 60 * PAGE, 40 * PAGE);
    result = madvise(start + 1, PAGE, MADV_GUARD_INSTALL);
    T_ASSERT(result == -1 && errno == EINVAL, "not at a page: %d", result);
    t_check_page(start + 100 * PAGE, 1, 4100);
}

/* A child has its parent's guards; what it makes and removes is its own. */
static void child(bool raw)
{
    T_SYS(madvise(memory + 100 * PAGE, RUN, MADV_GUARD_INSTALL));
    int pid = raw ? (int)T_SYS(syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL))
                  : T_SYS(fork());
    if (pid == 0) {
        T_ASSERT(!readable(memory + 100 * PAGE), "the parent's guard is not inherited");
        there_and_back(madvise, 2000);
        T_SYS(madvise(memory + 100 * PAGE, RUN, MADV_GUARD_REMOVE));
        t_check_zero(memory + 100 * PAGE, RUN);
        syscall(SYS_exit_group, 0);
    }
    t_wait_child(pid);
    T_ASSERT(!readable(memory + 100 * PAGE), "the child took its parent's guard");
    T_SYS(madvise(memory + 100 * PAGE, RUN, MADV_GUARD_REMOVE));
    t_check_zero(memory + 100 * PAGE, RUN);
    t_check(memory, 100 * PAGE, 1);
    for (size_t i = 2000; i < 3000; i++)
        t_check_page(memory + i * PAGE, 1, i);
}

/* Another process may not discard what is not its own. */
static void outside(void)
{
    int self = (int)T_SYS(syscall(SYS_pidfd_open, getpid(), 0));
    int pid = T_SYS(fork());
    if (pid == 0) {
        struct iovec range = {memory, BYTES};
        int refused[] = {MADV_DONTNEED, MADV_FREE, MADV_GUARD_INSTALL, MADV_REMOVE};
        for (size_t i = 0; i < COUNT(refused); i++) {
            long done = syscall(SYS_process_madvise, self, &range, 1, refused[i], 0);
            T_ASSERT(done == -1 && errno == EINVAL, "advice %d from outside: %ld", refused[i],
                     done);
        }
        T_SYS(syscall(SYS_process_madvise, self, &range, 1, MADV_COLD, 0));
        t_check(memory, BYTES, 1);
        _exit(0);
    }
    t_wait_child(pid);
    t_check(memory, BYTES, 1);
}

/* docs/limits.md: by a system call that nobody sees, removed before Strata looked. */
static void unseen(void)
{
    size_t first = 3000;
    char *run = memory + first * PAGE;
    T_SYS(advise_raw(run, RUN, MADV_GUARD_INSTALL));
    T_SYS(advise_raw(run, RUN, MADV_GUARD_REMOVE));
    size_t zero = 0, old = 0;
    for (size_t i = 0; i < RUN / PAGE; i++) {
        bool is_old = t_is_page(run + i * PAGE, 1, first + i);
        old += is_old;
        if (!is_old) {
            t_check_zero(run + i * PAGE, PAGE);
            zero++;
        }
    }
    if (t_native() || old == 0)
        T_ASSERT(old == 0 && t_native(), "the limit is gone: change docs/limits.md");
}

/* Guards of both kinds, in a stack and between pages that are evicted, looked at for
 * ever. The runner takes the program back to here; the file `remove` has it remove
 * them. */
static void *sleeper(void *unused)
{
    pause();
    return unused;
}

/* A child without an agent: it finds the memory empty that is to be, and all else as
 * it was. */
static void child_of_forever(const char *wiped)
{
    int pid = (int)T_SYS(syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL));
    if (pid == 0) {
        t_check_zero(wiped, WIPED);
        for (size_t i = 0; i < 1000; i++)
            t_check_page(memory + i * PAGE, 1, i);
        syscall(SYS_exit_group, 0);
    }
    t_wait_child(pid);
    t_check(wiped, WIPED, 2);
}

static void forever(void)
{
    enum { THREADS = 4, STACK = 1 * MIB };
    char *stacks[THREADS];
    for (size_t i = 0; i < THREADS; i++) {
        stacks[i] = T_SYS(mmap(NULL, STACK, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0));
        /* By the C library's own call, which nobody sees. */
        T_SYS(advise_raw(stacks[i], 4 * PAGE, MADV_GUARD_INSTALL));
        pthread_attr_t attributes;
        pthread_t thread;
        pthread_attr_init(&attributes);
        pthread_attr_setstack(&attributes, stacks[i] + 4 * PAGE, STACK - 4 * PAGE);
        T_ASSERT((errno = pthread_create(&thread, &attributes, sleeper, NULL)) == 0, "%s",
                 t_error());
    }
    char *run = memory + 1000 * PAGE;
    T_SYS(madvise(run, RUN, MADV_GUARD_INSTALL));
    char *wiped = t_map(WIPED);
    t_fill(wiped, WIPED, 2);
    T_SYS(madvise(wiped, WIPED, MADV_WIPEONFORK));
    bool removed = false;
    int rounds = T_SYS(open("rounds", O_CREAT | O_RDWR, 0666));
    for (unsigned long round = 0;; round++) {
        for (size_t i = 0; i < THREADS; i++)
            T_ASSERT(!readable(stacks[i]) && !readable(stacks[i] + 3 * PAGE) &&
                         readable(stacks[i] + 4 * PAGE),
                     "the guard of stack %zu is not where it was", i);
        for (size_t i = 0; !removed && i < RUN; i += 7 * PAGE)
            T_ASSERT(!readable(run + i), "guard %zu can be read", i / PAGE);
        if (!removed && access("remove", F_OK) == 0) {
            T_SYS(madvise(run, RUN, MADV_GUARD_REMOVE));
            t_check_zero(run, RUN);
            removed = true;
            close(T_SYS(open("removed", O_CREAT, 0666)));
        }
        if (t_absent(wiped, WIPED) > WIPED / PAGE / 2 && access("clone", F_OK) == 0) {
            T_SYS(unlink("clone"));
            child_of_forever(wiped);
            close(T_SYS(open("cloned", O_CREAT, 0666)));
        }
        for (size_t i = round % 16; i < PAGES; i += 16)
            if (i < 1000 || i >= 1000 + RUN / PAGE)
                t_check_page(memory + i * PAGE, 1, i);
        char text[24];
        T_SYS(pwrite(rounds, text, snprintf(text, sizeof text, "%020lu", round), 0));
        usleep(1000);
    }
}

int main(int argc, char **argv)
{
    t_start();
    T_ASSERT(argc > 1, "which case?");
    const char *which = argv[1];
    struct sigaction action = {.sa_handler = faulted, .sa_flags = SA_NODEFER};
    T_SYS(sigaction(SIGSEGV, &action, NULL));
    memory = t_map(BYTES);
    if (madvise(memory, PAGE, MADV_GUARD_INSTALL) != 0) {
        t_gate("no guards");
        t_done();
    }
    T_SYS(madvise(memory, PAGE, MADV_GUARD_REMOVE));
    t_fill(memory, BYTES, 1);
    t_wait_absent(memory, BYTES, 60);
    if (!strcmp(which, "forever"))
        forever();
    t_gate("ready");
    if (!strcmp(which, "madvise"))
        there_and_back(madvise, 1000);
    else if (!strcmp(which, "process-madvise"))
        there_and_back(advise_vector, 1000);
    else if (!strcmp(which, "by-number"))
        there_and_back(advise_by_number, 1000);
    else if (!strcmp(which, "between"))
        between();
    else if (!strcmp(which, "refused"))
        refused();
    else if (!strcmp(which, "fork"))
        child(false);
    else if (!strcmp(which, "raw-clone"))
        child(true);
    else if (!strcmp(which, "outside"))
        outside();
    else if (!strcmp(which, "unseen"))
        unseen();
    else
        t_fail("no case '%s'", which);
    t_done();
}
