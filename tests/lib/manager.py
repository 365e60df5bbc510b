"""Plays the service manager of one stratad: listens for it at its sockets, starts it,
hears what it says of itself. What a real one does with that is `system-service`."""

import contextlib
import fcntl
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

import machine
from strata import Failure, holders_of, worker_of

# What is behind the numbers that it is told becomes 3 and 4, in a process of this number.
LAUNCH = """
import os, sys
for number, at in zip(sys.argv[1:3], (3, 4)):
    os.dup2(int(number), at)
    os.close(int(number))
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="2")
os.execv(sys.argv[3], sys.argv[3:])
"""
WATCHDOG_S = 2


class ServiceManager:
    """With a configuration of `text`, in a directory of its own: that of the case is copied
    for clones."""

    def __init__(self, run, text=""):
        self.run = run
        self.directory = tempfile.mkdtemp(prefix="strata-test-")
        sockets = os.path.join(self.directory, "run")
        os.makedirs(sockets)
        for place in (self.directory, sockets):
            os.chmod(place, 0o755)
        self.configuration = os.path.join(self.directory, "stratad.toml")
        self.always = f'socket_dir = "{sockets}"\nsnapshot_dir = "{self.directory}/snapshots"\n'
        self.configure(text)
        self.paths = [os.path.join(sockets, name) for name in ("control.sock", "agent.sock")]
        self.listeners = []
        for path, kind in zip(self.paths, (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)):
            listener = socket.socket(socket.AF_UNIX, kind)
            listener.bind(path)
            os.chmod(path, 0o666)
            listener.listen(64)
            self.listeners.append(listener)
        self.ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.ear.bind(os.path.join(self.directory, "notify"))
        self.ear.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.log_path = os.path.join(run.log_directory, "service.log")
        self.process = None

    def configure(self, text):
        with open(self.configuration, "w") as file:
            file.write(self.always + text)

    def command(self):
        return [self.run.binaries.stratad, "--config", self.configuration]

    def start(self):
        # What one that is dead has said is not this one's.
        while select.select([self.ear], [], [], 0)[0]:
            self.ear.recv(4096)
        numbers = [os.dup(listener.fileno()) for listener in self.listeners]
        # Out of the way of 3 and 4, and of what other cases have.
        high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 100) for number in numbers]
        environment = {**os.environ, "NOTIFY_SOCKET": self.ear.getsockname(),
                       "WATCHDOG_USEC": str(WATCHDOG_S * 1_000_000)}
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", LAUNCH, *map(str, high), *self.command()],
                pass_fds=high, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True)
        for number in (*numbers, *high):
            os.close(number)

    def next(self, seconds):
        """What is said next, as a table; None: nothing within that time."""
        if not select.select([self.ear], [], [], seconds)[0]:
            return None
        said, credentials, _, _ = self.ear.recvmsg(4096, 256)
        sender = struct.unpack("3i", credentials[0][2])[0]
        if sender != self.process.pid:
            raise Failure(f"process {sender} speaks for stratad, which is {self.process.pid}")
        return dict(line.split("=", 1) for line in said.decode().splitlines())

    def hear(self, *wanted):
        """The message that has `wanted` (NAME=VALUE), which others may come before."""
        end = time.monotonic() + 20 * self.run.patience
        heard = []
        while (left := end - time.monotonic()) > 0:
            if self.process.poll() is not None and not select.select([self.ear], [], [], 0)[0]:
                raise Failure(f"stratad ended with {self.process.returncode} and said {heard}: "
                              + machine.read(self.log_path)[-300:])
            if said := self.next(min(left, 0.2)):
                heard.append(said)
                if all(said.get((pair := one.split("=", 1))[0]) == pair[1] for one in wanted):
                    return said
        raise Failure(f"it does not say {wanted}: {heard[-5:]}")

    def forget(self):
        """What was said until now."""
        while self.next(0):
            pass

    def worker(self):
        return worker_of(self.process.pid)

    def holders(self):
        return holders_of(self.configuration)

    def ends(self, status):
        try:
            self.process.wait(20 * self.run.patience)
        except subprocess.TimeoutExpired:
            raise Failure("stratad does not end") from None
        if self.process.returncode != status:
            raise Failure(f"stratad ended with {self.process.returncode}, not {status}")

    def close(self):
        for listener in self.listeners:
            listener.close()
        for sign in (signal.SIGTERM, signal.SIGKILL):
            if self.process and self.process.poll() is None:
                workers = machine.descendants(self.process.pid)
                self.process.send_signal(sign)
                try:
                    self.process.wait(5)
                except subprocess.TimeoutExpired:
                    continue
                finally:
                    if sign == signal.SIGKILL:
                        for pid in filter(machine.alive, workers):
                            os.kill(pid, signal.SIGKILL)
        for pid in self.holders():
            os.kill(pid, signal.SIGKILL)
        self.ear.close()
        shutil.rmtree(self.directory, ignore_errors=True)


@contextlib.contextmanager
def managed(run, text=""):
    """A service manager whose stratad takes the place of the case's private daemon; none
    is started yet."""
    manager = ServiceManager(run, text)
    private = run.daemon.socket_path
    run.daemon.socket_path = manager.paths[0]
    try:
        yield manager
    finally:
        run.daemon.socket_path = private
        manager.close()
