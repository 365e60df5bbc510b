"""Snapshots that go to another machine in a file, and what is refused there."""

import json
import os

import machine
from elsewhere import not_here
from moment import Arrived, Moment
from program import copy_program
from strata import Failure, configured
from suite import case

# Names the description of what came from the other machine, in the guest.
MANIFEST = "STRATA_TEST_ARRIVED"
# The C library shall choose nothing that QEMU's processor lacks, or is told to lack.
PLAIN_CPU = ("glibc.cpu.hwcaps=-AVX,-AVX2,-AVX_Fast_Unaligned_Load,-AVX512F,-AVX512VL,"
             "-AVX512BW,-AVX512DQ,-AVX512CD,-XSAVEC,-RTM")
LAST_PID = "/proc/sys/kernel/ns_last_pid"
BEYOND_THE_GUEST = 2000
PID_MAX = "/proc/sys/kernel/pid_max"
MOST_PIDS = str(1 << 22)


def mapped(pid):
    """The files that a process has mapped: what must be at the same place."""
    lines = machine.read(f"/proc/{pid}/maps").splitlines()
    return {line.split()[5] for line in lines if " /" in line and " /memfd:" not in line}


def refused(done, *words):
    """It says no in one line that has these words."""
    lines = done.stderr.strip().splitlines()
    if done.returncode != 1 or len(lines) != 1 or done.stdout or \
            not all(word in done.stderr for word in words):
        raise Failure(f"status {done.returncode}, {lines}, {done.stdout!r}: expected a line with "
                      f"{' and '.join(words)}")


def nothing_there(run, name, directory=None):
    """A refused import left neither tenant nor snapshot nor files."""
    if name in run.daemon.tenants():
        raise Failure(f"a refused import left the tenant {name}")
    if (listed := run.daemon.strata("snapshots", "--json").stdout) and name in listed:
        raise Failure(f"a refused import left {listed}")
    left = set(os.listdir(directory)) - {"lineage.json"} if directory else ()
    if left:
        raise Failure(f"a refused import left {sorted(left)}")


def export(run, program):
    """Takes and exports a snapshot, asks for a report that only what is brought
    back will give, and ends the program; the snapshot and the file."""
    program.pressed()
    snapshot = program.take()
    program.check()
    file = os.path.join(run.directory, "moved")
    run.daemon.strata("snapshot", "export", snapshot, file)
    program.report()
    program.kill()
    return snapshot, file


def send(run):
    """What `import-from-elsewhere` needs to let a program of this machine go on in a
    guest, under another kernel and on another processor: the files that must be there,
    and its environment."""
    # With a number that nobody in the guest has, also where this machine is young.
    if int(machine.read(LAST_PID)) < BEYOND_THE_GUEST:
        with open(LAST_PID, "w") as file:
            file.write(str(BEYOND_THE_GUEST))
    program = Moment(run, "threads", 16, "8MiB", env={"GLIBC_TUNABLES": PLAIN_CPU})
    needed = mapped(program.program.pid)
    snapshot, file = export(run, program)
    manifest = os.path.join(run.directory, "arrived.json")
    with open(manifest, "w") as out:
        json.dump({"name": program.name, "pid": program.program.pid, "file": file,
                   "board": program.board_path, "log": program.program.log_path,
                   "moment": program.moments[snapshot], "flags": machine.processor_flags()}, out)
    return needed | {manifest, file, program.program.log_path}, [f"{MANIFEST}={manifest}"]


@case("import-from-elsewhere", native=False, own_daemon=True)
def import_from_elsewhere(run):
    """What was sent by `send`: restored with all its values, kept to its budget,
    taken and rolled back here. Before, what a processor that can less and a
    lower bound of process numbers are told."""
    if MANIFEST not in os.environ:
        not_here("nothing came from another machine", "guest-new-kernel")
    with open(os.environ[MANIFEST]) as file:
        arrived = json.load(file)
    name = arrived["name"]
    come = ("snapshot", "import", arrived["file"])
    if "avx512f" in set(arrived["flags"]) - set(machine.processor_flags()):
        refused(run.daemon.strata(*come, check=False), "avx512", "--any-cpu")
        nothing_there(run, name)
    program = Arrived(run, name, arrived["board"], arrived["log"])
    snapshot = run.daemon.strata(*come, "--any-cpu").stdout.strip()
    program.moments[snapshot] = arrived["moment"]
    with open(PID_MAX, "w") as file:
        file.write(str(arrived["pid"]))
    refused(program.restore(snapshot, check=False), "kernel.pid_max")
    with open(PID_MAX, "w") as file:
        file.write(MOST_PIDS)
    program.brought_back(snapshot, lambda: program.restore(snapshot))
    program.pressed()
    own = program.take()
    program.check()
    program.roll(snapshot)
    program.roll(own)
    program.crash(own)
    program.pressed()
    program.assert_clean()


@case("import-other-daemon", native=False, own_daemon=True)
def import_other_daemon(run):
    """Into a daemon whose sockets are elsewhere, as another machine's are: the
    program finds it. Taken in twice it runs once, for it has its old number."""
    program = Moment(run, "plain", 24, "12MiB")
    snapshot, file = export(run, program)
    text = f'snapshot_dir = "{os.path.join(run.directory, "there")}"\n'
    with configured(run.daemon, text, run.directory, os.path.join(run.log_directory, "there.log")):
        came = run.daemon.strata("snapshot", "import", file).stdout.strip()
        again = run.daemon.strata("snapshot", "import", file, "--name", "again").stdout.strip()
        program.moments[came] = program.moments[snapshot]
        # What it was asked before it ended; it has forgotten the question.
        program.brought_back(came, lambda: program.restore(came))
        program.pressed()
        pid = program.pids()[0]
        refused(run.daemon.strata("restore", again, check=False), str(pid), "strata clone")
        own = program.take()
        program.roll(own)
        program.roll(came)
        program.assert_clean()
        program.kill()


@case("import-refused", native=False, own_daemon=True, seconds=120)
def import_refused(run):
    """Files that are no whole snapshot, no CRIU, the program not at its place:
    one line each, and nothing left behind."""
    own = os.path.join(run.directory, "own")
    copy_program(run.built("moment"), own)
    program = Moment(run, "plain", 24, "12MiB", command=(own,))
    snapshot, file = export(run, program)
    with open(file, "rb") as whole:
        content = whole.read()
    middle = len(content) // 2
    damaged = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1:]
    bad = [(b"", "no snapshot file"), (b"nothing of ours\n" * 9, "no snapshot file"),
           (content[:middle], "incomplete"), (damaged, "damaged")]
    directory = os.path.join(run.directory, "there")
    os.mkdir(directory, 0o700)
    text = f'snapshot_dir = "{directory}"\n'
    without = {name: value for name, value in os.environ.items() if name != "STRATA_CRIU"}
    without["PATH"] = run.directory
    log = os.path.join(run.log_directory, "there.log")
    with configured(run.daemon, text, run.directory, log, without):
        for number, (wrong, word) in enumerate(bad):
            path = os.path.join(run.directory, f"bad-{number}")
            with open(path, "wb") as out:
                out.write(wrong)
            done = run.daemon.strata("snapshot", "import", path, check=False)
            refused(done, word)
            nothing_there(run, program.name, directory)
        came = run.daemon.strata("snapshot", "import", file).stdout.strip()
        refused(program.restore(came, check=False), "CRIU is not installed")
        program.remove(came)
        run.daemon.wait_until(lambda: program.name not in run.daemon.tenants(),
                              "the tenant goes with its only snapshot")
        nothing_there(run, program.name, directory)
    with configured(run.daemon, text, run.directory, log):
        came = run.daemon.strata("snapshot", "import", file).stdout.strip()
        os.rename(own, own + ".away")
        refused(program.restore(came, check=False), f"it needs {own}: No such file")
        if program.pids():
            raise Failure("a refused restore left processes")
        if left := [n for n in os.listdir(os.path.join(run.directory, "run")) if "restore" in n]:
            raise Failure(f"a refused restore left {left}")
        os.rename(own + ".away", own)
        program.moments[came] = program.moments[snapshot]
        program.brought_back(came, lambda: program.restore(came))
        program.kill()
