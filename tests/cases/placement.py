"""The placement API (include/strata.h), by tests/programs/place.c: what is said of
memory is heeded, and nothing that is said makes a byte wrong."""

import os
import signal
import subprocess

from strata import Failure, configured
from suite import case


def pinned(program):
    return program.stats()["pinned_bytes"]


@case("place-hints", native=False)
def hints(run):
    """Cold memory leaves, hot memory comes back; where() and `strata stats` agree."""
    program = run.start("place", "hints", budget="48MiB")
    program.gate("cold")
    stats = run.daemon.stats(program.name)
    # A page is stored, or staged: not in place.
    if stats["stored_bytes"] < 31 << 20:
        raise Failure(f"32 MiB are cold, {stats['stored_bytes']} bytes are stored")
    program.answer()
    program.finish()


@case("place-far-below-budget", native=False)
def far_below(run):
    """What the budget does not ask for leaves all the same, when it is asked to."""
    program = run.start("place", "hints", budget="512MiB")
    program.gate("cold")
    program.answer()
    program.finish(pressed=False)


@case("place-pins", native=False)
def pins(run):
    """Pinned pages stay under pressure, no more can be pinned than may be, and they
    go with their memory."""
    program = run.start("place", "pins", budget="28MiB")
    for word, wanted in (("pinned", 12 << 20), ("moved", 12 << 20), ("unpinned", 0),
                         ("unmapped", 0)):
        program.gate(word)
        if (found := pinned(program)) != wanted:
            raise Failure(f"{word}: {found} bytes are pinned")
        program.answer()
    program.finish()


@case("place-pins-survive", native=False, own_daemon=True, seconds=120)
def pins_survive(run):
    """The worker is killed: what is pinned stays so, under pressure. A budget that
    is too small for it suspends all of it, and says so."""
    program = run.start("place", "survive", budget="28MiB")
    program.gate("pinned")
    for _ in range(run.times(3)):
        worker = run.daemon.wait_until(run.daemon.worker, "there is one worker")
        os.kill(worker, signal.SIGKILL)
        run.daemon.wait_until(lambda: run.daemon.worker() not in (None, worker), "a new worker")
        run.daemon.wait_until(lambda: run.daemon.stats(program.name), "it knows the tenant")
        if (found := pinned(program)) != 12 << 20:
            raise Failure(f"after the worker's death {found} bytes are pinned")
        program.answer()
        program.gate("pinned")
    run.daemon.strata("set", program.name, "--dram", "12MiB")

    def suspended():
        stats = run.daemon.stats(program.name)
        return any("three quarters" in note for note in stats["notes"]) \
            and stats["resident_bytes"] < 12 << 20
    run.daemon.wait_until(suspended, "the pins are suspended and their pages leave")
    run.daemon.strata("set", program.name, "--dram", "28MiB")
    run.daemon.wait_until(lambda: not any("three quarters" in note for note in
                                          run.daemon.stats(program.name)["notes"]),
                          "they are heeded again")
    program.answer("end")
    program.finish()


@case("place-tiers", native=False)
def tiers(run):
    """Memory for a tier is found there; without a file tier that is said."""
    program = run.start("place", "tiers", budget="40MiB")
    program.gate("compressed")
    program.answer()
    program.gate("no file tier")
    program.answer()
    program.finish()


@case("place-file-tier", native=False, own_daemon=True)
def file_tier(run):
    """With one, its pages go there though nothing presses."""
    tier = os.path.join(run.directory, "tier")
    os.mkdir(tier)
    text = f'tier_path = "{tier}"\ntier_limit = "64MiB"\n'
    log = os.path.join(run.log_directory, "stratad-tier.log")
    with configured(run.daemon, text, run.directory, log):
        program = run.start("place", "tiers", budget="40MiB")
        program.gate("compressed")
        program.answer()
        program.gate("file")
        stats = run.daemon.stats(program.name)
        if stats["file_bytes"] < 100 << 10:
            raise Failure(f"{stats['file_bytes']} bytes are in the file tier")
        program.answer()
        program.finish()


@case("place-sequential", native=False)
def sequential(run):
    """A reader that nobody would guess, every fourth page in order: pages come ahead
    when it has said so, and only then."""
    program = run.start("place", "sequential", budget="32MiB")
    ahead = []
    for word in ("begin", "unsaid", "said"):
        program.gate(word)
        ahead.append(run.daemon.stats(program.name)["prefetched_pages_total"])
        program.answer()
    unsaid, said = ahead[1] - ahead[0], ahead[2] - ahead[1]
    run.note(f"{said} pages ahead, {unsaid} when it was not said")
    if said < 2000 or said < 10 * unsaid:
        raise Failure(f"{said} pages came ahead, {unsaid} when it was not said")
    program.finish()


@case("place-storm", native=False, seconds=120)
def storm(run):
    """Every advice at random while the memory is written: no byte is wrong."""
    program = run.start("place", "storm", budget="40MiB")
    program.gate("running")
    faults = program.stats()["faults_total"]
    run.daemon.wait_until(lambda: program.stats()["faults_total"] > faults + run.times(5000),
                          "faults are served", 60)
    program.answer()
    program.finish()


@case("place-storm-killed", native=False, own_daemon=True, seconds=180)
def storm_killed(run):
    """The same while the worker is killed again and again."""
    before = run.daemon.footprint()
    program = run.start("place", "storm", budget="40MiB")
    program.gate("running")
    for _ in range(run.times(5)):
        faults = run.daemon.wait_until(lambda: run.daemon.stats(program.name),
                                       "a worker answers")["faults_total"]
        run.daemon.wait_until(
            lambda: (s := run.daemon.stats(program.name)) and s["faults_total"] > faults + 300,
            "faults are served", 40)
        worker = run.daemon.wait_until(run.daemon.worker, "there is one worker")
        os.kill(worker, signal.SIGKILL)
        run.daemon.wait_until(lambda: run.daemon.worker() not in (None, worker), "a new worker")
    program.answer()
    program.finish()
    run.daemon.wait_until(lambda: not run.daemon.tenants(), "strata ps lists it no more")
    # The settings' memory file stays.
    run.daemon.settled(before, "the daemon gives back what the tenant cost", stays=1)


@case("place-hostile", native=False, own_daemon=True, seconds=180)
def hostile(run):
    """Ranges that are not its own, overflows, and millions of tiny hints: each has
    its documented result, and a neighbour is served all the while."""
    neighbour = run.start("hold", "32", "load", budget="12MiB", name="neighbour")
    neighbour.gate("running")
    run.daemon.wait_until(lambda: neighbour.stats()["faults_total"] > 100, "it is served")
    before = run.daemon.footprint()
    program = run.start("place", "hostile", budget="40MiB", name="hostile")
    program.gate("refused")
    if (found := pinned(program)) != 0:
        raise Failure(f"refused, but {found} bytes are pinned")
    program.answer()
    while program.gate("hinting", "acted") == "hinting":
        faults = neighbour.stats()["faults_total"]
        run.daemon.wait_until(lambda: neighbour.stats()["faults_total"] > faults + 200,
                              "the neighbour is served beside it")
        program.answer()
    program.answer()
    program.finish()
    neighbour.answer()
    neighbour.finish()
    run.daemon.wait_until(lambda: run.daemon.footprint()[1] < before[1] + (8 << 20),
                          "the daemon gives back what it was made to hold")


@case("place-alone")
def alone(run):
    """Without Strata, or with the library and nobody who manages: it says so."""
    if run.native:
        run.run("place", "hints", pressed=False)
        return
    program = run.built("place")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("STRATA_", "LD_PRELOAD"))}
    clean["STRATA_TEST_NATIVE"] = "1"
    for preload in (None, run.binaries.library):
        if preload and os.path.exists("/run/strata/agent.sock"):
            continue
        environment = clean | ({"LD_PRELOAD": preload} if preload else {})
        done = subprocess.run([program, "alone"], env=environment, capture_output=True, text=True,
                              timeout=60, check=False)
        if done.returncode != 0 or done.stderr:
            raise Failure(f"preload {preload}: {done.returncode}, {done.stderr}")
