"""What each case costs in processor time, where the kernel has the controller `cpuacct` by
itself: the thread that runs a case, and so all that it starts, is in a group of the case's own.
A daemon that cases share is counted in the case that started it, until that has ended."""

import contextlib
import os
import threading

PLACE = "/sys/fs/cgroup/cpuacct"
SHOWN = 40


def read(*path):
    with open(os.path.join(PLACE, *path)) as file:
        return file.read()


def move(tid, *group):
    with open(os.path.join(PLACE, *group, "tasks"), "w") as file:
        file.write(str(tid))


class Costs:
    def __init__(self):
        if not os.access(os.path.join(PLACE, "cpuacct.usage"), os.R_OK | os.W_OK):
            raise SystemExit(f"--costs: {PLACE} is not there, or not ours to write to")
        self.seconds = {}

    @contextlib.contextmanager
    def of(self, name):
        group = f"strata-tests-{os.getpid()}-{name}"
        os.mkdir(os.path.join(PLACE, group))
        try:
            move(threading.get_native_id(), group)
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0) + \
                int(read(group, "cpuacct.usage")) / 1e9
            while tasks := read(group, "tasks").split():
                for tid in tasks:
                    # One that has ended meanwhile is in no group.
                    with contextlib.suppress(OSError):
                        move(tid)
            os.rmdir(os.path.join(PLACE, group))

    def lines(self):
        most = sorted(self.seconds.items(), key=lambda one: -one[1])
        yield f"\n{sum(self.seconds.values()):.0f} s of processors in cases; the most:"
        yield from (f"{seconds:8.1f} {name}" for name, seconds in most[:SHOWN])
