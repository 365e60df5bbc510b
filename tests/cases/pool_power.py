"""The power is cut while a stock guest flushes a file system on a raw image, which it reaches
through a pool. All that the image is sent below Strata is recorded in order (QEMU's
blklogwrites, over FUSE); what a disk may hold after a cut, at many points of that record, is
made of it: all that was flushed, and any part of what was not. Each is checked by the file
system's own check, and for what the guest had been told is flushed."""

import os
import random
import shutil
import signal
import struct
import subprocess
import time

import machine
from pool_guests import content
from strata import Failure, Skip
from suite import case
from under import Guest, initramfs, kernel

MIB = 1 << 20
DISK_MIB, SECTOR = 32, 512
SLOTS, EVERY = 64, 4
RECORDS, CUTS = 240, 20
# As dm-log-writes has them (Linux, drivers/md/dm-log-writes.c).
MAGIC, FLUSH, FUA, DISCARD = 0x6A736677736872, 1, 2, 4


class Recorded:
    """The image as a file whose writes QEMU records; `path` is what Strata opens."""

    def __init__(self, run, image):
        self.log = os.path.join(run.directory, "writes.log")
        self.path = os.path.join(run.directory, "recorded.img")
        for path in (self.log, self.path):
            with open(path, "w"):
                pass
        log = os.path.join(run.log_directory, "storage-daemon.log")
        with open(log, "wb") as said:
            self.process = subprocess.Popen(
                [run.tool("qemu-storage-daemon"),
                 "--blockdev", f"driver=file,node-name=image,filename={image}",
                 "--blockdev", f"driver=file,node-name=log,filename={self.log}",
                 "--blockdev", "driver=blklogwrites,node-name=recorded,file=image,log=log,"
                               f"log-sector-size={SECTOR}",
                 "--export", f"fuse,id=disk,node-name=recorded,mountpoint={self.path},writable=on"],
                stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        try:
            run.daemon.wait_until(lambda: os.stat(self.path).st_size == DISK_MIB * MIB,
                                  f"QEMU serves {self.path} ({machine.read(log).strip()})")
        except BaseException:
            self.end()
            raise

    def length(self):
        return os.stat(self.log).st_size

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait()

    def entries(self):
        """(flags, offset, bytes, end in the log) of all that the disk was sent."""
        found = []
        with open(self.log, "rb") as file:
            magic, version, _, sector = struct.unpack("<QQQI", file.read(28))
            if (magic, version, sector) != (MAGIC, 1, SECTOR):
                raise Failure(f"no record of writes: {magic:#x}, {version}, {sector}")
            file.seek(SECTOR)
            while head := file.read(SECTOR):
                first, count, flags, _ = struct.unpack_from("<QQQQ", head)
                if flags & DISCARD:
                    data = bytes(count * SECTOR)
                else:
                    data = file.read(count * SECTOR)
                found.append((flags, first * SECTOR, data, file.tell()))
        return found


def disk_at(base, path, entries, cut, chance):
    """What the disk may hold when the power is cut after so many entries."""
    shutil.copyfile(base, path)
    flushed = max((at for at in range(cut) if entries[at][0] & FLUSH), default=-1)
    with open(path, "r+b") as file:
        for at, (flags, offset, data, _) in enumerate(entries[:cut]):
            if at <= flushed or flags & FUA or chance.random() < 0.5:
                file.seek(offset)
                file.write(data)


def checked(run, disk, synced, what):
    """The file system is whole, and has all up to the record `synced`."""
    for flags, fine in (("-p", (0, 1)), ("-fn", (0,))):
        done = subprocess.run([run.tool("e2fsck"), flags, disk], capture_output=True, text=True,
                              check=False)
        if done.returncode not in fine:
            raise Failure(f"{what}: e2fsck {flags}: {done.stdout.strip()} {done.stderr.strip()}")
    files = os.path.join(run.directory, "files")
    shutil.rmtree(files, ignore_errors=True)
    os.mkdir(files)
    subprocess.run([run.tool("debugfs"), "-R", f"rdump / {files}", disk], capture_output=True,
                   check=True)
    with open(os.path.join(files, "log"), "rb") as file:
        log = file.read()
    for number in range(synced + 1):
        # The next one may stand in its place already, synced or not.
        slot = log[number % SLOTS * 4096:][:4096]
        later = range(number, RECORDS, SLOTS)
        if number + SLOTS > synced and slot not in [content(one, 0) for one in later]:
            raise Failure(f"{what}: record {number} is not in the log, {synced} was synced")
        name = os.path.join(files, f"n{number}")
        if number % EVERY == 0:
            with open(name, "rb") as file:
                if file.read() != content(number, 0):
                    raise Failure(f"{what}: the file n{number} is wrong, {synced} was synced")


@case("pool-power-cut", native=False, own_daemon=True, computes=True, seconds=150, takes=20)
def pool_power_cut(run):
    if not os.path.exists("/dev/fuse"):
        raise Skip("no /dev/fuse: the writes to the image cannot be recorded")
    base, image = (os.path.join(run.directory, name) for name in ("base.img", "image"))
    begin = os.path.join(run.directory, "begin")
    os.mkdir(begin)
    with open(os.path.join(begin, "log"), "wb") as file:
        file.write(b"-" * SLOTS * 4096)
    subprocess.run([run.tool("mkfs.ext4"), "-q", "-b", "4096", "-J", "size=4", "-d", begin, base,
                    f"{DISK_MIB}M"], check=True, capture_output=True)
    shutil.copyfile(base, image)
    initramfs(run, kernel(), "guest_synced")
    run.daemon.strata("pool", "create", "cache", "--limit", "32MiB", "--admit", "first")
    recorded, one = Recorded(run, image), None
    try:
        one = Guest(run, "writer", ["--memory", "192MiB", "--dram", "160MiB", "--disk",
                                    f"{recorded.path},cache=cache"], ["-machine", "q35"])
        one.hear(r"^up\n")
        one.tell(f"go {RECORDS}")
        synced = until_cut(run, one, recorded)
        servers = machine.children(one.process.pid)
        one.kill()
        run.daemon.wait_until(lambda: not any(map(machine.alive, servers)),
                              "who serves the disk has ended")
    finally:
        if one:
            one.kill()
        recorded.end()
    entries = recorded.entries()
    chance = random.Random(7)
    cuts = sorted(chance.sample(range(len(entries) // 8, len(entries)), CUTS)) + [len(entries)]
    disk = os.path.join(run.directory, "cut.img")
    for cut in cuts:
        end = entries[cut - 1][3]
        told = max((number for number, length in synced if length <= end), default=-1)
        disk_at(base, disk, entries, cut, chance)
        checked(run, disk, told, f"power cut after {cut} of {len(entries)} writes and flushes")
    run.note(f"{len(synced)} records synced, {len(entries)} writes and flushes, {len(cuts)} cuts")


def until_cut(run, one, recorded):
    """(number, how long the record of writes was when it was said to be synced) of each.
    The worker is killed meanwhile."""
    synced, worker = [], run.daemon.worker()
    cut = RECORDS * 5 // 6
    while len(synced) < cut:
        number = int(one.hear(r"^synced (\d+)\n")[1])
        synced.append((number, recorded.length()))
        if len(synced) == cut // 2:
            os.kill(worker, signal.SIGKILL)
    time.sleep(random.Random(8).uniform(0, 0.05))
    return synced
