/* Threads on evicted memory: faults at once on one page and on many, threads
 * that come and go, signal stacks, jumps and coroutines that lie in evicted
 * pages. */
#include "../lib/t.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#define BYTES (56 * MIB)
#define PAGES (BYTES / PAGE)
#define THREADS 8

static char *memory;
static pthread_barrier_t barrier;
static unsigned rounds;

static void run_threads(unsigned count, void *(*body)(void *))
{
    pthread_t threads[64];
    for (uintptr_t t = 0; t < count; t++)
        T_ASSERT((errno = pthread_create(&threads[t], NULL, body, (void *)t)) == 0, "%s",
                 t_error());
    for (unsigned t = 0; t < count; t++)
        T_ASSERT((errno = pthread_join(threads[t], NULL)) == 0, "%s", t_error());
}

static void *one_page(void *thread)
{
    uint64_t random = 3;
    for (unsigned round = 0; round < rounds; round++) {
        size_t page = t_next(&random) % PAGES;
        pthread_barrier_wait(&barrier);
        t_check_page(memory + page * PAGE, 1, page);
        /* Then each its own, to push things out. */
        for (int i = 0; i < 16; i++) {
            uint64_t own = t_mix(random + 977 * (uintptr_t)thread + (unsigned)i) % PAGES;
            t_check_page(memory + own * PAGE, 1, own);
        }
    }
    return NULL;
}

static void same_page(void)
{
    rounds = t_times(300);
    pthread_barrier_init(&barrier, NULL, THREADS);
    run_threads(THREADS, one_page);
}

/* Every page is written by one thread only, and the upper half by nobody. */
static void *own_pages(void *thread)
{
    static unsigned char version[PAGES];
    uint64_t random = 100 + (uintptr_t)thread;
    size_t half = PAGES / 2;
    for (unsigned n = 0; n < rounds; n++) {
        size_t page = t_next(&random) % (half / THREADS) * THREADS + (uintptr_t)thread;
        t_check_page(memory + page * PAGE, 1 + version[page], page);
        if (n % 3 == 0)
            t_fill_page(memory + page * PAGE, 1u + ++version[page], page);
        size_t shared = half + t_next(&random) % half;
        t_check_page(memory + shared * PAGE, 1, shared);
    }
    for (size_t page = (uintptr_t)thread; page < half; page += THREADS)
        t_check_page(memory + page * PAGE, 1 + version[page], page);
    return NULL;
}

static void different_pages(void)
{
    rounds = t_times(3000);
    run_threads(THREADS, own_pages);
}

static void *brief(void *number)
{
    uint64_t random = (uintptr_t)number;
    char local[3000];
    memset(local, (int)random, sizeof local);
    for (int i = 0; i < 4; i++) {
        size_t page = t_next(&random) % PAGES;
        t_check_page(memory + page * PAGE, 1, page);
    }
    uint64_t *answer = malloc(sizeof *answer);
    *answer = t_mix((uintptr_t)number) + (unsigned char)local[2999];
    return answer;
}

static void *spawner(void *unused)
{
    (void)unused;
    for (uintptr_t n = 0; n < rounds; n++) {
        pthread_t thread;
        T_ASSERT((errno = pthread_create(&thread, NULL, brief, (void *)n)) == 0, "%s", t_error());
        uint64_t *answer;
        T_ASSERT((errno = pthread_join(thread, (void **)&answer)) == 0, "%s", t_error());
        T_ASSERT(*answer == t_mix(n) + (unsigned char)n, "thread %lu returned something else", n);
        free(answer);
    }
    return NULL;
}

static void come_and_go(void)
{
    rounds = t_times(400);
    run_threads(4, spawner);
}

static atomic_uint finished;

static void *detached_body(void *number)
{
    free(brief(number));
    atomic_fetch_add(&finished, 1);
    return NULL;
}

static void detached(void)
{
    unsigned started = t_times(600);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 128 * 1024);
    for (uintptr_t n = 0; n < started; n++) {
        while (n - atomic_load(&finished) > 32)
            sched_yield();
        pthread_t thread;
        T_ASSERT((errno = pthread_create(&thread, &attributes, detached_body, (void *)n)) == 0,
                 "%s", t_error());
    }
    while (atomic_load(&finished) < started)
        sched_yield();
}

/* Threads whose stacks the program itself cut out of its memory, as language
 * runtimes do; after a thread has ended its stack is ordinary memory again. */
static void own_stacks(void)
{
    size_t stack_bytes = 256 * 1024, slots = 100;
    size_t bytes = slots * 2 * stack_bytes;
    char *stacks = t_map(bytes);
    t_fill(stacks, bytes, 9);
    t_press_with(memory, BYTES);
    t_wait_absent(stacks, bytes, 20);
    for (unsigned round = 0; round < t_times(60); round++) {
        pthread_t threads[4];
        for (uintptr_t t = 0; t < COUNT(threads); t++) {
            pthread_attr_t attributes;
            pthread_attr_init(&attributes);
            pthread_attr_setstack(&attributes,
                                  stacks + (round * 7 + t * 31) % slots * 2 * stack_bytes,
                                  stack_bytes);
            T_ASSERT((errno = pthread_create(&threads[t], &attributes, brief,
                                             (void *)(round + t))) == 0,
                     "%s", t_error());
        }
        for (uintptr_t t = 0; t < COUNT(threads); t++) {
            uint64_t *answer;
            T_ASSERT((errno = pthread_join(threads[t], (void **)&answer)) == 0, "%s", t_error());
            T_ASSERT(*answer == t_mix(round + t) + (unsigned char)(round + t), "wrong answer");
            free(answer);
        }
    }
    /* What lies between the stacks was never touched. */
    for (size_t i = 0; i < bytes / PAGE; i++)
        if (i * PAGE / stack_bytes % 2)
            t_check_page(stacks + i * PAGE, 9, i);
}

static sigjmp_buf *back;
static volatile sig_atomic_t handled;
static size_t signal_page;

static void on_user(int signal)
{
    (void)signal;
    char deep[20000];
    memset(deep, (int)signal_page, sizeof deep);
    t_check_page(memory + signal_page * PAGE, 1, signal_page);
    handled += deep[sizeof deep - 1] == (char)signal_page;
}

static void on_fault(int signal)
{
    (void)signal;
    siglongjmp(*back, 1);
}

static void set_handler(int signal, void (*handler)(int))
{
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_ONSTACK};
    T_SYS(sigaction(signal, &action, NULL));
}

/* The kernel writes the signal frame into evicted memory. */
static void signal_stack(void)
{
    size_t stack_bytes = 128 * 1024, slots = 64;
    char *stacks = t_map(slots * stack_bytes);
    char *guarded = t_map(PAGE);
    memset(stacks, 0x5a, slots * stack_bytes);
    T_SYS(mprotect(guarded, PAGE, PROT_NONE));
    set_handler(SIGUSR1, on_user);
    set_handler(SIGSEGV, on_fault);
    back = (sigjmp_buf *)(memory + BYTES - PAGE);
    t_press_with(memory, BYTES);
    t_wait_absent(stacks, slots * stack_bytes, 20);
    unsigned on_absent = 0, expected = 0;
    for (unsigned round = 0; round < t_times(200); round++) {
        stack_t stack = {.ss_sp = stacks + round % slots * stack_bytes, .ss_size = stack_bytes};
        char *top = (char *)stack.ss_sp + stack_bytes - PAGE;
        on_absent += t_absent(top, PAGE) > 0;
        T_SYS(sigaltstack(&stack, NULL));
        signal_page = round * 131 % (PAGES - 1);
        raise(SIGUSR1);
        expected++;
        if (sigsetjmp(*back, 1) == 0)
            *(volatile char *)guarded = 1;
        for (size_t i = round * 97 % 64; i < PAGES - 1; i += 64)
            t_check_page(memory + i * PAGE, 1, i);
    }
    T_ASSERT((unsigned)handled == expected, "%d signals of %u handled", (int)handled, expected);
    T_ASSERT(t_native() || on_absent > 0, "the signal stack was never out of memory");
}

/* Jump buffers in evicted pages. */
static void jumps(void)
{
    volatile unsigned landed = 0;
    for (volatile unsigned round = 0; round < t_times(200); round++) {
        volatile size_t index = (size_t)(round * 613) % PAGES;
        jmp_buf *buffer = (jmp_buf *)(memory + index * PAGE);
        if (setjmp(*buffer) == 0) {
            for (size_t i = round % 128; i < PAGES; i += 128)
                if (i != index)
                    t_check_page(memory + i * PAGE, 1, i);
            longjmp(*buffer, 1);
        }
        landed++;
        t_fill_page(memory + index * PAGE, 1, index);
    }
    T_ASSERT(landed == t_times(200), "%u jumps", landed);
}

#define COROUTINES 64
static ucontext_t scheduler, *contexts;

static void coroutine(int number)
{
    uint64_t sum = 0;
    char local[4096];
    memset(local, number, sizeof local);
    for (unsigned step = 0; step < rounds; step++) {
        size_t page = t_mix(step * 64 + (unsigned)number) % PAGES;
        t_check_page(memory + page * PAGE, 1, page);
        sum += (unsigned char)local[step];
        swapcontext(&contexts[number], &scheduler);
    }
    T_ASSERT(sum == (uint64_t)rounds * (unsigned)number, "coroutine %d lost its stack", number);
    handled++;
}

/* Stacks that no thread owns: switched to in user space, evicted in between. */
static void coroutines(void)
{
    rounds = 40;
    size_t stack_bytes = 64 * 1024;
    char *stacks = t_map(COROUTINES * stack_bytes);
    contexts = t_map(COROUTINES * sizeof *contexts + PAGE);
    for (int c = 0; c < COROUTINES; c++) {
        T_SYS(getcontext(&contexts[c]));
        contexts[c].uc_stack.ss_sp = stacks + (size_t)c * stack_bytes;
        contexts[c].uc_stack.ss_size = stack_bytes;
        contexts[c].uc_link = &scheduler;
        makecontext(&contexts[c], (void (*)(void))(uintptr_t)coroutine, 1, c);
    }
    for (unsigned step = 0; step <= rounds; step++) {
        for (int c = 0; c < COROUTINES; c++)
            T_SYS(swapcontext(&scheduler, &contexts[c]));
        for (size_t i = step % 32; i < PAGES; i += 32)
            t_check_page(memory + i * PAGE, 1, i);
    }
    T_ASSERT(handled == COROUTINES, "%d coroutines ended", (int)handled);
}

int main(int argc, char **argv)
{
    t_start();
    T_ASSERT(argc > 1, "which case?");
    const char *which = argv[1];
    memory = t_map(BYTES);
    t_fill(memory, BYTES, 1);
    t_wait_absent(memory, BYTES, 30);
    if (!strcmp(which, "same-page"))
        same_page();
    else if (!strcmp(which, "different-pages"))
        different_pages();
    else if (!strcmp(which, "come-and-go"))
        come_and_go();
    else if (!strcmp(which, "detached"))
        detached();
    else if (!strcmp(which, "own-stacks"))
        own_stacks();
    else if (!strcmp(which, "signal-stack"))
        signal_stack();
    else if (!strcmp(which, "jumps"))
        jumps();
    else if (!strcmp(which, "coroutines"))
        coroutines();
    else
        t_fail("no case '%s'", which);
    t_done();
}
