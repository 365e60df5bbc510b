"""Programs that were started in a terminal, and those whose parent waits for them: a
rollback is nothing that either has to notice."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import time

import machine
from moment import Snapshots, need_criu
from program import Program
from strata import Failure
from suite import case

# Says a line for each that it reads, and the round it is in.
ECHO = """
import os, sys, time
round = 0
while True:
    line = sys.stdin.readline()
    if not line:
        open("ended", "w").close()
        while True:
            time.sleep(60)
    round += 1
    print(f"round {round}: {line.strip()} tty {os.isatty(1)}", flush=True)
"""


class Terminal:
    """A pseudo-terminal with this process at its other end."""

    def __init__(self, run):
        self.run = run
        self.ours, self.theirs = pty.openpty()
        self.text = ""

    def expect(self, text):
        """Reads until it says so."""
        while text not in self.text:
            ready, _, _ = select.select([self.ours], [], [], max(self.run.seconds_left(), 0))
            if not ready:
                raise Failure(f"the terminal does not say '{text}', but {self.text[-200:]!r}")
            self.text += os.read(self.ours, 4096).decode(errors="replace")
        self.text = self.text.split(text, 1)[1]

    def type(self, line):
        os.write(self.ours, line.encode() + b"\n")

    def close(self):
        """Once: by then the numbers may be another case's."""
        ends, self.ours, self.theirs = {self.ours, self.theirs} - {None}, None, None
        for fd in ends:
            os.close(fd)


class InTerminal(Program):
    """A program whose standard streams are a terminal's, in the session of the
    runner: a shell's that runs in there."""

    def __init__(self, run, terminal, *words, options=()):
        self.case, self.native, self.name = run, False, f"{run.name}-{len(run.programs)}"
        self.log_path = os.path.join(run.log_directory, f"{self.name}.log")
        self.pids, self.link = set(), None
        command = [run.binaries.strata, "run", "--name", self.name, "--dram", "64MiB", *options,
                   "--", *words]
        self.process = subprocess.Popen(
            command, env=run.daemon.environment(), cwd=run.directory, stdin=terminal.theirs,
            stdout=terminal.theirs, stderr=terminal.theirs)
        self.pid = self.process.pid
        run.programs.append(self)

    def close(self, failed):
        self.process.poll()
        for pid in {self.pid} | self.pids:
            with contextlib.suppress(ProcessLookupError):
                if machine.alive(pid):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def terminal_of(run):
    terminal = Terminal(run)
    try:
        yield terminal
    finally:
        terminal.close()


def started(run, terminal, options=()):
    need_criu()
    program = InTerminal(run, terminal, run.tool("python3"), "-u", "-c", ECHO, options=options)
    terminal.type("one")
    terminal.expect("round 1: one tty True")
    tenant = Snapshots(run, program)
    tenant.note_pids()
    return tenant


@case("snapshot-terminal", native=False, own_daemon=True)
def in_terminal(run):
    """Typed at, rolled back, typed at again: on the same terminal. Restored by who has
    none, it has /dev/null, and that is said."""
    with terminal_of(run) as terminal:
        tenant = started(run, terminal)
        snapshot = tenant.take()
        for _ in range(2):
            terminal.type("two")
            terminal.expect("round 2: two tty True")
            tenant.rollback(snapshot)
        terminal.type("again")
        terminal.expect("round 2: again tty True")
        tenant.kill()
        said = tenant.restore(snapshot).stderr
        if "/dev/null" not in said:
            raise Failure(f"nothing is said of its terminal: {said!r}")
        run.daemon.wait_until(lambda: os.path.exists(os.path.join(run.directory, "ended")),
                              "it reads the end of nothing")
        tenant.kill()


@case("snapshot-terminal-of-client", native=False, own_daemon=True)
def of_client(run):
    """Restored, and cloned, from another terminal: it is there."""
    with terminal_of(run) as first, terminal_of(run) as second:
        tenant = started(run, first)
        snapshot = tenant.take()
        tenant.kill()
        first.close()
        with tenant.reaper_running():
            done = subprocess.run(
                [run.binaries.strata, "restore", snapshot], env=run.daemon.environment(),
                stdin=second.theirs, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode or done.stderr:
            raise Failure(f"status {done.returncode}: {done.stderr}")
        second.type("two")
        second.expect("round 2: two tty True")
        tenant.kill()


# Ends by itself when it is told to, with a status that nothing else has.
WAITS = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(23))
open("ready", "w").write(str(os.getpid()))
while True:
    signal.pause()
"""


def supervised(run):
    """One with a parent, and where it says that it is ready."""
    need_criu()
    with terminal_of(run) as terminal:
        program = InTerminal(run, terminal, run.tool("python3"), "-c", WAITS,
                             options=("--supervise",))
        ready = os.path.join(run.directory, "ready")
        run.daemon.wait_until(lambda: machine.read(ready), "it is ready")
    tenant = Snapshots(run, program)
    tenant.note_pids()
    return program, tenant


@case("rollback-supervised", native=False, own_daemon=True)
def waits(run):
    """Who waits for `strata run --supervise` hears nothing of rollbacks, passes signals
    on, and hears how it ends."""
    program, tenant = supervised(run)
    snapshot = tenant.take()
    for _ in range(2):
        tenant.rollback(snapshot)
        if program.process.poll() is not None:
            raise Failure(f"its parent ended with {program.process.returncode} over a rollback")
    program.process.send_signal(signal.SIGTERM)
    if (status := program.process.wait(run.seconds_left())) != 23:
        raise Failure(f"its parent ended with {status}, and it with 23")


@case("rollback-supervised-killed", native=False, own_daemon=True)
def waits_for_killed(run):
    """Killed, before a rollback or after, it is dead for who waits."""
    for rolls in (False, True):
        program, tenant = supervised(run)
        if rolls:
            tenant.rollback(tenant.take())
        for pid in tenant.note_pids():
            os.kill(pid, signal.SIGKILL)
        if (status := program.process.wait(run.seconds_left())) != -signal.SIGKILL:
            raise Failure(f"its parent ended with {status}, and it by SIGKILL")
        os.unlink(os.path.join(run.directory, "ready"))


@case("snapshot-restless", native=False, own_daemon=True, seconds=120)
def restless(run):
    """A shell that starts programs all the time: each snapshot of it is taken, and it
    comes back from the last."""
    need_criu()
    count = os.path.join(run.directory, "count")
    # As often as it can; a word each, in one write.
    loop = f"i=0; while :; do /bin/true; i=$((i+1)); echo $i >{count}; done"
    program = run.start("/bin/sh", "-c", loop, budget="64MiB")
    shell = Snapshots(run, program)

    last = [0]

    def starts():
        # Empty while it is being written.
        last[0] = int(machine.read(count) or last[0])
        return last[0]
    run.daemon.wait_until(lambda: starts() > 20, "the loop runs")
    before, began = starts(), time.monotonic()
    taken = [shell.take() for _ in range(3 if not run.soak else 20)]
    run.note(f"{(starts() - before) / (time.monotonic() - began):.0f} starts a second meanwhile")
    shell.reaper.pids.update(shell.pids())
    with shell.reaper_running():
        run.daemon.strata("rollback", shell.name, taken[-1], timeout_s=60)
    now = starts()
    run.daemon.wait_until(lambda: starts() != now, "the loop goes on")
    if said := machine.read(program.log_path):
        raise Failure(said.splitlines()[0])
    run.daemon.strata("stop", shell.name)
