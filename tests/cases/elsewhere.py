"""What only some machines can show. Where one cannot, the case says "not tested
here" and why, so that nobody takes a silence for a pass."""

import json
import os
import re
import subprocess

import machine
from strata import Failure, Skip
from suite import case

MIB = 1 << 20
CAP_SYS_RESOURCE = 24


def not_here(reason, guest=None):
    """`guest`: the case that shows it under another kernel."""
    raise Skip("not tested here: " + reason + (f" (see {guest})" if guest else ""))


def doctor(run):
    """What `stratad doctor` finds, by name, and whether it says ready. Needs no
    daemon."""
    if not os.path.exists(run.binaries.stratad):
        raise Skip("stratad is not built")
    done = subprocess.run([run.binaries.stratad, "doctor", "--json"], capture_output=True,
                          text=True, timeout=60, check=False)
    report = json.loads(done.stdout)
    if report["ready"] != (done.returncode == 0):
        raise Failure(f"doctor says ready: {report['ready']} and ends with {done.returncode}")
    return {f["name"]: f for f in report["findings"]}, report["ready"]


def unified_root():
    """Where cgroup v2 is mounted with the memory controller; None."""
    for line in machine.read("/proc/self/mounts").splitlines():
        _, place, kind = line.split()[:3]
        if kind == "cgroup2" and \
                "memory" in machine.read(place + "/cgroup.controllers").split():
            return place
    return None


@case("cgroup-v2-backstop", native=False)
def cgroup_v2_backstop(run):
    """memory.high stands a little above the budget and follows it."""
    root = unified_root()
    if root is None:
        not_here("the memory controller is not in cgroup v2 on this machine; with v1 there is "
                 "no backstop", "guest-new-kernel")
    program = run.start("hold", "20", "load", budget="8MiB")
    program.gate("running")
    group = root + machine.memory_cgroup(program.pid)
    high = group + "/memory.high"
    for budget in (8, 12):
        run.daemon.strata("set", program.name, "--dram", f"{budget}MiB")
        found = machine.read(high).strip()
        if not found.isdigit():
            raise Failure(f"{high} says {found!r}: the program has no cgroup of its own")
        if not budget * MIB < int(found) <= budget * MIB + 32 * MIB:
            raise Failure(f"memory.high is {found} for a budget of {budget} MiB")
    # Beyond it the kernel slows down whoever is in the group, by up to two
    # seconds each time. The pages that the daemon fills in are charged there;
    # the daemon itself is not to be slowed down.
    with open(high, "w") as file:
        file.write(str(4 * MIB))
    before = program.stats()["faults_total"]
    run.daemon.wait_until(lambda: program.stats()["faults_total"] > before + 1000,
                          "faults are served beyond memory.high")
    current = int(machine.read(group + "/memory.current"))
    if current < 6 * MIB:
        raise Failure(f"memory.current is {current}: nothing was beyond memory.high")
    run.note(f"1000 pages filled in with {current // MIB} MiB in use, memory.high at 4 MiB")
    run.daemon.strata("set", program.name, "--dram", "8MiB")
    program.answer()
    program.finish()


@case("kernel-without-move")
def kernel_without_move(run):
    """Before Linux 6.8 nothing can be managed; doctor and run say so. (On such a
    kernel no tenant attaches: --native --only kernel-without-move.)"""
    release = os.uname().release
    version = tuple(int(number) for number in re.findall(r"\d+", release)[:2])
    if version >= (6, 8):
        not_here(f"Linux {release} has UFFDIO_MOVE; a kernel before 6.8 is needed",
                 "guest-old-kernel")
    findings, ready = doctor(run)
    if ready or findings["UFFDIO_MOVE"]["presence"] != "no":
        raise Failure(f"doctor says ready: {ready}, {findings['UFFDIO_MOVE']}")
    environment = {**os.environ, "XDG_RUNTIME_DIR": run.directory}
    # A snapshot of another machine is not even looked at.
    for command in (("run", "--dram", "64MiB", "--", "/bin/true"),
                    ("snapshot", "import", "/proc/version")):
        done = subprocess.run(
            [run.binaries.strata, *command], env=environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=60 * run.patience, check=False)
        run.note(done.stderr.strip())
        if done.returncode != 1 or len(done.stderr.splitlines()) != 1 or "6.8" not in done.stderr:
            raise Failure(f"strata {command[0]}: status {done.returncode}, {done.stderr!r}")


@case("idle-page-bits")
def idle_page_bits(run):
    """Nothing of Strata uses them; doctor must tell whether they are there."""
    there = os.path.exists("/sys/kernel/mm/page_idle/bitmap")
    finding = doctor(run)[0]["idle page tracking"]
    if (finding["presence"] == "yes") != there:
        raise Failure(f"idle page tracking is there: {there}; doctor says {finding}")
    if not there:
        not_here("this kernel has no idle page tracking; Strata judges by faults alone")


@case("oom-order", native=False, own_daemon=True)
def oom_order(run):
    """The daemon is last in line for the OOM killer, its programs are not."""
    effective = int(machine.read("/proc/self/status").split("CapEff:")[1].split()[0], 16)
    if not effective >> CAP_SYS_RESOURCE & 1:
        not_here("without CAP_SYS_RESOURCE no oom_score_adj can be lowered",
                 "guest-new-kernel")
    program = run.start("hold", "4", "load", budget="12MiB")
    program.gate("running")
    scores = {}
    for who, pid in (("supervisor", run.daemon.pid), ("worker", run.daemon.worker()),
                     ("program", program.pid), ("runner", os.getpid())):
        scores[who] = machine.read(f"/proc/{pid}/oom_score_adj").strip()
    program.answer()
    program.finish(pressed=False)
    if scores["supervisor"] != "-1000" or scores["program"] != scores["runner"]:
        raise Failure(f"oom_score_adj: {scores}")
