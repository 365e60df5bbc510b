"""Registers the cases, builds the programs, and has the chosen ones run.

A case is a function of tests/cases/*.py, registered with @case. It gets a Case
(runner.py), starts programs through it and raises Failure or Skip."""

import argparse
import fnmatch
import glob
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:0] = [os.path.join(ROOT, "tests", "lib"), os.path.join(ROOT, "tests", "cases")]

import machine  # noqa: E402
import units  # noqa: E402
from runner import Runner  # noqa: E402
from strata import Binaries, Daemon  # noqa: E402

BUILD = os.path.join(os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target")), "tests")
CASES = {}


class Registered:
    """A case and what the runner has to know of it."""

    def __init__(self, body, name, native=True, own_daemon=False, daemon=True, alone=False,
                 soak=False, computes=False, loses_pages=False, seconds=60, takes=5):
        self.body, self.name, self.native = body, name, native
        self.own_daemon, self.daemon, self.alone, self.soak = own_daemon, daemon, alone, soak
        self.computes, self.loses_pages = computes, loses_pages
        self.seconds, self.takes = seconds, takes


def case(name, **how):
    """Registers a case. `native`: it also means something without Strata.
    `own_daemon`: it may hurt the daemon; `daemon=False`: it needs none. `alone`:
    nothing runs beside it. `soak`: it measures the machine more than the code, and
    runs only in a soak. `computes`: it keeps a processor busy all the time, as an
    emulated guest does. `loses_pages`: it loses pages, or the kernel takes some without a word,
    and its daemon says so, which is right. `seconds`: after which it hangs. `takes`: seconds that it
    usually takes, where they are many: the longest begin first."""
    def register(body):
        if name in CASES:
            raise ValueError(f"two cases are called {name}")
        CASES[name] = Registered(body, name, **how)
        return body
    return register


# The longest of the unit tests, in seconds.
UNITS_TAKE = {}


def register_units(path):
    for binary in units.read(path):
        case(binary.name, native=False, daemon=False,
             takes=UNITS_TAKE.get(binary.name, 5))(binary.run)


def build_programs():
    """Compiles what is older than its sources, on all processors."""
    helper = os.path.join(ROOT, "tests", "lib", "t")

    def build(source):
        program = os.path.join(BUILD, os.path.basename(source)[:-2])
        inputs = [source, helper + ".c", *glob.glob(os.path.join(ROOT, "tests", "lib", "*.h"))]
        if os.path.exists(program) and \
                os.path.getmtime(program) > max(os.path.getmtime(i) for i in inputs):
            return
        subprocess.run(
            ["cc", "-std=gnu17", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE",
             "-pthread", source, helper + ".c", "-o", program],
            check=True,
        )
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # Asked for, so that the first failure is raised.
        list(pool.map(build, sorted(glob.glob(os.path.join(ROOT, "tests", "programs", "*.c")))))


def become_subreaper():
    """Orphans of a case stay below us, so that they can be ended by pid."""
    import ctypes
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def keep_run_in_memory():
    """In a mount namespace of our own, gives /run a file system in memory where it has none, with
    what is there: CRIU keeps there what it has found out about the kernel, and only so. Each of
    hundreds of its runs would find it out again, for a second."""
    mounts = [line.split()[1:3] for line in machine.read("/proc/self/mounts").splitlines()]
    if os.geteuid() != 0 or ["/run", "tmpfs"] in mounts:
        return
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    clone_newns, ms_bind, ms_rec, ms_private = 0x20000, 4096, 16384, 1 << 18

    def must(result, what):
        if result != 0:
            raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    must(libc.unshare(clone_newns), "unshare")
    must(libc.mount(None, b"/", None, ms_rec | ms_private, None), "/")
    before = os.open("/run", os.O_PATH | os.O_DIRECTORY)
    must(libc.mount(b"tmpfs", b"/run", b"tmpfs", 0, b"mode=0755"), "/run")
    source = f"/proc/self/fd/{before}"
    for name in os.listdir(source):
        there, here = os.path.join(source, name), os.path.join("/run", name)
        if os.path.islink(there):
            os.symlink(os.readlink(there), here)
            continue
        if os.path.isdir(there):
            os.mkdir(here)
        elif name.startswith("criu."):
            continue  # what it could not keep
        else:
            open(here, "wb").close()
        must(libc.mount(there.encode(), here.encode(), None, ms_bind | ms_rec, None), here)
    os.close(before)


def end_leftovers():
    for pid in machine.descendants(os.getpid()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def arguments():
    parser = argparse.ArgumentParser(prog="tests/run.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--native", action="store_true", help="without Strata")
    parser.add_argument("--only", metavar="PATTERN", action="append", default=[],
                        help="cases whose name contains (or matches) this")
    parser.add_argument("--soak", action="store_true", help="many times longer")
    parser.add_argument("--patience", metavar="N", type=int, default=1,
                        help="wait N times as long for what hangs: for slow machines")
    parser.add_argument("--at-once", metavar="N", type=int, default=min(os.cpu_count(), 4) + 1,
                        help="cases that run beside each other; else one more than there are "
                             "processors, for most wait now and then")
    parser.add_argument("--first", action="store_true", help="end with the first failure")
    parser.add_argument("--units", metavar="FILE",
                        help="also the unit tests that cargo named in FILE (scripts/test.sh)")
    parser.add_argument("--costs", action="store_true",
                        help="say at the end which cases took most of the processors")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    return parser.parse_args()


def main():
    options = arguments()
    for module in sorted(glob.glob(os.path.join(ROOT, "tests", "cases", "*.py"))):
        importlib.import_module(os.path.basename(module)[:-3])
    if options.units:
        register_units(options.units)
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
        for place in (os.path.join(BUILD, name) for name in ("logs", "scratch")):
            os.makedirs(place, exist_ok=True)
            if not os.access(place, os.W_OK):
                raise OSError(f"{place} is another user's; make it yours, or set CARGO_TARGET_DIR")
        build_programs()
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"tests/run.sh: building the programs: {error}", file=sys.stderr)
        return 1
    become_subreaper()
    keep_run_in_memory()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    runner = Runner(options, binaries, BUILD)
    began = time.monotonic()
    try:
        runner.run_all(chosen)
    finally:
        end_leftovers()
        shutil.rmtree(os.path.join(BUILD, "scratch"), ignore_errors=True)
    if runner.failed or runner.flaky:
        print(f"logs of the failures: {os.path.join(BUILD, 'logs')}")
    print(f"{time.monotonic() - began:.0f} s")
    print(runner.closing_lines())
    return 1 if runner.failed else 0


if __name__ == "__main__":
    # The cases import this module by its name: let it be the same one.
    sys.modules["suite"] = sys.modules["__main__"]
    sys.exit(main())
