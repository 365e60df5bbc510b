/* The helpers of t.h. */
#include "t.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* How long a page may take to leave. Far above what any working machine
 * needs: it ends a hopeless wait, it measures nothing. */
#define LEAVE_SECONDS 30

static bool native = true;
static unsigned factor = 1;
static char gate_name[100];
static unsigned char *ballast;
static size_t ballast_bytes;
static bool ballast_is_ours;
#define BALLAST_SEED 0xba11a57

void t_start(void)
{
    native = getenv("STRATA_TEST_NATIVE") != NULL || getenv("STRATA_TOKEN") == NULL;
    if (getenv("STRATA_TEST_SOAK"))
        factor = 20;
    const char *gate = getenv("STRATA_TEST_GATE");
    if (gate)
        snprintf(gate_name, sizeof gate_name, "%s", gate);
}

bool t_native(void) { return native; }
unsigned t_times(unsigned count) { return count * factor; }

void t_pace(void)
{
    static _Thread_local int64_t began;
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    int64_t now = time.tv_sec * 1000000 + time.tv_nsec / 1000;
    int64_t worked = now - began;
    if (factor > 1 || worked < 1000)
        return;
    if (began != 0)
        usleep((useconds_t)(worked < 4000 ? 2 * worked : 8000));
    clock_gettime(CLOCK_MONOTONIC, &time);
    began = time.tv_sec * 1000000 + time.tv_nsec / 1000;
}

const char *t_error(void) { return strerror(errno); }

/* A connection to the runner, or -1 when nobody runs us. */
static int gate_connect(void)
{
    if (!gate_name[0])
        return -1;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t length = strlen(gate_name);
    memcpy(address.sun_path + 1, gate_name, length); /* abstract: leading 0 */
    socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, size) != 0) {
        if (fd >= 0)
            close(fd);
        return -1;
    }
    return fd;
}

const char *t_gate(const char *word)
{
    static char answer[128];
    int fd = gate_connect();
    if (fd < 0) {
        if (gate_name[0])
            t_fail("the runner does not answer at the gate '%s': %s", gate_name, t_error());
        return "go";
    }
    char line[256];
    int length = snprintf(line, sizeof line, "%s\n", word);
    if (write(fd, line, (size_t)length) != length)
        t_fail("telling the runner '%s': %s", word, t_error());
    size_t have = 0;
    while (have < sizeof answer - 1) {
        ssize_t got = read(fd, answer + have, 1);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0 || answer[have] == '\n')
            break;
        have++;
    }
    answer[have] = 0;
    close(fd);
    return answer;
}

void t_fail(const char *format, ...)
{
    char line[400] = "FAIL ";
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line + 5, sizeof line - 6, format, arguments);
    va_end(arguments);
    size_t length = strlen(line);
    line[length] = '\n';
    if (write(2, line + 5, length - 4) < 0) {
        /* A daemon has no stderr; the runner hears it at the gate. */
    }
    int fd = gate_connect();
    if (fd >= 0 && write(fd, line, length + 1) > 0) {
        char byte;
        while (read(fd, &byte, 1) < 0 && errno == EINTR)
            ;
    }
    _exit(1);
}

void t_done(void)
{
    t_gate("done");
    exit(0);
}

void t_wait_child(int pid)
{
    int status = 0;
    while (waitpid(pid, &status, 0) < 0)
        T_ASSERT(errno == EINTR, "%s", t_error());
    if (WIFSIGNALED(status))
        t_fail("child %d died by signal %d", pid, WTERMSIG(status));
    if (WEXITSTATUS(status) != 0)
        t_fail("child %d ended with status %d", pid, WEXITSTATUS(status));
}

uint64_t t_mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

uint64_t t_next(uint64_t *state) { return t_mix((*state)++); }

void *t_map(size_t bytes)
{
    return T_SYS(mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
}

void *t_map_huge(size_t bytes)
{
    char *start = t_map(bytes + 2 * MIB);
    start += 2 * MIB - (uintptr_t)start % (2 * MIB);
    T_SYS(madvise(start, bytes, MADV_HUGEPAGE));
    return start;
}

void t_fill_page(void *page, uint64_t seed, uint64_t index)
{
    /* Records as a program would keep them: a fixed shape with a few bytes that
     * differ everywhere. No two pages are alike. */
    static const char shape[65] =
        "{id:?????\t,name:\"Ada Lovelace\",town:\"Leipzig\",born:1815,kind:7}\n";
    unsigned char *record = page;
    for (unsigned i = 0; i < PAGE / 64; i++, record += 64) {
        uint64_t word = t_mix(seed * 0x100000001b3 ^ (index * 64 + i));
        memcpy(record, shape, 64);
        memcpy(record + 4, &word, 5);
        record[61] = (unsigned char)seed;
    }
}

bool t_is_page(const void *page, uint64_t seed, uint64_t index)
{
    unsigned char expected[PAGE];
    t_fill_page(expected, seed, index);
    return memcmp(page, expected, PAGE) == 0;
}

/* What the kernel has at `page`: its page table entry and the frame's flags
 * (Documentation/admin-guide/mm/pagemap.rst), 0 where it does not say. */
static void look_at(const void *page, uint64_t *entry, uint64_t *flags)
{
    *entry = *flags = 0;
    int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (fd < 0 || pread(fd, entry, 8, (off_t)((uintptr_t)page / PAGE * 8)) != 8)
        *entry = 0;
    close(fd);
    fd = open("/proc/kpageflags", O_RDONLY | O_CLOEXEC);
    if (fd < 0 || pread(fd, flags, 8, (off_t)((*entry & ((1ull << 55) - 1)) * 8)) != 8)
        *flags = 0;
    close(fd);
}

void t_check_page(const void *page, uint64_t seed, uint64_t index)
{
    if (t_is_page(page, seed, index))
        return;
    uint64_t entry, flags;
    look_at(page, &entry, &flags);
    unsigned char expected[PAGE], found[PAGE];
    t_fill_page(expected, seed, index);
    memcpy(found, page, PAGE);
    size_t first = PAGE, wrong = 0, zeroes = 0;
    for (size_t i = 0; i < PAGE; i++) {
        if (found[i] != expected[i]) {
            wrong++;
            first = first == PAGE ? i : first;
        }
        zeroes += found[i] == 0;
    }
    if (wrong == 0)
        t_fail("page %lu at %p was wrong, and right when read again (entry %lx flags %lx)", index,
               page, entry, flags);
    /* Whether it is so for good, and for every core. */
    usleep(300000);
    uint64_t later, later_flags;
    look_at(page, &later, &later_flags);
    bool right_later = t_is_page(page, seed, index);
    t_fail("page %lu at %p (seed %lu): %zu bytes wrong from offset %zu, %zu bytes are zero; "
           "entry %lx flags %lx, later %lx %lx and %s",
           index, page, seed, wrong, first, zeroes, entry, flags, later, later_flags,
           right_later ? "right" : "wrong");
}

void t_fill(void *start, size_t bytes, uint64_t seed)
{
    for (size_t i = 0; i < bytes / PAGE; i++)
        t_fill_page((char *)start + i * PAGE, seed, i);
}

void t_check(const void *start, size_t bytes, uint64_t seed)
{
    for (size_t i = 0; i < bytes / PAGE; i++)
        t_check_page((const char *)start + i * PAGE, seed, i);
}

void t_check_zero(const void *start, size_t bytes)
{
    const uint64_t *words = start;
    for (size_t i = 0; i < bytes / 8; i++)
        if (words[i] != 0)
            t_fail("%p (page %zu of the range) holds %016lx where new memory must be zero",
                   (const void *)&words[i], i * 8 / PAGE, words[i]);
}

/* Calls `visit` with the pagemap entries of the range, in pieces. */
static size_t scan(const void *start, size_t bytes, bool (*visit)(uint64_t, size_t, void *),
                   void *context)
{
    int fd = T_SYS(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
    uint64_t entries[512]; /* on the stack: stacks are never evicted */
    size_t pages = bytes / PAGE, done = 0;
    uint64_t first = (uintptr_t)start / PAGE;
    bool go_on = true;
    while (done < pages && go_on) {
        size_t want = pages - done < COUNT(entries) ? pages - done : COUNT(entries);
        ssize_t got = T_SYS(pread(fd, entries, want * 8, (off_t)((first + done) * 8)));
        T_ASSERT(got > 0, "pagemap ended");
        for (size_t i = 0; i < (size_t)got / 8 && go_on; i++)
            go_on = visit(entries[i], done + i, context);
        done += (size_t)got / 8;
    }
    close(fd);
    return done;
}

#define PRESENT (1ull << 63)

static bool count_absent(uint64_t entry, size_t index, void *context)
{
    (void)index;
    *(size_t *)context += !(entry & PRESENT);
    return true;
}

size_t t_absent(const void *start, size_t bytes)
{
    size_t absent = 0;
    scan(start, bytes, count_absent, &absent);
    return absent;
}

static bool find_absent(uint64_t entry, size_t index, void *context)
{
    if (entry & PRESENT)
        return true;
    *(size_t *)context = index;
    return false;
}

void *t_next_absent(void *start, size_t bytes, void *from)
{
    char *end = (char *)start + bytes;
    if ((char *)from >= end)
        return NULL;
    if (native)
        return from;
    size_t found = SIZE_MAX;
    scan(from, (size_t)(end - (char *)from), find_absent, &found);
    return found == SIZE_MAX ? NULL : (char *)from + found * PAGE;
}

void t_ballast(size_t bytes)
{
    ballast = t_map(bytes);
    ballast_bytes = bytes;
    ballast_is_ours = true;
    t_fill(ballast, bytes, BALLAST_SEED);
}

void t_press_with(void *start, size_t bytes)
{
    ballast = start;
    ballast_bytes = bytes;
}

void t_press(void)
{
    static uint64_t round;
    for (size_t i = 0; i < ballast_bytes / PAGE; i++) {
        if (!ballast_is_ours)
            (void)*(volatile unsigned char *)(ballast + i * PAGE);
        else if ((i + round) % 8 == 0)
            t_fill_page(ballast + i * PAGE, BALLAST_SEED, i);
        else if (ballast[i * PAGE + 1] != 'i')
            t_check_page(ballast + i * PAGE, BALLAST_SEED, i);
    }
    round++;
}

void t_check_ballast(void) { t_check(ballast, ballast_bytes, BALLAST_SEED); }

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

void t_wait_absent(const void *start, size_t bytes, unsigned percent)
{
    if (native) {
        t_press();
        return;
    }
    double end = now() + LEAVE_SECONDS;
    for (;;) {
        size_t absent = t_absent(start, bytes);
        if (absent * 100 >= bytes / PAGE * percent)
            return;
        if (now() > end)
            t_fail("only %zu of %zu pages left memory in %d s: nothing is tested", absent,
                   bytes / PAGE, LEAVE_SECONDS);
        if (ballast)
            t_press();
        else
            nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    }
}
