"""The node tier: cold pages lie on a node without processors, in place, and hot
ones come back. A guest has such a node (cases/kernels.py boots one for it)."""

import json
import os
import re
import signal
import subprocess

import machine
from elsewhere import doctor, not_here
from kernels import MANAGES, expect, in_guest
from strata import Failure, configured
from suite import case

MIB = 1 << 20
NODES = "/sys/devices/system/node"
BALANCING = "/proc/sys/kernel/numa_balancing"
LIMIT_MIB = 16
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


def check(program):
    """The program reads and checks all of its memory."""
    program.answer("check")
    program.gate("ready")


@case("node-tier", native=False, own_daemon=True, seconds=120)
def node_tier(run):
    node = node_without_cpus()
    if node is None:
        not_here("this machine has no node without processors", "guest-node")
    findings, _ = doctor(run)
    if findings["node tier"]["presence"] != "yes" or "NUMA balancing" not in findings:
        raise Failure(f"doctor says {findings}")
    refused(run)
    balance(False)
    text = f'node = "auto"\nnode_limit = "{LIMIT_MIB}MiB"\n'
    log = os.path.join(run.log_directory, "stratad-node.log")
    with configured(run.daemon, text, run.directory, log) as daemon:
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


@case("guest-node", native=False, seconds=900)
def guest_node(run):
    names = ["node-tier"]
    expect(in_guest(run, lambda version: version >= MANAGES, ["--only", names[0]],
                    hardware=HARDWARE), names)
