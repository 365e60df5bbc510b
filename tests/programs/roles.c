/* Two regions, one in use all the time and one hardly ever, that change places: for
 * cases about where pages lie. The cold one is there first.
 *
 *   roles MIB             two regions of so many MiB; a thread reads, checks and
 *                         sometimes writes pages in random order. Gate "regions
 *                         HOT COLD" (addresses); answers:
 *     tell                gate "uses HOT COLD": how often so far, by region
 *     swap                hot becomes cold and cold hot; then the same gate
 *     end                 checks everything and ends */
#include "../lib/t.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Of so many uses one is the cold region's... */
#define RARE 1000
/* ...and one writes. */
#define WRITES 8

static struct region {
    uint64_t seed;
    char *memory;
    unsigned char *version;
    atomic_ullong uses;
} regions[2] = {{.seed = 1}, {.seed = 1001}};
static size_t pages;
static atomic_uint hot;
static atomic_bool stop;

static void use(struct region *region, uint64_t random)
{
    size_t i = random / RARE % pages;
    unsigned char *version = &region->version[i];
    char *page = region->memory + i * PAGE;
    t_check_page(page, region->seed + *version, i);
    if (random / RARE / pages % WRITES == 0)
        t_fill_page(page, region->seed + ++*version, i);
    atomic_fetch_add(&region->uses, 1);
}

static void *work(void *state)
{
    while (!atomic_load(&stop)) {
        uint64_t random = t_next(state);
        unsigned now_hot = atomic_load(&hot);
        use(&regions[random % RARE == 0 ? !now_hot : now_hot], random);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    t_start();
    T_ASSERT(argc == 2, "how many MiB?");
    pages = strtoul(argv[1], NULL, 10) * (MIB / PAGE);
    for (int r = 1; r >= 0; r--) {
        regions[r].version = t_map(pages / PAGE * PAGE + PAGE);
        regions[r].memory = t_map(pages * PAGE);
        t_fill(regions[r].memory, pages * PAGE, regions[r].seed);
    }
    char word[80];
    snprintf(word, sizeof word, "regions %lu %lu", (unsigned long)regions[0].memory,
             (unsigned long)regions[1].memory);
    static uint64_t state;
    pthread_t worker;
    T_ASSERT((errno = pthread_create(&worker, NULL, work, &state)) == 0, "%s", t_error());
    for (;;) {
        const char *answer = t_gate(word);
        if (!strcmp(answer, "swap"))
            atomic_fetch_xor(&hot, 1);
        else if (strcmp(answer, "tell"))
            break;
        snprintf(word, sizeof word, "uses %llu %llu", atomic_load(&regions[0].uses),
                 atomic_load(&regions[1].uses));
    }
    atomic_store(&stop, true);
    pthread_join(worker, NULL);
    for (int r = 0; r < 2; r++)
        for (size_t i = 0; i < pages; i++)
            t_check_page(regions[r].memory + i * PAGE, regions[r].seed + regions[r].version[i], i);
    t_done();
}
