"""What /proc and the cgroup file systems say. Reads only, changes nothing."""

import collections
import ctypes
import os
import re

SYS_MOVE_PAGES = 279


def read(path):
    """The text of a file, or "" when it has gone."""
    try:
        with open(path, "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def field_kib(path, name):
    """The number after `name:` in a file like /proc/PID/status, in KiB."""
    for line in read(path).splitlines():
        if line.startswith(name + ":"):
            return int(line[len(name) + 1:].split()[0])
    return 0


def alive(pid):
    """A process that exists and is no zombie, or has threads that have not ended yet, and
    with them its descriptors."""
    stat = read(f"/proc/{pid}/stat")
    if not stat or stat.rsplit(")", 1)[1].split()[0] not in "ZX":
        return bool(stat)
    try:
        return len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def children(pid):
    """The children of all threads of a process."""
    found = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for task in tasks:
        found += [int(child) for child in read(f"/proc/{pid}/task/{task}/children").split()]
    return found


def descendants(pid):
    """Children, their children and so on."""
    found = []
    for child in children(pid):
        found += [child] + descendants(child)
    return found


def descriptors(pid):
    """(what is open, by kind; bytes in the memory files among it)."""
    kinds, seen, total = collections.Counter(), set(), 0
    directory = f"/proc/{pid}/fd"
    try:
        numbers = os.listdir(directory)
    except OSError:
        return kinds, 0
    for number in numbers:
        try:
            target = os.readlink(f"{directory}/{number}")
            status = os.stat(f"{directory}/{number}")
        except OSError:
            continue
        kinds[target if target.startswith("anon_inode:") else target.split(":[")[0]] += 1
        if target.startswith("/memfd:") and status.st_ino not in seen:
            seen.add(status.st_ino)
            total += status.st_blocks * 512
    return kinds, total


def events_waited_for(pid):
    """How many eventfds are in sets (epoll) that have nothing else, and whether there is such
    a set."""
    count, is_there, directory = 0, False, f"/proc/{pid}/fd"
    def link(number):
        try:
            return os.readlink(f"{directory}/{number}")
        except OSError:
            return ""
    for number in os.listdir(directory) if os.path.isdir(directory) else ():
        if link(number) == "anon_inode:[eventpoll]":
            members = re.findall(r"tfd:\s+(\d+)", read(f"/proc/{pid}/fdinfo/{number}"))
            if all(link(member) == "anon_inode:[eventfd]" for member in members):
                count, is_there = count + len(members), True
    return count, is_there


def nodes_of_pages(pid, start, count):
    """Where the kernel finds the pages of a process from `start` on: a node's number,
    or the error of a page that is not there, negative."""
    libc = ctypes.CDLL(None, use_errno=True)
    addresses = (ctypes.c_void_p * count)(*(start + page * 4096 for page in range(count)))
    status = (ctypes.c_int * count)()
    if libc.syscall(SYS_MOVE_PAGES, pid, ctypes.c_ulong(count), addresses, None, status, 0) != 0:
        raise OSError(ctypes.get_errno(), "move_pages")
    return list(status)


def anonymous_bytes(pids):
    """Anonymous memory of the processes, a page shared by them counted once."""
    return sum(field_kib(f"/proc/{pid}/smaps_rollup", "Pss_Anon") for pid in pids) * 1024


def resident_anonymous_bytes(pid):
    """RssAnon: cheap to read, but shared pages count in every process."""
    return field_kib(f"/proc/{pid}/status", "RssAnon") * 1024


def registered_bytes(pid):
    """How much of its memory is registered with a userfaultfd."""
    size = total = 0
    for line in read(f"/proc/{pid}/smaps").splitlines():
        if line.startswith("Size:"):
            size = int(line.split()[1]) * 1024
        elif line.startswith("VmFlags:") and "um" in line.split():
            total += size
    return total


def memory_cgroup(pid):
    """The memory cgroup of a process: a v1 `memory` line, else the v2 one."""
    unified = ""
    for line in read(f"/proc/{pid}/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return path
        if number == "0":
            unified = path
    return unified


def has_own_memory_cgroup(pid):
    """True when a process is in another memory cgroup than this one: a tenant's."""
    return memory_cgroup(pid) != memory_cgroup(os.getpid())


def autopsy(pid):
    """Where every thread of a process stands: for the log of a hung case."""
    lines = []
    for process in [pid] + descendants(pid):
        base = f"/proc/{process}"
        lines.append(f"process {process}: {read(base + '/cmdline').replace(chr(0), ' ')}")
        wanted = ("State", "VmRSS", "RssAnon", "Threads")
        lines += [
            "  " + line
            for line in read(base + "/status").splitlines()
            if line.split(":")[0] in wanted
        ]
        try:
            tasks = os.listdir(base + "/task")
        except OSError:
            continue
        for task in tasks[:40]:
            where = f"{base}/task/{task}"
            stack = " < ".join(
                line.split("] ")[-1].split("+")[0] for line in read(where + "/stack").splitlines()
            )
            lines.append(
                f"  thread {task} {read(where + '/comm').strip()}: "
                f"{read(where + '/syscall').strip()} in {stack or read(where + '/wchan')}"
            )
    return "\n".join(lines) + "\n"


def processor_flags():
    """As /proc/cpuinfo has them for the first processor."""
    for line in read("/proc/cpuinfo").splitlines():
        if line.startswith(("flags", "Features")):
            return line.split(":")[1].split()
    return []
