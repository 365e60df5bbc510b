/* An agent that passes another process, or another program, off as its own. Played by an
 * ordinary user in a tenant of theirs; what it is after is a file that only root can read,
 * and processes of root's.
 *
 * The prey is a copy of this program, executed as a set-user-id program of root's: it reads
 * the file to a known address and waits. */
#include "../lib/agent.h"

#include <sched.h>
#include <signal.h>

#define FAT (48 * MIB)
/* Where the prey has its secret; whoever attacks has its transfer range there. */
#define SECRET_AT ((char *)0x200000000000)
struct move {
    uint64_t dst, src, len, mode;
    int64_t moved;
};
#define UFFDIO_MOVE_PAGE _IOWR(0xAA, 0x05, struct move)

static char *fat;
/* To who steals: the prey is there. To who becomes the prey: now. To the runner: what came
 * of it. */
static int prey_came[2], becomes[2], outcome[2];

static void map_transfer(void)
{
    transfer = T_SYS(mmap(SECRET_AT, TRANSFER, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0));
}

/* The prey: `secret FILE FD`. Says at FD that it has read the file, and ends when nobody
 * listens there. */
static int secret(char **argv)
{
    char page[PAGE] = {0};
    int file = T_SYS(open(argv[2], O_RDONLY));
    T_ASSERT(read(file, page, PAGE) == (ssize_t)PAGE, "%s: %s", argv[2], t_error());
    map_transfer();
    for (size_t i = 0; i < TRANSFER / PAGE; i++)
        memcpy(transfer + i * PAGE, page, PAGE);
    T_ASSERT(write(atoi(argv[3]), "!", 1) == 1, "%s", t_error());
    struct pollfd left = {.fd = atoi(argv[3])};
    poll(&left, 1, 60000);
    return 0;
}

static char word(int fd)
{
    char byte = 0;
    return read(fd, &byte, 1) == 1 ? byte : 0;
}

static void say(int fd, char byte)
{
    T_ASSERT(write(fd, &byte, 1) == 1, "%s", t_error());
}

/* Waits for the thief's sign, and becomes the prey. */
static _Noreturn void become_prey(char **argv)
{
    char number[16];
    snprintf(number, sizeof number, "%d", prey_came[1]);
    close(becomes[1]);
    close(outcome[1]);
    if (word(becomes[0]))
        execl(argv[2], argv[2], "secret", argv[3], number, NULL);
    _exit(0);
}

/* The handshake, from the connection on. Whether it was Ready. */
static bool shake(void)
{
    struct hello hello = honest_hello();
    struct welcome welcome = {0};
    uint64_t magic = MAGIC, ready = 0;
    int got[8];
    size_t count = 0;
    if (!tell(link_fd, &hello, sizeof hello, NULL, 0) ||
        hear(link_fd, &welcome, sizeof welcome, got, &count) != (ssize_t)sizeof welcome ||
        welcome.verdict != CREATE || count != 2)
        return false;
    control_fd = got[0];
    userfaultfd_fd = ioctl(got[1], NEW_USERFAULTFD, O_CLOEXEC | O_NONBLOCK);
    close(got[1]);
    if (!tell(link_fd, &magic, sizeof magic, &userfaultfd_fd, 1) ||
        hear(link_fd, &ready, sizeof ready, got, &count) != 8 || ready != MAGIC)
        return false;
    control = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, control_fd, 0);
    return control != MAP_FAILED;
}

/* Moves what a command names into the transfer range; which of it was of `fat`, and how
 * much. */
static size_t move_batch(char **left)
{
    uint32_t count = atomic_load(&control->count), first = atomic_load(&control->first_slot);
    size_t moved = 0;
    for (uint32_t i = 0; i < count && i < BATCH; i++) {
        char *page = (char *)(uintptr_t)atomic_load(&control->entries[i].address);
        struct move move = {.dst = (uintptr_t)transfer + (first + i) * PAGE,
                            .src = (uintptr_t)page, .len = PAGE};
        int result = ioctl(userfaultfd_fd, UFFDIO_MOVE_PAGE, &move) == 0 ? 0 : -errno;
        atomic_store(&control->entries[i].result, result);
        if (result == 0 && page >= fat && page < fat + FAT)
            left[moved++] = page;
    }
    return moved;
}

/* Obeys until a batch of pages has left, then has the process that the daemon knows become
 * the prey, and looks what comes back: 'o', what was there; 'r', it was refused; 's',
 * something else. Others: nothing was tried, for the reason that `report` says. */
static char steal(void)
{
    if (!shake())
        return 'r';
    char *left[BATCH];
    size_t moved = 0;
    uint32_t last = 0;
    while (moved == 0) {
        if (!commanded(last))
            return 'x';
        last = atomic_load(&control->command_seq);
        if (atomic_load(&control->command) == MOVE)
            moved = move_batch(left);
        if (moved == 0)
            answer(last);
    }
    say(becomes[1], '!');
    if (word(prey_came[0]) != '!')
        return 'p';
    answer(last);
    /* What was moved has been taken when the next command comes. */
    if (!commanded(last))
        return 'n';
    for (size_t i = 0; i < moved; i++)
        if (!t_is_page(left[i], 1, (size_t)(left[i] - fat) / PAGE))
            return 's';
    return 'o';
}

static void open_pipes(void)
{
    T_SYS(pipe2(becomes, O_CLOEXEC));
    T_SYS(pipe2(outcome, O_CLOEXEC));
    T_SYS(pipe2(prey_came, O_CLOEXEC));
    T_SYS(fcntl(prey_came[1], F_SETFD, 0));
}

static int thief(void *unused)
{
    (void)unused;
    char what = steal();
    if (write(outcome[1], &what, 1) != 1)
        _exit(1);
    _exit(0);
}

/* Tells the runner what came of it. */
static void report(void)
{
    close(outcome[1]);
    char what = word(outcome[0]);
    switch (what) {
    case 'o':
        t_gate("own");
        break;
    case 'r':
        t_gate("refused");
        break;
    case 's':
        t_gate("secret");
        break;
    case 'x':
        t_fail("no page of its own was to be moved");
    case 'p':
        t_fail("the prey did not come");
    case 'n':
        t_fail("no command came after the moved pages");
    default:
        t_fail("the thief has ended without a word");
    }
}

/* The process that has connected becomes the prey; its child shakes hands. */
static void inherited(char **argv)
{
    open_pipes();
    if (T_SYS(fork()) == 0) {
        map_transfer();
        fat = t_map(FAT);
        link_fd = dial();
        int child = T_SYS(fork());
        t_fill(fat, FAT, 1);
        if (child == 0)
            thief(NULL);
        become_prey(argv);
    }
    report();
}

/* The process that has shaken hands becomes the prey; one that shares its memory goes on. */
static void sibling(char **argv)
{
    open_pipes();
    if (T_SYS(fork()) == 0) {
        map_transfer();
        fat = t_map(FAT);
        t_fill(fat, FAT, 1);
        link_fd = dial();
        /* In memory that never leaves. */
        char *stack = T_SYS(mmap(NULL, MIB, PROT_READ | PROT_WRITE,
                                 MAP_SHARED | MAP_ANONYMOUS, -1, 0));
        T_SYS(clone(thief, stack + MIB, CLONE_VM | SIGCHLD, NULL));
        become_prey(argv);
    }
    report();
}

/* Connects to `path` in a child that is gone when this returns; its number. */
static int dead_connection(int type, const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strcpy(address.sun_path, path);
    link_fd = T_SYS(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
    int child = T_SYS(fork());
    if (child == 0)
        _exit(connect(link_fd, (struct sockaddr *)&address, sizeof address) != 0);
    t_wait_child(child);
    return child;
}

static void gate_number(int number)
{
    char text[16];
    snprintf(text, sizeof text, "%d", number);
    t_gate(text);
}

/* Shakes hands for one that has ended, and whose number somebody else has got. */
static void dead(char **argv)
{
    (void)argv;
    gate_number(dead_connection(SOCK_SEQPACKET, socket_path));
    map_transfer();
    t_gate(shake() ? "ready" : "refused");
}

/* Asks for a tenant for one that has ended, and whose number somebody else has got. */
static void dead_run(char **argv)
{
    (void)argv;
    char path[108], reply[4096] = {0};
    snprintf(path, sizeof path, "%s", socket_path);
    strcpy(strrchr(path, '/'), "/control.sock");
    gate_number(dead_connection(SOCK_STREAM, path));
    static const char request[] = "{\"request\":\"run\",\"name\":\"grab\",\"dram_bytes\":67108864,"
                                  "\"command\":[\"x\"]}\n";
    T_ASSERT(write(link_fd, request, sizeof request - 1) > 0, "%s", t_error());
    for (size_t got = 0; got < sizeof reply - 1 && !strchr(reply, '\n');) {
        ssize_t more = T_SYS(read(link_fd, reply + got, sizeof reply - 1 - got));
        T_ASSERT(more > 0, "no reply");
        got += (size_t)more;
    }
    t_gate(strstr(reply, "\"reply\":\"run\"") ? "ready" : "refused");
}

/* One process says hello again and again; each time the daemon waits a moment for the
 * program before to be gone. */
static void many(char **argv)
{
    (void)argv;
    int ready = 0;
    map_transfer();
    for (int n = 0; n < 12; n++) {
        link_fd = dial();
        ready += link_fd >= 0 && shake();
    }
    gate_number(ready);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*body)(char **);
    } modes[] = {
        {"inherited", inherited}, {"sibling", sibling}, {"dead", dead},
        {"dead-run", dead_run},   {"many", many},
    };
    T_ASSERT(argc >= 2, "which mode?");
    if (strcmp(argv[1], "secret") == 0)
        return secret(argv);
    play_agent(argv);
    for (size_t m = 0; m < COUNT(modes); m++) {
        if (strcmp(modes[m].name, argv[1]) != 0)
            continue;
        modes[m].body(argv);
        t_done();
    }
    t_fail("no mode '%s'", argv[1]);
}
