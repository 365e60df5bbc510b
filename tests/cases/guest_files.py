"""Snapshots of guests in files: persisted, they outlive the daemon and come back with every
byte of memory and disk; exported, they come to life where nothing of the guest is but the
images that it only reads. One boot serves all checks, each counted and named."""

import contextlib
import os
import shutil
import struct

from guest_disks import begun, ended, files, killed_in, writes_on
from guest_snapshots import reborn
from snapshot_crash import fill, small_disk
from snapshot_files import blocks, flipped
from strata import Failure, configured
from suite import case
from users import as_nobody, publish

NAME = "first"
ROOM = "256m"
BASE = ["a.raw", "b.qcow2", "base.qcow2"]
COPIES = [f"a.raw.{NAME}@1", f"b.qcow2.{NAME}@1"]
SCHEDULE = f"""
[[snapshot]]
name = "{NAME}-clone"
every = "2s"
keep = 1
persist = true
"""


@contextlib.contextmanager
def daemon(run, directory, home="here", more=""):
    """A daemon with that directory of snapshots; another one is another machine."""
    home = os.path.join(run.directory, home)
    os.makedirs(home, exist_ok=True)
    sockets, run.daemon.directory = run.daemon.directory, os.path.join(home, "run")
    pid = run.daemon.pid
    try:
        with configured(run.daemon, f'snapshot_dir = "{directory}"\n{more}', home,
                        os.path.join(run.log_directory, "stratad-files.log")) as run.daemon.pid:
            yield
    finally:
        run.daemon.directory, run.daemon.pid = sockets, pid


def listed(run):
    found = run.daemon.ask({"request": "snapshots", "name": None, "brief": True})
    return {one["id"]: one["state"] for one in found["snapshots"]}


def assert_listed(run, expected):
    if (found := listed(run)) != expected:
        raise Failure(f"there are {found}, not {expected}")


def refused(run, why, *command):
    done = run.daemon.strata(*command, check=False)
    if done.returncode != 1 or why not in done.stderr or len(done.stderr.splitlines()) != 1:
        raise Failure(f"{command}: status {done.returncode}, {done.stderr!r} is not {why!r}")


def gone(run, name):
    run.daemon.wait_until(lambda: not (run.daemon.stats(name) or {"pids": []})["pids"],
                          f"{name} has ended")


def rights(run, guest):
    """Another user neither sees nor takes what is root's."""
    place, published = publish(run)
    os.chmod(run.directory, 0o755)
    try:
        for command in (("snapshot", "persist", f"{NAME}@1"), ("restore", f"{NAME}@1"),
                        ("snapshot", "export", f"{NAME}@1", "/tmp/strata-test-never")):
            status, lines = as_nobody(run, published.strata, *command,
                                      STRATA_SOCKET=run.daemon.socket_path)
            if status != 1 or len(lines) != 1 or "no snapshot" not in lines[0]:
                raise Failure(f"another user: {command}: {status}, {lines}")
    finally:
        shutil.rmtree(place)


def persisted(run, guest):
    """A worker dies over it, there is no room for it: the snapshot is as it was, and is
    persisted then."""
    run.daemon.strata("snapshot", NAME, "--label", "kept")
    rights(run, guest)
    for step in ("persisting", "persisted"):
        if killed_in(run, step, "snapshot", "persist", f"{NAME}@1").returncode == 0:
            raise Failure(f"persisted by a worker that died when it was {step}")
        assert_listed(run, {f"{NAME}@1": "usable"})
        guest.rounds(1)
    ballast = os.path.join(guest.room, "ballast")
    kept = os.path.join(guest.kept, f"{NAME}@1")
    before = set(os.listdir(kept)) - {"memory", "memory.part"}
    # What the second worker left would make room.
    os.unlink(os.path.join(kept, "memory"))
    for spare in (0, 4 << 20):
        fill(ballast, spare)
        refused(run, "No space left", "snapshot", "persist", f"{NAME}@1")
        refused(run, "No space left", "snapshot", "export", f"{NAME}@1",
                os.path.join(guest.room, "file"))
        if set(os.listdir(kept)) != before or len(os.listdir(guest.room)) != 2:
            raise Failure(f"no room left {os.listdir(kept)}, {os.listdir(guest.room)}")
    os.unlink(ballast)
    run.daemon.strata("snapshot", "persist", f"{NAME}@1")
    run.daemon.strata("snapshot", "persist", f"{NAME}@kept")  # once more is no error
    run.daemon.strata("snapshot", NAME)
    assert_listed(run, {f"{NAME}@1": "persisted", f"{NAME}@2": "usable"})
    copies = [*COPIES, *(name.replace("@1", "@2") for name in COPIES)]
    if files(guest) != sorted([*BASE, *copies]):
        raise Failure(f"there are {files(guest)}")
    noted = run.daemon.strata("snapshot", "export", f"{NAME}@1", guest.file)
    if "base.qcow2" not in noted.stdout:
        raise Failure(f"the export says {noted.stdout!r}")
    guest.rounds(1)
    # One that fails costs the tenant of that name nothing.
    whole = open(guest.file, "rb").read()
    with open(guest.file + ".bad", "wb") as file:
        file.write(flipped(whole, blocks(whole)["pages"][0] + 40 + 8 * 16 + 200))
    refused(run, "page at 0x", "snapshot", "import", guest.file + ".bad")
    if files(guest) != sorted([*BASE, *copies]):
        raise Failure(f"an import that failed left {files(guest)}")
    run.daemon.strata("clone", f"{NAME}@1", "--name", "early")
    line = reborn(run, "early")
    line.rounds(1)
    line.end()
    gone(run, "early")
    shutil.copy(os.path.join(kept, "memory"), guest.file + ".stays")
    guest.writes = writes_on(run, f"{guest.raw}.{NAME}@1", "raw")


def outlived(run, guest):
    """The next daemon has what was persisted, with its copies, and no more; it comes back,
    its clones too, and it goes back."""
    assert_listed(run, {f"{NAME}@1": "persisted"})
    run.daemon.wait_until(lambda: files(guest) == sorted([*BASE, *COPIES]),
                          "the copies of the snapshot that was lost are gone")
    run.daemon.strata("restore", f"{NAME}@kept")
    line = reborn(run, NAME)
    line.rounds(2)
    run.daemon.strata("clone", f"{NAME}@1", "--name", "twin")
    reborn(run, "twin").rounds(2)
    run.daemon.strata("rollback", NAME, "1")
    line.line.close()
    line = reborn(run, NAME)
    line.rounds(2)
    made = run.daemon.strata("vm", "snapshot", "twin", "--persist")
    if made.stdout != "twin@1\n" or made.stderr.count("a copy of its disk") != 2:
        raise Failure(f"a snapshot of a clone: {made.stdout!r}, {made.stderr!r}")


def by_the_clock(run, guest):
    """A schedule persists them, and removes those that are too many."""
    run.daemon.strata("clone", f"{NAME}@1")
    line = reborn(run, f"{NAME}-clone")

    def is_later_there():
        own = {id: state for id, state in listed(run).items() if id.startswith(f"{NAME}-clone@")}
        return f"{NAME}-clone@1" not in own and "persisted" in own.values()
    line.wait_until(is_later_there, "a later one by the clock is there, the first one gone")
    line.end()
    gone(run, f"{NAME}-clone")


def damaged(run, guest):
    """What is not as it was written is refused in one line that says what it is."""
    kept = os.path.join(guest.kept, f"{NAME}@1")
    path = os.path.join(kept, "memory")
    whole = open(path, "rb").read()
    place = blocks(whole)
    other = os.path.join(guest.kept, f"{NAME}@1", "snapshot.json")
    told = open(other, "rb").read()
    wrong = (
        (path, flipped(whole, place["pages"][0] + 40 + 8 * 16 + 200), "page at 0x"),
        (path, flipped(whole, sum(place["image"]) - 2), "the file devices"),
        (path, flipped(whole, place["directory"][0] + 50), "the directory"),
        (path, whole[:-1], "incomplete"),
        (path, whole[:8] + b"\2" + whole[9:], "version 2"),
        (other, told.replace(b'"state_bytes":', b'"state_bytes":1', 1), "is damaged"),
        (other, told.replace(b'"version":1', b'"version":7', 1), "is damaged"),
    )
    for changed, content, why in wrong:
        before = open(changed, "rb").read()
        if content == before:
            raise Failure(f"nothing is changed for {why!r}")
        with open(changed, "wb") as file:
            file.write(content)
        devices = os.path.join(kept, "devices")
        if os.path.exists(devices):
            os.unlink(devices)
        with daemon(run, guest.kept):
            refused(run, why, "restore", f"{NAME}@1")
            if NAME in run.daemon.tenants() and run.daemon.stats(NAME)["pids"]:
                raise Failure(f"{why}: it has processes")
        with open(changed, "wb") as file:
            file.write(before)
    # Neither is understood: nothing is offered, and nothing of it goes.
    for changed, content in ((other, told[:100]), (path, wrong[4][1])):
        with open(changed, "wb") as file:
            file.write(content)
    with daemon(run, guest.kept):
        if f"{NAME}@1" in listed(run):
            raise Failure(f"there are {listed(run)}")
    with open(path, "wb") as file:
        file.write(whole)
    # The file says it, too.
    with daemon(run, guest.kept):
        if listed(run).get(f"{NAME}@1") != "persisted":
            raise Failure(f"there are {listed(run)}")
        # A clone's stands on copies of the first one's.
        for name, command in (("again", ("clone", f"{NAME}@kept", "--name", "again")),
                              ("twin", ("restore", "twin@1"))):
            run.daemon.strata(*command)
            line = reborn(run, name)
            line.rounds(2)
            line.end()
            gone(run, name)


def travelled(run, guest):
    """On another machine: images that it only reads are there, its own come with the file."""
    base = os.path.join(guest.place, "base.qcow2")
    content = open(base, "rb").read()
    shutil.rmtree(guest.place)
    take = ("snapshot", "import", guest.file)
    refused(run, "No such file", *take)
    os.mkdir(guest.place)
    refused(run, "base.qcow2", *take)
    for at in (20, 6000):
        with open(base, "wb") as file:
            file.write(flipped(content, at))
        refused(run, "is another file here", *take)
    with open(base, "wb") as file:
        file.write(content)
    shown = run.daemon.strata(*take, "--dry-run").stdout
    if "starts, in" not in shown or guest.raw not in shown:
        raise Failure(f"a dry run says {shown!r}")
    ballast = os.path.join(guest.room, "ballast")
    for spare in (0, 16 << 10):
        fill(ballast, spare)
        refused(run, "No space left", *take)
    os.unlink(ballast)
    for step in ("unpacked", "importing", "imported"):
        if killed_in(run, step, *take).returncode == 0:
            raise Failure(f"imported by a worker that died when it was {step}")
        assert_listed(run, {})
        try:
            run.daemon.wait_until(lambda: files(guest) == ["base.qcow2"] and
                                  not run.daemon.tenants(), "nothing is left of the import")
        except Failure as failure:
            raise Failure(f"{failure}: died when it was {step}: {files(guest)}, "
                          f"{run.daemon.tenants()}") from None
    whole = open(guest.file, "rb").read()
    place = blocks(whole)
    bad = os.path.join(run.directory, "bad")
    for content, why in (
            (flipped(whole, sum(last_of(whole, 3)) - 2), "the file disk-1"),
            (flipped(whole, place["pages"][0] + 40 + 8 * 16 + 200), "page at 0x"),
            (whole[:len(whole) // 2], "incomplete")):
        with open(bad, "wb") as file:
            file.write(content)
        refused(run, why, "snapshot", "import", bad)
    with open(bad, "wb") as file:
        file.write(whole)
    os.chown(bad, 65534, 65534)
    refused(run, "says how a QEMU is to be started", "snapshot", "import", bad)
    refused(run, "lacks disk-0", "snapshot", "import", guest.file + ".stays")
    if files(guest) != ["base.qcow2"] or listed(run) or run.daemon.tenants():
        raise Failure(f"refused imports left {files(guest)}, {listed(run)}")
    imported = run.daemon.strata(*take)
    id = imported.stdout.strip()
    if imported.stderr.count("a copy of its disk") != 2 or listed(run) != {id: "usable"}:
        raise Failure(f"import: {imported.stdout!r}, {imported.stderr!r}")
    run.daemon.strata("restore", id)
    line = reborn(run, NAME)
    line.rounds(2)
    line.tell("end")
    writes = int(line.hear(r"^writes (\d+)\n")[1])
    line.hear(r"^end\n")
    line.line.close()
    gone(run, NAME)
    if [writes_on(run, guest.raw, "raw"), writes_on(run, guest.over, "qcow2")] != [writes] * 2 \
            or writes <= guest.writes:
        raise Failure(f"it wrote {writes} times, {guest.writes} before, and its disks are of "
                      f"{writes_on(run, guest.raw, 'raw')}, {writes_on(run, guest.over, 'qcow2')}")
    named = run.daemon.strata(*take, "--name", "other").stdout.strip()
    run.daemon.strata("restore", named)
    line = reborn(run, "other")
    line.rounds(1)
    line.end()
    gone(run, "other")
    run.daemon.strata("snapshot", "rm", id, named)
    run.daemon.wait_until(lambda: files(guest) == sorted([
        *BASE, "a.raw.other", "b.qcow2.other"]), "its copies are gone, what it wrote is there")


def last_of(data, kind):
    """Offset and length of the last block of a kind (docs/snapshot-format.md)."""
    table, count = struct.unpack_from("<QQ", data, len(data) - 56)
    found, offset = None, 32
    for index in range(count):
        length, is_kind = struct.unpack_from("<IB", data, table + 8 * index)
        if is_kind == kind:
            found = (offset, length)
        offset += length
    return found


@case("guest-files", native=False, own_daemon=True, seconds=300, takes=50)
def guest_files(run):
    guest = None
    done = []

    def check(what):
        what(run, guest)
        run.note(f"guest-files-{what.__name__}")
        done.append(what)
    with small_disk(run, ROOM) as room:
        kept = os.path.join(room, "kept")
        with daemon(run, kept):
            try:
                guest = begun(run)
                guest.room, guest.kept = room, kept
                guest.file = os.path.join(run.directory, "exported")
                check(persisted)
            finally:
                if guest:
                    ended(run, guest)
        with daemon(run, kept, more=SCHEDULE):
            try:
                check(outlived)
                check(by_the_clock)
            finally:
                ended(run, guest)
        check(damaged)
        with daemon(run, kept):
            run.daemon.strata("snapshot", "rm", *listed(run))
            run.daemon.wait_until(lambda: not any("@" in name for name in files(guest)),
                                  f"copies go with their snapshots: {files(guest)}")
        with daemon(run, os.path.join(room, "there"), home="there"):
            try:
                check(travelled)
            finally:
                ended(run, guest)
    run.tests = len(done)
