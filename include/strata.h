/* What a program that knows of Strata can ask of it, from inside.
 *
 * The functions are in libstrata.so, which `strata run` puts into a program
 * (LD_PRELOAD), so there is nothing to link. A program that is to run without
 * Strata as well either looks them up and does without what is not there:
 *
 *     int (*snapshot)(const char *);
 *     *(void **)&snapshot = dlsym(RTLD_DEFAULT, "strata_snapshot");
 *
 * or is linked against the library (-lstrata), and is then told -ENOSYS where
 * nobody manages it. */
#ifndef STRATA_H
#define STRATA_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Takes a snapshot of the tenant that the calling process belongs to: of all
 * its processes and threads, as they are at one moment during the call. To be
 * called where that moment is a good one: between two transactions, when a
 * cache is warm. `label` is a second name for it (1 to 64 letters, digits, '.',
 * '_' and '-', not digits alone, unique among the tenant's snapshots), or NULL.
 *
 * Returns, as fork does, in more than one life:
 *
 *   0   in the process that called, when the snapshot is whole;
 *   1   in every process that is restored, rolled back to or cloned from it,
 *       and likewise from a snapshot that somebody else took during the call:
 *       what was learned from outside before the call may be out of date.
 *
 * or, where there is no snapshot, a negative number; strata_error() says more:
 *
 *   -EINVAL      the label cannot be one;
 *   -ENOSYS      nobody manages this process: nothing was done;
 *   -ENOTCONN    the daemon's socket for requests cannot be reached: there is no
 *                daemon any more, the process has changed its user or root
 *                directory, or it has no descriptor left;
 *   -ECANCELED   the daemon refused: the label is taken, the tenant is another
 *                user's, it has something open that cannot be in a snapshot, ...
 *   -ECONNRESET  the daemon went away before it answered. Whether there is a
 *                snapshot, `strata snapshots` tells;
 *   -EPROTO      the daemon is of another version.
 *
 * The calling thread waits until the snapshot is whole, however long that
 * takes; all others stand still for the freeze alone. Meanwhile a descriptor
 * (close-on-exec) is open. Signals are handled as ever and do not interrupt the
 * call. Any thread may call it, also from a signal handler; calls of several
 * threads are answered one after the other. errno is left alone. */
int strata_snapshot(const char *label);

/* --- Memory ----------------------------------------------------------------
 *
 * A program that knows how it will use its memory can say so, and ask where it
 * lives. All of it is about the calling process's own private anonymous memory
 * (heap, mmap); mappings below 128 KiB, stacks and files are never managed, and
 * what is said of them changes nothing. Content is never changed, whatever is
 * said: at worst a program is slower.
 *
 * All these functions return 0 when they did what was asked, else a negative
 * number; strata_error() says more:
 *
 *   -ENOSYS      nobody manages this process: nothing was done;
 *   -EINVAL      no such advice or tier, or no range (it ends beyond what can be
 *                mapped): nothing was done;
 *   -EFAULT      part of the range is not mapped: nothing was done;
 *   -EAGAIN      a hint: the daemon is 1024 hints of this process behind. Those
 *                before it in this call were given, it and the rest were not;
 *   -ENOMEM      a pin, or STRATA_DRAM: more than three quarters of the tenant's
 *                budget would be pinned; or there is no memory;
 *   -ENOBUFS     more than 512 ranges of the process would have settings;
 *   -ENODEV      there is no such tier (here, or for this tenant);
 *   -ENOTCONN, -ECONNRESET, -EPROTO, -ECANCELED
 *                as strata_snapshot(). -ECANCELED also when the daemon has too
 *                many connections: later it may work.
 *
 * Of a call with many ranges, settings are made 64 ranges at a time, each time for
 * all or for none. Any thread may call, also from a signal handler; errno is left
 * alone. docs/placement.md has examples, and says what each costs. */

/* Tiers, and where else a page can be (strata_where). */
enum strata_tier {
    STRATA_NOT_MANAGED = 0, /* with the kernel: in DRAM, if it is anywhere */
    STRATA_DRAM = 1,
    STRATA_NODE = 2,        /* in place, in slower memory of this machine */
    STRATA_COMPRESSED = 3,  /* compressed in DRAM, or of one value throughout */
    STRATA_FILE = 4,        /* in the file tier */
    STRATA_STAGED = 5,      /* out of place, raw in DRAM */
    STRATA_UNTOUCHED = 6,   /* reads as zero */
    STRATA_LOST = 7         /* unreadable: whoever touches it gets SIGBUS */
};

enum strata_advice {
    /* Settings: they hold until they are changed, also when the daemon's worker is
     * replaced. Each replaces what was set for the range before. */
    STRATA_NORMAL = 0,     /* nothing is set any more */
    STRATA_SEQUENTIAL = 3, /* read in order: pages come far ahead, and those behind
                            * the reader leave first */
    STRATA_PIN = 4,        /* never evicted; what is out comes in */
    STRATA_UNPIN = 5,      /* as normal, where it is pinned; nothing elsewhere */
    /* Hints: about now. They cost less than a microsecond, are heeded within
     * milliseconds (a quarter of a second in an idle program), and may be lost
     * when the daemon is replaced. */
    STRATA_HOT = 1,        /* wanted soon: is brought in, counts as just used */
    STRATA_COLD = 2,       /* not wanted for a while: leaves DRAM at once */
    STRATA_FREE_SOON = 6   /* will be freed: leaves first when something must, is
                            * packed densely, and keeps no second copy */
};

/* A range of memory. Pages that it has only a part of are meant too, but not by
 * STRATA_COLD and STRATA_FREE_SOON. */
struct strata_range {
    const void *start;
    size_t bytes;
};

int strata_advise(const void *start, size_t bytes, int advice);
/* The same for `count` ranges. */
int strata_advise_ranges(const struct strata_range *ranges, size_t count, int advice);

/* Pages that a range touches: the bytes that strata_where() writes. */
#define STRATA_PAGES(start, bytes) \
    ((bytes) != 0 ? (((size_t)(start) % 4096 + (size_t)(bytes) + 4095) / 4096) : (size_t)0)

/* Writes for each page that the range touches an `enum strata_tier` to `tiers`; as
 * it was during the call, it may be elsewhere by now. A page that is on its way in
 * or out is in DRAM. When the call fails, what it wrote means nothing. */
int strata_where(const void *start, size_t bytes, unsigned char *tiers);

/* New zeroed memory whose pages are to be in a tier: STRATA_DRAM (it is pinned),
 * STRATA_NODE (its pages move there about a second after they are first touched, and
 * stay while there is room), STRATA_COMPRESSED or STRATA_FILE (its pages come when
 * they are touched and leave again about a second later). *memory is NULL when the call fails. Worth it from
 * 128 KiB on. */
int strata_alloc(void **memory, size_t bytes, int tier);
/* Gives it back; `bytes` as for strata_alloc(). NULL is nothing. */
int strata_free(void *memory, size_t bytes);

/* What a forked child inherits: the memory, wherever it is, and no settings. What
 * comes back from a snapshot has those of the snapshot, as far as budget and tiers
 * allow. mremap takes settings along, munmap ends them. */

/* --- A cache that may vanish -----------------------------------------------
 *
 * Pages in a pool of the daemon's (`strata pool create`): compressed, each content
 * once, outside of the tenant's budget. All of them may vanish at any time: at once
 * when the machine needs its memory, when the daemon's worker is replaced, one by one
 * when the pool is full. What is there is what was put there, or it is not found.
 *
 * A page is known by its pool, the name of a file, and its number in that. Whoever
 * says the same means the same page: any process of the same user's. A name should say
 * which content it is (a version, say): what a program is rolled back to, or a copy of
 * it, finds what was put since.
 *
 * What is opened is the process's own: a forked child and what comes back from a
 * snapshot open anew (-EBADF, -ECONNRESET). Threads may share it; their calls follow
 * one after the other. It holds a descriptor (close-on-exec). Not to be called from a
 * signal handler. Negative results, besides the above:
 *
 *   -EINVAL      no such name (a pool's has 1 to 64 bytes, a file's 1 to 56), or pages;
 *   -EBADF       nothing of this process's is open under that number;
 *   -EMFILE      64 are open;
 *   -ECANCELED   refused: the user has no such pool, too many connections, ...
 *   -ECONNRESET  the connection has ended: the worker was replaced or the pool removed,
 *                and all pages are gone; or the process has come back from a snapshot,
 *                and they are there. Close this one, open it anew, and flush again what
 *                was to be flushed. */
#define STRATA_POOL_PAGE 4096

/* Opens a file of one of the user's pools: a number that is not negative. */
int strata_pool_open(const char *pool, const char *file);
/* Copies out what is there of `count` pages (2^20 at most) from number `first` on: page
 * i to `pages` + i * STRATA_POOL_PAGE, and found[i] is 1; else found[i] is 0, and its
 * place stays as it was. Returns how many were there. */
int strata_pool_get(int number, unsigned long first, void *pages, size_t count,
                    unsigned char *found);
/* Puts pages there, in the place of what is there. Returns how many the pool took;
 * those that it did not take are not there. */
int strata_pool_put(int number, unsigned long first, const void *pages, size_t count);
/* Has pages be there no more, of all files' 2^64 - 1 numbers any part. Returns 0. */
int strata_pool_flush(int number, unsigned long first, unsigned long count);
int strata_pool_close(int number);

/* Why the calling thread's last call of one of these returned a negative number:
 * one line without a line feed, "" when it did not. Never NULL. To be used or
 * copied before the thread's next call; of a program in which more than 16
 * threads fail, those that failed first may find another's text, or "". */
const char *strata_error(void);

/* The library's version, "0.1.0". */
const char *strata_version(void);

#ifdef __cplusplus
}
#endif

#endif
