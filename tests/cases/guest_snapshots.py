"""Snapshots of guests (`strata vm`): they stand still for a moment, clones go on from it,
and whatever fails, the guest runs on. One boot serves all checks, each counted and named."""

import json
import os
import random
import signal
import subprocess
import time

import machine
from guests_failing import LIAR
from guests_under import directory_of
from strata import Failure
from suite import case
from under import Guest, Line, asked_qemu

MIB = 1 << 20
MEMORY_MIB, FILLED_MIB, BUDGET_MIB, PRESSED_MIB = 192, 64, 400, 150
NAME = "first"
KILLS = 5


def monitor(run, name, *commands):
    """What the guest's own monitor answers, between two questions of the worker's."""
    path = os.path.join(directory_of(run, name), "monitor")
    return asked_qemu(path, 20 * run.patience, *commands)


def snapshots(run):
    return json.loads(run.daemon.strata("snapshots", NAME, "--json").stdout)


def reborn(run, name):
    """The line of a guest that came from a snapshot: beside its monitor."""
    return Line(run, name, os.path.join(directory_of(run, name), f"{NAME}.serial"))


def point_at(link, path):
    if os.path.lexists(link):
        os.unlink(link)
    os.symlink(path, link)


def refused(run, why, *command):
    done = run.daemon.strata(*command, check=False)
    if done.returncode != 1 or why not in done.stderr:
        raise Failure(f"{command}: status {done.returncode}, {done.stderr!r} is not {why!r}")


def worker_gone(run, worker):
    run.daemon.wait_until(lambda: machine.alive(run.daemon.pid) and run.daemon.worker() not in
                          (None, worker) and run.daemon.answers(), "a new worker")


def taken(run, guest):
    """It stands still for a moment and runs on; a second one copies what was written."""
    guest.tell(f"fill {FILLED_MIB}")
    guest.hear(r"^filled\n")
    guest.last = guest.rounds(3)
    for _ in range(2):
        run.daemon.strata("vm", "snapshot", NAME)
        guest.rounds(1)
    first, second = snapshots(run)
    if not first["guest"] or first["pages"] < FILLED_MIB * MIB // 4096:
        raise Failure(f"the first one is {first}")
    if second["copied_pages"] >= first["copied_pages"]:
        raise Failure(f"the second one copied {second['copied_pages']} pages, the first one "
                      f"{first['copied_pages']}")
    run.note(f"stood still {first['freeze_us'] / 1000:.1f} ms, {second['freeze_us'] / 1000:.1f} ms")
    run.daemon.strata("snapshot", "rm", f"{NAME}@2")


def cloned(run, guest):
    """Two more go on from where it was, all three right, each alone."""
    run.daemon.strata("set", NAME, "--dram", f"{PRESSED_MIB}MiB")
    # So far that a clone, which is heard when it was looked for an agent in it, is not there yet.
    now = guest.rounds(20)
    made = run.daemon.strata("clone", f"{NAME}@1", "--name", "twin", "--count", "2")
    if made.stdout.split() != ["twin-1", "twin-2"]:
        raise Failure(f"clone printed {made.stdout!r}, {made.stderr!r}")
    guest.twins = [reborn(run, name) for name in ("twin-1", "twin-2")]
    for twin in guest.twins:
        came = twin.rounds(1)
        if not guest.last <= came <= now:
            raise Failure(f"{twin.name} goes on with round {came}; the snapshot is of round "
                          f"{guest.last}, and {now} was the first one's")
        twin.rounds(2)
    guest.rounds(2)
    listed = json.loads(run.daemon.strata("vm", "ls", "--json").stdout)
    if sorted(one["name"] for one in listed) != [NAME, "twin-1", "twin-2"]:
        raise Failure(f"strata vm ls: {[one['name'] for one in listed]}")


def clone_of_a_clone(run, guest):
    """A clone is a guest as any: it has snapshots, and clones; one from a moment in which
    its line was full speaks."""
    guest.twins[0].fill()
    run.daemon.strata("snapshot", "twin-1")
    run.daemon.strata("vm", "clone", "twin-1@1", "--name", "child")
    child = Line(run, "child", os.path.join(directory_of(run, "child"), f"{NAME}.serial"))
    child.rounds(2)
    guest.twins[0].rounds(2)
    for line in (child, *guest.twins):
        line.end()
    run.daemon.wait_until(lambda: run.daemon.stats("child") is None, "the child is gone")


def refusals(run, guest):
    """What would be wrong is refused by name, and the guest runs on."""
    refused(run, "is running", "restore", f"{NAME}@1")
    core = os.path.join(run.directory, "core-of-a-guest")
    refused(run, "dump-guest-memory", "snapshot", "core", f"{NAME}@1", "1", core)
    before = os.stat(guest.image)
    os.utime(guest.image)
    refused(run, "has changed since", "clone", f"{NAME}@1")
    os.utime(guest.image, ns=(before.st_atime_ns, before.st_mtime_ns))
    its_own = os.readlink(guest.qemu)
    point_at(guest.qemu, LIAR)
    for command in (("clone", f"{NAME}@1"), ("rollback", NAME, "1")):
        refused(run, "this is QEMU 99.1, and the guest ran in", *command)
    point_at(guest.qemu, its_own)
    devices = os.path.join(run.daemon.directory, "snapshots", f"{NAME}@1", "devices")
    with open(devices, "r+b") as file:
        file.seek(1000)
        byte = file.read(1)[0]
        for flipped in (byte ^ 1, byte):
            file.seek(1000)
            file.write(bytes([flipped]))
            file.flush()
            if flipped != byte:
                for command in (("clone", f"{NAME}@1"), ("rollback", NAME, "1"),
                                ("snapshot", "persist", f"{NAME}@1")):
                    refused(run, "is not what was written", *command)
    guest.rounds(1)


def silent(run, guest):
    """Its monitor does not answer: refused, and it runs on when it can."""
    guest.process.send_signal(signal.SIGSTOP)
    try:
        refused(run, "does not answer in time", "snapshot", NAME)
    finally:
        guest.process.send_signal(signal.SIGCONT)
    guest.rounds(2)


def paused(run, guest):
    """One that somebody has paused would run on: refused, and it stays as it is."""
    monitor(run, NAME, {"execute": "stop"})
    refused(run, "it is paused", "snapshot", NAME)
    status, _ = monitor(run, NAME, {"execute": "query-status"}, {"execute": "cont"})
    if status["return"]["status"] != "paused":
        raise Failure(f"it was paused, and is {status}")
    guest.rounds(2)


def left_still(run, guest):
    """A guest that stands still for a snapshot of nobody's: the next worker has it run on."""
    mark = os.path.join(run.daemon.directory, "guests", f"={os.getuid()}.{NAME}")
    worker = run.daemon.worker()
    monitor(run, NAME, {"execute": "stop"})
    with open(mark, "w", encoding="ascii"):
        os.kill(worker, signal.SIGKILL)
    worker_gone(run, worker)
    guest.rounds(2)
    run.daemon.wait_until(lambda: not os.path.exists(mark), "its mark is gone")


def killed(run, guest):
    """A worker dies at any moment of a snapshot: the guest runs on, right."""
    chance = random.Random(7)
    for _ in range(KILLS):
        worker = run.daemon.worker()
        taking = subprocess.Popen([run.binaries.strata, "snapshot", NAME],
                                  env=run.daemon.environment(), stdin=subprocess.DEVNULL,
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(chance.random() * 0.1)
        os.kill(worker, signal.SIGKILL)
        taking.wait()
        worker_gone(run, worker)
        guest.rounds(2)


def rolled_back(run, guest):
    """It is where it was, in another QEMU, under its name."""
    was = guest.rounds(1)
    run.daemon.strata("rollback", NAME, "1")
    guest.process.wait()
    guest.line.close()
    guest.next = reborn(run, NAME)
    came = guest.next.rounds(1)
    if not guest.last <= came <= was:
        raise Failure(f"it goes on with round {came}; the snapshot is of round {guest.last}, "
                      f"and it was in {was}")
    guest.next.rounds(2)
    run.daemon.strata("snapshot", NAME)
    guest.next.rounds(1)


def restored(run, guest):
    """Ended, it comes back under its name from where it was."""
    was = guest.next.rounds(1)
    for pid in run.daemon.stats(NAME)["pids"]:
        os.kill(pid, signal.SIGKILL)
    run.daemon.wait_until(lambda: not (run.daemon.stats(NAME) or {"pids": []})["pids"],
                          "it has ended")
    guest.next.line.close()
    run.daemon.strata("restore", f"{NAME}@1")
    line = reborn(run, NAME)
    came = line.rounds(1)
    if came > was:
        raise Failure(f"it goes on with round {came}, and had ended in {was}")
    line.rounds(2)
    run.daemon.strata("snapshot", "rm", f"{NAME}@1")
    line.rounds(1)
    line.end()


@case("guest-snapshots", native=False, own_daemon=True, computes=True, seconds=240, takes=25)
def guest_snapshots(run):
    image = os.path.join(run.directory, "image")
    with open(image, "wb") as file:
        file.truncate(MIB)
    qemu = os.path.join(run.directory, "newer", "qemu-system-x86_64")
    os.mkdir(os.path.dirname(qemu))
    point_at(qemu, run.tool("qemu-system-x86_64"))
    guest = Guest(run, NAME, ["--memory", f"{MEMORY_MIB}MiB", "--dram", f"{BUDGET_MIB}MiB"],
                  ["-machine", "q35", "-drive",
                   f"file={image},format=raw,if=none,id=d,readonly=on",
                   "-device", "virtio-blk-pci,drive=d", "-nic", "user,model=virtio-net-pci"],
                  qemu)
    guest.image, guest.qemu, guest.twins, guest.next = image, qemu, [], None
    checks = (taken, cloned, clone_of_a_clone, refusals, silent, paused, left_still, killed, rolled_back,
              restored)
    try:
        guest.hear(r"^up\n")
        for check in checks:
            check(run, guest)
            run.note(f"guest-{check.__name__}")
    finally:
        guest.kill()
        for name in run.daemon.tenants():
            if name != "keeper":
                run.daemon.strata("stop", name, check=False)
    run.tests = len(checks)
