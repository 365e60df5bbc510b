"""Snapshots of guests of a real libvirtd: what was taken comes back as a domain of libvirt's,
and what libvirt says of its domains is always so."""

import os
import shutil
import subprocess
import tempfile

import machine
from guest_clones import with_agent
from libvirt_guests import published
from libvirtd import Domain, Emulated, Libvirt, user
from strata import Failure, configured
from suite import case
from under import initramfs, kernel

MIB = 1 << 20
MEMORY_MIB, FILLED_MIB, BUDGET_MIB = 224, 48, 256
NAME, TENANT = "web-1", "vm-web-1"
# Rounds that the guest is to be ahead of its snapshot, and may do before it is heard again.
AHEAD = 40
DISK = """
    <disk type='file' device='disk'>
      <driver name='qemu' type='qcow2'/>
      <source file='{place}/{name}.qcow2'/>
      <target dev='vda' bus='virtio'/>
    </disk>
    <interface type='user'>
      <model type='virtio'/>
    </interface>"""


# Refuses one start, when it is told to.
HOOK = """#!/bin/sh
[ "$1 $2" = "web-1 prepare" ] || exit 0
! rm {place}/refuse 2>/dev/null
"""


class Revived(Domain):
    """One that `strata` had libvirt start: its line is full of what it has said."""

    def __init__(self, run, libvirt, name, tenant, serial):
        super().__init__(run, libvirt, name, tenant, serial)
        self.process = Emulated(pid_of(libvirt, name))
        self.line = self.connect(serial)


def pid_of(libvirt, domain):
    path = f"/proc/{libvirt.keeper.pid}/root/run/libvirt/qemu/{domain}.pid"
    return int(machine.read(path).strip() or 0)


def state(libvirt, domain):
    return libvirt.virsh("domstate", "--domain", domain).strip()


def uuid(libvirt, domain):
    return libvirt.virsh("domuuid", "--domain", domain).strip()


def taken(libvirt, guest):
    """libvirt sees that the guest runs on; its disk is copied beside the image, and the
    domain is what it was."""
    before = libvirt.virsh("dumpxml", guest.domain)
    first = libvirt.strata("snapshot", TENANT).stdout.strip()
    if first != f"{TENANT}@1" or state(libvirt, guest.domain) != "running":
        raise Failure(f"{first}: {state(libvirt, guest.domain)}")
    if libvirt.virsh("dumpxml", guest.domain) != before:
        raise Failure("the domain is another one after a snapshot")
    guest.rounds(2)
    libvirt.virsh("suspend", guest.domain)
    refused = libvirt.strata("snapshot", TENANT, check=False)
    if refused.returncode == 0 or "it is paused" not in refused.stderr or \
            state(libvirt, guest.domain) != "paused":
        raise Failure(f"of one that is paused: {refused.stderr}")
    libvirt.virsh("resume", guest.domain)
    guest.rounds(1)
    return first


def cloned(run, libvirt, first, guest, sockets):
    """A domain of its own, transient, of another identity, inside of it too, on a disk of its
    own."""
    done = libvirt.strata("clone", first, "--name", "copy")
    if "copy: it answers as copy, with the address 02:" not in done.stderr:
        raise Failure(f"who it is now: {done.stderr}")
    if done.stdout.strip() != "copy" or state(libvirt, "copy") != "running":
        raise Failure(f"clone: {done.stdout}{done.stderr}")
    if uuid(libvirt, "copy") == uuid(libvirt, guest.domain) or \
            "Persistent:     no" not in libvirt.virsh("dominfo", "copy"):
        raise Failure(f"what libvirt says of it: {libvirt.virsh('dominfo', 'copy')}")
    copy = Revived(run, libvirt, "copy", "copy", f"{sockets}/{guest.domain}.serial.copy")
    try:
        copy.rounds(3)
        guest.rounds(1)
        copy.tell("forks")
        if int(copy.hear(r"^forks (\d+)\n")[1]) < 1:
            raise Failure("its kernel has not seen that it is another machine")
        if run.daemon.stats("copy")["pids"] != [copy.process.pid]:
            raise Failure(f"its tenant has {run.daemon.stats('copy')}")
        second = libvirt.strata("snapshot", "copy").stdout.strip()
        copy.rounds(1)
        libvirt.strata("snapshot", "rm", second)
        copy.end()
        run.daemon.wait_until(lambda: "copy" not in libvirt.virsh("list", "--all", "--name"),
                              "libvirt has forgotten the clone")
    finally:
        copy.kill()


def killed(run, libvirt, first, guest):
    """The worker dies over a snapshot, and over a clone: the guest runs on, and nothing is left,
    no domain either."""
    step = os.path.join(libvirt.place, "run", "test-step")

    def dies(name, *words):
        with open(step, "w") as file:
            file.write(name)
        failed = libvirt.strata(*words, check=False)
        if failed.returncode == 0 or os.path.exists(step):
            raise Failure(f"the worker did not die when it had {name}: {failed.stdout}")
    for name in ("copied", "stopped", "devices"):
        dies(name, "snapshot", TENANT)
        run.daemon.wait_until(lambda: state(libvirt, NAME) == "running", f"after {name} it runs")
        guest.rounds(2)
    for name in ("filled", "given"):
        dies(name, "clone", first, "--name", "copy")
        # The next of its name does not wait until its tenant is taken down.
        run.daemon.wait_until(lambda: "copy" not in libvirt.virsh("list", "--all", "--name"),
                              "libvirt has forgotten the clone")
    run.daemon.wait_until(lambda: "copy" not in run.daemon.tenants(), "the clone is gone")
    guest.rounds(1)
    made = [f"{NAME}.qcow2", f"{NAME}.qcow2.{first}"]
    run.daemon.wait_until(lambda: sorted(
        file for file in os.listdir(libvirt.place) if ".qcow2" in file) == made, "no disk is left")


def undone(run, libvirt, first, guest):
    """libvirt does not start what the guest is to go back to: it is back as it was."""
    guest.rounds(AHEAD)
    last = guest.rounds(1)
    with open(os.path.join(libvirt.place, "refuse"), "w"):
        pass
    failed = libvirt.strata("rollback", TENANT, first, check=False)
    if failed.returncode == 0 or f"{TENANT} is back as it was before" not in failed.stderr or \
            os.path.exists(os.path.join(libvirt.place, "refuse")):
        raise Failure(f"a rollback that libvirt refuses: {failed.stdout}{failed.stderr}")
    guest = Revived(run, libvirt, NAME, TENANT, guest.serial)
    if guest.rounds(1) < last:
        raise Failure(f"it was in round {last}, and has gone back")
    shown = libvirt.strata("snapshots", TENANT).stdout
    if f"{TENANT}@1" not in shown or f"{TENANT}@2" in shown:
        raise Failure(f"its snapshots are {shown}")
    return guest


def back(run, libvirt, first, guest):
    """It is as it was, in a QEMU of libvirt's; its domain stays defined. A second time, too,
    when it has ended."""
    old = guest.process.pid
    guest.rounds(AHEAD)
    last = guest.rounds(1)
    done = libvirt.strata("rollback", TENANT, first)
    if done.stdout.strip() != TENANT or machine.alive(old):
        raise Failure(f"rollback: {done.stdout}{done.stderr}")
    guest = Revived(run, libvirt, NAME, TENANT, guest.serial)
    again = guest.rounds(1)
    if state(libvirt, NAME) != "running" or again > last or \
            "Persistent:     yes" not in libvirt.virsh("dominfo", NAME):
        raise Failure(f"round {again} after {last}: {libvirt.virsh('dominfo', NAME)}")
    guest.tell("forks")
    if int(guest.hear(r"^forks (\d+)\n")[1]) < 1:
        raise Failure("its kernel has not seen that it came back")
    if NAME + "-rehearsal" in libvirt.virsh("list", "--all", "--name"):
        raise Failure("its rehearsal is there still")
    shown = libvirt.strata("snapshots", TENANT).stdout
    if f"{TENANT}@1" not in shown or f"{TENANT}@" in shown.replace(f"{TENANT}@1", ""):
        raise Failure(f"what was taken for the way back is there still: {shown}")
    libvirt.virsh("destroy", NAME)
    run.daemon.wait_until(lambda: guest.process.poll() is not None, "it has ended")
    libvirt.strata("restore", first)
    guest = Revived(run, libvirt, NAME, TENANT, guest.serial)
    guest.rounds(2)
    guest.end()
    # And as libvirt knows it, without a snapshot.
    run.daemon.wait_until(lambda: state(libvirt, NAME) == "shut off", "libvirt has seen it end")
    libvirt.virsh("start", NAME)
    libvirt.virsh("destroy", NAME)


@case("libvirt-snapshots", native=False, own_daemon=True, computes=True, seconds=240, takes=25)
def libvirt_snapshots(run):
    """Snapshot, clone, rollback and restore of a guest with a disk."""
    place = tempfile.mkdtemp(prefix="strata-test-")
    os.chmod(place, 0o755)
    of = kernel()
    shutil.copy(of, os.path.join(place, "vmlinuz"))
    shutil.copy(initramfs(run, of, more=with_agent(run)), os.path.join(place, "initramfs"))
    subprocess.run([run.tool("qemu-img"), "create", "-q", "-f", "qcow2",
                    os.path.join(place, f"{NAME}.qcow2"), "64M"], check=True)
    mine, libvirt, guest = run.binaries, None, None
    run.binaries = run.daemon.binaries = published(run, place)
    try:
        libvirt = Libvirt(run, place, HOOK.format(place=place))
        libvirt.define(NAME, MEMORY_MIB, DISK.format(place=place, name=NAME))
        private = run.daemon.socket_path
        run.daemon.socket_path = os.path.join(place, "run", "control.sock")
        try:
            done = libvirt.strata("vm", "libvirt", NAME, "--dram", f"{BUDGET_MIB}MiB", "--apply")
        finally:
            run.daemon.socket_path = private
        rule = done.stdout.partition("# In /etc/strata/stratad.toml")[2].partition("\n")[2]
        run.note(f"as {user()}")
        log = os.path.join(run.log_directory, "stratad-libvirt.log")
        rule = f'snapshot_dir = "{place}/snapshots"\n{rule}'
        with configured(run.daemon, rule, place, log):
            sockets = os.path.join(place, "libvirt-2", "qemu")
            guest = Domain(run, libvirt, NAME, TENANT, f"{sockets}/{NAME}.serial")
            guest.start()
            guest.hear(r"^up\n")
            guest.tell("agent")
            guest.hear(r"^agent\n")
            guest.tell("disk")
            guest.hear(r"^disks\n")
            guest.tell(f"fill {FILLED_MIB}")
            guest.hear(r"^filled\n")
            guest.rounds(1)
            first = taken(libvirt, guest)
            cloned(run, libvirt, first, guest, sockets)
            killed(run, libvirt, first, guest)
            guest = undone(run, libvirt, first, guest)
            back(run, libvirt, first, guest)
            run.daemon.strata("snapshot", "rm", first)
    finally:
        if guest:
            guest.kill()
        if libvirt:
            libvirt.end()
        run.binaries = run.daemon.binaries = mine
        shutil.rmtree(place, ignore_errors=True)
    run.tests = 5
