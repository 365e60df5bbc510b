"""Clones of a guest are machines of their own: each with its host name and address, by the
agent in it, and with a network of its own; what a clone keeps of the first one is said. One
boot serves all checks, each counted and named."""

import os
import re
import socket
import subprocess
import sys

from guest_snapshots import monitor
from guests_under import directory_of
from strata import Failure, Skip
from suite import ROOT, case
from under import Guest, Line, initramfs, kernel

MEMORY_MIB, BUDGET_MIB, FILLED_MIB = 160, 300, 8
NAME, SERVED_PORT = "origin", 7
HOOK = os.path.join(ROOT, "packaging", "strata-clone-hook")
# What a guest of the hook's has to have.
COMMANDS = ("sh", "ip", "tr", "cat")
# Written into the guest as /etc/strata/clone.d/site: fails where it is told to.
BRIDGE, TAP = "strata-test", "strata-tap"
ASK = f"""import socket
print(socket.create_connection(("10.0.2.15", {SERVED_PORT}), 60).makefile().readline())"""
SITE = """#!/bin/sh
[ "$1 $STRATA_HOST_NAME" != "identity broken" ] || { echo no licence for it >&2; exit 3; }
"""


def with_agent(run):
    """What a guest's initramfs needs for the agent and its hook."""
    agent = os.path.join(run.binaries.directory, "strata-guest-agent")
    site = os.path.join(run.directory, "site")
    with open(site, "w", encoding="ascii") as file:
        file.write(SITE)
    os.chmod(site, 0o755)
    return [(agent, "/strata-guest-agent"), (HOOK, "/usr/lib/strata/clone-hook"),
            (site, "/etc/strata/clone.d/site"),
            *((run.tool(name), f"/bin/{name}") for name in COMMANDS)]


def free_port():
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return any_port.getsockname()[1]


def who(run, port):
    """What the guest says that it is, behind that port of this machine's."""
    with socket.create_connection(("127.0.0.1", port), 20 * run.patience) as line:
        line.settimeout(20 * run.patience)
        said = b""
        while not said.endswith(b"\n"):
            piece = line.recv(4096)
            if not piece:
                raise Failure(f"behind port {port} somebody says {said!r}")
            said += piece
    return said.decode().split()


def has_agent(guest):
    answer, = monitor(guest.run, guest.name, {"execute": "query-chardev"})
    return any(one["label"] == "strata-memory" and one["frontend-open"]
               for one in answer["return"])


def serving(guest):
    """It has an agent, and says at its port who it is."""
    guest.hear(r"^up\n")
    for order, answer in (("serve", "serves"), ("agent", "agent"),
                          (f"fill {FILLED_MIB}", "filled")):
        guest.tell(order)
        guest.hear(rf"^{answer}\n")
    guest.wait_until(lambda: has_agent(guest), "its agent has opened its port")


def stop_all(run):
    for name in run.daemon.tenants():
        if name != "keeper":
            run.daemon.strata("stop", name, check=False)


def reborn(run, name):
    return Line(run, name, os.path.join(directory_of(run, name), f"{NAME}.serial"))


def cloned(run, guest):
    """Two, each by its name and address at its port, and the first one as it was."""
    first = who(run, guest.port)
    made = run.daemon.strata("clone", f"{NAME}@1", "--count", "2", "--name", "twin_x", "--net",
                             "new", "--forward", f"0:{SERVED_PORT}")
    lines = [line.split() for line in made.stdout.splitlines()]
    if [line[0] for line in lines] != ["twin_x-1", "twin_x-2"]:
        raise Failure(f"clone printed {made.stdout!r}, {made.stderr!r}")
    found = {}
    for name, port in lines:
        host = int(re.fullmatch(rf"127\.0\.0\.1:(\d+)->{SERVED_PORT}", port)[1])
        called, address = who(run, host)
        if called != name.replace("_", "-") or not address.startswith("02:"):
            raise Failure(f"{name} says that it is {called}, {address}; {made.stderr}")
        told = f"{name}: it answers as {called}, with the address {address}\n"
        if told not in made.stderr:
            raise Failure(f"{told!r} is not said: {made.stderr}")
        found[address] = reborn(run, name)
    if len(found) != 2 or who(run, guest.port) != first or "no hostfwd" not in made.stderr:
        raise Failure(f"{sorted(found)}, {first}, {who(run, guest.port)}; {made.stderr}")
    for line in found.values():
        line.rounds(1)
        line.end()
    guest.rounds(1)


def keeps(run, guest):
    """A hook of the guest's that fails is shown, and nobody who does not answer is waited for
    for long. The clone runs all the same."""
    for snapshot, name, why in ((f"{NAME}@1", "broken", "its agent says: /etc/strata/clone.d/site: "
                                 "no licence for it ("),
                                (f"{NAME}@2", "silent", "no agent answers in it: nobody in the "
                                 "guest has its port open")):
        made = run.daemon.strata("clone", snapshot, "--name", name)
        told = f"{name}: it keeps the first guest's host name and address: {why}"
        if made.stdout.split() != [name] or told not in made.stderr:
            raise Failure(f"{told!r} is not said: {made.stdout!r}, {made.stderr!r}")
        line = reborn(run, name)
        line.rounds(1)
        line.end()
    guest.rounds(1)


class Network:
    """A network namespace of a case's own, with a bridge in it."""

    def __init__(self, run):
        self.run = run
        unshare, self.nsenter, self.ip = (run.tool(name) for name in ("unshare", "nsenter", "ip"))
        ip = self.ip
        script = (f"{ip} link add {BRIDGE} type bridge && {ip} address add 10.0.2.2/24 dev {BRIDGE}"
                  f" && {ip} link set dev {BRIDGE} up && {ip} tuntap add dev {TAP} mode tap"
                  f" && {ip} link delete dev {TAP} && echo there && exec cat")
        self.keeper = subprocess.Popen([unshare, "--net", "sh", "-c", script], text=True,
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.is_there = self.keeper.stdout.readline() == "there\n"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.keeper.kill()
        self.keeper.communicate()

    def inside(self, *words):
        return [self.nsenter, "--net", "--target", str(self.keeper.pid), *words]

    def try_to(self, *words):
        return subprocess.run(self.inside(*words), env=self.run.daemon.environment(), text=True,
                              stdin=subprocess.DEVNULL, capture_output=True, check=False)

    def do(self, *words):
        done = self.try_to(*words)
        if done.returncode != 0:
            raise Failure(f"{words}: {done.stderr}")
        return done

    def clone(self, snapshot, name, *more):
        return self.do(self.run.binaries.strata, "clone", snapshot, "--name", name, *more)

    def on_bridge(self):
        return len(self.do(self.ip, "-o", "link", "show", "master", BRIDGE).stdout.splitlines())

    def is_known(self, name, said):
        """Whether the one guest on the bridge is that one, by its own address."""
        called, address = self.do(sys.executable, "-c", ASK).stdout.split()
        if called != name or f"the address {address}, on the bridge {BRIDGE}" not in said or \
                address not in self.do(self.ip, "neigh", "show", "dev", BRIDGE).stdout:
            raise Failure(f"{called}, {address}; {said}")


def bridged(run, guest):
    """A clone is on the bridge when it has an address of its own, and not before."""
    with Network(run) as network:
        if not network.is_there:
            run.note("skipped: no bridge or tap device can be made here")
            return
        network.is_known("bridged", network.clone(
            f"{NAME}@1", "bridged", "--net", f"bridge={BRIDGE}").stderr)
        made = network.clone(f"{NAME}@2", "silent", "--net", f"bridge={BRIDGE}")
        if "leads nowhere until you have given it an address" not in made.stderr or \
                network.on_bridge() != 1:
            raise Failure(f"{network.on_bridge()} are on the bridge; {made.stderr}")
        for name in ("bridged", "silent"):
            line = reborn(run, name)
            line.rounds(1)
            line.end()
    guest.rounds(1)


@case("guest-clones", native=False, own_daemon=True, computes=True, seconds=180, takes=20)
def guest_clones(run):
    initramfs(run, kernel(), more=with_agent(run))
    port = free_port()
    guest = Guest(run, NAME, ["--memory", f"{MEMORY_MIB}MiB", "--dram", f"{BUDGET_MIB}MiB"],
                  ["-machine", "q35", "-nic",
                   f"user,model=virtio-net-pci,hostfwd=tcp:127.0.0.1:{port}-:{SERVED_PORT}"])
    guest.port = port
    checks = (cloned, keeps, bridged)
    try:
        serving(guest)
        who(run, port)
        run.daemon.strata("snapshot", NAME)
        guest.tell("silence")
        guest.hear(r"^silence\n")
        run.daemon.strata("snapshot", NAME)
        for check in checks:
            check(run, guest)
            run.note(f"guest-clones-{check.__name__}")
        guest.end()
    finally:
        guest.kill()
        stop_all(run)
    run.tests = len(checks)


@case("guest-clones-tap", native=False, own_daemon=True, computes=True, seconds=180, takes=15)
def guest_clones_tap(run):
    """A guest with a tap device: its clones have others, and it has its own when it comes back."""
    initramfs(run, kernel(), more=with_agent(run))
    with Network(run) as network:
        if not network.is_there:
            raise Skip("no bridge or tap device can be made here")
        mine = run.binaries.strata
        wrapper = os.path.join(run.directory, "strata")
        with open(wrapper, "w", encoding="ascii") as file:
            file.write(f"#!/bin/sh\nexec {' '.join(network.inside(mine))} \"$@\"\n")
        os.chmod(wrapper, 0o755)
        run.binaries.strata = wrapper
        try:
            guest = Guest(run, NAME, ["--memory", f"{MEMORY_MIB}MiB", "--dram",
                                      f"{BUDGET_MIB}MiB"],
                          ["-machine", "q35", "-netdev",
                           f"tap,id=n,ifname={TAP},script=no,downscript=no",
                           "-device", "virtio-net-pci,netdev=n"])
        finally:
            run.binaries.strata = mine
        try:
            serving(guest)
            network.do(network.ip, "link", "set", "dev", TAP, "master", BRIDGE, "up")
            run.daemon.strata("snapshot", NAME)
            tap_checks(run, network, guest)
        finally:
            guest.kill()
            stop_all(run)


def tap_checks(run, network, guest):
    strata = run.binaries.strata
    made = network.clone(f"{NAME}@1", "apart")
    if "which leads nowhere" not in made.stderr or "answers as apart" not in made.stderr or \
            network.on_bridge() != 1:
        raise Failure(f"{network.on_bridge()} are on the bridge; {made.stderr}")
    for words, why in ((("clone", f"{NAME}@1", "--net", "new"), "user networking lacks"),
                       (("rollback", NAME, "1"), f"has the tap device {TAP}")):
        refused = network.try_to(strata, *words)
        if refused.returncode != 1 or why not in refused.stderr:
            raise Failure(f"{words}: {refused.stderr!r} is not {why!r}")
    for line in (reborn(run, "apart"), guest):
        line.rounds(1)
        line.end()
    run.daemon.wait_until(lambda: network.on_bridge() == 0, "its tap device is gone")
    network.is_known("joined", network.clone(
        f"{NAME}@1", "joined", "--net", f"bridge={BRIDGE}").stderr)
    network.do(strata, "restore", f"{NAME}@1")
    for name in ("joined", NAME):
        line = reborn(run, name)
        line.rounds(1)
        line.end()
