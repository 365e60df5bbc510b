"""The node tier: cold pages lie on a node without processors, in place, and hot
ones come back. A guest has such a node (cases/kernels.py boots one for it)."""

import contextlib
import ctypes
import json
import mmap
import os
import re
import signal
import subprocess
import time

import machine
import vm
from elsewhere import doctor, not_here
from kernels import MANAGES, expect, in_guest
from strata import Failure, configured
from suite import case

MIB = 1 << 20
NODES = "/sys/devices/system/node"
BALANCING = "/proc/sys/kernel/numa_balancing"
LIMIT_MIB = 16
# What "place node-much" has there.
MUCH_PAGES = 96 * MIB // 4096
# Node 0 has the processors, node 1 is 256 MiB of memory farther away.
HARDWARE = ("-object", "memory-backend-ram,id=m0,size=768M",
            "-object", "memory-backend-ram,id=m1,size=256M",
            "-numa", "node,nodeid=0,cpus=0-1,memdev=m0", "-numa", "node,nodeid=1,memdev=m1",
            "-numa", "dist,src=0,dst=1,val=40")


def node_without_cpus():
    for name in sorted(os.listdir(NODES)) if os.path.isdir(NODES) else ():
        if re.fullmatch(r"node\d+", name) and not machine.read(f"{NODES}/{name}/cpulist").strip() \
                and machine.field_kib(f"{NODES}/{name}/meminfo", f"Node {name[4:]} MemTotal") > 0:
            return int(name[4:])
    return None


def pages_on(pid, node):
    """What the kernel says of the process's own memory on a node."""
    lines = [line for line in machine.read(f"/proc/{pid}/numa_maps").splitlines()
             if "anon=" in line]
    return sum(int(n) for line in lines for n in re.findall(rf"\bN{node}=(\d+)", line))


def tiers(run, name):
    told = json.loads(run.daemon.strata("tiers", name, "--json", "--interval", "0.1").stdout)
    return {tier["tier"]: tier for tier in told[0]["tiers"]}


def refused(run):
    """A node that cannot be one is refused in one line."""
    configuration = os.path.join(run.directory, "wrong.toml")
    for text, words in (("node = 0", "node 0 has processors"), ("node = 7", "node 7 is not there"),
                        ("node = \"auto\"\nnode_limit = \"900TiB\"", "more than node"),
                        ("node_limit = \"1MiB\"", "there is no node tier")):
        with open(configuration, "w") as file:
            file.write(f'socket_dir = "{run.directory}/wrong"\n{text}\n')
        done = subprocess.run([run.binaries.stratad, "--config", configuration], text=True,
                              stdin=subprocess.DEVNULL, capture_output=True,
                              timeout=30 * run.patience, check=False)
        lines = done.stderr.splitlines()
        if done.returncode == 0 or len(lines) != 1 or words not in lines[0]:
            raise Failure(f"{text!r}: status {done.returncode}, {lines}")


def lies_there(run, program, node):
    """As much as may be is on the node, and the rest is compressed: the kernel says
    the same as Strata."""
    def full():
        stats = program.stats()
        return stats["node_bytes"] > LIMIT_MIB * MIB * 3 // 4 and stats["stored_bytes"] > 4 * MIB
    run.daemon.wait_until(full, "cold pages went to the node, and on to the store", 60)

    def agree():
        stats, there = program.stats(), pages_on(program.pid, node) * 4096
        return abs(there - stats["node_bytes"]) < 2 * MIB
    run.daemon.wait_until(agree, "the kernel finds as many pages on the node as Strata", 30)
    stats = program.stats()
    dram = sum(stats[part] for part in ("resident_bytes", "unmanaged_bytes", "compressed_bytes",
                                        "metadata_bytes"))
    if dram > stats["budget_bytes"] + 16 * MIB:
        raise Failure(f"{dram} bytes of DRAM: what is on the node came on top")
    tier = tiers(run, program.name)
    if list(tier) != ["dram", "node", "compressed"] or tier["node"]["access"] != f"node {node}" \
            or tier["node"]["size_bytes"] != LIMIT_MIB * MIB or not tier["node"]["pages_in_total"]:
        raise Failure(f"strata tiers says {tier}")


def balance(on):
    """Whether the kernel brings back what is touched. Who else moves pages would
    make the other numbers here anybody's."""
    if os.path.exists(BALANCING):
        with open(BALANCING, "w") as file:
            file.write("1" if on else "0")
    return os.path.exists(BALANCING)


def is_opposed(run, program):
    """The kernel brings pages back that Strata has just moved: they are counted."""
    if not balance(True):
        return
    run.daemon.strata("set", program.name, "--dram", "24MiB")

    def opposed():
        check(program)
        return program.stats()["opposed_moves_total"] > 0
    run.daemon.wait_until(opposed, "what the kernel's balancing moves back is counted", 60)
    balance(False)
    run.note(f"opposed {program.stats()['opposed_moves_total']}")


@contextlib.contextmanager
def on_node(run, configuration):
    """A daemon with the node that this machine has, and a kernel that leaves pages
    where they are: the node and the daemon's process. Skips where there is none."""
    node = node_without_cpus()
    if node is None:
        not_here("this machine has no node without processors", "guest-node")
    balance(False)
    log = os.path.join(run.log_directory, "stratad-node.log")
    with configured(run.daemon, 'node = "auto"\n' + configuration, run.directory, log) as daemon:
        yield node, daemon


def check(program):
    """The program reads and checks all of its memory."""
    program.answer("check")
    program.gate("ready")


@case("node-tier", native=False, own_daemon=True, seconds=120)
def node_tier(run):
    with on_node(run, f'node_limit = "{LIMIT_MIB}MiB"\n') as (node, daemon):
        findings, _ = doctor(run)
        if findings["node tier"]["presence"] != "yes" or "NUMA balancing" not in findings:
            raise Failure(f"doctor says {findings}")
        refused(run)
        program = run.start("hold", "56", budget="24MiB")
        program.gate("ready")
        lies_there(run, program, node)
        run.note(f"{program.stats()['node_bytes'] >> 20} MiB on node {node}")

        before = program.stats()["node_bytes"]
        workers = [child for child in machine.children(daemon) if machine.alive(child)]
        os.kill(workers[0], signal.SIGKILL)

        def goes_on():
            stats = run.daemon.stats(program.name)
            return stats and stats["worker_restarts_total"] == 1 \
                and stats["node_bytes"] > before // 2
        run.daemon.wait_until(goes_on, "the next worker knows what is on the node", 60)
        check(program)
        program.answer("write")
        program.gate("ready")
        lies_there(run, program, node)

        # With room under the budget what is used comes back, and not by faults alone.
        before = program.stats()
        run.daemon.strata("set", program.name, "--dram", "128MiB")

        def came_back():
            check(program)
            return program.stats()["node_bytes"] < before["node_bytes"] // 2
        run.daemon.wait_until(came_back, "hot pages come back from the node", 60)
        after = program.stats()
        came = (before["node_bytes"] - after["node_bytes"]) // 4096
        out = tiers(run, program.name)["node"]["pages_out_total"]
        if after["soft_faults_total"] - before["soft_faults_total"] > came // 4:
            raise Failure(f"{came} pages came back, by as many faults: {before}, {after}")
        run.note(f"{came} pages came back in place ({out} left the node in all)")

        is_opposed(run, program)
        # And down again; released, nothing is left there.
        run.daemon.strata("set", program.name, "--dram", "24MiB")
        lies_there(run, program, node)
        if lost := program.stats()["lost_pages_total"]:
            raise Failure(f"{lost} pages lost")
        run.daemon.strata("set", program.name, "--dram", "256MiB")
        run.daemon.strata("release", program.name)
        if (left := pages_on(program.pid, node)) > 64:
            raise Failure(f"released, and {left} pages are still on node {node}")
        check(program)
        program.answer("end")
        program.finish()


@case("node-alloc", native=False, own_daemon=True, seconds=120)
def node_alloc(run):
    """Memory that a program asks for on the node."""
    with on_node(run, f'node_limit = "{LIMIT_MIB}MiB"\n') as (node, _):
        program = run.start("place", "node", budget="64MiB")
        program.gate("there")
        there, told = pages_on(program.pid, node), program.stats()["node_bytes"] // 4096
        if min(there, told) < 8 * MIB // 4096 * 9 // 10:
            raise Failure(f"8 MiB were asked for: the kernel finds {there} pages there, "
                          f"Strata {told}")
        program.answer("go")
        program.finish(pressed=False)
        run.note(f"{there} pages on node {node}")


@case("node-order", native=False, own_daemon=True, seconds=120)
def node_order(run):
    """With compressed memory first in the tiers' order the node's turn comes when that
    has half of the budget."""
    with on_node(run, 'tier_order = ["compressed", "node"]\n') as (node, _):
        program = run.start("hold", "56", budget="32MiB")
        program.gate("ready")
        run.daemon.wait_until(lambda: program.stats()["stored_bytes"] > 16 * MIB,
                              "cold pages went to compressed memory", 60)
        tier = tiers(run, program.name)
        if list(tier) != ["dram", "compressed", "node"] or tier["node"]["pages"]:
            raise Failure(f"strata tiers says {tier}")
        # Now compressed memory alone would take more than half of it.
        run.daemon.strata("set", program.name, "--dram", "10MiB")
        run.daemon.wait_until(lambda: program.stats()["node_bytes"] > 8 * MIB,
                              "then it is the node's turn", 60)
        check(program)
        if lost := program.stats()["lost_pages_total"]:
            raise Failure(f"{lost} pages lost")
        run.note(f"{program.stats()['node_bytes'] >> 20} MiB on node {node}, "
                 f"{program.stats()['compressed_bytes'] >> 20} MiB compressed")
        program.answer("end")
        program.finish()


@case("node-qemu", native=False, own_daemon=True, seconds=120)
def node_qemu(run):
    """A virtual machine's memory lies on the node as a program's does."""
    with on_node(run, "") as (node, _):
        guest = vm.Machine(run)

        def lies_there():
            told, there = guest.program.stats()["node_bytes"], pages_on(guest.program.pid, node)
            return told > 12 * MIB and abs(told - there * 4096) < 2 * MIB
        run.daemon.wait_until(lies_there, "the machine's memory went to the node", 60)
        run.note(f"{guest.program.stats()['node_bytes'] >> 20} MiB on node {node}")
        guest.check()
        guest.end()


def bare_moves(pages, node):
    """Seconds of CPU that a bare loop of move_pages takes for a page, in batches of
    512 as Strata's, to `node` from memory that was just written."""
    libc = ctypes.CDLL(None, use_errno=True)
    memory = mmap.mmap(-1, pages * 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in range(pages):
        memory[page * 4096] = 1
    batches = []
    for first in range(0, pages, 512):
        count = min(512, pages - first)
        addresses = (ctypes.c_void_p * count)(*(start + (first + page) * 4096
                                                for page in range(count)))
        batches.append((count, addresses, (ctypes.c_int * count)(*[node] * count),
                        (ctypes.c_int * count)()))
    began = time.thread_time()
    for count, addresses, nodes, status in batches:
        if libc.syscall(279, 0, ctypes.c_ulong(count), addresses, nodes, status, 2) < 0:
            raise Failure(f"move_pages: {os.strerror(ctypes.get_errno())}")
    spent = time.thread_time() - began
    if (moved := sum(list(status).count(node) for _, _, _, status in batches)) < pages * 99 // 100:
        raise Failure(f"a bare loop moved {moved} of {pages} pages")
    return spent / pages


def keeper_seconds(worker):
    """CPU time of a worker's keepers so far."""
    tasks = f"/proc/{worker}/task"
    return sum(int(machine.read(f"{tasks}/{task}/schedstat").split()[0]) / 1e9
               for task in os.listdir(tasks)
               if machine.read(f"{tasks}/{task}/comm").startswith("keeper"))


@case("node-cost", native=False, own_daemon=True, seconds=120)
def node_cost(run):
    """What a move to the node costs, and all of the keeper's work for these pages from
    their first touch on, beside a bare loop of the kernel's call; said, not judged."""
    with on_node(run, 'node_limit = "128MiB"\nnode_bandwidth = "100GiB"\n') as (node, daemon):
        worker = next(child for child in machine.children(daemon) if machine.alive(child))
        program = run.start("place", "node-much", budget="256MiB")
        program.gate("begin")
        # Whoever touches the node's memory first pays for it: never Strata alone.
        bare = [bare_moves(MUCH_PAGES, node)]
        before = keeper_seconds(worker)
        program.answer("go")
        program.gate("there")
        stats, spent = program.stats(), keeper_seconds(worker) - before
        moved, moving = stats["node_bytes"] // 4096, stats["node_move_us_total"] / 1e6
        bare += [bare_moves(MUCH_PAGES, node) for _ in range(2)]
        program.answer("go")
        program.finish(pressed=False)
    bare = sorted(bare)[1]
    run.note(f"{moved} pages, {moving / moved * 1e6:.2f} us to move one, {bare * 1e6:.2f} us by a "
             f"bare loop: {bare * moved / moving:.2f} of its rate; all of the keeper's work for "
             f"them {spent / moved * 1e6:.2f} us")


@case("guest-node", native=False, seconds=900)
def guest_node(run):
    qemu = vm.files(run.tool("qemu-system-x86_64"))
    # The first has the kernel move pages, too.
    for names in (["node-tier"], ["node-order", "node-alloc", "node-qemu", "node-cost"]):
        expect(in_guest(run, lambda version: version >= MANAGES,
                        [word for name in names for word in ("--only", name)],
                        hardware=HARDWARE, more=qemu), names)
