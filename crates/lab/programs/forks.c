/* Bench: forks children that end at once, one after the other. Prints the seconds
 * that it took. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

int main(int count, char **arguments) {
    long forks = count > 1 ? atol(arguments[1]) : 100;
    double begin = now();
    for (long i = 0; i < forks; i++) {
        int status = 0;
        pid_t child = fork();
        if (child == 0) _exit(7);
        if (child < 0 || waitpid(child, &status, 0) != child || WEXITSTATUS(status) != 7) return 1;
    }
    printf("%.6f\n", now() - begin);
    return 0;
}
