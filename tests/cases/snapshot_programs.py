"""Snapshots of an interpreter, a C++ program and a shell with a pipeline, while
they work; refusals of what CRIU cannot take."""

import os
import subprocess
import sys

import machine
from moment import Moment, Snapshots, need_criu
from strata import Failure
from suite import ROOT, case

SOURCES = os.path.join(ROOT, "tests", "programs")


def back_and_forth(run, program):
    """Two snapshots under pressure; back to each, killed, and back again."""
    program.pressed()
    snapshots = [program.take(), program.take()]
    program.check()
    for snapshot in snapshots:
        program.roll(snapshot)
        program.pressed()
    program.crash(snapshots[0])
    program.check()
    program.assert_clean()


def python_with_numpy():
    """The system's Python, and whether it has NumPy."""
    python = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
    done = subprocess.run([python, "-c", "import numpy"], check=False, capture_output=True)
    return python, done.returncode == 0


@case("snapshot-python", native=False, own_daemon=True, seconds=120)
def snapshot_python(run):
    """With NumPy where the system's Python has it."""
    need_criu()
    python, with_numpy = python_with_numpy()
    program = Moment(run, "job", 32, "32MiB",
                     command=(python, "-B", os.path.join(SOURCES, "arrays.py")))
    back_and_forth(run, program)
    program.order("fork")
    run.note("NumPy arrays" if with_numpy else "without NumPy")


@case("snapshot-cpp", native=False, own_daemon=True, seconds=120, takes=15)
def snapshot_cpp(run):
    need_criu()
    compiler = run.tool("c++", "g++", "clang++")
    built, source = run.built("moments"), os.path.join(SOURCES, "moments.cpp")
    if not os.path.exists(built) or os.path.getmtime(built) < os.path.getmtime(source):
        subprocess.run([compiler, "-std=c++17", "-O2", "-g", "-Wall", "-Wextra", "-Werror",
                        "-pthread", source, "-o", built], check=True)
    back_and_forth(run, Moment(run, "map", 32, "20MiB", command=(built,)))


PIPELINE = """
exec >>numbers
n=0
while :; do n=$((n + 1)); echo $n; done | {
    expected=1
    while read -r n; do
        [ "$n" = "$expected" ] || { echo "$n came instead of $expected" >&2; exit 1; }
        expected=$((n + 1))
        echo "$n"
    done
}
"""


@case("snapshot-pipeline", native=False, own_daemon=True)
def snapshot_pipeline(run):
    """`producer | consumer` of a shell: what is in the pipe belongs to the
    moment, not a number is lost or doubled."""
    need_criu()
    out = os.path.join(run.directory, "numbers")
    program = run.start("/bin/sh", "-c", PIPELINE, budget="64MiB")
    shell = Snapshots(run, program)
    # All whole lines of the file, which goes on growing.
    lines = lambda: [int(n) for n in machine.read(out).split("\n")[:-1]]  # noqa: E731
    run.daemon.wait_until(lambda: len(lines()) > 1000, "the pipeline runs")
    count = len(shell.note_pids())
    if count < 3:
        raise Failure(f"a pipeline of {count} processes")
    first = lines()[-1]
    snapshot = shell.take()
    last = lines()[-1]
    run.daemon.wait_until(lambda: lines()[-1] > last + 1000, "it goes on after the snapshot")
    for how in ("rollback", "kill"):
        if how == "kill":
            shell.kill()
            before = len(lines())
            shell.restore(snapshot)
        else:
            shell.rollback(snapshot)
            before = None
        run.daemon.wait_until(lambda: len(lines()) > (before or 0) + 1000, "it goes on")
        if len(shell.pids()) != count:
            raise Failure(f"{len(shell.pids())} of {count} processes came back")
        # One jump back in the file for each time, and only there.
        written = lines()
        jumps = [(a, b) for a, b in zip(written, written[1:]) if b != a + 1]
        if len(jumps) != (1 if how == "rollback" else 2):
            raise Failure(f"the numbers jump {jumps}")
        if not first <= jumps[-1][1] <= last + 1:
            raise Failure(f"after the {how} it goes on with {jumps[-1][1]}, the snapshot was "
                          f"taken between {first} and {last}")
    said = machine.read(program.log_path)
    if said:
        raise Failure(said.splitlines()[0])
    shell.kill()


REFUSED = {
    # What, the Python that has it, and a word of the refusal.
    "a device": ("import os; held = os.open('/dev/loop-control', os.O_RDWR)", "loop-control"),
    "an io_uring ring": ("import ctypes; ring = ctypes.CDLL(None).syscall(425, 4, "
                         "ctypes.create_string_buffer(120)); assert ring >= 0, ring", "io_uring"),
    "SysV shared memory": ("import ctypes; c = ctypes.CDLL(None); c.shmat.restype = "
                           "ctypes.c_void_p; i = c.shmget(0, 65536, 0o1600); a = c.shmat(i, None, "
                           "0); c.shmctl(i, 0, None)", "shared memory"),
}


@case("snapshot-refused", native=False, own_daemon=True)
def snapshot_refused(run):
    """What CRIU cannot take is named, the program is not harmed, and nothing is
    left of the attempt."""
    need_criu()
    for what, (python, word) in REFUSED.items():
        program = run.start(
            sys.executable, "-c",
            python + "\nimport os, time\nn = 0\nwhile True:\n    n += 1\n    time.sleep(0.001)\n"
            "    open('part', 'w').write(str(n))\n    os.rename('part', 'round')",
            budget="64MiB")
        snapshots = Snapshots(run, program)
        round_file = os.path.join(run.directory, "round")
        run.daemon.wait_until(lambda: machine.read(round_file), f"the program with {what} runs")
        done = run.daemon.strata("snapshot", program.name, check=False)
        lines = done.stderr.splitlines()
        if done.returncode != 1 or len(lines) != 1 or word not in lines[0]:
            raise Failure(f"{what} is not refused in one line with '{word}': status "
                          f"{done.returncode}, {lines}")
        if snapshots.list():
            raise Failure(f"{what}: a refused snapshot is listed")
        if program.process.poll() is not None:
            raise Failure(f"{what}: the program ended: {program.end_reason()}")
        before = machine.read(round_file)
        os.unlink(round_file)
        run.daemon.wait_until(lambda: machine.read(round_file), f"the program with {what} goes on")
        if int(machine.read(round_file)) < int(before or 0):
            raise Failure(f"{what}: the program began anew")
        program.close(False)
        run.programs.remove(program)
        os.unlink(round_file)


class Rounds(Snapshots):
    """A program that says "round N" after each round, and what it finds wrong."""

    def __init__(self, run, *command):
        need_criu()
        super().__init__(run, run.start(*command, budget="24MiB"))

    def rounds(self):
        lines = machine.read(self.program.log_path).splitlines()
        if wrong := [line for line in lines if not line.startswith("round ")]:
            raise Failure(f"the program: {wrong[0]}")
        return [int(line.split()[1]) for line in lines]

    def goes_on(self, count=10):
        before = len(self.rounds())
        self.daemon.wait_until(lambda: len(self.rounds()) >= before + count, "it reads on")
        return self.rounds()[before]


@case("snapshot-reads", native=False, own_daemon=True, seconds=120)
def snapshot_reads(run):
    """Stopped in the middle of system calls that want thousands of pages: over its
    budget, with nobody to evict meanwhile, they must come to their end."""
    program = Rounds(run, "reads", os.path.join(run.directory, "data"), 49, "wait")
    reached = []
    for _ in range(run.times(4)):
        first = program.goes_on()
        snapshot = program.take()
        reached.append((snapshot, first, program.rounds()[-1]))
    program.goes_on(50)
    # Newest first: each goes back, and is a jump in what the program has said.
    for snapshot, first, last in reversed(reached):
        program.rollback(snapshot)
        program.goes_on()
        said = program.rounds()
        now = [b for a, b in zip(said, said[1:]) if b <= a][-1]
        if not first < now <= last + 1:
            raise Failure(f"back at round {now}, but {snapshot} was taken between "
                          f"{first} and {last}")
    program.kill()
    program.restore(reached[0][0])
    program.goes_on()


@case("snapshot-aio", native=False, own_daemon=True)
def snapshot_aio(run):
    """Requests in flight write to memory past any protection, and no dump holds
    them: named, and nothing is frozen."""
    program = Rounds(run, "reads", os.path.join(run.directory, "data"), 49, "submit")
    program.goes_on()
    try:
        program.take()
    except Failure as refused:
        if "asynchronous I/O (io_setup)" not in str(refused):
            raise
    else:
        raise Failure("it was taken: test that all requests come to their end")
    program.goes_on(50)


@case("snapshot-aligned-stack", native=False, own_daemon=True)
def snapshot_aligned_stack(run):
    """Memory that CRIU brings back itself, the agent's too: the agent must learn of
    its new life all the same, in a clone as well."""
    program = Rounds(run, "aligned", 32)
    program.goes_on()
    snapshot = program.take()
    program.rollback(snapshot)
    program.goes_on()
    program.kill()
    program.restore(snapshot)
    program.goes_on()
    second = program.take()
    program.rollback(second)
    program.goes_on()


@case("snapshot-turns", native=False, own_daemon=True)
def snapshot_turns(run):
    """Snapshots asked for at the same time are taken one after the other, and what
    is persisted or removed meanwhile waits for its turn as well."""
    program = Rounds(run, "reads", os.path.join(run.directory, "data"), 49, "wait")
    program.goes_on()
    first = program.take()
    commands = [["snapshot", program.name]] * 3
    commands += [["snapshot", "persist", first], ["snapshot", program.name]]
    commands = [run.daemon.start_strata(*command) for command in commands]
    for command in commands:
        _, said = command.communicate(timeout=run.seconds_left())
        if command.returncode != 0:
            raise Failure(f"{' '.join(command.args[1:])}: {said.strip()}")
    if len(program.list()) != 5:
        raise Failure(f"there are {len(program.list())} snapshots, not 5")
    program.goes_on()
