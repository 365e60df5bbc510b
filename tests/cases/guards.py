"""Guard regions: content that is gone without a message from the kernel
(tests/programs/guards.c)."""

import os

import machine
from moment import Snapshots
from strata import Failure, Skip
from suite import case


def ready(program):
    """The program's memory is out, unless the kernel has no guards."""
    word = program.gate()
    if word == "no guards":
        program.answer()
        program.finish()
        raise Skip("this kernel has no guard regions (Linux 6.13)")
    if word != "ready":
        raise Failure(f"the program said '{word}'")


def register(name, which, **how):
    @case(name, **how)
    def body(run):
        program = run.start("guards", which, budget="16MiB")
        ready(program)
        program.answer()
        # Before, pages were only evicted; in the end they have come back, too.
        program.finish()


for which in ("madvise", "process-madvise", "by-number", "between", "refused", "fork",
              "raw-clone", "outside"):
    register(f"guards-{which}", which)
register("limit-unseen-guards", "unseen", loses_pages=True)


@case("guards-snapshot", native=False, own_daemon=True)
def guards_snapshot(run):
    """Guards in stacks and in memory that is evicted: a snapshot is taken of them, and
    they are guards again in what is brought back."""
    program = run.start("guards", "forever", budget="16MiB")
    tenant = Snapshots(run, program)
    names = ("rounds", "remove", "removed", "clone", "cloned")
    path = {name: os.path.join(run.directory, name) for name in names}

    def goes_on():
        before = machine.read(path["rounds"])

        def happened():
            said = machine.read(program.log_path).strip()
            if said:
                raise Failure(f"the program: {said.splitlines()[0]}")
            now = machine.read(path["rounds"])
            return now and (not before or int(now) != int(before))
        for _ in range(2):
            run.daemon.wait_until(happened, "the program goes on")
            before = machine.read(path["rounds"])

    def remove():
        open(path["remove"], "w").close()
        run.daemon.wait_until(lambda: os.path.exists(path["removed"]), "the guards are removed")
        goes_on()
        os.unlink(path["remove"])
        os.unlink(path["removed"])

    def clone():
        open(path["clone"], "w").close()
        run.daemon.wait_until(lambda: os.path.exists(path["cloned"]) or ended(),
                              "a child without an agent is right")
        goes_on()
        os.unlink(path["cloned"])

    def ended():
        return machine.read(program.log_path).strip()

    run.daemon.wait_until(lambda: os.path.exists(path["rounds"]), "it is ready")
    goes_on()
    clone()
    snapshot = tenant.take()
    goes_on()
    remove()
    tenant.rollback(snapshot)
    goes_on()
    clone()
    remove()
    tenant.kill()
    tenant.restore(snapshot)
    goes_on()
    remove()
    clone()
    stats = run.daemon.stats(tenant.name)
    if stats["lost_pages_total"]:
        raise Failure(f"{stats['lost_pages_total']} pages lost")
