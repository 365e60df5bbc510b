"""Connections of a program while it is snapshotted: those that it has with others
are not disturbed, and end in what is brought back; those inside of it go on there
(snapshot-connections, snapshot-clone-connections); who ends with them ends there."""

import os
import re
import socket
import struct
import threading

import clones
import machine
from moment import Snapshots, need_criu
from snapshot_crash import refused
from snapshot_programs import SOURCES
from strata import Failure
from suite import case

BLOCK = 8192


class Client(threading.Thread):
    """Sends numbered blocks all the while, a few of them ahead of their answers,
    and checks these."""

    AHEAD = 8

    def __init__(self, port):
        super().__init__(daemon=True)
        self.link = socket.create_connection(("127.0.0.1", port))
        self.link.settimeout(60)
        self.answered, self.stop, self.error, self.ended = 0, threading.Event(), None, False
        self.start()

    @staticmethod
    def block(number):
        return struct.pack("<QQ", 0, number) + struct.pack("<Q", number * 7919) * (BLOCK // 8 - 2)

    def run(self):
        sent = 0
        try:
            while not (self.stop.is_set() and sent == self.answered):
                while sent < self.answered + self.AHEAD and not self.stop.is_set():
                    self.link.sendall(self.block(sent))
                    sent += 1
                got = b""
                while len(got) < BLOCK:
                    piece = self.link.recv(BLOCK - len(got))
                    if not piece:
                        self.ended = True
                        return
                    got += piece
                if got != self.block(self.answered):
                    raise RuntimeError(f"the answer to block {self.answered} is another")
                self.answered += 1
        except ConnectionError:
            self.ended = True
        except (OSError, RuntimeError) as error:
            self.error = error

    def check(self):
        if self.error:
            raise Failure(f"a client: {self.error}")

    def goes_on(self, server, what):
        before = self.answered

        def moved():
            self.check()
            if self.ended:
                raise Failure(f"{what}: the connection has ended")
            return self.answered > before + 3 * self.AHEAD
        server.until(moved, f"{what}: answers come")

    def close(self):
        self.stop.set()
        self.join(30)
        self.link.close()
        self.check()


class Connected(Snapshots):
    """tests/programs/connected.py as a tenant."""

    def __init__(self, run, budget):
        need_criu()
        program = run.start("/usr/bin/python3", os.path.join(SOURCES, "connected.py"), "24",
                            budget=budget)
        super().__init__(run, program)
        self.file = os.path.join(run.directory, "port")
        self.until(lambda: os.path.exists(self.file), "the server listens")
        with open(self.file, encoding="ascii") as file:
            self.port = int(file.read())
        self.note_pids()

    def has_no_client(self):
        """All that it had are at their end for it."""
        counted = os.path.join(self.run.directory, "clients")
        self.until(lambda: machine.read(counted) == "0", "the server finds its clients' end")

    def until(self, condition, what):
        def holds():
            with open(self.program.log_path, encoding="utf-8", errors="replace") as log:
                if said := log.read().strip():
                    raise Failure(f"the server: {said.splitlines()[0]}")
            return condition()
        return self.daemon.wait_until(holds, what, 40)


@case("snapshot-outside-connections", native=False, own_daemon=True)
def outside(run):
    """Six snapshots while clients stream: not a block is lost, doubled or changed,
    and no connection breaks. Rolled back, the clients find the end, the worker is
    still connected, and new clients are served; in a clone beside it as well."""
    server = Connected(run, "28MiB")
    streams = [Client(server.port) for _ in range(3)]
    mute = Client(server.port)
    mute.goes_on(server, "before it falls silent")
    mute.stop.set()
    mute.join()
    for one in streams:
        one.goes_on(server, "before any snapshot")
    snapshots = []
    for number in range(6):
        snapshots.append(server.take())
        for one in streams:
            one.goes_on(server, f"after snapshot {number + 1}")
    (name, *_), = clones.start(server, snapshots[0], "--net", "new", "--copy-dir", run.directory,
                               "--forward", f"0:{server.port}")[0]
    listed = clones.start(server, snapshots[5], "--net", "new", "--copy-dir", run.directory,
                          "--name", "second", "--forward", f"0:{server.port}")[0]
    clones.Clone(server, name)
    second = clones.Clone(server, "second")
    port = int(re.search(r"127\.0\.0\.1:(\d+)", " ".join(listed[0]))[1])
    beside = Client(port)
    beside.goes_on(server, "a client of a clone")
    for one in streams:
        one.goes_on(server, "beside a clone")
    for snapshot in (snapshots[5], snapshots[0]):
        server.rollback(snapshot)
        for one in streams:
            server.until(lambda: one.ended or one.error, "a client finds the end")
        # For the server they have ended although they are still open.
        server.has_no_client()
        for one in streams:
            one.close()
        streams = [Client(server.port) for _ in range(3)]
        for one in streams:
            one.goes_on(server, "after a rollback")
    server.kill()
    for one in streams:
        server.until(lambda: one.ended or one.error, "a client finds the end")
        one.close()
    server.restore(snapshots[3])
    server.has_no_client()
    one = Client(server.port)
    one.goes_on(server, "after a restore")
    one.close()
    beside.goes_on(server, "a client of a clone, to the end")
    beside.close()
    mute.close()
    freezes = [info["freeze_us"] / 1000 for info in server.list().values()]
    run.note("frozen " + ", ".join(f"{freeze:.0f}" for freeze in freezes) + " ms")
    for tenant in (server, second):
        if lost := run.daemon.stats(tenant.name)["lost_pages_total"]:
            raise Failure(f"{lost} pages lost")


@case("snapshot-unaccepted-connections", native=False, own_daemon=True)
def unaccepted(run):
    """Clients that nobody has accepted yet do not keep a snapshot from being taken,
    are served afterwards, and are in no snapshot."""
    server = Connected(run, "28MiB")
    closed = os.path.join(run.directory, "closed")
    served = Client(server.port)
    served.goes_on(server, "before")
    open(closed, "w").close()
    served.goes_on(server, "while nobody else is accepted")
    waiting = [Client(server.port) for _ in range(3)]
    snapshot = server.take()
    served.goes_on(server, "after the snapshot")
    if any(one.answered or one.ended for one in waiting):
        raise Failure("one that was not accepted got an answer")
    os.unlink(closed)
    for one in waiting:
        one.goes_on(server, "accepted after the snapshot")
    server.rollback(snapshot)
    for one in (served, *waiting):
        server.until(lambda: one.ended or one.error, "a client finds the end")
        one.close()
    server.has_no_client()
    one = Client(server.port)
    one.goes_on(server, "after the rollback")
    one.close()


@case("snapshot-clone-keeps-connections", native=False, own_daemon=True)
def keeps(run):
    """On the network of the original a clone cannot have the same connections
    while that has them: a line says so, and the original does not notice. When it
    has ended, one clone goes on with them, and without the wish finds them closed."""
    server = Connected(run, "28MiB")
    snapshot = server.take()
    stream = Client(server.port)
    refused(clones.start(server, snapshot, "--tcp", "keep", check=False), "still connected")
    refused(clones.start(server, snapshot, "--tcp", "keep", "--count", "2", check=False),
            "one clone", status=2)
    stream.goes_on(server, "beside a refused clone")
    server.kill()
    server.until(lambda: stream.ended or stream.error, "the client finds the end")
    stream.close()
    ((name, *_),), _ = clones.start(server, snapshot, "--tcp", "keep")
    clone = clones.Clone(server, name)
    stream = Client(server.port)
    stream.goes_on(server, "a client of the clone")
    # Rolled back it has those of its own life, which nobody else has.
    own = clone.take()
    clone.rollback(own)
    server.until(lambda: stream.ended or stream.error, "the client finds the end")
    stream.close()
    stream = Client(server.port)
    stream.goes_on(server, "a client of the clone that was rolled back")
    stream.close()
    clone.kill()
    # Without it the worker loses its server, and says so.
    clones.start(server, snapshot, "--name", "closed")
    clones.Clone(server, "closed")
    run.daemon.wait_until(lambda: "has lost" in machine.read(server.program.log_path),
                          "its connections are closed in a clone")


@case("snapshot-clone-brief", native=False, own_daemon=True)
def brief(run):
    """Processes of a clone whose connections are closed, and that end with them, by
    the first of many threads, before they were ever heard of, do not keep the others
    from going on."""
    need_criu()
    program = run.start("brief", "4", "100")
    original = Snapshots(run, program)

    def counted():
        return int(machine.read(os.path.join(run.directory, "rounds")) or 0)
    run.daemon.wait_until(lambda: os.path.exists(os.path.join(run.directory, "ready")),
                          "all are connected")
    snapshot = original.take()
    original.kill()
    for number in range(run.times(4)):
        name = f"brief-{number}"
        clones.start(original, snapshot, "--name", name)
        clone = clones.Clone(original, name)
        run.daemon.wait_until(lambda: len(clone.pids()) == 1, "the children end")
        before = counted()
        run.daemon.wait_until(lambda: counted() > before + 5, "their parent goes on")
        clone.kill()
