"""Snapshots by the clock: `[[snapshot]]` in the configuration."""

import os
import signal
import time

import machine
from moment import Moment
from strata import Failure, configured
from suite import case

SCHEDULES = """
[[snapshot]]
name = "kept"
every = "10s"
keep = 1

[[snapshot]]
name = "written"
every = "10s"
keep = 2
persist = true

[[snapshot]]
name = "never-started"
every = "10s"
"""


def scheduled(program):
    """Those of the schedule that are whole, oldest first."""
    found = [one for one in program.list().values()
             if one["scheduled"] and one["state"] in ("usable", "persisted")]
    return sorted(found, key=lambda one: int(one["id"].split("@")[1]))


def wait_for(program, number):
    """The schedule's snapshot with this number or a later one, alone with what
    shall stay beside it."""
    def newest():
        time.sleep(0.2)
        try:
            found = scheduled(program)
        except Failure:
            return None  # between two workers
        return found and int(found[-1]["id"].split("@")[1]) >= number and found
    return program.daemon.wait_until(newest, f"the schedule takes {program.name}@{number}", 40)


@case("snapshot-schedule", native=False, own_daemon=True, seconds=150)
def schedule(run):
    """Taken every ten seconds, the shortest there is, the oldest removed when the
    next is whole; what is labelled, made or persisted by hand stays. The worker's
    death changes nothing of that, the tenant's end ends it."""
    directory = os.path.join(run.directory, "snapshots")
    text = f'snapshot_dir = "{directory}"\n{SCHEDULES}'
    with configured(run.daemon, text, run.directory, os.path.join(run.log_directory, "d.log")) as pid:
        run.daemon.pid, before = pid, run.daemon.pid
        try:
            follow(run)
        finally:
            run.daemon.pid = before


def follow(run):
    kept = Moment(run, "plain", 24, "16MiB", name="kept")
    written = Moment(run, "quiet", 24, "16MiB", name="written")
    by_hand = kept.take()
    labelled = kept.take("--label", "mine")
    own = written.take("--persist")
    first = wait_for(kept, 3)
    if [one["id"] for one in first] != ["kept@3"] or first[0]["state"] != "usable":
        raise Failure(f"the first is {first}")
    # One that the worker dies over has its number, too, and is not there.
    run.daemon.wait_until(
        lambda: written.list().get("written@2", {}).get("state") == "persisted",
        "the first of the other is persisted")
    worker = run.daemon.worker()
    os.kill(worker, signal.SIGKILL)
    run.daemon.wait_until(lambda: not machine.alive(worker) and run.daemon.worker(),
                          "there is another worker")
    second = wait_for(kept, 4)
    assert_gap(first[-1], second[-1])
    # The old one goes just after the new one has come, and none else.
    run.daemon.wait_until(lambda: set(kept.list()) == {by_hand, labelled, "kept@4"},
                          "kept@4 takes the place of kept@3")
    # Somebody wants this one: from now on it is no business of the schedule's.
    run.daemon.strata("snapshot", "persist", "kept@4")
    before = kept.count
    third = wait_for(kept, 5)
    after = kept.count
    assert_gap(second[-1], third[-1])
    wait_for(written, 4)
    run.daemon.wait_until(lambda: len(scheduled(written)) == 2,
                          "the third of the other takes the place of its first")
    if set(kept.list()) != {by_hand, labelled, "kept@4", "kept@5"}:
        raise Failure(f"there are {sorted(kept.list())}")
    states = {id: one["state"] for id, one in written.list().items()}
    if states != {own: "persisted", "written@3": "persisted", "written@4": "persisted"}:
        raise Failure(f"of the other there are {states}")
    left = {name.split("@")[0] + "@" + name.split("@")[1]
            for name in os.listdir(os.path.join(run.directory, "snapshots")) if "@" in name}
    if left != set(kept.list()) | set(written.list()):
        raise Failure(f"directories are left of {sorted(left)}")
    # It is the program as it was then.
    kept.moments["kept@5"] = (before, after)
    kept.roll("kept@5")
    written.report()
    written.kill()
    kept.kill()
    listed = set(kept.list()), set(written.list())
    # The time of another one passes; there is nobody to take it of.
    time.sleep(10.5)
    if (now := (set(kept.list()), set(written.list()))) != listed:
        raise Failure(f"there were {listed} when the tenants had ended, and then {now}")
    newest = scheduled(written)[-1]["id"]
    written.moments[newest] = (0, written.count)
    written.brought_back(newest, lambda: written.restore(newest))
    for program in (kept, written):
        program.assert_clean()
        program.kill()


def assert_gap(one, other):
    if other["taken"] - one["taken"] < 9.9:
        raise Failure(f"{other['id']} was taken {other['taken'] - one['taken']} s after "
                      f"{one['id']}")


@case("snapshot-schedule-refused", native=False)
def schedule_refused(run):
    """What no schedule can be: one line with the file, the place and what to do."""
    path = os.path.join(run.directory, "stratad.toml")
    good = {"name": '"db"', "every": '"5m"'}

    def check(keys, more=""):
        with open(path, "w") as file:
            file.write("[[snapshot]]\n" + "".join(f"{k} = {v}\n" for k, v in keys.items()) + more)
        return run.daemon.strata("config", "check", path, check=False)

    done = check({**good, "keep": 3, "persist": "true"})
    if done.returncode != 0 or "every" not in done.stdout:
        raise Failure(f"a good one is refused: {done.stderr}")
    for keys, line, words in (
        ({"every": '"5m"'}, 1, ("name",)),
        ({"name": '"db"'}, 1, ("every",)),
        ({**good, "name": '"a/b"'}, 2, ("name",)),
        ({**good, "every": '"9s"'}, 3, ("too often", "10s")),
        ({**good, "every": '"32d"'}, 3, ("too long", "31d")),
        ({**good, "every": '"-5m"'}, 3, ("every",)),
        ({**good, "every": '"5 parsecs"'}, 3, ("every",)),
        ({**good, "every": "300"}, 3, ("every", "time")),
        ({**good, "keep": 0}, 4, ("keep", "0")),
        ({**good, "keep": 1001}, 4, ("keep", "1000")),
        ({**good, "keep": "2.5"}, 4, ("keep",)),
        ({**good, "persist": '"yes"'}, 4, ("persist", "true or false")),
        ({**good, "evry": '"1h"'}, 4, ("evry", "every")),
    ):
        done = check(keys)
        lines = done.stderr.splitlines()
        if done.returncode != 1 or len(lines) != 1 or f"{path}:{line}" not in lines[0] or \
                not all(word in lines[0] for word in words):
            raise Failure(f"{keys}: status {done.returncode}, {lines}")
    done = check(good, '\n[[snapshot]]\nname = "db"\nevery = "1h"\n')
    if done.returncode != 1 or f"{path}:6" not in done.stderr or "db" not in done.stderr:
        raise Failure(f"two schedules for a name: status {done.returncode}, {done.stderr}")
