"""Two stock guests that read one image through one pool, and write: to overlays of their
own, and one to an image. Every byte is compared inside the guests."""

import json
import os
import signal
import struct
import subprocess
import time

import guest
from pool_clients import SETTLED, pool_stats
from strata import Failure
from suite import ROOT, case
from under import Guest, initramfs, kernel

MIB = 1 << 20
BASE_MIB, OWN_MIB = 16, 8
WORDS, STRIDE, PART = 512, 3, 4
MASK = (1 << 64) - 1


def content(page, version):
    """As tests/lib/guest_disk.c has it."""
    x = ((page + 1) * 0x9E3779B97F4A7C15 & MASK) ^ (version << 32 | version)
    words = []
    for _ in range(WORDS // 2):
        x = (x * 6364136223846793005 + 1442695040888963407) & MASK
        words.append(x)
    return struct.pack(f"<{WORDS // 2}Q", *words) + bytes(WORDS * 4)


def make_image(path, mib):
    with open(path, "wb") as file:
        for page in range(mib * MIB // 4096):
            file.write(content(page, 0))


def start(run, name, *disks):
    words = [word for disk in disks for word in ("--disk", disk)]
    return Guest(run, name, ["--memory", "192MiB", "--dram", "160MiB", *words],
                 ["-machine", "q35"])


def asked(one, order, answer):
    one.tell(order)
    return one.hear(answer)


@case("pool-guests", native=False, own_daemon=True, computes=True, seconds=150, takes=15)
def pool_guests(run):
    run.tool("qemu-img")
    base, own = os.path.join(run.directory, "base.img"), os.path.join(run.directory, "own.img")
    make_image(base, BASE_MIB)
    make_image(own, OWN_MIB)
    initramfs(run, kernel(), "guest_disk")
    run.daemon.strata("pool", "create", "shared", "--limit", "64MiB", "--admit", "first")
    shared = "{},cache=shared,overlay={}".format
    first = second = None
    try:
        first = start(run, "first", shared(base, os.path.join(run.directory, "first.qcow2")),
                      f"{own},cache=shared")
        second = start(run, "second", shared(base, os.path.join(run.directory, "second.qcow2")))
        for one in (first, second):
            one.hear(r"^up\n")
        # They took longer than that to boot; so it is on a fast machine, too.
        run.daemon.wait_until(lambda: os.stat(base).st_ctime + SETTLED < time.time(),
                              "the image is settled")
        check(run, first, second, own)
    finally:
        for one in (first, second):
            if one:
                one.kill()


def check(run, first, second, own):
    pages = BASE_MIB * MIB // 4096
    asked(first, "read vda", rf"^read vda {pages} right\n")
    before = pool_stats(run, "shared")
    # What the first has read the second finds.
    asked(second, "read vda", rf"^read vda {pages} right\n")
    after = pool_stats(run, "shared")
    hits = after["hits_total"] - before["hits_total"]
    run.note(f"the second guest found {hits} of {pages} pages; the pool holds "
             f"{after['page_bytes'] // MIB} MiB in {after['cost_bytes'] // MIB}")
    if hits < pages * 9 // 10:
        raise Failure(f"the second guest found {hits} of {pages} pages in the pool: {after}")
    run.note("pool-second-guest")
    # Each writes to an overlay of its own, and one to its image through the pool.
    asked(first, "write vda 5", r"^wrote vda\n")
    asked(second, "write vda 6", r"^wrote vda\n")
    asked(first, "read vdb", r"^read vdb \d+ right\n")
    asked(first, "write vdb 7", r"^wrote vdb\n")
    # The worker is killed while both read.
    for one in (first, second):
        one.tell("read vda")
    worker = run.daemon.worker()
    os.kill(worker, signal.SIGKILL)
    for one in (first, second):
        one.hear(rf"^read vda {pages} right\n")
    asked(first, "write vdb 8", r"^wrote vdb\n")
    asked(first, "read vdb", r"^read vdb \d+ right\n")
    run.daemon.wait_until(lambda: run.daemon.worker() not in (None, worker) and
                          run.daemon.answers(), "a new worker")
    # The disks have found the pool of the next one.
    def found_again():
        asked(second, "read vda", rf"^read vda {pages} right\n")
        return pool_stats(run, "shared")["hits_total"] > 0
    run.daemon.wait_until(found_again, "the new worker's pool is used")
    run.note("pool-worker-killed")
    # Worker and supervisor are killed while both read.
    for one in (first, second):
        one.tell("read vda")
    run.daemon.kill_whole()
    run.daemon.begin_again()
    for one in (first, second):
        one.hear(rf"^read vda {pages} right\n")
    asked(first, "write vdb 9", r"^wrote vdb\n")
    asked(first, "read vdb", r"^read vdb \d+ right\n")
    run.daemon.wait_until(found_again, "the pool of the next daemon is used")
    run.note("pool-daemon-killed")
    for name, disks in (("first", 2), ("second", 1)):
        known = json.loads(run.daemon.strata("vm", "ls", "--json").stdout)
        if name not in [one["name"] for one in known]:
            raise Failure(f"{name} is no guest any more")
        directory = os.path.join(run.daemon.directory, "guests", f"{os.getuid()}.{name}")
        sockets = [file for file in os.listdir(directory) if file.endswith(".sock")]
        if len(sockets) != disks:
            raise Failure(f"{directory} has {sockets}")
    for one in (first, second):
        one.end()
    run.daemon.wait_until(lambda: pool_stats(run, "shared")["connections"] == 0,
                          "who served the disks has ended")
    with open(own, "rb") as file:
        count = OWN_MIB * MIB // 4096
        for page in range(count):
            written = page % STRIDE == 0 and page < count // PART
            if file.read(4096) != content(page, 9 if written else 0):
                raise Failure(f"page {page} of the image is not what the guest wrote and flushed")
    run.note("pool-written-through")
    run.tests = 4
