/* Bench: reads a file a character at a time, in a program with one thread, where
 * the C library takes no lock. Prints the seconds that it took. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

int main(int count, char **arguments) {
    long bytes = count > 1 ? atol(arguments[1]) : 1 << 24, sum = 0;
    FILE *file = tmpfile();
    if (!file) return 1;
    for (long i = 0; i < bytes; i++) putc('a' + (int)(i % 26), file);
    rewind(file);
    double begin = now();
    for (int byte; (byte = getc(file)) != EOF;) sum += byte;
    double seconds = now() - begin;
    printf("%.6f\n", seconds);
    return sum == 0;
}
