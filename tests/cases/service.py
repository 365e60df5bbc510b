"""The system's daemon as a person installs it: by the commands of docs/usage.md, started
by systemd from its unit. What tests start themselves has no unit around it."""

import os
import subprocess

import machine
from moment import CRIU, need_criu
from strata import Failure, Skip
from suite import ROOT, case

SCRIPT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
                      "programs", "service.sh")
SYSTEMD = "/usr/lib/systemd/systemd"
PACKAGING = os.path.join(ROOT, "packaging")


@case("system-units", native=False, daemon=False)
def units(run):
    """systemd knows every word of both units."""
    analyze = run.tool("systemd-analyze")
    for name in ("stratad.service", "stratad.socket"):
        with open(os.path.join(PACKAGING, name)) as unit:
            text = unit.read().replace("/usr/bin/", run.binaries.directory + "/")
        with open(os.path.join(run.directory, name), "w") as unit:
            unit.write(text)
    done = subprocess.run([analyze, "verify", "--man=no", "stratad.service", "stratad.socket"],
                          cwd=run.directory, stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, timeout=30 * run.patience, check=False)
    if done.returncode != 0 or done.stderr.strip():
        raise Failure(f"status {done.returncode}: {done.stderr.strip()}")


@case("system-service", native=False, seconds=120)
def system_service(run):
    """A Redis is run, snapshotted, restored, rolled back and cloned, and what came
    back has all its rights and outlives the daemon."""
    need_criu()
    if not os.path.exists(SYSTEMD):
        raise Skip(f"there is no {SYSTEMD}")
    if "overlay" not in machine.read("/proc/filesystems").split():
        raise Skip("this kernel has no overlay file system")
    place = os.path.join(run.directory, "service")
    os.mkdir(place)
    build = os.path.dirname(run.binaries.stratad)
    with open(os.path.join(run.log_directory, "systemd.log"), "wb") as log:
        done = subprocess.run([SCRIPT, place, build, CRIU], stdin=subprocess.DEVNULL, stdout=log,
                              stderr=log, timeout=110 * run.patience, check=False)
    seen = machine.read(os.path.join(place, "seen")) or "nothing: see systemd.log"
    if done.returncode != 0 or not seen.endswith("done\n"):
        raise Failure(f"status {done.returncode}: {seen.strip()}")
    run.note(f"{len(seen.splitlines()) - 1} answers as they must be")
