/* How long a thread waits for its pages: touches random pages of SIZE_MIB, half of which
 * are stored at any time, and times those touches that had to wait. For each line that is
 * read, `COUNT`, it prints the median and the 99th percentile of as many in microseconds. */
#include "../lib/t.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <time.h>

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static int by_length(const void *a, const void *b)
{
    uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;
    return (left > right) - (left < right);
}

/* All of it was there once: a fault now is for a page that is stored. */
static long waited(void)
{
    struct rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_minflt + usage.ru_majflt;
}

int main(int argc, char **argv)
{
    T_ASSERT(argc == 2, "how many MiB?");
    size_t pages = strtoul(argv[1], NULL, 10) * (MIB / PAGE), count;
    char *memory = t_map(pages * PAGE);
    t_fill(memory, pages * PAGE, 1);
    uint64_t random = 1;
    while (scanf("%zu", &count) == 1 && count > 0) {
        uint64_t *times = malloc(count * sizeof *times);
        T_ASSERT(times, "no memory");
        for (size_t n = 0; n < count;) {
            volatile char *page = memory + t_next(&random) % pages * PAGE;
            long before = waited();
            uint64_t began = now();
            (void)*page;
            uint64_t ended = now();
            if (waited() != before)
                times[n++] = ended - began;
        }
        qsort(times, count, sizeof *times, by_length);
        printf("%.1f %.1f\n", (double)times[count / 2] / 1e3, (double)times[count * 99 / 100] / 1e3);
        fflush(stdout);
        free(times);
    }
    return 0;
}
