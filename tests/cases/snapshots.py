"""Snapshots of programs that work: brought back, they are as they were at one
moment, and are managed on. Every value is checked (tests/programs/moment.c)."""

import itertools
import os

import machine
from moment import Moment
from strata import Failure
from suite import case
from tenants import allowance, cost


def register(mode, megabytes, budget, processes=1):
    @case(f"snapshot-{mode}", native=False, own_daemon=True)
    def body(run):
        """Taken twice under pressure, rolled back to each, crashed, restored."""
        program = Moment(run, mode, megabytes, budget)
        program.pressed()
        snapshots = [program.take() for _ in range(2)]
        program.check()
        if len(program.pids()) != processes:
            raise Failure(f"{program.pids()} are there after a snapshot, not {processes}")
        for snapshot in (snapshots[0], snapshots[1], snapshots[0]):
            program.roll(snapshot)
            if len(program.pids()) != processes:
                raise Failure(f"{program.pids()} are there after a rollback, not {processes}")
        program.pressed()
        program.crash(snapshots[1])
        program.pressed()
        program.check()
        infos = program.list()
        if set(infos) != set(snapshots):
            raise Failure(f"listed are {sorted(infos)}, taken were {snapshots}")
        run.note("frozen " + ", ".join(f"{i['freeze_us'] / 1000:.0f}" for i in infos.values())
                 + " ms")
        program.assert_clean()


register("plain", 32, "12MiB")
register("threads", 32, "12MiB")
register("processes", 16, "32MiB", processes=3)
register("connections", 16, "32MiB", processes=5)
register("storm", 32, "12MiB")
register("wipe", 32, "20MiB")


@case("snapshot-idle", native=False, own_daemon=True)
def idle(run):
    """Threads that sleep while everything else is evicted again and again. CRIU
    wants to read their thread-local variables, and cannot wait for a page."""
    program = Moment(run, "idle", 32, "12MiB")
    for _ in range(2):
        # Evicted by now, if that may be; else a wait for it has no end.
        for _ in range(20):
            if program.word(36) >= 4:
                break
            program.pressed()
        snapshot = program.take()
        program.check()
        program.roll(snapshot)
    program.crash(snapshot)
    program.assert_clean()


@case("snapshot-faults", native=False, own_daemon=True)
def faults(run):
    """A restored program's faults are served as they were: beside the thread that
    waits, wherever it runs, and ahead of who reads in order. CRIU's userfaultfds do
    not say whose fault it is."""
    program = Moment(run, "plain", 32, "12MiB")
    program.pressed()
    program.crash(program.take())
    worker, [pid] = run.daemon.worker(), program.pids()

    def handlers():
        tasks = f"/proc/{worker}/task"
        return [int(tid) for tid in os.listdir(tasks)
                if machine.read(f"{tasks}/{tid}/comm").startswith("fault-")]
    cpus = sorted(os.sched_getaffinity(0))
    for cpu in (cpus[-1], cpus[0], cpus[-1]):
        for tid in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(tid), {cpu})
        program.until(lambda cpu=cpu: {cpu} in map(os.sched_getaffinity, handlers()),
                      f"its faults are served on CPU {cpu}")
    before = program.daemon.stats(program.name)["prefetched_pages_total"]
    program.check()
    after = program.daemon.stats(program.name)["prefetched_pages_total"]
    if after < before + 500:
        raise Failure(f"{after - before} pages came ahead of a pass over 32 MiB in 12")
    program.assert_clean()


@case("snapshot-refilled", native=False, own_daemon=True)
def refilled(run):
    """Memory that was offered to the kernel (MADV_FREE), not taken, and written
    again: no fault tells that it is there."""
    program = Moment(run, "quiet", 32, "12MiB")
    program.pressed()
    program.order("refill")
    snapshot = program.take()
    program.roll(snapshot)
    program.order("refill")
    program.roll(snapshot)
    program.assert_clean()


@case("snapshot-reserved", native=False, own_daemon=True)
def reserved(run):
    """8 TiB of address space that nothing is in, as MariaDB reserves it: CRIU
    would want 32 GiB of memory to list its pages. Named, and nothing is frozen."""
    program = Moment(run, "reserved", 24, "10MiB")
    program.pressed()
    try:
        program.take()
    except Failure as refused:
        if "8.0 TiB of address space" not in str(refused):
            raise
    else:
        raise Failure("it was taken: say so in docs/limits.md, and test that it comes back")
    program.order("write")
    program.check()
    program.assert_clean()


@case("snapshot-unmanaged", native=False, own_daemon=True)
def unmanaged(run):
    """A tenant so far below its budget that nothing of it is managed yet; then
    the same one, restored, must keep a budget."""
    program = Moment(run, "quiet", 64, "512MiB")
    if (state := program.daemon.stats(program.name)["state"]) != "native":
        raise Failure(f"the tenant is {state}: nothing new is tested")
    snapshot = program.take()
    program.check()
    program.order("write")
    program.roll(snapshot)
    program.daemon.strata("set", program.name, "--dram", "24MiB")
    program.pressed()
    program.check()
    program.roll(snapshot)
    program.crash(snapshot)
    program.assert_clean()


@case("snapshot-removed", native=False, own_daemon=True, seconds=120, takes=20)
def removed(run):
    """Three snapshots, removed in every order: what nothing refers to is freed,
    and what is left is whole."""
    program = Moment(run, "quiet", 16, "10MiB")
    program.pressed()
    stored = lambda: program.daemon.stats(program.name)["compressed_bytes"]  # noqa: E731
    before, most = stored(), 0
    footprint = run.daemon.footprint()
    for order in itertools.permutations(range(3)):
        taken = []
        for _ in range(3):
            taken.append(program.take())
            program.order("write")
        most = max(most, stored())
        for index in order[:2]:
            program.remove(taken[index])
        program.roll(taken[order[2]])
        program.remove(taken[order[2]])
        if left := program.list():
            raise Failure(f"{sorted(left)} are still listed")
        program.check()
    if most < before + (1 << 20):
        raise Failure(f"{most - before} bytes for three snapshots: nothing was tested")
    # Eighteen were taken: if one in six stays, this is exceeded.
    program.until(lambda: stored() < before + (most - before) // 2,
                  f"the store is back at {before >> 20} MiB from {most >> 20} MiB")
    run.note(f"store {before >> 20} MiB, with three snapshots {most >> 20}, after {stored() >> 20}")
    run.daemon.settled(footprint, "the daemon gives back what snapshots cost")
    program.assert_clean()


@case("snapshot-fork-after", native=False, own_daemon=True)
def fork_after(run):
    """What was restored forks at once; the child's memory is right, and managed."""
    program = Moment(run, "plain", 32, "24MiB")
    program.pressed()
    snapshot = program.take()
    for _ in range(2):
        program.report()
        program.brought_back(snapshot, lambda: (program.rollback(snapshot),
                                                program.order("fork")))
        program.order("fork")
    program.pressed()
    program.assert_clean()


@case("snapshot-exec-after", native=False, own_daemon=True)
def exec_after(run):
    """What was restored becomes another program, which is managed as well."""
    program = Moment(run, "plain", 32, "12MiB")
    program.pressed()
    snapshot = program.take()
    program.roll(snapshot)
    program.put(32, 0)
    program.order("exec")
    program.until(lambda: program.word(32), "the new program is ready")
    program.check()
    second = program.take()
    program.roll(second)
    program.pressed()
    # And back to what it was before it became another.
    program.roll(snapshot)
    program.assert_clean()


@case("snapshot-gives-back", native=False, own_daemon=True)
def gives_back(run):
    """What a program unmaps before it is captured tears the snapshot. The next
    attempt reads only what the torn one has not; it need not stop the program for
    all of its memory."""
    program = Moment(run, "gives-back", 96, "160MiB")
    torn, tried = 0, []
    # A processor that is taken away tears one before it has read much.
    while len(tried) < 5:
        before, snapshot = torn, program.take()
        torn = machine.read(program.daemon.log_path).count("taken again")
        copied = program.list()[snapshot]["copied_pages"]
        tried.append((torn - before, copied))
        if torn == before or copied <= 96 * 256 // 2:
            break
    else:
        raise Failure(f"torn so often, then so many pages were read: {tried}")
    for again in (snapshot, program.take()):
        program.roll(again)
        program.check()
    program.crash(snapshot)
    program.assert_clean()
    run.note(f"torn {torn} times, {copied} pages read by the last attempt")


@case("snapshot-memory-taken-down", native=False, own_daemon=True, seconds=120)
def memory_taken_down(run):
    """The memory of what is rolled back is taken down beside the restore, by a
    thread that ends with it, and nothing of it is left."""
    program = Moment(run, "processes", 48, "48MiB")
    snapshot = program.take()
    for _ in range(run.times(3)):
        program.roll(snapshot)

        tasks = f"/proc/{program.daemon.worker()}/task"
        program.until(lambda: not any(
            machine.read(f"{tasks}/{task}/comm").strip() == "take-down"
            for task in os.listdir(tasks)), "the old memory is taken down")
    program.assert_clean()


@case("snapshot-generations", native=False, own_daemon=True, seconds=120)
def generations(run):
    """Restored, pressed, taken again, and so on; then back through all of them."""
    program = Moment(run, "plain", 32, "12MiB")
    program.pressed()
    taken = []
    for number in range(5):
        taken.append(program.take())
        (program.roll if number % 2 else program.crash)(taken[-1])
        program.pressed()
        program.until(lambda: cost(program.daemon.stats(program.name)) <=
                      (24 << 20) + allowance(24 << 20),
                      f"generation {number} costs no more than its budget")
    for snapshot in reversed(taken):
        program.roll(snapshot)
    # Each came from the one before it.
    listed = program.list()
    parents = [listed[snapshot]["parent"] for snapshot in taken]
    if parents != [None, *taken[:-1]]:
        raise Failure(f"the parents of {taken} are {parents}")
    program.assert_clean()
