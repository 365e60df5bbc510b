#!/usr/bin/env python3
"""Says that it is QEMU, and has a monitor that does not say what a monitor says. The
machine that it is asked for names how: `-machine WAY`. One that is called old is of a version
that is too old, and one in a directory newer waits for a guest, and is of a later one."""

import json
import os
import re
import socket
import sys
import threading

GREETING = b'{"QMP": {"version": {"qemu": {"major": 7, "minor": 2}}, "capabilities": []}}\r\n'
NONSENSE = (b'{"id": %s, "return": {"status": "\\u001b[2J' + b"x" * 20000 + b'", "enabled": "yes", '
            b'"actual": -1, "stats": [1e99], "last-update": {"at": [[]]}}}\r\n')


def speak(way, link):
    if way == "silent":
        link.recv(1)
    elif way == "long":
        while True:
            link.sendall(b'{"QMP": "' + b"x" * (1 << 16))
    elif way == "deep":
        link.sendall(b'{"QMP":' + b"[" * 60000 + b"\n")
    elif way == "events":
        while True:
            link.sendall(GREETING + b'{"event": "RTC_CHANGE", "data": {"offset": 1}}\r\n' * 100)
    elif way == "nonsense":
        link.sendall(GREETING)
        while request := link.recv(1 << 16):
            link.sendall(NONSENSE % json.dumps(json.loads(request).get("id")).encode())
    elif way == "newer":
        link.sendall(GREETING)
        for line in link.makefile():
            told = json.loads(line)
            said = {"status": "inmigrate", "qemu": {"major": 99, "minor": 1}}
            link.sendall(json.dumps({"return": said, "id": told.get("id")}).encode() + b"\r\n")


def serve(way, link):
    try:
        speak(way, link)
    except OSError:
        pass
    link.close()


def listener_at(path):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(8)
    return listener


def main():
    words = " ".join(sys.argv[1:])
    newer = "/newer/" in sys.argv[0]
    if "--version" in words:
        old = "old" in os.path.basename(sys.argv[0])
        print(f"QEMU emulator version {'4.2.1' if old else '99.1.0' if newer else '7.2.9'}")
        return
    way = "newer" if newer else re.search(r"-machine (\w+)", words)[1]
    path = re.search(r"path=([^, ]+/monitor)", words)[1]
    # Whoever brings a guest back opens its serial lines.
    lines = set(re.findall(r"unix:([^, ]+)", words)) - {path} if newer else ()
    _listening = [listener_at(line) for line in lines]
    listener = listener_at(path)
    while True:
        link, _ = listener.accept()
        threading.Thread(target=serve, args=(way, link), daemon=True).start()


main()
