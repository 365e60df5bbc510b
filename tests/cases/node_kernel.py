"""The kernel's own tiering (demotion, and promotion by its balancing) beside Strata's
node tier: the same program with as much DRAM, and both at once. Where pages lie and
how many were moved is said and not judged; in an emulated machine both nodes are as
fast as each other, so what the program gets done shows what tiering costs, and
nothing of what it brings."""

import contextlib
import ctypes
import glob
import mmap
import os
import re
import time

import machine
from elsewhere import not_here
from node import BALANCING, MIB, keeper_seconds, node_without_cpus, on_node
from strata import Failure, worker_of
from suite import case

# Node 1 is said to be slower, too (HMAT): else it counts as DRAM for the kernel, which
# demotes only to what is slower.
HARDWARE = ("-machine", "hmat=on", "-m", "1280",
            "-object", "memory-backend-ram,id=m0,size=768M",
            "-object", "memory-backend-ram,id=m1,size=512M",
            "-numa", "node,nodeid=0,cpus=0-1,memdev=m0,initiator=0",
            "-numa", "node,nodeid=1,memdev=m1,initiator=0",
            "-numa", "dist,src=0,dst=1,val=40",
            *(word for node, latency, bandwidth in ((0, 100, "100G"), (1, 400, "25G"))
              for kind, value in (("latency", f"latency={latency}"),
                                  ("bandwidth", f"bandwidth={bandwidth}"))
              for word in ("-numa", f"hmat-lb,initiator=0,target={node},hierarchy=memory,"
                                    f"data-type=access-{kind},{value}")))
HOME = 0
TIERS = "/sys/devices/virtual/memory_tiering"
DEMOTION = "/sys/kernel/mm/numa/demotion_enabled"
# Balancing in its mode for memory of two speeds.
BY_SPEED = "2"
# A region of the program, and what it may have of DRAM.
REGION_MIB = 48
DRAM_MIB = 64
# ...to within so much.
SLACK_MIB = 2
# A machine with more than this cannot be made short of DRAM as lightly as that.
MOST_FREE = 2 << 30
LOOK_EVERY_S = 2
# Warm-up, window and looks after the change over; figures to quote are a soak's.
SHORT_S = (6, 6, (5, 10))
LONG_S = (20, 16, (5, 10, 20, 40))
SYS_MBIND, MPOL_BIND = 237, 2
LIBC = ctypes.CDLL(None, use_errno=True)


def is_lower(node):
    """Whether the kernel demotes to that node."""
    tiers = glob.glob(f"{TIERS}/memory_tier*/nodelist")
    return not any({str(node), str(HOME)} <= set(nodes_in(machine.read(tier))) for tier in tiers) \
        and len(tiers) > 1


def nodes_in(listed):
    for part in re.findall(r"\d+(?:-\d+)?", listed):
        first, _, last = part.partition("-")
        yield from (str(node) for node in range(int(first), int(last or first) + 1))


@contextlib.contextmanager
def kernel_moves(on):
    """The kernel's demotion and promotion on or off, and afterwards as they were."""
    before = {path: machine.read(path).strip() for path in (DEMOTION, BALANCING)}
    try:
        for path, value in ((DEMOTION, "1" if on else "0"), (BALANCING, BY_SPEED if on else "0")):
            write(path, value)
        yield
    finally:
        for path, value in before.items():
            write(path, value)


def write(path, value):
    with open(path, "w") as file:
        file.write(value)


def free_to_use(node):
    """Bytes of a node that programs get before the kernel begins to demote. With
    balancing by speed it keeps "high" free, and once more what lies between "low" and
    that."""
    kept = 0
    for zone in machine.read("/proc/zoneinfo").split("Node ")[1:]:
        if zone.startswith(f"{node},"):
            low, high = (int(re.search(rf"\n +{mark} +(\d+)", zone)[1]) for mark in ("low", "high"))
            kept += 2 * high - low
    free = machine.field_kib(f"/sys/devices/system/node/node{node}/meminfo", f"Node {node} MemFree")
    return free * 1024 - kept * 4096


class Ballast:
    """Memory of the home node, taken and locked, so that little is left. (A control
    group's limit counts both nodes: it makes no DRAM scarce.)"""

    def __init__(self):
        self.pieces = []

    def bytes(self):
        return sum(len(piece) for piece in self.pieces)

    def take(self, size):
        piece = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.pieces.append(piece)
        start, length, only = address_of(piece), ctypes.c_size_t(size), ctypes.c_ulong(1 << HOME)
        if LIBC.syscall(SYS_MBIND, start, length, MPOL_BIND, ctypes.byref(only),
                        ctypes.c_ulong(64), 0) != 0 or LIBC.mlock(start, length) != 0:
            raise Failure(f"{size} bytes of node {HOME}: {os.strerror(ctypes.get_errno())}")

    def give_back(self):
        for piece in self.pieces:
            LIBC.munlock(address_of(piece), ctypes.c_size_t(len(piece)))
            piece.close()
        self.pieces = []


def address_of(piece):
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(piece)))


@contextlib.contextmanager
def scarce(size):
    """So many bytes of DRAM are not to be had."""
    ballast = Ballast()
    try:
        ballast.take(size // MIB * MIB)
        yield ballast
    finally:
        ballast.give_back()


def leave(run, ballast, roles, size):
    """Takes DRAM until the program's regions have no more than that of it: the kernel
    demotes first what else lies idle there."""
    def is_short():
        over = roles.dram_bytes() - size
        if over > SLACK_MIB * MIB:
            ballast.take(int(over) // MIB * MIB)
            time.sleep(1)
        return over <= SLACK_MIB * MIB
    run.daemon.wait_until(is_short, "the program is short of DRAM", 60)


class Region:
    def __init__(self, pid, start):
        self.pid, self.start, self.count = pid, start, REGION_MIB * MIB // 4096

    def places(self, node):
        """Parts of it: in DRAM, on the node, and neither (stored by Strata)."""
        found = machine.nodes_of_pages(self.pid, self.start, self.count)
        there = [found.count(place) / self.count for place in (HOME, node)]
        return (*there, 1 - sum(there))


class Roles:
    """The program, begun: two regions, the first hot until they change places."""

    def __init__(self, run, node, **how):
        self.node = node
        self.program = run.start("roles", REGION_MIB, **how)
        _, *starts = self.program.gate().split()
        self.regions = [Region(self.program.peer, int(start)) for start in starts]

    def ask(self, what="tell"):
        """Uses of each region so far."""
        self.program.answer(what)
        return [int(uses) for uses in self.program.gate().split()[1:]]

    def places(self):
        return [region.places(self.node) for region in self.regions]

    def dram_bytes(self):
        return sum(dram for dram, _, _ in self.places()) * REGION_MIB * MIB

    def end(self):
        """It checks every byte."""
        self.program.answer("end")
        self.program.finish(pressed=False)


def moved_by_kernel():
    """Pages that the kernel has demoted and promoted, its hint faults, and the huge pages
    that it has made of small ones: it puts those on the node where most of them lay."""
    counts = dict(line.split() for line in machine.read("/proc/vmstat").splitlines())
    demoted = sum(int(count) for name, count in counts.items() if name.startswith("pgdemote_"))
    return (demoted, int(counts.get("pgpromote_success", 0)),
            int(counts.get("numa_hint_faults", 0)), int(counts.get("thp_collapse_alloc", 0)))


def reclaim_seconds():
    """CPU time of the home node's kswapd so far."""
    for stat in glob.glob("/proc/[0-9]*/stat"):
        name, _, rest = machine.read(stat).partition(") ")
        if name.endswith(f"(kswapd{HOME}"):
            return sum(int(ticks) for ticks in rest.split()[11:13]) / os.sysconf("SC_CLK_TCK")
    return 0.0


def moved_by_strata(roles):
    """Pages that went to the node, and left it for DRAM or the store; faults, soft ones,
    and moves that somebody opposed."""
    stats = roles.program.stats()
    tier = next(tier for tier in stats["tiers"] if tier["tier"] == "node")
    return [tier["pages_in_total"], tier["pages_out_total"], stats["faults_total"],
            stats["soft_faults_total"], stats["opposed_moves_total"]]


class Watch:
    """What happened from here on, to be said."""

    def __init__(self, roles, worker=None):
        self.roles, self.worker = roles, worker
        self.began, self.before = time.monotonic(), self.counts()
        self.uses = roles.ask()

    def counts(self):
        strata = moved_by_strata(self.roles) if self.worker else []
        spent = keeper_seconds(self.worker) if self.worker else 0.0
        return [*moved_by_kernel(), reclaim_seconds(), *strata, spent]

    def said(self):
        seconds = time.monotonic() - self.began
        uses = [now - then for now, then in zip(self.roles.ask(), self.uses)]
        demoted, promoted, hints, huge, reclaiming, *strata, keeping = (
            now - then for now, then in zip(self.counts(), self.before))
        text = f"{sum(uses) / seconds:.0f} uses/s; kernel: {demoted} demoted, {promoted} " \
               f"promoted, {hints} hint faults, {huge} huge pages made, " \
               f"kswapd {reclaiming / seconds:.1%}"
        if strata:
            down, up, faults, soft, opposed = strata
            text += f"; Strata: {down} to the node, {up} from it, {faults} faults ({soft} soft), " \
                    f"{opposed} opposed, keeper {keeping / seconds:.1%}"
        return uses, text


def percent(parts):
    return "/".join(f"{part * 100:.0f}" for part in parts)


def subject(run, name, roles, worker=None):
    """Lets the program run, with its regions as they are and changed over; says how that
    went. Returns how much DRAM it had (its regions)."""
    warm_up, window, after = LONG_S if run.soak else SHORT_S
    time.sleep(warm_up)
    watch, seen = Watch(roles, worker), []
    for _ in range(window // LOOK_EVERY_S):
        time.sleep(LOOK_EVERY_S)
        seen.append(roles.places())
    uses, text = watch.said()
    hot, cold = ([sum(part) / len(seen) for part in zip(*(places[region] for places in seen))]
                 for region in (0, 1))
    in_dram = (uses[0] * hot[0] + uses[1] * cold[0]) / sum(uses)
    dram = (hot[0] + cold[0]) * REGION_MIB * MIB
    run.note(f"{name}: {dram / MIB:.0f} MiB in DRAM; DRAM/node/stored: hot {percent(hot)} %, "
             f"cold {percent(cold)} %; {in_dram:.1%} of the uses in DRAM; {text}")
    watch, began, back = Watch(roles, worker), time.monotonic(), []
    roles.ask("swap")
    for seconds in after:
        time.sleep(max(began + seconds - time.monotonic(), 0))
        back.append(f"{percent(roles.places()[1])} % after {seconds} s")
    _, text = watch.said()
    run.note(f"{name}, changed over: new hot region {', '.join(back)}; {text}")
    return dram


def under_strata(run, name, node, daemon, dram):
    worker = worker_of(daemon)
    roles = Roles(run, node, budget=f"{int(dram) >> 10}KiB")
    run.daemon.wait_until(lambda: moved_by_strata(roles)[0] > 0,
                          "Strata moves pages to the node", 60)
    began = time.monotonic()
    subject(run, name, roles, worker)
    stats, took = roles.program.stats(), time.monotonic() - began
    if stats["lost_pages_total"]:
        raise Failure(f"{name}: {stats['lost_pages_total']} pages lost")
    roles.end()
    return stats["opposed_moves_total"], took


@case("node-beside-kernel", native=False, own_daemon=True, soak=True, seconds=120)
def node_kernel(run):
    node = node_without_cpus()
    if node is None or not is_lower(node):
        not_here("this machine has no node of a slower tier", "guest-measures")
    if not os.path.exists(DEMOTION) or not os.path.exists(BALANCING):
        not_here("this kernel moves no pages between tiers", "guest-measures")
    if free_to_use(HOME) > MOST_FREE:
        not_here("this machine has too much DRAM", "guest-measures")
    with kernel_moves(True), scarce(free_to_use(HOME) - DRAM_MIB * MIB) as ballast:
        before = moved_by_kernel()
        roles = Roles(run, node, native=True)

        def moves():
            demoted, promoted, *_ = moved_by_kernel()
            return demoted > before[0] and promoted > before[1]
        run.daemon.wait_until(moves, "the kernel demotes and promotes", 60)
        leave(run, ballast, roles, DRAM_MIB * MIB)
        dram, taken = subject(run, "kernel", roles), ballast.bytes()
        roles.end()
    with on_node(run, "") as (_, daemon), kernel_moves(False):
        under_strata(run, "Strata", node, daemon, dram)
    with on_node(run, "") as (_, daemon), kernel_moves(True), scarce(taken):
        opposed, took = under_strata(run, "both", node, daemon, dram)
        # A page that was opposed is left alone for a minute.
        pages = 2 * REGION_MIB * MIB // 4096
        if opposed > pages * (2 + took // 60):
            raise Failure(f"{opposed} moves of {pages} pages were opposed in {took:.0f} s")
