"""The file tier: cold pages go to a file and come back right, also across the
worker's death."""

import os
import signal
import subprocess

import machine
from strata import Failure
from suite import case

SECONDS = 15


@case("file-tier", native=False, own_daemon=True, seconds=120)
def file_tier(run):
    """A daemon with a configuration of its own takes the place of the private
    one: only a configuration can name a tier."""
    tier, sockets = os.path.join(run.directory, "tier"), os.path.join(run.directory, "run")
    os.mkdir(tier)
    os.mkdir(sockets)
    configuration = os.path.join(run.directory, "stratad.toml")
    with open(configuration, "w") as file:
        file.write(f'socket_dir = "{sockets}"\ntier_path = "{tier}"\ntier_limit = "1GiB"\n')
    private = run.daemon.socket_path
    with open(os.path.join(run.log_directory, "stratad-tier.log"), "wb") as log:
        daemon = subprocess.Popen([run.binaries.stratad, "--config", configuration],
                                  stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        run.daemon.socket_path = os.path.join(sockets, "control.sock")
        run.daemon.wait_until(run.daemon.answers, "the daemon answers")
        # It compresses to a fifth or better: half of the budget cannot hold that.
        program = run.start("hold", "128", "load", budget="24MiB")
        program.gate("running")

        def read_from_file():
            stats = program.stats()
            return stats["file_bytes"] > 1 << 20 and stats["file_faults_total"] > 100
        run.daemon.wait_until(read_from_file, "pages went to the file and came back", 60)
        if os.listdir(tier):
            raise Failure(f"the tier's files have names: {os.listdir(tier)}")
        before = program.stats()["file_faults_total"]
        workers = [child for child in machine.children(daemon.pid) if machine.alive(child)]
        os.kill(workers[0], signal.SIGKILL)

        def goes_on():
            stats = run.daemon.stats(program.name)
            return stats and stats["worker_restarts_total"] == 1 \
                and stats["file_faults_total"] > before + 100
        run.daemon.wait_until(goes_on, "the next worker reads from the file", 60)
        stats = program.stats()
        run.note(f"{stats['file_bytes'] >> 20} MiB in the file")
        program.answer()
        program.finish()
    finally:
        run.daemon.socket_path = private
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(SECONDS)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
