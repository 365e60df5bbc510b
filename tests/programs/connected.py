"""A server whose worker is a process of its own, reached by TCP: what a client
sends goes to the worker, and what the worker answers to the client, all in order.

    connected.py MIB

The port is in the file `port`. While there is a file `closed`, nobody is accepted.
`rounds` says how many blocks went through the worker, `clients` how many there
are. What is wrong is said on
stderr, status 1."""

import os
import select
import socket
import struct
import sys

BLOCK = 8192
held = bytearray(os.urandom(1 << 20) * int(sys.argv[1]))


def receive(link):
    """A whole block, or None at the end of a connection."""
    block = b""
    while len(block) < BLOCK:
        piece = link.recv(BLOCK - len(block))
        if not piece:
            if block:
                sys.exit("half a block, then the end")
            return None
        block += piece
    return block


def worker(port):
    link = socket.create_connection(("127.0.0.1", port))
    link.sendall(b"worker")
    expected = 0
    while True:
        block = receive(link)
        if block is None:
            # At once: a clone in which this happens may not have been looked at yet.
            os.write(2, b"the worker has lost its server\n")
            os._exit(1)
        number = struct.unpack_from("<Q", block)[0]
        if number != expected:
            sys.exit(f"block {number} came to the worker instead of {expected}")
        expected += 1
        held[expected * 4096 % len(held)] ^= 1
        link.sendall(bytes(byte ^ 1 for byte in block[:64]) + block[64:])


def main():
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    if os.fork() == 0:
        listener.close()
        worker(port)
    inside, _ = listener.accept()
    if inside.recv(6) != b"worker":
        sys.exit("somebody else is the worker")
    with open("part", "w", encoding="ascii") as file:
        file.write(str(port))
    os.rename("part", "port")
    clients, rounds, said = {}, 0, 0
    while True:
        if len(clients) != said:
            said = len(clients)
            with open("clients", "w", encoding="ascii") as file:
                file.write(str(said))
        watched = list(clients)
        if not os.path.exists("closed"):
            watched.append(listener)
        ready, _, _ = select.select(watched, [], [], 0.02)
        for link in ready:
            if link is listener:
                client, _ = listener.accept()
                clients[client] = 0
                continue
            try:
                block = receive(link)
            except OSError:
                block = None
            if block is None:
                del clients[link]
                link.close()
                continue
            number = struct.unpack_from("<Q", block, 8)[0]
            if number != clients[link]:
                sys.exit(f"block {number} came from a client instead of {clients[link]}")
            clients[link] += 1
            inside.sendall(struct.pack("<Q", rounds) + block[8:])
            answer = receive(inside)
            if answer is None:
                sys.exit("the server has lost its worker")
            if answer[64:] != block[64:] or answer[8:64] != bytes(b ^ 1 for b in block[8:64]):
                sys.exit("the worker's answer is another")
            rounds += 1
            held[rounds * 4096 % len(held)] ^= 1
            with open("rounds", "r+b" if os.path.exists("rounds") else "wb") as file:
                file.write(struct.pack("<Q", rounds))
            try:
                link.sendall(block)
            except OSError:
                del clients[link]
                link.close()


main()
