"""What goes wrong with guests stays where it is: their neighbours, the daemon and every
byte are as they were."""

import os
import re
import subprocess

import machine
from strata import Failure
from suite import ROOT, case

MIB = 1 << 20
LIAR = os.path.join(ROOT, "tests", "programs", "liar.py")
# Its monitor, and what `strata vm ls` and `stats` say of it.
LIES = {
    "silent": "does not answer in time",
    "long": "a line that is too long",
    "deep": "nests too deep",
    "events": "too many events",
    "hangs": "hung up",
    "nonsense": "",
}
# What the daemon may have grown by when it has heard all that.
MOST_GROWTH_BYTES = 16 * MIB


def refused(run, *arguments, word):
    """In one line, and nothing is changed."""
    done = run.daemon.strata(*arguments, check=False)
    if done.returncode != 1 or word not in done.stderr or len(done.stderr.splitlines()) != 1:
        raise Failure(f"{arguments}: status {done.returncode}, {done.stderr!r}, not {word!r}")


@case("vm-liars", native=False, own_daemon=True)
def vm_liars(run):
    """Monitors that are silent or lie: the others are listed as ever, and the daemon has
    kept nothing of what it was told. A QEMU that is too old is not started."""
    old = os.path.join(run.directory, "qemu-old")
    os.symlink(LIAR, old)
    refused(run, "vm", "run", "--name", "old", "--memory", "64MiB", "--", old, word="too old")
    worker = run.daemon.worker()
    before = machine.resident_anonymous_bytes(worker)
    environment = {k: v for k, v in os.environ.items()
                   if not k.startswith(("STRATA_", "LD_PRELOAD"))}
    environment["STRATA_SOCKET"] = run.daemon.socket_path
    liars = []
    try:
        for way in LIES:
            command = [run.binaries.strata, "vm", "run", "--name", way, "--memory", "64MiB",
                       "--dram", "64MiB", "--", LIAR, "-machine", way]
            with open(os.path.join(run.log_directory, f"{way}.log"), "wb") as file:
                liars.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file,
                                              stdin=subprocess.DEVNULL, start_new_session=True))
        for way, trouble in LIES.items():
            def is_said():
                guest = (run.daemon.stats(way) or {}).get("guest") or {}
                return trouble in guest.get("trouble", "-") and (trouble or guest.get("status"))
            run.daemon.wait_until(is_said, f"of {way} it is said that {trouble or 'it runs'}")
        told = run.daemon.stats("nonsense")["guest"]
        if len(told["status"]) > 32 or not re.fullmatch(r"[\w-]*", told["status"]) or \
                any(told[key] is not None
                    for key in ("balloon_bytes", "free_bytes", "available_bytes")):
            raise Failure(f"what a liar said is believed: {told}")
        lines = run.daemon.strata("vm", "ls").stdout.splitlines()
        if len(lines) != 1 + len(LIES) or sum("  silent  " in line for line in lines) != 5:
            raise Failure(f"strata vm ls: {lines}")
        for way in LIES:
            text = run.daemon.strata("vm", "stats", way).stdout
            if len(text) > 4000 or "\x1b" in text:
                raise Failure(f"strata vm stats {way} prints what it was told: {text[:200]!r}")
        grown = machine.resident_anonymous_bytes(worker) - before
        run.note(f"the worker grew by {grown // 1024} KiB")
        if run.daemon.worker() != worker or grown > MOST_GROWTH_BYTES:
            raise Failure(f"the worker grew by {grown} bytes, or is another")
    finally:
        for liar in liars:
            liar.kill()
            liar.wait()
    run.daemon.wait_until(lambda: not run.daemon.tenants(), "the liars are gone")
    run.tests = 2
