/* What every conformance program shares: contents that can be checked, a look
 * at which pages have left the address space, and the gate to the runner.
 * It is not a test framework: a program fails by t_fail() and ends by t_done().
 *
 * Nothing here allocates; all state is static, so that the helpers behave the
 * same in a forked child, on a signal stack and after every descriptor is shut. */
#ifndef T_H
#define T_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PAGE 4096ul
#define MIB (1024ul * 1024ul)
#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* Reads the environment. The first thing that main does. */
void t_start(void);
/* True without Strata: nothing will ever be evicted, so nothing waits for it. */
bool t_native(void);
/* For a program that works until it is told to end: rests for two thirds of the time, in
 * a soak never. What is tried with it needs its work, and processors for itself. */
void t_pace(void);
/* A repetition count, many times larger in a soak. */
unsigned t_times(unsigned count);

/* Ends the process with status 1 and one line that says why. */
_Noreturn void t_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Fails unless `condition` holds; the message is a printf format. */
#define T_ASSERT(condition, format, ...)                                               \
    do {                                                                               \
        if (!(condition))                                                              \
            t_fail("line %d: %s: " format, __LINE__, #condition, ##__VA_ARGS__);       \
    } while (0)
/* The same for system calls: prints what was called and errno. */
#define T_SYS(call)                                                                    \
    ({                                                                                 \
        __auto_type result_ = (call);                                                  \
        if ((intptr_t)result_ == -1)                                                   \
            t_fail("line %d: %s: %s", __LINE__, #call, t_error());                     \
        result_;                                                                       \
    })
const char *t_error(void);

/* splitmix64's finaliser: one well mixed word for each input. */
uint64_t t_mix(uint64_t x);
/* A private stream of random words; `state` is any number. */
uint64_t t_next(uint64_t *state);

/* Private anonymous memory, readable and writable. */
void *t_map(size_t bytes);
/* The same in huge pages, as far as the kernel gives them. */
void *t_map_huge(size_t bytes);
/* Writes page `index` of the contents `seed`; compresses to about a sixth. */
void t_fill_page(void *page, uint64_t seed, uint64_t index);
/* Fails unless the page holds exactly that. */
void t_check_page(const void *page, uint64_t seed, uint64_t index);
/* True when the page holds exactly that. */
bool t_is_page(const void *page, uint64_t seed, uint64_t index);
/* The same for a range; `index` counts from 0 at `start`. */
void t_fill(void *start, size_t bytes, uint64_t seed);
void t_check(const void *start, size_t bytes, uint64_t seed);
/* Fails unless every byte is zero. */
void t_check_zero(const void *start, size_t bytes);

/* Pages of the range that the page table does not hold. */
size_t t_absent(const void *start, size_t bytes);
/* The next absent page at or after `from` inside the range, or NULL. Without
 * Strata: `from` itself. */
void *t_next_absent(void *start, size_t bytes, void *from);
/* Memory whose only purpose is to be touched, so that other memory leaves. */
void t_ballast(size_t bytes);
/* The same with memory that the program has anyway; it is only read. */
void t_press_with(void *start, size_t bytes);
/* Reads all of the ballast once, writes some of it. */
void t_press(void);
/* Fails unless the ballast is what it should be. */
void t_check_ballast(void);
/* Presses until `percent` of the range has left; fails after a long while. */
void t_wait_absent(const void *start, size_t bytes, unsigned percent);

/* Tells the runner a word and waits for its answer, which is returned (static
 * buffer, one per process). Without a runner the answer is "go". */
const char *t_gate(const char *word);
/* The end of a program: gate "done", then exit status 0. */
_Noreturn void t_done(void);
/* Waits for a child and fails unless it exited with status 0. */
void t_wait_child(int pid);

#endif
