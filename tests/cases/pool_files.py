"""Files of snapshots of guests whose disks are read through a pool, and swap disks in memory:
they come to life where neither the guest nor the pool is. And images that are replaced while
a guest has them."""

import os
import shutil

from guest_snapshots import refused
from moves_hosts import another, at, host
from pool_guests import make_image
from pool_snapshots import (FILL_MIB, NAME, SWAPS, begun, begun_with_swap, checked, filled,
                            reborn, right, wrote)
from strata import Failure
from suite import case


def exported(run, name):
    file = os.path.join(run.directory, "exported")
    run.daemon.strata("snapshot", name, "--label", "taken")
    run.daemon.strata("snapshot", "export", f"{name}@taken", file)
    return file


def ended(daemon, line):
    line.end()
    daemon.wait_until(lambda: not (daemon.stats(line.name) or {"pids": []})["pids"], "it has ended")


def taken_in(run, file):
    id = run.daemon.strata("snapshot", "import", file).stdout.strip()
    return id, run.daemon.strata("restore", id).stderr


@case("pool-files", native=False, own_daemon=True, computes=True, seconds=200, takes=12)
def pool_files(run):
    """The pages of its swap disk, and an overlay over an image."""
    one = begun_with_swap(run)
    try:
        file = exported(run, SWAPS)
        filled(one, FILL_MIB // 2, 2)
        wrote(one, 6, "vda")
        ended(run.daemon, one)
        os.unlink(os.path.join(run.directory, "over.qcow2"))
        with another(run) as there:
            asks = there.strata("snapshot", "import", file, "--dry-run").stdout
            for word in ("base.img,cache=shared,overlay=", "a swap disk of 96.0 MiB"):
                if word not in asks:
                    raise Failure(f"a dry run says nothing of {word}: {asks}")
            id, said = taken_in(at(run, there), file)
            if "is read without the pool shared" not in said:
                raise Failure(f"a pool that is not there is not missed: {said}")
            line = reborn(at(run, there), SWAPS, SWAPS)
            checked(line, FILL_MIB)
            right(line, "vda")
            wrote(line, 7, "vda")
            ended(there, line)
            there.strata("snapshot", "rm", id)
        # At once, while the tenant of that name, of which nothing is left, is taken down.
        run.daemon.strata("snapshot", "rm", f"{SWAPS}@taken")
        id = run.daemon.strata("snapshot", "import", file).stdout.strip()
        run.daemon.strata("clone", id, "--name", "twin")
        line = reborn(run, "twin", SWAPS)
        checked(line, FILL_MIB)
        right(line, "vda")
        line.end()
    finally:
        one.kill()


@case("pool-files-raw", native=False, own_daemon=True, computes=True, seconds=150, takes=8)
def pool_files_raw(run):
    """An image that it writes to, read through a pool: it goes into the file; and the other
    host has a base with the same content, under another number."""
    plain = os.path.join(run.directory, "plain.img")
    make_image(plain, 1)
    one, base, *images = begun(run, ["-drive", f"file={plain},format=raw,if=virtio"])
    images.append(plain)
    try:
        one.hear(r"^up\n")
        wrote(one, 5, "vda", "vdb")
        # It is a copy of none of them while another file has its name.
        for path in (base, *images):
            os.rename(path, path + ".first")
            shutil.copy(path + ".first", path)
            refused(run, f"{path} is not the file any more", "snapshot", NAME)
            os.rename(path + ".first", path)
        file = exported(run, NAME)
        wrote(one, 6, "vda", "vdb")
        ended(run.daemon, one)
        for path in images:
            os.unlink(path)
        shutil.copy(base, base + ".there")
        os.rename(base + ".there", base)
        with another(run) as there:
            there.strata("pool", "create", "shared", "--limit", "64MiB", "--admit", "first")
            id, _ = taken_in(at(run, there), file)
            line = reborn(at(run, there), NAME)
            right(line, "vda", "vdb")
            wrote(line, 7, "vda", "vdb")
            there.strata("snapshot", NAME)
            there.strata("rollback", NAME, "1")
            line.line.close()
            line = reborn(at(run, there), NAME)
            right(line, "vda", "vdb")
            refused(at(run, there), "strata snapshot export", "move", NAME, host(run.daemon))
            ended(there, line)
    finally:
        one.kill()
