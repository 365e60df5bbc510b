"""The whole daemon dies, and another one takes its tenants over: what was stored comes
back, whoever waits goes on, and nobody reads a wrong byte."""

import copy
import os
import signal
import subprocess
import time

import machine
from moment import Moment
from private_client import client
from program import copy_program
from strata import Daemon, Failure, kill_together
from suite import case
from tenants import held

SIZE, BUDGET = "48", "12MiB"


def loaded(run):
    """A program most of whose memory is away, with two threads that want it."""
    program = run.start("hold", SIZE, "load", budget=BUDGET)
    program.gate("running")
    run.daemon.wait_until(lambda: program.stats()["faults_total"] > 500, "faults are served")
    program.assert_pressed()
    return program


def waits(program):
    """Until a thread of it waits for a page that nobody brings."""
    program.case.daemon.wait_until(lambda: "userfault" in machine.autopsy(program.pid),
                                   f"a thread of {program.name} waits for a page")


def goes_on(run, programs):
    for program in programs:
        faults = program.stats()["faults_total"]
        run.daemon.wait_until(lambda: program.stats()["faults_total"] > faults + 100,
                              f"{program.name} is served by the next daemon", 30)


def alone(run):
    """One holder: those that were taken over from have ended."""
    run.daemon.wait_until(lambda: len(run.daemon.holders()) == 1, "there is one holder")


def said(run, words):
    """What the daemons have logged must hold `words`."""
    if words not in machine.read(run.daemon.log_path):
        raise Failure(f"the log does not say: {words}")


def kill_beginner(run, process):
    """Ends a daemon that has just begun, with its worker if it has one by now."""
    os.kill(process.pid, signal.SIGSTOP)
    mark = machine.read(os.path.join(run.daemon.directory, "holder"))
    workers = [pid for pid in machine.children(process.pid)
               if machine.read(f"/proc/{pid}/comm").strip() != "strata-holder"
               and f"holder {pid} " not in mark]
    for pid in [process.pid, *workers]:
        os.kill(pid, signal.SIGKILL)
    process.wait()


@case("takeover", native=False, own_daemon=True, seconds=180, takes=30)
def takeover(run):
    """Three rounds under the load of two tenants; in each, some that begin to take over
    are killed over it."""
    programs = [loaded(run) for _ in range(2)]
    # Further on each time: one process more and more of what a takeover does.
    delays = (0.001, 0.004, 0.008, 0.012, 0.016, 0.02, 0.03, 0.05)
    for number in range(run.times(3)):
        run.daemon.kill_whole()
        for program in programs:
            waits(program)
        for delay in delays:
            begun = run.daemon.begin()
            time.sleep(delay * (1 + number % 3 / 3))
            if begun.poll() is not None:
                raise Failure(f"a daemon that takes over ended with {begun.returncode}")
            kill_beginner(run, begun)
        run.daemon.begin_again()
        goes_on(run, programs)
        alone(run)
    for program in programs:
        said(run, f"{program.name}, user 0: came back: 1 process")
        program.answer()
        program.finish()
    run.daemon.wait_until(lambda: not run.daemon.tenants(), "strata ps lists none of them")
    # An orderly end is one after a takeover, too.
    run.daemon_is_dead = True
    os.kill(run.daemon.pid, signal.SIGTERM)
    run.daemon.wait_until(lambda: run.daemon.process.poll() is not None, "the daemon ends")
    if run.daemon.holders() or os.path.exists(os.path.join(run.daemon.directory, "holder")):
        raise Failure("a daemon that ended in good order left a holder, or its mark")


@case("takeover-refused", native=False, own_daemon=True)
def refused(run):
    """A second daemon, while the first lives; and while a worker lives alone, the second
    ends that and takes over."""
    program = loaded(run)
    second = subprocess.run([run.binaries.stratad, "--private", run.daemon.directory],
                            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30,
                            check=False)
    lines = second.stderr.splitlines()
    if second.returncode != 1 or len(lines) != 1 or "in use by another stratad" not in lines[0]:
        raise Failure(f"a second daemon: status {second.returncode}, {lines}")
    goes_on(run, [program])
    worker = run.daemon.worker()
    os.kill(run.daemon.pid, signal.SIGKILL)
    run.daemon.process.wait()
    goes_on(run, [program])
    if not machine.alive(worker):
        raise Failure("the worker ended with its supervisor: nothing was tested")
    run.daemon.process = run.daemon.begin()
    run.daemon.wait_until(lambda: not machine.alive(worker), "the worker without supervisor ends")
    run.daemon.wait_until(run.daemon.answers, "the next daemon answers")
    run.daemon.pid = run.daemon.ask({"request": "ping"})["pid"]
    goes_on(run, [program])
    alone(run)
    program.answer()
    program.finish()


@case("takeover-gone", native=False, own_daemon=True)
def gone(run):
    """A tenant ends while there is no daemon; and then all of them, and the holder with
    them."""
    programs = [loaded(run) for _ in range(2)]
    run.daemon.kill_whole()
    os.kill(programs[0].pid, signal.SIGKILL)
    programs[0].wait()
    waits(programs[1])
    run.daemon.begin_again()
    said(run, f"{programs[0].name}, user 0: is gone")
    said(run, f"{programs[1].name}, user 0: came back")
    run.daemon.wait_until(lambda: run.daemon.tenants() == [programs[1].name],
                          "strata ps lists who is left")
    goes_on(run, programs[1:])
    run.daemon_is_dead = True
    run.daemon.kill_whole()
    if not run.daemon.holders():
        raise Failure("there is no holder: nothing was tested")
    os.kill(programs[1].pid, signal.SIGKILL)
    programs[1].wait()
    run.daemon.keeper.stdin.close()
    run.daemon.wait_until(lambda: not run.daemon.holders(), "the holder ends with the last tenant")
    if os.path.exists(os.path.join(run.daemon.directory, "holder")):
        raise Failure("its mark is there still")


@case("takeover-holder-lost", native=False, own_daemon=True)
def holder_lost(run):
    """With the holder dead as well, programs wait, and the next daemon says so."""
    program = loaded(run)
    run.daemon_is_dead = True
    holder = run.daemon.holders()[0]
    worker = run.daemon.worker()
    every = (run.daemon.pid, worker, holder)
    kill_together(*every)
    run.daemon.process.wait()
    run.daemon.wait_until(lambda: not any(map(machine.alive, every)), "all three are gone")
    run.daemon.begin_again()
    said(run, "and must be killed")
    if not program.quiet(2):
        raise Failure("the program spoke or ended: " + machine.read(program.log_path)[-200:])
    waits(program)
    # The new daemon is a whole one, and ends with this program.
    held(run, "64", "24MiB")


@case("takeover-snapshots", native=False, own_daemon=True, seconds=120)
def snapshots(run):
    """A snapshot of before brings its moment back after."""
    program = Moment(run, "plain", 24, "10MiB")
    program.pressed()
    snapshot = program.take("--label", "before")
    program.goes_on()
    run.daemon.kill_whole()
    run.daemon.begin_again()
    program.goes_on()
    if snapshot not in program.list():
        raise Failure(f"strata snapshots does not list {snapshot}")
    program.crash(snapshot)
    program.goes_on()
    program.check()


@case("library-before", native=False, own_daemon=True, seconds=120)
def library_before(run):
    """A program keeps the library that it was started with. One that speaks the version of
    the protocol before is managed as any other: it forks, is snapshotted and brought back, and
    taken over by the next worker and the next daemon; strata stats says that it is older."""
    new = Moment(run, "quiet", 16, "16MiB")
    environment = {**os.environ, "STRATA_AGENT_PROTOCOL": "5"}
    program = Moment(run, "plain", 24, "10MiB", env=environment)
    program.pressed()
    program.order("fork")
    snapshot = program.take()
    program.roll(snapshot)
    worker = run.daemon.worker()
    os.kill(worker, signal.SIGKILL)
    run.daemon.wait_until(lambda: run.daemon.worker() not in (None, worker), "another worker")
    program.goes_on()
    run.daemon.kill_whole()
    run.daemon.begin_again()
    program.goes_on()
    program.order("fork")
    program.roll(snapshot)
    program.order("exec")
    program.goes_on()
    program.assert_clean()
    version = run.daemon.strata("--version").stdout.split()[-1]
    found = [run.daemon.stats(one.name)["libraries"] for one in (new, program)]
    if found != [[version], ["older"]]:
        raise Failure(f"their libraries are {found}")


@case("upgrade", native=False, own_daemon=True, seconds=120)
def upgrade(run):
    """The daemon becomes the stratad that is installed by then, under load; one that does
    not start is refused, and the old one goes on."""
    place = os.path.join(run.directory, "installed")
    os.mkdir(place)
    stratad = os.path.join(place, "stratad")
    copy_program(run.binaries.stratad, stratad)
    binaries = copy.copy(run.binaries)
    binaries.stratad = stratad
    first = run.daemon
    run.daemon = Daemon(binaries, os.path.join(run.log_directory, "upgraded.log"))
    try:
        program = loaded(run)
        for number in range(run.times(3)):
            os.rename(stratad, stratad + ".old")
            with open(stratad, "w") as script:
                script.write("#!/bin/sh\necho it lacks a library >&2\nexit 127\n")
            os.chmod(stratad, 0o755)
            refused = run.daemon.strata("upgrade", check=False)
            if refused.returncode != 1 or "it lacks a library" not in refused.stderr:
                raise Failure(f"status {refused.returncode}: {refused.stderr.strip()}")
            goes_on(run, [program])
            os.unlink(stratad)
            copy_program(run.binaries.stratad, stratad)
            worker = run.daemon.worker()
            said = run.daemon.strata("upgrade").stdout
            if "takes over" not in said:
                raise Failure(f"strata upgrade: {said.strip()}")
            run.daemon.wait_until(
                lambda: (now := run.daemon.worker()) and now != worker and run.daemon.answers(),
                "the upgraded stratad has a worker")
            if os.readlink(f"/proc/{run.daemon.pid}/exe") != stratad:
                raise Failure("the supervisor is the old one")
            goes_on(run, [program])
            alone(run)
        program.answer()
        program.finish()
        if not run.daemon.is_well():
            raise Failure("the daemon died")
    finally:
        run.daemon.end()
        run.daemon = first


@case("takeover-private", native=False)
def private(run):
    """Whoever uses `strata` next has a private daemon's programs taken over."""
    with client(run) as user:
        keeper = subprocess.Popen(
            [run.binaries.strata, "run", "--name", "first", "--dram", "64MiB", "--", "cat"],
            env=user.environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True)
        shared = run.daemon.socket_path
        directory = os.path.join(user.directory, f"strata-{os.getuid()}")
        try:
            run.daemon.socket_path = os.path.join(directory, "control.sock")
            run.daemon.wait_until(lambda: (s := run.daemon.stats("first")) and s["pids"],
                                  "the first program is managed")
            program = loaded(run)
            supervisor = run.daemon.ask({"request": "ping"})["pid"]
            worker = [pid for pid in machine.children(supervisor)
                      if machine.read(f"/proc/{pid}/comm").strip() != "strata-holder"]
            kill_together(supervisor, *worker)
            run.daemon.wait_until(
                lambda: not any(map(machine.alive, (supervisor, *worker))), "both are dead")
            waits(program)
            # Named by the environment, a daemon is not started.
            named = run.daemon.wait_until(
                lambda: (d := run.daemon.strata("ps", check=False)) and "died" in d.stderr and d,
                "strata ps says that the daemon died")
            if named.returncode != 1 or "takes its programs over" not in named.stderr:
                raise Failure(f"strata ps: status {named.returncode}, {named.stderr.strip()}")
            listed = user.strata("ps")
            if listed.returncode or "first" not in listed.stdout or \
                    program.name not in listed.stdout or "another stratad" not in listed.stderr:
                raise Failure(f"strata ps: {listed.stdout} {listed.stderr}")
            goes_on(run, [program])
            program.answer()
            program.finish()
        finally:
            run.daemon.socket_path = shared
            keeper.stdin.close()
            keeper.wait()
