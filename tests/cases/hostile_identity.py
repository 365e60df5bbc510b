"""A user's process that passes another process, or another program, off as its own to a
daemon of root's. It may get nothing that is not its own, and nobody of root's may be
signalled or moved. The user is 65534, nobody."""

import contextlib
import os
import shutil
import stat
import time

import machine
from numbers_taken import taken
from program import copy_program
from strata import Failure, configured
from suite import case
from users import NOBODY, publish


@contextlib.contextmanager
def system_daemon(run):
    """A daemon of root's that nobody may use; gives the directory of its programs."""
    place, published = publish(run)
    copy_program(run.built("hostile_identity"), place)
    mine, run.binaries = run.binaries, published
    run.daemon.binaries = published
    os.chmod(run.directory, 0o755)
    log = os.path.join(run.log_directory, "stratad-identity.log")
    try:
        with configured(run.daemon, f'uffd_users = ["{NOBODY}"]\n', place, log):
            yield place
    finally:
        run.binaries = run.daemon.binaries = mine
        shutil.rmtree(place)


def attack(run, place, *arguments):
    return run.start(os.path.join(place, "hostile_identity"), *arguments, budget="32MiB",
                     name="theirs", uid=NOBODY)


def end(program):
    program.answer()
    program.finish(pressed=False)


def register(mode):
    def body(run):
        with system_daemon(run) as place:
            prey = os.path.join(place, "prey")
            copy_program(os.path.join(place, "hostile_identity"), prey)
            os.chmod(prey, 0o755 | stat.S_ISUID)
            secret = os.path.join(place, "secret")
            with open(os.open(secret, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
                file.write(os.urandom(4096))
            program = attack(run, place, mode, prey, secret)
            if program.gate() == "secret":
                raise Failure("a user has read what only root may read")
            end(program)
    case(f"identity-read-{mode}", native=False, own_daemon=True)(body)


for mode in ("inherited", "sibling"):
    register(mode)


@case("identity-dead", native=False, own_daemon=True)
def identity_dead(run):
    """Who has ended says no hello: its number is a process of root's by now, which lives on
    when the tenant is stopped."""
    with system_daemon(run) as place:
        program = attack(run, place, "dead")
        with taken(int(program.gate())) as number:
            program.answer()
            said = program.gate()
            run.daemon.strata("stop", "theirs", check=False)
            time.sleep(0.5)
            if not machine.alive(number):
                raise Failure("a process of root's was ended")
            if said != "refused":
                raise Failure("a dead process's hello was answered")
        # If the tenant still knew it, it has been stopped: the program that attached is the
        # one before this, until its descriptors are seen to be gone.
        program.process.terminate()
        program.wait()


@case("identity-dead-run", native=False, own_daemon=True)
def identity_dead_run(run):
    """Who has ended asks for no tenant: the process of root's that has its number is moved to
    no group."""
    with system_daemon(run) as place:
        program = attack(run, place, "dead-run")
        with taken(int(program.gate())) as number:
            path = f"/proc/{number}/cgroup"
            with open(path) as file:
                before = file.read()
            program.answer()
            said = program.gate()
            with open(path) as file:
                if file.read() != before:
                    raise Failure("a process of root's was moved to a user's group")
            if said != "refused":
                raise Failure("a dead process's request was carried out")
        end(program)


@case("identity-many", native=False, own_daemon=True, takes=10)
def identity_many(run):
    """One address space is one space, however often it says hello."""
    with system_daemon(run) as place:
        program = attack(run, place, "many")
        if (ready := program.gate()) != "1":
            raise Failure(f"one process has got {ready} spaces")
        end(program)


@case("identity-forger", native=False, own_daemon=True)
def identity_forger(run):
    """A file that answers as a userfaultfd, and others without a name, are no userfaultfds."""
    forger = run.start("forger", os.path.join(run.directory, "forged"), budget="32MiB")
    if (said := forger.gate()) != "refused":
        run.note("no FUSE here: only other descriptors were offered")
        if said != "refused, no fuse":
            raise Failure(f"it says {said!r}")
    end(forger)
