/* The placement API of include/strata.h: what a program says of its memory, and
 * where it is told that its memory is. Looked up by name: it runs anywhere.
 *
 *     place MODE
 *
 * Every page is checked, whatever was said of it. */
#include "../../include/strata.h"
#include "../lib/t.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int (*advise)(const void *, size_t, int);
static int (*advise_ranges)(const struct strata_range *, size_t, int);
static int (*where)(const void *, size_t, unsigned char *);
static int (*allocate)(void **, size_t, int);
static int (*release)(void *, size_t);
static const char *(*why)(void);

#define BYTES (64 * MIB)
#define PAGES (BYTES / PAGE)

static char *memory;

/* Pages of a range in each tier. */
static size_t count[8];

static void look(const void *start, size_t bytes)
{
    static unsigned char tiers[4 * PAGES];
    size_t pages = STRATA_PAGES(start, bytes);
    T_ASSERT(pages <= sizeof tiers, "%zu pages", pages);
    memset(count, 0, sizeof count);
    int result = where(start, bytes, tiers);
    T_ASSERT(result == 0, "%d %s", result, why());
    for (size_t i = 0; i < pages; i++) {
        T_ASSERT(tiers[i] < 8, "tier %u", tiers[i]);
        count[tiers[i]]++;
    }
}

static size_t stored(void)
{
    return count[STRATA_STAGED] + count[STRATA_COMPRESSED] + count[STRATA_FILE];
}

#define MUST(call, result)                                                             \
    do {                                                                               \
        errno = 4711;                                                                  \
        int is_ = (call);                                                              \
        T_ASSERT(is_ == (result), "%s: %d, not %d: %s", #call, is_, (int)(result), why()); \
        T_ASSERT(errno == 4711, "errno is changed");                                   \
        T_ASSERT((is_ < 0) == (why()[0] != 0), "%d for '%s'", is_, why());             \
    } while (0)

/* Waits until `condition` holds of the range: hints are heeded soon, not at once. */
#define UNTIL(start, bytes, condition)                                                 \
    do {                                                                               \
        for (int turn_ = 0;; turn_++) {                                                \
            look(start, bytes);                                                        \
            if (condition)                                                             \
                break;                                                                 \
            T_ASSERT(turn_ < 2000, "never: %s: %zu - %zu d %zu c %zu f %zu s %zu 0", #condition, \
                     count[0], count[1], count[3], count[4], count[5], count[6]);      \
            usleep(10000);                                                             \
        }                                                                              \
    } while (0)

/* Cold memory leaves and hot memory comes back, and where() says what the page
 * table says. */
static void hints(void)
{
    t_fill(memory, BYTES, 1);
    look(memory, BYTES);
    MUST(advise(memory, BYTES / 2, STRATA_COLD), 0);
    UNTIL(memory, BYTES / 2, stored() == PAGES / 2);
    T_ASSERT(t_absent(memory, BYTES / 2) == PAGES / 2, "%zu absent", t_absent(memory, BYTES / 2));
    t_gate("cold");
    /* A part of a page is nothing that may leave. */
    MUST(advise(memory + BYTES - PAGE + 1, PAGE - 1, STRATA_COLD), 0);
    MUST(advise(memory, 4 * MIB, STRATA_HOT), 0);
    UNTIL(memory, 4 * MIB, count[STRATA_DRAM] == 4 * MIB / PAGE);
    t_check(memory, BYTES, 1);
    T_SYS(madvise(memory, MIB, MADV_DONTNEED));
    UNTIL(memory, MIB, count[STRATA_UNTOUCHED] == MIB / PAGE);
    t_check_zero(memory, MIB);
}

/* Fills everything, and pins `bytes` of it when it has left: all of them are back. */
static void pin_what_left(size_t bytes)
{
    t_fill(memory, BYTES, 1);
    t_wait_absent(memory, BYTES, 30);
    MUST(advise(memory, bytes, STRATA_PIN), 0);
    UNTIL(memory, bytes, count[STRATA_DRAM] == bytes / PAGE);
}

/* Pinned pages stay whatever presses; unpinned ones leave again. */
static void pins(void)
{
    const size_t bytes = 12 * MIB;
    pin_what_left(bytes);
    t_gate("pinned");
    for (int turn = 0; turn < 8; turn++) {
        t_press_with(memory + bytes, BYTES - bytes);
        look(memory, bytes);
        T_ASSERT(count[STRATA_DRAM] == bytes / PAGE && t_absent(memory, bytes) == 0,
                 "%zu of %zu pinned pages are there, %zu absent", count[STRATA_DRAM],
                 bytes / PAGE, t_absent(memory, bytes));
    }
    /* A hint does not undo a setting. */
    MUST(advise(memory, bytes, STRATA_COLD), 0);
    MUST(advise(memory, bytes, STRATA_FREE_SOON), 0);
    t_press_with(memory + bytes, BYTES - bytes);
    T_ASSERT(t_absent(memory, bytes) == 0, "%zu absent", t_absent(memory, bytes));
    /* More than three quarters of the budget cannot be pinned, and nothing is. */
    MUST(advise(memory, BYTES, STRATA_PIN), -ENOMEM);
    /* It goes with the memory. */
    char *other = t_map(bytes);
    T_ASSERT(mremap(memory, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, other) == other, "%s",
             t_error());
    t_press_with(memory + bytes, BYTES - bytes);
    T_ASSERT(t_absent(other, bytes) == 0, "%zu absent", t_absent(other, bytes));
    t_check(other, bytes, 1);
    t_gate("moved");
    /* A child inherits none: it pins for itself, or not. */
    int child = T_SYS(fork());
    if (child == 0) {
        t_check(other, bytes, 1);
        look(other, bytes);
        _exit(0);
    }
    t_wait_child(child);
    MUST(advise(other, bytes, STRATA_UNPIN), 0);
    t_gate("unpinned");
    t_wait_absent(other, bytes, 50);
    t_check(other, bytes, 1);
    /* Unmapped while pinned: what comes to its place is not. */
    MUST(advise(other, bytes, STRATA_PIN), 0);
    T_SYS(munmap(other, bytes));
    other = mmap(other, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    T_ASSERT(other != MAP_FAILED, "%s", t_error());
    t_fill(other, bytes, 5);
    t_gate("unmapped");
    t_wait_absent(other, bytes, 50);
    t_check(other, bytes, 5);
}

/* Pins outlive the daemon's worker. */
static void survive(void)
{
    const size_t bytes = 12 * MIB;
    pin_what_left(bytes);
    while (strcmp(t_gate("pinned"), "end") != 0) {
        for (int turn = 0; turn < 3; turn++)
            t_press_with(memory + bytes, BYTES - bytes);
        T_ASSERT(t_absent(memory, bytes) == 0, "%zu pinned pages left", t_absent(memory, bytes));
    }
    t_check(memory, BYTES, 1);
}

/* The same in every life of a snapshot: says "round N", and never ends. */
static void restored(void)
{
    const size_t bytes = 12 * MIB;
    t_fill(memory, BYTES, 1);
    MUST(advise(memory, bytes, STRATA_PIN), 0);
    for (unsigned long round = 1;; round++) {
        t_check(memory, bytes, 1);
        t_press_with(memory + bytes, BYTES - bytes);
        if (t_absent(memory, bytes) > 0) {
            /* Those of a new life are away until they are asked for. */
            t_check(memory, bytes, 1);
            t_press_with(memory + bytes, BYTES - bytes);
            T_ASSERT(t_absent(memory, bytes) == 0, "%zu pinned pages left",
                     t_absent(memory, bytes));
        }
        printf("round %lu\n", round);
        fflush(stdout);
    }
}

/* Memory for a tier is found there after a while, and reads well. */
static void tiers(void)
{
    const struct {
        int tier;
        int there;
    } kinds[] = {{STRATA_COMPRESSED, STRATA_COMPRESSED}, {STRATA_FILE, STRATA_FILE}};
    void *room = memory;
    MUST(allocate(&room, MIB, STRATA_NODE), -ENODEV);
    T_ASSERT(room == NULL, "%p", room);
    for (size_t k = 0; k < COUNT(kinds); k++) {
        const size_t bytes = 8 * MIB;
        int result = allocate(&room, bytes, kinds[k].tier);
        if (kinds[k].tier == STRATA_FILE && result == -ENODEV) {
            t_gate("no file tier");
            continue;
        }
        T_ASSERT(result == 0, "%d %s", result, why());
        for (unsigned seed = 1; seed < 4; seed++) {
            t_fill(room, bytes, seed);
            UNTIL(room, bytes, count[kinds[k].there] >= bytes / PAGE * 9 / 10);
            t_check(room, bytes, seed);
        }
        t_gate(kinds[k].tier == STRATA_FILE ? "file" : "compressed");
        t_check(room, bytes, 3);
        MUST(release(room, bytes), 0);
    }
    MUST(allocate(&room, 8 * MIB, STRATA_DRAM), 0);
    t_fill(room, 8 * MIB, 7);
    t_fill(memory, BYTES, 1);
    t_wait_absent(memory, BYTES, 30);
    T_ASSERT(t_absent(room, 8 * MIB) == 0, "%zu absent", t_absent(room, 8 * MIB));
    t_check(room, 8 * MIB, 7);
    MUST(release(room, 8 * MIB), 0);
}

/* Every fourth page, in order: who is not told would not guess it. */
static void read_some(void)
{
    for (size_t turn = 0; turn < 3; turn++)
        for (size_t i = turn; i < PAGES; i += 4)
            t_check_page(memory + i * PAGE, 1, i);
}

/* Memory for the node lies there, in use or not, until something else is said. */
static void node(void)
{
    const size_t bytes = 8 * MIB, most = bytes / PAGE * 9 / 10;
    void *room = NULL;
    MUST(allocate(&room, bytes, STRATA_NODE), 0);
    for (unsigned seed = 1; seed < 4; seed++) {
        t_fill(room, bytes, seed);
        UNTIL(room, bytes, count[STRATA_NODE] >= most);
        t_check(room, bytes, seed);
    }
    t_gate("there");
    for (unsigned turn = 0; turn < 60; turn++) {
        t_check(room, bytes, 3);
        usleep(100000);
    }
    look(room, bytes);
    T_ASSERT(count[STRATA_NODE] >= most, "%zu left on the node", count[STRATA_NODE]);
    MUST(advise(room, bytes, STRATA_PIN), 0);
    UNTIL(room, bytes, count[STRATA_DRAM] == bytes / PAGE);
    t_check(room, bytes, 3);
    MUST(release(room, bytes), 0);
}

/* Much of it, moved there once: what that costs is measured outside. */
static void node_much(void)
{
    const size_t bytes = 96 * MIB;
    void *room = NULL;
    t_gate("begin");
    MUST(allocate(&room, bytes, STRATA_NODE), 0);
    t_fill(room, bytes, 1);
    UNTIL(room, bytes, count[STRATA_NODE] >= bytes / PAGE * 99 / 100);
    t_gate("there");
    t_check(room, bytes, 1);
    MUST(release(room, bytes), 0);
}

static void sequential(void)
{
    t_fill(memory, BYTES, 1);
    t_wait_absent(memory, BYTES, 30);
    t_gate("begin");
    read_some();
    t_gate("unsaid");
    MUST(advise(memory, BYTES, STRATA_SEQUENTIAL), 0);
    read_some();
    t_gate("said");
    MUST(advise(memory, BYTES, STRATA_NORMAL), 0);
    t_check(memory, BYTES, 1);
}

/* --- all at once, while it is written --- */

static atomic_uint generation[PAGES / 256];
static atomic_bool over;

static void *writer(void *argument)
{
    uint64_t random = (uintptr_t)argument;
    while (!over) {
        size_t block = t_next(&random) % COUNT(generation);
        /* One writer of four has it. */
        if (block % 4 != (uintptr_t)argument % 4)
            continue;
        unsigned seed = generation[block];
        for (size_t i = block * 256; i < (block + 1) * 256; i++) {
            t_check_page(memory + i * PAGE, seed, i);
            t_fill_page(memory + i * PAGE, seed + 1, i);
        }
        generation[block] = seed + 1;
    }
    return NULL;
}

static void *adviser(void *argument)
{
    static const int all[] = {STRATA_NORMAL,    STRATA_HOT,   STRATA_COLD,     STRATA_SEQUENTIAL,
                              STRATA_PIN,       STRATA_UNPIN, STRATA_FREE_SOON};
    uint64_t random = (uintptr_t)argument + 99;
    static _Thread_local unsigned char tiers[PAGES];
    unsigned long given = 0, refused = 0;
    while (!over) {
        size_t start = t_next(&random) % BYTES;
        size_t bytes = t_next(&random) % (t_next(&random) % 8 ? 64 * PAGE : BYTES);
        if (bytes > BYTES - start)
            bytes = BYTES - start;
        if (t_next(&random) % 32 == 0) {
            int result = where(memory + start, bytes, tiers);
            T_ASSERT(result == 0 || result == -ECONNRESET || result == -ENOTCONN ||
                         result == -ECANCELED,
                     "%d %s", result, why());
            continue;
        }
        int result = advise(memory + start, bytes, all[t_next(&random) % COUNT(all)]);
        T_ASSERT(result == 0 || result == -EAGAIN || result == -ENOMEM || result == -ENOBUFS ||
                     result == -ECONNRESET || result == -ENOTCONN || result == -ECANCELED,
                 "%d %s", result, why());
        given++;
        refused += result != 0;
    }
    T_ASSERT(given > refused, "%lu of %lu calls were refused", refused, given);
    return NULL;
}

static void storm(void)
{
    pthread_t thread[6];
    for (size_t i = 0; i < PAGES; i++)
        t_fill_page(memory + i * PAGE, 0, i);
    t_wait_absent(memory, BYTES, 20);
    for (uintptr_t n = 0; n < COUNT(thread); n++)
        T_ASSERT(pthread_create(&thread[n], NULL, n < 4 ? writer : adviser, (void *)n) == 0,
                 "no thread");
    t_gate("running");
    over = true;
    for (size_t n = 0; n < COUNT(thread); n++)
        T_ASSERT(pthread_join(thread[n], NULL) == 0, "not joined");
    MUST(advise(memory, BYTES, STRATA_NORMAL), 0);
    for (size_t i = 0; i < PAGES; i++)
        t_check_page(memory + i * PAGE, generation[i / 256], i);
}

/* --- what a hostile caller tries --- */

static void hostile(void)
{
    t_fill(memory, BYTES, 1);
    t_wait_absent(memory, BYTES, 20);
    unsigned char tiers[64];
    void *room;
    const void *nowhere = (void *)0x10000;
    /* Beyond what can be mapped, if chance has put the memory near the end of that. */
    int far = (uintptr_t)memory + 1025 * BYTES > (uintptr_t)1 << 47 ? -EINVAL : -EFAULT;
    /* No ranges of its own, and none at all. */
    const struct {
        const void *start;
        size_t bytes;
        int result;
    } wrong[] = {
        {nowhere, PAGE, -EFAULT},
        {memory + BYTES - PAGE, 1024 * BYTES + PAGE, far},
        {NULL, (size_t)1 << 47, -EFAULT},
        {memory, SIZE_MAX, -EINVAL},
        {memory, SIZE_MAX - (size_t)memory, -EINVAL},
        {(void *)SIZE_MAX, 1, -EINVAL},
        {(void *)((uintptr_t)1 << 47), PAGE, -EINVAL},
        {(void *)0xffff800000000000, PAGE, -EINVAL},
    };
    for (size_t n = 0; n < COUNT(wrong); n++) {
        for (int advice = 0; advice < 7; advice++)
            MUST(advise(wrong[n].start, wrong[n].bytes, advice), wrong[n].result);
        if (wrong[n].bytes < sizeof tiers * PAGE || wrong[n].result == -EINVAL)
            MUST(where(wrong[n].start, wrong[n].bytes, tiers), wrong[n].result);
    }
    for (int advice = -3; advice < 12; advice++)
        if (advice < 0 || advice > 6)
            MUST(advise(memory, PAGE, advice), -EINVAL);
    for (int tier = -3; tier < 12; tier++)
        if (tier < 1 || tier > 4)
            MUST(allocate(&room, PAGE, tier), -EINVAL);
    MUST(allocate(&room, SIZE_MAX, STRATA_DRAM), -EINVAL);
    MUST(allocate(&room, (size_t)1 << 46, STRATA_DRAM), -ENOMEM);
    MUST(advise_ranges(NULL, 7, STRATA_HOT), -EINVAL);
    MUST(advise_ranges((void *)8, SIZE_MAX, STRATA_HOT), -EINVAL);
    MUST(advise(memory, 0, STRATA_PIN), 0);
    /* One wrong range among good ones: nothing is done. */
    struct strata_range some[3] = {{memory, PAGE}, {nowhere, PAGE}, {memory, PAGE}};
    MUST(advise_ranges(some, 3, STRATA_PIN), -EFAULT);
    /* What is mapped and no memory of the kind: its code, its stack, a file. */
    MUST(advise((void *)(uintptr_t)hostile, PAGE, STRATA_COLD), 0);
    MUST(advise(tiers, sizeof tiers, STRATA_COLD), 0);
    t_gate("refused");

    /* Settings for every other page, until there is no place for more. */
    size_t set = 0;
    int result = 0;
    for (; set < PAGES && result == 0; set += 2)
        result = advise(memory + set * PAGE, PAGE, set % 4 ? STRATA_PIN : STRATA_SEQUENTIAL);
    T_ASSERT(result == -ENOBUFS && set > 1000, "%d after %zu: %s", result, set, why());
    /* Holes in a pinned range, more than can be remembered. */
    MUST(advise(memory, BYTES, STRATA_NORMAL), 0);
    MUST(advise(memory, 8 * MIB, STRATA_PIN), 0);
    for (size_t i = 0; i < 8 * MIB / PAGE; i += 2)
        T_SYS(munmap(memory + i * PAGE, PAGE));
    for (size_t i = 1; i < 8 * MIB / PAGE; i += 2)
        t_check_page(memory + i * PAGE, 1, i);

    /* Millions of tiny hints. */
    unsigned long taken = 0, behind = 0;
    char *rest = memory + 8 * MIB;
    for (unsigned long n = 0; n < 3000000; n++) {
        result = advise(rest + n % (PAGES / 2) * PAGE, PAGE, n % 3 ? STRATA_COLD : STRATA_HOT);
        T_ASSERT(result == 0 || result == -EAGAIN, "%d %s", result, why());
        taken += result == 0;
        behind += result != 0;
        if (n % 500000 == 0)
            t_gate("hinting");
    }
    T_ASSERT(taken > 1024 && behind > 0, "%lu taken, %lu not", taken, behind);
    for (size_t i = 8 * MIB / PAGE; i < PAGES; i++)
        t_check_page(memory + i * PAGE, 1, i);
    /* The ring works on after that. What was said to be hot before may still be brought
       after pages have left, so it is said until it holds. */
    UNTIL(rest, MIB, (advise(rest, MIB, STRATA_COLD), stored() == MIB / PAGE));
    t_check_page(rest, 1, 8 * MIB / PAGE);
    t_gate("acted");
}

/* Nobody manages this process, or nobody is there to do it. */
static void alone(void)
{
    unsigned char tiers[1] = {9};
    void *room = memory;
    for (int advice = 0; advice < 7; advice++)
        MUST(advise(memory, PAGE, advice), -ENOSYS);
    MUST(where(memory, PAGE, tiers), -ENOSYS);
    T_ASSERT(tiers[0] == 9, "%u", tiers[0]);
    MUST(allocate(&room, MIB, STRATA_DRAM), -ENOSYS);
    T_ASSERT(room == NULL, "%p", room);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*body)(void);
    } modes[] = {
        {"hints", hints}, {"pins", pins},   {"survive", survive}, {"tiers", tiers},
    {"node", node},
    {"node-much", node_much},
        {"storm", storm}, {"alone", alone}, {"hostile", hostile}, {"sequential", sequential},
        {"restored", restored},
    };
    t_start();
    T_ASSERT(argc == 2, "which mode?");
    *(void **)&advise = dlsym(RTLD_DEFAULT, "strata_advise");
    *(void **)&advise_ranges = dlsym(RTLD_DEFAULT, "strata_advise_ranges");
    *(void **)&where = dlsym(RTLD_DEFAULT, "strata_where");
    *(void **)&allocate = dlsym(RTLD_DEFAULT, "strata_alloc");
    *(void **)&release = dlsym(RTLD_DEFAULT, "strata_free");
    *(void **)&why = dlsym(RTLD_DEFAULT, "strata_error");
    if (!advise)
        t_done();
    memory = t_map(BYTES);
    for (size_t m = 0; m < COUNT(modes); m++) {
        if (strcmp(modes[m].name, argv[1]) == 0) {
            modes[m].body();
            t_done();
        }
    }
    t_fail("no mode '%s'", argv[1]);
}
