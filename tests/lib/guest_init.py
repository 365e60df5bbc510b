"""The first process of a guest (see guest.py, which puts the interpreter's line
before this): mounts what a system has, runs the suite, switches the guest off."""

import ctypes
import os
import subprocess
import sys

POWER_OFF = 0x4321FEDC
LIBC = ctypes.CDLL(None, use_errno=True)


def mount(kind, place):
    os.makedirs(place, exist_ok=True)
    if LIBC.mount(kind.encode(), place.encode(), kind.encode(), 0, None) != 0:
        print(f"guest: cannot mount {place}: {os.strerror(ctypes.get_errno())}")


def main():
    for kind, place in (("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"),
                        ("tmpfs", "/tmp"), ("tmpfs", "/run"), ("cgroup2", "/sys/fs/cgroup")):
        mount(kind, place)
    with open("/sys/fs/cgroup/cgroup.subtree_control", "w") as control:
        control.write("+memory")
    programs = "/strata/target/tests"
    for program in os.listdir(programs):
        os.utime(os.path.join(programs, program))  # newer than its source: not built again
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "STRATA_BIN_DIR": "/strata/bin",
                   "CARGO_TARGET_DIR": "/strata/target", "PYTHONDONTWRITEBYTECODE": "1"}
    suite = [sys.executable, "-B", "/strata/tests/lib/suite.py", *sys.argv[1:]]
    subprocess.run(suite, env=environment, stdin=subprocess.DEVNULL, check=False)
    logs = programs + "/logs"
    for place, _, files in os.walk(logs):
        for name in files:
            with open(os.path.join(place, name), errors="replace") as file:
                print(f"guest: {place[len(logs):]}/{name}:\n{file.read()[-2000:]}")
    print("\nguest: end", flush=True)


try:
    main()
finally:
    os.sync()
    LIBC.reboot(POWER_OFF)
