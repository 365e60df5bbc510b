"""The C programs of tests/programs: each checks itself; the runner sees that
pages really were evicted. One line a case."""

from strata import Failure, Skip
from suite import case


def register(name, program, *arguments, budget="20MiB", seconds=60, directory=False,
             loses_pages=False, **how):
    def body(run):
        more = [run.directory] if directory else []
        run.run(program, *arguments, *more, budget=budget, **how)
    case(name, seconds=seconds, loses_pages=loses_pages)(body)


# What a family of processes holds that differs must fit into the budget when it
# is compressed (to a little less than a fifth). What a child without an agent has wiped is said
# to be gone.
for which in ("same", "again", "raw-clone", "raw-clone-wiped", "daemon", "daemons",
              "raw-daemons", "vfork", "spawn"):
    register(f"fork-{which}", "fork", which, budget="24MiB",
             loses_pages=which == "raw-clone-wiped")


@case("fork-raw-clone-in-namespace", native=False, loses_pages=True)
def raw_clone_in_namespace(run):
    """Where a message's thread has another number than here."""
    program = run.start(run.tool("unshare"), "--pid", "--fork", "--mount-proc",
                        run.built("fork"), "raw-clone-wiped", budget="24MiB")
    program.finish()


for which in ("copy-on-write", "generations", "wide", "advice", "after-churn"):
    register(f"fork-{which}", "fork", which, budget="36MiB")
register("exec-itself", "exec", "3", budget="16MiB")

for which in ("same-page", "different-pages", "come-and-go", "detached", "own-stacks",
              "signal-stack", "jumps", "coroutines"):
    register(f"threads-{which}", "threads", which,
             budget="36MiB" if which in ("own-stacks", "signal-stack") else "20MiB")

for which in ("dont-need", "lazy-free", "unmap", "map-over", "remap-move", "remap-grow", "protect",
              "arena", "heap-end", "lock", "grows-down", "sparse"):
    register(f"memory-{which}", "mapping", which,
             budget="32MiB" if which in ("remap-grow", "lock") else "24MiB",
             loses_pages=which == "lazy-free")
register("memory-remap-keep", "mapping", "remap-keep", budget="32MiB")

for which in ("anywhere", "slots", "neighbours", "discard"):
    register(f"race-{which}", "race", which, budget="16MiB")

register("syscalls-buffers", "syscalls", "buffers", directory=True)
register("syscalls-direct", "syscalls", "direct", directory=True, budget="24MiB")
register("uring-fixed", "uring", "fixed", directory=True, budget="16MiB")
register("uring-plain", "uring", "plain", directory=True, budget="16MiB")

for which in ("wait-wake", "pi-mutex", "conditions"):
    register(f"futex-{which}", "futex", which, budget="40MiB")
for which in ("lock-pi", "wake-op", "robust"):
    register(f"limit-{which}", "futex", which, budget="40MiB")

def register_sandbox(which):
    def body(run):
        program = run.start("sandbox", which, budget="14MiB")
        program.gate("ready")
        program.assert_pressed()
        program.answer()
        program.end_well()
    case(f"sandbox-{which}")(body)


for which in ("drop-privileges", "change-root", "few-descriptors", "no-more-threads",
              "little-address-space", "pid-namespace", "mount-namespace", "filter-own",
              "filter-all", "overwrite-environment"):
    register_sandbox(which)
register("limit-user-namespace", "sandbox", "user-namespace", budget="14MiB")

register("heap-churn", "heap", "churn", budget="16MiB")
register("heap-brk", "heap", "brk", budget="16MiB")
register("heap-grow", "heap", "grow", budget="16MiB")


@case("heap-jemalloc")
def heap_jemalloc(run):
    """Another preloaded library before ours."""
    import glob
    found = glob.glob("/usr/lib/*/libjemalloc.so.2")
    if not found:
        raise Skip("libjemalloc2 is not installed")
    run.run("heap", "churn", budget="16MiB", env={"LD_PRELOAD": found[0]})


@case("memory-huge")
def memory_huge(run):
    """Huge pages filled while the budget is far, then squeezed."""
    program = run.start("mapping", "huge", budget="128MiB")
    program.gate("filled")
    if not run.native:
        run.daemon.strata("set", program.name, "--dram", "24MiB")
    program.answer()
    program.finish()


@case("memory-in-order", native=False, seconds=120)
def memory_in_order(run):
    """A reader that goes through its memory again and again: pages come ahead of
    it, and pages that it does not write are evicted without packing them anew.
    What it writes in between it finds again."""
    program = run.start("hold", "80", budget="32MiB")
    program.gate("ready")
    for _ in range(3):
        program.answer("check")
        program.gate("ready")
    stats = program.stats()
    for figure in ("prefetched_pages_total", "evictions_unchanged_total"):
        if stats[figure] < 1000:
            raise Failure(f"{figure} is {stats[figure]} after three passes over 80 MiB in 32")
    run.note(f"{stats['prefetched_pages_total']} pages came ahead, "
             f"{stats['evictions_unchanged_total']} of {stats['evictions_total']} left unchanged")
    program.answer("write")
    program.gate("ready")
    program.answer("check")
    program.gate("ready")
    program.answer("end")
    program.finish()
