"""Guests of a real libvirtd as tenants, with the configuration that Debian's packages bring:
QEMU as the user libvirt-qemu, its sandbox on, its mount namespace on."""

import os
import shutil
import tempfile

from libvirtd import Domain, Libvirt, user
from program import copy_program
from strata import Binaries, Failure, configured
from suite import case
from under import initramfs, kernel

MIB = 1 << 20
# Of the budget 64 MiB go to the buffer of translated code, and some 30 to QEMU itself.
# Beside what is filled there is room for what the guest has taken aside to report as free: up to
# 64 MiB, for as long as its QEMU takes.
MEMORY_MIB, FILLED_MIB, BUDGET_MIB, FREED_MIB = 288, 112, 176, 48
NAMES = ("web-1", "web-2")

SHARED = """
    <shmem name='s'>
      <model type='ivshmem-plain'/>
      <size unit='M'>4</size>
    </shmem>"""


def published(run, place):
    """The programs where QEMU's user can read and execute them."""
    binaries = Binaries(place)
    for name in ("strata", "stratad"):
        setattr(binaries, name, os.path.join(place, name))
    binaries.library = os.path.join(place, "libstrata.so")
    for path in (run.binaries.strata, run.binaries.stratad, run.binaries.library):
        copy_program(path, place)
    return binaries


def amended(libvirt):
    """What has to be changed is shown, and done when it is asked for, once; the rule that is
    proposed is the configuration of the daemon."""
    before = libvirt.virsh("dumpxml", "--inactive", NAMES[0])
    shown = libvirt.strata("vm", "libvirt", NAMES[0], "--dram", f"{BUDGET_MIB}MiB")
    diff, _, rule = shown.stdout.partition("# In /etc/strata/stratad.toml")
    for line in ("+    <access mode='shared'/>", "+    <qemu:env name='LD_PRELOAD'",
                 "+      <tb-cache unit='MiB'>64</tb-cache>", "freePageReporting='on'"):
        if line not in diff:
            raise Failure(f"{line} is not among the changes: {diff}")
    if libvirt.virsh("dumpxml", "--inactive", NAMES[0]) != before:
        raise Failure("the domain was changed unasked")
    for name in NAMES:
        done = libvirt.strata("vm", "libvirt", name, "--apply")
        if "holds from its next start" not in done.stderr:
            raise Failure(f"--apply says {done.stderr}")
        after = libvirt.virsh("dumpxml", "--inactive", name)
        again = libvirt.strata("vm", "libvirt", name, "--apply")
        if "already as it must be" not in again.stderr or "@@" in again.stdout or \
                libvirt.virsh("dumpxml", "--inactive", name) != after:
            raise Failure(f"a second time it is changed again: {again.stdout}{again.stderr}")
    refused = libvirt.strata("vm", "libvirt", "shares", check=False)
    lines = refused.stderr.splitlines()
    if refused.returncode != 1 or len(lines) != 1 or "shmem" not in lines[0]:
        raise Failure(f"one with shared memory: status {refused.returncode}: {lines}")
    return rule.partition("\n")[2]


def are_tenants(run, guests):
    """Each of its own, with the budget of the one rule."""
    if run.daemon.tenants() != [guest.name for guest in guests]:
        raise Failure(f"the tenants are {run.daemon.tenants()}")
    for guest in guests:
        stats = guest.stats()
        if stats["pids"] != [guest.process.pid] or stats["budget_bytes"] != BUDGET_MIB * MIB:
            raise Failure(f"{guest.name} has {stats['pids']}, {stats['budget_bytes']}")
        if guest.mappings(MEMORY_MIB * MIB) != [("rw-p", "0")]:
            raise Failure(f"its memory is mapped as {guest.mappings(MEMORY_MIB * MIB)}")
    lines = run.daemon.strata("vm", "ls").stdout.splitlines()[1:]
    for line, guest in zip(lines, guests, strict=True):
        words = line.split()
        if words[0] != guest.name or words[2:4] != ["libvirt's", "tcg"] or \
                f"{MEMORY_MIB}.0 MiB" not in line:
            raise Failure(f"strata vm ls: {line}")


def are_pressed(run, guests):
    """With less than they use, every byte in both is right."""
    for guest in guests:
        guest.tell(f"fill {FILLED_MIB}")
    for guest in guests:
        guest.hear(r"^filled\n")
        guest.rounds(2)
    for guest in guests:
        stats = guest.stats()
        run.note(f"{guest.name}: evictions {stats['evictions_total']} "
                 f"faults {stats['faults_total']}")
        if stats["evictions_total"] == 0 or stats["faults_total"] == 0:
            raise Failure(f"{guest.name}: nothing was evicted, or nothing came back")


def free(guest):
    """What a guest frees comes back."""
    def held():
        stats = guest.stats()
        return stats["resident_bytes"] + stats["stored_bytes"]
    before = held()
    guest.tell(f"free {FREED_MIB}")
    guest.hear(r"^freed\n")
    guest.wait_until(lambda: held() <= before - (FREED_MIB - 8) * MIB,
                     f"{before} bytes were held before it freed {FREED_MIB} MiB")
    guest.rounds(1)


@case("libvirt", native=False, own_daemon=True, computes=True, seconds=120, takes=30)
def libvirt_guests(run):
    """One rule, two guests, a tenant each."""
    place = tempfile.mkdtemp(prefix="strata-test-")
    os.chmod(place, 0o755)
    # libvirt gives what a guest boots from to QEMU's user.
    of = kernel()
    shutil.copy(of, os.path.join(place, "vmlinuz"))
    shutil.copy(initramfs(run, of), os.path.join(place, "initramfs"))
    mine, libvirt, guests = run.binaries, None, []
    run.binaries = run.daemon.binaries = published(run, place)
    try:
        libvirt = Libvirt(run, place)
        for name, more in ((NAMES[0], ""), (NAMES[1], ""), ("shares", SHARED)):
            libvirt.define(name, MEMORY_MIB, more)
        log = os.path.join(run.log_directory, "stratad-libvirt.log")
        private = run.daemon.socket_path
        # The daemon's, which is started with the rule that is proposed.
        run.daemon.socket_path = os.path.join(place, "run", "control.sock")
        try:
            rule = amended(libvirt)
        finally:
            run.daemon.socket_path = private
        run.note(f"as {user()}")
        with configured(run.daemon, rule, place, log):
            sockets = os.path.join(place, "libvirt-2", "qemu")
            guests = [Domain(run, libvirt, name, f"vm-{name}",
                             os.path.join(sockets, f"{name}.serial")) for name in NAMES]
            for guest in guests:
                guest.start()
            for guest in guests:
                guest.hear(r"^up\n")
            are_tenants(run, guests)
            are_pressed(run, guests)
            free(guests[0])
            guests[1].rounds(1)
            for guest in guests:
                guest.end()
            run.daemon.wait_until(lambda: run.daemon.tenants() == [], "no tenant is left")
    finally:
        for guest in guests:
            guest.kill()
        if libvirt:
            libvirt.end()
        run.binaries = run.daemon.binaries = mine
        shutil.rmtree(place, ignore_errors=True)
    run.tests = 4
