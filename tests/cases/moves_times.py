"""How long they stand still who move, and how much is sent; and the same guest, under the same
load, moved by QEMU itself."""

import contextlib
import os
import subprocess
import time

from moment import Moment, need_criu
from moves_hosts import another, move
from strata import Failure
from suite import case
from under import CPU, Guest, Line, initramfs, kernel

MEMORY = "320MiB"
MOVES = 4


class Plain(Line):
    """The guest of these cases in a QEMU that knows nothing of Strata; `origin`: the one
    that it comes from."""

    def __init__(self, run, number, origin=None):
        self.run, self.name = run, f"plain-{number}"
        place = os.path.join(run.directory, self.name)
        self.arrives, self.talks, serial = f"{place}.in", f"{place}.qmp", f"{place}.serial"
        self.log_path = os.path.join(run.log_directory, f"{self.name}.log")
        of = kernel()
        command = [
            run.tool("qemu-system-x86_64"), "-accel", "tcg", "-machine", "q35", "-m", "320M",
            "-cpu", CPU, "-nodefaults", "-display", "none", "-no-reboot", "-kernel", of,
            "-initrd", initramfs(run, of), "-append", "console=ttyS0 quiet panic=-1",
            "-serial", f"unix:{serial},server=on,wait={'off' if origin else 'on'}",
            "-qmp", f"unix:{self.talks},server=on,wait=off",
        ]
        if origin:
            command += ["-incoming", f"unix:{self.arrives}"]
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log,
                                            stderr=log, cwd=run.directory)
        self.said = ""
        self.line = self.connect(serial)

    def ask(self, command, **arguments):
        return self.qemu_says(self.talks, 20 * self.run.patience, command, arguments)

    def until(self, condition, what):
        end = time.monotonic() + 60 * self.run.patience
        while not condition():
            if time.monotonic() > end or self.process.poll() is not None:
                raise self.failure(f"not in time: {what}")
            time.sleep(0.05)

    def move_to(self, other):
        """By QEMU's own live migration, as fast as it can; what QEMU says of it."""
        self.until(lambda: all(map(os.path.exists, (other.talks, other.arrives))),
                   "the other QEMU waits")
        self.ask("migrate-set-parameters", **{"max-bandwidth": 1 << 40})
        self.ask("migrate", uri=f"unix:{other.arrives}")
        said = {}

        def is_over():
            said.update(self.ask("query-migrate"))
            return said["status"] in ("completed", "failed")
        self.until(is_over, "it has moved")
        if said["status"] != "completed":
            raise self.failure(f"it has not moved: {said}")
        other.until(lambda: other.ask("query-status")["status"] == "running", "it runs there")
        self.kill()
        return said["downtime"], said["ram"]["transferred"]

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            self.line.close()


def filled(guest):
    guest.hear(r"^up\n")
    guest.tell("fill 64")
    guest.hear(r"^filled\n")
    guest.rounds(2)


def by_qemu(run):
    guest = Plain(run, 0)
    try:
        filled(guest)
        for number in range(1, MOVES + 1):
            other = Plain(run, number, guest)
            try:
                ms, sent = guest.move_to(other)
            except BaseException:
                other.kill()
                raise
            guest = other
            run.note(f"QEMU itself: stood still for {ms} ms, {sent / (1 << 20):.1f} MiB were sent")
            guest.rounds(1)
            time.sleep(2)
    finally:
        guest.kill()


@case("move-times", native=False, own_daemon=True, alone=True, soak=True, seconds=400)
def times(run):
    """How long they stand still, and what is sent: a guest of 320 MiB that has filled 64 MiB and
    rewrites a part of that all the time, and a program that writes all its 64 MiB over and over,
    which move as always and at once; and what QEMU's own migration takes for that guest, without
    Strata."""
    need_criu()
    with another(run) as there:
        guest = Guest(run, "first", ["--memory", MEMORY, "--dram", "400MiB"], ["-machine", "q35"])
        try:
            filled(guest)
            there_and_back(run, "first", there)
            there_and_back(run, "first", there, ["--at-once"])
        finally:
            guest.kill()
            for daemon in (run.daemon, there):
                daemon.strata("stop", "first", check=False)
        program = Moment(run, "plain", 64, "400MiB", name="program")
        try:
            with program.reaper_running():
                there_and_back(run, "program", there)
                there_and_back(run, "program", there, ["--at-once"])
        finally:
            program.kill()
    by_qemu(run)


def there_and_back(run, name, there, options=()):
    for here, other in ((run.daemon, there), (there, run.daemon)) * (MOVES // 2):
        said = move(here, name, other, options=options).stdout.strip().split("; it ", 1)[1]
        if "until it ran" not in said:
            raise Failure(f"it is not said where the time went: {said!r}")
        run.note(f"{' '.join((name, *options))} {said}")
        time.sleep(2)
