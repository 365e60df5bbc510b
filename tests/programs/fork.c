/* Forked children and evicted memory: the same bytes, copy on write both ways,
 * evictable again afterwards. Also what a child is started with: vfork,
 * posix_spawn and exec with arguments that lie in evicted pages. */
#include "../lib/t.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define BYTES (56 * MIB)
#define PAGES (BYTES / PAGE)
#define MANY 30 /* percent that must be out before a case means anything */

static char *memory;
extern char **environ;

static void same(void)
{
    int child = T_SYS(fork());
    if (child == 0) {
        t_check(memory, BYTES, 1);
        _exit(0);
    }
    t_wait_child(child);
    t_check(memory, BYTES, 1);
}

/* Rewrites the pages of one parity, then checks all of them twice. */
static void own_half(size_t parity, uint64_t seed)
{
    for (size_t i = parity; i < PAGES; i += 2)
        t_fill_page(memory + i * PAGE, seed, i);
    for (int pass = 0; pass < 2; pass++)
        for (size_t i = 0; i < PAGES; i++)
            t_check_page(memory + i * PAGE, i % 2 == parity ? seed : 1, i);
}

static void copy_on_write(void)
{
    int child = T_SYS(fork());
    if (child == 0) {
        own_half(1, 2);
        _exit(0);
    }
    own_half(0, 3);
    t_wait_child(child);
    own_half(0, 4);
}

static void generations(unsigned depth, uint64_t seed)
{
    /* Each generation changes its quarter and leaves the others alone. */
    for (size_t i = depth; i < PAGES; i += 4)
        t_fill_page(memory + i * PAGE, seed, i);
    int child = depth == 3 ? 0 : T_SYS(fork());
    if (depth < 3 && child == 0) {
        generations(depth + 1, seed + 1);
        _exit(0);
    }
    for (size_t i = 0; i < PAGES; i++)
        t_check_page(memory + i * PAGE, i % 4 <= depth ? 10 + i % 4 : 1, i);
    if (depth < 3)
        t_wait_child(child);
}

static void again(void)
{
    for (unsigned round = 0; round < t_times(3); round++) {
        int child = T_SYS(fork());
        if (child == 0)
            _exit(0);
        t_wait_child(child);
        t_check(memory, BYTES, 1);
        /* Once shared, now nobody's but ours: it must be able to leave. */
        t_wait_absent(memory, BYTES, MANY);
    }
    t_check(memory, BYTES, 1);
}

static void wide(void)
{
    int children[6];
    for (unsigned c = 0; c < COUNT(children); c++) {
        children[c] = T_SYS(fork());
        if (children[c] == 0) {
            for (size_t i = c; i < PAGES; i += COUNT(children))
                t_fill_page(memory + i * PAGE, 20 + c, i);
            for (size_t i = 0; i < PAGES; i++)
                t_check_page(memory + i * PAGE, i % COUNT(children) == c ? 20 + c : 1, i);
            _exit(0);
        }
    }
    for (unsigned c = 0; c < COUNT(children); c++)
        t_wait_child(children[c]);
    t_check(memory, BYTES, 1);
}

/* What Redis does: the child reads all of the old, the parent writes on. */
static void background_save(void)
{
    int child = T_SYS(fork());
    if (child == 0) {
        for (int pass = 0; pass < 3; pass++)
            t_check(memory, BYTES, 1);
        t_gate("saved");
        _exit(0);
    }
    uint64_t random = 7;
    static unsigned char version[PAGES];
    for (size_t n = 0; n < PAGES; n++) {
        size_t i = t_next(&random) % PAGES;
        t_check_page(memory + i * PAGE, 1 + version[i], i);
        version[i]++;
        t_fill_page(memory + i * PAGE, 1 + version[i], i);
    }
    t_wait_child(child);
    for (size_t i = 0; i < PAGES; i++)
        t_check_page(memory + i * PAGE, 1 + version[i], i);
}

static void advice(void)
{
    size_t third = PAGES / 3 * PAGE;
    T_SYS(madvise(memory, third, MADV_WIPEONFORK));
    T_SYS(madvise(memory + third, third, MADV_DONTFORK));
    int child = T_SYS(fork());
    if (child == 0) {
        unsigned char vector;
        t_check_zero(memory, third);
        T_ASSERT(mincore(memory + third, PAGE, &vector) == -1 && errno == ENOMEM, "still mapped");
        for (size_t i = 2 * third / PAGE; i < PAGES; i++)
            t_check_page(memory + i * PAGE, 1, i);
        t_fill(memory, third, 5);
        t_check(memory, third, 5);
        _exit(0);
    }
    t_wait_child(child);
    t_check(memory, BYTES, 1);
}

#define PIECE (64 * PAGE)
#define PIECES (40 * MIB / PIECE)
static char *pieces[PIECES];
static uint64_t piece_seed[PIECES];

static void renew(size_t piece, uint64_t seed)
{
    if (pieces[piece])
        T_SYS(munmap(pieces[piece], PIECE));
    pieces[piece] = t_map(PIECE);
    piece_seed[piece] = seed;
    t_fill(pieces[piece], PIECE, seed);
}

/* As an interpreter forks: out of a heap of many small mappings, some of them
 * made and unmapped a moment ago, with changes going on in the parent. */
static void after_churn(void)
{
    T_SYS(munmap(memory, BYTES));
    uint64_t random = 5, seed = 100;
    for (size_t p = 0; p < PIECES; p++)
        renew(p, ++seed);
    for (unsigned round = 0; round < t_times(8); round++) {
        int children[2];
        for (unsigned c = 0; c < COUNT(children); c++) {
            for (unsigned n = 0; n < 40; n++)
                renew(t_next(&random) % PIECES, ++seed);
            children[c] = T_SYS(fork());
            if (children[c] == 0) {
                for (size_t p = 0; p < PIECES; p++) {
                    t_check(pieces[p], PIECE, piece_seed[p]);
                    if (p % 8 == c)
                        renew(p, ++seed);
                }
                for (size_t p = 0; p < PIECES; p += 4)
                    t_check(pieces[p], PIECE, piece_seed[p]);
                _exit(0);
            }
        }
        for (unsigned n = 0; n < 40; n++)
            renew(t_next(&random) % PIECES, ++seed);
        for (unsigned c = 0; c < COUNT(children); c++)
            t_wait_child(children[c]);
    }
    for (size_t p = 0; p < PIECES; p++)
        t_check(pieces[p], PIECE, piece_seed[p]);
}

/* Without glibc: no atfork handler runs and the child has no agent. */
static void raw_clone(void)
{
    for (unsigned round = 0; round < 3; round++) {
        int child = (int)T_SYS(syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL));
        if (child == 0) {
            t_check(memory, BYTES, 1);
            for (size_t i = 0; i < PAGES; i += 16)
                t_fill_page(memory + i * PAGE, 6, i);
            for (size_t i = 0; i < PAGES; i++)
                t_check_page(memory + i * PAGE, i % 16 ? 1 : 6, i);
            syscall(SYS_exit_group, 0);
        }
        t_wait_child(child);
        t_check(memory, BYTES, 1);
    }
}

/* Such a child has nobody who looks what it inherited: some of its memory is empty,
 * some is not there. */
static void raw_clone_wiped(void)
{
    size_t part = BYTES / 4;
    T_SYS(madvise(memory, part, MADV_WIPEONFORK));
    T_SYS(madvise(memory + part, part, MADV_DONTFORK));
    t_wait_absent(memory, part, 5);
    t_wait_absent(memory + 2 * part, 2 * part, 5);
    for (unsigned round = 0; round < 3; round++) {
        int child = (int)T_SYS(syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL));
        if (child == 0) {
            /* Advised here, it says nothing of what was inherited. */
            T_SYS(madvise(memory + 3 * part, part, MADV_WIPEONFORK));
            t_check_zero(memory, part);
            unsigned char there;
            T_ASSERT(mincore(memory + part, PAGE, &there) == -1 && errno == ENOMEM,
                     "what was not to be inherited is there");
            for (size_t i = PAGES / 2; i < PAGES; i++)
                t_check_page(memory + i * PAGE, 1, i);
            T_SYS(mmap(memory + part, part, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0));
            t_check_zero(memory + part, part);
            syscall(SYS_exit_group, 0);
        }
        t_wait_child(child);
    }
    t_check(memory, BYTES, 1);
}

/* The same child when nobody is left to serve it: the only thing that held its
 * userfaultfd was the daemon. The runner kills that. */
static void raw_clone_orphan(void)
{
    int child = (int)T_SYS(syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL));
    if (child == 0) {
        t_check(memory, PAGE, 1);
        t_gate("running");
        t_check(memory, BYTES, 1);
        t_gate("unharmed");
        _exit(0);
    }
    pause();
}

static void daemonise(void)
{
    if (T_SYS(fork()) != 0)
        _exit(0);
    T_SYS(setsid());
    if (T_SYS(fork()) != 0)
        _exit(0);
    T_SYS(chdir("/"));
    T_SYS(syscall(SYS_close_range, 0u, ~0u, 0u));
    t_check(memory, BYTES, 1);
    t_fill(memory, BYTES, 2);
    t_wait_absent(memory, BYTES, MANY);
    t_check(memory, BYTES, 2);
}

/* Each goes on in a child, in the middle of what evictions there are, and is gone before
 * anybody can ask it which of its pages were on their way just then. */
static void daemons(void)
{
    uint64_t seed = 1;
    for (unsigned generation = 0; generation < t_times(12); generation++) {
        t_check(memory, BYTES, seed);
        t_fill(memory, BYTES, ++seed);
        if (T_SYS(fork()) != 0)
            _exit(0);
    }
    t_check(memory, BYTES, seed);
}

/* The same, and each leaves a child without an agent behind as well. */
static void raw_daemons(void)
{
    const unsigned generations = t_times(12);
    int right[2];
    T_SYS(pipe(right));
    uint64_t seed = 1;
    for (unsigned generation = 0; generation < generations; generation++) {
        t_check(memory, BYTES, seed);
        t_fill(memory, BYTES, ++seed);
        if (T_SYS(fork()) == 0)
            continue;
        if (T_SYS(syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL)) == 0) {
            t_check(memory, BYTES, seed);
            T_SYS(write(right[1], "", 1));
        }
        syscall(SYS_exit_group, 0);
    }
    t_check(memory, BYTES, seed);
    T_SYS(close(right[1]));
    for (unsigned generation = 0; generation < generations; generation++) {
        char one;
        T_ASSERT(T_SYS(read(right[0], &one, 1)) == 1, "a child without an agent read wrong bytes");
    }
}

/* Argument strings, their vector and the path of one start, each in a page of
 * its own, far from each other, written long before they are used. */
#define STARTS 50
#define STRIDE 64

static char **prepare_start(const char *self, unsigned start)
{
    char number[16];
    snprintf(number, sizeof number, "%u", start);
    const char *texts[] = {self, "argument", number};
    char *page = memory + (size_t)start * 4 * STRIDE * PAGE;
    char **vector = memset(page, 0, PAGE);
    for (size_t a = 0; a < COUNT(texts); a++) {
        page += STRIDE * PAGE;
        vector[a] = strcpy(memset(page, 0, PAGE), texts[a]);
    }
    return vector;
}

static void start_children(const char *self, bool spawn)
{
    char **starts[STARTS];
    for (unsigned start = 0; start < STARTS; start++)
        starts[start] = prepare_start(self, start);
    for (unsigned round = 0; round < t_times(40); round++) {
        if (round % 10 == 0) {
            for (size_t i = 0; i < PAGES; i++)
                if (i % STRIDE)
                    t_check_page(memory + i * PAGE, 1, i);
            t_wait_absent(memory, BYTES, MANY);
        }
        char **arguments = starts[round % STARTS];
        int child;
        if (spawn) {
            T_ASSERT((errno = posix_spawn(&child, self, NULL, NULL, arguments, environ)) == 0,
                     "%s", t_error());
        } else {
            child = T_SYS(vfork());
            if (child == 0) {
                execve(arguments[0], arguments, environ);
                _exit(111);
            }
        }
        t_wait_child(child);
    }
}

int main(int argc, char **argv)
{
    t_start();
    T_ASSERT(argc > 1, "which case?");
    const char *which = argv[1];
    if (!strcmp(which, "argument")) /* a child of start_children */
        return argc == 3 && argv[2][0] >= '0' && argv[2][0] <= '9' ? 0 : 1;

    memory = t_map(BYTES);
    t_fill(memory, BYTES, 1);
    t_wait_absent(memory, BYTES, MANY);
    if (!strcmp(which, "same"))
        same();
    else if (!strcmp(which, "copy-on-write"))
        copy_on_write();
    else if (!strcmp(which, "generations"))
        generations(0, 10);
    else if (!strcmp(which, "again"))
        again();
    else if (!strcmp(which, "wide"))
        wide();
    else if (!strcmp(which, "background-save"))
        background_save();
    else if (!strcmp(which, "advice"))
        advice();
    else if (!strcmp(which, "after-churn"))
        after_churn();
    else if (!strcmp(which, "raw-clone"))
        raw_clone();
    else if (!strcmp(which, "raw-clone-wiped"))
        raw_clone_wiped();
    else if (!strcmp(which, "raw-clone-orphan"))
        raw_clone_orphan();
    else if (!strcmp(which, "daemon"))
        daemonise();
    else if (!strcmp(which, "daemons"))
        daemons();
    else if (!strcmp(which, "raw-daemons"))
        raw_daemons();
    else if (!strcmp(which, "vfork"))
        start_children("/proc/self/exe", false);
    else if (!strcmp(which, "spawn"))
        start_children("/proc/self/exe", true);
    else
        t_fail("no case '%s'", which);
    t_done();
}
