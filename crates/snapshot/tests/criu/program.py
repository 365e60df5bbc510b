"""Answers questions on a unix socket; see program.rs."""
import mmap
import os
import select
import socket
import sys
import threading
import time

# What whoever runs the tests left open may be of another mount namespace.
os.closerange(3, 1024)
home = sys.argv[1]
data = open(home + "/data", "w+b")
data.write(b"x" * 5000)
data.flush()
ours, theirs = socket.socketpair()
if os.fork() == 0:
    theirs.close()
    count = 0
    while ours.recv(1):
        count += 1
        ours.send(b"%d" % count)
    os._exit(0)
ours.close()
if os.fork() == 0:
    os._exit(3)  # stays a zombie
for _ in range(3):
    threading.Thread(target=lambda: time.sleep(100000), daemon=True).start()
memory = bytearray(os.urandom(1 << 20))
private = mmap.mmap(data.fileno(), 4096, flags=mmap.MAP_PRIVATE)
private[:5] = b"dirty"


def total():
    return str(sum(memory) + sum(private[:5]))


with open(home + "/sum", "w") as file:
    file.write(total())
count = 0
closed = 0
devices = []
listener = socket.socket(socket.AF_UNIX)
listener.bind(home + "/socket")
listener.listen(8)
poll = select.epoll()
poll.register(listener, select.EPOLLIN)
clients = {}
while True:
    for fd, _ in poll.poll():
        if fd == listener.fileno():
            client, _ = listener.accept()
            clients[client.fileno()] = [client, False]
            poll.register(client, select.EPOLLIN)
            continue
        client, greeted = clients[fd]
        what = client.recv(100).decode()
        if what == "":
            closed += greeted
            poll.unregister(client)
            client.close()
            del clients[fd]
            continue
        answer = "?"
        if what == "hello":
            clients[fd][1] = True
            answer = what
        elif what == "add":
            count += 1
            theirs.send(b"+")
            answer = "%d %s" % (count, theirs.recv(20).decode())
        elif what == "sum":
            answer = total()
        elif what == "closed":
            answer = str(closed)
        elif what == "pid":
            answer = str(os.getpid())
        elif what == "device":
            devices.append(os.open("/dev/loop-control", os.O_RDWR))
            answer = "ok"
        elif what == "exit":
            client.send(b"bye")
            os._exit(7)
        client.send(answer.encode())
