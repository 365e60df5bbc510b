"""Programs that a rule of the configuration manages, with no `strata run`: they start
with the library, as a service does, and the daemon asks the kernel what they are."""

import json
import os
import subprocess

from program import copy_program
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
        copy_program(sleep, copy)
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


TEMPLATE = """
[[manage]]
name = "vm-{guest}"
exe = "renamed"
dram = "8MiB"
"""


class Named:
    """`renamed` under a rule: fills memory, and says when it is right."""

    def __init__(self, run, environment, size_mib, *words):
        self.process = subprocess.Popen(
            [run.built("renamed"), str(size_mib), *words], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.hear("ready")

    def hear(self, word):
        line = self.process.stdout.readline().split()
        if line[:1] != [word]:
            self.process.kill()
            raise Failure(f"it says {line}, not {word}: {self.process.communicate()[1]}")
        return line

    def ask(self, order, word):
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        return self.hear(word)

    def end(self):
        """Its end, which is a good one."""
        said = self.process.communicate("end\n", timeout=60)[1]
        if self.process.returncode != 0:
            raise Failure(f"it ended with status {self.process.returncode}: {said}")


@case("rules-templates", native=False, own_daemon=True, seconds=120)
def rules_templates(run):
    """One rule, a tenant for each name on a command line. The child of a fork is its
    parent's by its memory, though the command line names another tenant by then."""
    place = os.path.join(run.directory, "templates")
    os.mkdir(place)
    log = os.path.join(run.log_directory, "stratad-templates.log")
    with configured(run.daemon, TEMPLATE, place, log):
        sockets = os.path.dirname(run.daemon.socket_path)
        environment = {**os.environ, "LD_PRELOAD": run.binaries.library,
                       "STRATA_AGENT_SOCKET": os.path.join(sockets, "agent.sock")}
        named = [Named(run, environment, 24, "-name", f"guest={name},debug-threads=on")
                 for name in ("one", "two")]
        named += [Named(run, environment, 1, "-name", "guest=a b"),
                  Named(run, environment, 1), Named(run, environment, 1)]
        one, two, spaced = named[:3]
        try:
            listed = {tenant["name"]: tenant for tenant
                      in json.loads(run.daemon.strata("ps", "--json").stdout)}
            names = sorted(listed)
            if names[1:] != ["vm-one", "vm-two"] or not names[0].startswith("vm-a-b-"):
                raise Failure(f"the tenants are {names}")
            for program, name in ((one, "vm-one"), (two, "vm-two"), (spaced, names[0])):
                if listed[name]["pids"] != [program.process.pid]:
                    raise Failure(f"{name} has the processes {listed[name]['pids']}")
            child = int(one.ask("fork two,debug-threads=on", "child")[1])
            if tenant_of(run, child) != "vm-one":
                raise Failure(f"the child of vm-one is {tenant_of(run, child)}'s")
            for program in (one, two):
                program.ask("check", "right")
            for name in ("vm-one", "vm-two"):
                stats = run.daemon.stats(name)
                if stats["budget_bytes"] != 8 << 20 or stats["evictions_total"] == 0:
                    raise Failure(f"{name}: its budget is {stats['budget_bytes']}, "
                                  f"evictions {stats['evictions_total']}")
            with open(log) as file:
                said = [line for line in file if "nothing that {guest} stands for" in line]
            if len(said) != 1:
                raise Failure(f"of those without a name the log says {said}")
            for program in named:
                program.end()
            run.daemon.wait_until(lambda: run.daemon.tenants() == [], "all tenants are gone")
        finally:
            for program in named:
                if program.process.poll() is None:
                    program.process.kill()
                    program.process.wait()
