/* Children that are each connected to their parent by TCP and end at once when
 * that connection does: with the first thing that their first thread does, before
 * any of their others has run.
 *
 *   brief CHILDREN THREADS
 *
 * The file `ready` is there when all are connected. The parent counts on in the file
 * `rounds`. */
#include "../lib/t.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static void *sleeper(void *unused)
{
    pause();
    return unused;
}

static void child(const struct sockaddr_in *address, int threads)
{
    char byte;
    int link = T_SYS(socket(AF_INET, SOCK_STREAM, 0));
    for (; threads > 0; threads--) {
        pthread_t thread;
        T_ASSERT((errno = pthread_create(&thread, NULL, sleeper, NULL)) == 0, "%s", t_error());
    }
    T_SYS(connect(link, (const struct sockaddr *)address, sizeof *address));
    while (read(link, &byte, 1) > 0)
        ;
    syscall(SYS_exit_group, 0);
}

int main(int argc, char **argv)
{
    t_start();
    T_ASSERT(argc == 3, "how many children, and threads of each?");
    signal(SIGCHLD, SIG_IGN);
    int listener = T_SYS(socket(AF_INET, SOCK_STREAM, 0));
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    T_SYS(bind(listener, (struct sockaddr *)&address, size));
    T_SYS(listen(listener, 8));
    T_SYS(getsockname(listener, (struct sockaddr *)&address, &size));
    for (int i = atoi(argv[1]); i > 0; i--) {
        if (T_SYS(fork()) == 0) {
            close(listener);
            child(&address, atoi(argv[2]));
        }
        T_SYS(accept(listener, NULL, NULL));
    }
    close(listener);
    int rounds = T_SYS(open("rounds", O_CREAT | O_RDWR, 0666));
    close(T_SYS(open("ready", O_CREAT, 0666)));
    for (unsigned long round = 0;; round++) {
        /* Of one length: a clone begins with a smaller number than stands there. */
        char text[24];
        int length = snprintf(text, sizeof text, "%020lu", round);
        T_SYS(pwrite(rounds, text, length, 0));
        usleep(1000);
    }
}
