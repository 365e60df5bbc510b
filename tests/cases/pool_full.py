"""The image of a stock guest, which it reaches through a pool, has no room: the guest stands
still, and runs on when there is room."""

import contextlib
import json
import os
import subprocess

import machine
from pool_guests import MIB, OWN_MIB, PART, STRIDE, content, start
from strata import Failure, Skip
from suite import case
from under import initramfs, kernel


@contextlib.contextmanager
def file_system(run, mebibytes):
    """A small one, and a way to make it larger."""
    place = os.path.join(run.directory, "small")
    os.mkdir(place)
    mount = ["mount", "-t", "tmpfs", "-o"]
    subprocess.run([*mount, f"size={mebibytes}M", "tmpfs", place], check=True)
    try:
        yield place, lambda more: subprocess.run([*mount, f"remount,size={more}M", "tmpfs", place],
                                                 check=True)
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@case("pool-disk-full", native=False, own_daemon=True, computes=True, seconds=150, takes=15)
def pool_disk_full(run):
    """The image's file system is full: the guest stands still, which is said with what to
    do, and loses nothing."""
    if os.getuid() != 0:
        raise Skip("not root: no file system that can be filled")
    initramfs(run, kernel(), "guest_disk")
    run.daemon.strata("pool", "create", "cache", "--limit", "32MiB")
    with file_system(run, 1) as (place, enlarge):
        image = os.path.join(place, "image")
        with open(image, "wb") as file:
            file.truncate(OWN_MIB * MIB)
        one = start(run, "full", f"{image},cache=cache")
        try:
            one.hear(r"^up\n")
            # A third of a quarter of it, which does not fit into what is left.
            with open(os.path.join(place, "ballast"), "wb") as file:
                file.write(bytes(700 << 10))
            one.tell("write vda 5")
            stands_still(run)
            # Told to go on, it fails again.
            refused = run.daemon.strata("vm", "resume", "full", check=False)
            if refused.returncode == 0 or "its disk failed again" not in refused.stderr:
                raise Failure(f"resumed without room: {refused.stdout}, {refused.stderr}")
            enlarge(OWN_MIB * 2)
            run.daemon.strata("vm", "resume", "full")
            one.hear(r"^wrote vda\n")
            one.tell("end")
            one.hear(r"^end\n")
            one.process.wait(max(run.seconds_left(), 1))
        finally:
            one.kill()
        with open(image, "rb") as file:
            count = OWN_MIB * MIB // 4096
            for page in range(count):
                written = page % STRIDE == 0 and page < count // PART
                if file.read(4096) != (content(page, 5) if written else bytes(4096)):
                    raise Failure(f"page {page} of the image is not what the guest wrote")


def stands_still(run):
    def is_said():
        (known,) = json.loads(run.daemon.strata("vm", "ls", "--json").stdout)
        return known["guest"]["status"] == "io-error"
    run.daemon.wait_until(is_said, "strata vm ls says that its disk failed")
    text = run.daemon.strata("vm", "stats", "full").stdout
    if "a disk of it failed" not in text or "strata vm resume full" not in text:
        raise Failure(f"what is to be done is not said: {text}")
    said = [line for line in machine.read(run.daemon.log_path).splitlines()
            if "full stands still: a disk of it failed" in line]
    if len(said) != 1:
        raise Failure(f"the log says {said}")
    log = os.path.join(run.daemon.directory, "guests", f"{os.getuid()}.full", "disk0.log")
    lines = machine.read(log).splitlines()
    if len(lines) != 1 or "No space left" not in lines[0]:
        raise Failure(f"the disk's log: {lines}")
