/* The handshake of crates/units/src/wire.rs spoken by hand, for programs that play an
 * agent themselves. Each function is used by some of them. */
#pragma once
#include "t.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wunused-variable"

#define MAGIC 0x5354524154410005ull
#define BATCH 256
#define TRANSFER (2 * BATCH * PAGE)
#define NEW_USERFAULTFD _IO(0xAA, 0x00)

enum { START = 1, FORKED = 2, RESUMED = 3 };
enum { UNMANAGED = 1, CREATE = 2, ADOPT = 3, RESUME = 4 };
enum { MOVE = 1, DISCARD = 2, POPULATE = 3, LEAVE = 4 };

struct hello {
    uint64_t magic;
    uint32_t kind, pid;
    uint64_t token, transfer, probe, own_start, own_end, restart;
};
struct welcome {
    uint64_t magic;
    uint32_t verdict, space;
    uint64_t back;
};
struct entry {
    _Atomic uint64_t address;
    _Atomic int32_t result;
    uint32_t reserved;
};
struct slot {
    _Atomic uint64_t control_block, stack;
    _Atomic uint32_t tid;
    uint32_t reserved;
};
struct control {
    _Atomic uint64_t magic;
    _Atomic uint32_t command_seq, command, count, first_slot, batch_epoch, batch_thread_seq;
    _Atomic uint32_t done_seq, epoch, reader_busy, mover_busy, thread_seq, thread_overflow;
    _Atomic uint32_t pinned_seq, reserved;
    struct entry entries[BATCH];
    struct slot threads[4096];
    _Atomic uint64_t pinned[1024];
    _Atomic uint64_t hint_tail, hint_head;
    struct hint {
        _Atomic uint64_t turn, start, end_kind;
    } hints[1024];
};
_Static_assert(sizeof(struct hello) == 64 && sizeof(struct welcome) == 24, "as in wire.rs");
_Static_assert(sizeof(struct entry) == 16 && sizeof(struct slot) == 24, "as in wire.rs");

static uint64_t token;
static char socket_path[108];
static char *transfer;
static struct control *control;
static int link_fd, userfaultfd_fd = -1, control_fd = -1;
static uint64_t randomness = 42;

static int dial(void)
{
    int fd = T_SYS(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strcpy(address.sun_path, socket_path);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

/* Sends a message with descriptors; what the other side thinks is its affair. */
static bool tell(int fd, const void *message, size_t bytes, const int *descriptors, size_t count)
{
    char space[CMSG_SPACE(253 * sizeof(int))] = {0};
    struct iovec part = {(void *)message, bytes};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1};
    if (count) {
        header.msg_control = space;
        header.msg_controllen = CMSG_SPACE(count * sizeof(int));
        struct cmsghdr *control_message = CMSG_FIRSTHDR(&header);
        control_message->cmsg_level = SOL_SOCKET;
        control_message->cmsg_type = SCM_RIGHTS;
        control_message->cmsg_len = CMSG_LEN(count * sizeof(int));
        memcpy(CMSG_DATA(control_message), descriptors, count * sizeof(int));
    }
    return sendmsg(fd, &header, MSG_NOSIGNAL) == (ssize_t)bytes;
}

/* Receives at most `bytes`; the descriptors that came are kept in `got`. */
static ssize_t hear(int fd, void *message, size_t bytes, int *got, size_t *count)
{
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    if (poll(&ready, 1, 10000) != 1)
        return -1;
    char space[CMSG_SPACE(8 * sizeof(int))];
    struct iovec part = {message, bytes};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space,
                            .msg_controllen = sizeof space};
    ssize_t length = recvmsg(fd, &header, MSG_CMSG_CLOEXEC);
    *count = 0;
    struct cmsghdr *one = CMSG_FIRSTHDR(&header);
    if (length > 0 && one && one->cmsg_type == SCM_RIGHTS) {
        *count = (one->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        memcpy(got, CMSG_DATA(one), *count * sizeof(int));
    }
    return length;
}

static struct hello honest_hello(void)
{
    char *probe = t_map(PAGE);
    /* With no access: the kernel would make it one mapping with other memory beside it,
     * which would then be the agent's own, too. */
    char *own = T_SYS(mmap(NULL, 16 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    return (struct hello){MAGIC,
                          START,
                          (uint32_t)getpid(),
                          token,
                          (uintptr_t)transfer,
                          (uintptr_t)probe,
                          (uintptr_t)own,
                          (uintptr_t)own + 16 * PAGE,
                          0};
}

/* The first half: hello, welcome. True when the daemon would manage us. */
static bool half_way(const struct hello *hello)
{
    struct welcome welcome = {0};
    int got[8];
    size_t count = 0;
    link_fd = dial();
    T_ASSERT(link_fd >= 0, "connecting to %s: %s", socket_path, t_error());
    if (!tell(link_fd, hello, sizeof *hello, NULL, 0) ||
        hear(link_fd, &welcome, sizeof welcome, got, &count) != (ssize_t)sizeof welcome ||
        welcome.verdict != CREATE || count != 2)
        return false;
    control_fd = got[0];
    userfaultfd_fd = ioctl(got[1], NEW_USERFAULTFD, O_CLOEXEC | O_NONBLOCK);
    close(got[1]);
    return userfaultfd_fd >= 0;
}

static void whole_way(void)
{
    struct hello hello = honest_hello();
    uint64_t magic = MAGIC, ready = 0;
    int got[8];
    size_t count;
    T_ASSERT(half_way(&hello), "the daemon did not welcome us: the lie could not be told");
    T_ASSERT(tell(link_fd, &magic, sizeof magic, &userfaultfd_fd, 1), "%s", t_error());
    T_ASSERT(hear(link_fd, &ready, sizeof ready, got, &count) == 8 && ready == MAGIC, "no Ready");
    control = T_SYS(mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, control_fd, 0));
}

static void futex(_Atomic uint32_t *word, int operation, uint32_t value)
{
    struct timespec a_while = {.tv_nsec = 20000000};
    syscall(SYS_futex, word, operation, value, operation == 0 ? &a_while : NULL, NULL, 0);
}

/* Waits for a command other than the last one; false when none comes. */
static bool commanded(uint32_t last)
{
    for (int turn = 0; turn < 1000; turn++) {
        if (atomic_load(&control->command_seq) != last)
            return true;
        futex(&control->command_seq, 0, last);
    }
    return false;
}

static void answer(uint32_t sequence)
{
    atomic_store(&control->done_seq, sequence);
    futex(&control->done_seq, 1, 1 << 30);
}

/* The same for a batch of moves; whatever comes before is done: nothing. */
static bool told_to_move(void)
{
    uint32_t last = 0;
    while (commanded(last)) {
        last = atomic_load(&control->command_seq);
        if (atomic_load(&control->command) == MOVE)
            return true;
        answer(last);
    }
    return false;
}

/* Throws the real agent out, by executing this program again without the preload, and
 * learns who manages it. */
static void play_agent(char **argv)
{
    if (getenv("LD_PRELOAD")) {
        unsetenv("LD_PRELOAD");
        execv("/proc/self/exe", argv);
        t_fail("execv: %s", t_error());
    }
    t_start();
    T_ASSERT(getenv("STRATA_TOKEN") && getenv("STRATA_AGENT_SOCKET"), "not under Strata");
    token = strtoull(getenv("STRATA_TOKEN"), NULL, 16);
    snprintf(socket_path, sizeof socket_path, "%s", getenv("STRATA_AGENT_SOCKET"));
}
