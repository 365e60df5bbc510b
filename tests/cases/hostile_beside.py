"""What users cost root and others who do all that they may, at once and without end; and
what tenants cost that do nothing. Measured, not judged: for `tests/run.sh --soak`."""

import collections
import contextlib
import os
import socket
import statistics
import time

import machine
from hostile_quota import MIB, USERS, system
from program import copy_program
from strata import Failure
from suite import case

ROUNDS = 3
# Faults whose waiting is measured in a part of a round, and programs that root runs.
FAULTS = 4000
RUNS = 12


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def worker_of(house):
    name = machine.read(f"/proc/{house.pid}/comm")
    return next(pid for pid in machine.children(house.pid)
                if machine.read(f"/proc/{pid}/comm") == name)


class Attack:
    """All that two users can do, by processes of theirs; or the same processes at doors
    behind which nobody is, which shows what they take by taking the processor."""

    def __init__(self, house, token, port, in_vain):
        agents = "/nonexistent/agent.sock" if in_vain else house.agents
        control = "/nonexistent/control.sock" if in_vain else house.daemon.socket_path
        strata = "/bin/true" if in_vain else house.binaries.strata
        port = 9 if in_vain else port
        storms = [("silent", agents, 300), ("hellos", agents, 0), ("hellos", agents, token),
                  ("noise", agents, 0), ("questions", control, 0), ("runs", strata, 0),
                  ("collectors", "", port)]
        self.house = house
        before = len(house.started)
        for number, storm in enumerate(storms):
            house.crowd(USERS[number % 2], *storm)
        self.programs = house.started[before:]

    def end(self):
        """How much was done, in all."""
        done = 0
        for program in self.programs:
            program.stdin.close()
        for program in self.programs:
            with contextlib.suppress(ValueError):
                done += int(program.stdout.readline() or 0)
            program.wait()
        return done


def measure(house, waits):
    """Seconds of a run of root's, of its `ps`, and the p99 of a tenant's waiting in us."""
    waits.stdin.write(f"{FAULTS}\n")
    waits.stdin.flush()
    runs, lists = [], []
    for _ in range(RUNS):
        for times, command in ((runs, ("run", "--dram", "64MiB", "--", "/bin/true")),
                               (lists, ("ps",))):
            began = time.monotonic()
            done = house.strata(0, *command)
            times.append(time.monotonic() - began)
            if done.returncode:
                raise Failure(f"{command[0]}: status {done.returncode}, {done.stderr[-300:]}")
    line = waits.stdout.readline().split()
    if len(line) != 2:
        raise Failure(f"the tenant has ended: {waits.stderr.read()[-300:]}")
    return statistics.median(runs), statistics.median(lists), float(line[1])


@case("hostile-beside", native=False, own_daemon=True, soak=True, seconds=600)
def beside(run):
    """Root's `run` and `ps`, and the faults of another user's tenant, while two users do all
    that they may; beside the same at rest, and while their processes do it to nobody."""
    port = free_port()
    with system(run, f'metrics = "127.0.0.1:{port}"\n') as house:
        copy_program(run.built("waits"), house.place)
        waits = house.start(USERS[2], house.binaries.strata, "run", "--name", "waits", "--dram",
                            "32MiB", "--", os.path.join(house.place, "waits"), "64")
        house.daemon.wait_until(lambda: house.tenant_of(waits.pid), "it is managed")
        own = house.start_tenant(USERS[0], "own")
        words = machine.read(f"/proc/{own.pid}/environ").split("\0")
        token = next(int(word.split("=")[1], 16) for word in words
                     if word.startswith("STRATA_TOKEN="))
        measure(house, waits)
        found = collections.defaultdict(list)
        for _ in range(ROUNDS):
            found["at rest"].append(measure(house, waits))
            for name, in_vain in (("in vain", True), ("attacked", False)):
                attack = Attack(house, token, port, in_vain)
                time.sleep(1)
                found[name].append(measure(house, waits))
                done = attack.end()
                # What it was kept from is over.
                time.sleep(1)
            run.note(f"{done} things were done")
        middle = {name: [statistics.median(column) for column in zip(*rows)]
                  for name, rows in found.items()}
        for index, (what, unit) in enumerate((("run", 1e3), ("ps", 1e3), ("p99 of faults", 1))):
            rest, vain, attacked = (middle[name][index] * unit
                                    for name in ("at rest", "in vain", "attacked"))
            unit = "us" if unit == 1 else "ms"
            run.note(f"{what}: {rest:.1f} {unit} at rest, {vain:.1f} beside the same processes "
                     f"without a daemon ({vain / rest:.2f}), {attacked:.1f} attacked "
                     f"({attacked / rest:.2f} of rest, {attacked / vain:.2f} of that)")


def percent_of(worker, seconds):
    """What a worker takes of a processor, in all and by kind of thread."""
    def used():
        sums = collections.Counter()
        for task in os.listdir(f"/proc/{worker}/task"):
            where = f"/proc/{worker}/task/{task}"
            name = machine.read(f"{where}/comm").strip().rstrip("0123456789").rstrip("-t")
            sums[name] += int((machine.read(f"{where}/schedstat") or "0").split()[0])
        return sums
    before, began = used(), time.monotonic()
    time.sleep(seconds)
    spent, took = used() - before, time.monotonic() - began
    parts = {name: ns / 1e7 / took for name, ns in spent.most_common(5)}
    return sum(spent.values()) / 1e7 / took, parts


def idle(name, count, command, budget, settling):
    @case(name, native=False, own_daemon=True, soak=True, seconds=600)
    def body(run):
        with system(run) as house:
            programs = []
            for first in range(0, count, 8):
                # They are root's: nobody else may have as many.
                programs += [house.start(0, house.binaries.strata, "run", "--dram", budget, "--",
                                         *command(run)) for _ in range(min(8, count - first))]
                run.daemon.wait_until(
                    lambda: all("strata" not in machine.read(f"/proc/{one.pid}/comm")
                                for one in programs[first:]), "they have started", 60)
            run.daemon.wait_until(
                lambda: sum(bool(t["pids"]) for t in house.tenants()) == count,
                "all are managed", 240)
            worker = worker_of(house)
            time.sleep(settling)
            cost, parts = percent_of(worker, 20)
            managed = sum(t["managed_pages"] > 0 for t in house.tenants())
            said = ", ".join(f"{name} {part:.2f} %" for name, part in parts.items())
            size = machine.field_kib(f"/proc/{worker}/status", "VmRSS") * 1024 // MIB
            run.note(f"{count} idle tenants, {managed} of them registered: {cost:.2f} % of a "
                     f"processor ({said}), {size} MiB resident")
    body.__doc__ = "Measures what many tenants cost that do nothing."


idle("idle-far", 1000, lambda run: ("/bin/sleep", "900"), "64MiB", 60)
idle("idle-near", 1000, lambda run: (run.built("asleep"), "5"), "5632KiB", 60)
