"""The configuration is read again while programs run."""

import copy
import os
import signal

import machine
from program import copy_program
from strata import Failure, configured, worker_of
from suite import case


@case("reload", native=False, own_daemon=True)
def reload(run):
    """What is new in it holds, under load and without a wrong byte; what is wrong with it
    is said, and what cannot change. If another stratad is installed by then, that reads it."""
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

        program = run.start("hold", "96", "load", budget="24MiB")
        program.gate("running")
        run.daemon.wait_until(lambda: program.stats()["faults_total"] > 500, "faults are served")
        write(snapshots + 'default_dram = "64MiB"\n')
        said = run.daemon.strata("reload").stdout
        if "read again" not in said or "restart" in said:
            raise Failure(f"strata reload: {said.strip()}")
        run.daemon.wait_until(lambda: program.stats()["worker_restarts_total"] == 1,
                              "a worker has the new configuration")
        budget_of_next(64, "second")
        write(f'snapshot_dir = "{place}/elsewhere"\ndefault_dram = "48MiB"\n')
        os.kill(pid, signal.SIGHUP)
        run.daemon.wait_until(lambda: "of snapshot_dir" in machine.read(log), "it names what stays")
        run.daemon.wait_until(lambda: program.stats()["worker_restarts_total"] == 2,
                              "a worker has the new configuration")
        if os.path.exists(f"{place}/elsewhere"):
            raise Failure("snapshots are elsewhere by now")
        write('default_dram = "plenty"\n')
        refused = run.daemon.strata("reload", check=False)
        if refused.returncode != 1 or "default_dram" not in refused.stderr:
            raise Failure(f"status {refused.returncode}: {refused.stderr.strip()}")
        budget_of_next(48, "third")
        if program.stats()["worker_restarts_total"] != 2:
            raise Failure("a worker was replaced for nothing")
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
