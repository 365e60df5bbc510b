"""A guest whose balloon follows what its agent says (`strata vm run --self-balloon`): what it
does not need is taken, what it needs comes back, and whatever fails gives it back. One boot
serves all checks, each counted and named."""

import os
import signal

import machine
from strata import Failure
from suite import case
from under import Guest, initramfs, kernel

MIB = 1 << 20
MEMORY_MIB, FILLED_MIB, FLOOR_MIB, BUDGET_MIB = 320, 160, 96, 420
# An idle one needs hardly half of that.
LITTLE_MIB = 224
HOW = f"floor={FLOOR_MIB}MiB,headroom=24MiB,hysteresis=4MiB,down=48MiB,calm=1,remember=0,stale=3"

# What is said of one that has no more than it needs, or is on the way there.
SETTLED = ("it needs less", "it has what it needs")


def follows(guest):
    return (guest.stats()["guest"] or {}).get("self_balloon") or {}


def left(guest):
    """What its balloon leaves it; none: its monitor is just not asked."""
    return (guest.stats()["guest"] or {}).get("balloon_bytes")


def shrinks(guest):
    guest.wait_until(lambda: 0 < (left(guest) or 0) <= LITTLE_MIB * MIB and
                     follows(guest).get("why") in SETTLED, "it gives back what it does not need")
    if left(guest) < FLOOR_MIB * MIB:
        raise Failure(f"it has {left(guest)} bytes, and keeps {FLOOR_MIB} MiB")


def has_all(guest):
    guest.wait_until(lambda: left(guest) == MEMORY_MIB * MIB and not follows(guest).get("by"),
                     "nobody speaks for it, and it has everything again")


def nothing_was_killed(guest):
    guest.tell("killed")
    killed = guest.hear(r"^killed (-?\d+)\n")[1]
    if killed != "0":
        raise Failure(f"its kernel ended {killed} processes for lack of memory")


def idle(run, guest):
    """Without an agent it keeps everything; with one it gives back what it does not need."""
    guest.wait_until(lambda: follows(guest).get("why") == "nothing is heard from it",
                     "its silence is seen")
    if left(guest) not in (None, MEMORY_MIB * MIB):
        raise Failure(f"nobody speaks for it, and it has {left(guest)} bytes")
    guest.tell("agent")
    guest.hear(r"^agent\n")
    shrinks(guest)
    run.note(f"idle it has {left(guest) // MIB} MiB of {MEMORY_MIB}")
    row = run.daemon.strata("vm", "ls").stdout.splitlines()[1]
    text = run.daemon.strata("vm", "stats", guest.name).stdout
    if " MiB: it " not in row or "balloon is to leave it" not in text or "its agent's" not in text:
        raise Failure(f"strata vm ls: {row}; stats: {text}")


def all_at_once(run, guest):
    """It takes more than it has at once, and gets it."""
    guest.tell(f"fill {FILLED_MIB}")
    guest.hear(r"^filled\n")
    guest.rounds(2)
    nothing_was_killed(guest)
    guest.wait_until(lambda: (left(guest) or 0) > FILLED_MIB * MIB, "it has what it needs")
    run.note(f"full it has {left(guest) // MIB} MiB; got everything back "
             f"{follows(guest)['given_back_total']} times")


def worker_killed(run, guest):
    """A new worker gives back first, and then goes on."""
    guest.tell(f"free {FILLED_MIB - 16}")
    guest.hear(r"^freed\n")
    for _ in range(4):
        shrinks(guest)
        worker = run.daemon.worker()
        os.kill(worker, signal.SIGKILL)
        run.daemon.wait_until(lambda: machine.alive(run.daemon.pid) and run.daemon.worker() not in
                              (None, worker) and run.daemon.answers(), "a new worker")
        guest.rounds(2)
        shrinks(guest)
        # The one before may just have given back itself: then this one had nothing to give.
        if follows(guest)["given_back_total"]:
            break
    else:
        raise Failure("four new workers, and none gave back first")
    guest.rounds(1)


def agent_killed(run, guest):
    """Nobody speaks for it: it gets everything back, and keeps it."""
    guest.tell("silence")
    guest.hear(r"^silence\n")
    has_all(guest)
    guest.rounds(2)
    stats = follows(guest)
    if stats["by"] or stats["target_bytes"] != MEMORY_MIB * MIB:
        raise Failure(f"its agent is dead, and this is known: {stats}")
    # A driver speaks for it too; but since an agent has spoken, nobody else counts.
    worker = run.daemon.worker()
    os.kill(worker, signal.SIGKILL)
    run.daemon.wait_until(lambda: run.daemon.worker() not in (None, worker) and
                          run.daemon.answers(), "a new worker")
    has_all(guest)
    mark = os.path.join(run.daemon.directory, "guests", f"+{os.getuid()}.{guest.name}")
    if not os.path.exists(mark):
        raise Failure("the next worker does not know that an agent has spoken")
    guest.tell("agent")
    guest.hear(r"^agent\n")
    shrinks(guest)
    guest.rounds(1)
    nothing_was_killed(guest)


@case("self-balloon", native=False, own_daemon=True, computes=True, seconds=180, takes=25)
def self_balloon(run):
    agent = os.path.join(run.binaries.directory, "strata-guest-agent")
    initramfs(run, kernel(), more=[(agent, "/strata-guest-agent")])
    guest = Guest(run, "self", ["--memory", f"{MEMORY_MIB}MiB", "--dram", f"{BUDGET_MIB}MiB",
                                f"--self-balloon={HOW}"], ["-machine", "q35"])
    checks = (idle, all_at_once, worker_killed, agent_killed)
    try:
        guest.hear(r"^up\n")
        for check in checks:
            check(run, guest)
            run.note(f"self-balloon-{check.__name__}")
        guest.end()
    finally:
        guest.kill()
    run.tests = len(checks)
