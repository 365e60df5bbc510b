"""Snapshots of real servers while clients write to them."""

import threading
import time

from moment import Snapshots
from redis import Redis, value
from strata import Failure
from suite import case

# About 1 KiB each; for a soak, 1 GB of them.
RECORDS, MANY_RECORDS = 60_000, 840_000


class Writer(threading.Thread):
    """Writes `records` in a known order, and after each the counter: record
    c % records gets version 1 + c // records, then `counter` becomes c + 1."""

    def __init__(self, directory, records, start=0):
        super().__init__(daemon=True)
        self.redis, self.records = Redis(directory), records
        self.written, self.stop, self.error = start, threading.Event(), None
        self.start()

    def run(self):
        try:
            while not self.stop.is_set():
                c = self.written
                version, record = divmod(c, self.records)
                if self.redis.ask("SET", f"k{record}", value(record, 1 + version)) \
                        != b"OK" or self.redis.ask("SET", "counter", c + 1) != b"OK":
                    raise RuntimeError("SET was refused")
                self.written = c + 1
        except (OSError, RuntimeError) as error:
            self.error = error

    def end(self):
        """Stops; how many were written."""
        self.stop.set()
        self.join()
        self.redis.close()
        if self.error:
            raise Failure(f"writing to Redis: {self.error}")
        return self.written


class Server(Snapshots):
    """Redis as a tenant, loaded."""

    def __init__(self, run, budget, records):
        server = run.tool("redis-server")
        program = run.start(server, "--port", "0", "--unixsocket", "redis.sock", "--save", "",
                            "--appendonly", "no", "--dir", run.directory,
                            "--enable-debug-command", "yes", budget=budget)
        super().__init__(run, program)
        self.records = records
        self.redis = Redis(run.directory, dead=lambda: program.process.poll() is not None)
        self.redis.set_many(range(self.records))
        self.redis.ask("SET", "counter", 0)

    def again(self):
        """A new connection, to what was brought back."""
        self.redis.close()
        self.redis = Redis(self.run.directory)
        return self.redis

    def assert_moment(self, first, last):
        """All that it holds is of one moment between these two writes."""
        counter = int(self.redis.ask("GET", "counter"))
        if not first <= counter <= last + 1:
            raise Failure(f"the counter is {counter}, the snapshot was taken between {first} "
                          f"and {last}")

        def versions(c):
            return lambda n: (c - n - 1) // self.records + 1 if c > n else 0
        # The one that was being written may be there before its counter.
        now = counter % self.records
        if self.redis.wrong([now], versions(counter)) and \
                self.redis.wrong([now], versions(counter + 1)):
            raise Failure(f"record {now}, which was being written, is torn")
        others = (n for n in range(self.records) if n != now)
        if bad := self.redis.wrong(others, versions(counter)):
            raise Failure(f"{bad} records of {self.records} are not as they were at counter "
                          f"{counter}")
        return counter

    def digest(self):
        return self.redis.ask("DEBUG", "DIGEST")

    def evicting(self):
        """Else the case would test nothing. It has only just been written."""
        def is_so():
            stats = self.daemon.stats(self.name)
            return stats if stats["evictions_total"] and stats["stored_bytes"] else None
        return self.daemon.wait_until(is_so, "something of it is evicted")


@case("snapshot-redis", native=False, own_daemon=True, seconds=180, takes=20)
def snapshot_redis(run):
    """Larger than its budget, written to all the while: taken twice, rolled back
    to both, killed and restored under another name."""
    records, budget = (MANY_RECORDS, "672MiB") if run.soak else (RECORDS, "48MiB")
    server = Server(run, budget, records)
    server.evicting()
    writer = Writer(run.directory, records)
    taken = []
    for number in range(2):
        server.daemon.wait_until(lambda: writer.error or writer.written > 2000 * (number + 1),
                                 "the client writes")
        first = writer.written
        snapshot = server.take()
        taken.append((snapshot, first, writer.written))
        if writer.error:
            break
    time.sleep(0.2)
    written = writer.end()
    # Nothing happened to the one that goes on.
    server.assert_moment(written, written)
    for snapshot, first, last in taken:
        server.rollback(snapshot)
        server.again()
        counter = server.assert_moment(first, last)
        # It is a server again: it takes writes, and keeps its budget under them.
        again = Writer(run.directory, records, counter)
        time.sleep(0.3)
        written = again.end()
        server.assert_moment(written, written)
        server.evicting()
    exact = server.take("--label", "exact")
    digest = server.digest()
    server.redis.set_many(range(0, records, 3), 7)
    if server.digest() == digest:
        raise Failure("the digest does not see writes")
    server.kill()
    server.restore(exact, "other")
    server.again()
    if server.digest() != digest:
        raise Failure("the digest is another after the restore")
    counter = int(server.redis.ask("GET", "counter"))
    server.assert_moment(counter, counter)
    stats = server.evicting()
    if stats["lost_pages_total"]:
        raise Failure(f"{stats['lost_pages_total']} pages lost")
    freezes = [one["freeze_us"] / 1000 for one in server.list(server.program.name).values()]
    run.note("frozen " + ", ".join(f"{freeze:.0f}" for freeze in freezes) + " ms")
