"""A private daemon and the command line, as a user has them.

Everything goes through `strata`; only the sampler, whoever waits for a figure, and the
cases about hostile bytes speak to the sockets themselves."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time

import machine


class Failure(Exception):
    """A case failed; the text is the reason, one line."""


class Skip(Exception):
    """A case cannot run here; the text is the reason, one line."""


class Binaries:
    """Where the programs under test are."""

    def __init__(self, root):
        target = os.environ.get("CARGO_TARGET_DIR", os.path.join(root, "target"))
        self.directory = os.environ.get("STRATA_BIN_DIR", os.path.join(target, "release"))
        self.strata = os.path.join(self.directory, "strata")
        self.stratad = os.path.join(self.directory, "stratad")
        self.library = os.path.join(self.directory, "libstrata.so")

    def missing(self):
        """The first that is not there, or None."""
        for path in (self.strata, self.stratad, self.library):
            if not os.path.exists(path):
                return path
        return None


class Daemon:
    """`stratad --private DIR` with a tenant that does nothing but keep it from
    ending with the last real one."""

    patience = 1  # how many times as long as usual is waited

    def __init__(self, binaries, log_path, directory=None):
        self.binaries = binaries
        self.directory = directory or tempfile.mkdtemp(prefix="strata-test-")
        os.chmod(self.directory, 0o700)
        self.socket_path = os.path.join(self.directory, "control.sock")
        self.log_path = log_path
        self.keeper = None
        self.process = self.begin()
        try:
            self.wait_until(self.answers, "the daemon answers on its socket", 15)
            self.keeper = subprocess.Popen(
                [binaries.strata, "run", "--name", "keeper", "--dram", "64MiB", "--", "cat"],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=self.environment(),
                stderr=subprocess.DEVNULL, start_new_session=True,
            )
            # Its agent must have come before anybody counts descriptors.
            self.wait_until(
                lambda: (s := self.stats("keeper")) and s["pids"] and s["state"] != "starting",
                "the first tenant has attached", 15)
        except Failure:
            self.end()
            raise
        self.pid = self.ask({"request": "ping"})["pid"]

    def begin(self):
        """A `stratad` in the directory; it may be a second one."""
        with open(self.log_path, "ab") as log:
            return subprocess.Popen(
                [self.binaries.stratad, "--private", self.directory],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )

    def begin_again(self):
        """The daemon was killed; another one takes over."""
        self.process = self.begin()
        self.wait_until(self.answers, "the next daemon answers on its socket", 30)
        self.pid = self.ask({"request": "ping"})["pid"]

    def kill_whole(self):
        """Supervisor and worker."""
        worker = self.wait_until(self.worker, "there is one worker")
        kill_together(self.pid, worker)
        self.wait_until(lambda: not machine.alive(worker) and self.process.poll() is not None,
                        "supervisor and worker are gone")

    def holders(self):
        return holders_of(self.directory)

    def environment(self, **more):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("STRATA_")}
        return {**environment, "STRATA_SOCKET": self.socket_path, **more}

    def answers(self):
        if self.process.poll() is not None:
            raise Failure(f"stratad ended with status {self.process.returncode}")
        try:
            return self.ask({"request": "ping"}).get("reply") == "pong"
        except (OSError, ValueError):
            return False

    def ask(self, request, timeout_s=10):
        """One request, one reply, straight to the control socket."""
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(timeout_s * self.patience)
            link.connect(self.socket_path)
            link.sendall(json.dumps(request).encode() + b"\n")
            line = b""
            while not line.endswith(b"\n"):
                piece = link.recv(1 << 16)
                if not piece:
                    break
                line += piece
        return json.loads(line)

    def strata(self, *arguments, check=True, timeout_s=30, **more):
        """Runs `strata ARGUMENTS`; fails unless it exits with 0."""
        done = subprocess.run(
            [self.binaries.strata, *arguments], env=self.environment(**more),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=timeout_s * self.patience, check=False,
        )
        if check and done.returncode != 0:
            raise Failure(f"strata {' '.join(arguments)}: status {done.returncode}: "
                          f"{done.stderr.strip()}")
        return done

    def start_strata(self, *arguments):
        """The same, under way; whoever starts it waits for its end."""
        return subprocess.Popen(
            [self.binaries.strata, *arguments], env=self.environment(), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )

    def stats(self, name):
        """What the daemon says of a tenant, or None when there is no such. Asked for over and
        over by who waits, so without a `strata` each time, where the daemon answers."""
        with contextlib.suppress(OSError, ValueError):
            reply = self.ask({"request": "stats", "name": name})
            if reply.get("reply") == "stats":
                return reply["stats"]
        return self.printed_stats(name)

    def printed_stats(self, name):
        """`strata stats NAME --json`, or None when there is no such tenant."""
        done = self.strata("stats", name, "--json", check=False)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def tenants(self):
        """The names that `strata ps --json` lists, the keeper apart."""
        listed = json.loads(self.strata("ps", "--json").stdout)
        if isinstance(listed, dict):
            listed = listed["tenants"]
        return sorted(t["name"] for t in listed if t["name"] != "keeper")

    def worker(self):
        """The pid of the process that does the work."""
        return worker_of(self.pid)

    def footprint(self):
        """(descriptors by kind, bytes of memory files) of the supervisor, whose
        table the worker shares. Without what a living tenant has while it stands still: the
        file that says how much memory it has, and the kernel's alarms, an event each that
        somebody waits for with nothing but such events."""
        kinds, size = machine.descriptors(self.pid)
        events, is_there = machine.events_waited_for(self.pid)
        kinds["anon_inode:[eventfd]"] -= events
        kinds["anon_inode:[eventpoll]"] -= is_there  # made when the daemon answers already
        for kind in list(kinds):
            gauge = re.fullmatch(r"/proc/(\d+)/statm", kind)
            if gauge and machine.alive(int(gauge[1])):
                del kinds[kind]
        return kinds, size

    def wait_until(self, condition, what, seconds=20):
        """Polls, for a quarter of a processor's time at most; the time only ends a hopeless
        wait."""
        seconds *= self.patience
        end = time.monotonic() + seconds
        while True:
            began = time.monotonic()
            value = condition()
            if value:
                return value
            if (now := time.monotonic()) > end:
                raise Failure(f"not within {seconds} s: {what}")
            time.sleep(max(0.02, 3 * (now - began)))

    def settled(self, before, what, stays=0):
        """Waits until the daemon costs no more than before. Memory files may keep
        a little (an index that grew), descriptors may not but for so many."""
        def back():
            kinds, size = self.footprint()
            return kinds.total() <= before[0].total() + stays and size <= before[1] + (4 << 20)
        try:
            self.wait_until(back, what)
        except Failure:
            kinds, size = self.footprint()
            raise Failure(f"{what}: {before[0].total()} descriptors and {before[1]} bytes of memory "
                          f"files before, {kinds.total()} and {size} after; too many are "
                          f"{dict(kinds - before[0])}") from None

    def is_well(self):
        return machine.alive(self.process.pid) and self.answers()

    def end(self):
        """Ends daemon and keeper, by pid, whatever state they are in."""
        if self.keeper:
            self.keeper.stdin.close()
            try:
                self.keeper.wait(5)
            except subprocess.TimeoutExpired:
                self.keeper.kill()
                self.keeper.wait()
        # A daemon that outlives its last tenant does so for a grace time.
        workers = machine.descendants(self.process.pid)
        for sign in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                self.process.send_signal(sign)
                try:
                    self.process.wait(5)
                except subprocess.TimeoutExpired:
                    continue
        for pid in workers:
            if machine.alive(pid):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        shutil.rmtree(self.directory, ignore_errors=True)


def kill_together(*pids):
    """All stopped first, so that none can do anything about another's death."""
    for sign in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, sign)


def holders_of(word):
    """The processes that hold, or held, what a daemon has in whose command line is `word`."""
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit()
            and machine.read(f"/proc/{pid}/comm").strip() == "strata-holder"
            and word in machine.read(f"/proc/{pid}/cmdline")
            and machine.alive(int(pid))]


def worker_of(supervisor):
    """The pid of the process that does a daemon's work. What was restored may be a
    child of the supervisor as well."""
    name = machine.read(f"/proc/{supervisor}/comm")
    found = [child for child in machine.children(supervisor)
             if machine.alive(child) and machine.read(f"/proc/{child}/comm") == name]
    return found[0] if len(found) == 1 else None


@contextlib.contextmanager
def configured(daemon, text, directory, log_path, environment=None, mask=0o022):
    """A `stratad --config` with `text` (less its socket_dir, which is below
    `directory`) takes the place of the private daemon; gives its pid.
    `environment`: instead of the runner's; `mask`: its umask."""
    sockets = os.path.join(directory, "run")
    os.makedirs(sockets, exist_ok=True)
    for place in (directory, sockets):
        # Whatever the runner's umask is: a daemon takes nothing that others write to.
        os.chmod(place, os.stat(place).st_mode & 0o7755)
    configuration = os.path.join(directory, "stratad.toml")
    with open(configuration, "w") as file:
        file.write(f'socket_dir = "{sockets}"\n{text}')
    private = daemon.socket_path
    with open(log_path, "ab") as log:
        process = subprocess.Popen([daemon.binaries.stratad, "--config", configuration],
                                   stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                   env=environment, umask=mask)
    try:
        daemon.socket_path = os.path.join(sockets, "control.sock")
        daemon.wait_until(daemon.answers, "the daemon with a configuration answers")
        yield process.pid
    finally:
        daemon.socket_path = private
        for sign in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                process.send_signal(sign)
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    continue
