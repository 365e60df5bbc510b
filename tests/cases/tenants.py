"""What the command line promises about a tenant: budgets kept and changed,
released, stopped, reclaimed; hundreds of them."""

import os
import signal
import threading
import time

import machine
from elsewhere import not_here, unified_root
from strata import Failure
from suite import case

MIB = 1 << 20
# The kernel only begins to slow a program down at `memory.high`, which is as far above the
# budget as it may be exceeded; the rest of a batch comes on top, and what the daemon stages.
SLOWED_WITHIN = 4 * MIB


def allowance(budget):
    """By how much a budget may be exceeded."""
    return max(budget * 2 // 100, 16 * MIB)


class Sampler:
    """Watches what a tenant really costs, as fast as it can."""

    def __init__(self, run, program, shared):
        self.run, self.program, self.shared = run, program, shared
        self.largest, self.samples, self.stop = 0, 0, threading.Event()
        self.worst = {}
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self):
        while not self.stop.is_set():
            try:
                parts = self.parts()
            except (OSError, ValueError, KeyError):
                continue  # it is not there yet, or no more
            self.samples += 1
            if sum(parts.values()) > self.largest:
                self.largest, self.worst = sum(parts.values()), parts
            self.stop.wait(0.002)

    def parts(self):
        """The kernel's word for what is in memory, Strata's for its store. Staged pages
        are raw in the store, outside of the program."""
        stats = self.run.daemon.ask({"request": "stats", "name": self.program.name})["stats"]
        pids = stats["pids"] or [self.program.pid]
        anonymous = machine.anonymous_bytes(pids) if self.shared else \
            sum(machine.resident_anonymous_bytes(pid) for pid in pids)
        return {"anonymous": anonymous, "staged": stats["staged_bytes"],
                "compressed": stats["compressed_bytes"], "metadata": stats["metadata_bytes"]}

    def cost(self):
        """What it costs now."""
        return sum(self.parts().values())

    def end(self, budget):
        self.stop.set()
        self.thread.join()
        over = self.largest - budget
        parts = ", ".join(f"{name} {size / MIB:.1f}" for name, size in self.worst.items())
        self.run.note(f"at most {over / MIB:+.1f} MiB over {budget / MIB:.0f} MiB ({parts} MiB, "
                      f"{self.samples} samples)")
        if self.samples < 10:
            raise Failure(f"only {self.samples} samples of the tenant: nothing was measured")
        return over


def judge(run, sampler, program, budget, backstop):
    """While the program stands still at its gate: what it cost at most, and what it
    costs once Strata has caught up. Where nothing slows down a program that is faster
    than evictions (no memory.high), only the latter is a promise."""
    over, most = sampler.end(budget), allowance(budget) + SLOWED_WITHIN
    if backstop and over > most:
        raise Failure(f"{over / MIB:.1f} MiB over a budget of {budget / MIB:.0f} MiB, "
                      f"{most / MIB:.0f} MiB are allowed")
    run.daemon.wait_until(lambda: sampler.cost() <= budget + allowance(budget),
                          f"{program.name} costs no more than its budget")


def has_backstop(run, program):
    """Whether the kernel slows it down beyond its budget: in a group of its own, of v2."""
    return not run.native and unified_root() is not None and \
        machine.has_own_memory_cgroup(program.pid)


def rush(run, size_mib, budget_mib):
    """All touched at full speed."""
    program = run.start("heap", "rush", str(size_mib), budget=f"{budget_mib}MiB")
    program.gate("start")
    backstop = has_backstop(run, program)
    sampler = None if run.native else Sampler(run, program, shared=False)
    program.answer()
    program.gate("filled")
    program.answer()
    program.gate("done")
    program.assert_pressed()
    if sampler:
        judge(run, sampler, program, budget_mib * MIB, backstop)
    program.answer()
    program.end_well()
    return backstop


@case("budget-rush", seconds=90)
def budget_rush(run):
    rush(run, 1024, 256)


@case("budget-rush-small", native=False, alone=True)
def budget_rush_small(run):
    """Where the kernel stands behind the budget, it is kept at each moment. Alone: the kernel
    slows a program down in steps, which are longer where processors are emulated and busy."""
    if unified_root() is None:
        not_here("the memory controller is not in cgroup v2 on this machine; with v1 there "
                 "is no backstop", "guest-new-kernel")
    if not rush(run, 48, 16):
        raise Failure("the program has no cgroup of its own")


@case("budget-fork", seconds=90)
def budget_fork(run):
    """A child reads everything while its parent writes: one budget for both."""
    budget = 32 * MIB
    program = run.start("fork", "background-save", budget="32MiB")
    sampler = None if run.native else Sampler(run, program, shared=True)
    program.gate("saved")
    backstop = has_backstop(run, program)
    program.answer()
    program.gate("done")
    program.assert_pressed()
    if sampler:
        judge(run, sampler, program, budget, backstop)
    program.answer()
    program.end_well()


def cost(stats):
    return stats["resident_bytes"] + stats["compressed_bytes"] + stats["metadata_bytes"]


@case("set-both-ways")
def set_both_ways(run):
    """A live budget, down, up and down again; the statistics follow."""
    program = run.start("hold", "128", budget="512MiB")
    program.gate("ready")
    if not run.native:
        stats = program.stats()
        if stats["evictions_total"]:
            raise Failure("evicted far below its budget")
        for size in (64, 256, 48):
            run.daemon.strata("set", program.name, "--dram", f"{size}MiB")
            budget = size * MIB
            run.daemon.wait_until(
                lambda: (s := program.stats())["budget_bytes"] == budget
                and cost(s) <= budget + allowance(budget),
                f"the tenant costs no more than {size} MiB")
            program.answer("check" if size != 256 else "write")
            program.gate("ready")
        # With room again, what is touched may stay: reading all of it twice
        # must end with most of it in memory.
        run.daemon.strata("set", program.name, "--dram", "512MiB")
        for _ in range(2):
            program.answer("check")
            program.gate("ready")
        run.daemon.wait_until(
            lambda: machine.resident_anonymous_bytes(program.pid) > 120 * MIB,
            "with a budget of 512 MiB the 128 MiB are back in memory")
        run.daemon.strata("set", program.name, "--dram", "48MiB")
        run.daemon.wait_until(
            lambda: machine.resident_anonymous_bytes(program.pid) < 64 * MIB,
            "with a budget of 48 MiB the program has shrunk")
    program.answer("end")
    program.finish()


@case("release", native=False)
def release(run):
    """Everything is given back, the program goes on without Strata."""
    program = run.start("hold", "64", budget="24MiB")
    program.gate("ready")
    run.daemon.wait_until(lambda: program.stats()["stored_bytes"] > 36 * MIB, "pages are stored")
    program.assert_pressed()
    run.daemon.strata("release", program.name, timeout_s=60)
    def given_back():
        stats = run.daemon.stats(program.name)
        return stats is None or stats["stored_bytes"] == 0
    run.daemon.wait_until(given_back, "nothing is stored any more", 30)
    if machine.resident_anonymous_bytes(program.pid) < 63 * MIB:
        raise Failure("the program's memory is not back")
    program.answer("write")
    program.gate("ready")
    program.answer("end")
    program.finish(pressed=False)


@case("release-under-load", native=False)
def release_under_load(run):
    """The same while two threads read and write."""
    program = run.start("hold", "64", "load", budget="24MiB")
    program.gate("running")
    run.daemon.wait_until(lambda: program.stats()["faults_total"] > 1000, "faults are served")
    run.daemon.strata("release", program.name, timeout_s=60)
    def given_back():
        stats = run.daemon.stats(program.name)
        return stats is None or stats["stored_bytes"] == 0
    run.daemon.wait_until(given_back, "nothing is stored any more", 30)
    program.answer()
    program.finish(pressed=False)


@case("stop", native=False, own_daemon=True)
def stop(run):
    """`strata stop` ends the program and its children, everything is reclaimed."""
    before = run.daemon.footprint()
    program = run.start("hold", "48", "forever", budget="20MiB")
    program.gate("running")
    run.daemon.wait_until(lambda: program.stats()["evictions_total"] > 0, "pages are evicted")
    run.daemon.strata("stop", program.name, timeout_s=30)
    status = program.wait()
    if status not in (-signal.SIGTERM, -signal.SIGKILL):
        raise Failure(f"ended with status {status}")
    run.daemon.wait_until(lambda: not run.daemon.tenants(), "strata ps lists it no more")
    run.daemon.settled(before, "the daemon gives back what the tenant cost")


def held(run, megabytes, budget):
    """A program looks at all of its memory when a part of it is away, and ends."""
    program = run.start("hold", megabytes, budget=budget)
    program.gate("ready")
    run.daemon.wait_until(lambda: program.stats()["evictions_total"] > 0, "pages are evicted")
    program.answer("check")
    program.gate("ready")
    program.answer("end")
    program.finish()


@case("exit-reclaims", native=False, own_daemon=True)
def exit_reclaims(run):
    """An orderly exit leaves nothing behind."""
    before = run.daemon.footprint()
    for _ in range(run.times(3)):
        held(run, "96", "40MiB")
        run.daemon.wait_until(lambda: not run.daemon.tenants(), "strata ps lists it no more")
    run.daemon.settled(before, "the daemon gives back what the tenants cost")


@case("kill-reclaims", native=False, own_daemon=True)
def kill_reclaims(run):
    """kill -9 in the middle of load: the same."""
    before = run.daemon.footprint()
    for _ in range(run.times(4)):
        program = run.start("hold", "48", "forever", budget="20MiB")
        program.gate("running")
        run.daemon.wait_until(lambda: program.stats()["faults_total"] > 100, "faults are served")
        os.kill(program.pid, signal.SIGKILL)
        if program.wait() != -signal.SIGKILL:
            raise Failure("ended by something else")
        run.daemon.wait_until(lambda: not run.daemon.tenants(), "strata ps lists it no more")
    run.daemon.settled(before, "the daemon gives back what the tenants cost")


@case("kill-forked-reclaims", native=False, own_daemon=True)
def kill_forked_reclaims(run):
    """A family of processes, killed while children share evicted pages."""
    before = run.daemon.footprint()
    program = run.start("fork", "background-save", budget="32MiB")
    run.daemon.wait_until(
        lambda: (s := run.daemon.stats(program.name)) and len(s["pids"]) == 2,
        "parent and child belong to the tenant")
    for pid in program.stats()["pids"]:
        os.kill(pid, signal.SIGKILL)
    program.wait()
    run.daemon.wait_until(lambda: not run.daemon.tenants(), "strata ps lists it no more")
    run.daemon.settled(before, "the daemon gives back what the tenant cost")


@case("tenants-by-hundreds", native=False, own_daemon=True, seconds=120)
def tenants_by_hundreds(run):
    """Short programs, every eighth with memory, four at a time."""
    before = run.daemon.footprint()
    total, at_once, running, started, began = run.times(200), 4, [], 0, time.monotonic()
    while started < total or running:
        while started < total and len(running) < at_once:
            if started % 8 == 0:
                program = run.start("hold", "24", "short", budget="16MiB")
            else:
                program = run.start("/bin/true", budget="16MiB")
            running.append(program)
            started += 1
        program = running.pop(0)
        program.end_well()
        program.close(False)
        run.programs.remove(program)
    run.note(f"{total} tenants in {time.monotonic() - began:.1f} s")
    run.daemon.wait_until(lambda: not run.daemon.tenants(), "strata ps lists none of them")
    run.daemon.settled(before, "the daemon gives back what the tenants cost")


@case("tenants-side-by-side", native=False)
def tenants_side_by_side(run):
    """Three under pressure at once; each keeps its budget and its bytes."""
    programs = [run.start("hold", "32", "load", budget="12MiB") for _ in range(3)]
    for program in programs:
        program.gate("running")
    for program in programs:
        run.daemon.wait_until(lambda: program.stats()["faults_total"] > 3000, "faults are served")
        # At each moment is what a kernel behind it promises: `budget-rush-small`.
        run.daemon.wait_until(lambda: cost(program.stats()) <= 12 * MIB + allowance(12 * MIB),
                              f"{program.name} costs no more than its budget")
    for program in programs:
        program.answer()
        program.finish()


@case("tenant-stopped", native=False)
def tenant_stopped(run):
    """A tenant that stands still (SIGSTOP), its agent too, holds up nobody."""
    still = run.start("hold", "96", "load", budget="64MiB")
    still.gate("running")
    run.daemon.wait_until(lambda: still.stats()["faults_total"] > 100, "faults are served")
    os.kill(still.pid, signal.SIGSTOP)
    # Now the daemon wants pages of it that it cannot have.
    run.daemon.strata("set", still.name, "--dram", "32MiB")
    other = run.start("hold", "32", "load", budget="12MiB")
    other.gate("running")
    run.daemon.wait_until(lambda: other.stats()["faults_total"] > 3000, "the other is served")
    other.answer()
    other.finish()
    run.daemon.strata("ps")
    os.kill(still.pid, signal.SIGCONT)
    faults = still.stats()["faults_total"]
    run.daemon.wait_until(lambda: still.stats()["faults_total"] > faults + 500, "it goes on")
    run.daemon.wait_until(lambda: cost(still.stats()) <= 32 * MIB + allowance(32 * MIB),
                          "it keeps its new budget")
    still.answer()
    still.finish()


@case("exit-status")
def exit_status(run):
    """The program's own status, signal, arguments and descriptors."""
    for script, expected in (("exit 7", 7), ("kill -USR1 $$", -signal.SIGUSR1), ("exit 0", 0)):
        program = run.start("/bin/sh", "-c", script, budget="64MiB")
        status = program.wait()
        if status != expected:
            raise Failure(f"'{script}' gave {status} instead of {expected}")
    program = run.start("/bin/sh", "-c", 'echo "$1"; exec ls /proc/self/fd', "sh", "two  words",
                        budget="64MiB")
    program.end_well()
    lines = machine.read(program.log_path).splitlines()
    # ls itself has the directory open as 3.
    if lines != ["two  words", "0", "1", "2", "3"]:
        raise Failure(f"an argument changed or a descriptor leaked into the program: {lines}")
