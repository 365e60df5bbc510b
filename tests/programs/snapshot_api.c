/* A program that takes snapshots of itself (include/strata.h): it does a piece
 * of work, calls at its good moment, and goes on, under pressure all the while.
 * Whoever comes back says so in a line of a journal and goes on from there.
 *
 *     snapshot_api JOURNAL once|aligned|many|threads|labels LABEL...
 *
 * The journal is opened for each line, so that it is no open file of the
 * snapshot and all lives write into the same one: PID CALL RESULT REASON. */
#include "../../include/strata.h"
#include "../lib/aligned.h"
#include "../lib/t.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#define PAGES (24 * MIB / PAGE)

static int (*snapshot)(const char *);
static const char *(*reason)(void);
static const char *journal;
static char *memory;
static unsigned generation;         /* of all pages, between two pieces of work */
static atomic_ulong alarms, turns;

static void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void say(const char *format, ...)
{
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    int length = snprintf(line, sizeof line, "%d ", getpid());
    length += vsnprintf(line + length, sizeof line - (size_t)length - 1, format, arguments);
    va_end(arguments);
    line[length++] = '\n';
    int fd = T_SYS(open(journal, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600));
    T_ASSERT(write(fd, line, (size_t)length) == length, "%s", t_error());
    close(fd);
}

/* Every page by one generation further; half of them are wrong in between. */
static void work(void)
{
    generation++;
    for (size_t i = 0; i < PAGES; i++) {
        t_check_page(memory + i * PAGE, generation - 1, i);
        t_fill_page(memory + i * PAGE, generation, i);
    }
}

static unsigned open_descriptors(void)
{
    unsigned count = 0;
    DIR *directory = opendir("/proc/self/fd");
    T_ASSERT(directory, "%s", t_error());
    while (readdir(directory))
        count++;
    closedir(directory);
    return count;
}

/* One call at a good moment; all that must hold in whoever returns. */
static int call(const char *label)
{
    char name[64];
    unsigned before = generation, descriptors = open_descriptors();
    snprintf(name, sizeof name, "%s", label ? label : "-");
    errno = 4711;
    int result = snapshot(label);
    T_ASSERT(errno == 4711, "errno is changed");
    T_ASSERT(generation == before, "generation %u after %u", generation, before);
    T_ASSERT((result < 0) == (reason()[0] != 0), "%d for '%s'", result, reason());
    unsigned after = open_descriptors();
    T_ASSERT(after == descriptors, "%u descriptors, %u before", after, descriptors);
    t_check(memory, PAGES * PAGE, generation);
    say("%s %d %s", name, result, reason());
    return result;
}

static void on_alarm(int sign)
{
    (void)sign;
    atomic_fetch_add(&alarms, 1);
}

/* Signals come all the time, without SA_RESTART. */
static void ring(void)
{
    struct sigaction action = {.sa_handler = on_alarm};
    struct itimerval every = {{0, 2000}, {0, 2000}};
    T_SYS(sigaction(SIGALRM, &action, NULL));
    T_SYS(setitimer(ITIMER_REAL, &every, NULL));
}

static void go_on(void)
{
    for (int n = 0; n < 3; n++)
        work();
    say("works");
    for (;;)
        work();
}

static void *turner(void *unused)
{
    for (;;)
        usleep(200), atomic_fetch_add(&turns, 1);
    return unused;
}

static void *aligned(void *unused)
{
    for (;;)
        wait_aligned(3600, 0);
    return unused;
}

static void *caller(void *label)
{
    T_ASSERT(snapshot(label) >= 0, "%s", reason());
    return NULL;
}

int main(int argc, char **argv)
{
    t_start();
    T_ASSERT(argc > 2, "which journal, and what?");
    journal = argv[1];
    const char *what = argv[2];
    *(void **)&snapshot = dlsym(RTLD_DEFAULT, "strata_snapshot");
    *(void **)&reason = dlsym(RTLD_DEFAULT, "strata_error");
    memory = t_map(PAGES * PAGE);
    t_fill(memory, PAGES * PAGE, generation);
    if (!snapshot) {
        say("not there");
        work();
        t_done();
    }
    work();
    if (!strcmp(what, "once") || !strcmp(what, "aligned")) {
        pthread_t other;
        if (what[0] == 'a')
            T_ASSERT(pthread_create(&other, NULL, aligned, NULL) == 0, "no thread");
        ring();
        call("good");
        unsigned long before = alarms;
        while (alarms == before) /* they come in every life */
            usleep(100);
        go_on();
    } else if (!strcmp(what, "many")) {
        for (int n = 0; n < 3; n++) {
            /* Whoever comes back asks for the next one at once. */
            int result = call(NULL);
            T_ASSERT(result >= 0, "%s", reason());
            work();
        }
        go_on();
    } else if (!strcmp(what, "threads")) {
        pthread_t other, thread[4];
        char *label[COUNT(thread)] = {"a", "b", "c", "d"};
        T_ASSERT(pthread_create(&other, NULL, turner, NULL) == 0, "no thread");
        for (size_t n = 0; n < COUNT(thread); n++)
            T_ASSERT(pthread_create(&thread[n], NULL, caller, label[n]) == 0, "no thread");
        for (size_t n = 0; n < COUNT(thread); n++)
            T_ASSERT(pthread_join(thread[n], NULL) == 0, "not joined");
        t_check(memory, PAGES * PAGE, generation);
        for (unsigned long before = turns; turns == before;) /* it goes on as well */
            usleep(100);
        say("all");
        go_on();
    } else {
        for (int n = 3; n < argc; n++) {
            call(argv[n]);
            work();
        }
        t_check(memory, PAGES * PAGE, generation);
        t_done();
    }
}
