"""The first process of a guest (see guest.py, which puts the interpreter's line
before this): mounts what a system has, runs the suite, switches the guest off."""

import ctypes
import fcntl
import glob
import json
import os
import socket
import struct
import subprocess
import sys

SIOCSIFFLAGS, IFF_UP = 0x8914, 1
SYS_FINIT_MODULE = 313
SYSLOG_ACTION_READ_ALL = 3
POWER_OFF = 0x4321FEDC
LIBC = ctypes.CDLL(None, use_errno=True)


def mount(kind, place):
    os.makedirs(place, exist_ok=True)
    if kind == "tmpfs" and os.listdir(place):
        os.chmod(place, 0o1777)  # the host's files of a case lie there: not to be hidden
        return
    if LIBC.mount(kind.encode(), place.encode(), kind.encode(), 0, None) != 0:
        print(f"guest: cannot mount {place}: {os.strerror(ctypes.get_errno())}")


def load_modules():
    """All that are there, each when those that it needs have been."""
    left = glob.glob("/modules/*.ko")
    while left:
        refused = []
        for path in left:
            with open(path, "rb") as file:
                if LIBC.syscall(SYS_FINIT_MODULE, file.fileno(), b"", 0) != 0:
                    refused.append(path)
        if len(refused) == len(left):
            print(f"guest: cannot load {' '.join(left)}: {os.strerror(ctypes.get_errno())}")
            return
        left = refused


def raise_loopback():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        fcntl.ioctl(link, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def main():
    os.chmod("/", 0o755)  # as everywhere; CRIU looks
    for kind, place in (("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"),
                        ("debugfs", "/sys/kernel/debug"), ("tmpfs", "/tmp"), ("tmpfs", "/run"),
                        ("cgroup2", "/sys/fs/cgroup")):
        mount(kind, place)
    load_modules()
    raise_loopback()
    with open("/sys/fs/cgroup/cgroup.subtree_control", "w") as control:
        control.write("+memory")
    programs = "/strata/target/tests"
    for program in os.listdir(programs):
        os.utime(os.path.join(programs, program))  # newer than its source: not built again
    with open("/told.json") as file:
        told = json.load(file)
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "STRATA_BIN_DIR": "/strata/bin",
                   "CARGO_TARGET_DIR": "/strata/target", "PYTHONDONTWRITEBYTECODE": "1",
                   **told["environment"]}
    failed = False
    for arguments in told["runs"]:
        suite = [sys.executable, "-B", "/strata/tests/lib/suite.py", *arguments]
        done = subprocess.run(suite, env=environment, stdin=subprocess.DEVNULL, check=False)
        failed |= done.returncode != 0
    if failed:
        said = ctypes.create_string_buffer(1 << 20)
        LIBC.klogctl(SYSLOG_ACTION_READ_ALL, said, len(said))
        print("guest: the kernel said:\n" + said.value.decode(errors="replace")[-2000:])
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
