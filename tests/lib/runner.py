"""Runs cases, several at a time, the longest first. One that fails is run once more,
alone and with more patience, when all others have ended: it is FAIL only if it fails
again; else it is *flaky*, with what both runs printed, and is named at the end, where
nobody should be.

Nothing here knows what a case is about."""

import contextlib
import glob
import os
import shutil
import subprocess
import tempfile
import threading
import time
import traceback

import machine
from costs import Costs
from program import Program
from strata import Daemon, Failure, Skip

# How many times as long what failed is waited for when it runs once more.
PATIENCE_AGAIN = 2
# What a daemon says when a page is missing of which it knows nothing: lost, or taken by the
# kernel without a word.
GONE = b"was in place and is gone"


class Case:
    """One run of a case."""

    def __init__(self, registered, options, binaries, build):
        self.name = registered.name
        self.native, self.soak, self.patience = options.native, options.soak, options.patience
        self.binaries, self.daemon, self.build = binaries, None, build
        self.log_directory = os.path.join(build, "logs", self.name)
        shutil.rmtree(self.log_directory, ignore_errors=True)
        os.makedirs(self.log_directory)
        scratch = os.path.join(build, "scratch")
        self.directory = tempfile.mkdtemp(prefix=self.name + "-", dir=scratch)
        patience = options.patience * (20 if options.soak else 1)
        self.deadline = time.monotonic() + registered.seconds * patience
        self.daemon_is_dead = False  # set by a case that killed its own
        self.programs = []
        self.daemon_logs = {}  # where what its daemon says of it begins, by the log's path
        self.notes = []
        self.tests = 1  # that passed, if it passes: more where it runs others' tests
        self.flaky = []  # of these

    def seconds_left(self):
        return self.deadline - time.monotonic()

    def note_daemon_log(self):
        """What its daemon, which may be shared, says from now on is of this case."""
        if self.daemon:
            self.daemon_logs[self.daemon.log_path] = os.path.getsize(self.daemon.log_path)

    def lost_page(self):
        """What one of its daemons says of a page that it lost; else None."""
        own = glob.glob(os.path.join(self.log_directory, "*.log"))
        for path, begin in {**dict.fromkeys(own, 0), **self.daemon_logs}.items():
            with open(path, "rb") as log:
                log.seek(begin)
                for line in log:
                    if GONE in line:
                        return line.decode(errors="replace").strip()
        return None

    def note(self, text):
        """Shown behind the result: what was measured."""
        self.notes.append(text)

    def tool(self, *names):
        """The first of these commands that is installed; skips without one."""
        for name in names:
            path = shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin")
            if path:
                return path
        raise Skip(f"{names[0]} is not installed")

    def built(self, program):
        return os.path.join(self.build, program)

    def start(self, program, *arguments, budget="20MiB", **how):
        """Starts a built program, or any command given with its path."""
        path = program if "/" in program else self.built(program)
        started = Program(self, [path, *arguments], budget, **how)
        self.programs.append(started)
        return started

    def run(self, program, *arguments, budget="20MiB", pressed=True, **how):
        """Starts it and sees it to its good end."""
        started = self.start(program, *arguments, budget=budget, **how)
        started.finish(pressed)
        return started

    def times(self, count):
        """How often to do what is worth doing more often in a soak."""
        return count * 20 if self.soak else count


class Outcome:
    """What came of one run."""

    def __init__(self, verdict, reason, notes=(), seconds=0, tests=1):
        self.verdict, self.reason, self.notes = verdict, reason, list(notes)
        self.seconds, self.tests = seconds, tests

    def line(self, name):
        text = f"{self.verdict} {name}"
        if self.reason:
            text += ": " + " ".join(self.reason.split())
        extra = [f"{self.seconds:.1f} s"] if self.verdict != "skipped" else []
        extra += self.notes
        return f"{text}  ({', '.join(extra)})" if extra else text


class Runner:
    def __init__(self, options, binaries, build):
        self.options, self.binaries, self.build = options, binaries, build
        self.daemons = [None] * options.at_once
        self.lock = threading.Lock()
        self.passed, self.failed, self.skipped = 0, [], 0
        self.flaky = []
        self.again = []  # (case, the reason of its failure)
        self.logs = os.path.join(build, "logs")
        self.stopped = False
        self.broken = None  # the defect of the runner itself that ended it
        # Those that run now.
        self.running = []
        self.costs = Costs() if options.costs else None
        self.changed = threading.Condition(self.lock)

    def say(self, text):
        print(text, flush=True)

    def count(self, registered, outcome):
        with self.lock:
            self.say(outcome.line(registered.name))
            if outcome.verdict == "skipped":
                self.skipped += 1
            elif outcome.verdict == "FAIL":
                self.failed.append(registered.name)
            else:
                self.passed += outcome.tests
                if outcome.verdict == "flaky":
                    self.flaky.append(registered.name)

    def daemon_for(self, registered, slot):
        if not registered.daemon:
            return None
        if registered.own_daemon:
            return Daemon(self.binaries, os.path.join(self.logs, registered.name, "stratad.log"))
        if self.daemons[slot] is None:
            log = os.path.join(self.logs, f"stratad-{slot}.log")
            self.daemons[slot] = Daemon(self.binaries, log)
        return self.daemons[slot]

    def run(self, registered, slot):
        """One run, from a new directory to nothing left of it."""
        if self.options.native and not registered.native:
            return Outcome("skipped", "means nothing without Strata")
        if registered.soak and not self.options.soak:
            return Outcome("skipped", "it measures the machine; make soak runs it")
        began = time.monotonic()
        run = Case(registered, self.options, self.binaries, self.build)
        verdict, reason = "ok", ""
        try:
            if not self.options.native:
                run.daemon = self.daemon_for(registered, slot)
                run.note_daemon_log()
            registered.body(run)
        except Skip as skip:
            verdict, reason = "skipped", str(skip)
        except Failure as failure:
            verdict, reason = "FAIL", str(failure)
        except Exception as error:  # a bug in the case is a failure of the case
            verdict, reason = "FAIL", f"{type(error).__name__}: {error}"
            with open(os.path.join(run.log_directory, "traceback"), "w") as log:
                traceback.print_exc(file=log)
        if verdict == "FAIL" and run.daemon and not run.daemon_is_dead:
            with open(os.path.join(run.log_directory, "stratad.autopsy"), "w") as log:
                log.write(machine.autopsy(run.daemon.process.pid))
                try:
                    log.write(run.daemon.strata("ps", "--json", check=False).stdout)
                except subprocess.TimeoutExpired:
                    log.write("strata ps hangs\n")
        if verdict == "FAIL":
            # Of every daemon that the case had.
            places = {run.directory, *([run.daemon.directory] if run.daemon else [])}
            for place in places:
                for log in glob.glob(os.path.join(place, "**", "criu-*.log"), recursive=True):
                    shutil.copy(log, run.log_directory)
        for program in run.programs:
            program.close(verdict == "FAIL")
        reason = self.after(registered, slot, run, verdict, reason)
        if reason and verdict == "ok":
            verdict = "FAIL"
        shutil.rmtree(run.directory, ignore_errors=True)
        if verdict != "FAIL":
            shutil.rmtree(run.log_directory, ignore_errors=True)
        if run.flaky and verdict == "ok":
            verdict, reason = "flaky", "; ".join(run.flaky)
        return Outcome(verdict, reason, run.notes, time.monotonic() - began, run.tests)

    def after(self, registered, slot, run, verdict, reason):
        """No page is lost, and the daemon must have survived the case, unless the case killed
        it."""
        daemon = run.daemon
        lost = None if registered.loses_pages else run.lost_page()
        if lost:
            reason = (reason + "; " if reason else "") + "a daemon says: " + lost
        if daemon is None:
            return reason
        if run.daemon_is_dead:
            daemon.end()
            return reason
        well = daemon.is_well()
        if registered.own_daemon:
            daemon.end()
        elif not well or lost or verdict == "FAIL":
            # The next case gets a new one, the log goes with the failure.
            daemon.end()
            self.daemons[slot] = None
            shutil.move(daemon.log_path, os.path.join(run.log_directory, "stratad.log"))
        if not well:
            return (reason + "; " if reason else "") + "the daemon died or does not answer"
        return reason

    def end_daemons(self):
        for slot, daemon in enumerate(self.daemons):
            if daemon:
                daemon.end()
                self.daemons[slot] = None

    def first_run(self, registered, slot):
        if registered.alone:
            # Not even a daemon that the others have shared.
            self.end_daemons()
        with self.costs.of(registered.name) if self.costs else contextlib.nullcontext():
            outcome = self.run(registered, slot)
        if outcome.verdict != "FAIL" or self.options.first:
            self.count(registered, outcome)
            self.stopped = self.stopped or outcome.verdict == "FAIL"
            return
        # What it left is of the first run; the second has a directory of its own.
        kept = os.path.join(self.logs, registered.name)
        shutil.rmtree(kept + ".first", ignore_errors=True)
        os.rename(kept, kept + ".first")
        with self.lock:
            self.say("again " + outcome.line(registered.name).removeprefix("FAIL "))
            self.again.append((registered, outcome.reason))

    def second_run(self, registered, reason):
        outcome = self.run(registered, 0)
        if outcome.verdict == "ok":
            outcome.verdict, outcome.reason = "flaky", f"alone it passes; before: {reason}"
        self.count(registered, outcome)

    def may_begin(self, one):
        """Those that compute leave a place to others: most of these wait now and then."""
        if one.alone or any(other.alone for other in self.running):
            return not self.running
        computing = sum(other.computes for other in self.running)
        return not one.computes or computing < max(self.options.at_once - 1, 1)

    def take(self, waiting):
        """The next case, when one may begin; none are left: None."""
        with self.changed:
            while True:
                if self.stopped or not waiting:
                    return None
                for one in waiting:
                    if self.may_begin(one):
                        waiting.remove(one)
                        self.running.append(one)
                        return one
                self.changed.wait()

    def run_all(self, chosen):
        # Those that nothing may run beside come last: else they hold up a slot.
        waiting = sorted(chosen, key=lambda one: (one.alone, -one.takes))

        def drain(slot):
            while registered := self.take(waiting):
                try:
                    self.first_run(registered, slot)
                except BaseException as error:
                    self.broken, self.stopped = error, True
                    raise
                finally:
                    with self.changed:
                        self.running.remove(registered)
                        self.changed.notify_all()

        threads = [threading.Thread(target=drain, args=(slot,))
                   for slot in range(self.options.at_once)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
            if self.broken:
                raise self.broken
            self.options.patience *= PATIENCE_AGAIN
            Daemon.patience = self.options.patience
            for registered, reason in self.again:
                self.second_run(registered, reason)
        finally:
            with self.changed:
                self.stopped = True
                self.changed.notify_all()
            self.end_daemons()

    def closing_lines(self):
        flaky = f"flaky: {' '.join(sorted(self.flaky))}" if self.flaky else "no flaky case"
        costs = "".join(line + "\n" for line in self.costs.lines()) if self.costs else ""
        return f"{costs}{flaky}\n{self.passed} passed, {len(self.failed)} failed, {self.skipped} skipped"
