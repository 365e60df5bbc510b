"""Builds the programs, runs the cases two at a time, says what came of them.

A case is a function of tests/cases/*.py, registered with @case. It gets a Case,
starts programs through it and raises Failure or Skip. Nothing here knows what a
case is about."""

import argparse
import fnmatch
import glob
import importlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:0] = [os.path.join(ROOT, "tests", "lib"), os.path.join(ROOT, "tests", "cases")]

import machine  # noqa: E402
from program import Program  # noqa: E402
from strata import Binaries, Daemon, Failure, Skip  # noqa: E402

SLOTS = 2
BUILD = os.path.join(os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target")), "tests")
CASES = {}


class Registered:
    def __init__(self, body, name, native, own_daemon, alone, seconds):
        self.body, self.name, self.native = body, name, native
        self.own_daemon, self.alone, self.seconds = own_daemon, alone, seconds


def case(name, native=True, own_daemon=False, alone=False, seconds=60):
    """Registers a case. `native`: it also means something without Strata.
    `own_daemon`: it may hurt the daemon. `alone`: nothing runs beside it."""
    def register(body):
        if name in CASES:
            raise ValueError(f"two cases are called {name}")
        CASES[name] = Registered(body, name, native, own_daemon, alone, seconds)
        return body
    return register


class Case:
    """One run of a case."""

    def __init__(self, registered, slot, options, binaries):
        self.name = registered.name
        self.native, self.soak, self.patience = options.native, options.soak, options.patience
        self.binaries, self.daemon = binaries, None
        self.slot = slot
        self.log_directory = os.path.join(BUILD, "logs", self.name)
        shutil.rmtree(self.log_directory, ignore_errors=True)
        os.makedirs(self.log_directory)
        scratch = os.path.join(BUILD, "scratch")
        self.directory = tempfile.mkdtemp(prefix=self.name + "-", dir=scratch)
        patience = options.patience * (20 if options.soak else 1)
        self.deadline = time.monotonic() + registered.seconds * patience
        self.daemon_is_dead = False  # set by a case that killed its own
        self.programs = []
        self.notes = []

    def seconds_left(self):
        return self.deadline - time.monotonic()

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
        return os.path.join(BUILD, program)

    def start(self, program, *arguments, budget="40MiB", **how):
        """Starts a built program, or any command given with its path."""
        path = program if "/" in program else self.built(program)
        started = Program(self, [path, *arguments], budget, **how)
        self.programs.append(started)
        return started

    def run(self, program, *arguments, budget="40MiB", pressed=True, **how):
        """Starts it and sees it to its good end."""
        started = self.start(program, *arguments, budget=budget, **how)
        started.finish(pressed)
        return started

    def times(self, count):
        """How often to do what is worth doing more often in a soak."""
        return count * 20 if self.soak else count


def build_programs():
    """Compiles what is older than its sources."""
    os.makedirs(os.path.join(BUILD, "scratch"), exist_ok=True)
    helper = os.path.join(ROOT, "tests", "lib", "t")
    for source in sorted(glob.glob(os.path.join(ROOT, "tests", "programs", "*.c"))):
        program = os.path.join(BUILD, os.path.basename(source)[:-2])
        inputs = [source, helper + ".c", helper + ".h"]
        if os.path.exists(program) and \
                os.path.getmtime(program) > max(os.path.getmtime(i) for i in inputs):
            continue
        subprocess.run(
            ["cc", "-std=gnu17", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE",
             "-pthread", source, helper + ".c", "-o", program],
            check=True,
        )


class Runner:
    def __init__(self, options, binaries):
        self.options, self.binaries = options, binaries
        self.daemons = [None] * (SLOTS + 1)
        self.lock = threading.Lock()
        self.counts = {"ok": 0, "FAIL": 0, "skipped": 0}
        self.logs = os.path.join(BUILD, "logs")

    def say(self, verdict, name, reason="", notes=(), seconds=0.0):
        with self.lock:
            self.counts[verdict] += 1
            text = f"{verdict} {name}"
            if reason:
                text += ": " + " ".join(reason.split())
            extra = [f"{seconds:.1f} s"] if verdict != "skipped" else []
            print(text + f"  ({', '.join(extra + list(notes))})" if extra else text, flush=True)

    def daemon_for(self, registered, slot):
        log = os.path.join(self.logs, f"stratad-{slot}.log")
        if registered.own_daemon:
            return Daemon(self.binaries, os.path.join(self.logs, registered.name, "stratad.log"))
        if self.daemons[slot] is None:
            self.daemons[slot] = Daemon(self.binaries, log)
        return self.daemons[slot]

    def run(self, registered, slot):
        if self.options.native and not registered.native:
            self.say("skipped", registered.name, "means nothing without Strata")
            return
        began = time.monotonic()
        run = Case(registered, slot, self.options, self.binaries)
        verdict, reason = "ok", ""
        try:
            if not self.options.native:
                run.daemon = self.daemon_for(registered, slot)
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
        for program in run.programs:
            program.close(verdict == "FAIL")
        reason = self.after(registered, slot, run, verdict, reason)
        if reason and verdict == "ok":
            verdict = "FAIL"
        shutil.rmtree(run.directory, ignore_errors=True)
        if verdict != "FAIL":
            shutil.rmtree(run.log_directory, ignore_errors=True)
        self.say(verdict, registered.name, reason, run.notes, time.monotonic() - began)

    def after(self, registered, slot, run, verdict, reason):
        """The daemon must have survived the case, unless the case killed it."""
        daemon = run.daemon
        if daemon is None:
            return reason
        if run.daemon_is_dead:
            daemon.end()
            return reason
        well = daemon.is_well()
        if registered.own_daemon:
            daemon.end()
        elif not well or verdict == "FAIL":
            # The next case gets a new one, the log goes with the failure.
            daemon.end()
            self.daemons[slot] = None
            if verdict == "FAIL" or not well:
                shutil.move(daemon.log_path, os.path.join(run.log_directory, "stratad.log"))
            if not well:
                return (reason + "; " if reason else "") + "the daemon died or does not answer"
        return reason

    def run_all(self, chosen):
        waiting = queue.Queue()
        for registered in chosen:
            if not registered.alone:
                waiting.put(registered)

        def drain(slot):
            while True:
                try:
                    registered = waiting.get_nowait()
                except queue.Empty:
                    return
                self.run(registered, slot)
                if self.stopped:
                    return

        self.stopped = False
        threads = [threading.Thread(target=drain, args=(slot,)) for slot in range(SLOTS)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
            for registered in chosen:
                if registered.alone:
                    self.run(registered, SLOTS)
        finally:
            self.stopped = True
            for daemon in self.daemons:
                if daemon:
                    daemon.end()

    def closing_line(self):
        return (f"{self.counts['ok']} passed, {self.counts['FAIL']} failed, "
                f"{self.counts['skipped']} skipped")


def become_subreaper():
    """Orphans of a case stay below us, so that they can be ended by pid."""
    import ctypes
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def end_leftovers():
    for pid in machine.descendants(os.getpid()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def main():
    parser = argparse.ArgumentParser(prog="tests/run.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--native", action="store_true", help="without Strata")
    parser.add_argument("--only", metavar="PATTERN", action="append", default=[],
                        help="cases whose name contains (or matches) this")
    parser.add_argument("--soak", action="store_true", help="many times longer")
    parser.add_argument("--patience", metavar="N", type=int, default=1,
                        help="wait N times as long for what hangs: for slow machines")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    options = parser.parse_args()
    for module in sorted(glob.glob(os.path.join(ROOT, "tests", "cases", "*.py"))):
        importlib.import_module(os.path.basename(module)[:-3])
    chosen = [c for name, c in CASES.items() if not options.only or any(
        pattern in name or fnmatch.fnmatch(name, pattern) for pattern in options.only)]
    if options.list:
        print("\n".join(c.name for c in chosen))
        return 0
    if not chosen:
        print("tests/run.sh: no case matches", file=sys.stderr)
        return 2
    binaries = Binaries(ROOT)
    Daemon.patience = options.patience
    if not options.native:
        missing = binaries.missing()
        why = f"{missing} is missing (cargo build --release)" if missing else \
            "only root may start a private daemon" if os.geteuid() != 0 else None
        if why:
            print(f"tests/run.sh: {why}", file=sys.stderr)
            return 1
    try:
        build_programs()
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        print(f"tests/run.sh: building the programs: {error}", file=sys.stderr)
        return 1
    os.makedirs(os.path.join(BUILD, "logs"), exist_ok=True)
    become_subreaper()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    runner = Runner(options, binaries)
    began = time.monotonic()
    try:
        runner.run_all(chosen)
    finally:
        end_leftovers()
        shutil.rmtree(os.path.join(BUILD, "scratch"), ignore_errors=True)
    if runner.counts["FAIL"]:
        print(f"logs of the failures: {os.path.join(BUILD, 'logs')}")
    print(f"{time.monotonic() - began:.0f} s")
    print(runner.closing_line())
    return 1 if runner.counts["FAIL"] else 0


if __name__ == "__main__":
    # The cases import this module by its name: let it be the same one.
    sys.modules["suite"] = sys.modules["__main__"]
    sys.exit(main())
