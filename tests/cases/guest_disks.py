"""Guests that write to disks: a snapshot has disks and memory of one moment, clones have
disks of their own, and the user's images are what the guest writes to, whatever fails. One
boot serves all checks of a case, each counted and named."""

import fcntl
import glob
import os
import socket
import struct
import subprocess

from guest_snapshots import monitor, refused, reborn, snapshots, worker_gone
from strata import Failure
from suite import case
from under import Guest

MIB = 1 << 20
MEMORY_MIB, FILLED_MIB, BUDGET_MIB, DISK_MIB = 160, 24, 300, 16
NAME = "first"


def images(run):
    """A raw image, and a qcow2 image over another: beside each other."""
    place = os.path.join(run.directory, "images")
    os.makedirs(place, exist_ok=True)
    raw, over, base = (os.path.join(place, name) for name in ("a.raw", "b.qcow2", "base.qcow2"))
    with open(raw, "wb") as file:
        file.write(os.urandom(4 * MIB))
        file.truncate(DISK_MIB * MIB)
    tool = run.tool("qemu-img")
    for words in (("convert", "-O", "qcow2", raw, base),
                  ("create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", over)):
        subprocess.run([tool, *words], check=True, stdin=subprocess.DEVNULL)
    return raw, over


def begun(run):
    raw, over = images(run)
    guest = Guest(run, NAME, ["--memory", f"{MEMORY_MIB}MiB", "--dram", f"{BUDGET_MIB}MiB"], [
        "-machine", "q35", "-drive", f"file={raw},format=raw,if=none,id=a",
        "-device", "virtio-blk-pci,drive=a",
        "-blockdev", f"driver=file,node-name=bf,filename={over}",
        "-blockdev", "driver=qcow2,node-name=b,file=bf", "-device", "virtio-blk-pci,drive=b",
        "-chardev", f"file,id=c,path={raw}.console", "-serial", "chardev:c"])
    guest.raw, guest.over = raw, over
    guest.place = os.path.dirname(raw)
    guest.hear(r"^up\n")
    guest.tell("disk")
    guest.hear(r"^disks\n")
    guest.tell(f"fill {FILLED_MIB}")
    guest.hear(r"^filled\n")
    guest.rounds(1)
    return guest


def ended(run, guest):
    guest.kill()
    for name in run.daemon.tenants():
        if name != "keeper":
            run.daemon.strata("stop", name, check=False)


def files(guest):
    return sorted(os.path.basename(path) for path in glob.glob(os.path.join(guest.place, "*"))
                  if not path.endswith(".console") and ".strata" not in path)


def writes_on(run, path, form):
    """How often a guest wrote to an image, as the image says. Nobody writes to it now."""
    out = os.path.join(run.directory, "block")
    subprocess.run([run.tool("qemu-img"), "dd", "-f", form, "-O", "raw", "bs=4096", "count=1",
                    f"if={path}", f"of={out}"], check=True, stdin=subprocess.DEVNULL,
                   stdout=subprocess.DEVNULL)
    with open(out, "rb") as file:
        return struct.unpack("<Q", file.read(8))[0]


def nodes(run, name):
    (answer,) = monitor(run, name, {"execute": "query-named-block-nodes",
                                    "arguments": {"flat": True}})
    return answer["return"]


def taken(run, guest):
    """It has a copy of each disk, and the guest writes to its own images as before."""
    for _ in range(2):
        run.daemon.strata("snapshot", NAME)
        guest.rounds(1)
    first = snapshots(run)[0]
    copies = [f"{path}.{NAME}@1" for path in (guest.raw, guest.over)]
    if first["disks"] != copies:
        raise Failure(f"its copies are {first['disks']}, not {copies}")
    if any(os.stat(path).st_mode & 0o222 for path in copies):
        raise Failure("a copy can be written")
    before = [writes_on(run, path, form) for path, form in zip(copies, ("raw", "qcow2"))]
    if before[0] != before[1] or not before[0]:
        # The guest writes to the one, then to the other: what differs is under way.
        if before[0] - before[1] != 1:
            raise Failure(f"its disks are of the writes {before}")
    names = {node["node-name"] for node in nodes(run, NAME)}
    opened = {node["file"] for node in nodes(run, NAME) if not node["ro"]}
    if opened != {guest.raw, guest.over} or any(name.startswith("strata") for name in names):
        raise Failure(f"after a snapshot its QEMU has {opened}, {names}")
    still = [f"{one['freeze_us'] / 1000:.1f}" for one in snapshots(run)]
    run.note(f"stood still {', '.join(still)} ms")
    run.daemon.strata("snapshot", "rm", f"{NAME}@2")
    if files(guest) != ["a.raw", f"a.raw.{NAME}@1", "b.qcow2", f"b.qcow2.{NAME}@1", "base.qcow2"]:
        raise Failure(f"a snapshot is gone, and there are {files(guest)}")


def cloned(run, guest):
    """Clones go on from the moment of the snapshot, each on disks of its own, which go with
    them; what they stand on stays as long."""
    run.daemon.strata("clone", f"{NAME}@1", "--name", "twin", "--count", "2")
    twins = [reborn(run, name) for name in ("twin-1", "twin-2")]
    for line, forks in (*((twin, 1) for twin in twins), (guest, 0)):
        line.rounds(2)
        line.tell("forks")
        if int(line.hear(r"^forks (\d+)\n")[1]) != forks:
            raise Failure(f"the kernel of {line.name} knows of another number than {forks} of "
                          "times that it went on as another machine")
    run.daemon.strata("snapshot", "twin-1")
    run.daemon.strata("clone", "twin-1@1", "--name", "child")
    child = reborn(run, "child")
    child.rounds(2)
    run.daemon.strata("snapshot", "rm", "twin-1@1")
    run.daemon.strata("snapshot", NAME, "--label", "later")
    run.daemon.strata("clone", f"{NAME}@later", "--name", "late")
    late = reborn(run, "late")
    run.daemon.strata("snapshot", "rm", f"{NAME}@later")
    for line in (child, late, *twins):
        line.rounds(2)
        line.end()
    run.daemon.wait_until(lambda: files(guest) == ["a.raw", f"a.raw.{NAME}@1", "b.qcow2",
                                                   f"b.qcow2.{NAME}@1", "base.qcow2"],
                          "the clones' disks are gone")
    guest.rounds(1)


def at_a_moment(run, guest):
    """A template is taken when the guest's console has said something, or a port answers."""
    refused(run, 'does not say "ready" (in ', "vm", "template", NAME, "--when-console", "ready",
            "--within", "1")
    with socket.create_server(("127.0.0.1", 0)) as port, \
            open(f"{guest.raw}.console", "ab") as console:
        console.write(b"it is ready\n")
        console.flush()
        run.daemon.strata("vm", "template", NAME, "--when-console", "is ready")
        run.daemon.strata("vm", "template", NAME, "--label", "served", "--when",
                          f"port {port.getsockname()[1]} answers")
    if [one["label"] for one in snapshots(run)] != [None, "template", "served"]:
        raise Failure(f"there are {snapshots(run)}")
    run.daemon.strata("snapshot", "rm", f"{NAME}@template", f"{NAME}@served")
    guest.rounds(1)


def refusals(run, guest):
    """A changed copy, and a second writer, are refused by name."""
    copy = f"{guest.raw}.{NAME}@1"
    before = os.stat(copy)
    os.chmod(copy, 0o600)
    with open(copy, "r+b") as file:
        byte = file.read(1)
        for changed in (bytes([byte[0] ^ 1]), byte):
            file.seek(0)
            file.write(changed)
            file.flush()
            os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
            if changed != byte:
                refused(run, "has changed since", "clone", f"{NAME}@1")
                refused(run, "has changed since", "rollback", NAME, "1")
                refused(run, "has changed since", "snapshot", "persist", f"{NAME}@1")
    node = {"driver": "nbd", "node-name": "w", "server": {"type": "unix", "path": "/none"}}
    (answer,) = monitor(run, NAME, {"execute": "blockdev-add", "arguments": node})
    if "error" not in answer:
        raise Failure("a drive of nobody's was added")
    node = {"driver": "file", "node-name": "w", "filename": os.path.join(guest.place, "other")}
    with open(node["filename"], "wb") as file:
        file.truncate(MIB)
    monitor(run, NAME, {"execute": "blockdev-add", "arguments": node})
    refused(run, "is not one image in one file", "snapshot", NAME)
    monitor(run, NAME, {"execute": "blockdev-del", "arguments": {"node-name": "w"}})
    os.remove(node["filename"])
    second = subprocess.run([run.tool("qemu-io"), "-f", "raw", "-c", "quit", guest.raw],
                            check=False, capture_output=True, text=True)
    if second.returncode == 0 or "lock" not in second.stderr:
        raise Failure("the guest's image is not locked any more")
    guest.rounds(1)


def rolled_back(run, guest):
    """Its images have the content that they had, and what they had until then is beside."""
    run.daemon.strata("rollback", NAME, "1")
    guest.process.wait()
    guest.line.close()
    guest.next = reborn(run, NAME)
    guest.next.rounds(2)
    for path in (guest.raw, guest.over):
        if not os.path.exists(f"{path}.before"):
            raise Failure(f"there are {files(guest)}")
    run.daemon.strata("snapshot", NAME, "--label", "back")
    run.daemon.strata("clone", f"{NAME}@back", "--name", "back")
    line = reborn(run, "back")
    line.rounds(2)
    line.end()
    guest.next.rounds(1)
    run.daemon.strata("snapshot", "rm", f"{NAME}@back")


def restored(run, guest):
    """Ended, it comes back; its images are what it writes to, and nobody else has them."""
    guest.next.end()
    run.daemon.wait_until(lambda: not (run.daemon.stats(NAME) or {"pids": []})["pids"],
                          "it has ended")
    with open(guest.raw, "rb") as other:
        lock = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 100, 1, 0)
        fcntl.fcntl(other, 37, lock)  # F_OFD_SETLK
        refused(run, "is in use", "restore", f"{NAME}@1")
    run.daemon.strata("restore", f"{NAME}@1")
    line = reborn(run, NAME)
    line.rounds(2)
    line.tell("end")
    writes = int(line.hear(r"^writes (\d+)\n")[1])
    line.hear(r"^end\n")
    line.line.close()
    run.daemon.wait_until(lambda: not (run.daemon.stats(NAME) or {"pids": []})["pids"],
                          "it has ended")
    for path, form in ((guest.raw, "raw"), (guest.over, "qcow2")):
        if writes_on(run, path, form) != writes:
            raise Failure(f"{path} is of write {writes_on(run, path, form)}, the guest wrote "
                          f"{writes} times")
    run.daemon.strata("snapshot", "rm", f"{NAME}@1")
    left = ["a.raw", "a.raw.before", "b.qcow2", "b.qcow2.before", "base.qcow2"]
    run.daemon.wait_until(lambda: files(guest) == left and
                          not glob.glob(os.path.join(guest.place, "*.strata*")),
                          f"its files are {left}")


@case("guest-disks", native=False, own_daemon=True, computes=True, seconds=240, takes=20)
def guest_disks(run):
    guest = begun(run)
    checks = (taken, cloned, at_a_moment, refusals, rolled_back, restored)
    try:
        for check in checks:
            check(run, guest)
            run.note(f"guest-disks-{check.__name__}")
    finally:
        ended(run, guest)
    run.tests = len(checks)


TAKING = ("copying", "copied", "stopped", "disks", "devices", "runs", "captured")
FILLING = ("filled", "given")
TAKING_OVER = ("marked", "ended", "placed", "moved", "runs")


def killed_in(run, step, *command, victim=""):
    """Runs a command, in which step the worker dies (or the process `victim`)."""
    path = os.path.join(run.daemon.directory, "test-step")
    with open(path + ".part", "w", encoding="ascii") as file:
        file.write(f"{step} {victim}")
    os.rename(path + ".part", path)
    worker = run.daemon.worker()
    done = run.daemon.strata(*command, check=False, timeout_s=60)
    if os.path.exists(path):
        os.remove(path)
        raise Failure(f"{command} has no step {step}: {done.stderr!r}")
    if not victim:
        worker_gone(run, worker)
    return done


def quiet(run, guest, also=()):
    """Nothing is left of what came to nothing."""
    left = sorted(["a.raw", f"a.raw.{NAME}@1", "b.qcow2", f"b.qcow2.{NAME}@1", "base.qcow2",
                   *also])
    marks = os.path.join(run.daemon.directory, "guests", "=*")
    def is_quiet():
        return files(guest) == left and not glob.glob(marks) and run.daemon.tenants() == [NAME]
    try:
        run.daemon.wait_until(is_quiet, f"there are {left} and no marks")
    except Failure as failure:
        raise Failure(f"{failure}: {files(guest)}, {glob.glob(marks)}, "
                      f"{run.daemon.tenants()}") from None
    copies = [node["file"] for node in nodes(run, NAME) if node["node-name"].startswith("strata")]
    if copies:
        raise Failure(f"its QEMU has copies still: {copies}")


@case("guest-killed-steps", native=False, own_daemon=True, computes=True, seconds=300, takes=60)
def guest_killed_steps(run):
    """The worker, or a QEMU, dies in each step: the guest runs on, or its successor does, or
    it is gone without a trace; never with a wrong byte of memory or disk."""
    guest = begun(run)
    line, kills = guest, 0
    before = [f"{name}.before" for name in ("a.raw", "b.qcow2")]
    try:
        run.daemon.strata("snapshot", NAME)
        for step in TAKING:
            run.note(step)
            killed_in(run, step, "snapshot", NAME)
            line.rounds(2)
            quiet(run, guest)
            kills += 1
        for step in FILLING:
            if killed_in(run, step, "clone", f"{NAME}@1", "--name", "twin").returncode == 0:
                raise Failure(f"a clone came of a worker that died when it was {step}")
            quiet(run, guest)
            line.rounds(1)
            kills += 1
        for step in ("copied", "devices"):
            run.daemon.strata("clone", f"{NAME}@1", "--name", "twin")
            reborn(run, "twin").rounds(1)
            (pid,) = run.daemon.stats("twin")["pids"]
            if killed_in(run, step, "snapshot", "twin", victim=pid).returncode == 0:
                raise Failure("there is a snapshot of a guest that died over it")
            quiet(run, guest)
            kills += 1
        for step in (*FILLING, *TAKING_OVER):
            done = killed_in(run, step, "rollback", NAME, "1")
            if (done.returncode == 0) != (step in TAKING_OVER):
                raise Failure(f"rollback, killed when {step}: {done.returncode}, {done.stderr!r}")
            if step in TAKING_OVER:
                line.line.close()
                line = reborn(run, NAME)
            line.rounds(2)
            quiet(run, guest, before if step in TAKING_OVER else ())
            kills += 1
        line.end()
        run.note(f"{kills} kills")
    finally:
        ended(run, guest)
    run.tests = kills
