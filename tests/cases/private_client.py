"""A private daemon has the environment and the limits of its first client: neither is
to matter to the next one."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import tempfile

import machine
from moment import CRIU, need_criu
from strata import Failure, Skip
from suite import case


class Client:
    """`strata` as a user has it who runs no daemon."""

    def __init__(self, run):
        if os.path.exists("/run/strata/control.sock"):
            raise Skip("the system's daemon runs here")
        self.run = run
        # Short: a socket's path is.
        self.directory = tempfile.mkdtemp(prefix="strata-client-")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("STRATA_", "LD_"))}
        self.environment = {**kept, "XDG_RUNTIME_DIR": self.directory, "PATH": "/usr/bin:/bin"}

    def strata(self, *arguments, limit=None, **more):
        def limited():
            if limit:
                resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        return subprocess.run(
            [self.run.binaries.strata, *arguments], env={**self.environment, **more},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
            preexec_fn=limited)

    def close(self):
        """Ends its daemon."""
        mark = self.directory.encode()
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    words = file.read().split(b"\0")
                if b"--private" in words and any(word.startswith(mark) for word in words):
                    os.kill(int(pid), signal.SIGTERM)
        shutil.rmtree(self.directory, ignore_errors=True)


@contextlib.contextmanager
def client(run):
    one = Client(run)
    try:
        yield one
    finally:
        one.close()


@case("private-daemon-criu", native=False)
def criu_of_client(run):
    """CRIU is where whoever asks has it, not only where the first client had it."""
    need_criu()
    with client(run) as user:
        ready = os.path.join(run.directory, "ready")
        first = subprocess.Popen(
            [run.binaries.strata, "run", "--name", "first", "--dram", "64MiB", "--", "/bin/sh",
             "-c", f"echo ready >{ready}; exec sleep 1000"], env=user.environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True)
        try:
            run.daemon.wait_until(lambda: machine.read(ready), "the first program runs")
            refused = user.strata("snapshot", "first")
            if refused.returncode == 0:
                raise Skip("CRIU is installed for everybody here")
            for more in ({"STRATA_CRIU": CRIU},
                         {"PATH": f"{os.path.dirname(CRIU)}:{user.environment['PATH']}"}):
                done = user.strata("snapshot", "first", **more)
                if done.returncode:
                    raise Failure(f"with {more}: {done.stderr.strip()}")
        finally:
            first.kill()
            first.wait()


@case("private-daemon-limits", native=False)
def limits_of_client(run):
    """The limit of address space of a client is its program's, not the daemon's."""
    with client(run) as user:
        done = user.strata("run", "--name", "first", "--dram", "64MiB", "--", "/bin/sh", "-c",
                           "ulimit -v", limit=4 << 30)
        if done.returncode or done.stdout.strip() != str(4 << 20):
            raise Failure(f"status {done.returncode}: {done.stdout} {done.stderr.strip()}")
