"""A stock guest that has more memory than it was promised, and a swap disk of Strata's. Who
serves the disk is killed, and the worker is; every page is compared inside the guest."""

import json
import os
import signal

import machine
from pool_clients import pool_stats
from strata import Failure
from suite import case
from under import Guest, initramfs, kernel

MIB = 1 << 20
MEMORY_MIB, SWAP_MIB, FILL_MIB = 144, 160, 140
NAME = "swaps"


def servers(one):
    """Who keeps the disk's pages and whoever serves it."""
    for child in machine.children(one.process.pid):
        if "--swap" in machine.read(f"/proc/{child}/cmdline").split("\0"):
            return child, machine.children(child)
    raise Failure("nobody serves the swap disk")


def asked(one, order, answer):
    one.tell(order)
    return one.hear(answer)


def refusals(run):
    """What cannot be done with it is refused, a line each."""
    strata = run.daemon.strata
    for command, why in ((("pool", "rm", f"{NAME}.swap"), "none of it can be dropped"),
                         (("pool", "empty", f"{NAME}.swap"), "none of it can be dropped")):
        refused = strata(*command, check=False)
        lines = refused.stderr.splitlines()
        if refused.returncode != 1 or len(lines) != 1 or why not in lines[0]:
            raise Failure(f"{command}: status {refused.returncode}: {refused.stderr}")
    small = strata("vm", "run", "--swap", "1KiB", "--print", "--",
                   run.tool("qemu-system-x86_64"), "-name", "x", "-m", "64", check=False)
    if small.returncode == 0 or "a swap disk of 1.0 KiB cannot be made" not in small.stderr:
        raise Failure(f"a swap disk of 1 KiB: {small.stderr}")


def shown(run):
    """Its pages are in the guest's account."""
    pool = pool_stats(run, f"{NAME}.swap")
    (known,) = json.loads(run.daemon.strata("vm", "ls", "--json").stdout)
    swap = known["guest"]["swap"]
    text = run.daemon.strata("vm", "stats", NAME).stdout
    listed = run.daemon.strata("pool", "ls").stdout
    if pool["guest"] != NAME or pool["limit_bytes"] != SWAP_MIB * MIB or \
            swap["size_bytes"] != SWAP_MIB * MIB or known["swap_bytes"] == 0 or \
            "swapped out" not in text or f"{NAME}.swap" not in listed:
        raise Failure(f"{pool}, {known}, {text}, {listed}")
    return pool


@case("pool-swap", native=False, own_daemon=True, computes=True, seconds=150, takes=15)
def pool_swap(run):
    initramfs(run, kernel(), "guest_swap")
    one = Guest(run, NAME, ["--memory", f"{MEMORY_MIB}MiB", "--dram", "320MiB",
                            "--swap", f"{SWAP_MIB}MiB"], ["-machine", "q35"])
    try:
        one.hear(r"^up\n")
        check(run, one)
    finally:
        one.kill()


def check(run, one):
    pages = SWAP_MIB * MIB // 4096 - 1
    asked(one, "on", rf"^on {pages}\n")
    out = int(asked(one, f"fill {FILL_MIB} 1", r"^filled \d+, (\d+) out\n")[1])
    if out * 4096 < 20 * MIB:
        raise Failure(f"only {out} pages were swapped out")
    run.daemon.wait_until(
        lambda: pool_stats(run, f"{NAME}.swap")["page_bytes"] > 15 * MIB, "pages are there")
    pool = shown(run)
    run.note(f"{out} pages out; holds {pool['page_bytes'] // MIB} MiB, of which "
             f"{pool['deduplicated_bytes'] // MIB} twice, in {pool['cost_bytes'] // MIB} MiB")
    if pool["deduplicated_bytes"] * 5 < pool["page_bytes"] or \
            pool["cost_bytes"] * 3 > pool["page_bytes"] * 2:
        raise Failure(f"they are neither there once nor compressed: {pool}")
    refusals(run)
    # Worker and server are killed while pages go out and come in.
    keeper, (server,) = servers(one)
    one.tell("check")
    one.hear(r"^middle\n")
    worker = run.daemon.worker()
    os.kill(worker, signal.SIGKILL)
    os.kill(server, signal.SIGKILL)
    count = FILL_MIB * MIB // 4096
    one.hear(rf"^checked {count}, \d+ out\n")
    again, (second,) = servers(one)
    if again != keeper or second == server:
        raise Failure("the server was not killed")
    run.daemon.wait_until(lambda: run.daemon.worker() not in (None, worker) and
                          run.daemon.answers(), "a new worker")
    run.daemon.wait_until(lambda: [pool for pool in json.loads(
        run.daemon.strata("pool", "ls", "--json").stdout) if pool["page_bytes"] > 0],
        "the new worker is told of the swap disk")
    if shown(run)["corrupt_total"]:
        raise Failure("a page was not what was written")
    run.note("pool-swap-killed")
    # The other process of the two is killed: the disk goes on.
    asked(one, "halve", r"^halved\n")
    one.tell("check")
    os.kill(keeper, signal.SIGKILL)
    one.hear(rf"^checked {count // 2}, \d+ out\n")
    asked(one, f"fill {FILL_MIB // 2} 2", r"^filled \d+, \d+ out\n")
    asked(one, "check", rf"^checked {count // 2}, \d+ out\n")
    asked(one, "off", r"^off\n")
    run.daemon.wait_until(lambda: pool_stats(run, f"{NAME}.swap")["page_bytes"] == 0,
                          "what is trimmed is gone")
    trimmed = pool_stats(run, f"{NAME}.swap")
    run.note(f"trimmed, it costs {trimmed['cost_bytes'] // 1024} KiB")
    if trimmed["cost_bytes"] > 8 * MIB or trimmed["refused_total"]:
        raise Failure(f"trimmed: {trimmed}")
    one.end()
    run.daemon.wait_until(lambda: not json.loads(
        run.daemon.strata("pool", "ls", "--json").stdout), "it ends with its guest")
    run.note("pool-swap-trimmed")
    run.tests = 3
