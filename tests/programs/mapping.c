/* What a program can do to its address space while pages of it are evicted:
 * discard, unmap, move, grow, protect, lock. New memory must read zero, kept
 * memory must keep its bytes. */
#include "../lib/t.h"

#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define BYTES (56 * MIB)
#define PAGES (BYTES / PAGE)
#define PIECE (16 * PAGE)
#define PIECES (BYTES / PIECE)

static char *memory;

static void *map_at(void *address, size_t bytes, int protection, int flags)
{
    return T_SYS(mmap(address, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0));
}

static void fill_piece(char *start, uint64_t seed, size_t piece)
{
    for (size_t i = 0; i < PIECE / PAGE; i++)
        t_fill_page(start + i * PAGE, seed, piece * (PIECE / PAGE) + i);
}

static void check_piece(const char *start, uint64_t seed, size_t piece)
{
    for (size_t i = 0; i < PIECE / PAGE; i++)
        t_check_page(start + i * PAGE, seed, piece * (PIECE / PAGE) + i);
}

/* Every third piece is discarded and filled anew, some at once, some later. */
static void dont_need(void)
{
    for (unsigned round = 0; round < 3; round++) {
        for (size_t p = round; p < PIECES; p += 3) {
            T_SYS(madvise(memory + p * PIECE, PIECE, MADV_DONTNEED));
            if (p % 2) {
                t_check_zero(memory + p * PIECE, PIECE);
                fill_piece(memory + p * PIECE, 2 + round, p);
            }
        }
        for (size_t p = 0; p < PIECES; p++) {
            char *piece = memory + p * PIECE;
            if (p % 3 == round && p % 2 == 0) {
                t_check_zero(piece, PIECE);
                fill_piece(piece, 2 + round, p);
            } else {
                check_piece(piece, p % 3 <= round ? 2 + p % 3 : 1, p);
            }
        }
        t_wait_absent(memory, BYTES, 20);
    }
    for (size_t p = 0; p < PIECES; p++)
        check_piece(memory + p * PIECE, 2 + p % 3, p);
}

/* A freed page holds its old bytes or zero, as long as nobody writes it; what
 * is written to it afterwards stays. */
static void lazy_free(void)
{
    for (size_t p = 0; p < PIECES; p += 2)
        T_SYS(madvise(memory + p * PIECE, PIECE, MADV_FREE));
    for (size_t p = 0; p < PIECES; p += 8)
        fill_piece(memory + p * PIECE, 2, p);
    t_wait_absent(memory, BYTES, 20);
    static const char zeroes[PAGE];
    for (size_t p = 0; p < PIECES; p++) {
        if (p % 8 == 0 || p % 2) {
            check_piece(memory + p * PIECE, p % 2 ? 1 : 2, p);
            continue;
        }
        for (size_t i = p * 16; i < p * 16 + 16; i++)
            if (memcmp(memory + i * PAGE, zeroes, PAGE) != 0)
                t_check_page(memory + i * PAGE, 1, i);
    }
    t_fill(memory, BYTES, 3);
    t_wait_absent(memory, BYTES, 20);
    t_check(memory, BYTES, 3);
}

static void unmap(void)
{
    for (unsigned round = 0; round < 3; round++) {
        for (size_t p = round; p < PIECES; p += 3)
            T_SYS(munmap(memory + p * PIECE, PIECE));
        unsigned char vector[16];
        T_ASSERT(mincore(memory + round * PIECE, PIECE, vector) == -1 && errno == ENOMEM,
                 "still mapped");
        for (size_t p = round; p < PIECES; p += 3) {
            char *piece = memory + p * PIECE;
            T_ASSERT(map_at(piece, PIECE, PROT_READ | PROT_WRITE, MAP_FIXED_NOREPLACE) == piece,
                     "not where asked");
            t_check_zero(piece, PIECE);
            fill_piece(piece, 2 + round, p);
        }
        for (size_t p = 0; p < PIECES; p++)
            check_piece(memory + p * PIECE, p % 3 <= round ? 2 + p % 3 : 1, p);
        t_wait_absent(memory, BYTES, 20);
    }
    T_SYS(munmap(memory, BYTES));
}

/* Maps over managed memory without unmapping it first. */
static void map_over(void)
{
    for (unsigned round = 0; round < 3; round++) {
        for (size_t p = round; p < PIECES; p += 3) {
            char *piece = memory + p * PIECE;
            map_at(piece, PIECE, PROT_READ | PROT_WRITE, MAP_FIXED);
            t_check_zero(piece, PIECE);
            fill_piece(piece, 2 + round, p);
        }
        t_wait_absent(memory, BYTES, 20);
    }
    for (size_t p = 0; p < PIECES; p++)
        check_piece(memory + p * PIECE, 2 + p % 3, p);
}

static void remap_move(void)
{
    /* To a place of its own and back, page tables and evicted pages with it. */
    char *from = memory;
    for (unsigned round = 0; round < 4; round++) {
        char *to = map_at(NULL, BYTES, PROT_NONE, MAP_NORESERVE);
        T_ASSERT(mremap(from, BYTES, BYTES, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to, "%s",
                 t_error());
        unsigned char vector;
        T_ASSERT(mincore(from, PAGE, &vector) == -1 && errno == ENOMEM, "still mapped");
        for (size_t i = round; i < PAGES; i += 4)
            t_fill_page(to + i * PAGE, 2 + round, i);
        for (size_t i = 0; i < PAGES; i += round % 2 ? 1 : 5)
            t_check_page(to + i * PAGE, i % 4 <= round ? 2 + i % 4 : 1, i);
        t_wait_absent(to, BYTES, 20);
        from = to;
    }
    /* A piece out of the middle, grown while it moves. */
    char *moved = T_SYS(mremap(from + BYTES / 2, BYTES / 4, BYTES / 2, MREMAP_MAYMOVE));
    for (size_t i = 0; i < PAGES / 4; i++)
        t_check_page(moved + i * PAGE, 2 + (PAGES / 2 + i) % 4, PAGES / 2 + i);
    t_check_zero(moved + BYTES / 4, BYTES / 4);
    for (size_t i = 0; i < PAGES; i++)
        if (i < PAGES / 2 || i >= PAGES / 4 * 3)
            t_check_page(from + i * PAGE, 2 + i % 4, i);
}

static void remap_keep(void)
{
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif
    char *to = T_SYS(mremap(memory, BYTES, BYTES, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL));
    t_check(to, BYTES, 1);
    t_check_zero(memory, BYTES / 4);
    t_fill(memory, BYTES / 4, 2);
    t_wait_absent(to, BYTES, 20);
    t_check(to, BYTES, 1);
    t_check(memory, BYTES / 4, 2);
    t_check_zero(memory + BYTES / 4, BYTES / 4);
}

static void remap_grow(void)
{
    size_t room = 32 * MIB;
    char *start = t_map(BYTES + room);
    T_SYS(munmap(start + BYTES, room));
    t_fill(start, BYTES, 5);
    t_wait_absent(start, BYTES, 20);
    for (size_t have = BYTES; have < BYTES + room; have += 8 * MIB) {
        T_ASSERT(mremap(start, have, have + 8 * MIB, 0) == start, "%s", t_error());
        t_check_zero(start + have, 8 * MIB);
        for (size_t i = have / PAGE; i < (have + 8 * MIB) / PAGE; i++)
            t_fill_page(start + i * PAGE, 5, i);
    }
    t_wait_absent(start, BYTES + room, 20);
    t_check(start, BYTES + room, 5);
    /* Smaller, then larger again: what was cut off is zero. */
    T_ASSERT(mremap(start, BYTES + room, BYTES, 0) == start, "%s", t_error());
    T_ASSERT(mremap(start, BYTES, BYTES + room, 0) == start, "%s", t_error());
    t_check_zero(start + BYTES, room);
    t_check(start, BYTES, 5);
}

static sigjmp_buf back;

static void on_fault(int signal)
{
    (void)signal;
    siglongjmp(back, 1);
}

static bool write_is_refused(char *where)
{
    if (sigsetjmp(back, 1) == 0) {
        *(volatile char *)where = 1;
        return false;
    }
    return true;
}

static bool read_is_refused(char *where)
{
    if (sigsetjmp(back, 1) == 0)
        return *(volatile char *)where == 2 && false;
    return true;
}

static void protect(void)
{
    signal(SIGSEGV, on_fault);
    for (unsigned round = 0; round < t_times(1); round++) {
        for (size_t p = 0; p < PIECES; p += 2)
            T_SYS(mprotect(memory + p * PIECE, PIECE, PROT_READ));
        for (size_t p = 0; p < PIECES; p += 64)
            T_ASSERT(write_is_refused(memory + p * PIECE + 100), "a read-only page was written");
        t_check(memory, BYTES, 1);
        for (size_t p = 0; p < PIECES; p += 2)
            T_SYS(mprotect(memory + p * PIECE, PIECE, PROT_NONE));
        for (size_t p = 0; p < PIECES; p += 64)
            T_ASSERT(read_is_refused(memory + p * PIECE + 100), "a PROT_NONE page was read");
        for (size_t p = 1; p < PIECES; p += 2)
            check_piece(memory + p * PIECE, 1, p);
        T_SYS(mprotect(memory, BYTES, PROT_READ | PROT_WRITE));
        t_check(memory, BYTES, 1);
        t_wait_absent(memory, BYTES, 20);
    }
    /* All of it, evicted as it is, without a touch in between. */
    T_SYS(mprotect(memory, BYTES, PROT_NONE));
    T_SYS(mprotect(memory, BYTES, PROT_READ));
    t_check(memory, BYTES, 1);
    T_SYS(mprotect(memory, BYTES, PROT_READ | PROT_WRITE));
    t_fill(memory, BYTES, 2);
    t_check(memory, BYTES, 2);
}

/* How glibc grows the heap of a thread: reserved, then opened bit by bit. */
static void arena(void)
{
    char *start = map_at(NULL, BYTES, PROT_NONE, MAP_NORESERVE);
    for (size_t have = 0; have < BYTES; have += 132 * 1024) {
        size_t more = BYTES - have < 132 * 1024 ? BYTES - have : 132 * 1024;
        T_SYS(mprotect(start + have, more, PROT_READ | PROT_WRITE));
        t_check_zero(start + have, more);
        for (size_t i = have / PAGE; i < (have + more) / PAGE; i++)
            t_fill_page(start + i * PAGE, 4, i);
    }
    t_wait_absent(start, BYTES, 20);
    t_check(start, BYTES, 4);
    /* And trims it: mapped over with PROT_NONE, opened again. */
    size_t half = BYTES / 2;
    map_at(start + half, half, PROT_NONE, MAP_NORESERVE | MAP_FIXED);
    T_SYS(mprotect(start + half, half, PROT_READ | PROT_WRITE));
    t_check_zero(start + half, half);
    t_check(start, half, 4);
}

static void heap_end(void)
{
    char *start = T_SYS(sbrk(0));
    T_SYS(sbrk((intptr_t)(PAGE - (uintptr_t)start % PAGE)));
    start = T_SYS(sbrk(0));
    for (size_t have = 0; have < BYTES; have += MIB) {
        char *more = T_SYS(sbrk((intptr_t)MIB));
        T_ASSERT(more == start + have, "somebody else moved the break");
        t_check_zero(more, MIB);
        for (size_t i = have / PAGE; i < (have + MIB) / PAGE; i++)
            t_fill_page(start + i * PAGE, 4, i);
    }
    t_wait_absent(start, BYTES, 20);
    t_check(start, BYTES, 4);
    T_SYS(sbrk(-(intptr_t)(BYTES / 2)));
    t_check(start, BYTES / 2, 4);
    T_SYS(sbrk((intptr_t)(BYTES / 2)));
    t_check_zero(start + BYTES / 2, BYTES / 2);
    t_fill(start, BYTES, 5);
    t_wait_absent(start, BYTES, 20);
    t_check(start, BYTES, 5);
}

static size_t locked_absent(char *start, size_t bytes)
{
    return t_native() ? 0 : t_absent(start, bytes);
}

static void lock(void)
{
    /* The first locked range is partly evicted when it is locked. */
    size_t bytes = 3 * MIB;
    char *early = memory, *late = memory + BYTES / 2;
    T_SYS(mlock(early, bytes));
    T_ASSERT(t_absent(early, bytes) == 0, "mlock returned with pages out");
    T_SYS(mlock2(late, bytes, MLOCK_ONFAULT));
    for (size_t i = 0; i < bytes / PAGE; i++)
        t_check_page(late + i * PAGE, 1, (size_t)(late - memory) / PAGE + i);
    for (unsigned round = 0; round < 3; round++) {
        t_check(memory, BYTES, 1);
        t_wait_absent(memory, BYTES, 20);
        T_ASSERT(locked_absent(early, bytes) == 0, "locked pages left");
        T_ASSERT(locked_absent(late, bytes) == 0, "pages locked on fault left");
    }
    T_SYS(munlock(memory, BYTES));
    for (size_t i = bytes / PAGE; i < PAGES; i++)
        t_check_page(memory + i * PAGE, 1, i);
    t_press_with(memory + bytes, BYTES - bytes);
    t_wait_absent(early, bytes, 1);
    t_check(memory, BYTES, 1);
}

static unsigned long huge_kib(const void *address)
{
    FILE *maps = fopen("/proc/self/smaps", "re");
    T_ASSERT(maps, "%s", t_error());
    char line[512];
    unsigned long start, end, kib, sum = 0;
    bool inside = false;
    while (fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx ", &start, &end) == 2)
            inside = start <= (uintptr_t)address && (uintptr_t)address < end;
        else if (inside && sscanf(line, "AnonHugePages: %lu", &kib) == 1)
            sum = kib;
    }
    fclose(maps);
    return sum;
}

static void huge(void)
{
    /* No pressure yet: the runner gives this case a budget for the start. */
    size_t bytes = 48 * MIB;
    char *start = t_map_huge(bytes);
    t_fill(start, bytes, 6);
    unsigned long before = huge_kib(start);
    if (before == 0) {
        t_gate("skip no huge page was to be had");
        _exit(0);
    }
    t_gate("filled");
    t_wait_absent(start, bytes, 30);
    t_check(start, bytes, 6);
    t_fill(start, bytes, 7);
    t_wait_absent(start, bytes, 30);
    t_check(start, bytes, 7);
}

static void grows_down(void)
{
    /* Such a mapping may grow to the limit of stacks, usually 8 MiB. */
    size_t room = 6 * MIB;
    char *base = map_at(NULL, 2 * room, PROT_NONE, MAP_NORESERVE);
    T_SYS(munmap(base, 2 * room));
    char *end = base + 2 * room;
    char *first = map_at(end - PAGE, PAGE, PROT_READ | PROT_WRITE,
                         MAP_FIXED_NOREPLACE | MAP_GROWSDOWN);
    T_ASSERT(first == end - PAGE, "not where asked");
    for (size_t i = 0; i < room / PAGE; i++)
        t_fill_page(end - (i + 1) * PAGE, 8, i);
    for (unsigned round = 0; round < 2; round++) {
        t_check(memory, BYTES, 1);
        for (size_t i = 0; i < room / PAGE; i++)
            t_check_page(end - (i + 1) * PAGE, 8, i);
    }
}

/* One TiB of address space of which a few places are used. */
static void sparse(void)
{
    size_t reserved = 1024 * 1024 * MIB, places = 800, run = 16;
    char *start = map_at(NULL, reserved, PROT_READ | PROT_WRITE, MAP_NORESERVE);
    for (size_t n = 0; n < places; n++) {
        char *place = start + n * (reserved / places / PAGE) * PAGE;
        for (size_t i = 0; i < run; i++)
            t_fill_page(place + i * PAGE, 9, n * run + i);
    }
    for (unsigned round = 0; round < 2; round++) {
        size_t absent = 0;
        for (size_t n = 0; n < places; n++) {
            char *place = start + n * (reserved / places / PAGE) * PAGE;
            absent += t_absent(place, run * PAGE);
            for (size_t i = 0; i < run; i++)
                t_check_page(place + i * PAGE, 9, n * run + i);
            t_check_zero(place + (run + 7) * PAGE, PAGE);
        }
        T_ASSERT(t_native() || round == 0 || absent > 0, "nothing left memory");
        t_check(memory, BYTES, 1);
    }
    T_SYS(munmap(start, reserved));
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*body)(void);
        bool prepared; /* under pressure before it begins */
    } cases[] = {
        {"dont-need", dont_need, true},     {"lazy-free", lazy_free, true},
        {"unmap", unmap, true},             {"map-over", map_over, true},
        {"remap-move", remap_move, true},   {"remap-keep", remap_keep, true},
        {"remap-grow", remap_grow, false},  {"protect", protect, true},
        {"arena", arena, false},            {"heap-end", heap_end, false},
        {"lock", lock, true},               {"huge", huge, false},
        {"grows-down", grows_down, true},   {"sparse", sparse, true},
    };
    t_start();
    T_ASSERT(argc > 1, "which case?");
    for (size_t c = 0; c < COUNT(cases); c++) {
        if (strcmp(argv[1], cases[c].name) != 0)
            continue;
        if (cases[c].prepared) {
            memory = t_map(BYTES);
            t_fill(memory, BYTES, 1);
            t_wait_absent(memory, BYTES, 30);
        }
        cases[c].body();
        t_done();
    }
    t_fail("no case '%s'", argv[1]);
}
