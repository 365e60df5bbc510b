/* Futexes in evicted memory. Waiting and waking work. FUTEX_LOCK_PI and
 * FUTEX_WAKE_OP do not: there the kernel takes no fault that could wait, and
 * says EFAULT; the cases `lock-pi` and `wake-op` show that limit. Mutexes of
 * the C library that need it (priority inheritance) are known to Strata and
 * stay in memory. */
#include "../lib/t.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define BYTES (112 * MIB)
#define PAGES (BYTES / PAGE)
/* Every such page begins with a futex word instead of contents. */
#define STRIDE 32
#define WORDS (PAGES / STRIDE)

static char *memory;

static _Atomic uint32_t *word(size_t number)
{
    return (_Atomic uint32_t *)(memory + number * STRIDE * PAGE);
}

static long futex(_Atomic uint32_t *address, int operation, uint32_t value, uintptr_t fourth,
                  _Atomic uint32_t *second, uint32_t third)
{
    return syscall(SYS_futex, address, operation, value, fourth, second, third);
}

static void press(void)
{
    for (size_t i = 0; i < PAGES; i++)
        if (i % STRIDE)
            t_check_page(memory + i * PAGE, 1, i);
}

/* A word whose page is out, from `*number` on; presses until there is one. */
static _Atomic uint32_t *evicted_word(size_t *number)
{
    for (int turn = 0; turn < 1000; turn++) {
        for (; *number < WORDS; ++*number)
            if (t_native() || t_absent((void *)word(*number), PAGE) == 1)
                return word((*number)++);
        *number = 0;
        press();
    }
    t_fail("no futex word ever left memory");
}

static void *waiter(void *unused)
{
    for (size_t n = 0; n < WORDS; n++)
        while (atomic_load(word(n)) == 0)
            if (futex(word(n), FUTEX_WAIT, 0, 0, NULL, 0) < 0)
                T_ASSERT(errno == EAGAIN || errno == EINTR, "%s", t_error());
    return unused;
}

static void wait_and_wake(void)
{
    /* The comparison inside FUTEX_WAIT reads the evicted word itself. */
    size_t number = 0;
    for (int i = 0; i < 50; i++)
        T_ASSERT(futex(evicted_word(&number), FUTEX_WAIT, 1, 0, NULL, 0) == -1 && errno == EAGAIN,
                 "%s", t_error());
    pthread_t threads[4];
    for (size_t t = 0; t < COUNT(threads); t++)
        T_ASSERT((errno = pthread_create(&threads[t], NULL, waiter, NULL)) == 0, "%s", t_error());
    for (size_t n = 0; n < WORDS; n++) {
        if (n % 450 == 0)
            press();
        atomic_store(word(n), 1);
        T_ASSERT(futex(word(n), FUTEX_WAKE, 100, 0, NULL, 0) >= 0, "%s", t_error());
    }
    for (size_t t = 0; t < COUNT(threads); t++)
        pthread_join(threads[t], NULL);
}

/* Counts how often the operation on an evicted page said EFAULT. */
static void show_limit(long (*operation)(_Atomic uint32_t *, int))
{
    size_t number = 0, refused = 0, attempts = 40;
    for (size_t i = 0; i < attempts; i++) {
        /* A futex that could be shared is looked up by its page, and the look
         * waits for it. The C library uses the other kind where it can. */
        T_ASSERT(operation(evicted_word(&number), 0) == 0, "%s", t_error());
        _Atomic uint32_t *address = evicted_word(&number);
        if (operation(address, FUTEX_PRIVATE_FLAG) == 0)
            continue;
        T_ASSERT(errno == EFAULT, "%s", t_error());
        refused++;
        /* Once the page is back the same operation works. */
        T_ASSERT(atomic_load(address) == 0, "not zero");
        atomic_fetch_add(address, 0);
        T_ASSERT(operation(address, FUTEX_PRIVATE_FLAG) == 0, "on a page that is in memory: %s",
                 t_error());
    }
    if (t_native())
        T_ASSERT(refused == 0, "refused without Strata");
    else
        T_ASSERT(refused > 0, "the kernel's limit is gone: change docs/limits.md");
}

static long lock_pi(_Atomic uint32_t *address, int flag)
{
    long result = futex(address, FUTEX_LOCK_PI | flag, 0, 0, NULL, 0);
    if (result == 0 && futex(address, FUTEX_UNLOCK_PI | flag, 0, 0, NULL, 0) != 0)
        t_fail("unlocking: %s", t_error());
    return result;
}

static long wake_op(_Atomic uint32_t *address, int flag)
{
    static _Atomic uint32_t resident;
    return futex(&resident, FUTEX_WAKE_OP | flag, 1, 1, address,
                 FUTEX_OP(FUTEX_OP_ADD, 0, FUTEX_OP_CMP_EQ, 0)) < 0
               ? -1
               : 0;
}

/* --- mutexes of the C library --- */

#define MUTEXES 40
static pthread_mutex_t *mutexes[MUTEXES];
static unsigned long counters[MUTEXES];
static unsigned rounds;

static void *lock_all(void *unused)
{
    for (unsigned round = 0; round < rounds; round++)
        for (size_t m = 0; m < MUTEXES; m++) {
            T_ASSERT((errno = pthread_mutex_lock(mutexes[m])) == 0, "%s", t_error());
            counters[m]++;
            if (m % 8 == 0) { /* held over a fault, so that others queue up */
                size_t page = (round * 8 + m) % WORDS * STRIDE + 1;
                t_check_page(memory + page * PAGE, 1, page);
            }
            T_ASSERT((errno = pthread_mutex_unlock(mutexes[m])) == 0, "%s", t_error());
        }
    return unused;
}

static void mutexes_with(int protocol, int robust)
{
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setprotocol(&attributes, protocol);
    pthread_mutexattr_setrobust(&attributes, robust);
    for (size_t m = 0; m < MUTEXES; m++) {
        mutexes[m] = (pthread_mutex_t *)word(m * 17);
        T_ASSERT((errno = pthread_mutex_init(mutexes[m], &attributes)) == 0, "%s", t_error());
    }
}

static void priority_inheritance(void)
{
    mutexes_with(PTHREAD_PRIO_INHERIT, PTHREAD_MUTEX_STALLED);
    press();
    press();
    size_t out = 0;
    for (size_t m = 0; m < MUTEXES; m++)
        out += t_absent(mutexes[m], PAGE);
    T_ASSERT(t_native() || out == 0, "%zu pages with such a mutex left memory", out);
    rounds = t_times(200);
    pthread_t threads[4];
    for (size_t t = 0; t < COUNT(threads); t++)
        T_ASSERT((errno = pthread_create(&threads[t], NULL, lock_all, NULL)) == 0, "%s", t_error());
    for (size_t t = 0; t < COUNT(threads); t++)
        pthread_join(threads[t], NULL);
    for (size_t m = 0; m < MUTEXES; m++) {
        T_ASSERT(counters[m] == COUNT(threads) * rounds, "%lu turns", counters[m]);
        T_ASSERT((errno = pthread_mutex_destroy(mutexes[m])) == 0, "%s", t_error());
    }
}

/* Plain mutexes and condition variables: nothing special is done for them. */
static pthread_cond_t *condition;
static unsigned turn;

static void *take_turns(void *number)
{
    pthread_mutex_t *mutex = mutexes[0];
    for (unsigned n = 0; n < rounds; n++) {
        pthread_mutex_lock(mutex);
        while (turn % 4 != (unsigned)(uintptr_t)number)
            pthread_cond_wait(condition, mutex);
        turn++;
        pthread_cond_broadcast(condition);
        pthread_mutex_unlock(mutex);
        if (n % 100 == 0)
            press();
    }
    return NULL;
}

static void conditions(void)
{
    mutexes_with(PTHREAD_PRIO_NONE, PTHREAD_MUTEX_STALLED);
    condition = (pthread_cond_t *)word(MUTEXES * 17 + 1);
    T_ASSERT(pthread_cond_init(condition, NULL) == 0, "cond");
    rounds = 300;
    pthread_t threads[4];
    for (uintptr_t t = 0; t < COUNT(threads); t++)
        T_ASSERT((errno = pthread_create(&threads[t], NULL, take_turns, (void *)t)) == 0, "%s",
                 t_error());
    for (size_t t = 0; t < COUNT(threads); t++)
        pthread_join(threads[t], NULL);
    T_ASSERT(turn == COUNT(threads) * rounds, "%u turns", turn);
}

/* A thread that ends while it holds robust mutexes whose pages are out. The
 * kernel walks its list of them when it exits, and cannot wait for a page any
 * more: on an evicted page the mutex is never given free. */
static void *die_holding(void *evicted)
{
    for (size_t m = 0; m < MUTEXES; m++)
        T_ASSERT((errno = pthread_mutex_lock(mutexes[m])) == 0, "%s", t_error());
    size_t *out = evicted;
    for (int turn = 0; turn < 6 && *out == 0; turn++) {
        press();
        for (size_t m = 0; m < MUTEXES; m++)
            *out += t_absent(mutexes[m], PAGE);
    }
    return NULL;
}

static void robust(void)
{
    mutexes_with(PTHREAD_PRIO_NONE, PTHREAD_MUTEX_ROBUST);
    size_t out = 0, inherited = 0;
    pthread_t thread;
    T_ASSERT((errno = pthread_create(&thread, NULL, die_holding, &out)) == 0, "%s", t_error());
    pthread_join(thread, NULL);
    for (size_t m = 0; m < MUTEXES; m++)
        inherited += pthread_mutex_trylock(mutexes[m]) == EOWNERDEAD;
    if (t_native())
        T_ASSERT(inherited == MUTEXES, "only %zu of %d", inherited, MUTEXES);
    else if (out == 0)
        T_ASSERT(inherited == MUTEXES, "only %zu of %d, all in memory", inherited, MUTEXES);
    else
        T_ASSERT(inherited < MUTEXES, "the kernel's limit is gone: change docs/limits.md");
}

int main(int argc, char **argv)
{
    t_start();
    T_ASSERT(argc > 1, "which case?");
    memory = t_map(BYTES);
    for (size_t i = 0; i < PAGES; i++)
        if (i % STRIDE)
            t_fill_page(memory + i * PAGE, 1, i);
        else
            *word(i / STRIDE) = 0;
    t_wait_absent(memory, BYTES, 30);
    if (!strcmp(argv[1], "wait-wake"))
        wait_and_wake();
    else if (!strcmp(argv[1], "lock-pi"))
        show_limit(lock_pi);
    else if (!strcmp(argv[1], "wake-op"))
        show_limit(wake_op);
    else if (!strcmp(argv[1], "pi-mutex"))
        priority_inheritance();
    else if (!strcmp(argv[1], "conditions"))
        conditions();
    else if (!strcmp(argv[1], "robust"))
        robust();
    else
        t_fail("no case '%s'", argv[1]);
    t_done();
}
