"""Core files of snapshots: what gdb shows of a moment that has passed."""

import os
import re
import shutil
import stat
import struct
import subprocess

from moment import Moment
from snapshot_crash import refused, small_disk
from snapshot_files import Machine
from strata import Failure, Skip
from suite import case

PAGE = 4096
MEGABYTES = 24
THREADS = {"alpha_stands": 1, "beta_stands": 2, "gamma_stands": 3}
VARIABLES = {"in_data": 0x5eed0000, "in_bss": 0xb550000, "*on_heap": 0x4ea90000,
             "*shared_words": 0x54a60000, "*memory_file_words": 0x3e3f0000,
             "file_words[512]": 0xf11e0000}


def need_gdb():
    if not shutil.which("gdb"):
        raise Skip("gdb is not installed (scripts/setup.sh test)")


class Dumped(Moment):
    """dumped.c, and core files of it."""

    def __init__(self, run, name=None):
        self.file = os.path.join(run.directory, "private")
        super().__init__(run, "plain", MEGABYTES, "16MiB", name=name, command=("dumped",),
                         more=(self.file,))

    def core(self, snapshot, name, pid=None, check=True):
        """Writes one; where it is, or what was said."""
        path = os.path.join(self.run.directory, name)
        done = self.daemon.strata("snapshot", "core", snapshot, str(pid or self.program.pid),
                                  path, check=check, timeout_s=60)
        return path if check else done


def gdb(program, core, *commands):
    """What gdb prints."""
    options = [word for command in commands for word in ("-ex", command)]
    done = subprocess.run(
        ["gdb", "-nx", "-batch", "-iex", "set debuginfod enabled off",
         "-iex", "set auto-load off", *options, program, core],
        capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise Failure(f"gdb ended with {done.returncode}: {done.stderr.splitlines()[-3:]}")
    return done.stdout + "\n" + done.stderr


def assert_shows(program, core, moment):
    """gdb shows variables, pages and threads as they were at that moment."""
    commands = [f"output/x {name}" for name in VARIABLES]
    commands = [word for command in commands for word in (command, "echo \\n@")]
    said = gdb(program, core, "echo @", *commands)
    found = re.findall(r"@(0x[0-9a-f]+)", said)
    expected = [hex(base + moment) for base in VARIABLES.values()]
    if found != expected:
        raise Failure(f"{core}: {dict(zip(VARIABLES, found))} instead of {expected}: {said[-600:]}")
    said = gdb(program, core, "output/s in_text", "echo \\n", "output/x file_words[1]")
    if "constant" not in said or "0xd15c0001" not in said:
        raise Failure(f"{core}: what is in files is not shown: {said[-300:]}")
    said = gdb(program, core, "thread apply all -q -s p/x $_siginfo.si_signo", "info threads",
               "thread apply all bt")
    stacks = re.split(r"\nThread \d+ \(", said)
    for name in THREADS:
        stack = [one for one in stacks if f"{name} (" in one]
        if len(stack) != 1 or "stand_still" not in stack[0] or "?? ()" in stack[0]:
            raise Failure(f"{core}: no stack of {name}: {said[-2000:]}")
    if len(stacks) != 1 + 1 + len(THREADS):
        raise Failure(f"{core}: other threads than the program's: {said[-2000:]}")
    if not any("serve (" in one and "main (" in one and "nanosleep" in one for one in stacks):
        raise Failure(f"{core}: no stack of main: {said[-2000:]}")
    assert_registers(program, core)


def assert_registers(program, core):
    """Those of each thread, and its own variables."""
    said = gdb(program, core, "thread apply all -q p/x $xmm15.v2_int64[0]",
               "thread apply all -q p/x in_thread")
    for number in THREADS.values():
        if hex(0xf000 + number) not in said:
            raise Failure(f"{core}: no thread has {hex(0xf000 + number)} in xmm15: {said[-600:]}")
        if hex(0x7000 + number) not in said:
            raise Failure(f"{core}: no thread's variable is {hex(0x7000 + number)}: {said[-600:]}")


class Core:
    """A core file, read by hand."""

    def __init__(self, path):
        self.path = path
        with open(path, "rb") as file:
            head = file.read(64)
            if head[:7] != b"\x7fELF\x02\x01\x01" or struct.unpack_from("<HH", head, 16) != (4, 62):
                raise Failure(f"{path} is no core file of a 64-bit x86 program")
            table, = struct.unpack_from("<Q", head, 32)
            size, count = struct.unpack_from("<HH", head, 54)
            file.seek(table)
            rows = [struct.unpack("<IIQQQQQQ", file.read(size)) for _ in range(count)]
        self.loads = [row for row in rows if row[0] == 1]

    def read(self, address, length):
        """All of a range, which must be in one segment."""
        for _, _, offset, start, _, in_file, _, _ in self.loads:
            if start <= address and address + length <= start + in_file:
                with open(self.path, "rb") as file:
                    file.seek(offset + address - start)
                    return file.read(length)
        raise Failure(f"{self.path}: {hex(address)} is not in it")


def assert_pages(program, path, moment):
    """Every word of the pages, evicted or not; what was never touched is zero, and
    takes no room."""
    said = gdb(program, path, "output/x (unsigned long) in_pages", "echo \\n",
               "output/x untouched_pages")
    places = [int(word, 16) for word in re.findall(r"^(0x[0-9a-f]+)", said, re.M)][-2:]
    core = Core(path)
    bytes_ = MEGABYTES << 20
    words = struct.unpack(f"<{bytes_ // 8}Q", core.read(places[0], bytes_))
    for index, word in enumerate(words):
        if word != moment << 32 | index:
            raise Failure(f"{path}: word {index} of the pages is {hex(word)}")
    if core.read(places[1], 64 << 20).count(0) != 64 << 20:
        raise Failure(f"{path}: memory that was never touched is not zero")
    status = os.stat(path)
    if status.st_blocks * 512 > status.st_size - (60 << 20):
        raise Failure(f"{path}: {status.st_blocks * 512} of {status.st_size} bytes take room")
    if stat.S_IMODE(status.st_mode) != 0o600 or status.st_uid != os.geteuid():
        raise Failure(f"{path} has mode {stat.S_IMODE(status.st_mode):o}")


@case("snapshot-core", native=False, own_daemon=True, seconds=120)
def core(run):
    """Two moments of a program that goes on: gdb shows each as it was, also when the
    program has ended, and of one that is on disk alone, in another daemon."""
    need_gdb()
    machine = Machine(run, "here")
    with machine.daemon():
        program = Dumped(run)
        binary = run.built("dumped")
        first = program.take()
        program.order("write")
        second = program.take()
        program.order("write")
        old, new = program.core(first, "first"), program.core(second, "second")
        program.goes_on()
        for path, moment in ((old, 1), (new, 2)):
            assert_shows(binary, path, moment)
            assert_pages(binary, path, moment)
        run.daemon.strata("snapshot", "persist", second)
        pid = program.program.pid
        program.kill()
        again = program.core(first, "ended", pid)
        assert_shows(binary, again, 1)
    with machine.daemon():
        again = program.core(second, "persisted", pid)
        assert_shows(binary, again, 2)
        assert_pages(binary, again, 2)
    machine.assert_nothing_left(but=(second,))


@case("snapshot-core-refused", native=False, own_daemon=True)
def core_refused(run):
    """Refused in one line, and nothing is left: no such process or snapshot, a file
    that is there, a full disk; the program goes on."""
    machine = Machine(run, "here")
    with machine.daemon():
        program = Dumped(run)
        snapshot = program.take()
        pid = program.program.pid
        refused(program.core(snapshot, "none", pid=1, check=False), "process 1", str(pid))
        refused(program.core(f"{program.name}@9", "none", check=False), f"{program.name}@9")
        there = os.path.join(run.directory, "there")
        with open(there, "w", encoding="ascii") as file:
            file.write("mine")
        refused(program.core(snapshot, "there", check=False), "already")
        with open(there, encoding="ascii") as file:
            if file.read() != "mine":
                raise Failure("a file that was there was written over")
        with small_disk(run, "8m") as small:
            done = program.core(snapshot, os.path.join(small, "full"), check=False)
            refused(done, "No space left")
            if left := os.listdir(small):
                raise Failure(f"left on a full disk: {left}")
            # What a killed daemon leaves is no hindrance.
            with open(os.path.join(run.directory, "killed.part"), "wb") as file:
                file.write(b"\x89strata\n" + bytes(9000))
            program.core(snapshot, "killed")
        if os.path.exists(os.path.join(run.directory, "none")):
            raise Failure("a refused core file is there")
        machine.assert_nothing_left(but=(snapshot,))
        program.goes_on()
        program.order("write")
