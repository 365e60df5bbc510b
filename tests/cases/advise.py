"""The advisor: what it says of a real Redis, that it says so when it cannot know,
and that budgets shared out are set. How good its figures are is for the bench."""

import json
import os
import random
import signal
import threading
import time

import machine
from redis import Redis
from strata import Failure
from suite import case

MIB = 1 << 20
KEYS = 60_000


class Load:
    """Requests to a Redis by one thread, normal around a middle that may move."""

    def __init__(self, run, budget, keys=KEYS, width=1 / 6, moves_after=None):
        server = run.tool("redis-server")
        self.program = run.start(
            server, "--port", "0", "--unixsocket", "redis.sock", "--save", "", "--appendonly",
            "no", "--dir", run.directory, budget=budget)
        dead = lambda: self.program.process.poll() is not None  # noqa: E731
        self.redis = Redis(run.directory, dead=dead)
        self.redis.set_many(range(keys))
        self.run, self.keys, self.width, self.moves_after = run, keys, width, moves_after
        self.count, self.stopped, self.failed = 0, threading.Event(), None
        self.thread = threading.Thread(target=self.load, daemon=True)
        self.thread.start()

    def load(self):
        draw, middle, began = random.Random(7), 0.5, time.monotonic()
        try:
            while not self.stopped.is_set():
                if self.moves_after and time.monotonic() - began > self.moves_after:
                    middle, began = (middle + 0.37) % 1, time.monotonic()
                picked = [int((middle + draw.gauss(0, self.width)) % 1 * self.keys)
                          for _ in range(50)]
                self.redis.ask(b"MGET", *(f"k{n}" for n in picked))
                self.count += 50
        except Exception as error:  # said by whoever ends it
            self.failed = error

    def end(self):
        """Ends the load, then the server; every value must be right."""
        self.stopped.set()
        self.thread.join(self.run.seconds_left())
        if self.thread.is_alive():
            raise Failure("the load stands still")
        if self.failed:
            raise Failure(f"the load ended: {self.failed}")
        if bad := self.redis.wrong(range(self.keys)):
            raise Failure(f"{bad} values of {self.keys} are wrong")
        self.redis.link.sendall(self.redis.command(b"SHUTDOWN", b"NOSAVE"))
        self.program.end_well()
        self.redis.close()


def advice(run, name):
    return json.loads(run.daemon.strata("advise", name, "--json").stdout)


def wait_for(run, name, state, seconds):
    return run.daemon.wait_until(
        lambda: (a := advice(run, name)) and a["state"] == state and a,
        f"the advisor says {state} of {name}", seconds)


def check_curve(said):
    curve = said["curve"]
    budgets, losses = [p["budget_bytes"] for p in curve], [p["loss"] for p in curve]
    if budgets != sorted(set(budgets)) or losses != sorted(losses, reverse=True):
        raise Failure(f"budgets do not rise or losses do not fall: {list(zip(budgets, losses))}")
    if not 0 == losses[-1] < losses[0] <= 1:
        raise Failure(f"losses from {losses[0]} to {losses[-1]}")
    if any(p["loss_at_most"] < p["loss"] for p in curve):
        raise Failure("a bound lies below its loss")
    needs = [need["budget_bytes"] for need in said["needs"]]
    if None in needs or needs != sorted(needs, reverse=True):
        raise Failure(f"1, 5 and 10 % need {needs}")


@case("advise-redis", native=False, own_daemon=True, seconds=180, takes=15)
def advise_redis(run):
    """Under pressure: the curve, its text, top, stats."""
    load = Load(run, "72MiB")
    name = load.program.name
    said = wait_for(run, name, "steady", 120)
    check_curve(said)
    if said["watched_pages"] < 100 or said["processor_seconds"] <= 0:
        raise Failure(f"watched {said['watched_pages']} pages, {said['processor_seconds']} s")
    text = run.daemon.strata("advise", name).stdout
    for word in ("watched for", "NEEDS", "*", "its budget of"):
        if word not in text:
            raise Failure(f"no {word!r} in what it prints: {text}")
    brief = run.daemon.stats(name)["advice"]
    if not brief or brief["state"] != "steady" or brief["loss"] is None:
        raise Failure(f"stats say {brief}")
    frame = run.daemon.strata("top", "--once").stdout.splitlines()
    row = dict(zip(frame[0].split(), next(l for l in frame if l.startswith(name)).split()))
    if not row["LOSS"].endswith("%") or row["NEED5"] == "-":
        raise Failure(f"top shows {row}")
    # Its size is known: room for everything is between the values and twice them.
    largest, least = said["curve"][-1]["budget_bytes"], machine.resident_anonymous_bytes(
        load.program.pid)
    if not least < largest < 4 * least:
        raise Failure(f"room for all is {largest / MIB:.0f} MiB, {least / MIB:.0f} are in place")
    run.note(f"room for all {largest / MIB:.0f} MiB; 5 % loss with "
             f"{said['needs'][1]['budget_bytes'] / MIB:.0f} MiB")
    load.end()


@case("advise-native", native=False, own_daemon=True, seconds=180)
def advise_native(run):
    """Far from its budget: a sample is registered, no more."""
    load = Load(run, "1GiB")
    name = load.program.name
    if run.daemon.stats(name)["managed_pages"]:
        raise Failure("something was registered before anybody asked")
    check_curve(wait_for(run, name, "steady", 120))
    stats = run.daemon.stats(name)
    if stats["state"] != "native":
        raise Failure(f"its state is {stats['state']}")
    registered = machine.registered_bytes(load.program.pid)
    size = stats["unmanaged_bytes"] + stats["resident_bytes"]
    # The agent's transfer range is registered, too.
    if not 0 < registered <= size // 100 + 2 * MIB:
        raise Failure(f"{registered} bytes of {size} are registered")
    run.note(f"{registered / size * 100:.2f} % registered")
    # Near its budget all of it is managed, in place of the sample.
    run.daemon.strata("set", name, "--dram", "48MiB")
    run.daemon.wait_until(lambda: run.daemon.stats(name)["stored_bytes"] > 20 * MIB,
                          "pages are stored")
    load.end()


@case("advise-reserved", native=False, own_daemon=True, seconds=180)
def advise_reserved(run):
    """Far from its budget, in address space that is nearly all reserved: what is sampled
    is what is used, and the program keeps its room for mappings."""
    program = run.start("reserve", "64", budget="1GiB")
    program.gate("ready")
    said = wait_for(run, program.name, "steady", 120)
    if not 60 * MIB <= said["pages"] * 4096 <= 80 * MIB:
        raise Failure(f"of 64 MiB it says {said['pages']} pages")
    registered = machine.registered_bytes(program.pid)
    mappings = len(machine.read(f"/proc/{program.pid}/maps").splitlines())
    if not 0 < registered <= 3 * MIB or mappings > 2200:
        raise Failure(f"{registered} bytes are registered, in {mappings} mappings")
    run.note(f"{registered >> 10} KiB registered, {mappings} mappings")
    program.answer("map")
    program.gate("mapped")
    program.answer("end")
    program.finish(pressed=False)


@case("advise-remap", native=False, own_daemon=True, seconds=180)
def advise_remap(run):
    """Far from its budget a program moves and resizes memory of which parts are watched;
    then all of it is managed, and keeps its bytes."""
    program = run.start("remap", budget="1GiB")
    program.gate("ready")
    run.daemon.strata("advise", program.name, "--json")
    run.daemon.wait_until(lambda: machine.registered_bytes(program.pid) > 2 * MIB,
                          "a sample is registered")
    program.answer("go")
    program.gate("moved")
    run.daemon.strata("set", program.name, "--dram", "64MiB")
    run.daemon.wait_until(lambda: run.daemon.stats(program.name)["stored_bytes"] > 40 * MIB,
                          "pages are stored")
    program.answer("go")
    program.finish()


@case("advise-jump", native=False, own_daemon=True, seconds=240, takes=30)
def advise_jump(run):
    """A hot set that moves on and on is not advised on."""
    load = Load(run, "1GiB", width=1 / 20, moves_after=20)
    said = wait_for(run, load.program.name, "changing", 200)
    text = run.daemon.strata("advise", load.program.name).stdout
    if said["drift"] < 0.05 or (
            "CHANGES TOO FAST" not in text and advice(run, load.program.name)["state"] != "steady"):
        raise Failure(f"drift {said['drift']}: {text}")
    run.note(f"drift {said['drift']:.2f}")
    load.end()


@case("advise-stopped", native=False, own_daemon=True, seconds=120)
def advise_stopped(run):
    """Far from its budget, stopped in the middle of probes again and again: what the
    agent moves later is fetched all the same, and the program goes on."""
    load = Load(run, "1GiB")
    name = load.program.name
    pid, = run.daemon.stats(name)["pids"]
    advice(run, name)
    for _ in range(run.times(4)):
        evictions = run.daemon.stats(name)["evictions_total"]
        run.daemon.wait_until(lambda: run.daemon.stats(name)["evictions_total"] > evictions + 20,
                              "it is probed", 60)
        os.kill(pid, signal.SIGSTOP)
        # Longer than a batch is waited for.
        time.sleep(0.4)
        os.kill(pid, signal.SIGCONT)
        count = load.count
        run.daemon.wait_until(lambda: load.count > count + 20_000, "the program goes on", 60)
    load.end()


@case("advise-all", native=False, own_daemon=True, seconds=240)
def advise_all(run):
    """A total is shared out and set; whoever cannot be advised keeps what it has."""
    load = Load(run, "56MiB")
    idle = run.start("hold", "64", budget="48MiB")
    idle.gate("ready")
    wait_for(run, load.program.name, "steady", 120)
    proposed = json.loads(run.daemon.strata(
        "advise", "--all", "--total", "256MiB", "--json").stdout)
    if proposed["applied"] or run.daemon.stats(load.program.name)["budget_bytes"] != 56 * MIB:
        raise Failure("a proposal changed a budget")
    text = run.daemon.strata("advise", "--all", "--total", "256MiB", "--apply").stdout
    if "budgets set" not in text or "PROPOSED" not in text:
        raise Failure(f"it prints {text}")
    applied = json.loads(run.daemon.strata(
        "advise", "--all", "--total", "256MiB", "--apply", "--json").stdout)
    for tenant in applied["tenants"]:
        now = run.daemon.stats(tenant["name"])["budget_bytes"]
        if now != tenant["proposed_bytes"]:
            raise Failure(f"{tenant['name']} has {now}, proposed were {tenant['proposed_bytes']}")
        if tenant["state"] != "steady" and now != tenant["budget_bytes"]:
            raise Failure(f"{tenant['name']} is {tenant['state']} and was changed")
    if sum(t["proposed_bytes"] for t in applied["tenants"]) > 256 * MIB:
        raise Failure("more was given out than there is")
    busy = next(t for t in applied["tenants"] if t["name"] == load.program.name)
    if busy["proposed_bytes"] <= 56 * MIB:
        raise Failure(f"the one that works got {busy['proposed_bytes']} bytes")
    load.end()
    idle.answer("end")
    idle.finish(pressed=False)


@case("advise-bad-input", native=False, own_daemon=True, seconds=60)
def advise_bad_input(run):
    """One line each, and nothing is changed."""
    def refused(*arguments, says):
        done = run.daemon.strata("advise", *arguments, check=False)
        lines = done.stderr.strip().splitlines()
        if done.returncode == 0 or len(lines) != 1 or says not in lines[0]:
            raise Failure(f"advise {arguments}: status {done.returncode}: {done.stderr}")

    refused("nobody", says="no tenant is named nobody")
    refused("keeper", says="nothing to say of keeper yet")
    refused("keeper", "--apply", says="usage")
    refused("keeper", "--all", says="usage")
    refused(says="usage")
    refused("--all", "--total", "3", says="not a size")
    refused("--all", "--total", "1MiB", says="cannot share out 1.0 MiB")
    refused("keeper", "--wait", "-1", says="usage")
    point = {"budget_bytes": 1, "misses_per_second": 0.0, "loss": 0.5, "loss_at_most": 0.5}
    for curves, says in (
            ([[]], "points"), ([[point] * 100], "points"), ([[point, point]], "rise"),
            ([[{**point, "loss": 2.0}]], "between 0 and 1"),
            ([[{**point, "budget_bytes": 2**63}]] * 3, "does not suffice"),
            ([[{**point, "budget_bytes": -1}]], "not a request")):
        reply = run.daemon.ask({"request": "share_out", "total_bytes": 2**62, "curves": curves})
        if reply["reply"] != "error" or says not in reply["message"]:
            raise Failure(f"{curves}: {reply}")
    none = run.daemon.ask({"request": "share_out", "total_bytes": 5, "curves": []})
    if none != {"reply": "shares", "budgets_bytes": [], "losses": []}:
        raise Failure(f"no curves: {none}")
