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


def in_guest(run, wanted, arguments):
    """Runs cases under the newest kernel there that `wanted` wants."""
    qemu = run.tool("qemu-system-x86_64")
    place = os.path.join(BUILD, "guest")
    kernels = [(version, path) for version, path in guest.kernels(place) if wanted(version)]
    if not kernels:
        raise Skip("no guest kernel of that age; scripts/setup.sh guest fetches Debian's")
    if run.binaries.missing():
        raise Skip("Strata is not built")
    version, kernel = kernels[-1]
    initramfs = os.path.join(run.directory, "initramfs")
    guest.make_initramfs(initramfs, ROOT, run.binaries, BUILD)
    log = os.path.join(run.log_directory, "guest.log")
    arguments = ["--patience", PATIENCE, *arguments]
    verdicts = guest.run(qemu, kernel, initramfs, arguments, log, run.seconds_left())
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
