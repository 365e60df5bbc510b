"""Clones: each goes on from the same moment, in a place of its own, as a tenant
of its own; neither the original nor another clone sees what it does."""

import os
import re
import socket
import struct

import clones
import machine
from moment import Moment, Snapshots, need_criu
from redis import Redis, value
from snapshot_crash import refused
from snapshot_programs import python_with_numpy, SOURCES
from strata import Failure
from suite import case
from tenants import allowance, cost


@case("snapshot-clone-python", native=False, own_daemon=True, seconds=120, takes=10)
def clone_python(run):
    """Eight of one job, each told to go on by strides of its own: the same
    moment, eight results, and the original's is a ninth."""
    need_criu()
    python, numpy = python_with_numpy()
    job = Moment(run, "job", 32, "56MiB",
                 command=(python, "-B", os.path.join(SOURCES, "arrays.py")))
    job.pressed()
    snapshot = job.take()
    eight = clones.of_moment(job, snapshot, 8, "--name", "worker")
    if sorted(one.name for one in eight) != [f"worker-{n}" for n in range(1, 9)]:
        raise Failure(f"they are called {[one.name for one in eight]}")
    clones.assert_moment(job, snapshot, eight)
    if run.daemon.tenants() != sorted([job.name, *(one.name for one in eight)]):
        raise Failure(f"tenants are {run.daemon.tenants()}")
    everyone = [job, *eight]
    for number, one in enumerate(everyone):
        one.put(48, 2 + number)
        one.order("write")
    for one in everyone:
        one.goes_on()
    for number, one in enumerate(everyone):
        one.check()
        advanced, began, rounds = (one.long(at) for at in (56, 64, 72))
        if rounds <= began or advanced != rounds + (1 + number) * (rounds - began):
            raise Failure(f"{one.name} went {advanced} in {rounds} rounds, from round {began} on "
                          f"by {2 + number}")
        one.assert_clean()
        one.order("end")
    run.note("NumPy arrays" if numpy else "without NumPy")


class Server(Snapshots):
    """Redis as a tenant, by TCP."""

    RECORDS = 20_000

    def __init__(self, run, budget):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        program = run.start(run.tool("redis-server"), "--port", self.port, "--bind", "127.0.0.1",
                            "--save", "", "--appendonly", "no", "--dir", run.directory,
                            "--enable-debug-command", "yes", budget=budget)
        super().__init__(run, program)
        self.redis = self.client(self.port)
        self.redis.set_many(range(self.RECORDS))

    def client(self, port):
        return Redis(("127.0.0.1", int(port)), dead=lambda: self.program.process.poll() is not None)


def holds(redis, who, versions, word):
    """All records are of these versions, and the word is this one."""
    if bad := redis.wrong(range(Server.RECORDS), versions):
        raise Failure(f"{bad} records of {who} are not its own")
    if (found := redis.ask("GET", "word")) != word:
        raise Failure(f"{who} has the word {found}, not {word}")


@case("snapshot-clone-redis", native=False, own_daemon=True, seconds=120, takes=15)
def clone_redis(run):
    """Two with networks of their own, behind ports of this machine: they have the
    snapshot's values while the original goes on with others, and what is written
    to one is in no other."""
    server = Server(run, "24MiB")
    server.redis.ask("SET", "word", "then")
    snapshot = server.take("--label", "then")
    digest = server.redis.ask("DEBUG", "DIGEST")
    server.redis.set_many(range(0, Server.RECORDS, 2), 1)
    server.redis.ask("SET", "word", "now")
    started, _ = clones.start(server, snapshot, "--count", "2", "--name", "twin", "--net", "new",
                              "--forward", f"0:{server.port}")
    ports = [re.search(r"127\.0\.0\.1:(\d+)", " ".join(line)) for line in started]
    if len(started) != 2 or not all(ports):
        raise Failure(f"no ports are printed: {started}")
    twins = [clones.Clone(server, line[0]) for line in started]
    clients = [server.client(port[1]) for port in ports]
    for twin, client in zip(twins, clients):
        holds(client, twin.name, lambda n: 0, b"then")
        if client.ask("DEBUG", "DIGEST") != digest:
            raise Failure(f"{twin.name} has another digest than the snapshot")
    for number, client in enumerate(clients):
        client.set_many(range(number, Server.RECORDS, 3), 2 + number)
        client.ask("SET", "word", f"twin {number}")
    # Each its own, all at the same time.
    for number, (twin, client) in enumerate(zip(twins, clients)):
        holds(client, twin.name, lambda n: 2 + number if n % 3 == number else 0,
              f"twin {number}".encode())
        stats = run.daemon.stats(twin.name)
        if stats["evictions_total"] == 0 or stats["lost_pages_total"]:
            raise Failure(f"{twin.name}: {stats['evictions_total']} evictions, "
                          f"{stats['lost_pages_total']} pages lost")
    holds(server.redis, "the original", lambda n: 1 - n % 2, b"now")
    # A port that is taken, by a clone or anybody: refused, and nothing new is there.
    before = run.daemon.tenants()
    refused(clones.start(server, snapshot, "--net", "new", "--forward",
                         f"{ports[0][1]}:{server.port}", check=False), ports[0][1], "in use")
    # The original's port, in the original's network.
    refused(clones.start(server, snapshot, check=False), "in use", "--net new")
    if run.daemon.tenants() != before:
        raise Failure(f"a refused clone left {run.daemon.tenants()}, there were {before}")
    # The original ends, its snapshot goes: the clones are not concerned.
    server.redis.close()
    server.kill()
    server.remove(snapshot)
    for number, (twin, client) in enumerate(zip(twins, clients)):
        holds(client, twin.name, lambda n: 2 + number if n % 3 == number else 0,
              f"twin {number}".encode())
        client.close()
    # And when one has ended, nobody listens on its port.
    twins[0].kill()
    run.daemon.wait_until(lambda: not listens(ports[0][1]), "the port of an ended clone is free")
    if not listens(ports[1][1]):
        raise Failure("the other clone's port is gone as well")


def listens(port):
    try:
        socket.create_connection(("127.0.0.1", int(port)), 1).close()
        return True
    except OSError:
        return False


# Appends its numbers to a file, eight bytes at a time, as long as a second file
# says so; at each thousand it makes a file more.
NUMBERS = """
import os, struct, time
held = bytearray(os.urandom(1 << 20) * 24)
out, n = os.open("numbers", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 0
os.mkdir("more")
while os.path.exists("go"):
    n += 1
    os.write(out, struct.pack("<Q", n))
    time.sleep(0.0002)
    held[n * 4096 % len(held)] ^= 1
    if n % 1000 == 0:
        open(f"more/{n}", "w").write(str(n))
"""


def numbers(directory):
    data = machine_bytes(os.path.join(directory, "numbers"))
    return list(struct.unpack(f"<{len(data) // 8}Q", data[:len(data) // 8 * 8]))


def machine_bytes(path):
    with open(path, "rb") as file:
        return file.read()


@case("snapshot-clone-directory", native=False, own_daemon=True)
def clone_directory(run):
    """--copy-dir: what a clone writes, makes and removes is in its copy alone,
    which goes when it has ended."""
    need_criu()
    go = os.path.join(run.directory, "go")
    open(go, "w").close()
    program = run.start("/usr/bin/python3", "-c", NUMBERS, budget="32MiB")
    original = Snapshots(run, program)
    run.daemon.wait_until(lambda: os.path.exists(os.path.join(run.directory, "more", "2000")),
                          "it writes")
    first = len(numbers(run.directory))
    snapshot = original.take()
    last = len(numbers(run.directory))
    run.daemon.wait_until(lambda: len(numbers(run.directory)) > last + 3000, "it goes on")
    _, notes = clones.start(original, snapshot, "--count", "2", "--name", "other",
                            "--copy-dir", run.directory)
    copies = dict(re.findall(r"(\S+) sees (\S+) as ", notes))
    if sorted(copies) != ["other-1", "other-2"]:
        raise Failure(f"it says {notes}")
    others = {name: clones.Clone(original, name) for name in copies}
    ended = set()
    for name, copy in copies.items():
        if os.stat(os.path.dirname(copy)).st_mode & 0o77:
            raise Failure(f"{copy} is open to others")
        jump = run.daemon.wait_until(lambda: jumps(numbers(copy)), f"{name} writes")
        if len(jump) != 1 or not first <= jump[0][1] <= last + 2:
            raise Failure(f"{name}: the numbers jump {jump}, the snapshot was taken between "
                          f"{first} and {last}")
        # It alone is told to end, by its own file.
        os.unlink(os.path.join(copy, "go"))
        run.daemon.wait_until(lambda: not others[name].pids(), f"{name} ends")
        ended.add(name)
        if len(ended) == 1 and not others["other-2"].pids():
            raise Failure("both ended")
    run.daemon.wait_until(lambda: not any(os.path.exists(c) for c in copies.values()),
                          "the copies of ended clones are removed")
    mine = numbers(run.directory)
    if jumps(mine) or mine != list(range(1, len(mine) + 1)):
        raise Failure(f"the original's file jumps {jumps(mine)[:3]}")
    made = {int(name) for name in os.listdir(os.path.join(run.directory, "more"))}
    if made != set(range(1000, max(made) + 1, 1000)):
        raise Failure("the original's directory has lost files")
    os.unlink(go)
    program.end_well()


def jumps(found):
    return [(a, b) for a, b in zip(found, found[1:]) if b != a + 1]


def register(mode, megabytes, budget, processes, *options):
    @case(f"snapshot-clone-{mode}", native=False, own_daemon=True)
    def body(run):
        """Two clones under pressure; the original ends first, then the snapshot
        goes; a clone is killed and comes back."""
        original = Moment(run, mode, megabytes, budget)
        original.pressed()
        snapshot = original.take()
        two = clones.of_moment(original, snapshot, 2, *options)
        clones.assert_moment(original, snapshot, two)
        pids = [set(one.pids()) for one in (original, *two)]
        if any(len(own) != processes for own in pids) or len(set.union(*pids)) != 3 * processes:
            raise Failure(f"the processes are {pids}")
        original.order("end")
        run.daemon.wait_until(lambda: not original.pids(), "the original ends")
        for one in two:
            one.pressed()
            one.check()
        original.remove(snapshot)
        one, other = two
        own = one.take()
        one.pressed()
        one.crash(own)
        one.roll(own)
        if not one.pids() or len(one.pids()) != processes:
            raise Failure(f"{one.pids()} came back of {one.name}")
        for one in two:
            one.pressed()
            one.check()
            one.assert_clean()
            one.order("end")
            run.daemon.wait_until(lambda: not one.pids(), "the clone ends when its program does")


register("threads", 24, "10MiB", 1)
register("processes", 16, "36MiB", 3)
# Both ends of their TCP connections are in the clone, so they go on.
register("connections", 24, "44MiB", 5, "--net", "new")


@case("snapshot-clone-again", native=False, own_daemon=True)
def clone_again(run):
    """A clone is a tenant: it keeps a budget, its own, and has snapshots, clones
    of which go on from where *it* was. All of it is given back."""
    original = Moment(run, "plain", 24, "10MiB")
    original.pressed()
    footprint = run.daemon.footprint()
    snapshot = original.take()
    (clone,) = clones.of_moment(original, snapshot, 1, "--name", "second")
    clones.assert_moment(original, snapshot, [clone])
    clone.pressed()
    run.daemon.strata("set", clone.name, "--dram", "8MiB")
    run.daemon.wait_until(
        lambda: cost(run.daemon.stats(clone.name)) <= (8 << 20) + allowance(8 << 20),
        "the clone keeps another budget than the original")
    if (left := run.daemon.stats(original.name)["budget_bytes"]) != 10 << 20:
        raise Failure(f"the original has a budget of {left} now")
    clone.order("write")
    clone.check()
    own = clone.take("--label", "own")
    if own != "second@1" or clone.list()[own]["parent"] != snapshot:
        raise Failure(f"{own} comes from {clone.list()[own]['parent']}, not from {snapshot}")
    grand = clones.of_moment(clone, own, 2, "--name", "third", directory=clone.run.directory)
    clones.assert_moment(clone, own, grand)
    for one in (original, clone, *grand):
        one.pressed()
        one.check()
        one.assert_clean()
    clone.kill()
    for one in grand:
        one.pressed()
        one.check()
    for one in grand:
        one.kill()
    clone.remove(own)
    original.remove(snapshot)
    original.pressed()
    original.check()
    run.daemon.settled(footprint, "the daemon gives back what clones cost")


@case("snapshot-clone-refused", native=False, own_daemon=True)
def clone_refused(run):
    """Names, numbers and choices that cannot be: one line, and nothing is there."""
    original = Moment(run, "quiet", 32, "256MiB")
    snapshot = original.take("--label", "here")
    before = (run.daemon.tenants(), original.pids(), original.list().keys())
    nowhere = os.path.join(run.directory, "nowhere")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, status, words in (
            ((snapshot, "--count", "0"), 2, ("1..=256",)),
            ((snapshot, "--count", "257"), 2, ("1..=256",)),
            ((snapshot, "--count", "x"), 2, ("--count",)),
            ((snapshot, "--name", "../x"), 2, ("name",)),
            ((snapshot, "--name", original.name), 1, (original.name, "already")),
            ((snapshot, "--name", "keeper"), 1, ("keeper", "already")),
            ((f"{original.name}@99",), 1, (f"{original.name}@99",)),
            ((f"{original.name}@nothing",), 1, (f"{original.name}@nothing",)),
            ((original.name,), 2, ("NAME@",)),
            ((snapshot, "--forward", "7000:80"), 2, ("network of its own",)),
            ((snapshot, "--net", "new", "--forward", "x:80"), 2, ("--forward",)),
            ((snapshot, "--net", "new", "--forward", "7000:0"), 2, ("port 0",)),
            ((snapshot, "--net", "new", "--forward", f"{port}:80"), 1, (str(port), "in use")),
            # The second one's, if nobody has the first.
            ((snapshot, "--net", "new", "--count", "2", "--forward", f"{port - 1}:80"), 1,
             ("in use",)),
            ((snapshot, "--net", "new", "--count", "9", "--forward", "65530:80"), 2, ("65535",)),
            ((snapshot, "--copy-dir", nowhere), 1, (nowhere,)),
            ((snapshot, "--copy-dir", original.board_path), 1, (original.board_path, "directory")),
        ):
            done = clones.start(original, *arguments, check=False)
            lines = done.stderr.splitlines()
            if done.returncode != status or not all(word in done.stderr for word in words) or \
                    (status == 1 and len(lines) != 1):
                raise Failure(f"strata clone {' '.join(arguments)}: status {done.returncode} "
                              f"instead of {status}, {lines}")
            if done.stdout:
                raise Failure(f"strata clone {' '.join(arguments)} was refused and says "
                              f"{done.stdout}")
    # The second of three cannot have its name: none is left.
    run.start("hold", "8", budget="64MiB", name="group-2").gate("ready")
    refused(clones.start(original, snapshot, "--count", "3", "--name", "group", check=False),
            "group-2", "already")
    run.programs[-1].answer("end")
    run.programs[-1].finish(pressed=False)
    run.daemon.wait_until(
        lambda: (run.daemon.tenants(), original.pids(), original.list().keys()) == before,
        "all is as it was before the refusals")
    original.goes_on()
    original.check()


@case("snapshot-clone-worker-killed", native=False, own_daemon=True)
def clone_worker_killed(run):
    """The worker dies while clones run: the next one serves them and their ports."""
    server = Server(run, "24MiB")
    server.redis.ask("SET", "word", "then")
    snapshot = server.take()
    (line,), _ = clones.start(server, snapshot, "--name", "twin", "--net", "new", "--forward",
                              f"0:{server.port}")
    port = re.search(r"127\.0\.0\.1:(\d+)", " ".join(line))[1]
    twin = clones.Clone(server, "twin")
    worker = run.daemon.worker()
    os.kill(worker, 9)
    run.daemon.wait_until(lambda: not machine.alive(worker) and run.daemon.worker(),
                          "there is another worker")
    run.daemon.wait_until(lambda: listens(port), "the clone's port answers again")
    client = server.client(port)
    holds(client, "twin", lambda n: 0, b"then")
    client.set_many(range(0, Server.RECORDS, 3), 5)
    holds(client, "twin", lambda n: 5 * (n % 3 == 0), b"then")
    holds(server.redis, "the original", lambda n: 0, b"then")
    client.close()
    # And it can be taken and brought back in its place.
    own = twin.take()
    twin.kill()
    twin.restore(own)
    run.daemon.wait_until(lambda: listens(port), "the restored clone's port answers")
    client = server.client(port)
    holds(client, "twin", lambda n: 5 * (n % 3 == 0), b"then")
    client.close()


@case("snapshot-clone-name-again", native=False, own_daemon=True)
def clone_name_again(run):
    """A program that is started under the name of a clone that has gone is none:
    it comes back with its own process number, and its own files."""
    original = Moment(run, "quiet", 16, "10MiB", name="first")
    snapshot = original.take()
    (clone,) = clones.of_moment(original, snapshot, 1, "--name", "other", "--net", "new")
    clone.kill()
    run.daemon.wait_until(lambda: run.daemon.tenants() == ["first"], "the clone is forgotten")
    plain = Moment(run, "quiet", 16, "10MiB", name="other")
    own = plain.take()
    if plain.list()[own]["parent"]:
        raise Failure(f"{own} of a new program comes from {plain.list()[own]['parent']}")
    pids = plain.pids()
    plain.roll(own)
    if plain.pids() != pids:
        raise Failure(f"process {pids} came back as {plain.pids()}")
    plain.crash(own)
    plain.assert_clean()
