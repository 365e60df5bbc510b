"""Programs and guests that run at the other host before all of their memory is there: no page is
ever an old one or zero, whoever dies and whatever is cut in between."""

import json
import os
import re
import signal
import time

from guest_disks import begun, ended, files
from guest_snapshots import reborn, worker_gone
from moment import Moment, need_criu
from moves_hosts import (another, at, dying, guest_over, killed_guest_in_steps, killed_in_steps,
                         move, runs_at, went_over)
from strata import Failure
from suite import case

SAID = (r"runs at .*; it stood still for [0-9.]+ ms \(of it .* until it ran\), .* were sent for .* "
        r"of memory, .* of that after it ran there; its last page was there [0-9.]+ s after that")


def both(run, there):
    """Moves to either go at once."""
    run.daemon.options = there.options = ["--at-once"]
    return run.daemon


def over(run, line, here, there):
    """Moves; nothing of it is left here, and no snapshot on either side."""
    line = guest_over(run, line, here, there, is_said)
    nothing_left(line.name, here, there)
    return line


def is_said(done):
    return re.search(SAID, done.stdout) and "it depends on both hosts" in done.stderr


def nothing_left(name, here, there):
    here.wait_until(lambda: name not in here.tenants(), "nothing of it is left here")
    for daemon in (here, there):
        if (left := daemon.strata("snapshots", "--json").stdout.strip()) != "[]":
            raise Failure(f"snapshots are left: {left}")


def program_over(run, program, here, there):
    """The same with a program."""
    before = program.count
    program.report()
    with program.reaper_running():
        done = move(here, program.name, there)
        run.note(done.stdout.strip())
        if not is_said(done):
            raise Failure(f"it says {done.stdout!r} and {done.stderr!r}")
        went_over(run, program, here, there)
        nothing_left(program.name, here, there)
    if program.count < before:
        raise Failure(f"from round {before} it went back to {program.count}")


@case("move-program-at-once", native=False, own_daemon=True, seconds=120, takes=15)
def program(run):
    """A program that writes all the time, and one of several processes, move there, and back
    with a cut in between, in which whoever had what is lent captures it anew from what stands
    still; what has moved is snapshotted, and moves as always."""
    need_criu()
    with another(run) as there:
        here = both(run, there)
        for mode in ("plain", "processes"):
            program = Moment(run, mode, 24, "12MiB")
            program.pressed()
            program_over(run, program, here, there)
            program.pressed()
            with program.reaper_running():
                cut(run, program.name, there, here, ("stats",))
                captured_anew(run, program.name, there)
            program_settled(run, program, there, here)
            program.pressed()
            taken = program.take()
            program.roll(taken)
            program.remove(taken)
            with program.reaper_running():
                move(here, program.name, there, options=[])
            went_over(run, program, here, there)
            program.assert_clean()
            program.kill()


def record(daemon, name):
    return os.path.join(daemon.directory, "snapshots", "moves", f"out-{name}.json")


def captured_anew(run, name, daemon):
    """The worker dies that had captured what is lent, and the next one finds nothing of that on
    record: it captures it again."""
    daemon.wait_until(lambda: captured(daemon, name), "what is lent is captured")
    worker = daemon.worker()
    os.kill(worker, signal.SIGSTOP)
    with open(record(daemon, name), encoding="ascii") as file:
        lent = json.load(file)
    for process in lent["lent"]["processes"]:
        process["whole"] = None
    with open(record(daemon, name), "w", encoding="ascii") as file:
        json.dump(lent, file)
    os.kill(worker, signal.SIGKILL)
    worker_gone(at(run, daemon), worker)


def program_settled(run, program, here, there):
    with program.reaper_running():
        done = move(here, program.name, there, settle=True)
        if "runs at" not in done.stdout:
            raise Failure(f"settled: {done.stdout!r}")
        went_over(run, program, here, there)
        nothing_left(program.name, here, there)


@case("move-guest-at-once", native=False, own_daemon=True, computes=True, seconds=200, takes=40)
def guest(run):
    """A guest that rewrites a part of its memory and of two disks, which both hosts see, moves
    there, and back with a cut in between; what has moved is snapshotted, and moves as always."""
    with another(run) as there:
        here = both(run, there)
        first = line = begun(run)
        try:
            line = over(run, line, here, there)
            cut(run, line.name, there, here)
            line = settled(run, line, there, here)
            taken = here.strata("snapshot", line.name).stdout.split()[-1]
            line.rounds(1)
            here.strata("snapshot", "rm", taken)
            move(here, line.name, there, options=[])
            line.line.close()
            line = reborn(at(run, there), line.name)
            line.rounds(2)
            if (left := files(first)) != ["a.raw", "b.qcow2", "base.qcow2"]:
                raise Failure(f"beside its disks there are {left}")
            line.end()
        finally:
            ended(run, first)
            there.strata("stop", first.name, check=False)


# Each step, on which side it is, and where the guest runs when a worker has died in it.
STEPS = (
    ("here", "still", "here"), ("here", "all-sent", "here"), ("here", "ready", "here"),
    ("here", "giving", "here"), ("here", "given", "here"), ("here", "answered", "there"),
    ("here", "whole", "there"), ("there", "stands", "here"), ("there", "told", "here"),
    ("there", "committed", "there"), ("there", "let-run", "there"), ("there", "ran", "there"),
    ("there", "owing", "there"), ("there", "whole", "there"),
)


@case("move-at-once-killed", native=False, own_daemon=True, computes=True, soak=True, seconds=600)
def killed(run):
    """A worker here, one there, or the command dies in each step: it runs at one side, and is
    whole there."""
    with another(run) as there:
        both(run, there)
        first = begun(run)

        def also(runs, other, when):
            for daemon in (runs, other):
                if "--settle" in (said := daemon.strata("ps").stdout):
                    raise Failure(f"{when}: strata ps says {said!r}")
            if (left := files(first)) != ["a.raw", "b.qcow2", "base.qcow2"]:
                raise Failure(f"{when}: beside its disks there are {left}")
        try:
            killed_guest_in_steps(run, first, there, STEPS, also)
        finally:
            ended(run, first)
            there.strata("stop", first.name, check=False)


def cut(run, name, here, there, stats=("vm", "stats")):
    """The command dies when it is about to run there, and but for what that needed nothing of
    what was lent has come: both sides say so, and do nothing else with it."""
    dying(run, name, here, there, "there", "committed", "command")
    here.wait_until(lambda: runs_at(there, name), "it runs there")
    here.wait_until(lambda: "which may not have" in here.strata("ps").stdout, "it is lent")
    for daemon, words in ((here, "were lent from here"), (there, "of its memory, which")):
        for command in (("ps",), (*stats, name)):
            daemon.wait_until(lambda daemon=daemon, command=command, words=words:
                              words in daemon.strata(*command).stdout,
                              f"{' '.join(command)} says {words!r}")
    refused = ((here, "stop"), (here, "snapshot"), (there, "snapshot"))
    for daemon, command in refused:
        done = daemon.strata(command, name, check=False)
        if done.returncode != 1:
            raise Failure(f"{command}: {done.returncode}, {done.stdout!r}, {done.stderr!r}")
    done = there.strata("move", name, f"unix:{here.socket_path}", check=False)
    if done.returncode != 1 or "waits for" not in done.stderr:
        raise Failure(f"it is moved on: {done.returncode}, {done.stderr!r}")


def settled(run, line, here, there):
    """It gets the rest, and has missed nothing."""
    done = move(here, line.name, there, settle=True)
    if "runs at" not in done.stdout:
        raise Failure(f"settled: {done.stdout!r}")
    line.line.close()
    line = reborn(at(run, there), line.name)
    line.rounds(2)
    here.wait_until(lambda: not runs_at(here, line.name), "it has ended here")
    return line


@case("move-program-at-once-killed", native=False, own_daemon=True, soak=True, seconds=600)
def program_killed(run):
    """A worker here, one there, or the command dies in each step of a program's move at once."""
    need_criu()
    with another(run) as there:
        both(run, there)
        program = Moment(run, "processes", 16, "10MiB")
        program.pressed()

        def goes_on(daemon, other, when):
            program.daemon = daemon
            program.note_pids()
            try:
                program.goes_on()
                program.check()
                nothing_left(program.name, other, daemon)
            except Failure as failure:
                raise Failure(f"{when}: {failure}") from None
        with program.reaper_running():
            # Programs that a worker was about to let run end with it.
            steps = [step for step in STEPS if step[1] != "let-run"]
            killed_in_steps(run, program.name, run.daemon, there, goes_on, steps)
        program.assert_clean()
        program.kill()


@case("move-at-once-cut", native=False, own_daemon=True, computes=True, soak=True, seconds=400)
def was_cut(run):
    """The way is cut while it runs there: it waits for what it needs, for as long as that takes,
    also when a worker or a whole daemon dies meanwhile, or its QEMU here once all of it is
    captured; and gets it when the move is settled."""
    with another(run) as there:
        here = both(run, there)
        first = line = begun(run)
        try:
            cut(run, line.name, here, there)
            time.sleep(60)
            for daemon in (here, there):
                worker = daemon.worker()
                os.kill(worker, signal.SIGKILL)
                worker_gone(at(run, daemon), worker)
            line = settled(run, line, here, there)
            here, there = there, here
            cut(run, line.name, here, there)
            there.kill_whole()
            there.begin_again()
            (pid,) = here.stats(line.name)["pids"]
            here.wait_until(lambda: captured(here, line.name), "what is lent is captured")
            os.kill(pid, signal.SIGKILL)
            here.wait_until(lambda: not (here.stats(line.name) or {"pids": []})["pids"],
                            "its QEMU has ended here")
            worker = here.worker()
            os.kill(worker, signal.SIGKILL)
            worker_gone(at(run, here), worker)
            line = settled(run, line, here, there)
            line.end()
        finally:
            ended(run, first)
            there.strata("stop", first.name, check=False)


def captured(daemon, name):
    with open(record(daemon, name), encoding="ascii") as file:
        lent = json.load(file)["lent"]
    return all(one["whole"] is not None for one in lent.get("processes") or [lent])
