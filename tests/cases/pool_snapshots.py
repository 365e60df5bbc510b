"""A guest with disks that are read through a pool goes back, comes back and is cloned with
them: each has the bytes of the moment, and its own server. Every byte is compared inside."""

import json
import os
import signal

import machine
from guest_disks import killed_in
from guest_snapshots import refused, worker_gone
from guests_under import directory_of
from moves_hosts import another, at, dying, move, only_at
from pool_clients import pool_stats
from pool_guests import content, make_image
from strata import Failure
from suite import case
from under import Guest, Line, initramfs, kernel

MIB = 1 << 20
BASE_MIB, OWN_MIB = 8, 4
NAME = "first"


def reborn(run, name, of=NAME):
    """The line of a guest that came from a snapshot: beside its monitor."""
    return Line(run, name, os.path.join(directory_of(run, name), f"{of}.serial"))


def links(pid):
    place, found = f"/proc/{pid}/fd", []
    for file in os.listdir(place):
        try:
            found.append(os.readlink(os.path.join(place, file)))
        except OSError:
            pass  # closed meanwhile
    return found


def serving(run, name):
    """Who works on the swap disk of a guest: it ends with the guest's QEMU, and so does its
    parent, which holds the pages."""
    (qemu,) = run.daemon.stats(name)["pids"]
    kept = {link for link in links(qemu) if link.startswith("pipe:")}
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if os.path.basename(machine.read(f"/proc/{pid}/cmdline").split("\0")[0]) == \
                "strata-export" and os.readlink(f"/proc/{pid}/fd/0") in kept:
            found += machine.children(pid)
    if len(found) != 1:
        raise Failure(f"{found} serve the swap disk of {name}")
    return found


def asked(one, order, answer):
    one.tell(order)
    return one.hear(answer)


def right(one, *disks):
    for disk in disks:
        asked(one, f"read {disk}", rf"^read {disk} \d+ right\n")


def wrote(one, version, *disks):
    for disk in disks:
        asked(one, f"write {disk} {version}", rf"^wrote {disk}\n")




def begun(run, words=()):
    """A guest with an overlay over an image, and an image that it writes to itself, both read
    through a pool; and the three files."""
    run.tool("qemu-img")
    base, own, over = (os.path.join(run.directory, name)
                       for name in ("base.img", "own.img", "over.qcow2"))
    make_image(base, BASE_MIB)
    make_image(own, OWN_MIB)
    initramfs(run, kernel(), "guest_disk")
    run.daemon.strata("pool", "create", "shared", "--limit", "64MiB", "--admit", "first")
    one = Guest(run, NAME, ["--memory", "96MiB", "--dram", "160MiB",
                            "--disk", f"{base},cache=shared,overlay={over}",
                            "--disk", f"{own},cache=shared"], ["-machine", "q35", *words])
    return one, base, own, over


@case("pool-snapshots", native=False, own_daemon=True, computes=True, seconds=150, takes=15)
def pool_snapshots(run):
    one, base, own, _ = begun(run)
    try:
        check(run, one, base, own)
    finally:
        one.kill()


def check(run, one, base, own):
    disks = ("vda", "vdb")
    one.hear(r"^up\n")
    wrote(one, 5, *disks)
    right(one, *disks)
    run.daemon.strata("snapshot", NAME)
    wrote(one, 6, *disks)
    # Two go on from there, each with overlays of its own, beside the one that runs.
    run.daemon.strata("clone", f"{NAME}@1", "--name", "twin", "--count", "2")
    twins = [reborn(run, f"twin-{number}") for number in (1, 2)]
    for version, twin in enumerate(twins, 7):
        right(twin, *disks)
        wrote(twin, version, *disks)
    for line in (*twins, one):
        right(line, *disks)
    hits = pool_stats(run, "shared")["hits_total"]
    right(twins[0], "vda")
    if pool_stats(run, "shared")["hits_total"] == hits:
        raise Failure("a clone reads its image past the pool")
    run.note("pool-snapshots-cloned")
    # A clone of a clone is over the copies of both.
    run.daemon.strata("snapshot", "twin-1")
    run.daemon.strata("clone", "twin-1@1", "--name", "child")
    child = reborn(run, "child")
    right(child, *disks)
    wrote(child, 9, *disks)
    run.daemon.strata("snapshot", "rm", "twin-1@1")
    right(child, *disks)
    right(twins[0], *disks)
    child.end()
    for twin in twins:
        twin.end()
    run.note("pool-snapshots-cloned-again")
    # It goes back; whoever served the QEMU before has ended with it, and one that
    # serves its disks may be lost and found by nobody else.
    before = pool_stats(run, "shared")["connections"]
    run.daemon.strata("rollback", NAME, "1")
    one.process.wait()
    back = reborn(run, NAME)
    right(back, *disks)
    wrote(back, 10, *disks)
    run.daemon.wait_until(lambda: pool_stats(run, "shared")["connections"] <= before,
                          "who served the QEMU before has ended")
    run.daemon.strata("rollback", NAME, "1")
    back.line.close()
    back = reborn(run, NAME)
    right(back, *disks)
    run.note("pool-snapshots-rolled-back")
    # From a file, when nobody has what it was in memory, and no pool; a worker dies.
    run.daemon.strata("snapshot", "persist", f"{NAME}@1")
    wrote(back, 11, *disks)
    back.end()
    run.daemon.wait_until(lambda: not (run.daemon.stats(NAME) or {"pids": []})["pids"],
                          "it has ended")
    run.daemon.strata("pool", "rm", "shared")
    came = run.daemon.strata("restore", f"{NAME}@1")
    if "is read without the pool shared" not in came.stderr:
        raise Failure(f"a pool that is gone is not missed: {came.stderr}")
    back = reborn(run, NAME)
    right(back, *disks)
    run.daemon.strata("pool", "create", "shared", "--limit", "64MiB", "--admit", "first")
    worker = run.daemon.worker()
    os.kill(worker, 9)
    right(back, *disks)
    worker_gone(run, worker)
    wrote(back, 12, *disks)
    run.daemon.wait_until(lambda: right(back, "vda") or pool_stats(run, "shared")["hits_total"],
                          "the new pool is used")
    run.note("pool-snapshots-restored")
    # A base that has changed behind its back is refused.
    back.end()
    run.daemon.wait_until(lambda: not (run.daemon.stats(NAME) or {"pids": []})["pids"],
                          "it has ended")
    with open(own, "rb") as file:
        count = OWN_MIB * MIB // 4096
        for page in range(count):
            written = page % 3 == 0 and page < count // 4
            if file.read(4096) != content(page, 12 if written else 0):
                raise Failure(f"page {page} of the image is not what the guest wrote")
    with open(base, "r+b") as file:
        file.write(b"x")
    refused(run, "has changed since", "restore", f"{NAME}@1")
    refused(run, "has changed since", "clone", f"{NAME}@1")
    run.note("pool-snapshots-refused")
    run.tests = 5


SWAP_MEMORY_MIB, SWAP_MIB, FILL_MIB = 88, 96, 72
SWAPS = "swaps"


def filled(one, mib, version):
    return int(asked(one, f"fill {mib} {version}", r"^filled \d+, (\d+) out\n")[1])


def checked(one, mib):
    asked(one, "check", rf"^checked {mib * MIB // 4096}, \d+ out\n")


def begun_with_swap(run):
    run.tool("qemu-img")
    base = os.path.join(run.directory, "base.img")
    make_image(base, BASE_MIB)
    initramfs(run, kernel(), "guest_swap")
    run.daemon.strata("pool", "create", "shared", "--limit", "32MiB", "--admit", "first")
    over = os.path.join(run.directory, "over.qcow2")
    one = Guest(run, SWAPS, ["--memory", f"{SWAP_MEMORY_MIB}MiB", "--dram", "400MiB",
                             "--disk", f"{base},cache=shared,overlay={over}",
                             "--swap", f"{SWAP_MIB}MiB"], ["-machine", "q35"])
    try:
        one.hear(r"^up\n")
        asked(one, "on", r"^on \d+\n")
        out = filled(one, FILL_MIB, 1)
        if out * 4096 < 8 * MIB:
            raise Failure(f"only {out} pages were swapped out")
        run.note(f"{out} pages out")
        wrote(one, 5, "vda")
    except Failure:
        one.kill()
        raise
    return one


@case("pool-swap-snapshots", native=False, own_daemon=True, computes=True, seconds=200, takes=25)
def pool_swap_snapshots(run):
    """The same of a guest that has swapped pages out."""
    one = begun_with_swap(run)
    try:
        check_swap(run, one)
    finally:
        one.kill()


def is_told_of(run, name):
    pools = json.loads(run.daemon.strata("pool", "ls", "--json").stdout)
    return any(pool["guest"] == name and pool["page_bytes"] > 0 for pool in pools)


def check_swap(run, one):
    # A worker that dies over it leaves the guest as it was, and no snapshot.
    for step in ("stopped", "runs", "captured"):
        killed_in(run, step, "snapshot", SWAPS)
    if json.loads(run.daemon.strata("snapshots", SWAPS, "--json").stdout):
        raise Failure("half a snapshot is there")
    run.daemon.strata("snapshot", SWAPS, "--label", "out")
    # It goes on, and its swap disk has other pages in the same places.
    filled(one, FILL_MIB // 2, 2)
    wrote(one, 6, "vda")
    for command in (("clone", f"{SWAPS}@out", "--name", "none"), ("rollback", SWAPS, "out")):
        if killed_in(run, "swap", *command).returncode == 0:
            raise Failure(f"{command}, when its worker had died")
    run.daemon.strata("clone", f"{SWAPS}@out", "--name", "twin", "--count", "2")
    twins = [reborn(run, f"twin-{number}", SWAPS) for number in (1, 2)]
    checked(one, FILL_MIB // 2)
    for version, twin in enumerate(twins, 7):
        checked(twin, FILL_MIB)
        right(twin, "vda")
        filled(twin, FILL_MIB // 4, version)
        wrote(twin, version, "vda")
    for twin in twins:
        checked(twin, FILL_MIB // 4)
        right(twin, "vda")
        twin.end()
    right(one, "vda")
    run.note("pool-swap-snapshots-cloned")
    # It goes back; whoever serves its disk then is lost, and found under the same name.
    before = run.daemon.stats(SWAPS)["pids"]
    run.daemon.strata("rollback", SWAPS, "out")
    one.process.wait()
    back = reborn(run, SWAPS, SWAPS)
    (pid,) = run.daemon.stats(SWAPS)["pids"]
    if pid in before:
        raise Failure("the same QEMU goes on")
    run.daemon.wait_until(lambda: is_told_of(run, SWAPS), "its swap disk is told of")
    back.tell("check")
    back.hear(r"^middle\n")
    for server in serving(run, SWAPS):
        os.kill(server, signal.SIGKILL)
    back.hear(rf"^checked {FILL_MIB * MIB // 4096}, \d+ out\n")
    right(back, "vda")
    run.note("pool-swap-snapshots-rolled-back")
    # From a file, and a worker dies.
    run.daemon.strata("snapshot", "persist", f"{SWAPS}@out")
    back.end()
    run.daemon.wait_until(lambda: not (run.daemon.stats(SWAPS) or {"pids": []})["pids"],
                          "it has ended")
    run.daemon.kill_whole()
    run.daemon.begin_again()
    run.daemon.strata("restore", f"{SWAPS}@out")
    back = reborn(run, SWAPS, SWAPS)
    back.tell("check")
    back.hear(r"^middle\n")
    worker = run.daemon.worker()
    os.kill(worker, signal.SIGKILL)
    back.hear(rf"^checked {FILL_MIB * MIB // 4096}, \d+ out\n")
    worker_gone(run, worker)
    right(back, "vda")
    back.end()
    run.note("pool-swap-snapshots-restored")
    run.tests = 3


@case("move-pool-guest", native=False, own_daemon=True, computes=True, seconds=200, takes=25)
def move_pool_guest(run):
    """A guest that has swapped pages out, and an overlay over an image that is read through a
    pool, moves there and back; there is no such pool there."""
    with another(run) as there:
        one = begun_with_swap(run)
        line = one
        try:
            # A worker dies before it can run there.
            for side, step in (("here", "still"), ("there", "swap"), ("there", "stands")):
                dying(run, SWAPS, run.daemon, there, side, step, "worker")
                only_at(run, SWAPS, run.daemon, there, f"worker killed, {step} {side}")
                wrote(one, 6, "vda")
            for here, other, at_run in ((run.daemon, there, at(run, there)),
                                        (there, run.daemon, run)):
                done = move(here, SWAPS, other)
                run.note(done.stdout.strip())
                line.line.close()
                line = reborn(at_run, SWAPS, SWAPS)
                checked(line, FILL_MIB)
                right(line, "vda")
                wrote(line, 7, "vda")
            right(line, "vda")
            line.end()
        finally:
            one.kill()
            there.strata("stop", SWAPS, check=False)
