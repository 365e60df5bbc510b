"""The daemon as the service of a manager: it says when it is ready, reloads, stops and
whether it answers, and who comes while there is no daemon waits for the next one."""

import os
import select
import signal
import subprocess
import time

import machine
from manager import WATCHDOG_S, managed
from strata import Failure
from suite import case
from takeover import goes_on, waits

SIZE, BUDGET = "48", "12MiB"


def assert_managed(run, program):
    run.daemon.wait_until(lambda: (s := run.daemon.stats(program.name)) and s["faults_total"] > 500,
                          f"{program.name} is managed")


def answers_at_once(run):
    """The sockets of a daemon that says it is ready answer."""
    if run.daemon.ask({"request": "ping"}).get("reply") != "pong":
        raise Failure("it is ready and does not answer")


def reloads(run, manager, program):
    """What is new and what is wrong: both begin and come to an end."""
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    manager.configure('default_dram = "64MiB"\n')
    run.daemon.strata("reload")
    said = manager.hear("RELOADING=1")
    if not before <= int(said["MONOTONIC_USEC"]) <= time.clock_gettime_ns(
            time.CLOCK_MONOTONIC) // 1000:
        raise Failure(f"it reloads at {said}, asked at {before}")
    manager.hear("READY=1")
    if program.stats()["worker_restarts_total"] != 0:
        raise Failure("it is ready again, and a worker was replaced for nothing")
    brief = run.start("hold", "16", "load", budget=[])
    brief.gate("running")
    if brief.stats()["budget_bytes"] != 64 << 20:
        raise Failure("it is ready again, and the new configuration does not hold")
    brief.answer()
    brief.finish(pressed=False)
    manager.configure('default_dram = "plenty"\n')
    manager.process.send_signal(signal.SIGHUP)
    manager.hear("RELOADING=1")
    manager.hear("READY=1", "STATUS=Goes on with the configuration that it had.")
    manager.configure("")
    goes_on(run, [program])


def hangs(run, manager, program):
    """A worker that stands still gives no sign of life; killed for it, the daemon is
    followed by one that ends that worker and takes over."""
    manager.forget()
    manager.hear("WATCHDOG=1")
    worker = run.daemon.wait_until(manager.worker, "there is one worker")
    os.kill(worker, signal.SIGSTOP)
    run.daemon.wait_until(lambda: "T (stopped)" in machine.read(f"/proc/{worker}/status"),
                          "the worker stands still")
    # A sign that was under way.
    manager.forget()
    manager.next(0.3)
    # Signs come four times as often as they must.
    if said := manager.next(WATCHDOG_S * 0.75):
        raise Failure(f"its worker stands still, and it says {said}")
    manager.process.kill()
    manager.process.wait()
    manager.start()
    manager.hear("READY=1", "STATUS=Manages the programs of 1 tenant.")
    answers_at_once(run)
    if machine.alive(worker):
        raise Failure("the worker that hung is there still")
    goes_on(run, [program])


def is_upgraded(run, manager, program):
    """As the same process, whose sockets nobody finds closed meanwhile."""
    manager.forget()
    run.daemon.strata("upgrade")
    manager.hear("RELOADING=1")
    answers_at_once(run)
    manager.hear("READY=1")
    manager.hear("WATCHDOG=1")
    goes_on(run, [program])


def is_restarted(run, manager, program):
    """It leaves everything to the next one; one that is started by hand does not come
    between."""
    manager.process.send_signal(signal.SIGUSR1)
    manager.hear("STOPPING=1")
    manager.ends(0)
    waits(program)
    if len(manager.holders()) != 1:
        raise Failure(f"it left the holders {manager.holders()}")
    by_hand = subprocess.run(manager.command(), stdin=subprocess.DEVNULL, capture_output=True,
                             text=True, timeout=30, check=False)
    if by_hand.returncode != 1 or "systemctl start stratad" not in by_hand.stderr:
        raise Failure(f"one by hand: status {by_hand.returncode}, {by_hand.stderr}")
    # It has asked who listens there, and so may a command.
    manager.start()
    manager.hear("READY=1")
    goes_on(run, [program])


@case("service-manager", native=False, own_daemon=True, seconds=120, takes=15)
def service_manager(run):
    with managed(run) as manager:
        # Started with no daemon there, and managed when it comes.
        program = run.start("hold", SIZE, "load", budget=BUDGET)
        if not program.quiet(0.5):
            raise Failure("it runs without a daemon: " + machine.read(program.log_path)[-200:])
        manager.start()
        said = manager.hear("READY=1")
        if not said.get("STATUS", "").startswith("Manages"):
            raise Failure(f"it is ready and says {said}")
        answers_at_once(run)
        program.gate("running")
        assert_managed(run, program)
        for check in (reloads, hangs, is_upgraded, is_restarted):
            check(run, manager, program)
            run.note(f"service-{check.__name__.replace('_', '-')}")
        program.answer()
        program.finish()
        manager.process.send_signal(signal.SIGTERM)
        manager.hear("STOPPING=1")
        manager.ends(0)
        run.daemon.wait_until(lambda: not manager.holders(), "the holder has ended")
        if not all(map(os.path.exists, manager.paths)):
            raise Failure("it took the names of its manager's sockets away")
        # Else the manager would start it again.
        if select.select(manager.listeners, [], [], 0)[0]:
            raise Failure("somebody waits at a socket of the daemon that was stopped")


@case("service-manager-rules", native=False, own_daemon=True)
def by_rules(run):
    """One that a rule wants managed asks at the other socket, and waits as well; and a
    manager that listens elsewhere is refused."""
    rule = '[[manage]]\nname = "ruled"\ndram = "24MiB"\nexe = "hold"\n'
    with managed(run, rule) as manager:
        program = run.start(run.built("hold"), SIZE, "load", native=True, env={
            "LD_PRELOAD": run.binaries.library, "STRATA_AGENT_SOCKET": manager.paths[1]})
        program.name = "ruled"
        if not program.quiet(0.5):
            raise Failure("it runs without a daemon: " + machine.read(program.log_path)[-200:])
        manager.start()
        manager.hear("READY=1")
        program.gate("running")
        assert_managed(run, program)
        program.answer()
        program.gate("done")
        program.answer()
        program.end_well()
        manager.process.send_signal(signal.SIGTERM)
        manager.ends(0)
        manager.always = manager.always.replace("/run\"", "/elsewhere\"", 1)
        manager.configure("")
        manager.start()
        manager.ends(1)
        if "which is no socket of a stratad in" not in (log := machine.read(manager.log_path)):
            raise Failure(f"a manager that listens elsewhere: {log[-300:]}")
