"""The node tier: cold pages lie on a node without processors, in place, and hot
ones come back. A guest has such a node (cases/guests.py boots one for it)."""

import collections
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
from strata import Failure, configured, worker_of
from suite import case

MIB = 1 << 20
NODES = "/sys/devices/system/node"
BALANCING = "/proc/sys/kernel/numa_balancing"
# Between two looks of the kernel's at a process; as it is, up to a minute.
LOOKS_AFTER_MS = {"/sys/kernel/debug/sched/numa_balancing/scan_period_min_ms": 100,
                  "/sys/kernel/debug/sched/numa_balancing/scan_period_max_ms": 200}
HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
# What the programs have, what is allowed on the node of it, and a budget that neither
# fits: small, because all of this runs under TCG.
SIZE_MIB, LIMIT_MIB, BUDGET = 20, 5, "8MiB"
# What "place node-much" has there.
MUCH_PAGES = 96 * MIB // 4096


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
    the same as Strata. Pages that the kernel has moved back are stored, and stay so until
    they are used again: the program looks at all of them now and then."""
    looks = 0

    def full():
        nonlocal looks
        looks += 1
        if looks % 100 == 0:
            check(program)
        stats = program.stats()
        return stats["node_bytes"] > LIMIT_MIB * MIB * 3 // 4 and stats["stored_bytes"] > 2 * MIB
    run.daemon.wait_until(full, "cold pages went to the node, and on to the store", 60)

    def agree():
        stats, there = program.stats(), pages_on(program.pid, node) * 4096
        return abs(there - stats["node_bytes"]) < 2 * MIB
    run.daemon.wait_until(agree, "the kernel finds as many pages on the node as Strata", 30)

    def is_within():
        stats = program.stats()
        return sum(stats[part] for part in ("resident_bytes", "unmanaged_bytes",
                                            "compressed_bytes", "metadata_bytes")) \
            <= stats["budget_bytes"] + 8 * MIB
    run.daemon.wait_until(is_within, "what is on the node does not come on top of its budget", 30)
    tier = tiers(run, program.name)
    if list(tier) != ["dram", "node", "compressed"] or tier["node"]["access"] != f"node {node}" \
            or tier["node"]["size_bytes"] != LIMIT_MIB * MIB or not tier["node"]["pages_in_total"]:
        raise Failure(f"strata tiers says {tier}")


def balance(on):
    """Whether the kernel brings back what is touched. Who else moves pages would
    make the other numbers here anybody's."""
    for path, ms in LOOKS_AFTER_MS.items():
        if os.path.exists(path):
            with open(path, "w") as file:
                file.write(str(ms))
    if os.path.exists(BALANCING):
        with open(BALANCING, "w") as file:
            file.write("1" if on else "0")
    return os.path.exists(BALANCING)


def is_opposed(run, program):
    """The kernel brings pages back that Strata has just moved: they are counted."""
    if not balance(True):
        return
    run.daemon.strata("set", program.name, "--dram", BUDGET)

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
        not_here("this machine has no node without processors", "guest-new-kernel")
    balance(False)
    log = os.path.join(run.log_directory, "stratad-node.log")
    with configured(run.daemon, 'node = "auto"\n' + configuration, run.directory, log) as daemon:
        yield node, daemon


def check(program):
    """The program reads and checks all of its memory."""
    program.answer("check")
    program.gate("ready")


def comes_back(run, program, below_bytes):
    """With room under the budget what is used comes back."""
    run.daemon.strata("set", program.name, "--dram", "128MiB")

    def came_back():
        check(program)
        return program.stats()["node_bytes"] < below_bytes
    run.daemon.wait_until(came_back, "hot pages come back from the node", 60)


@case("node-tier", native=False, own_daemon=True, alone=True, seconds=120)
def node_tier(run):
    """Alone: it switches the kernel's own balancing on."""
    with on_node(run, f'node_limit = "{LIMIT_MIB}MiB"\n') as (node, daemon):
        findings, _ = doctor(run)
        if findings["node tier"]["presence"] != "yes" or "NUMA balancing" not in findings:
            raise Failure(f"doctor says {findings}")
        refused(run)
        program = run.start("hold", SIZE_MIB, budget=BUDGET)
        program.gate("ready")
        lies_there(run, program, node)
        run.note(f"{program.stats()['node_bytes'] >> 20} MiB on node {node}")

        before = program.stats()["node_bytes"]
        os.kill(worker_of(daemon), signal.SIGKILL)

        def goes_on():
            stats = run.daemon.stats(program.name)
            return stats and stats["worker_restarts_total"] == 1 \
                and stats["node_bytes"] > before // 2
        run.daemon.wait_until(goes_on, "the next worker knows what is on the node", 60)
        check(program)
        program.answer("write")
        program.gate("ready")
        lies_there(run, program, node)

        # Not by faults alone.
        before = program.stats()
        comes_back(run, program, before["node_bytes"] // 2)
        after = program.stats()
        came = (before["node_bytes"] - after["node_bytes"]) // 4096
        out = tiers(run, program.name)["node"]["pages_out_total"]
        if after["soft_faults_total"] - before["soft_faults_total"] > came // 4:
            raise Failure(f"{came} pages came back, by as many faults: {before}, {after}")
        run.note(f"{came} pages came back in place ({out} left the node in all)")

        is_opposed(run, program)
        # And down again; released, nothing is left there.
        run.daemon.strata("set", program.name, "--dram", BUDGET)
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


def huge_mib(pid):
    return machine.field_kib(f"/proc/{pid}/smaps_rollup", "AnonHugePages") >> 10


@case("node-huge", native=False, own_daemon=True, seconds=120)
def node_huge(run):
    """Memory in huge pages goes to the node and comes back, page by page: the kernel would
    move such a page whole, whichever part of it was meant, and the limit would not hold."""
    if "[never]" in machine.read(HUGE_PAGES):
        not_here("huge pages are switched off", "guest-new-kernel")
    with on_node(run, f'node_limit = "{LIMIT_MIB}MiB"\n') as (node, _):
        program = run.start("hold", SIZE_MIB, "huge", budget="128MiB")
        program.gate("ready")
        if (huge := huge_mib(program.pid)) < LIMIT_MIB:
            raise Failure(f"{huge} MiB of {SIZE_MIB} in huge pages: nothing to see")
        run.daemon.strata("set", program.name, "--dram", BUDGET)
        most = 0

        def look():
            nonlocal most
            most = max(most, pages_on(program.pid, node) * 4096)

        def went():
            look()
            return program.stats()["node_bytes"] > LIMIT_MIB * MIB * 3 // 4
        run.daemon.wait_until(went, "pages went to the node", 60)
        lies_there(run, program, node)
        look()
        run.note(f"{huge} MiB in huge pages, {huge_mib(program.pid)} of them still when "
                 f"{program.stats()['node_bytes'] >> 20} MiB are on node {node}, "
                 f"{most >> 20} at most were seen there")
        for work in ("check", "write", "check"):
            program.answer(work)
            program.gate("ready")
            look()
        # The kernel may have made a huge page of small ones meanwhile.
        if most > (LIMIT_MIB + 2) * MIB:
            raise Failure(f"{most >> 20} MiB were seen on node {node}, {LIMIT_MIB} are allowed")
        comes_back(run, program, LIMIT_MIB * MIB // 2)
        program.answer("end")
        program.finish()


@case("node-alloc", native=False, own_daemon=True, seconds=120)
def node_alloc(run):
    """Memory that a program asks for on the node."""
    with on_node(run, 'node_limit = "8MiB"\n') as (node, _):
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
        program = run.start("hold", "26", budget="17MiB")
        program.gate("ready")
        run.daemon.wait_until(lambda: program.stats()["stored_bytes"] > 6 * MIB,
                              "cold pages went to compressed memory", 60)
        tier = tiers(run, program.name)
        if list(tier) != ["dram", "compressed", "node"] or tier["node"]["pages"]:
            raise Failure(f"strata tiers says {tier}")
        # Now compressed memory alone would take more than half of it.
        run.daemon.strata("set", program.name, "--dram", "5MiB")
        run.daemon.wait_until(lambda: program.stats()["node_bytes"] > 4 * MIB,
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
        guest = vm.Machine(run, 24)

        def lies_there():
            told, there = guest.program.stats()["node_bytes"], pages_on(guest.program.pid, node)
            return told > 8 * MIB and abs(told - there * 4096) < 2 * MIB
        run.daemon.wait_until(lies_there, "the machine's memory went to the node", 60)
        run.note(f"{guest.program.stats()['node_bytes'] >> 20} MiB on node {node}")
        guest.check()
        guest.end()


@contextlib.contextmanager
def its_writer(memory):
    """A process that has written all pages of `memory` and sleeps; gives its number."""
    ready, written = os.pipe()
    pid = os.fork()
    if pid == 0:
        for start in range(0, len(memory), 4096):
            memory[start] = 1
        os.write(written, b".")
        while True:
            signal.pause()
    os.close(written)
    try:
        os.read(ready, 1)
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)


def bare_moves(pages, node):
    """Seconds of CPU that a bare loop of move_pages takes for a page that it moves, in
    batches of 512 as Strata's, to `node` from memory that another process just wrote."""
    libc = ctypes.CDLL(None, use_errno=True)
    memory = mmap.mmap(-1, pages * 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    batches = []
    for first in range(0, pages, 512):
        count = min(512, pages - first)
        addresses = (ctypes.c_void_p * count)(*(start + (first + page) * 4096
                                                for page in range(count)))
        batches.append((count, addresses, (ctypes.c_int * count)(*[node] * count),
                        (ctypes.c_int * count)()))
    with its_writer(memory) as pid:
        began = time.thread_time()
        for count, addresses, nodes, status in batches:
            if libc.syscall(machine.SYS_MOVE_PAGES, pid, ctypes.c_ulong(count), addresses, nodes,
                            status, 2) < 0:
                raise Failure(f"move_pages: {os.strerror(ctypes.get_errno())}")
        spent = time.thread_time() - began
    told = collections.Counter(code for _, _, _, status in batches for code in status)
    # Whom it leaves is the kernel's affair: the node may be full of its caches.
    if (moved := told[node]) < pages // 2:
        raise Failure(f"a bare loop moved {moved} of {pages} pages: {dict(told)}")
    return spent / moved


def keeper_seconds(worker):
    """CPU time of a worker's keepers so far."""
    tasks = f"/proc/{worker}/task"
    return sum(int(machine.read(f"{tasks}/{task}/schedstat").split()[0]) / 1e9
               for task in os.listdir(tasks)
               if machine.read(f"{tasks}/{task}/comm").startswith("keeper"))


@case("node-cost", native=False, own_daemon=True, soak=True, seconds=120)
def node_cost(run):
    """What a move to the node costs, and all of the keeper's work for these pages from
    their first touch on, beside a bare loop of the kernel's call; said, not judged."""
    with on_node(run, 'node_limit = "128MiB"\nnode_bandwidth = "100GiB"\n') as (node, daemon):
        worker = worker_of(daemon)
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


def kdamonds(name):
    return os.path.join("/sys/kernel/mm/damon/admin/kdamonds", name)


def damon_files():
    """All that DAMON's directory says, but for what a running one counts."""
    said = {}
    for place, _, names in os.walk(kdamonds("")):
        for name in names:
            if "/stats" not in place and "/tried_regions" not in place:
                said[os.path.join(place, name)] = machine.read(os.path.join(place, name))
    return said


def set_damon(name, text):
    with open(kdamonds(name), "w") as file:
        file.write(str(text))


@contextlib.contextmanager
def somebody_elses(pid):
    """A kdamond that watches a process, and is nobody's of Strata's; gives what it
    says. Skips where there can be none."""
    context = "0/contexts/0/"
    try:
        set_damon("nr_kdamonds", 1)
        set_damon("0/contexts/nr_contexts", 1)
        operations = machine.read(kdamonds(context + "avail_operations")).split()
        if "fvaddr" not in operations:
            not_here(f"this kernel's DAMON can only {operations}", "guest-new-kernel")
        set_damon(context + "operations", "vaddr")
        set_damon(context + "targets/nr_targets", 1)
        set_damon(context + "targets/0/pid_target", pid)
        set_damon("0/state", "on")
        yield damon_files()
    finally:
        if machine.read(kdamonds("0/state")).strip() == "on":
            set_damon("0/state", "off")
        set_damon("nr_kdamonds", 0)


def count_on(pid, node, start, pages):
    """How many of the pages of a process from `start` on the kernel finds on a node."""
    return machine.nodes_of_pages(pid, start, pages).count(node)


def quarter_becomes_hot(run, program, node):
    """A quarter of a program, one that is on the node, is used again with room under
    the budget: how to count its pages there, how many they were, and what was said of
    the tenant before."""
    run.daemon.strata("set", program.name, "--dram", "24MiB")
    run.daemon.wait_until(lambda: program.stats()["node_bytes"] > 32 * MIB,
                          "cold pages went to the node", 60)
    lines = machine.read(f"/proc/{program.pid}/maps").splitlines()
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    start = next(start for start, end in ranges if end - start >= 64 * MIB)
    quarter = 64 * MIB // 4096 // 4

    def there(number):
        return count_on(program.pid, node, start + number * quarter * 4096, quarter)
    number = max(range(4), key=there)
    first, before = there(number), program.stats()
    if first < quarter // 2:
        raise Failure(f"{first} of {quarter} pages of a quarter that is not used are on the node")
    run.daemon.strata("set", program.name, "--dram", "56MiB")
    program.answer(f"quarter {number}")
    program.gate("ready")
    return lambda: there(number), first, before


def damon_sees(run, program, node):
    """What is used there comes back because DAMON saw it."""
    _, _, before = quarter_becomes_hot(run, program, node)
    run.daemon.wait_until(
        lambda: program.stats()["damon_promotions_total"] > before["damon_promotions_total"],
        "DAMON sees what is used on the node", 120)
    program.answer("quiet")
    program.gate("ready")


def becomes_hot(run, program, node):
    """How long until such a quarter is back, and by how many faults."""
    there, first, before = quarter_becomes_hot(run, program, node)
    began, spent = time.monotonic(), {}

    def came_back():
        kdamond = machine.read(kdamonds("0/pid")).strip()
        if kdamond.isdigit() and (told := machine.read(f"/proc/{kdamond}/schedstat").split()):
            spent[kdamond] = int(told[0]) / 1e9
        time.sleep(0.25)  # the look at all these pages is no small load
        return there() < first // 5
    run.daemon.wait_until(came_back, "a quarter that is used came back from the node", 120)
    seconds = time.monotonic() - began
    program.answer("quiet")
    program.gate("ready")

    def stays():
        told = program.stats()["node_bytes"]
        time.sleep(0.5)  # moved is moved, counted a moment later
        return program.stats()["node_bytes"] == told
    run.daemon.wait_until(stays, "no more pages come", 60)
    after = program.stats()
    faults, seen = (after[name] - before[name]
                    for name in ("soft_faults_total", "damon_promotions_total"))
    return seen, f"{first} pages on the node, four of five of them back in {seconds:.0f} s, " \
                 f"{faults} soft faults, {seen} pages by DAMON; the kdamond there took " \
                 f"{sum(spent.values()):.2f} s of a processor"


def looks(run, other_than=None):
    """Waits for Strata to look; the kdamond's number."""
    def looking():
        told = machine.read(kdamonds("0/pid")).strip()
        return told if told not in ("", "-1", other_than) else None
    return run.daemon.wait_until(looking, "the kernel watches the node for Strata", 60)


@case("node-damon", native=False, own_daemon=True, alone=True, seconds=240)
def node_damon(run):
    """What is used on the node is seen by DAMON, and by probes alone where DAMON is
    somebody else's: that one is left as it is. A soak says how long each takes."""
    if machine.read(kdamonds("nr_kdamonds")).strip() != "0":
        not_here("this kernel has no DAMON, or somebody uses it", "guest-new-kernel")
    with on_node(run, 'node_limit = "128MiB"\n') as (node, daemon):
        def hot_again(what):
            if run.soak:
                seen, told = becomes_hot(run, program, node)
                run.note(f"{what}: {told}")
                if not seen:
                    raise Failure(f"DAMON saw nothing: {told}")
            else:
                damon_sees(run, program, node)

        with somebody_elses(os.getpid()) as said:
            if "used by somebody else" not in doctor(run)[0]["DAMON"]["detail"]:
                raise Failure(f"doctor says {doctor(run)[0]['DAMON']}")
            program = run.start("hold", "64", budget="24MiB")
            program.gate("ready")
            if run.soak:
                run.note(f"without DAMON: {becomes_hot(run, program, node)[1]}")
            else:
                quarter_becomes_hot(run, program, node)
                run.daemon.wait_until(lambda: program.stats()["soft_faults_total"] > 0,
                                      "a probe comes back", 120)
                program.answer("quiet")
                program.gate("ready")
            if seen := program.stats()["damon_promotions_total"]:
                raise Failure(f"{seen} pages came by a DAMON that is somebody else's")
            if (now := damon_files()) != said:
                changed = [name for name in {*now, *said} if now.get(name) != said.get(name)]
                raise Failure(f"somebody else's DAMON was changed: {changed}")
        looks(run)
        if "in use by Strata" not in doctor(run)[0]["DAMON"]["detail"]:
            raise Failure(f"doctor says {doctor(run)[0]['DAMON']}")
        hot_again("with it")

        # In the middle of a look: the next worker takes over what the dead one left.
        watched = looks(run)
        os.kill(worker_of(daemon), signal.SIGKILL)
        looks(run, watched)
        hot_again("after the worker's death")
        if program.stats()["worker_restarts_total"] != 1:
            raise Failure(f"the worker did not start anew once: {program.stats()}")
        check(program)
        if lost := program.stats()["lost_pages_total"]:
            raise Failure(f"{lost} pages lost")
        program.answer("end")
        program.finish()
    if (left := machine.read(kdamonds("nr_kdamonds")).strip()) != "0":
        raise Failure(f"the daemon has ended and left {left} kdamond(s)")
