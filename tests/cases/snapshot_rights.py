"""Whose snapshots are whose, how they may be called, what is refused."""

import os
import shutil
import stat
import subprocess

from moment import Moment, need_criu
from strata import Failure, configured
from suite import case
from users import NOBODY, as_nobody, publish, refused as refused_to_nobody


@case("snapshot-names", native=False, own_daemon=True)
def names(run):
    """Labels and identities: what is taken, what is refused, and that refusing
    changes nothing."""
    program = Moment(run, "plain", 32, "256MiB")
    name = program.name
    first = program.take("--label", "before-migration")
    second = program.take()
    if (first, second) != (f"{name}@1", f"{name}@2"):
        raise Failure(f"they are called {first} and {second}")
    program.remove(second)
    third = program.take("--label", "v1.2_x")
    if third != f"{name}@3":
        raise Failure(f"a number was given twice: {third}")
    before = program.list()
    pids = program.pids()
    for arguments, status, word in (
        (("snapshot", name, "--label", "before-migration"), 1, "before-migration"),
        (("snapshot", name, "--label", "7"), 2, "label"),
        (("snapshot", name, "--label", "a/b"), 2, "label"),
        (("snapshot", name, "--label", ""), 2, "label"),
        (("snapshot", "../x"), 2, "name"),
        (("snapshot", "nobody-is-called-so"), 1, "nobody-is-called-so"),
        (("rollback", name, "2"), 1, f"{name}@2"),
        (("rollback", name, "no-such-label"), 1, "no-such-label"),
        (("rollback", name, "keeper@1"), 1, "keeper@1"),
        (("rollback", "keeper", first), 1, first),
        (("restore", f"{name}@99"), 1, f"{name}@99"),
        (("restore", name), 2, "NAME@"),
        (("restore", first, "--name", "../x"), 2, "name"),
        (("restore", first, "--name", "keeper"), 1, "keeper"),
        (("snapshot", "rm", f"{name}@0"), 2, "1, 2, 3"),
        (("snapshot", "rm", f"{name}@../../x"), 2, "label"),
        (("snapshot", "rm", second), 1, second),
    ):
        done = program.daemon.strata(*arguments, check=False)
        lines = done.stderr.strip().splitlines()
        if done.returncode != status or word not in done.stderr or (status == 1 and len(lines) != 1):
            raise Failure(f"strata {' '.join(arguments)}: status {done.returncode} instead of "
                          f"{status}, {lines}")
        if done.stdout:
            raise Failure(f"strata {' '.join(arguments)} was refused and says {done.stdout}")
    if program.list().keys() != before.keys() or program.pids() != pids:
        raise Failure("a refusal changed what is listed or runs")
    program.goes_on()
    # All the ways to name one.
    for way in ("before-migration", f"{name}@before-migration", "1", first):
        program.report()
        program.brought_back(first, lambda: program.rollback(way))
    program.kill()
    program.restore(f"{name}@v1.2_x")
    program.goes_on()
    program.check()
    program.remove(f"{name}@before-migration", third)
    if program.list():
        raise Failure("removed ones are listed")


def assert_private(directory):
    """Nothing below it is anybody else's to read; how many files there are."""
    files = 0
    for place, directories, names in os.walk(directory):
        for name in [".", *directories, *names]:
            path = os.path.join(place, name)
            status = os.lstat(path)
            if stat.S_ISDIR(status.st_mode):
                if stat.S_IMODE(status.st_mode) != 0o700:
                    raise Failure(f"{path} has mode {stat.S_IMODE(status.st_mode):o}")
            elif stat.S_ISREG(status.st_mode):
                files += 1
                if stat.S_IMODE(status.st_mode) & 0o177:
                    raise Failure(f"{path} has mode {stat.S_IMODE(status.st_mode):o}")
            if status.st_uid != os.geteuid():
                raise Failure(f"{path} belongs to user {status.st_uid}")
    return files


@case("snapshot-rights", native=False, own_daemon=True)
def rights(run):
    """Files are their owner's only; another user neither sees nor touches."""
    need_criu()
    place, published = publish(run)
    directory = os.path.join(run.directory, "kept")
    text = f'uffd_users = ["{NOBODY}"]\nsnapshot_dir = "{directory}"\n'
    log = os.path.join(run.log_directory, "stratad-rights.log")
    try:
        os.chmod(run.directory, 0o755)
        # What a careless starter leaves to the daemon.
        with configured(run.daemon, text, place, log, mask=0):
            program = Moment(run, "plain", 32, "256MiB")
            snapshot = program.take("--label", "mine")
            program.report()
            program.brought_back(snapshot, lambda: program.rollback(snapshot))
            files = assert_private(directory)
            if files < 10:
                raise Failure(f"only {files} files in {directory}: nothing was looked at")
            socket = {"STRATA_SOCKET": run.daemon.socket_path}
            for command in (("snapshot", "rm", snapshot), ("snapshot", "rm", f"{program.name}@mine"),
                            ("restore", snapshot), ("restore", snapshot, "--name", "theirs"),
                            ("clone", snapshot), ("snapshot", "persist", snapshot),
                            ("snapshot", "export", snapshot, "/tmp/strata-test-never"),
                            ("snapshot", "core", snapshot, str(program.program.pid),
                             "/tmp/strata-test-never")):
                refused_to_nobody(run, as_nobody(run, published.strata, *command, **socket),
                                  "no snapshot")
            for command in (("snapshot", program.name), ("rollback", program.name, snapshot),
                            ("snapshots", program.name)):
                status, lines = as_nobody(run, published.strata, *command, **socket)
                if command[0] == "snapshots" and status == 0:
                    continue  # an empty list is an answer
                refused_to_nobody(run, (status, lines), program.name)
            status, out = as_nobody_says(published.strata, "snapshots", "--json", **socket)
            if status != 0 or program.name in out:
                raise Failure(f"another user is told: {out}")
            if set(program.list()) != {snapshot}:
                raise Failure("another user changed what is there")
            program.goes_on()
            program.check()
            program.kill()
    finally:
        shutil.rmtree(place)


def as_nobody_says(strata, *arguments, **environment):
    """Status and standard output."""
    done = subprocess.run([strata, *arguments], user=NOBODY, group=NOBODY, extra_groups=[],
                          cwd="/", env=environment, capture_output=True, text=True, timeout=30,
                          stdin=subprocess.DEVNULL, check=False)
    return done.returncode, done.stdout
