"""Persisted snapshots that are brought back without being read: their pages come from the
file when they are asked for, whatever happens to daemon, file and program meanwhile."""

import json
import os
import random
import shutil
import signal
import struct
import time

import machine
from guest_files import NAME, daemon as guest_daemon
from guest_snapshots import reborn
from moment import Moment
from snapshot_files import Machine, flipped
from strata import Failure, worker_of
from suite import case
from under import Guest

PAGE = 4096


def in_file(run, name):
    """Bytes of it that are in a snapshot's file still."""
    stats = run.daemon.stats(name)
    if stats["lost_pages_total"]:
        raise Failure(f"{name}: {stats['lost_pages_total']} pages lost")
    return stats["snapshot_file_bytes"]


def comes_from_file(run, name, least=4 << 20):
    # Of those that share a store, who has what of it is counted now and then.
    run.daemon.wait_until(lambda: in_file(run, name) >= least,
                          f"{least} bytes of {name} are in the file, unread")


def persisted(run, machine_here, megabytes=64):
    """A program's snapshot in a file, and nothing else of it."""
    with machine_here.daemon():
        program = Moment(run, "corner", megabytes, "16MiB")
        snapshot = program.take("--persist")
        program.report()
        program.kill()
    return program, snapshot


def files_held(pid, directory):
    """What of a directory a process has open, or had and keeps."""
    return [name for name in machine.descriptors(pid)[0] if name.startswith(directory)]


@case("snapshot-in-file", native=False, own_daemon=True)
def goes_on_from_the_file(run):
    """Restored, cloned and rolled back from a file that nobody has read; the worker is
    killed, the daemon upgraded, the snapshot removed, others are taken of what came back:
    every page is right, and the file is let go of with the last one that is in it."""
    here = Machine(run, "here")
    program, snapshot = persisted(run, here)
    with here.daemon() as daemon:
        program.command("clone", snapshot, "--name", "twin")
        comes_from_file(run, "twin", 32 << 20)
        program.brought_back(snapshot, lambda: program.restore(snapshot))
        program.kill()
        kept = os.path.join(here.directory, snapshot, "memory")
        worker = worker_of(daemon)
        if not files_held(worker, kept):
            raise Failure(f"{kept} is not open")
        os.kill(worker, signal.SIGKILL)
        run.daemon.wait_until(lambda: not machine.alive(worker), "the worker is gone")
        run.daemon.wait_until(lambda: worker_of(daemon), "there is another one")
        comes_from_file(run, "twin", 16 << 20)
        run.daemon.strata("upgrade")
        comes_from_file(run, "twin", 16 << 20)
        program.name = "twin"
        program.goes_on()
        # Of pages in the file, and of others.
        second = program.take("--persist")
        program.order("write")
        third = program.take()
        program.roll(second)
        program.roll(third)
        run.daemon.strata("snapshot", "rm", snapshot)
        program.roll(second)
        comes_from_file(run, "twin", PAGE)
        program.check()
        program.assert_clean()
        program.kill()
        program.remove(second, third)
        run.daemon.wait_until(lambda: not run.daemon.tenants(), "nobody is left")
        if held := files_held(worker_of(daemon), here.directory):
            raise Failure(f"open still: {held}")
        here.assert_nothing_left()


def middle_block(data):
    """Where a block of pages lies that is neither the first nor the last."""
    table, count = struct.unpack_from("<QQ", data, len(data) - 56)
    found, offset = [], 32
    for index in range(count):
        length, kind = struct.unpack_from("<IB", data, table + 8 * index)
        found += [offset] * (kind == 1)
        offset += length
    return found[len(found) // 2]


@case("snapshot-in-file-killed", native=False, own_daemon=True, seconds=120)
def killed(run):
    """The worker is killed at random moments while a clone reads all of its memory out of
    the file, five times (hundreds in a soak): every page is right."""
    here = Machine(run, "here")
    program, snapshot = persisted(run, here)
    chance = random.Random(6)
    with here.daemon() as daemon:
        for number in range(run.times(5)):
            program.name = f"twin-{number}"
            program.command("clone", snapshot, "--name", program.name)
            program.orders += 1
            order = program.orders << 8 | program.COMMANDS["check"]
            program.put(24, order)
            for _ in range(2):
                time.sleep(chance.uniform(0, 0.05))
                worker = run.daemon.wait_until(lambda: worker_of(daemon), "there is a worker")
                os.kill(worker, signal.SIGKILL)
                run.daemon.wait_until(lambda: not machine.alive(worker), "it is gone")
            program.until(lambda: program.word(28) == order, "all of it was read, and is right")
            program.put(24, 0)
            program.goes_on()
            program.assert_clean()
            program.kill()


@case("snapshot-in-file-changed", native=False, own_daemon=True)
def changed(run):
    """A file that is not as it was written is read as a whole before anything runs. Damage
    that does not show in its times ends who touches the page, with the reason, and only
    that one."""
    here = Machine(run, "here")
    program, snapshot = persisted(run, here)
    kept = os.path.join(here.directory, snapshot, "memory")
    told = os.path.join(here.directory, snapshot, "snapshot.json")
    with open(kept, "rb") as file:
        whole = file.read()
    shutil.copy2(kept, kept + ".copy")
    os.rename(kept + ".copy", kept)
    with here.daemon():
        program.brought_back(snapshot, lambda: program.restore(snapshot))
        if found := in_file(run, program.name):
            raise Failure(f"a copy of the file was trusted: {found} bytes are in it")
        program.report()
        program.kill()
    with open(kept, "wb") as file:
        file.write(flipped(whole, middle_block(whole) + 40 + 8 * 16 + 500))
    known, now = json.load(open(told)), os.stat(kept)
    known["as_written"] = {
        "inode": now.st_ino, "len_bytes": now.st_size,
        "modified": divmod(now.st_mtime_ns, 10**9), "changed": divmod(now.st_ctime_ns, 10**9)}
    for process in known["processes"]:
        process["touched"] = process["touched_then"] = []
    with open(told, "w") as file:
        json.dump(known, file)
    with here.daemon():
        program.restore(snapshot)
        # Who checks all of its pages meets it.
        program.put(24, 77 << 8 | program.COMMANDS["check"])
        with program.reaper_running():
            run.daemon.wait_until(lambda: not program.pids(), "it ends at the damaged page")
        run.daemon.wait_until(lambda: "a stored page is corrupt" in machine.read(here.log),
                              "the log says why")
        program.put(24, 0)
        # The daemon lives, and so does who has nothing to do with it.
        other = Moment(run, "quiet", 16, "16MiB")
        other.check()


@case("snapshot-in-file-times", native=False, own_daemon=True, soak=True, seconds=600)
def times(run):
    """What measures the machine: a program of 2 GiB, until it answers, from a file that is
    trusted, with and without knowing what it asked for the last time, and from one that is
    read first. The file is not in the page cache."""
    here = Machine(run, "here")
    megabytes = 2048
    with here.daemon():
        program = Moment(run, "corner", megabytes, "3GiB")
        snapshot = program.take("--persist")
        program.report()
        program.kill()
    kept = os.path.join(here.directory, snapshot, "memory")
    size = os.stat(kept).st_size >> 20
    for what in ("from the file", "from the file, the second time", "read first"):
        if what == "read first":
            os.utime(kept)
        drop_from_page_cache(kept)
        with here.daemon():
            reports, began = program.reports, time.monotonic()
            program.restore(snapshot)
            ready = time.monotonic() - began
            program.until(lambda: program.reports > reports, "it answers")
            answer = time.monotonic() - began
            at_speed = until_at_speed(program)
            run.note(f"{what}: restored after {ready * 1000:.0f} ms, first answer after "
                     f"{answer * 1000:.0f} ms, 90 % of its speed {at_speed * 1000:.0f} ms later; "
                     f"{megabytes} MiB in {size} MiB")
            program.report()
            program.kill()


def until_at_speed(program):
    """Seconds from now until 90 % of what it does in the end, which is after 4 s."""
    seen = [(time.monotonic(), program.count)]
    while seen[-1][0] < seen[0][0] + 4:
        time.sleep(0.02)
        seen.append((time.monotonic(), program.count))
    speeds = [(then - seen[0][0], (done - before) / (then - since))
              for (since, before), (then, done) in zip(seen, seen[1:])]
    last = [speed for then, speed in speeds if then > 3]
    # Three windows in a row: in one it may have a processor to itself.
    goal, needed = 0.9 * sum(last) / len(last), 3
    for at in range(len(speeds)):
        if all(speed >= goal for _, speed in speeds[at:at + needed]):
            return speeds[at][0]
    return speeds[-1][0]


def drop_from_page_cache(path):
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@case("guest-in-file-times", native=False, own_daemon=True, soak=True, seconds=600)
def guest_times(run):
    """The same of a guest with 2 GiB of touched memory."""
    kept = os.path.join(run.directory, "kept")
    with guest_daemon(run, kept):
        guest = Guest(run, NAME, ["--memory", "2560MiB", "--dram", "3GiB"], ["-machine", "q35"])
        try:
            guest.hear(r"^up\n")
            guest.tell("fill 2048")
            guest.hear(r"^filled\n")
            guest.tell("rest")
            guest.hear(r"^rests\n")
            run.daemon.strata("snapshot", NAME, "--persist", timeout_s=120)
        finally:
            guest.kill()
    file = os.path.join(kept, f"{NAME}@1", "memory")
    size = os.stat(file).st_size >> 20
    for what in ("from the file", "from the file, the second time", "read first"):
        if what == "read first":
            os.utime(file)
        drop_from_page_cache(file)
        with guest_daemon(run, kept):
            began = time.monotonic()
            run.daemon.strata("restore", f"{NAME}@1", timeout_s=120)
            ready = time.monotonic() - began
            line = reborn(run, NAME)
            line.tell("killed")
            line.hear(r"^killed 0\n")
            run.note(f"{what}: runs after {ready * 1000:.0f} ms, first answer after "
                     f"{(time.monotonic() - began) * 1000:.0f} ms; 2048 MiB in {size} MiB")
            time.sleep(1.5)
            line.end()
