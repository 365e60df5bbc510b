/* A program that a rule knows by its command line, and that calls itself otherwise
 * before it forks: as the one of another tenant.
 *
 *   renamed SIZE_MIB -name guest=NAME
 *
 * fills, says "ready", and reads words, a line each:
 *   check       reads and checks everything, and says "right"
 *   fork NAME   calls itself NAME, of as many letters; its child checks everything and
 *               says "child PID"
 *   end         (or the end of its input) sees to the good end of both */
#include "../lib/t.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

static char *memory;
static size_t size;
static int pipe_ends[2], child;

static void forks(char *name, const char *other)
{
    T_ASSERT(strlen(name) == strlen(other), "%s and %s", name, other);
    memcpy(name, other, strlen(other));
    T_SYS(prctl(PR_SET_NAME, "otherwise"));
    T_SYS(pipe(pipe_ends));
    child = T_SYS(fork());
    if (child)
        return;
    T_SYS(close(pipe_ends[1]));
    t_check(memory, size, 1);
    printf("child %d\n", getpid());
    fflush(stdout);
    char end;
    T_SYS(read(pipe_ends[0], &end, 1));
    t_check(memory, size, 1);
    _exit(0);
}

int main(int argc, char **argv)
{
    t_start();
    T_ASSERT(argc >= 2, "how many MiB?");
    size = strtoul(argv[1], NULL, 10) * MIB;
    memory = t_map(size);
    t_fill(memory, size, 1);
    setlinebuf(stdout);
    puts("ready");
    char line[128];
    while (fgets(line, sizeof line, stdin) && strcmp(line, "end\n")) {
        line[strcspn(line, "\n")] = 0;
        if (!strncmp(line, "fork ", 5))
            forks(strchr(argv[argc - 1], '=') + 1, line + 5);
        else {
            t_check(memory, size, 1);
            puts("right");
        }
    }
    t_check(memory, size, 1);
    if (child) {
        T_SYS(close(pipe_ends[1]));
        t_wait_child(child);
    }
    return 0;
}
