"""Sends a control socket what no client should: garbage.py SOCKET COUNT. Ends
with 0 when the daemon answered or hung up every time, within seconds.

It is a process of its own because a mutation may happen to be a good request:
the tenants of `run` requests wait for whoever asked, and must end with it."""

import json
import random
import socket
import sys


def messages(count):
    """Lines that no client should send; seeded, so the same in each run."""
    source = random.Random(1)
    good = [
        {"request": "ping"}, {"request": "list"}, {"request": "stats", "name": "neighbour"},
        {"request": "set", "name": "nobody", "dram_bytes": 1 << 20},
        {"request": "run", "name": None, "dram_bytes": None, "command": ["x"]},
    ]
    yield json.dumps(good[-1]).encode() + b"\n"
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


def send(path, line):
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(10)
        link.connect(path)
        try:
            link.sendall(line)
            link.shutdown(socket.SHUT_WR)
            while link.recv(1 << 16):
                pass
        except TimeoutError:
            sys.exit(f"no answer and no end after {line[:60]!r}")
        except OSError:
            pass  # it may well hang up on us


def main():
    path, count = sys.argv[1], int(sys.argv[2])
    for line in messages(count):
        # A mutation must not happen to be a request that the neighbour would
        # rightly suffer from.
        if not (b"stop" in line and b"neighbour" in line):
            send(path, line)


if __name__ == "__main__":
    main()
