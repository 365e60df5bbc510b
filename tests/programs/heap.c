/* malloc under pressure: random sizes from several threads, the brk heap alone,
 * realloc, and memory taken as fast as it can be touched. Runs as well with
 * another allocator preloaded. */
#include "../lib/t.h"

#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define THREADS 4
#define BLOCKS 1500

static unsigned rounds;

struct block {
    unsigned char *start;
    size_t bytes;
    uint64_t seed;
};

/* A pattern with a period of 64 bytes or so and a seed in each period. */
static void write_block(const struct block *block, size_t from)
{
    for (size_t i = from & ~63ul; i < block->bytes; i += 64) {
        unsigned char record[64] = "block of a program that allocates and frees, checked byte by";
        uint64_t word = t_mix(block->seed + i);
        memcpy(record + 56, &word, 4);
        size_t length = block->bytes - i < 64 ? block->bytes - i : 64;
        memcpy(block->start + i, record, length);
    }
}

static void check_block(const struct block *block, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += 64) {
        unsigned char record[64] = "block of a program that allocates and frees, checked byte by";
        uint64_t word = t_mix(block->seed + i);
        memcpy(record + 56, &word, 4);
        size_t length = bytes - i < 64 ? bytes - i : 64;
        if (memcmp(block->start + i, record, length) != 0)
            t_fail("block %p of %zu bytes is wrong at %zu", (void *)block->start, block->bytes, i);
    }
}

static size_t random_size(uint64_t *random)
{
    uint64_t word = t_next(random);
    switch (word % 16) {
    case 0:
        return 1 + (word >> 8) % (400 * 1024); /* mmapped by glibc */
    case 1:
    case 2:
        return 1 + (word >> 8) % (40 * 1024);
    default:
        return 1 + (word >> 8) % 3000;
    }
}

static void *churn(void *thread)
{
    uint64_t random = (uintptr_t)thread << 40;
    struct block *blocks = calloc(BLOCKS, sizeof *blocks);
    T_ASSERT(blocks, "no memory");
    for (unsigned round = 0; round < rounds; round++) {
        struct block *block = &blocks[t_next(&random) % BLOCKS];
        if (!block->start) {
            block->bytes = random_size(&random);
            block->seed = random;
            bool zeroed = t_next(&random) % 4 == 0;
            block->start = zeroed ? calloc(1, block->bytes) : malloc(block->bytes);
            T_ASSERT(block->start, "no memory");
            for (size_t i = 0; zeroed && i < block->bytes; i++)
                T_ASSERT(block->start[i] == 0, "calloc gave old bytes");
            write_block(block, 0);
            continue;
        }
        check_block(block, block->bytes);
        if (t_next(&random) % 3 == 0) {
            size_t bytes = random_size(&random), kept = bytes < block->bytes ? bytes : block->bytes;
            block->start = realloc(block->start, bytes);
            T_ASSERT(block->start, "no memory");
            block->bytes = bytes;
            check_block(block, kept);
            write_block(block, kept);
        } else {
            free(block->start);
            block->start = NULL;
        }
    }
    for (unsigned i = 0; i < BLOCKS; i++)
        if (blocks[i].start) {
            check_block(&blocks[i], blocks[i].bytes);
            free(blocks[i].start);
        }
    free(blocks);
    return NULL;
}

static void run(unsigned threads)
{
    pthread_t ids[THREADS];
    for (uintptr_t t = 0; t < threads; t++)
        T_ASSERT((errno = pthread_create(&ids[t], NULL, churn, (void *)t)) == 0, "%s", t_error());
    for (unsigned t = 0; t < threads; t++)
        pthread_join(ids[t], NULL);
}

/* One block that grows by realloc to most of the memory, with small ones kept
 * alive in between so that it has to move. */
static void grow(void)
{
    struct block block = {NULL, 0, 11};
    static struct block small[256];
    for (unsigned step = 0; step < 220; step++) {
        size_t old = block.bytes;
        block.bytes += 400 * 1024 + step;
        block.start = realloc(block.start, block.bytes);
        T_ASSERT(block.start, "no memory");
        write_block(&block, old);
        small[step] = (struct block){malloc(5000), 5000, step};
        write_block(&small[step], 0);
        if (step % 40 == 0)
            check_block(&block, block.bytes);
    }
    check_block(&block, block.bytes);
    for (unsigned step = 0; step < 220; step++)
        check_block(&small[step], small[step].bytes);
    free(block.start);
}

/* Fresh memory at full speed: what a budget is exceeded by before anybody can
 * notice. */
static void rush(size_t mib)
{
    size_t bytes = mib * MIB;
    char *start = t_map(bytes);
    t_gate("start");
    for (size_t i = 0; i < bytes; i += PAGE) {
        /* Little work for each page, and pages that compress well. */
        uint64_t *page = (uint64_t *)(start + i);
        for (size_t w = 0; w < PAGE / 8; w += 64)
            page[w] = t_mix(i + w);
    }
    t_gate("filled");
    for (size_t i = 0; i < bytes; i += PAGE) {
        const uint64_t *page = (const uint64_t *)(start + i);
        for (size_t w = 0; w < PAGE / 8; w++)
            if (page[w] != (w % 64 ? 0 : t_mix(i + w)))
                t_fail("page %zu is wrong at word %zu", i / PAGE, w);
    }
}

int main(int argc, char **argv)
{
    t_start();
    T_ASSERT(argc > 1, "which case?");
    if (!strcmp(argv[1], "churn")) {
        rounds = t_times(9000);
        run(THREADS);
    } else if (!strcmp(argv[1], "brk")) {
        mallopt(M_MMAP_MAX, 0);
        mallopt(M_ARENA_MAX, 1);
        mallopt(M_TRIM_THRESHOLD, 1 << 30);
        char *before = sbrk(0);
        rounds = t_times(9000);
        run(THREADS);
        T_ASSERT((char *)sbrk(0) - before >= (ptrdiff_t)(32 * MIB), "the heap was elsewhere");
    } else if (!strcmp(argv[1], "grow")) {
        grow();
    } else if (!strcmp(argv[1], "rush")) {
        rush(argc > 2 ? strtoul(argv[2], NULL, 10) : 1024);
    } else {
        t_fail("no case '%s'", argv[1]);
    }
    t_done();
}
