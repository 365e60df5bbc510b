"""Snapshots by the clock: `[[snapshot]]` in the configuration."""

import os
import signal
import time

import machine
from moment import Moment
from strata import Failure, configured
from suite import case

EVERY_S = 2
SCHEDULES = f"""
[[snapshot]]
name = "kept"
every = "{EVERY_S}s"
keep = 1

[[snapshot]]
name = "written"
every = "{EVERY_S}s"
keep = 2
persist = true

[[snapshot]]
name = "never-started"
every = "{EVERY_S}s"
"""


def number(one):
    return int(one["id"].split("@")[1])


def scheduled(program):
    """Those of the schedule that are whole and nobody has kept, oldest first."""
    found = [one for one in program.list().values()
             if one["scheduled"] and one["state"] in ("usable", "persisted")
             and one["id"] not in program.pinned]
    return sorted(found, key=number)


def next_one(program, after=None):
    """The newest of the schedule, when there is one newer than `after`."""
    def newest():
        try:
            found = scheduled(program)
        except Failure:
            return None  # between two workers
        return found and (after is None or number(found[-1]) > number(after)) and found[-1]
    return program.daemon.wait_until(newest, f"the schedule takes one of {program.name}", 40)


def kept_by_hand(run, program):
    """One of the schedule that somebody persists: from then on it is no business of the
    schedule's. It may take the one at hand away meanwhile."""
    def persisted():
        before = program.count
        one = next_one(program, scheduled(program)[-1])
        program.moments[one["id"]] = (before, program.count)
        done = run.daemon.strata("snapshot", "persist", one["id"], check=False)
        return done.returncode == 0 and one
    one = run.daemon.wait_until(persisted, "one of the schedule is persisted by hand", 40)
    program.pinned.add(one["id"])
    return one


@case("snapshot-schedule", native=False, own_daemon=True, seconds=150, takes=15)
def schedule(run):
    """Taken every so often, the oldest removed when the next is whole; what is
    labelled, made or persisted by hand stays. The worker's death changes nothing of
    that, the tenant's end ends it."""
    directory = os.path.join(run.directory, "snapshots")
    text = f'snapshot_dir = "{directory}"\n{SCHEDULES}'
    with configured(run.daemon, text, run.directory, os.path.join(run.log_directory, "d.log")) as pid:
        run.daemon.pid, before = pid, run.daemon.pid
        try:
            follow(run, directory)
        finally:
            run.daemon.pid = before


def follow(run, directory):
    kept = Moment(run, "plain", 16, "10MiB", name="kept")
    written = Moment(run, "quiet", 16, "10MiB", name="written")
    kept.pinned, written.pinned = set(), set()
    by_hand = {kept.take(), kept.take("--label", "mine")}
    own = written.take("--persist")
    first = next_one(kept)
    if first["state"] != "usable":
        raise Failure(f"the first is {first}")
    next_one(written)
    worker = run.daemon.worker()
    os.kill(worker, signal.SIGKILL)
    run.daemon.wait_until(lambda: not machine.alive(worker) and run.daemon.worker(),
                          "there is another worker")
    second = next_one(kept, first)
    assert_gap(first, second)
    # The old one goes just after a new one has come, and none else.
    run.daemon.wait_until(
        lambda: first["id"] not in (there := set(kept.list())) and by_hand <= there
        and len(scheduled(kept)) == 1, "the next takes the place of the first")
    pinned = kept_by_hand(run, kept)
    third = next_one(kept, pinned)
    assert_gap(pinned, third)
    older = next_one(written)
    run.daemon.wait_until(
        lambda: older["id"] not in written.list() and len(scheduled(written)) == 2,
        "the third of the other takes the place of its first")
    if {one["state"] for one in scheduled(written)} != {"persisted"}:
        raise Failure(f"of the other there are {scheduled(written)}")

    def left():
        return {"@".join(name.split("@")[:2]) for name in os.listdir(directory) if "@" in name}
    run.daemon.wait_until(lambda: left() == set(kept.list()) | set(written.list()),
                          "each directory has its snapshot, and each snapshot its directory")
    # It is the program as it was then.
    kept.roll(pinned["id"])
    written.report()
    written.kill()
    kept.kill()
    run.daemon.wait_until(lambda: len(scheduled(kept)) == 1 and len(scheduled(written)) == 2,
                          "what was under way has ended")
    listed = set(kept.list()), set(written.list())
    for stays, there in ((by_hand | {pinned["id"]}, listed[0]), ({own}, listed[1])):
        if not stays <= there:
            raise Failure(f"{stays - there} was kept by hand and is not there")
    # The time of another one passes; there is nobody to take it of.
    time.sleep(EVERY_S + 0.5)
    if (now := (set(kept.list()), set(written.list()))) != listed:
        raise Failure(f"there were {listed} when the tenants had ended, and then {now}")
    newest = scheduled(written)[-1]["id"]
    written.moments[newest] = (0, written.count)
    written.brought_back(newest, lambda: written.restore(newest))
    for program in (kept, written):
        program.assert_clean()
        program.kill()


def assert_gap(one, other):
    """`taken` is read when a snapshot is begun, and the next is due so long after."""
    if other["taken"] - one["taken"] < EVERY_S - 0.1:
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
        ({**good, "every": '"900ms"'}, 3, ("too often", "1s")),
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
