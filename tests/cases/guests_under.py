"""Guests underneath which Strata is (`strata vm`). One boot serves several checks, each
counted and named: emulated guests take long to begin."""

import json
import os
import re
import signal

import machine
from strata import Failure
from suite import case
from under import Guest

MIB = 1 << 20
MEMORY_MIB, FILLED_MIB, BUDGET_MIB, FREED_MIB = 320, 200, 180, 60


def directory_of(run, name):
    return os.path.join(run.daemon.directory, "guests", f"{os.getuid()}.{name}")


def started(run, guest):
    """What was added is said; its memory is private anonymous, and the file empty."""
    log = machine.read(guest.log_path)
    for word in (f"strata: {guest.name}: QEMU ", "promised; ", "memory-backend-file", "-mon ",
                 "free-page-reporting=on"):
        if word not in log:
            raise Failure(f"strata vm run does not say {word!r}: {log}")
    file = os.stat(os.path.join(directory_of(run, guest.name), "strata-ram"))
    if file.st_blocks != 0 or file.st_size != 0:
        raise Failure(f"the file of its memory has {file.st_blocks} blocks, {file.st_size} bytes")
    ram = guest.mappings(MEMORY_MIB * MIB)
    if ram != [("rw-p", "0")]:
        raise Failure(f"its memory is mapped as {ram}")


def pressed(run, guest):
    """With half of what it uses, every byte is right."""
    guest.tell(f"fill {FILLED_MIB}")
    guest.hear(r"^filled\n")
    guest.rounds(4)
    stats = guest.stats()
    run.note(f"evictions {stats['evictions_total']} faults {stats['faults_total']}")
    if stats["evictions_total"] == 0 or stats["faults_total"] == 0:
        raise Failure("nothing was evicted or nothing came back: it tested nothing")
    if stats["shared_bytes"] > 8 * MIB:
        raise Failure(f"{stats['shared_bytes']} bytes of it are shared")


def listed(run, guest):
    """ls and stats show what it was promised, what it costs and what it says."""
    guest.wait_until(lambda: (guest.stats()["guest"] or {}).get("free_bytes"),
                     "its balloon's driver tells what is free")
    known = guest.stats()["guest"]
    if known["memory_bytes"] != MEMORY_MIB * MIB or known["balloon_bytes"] != MEMORY_MIB * MIB:
        raise Failure(f"it was promised {MEMORY_MIB} MiB, and this is known: {known}")
    if known["status"] != "running" or known["trouble"] or known["machine"] != "q35":
        raise Failure(f"it runs, and this is known: {known}")
    lines = run.daemon.strata("vm", "ls").stdout.splitlines()
    if len(lines) != 2 or not lines[1].startswith(guest.name) or "320.0 MiB" not in lines[1]:
        raise Failure(f"strata vm ls: {lines}")
    everything = json.loads(run.daemon.strata("vm", "ls", "--json").stdout)
    if [one["name"] for one in everything] != [guest.name]:
        raise Failure("strata vm ls --json lists others")
    text = run.daemon.strata("vm", "stats", guest.name).stdout
    if not re.search(r"^memory promised +320\.0 MiB$", text, re.MULTILINE):
        raise Failure(f"strata vm stats: {text}")
    refused = run.daemon.strata("vm", "stats", "keeper", check=False)
    if refused.returncode != 1 or "keeper is no guest" not in refused.stderr:
        raise Failure(f"strata vm stats keeper: {refused.stderr}")


def survives(run, guest):
    """The worker is killed under it: the guest goes on, right, and is known as before."""
    worker = run.daemon.worker()
    os.kill(worker, signal.SIGKILL)
    run.daemon.wait_until(lambda: machine.alive(run.daemon.pid) and run.daemon.worker() not in
                          (None, worker) and run.daemon.answers(), "a new worker")
    guest.rounds(3)
    guest.wait_until(lambda: (guest.stats()["guest"] or {}).get("status") == "running",
                     "the new worker knows the guest")


def taken_over(run, guest):
    """Worker and supervisor are killed under it: under the next stratad it goes on, right."""
    run.daemon.kill_whole()
    run.daemon.begin_again()
    guest.rounds(3)
    guest.wait_until(lambda: (guest.stats()["guest"] or {}).get("status") == "running",
                     "the next daemon knows the guest")


def frees(run, guest):
    """What the guest frees comes back: nothing of it is resident or stored any more."""
    def held():
        stats = guest.stats()
        return stats["resident_bytes"] + stats["stored_bytes"]
    before, stored = held(), guest.stats()["stored_bytes"]
    given = guest.stats()["discarded_pages_total"]
    guest.tell(f"free {FREED_MIB}")
    guest.hear(r"^freed\n")
    most = before - (FREED_MIB - 8) * MIB
    guest.wait_until(lambda: held() <= most, f"{held()} bytes are held, and {before} were before "
                     f"the guest freed {FREED_MIB} MiB")
    after = guest.stats()
    run.note(f"stored {stored // MIB} MiB, {after['stored_bytes'] // MIB} MiB after it freed "
             f"{FREED_MIB}")
    if after["stored_bytes"] >= stored:
        raise Failure("no less is stored")
    if after["discarded_pages_total"] - given < (FREED_MIB - 8) * MIB // 4096:
        raise Failure("what it gave back was not counted")
    guest.rounds(2)


def ends(run, guest):
    """Nothing of an ended guest stays."""
    guest.end()
    run.daemon.wait_until(lambda: not os.path.exists(directory_of(run, guest.name)),
                          "its directory is removed")
    # It is renamed first, and removed then.
    guests = os.path.join(run.daemon.directory, "guests")
    run.daemon.wait_until(lambda: not os.listdir(guests),
                          f"nothing is left in {guests}")


@case("vm-guest", native=False, own_daemon=True, computes=True, seconds=120, takes=25)
def vm_guest(run):
    guest = Guest(run, "web1", ["--memory", f"{MEMORY_MIB}MiB", "--dram", f"{BUDGET_MIB}MiB"],
                  ["-machine", "q35"])
    checks = (started, pressed, listed, survives, taken_over, frees, ends)
    try:
        guest.hear(r"^up\n")
        for check in checks:
            check(run, guest)
            run.note(f"vm-{check.__name__}")
    finally:
        guest.kill()
    run.tests = len(checks)


@case("vm-machines", native=False, computes=True, seconds=120, takes=10)
def vm_machines(run):
    """The other machines boot, and their monitors answer. (Under TCG, Debian's kernel has no
    clock in a microvm with ACPI, and finds no virtio device in one without: so nothing is
    known of that one from inside.)"""
    for kind, machine in (("pc", "pc"), ("microvm", "microvm,acpi=off")):
        guest = Guest(run, f"vm-{kind}", ["--memory", "256MiB", "--dram", "256MiB"],
                      ["-machine", machine])
        try:
            guest.hear(r"^up\n")
            figure = "free_bytes" if kind == "pc" else "balloon_bytes"
            guest.wait_until(lambda: (guest.stats()["guest"] or {}).get(figure),
                             f"{figure} of {kind} is told")
        finally:
            guest.kill()
        run.note(f"vm-{kind}")
    run.tests = 2


@case("vm-refusals", native=False)
def vm_refusals(run):
    """What cannot be a guest is refused in one line, and no tenant is made; --print
    starts nothing."""
    qemu = run.tool("qemu-system-x86_64")

    def vm_run(*words):
        return run.daemon.strata("vm", "run", "--name", "refused", *words, check=False)
    for words, why in (
        ((qemu, "-m", "1G", "-device", "vfio-pci,host=00:00.0"), "VFIO"),
        ((qemu, "-m", "1G", "-device", "vhost-user-fs-pci,chardev=c,tag=t"), "virtiofs"),
        ((qemu, "-m", "1G", "-device", "ivshmem-plain,memdev=m"), "ivshmem"),
        ((qemu, "-m", "1G", "-overcommit", "mem-lock=on"), "locked"),
        ((qemu, "-m", "1G", "-object", "memory-backend-memfd,id=h,size=1G,hugetlb=on"),
         "hugetlbfs"),
        ((qemu,), "give --memory"),
        (("sh", "-m", "1G"), "does not say that it is QEMU"),
        (("no-such-qemu", "-m", "1G"), "command not found"),
    ):
        done = vm_run("--", *words)
        lines = done.stderr.splitlines()
        if done.returncode != 1 or len(lines) != 1 or why not in lines[0]:
            raise Failure(f"{words}: status {done.returncode}: {done.stderr}")
    printed = vm_run("--memory", "1GiB", "--print", "--", qemu, "-machine", "q35")
    words = printed.stdout.split()
    if printed.returncode != 0 or words[:3] != [qemu, "-machine", "q35"] or \
            "memory-backend=strata-ram" not in words:
        raise Failure(f"--print: status {printed.returncode}: {printed.stdout}{printed.stderr}")
    if "refused" in run.daemon.tenants():
        raise Failure("a tenant was made for a guest that was refused")
