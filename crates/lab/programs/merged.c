/* Memory that an equal program has, too, and that the kernel may merge (KSM): looks at every
 * byte again and again, and rewrites a sixteenth, which is its own. Arguments: MiB, seconds.
 * Prints how often it has looked at all of it. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#ifndef PR_SET_MEMORY_MERGE
#define PR_SET_MEMORY_MERGE 67
#endif

enum { PAGE = 4096, WORDS = PAGE / 8, OWN_PART = 16, RANDOM_WORDS = WORDS / 4 };

static void content(uint64_t page, uint64_t version, uint64_t out[WORDS]) {
    uint64_t x = (page + 1) * 0x9E3779B97F4A7C15u ^ version;
    for (int i = 0; i < WORDS; i++) {
        if (i < RANDOM_WORDS) {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
        }
        out[i] = x;
    }
}

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec / 1e9;
}

int main(int count, char **words) {
    if (count != 3)
        return 2;
    size_t pages = (strtoul(words[1], NULL, 10) << 20) / PAGE;
    double end = now() + strtod(words[2], NULL);
    if (prctl(PR_SET_MEMORY_MERGE, 1, 0, 0, 0) != 0) {
        perror("PR_SET_MEMORY_MERGE");
        return 3;
    }
    uint64_t *memory =
        mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return 4;
    for (size_t page = 0; page < pages; page++)
        content(page, 0, memory + page * WORDS);
    uint64_t own = 0, expected[WORDS];
    unsigned rounds = 0;
    while (now() < end) {
        for (size_t page = 0; page < pages; page++) {
            uint64_t *at = memory + page * WORDS;
            int is_own = page % OWN_PART == 0;
            content(page, is_own ? own : 0, expected);
            if (memcmp(at, expected, PAGE) != 0) {
                fprintf(stderr, "page %zu is wrong in round %u\n", page, rounds);
                return 1;
            }
            if (is_own)
                content(page, ((uint64_t)getpid() << 32) + rounds, at);
        }
        own = ((uint64_t)getpid() << 32) + rounds;
        rounds++;
        usleep(100000);
    }
    printf("%u\n", rounds);
    return 0;
}
