"""Runs cases in a guest under another kernel, for what this machine's cannot show.
The kernels come from `scripts/setup.sh guest` (`make guest`); without them the cases
are skipped. Which cases run where: guests.py."""

import os

import guest
from strata import Failure, Skip
from suite import BUILD, ROOT

# From which kernel on programs can be managed (UFFDIO_MOVE).
MANAGES = (6, 8)
# Emulation, and perhaps a busy machine beneath it.
PATIENCE = "10"
# It computes all the time: more than two beside each other would only wait for each other.
AT_ONCE = "2"


def guest_for(run, wanted):
    """QEMU, and version and path of the newest kernel there that `wanted` wants;
    skips where one is missing."""
    qemu = run.tool("qemu-system-x86_64")
    place = os.path.join(BUILD, "guest")
    kernels = [(version, path) for version, path in guest.kernels(place) if wanted(version)]
    if not kernels:
        raise Skip("no guest kernel of that age; scripts/setup.sh guest fetches Debian's")
    if run.binaries.missing():
        raise Skip("Strata is not built")
    return qemu, *kernels[-1]


def only(*names):
    """What the suite is told to run these."""
    return [word for name in names for word in ("--only", name)]


def in_guest(run, wanted, runs, names, environment=(), hardware=("-m", "1024"), needs=(),
             **contents):
    """Boots a guest with that kernel, in which `runs` (what the suite is told, each time
    that it is started) must be the cases `names`; returns how many these are.
    `environment`, `hardware` and `contents`: see guest.py. `needs`: modules that must be
    there."""
    qemu, version, kernel = guest_for(run, wanted)
    there = {os.path.basename(path).split(".")[0] for path in guest.modules(kernel)}
    if (contents.get("criu") and not there) or not there.issuperset(needs):
        raise Skip("modules of the guest's kernel are missing; scripts/setup.sh guest fetches "
                   "them")
    initramfs = os.path.join(run.directory, "initramfs")
    runs = [["--patience", PATIENCE, "--at-once", AT_ONCE, *arguments] for arguments in runs]
    # All boots of a case have the same.
    if not os.path.exists(initramfs):
        guest.make_initramfs(initramfs, ROOT, run.binaries, BUILD, kernel=kernel, **contents)
    guest.tell(initramfs, runs, environment)
    boots = sum(name.startswith("guest-boot") for name in os.listdir(run.log_directory))
    log = os.path.join(run.log_directory, f"guest-boot-{boots + 1}.log")
    verdicts = guest.run(qemu, kernel, initramfs, log, run.seconds_left(), hardware)
    run.note(f"Linux {version[0]}.{version[1]} under TCG")
    for name, (verdict, rest) in verdicts.items():
        if verdict == "flaky":
            run.flaky.append(f"in the guest: {name}: {rest}")
        elif verdict != "ok":
            raise Failure(f"in the guest: {verdict} {name}: {rest}; see {log}")
        run.note(f"{name} {rest}")
    if set(verdicts) != set(names):
        raise Failure(f"the guest ran {sorted(verdicts)} and not {sorted(names)}; see {log}")
    return len(names)
