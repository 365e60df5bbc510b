"""Programs that keep pages in a pool themselves (include/strata.h, the Python module): what
they find is what they put, whoever dies meanwhile."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

import machine
from strata import Failure
from suite import ROOT, case

POOL = "pages"
# Of which a pool is full that hands it back.
FULL_MIB = 2048
SERVER = os.path.join(ROOT, "examples", "pool", "web_cache.py")
MODULE = {"PYTHONPATH": os.path.join(ROOT, "python")}


def pool_stats(run):
    (stats,) = json.loads(run.daemon.strata("pool", "stats", POOL, "--json").stdout)
    return stats


def kill_worker(run):
    worker = run.daemon.worker()
    os.kill(worker, signal.SIGKILL)
    run.daemon.wait_until(lambda: machine.alive(run.daemon.pid) and run.daemon.worker() not in
                          (None, worker) and run.daemon.answers(), "a new worker")


def finds(run, what):
    before = pool_stats(run)["hits_total"]
    run.daemon.wait_until(lambda: pool_stats(run)["hits_total"] > before + 100, what)


def edges(run):
    """What is refused, forks, descriptors that the program closes."""
    run.start("pooled", "edges", POOL).finish(pressed=False)


def threads(run):
    """Threads that share connections, while the worker is killed and the pool emptied."""
    program = run.start("pooled", "threads", POOL)
    program.gate("running")
    finds(run, "pages are found")
    for _ in range(run.times(3)):
        kill_worker(run)
        finds(run, "pages are found again")
    run.daemon.strata("pool", "empty", POOL)
    finds(run, "pages are found in a pool that was emptied")
    program.answer()
    program.finish(pressed=False)
    said = machine.read(program.log_path).splitlines()[-1]
    if int(said.split()[-1]) < 2:
        raise Failure(f"connections do not end with their worker: {said}")
    run.note(said)


def request(url, method="GET"):
    wish = urllib.request.Request(url, method=method)
    with urllib.request.urlopen(wish, timeout=60) as answer:
        return answer.headers.get("X-Cache"), answer.read()


def server(run):
    program = run.start(sys.executable, SERVER, "--pool", POOL, budget="64MiB", env=MODULE)
    run.daemon.wait_until(lambda: "http://" in machine.read(program.log_path), "it listens")
    return program, machine.read(program.log_path).split()[-1]


def web_cache(run):
    """The example: two servers share what one has made; it may vanish, and is never old."""
    (one, first), (other, second) = server(run), server(run)
    made = request(first + "/report/7")
    if made[0] != "miss" or len(made[1]) < 100_000:
        raise Failure(f"the first time: {made[0]}, {len(made[1])} bytes")
    for url in (first, second):
        if request(url + "/report/7") != ("hit", made[1]):
            raise Failure("a page that was made is not found, or another one")
    request(second + "/report/7", "DELETE")
    if request(first + "/report/7") != ("miss", made[1]):
        raise Failure("what was removed is still there")
    for vanish in (lambda: run.daemon.strata("pool", "empty", POOL), lambda: kill_worker(run),
                   lambda: run.daemon.strata("pool", "rm", POOL)):
        vanish()
        if request(first + "/report/7") != ("miss", made[1]):
            raise Failure("a page that vanished is found, or another one is made")
    if request(first + "/report/7") != ("miss", made[1]):
        raise Failure("there is no pool, and a page is found")
    run.daemon.strata("pool", "create", POOL, "--limit", "32MiB")
    request(second + "/report/7")
    if request(first + "/report/7") != ("hit", made[1]):
        raise Failure("a pool that is there again is not used")
    for program in (one, other):
        program.process.send_signal(signal.SIGTERM)
        program.process.wait(60)


def without(run):
    """Nobody manages it: each page is made anew, and it says so."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("STRATA_", "LD_PRELOAD"))}
    with subprocess.Popen([sys.executable, SERVER, "--pool", POOL], env=clean | MODULE, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        try:
            url = program.stdout.readline().strip()
            if [request(url + "/a")[0] for _ in range(2)] != ["miss", "miss"]:
                raise Failure("it finds pages without Strata")
        finally:
            program.terminate()
        if "not managed by Strata" not in (said := program.stderr.read()):
            raise Failure(f"it says {said!r}")


@case("pool-programs", native=False, own_daemon=True, seconds=120, takes=10)
def pool_programs(run):
    run.daemon.strata("pool", "create", POOL, "--limit", "32MiB", "--admit", "first")
    checks = (edges, threads, web_cache, without)
    for check in checks:
        check(run)
        run.note(f"pool-{check.__name__}")
    run.tests = len(checks)


@case("pool-hand-back", native=False, own_daemon=True, alone=True, soak=True, seconds=120)
def hand_back(run):
    """How long it takes to give memory back that a pool is full of. Measured, not asserted."""
    run.daemon.strata("pool", "create", POOL, "--limit", f"{FULL_MIB * 5 // 4}MiB", "--admit",
                      "first")
    took = []
    for _ in range(5):
        run.start("pooled", "fill", POOL, str(FULL_MIB)).finish(pressed=False)
        before = pool_stats(run)["cost_bytes"]
        began = time.monotonic()
        answer = run.daemon.ask({"request": "pool_empty", "name": POOL})
        took.append(time.monotonic() - began)
        after = pool_stats(run)["cost_bytes"]
        if answer.get("reply") != "done" or before < FULL_MIB << 20 or after > 64 << 20:
            raise Failure(f"{answer}: from {before} to {after} bytes")
    run.note(f"{before / (1 << 30):.2f} GiB in " +
             ", ".join(f"{seconds * 1000:.0f}" for seconds in sorted(took)) + " ms")
