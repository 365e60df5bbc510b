"""What measures the machine, in the soak alone: how long guests with 512 MiB, 2 and 8 GiB of
touched memory stand still for a snapshot, and how long clones and a rollback take until they
answer; beside it the same guest in a plain QEMU, whose migration to a file, `savevm` and
`loadvm` do the same. Nothing is judged but that every byte is right."""

import concurrent.futures
import contextlib
import os
import re
import socket
import subprocess
import time

import guest as guests
from guest_snapshots import MIB, reborn, snapshots
from guests_under import directory_of
from strata import Failure
from suite import case
from under import CPU, Guest, Line, initramfs, kernel

NAME = "first"
SIZES_MIB = (512, 2048, 8192)
MANY, MANY_MIB = 16, 512
POLL_SECONDS = 0.002
# What a plain QEMU may take for all of its memory.
SAVED_WITHIN = 300
# Then it is told once more.
AGAIN_SECONDS = 0.02
GOES_ON_SECONDS = 20


def ram_mib(mib):
    """What a guest has that touches so much: its kernel needs a part of all for itself."""
    return mib + 256 + mib // 32


def filled(one, mib):
    """Its memory is filled, it was looked at once, and it waits for what it is told."""
    one.hear(r"^up\n")
    one.tell(f"fill {mib}")
    one.hear(r"^filled\n")
    one.rounds(1)
    one.tell("rest")
    one.hear(r"^rests\n")


def answers(path, seconds):
    """Until whoever has this serial line has answered; it may not be there yet, and what it
    is told before it has its devices' state is lost."""
    until, said = time.monotonic() + seconds, b""
    while time.monotonic() < until:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(AGAIN_SECONDS)
            try:
                line.connect(path)
                while time.monotonic() < until:
                    line.sendall(b"rest\n")
                    with contextlib.suppress(TimeoutError):
                        said += line.recv(4096)
                    if re.search(rb"rests\r?\n", said):
                        return
            except OSError:
                time.sleep(POLL_SECONDS)
    raise Failure(f"nobody answers at {path}: {said!r}")


def inode(path):
    with contextlib.suppress(FileNotFoundError):
        return os.stat(path).st_ino
    return None


def brought_back(run, names, *command):
    """Milliseconds until QEMU was started, and until the first answer, of the last of them."""
    places = [directory_of(run, name) for name in names]
    before = [inode(os.path.join(place, "monitor")) for place in places]
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(len(names) + 1) as pool:
        told = pool.submit(run.daemon.strata, *command, timeout_s=300)

        def watch(place, was):
            while inode(os.path.join(place, "monitor")) in (None, was):
                if told.done() and told.exception():
                    raise told.exception()
                time.sleep(POLL_SECONDS)
            started = time.monotonic()
            answers(os.path.join(place, f"{NAME}.serial"), 120)
            return (started - began) * 1000, (time.monotonic() - began) * 1000
        times = list(pool.map(watch, places, before))
        told.result()
    return tuple(max(column) for column in zip(*times))


def right(run, name):
    """Every byte of it. What it was told until it answered may reach it only now, and of the last
    line a part: that is ended first, and it is told again until it does."""
    line = reborn(run, name)
    while "round" not in line.said:
        if run.seconds_left() < 0:
            raise line.failure("hung: it does not go on")
        line.tell("\ngo on")
        with contextlib.suppress(TimeoutError):
            line.more(GOES_ON_SECONDS)
    line.rounds(1)
    line.line.close()


def said(all_times):
    return ", ".join(f"{started:.0f} and {answered:.0f}" for started, answered in all_times)


def clean_up(run):
    for name in run.daemon.tenants():
        if name != "keeper":
            run.daemon.strata("stop", name, check=False)
    for known in snapshots(run):
        run.daemon.strata("snapshot", "rm", known["id"])


def ours(run, mib):
    one = Guest(run, NAME, ["--memory", f"{ram_mib(mib)}MiB", "--dram", f"{mib + 1024}MiB"],
                ["-machine", "q35"])
    try:
        filled(one, mib)
        for _ in range(3):
            run.daemon.strata("snapshot", NAME, timeout_s=300)
        taken = snapshots(run)
        last, still = taken[-1]["id"], [f"{one['freeze_us'] / 1000:.0f}" for one in taken]
        run.note(f"{mib} MiB: stood still {', '.join(still)} ms")
        clones = []
        for number in range(3):
            name = f"clone-{number}"
            clones.append(brought_back(run, [name], "clone", last, "--name", name))
            if number == 0:
                right(run, name)
            run.daemon.strata("stop", name)
        run.note(f"clones, until QEMU was there and until the answer: {said(clones)} ms")
        number = last.partition("@")[2]
        back = [brought_back(run, [NAME], "rollback", NAME, number) for _ in range(2)]
        right(run, NAME)
        run.note(f"rollback likewise: {said(back)} ms")
    finally:
        one.kill()
        clean_up(run)


def many(run):
    """Sixteen clones at once, and what all of them have in DRAM before they differ."""
    one = Guest(run, NAME, ["--memory", f"{ram_mib(MANY_MIB)}MiB",
                            "--dram", f"{MANY_MIB + 1024}MiB"], ["-machine", "q35"])
    try:
        filled(one, MANY_MIB)
        taken = run.daemon.strata("snapshot", NAME, timeout_s=300).stdout.split()[-1]
        names = [f"clone-{number}" for number in range(1, MANY + 1)]
        times = brought_back(run, names, "clone", taken, "--name", "clone", "--count", str(MANY))
        known = [run.daemon.stats(name) for name in (NAME, *names)]
        resident = [stats["resident_bytes"] / MIB for stats in known]
        stored = sum(stats["compressed_bytes"] for stats in known) / MIB
        run.note(f"{MANY} clones of {MANY_MIB} MiB all answer after {times[1]:.0f} ms; resident is "
                 f"{resident[0]:.0f} MiB of the first, {sum(resident[1:]):.0f} of all clones; "
                 f"{stored:.0f} MiB are compressed")
        right(run, names[-1])
    finally:
        one.kill()
        clean_up(run)


class Plain(Line):
    """The same guest in a QEMU without Strata; `words`: more of its own."""

    def __init__(self, run, mib, disk, words=()):
        self.run, self.name, self.said = run, "plain", ""
        place = os.path.join(run.directory, "plain")
        os.makedirs(place, exist_ok=True)
        for file in ("monitor", "serial"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(place, file))
        self.monitor, self.serial = (os.path.join(place, file) for file in ("monitor", "serial"))
        self.log_path = os.path.join(run.log_directory, "plain.log")
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [run.tool("qemu-system-x86_64"), "-machine", "q35", "-cpu", CPU, "-nodefaults",
                 "-display", "none", "-no-reboot", "-kernel", kernel(), "-initrd",
                 initramfs(run, kernel()), "-append", guests.APPEND, "-m", f"{ram_mib(mib)}M",
                 "-drive", f"file={disk},format=qcow2,if=none,id=d", "-device",
                 "virtio-blk-pci,drive=d", "-qmp", f"unix:{self.monitor},server=on,wait=off",
                 "-serial", f"unix:{self.serial},server=on,wait=off", *words],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def ask(self, command, **arguments):
        return self.qemu_says(self.monitor, SAVED_WITHIN, command, arguments)

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def theirs(run, mib):
    disk, file = (os.path.join(run.directory, name) for name in ("plain.qcow2", "plain.state"))
    subprocess.run([run.tool("qemu-img"), "create", "-q", "-f", "qcow2", disk, "64M"], check=True)
    one = Plain(run, mib, disk)
    try:
        one.line = one.connect(one.serial)
        filled(one, mib)
        one.line.close()
        began = time.monotonic()
        one.ask("human-monitor-command", **{"command-line": "savevm one"})
        saved = time.monotonic()
        one.ask("human-monitor-command", **{"command-line": "loadvm one"})
        answers(one.serial, 300)
        loaded = time.monotonic()
        one.ask("migrate", uri=f"exec:cat >{file}")
        while one.ask("query-migrate")["status"] not in ("completed", "failed"):
            time.sleep(POLL_SECONDS)
        written = time.monotonic()
        one.end()
        again = time.monotonic()
        one = Plain(run, mib, disk, ["-incoming", f"exec:cat {file}"])
        answers(one.serial, 300)
        run.note(f"plain QEMU: stood still {(saved - began) * 1000:.0f} ms for savevm, loadvm "
                 f"answers after {(loaded - saved) * 1000:.0f} ms; migration to a file took "
                 f"{(written - loaded) * 1000:.0f} ms, from it the answer "
                 f"{(time.monotonic() - again) * 1000:.0f} ms")
    finally:
        one.end()
        for path in (disk, file):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


@case("guest-snapshot-times", native=False, own_daemon=True, soak=True, seconds=1500)
def guest_snapshot_times(run):
    for mib in SIZES_MIB:
        theirs(run, mib)
        ours(run, mib)
    many(run)
