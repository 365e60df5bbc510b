"""Supervisor and worker are killed, and the next stratad has tenants of all kinds: with
pages in the file tier, with a schedule of snapshots, clones, and clones with children."""

import os

import clones
import machine
from manager import managed
from moment import Moment
from snapshot_schedule import kept_by_hand, next_one
from strata import Failure, kill_together
from suite import case
from takeover import goes_on, waits

TEXT = """
tier_path = "{tier}"
tier_limit = "1GiB"

[[snapshot]]
name = "kept"
every = "2s"
keep = 1
"""


def kill_whole(run, manager):
    """Supervisor and worker."""
    worker = run.daemon.wait_until(manager.worker, "there is one worker")
    kill_together(manager.process.pid, worker)
    manager.process.wait()
    run.daemon.wait_until(lambda: not machine.alive(worker), "the worker is gone")


def filed(run):
    """A program with pages in the file tier."""
    program = run.start("hold", "48", "load", budget="10MiB")
    program.gate("running")

    def reads():
        stats = program.stats()
        return stats["file_bytes"] > 1 << 20 and stats["file_faults_total"] > 100
    run.daemon.wait_until(reads, "pages went to the file and came back", 60)
    return program


def still_filed(run, program):
    before = program.stats()["file_faults_total"]
    run.daemon.wait_until(lambda: program.stats()["file_faults_total"] > before + 100,
                          "the next daemon reads the file of the one before", 60)
    program.answer()
    program.finish()


@case("takeover-kinds", native=False, own_daemon=True, seconds=150, takes=15)
def kinds(run):
    tier = os.path.join(run.directory, "tier")
    os.mkdir(tier)
    with managed(run, TEXT.format(tier=tier)) as manager:
        manager.start()
        manager.hear("READY=1")
        kept = Moment(run, "plain", 16, "12MiB", name="kept")
        kept.pinned = set()
        # Of several processes, so that each clone has children.
        origin = Moment(run, "processes", 16, "40MiB", name="origin")
        snapshot = origin.take()
        two = clones.of_moment(origin, snapshot, 2, "--name", "clone")
        clones.assert_moment(origin, snapshot, two)
        programs = [kept, origin, *two]
        program = filed(run)
        processes = {one.name: len(one.pids()) for one in programs}
        if min(processes[one.name] for one in two) < 2:
            raise Failure(f"no clone has children: {processes}")
        first = next_one(kept)
        kill_whole(run, manager)
        waits(program)
        manager.start()
        manager.hear("READY=1", "STATUS=Manages the programs of 5 tenants.")
        goes_on(run, [program])
        for one in programs:
            one.goes_on()
            one.check()
            if len(one.pids()) != processes[one.name]:
                raise Failure(f"{one.name} has {len(one.pids())} processes, and had "
                              f"{processes[one.name]}")
        run.note("takeover-clones")
        still_filed(run, program)
        run.note("takeover-file-tier")
        # The schedule goes on, and what it takes is whole.
        next_one(kept, first)
        kept.roll(kept_by_hand(run, kept)["id"])
        run.note("takeover-schedule")
        # And what was a snapshot before still is.
        third = clones.of_moment(origin, snapshot, 1, "--name", "late")
        clones.assert_moment(origin, snapshot, [*two, *third])
        for one in [*programs, *third]:
            one.assert_clean()
            one.kill()
    run.tests = 3
