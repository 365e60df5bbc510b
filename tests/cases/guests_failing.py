"""What goes wrong with guests stays where it is: their neighbours, the daemon and every
byte are as they were."""

import os
import re
import signal
import subprocess

import machine
from guests_under import directory_of
from strata import Failure, configured, worker_of
from suite import ROOT, case
from under import Guest

MIB = 1 << 20
GUESTS, MEMORY_MIB, FILLED_MIB, PLENTY_MIB, BUDGET_MIB, LITTLE_MIB = 8, 128, 24, 176, 134, 32
HOST_MIB, RESERVE_MIB, FILE_MIB = 2048, 64, 16
LIAR = os.path.join(ROOT, "tests", "programs", "liar.py")
# Its monitor, and what `strata vm ls` and `stats` say of it.
LIES = {
    "silent": "does not answer in time",
    "long": "a line that is too long",
    "deep": "nests too deep",
    "events": "too many events",
    "hangs": "hung up",
    "nonsense": "",
}
# What the daemon may have grown by when it has heard all that.
MOST_GROWTH_BYTES = 16 * MIB


def refused(run, *arguments, word):
    """In one line, and nothing is changed."""
    done = run.daemon.strata(*arguments, check=False)
    if done.returncode != 1 or word not in done.stderr or len(done.stderr.splitlines()) != 1:
        raise Failure(f"{arguments}: status {done.returncode}, {done.stderr!r}, not {word!r}")


def full(run, guests):
    """All of them use all that they have at once, and a part of that may not be in DRAM."""
    for guest in guests:
        run.daemon.strata("set", guest.name, "--dram", f"{BUDGET_MIB}MiB")
        guest.tell(f"fill {FILLED_MIB}")
    for guest in guests:
        guest.hear(r"^filled\n")
    for guest in guests:
        guest.rounds(1)
    run.note(f"DRAM {sum(guest.stats()['resident_bytes'] for guest in guests) // MIB} MiB")
    pressed = [guest.stats()["evictions_total"] for guest in guests]
    if min(pressed) == 0:
        raise Failure(f"a guest was not pressed: evictions {pressed}")
    return f"evictions {sum(pressed)}"


def survived(run, guests, supervisor):
    """The worker is killed under all of them."""
    worker = worker_of(supervisor)
    os.kill(worker, signal.SIGKILL)
    run.daemon.wait_until(lambda: machine.alive(supervisor) and worker_of(supervisor) not in
                          (None, worker) and run.daemon.answers(), "a new worker")
    for guest in guests:
        guest.rounds(2)
    for guest in guests:
        guest.wait_until(lambda: (guest.stats()["guest"] or {}).get("status") == "running",
                         "the new worker knows the guest")


def killed(run, guest, neighbours):
    """One QEMU is killed: nothing of it stays, and nothing else is touched."""
    before = [stats["pids"] for stats in map(Guest.stats, neighbours)]
    guest.kill()
    run.daemon.wait_until(lambda: guest.name not in run.daemon.tenants(), "its tenant goes")
    run.daemon.wait_until(lambda: not os.path.exists(directory_of(run, guest.name)),
                          "its directory goes")
    for neighbour in neighbours:
        neighbour.rounds(1)
    if [stats["pids"] for stats in map(Guest.stats, neighbours)] != before:
        raise Failure("other guests have other processes now")


def store_full(run, guest):
    """Neither DRAM nor the file can take what it has: it is said to be over its budget,
    goes on beyond it, and every byte is right."""
    run.daemon.strata("set", guest.name, "--dram", f"{LITTLE_MIB}MiB")
    said = []

    def is_over():
        said[:] = [note for note in guest.stats()["notes"] if "over its budget" in note]
        return said
    guest.wait_until(is_over, "it is said to be over its budget")
    guest.rounds(1)
    run.daemon.strata("set", guest.name, "--dram", f"{PLENTY_MIB}MiB")
    return said[0].split(";")[0]


def promised(run, guest):
    """What cannot be kept is refused in one line."""
    qemu = run.tool("qemu-system-x86_64")
    refused(run, "vm", "run", "--name", "large", "--reserve", f"{2 * HOST_MIB}MiB", "--memory",
            "4GiB", "--", qemu, word="cannot be kept")
    run.daemon.wait_until(lambda: "large" not in run.daemon.tenants(),
                          "the tenant of the guest that was refused goes with who asked")
    run.daemon.strata("set", guest.name, "--reserve", f"{RESERVE_MIB}MiB", "--limit",
                      f"{2 * RESERVE_MIB}MiB")
    refused(run, "set", guest.name, "--limit", f"{RESERVE_MIB // 2}MiB",
            word=f"its reserve of {RESERVE_MIB}.0 MiB is more than its limit of")
    refused(run, "set", guest.name, "--reserve", f"{2 * HOST_MIB}MiB", word="limit")
    guest.rounds(1)


@case("vm-eight", native=False, own_daemon=True, computes=True, seconds=180, takes=40)
def vm_eight(run):
    """Eight small guests, and everything that goes wrong with one or under all of them. (No
    microvms: with eight of them on two processors one was seen to find no timer and to panic,
    without Strata too.)"""
    tier = os.path.join(run.directory, "tier")
    os.mkdir(tier)
    text = f'dram = "{HOST_MIB}MiB"\ntier_path = "{tier}"\ntier_limit = "{FILE_MIB}MiB"\n'
    log = os.path.join(run.log_directory, "stratad-guests.log")
    with configured(run.daemon, text, run.directory, log) as supervisor:
        run.daemon.directory, private = os.path.join(run.directory, "run"), run.daemon.directory
        guests = []
        try:
            for number in range(GUESTS):
                guests.append(Guest(
                    run, f"g{number}",
                    ["--memory", f"{MEMORY_MIB}MiB", "--dram", f"{PLENTY_MIB}MiB"],
                    ["-machine", "q35"]))
            for guest in guests:
                guest.hear(r"^up\n")
            run.note(full(run, guests))
            survived(run, guests, supervisor)
            killed(run, guests.pop(), guests)
            for guest in guests[2:]:
                guest.kill()
            run.note(store_full(run, guests[0]))
            promised(run, guests[1])
            for guest in guests[:2]:
                guest.rounds(1)
                guest.end()
        finally:
            run.daemon.directory = private
            for guest in guests:
                guest.kill()
    run.tests = 5


@case("vm-liars", native=False, own_daemon=True)
def vm_liars(run):
    """Monitors that are silent or lie: the others are listed as ever, and the daemon has
    kept nothing of what it was told. A QEMU that is too old is not started."""
    old = os.path.join(run.directory, "qemu-old")
    os.symlink(LIAR, old)
    refused(run, "vm", "run", "--name", "old", "--memory", "64MiB", "--", old, word="too old")
    worker = run.daemon.worker()
    before = machine.resident_anonymous_bytes(worker)
    environment = {k: v for k, v in os.environ.items()
                   if not k.startswith(("STRATA_", "LD_PRELOAD"))}
    environment["STRATA_SOCKET"] = run.daemon.socket_path
    liars = []
    try:
        for way in LIES:
            command = [run.binaries.strata, "vm", "run", "--name", way, "--memory", "64MiB",
                       "--dram", "64MiB", "--", LIAR, "-machine", way]
            with open(os.path.join(run.log_directory, f"{way}.log"), "wb") as file:
                liars.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file,
                                              stdin=subprocess.DEVNULL, start_new_session=True))
        for way, trouble in LIES.items():
            def is_said():
                guest = (run.daemon.stats(way) or {}).get("guest") or {}
                return trouble in guest.get("trouble", "-") and (trouble or guest.get("status"))
            run.daemon.wait_until(is_said, f"of {way} it is said that {trouble or 'it runs'}")
        told = run.daemon.stats("nonsense")["guest"]
        if len(told["status"]) > 32 or not re.fullmatch(r"[\w-]*", told["status"]) or \
                any(told[key] is not None
                    for key in ("balloon_bytes", "free_bytes", "available_bytes")):
            raise Failure(f"what a liar said is believed: {told}")
        lines = run.daemon.strata("vm", "ls").stdout.splitlines()
        if len(lines) != 1 + len(LIES) or sum("  silent  " in line for line in lines) != 5:
            raise Failure(f"strata vm ls: {lines}")
        for way in LIES:
            text = run.daemon.strata("vm", "stats", way).stdout
            if len(text) > 4000 or "\x1b" in text:
                raise Failure(f"strata vm stats {way} prints what it was told: {text[:200]!r}")
        grown = machine.resident_anonymous_bytes(worker) - before
        run.note(f"the worker grew by {grown // 1024} KiB")
        if run.daemon.worker() != worker or grown > MOST_GROWTH_BYTES:
            raise Failure(f"the worker grew by {grown} bytes, or is another")
    finally:
        for liar in liars:
            liar.kill()
            liar.wait()
    run.daemon.wait_until(lambda: not run.daemon.tenants(), "the liars are gone")
    run.tests = 2
