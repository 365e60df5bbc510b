"""What Strata does not manage is named with its cause, where the person looks; what it
costs counts; and how long a tenant waits for its pages is told."""

import os
import subprocess

from strata import Failure
from suite import case

MIB = 1 << 20
STATIC = "int main(void) { for (;;) pause(); }\n"


def note(stats, part):
    return next((text for text in stats["notes"] if part in text), None)


def shared(run, kind):
    size = 64
    program = run.start("unmanaged", kind, size, budget="40MiB")
    program.gate("ready")
    if run.native:
        program.answer()
        program.finish(pressed=False)
        return
    # The kernel counts with some hundred KiB of tolerance.
    stats = run.daemon.wait_until(
        lambda: (s := program.stats()) and s["shared_bytes"] >= (size - 1) * MIB
        and s["state"] == "exhausted" and s["notes"] and s, "it is counted and is too much")
    if stats["shared_bytes"] > (size + 8) * MIB:
        raise Failure(f"{stats['shared_bytes']} bytes, and two processes map {size} MiB")
    said = note(stats, "shared memory, which is not managed")
    if not said or "raise the budget to" not in said or "file tier" in said:
        raise Failure(f"its notes say neither why nor what to do: {stats['notes']}")
    listed = run.daemon.strata("ps").stdout
    if said not in listed or "UNMANAGED" not in listed:
        raise Failure(f"ps does not say it: {listed}")
    run.daemon.strata("set", program.name, "--dram", "128MiB")
    run.daemon.wait_until(lambda: not note(program.stats(), "shared memory"), "there is room now")
    if (state := program.stats()["state"]) == "exhausted":
        raise Failure(f"it is {state} under a budget that is large enough")
    program.answer()
    program.finish(pressed=False)


@case("shared-memory")
def shared_memory(run):
    """Shared memory of a memory file that two processes map counts once against the
    budget; where it alone is more, the tenant says so and what to do."""
    shared(run, "shared")


@case("shared-memory-nameless")
def shared_memory_nameless(run):
    """The same of shared memory without a file."""
    shared(run, "nameless")


@case("unmanaged-causes")
def unmanaged_causes(run):
    """Memory that cannot be managed is told by cause, in what scripts read and in what
    people read; nobody is advised to have a file tier for it."""
    size = 32
    program = run.start("unmanaged", "private", size, budget="40MiB")
    program.gate("ready")
    if not run.native:
        least = size * MIB
        stats = run.daemon.wait_until(
            lambda: (s := program.stats()) and s["unmanaged_by"]["executable_bytes"] >= least
            and s["unmanaged_by"]["files_bytes"] >= least and s, "both causes are told")

        def agree():
            # All of it, and what of it has which cause, are counted one after the other.
            nonlocal stats
            stats = program.stats()
            return sum(stats["unmanaged_by"].values()) <= stats["unmanaged_bytes"] + 2 * MIB
        run.daemon.wait_until(agree, f"causes and their sum agree (they are {stats['unmanaged_by']},"
                                     f" and {stats['unmanaged_bytes']} in all)")
        run.daemon.wait_until(lambda: note(program.stats(), "cannot be managed"),
                              "it says that this takes its budget")
        if any("file tier" in text for text in program.stats()["notes"]):
            raise Failure(f"it is told to have a file tier: {program.stats()['notes']}")
        text = run.daemon.strata("stats", program.name).stdout
        if "unmanaged_by.executable_bytes" not in text:
            raise Failure(f"strata stats does not tell the causes: {text}")
    program.answer()
    program.finish(pressed=False)


@case("unattended", native=False)
def unattended(run):
    """Programs in a tenant that no agent can be in run, and are named with the reason:
    one that was started without the environment, and a static one."""
    source = os.path.join(run.directory, "static.c")
    static = os.path.join(run.directory, "static")
    with open(source, "w") as file:
        file.write("#include <unistd.h>\n" + STATIC)
    subprocess.run([run.tool("cc"), "-static", "-o", static, source], check=True)
    program = run.daemon.start_strata("run", "--name", "mixed", "--dram", "64MiB", "--", "sh", "-c",
                                      f"env -i sleep 600 & {static} & wait")
    pids = []
    try:
        def named():
            stats = run.daemon.stats("mixed")
            found = {one["name"]: one for one in (stats or {}).get("unattended", [])}
            return stats and len(found) == 2 and (stats, found)
        stats, found = run.daemon.wait_until(named, "both are named")
        pids = [one["pid"] for one in found.values()]
        for name, why in (("sleep", "without Strata's environment"), ("static", "statically linked")):
            if why not in found[name]["reason"]:
                raise Failure(f"{name}: {found[name]}")
        if stats["unattended_processes"] != 2 or not note(stats, "not managed"):
            raise Failure(f"{stats['unattended_processes']} processes, notes {stats['notes']}")
        run.daemon.wait_until(lambda: (s := run.daemon.stats("mixed"))
                              and s["unmanaged_by"]["unattended_bytes"] > 0, "what they cost is told")
    finally:
        for pid in pids:
            os.kill(pid, 9)
        program.kill()
        program.communicate()


@case("stall", native=False)
def stall(run):
    """A program that waits for its pages most of the time is said to, some of its threads
    and all of them; one that has what it needs is not."""
    program = run.start("hold", 96, budget="24MiB")
    program.gate("ready")
    for _ in range(2):
        program.answer("check")
        program.gate("ready")
    stats = program.stats()
    some, full = stats["stall"]["some"], stats["stall"]["full"]
    if not 0 < some["avg10"] <= 100 or not some["avg10"] >= some["avg60"] >= some["avg300"] > 0:
        raise Failure(f"odd averages: {some}")
    if not 0 < full["total_us"] <= some["total_us"] <= stats["uptime_seconds"] * 1e6:
        raise Failure(f"odd sums: {stats['stall']}, of {stats['uptime_seconds']} s")
    if (idle := run.daemon.stats("keeper")["stall"]["some"]["total_us"]) != 0:
        raise Failure(f"a program that was never evicted has waited for {idle} us")
    head, *rows = run.daemon.strata("top", "--once").stdout.splitlines()
    row = next(row for row in rows if row.startswith(program.name + " "))
    if "STALL" not in head.split() or "%" not in row.split()[head.split().index("STALL")]:
        raise Failure(f"top does not show it: {head} {row}")
    program.answer("end")
    program.finish()
