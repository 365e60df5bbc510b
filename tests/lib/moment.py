"""What the cases of snapshots share: a CRIU, `strata snapshot` and its kin, the
processes that it brings back (which are nobody's children), and the program
tests/programs/moment.c with the board that it and the runner write on.

Nothing here says what must hold after a rollback; that is in the cases."""

import json
import mmap
import os
import shutil
import signal
import subprocess
import threading
import time

import machine
from strata import Failure, Skip

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def find_criu():
    """Path of a CRIU that is new enough, or None. Downloads nothing."""
    if named := os.environ.get("STRATA_CRIU"):
        return named
    script = os.path.join(ROOT, "scripts", "criu.sh")
    if os.path.exists(script):
        done = subprocess.run([script, "--path"], capture_output=True, text=True, cwd=ROOT,
                              check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    return shutil.which("criu")


# Daemons are started with the environment of the runner.
CRIU = find_criu()
if CRIU:
    os.environ["STRATA_CRIU"] = CRIU


def need_criu():
    if not CRIU:
        raise Skip("criu is not installed (scripts/setup.sh criu)")


class Reaper:
    """Collects processes that end meanwhile. The runner is the subreaper: what
    is restored becomes its child, and as a zombie would keep its number."""

    def __init__(self, programs=()):
        self.programs, self.pids, self.stop = list(programs), set(), threading.Event()
        self.thread = threading.Thread(target=self.work, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()

    def look(self):
        for program in self.programs:
            program.process.poll()
        for pid in list(self.pids):
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass

    def work(self):
        while not self.stop.wait(0.002):
            self.look()


class Snapshots:
    """The snapshots of one tenant, by the command line."""

    def __init__(self, run, program):
        need_criu()
        self.run, self.daemon, self.program = run, run.daemon, program
        self.name = program.name
        self.reaper = Reaper([program])

    def take(self, *options):
        """The identity of a new one."""
        return self.daemon.strata("snapshot", self.name, *options).stdout.strip()

    def list(self, name=None):
        """As `strata snapshots --json` shows them, by identity."""
        listed = json.loads(self.daemon.strata("snapshots", "--json").stdout)
        if isinstance(listed, dict):
            listed = listed["snapshots"]
        return {one["id"]: one for one in listed if one["tenant"] == (name or self.name)}

    def pids(self):
        stats = self.daemon.stats(self.name)
        return stats["pids"] if stats else []

    def note_pids(self):
        """What is there now is ended with the case, and collected."""
        found = self.pids()
        self.program.pids.update(found)
        self.reaper.pids.update(found)
        return found

    def command(self, *arguments, check=True):
        """One that ends or starts processes."""
        self.note_pids()
        with self.reaper_running():
            done = self.daemon.strata(*arguments, check=check, timeout_s=60)
        self.note_pids()
        return done

    def reaper_running(self):
        self.reaper = Reaper([self.program])
        self.reaper.pids.update(self.program.pids)
        return self.reaper

    def rollback(self, snapshot, check=True):
        return self.command("rollback", self.name, snapshot, check=check)

    def restore(self, snapshot, name=None, check=True):
        if name:
            self.name = name
        return self.command("restore", snapshot, *(["--name", name] if name else []), check=check)

    def remove(self, *snapshots):
        self.daemon.strata("snapshot", "rm", *snapshots)

    def kill(self, sign=signal.SIGKILL):
        """Ends the tenant's processes from outside and waits until they are gone."""
        pids = self.note_pids()
        with self.reaper_running():
            # Stopped first: none is to see another's end, and say so.
            for number in (signal.SIGSTOP, sign):
                for pid in pids:
                    try:
                        os.kill(pid, number)
                    except ProcessLookupError:
                        pass
            self.daemon.wait_until(
                lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids),
                "the killed processes are gone")
        self.daemon.wait_until(lambda: not self.pids(), "strata knows that they are gone")


class Moment(Snapshots):
    """moment.c under Strata, or another program that knows the board (see
    there)."""

    # Whether its processes had a memory cgroup of their own in their first life.
    has_group = False
    COMMANDS = {"check": 1, "fork": 2, "exec": 3, "end": 4, "refill": 5, "write": 6}

    def __init__(self, run, mode, megabytes=32, budget="12MiB", name=None,
                 more=(), command=("moment",), env=None):
        need_criu()
        path = os.path.join(run.directory, f"board-{len(run.programs)}")
        with open(path, "wb") as file:
            file.truncate(4096)
        program = run.start(*command, path, mode, megabytes, *more, budget=budget, name=name,
                            env=env)
        self.meet(run, program, path)
        self.until(lambda: self.word(32), "it is ready")
        self.note_pids()
        self.has_group = machine.has_own_memory_cgroup(program.pid)

    def meet(self, run, program, board):
        Snapshots.__init__(self, run, program)
        self.look_at(board)
        self.orders = 0
        self.moments = {}

    def look_at(self, board):
        """At whole words: `struct` writes zero first and then byte by byte, which
        the program takes for an epoch of its own, or half an order."""
        self.board_path = board
        with open(board, "r+b") as file:
            view = memoryview(mmap.mmap(file.fileno(), 4096))
        self.words, self.longs = view.cast("I"), view.cast("Q")

    def word(self, offset):
        return self.words[offset // 4]

    def long(self, offset):
        return self.longs[offset // 8]

    def put(self, offset, value):
        self.words[offset // 4] = value

    epoch = property(lambda self: self.word(0))
    reports = property(lambda self: self.word(4))
    count = property(lambda self: self.long(8))
    resumed_at = property(lambda self: self.long(16))

    def fail_if_said(self):
        said = machine.read(self.program.log_path).strip()
        if said:
            raise Failure(f"the program, at round {self.count}: {said.splitlines()[0]}")

    def until(self, condition, what, seconds=30):
        """Waits; what the program finds wrong meanwhile fails the case."""
        end = time.monotonic() + seconds * self.daemon.patience
        while not condition():
            self.fail_if_said()
            if time.monotonic() > end:
                raise Failure(f"not within {seconds * self.daemon.patience} s: {what}")
            time.sleep(0.002)

    def order(self, what):
        """Has something done, and waits until it is."""
        self.orders += 1
        order = self.orders << 8 | self.COMMANDS[what]
        self.put(24, order)
        self.until(lambda: self.word(28) == order, f"'{what}' is done")
        self.put(24, 0)
        self.fail_if_said()

    def check(self):
        self.order("check")

    def pressed(self):
        """Waits until pages were evicted and came back since now."""
        before = self.daemon.stats(self.name)

        def happened():
            stats = self.daemon.stats(self.name)
            return stats["evictions_total"] > before["evictions_total"] + 200 and \
                stats["faults_total"] > before["faults_total"] + 200
        self.until(happened, f"pages of {self.name} are evicted and come back")

    def assert_clean(self):
        """Nothing of its memory was lost."""
        if lost := self.daemon.stats(self.name)["lost_pages_total"]:
            raise Failure(f"{lost} pages lost")

    def moves(self):
        """True when the program goes on at once."""
        before = self.count
        time.sleep(0.05)
        self.fail_if_said()
        return self.count != before

    def goes_on(self):
        before = self.count
        self.until(lambda: self.count > before + 5, "the program goes on")

    def take(self, *options):
        before = self.count
        snapshot = super().take(*options)
        self.fail_if_said()
        self.moments[snapshot] = (before, self.count)
        return snapshot

    def report(self):
        """The program's own count, as its private memory has it. Asked before
        and after it is brought back: only what forgot the question answers
        again."""
        reports = self.reports
        self.put(0, self.epoch + 1)
        self.until(lambda: self.reports > reports, "it reports")

    def brought_back(self, snapshot, how):
        """Brings it back by `how`, which was given after the question; sees that
        it is back where it was at that snapshot, and that all is right."""
        reports = self.reports
        how()
        self.until(lambda: self.reports > reports, "it reports after it was brought back")
        first, last = self.moments[snapshot]
        # A round may stand between its count and its place on the board.
        if not first <= self.resumed_at <= last + 1:
            raise Failure(f"brought back to round {self.resumed_at}, but {snapshot} was taken "
                          f"between {first} and {last}")
        self.goes_on()
        self.check()
        if self.has_group:
            self.assert_one_group()

    def assert_one_group(self):
        """Its processes are in one memory cgroup, and that is its own."""
        pids = self.daemon.stats(self.name)["pids"]
        groups = {machine.memory_cgroup(pid) for pid in pids}
        if len(groups) != 1 or not machine.has_own_memory_cgroup(pids[0]):
            raise Failure(f"brought back, its processes are in the memory cgroups {groups}")

    def roll(self, snapshot):
        self.report()
        self.brought_back(snapshot, lambda: self.rollback(snapshot))

    def crash(self, snapshot, name=None):
        self.report()
        self.kill()
        self.brought_back(snapshot, lambda: self.restore(snapshot, name))


class Arrival:
    """Stands for a Program that was started on another machine: nobody's child
    here, and not there before it is restored."""

    def __init__(self, name, log_path):
        self.name, self.log_path, self.pids, self.process = name, log_path, set(), self

    def poll(self):
        """As a child that was never started."""

    def close(self, _failed):
        for pid in self.pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


class Arrived(Moment):
    """A Moment of which another machine's snapshot is to be restored here; what
    it needs of files is there."""

    def __init__(self, run, name, board, log_path):
        need_criu()
        program = Arrival(name, log_path)
        run.programs.append(program)
        self.meet(run, program, board)
