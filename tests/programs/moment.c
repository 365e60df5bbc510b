/* A program whose state must be of one moment: used where a snapshot is taken
 * of it while it works, and it is brought back again and again.
 *
 *   moment BOARD MODE [SIZE_MIB [WEATHER]]
 *
 * BOARD is a file that runner and program map shared: what is written there is
 * not brought back with the program. Nothing else connects them, no socket and
 * no pipe, because a connection to an outsider is closed by a snapshot. A failed
 * check is a line on stderr and status 1. Modes: see `modes` at the end. */
#include "../lib/t.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* The layout is known to tests/lib/moment.py. */
struct board {
    atomic_uint epoch;      /* of the runner: another one asks for a report */
    atomic_uint reports;    /* of the program: how many it made */
    atomic_ulong count;     /* how often the main loop went round */
    atomic_ulong resumed_at; /* the count, in private memory, at the last report */
    atomic_uint order;      /* of the runner: number << 8 | what; 0 is none */
    atomic_uint done;       /* the last order that was carried out */
    atomic_uint ready;
    atomic_uint absent;     /* sleepers whose thread-local variables are evicted */
};

static struct board *board;
static char *memory;
static size_t pages;
static unsigned *version;
static uint64_t count;

static void check_page(size_t i) { t_check_page(memory + i * PAGE, 1 + version[i], i); }

static void write_page(size_t i)
{
    check_page(i);
    version[i]++;
    t_fill_page(memory + i * PAGE, 1 + version[i], i);
}

static void check_all(void)
{
    for (size_t i = 0; i < pages; i++)
        check_page(i);
}

static void fill_all(void)
{
    version = t_map((pages * sizeof *version + PAGE - 1) / PAGE * PAGE);
    memory = t_map(pages * PAGE);
    t_fill(memory, pages * PAGE, 1);
}

/* Once a round: tells the runner where it is. */
static void tick(void)
{
    static unsigned epoch;
    t_pace();
    unsigned now = atomic_load(&board->epoch);
    if (now != epoch) {
        epoch = now;
        atomic_store(&board->resumed_at, count);
        atomic_fetch_add(&board->reports, 1);
    }
    count++;
    atomic_store(&board->count, count);
}

enum { NOTHING, CHECK, FORK, EXEC, END, REFILL, WRITE };

/* The runner's next order, or NOTHING. An order given before a snapshot is not
 * carried out again after it: the runner takes it down first. */
static unsigned order(void)
{
    static unsigned last;
    unsigned now = atomic_load(&board->order);
    if ((now & 255) == NOTHING || now == last)
        return NOTHING;
    last = now;
    return now & 255;
}

static void carried_out(void) { atomic_store(&board->done, atomic_load(&board->order)); }

static void carried_out_or_end(unsigned what)
{
    carried_out();
    if (what == END)
        _exit(0);
}

static void ready(void) { atomic_store(&board->ready, 1); }

/* A child of whom nothing may be wrong: its copy, what it writes, and the
 * parent's afterwards. */
static void fork_and_check(void)
{
    int child = (int)T_SYS(fork());
    if (child == 0) {
        check_all();
        for (size_t i = 0; i < pages; i += 2)
            write_page(i);
        check_all();
        _exit(0);
    }
    t_wait_child(child);
    check_all();
}

static void start_thread(void *(*body)(void *), uintptr_t argument)
{
    pthread_t thread;
    T_ASSERT((errno = pthread_create(&thread, NULL, body, (void *)argument)) == 0, "%s", t_error());
}

/* Threads that sleep until they are told otherwise: mode idle. */
#define SLEEPERS 8
static pthread_mutex_t bed = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t morning = PTHREAD_COND_INITIALIZER, breakfast = PTHREAD_COND_INITIALIZER;
static unsigned long day;       /* a new one wakes everybody */
static unsigned asleep, awake;
static char *sleepers_page[SLEEPERS];

static void *sleeper(void *number)
{
    volatile char local[3000];
    for (size_t i = 0; i < sizeof local; i++)
        local[i] = (char)(i + (uintptr_t)number);
    pthread_mutex_lock(&bed);
    /* Where its thread-local variables begin. */
    sleepers_page[(uintptr_t)number] = (char *)((uintptr_t)pthread_self() & ~(PAGE - 1));
    asleep++;
    for (unsigned long mine = day;; mine++) {
        while (mine == day)
            pthread_cond_wait(&morning, &bed);
        T_ASSERT(mine + 1 == day, "day %lu came after %lu", day, mine);
        for (size_t i = 0; i < sizeof local; i++)
            T_ASSERT(local[i] == (char)(i + (uintptr_t)number), "a local variable changed");
        awake++;
        pthread_cond_signal(&breakfast);
    }
    return NULL;
}

/* Wakes them all and sees that each did. */
static void check_sleepers(void)
{
    pthread_mutex_lock(&bed);
    awake = 0;
    day++;
    pthread_cond_broadcast(&morning);
    while (awake < asleep)
        pthread_cond_wait(&breakfast, &bed);
    pthread_mutex_unlock(&bed);
}

static unsigned sleepers_absent(void)
{
    unsigned absent = 0;
    for (unsigned n = 0; n < asleep; n++)
        absent += t_absent(sleepers_page[n], PAGE) != 0;
    return absent;
}

/* --- plain: one thread, pages written at random */

static void plain(void)
{
    uint64_t random = 5;
    fill_all();
    ready();
    for (;;) {
        tick();
        write_page(t_next(&random) % pages);
        atomic_store(&board->absent, sleepers_absent());
        switch (order()) {
        case NOTHING:
            continue;
        case CHECK:
            check_all();
            check_sleepers();
            break;
        case FORK:
            fork_and_check();
            break;
        case EXEC:
            carried_out();
            T_SYS(execl("/proc/self/exe", "moment", getenv("MOMENT_BOARD"), "executed", "32", NULL));
            break;
        case END:
            check_all();
            carried_out();
            exit(0);
        }
        carried_out();
    }
}

/* --- idle: like plain, beside threads that sleep until their pages are evicted,
 * stack, thread-local variables and all; CRIU reads some of that from outside.
 * They are started past Strata's library, which does not know their stacks. */

static void idle(void)
{
    /* As a library that is loaded after Strata's (jemalloc) finds it. */
    int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    *(void **)&create = dlsym(dlopen("libc.so.6", RTLD_NOW | RTLD_NOLOAD), "pthread_create");
    T_ASSERT(create, "no pthread_create: %s", dlerror());
    for (uintptr_t n = 0; n < SLEEPERS; n++) {
        pthread_t thread;
        T_ASSERT((errno = create(&thread, NULL, sleeper, (void *)n)) == 0, "%s", t_error());
    }
    plain();
}

/* --- threads: each with pages of its own, and all that wakes a thread */

#define THREADS 4
static pthread_mutex_t own[THREADS];    /* held while a thread's pages change */
static pthread_mutex_t baton_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t baton_passed = PTHREAD_COND_INITIALIZER;
static unsigned long baton, baton_taken[THREADS];
static atomic_ulong alarms, timer_rounds;
static int bell, poller, water[2];
static atomic_ulong rung, heard, poured, drunk;

static void on_alarm(int sign, siginfo_t *info, void *context)
{
    (void)sign, (void)info, (void)context;
    atomic_fetch_add(&alarms, 1);
}

static void *page_writer(void *thread)
{
    uintptr_t me = (uintptr_t)thread;
    uint64_t random = me << 32;
    for (;;) {
        pthread_mutex_lock(&own[me]);
        write_page(t_next(&random) % (pages / THREADS) * THREADS + me);
        pthread_mutex_unlock(&own[me]);
        /* The baton goes round in order; whoever finds it elsewhere sleeps. */
        pthread_mutex_lock(&baton_lock);
        while (baton % THREADS != me)
            pthread_cond_wait(&baton_passed, &baton_lock);
        T_ASSERT(baton_taken[me] == baton / THREADS, "%lu taken, %lu passed", baton_taken[me], baton);
        baton_taken[me]++;
        baton++;
        pthread_cond_broadcast(&baton_passed);
        pthread_mutex_unlock(&baton_lock);
        t_pace();
    }
    return NULL;
}

/* Numbers go through a pipe, in order, and a bell (eventfd) rings for each;
 * epoll waits for both. Nothing may be lost, doubled or overtaken. */
static void *pourer(void *unused)
{
    (void)unused;
    for (uint64_t n = 0;; n++) {
        uint64_t one = 1;
        T_ASSERT(write(water[1], &n, sizeof n) == sizeof n, "%s", t_error());
        atomic_store(&poured, n + 1);
        T_ASSERT(write(bell, &one, sizeof one) == sizeof one, "%s", t_error());
        atomic_fetch_add(&rung, 1);
        if (n % 64 == 63)
            usleep(300);
        t_pace();
    }
    return NULL;
}

static void *drinker(void *unused)
{
    (void)unused;
    for (;;) {
        struct epoll_event event;
        int got = epoll_wait(poller, &event, 1, -1);
        T_ASSERT(got == 1 || (got < 0 && errno == EINTR), "%s", t_error());
        uint64_t n;
        if (got == 1 && event.data.fd == bell) {
            T_ASSERT(read(bell, &n, sizeof n) == sizeof n, "%s", t_error());
            atomic_fetch_add(&heard, n);
        } else if (got == 1) {
            T_ASSERT(read(water[0], &n, sizeof n) == sizeof n, "%s", t_error());
            T_ASSERT(n == atomic_load(&drunk), "%lu came instead of %lu", n, drunk);
            atomic_fetch_add(&drunk, 1);
        }
    }
    return NULL;
}

static void *timer_waiter(void *unused)
{
    (void)unused;
    for (;;) {
        struct timespec nap = {.tv_nsec = 5000000};
        while (clock_nanosleep(CLOCK_MONOTONIC, 0, &nap, &nap) == EINTR)
            ;
        atomic_fetch_add(&timer_rounds, 1);
    }
    return NULL;
}

static void watch(int fd)
{
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    T_SYS(epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event));
}

static void start_timer(void)
{
    struct sigaction action = {.sa_sigaction = on_alarm, .sa_flags = SA_SIGINFO | SA_RESTART};
    T_SYS(sigaction(SIGRTMIN + 3, &action, NULL));
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN + 3};
    struct itimerspec every = {{0, 7000000}, {0, 7000000}};
    timer_t timer;
    T_SYS(timer_create(CLOCK_MONOTONIC, &event, &timer));
    T_SYS(timer_settime(timer, 0, &every, NULL));
}

/* Everything that wakes somebody must go on: fails after a long while. */
static void wait_for_more(atomic_ulong *what, const char *name)
{
    unsigned long before = atomic_load(what);
    for (int n = 0; atomic_load(what) < before + 3; n++) {
        T_ASSERT(n < 10000, "%s stands still at %lu", name, before);
        usleep(1000);
    }
}

static void check_threads(void)
{
    for (int t = 0; t < THREADS; t++)
        pthread_mutex_lock(&own[t]);
    check_all();
    for (int t = THREADS; t-- > 0;)
        pthread_mutex_unlock(&own[t]);
    wait_for_more(&alarms, "the signal handler");
    wait_for_more(&timer_rounds, "the sleeper");
    wait_for_more(&drunk, "the pipe");
    wait_for_more(&heard, "the eventfd");
    T_ASSERT(drunk <= poured + 1, "%lu out of the pipe, %lu into it", drunk, poured);
    T_ASSERT(heard <= rung + 1, "%lu heard, %lu rung", heard, rung);
    pthread_mutex_lock(&baton_lock);
    unsigned long before = baton;
    while (baton < before + 2 * THREADS)
        pthread_cond_wait(&baton_passed, &baton_lock);
    pthread_mutex_unlock(&baton_lock);
}

static void threads(void)
{
    fill_all();
    pthread_mutexattr_t inherit;
    pthread_mutexattr_init(&inherit);
    T_ASSERT((errno = pthread_mutexattr_setprotocol(&inherit, PTHREAD_PRIO_INHERIT)) == 0, "%s",
             t_error());
    for (int t = 0; t < THREADS; t++)
        pthread_mutex_init(&own[t], t % 2 ? &inherit : NULL);
    bell = T_SYS(eventfd(0, EFD_CLOEXEC));
    poller = T_SYS(epoll_create1(EPOLL_CLOEXEC));
    T_SYS(pipe2(water, O_CLOEXEC));
    watch(bell);
    watch(water[0]);
    start_timer();
    start_thread(drinker, 0);
    start_thread(pourer, 0);
    start_thread(timer_waiter, 0);
    for (uintptr_t t = 0; t < THREADS; t++)
        start_thread(page_writer, t);
    ready();
    for (;;) {
        tick();
        usleep(100);
        unsigned what = order();
        if (what == NOTHING)
            continue;
        check_threads();
        carried_out_or_end(what);
    }
}

/* --- processes: a family with private and shared memory, a pipe, a socket pair;
 * connections: the same by TCP, and a stream */

struct word {
    uint64_t number, check;
};

/* Passes each word on with one added to its number, works in its own memory. */
static void relative(int in, int out, uint64_t seed, atomic_ulong *shared)
{
    uint64_t random = seed;
    T_SYS(prctl(PR_SET_PDEATHSIG, SIGKILL));
    for (uint64_t expected = 0;; expected++) {
        struct word word;
        T_ASSERT(read(in, &word, sizeof word) == sizeof word, "%s", t_error());
        T_ASSERT(word.check == t_mix(word.number), "a word was torn");
        T_ASSERT(word.number / 3 == expected, "%lu after %lu", word.number / 3, expected);
        for (int n = 0; n < 8; n++)
            write_page(t_next(&random) % pages);
        if (expected % 256 == 255)
            check_all();
        atomic_store(&shared[seed], expected + 1);
        word.number++;
        word.check = t_mix(word.number);
        T_ASSERT(write(out, &word, sizeof word) == sizeof word, "%s", t_error());
    }
}

/* Two ends of a TCP connection to itself; the server's may have IPv4 in IPv6. */
static void connection(int ends[2], int family)
{
    union {
        struct sockaddr any;
        struct sockaddr_in four;
        struct sockaddr_in6 six;
    } server = {.any.sa_family = (sa_family_t)family}, client = {.any.sa_family = AF_INET};
    socklen_t length = sizeof server;
    int listener = T_SYS(socket(family, SOCK_STREAM, 0));
    T_SYS(bind(listener, &server.any, length));
    T_SYS(listen(listener, 1));
    T_SYS(getsockname(listener, &server.any, &length));
    client.four.sin_port = family == AF_INET ? server.four.sin_port : server.six.sin6_port;
    client.four.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ends[1] = T_SYS(socket(AF_INET, SOCK_STREAM, 0));
    T_SYS(connect(ends[1], &client.any, sizeof client.four));
    ends[0] = T_SYS(accept(listener, NULL, NULL));
    close(listener);
}

/* As much as goes in, and all that comes out in order: something is always on
 * its way. */
static void stream_in(int out)
{
    uint64_t block[1024];
    T_SYS(prctl(PR_SET_PDEATHSIG, SIGKILL));
    for (uint64_t n = 0;;) {
        for (size_t i = 0; i < COUNT(block); i++)
            block[i] = t_mix(n++);
        for (size_t done = 0; done < sizeof block;)
            done += (size_t)T_SYS(write(out, (char *)block + done, sizeof block - done));
    }
}

static void stream_out(int in, atomic_ulong *shared)
{
    uint64_t block[1000];
    T_SYS(prctl(PR_SET_PDEATHSIG, SIGKILL));
    for (uint64_t n = 0;;) {
        /* A freeze may cut a read short. */
        for (size_t done = 0; done < sizeof block;) {
            ssize_t got = T_SYS(read(in, (char *)block + done, sizeof block - done));
            T_ASSERT(got > 0, "the stream ends at word %lu", n);
            done += (size_t)got;
        }
        for (size_t i = 0; i < COUNT(block); i++, n++)
            T_ASSERT(block[i] == t_mix(n), "word %lu of the stream is another", n);
        atomic_store(shared, n);
        usleep(100);
        t_pace();
    }
}

static void family(bool connected)
{
    int first[2], second[2], pair[2], stream[2];
    atomic_ulong *shared = T_SYS(mmap(NULL, 64 * PAGE, PROT_READ | PROT_WRITE,
                                      MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    fill_all();
    if (connected) {
        connection(first, AF_INET);
        connection(second, AF_INET6);
        connection(pair, AF_INET);
        connection(stream, AF_INET);
        if (T_SYS(fork()) == 0)
            stream_in(stream[1]);
        if (T_SYS(fork()) == 0)
            stream_out(stream[0], &shared[3]);
    } else {
        T_SYS(pipe(first));
        T_SYS(pipe(second));
        T_SYS(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    }
    if (T_SYS(fork()) == 0)
        relative(first[0], pair[0], 1, shared);
    if (T_SYS(fork()) == 0)
        relative(pair[1], second[1], 2, shared);
    uint64_t random = 99;
    ready();
    for (uint64_t round = 0;; round++) {
        tick();
        struct word word = {3 * round, t_mix(3 * round)};
        T_ASSERT(write(first[1], &word, sizeof word) == sizeof word, "%s", t_error());
        for (int n = 0; n < 8; n++)
            write_page(t_next(&random) % pages);
        T_ASSERT(read(second[0], &word, sizeof word) == sizeof word, "%s", t_error());
        T_ASSERT(word.number == 3 * round + 2 && word.check == t_mix(word.number), "got %lu",
                 word.number);
        for (int child = 1; child <= 2; child++)
            T_ASSERT(shared[child] == round + 1, "child %d is at %lu in round %lu", child,
                     shared[child], round);
        unsigned what = order();
        if (what == NOTHING)
            continue;
        check_all();
        if (connected)
            wait_for_more(&shared[3], "the stream");
        carried_out_or_end(what);
    }
}

static void processes(void) { family(false); }

static void connections(void) { family(true); }

/* --- storm: mappings come, go, move and are discarded all the time */

#define PIECE_PAGES 64
#define PIECES 512
static char *piece[PIECES];
static unsigned piece_seed[PIECES];
static bool piece_is_clear[PIECES];
/* Which of the first four kinds of change happen: "-" in place of one that does
 * not. */
static const char *weather = "dfum";

static void check_piece(size_t p)
{
    if (piece_is_clear[p])
        t_check_zero(piece[p], PIECE_PAGES * PAGE);
    else
        t_check(piece[p], PIECE_PAGES * PAGE, piece_seed[p]);
}

static void fill_piece(size_t p, unsigned seed)
{
    t_fill(piece[p], PIECE_PAGES * PAGE, seed);
    piece_seed[p] = seed;
    piece_is_clear[p] = false;
}

static void storm(void)
{
    size_t used = pages / PIECE_PAGES;
    uint64_t random = 8;
    unsigned seed = 0;
    T_ASSERT(used <= PIECES, "at most %d MiB", PIECES * PIECE_PAGES * 4 / 1024);
    for (size_t p = 0; p < used; p++) {
        piece[p] = t_map(PIECE_PAGES * PAGE);
        fill_piece(p, ++seed);
    }
    ready();
    for (;;) {
        tick();
        size_t p = t_next(&random) % used;
        check_piece(p);
        size_t bytes = PIECE_PAGES * PAGE;
        unsigned kind = t_next(&random) % 6;
        if (kind < strlen(weather) && weather[kind] == '-')
            kind = 5;
        switch (kind) {
        case 0: /* The state says clear only when it is: nobody looks between. */
            T_SYS(madvise(piece[p], bytes, MADV_DONTNEED));
            piece_is_clear[p] = true;
            break;
        case 1:
            /* May or may not be discarded, until it is written again. */
            T_SYS(madvise(piece[p], bytes, MADV_FREE));
            fill_piece(p, ++seed);
            break;
        case 2:
            T_SYS(munmap(piece[p], bytes));
            piece[p] = t_map(bytes);
            piece_is_clear[p] = true;
            break;
        case 3: {
            char *to = t_map(bytes);
            piece[p] = T_SYS(mremap(piece[p], bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to));
            break;
        }
        default:
            fill_piece(p, ++seed);
        }
        check_piece(p);
        unsigned what = order();
        if (what == NOTHING)
            continue;
        for (p = 0; p < used; p++)
            check_piece(p);
        carried_out_or_end(what);
    }
}

/* --- wipe: what a child must not see, seen by the program itself */

static void wipe(void)
{
    uint64_t random = 3;
    fill_all();
    T_SYS(madvise(memory, pages / 2 * PAGE, MADV_WIPEONFORK));
    ready();
    for (;;) {
        tick();
        check_page(t_next(&random) % pages);
        unsigned what = order();
        if (what == NOTHING)
            continue;
        check_all();
        int child = (int)T_SYS(fork());
        if (child == 0) {
            t_check_zero(memory, pages / 2 * PAGE);
            for (size_t i = pages / 2; i < pages; i++)
                check_page(i);
            _exit(0);
        }
        t_wait_child(child);
        check_all();
        carried_out_or_end(what);
    }
}

/* --- gives-back: blocks of memory are unmapped all the time, and new ones come,
 * beside memory that is only read: what is unmapped before it was captured tears
 * the snapshot */

static void give_back(void)
{
    enum { BLOCKS = 64, BLOCK_PAGES = 128, REST_US = 10000 };
    char *block[BLOCKS];
    uint64_t random = 11;
    fill_all();
    for (size_t i = 0; i < BLOCKS; i++) {
        block[i] = t_map(BLOCK_PAGES * PAGE);
        t_fill(block[i], BLOCK_PAGES * PAGE, i);
    }
    ready();
    for (size_t n = BLOCKS;; n++) {
        char **oldest = &block[n % BLOCKS];
        tick();
        check_page(t_next(&random) % pages);
        for (size_t p = 0; p < BLOCK_PAGES; p++)
            t_check_page(*oldest + p * PAGE, n - BLOCKS, p);
        T_SYS(munmap(*oldest, BLOCK_PAGES * PAGE));
        *oldest = t_map(BLOCK_PAGES * PAGE);
        t_fill(*oldest, BLOCK_PAGES * PAGE, n);
        /* Slow enough to be registered by the next time round. */
        usleep(REST_US);
        unsigned what = order();
        if (what == NOTHING)
            continue;
        check_all();
        carried_out_or_end(what);
    }
}

/* --- quiet: only reads, until it is told to write. REFILL: memory is offered to
 * the kernel (MADV_FREE), and written again without a fault, because it had not
 * taken the pages yet */

static void quiet_in(size_t part)
{
    uint64_t random = 3;
    fill_all();
    ready();
    for (;;) {
        tick();
        check_page(t_next(&random) % (pages / part));
        unsigned what = order();
        if (what == NOTHING)
            continue;
        if (what == WRITE)
            for (size_t i = 0; i < pages; i += 4)
                write_page(i);
        if (what == REFILL) {
            check_all();
            T_SYS(madvise(memory, pages * PAGE, MADV_FREE));
            for (size_t i = 0; i < pages; i++)
                t_fill_page(memory + i * PAGE, 1 + ++version[i], i);
        }
        check_all();
        carried_out_or_end(what);
    }
}

static void quiet(void) { quiet_in(1); }

/* --- corner: quiet, and reads a sixteenth of its memory until it is told to check */

static void corner(void) { quiet_in(16); }

/* --- reserved: quiet, beside an address space as databases and runtimes reserve */

static void reserved(void)
{
    T_SYS(mmap(NULL, 8ul << 40, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    quiet();
}

static const struct {
    const char *name;
    void (*body)(void);
} modes[] = {
    {"plain", plain},
    {"executed", plain}, /* what `plain` becomes by EXEC */
    {"threads", threads},
    {"idle", idle},
    {"processes", processes},
    {"connections", connections},
    {"storm", storm},
    {"wipe", wipe},
    {"gives-back", give_back},
    {"quiet", quiet},
    {"corner", corner},
    {"reserved", reserved},
};

int main(int argc, char **argv)
{
    t_start();
    T_ASSERT(argc >= 3, "which board and mode?");
    T_SYS(setenv("MOMENT_BOARD", argv[1], 1));
    int fd = T_SYS(open(argv[1], O_RDWR | O_CLOEXEC));
    board = T_SYS(mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    close(fd);
    pages = strtoul(argc > 3 ? argv[3] : "64", NULL, 10) * (MIB / PAGE);
    if (argc > 4)
        weather = argv[4];
    for (size_t m = 0; m < COUNT(modes); m++)
        if (!strcmp(argv[2], modes[m].name))
            modes[m].body();
    t_fail("no mode '%s'", argv[2]);
}
