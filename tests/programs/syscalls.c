/* System calls whose buffers lie in evicted pages: the kernel must wait for
 * the page like any reader. Also O_DIRECT reads that are in flight while their
 * buffers are under pressure. */
#include "../lib/t.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#define BYTES (56 * MIB)
#define PAGES (BYTES / PAGE)
#define CHUNK (16 * PAGE)

static char *memory;
static char path[256];
static int file;

/* A chunk of evicted memory, another one with each call. Its contents are
 * `t_fill(memory, BYTES, 1)`'s until the caller overwrites it. */
static char *evicted(void)
{
    static char *position;
    if (!position)
        position = memory;
    for (int turn = 0; turn < 1000; turn++) {
        char *page = t_next_absent(memory, BYTES - 2 * CHUNK, position);
        if (page) {
            page = memory + (size_t)(page - memory) / CHUNK * CHUNK;
            position = page + CHUNK;
            return page;
        }
        position = memory;
        t_wait_absent(memory, BYTES, 20);
    }
    t_fail("no evicted chunk to be had");
}

static size_t index_of(const char *chunk) { return (size_t)(chunk - memory) / PAGE; }

static void restore(char *chunk)
{
    for (size_t i = 0; i < CHUNK / PAGE; i++)
        t_fill_page(chunk + i * PAGE, 1, index_of(chunk) + i);
}

/* Fails unless `chunk` holds the contents that belong to `origin`. */
static void holds(const char *chunk, const char *origin)
{
    for (size_t i = 0; i < CHUNK / PAGE; i++)
        t_check_page(chunk + i * PAGE, 1, index_of(origin) + i);
}

#define WHOLE(call) T_ASSERT((call) == (ssize_t)CHUNK, "%s", t_error())

static void files(void)
{
    char *from = evicted(), *to = evicted();
    WHOLE(pwrite(file, from, CHUNK, 0));
    WHOLE(pread(file, to, CHUNK, 0));
    holds(to, from);
    restore(to);
    from = evicted(), to = evicted();
    T_SYS(lseek(file, 0, SEEK_SET));
    WHOLE(write(file, from, CHUNK));
    T_SYS(lseek(file, 0, SEEK_SET));
    WHOLE(read(file, to, CHUNK));
    holds(to, from);
    restore(to);
}

/* The vector itself lies in an evicted page, too. */
static void vectors(void)
{
    char *where = evicted(), *from = evicted(), *to = evicted();
    struct iovec *parts = (struct iovec *)where;
    for (size_t i = 0; i < 16; i++)
        parts[i] = (struct iovec){from + (15 - i) * PAGE, PAGE};
    t_wait_absent(memory, BYTES, 20);
    WHOLE(pwritev(file, parts, 16, 0));
    for (size_t i = 0; i < 16; i++)
        parts[i] = (struct iovec){to + (15 - i) * PAGE, PAGE};
    T_SYS(lseek(file, 0, SEEK_SET));
    WHOLE(readv(file, parts, 16));
    holds(to, from);
    restore(to);
    /* From ourselves to ourselves, both ends evicted. */
    from = evicted(), to = evicted();
    struct iovec source = {from, CHUNK}, target = {to, CHUNK};
    ssize_t got = process_vm_readv(getpid(), &target, 1, &source, 1, 0);
    T_ASSERT(got == (ssize_t)CHUNK, "%zd: %s", got, t_error());
    holds(to, from);
    restore(to);
    restore(where);
}

static void sockets(void)
{
    int pair[2];
    T_SYS(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair));
    int size = 4 * CHUNK;
    T_SYS(setsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &size, sizeof size));
    char *from = evicted(), *to = evicted(), *head = evicted();
    struct msghdr *message = memset(head, 0, CHUNK);
    struct iovec *part = (struct iovec *)(head + PAGE);
    char *control = head + 2 * PAGE;
    *part = (struct iovec){from, CHUNK};
    message->msg_iov = part;
    message->msg_iovlen = 1;
    message->msg_control = control;
    message->msg_controllen = CMSG_SPACE(sizeof(int));
    struct cmsghdr *header = CMSG_FIRSTHDR(message);
    *header = (struct cmsghdr){CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
    memcpy(CMSG_DATA(header), &file, sizeof file);
    WHOLE(sendmsg(pair[0], message, 0));
    part->iov_base = to;
    memset(control, 0, PAGE);
    message->msg_controllen = CMSG_SPACE(sizeof(int));
    WHOLE(recvmsg(pair[1], message, 0));
    int received;
    memcpy(&received, CMSG_DATA(CMSG_FIRSTHDR(message)), sizeof received);
    T_ASSERT(received != file && fcntl(received, F_GETFD) >= 0, "no descriptor came");
    close(received);
    holds(to, from);
    restore(to);
    restore(head);
    close(pair[0]);
    close(pair[1]);
}

static void pipes(void)
{
    int ends[2], other[2];
    T_SYS(pipe(ends));
    T_SYS(pipe(other));
    T_SYS(fcntl(ends[1], F_SETPIPE_SZ, (int)CHUNK * 2));
    T_SYS(fcntl(other[1], F_SETPIPE_SZ, (int)CHUNK * 2));
    char *from = evicted(), *to = evicted();
    WHOLE(write(ends[1], from, CHUNK));
    WHOLE(splice(ends[0], NULL, other[1], NULL, CHUNK, 0));
    WHOLE(read(other[0], to, CHUNK));
    holds(to, from);
    restore(to);
    /* vmsplice holds the pages themselves until the pipe is read. */
    from = evicted();
    struct iovec part = {from, CHUNK};
    WHOLE(vmsplice(ends[1], &part, 1, 0));
    for (size_t i = 0; i < PAGES; i += 3)
        t_check_page(memory + i * PAGE, 1, i);
    to = evicted();
    WHOLE(read(ends[0], to, CHUNK));
    holds(to, from);
    holds(from, from);
    restore(to);
    for (int i = 0; i < 2; i++) {
        close(ends[i]);
        close(other[i]);
    }
}

/* A thread that sleeps in read() while its buffer leaves. */
static void *late_write(void *end)
{
    t_wait_absent(memory, BYTES, 20);
    char *from = memory + BYTES - CHUNK;
    WHOLE(write(*(int *)end, from, CHUNK));
    return NULL;
}

static void blocking_read(void)
{
    int ends[2];
    T_SYS(pipe(ends));
    T_SYS(fcntl(ends[1], F_SETPIPE_SZ, (int)CHUNK));
    char *to = evicted();
    pthread_t thread;
    T_ASSERT((errno = pthread_create(&thread, NULL, late_write, &ends[1])) == 0, "%s", t_error());
    for (size_t have = 0; have < CHUNK;) {
        ssize_t got = T_SYS(read(ends[0], to + have, CHUNK - have));
        have += (size_t)got;
    }
    pthread_join(thread, NULL);
    holds(to, memory + BYTES - CHUNK);
    restore(to);
    close(ends[0]);
    close(ends[1]);
}

static void small_results(void)
{
    char *where = evicted();
    struct stat *status = (struct stat *)where, expected;
    T_SYS(fstat(file, &expected));
    T_SYS(fstat(file, status));
    T_ASSERT(status->st_ino == expected.st_ino && status->st_size == expected.st_size, "stat");
    restore(where);

    where = evicted(); /* the path in evicted memory */
    strcpy(where, path);
    struct stat *second = (struct stat *)(evicted());
    t_wait_absent(memory, BYTES, 20);
    T_SYS(stat(where, second));
    T_ASSERT(second->st_ino == expected.st_ino, "another file");
    restore(where);
    restore(memory + (size_t)((char *)second - memory) / CHUNK * CHUNK);

    where = evicted();
    char *copy = evicted();
    T_ASSERT(getrandom(where, CHUNK, 0) == (ssize_t)CHUNK, "%s", t_error());
    T_ASSERT(memcmp(where, where + CHUNK / 2, CHUNK / 2) != 0, "not random");
    static char known[CHUNK];
    memcpy(known, where, CHUNK);
    memcpy(copy, known, CHUNK);
    t_wait_absent(memory, BYTES, 20);
    T_ASSERT(memcmp(where, known, CHUNK) == 0 && memcmp(copy, known, CHUNK) == 0, "changed");
    restore(where);
    restore(copy);

    where = evicted();
    struct utsname *name = (struct utsname *)where, short_name;
    T_SYS(uname(&short_name));
    T_SYS(uname(name));
    T_ASSERT(memcmp(name, &short_name, sizeof short_name) == 0, "uname");
    restore(where);

    where = evicted();
    T_ASSERT(getcwd(where, CHUNK) && where[0] == '/', "getcwd: %s", t_error());
    restore(where);

    where = evicted();
    struct timespec *pause = (struct timespec *)where;
    *pause = (struct timespec){.tv_nsec = 1000};
    T_SYS(nanosleep(pause, pause + 1));
    T_SYS(clock_gettime(CLOCK_REALTIME, pause));
    T_ASSERT(pause->tv_sec > 1600000000, "clock");
    restore(where);

    int ends[2];
    T_SYS(pipe(ends));
    T_SYS(write(ends[1], "x", 1));
    where = evicted();
    struct pollfd *poll_set = (struct pollfd *)where;
    poll_set[0] = (struct pollfd){.fd = ends[0], .events = POLLIN};
    T_ASSERT(poll(poll_set, 1, 0) == 1 && poll_set[0].revents == POLLIN, "poll");
    T_SYS(ioctl(ends[0], FIONREAD, (int *)(where + PAGE)));
    T_ASSERT(*(int *)(where + PAGE) == 1, "FIONREAD");
    restore(where);
    int group = T_SYS(epoll_create1(0));
    struct epoll_event *event = (struct epoll_event *)evicted();
    where = (char *)event;
    *event = (struct epoll_event){.events = EPOLLIN, .data.u64 = 77};
    T_SYS(epoll_ctl(group, EPOLL_CTL_ADD, ends[0], event));
    event = (struct epoll_event *)evicted();
    T_ASSERT(epoll_wait(group, event, 4, 0) == 1 && event->data.u64 == 77, "epoll");
    restore((char *)event);
    restore(where);
    close(group);
    close(ends[0]);
    close(ends[1]);
}

static void buffers(void)
{
    for (unsigned round = 0; round < t_times(4); round++) {
        files();
        vectors();
        sockets();
        pipes();
        blocking_read();
        small_results();
    }
    t_check(memory, BYTES, 1);
}

/* --- O_DIRECT: the device writes into the pages themselves --- */

#define READ (1 * MIB)
#define FILE_BYTES (32 * MIB)
#define READERS 3
static atomic_bool stop;

static void *press(void *unused)
{
    uint64_t random = 5;
    while (!atomic_load(&stop)) {
        size_t i = PAGES / 2 + t_next(&random) % (PAGES / 2);
        t_check_page(memory + i * PAGE, 1, i);
    }
    return unused;
}

static void *direct_reader(void *number)
{
    int fd = T_SYS(open(path, O_RDONLY | O_DIRECT | O_CLOEXEC));
    uint64_t random = (uintptr_t)number << 40;
    char *area = memory + (uintptr_t)number * 8 * MIB;
    for (unsigned n = 0; n < t_times(150); n++) {
        char *to = area + t_next(&random) % 8 * MIB;
        size_t from = t_next(&random) % (FILE_BYTES / READ) * READ;
        T_ASSERT(pread(fd, to, READ, (off_t)from) == (ssize_t)READ, "%s", t_error());
        for (size_t i = 0; i < READ / PAGE; i++)
            t_check_page(to + i * PAGE, 50, from / PAGE + i);
    }
    close(fd);
    return NULL;
}

static void direct(void)
{
    char *page = T_SYS(mmap(NULL, FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    for (size_t i = 0; i < FILE_BYTES / PAGE; i++)
        t_fill_page(page + i * PAGE, 50, i);
    T_SYS(munmap(page, FILE_BYTES));
    T_SYS(fsync(file));
    int fd = open(path, O_RDONLY | O_DIRECT);
    if (fd < 0 && errno == EINVAL) {
        t_gate("skip the build directory's file system has no O_DIRECT");
        _exit(0);
    }
    close(fd);
    pthread_t presser, readers[READERS];
    pthread_create(&presser, NULL, press, NULL);
    for (uintptr_t r = 0; r < READERS; r++)
        pthread_create(&readers[r], NULL, direct_reader, (void *)r);
    for (unsigned r = 0; r < READERS; r++)
        pthread_join(readers[r], NULL);
    atomic_store(&stop, true);
    pthread_join(presser, NULL);
    for (size_t i = PAGES / 2; i < PAGES; i++)
        t_check_page(memory + i * PAGE, 1, i);
}

int main(int argc, char **argv)
{
    t_start();
    T_ASSERT(argc == 3, "which case, and a directory for files");
    snprintf(path, sizeof path, "%s/file-%d", argv[2], getpid());
    file = T_SYS(open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    T_SYS(ftruncate(file, FILE_BYTES));
    memory = t_map(BYTES);
    t_fill(memory, BYTES, 1);
    t_wait_absent(memory, BYTES, 30);
    if (!strcmp(argv[1], "buffers"))
        buffers();
    else if (!strcmp(argv[1], "direct"))
        direct();
    else
        t_fail("no case '%s'", argv[1]);
    T_SYS(unlink(path));
    t_done();
}
