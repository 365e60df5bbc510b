"""Disks that are read through a pool, as clients that others wrote see them: qemu-img and
qemu-io, nbdinfo, nbdcopy, and libnbd's Python (Debian: qemu-utils, libnbd-bin,
python3-libnbd). Every byte is compared with the image's."""

import filecmp
import hashlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time

from exports import Export
from strata import Failure, Skip
from suite import ROOT, case

MIB = 1 << 20
# No whole number of pages, so that its last page is a part of one.
SIZE = 12 * MIB + 512
# A file that changed later than this is not read from a pool (docs/pools.md).
SETTLED = 2.2


def make_image(path, size, seed):
    """Half of it hardly compresses, and some is there twice."""
    choose = random.Random(seed)
    with open(path, "wb") as file:
        for page in range(size // 4096):
            again = page % 7 == 3
            half = random.Random(seed + 1 + page // 14).randbytes(2048) if again else \
                choose.randbytes(2048)
            file.write(half + bytes(2048))
        file.write(choose.randbytes(size % 4096))


def digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pool_stats(run, name):
    (stats,) = json.loads(run.daemon.strata("pool", "stats", name, "--json").stdout)
    return stats


def done(run, *command):
    ended = subprocess.run(command, capture_output=True, text=True, check=False,
                           timeout=max(run.seconds_left(), 1))
    if ended.returncode != 0:
        raise Failure(f"{' '.join(command)}: status {ended.returncode}: {ended.stderr.strip()}")
    return ended.stdout


def libnbd(run):
    """The distribution's python, which has libnbd's module."""
    for python in (sys.executable, "/usr/bin/python3"):
        if subprocess.run([python, "-c", "import nbd"], capture_output=True,
                          check=False).returncode == 0:
            return python
    raise Skip("python3-libnbd is not installed")


def commands(run):
    """Pools are made, listed, and refused by name."""
    strata = run.daemon.strata
    strata("pool", "create", "shared", "--limit", "64MiB", "--admit", "first")
    again = strata("pool", "create", "shared", check=False)
    small = strata("pool", "create", "small", "--limit", "1MiB", check=False)
    for refused, why in ((again, "you have one of that name"), (small, "too little")):
        if refused.returncode != 1 or why not in refused.stderr or \
                len(refused.stderr.splitlines()) != 1:
            raise Failure(f"status {refused.returncode}: {refused.stderr}")
    listed = strata("pool", "ls").stdout.splitlines()
    if len(listed) != 2 or not listed[1].startswith("shared") or "64.0 MiB" not in listed[1]:
        raise Failure(f"strata pool ls: {listed}")
    if pool_stats(run, "shared")["limit_bytes"] != 64 * MIB:
        raise Failure("the limit is not what was given")


def locks(run, image):
    """Who writes to an image is alone with it, and QEMU keeps to that as well."""
    first = Export(run, image, "first", "shared")
    second = Export(run, image, "second", "shared")
    if "somebody else has it open" not in second.said:
        raise Failure(f"a second one writes to the same image: {second.said}")
    qemu = subprocess.run([run.tool("qemu-io"), "-f", "raw", "-c", "write 0 512", image],
                          capture_output=True, text=True, check=False)
    if qemu.returncode == 0 or "lock" not in qemu.stderr:
        raise Failure(f"QEMU writes to it as well: {qemu.stdout}{qemu.stderr}")
    first.end()
    unknown = Export(run, image, "third", "unknown")
    if "you have no pool unknown" not in unknown.said:
        raise Failure(f"a pool that is not there: {unknown.said}")


def reads(run, image):
    """The whole image, byte for byte, from the disk and from the pool; what it says of
    itself is right."""
    copy = os.path.join(run.directory, "copy")
    export = Export(run, image, "reader", "shared", read_only=True)
    about = json.loads(done(run, run.tool("nbdinfo"), "--json", export.uri))
    (known,) = about["exports"]
    if known["export-size"] != SIZE or not known["is_read_only"] or \
            not known["can_multi_conn"] or "base:allocation" not in known["contexts"] or \
            known["block_size_preferred"] != 4096:
        raise Failure(f"nbdinfo: {about}")
    if "disk" not in done(run, run.tool("nbdinfo"), "--list", export.uri):
        raise Failure("it is not listed")
    before = pool_stats(run, "shared")
    for _ in range(2):
        done(run, run.tool("nbdcopy"), export.uri, copy)
        if not filecmp.cmp(image, copy, shallow=False):
            raise Failure("nbdcopy brought other bytes")
        os.unlink(copy)
    after = pool_stats(run, "shared")
    hits = after["hits_total"] - before["hits_total"]
    run.note(f"hits {hits}")
    if hits < SIZE // 4096 - 64:
        raise Failure(f"the second copy did not come from the pool: {hits} hits")
    if after["deduplicated_bytes"] < SIZE // 20 or after["cost_bytes"] > after["page_bytes"]:
        raise Failure(f"it is neither compressed nor there once: {after}")
    done(run, run.tool("qemu-img"), "convert", "-f", "raw", "-O", "raw",
         f"nbd:unix:{export.socket_path}", copy)
    done(run, run.tool("qemu-img"), "compare", "-f", "raw", "-F", "raw", image, copy)
    os.unlink(copy)
    refused = subprocess.run(
        [run.tool("qemu-io"), "-f", "raw", "-c", "write 0 512",
         f"nbd:unix:{export.socket_path}"], capture_output=True, text=True, check=False)
    if refused.returncode == 0 and "ead" not in refused.stdout + refused.stderr:
        raise Failure("it writes to what is read only")
    handed_back = run.daemon.strata("pool", "empty", "shared").stdout
    emptied = pool_stats(run, "shared")
    if "handed back" not in handed_back or emptied["page_bytes"] != 0:
        raise Failure(f"{handed_back!r}, and it holds {emptied['page_bytes']} bytes")
    export.end()
    if export.complaints():
        raise Failure(f"it complained: {export.complaints()}")


def changed_below(run, image):
    """An image that was changed below a disk that only reads is read as it is."""
    export = Export(run, image, "changed", "shared", read_only=True)
    for _ in range(2):
        done(run, run.tool("nbdcopy"), export.uri, os.path.join(run.directory, "copy"))
    with open(image, "r+b") as file:
        for offset in range(0, SIZE, 1 * MIB):
            file.seek(offset)
            file.write(b"changed")
    for _ in range(2):
        done(run, run.tool("nbdcopy"), export.uri, os.path.join(run.directory, "copy"))
        if not filecmp.cmp(image, os.path.join(run.directory, "copy"), shallow=False):
            raise Failure("bytes of before the change were read")
    export.end()


def qemu_io(run, image):
    """QEMU's patterns, zeroes and discards."""
    export = Export(run, image, "qemu", "shared")
    script = ["write -P 7 1M 256k", "read -P 7 1M 256k", "write -P 9 1000k 3k",
              "read -P 9 1000k 3k", "write -z 1100k 64k", "read -P 0 1100k 64k",
              "write -z -u 1200k 64k", "read -P 0 1200k 64k", "write -f -P 5 12M 512",
              "read -P 5 12M 512", "discard 4M 1M", "flush", "read -P 7 1164k 36k"]
    words = [word for line in script for word in ("-c", line)]
    said = done(run, run.tool("qemu-io"), "-f", "raw", "-d", "unmap", *words,
                f"nbd:unix:{export.socket_path}")
    if "failed" in said:
        raise Failure(f"qemu-io: {said}")
    export.end()


def model(run, image):
    """Random requests over several connections, and the worker killed in the middle."""
    export = Export(run, image, "model", "shared")
    client = subprocess.Popen(
        [libnbd(run), os.path.join(ROOT, "tests", "lib", "nbd_model.py"), export.socket_path,
         "7", str(run.times(1500))],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    first = client.stdout.readline()
    if first != "middle\n":
        raise Failure(f"nbd_model.py: {first}{client.stdout.read()}")
    worker = run.daemon.worker()
    before = pool_stats(run, "shared")
    os.kill(worker, signal.SIGKILL)
    said = client.stdout.read()
    if client.wait() != 0:
        raise Failure(f"nbd_model.py: status {client.returncode}: {said}")
    expected = said.split()[-1]
    export.end()
    if digest(image) != expected:
        raise Failure("the image is not what was written to it")
    run.daemon.wait_until(lambda: run.daemon.worker() not in (None, worker) and
                          run.daemon.answers(), "a new worker")
    after = pool_stats(run, "shared")
    run.note(f"model: hits {before['hits_total']}, then {after['hits_total']}")
    if before["hits_total"] == 0 or before["forgotten_total"] == 0:
        raise Failure(f"nothing was found, or nothing forgotten: {before}")
    if after["limit_bytes"] != before["limit_bytes"]:
        raise Failure("the new worker has another pool")


def raw_client(export):
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(10)
    link.connect(export.socket_path)
    return link


def hostile(run, image):
    """Clients that go in the middle, or are none: the next one is served."""
    export = Export(run, image, "hostile", "shared")
    before = digest(image)
    go = struct.pack(">I", 3) + b"IHAVEOPT" + struct.pack(">II", 1, 0)
    write = struct.pack(">IHHQQI", 0x25609513, 0, 1, 1, 0, MIB)
    choose = random.Random(5)
    pieces = [b"", b"GET / HTTP/1.1\r\n\r\n", go, go + write, go + write + b"x" * 5000,
              go + struct.pack(">IHHQQI", 0x25609513, 0, 1, 1, 0, 0xffffffff),
              go + struct.pack(">IHHQQI", 0x25609513, 0, 0, 1, 0, 32 * MIB) * 30,
              struct.pack(">I", 3) + b"IHAVEOPT" + struct.pack(">II", 7, 0xffffffff)]
    pieces += [choose.randbytes(choose.randint(1, 4000)) for _ in range(20)]
    pieces += [go + choose.randbytes(2800) for _ in range(20)]
    for piece in pieces:
        with raw_client(export) as link:
            try:
                link.sendall(piece)
                link.shutdown(socket.SHUT_WR)
                if choose.random() < 0.5:
                    while link.recv(1 << 16):
                        pass
            except OSError:
                pass
    # They are accepted in their order: when this one has been, none waits any more. libnbd
    # does not bear a socket whose queue is full.
    with raw_client(export) as link:
        link.shutdown(socket.SHUT_WR)
        while link.recv(1 << 16):
            pass
    done(run, run.tool("nbdinfo"), export.uri)
    export.end()
    if digest(image) != before:
        raise Failure("what no client wrote is in the image")
    # At the pool's own socket.
    for piece in (b"", b"STRPOOL1", b"STRPOOL1\xff\xff\xff\xff", choose.randbytes(500),
                  b"STRPOOL1\x06\0\0\0shared" + b"\xff" * 24,
                  b"STRPOOL1\x06\0\0\0shared" + struct.pack("<IIQQ", 3, 0, 0, 1)):
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(os.path.join(run.daemon.directory, "pool.sock"))
            link.sendall(piece)
            link.shutdown(socket.SHUT_WR)
    if not run.daemon.is_well():
        raise Failure("the daemon is not well")


def removed(run, image):
    """A pool that is removed under a disk: the disk goes on without."""
    export = Export(run, image, "bereft", "shared")
    copy = os.path.join(run.directory, "copy")
    done(run, run.tool("nbdcopy"), export.uri, copy)
    run.daemon.strata("pool", "rm", "shared")
    if json.loads(run.daemon.strata("pool", "ls", "--json").stdout):
        raise Failure("it is still listed")
    done(run, run.tool("nbdcopy"), export.uri, copy)
    if not filecmp.cmp(image, copy, shallow=False):
        raise Failure("other bytes without the pool")
    export.end()
    unknown = run.daemon.strata("pool", "rm", "shared", check=False)
    if unknown.returncode != 1 or "there is none of that name" not in unknown.stderr:
        raise Failure(f"removed twice: {unknown.stderr}")


@case("pool-clients", native=False, own_daemon=True, seconds=90, takes=15)
def pool_clients(run):
    for tool in ("qemu-img", "qemu-io", "nbdinfo", "nbdcopy"):
        run.tool(tool)
    libnbd(run)
    image = os.path.join(run.directory, "image")
    make_image(image, SIZE, 11)
    made = time.monotonic()
    commands(run)
    locks(run, image)
    time.sleep(max(0, made + SETTLED - time.monotonic()))
    checks = (reads, changed_below, qemu_io, model, hostile, removed)
    for check in checks:
        check(run, image)
        run.note(f"pool-{check.__name__}")
    run.tests = len(checks) + 2
