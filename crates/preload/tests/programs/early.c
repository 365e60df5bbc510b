/* A library whose constructor, which runs before Strata's, starts a thread. */
#include <pthread.h>
#include <unistd.h>

static void *stay(void *argument) {
    for (;;) pause();
    return argument;
}

__attribute__((constructor)) static void early(void) {
    pthread_t thread;
    pthread_create(&thread, 0, stay, 0);
}
