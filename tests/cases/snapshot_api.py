"""A program that takes snapshots of itself (tests/programs/snapshot_api.c), by
include/strata.h: what the call returns, in which life."""

import errno
import os
import subprocess

import machine
from moment import Snapshots, need_criu
from strata import Failure
from suite import ROOT, case


class Caller(Snapshots):
    """The program, and the journal that all its lives write."""

    def __init__(self, run, *what, env=None, budget="12MiB"):
        self.journal = os.path.join(run.directory, f"journal-{len(run.programs)}")
        program = run.start("snapshot_api", self.journal, *what, budget=budget, env=env)
        super().__init__(run, program)

    def lines(self):
        """(pid, what, the rest) for each line that is whole."""
        text = machine.read(self.journal) if os.path.exists(self.journal) else ""
        split = [line.split(" ", 2) for line in text.split("\n")[:-1]]
        return [(int(pid), *rest, *[""] * (2 - len(rest))) for pid, *rest in split]

    def until(self, condition, what):
        def look():
            if said := machine.read(self.program.log_path).strip():
                raise Failure(f"the program: {said.splitlines()[0]}")
            return condition(self.lines())
        return self.daemon.wait_until(look, what, 40)

    def until_lines(self, count, what):
        self.until(lambda lines: len(lines) >= count, f"{what} ({count} lines in the journal)")
        return self.lines()

    def assert_clean(self, *names):
        for name in names or (self.name,):
            stats = self.daemon.stats(name)
            if not stats or stats["lost_pages_total"]:
                raise Failure(f"{name}: {stats and stats['lost_pages_total']} pages lost")
            if not stats["faults_total"]:
                raise Failure(f"{name} had no fault: nothing was tested")


def results(lines, what):
    """What the call returned, life after life."""
    return [rest.split(" ", 1)[0] for _, said, rest in lines if said == what]


def expect(found, wanted, what):
    if found != wanted:
        raise Failure(f"{what}: {found} instead of {wanted}")


@case("snapshot-api", native=False, own_daemon=True, seconds=120)
def back_again(run):
    """Taken at a good moment under pressure; then killed and restored, rolled
    back, and cloned: each life finds 1, and the values of that moment."""
    need_criu()
    back_to_one_call(run, "once")


@case("snapshot-api-aligned-stack", native=False, own_daemon=True, seconds=120)
def back_again_to_an_aligned_stack(run):
    """The same beside a thread for whose sake CRIU restores small memory itself: the
    copy runs before its agent's page says that it is one."""
    need_criu()
    back_to_one_call(run, "aligned")


def back_to_one_call(run, what):
    program = Caller(run, what)
    lines = program.until_lines(2, "the first life works")
    expect([line[1:] for line in lines], [("good", "0 "), ("works", "")], "the first life")
    snapshot = f"{program.name}@1"
    listed = program.list()
    expect([(name, one["label"], one["state"]) for name, one in listed.items()],
           [(snapshot, "good", "usable")], "listed")
    program.kill()
    program.restore(snapshot)
    program.until_lines(4, "the restored one works")
    program.rollback("good")
    lines = program.until_lines(6, "the one that was rolled back works")
    expect(results(lines, "good"), ["0", "1", "1"], "restored and rolled back")
    program.assert_clean()
    clones = program.command("clone", snapshot, "--count", "2", "--name", "twin").stdout.split()
    for name in ("twin-1", "twin-2"):
        program.program.pids.update(program.daemon.stats(name)["pids"])
    lines = program.until_lines(10, "the clones work")
    expect(results(lines, "good"), ["0", "1", "1", "1", "1"], "with the clones")
    expect(sum(said == "works" for _, said, _ in lines), 5, "lives that work")
    expect(sorted(clones)[:2], ["twin-1", "twin-2"], "clones")
    program.assert_clean("twin-1", "twin-2")
    run.note(f"frozen {listed[snapshot]['freeze_us'] / 1000:.0f} ms")


@case("snapshot-api-many", native=False, own_daemon=True, seconds=120, takes=20)
def many(run):
    """Three in a row; who comes back takes the next one at once, and it is a
    child of the one that it came from."""
    need_criu()
    program = Caller(run, "many")
    program.until_lines(4, "the first life works")
    name = program.name
    program.kill()
    program.restore(f"{name}@2")
    program.until_lines(7, "the second life works")
    program.rollback("1")
    lines = program.until_lines(11, "the third life works")
    expect(results(lines, "-"), ["0", "0", "0", "1", "0", "1", "0", "0"], "calls")
    parents = {one["id"]: one["parent"] for one in program.list().values()}
    expect(parents, {f"{name}@1": None, f"{name}@2": f"{name}@1", f"{name}@3": f"{name}@2",
                     f"{name}@4": f"{name}@2", f"{name}@5": f"{name}@1",
                     f"{name}@6": f"{name}@5"}, "parents")
    program.assert_clean()
    program.command("clone", f"{name}@1", "--name", "twin")
    program.program.pids.update(program.daemon.stats("twin")["pids"])
    lines = program.until_lines(15, "a clone takes its own")
    expect(results(lines, "-")[8:], ["1", "0", "0"], "calls in the clone")
    expect({one["id"]: one["parent"] for one in program.list("twin").values()},
           {"twin@1": f"{name}@1", "twin@2": "twin@1"}, "what the clone took")


@case("snapshot-api-threads", native=False, own_daemon=True, seconds=120)
def threads(run):
    """Four threads at once are answered one after the other. In a copy of the
    first, the other calls are under way, and return as well."""
    need_criu()
    program = Caller(run, "threads")
    program.until_lines(2, "all threads have returned")
    listed = program.list()
    expect(sorted(one["label"] for one in listed.values()), ["a", "b", "c", "d"], "labels")
    for number in (1, 4):
        before = len(program.lines())
        program.rollback(str(number))
        program.until_lines(before + 2, "all threads have returned in the copy")
    program.assert_clean()


@case("snapshot-api-refused", native=False, own_daemon=True)
def refused(run):
    """Labels that are taken or none; the program runs on."""
    need_criu()
    for label, code, word in (("a b", errno.EINVAL, "letters"), ("12", errno.EINVAL, "digits"),
                              ("", errno.EINVAL, "empty"), ("x" * 65, errno.EINVAL, "64")):
        other = Caller(run, "labels", label)
        other.program.finish(pressed=False)
        (_, _, said), = [line for line in other.lines()]
        if f"-{code} " not in f"{said} " or word not in said:
            raise Failure(f"label '{label}': {said}")
        if other.list():
            raise Failure(f"label '{label}' made a snapshot")
    twice = Caller(run, "labels", "good", "good", "other")
    twice.program.finish(pressed=False)
    said = [rest for _, _, rest in twice.lines()]
    if said[0] != "0 " or not said[1].startswith(f"-{errno.ECANCELED} ") or said[2] != "0 " \
            or f"{twice.name}@1 has the label good already" not in said[1]:
        raise Failure(f"the same label twice: {said}")


@case("snapshot-api-without", own_daemon=True)
def without(run):
    """The same program without Strata, linked against nothing; and with the
    library, but with no daemon."""
    program = run.built("snapshot_api")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("STRATA_", "LD_PRELOAD"))}
    clean["STRATA_TEST_NATIVE"] = "1"
    for preload, wanted in ((None, "not there"),
                            (run.binaries.library, f"good -{errno.ENOSYS} this process is not")):
        if preload and (not os.path.exists(preload) or os.path.exists("/run/strata/agent.sock")):
            continue
        journal = os.path.join(run.directory, f"without-{bool(preload)}")
        environment = clean | ({"LD_PRELOAD": preload} if preload else {})
        done = subprocess.run([program, journal, "labels", "good"], env=environment, timeout=60,
                              capture_output=True, text=True, check=False)
        said = machine.read(journal).strip()
        if done.returncode != 0 or done.stderr or wanted not in said or said.count("\n"):
            raise Failure(f"without a daemon: status {done.returncode}, '{said}', {done.stderr}")


@case("snapshot-api-header", own_daemon=True)
def header(run):
    """The header is C99 and C++, and a program can be linked against the library."""
    source = os.path.join(run.directory, "uses")
    text = ('#include "strata.h"\n#include <stdio.h>\nint main(void) {\n'
            '    int result = strata_snapshot("good");\n'
            '    printf("%d %s\\n", result, strata_error());\n'
            '    return strata_version()[0] == 0;\n}\n')
    include, library = os.path.join(ROOT, "include"), run.binaries.library
    for compiler, standard, ending in ((run.tool("cc"), "c99", "c"), (run.tool("c++"), "c++11", "cpp")):
        with open(f"{source}.{ending}", "w") as file:
            file.write(text)
        linked = ["-L" + os.path.dirname(library), "-lstrata",
                  "-Wl,-rpath," + os.path.dirname(library)] if os.path.exists(library) else ["-c"]
        subprocess.run([compiler, f"-std={standard}", "-pedantic-errors", "-Wall", "-Wextra",
                        "-Werror", "-I", include, f"{source}.{ending}", "-o", source, *linked],
                       check=True)
        if "-c" in linked or os.path.exists("/run/strata/agent.sock"):
            continue
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("STRATA_", "LD_PRELOAD"))}
        done = subprocess.run([source], env=clean, capture_output=True, text=True, timeout=30,
                              check=False)
        if done.returncode != 0 or not done.stdout.startswith(f"-{errno.ENOSYS} "):
            raise Failure(f"linked ({standard}): {done.returncode}, {done.stdout} {done.stderr}")
