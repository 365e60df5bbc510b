/* Children that are each connected to their parent by TCP and end at once when
 * that connection does: with the first thing that they do, before anything else
 * in the process has run.
 *
 *   brief CHILDREN
 *
 * The file `ready` is there when all are connected. The parent counts on in the file
 * `rounds`. */
#include "../lib/t.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    t_start();
    T_ASSERT(argc == 2, "how many children?");
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
            char byte;
            close(listener);
            int link = T_SYS(socket(AF_INET, SOCK_STREAM, 0));
            T_SYS(connect(link, (struct sockaddr *)&address, size));
            while (read(link, &byte, 1) > 0)
                ;
            syscall(SYS_exit_group, 0);
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
