"""Snapshots when something dies or is full: the tenant, the worker, CRIU, the
directory. The tenant runs on or is cleanly gone, what was whole stays whole, and
what is not is never listed."""

import contextlib
import os
import random
import signal
import subprocess
import threading
import time

import machine
from moment import Moment
from strata import Failure, configured
from suite import case


# What is disturbed, in turn.
KINDS = ("snapshot", "rollback", "restore")


def prepared(program, kind, snapshot):
    """The command of this kind; the program is what it wants: ended, or as it is."""
    if kind == "restore":
        program.kill()
    program.note_pids()
    return {"snapshot": ["snapshot", program.name],
            "rollback": ["rollback", program.name, snapshot],
            "restore": ["restore", snapshot]}[kind]


def refused(done, *words, status=1):
    """One line that says why, status 1."""
    lines = done.stderr.splitlines()
    if done.returncode != status or len(lines) != 1 or not all(word in lines[0] for word in words):
        raise Failure(f"not refused in one line with {words}: status {done.returncode}, {lines}")


@case("snapshot-crash", native=False, own_daemon=True)
def crash(run):
    """Killed, it comes back under its own name or another; not while it runs."""
    program = Moment(run, "plain", 24, "10MiB")
    program.pressed()
    snapshot = program.take("--label", "good")
    refused(program.restore(snapshot, check=False), program.name, "running")
    program.goes_on()
    program.crash(snapshot)
    name = program.name
    # While the tenant runs, a second one cannot have its process numbers.
    pids = program.pids()
    done = program.daemon.strata("restore", snapshot, "--name", "other", check=False)
    refused(done, "in use", str(pids[0]))
    if program.pids() != pids or program.daemon.stats("other"):
        raise Failure("a refused restore changed something")
    program.goes_on()
    program.check()
    program.crash(snapshot, name="other")
    if program.daemon.stats(name) and program.daemon.stats(name)["pids"]:
        raise Failure(f"{name} has processes beside other's")
    program.pressed()
    program.check()
    # What came back has snapshots of its own, and they outlive the first.
    own = program.take()
    if not own.startswith("other@"):
        raise Failure(f"a snapshot of other is called {own}")
    program.remove(snapshot)
    program.crash(own)
    program.assert_clean()


class InBackground(threading.Thread):
    """A command whose work is disturbed meanwhile."""

    def __init__(self, program, *arguments):
        super().__init__(daemon=True)
        self.program, self.arguments, self.done = program, arguments, None
        self.start()

    def run(self):
        self.done = self.program.daemon.strata(*self.arguments, check=False, timeout_s=60)


def disturb(run, program, what, victim, delay):
    """Kills `victim()` that long after the command began."""
    job = InBackground(program, *what)
    end = time.monotonic() + delay
    killed = False
    while job.is_alive() and not killed:
        if time.monotonic() >= end and (pid := victim()):
            try:
                os.kill(pid, signal.SIGKILL)
                killed = True
            except ProcessLookupError:
                pass
        time.sleep(0.0005)
    job.join()
    return job.done, killed


def assert_whole(program, snapshots, what):
    """Exactly what was reported as taken is listed, and all of it usable."""
    listed = program.daemon.wait_until(lambda: listing(program), "snapshots are listed")[0]
    wrong = {i: s["state"] for i, s in listed.items() if s["state"] != "usable"}
    if wrong or set(listed) != set(snapshots):
        raise Failure(f"after {what}: listed are {sorted(listed)} (not usable: {wrong}), "
                      f"taken were {sorted(snapshots)}")


def listing(program):
    try:
        return (program.list(),)
    except Failure:
        return None  # between two workers


def worker_back(run, old):
    if old:
        run.daemon.wait_until(lambda: not machine.alive(old), "the killed worker is gone")
    return run.daemon.wait_until(run.daemon.worker, "there is a worker")


@case("snapshot-worker-killed", native=False, own_daemon=True, seconds=120)
def worker_killed(run):
    """Ten times (hundreds in a soak) at random points of snapshot, rollback and
    restore; the random numbers are the same each time."""
    program = Moment(run, "plain", 24, "10MiB")
    program.pressed()
    first = program.take()
    snapshots, kills, gone = {first}, 0, 0
    chance = random.Random(4)
    for number in range(run.times(10)):
        kind = KINDS[number % 3]
        delay = chance.uniform(0, 0.15)
        where = f"worker killed {delay * 1000:.0f} ms into a {kind}"
        worker = worker_back(run, None)
        what = prepared(program, kind, first)
        with program.reaper_running():
            done, killed = disturb(run, program, what, lambda: worker, delay)
            worker_back(run, worker if killed else None)
            kills += killed
            if kind == "snapshot" and done.returncode == 0:
                taken = done.stdout.strip()
                snapshots.add(taken)
            if kind in ("snapshot", "rollback") and done.returncode:
                # The answer may be lost when the work is done; and what a program was when it
                # was ended for a rollback is kept.
                new = set(program.list()) - snapshots
                if len(new) > 1:
                    raise Failure(f"{where}: {sorted(new)} are new")
                snapshots |= new
        assert_whole(program, snapshots, where)
        program.note_pids()
        if kind == "snapshot":
            program.goes_on()
            program.check()
        elif done.returncode:
            # Alive as it was, alive as it shall be, or cleanly gone.
            try:
                run.daemon.wait_until(lambda: not program.pids() or program.moves(), where, 15)
            except Failure:
                raise Failure(f"{where}: {done.stderr.strip()}; its processes "
                              f"{program.pids()} stand still") from None
        gone += restored_if_gone(run, program, first, where)
        program.goes_on()
        program.check()
        for snapshot in sorted(snapshots - {first}):
            program.remove(snapshot)
            snapshots.discard(snapshot)
    program.rollback(first)
    program.goes_on()
    program.check()
    program.assert_clean()
    run.note(f"{kills} kills, {gone} times cleanly gone")
    if not kills:
        raise Failure("nothing was killed")


def restored_if_gone(run, program, snapshot, where):
    """Whether nothing was left and it had to be restored. What is still on its
    way (`is running`, without a process yet), or on its way out (half made, its numbers
    in use), must arrive or go."""
    def settled():
        if program.pids():
            return "there"
        done = program.restore(snapshot, check=False)
        if done.returncode == 0:
            return "restored"
        if not any(why in done.stderr for why in ("is running", "numbers of it are in use")):
            raise Failure(f"{where}, then: {done.stderr.strip()}")
        return None
    return run.daemon.wait_until(settled, f"{where}: it is there or can be restored") == "restored"


def criu_of(run):
    """The CRIU that the worker runs, or None."""
    worker = run.daemon.worker()
    for pid in machine.descendants(worker) if worker else []:
        line = machine.read(f"/proc/{pid}/cmdline")
        if "criu" in line and ("dump" in line or "restore" in line):
            return pid
    return None


@case("snapshot-criu-killed", native=False, own_daemon=True, seconds=120)
def criu_killed(run):
    """CRIU is killed in the middle. In the few milliseconds in which it stands in
    the program that may end the program, but cleanly."""
    program = Moment(run, "plain", 24, "10MiB")
    program.pressed()
    first = program.take()
    chance, kills, gone = random.Random(5), 0, 0
    for number in range(run.times(10)):
        kind = KINDS[number % 3]
        delay = chance.uniform(0, 0.06)
        where = f"CRIU killed {delay * 1000:.0f} ms into a {kind}"
        what = prepared(program, kind, first)
        with program.reaper_running():
            done, killed = disturb(run, program, what, lambda: criu_of(run), delay)
        kills += killed
        taken = {done.stdout.strip()} if kind == "snapshot" and done.returncode == 0 else set()
        assert_whole(program, {first} | taken, where)
        try:
            run.daemon.wait_until(lambda: not program.pids() or program.moves(), where, 15)
        except Failure:
            raise Failure(f"{where}: {done.stderr.strip()}; its processes {program.pids()} "
                          "stand still") from None
        gone += restored_if_gone(run, program, first, where)
        program.goes_on()
        program.check()
        for snapshot in taken:
            program.remove(snapshot)
    program.assert_clean()
    run.note(f"{kills} kills, {gone} times cleanly gone")
    if not kills:
        raise Failure("nothing was killed")


@case("snapshot-tenant-killed", native=False, own_daemon=True, seconds=120)
def tenant_killed(run):
    """The tenant is killed while a snapshot of it is taken: a whole snapshot or
    none, never half of one; the older one brings it back."""
    program = Moment(run, "plain", 24, "10MiB")
    program.pressed()
    first = program.take()
    chance, kills = random.Random(6), 0
    for _ in range(run.times(6)):
        pid = program.note_pids()[0]
        with program.reaper_running():
            done, killed = disturb(run, program, ["snapshot", program.name], lambda: pid,
                                   chance.uniform(0, 0.1))
        kills += killed
        taken = {done.stdout.strip()} if done.returncode == 0 else set()
        assert_whole(program, {first} | taken, "the tenant was killed")
        program.kill()
        for snapshot in [*taken, first]:
            if program.pids():
                program.kill()
            program.restore(snapshot)
            program.goes_on()
            program.check()
        for snapshot in taken:
            program.remove(snapshot)
    if not kills:
        raise Failure("nothing was killed")
    program.assert_clean()


@case("snapshot-no-space", native=False, own_daemon=True)
def no_space(run):
    """The directory of snapshots is full: refused with that reason, the tenant
    runs on, and older ones stay; with space again it works."""
    with small_disk(run, "2m") as full:
        text = f'snapshot_dir = "{full}"\n'
        log = os.path.join(run.log_directory, "stratad-small.log")
        with configured(run.daemon, text, run.directory, log):
            program = Moment(run, "plain", 24, "10MiB")
            program.pressed()
            first = program.take()
            ballast = os.path.join(full, "ballast")
            # Everything, then all but little pieces: it fails at several places.
            for spare in (0, 4096, 16 << 10, 64 << 10):
                fill(ballast, spare)
                done = program.daemon.strata("snapshot", program.name, check=False)
                if done.returncode == 0:
                    program.remove(done.stdout.strip())
                elif "No space left" not in done.stderr:
                    raise Failure(f"with {spare} bytes left: {done.stderr.strip()}")
                elif spare == 0:
                    run.note(done.stderr.strip()[-60:])
                if spare == 0:
                    # What it is now cannot be kept: so it is not ended.
                    refused(program.rollback(first, check=False), "space left", "runs on")
                if spare == 0 and done.returncode == 0:
                    raise Failure("a snapshot without any space: nothing was tested")
                program.goes_on()
                program.check()
                assert_whole(program, {first}, f"{spare} bytes were left")
            os.unlink(ballast)
            second = program.take()
            program.roll(first)
            program.roll(second)
            program.assert_clean()
            program.kill()


def fill(path, spare):
    """Takes all space of the file system of `path` but `spare` bytes."""
    if os.path.exists(path):
        os.unlink(path)
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            pass
        if spare:
            file.truncate(file.tell() - spare)


@contextlib.contextmanager
def small_disk(run, size):
    """A file system of so much, in memory; where it is mounted."""
    full = os.path.join(run.directory, "small")
    os.mkdir(full)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700",
                              "strata-test", full], check=False, capture_output=True, text=True)
    if mounted.returncode:
        raise Failure("mounting a small tmpfs: " + mounted.stderr.strip())
    try:
        yield full
    finally:
        unmount(full)


def unmount(path):
    for _ in range(100):
        if subprocess.run(["umount", path], check=False, capture_output=True).returncode == 0:
            return
        time.sleep(0.05)
    subprocess.run(["umount", "-l", path], check=False)
