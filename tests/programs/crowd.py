"""What an ordinary user can do to the daemon's sockets: crowd.py MODE SOCKET COUNT.

Says "acted" on standard output and goes on with it until its standard input ends. It is
a process of its own, so that it can be another user's."""

import json
import select
import socket
import sys


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


def main():
    mode, path, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if path.startswith("@"):
        path = "\0" + path[1:]
    {"silent": silent, "garbage": garbage, "tenants": tenants}[mode](path, count)


if __name__ == "__main__":
    main()
