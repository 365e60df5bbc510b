/* Reads a file past the page cache, into memory of which most is evicted
 * meanwhile, and checks every byte of it.
 *
 *   reads FILE MIB wait     makes FILE; in each round one system call that brings
 *                           8 MiB from all over it
 *   reads FILE MIB submit   the same with asynchronous requests
 *
 * Says "round N" after each round, and never ends. */
#include "../lib/t.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define REQUESTS 32u
#define BYTES (256 * 1024ul)
#define SEED 7

static size_t blocks;
static char *memory;
static int file;
static aio_context_t context;
/* The blocks of a round: where they come from, and where they go. */
static size_t from[REQUESTS], to[REQUESTS];

static void make_file(void)
{
    char *block = t_map(BYTES);
    for (size_t i = 0; i < blocks; i++) {
        for (size_t p = 0; p < BYTES / PAGE; p++)
            t_fill_page(block + p * PAGE, SEED, i * (BYTES / PAGE) + p);
        T_ASSERT(pwrite(file, block, BYTES, (off_t)(i * BYTES)) == (ssize_t)BYTES, "%s", t_error());
    }
}

static void submit(void)
{
    static struct iocb requests[REQUESTS], *all[REQUESTS];
    static struct io_event events[REQUESTS];
    for (unsigned i = 0; i < REQUESTS; i++) {
        requests[i] = (struct iocb){
            .aio_lio_opcode = IOCB_CMD_PREAD,
            .aio_fildes = (uint32_t)file,
            .aio_buf = (uintptr_t)(memory + to[i] * BYTES),
            .aio_nbytes = BYTES,
            .aio_offset = (int64_t)(from[i] * BYTES),
        };
        all[i] = &requests[i];
    }
    T_ASSERT(syscall(SYS_io_submit, context, REQUESTS, all) == REQUESTS, "%s", t_error());
    for (unsigned got = 0; got < REQUESTS;) {
        long more = syscall(SYS_io_getevents, context, 1, REQUESTS - got, events, NULL);
        T_ASSERT(more > 0 || errno == EINTR, "%s", t_error());
        for (long i = 0; i < more; i++)
            T_ASSERT(events[i].res == (int64_t)BYTES, "%lld", (long long)events[i].res);
        got += more > 0 ? (unsigned)more : 0;
    }
}

/* One call: from neighbours in the file to blocks all over the memory. */
static void wait_for_it(void)
{
    struct iovec parts[REQUESTS];
    for (unsigned i = 0; i < REQUESTS; i++) {
        from[i] = from[0] % (blocks - REQUESTS) + i;
        parts[i] = (struct iovec){.iov_base = memory + to[i] * BYTES, .iov_len = BYTES};
    }
    ssize_t got = preadv(file, parts, REQUESTS, (off_t)(from[0] * BYTES));
    T_ASSERT(got == (ssize_t)(REQUESTS * BYTES), "%zd: %s", got, t_error());
}

int main(int argc, char **argv)
{
    t_start();
    T_ASSERT(argc == 4, "which file, how many MiB, and how?");
    blocks = strtoul(argv[2], NULL, 10) * (MIB / BYTES);
    T_ASSERT(blocks > REQUESTS, "more");
    bool submits = strcmp(argv[3], "submit") == 0;
    file = T_SYS(open(argv[1], O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600));
    make_file();
    memory = t_map(blocks * BYTES);
    if (submits)
        T_SYS(syscall(SYS_io_setup, REQUESTS, &context));
    uint64_t random = 1;
    for (unsigned long round = 1;; round++) {
        size_t first = t_next(&random) % blocks;
        for (unsigned i = 0; i < REQUESTS; i++) {
            from[i] = t_next(&random) % blocks;
            to[i] = (first + i * 5) % blocks;
        }
        submits ? submit() : wait_for_it();
        for (unsigned i = 0; i < REQUESTS; i++)
            for (size_t p = 0; p < BYTES / PAGE; p++)
                t_check_page(memory + to[i] * BYTES + p * PAGE, SEED, from[i] * (BYTES / PAGE) + p);
        printf("round %lu\n", round);
        fflush(stdout);
    }
}
