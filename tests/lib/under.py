"""A guest underneath which Strata is: `strata vm run` starts QEMU, in which nothing
runs but `guest_memory.c`, heard and told over the serial line."""

import contextlib
import fcntl
import itertools
import json
import os
import re
import signal
import socket
import struct
import subprocess
import termios
import time

import guest
import machine
from strata import Failure, Skip
from suite import BUILD, ROOT

# Without cmpxchg16b: the emulation of QEMU before 8.0 leaves wrong flags behind it, and an
# interrupt just then, as after a wait for a page, brings a guest's kernel down with a double
# fault (docs/guests.md).
WITHOUT = (*guest.SLOW, "cx16")
CPU = guest.cpu(WITHOUT)
# Modules of the guest's kernel, where it does not have them built in.
BALLOON = "virtio_balloon"
# A line takes some 278 writes of a byte that nobody reads.
FULL_BYTES = 200
FOUND_SECONDS = 30
REQUESTS = itertools.count()


def kernel():
    """The newest that was fetched, with the balloon's module."""
    for _, path in reversed(guest.kernels(os.path.join(BUILD, "guest"))):
        if any(os.path.basename(m).startswith(BALLOON) for m in guest.modules(path)):
            return path
    raise Skip("no guest kernel with a balloon's module; scripts/setup.sh guest fetches Debian's")


def initramfs(run, of, name="guest_memory", more=()):
    """With the one program, and the kernel's modules; `more`: files, and where they are."""
    path = os.path.join(run.directory, "initramfs")
    if os.path.exists(path):
        return path  # another guest of this case may be reading it
    program = os.path.join(run.directory, name)
    source = os.path.join(ROOT, "tests", "lib", name + ".c")
    built = subprocess.run(
        [run.tool("cc"), "-std=gnu17", "-O2", "-Wall", "-Wextra", "-Werror", "-static", source,
         "-o", program], capture_output=True, text=True, check=False)
    if built.returncode != 0:
        raise Failure(f"cc: {built.stderr.strip()}")
    archive = guest.Archive(path)
    archive.add(program, "/init")
    for source, place in more:
        archive.add(source, place)
    guest.add_modules(archive, of)
    archive.end()
    return path


def asked_qemu(path, seconds, *requests):
    """What a QEMU answers at its monitor in one conversation. Each request has a name of its
    own: an answer to whoever has hung up before goes to the next one."""
    with socket.socket(socket.AF_UNIX) as talk:
        talk.settimeout(seconds)
        until = time.monotonic() + seconds
        while True:
            try:
                talk.connect(path)
                break
            except BlockingIOError:
                # QEMU lets one wait, and the worker does just now.
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
        lines = talk.makefile("rw")
        answers = []
        for request in ({"execute": "qmp_capabilities"}, *requests):
            name = f"test-{os.getpid()}-{next(REQUESTS)}"
            lines.write(json.dumps({**request, "id": name}) + "\n")
            lines.flush()
            answer = {}
            while answer.get("id") != name:
                answer = json.loads(lines.readline())
            answers.append(answer)
    return answers[1:]


class Line:
    """What a guest says and is told; it came from a snapshot, and is no child of ours."""

    process = None

    def __init__(self, run, name, path):
        self.run, self.name = run, name
        self.log_path = os.path.join(os.path.dirname(path), "qemu.log")
        self.said = ""
        self.line = self.connect(path)

    def failure(self, what):
        log = machine.read(self.log_path).strip().splitlines()
        with open(self.log_path + ".serial", "w") as said:
            said.write(self.said)
        return Failure(f"{self.name}: {what}; it said {self.said[-200:]!r}, "
                       f"QEMU {log[-1:]!r}; see {self.log_path}")

    def connect(self, path):
        """The command of one that was begun anew may still be starting it; one that came from a
        snapshot is there, and so is its line."""
        end = time.monotonic() + (self.run.seconds_left() if self.process else
                                  FOUND_SECONDS * self.run.patience)
        while True:
            line = socket.socket(socket.AF_UNIX)
            try:
                line.connect(path)
                return line
            except OSError:
                line.close()
            if self.process and self.process.poll() is not None:
                raise self.failure(f"status {self.process.returncode}")
            if time.monotonic() > end:
                raise self.failure("hung: no serial line")
            time.sleep(0.05)

    def hear(self, pattern):
        """Waits for a line of the guest's, and forgets those before it."""
        while True:
            if "WRONG" in self.said:
                raise self.failure("a byte of its memory is wrong")
            found = re.search(pattern, self.said, re.MULTILINE)
            if found:
                self.said = self.said[found.end():]
                return found
            try:
                if not self.more(max(self.run.seconds_left(), 0.1)):
                    raise self.failure(f"it ended before it said {pattern!r}")
            except TimeoutError:
                raise self.failure(f"hung: it does not say {pattern!r}") from None

    def more(self, seconds):
        """Reads what it says next, for so long at most; false: it has ended."""
        self.line.settimeout(seconds)
        piece = self.line.recv(1 << 16)
        self.said += piece.decode(errors="replace").replace("\r", "")
        return bool(piece)

    def hear_out(self):
        """All that it says until it ends."""
        try:
            while self.more(max(self.run.seconds_left(), 0.1)):
                pass
        except ConnectionError:
            pass
        except TimeoutError:
            raise self.failure("it does not end") from None
        if "WRONG" in self.said:
            raise self.failure("a byte of its memory is wrong")

    def fill(self):
        """Waits until it is full, because nobody reads it: its guest waits for room."""
        waiting = 0

        def is_full():
            nonlocal waiting
            before, waiting = waiting, self.waiting_bytes()
            time.sleep(1)
            return waiting > FULL_BYTES and waiting == before
        self.run.daemon.wait_until(is_full, "its line is full", 60)

    def waiting_bytes(self):
        return struct.unpack("i", fcntl.ioctl(self.line, termios.FIONREAD, b"    "))[0]

    def tell(self, order):
        self.line.sendall(order.encode() + b"\n")

    def rounds(self, count):
        """So many more of them; the number of the last, or none."""
        last = None
        for _ in range(count):
            last = int(self.hear(r"^round (\d+) right\n")[1])
        return last

    def stats(self):
        stats = self.run.daemon.stats(self.name)
        if stats is None:
            raise self.failure("strata stats does not know it")
        return stats

    def qemu_says(self, monitor, seconds, command, arguments):
        """What the guest's QEMU answers to one command at its monitor."""
        request = {"execute": command, "arguments": arguments}
        (answer,) = asked_qemu(monitor, seconds, request)
        if "error" in answer:
            raise self.failure(f"QEMU refuses {command}: {answer['error']}")
        return answer["return"]

    def wait_until(self, condition, what):
        """Polls, and hears the guest meanwhile: nobody else empties its line."""
        end = time.monotonic() + 20 * self.run.patience
        while not condition():
            if time.monotonic() > end:
                raise self.failure(f"not in time: {what}")
            if self.said and "round" in self.said:
                self.rounds(self.said.count(" right\n"))
            with contextlib.suppress(TimeoutError):
                self.more(0.1)
            if "WRONG" in self.said:
                raise self.failure("a byte of its memory is wrong")

    def end(self):
        self.tell("end")
        self.hear(r"^end\n")
        if not self.process:
            self.line.close()
            return
        try:
            status = self.process.wait(30 * self.run.patience)
        except subprocess.TimeoutExpired:
            # As QEMU 7.2 does when somebody asks it something just then (docs/guests.md).
            self.process.terminate()
            self.run.note(f"{self.name}'s QEMU hung at its end, until it was told once more")
            status = self.wait_told()
        if status != 0:
            raise self.failure(f"QEMU ended with status {status}")
        self.line.close()

    def wait_told(self):
        try:
            return self.process.wait(10 * self.run.patience)
        except subprocess.TimeoutExpired:
            raise self.failure("hung: it did not end") from None


class Guest(Line):
    """`arguments`: of `strata vm run`; `words`: more of QEMU's, which is at `qemu`."""

    def __init__(self, run, name, arguments, words=(), qemu=None):
        self.run, self.name = run, name
        of = kernel()
        serial = os.path.join(run.directory, f"{name}.serial")
        self.log_path = os.path.join(run.log_directory, f"{name}.log")
        command = [
            run.binaries.strata, "vm", "run", "--name", name, *arguments, "--",
            qemu or run.tool("qemu-system-x86_64"), "-cpu", CPU, "-nodefaults", "-display", "none",
            "-no-reboot", "-kernel", of, "-initrd", initramfs(run, of),
            "-append", guest.APPEND,
            "-serial", f"unix:{serial},server=on,wait=on", *words,
        ]
        environment = {k: v for k, v in os.environ.items()
                       if not k.startswith(("STRATA_", "LD_PRELOAD"))}
        environment["STRATA_SOCKET"] = run.daemon.socket_path
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                cwd=run.directory, start_new_session=True)
        self.said = ""
        self.line = self.connect(serial)

    def kill(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    def mappings(self, size):
        """Permissions and inode of the mappings of that size."""
        found = []
        for line in machine.read(f"/proc/{self.process.pid}/maps").splitlines():
            words = line.split()
            start, end = (int(part, 16) for part in words[0].split("-"))
            if end - start == size:
                found.append((words[1], words[4]))
        return found
