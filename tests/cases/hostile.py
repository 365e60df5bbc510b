"""Hostile bytes on both sockets and agents that lie. The one who does it may
come to harm; another tenant of the same daemon goes on unharmed, and the daemon
gives everything back afterwards."""

import os
import signal
import socket
import subprocess
import sys

from strata import Failure, configured
from suite import ROOT, case


def beside_a_neighbour(run, act):
    """Runs `act` beside a tenant under load that must go on being served."""
    daemon = run.daemon
    before = daemon.footprint()
    neighbour = run.start("hold", "32", "load", budget="12MiB", name="neighbour")
    neighbour.gate("running")
    daemon.wait_until(lambda: neighbour.stats()["faults_total"] > 100, "the neighbour is served")
    act()
    faults = neighbour.stats()["faults_total"]
    daemon.wait_until(lambda: neighbour.stats()["faults_total"] > faults + 200,
                      "the neighbour is still served")
    neighbour.answer()
    neighbour.finish()
    daemon.wait_until(lambda: not daemon.tenants(), "strata ps lists nobody any more")
    daemon.settled(before, "the daemon gives back what it was made to hold")


def register(mode):
    def body(run):
        def act():
            program = run.start("hostile", mode, budget="16MiB", name="hostile")
            program.gate("acted")
            neighbour = run.programs[0]
            faults = neighbour.stats()["faults_total"]
            run.daemon.wait_until(lambda: neighbour.stats()["faults_total"] > faults + 500,
                                  "the neighbour is served beside the hostile agent")
            if run.daemon.stats("hostile"):
                run.daemon.strata("ps")
            try:
                os.kill(program.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            program.wait()
        beside_a_neighbour(run, act)
    case(f"agent-{mode}", native=False, own_daemon=True)(body)


for mode in ("garbage", "crowd", "hoarder", "half", "wrong-descriptor", "impostor", "liar", "mute",
             "scribbler", "stuck", "dam", "leaver", "meddler", "foreign-transfer"):
    register(mode)


def refuse_release(mode):
    def body(run):
        def act():
            program = run.start("hostile", mode, budget="16MiB", name="hostile")
            program.gate("acted")
            done = run.daemon.strata("release", "hostile", check=False,
                                     timeout_s=run.seconds_left())
            # The dam holds nobody up, and what it says has moved is where it was: that can
            # be given back, unless it is being said just now.
            if mode == "dam" and (done.returncode, done.stderr) == (0, ""):
                pass
            elif done.returncode != 1 or len(done.stderr.splitlines()) != 1 \
                    or not done.stderr.startswith("strata: cannot release hostile: ") \
                    or done.stderr.count("hostile:") != 1:
                raise Failure(f"release: status {done.returncode}, {done.stderr!r}")
            os.kill(program.pid, signal.SIGKILL)
            program.wait()
        log = os.path.join(run.log_directory, "impatient.log")
        with configured(run.daemon, 'release_patience = "1s"\n', run.directory, log) as pid:
            run.daemon.pid, before = pid, run.daemon.pid
            try:
                beside_a_neighbour(run, act)
            finally:
                run.daemon.pid = before
    case(f"release-{mode}-agent", native=False, own_daemon=True)(body)


# What they hold cannot come back; asking for it must not take for ever.
for mode in ("mute", "stuck", "dam"):
    refuse_release(mode)


@case("control-garbage", native=False, own_daemon=True)
def control_garbage(run):
    """Mutated, oversized and absurd requests, and some that are good: a process
    of its own sends them, and what they made must go with it."""
    def act():
        script = os.path.join(ROOT, "tests", "programs", "garbage.py")
        done = subprocess.run([sys.executable, "-B", script, run.daemon.socket_path,
                               str(run.times(300))], capture_output=True, text=True,
                              timeout=run.seconds_left(), check=False)
        if done.returncode:
            raise Failure((done.stderr.splitlines() or ["garbage.py failed"])[-1])
        if (budget := run.programs[0].stats()["budget_bytes"]) != 12 << 20:
            raise Failure(f"garbage changed the neighbour's budget to {budget} bytes")
    beside_a_neighbour(run, act)


@case("control-crowd", native=False, own_daemon=True)
def control_crowd(run):
    """Hundreds of connections that say nothing, or half a line."""
    def act():
        crowd = []
        for number in range(400):
            link = socket.socket(socket.AF_UNIX)
            link.settimeout(5)
            try:
                link.connect(run.daemon.socket_path)
                if number % 2:
                    link.sendall(b'{"request":"pi')
            except OSError:
                pass  # refused: one way to bound it
            crowd.append(link)
        # Somebody else gets an answer, if need be after some were thrown out.
        def answered():
            try:
                return run.daemon.ask({"request": "ping"})["reply"] == "pong"
            except (OSError, ValueError):
                return False
        run.daemon.wait_until(answered, "a client gets an answer beside the crowd", 40)
        for link in crowd:
            link.close()
        run.daemon.wait_until(answered, "a client gets an answer after the crowd")
    beside_a_neighbour(run, act)
