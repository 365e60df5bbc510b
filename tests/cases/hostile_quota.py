"""What ordinary users do to the system's daemon, three at once where it matters: they
take over nobody's tenants, switch nobody's management off, stop nobody's service, and
fill neither its tables nor its log."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time

import machine
from program import copy_program
from strata import Failure, Skip, configured
from suite import ROOT, case
from users import publish

USERS = (60001, 60002, 60003)
STRANGER = 60004
CROWD = os.path.join(ROOT, "tests", "programs", "crowd.py")
LISTED = "uffd_users = [" + ", ".join(f'"{uid}"' for uid in USERS) + "]\n"
MIB = 1 << 20


class System:
    """A system's daemon, the programs where everybody can execute them, and its users."""

    def __init__(self, run, place, binaries):
        self.run, self.place, self.binaries, self.daemon = run, place, binaries, run.daemon
        self.started = []

    @property
    def agents(self):
        return os.path.join(os.path.dirname(self.daemon.socket_path), "agent.sock")

    def environment(self, **more):
        kept = {k: v for k, v in os.environ.items() if k == "PATH"}
        return {**kept, "STRATA_SOCKET": self.daemon.socket_path, **more}

    def strata(self, uid, *arguments):
        """Runs `strata ARGUMENTS` as that user; what came of it."""
        return subprocess.run(
            [self.binaries.strata, *arguments], user=uid, group=uid, extra_groups=[], cwd="/",
            env=self.environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=60 * self.daemon.patience, check=False)

    def start(self, uid, *command, **environment):
        """Starts a program as that user; whatever happens, it ends with the case."""
        program = subprocess.Popen(
            command, user=uid, group=uid, extra_groups=[], cwd="/",
            env=self.environment(**environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True)
        self.started.append(program)
        return program

    def start_tenant(self, uid, name, dram="64MiB", command=("/bin/sleep", "600")):
        program = self.start(uid, self.binaries.strata, "run", "--name", name, "--dram", dram,
                             "--", *command)
        self.daemon.wait_until(lambda: self.tenant_of(program.pid) == (uid, name),
                               f"{name} of user {uid} runs, and is managed")
        return program

    def crowd(self, uid, mode, path, count):
        """What a crowd of that user says when it has acted."""
        # The one that runs this may be in a directory of root's.
        python = next((path for path in (sys.executable, "/usr/bin/python3")
                       if path and not path.startswith("/root") and os.path.exists(path)), None)
        if not python:
            raise Skip("no python3 that other users may execute")
        copy_program(CROWD, self.place)
        script = os.path.join(self.place, os.path.basename(CROWD))
        program = self.start(uid, python, "-B", script, mode, path, str(count))
        line = program.stdout.readline().strip()
        if not line:
            raise Failure(f"the crowd of {uid} ended: {program.stderr.read()[-200:]}")
        return line

    def tenants(self):
        return json.loads(self.daemon.strata("ps", "--json").stdout)

    def tenant_of(self, pid):
        found = [(t["uid"], t["name"]) for t in self.tenants() if pid in t["pids"]]
        if len(found) > 1:
            raise Failure(f"process {pid} is in {found}")
        return found[0] if found else None

    def end(self):
        for program in self.started:
            if program.poll() is None:
                program.kill()
            program.wait()
            for pipe in (program.stdin, program.stdout, program.stderr):
                with contextlib.suppress(OSError):
                    pipe.close()


@contextlib.contextmanager
def system(run, text="", users=LISTED):
    """The system's daemon with such a configuration."""
    place, published = publish(run)
    log = os.path.join(run.log_directory, f"stratad-{run.name}.log")
    mine, run.binaries = run.binaries, published
    run.daemon.binaries = published
    os.chmod(run.directory, 0o755)
    try:
        with configured(run.daemon, users + text, place, log) as pid:
            house = System(run, place, published)
            house.pid, house.log = pid, log
            try:
                yield house
            finally:
                house.end()
                run.daemon.wait_until(lambda: not house.tenants(), "nobody is left")
    finally:
        run.binaries = run.daemon.binaries = mine
        shutil.rmtree(place)


def expect(done, status, *words):
    lines = done.stderr.splitlines()
    if done.returncode != status or not all(word in done.stderr for word in words):
        raise Failure(f"status {done.returncode} and {lines} instead of {status} and {words}")


@case("quota-names", native=False, own_daemon=True)
def names(run):
    """Each user may have a tenant of the same name, and learns nothing of the others'."""
    with system(run) as house:
        programs = [house.start_tenant(uid, "web") for uid in (*USERS, 0)]
        house.start_tenant(USERS[0], "own")
        for uid, program in zip((*USERS, 0), programs):
            listed = json.loads(house.strata(uid, "ps", "--json").stdout)
            owners = {t["uid"] for t in listed}
            if uid and owners != {uid}:
                raise Failure(f"user {uid} sees tenants of {owners}")
            expect(house.strata(uid, "set", "web", "--dram", "32MiB"), 0)
            web = {t["uid"]: t for t in house.tenants() if t["name"] == "web"}
            if web[uid]["budget_bytes"] != 32 * MIB or web[uid]["pids"] != [program.pid]:
                raise Failure(f"user {uid} set another tenant's budget: {web}")
        # The same of one that is not there and of one that is another's.
        texts = {house.strata(USERS[1], *command, name).stderr.replace(name, "X")
                 for command in (("stats",), ("stop",), ("release",))
                 for name in ("own", "nobodys", f"{USERS[0]}:own", f"{STRANGER}:own")}
        if len(texts) != 1:
            raise Failure(f"errors tell of others' tenants: {texts}")
        asked = {name: house.daemon.ask({"request": "stats", "name": name})
                 for name in ("web", "own", f"{USERS[2]}:web", f"{STRANGER}:web")}
        kinds = {name: reply.get("stats", {}).get("uid") for name, reply in asked.items()}
        if kinds != {"web": 0, "own": USERS[0], f"{USERS[2]}:web": USERS[2],
                     f"{STRANGER}:web": None}:
            raise Failure(f"root is understood as {kinds}")
        programs[3].kill()
        programs[3].wait()
        house.daemon.wait_until(lambda: len([t for t in house.tenants() if t["name"] == "web"]) == 3,
                                "root's has ended")
        reply = house.daemon.ask({"request": "stop", "name": "web"})
        if f"{USERS[0]}:web" not in reply.get("message", ""):
            raise Failure(f"root is not asked whose it means: {reply}")
        expect(house.strata(0, "stop", f"{USERS[0]}:web"), 0)
        shown = house.strata(0, "ps").stdout.splitlines()
        if "USER" not in shown[0] or not any(str(USERS[1]) in line for line in shown):
            raise Failure(f"ps does not show owners: {shown}")


RULES = """
[[manage]]
name = "service"
exe = "worker"
dram = "32MiB"
[[manage]]
name = "theirs"
exe = "worker"
user = "60002"
dram = "16MiB"
"""


@case("quota-rules", native=False, own_daemon=True)
def rules(run):
    """A rule's tenant is its user's: whoever else has such a tenant, or starts such a
    program, and may be managed or not, gets nothing of it."""
    with system(run, RULES) as house:
        worker = os.path.join(house.place, "worker")
        copy_program(os.path.realpath("/bin/sleep"), worker)

        def start(uid):
            return house.start(uid, worker, "600", LD_PRELOAD=house.binaries.library,
                               STRATA_AGENT_SOCKET=house.agents)

        # The tenant that root's service would have joined, and that its user commands.
        house.start_tenant(USERS[0], "service")
        strangers = [start(USERS[0]), start(STRANGER)]
        service, other = start(0), start(USERS[1])
        house.daemon.wait_until(lambda: house.tenant_of(service.pid) == (0, "service")
                                and house.tenant_of(other.pid) == (USERS[1], "theirs"),
                                "both are their rules' tenants'")
        if taken := [house.tenant_of(one.pid) for one in strangers if house.tenant_of(one.pid)]:
            raise Failure(f"programs of others are {taken}")
        expect(house.strata(USERS[0], "set", "service", "--dram", "4MiB"), 0)
        expect(house.strata(USERS[0], "stop", "service"), 0)
        house.daemon.wait_until(
            lambda: sorted((t["uid"], t["name"]) for t in house.tenants())
            == [(0, "service"), (USERS[1], "theirs")], "only tenants that somebody is in are there")
        if house.daemon.stats("service")["budget_bytes"] != 32 * MIB or service.poll() is not None:
            raise Failure("root's service was another user's")


@case("quota-token", native=False, own_daemon=True)
def token(run):
    """Who has found out another user's token joins nothing by it."""
    with system(run) as house:
        victim = house.start_tenant(0, "victim")
        words = machine.read(f"/proc/{victim.pid}/environ").split("\0")
        found = dict(word.split("=", 1) for word in words if word.startswith("STRATA_"))
        for uid in (USERS[0], STRANGER):
            thief = house.start(uid, "/bin/sleep", "600", LD_PRELOAD=house.binaries.library,
                                STRATA_AGENT_SOCKET=house.agents, STRATA_TOKEN=found["STRATA_TOKEN"])
            line = thief.stderr.readline()
            if "does not take it into its tenant" not in line:
                raise Failure(f"the thief is told {line!r}")
            if (pids := house.daemon.stats("victim")["pids"]) != [victim.pid]:
                raise Failure(f"the tenant has {pids}")


@case("quota-silent", native=False, own_daemon=True, seconds=90)
def silent(run):
    """Three users with 300 connections each that say nothing, at every door, keep neither
    root nor another user from being managed."""
    with system(run) as house:
        reports = machine.read("/proc/net/unix").splitlines()
        back = [line.split()[-1] for line in reports if "@strata-" in line]
        for uid in (USERS[0], USERS[1], STRANGER):
            house.crowd(uid, "silent", house.agents, 300)
            for door in back[:1]:
                house.crowd(uid, "silent", door, 100)
        for uid in (0, USERS[2], USERS[0]):
            house.start_tenant(uid, "beside")
        if (done := house.strata(0, "run", "--dram", "64MiB", "--", "/bin/true")).returncode:
            raise Failure(f"status {done.returncode}: {done.stderr}")


@case("quota-tenants", native=False, own_daemon=True, seconds=120)
def tenants(run):
    """Users who take all tenants that they get are refused at their quota and told so;
    root has room, all are listed, and all are taken down when they end."""
    with system(run) as house:
        before = machine.descriptors(house.pid)
        for uid in USERS:
            made = json.loads(house.crowd(uid, "tenants", house.daemon.socket_path, 80))
            if made["made"] != 64 or "quota tenants" not in made["refusal"]:
                raise Failure(f"user {uid}: {made}")
        house.start_tenant(0, "root")
        listed = house.tenants()
        if len(listed) != 3 * 64 + 1:
            raise Failure(f"{len(listed)} are listed")
        if longest := [t for t in listed if sum(map(len, t["command"])) > 300]:
            raise Failure(f"whole command lines are listed: {longest[0]['command']}")
        if len(json.loads(house.strata(USERS[0], "ps", "--json").stdout)) != 64:
            raise Failure("a user does not see all of their own")
        # Nobody has attached: no tenant but root's has a thread.
        worker = next(pid for pid in machine.children(house.pid) if machine.read(
            f"/proc/{pid}/comm") == machine.read(f"/proc/{house.pid}/comm"))
        names = [machine.read(f"/proc/{worker}/task/{task}/comm").strip()
                 for task in os.listdir(f"/proc/{worker}/task")]
        if (keepers := sum(name.startswith("keeper-") for name in names)) != 1:
            raise Failure(f"{keepers} keepers for one tenant with a process")
        house.end()
        run.daemon.wait_until(lambda: not house.tenants(), "all are taken down")
        run.daemon.wait_until(
            lambda: machine.descriptors(house.pid)[0].total() <= before[0].total() + 8,
            "the daemon gives back what it was made to hold")


@case("quota-processes", native=False, own_daemon=True)
def processes(run):
    """A user's processes are bounded in all; one more is not run, and says why."""
    with system(run, "[quota]\nprocesses = 3\n") as house:
        for number in range(3):
            house.start_tenant(USERS[0], f"t{number}")
        refused = house.strata(USERS[0], "run", "--dram", "64MiB", "--", "/bin/echo", "ran")
        expect(refused, 125, "quota used up")
        if "ran" in refused.stdout:
            raise Failure("it ran all the same")
        allowed = house.strata(USERS[0], "run", "--allow-unmanaged", "--dram", "64MiB", "--",
                               "/bin/echo", "ran")
        expect(allowed, 0, "quota used up", "running unmanaged")
        if allowed.stdout != "ran\n":
            raise Failure(f"it did not run: {allowed.stdout!r}")
        house.start_tenant(USERS[1], "other")
        if "quota processes" not in machine.read(house.log):
            raise Failure("the log does not name the quota")


@case("quota-log", native=False, own_daemon=True)
def log(run):
    """Thousands of handshakes that fail cost the log some lines, and no control
    characters; other users' lines are still written."""
    with system(run) as house:
        for uid in USERS[:2]:
            house.crowd(uid, "garbage", house.agents, 1500)
        house.start_tenant(USERS[2], "beside")
        text = machine.read(house.log)
        for uid in USERS[:2]:
            lines = [line for line in text.splitlines() if f"user {uid}" in line]
            if not 0 < len(lines) <= 70:
                raise Failure(f"{len(lines)} lines of user {uid}")
        if any(ord(c) < 32 and c != "\n" for c in text):
            raise Failure("control characters in the log")
        if "tenant beside starts" not in text:
            raise Failure("the line of another user is missing")


@case("quota-metrics", native=False, own_daemon=True)
def metrics(run):
    """Clients of the metrics that say nothing delay no collector."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with system(run, f'metrics = "127.0.0.1:{port}"\n') as house:
        house.start_tenant(USERS[0], "web")
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
        with socket.create_connection(("127.0.0.1", port), timeout=30) as collector:
            collector.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            answer = b""
            while piece := collector.recv(1 << 16):
                answer += piece
        for link in silent:
            link.close()
        if b"200 OK" not in answer or f'tenant="web",user="{USERS[0]}"'.encode() not in answer:
            raise Failure(f"the collector gets {answer[:200]}")


REQUIRED = """
[[manage]]
name = "must"
exe = "must"
user = "60004"
required = true
[[manage]]
name = "may"
exe = "may"
user = "60004"
"""


@case("quota-fails-closed", native=False, own_daemon=True)
def fails_closed(run):
    """A program that was promised a budget and cannot be managed does not run, and one
    that was not runs on; either says so."""
    with system(run, REQUIRED) as house:
        setpriv = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups",
                   "/bin/echo", "ran"]
        refused = house.strata(0, "run", "--dram", "64MiB", "--", *setpriv)
        expect(refused, 125, "does not run unmanaged")
        allowed = house.strata(0, "run", "--allow-unmanaged", "--dram", "64MiB", "--", *setpriv)
        expect(allowed, 0, "running unmanaged")
        supervised = house.strata(0, "run", "--supervise", "--dram", "64MiB", "--", *setpriv)
        expect(supervised, 125, "does not run unmanaged")
        if refused.stdout or supervised.stdout or allowed.stdout != "ran\n":
            raise Failure(f"{refused.stdout!r}, {supervised.stdout!r}, {allowed.stdout!r}")
        # What a program starts may run without: it is in the tenant's group.
        child = house.strata(0, "run", "--dram", "64MiB", "--", "/bin/sh", "-c",
                             " ".join(setpriv) + "; true")
        expect(child, 0, "running unmanaged")
        for name, status in (("must", 125), ("may", 0)):
            program = os.path.join(house.place, name)
            copy_program(os.path.realpath("/bin/true"), program)
            started = house.start(STRANGER, program, LD_PRELOAD=house.binaries.library,
                                  STRATA_AGENT_SOCKET=house.agents)
            _, said = started.communicate(timeout=30 * run.daemon.patience)
            if started.returncode != status or "uffd_users" not in said:
                raise Failure(f"{name}: status {started.returncode}, {said!r}")


@case("quota-take-down", native=False, own_daemon=True, soak=True, seconds=300)
def take_down(run):
    """Measures how long it takes to take many tenants down."""
    count, of_user = 1000, 900  # the last slots are root's
    with system(run, f"[quota]\ntenants = {count}\nprocesses = {2 * count}\n") as house:
        programs = []
        while len(programs) < count:
            # No more at once than may ask at once.
            uid = USERS[0] if len(programs) < of_user else 0
            programs += [house.start(uid, house.binaries.strata, "run", "--dram", "64MiB",
                                     "--", "/bin/sleep", "600")
                         for _ in range(min(6, count - len(programs)))]
            run.daemon.wait_until(
                lambda: all(machine.read(f"/proc/{one.pid}/comm") == "sleep\n"
                            for one in programs), "all have started", 60)
        run.daemon.wait_until(
            lambda: sum(bool(t["pids"]) for t in house.tenants()) == count, "all are managed", 120)
        worker = next(pid for pid in machine.children(house.pid) if machine.read(
            f"/proc/{pid}/comm") == machine.read(f"/proc/{house.pid}/comm"))
        size = machine.field_kib(f"/proc/{worker}/status", "VmSize") // 1024
        threads = machine.field_kib(f"/proc/{worker}/status", "Threads")
        for program in programs:
            program.kill()
        for program in programs:
            program.wait()
        began = time.monotonic()
        run.daemon.wait_until(
            lambda: machine.field_kib(f"/proc/{worker}/status", "Threads") < threads - count + 2,
            "all are taken down", 120)
        run.note(f"{count} tenants, {threads} threads, {size} MiB of address space; taken down in "
                 f"{time.monotonic() - began:.1f} s")
