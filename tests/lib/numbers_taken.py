"""Processes that have chosen numbers: somebody else's, for those who come back and want
them."""

import contextlib
import ctypes
import errno
import os
import signal
import struct
import threading
import time

from strata import Failure

SYS_CLONE3 = 435
COMMAND = ("sleep", "600")
PATIENCE_S = 20
# Keeps the interpreter's lock: the child has it, too, until it executes its program.
LIBC = ctypes.PyDLL(None, use_errno=True)


def begin(number):
    """A child of that number, at once and without moving the kernel's own count, which
    other programs' numbers depend on; False if somebody has it."""
    wanted = ctypes.c_int(number)
    # struct clone_args: flags, pidfd, child_tid, parent_tid, exit_signal, stack,
    # stack_size, tls, set_tid, set_tid_size.
    words = struct.pack("10Q", 0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, ctypes.addressof(wanted), 1)
    got = LIBC.syscall(SYS_CLONE3, words, len(words))
    if got == 0:
        try:
            os.execvp(COMMAND[0], COMMAND)
        finally:
            os._exit(127)
    if got < 0:
        if ctypes.get_errno() == errno.EEXIST:
            return False
        raise Failure(f"no process with number {number}: {os.strerror(ctypes.get_errno())}")
    return True


def end(number):
    os.kill(number, signal.SIGKILL)
    os.waitpid(number, 0)


@contextlib.contextmanager
def taken(number):
    """A process of the runner's that has got this number; who had it is ending."""
    deadline = time.monotonic() + PATIENCE_S
    while not begin(number):
        if time.monotonic() > deadline:
            raise Failure(f"somebody has number {number}")
        time.sleep(0.001)
    try:
        yield number
    finally:
        end(number)


class Taker(threading.Thread):
    """Takes a number as soon as it is free and `may` says so, and keeps it for so long."""

    def __init__(self, number, seconds, may=lambda: True):
        super().__init__(daemon=True)
        self.number, self.seconds, self.may = number, seconds, may
        self.had, self.over = False, threading.Event()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.join()

    def run(self):
        while not self.over.is_set():
            if self.may() and begin(self.number):
                self.had = True
                self.over.wait(self.seconds)
                end(self.number)
                return
            time.sleep(0.0002)
