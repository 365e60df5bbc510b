"""The worker, the whole daemon or a QEMU dies at random moments of a guest's snapshots,
clones and rollbacks: the guest runs on, or its successor does, or it is gone without a trace
and comes back from its snapshot; never with a wrong byte of memory or disk."""

import os
import random
import signal
import subprocess
import time

import machine
from guest_disks import NAME, begun, ended, quiet
from guest_snapshots import reborn, snapshots
from strata import Failure
from suite import case

KINDS = ("snapshot", "clone", "rollback")
VICTIMS = ("worker", "worker", "qemu", "daemon")
LONGEST_SECONDS = 0.5
BEFORE = ("a.raw.before", "b.qcow2.before")


def order(kind):
    return {"snapshot": ("snapshot", NAME), "clone": ("clone", f"{NAME}@1", "--name", "twin"),
            "rollback": ("rollback", NAME, "1")}[kind]


def daemon_works(run):
    run.daemon.wait_until(lambda: run.daemon.worker() and run.daemon.answers(), "a worker")


def die(run, victim):
    """False: it is not there just now."""
    worker = run.daemon.worker()
    if victim == "daemon":
        run.daemon.kill_whole()
        run.daemon.begin_again()
        return True
    pids = [worker] if victim == "worker" else (run.daemon.stats(NAME) or {"pids": []})["pids"]
    pids = [pid for pid in pids if pid]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    # A QEMU has its memory to give up first; who sees it meanwhile would take it for running.
    run.daemon.wait_until(lambda: not any(map(machine.alive, pids)), "what was killed has ended")
    return bool(pids)


def has_ended(line):
    """What it says ends; what it says until then is right."""
    try:
        line.rounds(2)
    except ConnectionError:
        return True
    except Failure as failure:
        if "it ended before" not in str(failure):
            raise
        return True
    return False


def who_runs(run, line, killed):
    """The line of whoever runs now, and whether he had to be brought back."""
    if killed:
        line.hear_out()
    elif not has_ended(line):
        return line, False

    def there():
        # A QEMU that was killed is a process until the worker knows.
        if any(machine.alive(pid) for pid in (run.daemon.stats(NAME) or {"pids": []})["pids"]):
            return "runs"
        done = run.daemon.strata("restore", f"{NAME}@1", check=False, timeout_s=60)
        if done.returncode == 0:
            return "brought back"
        return None
    # Whoever was just about to come may have been killed, too.
    for _ in range(3):
        line.line.close()
        how = run.daemon.wait_until(there, "it runs, or can be brought back", 30)
        line = reborn(run, NAME)
        if not has_ended(line):
            return line, how == "brought back"
    raise Failure(f"it {how}, and ended")


def clean_up(run, guest):
    """Whoever came of it is right; then nothing but the guest and its first snapshot is there."""
    for name in run.daemon.tenants():
        if name not in (NAME, "keeper"):
            if (run.daemon.stats(name) or {"pids": []})["pids"]:
                reborn(run, name).rounds(1)
            run.daemon.strata("stop", name, check=False)
    for known in snapshots(run):
        if known["id"] != f"{NAME}@1":
            run.daemon.strata("snapshot", "rm", known["id"])
    for file in BEFORE:
        path = os.path.join(guest.place, file)
        if os.path.exists(path):
            os.remove(path)
    quiet(run, guest)


@case("guest-killed-anywhere", native=False, own_daemon=True, soak=True, seconds=2400)
def guest_killed_anywhere(run):
    guest = begun(run)
    line, chance = guest, random.Random(11)
    at = "the first snapshot"
    counts = dict.fromkeys((*VICTIMS, "brought back"), 0)
    try:
        run.daemon.strata("snapshot", NAME)
        for number in range(run.times(15)):
            kind, victim = chance.choice(KINDS), chance.choice(VICTIMS)
            delay = chance.random() * LONGEST_SECONDS
            at = f"kill {number}: {victim}, {delay * 1000:.0f} ms into a {kind}"
            asking = subprocess.Popen([run.binaries.strata, *order(kind)],
                                      env=run.daemon.environment(), stdin=subprocess.DEVNULL,
                                      stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            time.sleep(delay)
            killed = die(run, victim)
            counts[victim] += killed
            asking.wait()
            daemon_works(run)
            line, again = who_runs(run, line, killed and victim == "qemu")
            counts["brought back"] += again
            clean_up(run, guest)
        line.end()
    except Failure as failure:
        raise Failure(f"{at}: {failure}") from None
    finally:
        ended(run, guest)
    run.note(", ".join(f"{what} {count}" for what, count in counts.items()))
