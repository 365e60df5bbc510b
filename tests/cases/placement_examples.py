"""The examples of docs/placement.md, built and run as it says, under Strata and
without; the Python module; and whose memory it is that a caller may name."""

import os
import shutil
import socket
import subprocess
import sys

import machine
from moment import Snapshots, need_criu
from snapshot_programs import python_with_numpy
from program import copy_program
from strata import Failure, Skip, configured
from suite import ROOT, case
from users import NOBODY, publish

EXAMPLES = os.path.join(ROOT, "examples", "placement")


def both(run, command, managed, alone, budget="48MiB"):
    """Runs it under Strata and without: what it must say each time, in order."""
    environment = {"PYTHONPATH": os.path.join(ROOT, "python")}
    program = run.start(*command, budget=budget, env=environment)
    program.end_well()
    said = machine.read(program.log_path).splitlines()
    if len(said) != len(managed) or not all(w in s for w, s in zip(managed, said)):
        raise Failure(f"under Strata it says {said}, not {managed}")
    if int(said[0].split()[0]) == 0:
        raise Failure(f"nothing left DRAM: {said}")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("STRATA_", "LD_PRELOAD"))}
    done = subprocess.run(command, env=clean | environment, capture_output=True, text=True,
                          timeout=run.seconds_left(), check=False)
    said = done.stdout.splitlines()
    if done.returncode or done.stderr or said != alone:
        raise Failure(f"alone: status {done.returncode}, {said}, {done.stderr}")
    run.note(machine.read(program.log_path).splitlines()[0])


def compiled(run):
    program = os.path.join(run.directory, "archive")
    subprocess.run(
        [run.tool("c++"), "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-pedantic-errors",
         "-I", os.path.join(ROOT, "include"), os.path.join(EXAMPLES, "archive.cpp"),
         "-o", program, "-ldl"], check=True)
    return program


@case("placement-example-allocator", native=False)
def allocator(run):
    """A C++ allocator: a vector lives compressed, and reads well."""
    both(run, [compiled(run)], ["pages of the archive are out of DRAM", "all records are right"],
         ["no Strata here: everything is in DRAM", "all records are right"])


@case("placement-example-array", native=False)
def array(run):
    """A NumPy array lives compressed, and reads well."""
    python, with_numpy = python_with_numpy()
    if not with_numpy:
        raise Skip("NumPy is not installed")
    both(run, [python, "-B", os.path.join(EXAMPLES, "array.py")],
         ["of 4096 pages of the history are out of DRAM", "all rows are right"],
         ["no Strata here: everything is in DRAM", "all rows are right"])


@case("placement-python", native=False)
def python(run):
    """The module without NumPy: bytearrays, arrays, mappings, and its own memory."""
    script = os.path.join(ROOT, "tests", "programs", "placing.py")
    program = run.start(sys.executable, "-B", script, "managed", budget="64MiB")
    program.end_well()
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("STRATA_", "LD_PRELOAD"))}
    for preload in (None, run.binaries.library):
        if preload and os.path.exists("/run/strata/agent.sock"):
            continue
        done = subprocess.run([sys.executable, "-B", script, "alone"],
                              env=clean | ({"LD_PRELOAD": preload} if preload else {}),
                              capture_output=True, text=True, timeout=60, check=False)
        if done.returncode or done.stderr or done.stdout != "all right\n":
            raise Failure(f"alone ({preload}): {done.returncode}, {done.stdout} {done.stderr}")


@case("placement-rust", native=False)
def rust(run):
    """The crate's example; it is built with the workspace's tests."""
    program = os.path.join(run.binaries.directory, "examples", "placement")
    if not os.path.exists(program):
        raise Skip("it is not built (cargo build --release --examples)")
    both(run, [program], ["pages of the archive are out of DRAM", "index pinned: true"],
         ["0 of 4096 pages of the archive are out of DRAM",
          "index pinned: false, all records right"])


@case("placement-snapshot", native=False, own_daemon=True, seconds=120)
def snapshot(run):
    """A program that goes on saying things of its memory is snapshotted, rolled back
    and restored: no byte is wrong, and what comes back has its settings."""
    need_criu()
    journal = os.path.join(run.directory, "journal")
    script = os.path.join(ROOT, "tests", "programs", "placing.py")
    program = run.start(sys.executable, "-B", script, "working", journal, budget="40MiB")
    lives = Snapshots(run, program)

    def goes_on(what):
        before = len(machine.read(journal).splitlines()) if os.path.exists(journal) else 0

        def more():
            if said := machine.read(program.log_path).strip():
                raise Failure(f"{what}: {said.splitlines()[-1]}")
            return os.path.exists(journal) and \
                len(machine.read(journal).splitlines()) > before + 3
        run.daemon.wait_until(more, f"it works: {what}", 40)

    goes_on("the first life")
    pinned = run.daemon.stats(lives.name)["pinned_bytes"]
    if pinned < 8 << 20:
        raise Failure(f"{pinned} bytes are pinned")
    for turn in range(2):
        lives.command("snapshot", lives.name)
        goes_on(f"after snapshot {turn + 1}")
    lives.rollback("1")
    goes_on("rolled back")
    if (found := run.daemon.stats(lives.name)["pinned_bytes"]) != pinned:
        raise Failure(f"rolled back, {found} bytes of {pinned} are pinned")
    lives.kill()
    lives.restore(f"{lives.name}@2")
    goes_on("restored")
    if (found := run.daemon.stats(lives.name)["pinned_bytes"]) != pinned:
        raise Failure(f"restored, {found} bytes of {pinned} are pinned")


@case("placement-of-others", native=False, own_daemon=True)
def of_others(run):
    """A process names its own memory only: there is no way to say another's, a
    process of nobody is refused, and so is whoever has ended and left its
    connection to somebody else."""
    program = run.start("hold", "32", "load", budget="12MiB", name="victim")
    program.gate("running")
    request = {"request": "where", "start": 1 << 46, "pages": 1}
    place = {"request": "place", "wish": "pin", "ranges": [[4096, 8192]]}
    for asked in (request, place):
        answer = run.daemon.ask(asked)
        if answer.get("reply") != "error" or "belongs to no tenant" not in answer["message"]:
            raise Failure(f"a process of no tenant: {answer}")
        for extra in ("pid", "name", "space"):
            answer = run.daemon.ask(asked | {extra: program.pid})
            if answer.get("reply") != "error" or "not a request" not in answer["message"]:
                raise Failure(f"with {extra}: {answer}")
    # Whoever connects and ends, so that its number can become another's.
    with socket.socket(socket.AF_UNIX) as link:
        child = os.fork()
        if child == 0:
            link.connect(run.daemon.socket_path)
            os._exit(0)
        os.waitpid(child, 0)
        link.settimeout(10)
        link.sendall(b'{"request":"where","start":4096,"pages":1}\n')
        answer = link.recv(4096)
        if b"process that has ended" not in answer:
            raise Failure(f"for a process that has ended: {answer}")
    if (found := program.stats()["pinned_bytes"]) != 0:
        raise Failure(f"{found} bytes of the victim are pinned")
    program.answer()
    program.finish()


@case("placement-other-user", native=False, own_daemon=True)
def other_user(run):
    """A user whom the configuration names places their own memory, beside root's."""
    place, published = publish(run)
    copy_program(run.built("place"), place)
    log = os.path.join(run.log_directory, "stratad-users.log")
    mine, run.binaries, run.daemon.binaries = run.binaries, published, published
    try:
        os.chmod(run.directory, 0o755)
        with configured(run.daemon, f'uffd_users = ["{NOBODY}"]\n', place, log):
            program = run.start(os.path.join(place, "place"), "pins", budget="28MiB",
                                name="theirs", uid=NOBODY)
            for _ in range(4):
                program.gate("pinned", "moved", "unpinned", "unmapped")
                program.answer()
            program.finish()
    finally:
        run.binaries = run.daemon.binaries = mine
        shutil.rmtree(place)
