"""What an ordinary user can do to the daemon's sockets: crowd.py MODE SOCKET COUNT.

Says "acted" on standard output and goes on with it until its standard input ends. It is
a process of its own, so that it can be another user's."""

import json
import os
import select
import socket
import struct
import subprocess
import sys

MAGIC = 0x5354524154410005


def connect(path, kind):
    link = socket.socket(socket.AF_UNIX, kind)
    link.settimeout(5)
    link.connect(path)
    return link


def ended():
    return bool(select.select([sys.stdin], [], [], 0)[0])


def silent(path, count):
    """As many connections as can be had that say nothing; those that are closed are made
    anew."""
    links = []
    said = False
    while not ended():
        alive = []
        for link in links:
            link.setblocking(False)
            try:
                if link.recv(1) == b"":
                    link.close()
                    continue
            except BlockingIOError:
                pass
            except OSError:
                link.close()
                continue
            alive.append(link)
        links = alive
        for _ in range(count - len(links)):
            try:
                links.append(connect(path, socket.SOCK_SEQPACKET))
            except OSError:
                break
        if not said:
            print("acted", flush=True)
            said = True
        select.select([sys.stdin], [], [], 0.01)


def garbage(path, count):
    """Hellos that are none, with what a terminal would act upon."""
    for number in range(count):
        try:
            with connect(path, socket.SOCK_SEQPACKET) as link:
                link.sendall(b"\x1b[2J%d\n" % number)
                link.recv(1)
        except OSError:
            pass
    print("acted", flush=True)
    sys.stdin.read()


def tenants(path, count):
    """As many tenants as can be had, of this process; prints how many, and the refusal."""
    made, refusal = 0, ""
    for _ in range(count):
        with connect(path, socket.SOCK_STREAM) as link:
            request = {"request": "run", "name": None, "dram_bytes": 4 << 20,
                       "command": ["x" * 4000]}
            link.sendall(json.dumps(request).encode() + b"\n")
            line = b""
            while not line.endswith(b"\n"):
                piece = link.recv(1 << 16)
                if not piece:
                    break
                line += piece
        reply = json.loads(line)
        if reply["reply"] == "run":
            made += 1
        else:
            refusal = reply["message"]
    print(json.dumps({"made": made, "refusal": refusal}), flush=True)
    sys.stdin.read()


def hello(token=0):
    """One whose numbers make sense."""
    return struct.pack("<QIIQQQQQQ", MAGIC, 1, os.getpid(), token, 1 << 30, 1 << 20,
                       1 << 40, (1 << 40) + 8192, 0)


def storm(act):
    """Does it over and over, and says how often when its standard input ends."""
    print("acted", flush=True)
    done = 0
    while not ended():
        for _ in range(20):
            try:
                act(done)
            except OSError:
                pass
            done += 1
    print(done, flush=True)


def hellos(path, token):
    """Hellos of a program that nobody wants managed or, with a token, of its tenant's, to
    which it then sends no userfaultfd."""
    def act(_):
        with connect(path, socket.SOCK_SEQPACKET) as link:
            link.sendall(hello(token))
            link.recv(64)
    storm(act)


def noise(path, _):
    def act(number):
        with connect(path, socket.SOCK_SEQPACKET) as link:
            link.sendall(b"\x1b[2J%d\n" % number)
            link.recv(1)
    storm(act)


def questions(path, _):
    """Requests that are answered, and some that are not understood."""
    def act(number):
        with connect(path, socket.SOCK_STREAM) as link:
            link.sendall(b'{"request":"list"}\n' if number % 2 else b"nonsense\n")
            while link.recv(1 << 16):
                pass
    storm(act)


def runs(program, _):
    """Tenants that are made and end at once."""
    def act(_):
        subprocess.run([program, "run", "--dram", "64MiB", "--", "/bin/true"], check=False,
                       stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)
    storm(act)


def collectors(_, port):
    """Clients of the metrics: as many silent ones as are let in, and some that read."""
    links = []

    def act(number):
        if number % 2:
            links.append(socket.create_connection(("127.0.0.1", port), timeout=5))
            del links[:-100]
            return
        with socket.create_connection(("127.0.0.1", port), timeout=5) as link:
            link.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            while link.recv(1 << 16):
                pass
    storm(act)


def main():
    mode, path, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if path.startswith("@"):
        path = "\0" + path[1:]
    modes = (silent, garbage, tenants, hellos, noise, questions, runs, collectors)
    {one.__name__: one for one in modes}[mode](path, count)


if __name__ == "__main__":
    main()
