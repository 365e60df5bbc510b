/* Several threads map and unmap as fast as they can under pressure, also at the
 * same addresses: new memory reads zero, then keeps what was written. */
#include "../lib/t.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define BALLAST (40 * MIB)
#define THREADS 4
#define SLOTS 24
#define SLOT (64 * PAGE)

static char *arena; /* SLOTS slots with a hole after each */
static struct {
    atomic_bool taken;
    bool mapped;
    uint64_t seed;
} slots[SLOTS];
static unsigned rounds;
/* Between the slots is memory that stays, of the same kind: the kernel makes one
 * mapping of both as long as both are there. */
static bool neighbours;

static char *address_of(size_t slot) { return arena + slot * 2 * SLOT; }

/* Anywhere: the kernel likes to hand out the address that was just freed. */
static void *anywhere(void *thread)
{
    uint64_t random = (uintptr_t)thread << 32;
    for (unsigned round = 0; round < rounds; round++) {
        size_t bytes = (1 + t_next(&random) % 128) * PAGE;
        char *piece = t_map(bytes);
        t_check_zero(piece, bytes);
        t_fill(piece, bytes, random);
        t_check(piece, bytes, random);
        T_SYS(munmap(piece, bytes));
    }
    return NULL;
}

/* The same addresses from all threads: a slot is checked for what its last
 * owner wrote, then unmapped or mapped over, then filled anew. */
static void *shared_slots(void *thread)
{
    uint64_t random = (uintptr_t)thread << 32;
    for (unsigned round = 0; round < rounds; round++) {
        size_t slot = t_next(&random) % SLOTS;
        if (atomic_exchange(&slots[slot].taken, true))
            continue;
        char *start = address_of(slot);
        if (slots[slot].mapped)
            t_check(start, SLOT, slots[slot].seed);
        bool over = t_next(&random) % 2;
        if (slots[slot].mapped && !over)
            T_SYS(munmap(start, SLOT));
        if (neighbours)
            usleep(t_next(&random) % 64);
        int flags = over ? MAP_FIXED : MAP_FIXED_NOREPLACE;
        T_ASSERT(mmap(start, SLOT, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1,
                      0) == start,
                 "%s", t_error());
        t_check_zero(start, SLOT);
        slots[slot].seed = random;
        slots[slot].mapped = true;
        t_fill(start, SLOT, random);
        atomic_store(&slots[slot].taken, false);
    }
    return NULL;
}

/* Discarding in place, from several threads in one mapping. */
static void *discard(void *thread)
{
    uint64_t random = (uintptr_t)thread << 32;
    char *own = address_of((uintptr_t)thread);
    for (unsigned round = 0; round < rounds; round++) {
        size_t first = t_next(&random) % 32, count = 1 + t_next(&random) % 32;
        t_fill(own, SLOT, round);
        T_SYS(madvise(own + first * PAGE, count * PAGE, MADV_DONTNEED));
        t_check_zero(own + first * PAGE, count * PAGE);
        for (size_t i = 0; i < SLOT / PAGE; i++)
            if (i < first || i >= first + count)
                t_check_page(own + i * PAGE, round, i);
    }
    return NULL;
}

static atomic_bool stop;

static void *press(void *unused)
{
    while (!atomic_load(&stop))
        t_press();
    return unused;
}

int main(int argc, char **argv)
{
    t_start();
    T_ASSERT(argc > 1, "which case?");
    void *(*body)(void *) = NULL;
    if (!strcmp(argv[1], "anywhere")) {
        body = anywhere;
        rounds = t_times(400);
    } else if (!strcmp(argv[1], "slots")) {
        body = shared_slots;
        rounds = t_times(600);
    } else if (!strcmp(argv[1], "neighbours")) {
        body = shared_slots;
        rounds = t_times(600);
        neighbours = true;
    } else if (!strcmp(argv[1], "discard")) {
        body = discard;
        rounds = t_times(400);
    } else {
        t_fail("no case '%s'", argv[1]);
    }
    arena = T_SYS(mmap(NULL, SLOTS * 2 * SLOT, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | (neighbours ? 0 : MAP_NORESERVE), -1, 0));
    for (size_t slot = 0; slot < SLOTS; slot++) {
        if (body == discard)
            T_SYS(mprotect(address_of(slot), SLOT, PROT_READ | PROT_WRITE));
        else
            T_SYS(munmap(address_of(slot), SLOT));
        if (neighbours) {
            T_SYS(mprotect(address_of(slot) + SLOT, SLOT, PROT_READ | PROT_WRITE));
            t_fill(address_of(slot) + SLOT, SLOT, slot);
        }
    }
    t_ballast(BALLAST);
    pthread_t presser, threads[THREADS];
    T_ASSERT((errno = pthread_create(&presser, NULL, press, NULL)) == 0, "%s", t_error());
    for (uintptr_t t = 0; t < THREADS; t++)
        T_ASSERT((errno = pthread_create(&threads[t], NULL, body, (void *)t)) == 0, "%s",
                 t_error());
    for (unsigned t = 0; t < THREADS; t++)
        pthread_join(threads[t], NULL);
    atomic_store(&stop, true);
    pthread_join(presser, NULL);
    t_check_ballast();
    for (size_t slot = 0; neighbours && slot < SLOTS; slot++)
        t_check(address_of(slot) + SLOT, SLOT, slot);
    t_done();
}
