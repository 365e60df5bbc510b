/* Pages in a pool of the daemon's (include/strata.h). Whatever is found must be what was
 * put last; that nothing is found is never wrong.
 *
 *     pooled edges POOL      what is refused, forked children, descriptors that are closed
 *     pooled threads POOL    threads put, get and flush until the gate "running" is answered
 *     pooled fill POOL MIB   puts so much that hardly compresses, says how much was taken */
#include "../../include/strata.h"
#include "../lib/t.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int (*open_file)(const char *, const char *);
static int (*get)(int, unsigned long, void *, size_t, unsigned char *);
static int (*put)(int, unsigned long, const void *, size_t);
static int (*flush)(int, unsigned long, unsigned long);
static int (*close_file)(int);
static const char *(*why)(void);

static const char *pool;

#define MUST(call, result)                                                             \
    do {                                                                               \
        errno = 4711;                                                                  \
        int is_ = (call);                                                              \
        T_ASSERT(is_ == (result), "%s: %d, not %d: %s", #call, is_, (int)(result), why()); \
        T_ASSERT(errno == 4711, "errno is changed");                                   \
        T_ASSERT((is_ < 0) == (why()[0] != 0), "%d for '%s'", is_, why());             \
    } while (0)

/* More than one request has. */
#define MANY 150

static char pages[MANY * PAGE] __attribute__((aligned(4096)));
static unsigned char found[MANY];

static void fill(uint64_t seed)
{
    for (size_t i = 0; i < MANY; i++)
        t_fill_page(pages + i * PAGE, seed, i);
}

static void expect(int number, uint64_t seed)
{
    memset(pages, 0x5a, sizeof pages);
    MUST(get(number, 1ul << 40, pages, MANY, found), MANY);
    for (size_t i = 0; i < MANY; i++) {
        T_ASSERT(found[i] == 1, "page %zu: %u", i, found[i]);
        t_check_page(pages + i * PAGE, seed, i);
    }
}

static void child_of(int number)
{
    int child = T_SYS(fork());
    if (child == 0) {
        MUST(get(number, 0, pages, 1, found), -EBADF);
        MUST(close_file(number), -EBADF);
        int own = open_file(pool, "edges");
        T_ASSERT(own >= 0 && own != number, "%d %s", own, why());
        expect(own, 1);
        MUST(close_file(own), 0);
        _exit(0);
    }
    t_wait_child(child);
}

static void edges(void)
{
    MUST(open_file(NULL, "a"), -EINVAL);
    MUST(open_file(pool, ""), -EINVAL);
    MUST(open_file("no-such-pool", "a"), -ECANCELED);
    MUST(flush(0, 0, 1), -EBADF);
    MUST(flush(-1, 0, 1), -EBADF);
    int number = open_file(pool, "edges");
    T_ASSERT(number >= 0, "%d %s", number, why());
    MUST(get(number, 0, pages, (1 << 20) + 1, found), -EINVAL);
    MUST(get(number, ~0ul, pages, 2, found), -EINVAL);
    MUST(get(number, 0, NULL, 1, found), -EINVAL);
    MUST(put(number, 0, NULL, 1), -EINVAL);
    MUST(flush(number, 2, ~0ul), -EINVAL);
    MUST(get(number, 0, pages, 0, found), 0);
    fill(1);
    MUST(put(number, 1ul << 40, pages, MANY), MANY);
    expect(number, 1);
    /* Another name is another file. */
    int other = open_file(pool, "edge");
    MUST(get(other, 1ul << 40, pages, MANY, found), 0);
    MUST(found[0], 0);
    MUST(close_file(other), 0);
    child_of(number);
    expect(number, 1);
    MUST(flush(number, (1ul << 40) + 1, MANY - 2), 0);
    memset(pages, 0x5a, sizeof pages);
    MUST(get(number, 1ul << 40, pages, MANY, found), 2);
    T_ASSERT(found[0] == 1 && found[MANY - 1] == 1, "both ends stay");
    T_ASSERT(found[1] == 0 && pages[PAGE] == 0x5a, "what is not found stays as it was");
    MUST(flush(number, 0, ~0ul), 0);
    MUST(get(number, 1ul << 40, pages, MANY, found), 0);
    /* A program that closes everything, and gets other files under those numbers. */
    T_SYS(syscall(SYS_close_range, 3u, ~0u, 0u));
    char name[] = "pooled-XXXXXX";
    for (int i = 0; i < 16; i++) {
        int file = T_SYS(mkstemp(name));
        T_SYS(unlink(name));
        strcpy(name, "pooled-XXXXXX");
        (void)file;
    }
    MUST(put(number, 0, pages, 1), -ECONNRESET);
    for (int file = 3; file < 19; file++) {
        struct stat of;
        T_SYS(fstat(file, &of));
        T_ASSERT(of.st_size == 0, "the library wrote to a file that is not its own");
    }
    MUST(get(number, 0, pages, 1, found), -ECONNRESET);
    MUST(close_file(number), 0);
    MUST(close_file(number), -EBADF);
    int numbers[64];
    for (int i = 0; i < 64; i++) {
        numbers[i] = open_file(pool, "edges");
        T_ASSERT(numbers[i] >= 0 && numbers[i] != number, "%d: %d %s", i, numbers[i], why());
    }
    MUST(open_file(pool, "edges"), -EMFILE);
    for (int i = 0; i < 64; i++)
        MUST(close_file(numbers[i]), 0);
}

#define THREADS 4
/* A thread's own, of which it knows what it put last. */
#define OWN 512

static atomic_bool stop;
static atomic_ulong hits, misses, ended;
static atomic_int shared = -1;
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

/* The connection that threads share, or one's own; anew if `broken` is that. */
static int connection(atomic_int *place, int broken)
{
    pthread_mutex_lock(&opening);
    while (!atomic_load(&stop) && atomic_load(place) == broken) {
        if (broken >= 0) {
            close_file(broken);
            atomic_fetch_add(&ended, 1);
            atomic_store(place, -1);
            broken = -1;
        }
        int number = open_file(pool, "threads");
        if (number >= 0)
            atomic_store(place, number);
        else
            usleep(10000);
    }
    int number = atomic_load(place);
    pthread_mutex_unlock(&opening);
    return number;
}

static void *work(void *argument)
{
    unsigned long thread = (unsigned long)argument;
    uint64_t random = thread + 1;
    static uint32_t generations[THREADS][OWN]; /* 0: nothing is there */
    static char own_pages[THREADS][16 * PAGE] __attribute__((aligned(4096)));
    uint32_t *generation = generations[thread], next = 0;
    char *own = own_pages[thread];
    atomic_int alone = -1;
    atomic_int *place = thread % 2 ? &alone : &shared;
    int number = connection(place, -1);
    while (!atomic_load(&stop)) {
        unsigned long at = t_next(&random) % (OWN - 16), count = 1 + t_next(&random) % 16;
        unsigned long first = thread << 32 | at;
        unsigned kind = t_next(&random) % 8;
        int result;
        if (kind < 2) {
            next++;
            for (unsigned long i = 0; i < count; i++)
                t_fill_page(own + i * PAGE, next, first + i);
            result = put(number, first, own, count);
            for (unsigned long i = 0; i < count; i++)
                generation[at + i] = next;
        } else if (kind == 2) {
            result = flush(number, first, count);
            for (unsigned long i = 0; i < count; i++)
                generation[at + i] = 0;
        } else {
            unsigned char there[16];
            result = get(number, first, own, count, there);
            for (unsigned long i = 0; result >= 0 && i < count; i++) {
                atomic_fetch_add(there[i] ? &hits : &misses, 1);
                if (there[i]) {
                    T_ASSERT(generation[at + i] != 0, "page %lx was never put, or flushed", first + i);
                    t_check_page(own + i * PAGE, generation[at + i], first + i);
                }
            }
        }
        if (result < 0) {
            T_ASSERT(result == -ECONNRESET || result == -EBADF, "%d %s", result, why());
            number = connection(place, number);
        }
    }
    return NULL;
}

static void threads(void)
{
    pthread_t all[THREADS];
    for (unsigned long i = 0; i < THREADS; i++)
        pthread_create(&all[i], NULL, work, (void *)i);
    t_gate("running");
    atomic_store(&stop, true);
    for (int i = 0; i < THREADS; i++)
        pthread_join(all[i], NULL);
    printf("found %lu missed %lu connections that ended %lu\n", atomic_load(&hits),
           atomic_load(&misses), atomic_load(&ended));
    fflush(stdout);
}

static void fill_up(unsigned long mib)
{
    uint64_t random = 1;
    unsigned long taken = 0;
    int number = open_file(pool, "full");
    T_ASSERT(number >= 0, "%d %s", number, why());
    for (unsigned long first = 0; first < mib * (MIB / PAGE); first += 64) {
        for (size_t i = 0; i < 64 * PAGE / sizeof random; i++)
            ((uint64_t *)(void *)pages)[i] = t_next(&random);
        int result = put(number, first, pages, 64);
        T_ASSERT(result >= 0, "%d %s", result, why());
        taken += (unsigned long)result;
    }
    printf("taken %lu\n", taken);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    t_start();
    T_ASSERT(argc >= 3, "which mode, and which pool?");
    pool = argv[2];
    *(void **)&open_file = dlsym(RTLD_DEFAULT, "strata_pool_open");
    *(void **)&get = dlsym(RTLD_DEFAULT, "strata_pool_get");
    *(void **)&put = dlsym(RTLD_DEFAULT, "strata_pool_put");
    *(void **)&flush = dlsym(RTLD_DEFAULT, "strata_pool_flush");
    *(void **)&close_file = dlsym(RTLD_DEFAULT, "strata_pool_close");
    *(void **)&why = dlsym(RTLD_DEFAULT, "strata_error");
    T_ASSERT(open_file && get && put && flush && close_file && why, "no library?");
    if (strcmp(argv[1], "edges") == 0)
        edges();
    else if (strcmp(argv[1], "fill") == 0)
        fill_up(strtoul(argv[3], NULL, 10));
    else
        threads();
    t_done();
}
