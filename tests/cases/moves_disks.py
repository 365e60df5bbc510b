"""Guests that move with their disks: what is copied while they run is of the moment in which
they stood still, on the side on which they run, and nobody's on the other."""

import contextlib
import copy
import glob
import os
import shutil
import subprocess

from guest_disks import begun, ended, writes_on
from guest_snapshots import reborn
from moment import Moment, need_criu
from moves_hosts import (another, at, dying, for_each_side, guest_over, killed_guest_in_steps, move,
                         on, runs_at)
from strata import Daemon, Failure
from suite import case

FORMS = (("a.raw", "raw"), ("b.qcow2", "qcow2"))


class Apart(Daemon):
    """A second host whose files at `place` are its own: those of another directory."""

    def __init__(self, binaries, log_path, place, own):
        self.place, self.own = place, own
        super().__init__(binaries, log_path)

    def begin(self):
        with open(self.log_path, "ab") as log:
            return subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", 'mount --bind "$1" "$2" && shift 2 && exec "$@"',
                 "sh", self.own, self.place, self.binaries.stratad, "--private", self.directory],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def by_road(run, daemon, name):
    """Moves to it go by what stands for ssh, with disks."""
    path = f"{os.path.join(run.directory, 'road')}:{os.environ['PATH']}"
    daemon.road, daemon.options = name, ["--copy-disks"]
    daemon.environment = lambda **more: Daemon.environment(daemon, **{"PATH": path, **more})


@contextlib.contextmanager
def apart(run):
    """A second host, which sees none of the guests' disks; `ssh` leads there and back."""
    place, own, road = (os.path.join(run.directory, name) for name in ("images", "own", "road"))
    for directory in (place, own, road):
        os.mkdir(directory)
    there = Apart(run.daemon.binaries, os.path.join(run.log_directory, "stratad-there.log"), place,
                  own)
    there.patience = run.daemon.patience
    try:
        lines = ["#!/bin/sh", 'while [ "$1" != -- ]; do shift; done', 'case "$2" in']
        for daemon, name in ((run.daemon, "here"), (there, "there")):
            by_road(run, daemon, name)
            lines.append(f"{name}) pid={daemon.pid} STRATA_SOCKET={daemon.socket_path} ;;")
        lines += ["esac", f"PATH={run.binaries.directory}:$PATH", "export STRATA_SOCKET PATH",
                  'exec nsenter --target "$pid" --mount sh -c "$3"']
        with open(os.path.join(road, "ssh"), "w", encoding="ascii") as file:
            file.write("\n".join(lines) + "\n")
        with open(os.path.join(road, "strata"), "w", encoding="ascii") as file:
            file.write(f'#!/bin/sh\nexec nsenter --target {there.pid} --mount '
                       f'{run.binaries.strata} "$@"\n')
        for name in ("ssh", "strata"):
            os.chmod(os.path.join(road, name), 0o755)
        there.binaries = copy.copy(there.binaries)
        there.binaries.strata = os.path.join(road, "strata")
        there.images = own
        run.daemon.images = place
        yield there
    finally:
        there.end()


def files(daemon):
    found = (os.path.basename(path) for path in glob.glob(os.path.join(daemon.images, "*")) +
             glob.glob(os.path.join(daemon.images, ".*")))
    return sorted(name for name in found if not name.endswith(".console"))


def has(run, daemon, *expected):
    try:
        run.daemon.wait_until(lambda: files(daemon) == sorted(expected), "its files are right")
    except Failure:
        raise Failure(f"at {daemon.road} there are {files(daemon)}, not {expected}") from None


def backing(run, path):
    tool = run.tool("qemu-img")
    said = subprocess.run([tool, "info", "-U", path], check=True, capture_output=True, text=True)
    return "backing file:" in said.stdout


def moved(run, line, here, there):
    """Moves with its disks, which stay here under other names."""
    return guest_over(run, line, here, there, lambda done:
                      "of disks; what its disks were is here still" in done.stdout)


def away(daemon, *names):
    """Removes what is not needed any more."""
    for name in names:
        os.remove(os.path.join(daemon.images, name))


@case("move-guest-disks", native=False, own_daemon=True, computes=True, seconds=400, takes=60)
def guest(run):
    """A guest that writes to a raw disk and an overlay moves there, back, and there again where
    what it was an overlay of is not; and so does a clone of it."""
    with apart(run) as there:
        here = run.daemon
        first = begun(run)
        line = first
        try:
            shutil.copy2(os.path.join(here.images, "base.qcow2"), there.images)
            os.chmod(first.raw, 0o640)
            line = moved(run, line, here, there)
            has(run, there, "a.raw", "b.qcow2", "base.qcow2")
            has(run, here, "a.raw.moved", "b.qcow2.moved", "base.qcow2")
            over = os.path.join(there.images, "b.qcow2")
            if not backing(run, over) or os.stat(f"{there.images}/a.raw").st_mode & 0o777 != 0o640:
                raise Failure("its images there are not as they were here")
            line = moved(run, line, there, here)
            has(run, here, "a.raw", "a.raw.moved", "b.qcow2", "b.qcow2.moved", "base.qcow2")
            away(there, "a.raw.moved", "b.qcow2.moved", "base.qcow2")
            away(here, "a.raw.moved", "b.qcow2.moved")
            line = moved(run, line, here, there)
            has(run, there, "a.raw", "b.qcow2")
            if backing(run, over):
                raise Failure("it is an overlay of what is not there")
            clone_moved(run, line, here, there)
            line = back_and_moved(run, line, here, there)
            here, there = there, here
            line.tell("end")
            writes = int(line.hear(r"^writes (\d+)\n")[1])
            line.hear(r"^end\n")
            there.wait_until(lambda: not runs_at(there, line.name), "it has ended")
            for name, form in FORMS:
                if writes_on(run, os.path.join(there.images, name), form) != writes:
                    raise Failure(f"{name} is not of write {writes}")
        finally:
            ended(run, first)
            for daemon in (here, there):
                for name in (first.name, "twin"):
                    daemon.strata("stop", name, check=False)


def clone_moved(run, line, here, there):
    """A clone's disks, which were made for it, go along, and go when it has ended."""
    taken = there.strata("snapshot", line.name).stdout.split()[-1]
    there.strata("clone", taken, "--name", "twin")
    twin = reborn(at(run, there), "twin")
    twin.rounds(2)
    done = move(there, "twin", here, options=[], check=False)
    if "--copy-disks" not in done.stderr:
        raise Failure(f"it is moved without its disks: {done.stderr!r}")
    before = twin.rounds(1)
    move(there, "twin", here)
    twin.line.close()
    twin = reborn(run, "twin")
    if before > (came := twin.rounds(1)):
        raise Failure(f"it went back from round {before} to {came}")
    twin.rounds(2)
    for path in (f"{name}.twin" for name, _ in FORMS):
        if path not in files(here):
            raise Failure(f"there is no {path} in {files(here)}")
    copies = [f"{name}.{taken}" for name, _ in FORMS]
    has(run, there, "a.raw", "b.qcow2", *copies)
    twin.end()
    has(run, here, "a.raw.moved", "b.qcow2.moved", "base.qcow2")
    there.strata("snapshot", "rm", taken)
    has(run, there, "a.raw", "b.qcow2")


def back_and_moved(run, line, here, there):
    """A guest that was rolled back, whose images its QEMU has opened by other names, moves."""
    away(here, "a.raw.moved", "b.qcow2.moved")
    taken = there.strata("snapshot", line.name).stdout.split()[-1]
    there.strata("rollback", line.name, taken)
    line.line.close()
    line = reborn(at(run, there), line.name)
    there.strata("snapshot", "rm", taken)
    line = moved(run, line, there, here)
    has(run, here, "a.raw", "b.qcow2", "base.qcow2")
    has(run, there, *(f"{name}.{end}" for name, _ in FORMS for end in ("before", "moved")))
    return line


# Each step that only moves with disks have, and where the guest runs when a worker dies in it.
STEPS = (
    ("here", "asked", "here"), ("there", "room", "here"), ("there", "made", "here"),
    ("there", "served", "here"), ("here", "ways", "here"), ("here", "mirroring", "here"),
    ("here", "mirrored", "here"), ("here", "alike", "here"), ("there", "unserved", "here"),
    ("here", "giving", "here"), ("here", "given", "here"), ("here", "aside", "here"),
    ("there", "told", "here"), ("there", "committed", "there"),
    ("there", "let-run", "there"), ("there", "ran", "there"), ("here", "answered", "there"),
)


def killed(run, side):
    """A worker here, one there, or the command dies in each step of a guest's move with its
    disks: it runs at one side, and the images of the other are put aside or gone. The command
    dies in each of them only in the soak: what it is asked for by then is the same as without."""
    with apart(run) as there:
        first = begun(run)
        shutil.copy2(os.path.join(run.daemon.images, "base.qcow2"), there.images)

        def also(runs, other, when):
            own = [name for name in files(runs) if ".moved" not in name]
            if own != ["a.raw", "b.qcow2", "base.qcow2"]:
                raise Failure(f"{when}: where it runs there are {files(runs)}")
            has(run, other, "base.qcow2", *(name for name in files(other) if ".moved" in name))
            for daemon in (runs, other):
                away(daemon, *(name for name in files(daemon) if ".moved" in name))
        try:
            killed_guest_in_steps(run, first, there, on(side, STEPS), also,
                                  None if run.soak else ("mirroring", "aside", "told"))
        finally:
            ended(run, first)
            there.strata("stop", first.name, check=False)


for_each_side("move-disks-killed", killed)


def given_and_ended(run, guest, there):
    """It was given up, and is ended before the other side was asked: its images are aside, and
    get their names back when it is known that it never ran there."""
    here = run.daemon
    dying(run, guest.name, here, there, "here", "aside", "command")
    has(run, here, "a.raw.moved", "b.qcow2.moved", "base.qcow2")
    here.strata("stop", guest.name, timeout_s=60)
    guest.process.wait()
    here.wait_until(lambda: not (here.stats(guest.name) or {"pids": []})["pids"], "it has ended")
    here.kill_whole()
    here.begin_again()
    has(run, here, "a.raw.moved", "b.qcow2.moved", "base.qcow2")
    done = move(here, guest.name, there, check=False, settle=True)
    if done.returncode != 1 or "it has ended here" not in done.stderr:
        raise Failure(f"settled: {done.returncode}, {done.stderr!r}")
    has(run, here, "a.raw", "b.qcow2", "base.qcow2")
    has(run, there)


@case("move-disks-refused", native=False, own_daemon=True, computes=True, seconds=200, takes=30)
def refused(run):
    """What cannot be copied, or has no place there, is refused by name: it runs on here, and
    nothing is left there."""
    with apart(run) as there:
        guest = begun(run)

        def fails(*words, daemon=there, **more):
            done = move(run.daemon, guest.name, daemon, check=False, **more)
            last = done.stderr.splitlines()[-1:]
            if done.returncode != 1 or not all(word in done.stderr for word in words):
                raise Failure(f"not refused with {words}: status {done.returncode}, {last}")
            guest.rounds(1)

        try:
            for name in ("a.raw", "b.qcow2"):
                path = os.path.join(there.images, name)
                with open(path, "w", encoding="ascii") as file:
                    file.write("theirs")
                fails(f"images/{name} already", "it runs on here")
                has(run, there, name)
                with open(path, encoding="ascii") as file:
                    if file.read() != "theirs":
                        raise Failure("a file of somebody else's was written to")
                os.remove(path)
            with open(os.path.join(there.images, "base.qcow2"), "w", encoding="ascii") as file:
                file.write("another")
            fails("base.qcow2", "is another file here")
            os.remove(os.path.join(there.images, "base.qcow2"))
            has(run, there)
            with another(run) as same:
                same.options = ["--copy-disks"]
                fails("already", "leave out --copy-disks", daemon=same)
            has(run, run.daemon, "a.raw", "b.qcow2", "base.qcow2")
            need_criu()
            program = Moment(run, "plain", 8, "32MiB", name="mover")
            done = move(run.daemon, "mover", there, check=False)
            if "it is no guest" not in done.stderr:
                raise Failure(f"a program has no disks: {done.stderr!r}")
            program.goes_on()
            program.kill()
            given_and_ended(run, guest, there)
        finally:
            ended(run, guest)
