"""What the daemon says, and to whom: its log, and the standard error of a program that
was to be managed and is not."""

import os
import signal
import subprocess
import tempfile

from strata import Failure, configured
from suite import case

NOBODY = 65534
# As a service that is restarted in a loop; it is a quarter of the time in the middle of
# ending.
RESTARTS = 250
REFUSED = """
[[manage]]
name = "refused"
exe = "{sleep}"
user = "65534"
dram = "8MiB"
"""


def lines(path):
    with open(path, errors="replace") as log:
        return log.read().splitlines()


@case("name-again-at-once", native=False, takes=20)
def name_again_at_once(run):
    """Whoever starts a program under the name of one that has just ended gets it."""
    refused = []
    for number in range(run.times(RESTARTS)):
        done = run.daemon.strata("run", "--name", "again", "--dram", "8MiB", "--", "true",
                                 check=False)
        if done.returncode != 0:
            refused.append(f"{number}: {done.stderr.strip()}")
    if refused:
        raise Failure(f"{len(refused)} of {run.times(RESTARTS)} did not start: {refused[0]}")
    living = run.daemon.start_strata("run", "--name", "again", "--", "sleep", "60")
    try:
        # Not the one before, of which something may be left.
        run.daemon.wait_until(
            lambda: (s := run.daemon.stats("again")) and s["pids"] and s["command"][0] == "sleep",
            "it runs")
        second = run.daemon.strata("run", "--name", "again", "--", "true", check=False)
        if second.returncode == 0 or "there is a tenant again already" not in second.stderr:
            raise Failure(f"a second one beside it: {second.returncode} {second.stderr!r}")
    finally:
        living.kill()
        living.communicate()


@case("hangup", native=False, own_daemon=True)
def hangup(run):
    """SIGHUP asks for a new look at the configuration, which a private daemon has not: it
    says so and goes on, whether its supervisor gets it or its worker."""
    with open(run.daemon.log_path) as log:
        log.seek(0, os.SEEK_END)
        for pid in (run.daemon.worker(), run.daemon.pid):
            os.kill(pid, signal.SIGHUP)
        said = ""

        def told():
            nonlocal said
            said += log.read()
            return "SIGHUP: a private stratad has no configuration" in said
        run.daemon.wait_until(told, "it says that it does not read its configuration again")
    if not run.daemon.is_well():
        raise Failure("it has ended")
    if run.daemon.stats("keeper")["state"] == "released":
        raise Failure("it has released its tenants")


@case("log-lines", native=False)
def log_lines(run):
    """A line each when the daemon starts, when a tenant starts, gets another budget and
    ends, and when the daemon stops; with a priority where the journal reads it."""
    for journal in (False, True):
        directory = tempfile.mkdtemp(prefix="strata-test-")
        path = os.path.join(run.log_directory, f"lines-{journal}.log")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("STRATA_")}
        with open(path, "w") as log:
            if journal:
                file = os.fstat(log.fileno())
                environment["JOURNAL_STREAM"] = f"{file.st_dev}:{file.st_ino}"
            daemon = subprocess.Popen(
                [run.binaries.stratad, "--private", directory], env=environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        environment["STRATA_SOCKET"] = os.path.join(directory, "control.sock")

        def strata(*arguments):
            return subprocess.run([run.binaries.strata, *arguments], env=environment,
                                  stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                  check=False)
        try:
            run.daemon.wait_until(lambda: os.path.exists(environment["STRATA_SOCKET"]), "it listens")
            strata("run", "--name", "web", "--dram", "16MiB", "--", run.binaries.strata, "set",
                   "web", "--dram", "24MiB")
            daemon.wait(20)
        finally:
            if daemon.poll() is None:
                daemon.kill()
                daemon.wait()
        said = lines(path)
        head = "<5>" if journal else "stratad: "
        for wanted in (f"{head}starts: version ", f"{head}tenant web starts: budget 16.0 MiB, user 0, ",
                       f"{head}web: its budget is 24.0 MiB now (user 0)",
                       f"{head}tenant web ended after ", f"{head}stops"):
            if sum(line.startswith(wanted) for line in said) != 1:
                raise Failure(f"not one line {wanted!r}: {said}")


@case("refused-user", native=False, own_daemon=True)
def refused_user(run):
    """A program that a rule manages, of a user who may not be managed: the program says
    so, the log says so, and no tenant is left behind that nobody is in. So it is with a
    program that becomes such a user under `strata run`, whose tenant names it."""
    place = os.path.join(run.directory, "refused")
    os.mkdir(place)
    os.chmod(run.directory, 0o755)
    sleep = os.path.realpath("/bin/sleep")
    path = os.path.join(run.log_directory, "stratad-refused.log")
    with configured(run.daemon, REFUSED.format(sleep=sleep), place, path):
        sockets = os.path.dirname(run.daemon.socket_path)
        # Where anybody may read it.
        library = os.path.join(tempfile.mkdtemp(prefix="strata-test-"), "libstrata.so")
        os.chmod(os.path.dirname(library), 0o755)
        with open(run.binaries.library, "rb") as built, open(library, "wb") as copy:
            copy.write(built.read())
        environment = {**os.environ, "LD_PRELOAD": library,
                       "STRATA_AGENT_SOCKET": os.path.join(sockets, "agent.sock")}
        done = subprocess.run([sleep, "0.1"], env=environment, user=NOBODY, group=NOBODY, cwd="/",
                              capture_output=True, text=True, check=False)
        if done.returncode != 0 or "uffd_users" not in done.stderr:
            raise Failure(f"it says nothing of it: {done.returncode} {done.stderr!r}")
        if (left := run.daemon.tenants()):
            raise Failure(f"tenants that nobody is in: {left}")
        said = [line for line in lines(path) if f"user {NOBODY} may not use userfaultfd" in line]
        if len(said) != 1:
            raise Failure(f"not one line in the log: {lines(path)}")
