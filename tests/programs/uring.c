/* io_uring under pressure: fixed buffers, which the kernel pins, and plain
 * ones. A read that waits in the kernel while everything around it leaves must
 * arrive where the program will look. Raw system calls, no liburing. */
#include "../lib/t.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define BYTES (40 * MIB)
#define PAGES (BYTES / PAGE)
#define ENTRIES 16
#define BUFFERS 8
#define BUFFER (64 * PAGE)

static char *memory;
static int ring;
static char *queue;                  /* submission and completion rings */
static struct io_uring_sqe *entries; /* what is submitted */
static struct io_uring_params parameters;

static void set_up(void)
{
    ring = (int)syscall(SYS_io_uring_setup, ENTRIES, &parameters);
    if (ring < 0) {
        char line[100];
        snprintf(line, sizeof line, "skip io_uring: %s", t_error());
        t_gate(line);
        _exit(0);
    }
    T_ASSERT(parameters.features & IORING_FEAT_SINGLE_MMAP, "an old kernel");
    size_t bytes = parameters.cq_off.cqes + parameters.cq_entries * sizeof(struct io_uring_cqe);
    size_t other = parameters.sq_off.array + parameters.sq_entries * sizeof(unsigned);
    bytes = bytes > other ? bytes : other;
    queue = T_SYS(mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring,
                       IORING_OFF_SQ_RING));
    entries = T_SYS(mmap(NULL, parameters.sq_entries * sizeof *entries, PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQES));
}

static void submit(const struct io_uring_sqe *entry)
{
    _Atomic unsigned *tail = (void *)(queue + parameters.sq_off.tail);
    unsigned mask = *(unsigned *)(queue + parameters.sq_off.ring_mask);
    unsigned *array = (unsigned *)(queue + parameters.sq_off.array);
    unsigned position = atomic_load(tail);
    entries[position & mask] = *entry;
    array[position & mask] = position & mask;
    atomic_store(tail, position + 1);
    T_ASSERT(syscall(SYS_io_uring_enter, ring, 1, 0, 0, NULL, 0) == 1, "%s", t_error());
}

/* What a completion says of its request. */
struct done {
    int res;
    uint64_t user_data;
};

static struct done complete(void)
{
    _Atomic unsigned *head = (void *)(queue + parameters.cq_off.head);
    _Atomic unsigned *tail = (void *)(queue + parameters.cq_off.tail);
    unsigned mask = *(unsigned *)(queue + parameters.cq_off.ring_mask);
    struct io_uring_cqe *all = (struct io_uring_cqe *)(queue + parameters.cq_off.cqes);
    while (atomic_load(head) == atomic_load(tail))
        if (syscall(SYS_io_uring_enter, ring, 0, 1, IORING_ENTER_GETEVENTS, NULL, 0) < 0)
            T_ASSERT(errno == EINTR, "%s", t_error());
    const struct io_uring_cqe *one = &all[atomic_load(head) & mask];
    struct done result = {one->res, one->user_data};
    atomic_fetch_add(head, 1);
    return result;
}

static char *buffer(size_t number) { return memory + number * (BYTES / BUFFERS); }

/* Everything but the buffers is read and left to leave again. */
static void press(void)
{
    for (size_t i = 0; i < PAGES; i++)
        if (i % (PAGES / BUFFERS) >= BUFFER / PAGE)
            t_check_page(memory + i * PAGE, 1, i);
    t_wait_absent(memory, BYTES, 20);
}

/* Reads from a file, the answer checked after each. */
static void read_file(int file, size_t file_pages, unsigned char opcode)
{
    uint64_t random = opcode;
    for (unsigned n = 0; n < t_times(64); n++) {
        size_t b = n % BUFFERS, at = t_next(&random) % (file_pages - BUFFER / PAGE);
        submit(&(struct io_uring_sqe){.opcode = opcode,
                                      .fd = file,
                                      .off = at * PAGE,
                                      .addr = (uintptr_t)buffer(b),
                                      .len = BUFFER,
                                      .buf_index = opcode == IORING_OP_READ_FIXED ? (uint16_t)b : 0,
                                      .user_data = n});
        struct done result = complete();
        T_ASSERT(result.res == (int)BUFFER && result.user_data == n, "read said %d", result.res);
        if (n % 64 == 0)
            press();
        for (size_t i = 0; i < BUFFER / PAGE; i++)
            t_check_page(buffer(b) + i * PAGE, 60, at + i);
    }
}

/* Reads from pipes that are empty until everything around has left. */
static void read_pipes(unsigned char opcode)
{
    int pipes[BUFFERS][2];
    static char page[16 * PAGE];
    for (size_t b = 0; b < BUFFERS; b++) {
        T_SYS(pipe(pipes[b]));
        submit(&(struct io_uring_sqe){.opcode = opcode,
                                      .fd = pipes[b][0],
                                      .off = (uint64_t)-1,
                                      .addr = (uintptr_t)buffer(b),
                                      .len = sizeof page,
                                      .buf_index = opcode == IORING_OP_READ_FIXED ? (uint16_t)b : 0,
                                      .user_data = b});
    }
    press();
    for (size_t b = 0; b < BUFFERS; b++) {
        t_fill(page, sizeof page, 70 + b);
        T_ASSERT(write(pipes[b][1], page, sizeof page) == (ssize_t)sizeof page, "%s", t_error());
        struct done result = complete();
        T_ASSERT(result.res > 0 && result.user_data == b, "read said %d", result.res);
        /* A pipe may hand over less; whatever came must be right. */
        for (size_t i = 0; i < (size_t)result.res / PAGE; i++)
            t_check_page(buffer(b) + i * PAGE, 70 + b, i);
        close(pipes[b][0]);
        close(pipes[b][1]);
    }
}

int main(int argc, char **argv)
{
    t_start();
    T_ASSERT(argc == 3, "fixed or plain, and a directory for files");
    bool fixed = !strcmp(argv[1], "fixed");
    char path[256];
    snprintf(path, sizeof path, "%s/uring-%d", argv[2], getpid());
    int file = T_SYS(open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    T_SYS(unlink(path));
    size_t file_pages = 2048;
    static char page[PAGE];
    for (size_t i = 0; i < file_pages; i++) {
        t_fill_page(page, 60, i);
        T_ASSERT(write(file, page, PAGE) == (ssize_t)PAGE, "%s", t_error());
    }
    set_up();
    memory = t_map(BYTES);
    t_fill(memory, BYTES, 1);
    t_wait_absent(memory, BYTES, 30);
    if (fixed) {
        struct iovec vectors[BUFFERS];
        for (size_t b = 0; b < BUFFERS; b++)
            vectors[b] = (struct iovec){buffer(b), BUFFER};
        T_SYS(syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, vectors, BUFFERS));
        press();
        for (size_t b = 0; b < BUFFERS; b++)
            T_ASSERT(t_absent(buffer(b), BUFFER) == 0, "a page of a fixed buffer left");
    }
    unsigned char opcode = fixed ? IORING_OP_READ_FIXED : IORING_OP_READ;
    for (unsigned round = 0; round < 2; round++) {
        read_file(file, file_pages, opcode);
        read_pipes(opcode);
    }
    press();
    t_done();
}
