/* A program for the agent's tests: obeys the lines on its standard input and
 * answers each with one line. Of Strata it knows include/strata.h alone. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <grp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/single_threaded.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <threads.h>
#include <sched.h>
#include <unistd.h>

extern char **environ;

enum { PAGE = 4096, MOST_THREADS = 64 };

static unsigned char *memory;
static long pages;
static pthread_t threads[MOST_THREADS];
static long thread_count;
static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static long started, let_go;

static unsigned char expected(long page, long byte) { return (unsigned char)(page * 7 + byte * 3 + 1); }

static void fill(long count) {
    pages = count;
    memory = mmap(0, count * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    madvise(memory, count * PAGE, MADV_NOHUGEPAGE);
    for (long p = 0; p < count; p++)
        for (long b = 0; b < PAGE; b++) memory[p * PAGE + b] = expected(p, b);
    printf("%lx\n", (unsigned long)memory);
}

/* 0, or one more than the first wrong page. */
static long wrong_page(void) {
    for (long p = 0; p < pages; p++)
        for (long b = 0; b < PAGE; b++)
            if (memory[p * PAGE + b] != expected(p, b)) return p + 1;
    return 0;
}

static void *wait_for_end(void *argument) {
    pthread_mutex_lock(&gate);
    started++;
    pthread_cond_broadcast(&moved);
    while (!let_go) pthread_cond_wait(&moved, &gate);
    pthread_mutex_unlock(&gate);
    return argument;
}

/* Answers with the thread control blocks. */
static void make_threads(long count) {
    started = let_go = 0;
    thread_count = count;
    for (long i = 0; i < count; i++)
        if (pthread_create(&threads[i], 0, wait_for_end, (void *)(i + 100))) exit(3);
    pthread_mutex_lock(&gate);
    while (started < count) pthread_cond_wait(&moved, &gate);
    pthread_mutex_unlock(&gate);
    for (long i = 0; i < count; i++) printf("%lx ", (unsigned long)threads[i]);
    puts("");
}

static void join_threads(void) {
    pthread_mutex_lock(&gate);
    let_go = 1;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&gate);
    long right = 0;
    for (long i = 0; i < thread_count; i++) {
        void *result = 0;
        if (!pthread_join(threads[i], &result) && result == (void *)(i + 100)) right++;
    }
    printf("%ld\n", right);
}

static void *leave_early(void *argument) { pthread_exit(argument); }
static void *be_cancelled(void *argument) { for (;;) pause(); return argument; }
static int c11_start(void *argument) { return (int)(intptr_t)argument - 50; }

/* The ways for a thread to end, with their results. */
static void ends(void) {
    pthread_t thread;
    thrd_t other;
    void *result = 0;
    int number = 0;
    pthread_create(&thread, 0, leave_early, (void *)41);
    pthread_join(thread, &result);
    printf("%ld ", (long)result);
    pthread_create(&thread, 0, be_cancelled, 0);
    pthread_cancel(thread);
    pthread_join(thread, &result);
    printf("%s ", result == PTHREAD_CANCELED ? "cancelled" : "wrong");
    thrd_create(&other, c11_start, (void *)8);
    thrd_join(other, &number);
    printf("%d\n", number);
}

static void *end_last(void *argument) {
    usleep(20000);
    return argument;
}

static void fork_and_verify(int inner) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        long wrong = wrong_page();
        if (!wrong && inner) make_threads(2), join_threads();
        _exit(wrong ? 1 : 7);
    }
    int status = 0;
    waitpid(child, &status, 0);
    printf("%d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
}

/* The child obeys the next lines, until "leave". */
static void fork_and_stay(void) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        puts("here");
        return;
    }
    int status = 0;
    waitpid(child, &status, 0);
    printf("%d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
}

static void list_descriptors(void) {
    DIR *directory = opendir("/proc/self/fd");
    for (struct dirent *entry; (entry = readdir(directory));) {
        char path[300], target[300];
        snprintf(path, sizeof path, "/proc/self/fd/%s", entry->d_name);
        ssize_t length = readlink(path, target, sizeof target - 1);
        if (length > 0) printf("%.*s ", (int)length, target);
    }
    closedir(directory);
    puts("");
}

static pthread_mutex_t *inheriting;

static void make_mutex(void) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setprotocol(&attributes, PTHREAD_PRIO_INHERIT);
    char *two = mmap(0, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    inheriting = (pthread_mutex_t *)(two + PAGE - 16); /* across the two */
    int result = pthread_mutex_init(inheriting, &attributes);
    printf("%lx\n", result ? 0 : (unsigned long)inheriting);
}

/* Answers with the result and the reason. */
static void take_snapshot(char *line) {
    int (*snapshot)(const char *);
    const char *(*reason)(void);
    *(void **)&snapshot = dlsym(RTLD_DEFAULT, "strata_snapshot");
    *(void **)&reason = dlsym(RTLD_DEFAULT, "strata_error");
    char *label = strchr(line, ' ');
    line[strcspn(line, "\n")] = 0;
    int result = snapshot(label ? label + 1 : 0);
    printf("%d %s\n", result, reason());
}

enum { STRESS_PAGES = 256 };
static long rounds;
static unsigned char is_zero[STRESS_PAGES];

/* Verifies, discards and refills its half of the pages in a random order. */
static void *stress_half(void *argument) {
    unsigned long half = (unsigned long)argument, random = 88172645463325252UL + half, wrong = 0;
    for (long round = 0; round < rounds; round++) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        long page = (long)(random % (STRESS_PAGES / 2) * 2 + half);
        unsigned char *bytes = memory + page * PAGE;
        for (long b = 0; b < PAGE; b++)
            if (bytes[b] != (is_zero[page] ? 0 : expected(page, b))) { wrong++; break; }
        if (is_zero[page]) {
            for (long b = 0; b < PAGE; b++) bytes[b] = expected(page, b);
            is_zero[page] = 0;
        } else if (random >> 32 & 15 ? 0 : 1) {
            madvise(bytes, PAGE, MADV_DONTNEED);
            is_zero[page] = 1;
        }
    }
    return (void *)wrong;
}

/* Group and user alike; 0: done. */
static int become(unsigned id) {
    return setgroups(0, 0) || setresgid(id, id, id) || setresuid(id, id, id);
}

/* A child that shares this memory, until it ends, becomes somebody else. */
static int vfork_and_become(unsigned id) {
    pid_t child = vfork();
    if (child == 0) _exit(setresuid(id, id, id) ? 1 : 7);
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int enter_root(char *line) {
    line[strcspn(line, "\n")] = 0;
    return chroot(strchr(line, ' ') + 1) || chdir("/");
}

static void *nothing(void *argument) { return argument; }

/* Answers with the number of times that a page was not as it was left. */
static void stress(long count) {
    pthread_t half[2];
    unsigned long wrong = 0;
    rounds = count;
    for (long i = 0; i < 2; i++) pthread_create(&half[i], 0, stress_half, (void *)i);
    for (long i = 0; i < count / 100; i++) {
        pthread_t brief;
        void *result = 0;
        pthread_create(&brief, 0, nothing, &rounds);
        pthread_join(brief, &result);
        if (result != &rounds) wrong++;
    }
    for (long i = 0; i < 2; i++) {
        void *result = 0;
        pthread_join(half[i], &result);
        wrong += (unsigned long)result;
    }
    printf("%lu\n", wrong);
}

int main(void) {
    static char line[256];
    setvbuf(stdout, 0, _IOLBF, 0);
    while (fgets(line, sizeof line, stdin)) {
        long number = 0;
        sscanf(line, "%*s %ld", &number);
        if (!strncmp(line, "fill", 4)) fill(number);
        else if (!strncmp(line, "verify", 6)) printf("%ld\n", wrong_page());
        else if (!strncmp(line, "threads", 7)) make_threads(number);
        else if (!strncmp(line, "join", 4)) join_threads();
        else if (!strncmp(line, "ends", 4)) ends();
        else if (!strncmp(line, "forkthreads", 11)) fork_and_verify(1);
        else if (!strncmp(line, "forkstay", 8)) fork_and_stay();
        else if (!strncmp(line, "leave", 5)) _exit(7);
        else if (!strncmp(line, "fork", 4)) fork_and_verify(0);
        else if (!strncmp(line, "descriptors", 11)) list_descriptors();
        else if (!strncmp(line, "mutex", 5)) make_mutex();
        else if (!strncmp(line, "snapshot", 8)) take_snapshot(line);
        else if (!strncmp(line, "stress", 6)) stress(number);
        else if (!strncmp(line, "lock", 4)) printf("%d\n", mlockall(MCL_CURRENT));
        else if (!strncmp(line, "destroy", 7)) printf("%d\n", pthread_mutex_destroy(inheriting));
        else if (!strncmp(line, "discard", 7))
            printf("%d\n", madvise(memory + number * PAGE, PAGE, MADV_DONTNEED));
        else if (!strncmp(line, "become", 6)) printf("%d\n", become(number));
        else if (!strncmp(line, "vforkbecome", 11)) printf("%d\n", vfork_and_become(number));
        else if (!strncmp(line, "effective", 9)) printf("%d\n", seteuid(number));
        else if (!strncmp(line, "root", 4)) printf("%d\n", enter_root(line));
        else if (!strncmp(line, "mounts", 6)) printf("%d\n", unshare(CLONE_NEWNS));
        else if (!strncmp(line, "network", 7)) printf("%d\n", unshare(CLONE_NEWNET));
        else if (!strncmp(line, "dumpable", 8)) printf("%d\n", prctl(PR_GET_DUMPABLE));
        else if (!strncmp(line, "open", 4)) printf("%d\n", prctl(PR_SET_DUMPABLE, 1));
        else if (!strncmp(line, "single", 6)) printf("%d\n", __libc_single_threaded);
        else if (!strncmp(line, "wipe", 4)) {
            /* As daemons do: descriptors closed, environment overwritten. */
            closefrom(2);
            for (char **variable = environ; *variable; variable++)
                memset(*variable, 'x', strlen(*variable));
            puts("wiped");
        } else if (!strncmp(line, "group", 5)) {
            printf("%d\n", setgid(getgid())); /* glibc signals every thread */
        } else if (!strncmp(line, "mainexit", 8)) {
            pthread_t thread;
            puts("leaving");
            pthread_create(&thread, 0, end_last, 0);
            pthread_exit(0);
        } else puts("?");
    }
    return 5;
}
