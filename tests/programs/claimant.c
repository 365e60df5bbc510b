/* A program that has what a snapshot of it would ask for, and waits. Started as root.
 *
 *   claimant READY USER [capability | low-port | socket PATH | open PATH | setuid PATH]
 *                   becomes USER (a number; its group too) and then has that; makes
 *                   the file READY when it has all of it */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#define MUST(call)                                                      \
    do {                                                                \
        if ((call) < 0) {                                               \
            fprintf(stderr, "%s: %s\n", #call, strerror(errno));        \
            return 1;                                                   \
        }                                                               \
    } while (0)

static int keep_a_capability(void)
{
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2] = {{.permitted = 1 << CAP_NET_RAW}};
    return (int)syscall(SYS_capset, &head, data);
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    unsigned user = (unsigned)atoi(argv[2]);
    const char *what = argc > 3 ? argv[3] : "";
    const char *path = argc > 4 ? argv[4] : "";
    /* What is there to be lost: a page that is read again at the end. */
    char *memory = malloc(1 << 20);
    memset(memory, 7, 1 << 20);
    int ready = open(argv[1], O_WRONLY | O_CREAT | O_EXCL, 0600);
    MUST(ready);
    if (strcmp(what, "open") == 0)
        MUST(open(path, O_RDONLY | O_CLOEXEC));
    if (strcmp(what, "setuid") == 0) {
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        MUST(fd);
        if (mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, fd, 0) == MAP_FAILED)
            return 1;
        close(fd);
    }
    if (strcmp(what, "low-port") == 0) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(831),
                                 .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        MUST(bind(fd, (struct sockaddr *)&to, sizeof to));
        MUST(listen(fd, 1));
    }
    if (strcmp(what, "socket") == 0) {
        int fd = socket(AF_UNIX, SOCK_STREAM, 0);
        struct sockaddr_un to = {.sun_family = AF_UNIX};
        strncpy(to.sun_path, path, sizeof to.sun_path - 1);
        MUST(bind(fd, (struct sockaddr *)&to, sizeof to));
        MUST(listen(fd, 1));
    }
    if (strcmp(what, "capability") == 0)
        MUST(prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0));
    if (user) {
        MUST(setgroups(0, NULL));
        MUST(setresgid(user, user, user));
        MUST(setresuid(user, user, user));
        /* The agent is to know it as what it is now. */
        prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
    }
    if (strcmp(what, "capability") == 0)
        MUST(keep_a_capability());
    MUST(write(ready, "ready", 5));
    close(ready);
    for (;;) {
        pause();
        for (int at = 0; at < 1 << 20; at += 4096)
            if (memory[at] != 7)
                return 1;
    }
}
