"""Process numbers of what is to come back which somebody else has by then: before it is
tried, between the end of the old processes and the new ones, and for good."""

import glob
import os

import machine
from moment import Moment
from numbers_taken import Taker, taken
from snapshot_crash import refused
from strata import Failure
from suite import case

# In the directory of a restore, from before CRIU is started until after it has ended.
SOCKET = "lazy-pages.socket"


@case("snapshot-pid-taken", native=False, own_daemon=True)
def pid_taken(run):
    """Its process number belongs to somebody else by now: a refusal that says
    so, and when the number is free the restore works."""
    program = Moment(run, "plain", 24, "10MiB")
    program.pressed()
    snapshot = program.take()
    program.report()
    pid = program.pids()[0]
    program.kill()
    with taken(pid):
        refused(program.restore(snapshot, check=False), str(pid))
        if not machine.alive(pid):
            raise Failure("the restore ended somebody else's process")
    if program.pids():
        raise Failure("a refused restore left processes")
    program.brought_back(snapshot, lambda: program.restore(snapshot))


def thread_of(pid):
    """The number of a thread that is not its first."""
    return max(int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid)


@case("snapshot-thread-taken", native=False, own_daemon=True)
def thread_taken(run):
    """Between the end of a program and its return somebody else gets the number of a
    thread of it. Whoever lets go of it soon is waited for, before CRIU is started and after;
    if not, what it was and what it was to be are both kept, and can be had later."""
    program = Moment(run, "threads", 24, "10MiB")
    program.pressed()
    snapshot = program.take()
    places = os.path.join(os.path.dirname(run.daemon.socket_path), "**", SOCKET)

    def restoring():
        return glob.glob(places, recursive=True)

    def tried(what, seconds, may=lambda: True):
        """Of a thread that has its number again before anybody else had it nothing is seen: on
        a busy machine that is so now and then."""
        for _ in range(5):
            program.report()
            number = thread_of(program.pids()[0])
            with Taker(number, seconds, may) as taker:
                what(taker)
                if taker.had:
                    return
        raise Failure(f"nobody else got number {number}: nothing was tried")

    def waited_for(_):
        program.brought_back(snapshot, lambda: program.rollback(snapshot))

    def kept(taker):
        done = program.rollback(snapshot, check=False)
        if not taker.had:
            if done.returncode != 0:
                raise Failure(f"nobody had number {taker.number}: {done.stderr!r}")
            return
        refused(done, str(taker.number), "both are kept")
        if not machine.alive(taker.number):
            raise Failure("somebody else's process was ended")
    tried(waited_for, 0.7)
    tried(waited_for, 0.7, restoring)
    tried(kept, 600)
    if len(program.list()) != 2:
        raise Failure(f"what it was is not kept: {sorted(program.list())}")
    program.brought_back(snapshot, lambda: program.restore(snapshot))
    program.assert_clean()
