/* An agent that lies. Started by `strata run`, it throws the real agent out by
 * executing itself again without the preload, speaks the handshake of
 * crates/units/src/wire.rs by hand and then breaks the rules, one way a mode.
 * It may come to harm; nobody else may. It is not a test of the real agent.
 *
 * Gate words: "acted" when the lie has been told, answered when it may end. */
#include "../lib/agent.h"

#include <pthread.h>
#include <sys/stat.h>

#define BYTES (48 * MIB)

static char *memory;

/* Far over the budget, so that the daemon wants something of us. */
static void be_fat(void)
{
    memory = t_map(BYTES);
    t_fill(memory, BYTES, 1);
}

/* --- the modes --- */

static void garbage(void)
{
    char bytes[4096];
    for (unsigned n = 0; n < t_times(300); n++) {
        for (size_t i = 0; i < sizeof bytes; i += 8)
            *(uint64_t *)(bytes + i) = t_next(&randomness);
        struct hello hello = honest_hello();
        static const size_t lengths[] = {0, 1, 8, 55, 56, 57, 100, 4096};
        int fd = dial();
        if (fd < 0)
            continue;
        switch (n % 4) {
        case 0:
            tell(fd, bytes, lengths[t_next(&randomness) % COUNT(lengths)], NULL, 0);
            break;
        case 1: /* right but for one field */
            ((uint64_t *)&hello)[t_next(&randomness) % 7] = t_next(&randomness);
            tell(fd, &hello, sizeof hello, NULL, 0);
            break;
        case 2:
            hello.kind = (uint32_t)t_next(&randomness) % 5;
            tell(fd, &hello, sizeof hello, NULL, 0);
            tell(fd, bytes, 8, NULL, 0);
            break;
        default:
            hello.transfer = (uint64_t[]){0, 1, ~0ull, 0xffff800000000000, 0x1000,
                                          (uintptr_t)transfer + 1}[t_next(&randomness) % 6];
            tell(fd, &hello, sizeof hello, NULL, 0);
        }
        close(fd);
        munmap((void *)(hello.own_start / PAGE * PAGE), PAGE);
    }
}

static void crowd(void)
{
    /* Connections that say nothing, or only the first word. */
    struct hello hello = honest_hello();
    for (int n = 0; n < 300; n++) {
        int fd = dial();
        if (fd >= 0 && n % 2)
            tell(fd, &hello, sizeof hello, NULL, 0);
    }
}

static void hoarder(void)
{
    /* One process, several address spaces: each would be a thread and descriptors of the
       daemon's. */
    whole_way();
    for (int n = 0; n < 3; n++) {
        struct hello hello = honest_hello();
        T_ASSERT(!half_way(&hello), "a process was attached twice");
    }
}

static void half(void)
{
    struct hello hello = honest_hello();
    T_ASSERT(half_way(&hello), "the daemon did not welcome us: the lie could not be told");
}

static void wrong_descriptor(void)
{
    uint64_t magic = MAGIC;
    int pipes[2];
    T_SYS(pipe(pipes));
    int others[] = {pipes[0], pipes[1], memfd_create("x", 0), open("/dev/null", O_RDWR),
                    open("/", O_RDONLY | O_DIRECTORY)};
    for (size_t n = 0; n < COUNT(others) + 2; n++) {
        struct hello hello = honest_hello();
        if (!half_way(&hello)) {
            T_ASSERT(n > 0, "the daemon did not welcome us: the lie could not be told");
            continue;
        }
        int many[200];
        for (size_t i = 0; i < COUNT(many); i++)
            many[i] = pipes[0];
        if (n < COUNT(others))
            tell(link_fd, &magic, sizeof magic, &others[n], 1);
        else if (n == COUNT(others))
            tell(link_fd, &magic, sizeof magic, many, COUNT(many));
        else
            tell(link_fd, &magic, sizeof magic, NULL, 0);
        char rest[64];
        int got[8];
        size_t count;
        hear(link_fd, rest, sizeof rest, got, &count);
        close(link_fd);
        close(userfaultfd_fd);
        close(control_fd);
    }
}

static void impostor(void)
{
    /* Says that it was forked, or resumed, though nothing was. */
    for (uint32_t kind = FORKED; kind <= RESUMED; kind++) {
        struct hello hello = honest_hello();
        hello.kind = kind;
        int fd = dial(), other = memfd_create("x", 0), got[8];
        struct welcome welcome;
        size_t count;
        tell(fd, &hello, sizeof hello, &other, kind == RESUMED);
        ssize_t length = hear(fd, &welcome, sizeof welcome, got, &count);
        T_ASSERT(length != (ssize_t)sizeof welcome || welcome.verdict != ADOPT,
                 "the daemon gave us somebody's userfaultfd");
        close(fd);
    }
}

static void liar(void)
{
    whole_way();
    be_fat();
    uint32_t last = 0;
    for (unsigned lies = 0; lies < 40; lies++) {
        T_ASSERT(commanded(last) || lies > 0, "no command came: nothing was lied about");
        last = atomic_load(&control->command_seq);
        for (uint32_t i = 0; i < BATCH; i++)
            atomic_store(&control->entries[i].result, 0);
        answer(last);
    }
}

static void mute(void)
{
    whole_way();
    be_fat();
    T_ASSERT(told_to_move(), "no batch came: nothing was left unanswered");
}

static void scribbler(void)
{
    whole_way();
    be_fat();
    T_ASSERT(commanded(0), "no command came");
    for (unsigned n = 0; n < 3000; n++) {
        uint64_t *words = (uint64_t *)control;
        for (int i = 0; i < 200; i++)
            words[t_next(&randomness) % (sizeof *control / 8)] = t_next(&randomness);
        futex(&control->done_seq, 1, 1 << 30);
        futex(&control->mover_busy, 1, 1 << 30);
    }
}

static void stuck(void)
{
    /* Inside a MOVE for ever, while its address space goes on changing. */
    whole_way();
    be_fat();
    T_ASSERT(told_to_move(), "no batch came");
    atomic_store(&control->mover_busy, 1);
}

static void *change_memory(void *unused)
{
    madvise(memory, BYTES / 2, MADV_DONTNEED);
    munmap(memory + BYTES / 2, BYTES / 4);
    return unused;
}

static void dam(void)
{
    /* Says that pages moved, and would let whoever reads them wait for ever: the
     * transfer range belongs to a userfaultfd of its own. */
    whole_way();
    int own = T_SYS(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK));
    struct uffdio_api api = {.api = UFFD_API};
    struct uffdio_register dammed = {.range = {(uintptr_t)transfer, TRANSFER},
                                     .mode = UFFDIO_REGISTER_MODE_MISSING};
    T_SYS(ioctl(own, UFFDIO_API, &api));
    T_SYS(ioctl(own, UFFDIO_REGISTER, &dammed));
    be_fat();
    /* It finds nobody who waits: what is read from outside is an error there. Should a
     * reader come all the same, it is held up. */
    struct pollfd reader = {.fd = own, .events = POLLIN};
    uint32_t last = 0;
    for (int told = 0; told < 8 && poll(&reader, 1, 100) == 0; told++) {
        bool comes = commanded(last);
        T_ASSERT(comes || told, "no command came: nothing was dammed");
        if (!comes)
            break;
        last = atomic_load(&control->command_seq);
        for (uint32_t i = 0; i < BATCH; i++)
            atomic_store(&control->entries[i].result, 0);
        answer(last);
    }
}

static void leaver(void)
{
    /* Closes everything in the middle of a command and runs on. */
    whole_way();
    be_fat();
    T_ASSERT(commanded(0), "no command came");
    close(link_fd);
    close(userfaultfd_fd);
    munmap(control, sizeof *control);
}

static void meddler(void)
{
    /* Uses its right to its own userfaultfd against the daemon's book-keeping,
     * and tries to cut the control block under the daemon's feet. */
    whole_way();
    T_ASSERT(ftruncate(control_fd, 0) != 0, "the control block could be truncated");
    T_ASSERT(fallocate(control_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, PAGE) == 0 ||
                 errno == EPERM || errno == EOPNOTSUPP,
             "%s", t_error());
    be_fat();
    T_ASSERT(commanded(0), "no command came");
    for (size_t offset = 0; offset < BYTES; offset += 64 * PAGE) {
        struct uffdio_range range = {(uintptr_t)memory + offset, 16 * PAGE};
        struct uffdio_zeropage zero = {.range = {(uintptr_t)memory + offset + 20 * PAGE, PAGE}};
        ioctl(userfaultfd_fd, UFFDIO_UNREGISTER, &range);
        ioctl(userfaultfd_fd, UFFDIO_ZEROPAGE, &zero);
        ioctl(userfaultfd_fd, UFFDIO_WAKE, &range);
    }
    char message[512];
    while (read(userfaultfd_fd, message, sizeof message) > 0)
        ; /* steals the daemon's messages */
}

static void foreign_transfer(void)
{
    /* Names memory as its transfer range that is none: a file, code, a hole. */
    char path[] = "/proc/self/exe";
    int file = T_SYS(open(path, O_RDONLY));
    char *places[] = {
        T_SYS(mmap(NULL, TRANSFER, PROT_READ, MAP_SHARED, file, 0)),
        T_SYS(mmap(NULL, TRANSFER, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)),
        (char *)((uintptr_t)&foreign_transfer / PAGE * PAGE),
        transfer + TRANSFER * 64,
    };
    for (size_t n = 0; n < COUNT(places); n++) {
        struct hello hello = honest_hello();
        hello.transfer = (uintptr_t)places[n];
        if (half_way(&hello)) {
            uint64_t magic = MAGIC, ready;
            int got[8];
            size_t count;
            tell(link_fd, &magic, sizeof magic, &userfaultfd_fd, 1);
            hear(link_fd, &ready, sizeof ready, got, &count);
            close(userfaultfd_fd);
            close(control_fd);
        }
        close(link_fd);
    }
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*body)(void);
    } modes[] = {
        {"garbage", garbage},   {"crowd", crowd},
        {"hoarder", hoarder},
        {"half", half},         {"wrong-descriptor", wrong_descriptor},
        {"impostor", impostor}, {"liar", liar},
        {"mute", mute},         {"scribbler", scribbler},
        {"stuck", stuck},       {"dam", dam},
        {"leaver", leaver},     {"meddler", meddler},
        {"foreign-transfer", foreign_transfer},
    };
    T_ASSERT(argc == 2, "which mode?");
    play_agent(argv);
    transfer = t_map(TRANSFER);
    for (size_t m = 0; m < COUNT(modes); m++) {
        if (strcmp(modes[m].name, argv[1]) != 0)
            continue;
        modes[m].body();
        pthread_t thread;
        if (modes[m].body == stuck)
            pthread_create(&thread, NULL, change_memory, NULL);
        t_gate("acted");
        return 0;
    }
    t_fail("no mode '%s'", argv[1]);
}
