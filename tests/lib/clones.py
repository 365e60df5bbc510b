"""Clones as the cases have them: `strata clone` with a copy of the case's
directory for each, so that each clone has a board of its own (moment.py) where
the original has its."""

import os
import re

from moment import Moment, Snapshots
from strata import Failure


def start(original, snapshot, *options, check=True):
    """`strata clone`; the names that it prints and what is behind them."""
    done = original.command("clone", snapshot, *options, check=check)
    if not check:
        return done
    return [line.split() for line in done.stdout.splitlines()], done.stderr


class Clone(Snapshots):
    """A tenant that `strata clone` has started; it ends with the case."""

    def __init__(self, original, name):
        self.run, self.daemon, self.name = original.run, original.daemon, name
        # Its processes are nobody's children; they are noted with the original's.
        self.program, self.reaper = original.program, original.reaper
        if not self.note_pids():
            raise Failure(f"the clone {name} has no process")


class MomentClone(Clone, Moment):
    """A clone of a program that has a board, with the copy that it sees."""

    def __init__(self, original, name, directory):
        Clone.__init__(self, original, name)
        self.look_at(os.path.join(directory, os.path.basename(original.board_path)))
        self.orders, self.moments = original.orders, {}


def of_moment(original, snapshot, count, *options, directory=None):
    """Clones of a Moment, each of which has said where it is: `resumed_at`. The
    question is on the board that is copied; what has asked nothing answers."""
    reports = original.reports
    original.report()
    directory = directory or original.run.directory
    names, notes = start(original, snapshot, "--count", str(count), "--copy-dir", directory,
                         *options)
    copies = dict(re.findall(r"(\S+) sees (\S+) as ", notes))
    clones = [MomentClone(original, name, copies[name]) for name, *_ in names]
    if len(clones) != count:
        raise Failure(f"{len(clones)} of {count} clones are named")
    for clone in clones:
        clone.until(lambda: clone.reports > reports + 1, f"{clone.name} says where it is")
    return clones


def assert_moment(original, snapshot, clones):
    """All of them were at that snapshot, at the same round."""
    first, last = original.moments[snapshot]
    places = {clone.resumed_at for clone in clones}
    # A round may stand between its count and its place on the board.
    if len(places) != 1 or not first <= min(places) <= last + 1:
        raise Failure(f"clones go on at rounds {sorted(places)}, {snapshot} was taken between "
                      f"{first} and {last}")
