"""What this machine's kernel cannot show, shown by another one in a guest. The
kernels come from `scripts/setup.sh guest` (`make guest`); without them the cases
are skipped."""

import os

import guest
from strata import Failure, Skip
from suite import BUILD, ROOT, case

# From which kernel on programs can be managed (UFFDIO_MOVE).
MANAGES = (6, 8)
# Emulation, and perhaps a busy machine beneath it.
PATIENCE = "10"


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


def in_guest(run, wanted, arguments, environment=(), hardware=(), needs=(), **contents):
    """Runs cases under that kernel; `environment`, `hardware` and `contents`: see
    guest.py. `needs`: modules that must be there."""
    qemu, version, kernel = guest_for(run, wanted)
    there = {os.path.basename(path).split(".")[0] for path in guest.modules(kernel)}
    if (contents.get("criu") and not there) or not there.issuperset(needs):
        raise Skip("modules of the guest's kernel are missing; scripts/setup.sh guest fetches "
                   "them")
    initramfs = os.path.join(run.directory, "initramfs")
    guest.make_initramfs(initramfs, ROOT, run.binaries, BUILD, kernel=kernel,
                         **contents)
    boots = sum(name.startswith("guest") for name in os.listdir(run.log_directory))
    log = os.path.join(run.log_directory, f"guest-{boots + 1}.log")
    arguments = ["--patience", PATIENCE, *arguments]
    verdicts = guest.run(qemu, kernel, initramfs, arguments, log, run.seconds_left(),
                         environment, hardware)
    run.note(f"Linux {version[0]}.{version[1]} under TCG")
    for name, (verdict, rest) in verdicts.items():
        if verdict != "ok":
            raise Failure(f"in the guest: {verdict} {name}: {rest}; see {log}")
        run.note(f"{name} {rest}")
    return verdicts


def expect(verdicts, names):
    if set(verdicts) != set(names):
        raise Failure(f"the guest ran {sorted(verdicts)}")


@case("guest-without-move", seconds=400)
def guest_without_move(run):
    names = ["kernel-without-move"]
    expect(in_guest(run, lambda version: version < MANAGES,
                    ["--native", "--only", names[0]]), names)


@case("guest-with-cgroup-v2", native=False, seconds=900)
def guest_with_cgroup_v2(run):
    names = ["cgroup-v2-backstop", "oom-order"]
    expect(in_guest(run, lambda version: version >= MANAGES,
                    [word for name in names for word in ("--only", name)]), names)
