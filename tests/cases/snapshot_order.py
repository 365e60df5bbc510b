"""Nothing is ended before it is known to come back: rollback, restore and clone with a
CRIU that fails at each of its steps (tests/programs/failing_criu.sh). Afterwards the
program runs with its bytes, as it was or as it was to become, or it was never stopped;
and if all fails, what it was and what it was to become are both there."""

import contextlib
import os
import random

import machine
from moment import CRIU, ROOT, Moment, Snapshots, need_criu
from program import copy_program
from strata import Failure, Skip, configured
from suite import case

# A rollback restores once to rehearse and once in earnest; if that fails, once more
# to undo it.
REHEARSAL, REAL, UNDO = 1, 2, 3
STEPS = (("start", "fail"), ("start", "kill"), ("pre-restore", "fail"), ("pre-restore", "kill"),
         ("post-restore", "fail"), ("post-restore", "kill"), ("pre-resume", "fail"),
         ("pre-resume", "kill"))
# With process numbers of its own CRIU is not to be killed before it has restored any.
OWN_NUMBERS = [step for step in STEPS if step != ("pre-restore", "kill")]
# A rehearsal is over when CRIU asks whether to resume.
REHEARSED = [step for step in OWN_NUMBERS if step[0] != "pre-resume"]
# After the first instruction of what was restored.
LAST_STEPS = (("post-resume", "fail"), ("post-resume", "kill"), ("end", "fail"))
DUMP_STEPS = (("start", "fail"), ("start", "kill"), ("pre-dump", "fail"), ("post-dump", "fail"))
# Not a failure for CRIU: it goes on, or has all of its images already.
HARMLESS = {("pre-resume", "fail"), ("post-resume", "fail"), ("post-dump", "fail")}


class Double:
    """The CRIU that fails, as the daemon of a case has it."""

    def __init__(self, run):
        need_criu()
        self.directory = os.path.join(run.directory, "double")
        os.makedirs(self.directory)
        self.path = os.path.join(self.directory, "criu")
        copy_program(os.path.join(ROOT, "tests", "programs", "failing_criu.sh"), self.path)
        self.write("real", CRIU)
        self.plan()

    def write(self, name, text):
        with open(os.path.join(self.directory, name), "w") as file:
            file.write(text)

    def plan(self, *rows):
        """(command, number, step, how) from now on."""
        self.rows = rows
        for name in ("dump.count", "restore.count", "done"):
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(self.directory, name))
        self.write("plan", "".join(f"{a} {b} {c} {d}\n" for a, b, c, d in rows))

    def done(self):
        return machine.read(os.path.join(self.directory, "done")).splitlines()

    def assert_done(self):
        """All that was planned has happened: else nothing was tested."""
        planned = {" ".join(map(str, row)) for row in self.rows}
        if not planned <= set(self.done()):
            raise Failure(f"planned was {sorted(planned)}, done {self.done()}")


@contextlib.contextmanager
def failing(run):
    """A program with a snapshot, under a daemon with such a CRIU."""
    double = Double(run)
    log = os.path.join(run.log_directory, "stratad.log")
    text = f'snapshot_dir = "{run.directory}/snapshots"\ncriu = "{double.path}"\n'
    with configured(run.daemon, text, run.directory, log):
        program = Moment(run, "plain", 8, "64MiB")
        yield double, program
        double.plan()
        program.kill()


def started(pid):
    """When a process began: which one has this number."""
    return machine.read(f"/proc/{pid}/stat").rsplit(")", 1)[-1].split()[19]


def told(done):
    """Refused in one line that is a sentence, with where CRIU's own words are."""
    lines = done.stderr.splitlines()
    if done.returncode != 1 or len(lines) != 1:
        raise Failure(f"not refused in one line: status {done.returncode}, {lines}")
    if "Error (" in lines[0]:
        raise Failure(f"CRIU's own line: {lines[0]}")
    return lines[0]


def runs_as_it_was(program, pids, before):
    """The same processes by number, no step back, all bytes right."""
    if program.pids() != pids:
        raise Failure(f"its processes are {program.pids()}, were {pids}")
    program.goes_on()
    if program.count < before:
        raise Failure(f"it is at round {program.count}, and was at {before}")
    program.check()


def one_rollback(double, program, snapshot, *rows):
    """A rollback while CRIU fails so."""
    pids, before = program.pids(), program.count
    epoch = program.epoch
    program.report()
    double.plan(*rows)
    listed = set(program.list())
    done = program.rollback(snapshot, check=False)
    double.assert_done()
    if done.returncode == 0:
        if {(step, how) for _, _, step, how in rows} - HARMLESS:
            raise Failure(f"rolled back, though CRIU failed at {rows}")
        program.until(lambda: program.pids() == pids, "it is back")
        program.goes_on()
        program.check()
    else:
        line = told(done)
        if not any(words in line for words in ("runs on", "is back as it was")):
            raise Failure(f"it does not say how the program is: {line}")
        runs_as_it_was(program, pids, before)
    if set(program.list()) != listed:
        raise Failure(f"listed are {set(program.list())}, were {listed}")
    return epoch


@case("rollback-refused", native=False, own_daemon=True)
def refused(run):
    """CRIU fails before anything is ended: the program never stops to be."""
    with failing(run) as (double, program):
        snapshot = program.take()
        rows = [("restore", REHEARSAL, *step) for step in REHEARSED]
        rows += [("dump", 1, *step) for step in DUMP_STEPS]
        for row in rows:
            starts = {pid: started(pid) for pid in program.pids()}
            one_rollback(double, program, snapshot, row)
            if row[2:] not in HARMLESS and {pid: started(pid) for pid in program.pids()} != starts:
                raise Failure(f"other processes are there after {row}")
        run.note(f"{len(rows)} steps")
        double.plan()
        program.roll(snapshot)


# Has a file mapped that a JVM's neighbours would remove (/tmp/hsperfdata_*).
MAPS = """
import mmap, os, time
os.mkdir("shown")
if os.environ.get("STRATA_TEST_MOUNT"):
    os.system("mount -t tmpfs none shown")
    # What it had from outside is opened behind other mounts.
    for number in range(3):
        os.dup2(os.open("/dev/null", os.O_RDWR), number)
with open("shown/mapped", "w+b") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
count = 0
while True:
    count += 1
    with open("count", "w") as file:
        file.write(str(count))
    time.sleep(0.01)
"""


def lacking(run, command, env=None):
    """A program of which something is missing when it is to come back: rolled back, it
    runs on, and is told why."""
    need_criu()
    program = run.start(*command, "-c", MAPS, budget="64MiB", env=env)
    tenant = Snapshots(run, program)
    count = lambda: int(machine.read(os.path.join(run.directory, "count")) or 0)  # noqa: E731
    run.daemon.wait_until(lambda: count() > 5, "it runs")
    pids = tenant.note_pids()
    snapshot = tenant.take()
    mapped = os.path.join(run.directory, "shown", "mapped")
    with contextlib.suppress(FileNotFoundError):
        os.rename(mapped, mapped + ".away")
    said = told(tenant.rollback(snapshot, check=False))
    if "shown/mapped: No such file" not in said or "runs on" not in said:
        raise Failure(f"it does not say what is missing: {said}")
    if tenant.pids() != pids:
        raise Failure(f"its processes are {tenant.pids()}, were {pids}")
    before = count()
    run.daemon.wait_until(lambda: count() > before + 5, "it runs on")
    return tenant, snapshot, mapped


@case("rollback-file-missing", native=False, own_daemon=True)
def file_missing(run):
    """Put back what is missing, and it works."""
    tenant, snapshot, mapped = lacking(run, [run.tool("python3")])
    os.rename(mapped + ".away", mapped)
    tenant.rollback(snapshot)
    tenant.kill()


@case("rollback-other-mounts", native=False, own_daemon=True)
def other_mounts(run):
    """What a container has mounted is not there for who restores it."""
    unshare = run.tool("unshare")
    if os.geteuid() != 0:
        raise Skip("only root has a mount namespace of its own")
    tenant, _, _ = lacking(run, [unshare, "--mount", run.tool("python3")],
                           env={"STRATA_TEST_MOUNT": "1"})
    tenant.kill()


@case("rollback-undone", native=False, own_daemon=True)
def undone(run):
    """CRIU fails when the old processes have ended: what they were comes back."""
    with failing(run) as (double, program):
        snapshot = program.take()
        for step in (*STEPS, *LAST_STEPS):
            one_rollback(double, program, snapshot, ("restore", REAL, *step))
        double.plan()
        program.roll(snapshot)


@case("rollback-both-kept", native=False, own_daemon=True)
def both_kept(run):
    """CRIU fails and fails again: both are named, and either comes back."""
    with failing(run) as (double, program):
        snapshot = program.take()
        for _ in range(2):
            program.goes_on()
            before = program.count
            double.plan(("restore", REAL, "post-restore", "kill"),
                        ("restore", UNDO, "pre-restore", "fail"))
            listed = set(program.list())
            line = told(program.rollback(snapshot, check=False))
            double.assert_done()
            [kept] = set(program.list()) - listed
            if kept not in line or snapshot not in line:
                raise Failure(f"{kept} or {snapshot} is not named: {line}")
            if program.pids():
                raise Failure(f"{program.pids()} are there")
            double.plan()
            program.restore(kept)
            program.goes_on()
            if program.count < before:
                raise Failure(f"back at round {program.count}, it was at {before}")
            program.check()
        program.crash(snapshot)


def restored(double, program, snapshot, step):
    program.kill()
    double.plan(("restore", 1, *step))
    done = program.restore(snapshot, check=False)
    double.assert_done()
    if done.returncode:
        told(done)
        # They are killed by then, and gone in a moment.
        program.daemon.wait_until(lambda: not program.pids(), f"nothing is there after {step}")
        double.plan()
        program.restore(snapshot)
    elif step not in HARMLESS:
        raise Failure(f"restored, though CRIU failed at {step}")
    program.goes_on()
    program.check()


def cloned(double, program, snapshot, step):
    pids, before = program.pids(), program.count
    double.plan(("restore", 1, *step))
    name = f"{program.name}-twin"
    # What it writes of the board is the original's: it is stopped at once.
    done = program.command("clone", snapshot, "--name", name, check=False)
    double.assert_done()
    if done.returncode == 0:
        if step not in HARMLESS:
            raise Failure(f"cloned, though CRIU failed at {step}")
        program.daemon.strata("stop", name)
    else:
        told(done)
        if (stats := program.daemon.stats(name)) and stats["pids"]:
            raise Failure(f"the clone has {stats['pids']} after {step}")
    if program.pids() != pids:
        raise Failure(f"its processes are {program.pids()}, were {pids}")
    return before


@case("restore-refused", native=False, own_daemon=True)
def restore_refused(run):
    """CRIU fails over a restore: nothing is left, and the next one succeeds."""
    with failing(run) as (double, program):
        snapshot = program.take()
        for step in (*STEPS, *LAST_STEPS):
            restored(double, program, snapshot, step)


@case("clone-refused", native=False, own_daemon=True)
def clone_refused(run):
    """CRIU fails over a clone: nothing of it is left, and the original runs on."""
    with failing(run) as (double, program):
        snapshot = program.take()
        for step in OWN_NUMBERS:
            if step in HARMLESS:
                continue
            cloned(double, program, snapshot, step)
            program.goes_on()
            program.check()


@case("rollback-at-random", native=False, own_daemon=True)
def at_random(run):
    """Ten commands (200 in a soak), a snapshot before each, that fail anywhere."""
    dice = random.Random(3)
    with failing(run) as (double, program):
        for _ in range(run.times(10)):
            double.plan()
            snapshot = program.take()
            command = dice.choice(("dump", "restore", "restore", "restore"))
            step = dice.choice(DUMP_STEPS if command == "dump" else STEPS)
            number = 1 if command == "dump" else dice.choice((REHEARSAL, REAL))
            if command == "restore" and step not in REHEARSED:
                number = REAL
            kind = dice.choice(("rollback", "rollback", "restore")) if command == "restore" else ""
            if kind == "restore":
                restored(double, program, snapshot, step)
            else:
                one_rollback(double, program, snapshot, (command, number, *step))
            program.remove(snapshot)
