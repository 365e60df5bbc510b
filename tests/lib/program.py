"""One program of a case: started natively or under Strata, heard through its
gate, ended for certain."""

import os
import select
import signal
import socket
import struct
import subprocess
import time

import machine
from strata import Failure, Skip

_number = 0


def copy_program(path, to):
    """What is to be executed there. A child of its own writes it: what this process has open
    for writing, a child of another case has, too, until it executes its program, and as long
    the kernel executes nothing of it (ETXTBSY)."""
    subprocess.run(["cp", path, to], check=True)


class Program:
    """`gate()` waits for the program's next word, `answer()` lets it go on. `budget`: a
    size, or flags of `strata run` in its place."""

    def __init__(self, case, arguments, budget, name=None, env=None, fails=False, uid=None,
                 native=False):
        global _number
        _number += 1
        self.case = case
        self.native = case.native or native
        self.name = name or f"{case.name}-{_number}"
        self.budget = budget
        self.fails = fails
        self.pids = set()
        self.link = None
        gate = f"strata-test-{os.getpid()}-{_number}"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind("\0" + gate)
        self.listener.listen(8)
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("STRATA_", "LD_PRELOAD"))
        }
        environment.update(env or {}, STRATA_TEST_GATE=gate)
        if case.soak:
            environment["STRATA_TEST_SOAK"] = "1"
        command = [str(a) for a in arguments]
        if self.native:
            environment["STRATA_TEST_NATIVE"] = "1"
        else:
            environment["STRATA_SOCKET"] = case.daemon.socket_path
            wish = ["--dram", budget] if isinstance(budget, str) else budget
            command = [case.binaries.strata, "run", "--name", self.name, *wish, "--"] + command
        self.log_path = os.path.join(case.log_directory, f"{self.name}.log")
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                cwd=case.directory, start_new_session=True, user=uid, group=uid,
                extra_groups=None if uid is None else [],
            )
        self.pid = self.process.pid
        self.ended = os.pidfd_open(self.pid)

    def gate(self, *words):
        """Waits for the next word at the gate and returns it; one of `words`
        if there are any. A program that ends instead fails the case."""
        watched = [self.listener, self.ended] if self.process.poll() is None else [self.listener]
        while True:
            left = self.case.seconds_left()
            ready, _, _ = select.select(watched, [], [], max(left, 0))
            if self.listener in ready:
                break
            if self.ended in ready:
                self.process.wait()
                if self.process.returncode != 0:
                    raise Failure(self.end_reason())
                # It may have left a daemon behind that still talks to us.
                watched = [self.listener]
                continue
            raise Failure(f"hung: no word at the gate ({' or '.join(words) or 'any'})")
        self.link, _ = self.listener.accept()
        credentials = self.link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.peer = struct.unpack("3i", credentials)[0]
        self.pids.add(self.peer)
        self.link.settimeout(max(self.case.seconds_left(), 1))
        line = b""
        while not line.endswith(b"\n"):
            piece = self.link.recv(4096)
            if not piece:
                raise Failure("the program died at its gate: " + self.end_reason())
            line += piece
        word = line.decode(errors="replace").strip()
        if word.startswith("FAIL "):
            raise Failure(word[5:])
        if word.startswith("skip "):
            self.answer()
            raise Skip(word[5:])
        if words and word not in words:
            raise Failure(f"the program said '{word}' instead of '{' or '.join(words)}'")
        return word

    def answer(self, word="go"):
        self.link.sendall(word.encode() + b"\n")
        self.link.close()
        self.link = None

    def quiet(self, seconds):
        """True when the program neither speaks nor ends for that long."""
        ready, _, _ = select.select([self.listener, self.ended], [], [], seconds)
        return not ready

    def wait(self):
        """The exit status (negative: the signal)."""
        try:
            return self.process.wait(max(self.case.seconds_left(), 0.1))
        except subprocess.TimeoutExpired:
            raise Failure("hung: did not end") from None

    def end_well(self):
        status = self.wait()
        if status != 0:
            raise Failure(self.end_reason())

    def end_reason(self):
        self.process.poll()
        lines = machine.read(self.log_path).strip().splitlines()
        status = self.process.returncode
        how = f"died by {signal.Signals(-status).name}" if status and status < 0 else \
            f"status {status}"
        return f"{how}: {lines[-1] if lines else 'nothing said'}"

    def stats(self):
        """The tenant as `strata stats` shows it; there must be one."""
        stats = self.case.daemon.stats(self.name)
        if stats is None:
            raise Failure(f"strata stats does not know {self.name}")
        return stats

    def assert_pressed(self):
        """A case that never evicted anything has tested nothing."""
        if self.native:
            return
        stats = self.case.daemon.printed_stats(self.name) or self.stats()
        self.case.note(f"evictions {stats['evictions_total']} faults {stats['faults_total']}")
        for counter in ("evictions_total", "faults_total"):
            if stats[counter] == 0:
                raise Failure(f"{counter} is 0: the case tested nothing")
        if stats["lost_pages_total"]:
            raise Failure(f"{stats['lost_pages_total']} pages lost")

    def finish(self, pressed=True):
        """The usual end: gate "done", a look at the counters, exit 0. Words
        before are answered with "go"."""
        while self.gate() != "done":
            self.answer()
        if pressed:
            self.assert_pressed()
        self.answer()
        if self.process.poll() is None or self.process.returncode:
            self.end_well()
        end = time.monotonic() + max(self.case.seconds_left(), 1)
        for pid in self.pids - {self.pid}:
            while machine.alive(pid):
                if time.monotonic() > end:
                    raise Failure(f"process {pid} did not end")
                time.sleep(0.01)
            try:
                os.waitpid(pid, os.WNOHANG)  # an orphan of the program is ours now
            except ChildProcessError:
                pass

    def close(self, failed):
        """Whatever happened, nothing of it is left running."""
        if failed:
            with open(os.path.join(self.case.log_directory, f"{self.name}.autopsy"), "w") as log:
                for pid in {self.pid} | self.pids:
                    log.write(machine.autopsy(pid))
        left = {self.pid} | self.pids
        left |= {child for pid in left for child in machine.descendants(pid)}
        for pid in left:
            if machine.alive(pid):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        self.process.wait()
        self.listener.close()
        os.close(self.ended)
