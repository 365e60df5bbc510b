"""What the command line says of a move whose other end has gone."""

import os

from moment import Moment, need_criu
from moves_hosts import another
from strata import Failure
from suite import case

# `strata receive` of another host, which ends as soon as it is told to let it run: what it
# says last is that it never will.
ENDING = """#!/usr/bin/env python3
import json, os, subprocess, sys, threading

def frame(source):
    head = source.read(5)
    return head, source.read(int.from_bytes(head[1:], "little"))

receive = subprocess.Popen(["strata", "receive"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                           env=dict(os.environ, STRATA_SOCKET="@THERE@"))
out = sys.stdout.buffer

def back():
    while True:
        head, content = frame(receive.stdout)
        if not head:
            return
        out.write(head + content)
        out.flush()

threading.Thread(target=back, daemon=True).start()
while True:
    head, content = frame(sys.stdin.buffer)
    if head[:1] == b"w" and json.loads(content).get("word") == "go":
        break
    receive.stdin.write(head + content)
    receive.stdin.flush()
receive.kill()
receive.wait()
os.close(0)
said = json.dumps({"word": "never", "why": "it has no room there"}).encode()
out.write(b"w" + len(said).to_bytes(4, "little") + said)
out.flush()
os._exit(0)
"""


@case("move-other-end-gone", native=False, own_daemon=True)
def other_end_gone(run):
    """The other end says that the program will never run there, and has gone before it hears
    the answer: the command says why, and the program runs on here."""
    need_criu()
    with another(run) as there:
        program = Moment(run, "plain", 8, "32MiB")
        place = os.path.join(run.directory, "bin")
        os.mkdir(place)
        ssh = os.path.join(place, "ssh")
        with open(ssh, "w", encoding="ascii") as file:
            file.write(ENDING.replace("@THERE@", there.socket_path))
        os.chmod(ssh, 0o755)
        for _ in range(3):
            done = run.daemon.strata("move", program.name, "other", check=False, timeout_s=60,
                                     PATH=f"{place}:{run.binaries.directory}:{os.environ['PATH']}")
            last = done.stderr.splitlines()[-1:]
            if done.returncode != 1 or "it has no room there" not in last[0] or (
                    "it runs on here" not in last[0] or "died" in last[0]):
                raise Failure(f"status {done.returncode}, {done.stderr!r}")
            program.goes_on()
        program.check()
        program.kill()
