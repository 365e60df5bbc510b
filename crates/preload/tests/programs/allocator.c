/* A program whose allocator holds its lock across fork, with a handler that
 * runs after the library's own: gperftools' and jemalloc's way. Ends with 7
 * when its child did. */
#include <pthread.h>
#include <stddef.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Alignas(64) unsigned char arena[8 << 20];
static size_t used;

void *malloc(size_t size) {
    pthread_mutex_lock(&lock);
    used = (used + 63) / 64 * 64;
    unsigned char *result = arena + used + 64;
    memcpy(result - 64, &size, sizeof size);
    used += size + 64;
    pthread_mutex_unlock(&lock);
    return used < sizeof arena ? result : 0;
}
void free(void *memory) { (void)memory; }
void *calloc(size_t count, size_t size) { return malloc(count * size); /* never used twice: zero */ }
void *realloc(void *memory, size_t size) {
    void *result = malloc(size);
    size_t old = 0;
    if (memory) memcpy(&old, (char *)memory - 64, sizeof old);
    if (result && memory) memcpy(result, memory, old < size ? old : size);
    return result;
}

static void take(void) { pthread_mutex_lock(&lock); }
static void give(void) { pthread_mutex_unlock(&lock); }

int main(void) {
    pthread_atfork(take, give, give);
    pid_t child = fork();
    if (child == 0) _exit(7);
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
