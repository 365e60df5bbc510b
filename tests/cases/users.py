"""Users other than root: what they may, with a daemon of the system and without
one. The user is 65534, the kernel's and everybody's nobody."""

import os
import shutil
import stat
import subprocess
import tempfile

from program import copy_program
from strata import Binaries, Failure, Skip, configured
from suite import case

NOBODY = 65534


def publish(run):
    """The programs where nobody can read and execute them; the directory."""
    place = tempfile.mkdtemp(prefix="strata-test-")
    os.chmod(place, 0o755)
    for path in (run.binaries.strata, run.binaries.stratad, run.binaries.library,
                 run.built("hold")):
        copy_program(path, place)
    published = Binaries(place)
    for name in ("strata", "stratad"):
        setattr(published, name, os.path.join(place, name))
    return place, published


def as_nobody(run, strata, *arguments, **environment):
    """Status and lines on stderr."""
    kept = {k: v for k, v in os.environ.items() if k == "PATH"}
    done = subprocess.run(
        [strata, *arguments], user=NOBODY, group=NOBODY, extra_groups=[], cwd="/",
        env={**kept, **environment}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=30, check=False,
    )
    return done.returncode, done.stderr.splitlines()


def refused(run, answer, *words):
    status, lines = answer
    if status != 1 or len(lines) != 1 or not all(word in lines[0] for word in words):
        raise Failure(f"not refused in one line with {words}: status {status}, {lines}")


@case("other-user-alone", native=False)
def other_user_alone(run):
    """Without a daemon of the system: told how to start one."""
    if os.path.exists("/run/strata/control.sock"):
        raise Skip("this machine has a stratad of its own")
    place, published = publish(run)
    try:
        refused(run, as_nobody(run, published.strata, "run", "--dram", "64MiB", "--", "/bin/true"),
                "cannot start a private stratad", "systemctl start stratad")
        refused(run, as_nobody(run, published.stratad), "no program can be managed", "as root")
    finally:
        shutil.rmtree(place)


@case("other-user-named", native=False, own_daemon=True)
def other_user_named(run):
    """With one that names the user: managed, and seeing only what is theirs."""
    place, published = publish(run)
    log = os.path.join(run.log_directory, "stratad-users.log")
    mine, run.binaries = run.binaries, published
    run.daemon.binaries = published
    try:
        os.chmod(run.directory, 0o755)
        for users in ("[]", f'["{NOBODY}"]'):
            with configured(run.daemon, f"uffd_users = {users}\n", place, log):
                socket = {"STRATA_SOCKET": run.daemon.socket_path}
                if users == "[]":
                    refused(run, as_nobody(run, published.strata, "run", "--dram", "64MiB", "--",
                                           "/bin/true", **socket),
                            f"user {NOBODY}", "uffd_users")
                    continue
                roots = run.start("hold", "8", budget="64MiB", name="roots")
                roots.gate("ready")
                for command in (("stats",), ("release",), ("stop",),
                                ("set", "--dram", "64MiB")):
                    refused(run, as_nobody(run, published.strata, *command, "roots", **socket),
                            "no tenant is named roots")
                program = run.start(os.path.join(place, "hold"), "48", "load", budget="20MiB",
                                    name="theirs", uid=NOBODY)
                program.gate("running")
                stats = run.daemon.wait_until(
                    lambda: (s := program.stats())["faults_total"] > 500 and s, "faults are served")
                if stats["uid"] != NOBODY:
                    raise Failure(f"the tenant belongs to {stats['uid']}")
                # A program that gains privileges cannot be entered.
                setuid = os.path.join(place, "setuid")
                copy_program("/bin/true", setuid)
                os.chmod(setuid, 0o755 | stat.S_ISUID)
                refused(run, as_nobody(run, published.strata, "run", "--dram", "64MiB", "--",
                                       setuid, **socket), "setuid")
                program.answer()
                program.finish()
                roots.answer("end")
                roots.finish(pressed=False)
    finally:
        run.binaries = run.daemon.binaries = mine
        shutil.rmtree(place)
