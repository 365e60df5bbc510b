/* A program that replaces itself again and again while its memory is under
 * pressure, once from its main thread, once from another. */
#include "../lib/t.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define BYTES (48 * MIB)

static char **next;

static void *replace(void *unused)
{
    (void)unused;
    execv("/proc/self/exe", next);
    t_fail("execv: %s", t_error());
}

int main(int argc, char **argv)
{
    t_start();
    T_ASSERT(argc == 2, "how often?");
    int left = atoi(argv[1]);
    char *memory = t_map(BYTES);
    t_check_zero(memory, BYTES / 16);
    t_fill(memory, BYTES, (uint64_t)left);
    t_wait_absent(memory, BYTES, 30);
    t_check(memory, BYTES, (uint64_t)left);
    if (left == 0)
        t_done();
    t_wait_absent(memory, BYTES, 10);
    char number[16];
    snprintf(number, sizeof number, "%d", left - 1);
    next = (char *[]){argv[0], number, NULL};
    if (left % 2) {
        pthread_t thread;
        pthread_create(&thread, NULL, replace, NULL);
        pthread_join(thread, NULL);
    }
    replace(NULL);
}
