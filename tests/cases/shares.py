"""A host's DRAM that is shared out: reserves, limits and weights of living tenants, also
across a worker's death."""

import json
import os
import signal
import time

from strata import Failure, configured, worker_of
from suite import case

HOST_MIB = 176
RESERVE_MIB = 64


def shares(run):
    """By name, as `strata shares` says it; all of it must be there."""
    (host,) = json.loads(run.daemon.strata("shares", "--json").stdout)
    tenants = {one["name"]: one for one in host["tenants"]}
    given = sum(one["budget_bytes"] for one in tenants.values())
    if given > HOST_MIB << 20:
        raise Failure(f"{given} bytes are given of {HOST_MIB} MiB: {tenants}")
    quiet = tenants.get("quiet")
    if quiet and quiet["used_bytes"] > RESERVE_MIB << 20 > quiet["budget_bytes"]:
        raise Failure(f"its reserve is not kept: {quiet}")
    return tenants


def has(run, name, least_mib, most_mib=HOST_MIB):
    """Whether its budget is in there now."""
    tenant = shares(run).get(name)
    return tenant and least_mib << 20 <= tenant["budget_bytes"] <= most_mib << 20 and tenant


def refused(run, *arguments, word):
    done = run.daemon.strata(*arguments, check=False)
    if done.returncode != 1 or word not in done.stderr:
        raise Failure(f"{arguments}: status {done.returncode}, {done.stderr!r}, not {word!r}")


@case("shares-move", native=False, own_daemon=True, seconds=120, takes=20)
def shares_move(run):
    log = os.path.join(run.log_directory, "stratad-shares.log")
    wait = run.daemon.wait_until
    with configured(run.daemon, f'dram = "{HOST_MIB}MiB"\n', run.directory, log) as daemon:
        quiet = run.start("hold", "96", name="quiet",
                          budget=("--reserve", f"{RESERVE_MIB}MiB", "--weight", "2"))
        quiet.gate("ready")
        busy = run.start("hold", "128", "load", budget=(), name="busy")
        busy.gate("running")
        # What is quiet keeps its reserve and gives the rest; the other waits, and gets it.
        wait(lambda: has(run, "busy", HOST_MIB - RESERVE_MIB - 24), "the busy one gets the rest", 60)
        refused(run, "set", "busy", "--reserve", f"{HOST_MIB}MiB", word="cannot be kept")
        refused(run, "set", "busy", "--weight", "0", word="weight of 0")
        refused(run, "run", "--name", "third", "--dram", f"{HOST_MIB}MiB", "--", "true",
                word="cannot be kept")
        for line in run.daemon.strata("shares").stdout.splitlines()[2:]:
            run.note(" ".join(line.split()))

        os.kill(worker_of(daemon), signal.SIGKILL)
        wait(lambda: (s := run.daemon.stats("quiet")) and s["worker_restarts_total"] == 1,
             "another worker has them")
        kept = wait(lambda: shares(run).get("quiet"), "it shares out")
        if (kept["reserve_bytes"], kept["weight"]) != (RESERVE_MIB << 20, 2.0):
            raise Failure(f"the next worker forgot what it claims: {kept}")

        run.daemon.strata("set", "busy", "--limit", "48MiB")
        wait(lambda: has(run, "busy", 1, 48), "its limit holds", 20)
        # A budget of its own does not move, and the other has what is left.
        run.daemon.strata("set", "busy", "--dram", "56MiB")
        wait(lambda: not shares(run)["busy"]["moves"], "it is told apart")
        before = time.monotonic()
        quiet.answer("check")
        quiet.gate("ready")
        wait(lambda: has(run, "quiet", RESERVE_MIB + 16), "who wakes gets what nobody else has", 40)
        run.note(f"awake, with more than its reserve after {time.monotonic() - before:.1f} s")
        busy.answer()
        busy.finish()
        quiet.answer("end")
        quiet.finish()
