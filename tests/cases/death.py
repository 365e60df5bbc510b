"""The daemon dies: its worker in the middle of load, again and again; then the
supervisor with it. Nobody ever reads a wrong byte."""

import os
import signal

import machine
from strata import Failure
from suite import case
from tenants import held


def kill_worker(run, programs, restarts):
    """Kills the worker, waits for the next one, and for faults served by it."""
    daemon = run.daemon
    worker = daemon.wait_until(daemon.worker, "there is one worker")
    faults = {}
    for program in programs:
        faults[program] = program.stats()["faults_total"]
    os.kill(worker, signal.SIGKILL)
    daemon.wait_until(lambda: daemon.worker() not in (None, worker), "a new worker is there")
    for program in programs:
        def goes_on():
            stats = daemon.stats(program.name)
            return stats and stats["faults_total"] > faults[program] \
                and stats["worker_restarts_total"] >= restarts
        daemon.wait_until(goes_on, f"{program.name} is served by worker number {restarts + 1}", 30)


@case("worker-killed", native=False, own_daemon=True, seconds=120)
def worker_killed(run):
    """Ten times (hundreds in a soak) under the load of two tenants."""
    before = run.daemon.footprint()
    programs = [run.start("hold", "48", "load", budget="20MiB") for _ in range(2)]
    for program in programs:
        program.gate("running")
        run.daemon.wait_until(lambda: program.stats()["faults_total"] > 500, "faults are served")
    for number in range(run.times(10)):
        kill_worker(run, programs, number + 1)
    for program in programs:
        program.answer()
        program.finish()
    run.daemon.wait_until(lambda: not run.daemon.tenants(), "strata ps lists none of them")
    run.daemon.settled(before, "the daemon gives back what the tenants cost")


def killed_under(run, which):
    """How many workers died under a program that ended well."""
    program = run.start(*which, budget="36MiB" if which[0] == "fork" else "24MiB")
    run.daemon.wait_until(
        lambda: (s := run.daemon.stats(program.name)) and s["evictions_total"] > 0
        or not program.quiet(0), "pages are evicted")
    killed = 0
    while killed < run.times(4) and program.quiet(0.05):
        worker = run.daemon.worker()
        if worker:
            os.kill(worker, signal.SIGKILL)
            killed += 1
            run.daemon.wait_until(
                lambda: run.daemon.worker() not in (None, worker), "a new worker is there")
    program.finish()
    return killed


@case("worker-killed-at-fork", native=False, own_daemon=True, seconds=120, takes=30)
def worker_killed_at_fork(run):
    """While programs fork, map and unmap: events must not be lost with it."""
    before = run.daemon.footprint()
    for which in (("fork", "generations"), ("fork", "wide"), ("mapping", "dont-need"),
                  ("mapping", "remap-move"), ("race", "slots"), ("threads", "come-and-go")):
        # On a busy machine one may end before anybody looks.
        if not any(killed_under(run, which) for _ in range(5)):
            raise Failure(f"{' '.join(which)} ended five times before anything was killed")
    run.daemon.wait_until(lambda: not run.daemon.tenants(), "strata ps lists none of them")
    run.daemon.settled(before, "the daemon gives back what the tenants cost")


@case("new-tenants-after-kill", native=False, own_daemon=True)
def new_tenants_after_kill(run):
    """Who calls while there is no worker waits for the next one."""
    for _ in range(run.times(3)):
        worker = run.daemon.wait_until(run.daemon.worker, "there is a worker")
        os.kill(worker, signal.SIGKILL)
        # A call that the dying worker still took would rightly be refused.
        run.daemon.wait_until(lambda: not machine.alive(worker), "it is dead")
        held(run, "64", "24MiB")


def waits(run, pid):
    """Until a thread of it waits for a page that nobody brings: else nothing was tested."""
    run.daemon.wait_until(lambda: "userfault" in machine.autopsy(pid), "it waits for a page")


def kill_all_of_it(run):
    """Supervisor and worker."""
    run.daemon_is_dead = True
    run.daemon.kill_whole()


@case("daemon-killed", native=False, own_daemon=True)
def daemon_killed(run):
    """Supervisor and worker at once: tenants wait, they do not read zeroes."""
    program = run.start("hold", "48", "load", budget="20MiB")
    program.gate("running")
    run.daemon.wait_until(lambda: program.stats()["faults_total"] > 500, "faults are served")
    program.assert_pressed()
    kill_all_of_it(run)
    # A wrong read would end the program with a word at the gate.
    if not program.quiet(4):
        raise Failure("after the daemon's death the program spoke or ended: " +
                      machine.read(program.log_path)[-200:])
    waits(run, program.pid)
    os.kill(program.pid, signal.SIGKILL)
    if program.wait() != -signal.SIGKILL:
        raise Failure("a waiting program could not be killed")


@case("daemon-killed-with-children", native=False, own_daemon=True)
def daemon_killed_with_children(run):
    """The same for a forked child: fork returned only after it was safe."""
    program = run.start("fork", "background-save", budget="32MiB")
    run.daemon.wait_until(
        lambda: (s := run.daemon.stats(program.name)) and len(s["pids"]) == 2,
        "parent and child belong to the tenant")
    pids = program.stats()["pids"]
    kill_all_of_it(run)
    if not program.quiet(4):
        raise Failure("after the daemon's death the program spoke or ended: " +
                      machine.read(program.log_path)[-200:])
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@case("raw-clone-orphan", native=False, own_daemon=True)
def raw_clone_orphan(run):
    """A child without an agent: nothing of its own holds its userfaultfd. It waits
    all the same, and the next daemon serves it."""
    program = run.start("fork", "raw-clone-orphan", budget="20MiB")
    program.gate("running")
    child = program.peer
    program.pids.add(child)
    if len(run.daemon.holders()) != 1:
        raise Failure(f"the daemon has {len(run.daemon.holders())} holders")
    link = program.link
    program.link = None
    kill_all_of_it(run)
    link.sendall(b"go\n")
    link.close()
    if not program.quiet(2):
        raise Failure("after the daemon's death the child spoke or ended: " +
                      machine.read(program.log_path)[-200:])
    waits(run, child)
    if not run.daemon.holders():
        raise Failure("nobody holds the child's memory")
    run.daemon.begin_again()
    run.daemon_is_dead = False
    program.gate("unharmed")
    program.answer()


@case("daemon-ends-whole", native=False, own_daemon=True)
def daemon_ends_whole(run):
    """A daemon that ends in good order leaves no holder, and one that was killed is
    replaced."""
    def holders():
        return [pid for pid in machine.children(run.daemon.pid)
                if machine.read(f"/proc/{pid}/comm").strip() == "strata-holder"]
    first = run.daemon.wait_until(holders, "there is a holder")[0]
    os.kill(first, signal.SIGKILL)
    second = run.daemon.wait_until(
        lambda: [pid for pid in holders() if pid != first], "there is another holder")[0]
    run.daemon_is_dead = True
    os.kill(run.daemon.pid, signal.SIGTERM)
    run.daemon.wait_until(lambda: run.daemon.process.poll() is not None, "the daemon ends")
    if os.path.exists(f"/proc/{second}"):
        raise Failure("its holder is still there, or nobody has collected it")
