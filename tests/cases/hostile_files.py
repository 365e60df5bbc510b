"""Files and directories that others can reach: links in the place of what the daemon
opens, makes or removes; core dumps of the daemon; snapshot files that somebody else
wrote. What is refused names the cause in one line and leaves everything as it was."""

import contextlib
import glob
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys

from moment import need_criu
from program import copy_program
from strata import Failure, configured
from suite import case
from users import NOBODY, publish

# Bit of CAP_SYS_RESOURCE: without it CRIU takes no process of another user.
SYS_RESOURCE = 24
MARK = b"the secret of a tenant: "
# Pages that do not compress and are each another: they are kept as they are.
HOLDER = """
import os, sys, time
pages = int(sys.argv[1])
mark = open(sys.argv[2], "rb").read()
memory = bytearray()
for number in range(pages):
    memory += mark + os.urandom(4096 - len(mark))
open(sys.argv[3], "w").close()
while True:
    for number in range(0, pages * 4096, 4096):
        if memory[number:number + len(mark)] != mark:
            os._exit(7)
    open(sys.argv[4], "w").close()
"""


def has_capability(bit):
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("CapEff:"))
    return bool(int(line.split()[1], 16) >> bit & 1)


def one_line(done, *words):
    lines = done.stderr.strip().splitlines()
    if done.returncode != 1 or len(lines) != 1 or not all(word in lines[0] for word in words):
        raise Failure(f"not refused in one line with {words}: status {done.returncode}, {lines}")


def occurrences(path, mark):
    found, before = 0, b""
    with open(path, "rb") as file:
        while piece := file.read(1 << 24):
            found += (before + piece).count(mark)
            before = piece[-len(mark) + 1:]
    return found


def another_worker(daemon, before):
    return daemon.wait_until(
        lambda: (worker := daemon.worker()) and worker != before and daemon.answers() and worker,
        "another worker takes over")


@case("worker-core-dump", native=False, own_daemon=True)
def worker_core_dump(run):
    """A worker that has a tenant's pages in its hands, raw, compressed and in
    buffers, dies by a signal that dumps core, and is dumped by gcore: not one byte of
    the tenant is in either, and the tenant goes on."""
    daemon = run.daemon
    filled, seen = (os.path.join(run.directory, name) for name in ("filled", "seen"))
    # Not among its words, which the daemon knows as well.
    mark, told = MARK + os.urandom(8).hex().encode(), os.path.join(run.directory, "mark")
    with open(told, "wb") as file:
        file.write(mark)
    program = subprocess.Popen(
        [run.binaries.strata, "run", "--name", "holder", "--dram", "32MiB", "--", sys.executable,
         "-c", HOLDER, "12000", told, filled, seen], env=daemon.environment(),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        daemon.wait_until(lambda: os.path.exists(filled), "it has its pages", 60)
        daemon.wait_until(lambda: daemon.stats("holder")["faults_total"] > 3000, "pages come and go", 60)
        for pid in (daemon.pid, daemon.worker()):
            dumpable = os.stat(f"/proc/{pid}/mem").st_uid == os.geteuid()
            limit = resource.prlimit(pid, resource.RLIMIT_CORE)[0]
            with open(f"/proc/{pid}/coredump_filter") as file:
                kinds = int(file.read(), 16)
            if limit != 0 or kinds != 0 or (os.geteuid() and dumpable):
                raise Failure(f"process {pid} may dump core: limit {limit}, kinds {kinds:#x}")
        core = os.path.join(run.directory, "core")
        if gcore := shutil.which("gcore"):
            worker = daemon.worker()
            subprocess.run([gcore, "-o", core, str(worker)], stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL, timeout=run.seconds_left(), check=False)
            dumps = glob.glob(core + "*")
            if not dumps:
                raise Failure("gcore wrote nothing")
            for dump in dumps:
                if found := occurrences(dump, mark):
                    raise Failure(f"gcore finds {found} pages of the tenant in the worker")
                os.unlink(dump)
        # The kernel's own, with the limit that was there for the asking.
        worker = daemon.worker()
        hard = resource.prlimit(worker, resource.RLIMIT_CORE)[1]
        resource.prlimit(worker, resource.RLIMIT_CORE, (hard, hard))
        place = os.readlink(f"/proc/{worker}/cwd")
        before = set(glob.glob(os.path.join(place, "core*")))
        os.kill(worker, signal.SIGABRT)
        another_worker(daemon, worker)
        if new := set(glob.glob(os.path.join(place, "core*"))) - before:
            for path in new:
                os.unlink(path)
            raise Failure(f"the worker dumped core: {new}")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(seen)
        daemon.wait_until(lambda: os.path.exists(seen) or program.poll() is not None,
                          "it has seen all of its pages", 60)
        if program.poll() is not None:
            raise Failure(f"the program ended with {program.returncode}")
    finally:
        program.kill()
        program.wait()


@case("links-in-the-way", native=False, own_daemon=True)
def links_in_the_way(run):
    """A directory that others may write to, or a link that they may have put there: a
    daemon does not start on it, and nothing behind the link is touched."""
    open_to_all = os.path.join(run.directory, "open")
    os.mkdir(open_to_all)
    os.chmod(open_to_all, 0o1777)
    target = os.path.join(run.directory, "target")
    os.mkdir(target, 0o700)
    os.symlink(target, os.path.join(open_to_all, "link"))
    strangers = os.path.join(run.directory, "strangers")
    os.mkdir(strangers, 0o700)
    os.chown(strangers, NOBODY, NOBODY)
    sockets = os.path.join(run.directory, "sockets")
    configuration = os.path.join(run.directory, "refused.toml")
    # Where a link leads is written as it is: nothing is changed there.
    for key, path, words in (
            ("socket_dir", open_to_all, ("others may write to",)),
            ("socket_dir", os.path.join(open_to_all, "link", "run"), ("link is a symbolic link",)),
            ("snapshot_dir", os.path.join(open_to_all, "link"), ("link is a symbolic link",)),
            ("snapshot_dir", os.path.join(open_to_all, "link", "kept"), ("link is a symbolic link",)),
            ("snapshot_dir", strangers, (f"belongs to user {NOBODY}",)),
            ("snapshot_dir", os.path.join(strangers, "kept"), (f"belongs to user {NOBODY}",)),
            ("tier_path", os.path.join(open_to_all, "link"), ("link is a symbolic link",))):
        text = f'{key} = "{path}"\n'
        if key != "socket_dir":
            text += f'socket_dir = "{sockets}"\n'
        with open(configuration, "w") as file:
            file.write(text)
        done = subprocess.run([run.binaries.stratad, "--config", configuration], text=True,
                              stdin=subprocess.DEVNULL, capture_output=True,
                              timeout=run.seconds_left(), check=False)
        one_line(done, f"{key}: ", "chown", *words)
        if left := [name for name in os.listdir(target) if not name.startswith("strata-probe")]:
            raise Failure(f"{key} = {path}: {left} were made behind the link")
        if os.listdir(strangers):
            raise Failure(f"{key} = {path}: something was made in another's directory")


@case("links-in-an-exports-way", native=False, own_daemon=True)
def links_in_an_exports_way(run):
    """Exported to and imported from where others may put links: not followed."""
    need_criu()
    open_to_all = os.path.join(run.directory, "open")
    os.mkdir(open_to_all)
    os.chmod(open_to_all, 0o1777)
    target = os.path.join(run.directory, "target")
    os.mkdir(target)
    os.symlink(target, os.path.join(open_to_all, "link"))
    with Claimant(run, run.daemon, 0) as program:
        snapshot = program.take()
        into = os.path.join(open_to_all, "link", "file")
        one_line(run.daemon.strata("snapshot", "export", snapshot, into, check=False),
                 "link is a symbolic link")
        precious = os.path.join(target, "precious")
        with open(precious, "w") as file:
            file.write("precious")
        os.symlink(precious, os.path.join(open_to_all, "file.part"))
        one_line(run.daemon.strata("snapshot", "export", snapshot,
                                   os.path.join(open_to_all, "file"), check=False), "file.part")
        with open(precious) as file:
            if file.read() != "precious":
                raise Failure("an export wrote through a link")
        if os.listdir(target) != ["precious"]:
            raise Failure(f"an export made {os.listdir(target)} behind a link")
        whole = os.path.join(target, "whole")
        run.daemon.strata("snapshot", "export", snapshot, whole)
        os.symlink(whole, os.path.join(open_to_all, "taken"))
        for path in (os.path.join(open_to_all, "taken"), os.path.join(open_to_all, "link", "whole")):
            one_line(run.daemon.strata("snapshot", "import", path, check=False),
                     "is a symbolic link")


class Claimant:
    """tests/programs/claimant.c as a tenant."""

    number = 0

    def __init__(self, run, daemon, user, *what, binaries=None):
        self.run, self.daemon = run, daemon
        self.binaries = binaries or run.binaries
        Claimant.number += 1
        self.name = f"claimant-{Claimant.number}"
        self.ready = os.path.join(run.directory, f"{self.name}.ready")
        built = os.path.join(os.path.dirname(self.binaries.strata), "claimant")
        if binaries is None:
            built = run.built("claimant")
        self.log = open(os.path.join(run.log_directory, f"{self.name}.log"), "wb")
        self.process = subprocess.Popen(
            [self.binaries.strata, "run", "--name", self.name, "--dram", "64MiB", "--",
             built, self.ready, str(user), *what],
            env={**daemon.environment()}, cwd="/", stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def __enter__(self):
        def is_ready():
            if self.process.poll() is not None:
                raise Failure(f"{self.name} ended with {self.process.returncode}")
            return os.path.exists(self.ready) and os.path.getsize(self.ready)
        self.daemon.wait_until(is_ready, f"{self.name} is ready")
        return self

    def take(self):
        return self.daemon.strata("snapshot", self.name).stdout.strip()

    def exported(self):
        """A file with a snapshot of it; it does not run any more."""
        path = os.path.join(self.run.directory, f"{self.name}.strata")
        snapshot = self.take()
        self.daemon.strata("snapshot", "export", snapshot, path)
        self.end()
        self.daemon.strata("snapshot", "rm", snapshot)
        self.daemon.wait_until(lambda: self.daemon.stats(self.name) is None, "it is gone")
        return path

    def end(self):
        self.process.kill()
        self.process.wait()

    def __exit__(self, *_):
        self.end()
        self.log.close()


@case("import-of-others", native=False, own_daemon=True)
def import_of_others(run):
    """A snapshot in a file of another user asks for what that user may have, or is
    refused by name and leaves nothing; unless it is trusted."""
    need_criu()
    place, published = publish(run)
    for path in (run.built("claimant"), os.path.join(run.binaries.directory, "strata-clone")):
        copy_program(path, place)
    special = os.path.join(place, "special")
    copy_program("/bin/true", special)
    os.chmod(special, 0o755 | stat.S_ISUID)
    closed = os.path.join(place, "closed")
    with open(closed, "w") as file:
        file.write("not for everybody\n")
    os.chmod(closed, 0o600)
    kept = os.path.join(run.directory, "kept")
    log = os.path.join(run.log_directory, "stratad-others.log")
    mine, run.daemon.binaries = run.daemon.binaries, published
    os.chmod(run.directory, 0o755)
    try:
        with configured(run.daemon, f'snapshot_dir = "{kept}"\n', place, log):
            strata = run.daemon.strata

            def export(user, *what):
                with Claimant(run, run.daemon, user, *what, binaries=published) as program:
                    return program.exported()

            def refused(path, *words, named=None):
                """`named`: what the refusal itself says, which names a few."""
                os.chown(path, NOBODY, NOBODY)
                before = strata("snapshots", "--json").stdout
                one_line(strata("snapshot", "import", path, check=False),
                         f"belongs to user {NOBODY}", *(words if named is None else named))
                if strata("snapshots", "--json").stdout != before or run.daemon.tenants():
                    raise Failure(f"{words}: something of it is left")
                if left := [name for name in os.listdir(kept) if "@" in name]:
                    raise Failure(f"{words}: {left} are left on disk")
                listed = strata("snapshot", "import", path, "--dry-run").stdout
                bad = [line for line in listed.splitlines()
                       if line.endswith(f"; more than user {NOBODY} may")]
                if not any(all(word in line for word in words) for line in bad):
                    raise Failure(f"--dry-run does not name {words}: {bad}")
                return listed

            roots = export(0)
            listed = refused(roots, ": user 0")
            refused(roots, " capabilities: cap_")
            if ": file " not in listed:
                raise Failure(f"--dry-run names no file: {listed}")
            # Whoever may write to root's file may have written it.
            os.chown(roots, 0, 0)
            os.chmod(roots, 0o666)
            one_line(strata("snapshot", "import", roots, check=False), "who wrote it is not known")
            os.chmod(roots, 0o600)
            own = strata("snapshot", "import", roots, "--name", "of-root").stdout.strip()
            strata("snapshot", "rm", own)
            os.chown(roots, NOBODY, NOBODY)
            trusted = strata("snapshot", "import", roots, "--trust", "--name", "trusted").stdout.strip()
            strata("snapshot", "rm", trusted)
            socket = os.path.join(place, "s")
            user = NOBODY if has_capability(SYS_RESOURCE) else 0
            devices = []
            with contextlib.suppress(OSError):
                os.close(os.open("/dev/kmsg", os.O_RDONLY))
                devices = [(("open", "/dev/kmsg"), ("file /dev/kmsg to read", "device"))]
            for what, words in (
                    *devices,
                    (("capability",), ("permitted capabilities: ",)),
                    (("low-port",), ("port 831",)),
                    (("socket", socket), (f"unix socket at {socket}",)),
                    (("open", closed), (f"file {closed} to read", "may not open it")),
                    (("open", "/proc/1/status"), ("file /proc/1/status to read", "kernel's")),
                    (("setuid", special), (f"file {special} to read", "set-user-id"))):
                # As root it asks for more than a refusal names.
                named = None if user else ("more",)
                refused(export(user, *what), *words, named=named)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(socket)
            if not user:
                run.note("no CAP_SYS_RESOURCE: nothing of an ordinary user's")
                return
            # One that asks for itself alone comes back as that user.
            plain = export(NOBODY)
            os.chown(plain, NOBODY, NOBODY)
            listed = strata("snapshot", "import", plain, "--dry-run").stdout
            if "more than user" in listed or f": user {NOBODY}" not in listed:
                raise Failure(f"--dry-run of a plain program: {listed}")
            taken = strata("snapshot", "import", plain, "--name", "plain").stdout.strip()
            strata("restore", taken)
            pids = run.daemon.stats("plain")["pids"]
            if [os.stat(f"/proc/{pid}").st_uid for pid in pids] != [NOBODY]:
                raise Failure(f"it came back as another: {pids}")
            with open(f"/proc/{pids[0]}/coredump_filter") as file:
                if int(file.read(), 16) == 0:
                    raise Failure("it came back with the daemon's core dump filter")
            strata("stop", "plain")
    finally:
        run.daemon.binaries = mine
        shutil.rmtree(place)
