/* A program with one thread drops root and keeps what it needs to go on changing:
 * each step is legal only for the thread that took the steps before. 0: all done. */
#include "../lib/t.h"

#include <grp.h>
#include <linux/capability.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { NOBODY = 65534 };

int main(void) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct sets[2];
    if (prctl(PR_SET_KEEPCAPS, 1) || setresuid(NOBODY, NOBODY, NOBODY)) t_fail("the user");
    if (syscall(SYS_capget, &header, sets)) t_fail("what is left");
    for (int i = 0; i < 2; i++) sets[i].effective = sets[i].permitted;
    if (syscall(SYS_capset, &header, sets)) t_fail("what is kept");
    if (setresgid(NOBODY, NOBODY, NOBODY)) t_fail("the group");
    if (setgroups(0, 0)) t_fail("the groups");
    return 0;
}
