"""Tenants of one group keep equal pages that they have evicted once; all others do not."""

import json
import os
import signal

import machine
from strata import Failure, configured, worker_of
from suite import case

MIB = 1 << 20
SIZE_MIB, BUDGET = 96, "24MiB"
TEXT = """
tier_path = "{tier}"
tier_limit = "1GiB"
[groups]
twins = ["twin*"]
"""
# What is evicted of so much under that budget, at least.
AWAY = 60 * MIB


def holder(run, name):
    """It fills its memory with what every other one has, too, and waits."""
    program = run.start("hold", str(SIZE_MIB), budget=BUDGET, name=name)
    program.gate("ready")
    run.daemon.wait_until(lambda: program.stats()["stored_bytes"] > AWAY and settled(program),
                          f"pages of {name} are stored")
    return program


def settled(program):
    """What it has evicted is packed."""
    stats = program.stats()
    return stats["staged_bytes"] < MIB and stats["resident_bytes"] < 24 * MIB


def cost(*programs):
    """What the store has for them, in pages: how densely those are packed depends on when there
    was time for it."""
    return sum(program.stats()["stored_objects"] for program in programs)


def bytes_each(*programs):
    """What a stored page costs them in DRAM and in the file."""
    stats = [program.stats() for program in programs]
    cost_bytes = sum(one["compressed_bytes"] + one["file_bytes"] for one in stats)
    return cost_bytes / sum(one["stored_objects"] for one in stats)


def told(program, word):
    program.answer(word)
    program.gate("ready")


def once(run, alone, first, second):
    """Two cost what one costs; and that is how either can tell what the other has."""
    groups = [program.stats()["group"] for program in (alone, first, second)]
    if groups != [None, "twins", "twins"]:
        raise Failure(f"they are of the groups {groups}")
    try:
        run.daemon.wait_until(lambda: cost(first, second) < 1.4 * cost(alone),
                              "two of a group cost what one costs")
        # Nor is a page that is there once charged twice, however densely it is packed by now.
        run.daemon.wait_until(lambda: bytes_each(first, second) < 1.5 * bytes_each(alone),
                              "a page costs two of a group what it costs one")
    except Failure as failure:
        parts = ("stored_bytes", "staged_bytes", "compressed_bytes", "file_bytes", "stored_objects",
                 "deduplicated_pages")
        told = [{part: one[part] for part in parts} for one in
                (program.stats() for program in (alone, first, second))]
        raise Failure(f"{failure}: alone {told[0]}, the two {told[1:]}") from None
    run.note(f"alone {cost(alone)} pages of {bytes_each(alone):.0f} bytes, both twins "
             f"{cost(first, second)} of {bytes_each(first, second):.0f}")
    if cost(second) > 0.75 * cost(alone):
        raise Failure(f"the second pays {cost(second)} for what is there already, one alone "
                      f"{cost(alone)}")


def writes(run, first, second):
    """What one writes the other does not read."""
    for program, word in ((first, "write"), (second, "check"), (first, "check"), (second, "write"),
                          (first, "check"), (second, "check")):
        told(program, word)


def worker_killed(run, pid, programs):
    worker = worker_of(pid)
    os.kill(worker, signal.SIGKILL)
    run.daemon.wait_until(lambda: machine.alive(pid) and worker_of(pid) not in (None, worker) and
                          run.daemon.answers(), "a new worker")
    for program in programs:
        told(program, "check")
    if programs[1].stats()["group"] != "twins":
        raise Failure("the next worker does not know of the group")


def nested(run):
    """A program of a member may start another member: each has its own processes."""
    inner = f"{run.binaries.strata} run --name twin-inner --dram {BUDGET} -- sleep 600"
    outer = run.start("/bin/sh", "-c", f"{inner}; true", budget=BUDGET, name="twin-outer")

    def pids(name):
        listed = json.loads(run.daemon.strata("ps", "--json").stdout)
        return next((one["pids"] for one in listed if one["name"] == name), [])
    run.daemon.wait_until(lambda: pids("twin-inner"), "the inner one is a tenant with a process")
    (inside,) = pids("twin-inner")
    if inside in pids("twin-outer") or machine.read(f"/proc/{inside}/comm").strip() != "sleep":
        raise Failure(f"{pids('twin-inner')} and {pids('twin-outer')} are mixed up")
    os.kill(inside, signal.SIGTERM)
    outer.end_well()


def ends(run, program):
    program.answer("end")
    program.finish()


@case("groups", native=False, own_daemon=True, seconds=120, takes=15)
def groups(run):
    place, tier = (os.path.join(run.directory, name) for name in ("configured", "tier"))
    os.mkdir(tier)
    log = os.path.join(run.log_directory, "configured.log")
    with configured(run.daemon, TEXT.format(tier=tier), place, log) as pid:
        alone, first, second = (holder(run, name) for name in ("alone", "twin1", "twin2"))
        once(run, alone, first, second)
        writes(run, first, second)
        worker_killed(run, pid, (alone, first, second))
        nested(run)
        # Whose files they were at first is gone; the others go on, and more come.
        ends(run, first)
        told(second, "check")
        third = holder(run, "twin3")
        if cost(third) > 0.75 * cost(alone):
            raise Failure(f"a third one pays {cost(third)}, one alone {cost(alone)}")
        told(second, "check")
        for program in (third, second, alone):
            told(program, "check")
            ends(run, program)
