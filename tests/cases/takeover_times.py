"""How long programs stand still when the whole daemon dies, is upgraded, or reads its
configuration again. What measures the machine: nothing here is asserted but that no byte is
wrong and everybody goes on."""

import mmap
import os
import random
import signal
import time

import machine
from manager import managed
from suite import case
from takeover_kinds import kill_whole

# How many, of what, under which budget, and how long each rests between two looks: what 200
# ask of two processors must be less than those have.
FEW = 20, 256, "64MiB", 2
MANY = 200, 16, "8MiB", 100
LOOKS = 20


class Clients:
    """So many programs that each look at their memory all the time (programs/pauses.c)."""

    def __init__(self, run, count, megabytes, budget, rest_ms):
        self.run, self.programs, self.boards = run, [], []
        for number in range(count):
            path = os.path.join(run.directory, f"board-{len(run.programs)}")
            with open(path, "w+b") as file:
                file.truncate(4096)
                self.boards.append(memoryview(mmap.mmap(file.fileno(), 4096)).cast("Q"))
            self.programs.append(run.start("pauses", path, megabytes, rest_ms, budget=budget))
            # One after the other: a user may ask for so many at once and no more.
            self.programs[-1].gate("running")

    def go_on(self):
        before = [board[0] for board in self.boards]
        self.run.daemon.wait_until(
            lambda: all(board[0] > seen + LOOKS for board, seen in zip(self.boards, before)),
            "all of them go on", 60)

    def pause(self, what):
        """The longest of any of them while `what` is done, in seconds."""
        self.go_on()
        for board in self.boards:
            board[1] = 0
        what()
        self.go_on()
        return max(board[1] for board in self.boards) / 1e9

    def end(self):
        for program in self.programs:
            program.answer()
        for program in self.programs:
            program.finish(pressed=False)


def note(run, what, pauses):
    pauses = sorted(pauses)
    run.note(f"{what}: {len(pauses)} times, the longest pause {pauses[-1] * 1000:.0f} ms, "
             f"half of them at most {pauses[len(pauses) // 2] * 1000:.0f} ms")


def killed_upgrade(run, manager, chance):
    """Killed somewhere in it, alone or with its worker; the next daemon takes over."""
    supervisor, worker = manager.process.pid, manager.worker()
    asked = run.daemon.start_strata("upgrade")
    time.sleep(chance.uniform(0, 0.5))
    os.kill(supervisor, signal.SIGKILL)
    if worker and chance.random() < 0.5 and machine.alive(worker):
        os.kill(worker, signal.SIGKILL)
    manager.process.wait()
    asked.communicate()
    manager.start()
    manager.forget()
    manager.hear("READY=1")


@case("takeover-times", native=False, own_daemon=True, soak=True, alone=True, seconds=180)
def times(run):
    with managed(run) as manager:
        manager.start()
        manager.hear("READY=1")
        clients = Clients(run, *FEW)
        nothing = [clients.pause(lambda: time.sleep(0.5)) for _ in range(run.times(1))]
        note(run, "nothing", nothing)

        def die():
            """What a manager does, who needs a moment: that is not counted."""
            nonlocal restart
            began = time.monotonic()
            kill_whole(run, manager)
            restart = time.monotonic() - began
            manager.start()
            manager.forget()
            manager.hear("READY=1")
        beyond, restart = [], 0
        for _ in range(run.times(5) // 2):
            whole = clients.pause(die)
            beyond.append(max(whole - restart, 0))
        note(run, f"both killed, {FEW[0]} tenants of {FEW[1]} MiB, beyond the restart", beyond)

        def upgrade():
            manager.forget()
            run.daemon.strata("upgrade")
            manager.hear("READY=1")
        note(run, "upgrade", [clients.pause(upgrade) for _ in range(run.times(1))])
        chance = random.Random(39)
        for _ in range(run.times(1)):
            killed_upgrade(run, manager, chance)
            clients.go_on()
        run.note(f"killed in the middle of an upgrade: {run.times(1)} times, and all went on")
        for program in clients.programs:
            program.assert_pressed()
        run.notes = [one for one in run.notes if not one.startswith("evictions")]
        clients.end()
        many = Clients(run, *MANY)
        nothing = [many.pause(lambda: time.sleep(0.5)) for _ in range(run.times(1))]
        note(run, f"nothing, {MANY[0]} tenants", nothing)

        def reload():
            manager.forget()
            run.daemon.strata("reload")
            manager.hear("READY=1")
        note(run, f"reload, {MANY[0]} tenants", [many.pause(reload) for _ in range(run.times(1))])
        many.end()
