"""The configuration is read again while programs run."""

import copy
import os
import signal
import socket
import subprocess
import urllib.request

import machine
from program import copy_program
from strata import Failure, configured, worker_of
from suite import case


def fetch(port):
    """The metrics at a port; none: nobody listens there."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            return answer.read().decode()
    except OSError:
        return None


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def follows(run, place, write, pid, name):
    """Everything that a worker can follow, it follows: rules, schedules, metrics, shared
    DRAM, quotas."""
    worker = worker_of(pid)
    first, second = free_ports(2)
    cat = os.path.join(run.directory, "ruled-cat")
    copy_program(os.path.realpath("/bin/cat"), cat)
    environment = dict(os.environ, LD_PRELOAD=run.binaries.library,
                       STRATA_AGENT_SOCKET=os.path.join(place, "run", "agent.sock"))

    def reload(text):
        write(text)
        said = run.daemon.strata("reload").stdout
        if "read again" not in said or "about to" in said:
            raise Failure(f"strata reload: {said.strip()}")

    def is_managed():
        program = subprocess.Popen([cat], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   env=environment)
        try:
            program.stdin.write(b"here\n")
            program.stdin.flush()
            # Its library has asked before it read anything.
            if program.stdout.readline() != b"here\n":
                raise Failure("the program that a rule is for does not run")
            return "ruled" in run.daemon.tenants()
        finally:
            program.stdin.close()
            program.wait(60)

    base = f'snapshot_dir = "{place}/snapshots"\n'
    reload(base + f'metrics = "127.0.0.1:{first}"\n')
    if "strata_budget_bytes" not in (fetch(first) or ""):
        raise Failure("there are no metrics at the first address")
    if is_managed():
        raise Failure("a program is managed that no rule is for")
    rule = f'[[manage]]\nname = "ruled"\nexe = "{cat}"\ndram = "32MiB"\n'
    reload(base + f'metrics = "127.0.0.1:{second}"\n' + rule)
    if fetch(first) is not None or "strata_budget_bytes" not in (fetch(second) or ""):
        raise Failure("the metrics have not moved")
    if not is_managed():
        raise Failure("the new rule does not hold")
    run.daemon.wait_until(lambda: "ruled" not in run.daemon.tenants(), "the rule's tenant has ended")
    if "shares no DRAM out" not in run.daemon.strata("shares", check=False).stderr:
        raise Failure("DRAM is shared out of which nothing is said")
    reload('dram = "1GiB"\n' + base)
    if fetch(second) is not None or is_managed():
        raise Failure("what the configuration says no more holds still")
    run.daemon.wait_until(lambda: name in run.daemon.strata("shares").stdout, "DRAM is shared out")
    reload(base)
    if "shares no DRAM out" not in run.daemon.strata("shares", check=False).stderr:
        raise Failure("DRAM is shared out of which nothing is said any more")
    if worker_of(pid) != worker:
        raise Failure("the worker was replaced")


def changed_again(run, pid, log, write):
    """The file changes once more before the worker has read it: that makes room for one which
    has what the supervisor has read."""
    worker, before = worker_of(pid), machine.read(log).count("was read again")
    os.kill(worker, signal.SIGSTOP)
    try:
        write(40)
        os.kill(pid, signal.SIGHUP)
        run.daemon.wait_until(lambda: machine.read(log).count("was read again") > before,
                              "the supervisor has read it")
        write(56)
    finally:
        os.kill(worker, signal.SIGCONT)
    run.daemon.wait_until(lambda: worker_of(pid) not in (None, worker) and run.daemon.answers(),
                          "another worker has what the supervisor has")


@case("reload", native=False, own_daemon=True)
def reload(run):
    """What is new in it holds, under load, without a wrong byte and with the same worker;
    what is wrong with it is said, and what cannot change. If another stratad is installed by
    then, that reads it."""
    place = os.path.join(run.directory, "configured")
    file = os.path.join(place, "stratad.toml")
    log = os.path.join(run.log_directory, "configured.log")
    snapshots = f'snapshot_dir = "{place}/snapshots"\n'
    stratad = os.path.join(run.directory, "stratad")
    copy_program(run.binaries.stratad, stratad)
    run.daemon.binaries = copy.copy(run.binaries)
    run.daemon.binaries.stratad = stratad
    with configured(run.daemon, snapshots + 'default_dram = "96MiB"\n', place, log) as pid:
        sockets = f'socket_dir = "{place}/run"\n'

        def write(text):
            with open(file, "w") as to:
                to.write(sockets + text)

        def budget_of_next(expected, name):
            program = run.start("hold", "16", "load", budget=[], name=name)
            program.gate("running")
            found = program.stats()["budget_bytes"]
            program.answer()
            program.finish(pressed=False)
            if found != expected << 20:
                raise Failure(f"{name} has a budget of {found >> 20} MiB")

        program = run.start("hold", "48", "load", budget="12MiB")
        program.gate("running")
        run.daemon.wait_until(lambda: program.stats()["faults_total"] > 500, "faults are served")
        worker = worker_of(pid)
        write(snapshots + 'default_dram = "64MiB"\n')
        said = run.daemon.strata("reload").stdout
        if "read again" not in said or "restart" in said:
            raise Failure(f"strata reload: {said.strip()}")
        budget_of_next(64, "second")
        follows(run, place, write, pid, program.name)
        write(f'snapshot_dir = "{place}/elsewhere"\ndefault_dram = "48MiB"\n')
        os.kill(pid, signal.SIGHUP)
        run.daemon.wait_until(lambda: "of snapshot_dir" in machine.read(log), "it names what stays")

        def is_followed():
            run.daemon.strata("run", "--name", "next", "--", "true")
            return "tenant next starts: budget 48.0 MiB" in machine.read(log)
        # That was the supervisor. A worker that finds another file by then makes room.
        run.daemon.wait_until(is_followed, "the worker follows the signal, too")
        if os.path.exists(f"{place}/elsewhere"):
            raise Failure("snapshots are elsewhere by now")
        write('default_dram = "plenty"\n')
        refused = run.daemon.strata("reload", check=False)
        if refused.returncode != 1 or "default_dram" not in refused.stderr:
            raise Failure(f"status {refused.returncode}: {refused.stderr.strip()}")
        budget_of_next(48, "third")
        if worker_of(pid) != worker or program.stats()["worker_restarts_total"] != 0:
            raise Failure("a worker was replaced for nothing")
        changed_again(run, pid, log, lambda mib: write(snapshots + f'default_dram = "{mib}MiB"\n'))
        budget_of_next(40, "changed")
        # A package was upgraded.
        write(snapshots + 'default_dram = "32MiB"\n')
        os.rename(stratad, stratad + ".old")
        copy_program(run.binaries.stratad, stratad)
        worker = worker_of(pid)
        said = run.daemon.strata("reload").stdout
        if "takes over" not in said:
            raise Failure(f"strata reload: {said.strip()}")
        run.daemon.wait_until(
            lambda: (now := worker_of(pid)) and now != worker and run.daemon.answers(),
            "the upgraded stratad has a worker")
        if os.readlink(f"/proc/{pid}/exe") != stratad:
            raise Failure("the supervisor is the old one")
        budget_of_next(32, "fourth")
        program.answer()
        program.finish()
