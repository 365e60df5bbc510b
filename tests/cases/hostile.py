"""Hostile bytes on both sockets and agents that lie. The one who does it may
come to harm; another tenant of the same daemon goes on unharmed, and the daemon
gives everything back afterwards."""

import json
import os
import random
import signal
import socket

from strata import Failure
from suite import case


def beside_a_neighbour(run, act):
    """Runs `act` beside a tenant under load that must go on being served."""
    daemon = run.daemon
    before = daemon.footprint()
    neighbour = run.start("hold", "64", "load", budget="24MiB", name="neighbour")
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
            program = run.start("hostile", mode, budget="32MiB", name="hostile")
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


for mode in ("garbage", "crowd", "half", "wrong-descriptor", "impostor", "liar", "mute",
             "scribbler", "stuck", "leaver", "meddler", "foreign-transfer"):
    register(mode)


def messages(count):
    """Lines that no client should send; seeded, so the same in each run."""
    source = random.Random(1)
    good = [
        {"request": "ping"}, {"request": "list"}, {"request": "stats", "name": "neighbour"},
        {"request": "set", "name": "nobody", "dram_bytes": 1 << 20},
        {"request": "run", "name": None, "dram_bytes": None, "command": ["x"]},
    ]
    yield b""
    yield b"\n" * 1000
    yield b"[" * 100_000 + b"\n"
    yield b'{"request":' * 10_000 + b"\n"
    yield b"\xff\xfe\x00{}\n"
    yield b'{"request":"stats","name":"' + b"a" * (3 << 20) + b'"}\n'
    for number in (-1, 0, 1 << 62, 1 << 64, 1e300, "4GiB", None, [], True):
        yield json.dumps({"request": "set", "name": "neighbour", "dram_bytes": number}).encode() \
            + b"\n"
    for name in ("", "../../etc/passwd", "a\nb", "a\x00b", "\u202e", "x" * 10_000, "%s%n"):
        yield json.dumps({"request": "stats", "name": name}).encode() + b"\n"
        yield json.dumps({"request": "stop", "name": name}).encode() + b"\n"
    for _ in range(count):
        line = bytearray(json.dumps(source.choice(good)).encode() + b"\n")
        for _ in range(source.randrange(1, 6)):
            kind = source.randrange(3)
            where = source.randrange(len(line))
            if kind == 0:
                line[where] = source.randrange(256)
            elif kind == 1:
                del line[where:where + source.randrange(1, 9)]
            else:
                line[where:where] = source.randbytes(source.randrange(1, 30))
            line = line or bytearray(b"\n")
        yield bytes(line)


@case("control-garbage", native=False, own_daemon=True)
def control_garbage(run):
    """Mutated, oversized and absurd requests."""
    def act():
        for line in messages(run.times(300)):
            # A mutation must not happen to be a request that the neighbour
            # would rightly suffer from.
            if b"stop" in line and b"neighbour" in line:
                continue
            with socket.socket(socket.AF_UNIX) as link:
                link.settimeout(10)
                link.connect(run.daemon.socket_path)
                try:
                    link.sendall(line)
                    link.shutdown(socket.SHUT_WR)
                    while link.recv(1 << 16):
                        pass
                except TimeoutError:
                    raise Failure(f"no answer and no end after {line[:60]!r}") from None
                except OSError:
                    pass  # it may well hang up on us
        if (budget := run.programs[0].stats()["budget_bytes"]) != 24 << 20:
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
