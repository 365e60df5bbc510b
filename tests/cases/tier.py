"""The file tier: cold pages go to a file and come back right, also across the
worker's death."""

import os
import signal

import machine
from strata import Failure, configured
from suite import case


@case("file-tier", native=False, own_daemon=True, seconds=120)
def file_tier(run):
    """Only a configuration can name a tier."""
    tier = os.path.join(run.directory, "tier")
    os.mkdir(tier)
    text = f'tier_path = "{tier}"\ntier_limit = "1GiB"\n'
    log = os.path.join(run.log_directory, "stratad-tier.log")
    with configured(run.daemon, text, run.directory, log) as daemon:
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
        workers = [child for child in machine.children(daemon) if machine.alive(child)]
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
