"""A small Redis client: enough to load, verify and save. Not a benchmark."""

import hashlib
import json
import os
import socket
import time
import zlib


def _orders(seed):
    mark = zlib.crc32(str(seed).encode())
    return json.dumps({
        "name": f"customer {mark % 9973}", "mail": f"user{mark:08x}@example.org",
        "orders": [{"item": (mark >> i) % 499, "count": (mark >> (2 * i)) % 7 + 1,
                    "state": ("open", "paid", "sent", "back")[(mark >> i) % 4]}
                   for i in range(14)],
        "note": "delivered to the usual address unless told otherwise " * 4,
    })[1:]


_TAILS = [_orders(seed) for seed in range(997)]


def value(number, version=0):
    """About 1 KiB of JSON as an application would keep it; a function of its
    number, so that every byte can be verified."""
    mark = zlib.crc32(b"%d/%d" % (number, version))
    return f'{{"id": {number}, "version": {version}, "mark": {mark}, {_TAILS[mark % 997]}'.encode()


def dense_value(number, version=0):
    """The same in bytes that nobody can compress."""
    return hashlib.shake_128(b"%d/%d" % (number, version)).digest(1024)


class Redis:
    """A connection to `redis.sock` in a directory, or to an address and port.
    `value`: what its keys hold, a function of number and version."""

    def __init__(self, where, deadline_s=60, dead=lambda: False, value=value):
        self.value = value
        self.directory, family, address = None, socket.AF_INET, where
        if isinstance(where, str):
            self.directory = os.open(where, os.O_RDONLY | os.O_DIRECTORY)
            # The path of a unix socket is short, that of a directory need not be.
            family, address = socket.AF_UNIX, f"/proc/self/fd/{self.directory}/redis.sock"
        end = time.monotonic() + deadline_s
        while True:
            try:
                self.link = socket.socket(family)
                self.link.connect(address)
                self.file = self.link.makefile("rb")
                if self.ask(b"PING") == b"PONG":
                    break
            except (OSError, RuntimeError):
                self.link.close()
            if dead() or time.monotonic() > end:
                raise RuntimeError("Redis does not answer")
            time.sleep(0.05)

    @staticmethod
    def command(*words):
        words = [w if isinstance(w, bytes) else str(w).encode() for w in words]
        return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)

    def reply(self):
        line = self.file.readline()
        kind, rest = line[:1], line[1:-2]
        if kind == b"+":
            return rest
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return None if rest == b"-1" else self.file.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return [self.reply() for _ in range(int(rest))]
        raise RuntimeError(line.decode(errors="replace").strip() or "Redis hung up")

    def ask(self, *words):
        self.link.sendall(self.command(*words))
        return self.reply()

    def set_many(self, numbers, version=0):
        numbers = list(numbers)
        for start in range(0, len(numbers), 500):
            batch = numbers[start:start + 500]
            self.link.sendall(b"".join(
                self.command(b"SET", f"k{n}", self.value(n, version)) for n in batch))
            for _ in batch:
                if self.reply() != b"OK":
                    raise RuntimeError("SET was refused")

    def wrong(self, numbers, version_of=lambda n: 0):
        """How many values are not what they should be."""
        numbers, bad = list(numbers), 0
        for start in range(0, len(numbers), 500):
            batch = numbers[start:start + 500]
            found = self.ask(b"MGET", *(f"k{n}" for n in batch))
            bad += sum(v != self.value(n, version_of(n)) for n, v in zip(batch, found))
        return bad

    def info(self, section, field):
        for line in self.ask(b"INFO", section).decode().splitlines():
            if line.startswith(field + ":"):
                return line.split(":", 1)[1]
        return ""

    def close(self):
        self.link.close()
        if self.directory is not None:
            os.close(self.directory)
            self.directory = None
