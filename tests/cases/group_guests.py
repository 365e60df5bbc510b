"""What each further one of equal guests at rest costs: in a group, without one, and merged
by the kernel (KSM). What measures the machine: nothing here is asserted but that all of
them go on, with every byte right."""

import contextlib
import os
import re
import time

import ksm
import machine
from strata import configured
from suite import case
from under import Guest

MIB = 1 << 20
GUEST_MIB, FILLED_MIB, GUESTS = 192, 96, 4
# Beyond what QEMU itself takes, so much of what the guest has touched.
DRAM_PART = 12
SETTLES = 90


def mappings(pid):
    """(start, end, bytes in DRAM) of the anonymous ones."""
    found = []
    for line in machine.read(f"/proc/{pid}/smaps").splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ 0\s*$", line):
            found.append([int(head[1], 16), int(head[2], 16), 0])
        elif re.match(r"[0-9a-f]+-", line):
            found.append([0, 0, 0])
        elif line.startswith("Rss:"):
            found[-1][2] = int(line.split()[1]) << 10
    return [tuple(one) for one in found if one[1]]


class Measured:
    """A guest, and where its memory is in QEMU's."""

    def __init__(self, run, name, budget="1GiB"):
        arguments = ["--memory", f"{GUEST_MIB}MiB", "--dram", budget]
        self.guest = Guest(run, name, arguments, ["-machine", "q35"])
        self.guest.hear(r"^up\n")
        self.guest.tell(f"fill {FILLED_MIB}")
        self.guest.hear(r"^filled\n")
        self.guest.tell("rest")
        self.guest.hear(r"^rests\n")
        self.pid = self.guest.process.pid
        (self.start, self.end), = [(start, end) for start, end, _ in mappings(self.pid)
                                   if end - start == GUEST_MIB * MIB] or [(0, 0)]
        self.touched = self.resident()

    def resident(self):
        return sum(rss for start, end, rss in mappings(self.pid)
                   if start >= self.start and end <= self.end)

    def cost(self):
        stats = self.guest.stats()
        return self.resident() + stats["compressed_bytes"] + stats["file_bytes"]

    def squeeze(self, run):
        """Leaves it a twelfth of what it has touched, beside QEMU."""
        own = sum(rss for _, _, rss in mappings(self.pid)) - self.resident()
        budget = own + self.touched // DRAM_PART
        run.daemon.strata("set", self.guest.name, "--dram", f"{budget >> 10}KiB")

    def wakes(self):
        self.guest.tell("work")
        self.guest.rounds(1)


def settle(guests):
    """Until what they cost changes no more."""
    end, before = time.monotonic() + SETTLES, None
    while time.monotonic() < end:
        time.sleep(5)
        now = sum(guest.cost() for guest in guests)
        if before is not None and abs(now - before) < MIB:
            break
        before = now


def further(run, what, names, squeezed):
    """Starts the guests, and says what the first costs, and each of the others."""
    guests = []
    with contextlib.ExitStack() as stack:
        def start(name):
            guests.append(Measured(run, name))
            stack.callback(guests[-1].guest.kill)
            if squeezed:
                guests[-1].squeeze(run)

        def cost():
            settle(guests)
            merged = 0 if squeezed else ksm.sharing() * 4096
            return sum(guest.cost() for guest in guests) - merged
        start(names[0])
        first = cost()
        for name in names[1:]:
            start(name)
        each = (cost() - first) / (len(names) - 1)
        touched = guests[-1].touched
        run.note(f"{what}: touched {touched / MIB:.0f} MiB, the first costs {first / MIB:.1f} MiB, "
                 f"each further one {each / MIB:.1f} MiB, {100 * each / touched:.1f} %")
        for guest in guests:
            guest.wakes()
            guest.guest.end()


@case("group-guests", native=False, own_daemon=True, alone=True, soak=True, seconds=300)
def group_guests(run):
    place = os.path.join(run.directory, "configured")
    log = os.path.join(run.log_directory, "configured.log")
    with configured(run.daemon, '[groups]\ntwins = ["twin*"]\n', place, log):
        further(run, "in a group", [f"twin{number}" for number in range(GUESTS)], True)
        further(run, "without one", [f"other{number}" for number in range(GUESTS)], True)
        why = ksm.missing()
        if why:
            run.note(f"KSM: not measured: {why}")
            return
        with ksm.switched_on():
            further(run, "KSM", [f"merged{number}" for number in range(GUESTS)], False)
