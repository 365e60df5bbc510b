"""Programs that a rule of the configuration manages, with no `strata run`: they start
with the library, as a service does, and the daemon asks the kernel what they are."""

import json
import os
import shutil
import subprocess

from strata import Failure, configured
from suite import case

RULES = """
[[manage]]
name = "by-link"
exe = "{place}/server"
dram = "8MiB"
[[manage]]
name = "by-name"
exe = "worker"
[[manage]]
name = "by-file"
exe = "{sleep}"
user = "root"
"""
# As a service that is restarted in a loop.
RESTARTS = 200


def tenant_of(run, pid):
    listed = json.loads(run.daemon.strata("ps", "--json").stdout)
    return next((tenant["name"] for tenant in listed if pid in tenant["pids"]), None)


@case("rules", native=False, own_daemon=True, seconds=120)
def rules(run):
    """Each gets what the first rule says that matches: by the path of a link, by a name
    that it was started by, by its file. One that is started at the moment at which the
    tenant of the one before ends is a tenant's, too."""
    place = os.path.join(run.directory, "rules")
    os.mkdir(place)
    sleep = os.path.realpath("/bin/sleep")
    served, worked = (os.path.join(place, name) for name in ("served", "worked"))
    for copy in (served, worked):
        shutil.copy(sleep, copy)
    server, worker, other = (os.path.join(place, name) for name in ("server", "worker", "other"))
    for link, file in ((server, served), (worker, worked), (other, worked)):
        os.symlink(file, link)
    log = os.path.join(run.log_directory, "stratad-rules.log")
    with configured(run.daemon, RULES.format(place=place, sleep=sleep), place, log):
        sockets = os.path.dirname(run.daemon.socket_path)
        environment = {**os.environ, "LD_PRELOAD": run.binaries.library,
                       "STRATA_AGENT_SOCKET": os.path.join(sockets, "agent.sock")}

        def start(path):
            return subprocess.Popen([path, "600"], env=environment, stdin=subprocess.DEVNULL)

        def is_managed(program, name):
            run.daemon.wait_until(lambda: tenant_of(run, program.pid) == name,
                                  f"{program.args[0]} is {name}'s")

        def ended(program):
            program.kill()
            program.wait()

        stranger = start(other)
        try:
            for path, name in ((server, "by-link"), (served, "by-link"), (worker, "by-name"),
                               (sleep, "by-file")):
                program = start(path)
                try:
                    is_managed(program, name)
                    if name == "by-link" and run.daemon.stats(name)["budget_bytes"] != 8 << 20:
                        raise Failure(f"not the rule's budget: {run.daemon.stats(name)}")
                finally:
                    ended(program)
            if name := tenant_of(run, stranger.pid):
                raise Failure(f"{other} is {name}'s, and no rule's")
        finally:
            ended(stranger)
        for _ in range(RESTARTS):
            program = start(served)
            try:
                is_managed(program, "by-link")
            finally:
                ended(program)
        run.note(f"{RESTARTS} restarts")
