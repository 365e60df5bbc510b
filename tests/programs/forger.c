/* An agent that sends a file of a file system in user space for its userfaultfd, and plays
 * that file system itself: whatever is asked of it is answered as a userfaultfd would, so
 * that its owner could forge faults, forks and removals. Then other files that have no
 * name, which the kernel calls otherwise. None may be taken, nor anything be asked of it.
 *
 * Gate word: "refused". */
#include "../lib/agent.h"

#include <linux/fuse.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/mount.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/timerfd.h>

/* As the kernel would call it. */
#define NAME "anon_inode:[userfaultfd]"

static int fuse_fd;
/* Calls and reads of the file: what a daemon that believes in it would do. */
static _Atomic unsigned asked;

static void reply(const struct fuse_in_header *in, int error, const void *body, size_t bytes)
{
    char message[8192];
    struct fuse_out_header out = {(uint32_t)(sizeof out + bytes), error, in->unique};
    memcpy(message, &out, sizeof out);
    if (bytes)
        memcpy(message + sizeof out, body, bytes);
    ssize_t written = write(fuse_fd, message, out.len);
    (void)written; /* it may have been unmounted */
}

static struct fuse_attr attributes(uint64_t node)
{
    return (struct fuse_attr){.ino = node, .size = 1 << 20, .nlink = 1,
                              .mode = node == 1 ? S_IFDIR | 0777 : S_IFREG | 0666};
}

static void *file_system(void *unused)
{
    static char request[FUSE_MIN_READ_BUFFER * 32];
    for (;;) {
        ssize_t got = read(fuse_fd, request, sizeof request);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < (ssize_t)sizeof(struct fuse_in_header))
            return unused;
        const struct fuse_in_header *in = (const void *)request;
        const void *body = request + sizeof *in;
        switch (in->opcode) {
        case FUSE_INIT: {
            struct fuse_init_out out = {.major = FUSE_KERNEL_VERSION, .minor = 31,
                                        .max_readahead = 4096, .max_write = 4096};
            reply(in, 0, &out, sizeof out);
            break;
        }
        case FUSE_LOOKUP: {
            struct fuse_entry_out out = {.nodeid = 2, .attr_valid = 600, .entry_valid = 600,
                                         .attr = attributes(2)};
            reply(in, 0, &out, sizeof out);
            break;
        }
        case FUSE_GETATTR: {
            struct fuse_attr_out out = {.attr_valid = 600, .attr = attributes(in->nodeid)};
            reply(in, 0, &out, sizeof out);
            break;
        }
        case FUSE_OPEN: {
            struct fuse_open_out out = {.fh = 1, .open_flags = FOPEN_DIRECT_IO};
            reply(in, 0, &out, sizeof out);
            break;
        }
        case FUSE_IOCTL: {
            const struct fuse_ioctl_in *call = body;
            struct uffdio_api api = {.api = UFFD_API, .features = ~0ull, .ioctls = ~0ull};
            struct {
                struct fuse_ioctl_out out;
                char bytes[4096];
            } answer = {0};
            memcpy(answer.bytes, &api, sizeof api);
            atomic_fetch_add(&asked, 1);
            size_t bytes = call->out_size < 4096 ? call->out_size : 4096;
            reply(in, 0, &answer, sizeof answer.out + bytes);
            break;
        }
        case FUSE_READ: {
            struct uffd_msg message = {.event = UFFD_EVENT_REMOVE};
            message.arg.remove.end = 1ull << 46;
            atomic_fetch_add(&asked, 1);
            reply(in, 0, &message, sizeof message);
            break;
        }
        case FUSE_FLUSH:
        case FUSE_RELEASE:
        case FUSE_ACCESS:
            reply(in, 0, NULL, 0);
            break;
        case FUSE_FORGET:
        case FUSE_BATCH_FORGET:
        case FUSE_INTERRUPT:
            break;
        default:
            reply(in, -ENOSYS, NULL, 0);
        }
    }
}

/* A file of a file system that answers as is said above. */
static int forged(const char *directory)
{
    fuse_fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    if (fuse_fd < 0)
        return -1;
    char options[128];
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0", fuse_fd);
    T_ASSERT(mkdir(directory, 0700) == 0, "%s: %s", directory, t_error());
    if (mount("forged", directory, "fuse", MS_NOSUID | MS_NODEV, options) != 0)
        return -1;
    pthread_t thread;
    T_ASSERT(pthread_create(&thread, NULL, file_system, NULL) == 0, "no thread");
    char path[512];
    snprintf(path, sizeof path, "%s/" NAME, directory);
    int file = T_SYS(open(path, O_RDWR));
    struct uffdio_api api = {.api = UFFD_API};
    T_ASSERT(ioctl(file, UFFDIO_API, &api) == 0 && api.ioctls == ~0ull && asked == 1,
             "the file does not answer as a userfaultfd: %s", t_error());
    atomic_store(&asked, 0);
    return file;
}

static void offer(const char *what, int fd)
{
    uint64_t magic = MAGIC, ready = 0;
    int got[8];
    size_t count;
    struct hello hello = honest_hello();
    T_ASSERT(half_way(&hello), "%s: the daemon did not welcome us", what);
    T_ASSERT(tell(link_fd, &magic, sizeof magic, &fd, 1), "%s", t_error());
    T_ASSERT(hear(link_fd, &ready, sizeof ready, got, &count) <= 0, "%s was taken", what);
    T_ASSERT(atomic_load(&asked) == 0, "%s: something was asked of it", what);
    close(link_fd);
    close(userfaultfd_fd);
    close(control_fd);
}

int main(int argc, char **argv)
{
    T_ASSERT(argc == 2, "in which directory?");
    play_agent(argv);
    transfer = t_map(TRANSFER);
    int file = forged(argv[1]);
    if (file >= 0)
        offer("a file of a file system in user space", file);
    sigset_t none;
    sigemptyset(&none);
    struct {
        const char *what;
        int fd;
    } others[] = {{"an eventfd", eventfd(0, 0)},
                  {"a timerfd", timerfd_create(CLOCK_MONOTONIC, 0)},
                  {"an epoll", epoll_create1(0)},
                  {"a signalfd", signalfd(-1, &none, 0)},
                  {"an inotify", inotify_init1(0)},
                  {"a pidfd", (int)syscall(SYS_pidfd_open, getpid(), 0)}};
    for (size_t n = 0; n < COUNT(others); n++) {
        T_ASSERT(others[n].fd >= 0, "%s: %s", others[n].what, t_error());
        offer(others[n].what, others[n].fd);
    }
    t_gate(file >= 0 ? "refused" : "refused, no fuse");
    if (file >= 0) {
        close(file);
        umount2(argv[1], MNT_DETACH);
    }
    t_done();
}
