"""The kernel's same-page merging (KSM), switched on for a while. What is set for the whole
machine is put back as it was, by a process of its own: also when this one is killed."""

import contextlib
import fcntl
import json
import os
import subprocess
import sys

DIRECTORY = "/sys/kernel/mm/ksm"
# Fast: a case does not wait for it.
WANTED = {"pages_to_scan": "20000", "sleep_millisecs": "5", "smart_scan": "0", "run": "1"}


def read(name):
    with open(os.path.join(DIRECTORY, name)) as file:
        return file.read().strip()


def write(name, value):
    with open(os.path.join(DIRECTORY, name), "w") as file:
        file.write(value)


def sharing():
    """Pages that others have too, beyond the first of each."""
    return int(read("pages_sharing"))


def missing():
    """Why it cannot be switched on here, or None."""
    if not os.path.exists(os.path.join(DIRECTORY, "run")):
        return "this kernel has no KSM"
    if not os.access(os.path.join(DIRECTORY, "run"), os.W_OK):
        return "KSM can be switched on by root alone"
    if read("run") == "1":
        return "KSM runs on this machine already"
    return None


def settings():
    return {name: read(name) for name in WANTED if os.path.exists(os.path.join(DIRECTORY, name))}


@contextlib.contextmanager
def switched_on():
    """KSM merges. What it has merged until the end is unmerged, unless something was merged
    before."""
    before = settings()
    with subprocess.Popen([sys.executable, os.path.abspath(__file__)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True, start_new_session=True) as guardian:
        try:
            guardian.stdout.readline()
            for name in before:
                write(name, WANTED[name])
            yield
        finally:
            guardian.stdin.close()
            guardian.wait()
    if settings() != before:
        raise RuntimeError(f"KSM was {before}, and is {settings()}")


def guard():
    """Waits for the end of whoever started it, and puts everything back."""
    with open(os.path.join(DIRECTORY, "run")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before, merged = settings(), int(read("pages_shared"))
        print(json.dumps(before), flush=True)
        sys.stdin.read()
        if merged == 0:
            write("run", "2")
        for name in sorted(before, key=lambda name: name == "run"):
            write(name, before[name])


if __name__ == "__main__":
    guard()
