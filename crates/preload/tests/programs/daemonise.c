/* A program that forks through the C library: daemon(3). Its child writes one
 * line to its standard output when it has gone on. */
#define _DEFAULT_SOURCE
#include <stdio.h>
#include <unistd.h>

int main(void) {
    if (daemon(1, 1)) return 1;
    puts("daemon");
    return 0;
}
