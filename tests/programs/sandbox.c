/* Programs that lock themselves in after they started, as servers do: fewer
 * rights, another root, other namespaces, tight limits. Their memory, and that
 * of children made afterwards, must stay right under pressure. */
#include "../lib/t.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#define BYTES (32 * MIB)
#define PAGES (BYTES / PAGE)
#define NOBODY 65534

static char *memory;

static void drop_privileges(void)
{
    T_SYS(setresgid(NOBODY, NOBODY, NOBODY));
    T_SYS(setresuid(NOBODY, NOBODY, NOBODY));
    T_ASSERT(setuid(0) == -1, "still root");
}

static void change_root(void)
{
    /* Into the directory that the runner gave us, where there is nothing. */
    T_SYS(chroot("."));
    T_SYS(chdir("/"));
}

static void few_descriptors(void)
{
    struct rlimit none = {0, 0};
    T_SYS(syscall(SYS_close_range, 3u, ~0u, 0u));
    T_SYS(setrlimit(RLIMIT_NOFILE, &none));
}

static void no_more_threads(void)
{
    /* Does not bind root: both together. */
    struct rlimit none = {0, 0};
    T_SYS(setrlimit(RLIMIT_NPROC, &none));
    drop_privileges();
}

static void little_address_space(void)
{
    struct rlimit now = {BYTES + 600 * MIB, BYTES + 600 * MIB};
    T_SYS(setrlimit(RLIMIT_AS, &now));
}

static void pid_namespace(void) { T_SYS(unshare(CLONE_NEWPID)); }

static void mount_namespace(void) { T_SYS(unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWNET)); }

static void filter(unsigned flags)
{
    struct sock_filter program[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_ioctl, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog all = {COUNT(program), program};
    T_SYS(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    T_SYS(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &all));
}

static void filter_own(void) { filter(0); }

static void filter_all(void) { filter(SECCOMP_FILTER_FLAG_TSYNC); }

static void overwrite_environment(void)
{
    extern char **environ;
    for (char **variable = environ; *variable; variable++)
        memset(*variable, 'x', strlen(*variable));
    clearenv();
}

static unsigned children;

/* A fork may be refused (RLIMIT_NPROC, or the first process of a new PID
 * namespace has ended): then there is no child to check. */
static void check_in_child(void)
{
    int child = fork();
    if (child < 0) {
        T_ASSERT(errno == EAGAIN || errno == ENOMEM, "%s", t_error());
        return;
    }
    children++;
    if (child == 0) {
        t_check(memory, BYTES, 2);
        for (size_t i = 0; i < PAGES; i += 4)
            t_fill_page(memory + i * PAGE, 3, i);
        for (size_t i = 0; i < PAGES; i++)
            t_check_page(memory + i * PAGE, i % 4 ? 2 : 3, i);
        _exit(0);
    }
    t_wait_child(child);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*lock_in)(void);
    } cases[] = {
        {"drop-privileges", drop_privileges},
        {"change-root", change_root},
        {"few-descriptors", few_descriptors},
        {"no-more-threads", no_more_threads},
        {"little-address-space", little_address_space},
        {"pid-namespace", pid_namespace},
        {"mount-namespace", mount_namespace},
        {"filter-own", filter_own},
        {"filter-all", filter_all},
        {"overwrite-environment", overwrite_environment},
    };
    t_start();
    T_ASSERT(argc > 1, "which case?");
    memory = t_map(BYTES);
    t_fill(memory, BYTES, 1);
    t_wait_absent(memory, BYTES, 30);
    /* So that something has come back before the gate, and is away again behind it. */
    t_check(memory, BYTES, 1);
    t_wait_absent(memory, BYTES, 30);
    if (!strcmp(argv[1], "user-namespace")) {
        /* A limit of the kernel: not with a second thread, and the agent is one. */
        int result = unshare(CLONE_NEWUSER);
        if (t_native())
            T_ASSERT(result == 0, "%s", t_error());
        else
            T_ASSERT(result == -1 && errno == EINVAL, "the kernel's limit is gone");
        t_check(memory, BYTES, 1);
        t_done();
    }
    for (size_t c = 0; c < COUNT(cases); c++) {
        if (strcmp(argv[1], cases[c].name) != 0)
            continue;
        /* From inside there may be no way to the gate: it is passed before. */
        t_gate("ready");
        cases[c].lock_in();
        t_check(memory, BYTES, 1);
        t_fill(memory, BYTES, 2);
        t_check(memory, BYTES, 2);
        check_in_child();
        t_check(memory, BYTES, 2);
        check_in_child();
        t_check(memory, BYTES, 2);
        T_ASSERT(children > 0 || cases[c].lock_in == no_more_threads, "no child was made");
        return 0;
    }
    t_fail("no case '%s'", argv[1]);
}
