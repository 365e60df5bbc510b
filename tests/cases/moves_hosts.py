"""Programs that move to another daemon, which stands for another host: they go on there from
where they were, once, with all of their memory, whoever dies meanwhile."""

import contextlib
import copy
import os
import re
import shutil
import signal
import subprocess

from guest_disks import begun, ended, files
from guest_snapshots import monitor, reborn, worker_gone
from moment import Moment, need_criu
from strata import Daemon, Failure, configured
from suite import case
from users import as_nobody, publish


@contextlib.contextmanager
def another(run):
    """A second host."""
    daemon = Daemon(run.daemon.binaries, os.path.join(run.log_directory, "stratad-there.log"))
    daemon.patience = run.daemon.patience
    try:
        yield daemon
    finally:
        daemon.end()


def host(daemon):
    return getattr(daemon, "road", f"unix:{daemon.socket_path}")


def move(daemon, name, there, check=True, settle=False, options=None):
    if options is None:
        options = ["--settle"] if settle else getattr(there, "options", [])
    return daemon.strata("move", *options, name, host(there), check=check, timeout_s=120)


def runs_at(daemon, name):
    """Its processes there that run: neither stopped nor ending."""
    stats = daemon.stats(name) or {"pids": []}
    return [pid for pid in stats["pids"] if state(pid) not in ("T", "t", "Z", "X", "")]


def state(pid):
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0]
    return ""


def went_over(run, program, here, there):
    """It runs there, and nowhere else."""
    here.wait_until(lambda: not runs_at(here, program.name), "it does not run here any more")
    program.daemon = there
    program.note_pids()
    program.goes_on()
    program.check()


@case("move-program", native=False, own_daemon=True)
def program(run):
    """A program moves there, under pressure, and back: each time it goes on from its round,
    with all of its memory."""
    need_criu()
    with another(run) as there:
        program = Moment(run, "plain", 24, "12MiB")
        program.pressed()
        for here, other in ((run.daemon, there), (there, run.daemon)):
            before = program.count
            program.report()
            with program.reaper_running():
                done = move(here, program.name, other)
            if not re.search(r"stood still for [0-9.]+ ms \(of it [0-9.]+ to stop it, .* until it "
                             r"ran\), .* were sent for .* of memory", done.stdout):
                raise Failure(f"it says {done.stdout!r}")
            run.note(done.stdout.strip())
            went_over(run, program, here, other)
            if program.count < before:
                raise Failure(f"from round {before} it went back to {program.count}")
            program.report()
            left = other.strata("snapshots", program.name, "--json").stdout.strip()
            if left != "[]":
                raise Failure(f"snapshots are left there: {left}")
        program.assert_clean()
        program.kill()


def at(run, daemon):
    """The same run, of which another daemon is asked."""
    other = copy.copy(run)
    other.daemon = daemon
    return other


def held(run, name, here, there, step):
    """Moves; that side stays in that step. The command, and what lets it go on."""
    path = os.path.join(there.directory, "test-step")
    with open(path, "w", encoding="ascii") as file:
        file.write(f"{step} wait")
    moving = subprocess.Popen([here.binaries.strata, "move", name, host(there)],
                              env=here.environment(), text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    reached = path + ".reached"
    run.daemon.wait_until(lambda: os.path.exists(reached), f"it comes to {step}")
    return moving, lambda: os.remove(reached)


def silent(run, line, here, there):
    """The QEMU there does not answer when it is told to run. It may have run, so it never runs
    here again, and this side stands still until it is known there that it runs."""
    moving, goes_on = held(run, line.name, here, there, "let-run")
    (pid,) = there.stats(line.name)["pids"]
    os.kill(pid, signal.SIGSTOP)
    goes_on()
    try:
        said = moving.communicate(timeout=120 * run.patience)
        if moving.returncode != 1 or "--settle" not in said[1]:
            raise Failure(f"status {moving.returncode}, {said}")
        (answer,) = monitor(at(run, here), line.name, {"execute": "query-status"})
        noted = here.strata("ps").stdout
        if answer["return"]["running"] or "--settle" not in noted:
            raise Failure(f"it does not stand still here: {answer}, {noted!r}, {said}")
    finally:
        os.kill(pid, signal.SIGCONT)
    done = move(here, line.name, there, settle=True)
    if "runs at" not in done.stdout:
        raise Failure(f"settled: {done.stdout!r}, {done.stderr!r}")


@case("move-guest", native=False, own_daemon=True, computes=True, seconds=200, takes=70)
def guest(run):
    """A guest that writes to two disks, which both hosts see, moves there and back, where its
    QEMU does not answer at first."""
    with another(run) as there:
        guest = begun(run)
        before = guest.rounds(2)
        try:
            done = move(run.daemon, guest.name, there)
            run.note(done.stdout.strip())
            line = reborn(at(run, there), guest.name)
            came = line.rounds(1)
            if not before <= came:
                raise Failure(f"it went back from round {before} to {came}")
            line.rounds(3)
            run.daemon.wait_until(lambda: not runs_at(run.daemon, guest.name), "it has ended here")
            left = files(guest)
            if left != ["a.raw", "b.qcow2", "base.qcow2"]:
                raise Failure(f"beside its disks there are {left}")
            silent(run, line, there, run.daemon)
            line.line.close()
            line = reborn(run, guest.name)
            if came > (back := line.rounds(1)):
                raise Failure(f"it went back from round {came} to {back}")
            line.rounds(2)
            line.end()
        finally:
            ended(run, guest)
            there.strata("stop", guest.name, check=False)


def guest_over(run, line, here, there, is_said):
    """Moves a guest, and looks at what that says, and whether it goes on from where it was."""
    before = line.rounds(1)
    done = move(here, line.name, there)
    run.note(done.stdout.strip())
    if not is_said(done):
        raise Failure(f"it says {done.stdout!r} and {done.stderr!r}")
    line.line.close()
    line = reborn(at(run, there), line.name)
    if before > (came := line.rounds(1)):
        raise Failure(f"it went back from round {before} to {came}")
    line.rounds(3)
    here.wait_until(lambda: not runs_at(here, line.name), "it has ended here")
    return line


# Each step, on which side it is, and where the tenant runs when a worker has died in it.
STEPS = (
    ("here", "welcome", "here"), ("here", "sent", "here"), ("here", "taken", "here"),
    ("here", "still", "here"), ("here", "all-sent", "here"), ("here", "ready", "here"),
    ("here", "giving", "here"), ("here", "given", "here"), ("here", "answered", "there"),
    ("there", "arrived", "here"), ("there", "stands", "here"), ("there", "told", "here"),
    ("there", "committed", "there"), ("there", "ran", "there"),
)


def on(side, steps):
    return [step for step in steps if step[0] == side]


def for_each_side(name, body):
    """A case for the steps of one host, and one for the other's."""
    for side in ("here", "there"):
        case(f"{name}-{side}", native=False, own_daemon=True, computes=True, seconds=600,
             takes=40)(lambda run, side=side: body(run, side))


def dying(run, name, here, there, side, step, victim):
    """Moves; in that step of that side its worker dies, or the command that carries it."""
    daemon = {"here": here, "there": there}[side]
    worker = daemon.worker()
    path = os.path.join(daemon.directory, "test-step")
    # It has its number before the step is said.
    moving = subprocess.Popen(["sh", "-c", 'read _ && exec "$@"', "sh", daemon.binaries.strata,
                               "move", *getattr(there, "options", []), name, host(there)],
                              env=here.environment(), stdin=subprocess.PIPE, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with open(path + ".part", "w", encoding="ascii") as file:
        file.write(f"{step} {moving.pid if victim == 'command' else ''}")
    os.rename(path + ".part", path)
    said = moving.communicate("go\n", timeout=120 * run.patience)
    if os.path.exists(path):
        os.remove(path)
        raise Failure(f"there is no step {step} {side}: {said}")
    if victim == "worker":
        worker_gone(at(run, daemon), worker)
    elif moving.returncode != -signal.SIGKILL:
        raise Failure(f"the command did not die in {step}: {moving.returncode}, {said}")
    return moving.returncode, said


def only_at(run, name, place, other, when):
    """It runs at one place, and has no process at the other."""
    def is_so():
        return runs_at(place, name) and not (other.stats(name) or {"pids": []})["pids"]
    try:
        run.daemon.wait_until(is_so, "it runs at one place")
    except Failure:
        raise Failure(f"{when}: it runs at the one with {runs_at(place, name)}, at the other with "
                      f"{runs_at(other, name)}, {other.stats(name)}") from None


def killed_in_steps(run, name, here, there, goes_on, steps=STEPS, commands=None):
    """Whoever dies, in whatever step: it runs at one side, its memory whole. `commands`: the
    steps in which the command dies; none: in all."""
    for victim in ("worker", "command"):
        for side, step, expected in steps:
            if victim == "command" and commands and step not in commands:
                continue
            when = f"{victim} killed, {step} {side}"
            if victim == "command" and step == "told":
                expected = "there"  # the word has come, whoever carried it
            status, said = dying(run, name, here, there, side, step, victim)
            if victim == "command":
                settled = move(here, name, there, check=False, settle=True)
                said = (*said, settled.stdout, settled.stderr)
            runs, other = (here, there) if expected == "here" else (there, here)
            try:
                only_at(run, name, runs, other, when)
            except Failure as failure:
                raise Failure(f"{failure}; {status}, {said}") from None
            if victim == "worker" and (status == 0) != (expected == "there"):
                raise Failure(f"{when}: status {status}, {said}")
            goes_on(runs, other, when)
            if expected == "there":
                here, there = there, here
    return here


@case("move-program-killed", native=False, own_daemon=True, seconds=300, takes=60)
def program_killed(run):
    """A worker here, a worker there, or the command dies in each step of a program's move."""
    need_criu()
    with another(run) as there:
        program = Moment(run, "plain", 16, "10MiB")
        program.pressed()

        def goes_on(daemon, _, when):
            program.daemon = daemon
            program.note_pids()
            try:
                program.goes_on()
                program.check()
            except Failure as failure:
                raise Failure(f"{when}: {failure}") from None
        before = run.daemon.stats(program.name)["managed_pages"]
        with program.reaper_running():
            killed_in_steps(run, program.name, run.daemon, there, goes_on)
        for daemon in (run.daemon, there):
            left = daemon.strata("snapshots", "--json").stdout.strip()
            after = (daemon.stats(program.name) or {"managed_pages": 0})["managed_pages"]
            if after > 2 * before or left != "[]":
                raise Failure(f"{before} pages were managed, and {after} are; snapshots: {left}")
        program.assert_clean()
        program.kill()


# Programs that a worker was about to let run end with it.
GUEST_STEPS = (*STEPS, ("there", "let-run", "there"))


def killed_guest_in_steps(run, first, there, steps, also, commands=None):
    """The same with a guest; `also` looks at what else is left where it runs and where it does
    not."""
    place, line = run.daemon, first

    def goes_on(daemon, other, when):
        nonlocal place, line
        if daemon is not place:
            line.line.close()
            place, line = daemon, reborn(at(run, daemon), first.name)

        def runs():
            (answer,) = monitor(at(run, daemon), first.name, {"execute": "query-status"})
            return answer["return"]["status"] == "running"
        try:
            line.wait_until(runs, "its QEMU says that it runs")
            line.said = ""
            line.rounds(2)
        except Failure as failure:
            raise Failure(f"{when}: {failure}") from None
        also(daemon, other, when)
    killed_in_steps(run, first.name, run.daemon, there, goes_on, steps, commands)


def guest_killed(run, side):
    """The same with a guest, whose disks both hosts see. The command dies in each step only in
    the soak: that is a cut connection, as in the program's."""
    with another(run) as there:
        first = begun(run)

        def also(*_):
            if (left := files(first)) != ["a.raw", "b.qcow2", "base.qcow2"]:
                raise Failure(f"beside its disks there are {left}")
        try:
            killed_guest_in_steps(run, first, there, on(side, GUEST_STEPS), also,
                                  None if run.soak else ("given", "told", "committed"))
        finally:
            ended(run, first)
            there.strata("stop", first.name, check=False)


for_each_side("move-guest-killed", guest_killed)


@case("move-refused", native=False, own_daemon=True, seconds=120, takes=15)
def refused(run):
    """To nobody, to itself, of nobody, by somebody else, or where there is one already: a plain
    line, and it runs on here."""
    need_criu()

    def fails(done, *words):
        lines = done.stderr.splitlines()
        if done.returncode != 1 or not all(word in lines[-1] for word in words):
            raise Failure(f"not refused with {words}: status {done.returncode}, {lines}")
    with another(run) as there:
        program = Moment(run, "plain", 8, "32MiB", name="mover")
        name = program.name
        same = Moment(run, "plain", 8, "32MiB", name="other")
        fails(move(run.daemon, "nobody", there, check=False), "no tenant is named nobody")
        fails(run.daemon.strata("move", name, "unix:/nowhere", check=False), "nobody takes it in",
              "it runs on here")
        fails(run.daemon.strata("move", name, "--", "-oProxyCommand=x", check=False),
              "no host")
        fails(run.daemon.strata("move", name, "", check=False), "no host")
        fails(move(run.daemon, name, run.daemon, check=False), "it is here already",
              "it runs on here")
        fails(move(run.daemon, name, there, check=False, settle=True), "was not given up")
        program.goes_on()
        with program.reaper_running():
            move(run.daemon, name, there)
        went_over(run, program, run.daemon, there)
        done = move(run.daemon, name, there, check=False)
        if done.returncode != 1 or "runs on here" in done.stderr:
            raise Failure(f"what has gone is moved again: {done.returncode}, {done.stderr}")
        again = Moment(run, "plain", 8, "32MiB", name="mover")
        fails(move(run.daemon, name, there, check=False), "there is a tenant mover already",
              "it runs on here")
        again.goes_on()
        program.goes_on()
        # What is not settled is said, and nothing else is done with it.
        gone_over(run, same, there)
        for one in (program, again):
            one.kill()


def gone_over(run, program, there):
    """The command dies when it was given up."""
    status, said = dying(run, program.name, run.daemon, there, "here", "given", "command")
    noted = run.daemon.strata("ps").stdout
    if "strata move --settle" not in noted or runs_at(run.daemon, program.name):
        raise Failure(f"{status}, {said}: strata ps says {noted!r}")
    for command in (("snapshot", program.name), ("move", program.name, host(there))):
        done = run.daemon.strata(*command, check=False, timeout_s=60)
        if command[0] == "snapshot" and (done.returncode != 1 or "it was given to" not in
                                         done.stderr):
            raise Failure(f"{command}: {done.returncode}, {done.stderr}")
    # It was asked about by that, and runs on here.
    program.goes_on()
    program.check()
    # It is ended instead: another one of its name has nothing to do with that.
    dying(run, program.name, run.daemon, there, "here", "given", "command")
    with program.reaper_running():
        program.note_pids()
        run.daemon.strata("stop", program.name, timeout_s=60)
    another_one = Moment(run, "plain", 8, "32MiB", name=program.name)
    another_one.take()
    done = move(run.daemon, program.name, there, check=False, settle=True)
    if done.returncode != 1 or "it has ended here" not in done.stderr:
        raise Failure(f"settled: {done.returncode}, {done.stdout!r}, {done.stderr!r}")
    another_one.goes_on()
    another_one.kill()


@case("move-of-others", native=False, own_daemon=True)
def of_others(run):
    """Another user neither moves what is root's nor has root's daemon take anything in."""
    place, published = publish(run)
    home = os.path.join(run.directory, "home")
    os.chmod(run.directory, 0o755)
    os.mkdir(home)
    try:
        with configured(run.daemon, f'snapshot_dir = "{home}/kept"\n', home,
                        os.path.join(run.log_directory, "stratad-home.log")):
            program = Moment(run, "plain", 8, "32MiB", name="mover")
            where = f"unix:{run.daemon.socket_path}"
            for words in (("move", "mover", where), ("move", "--settle", "mover", where)):
                status, lines = as_nobody(run, published.strata, *words,
                                          STRATA_SOCKET=run.daemon.socket_path)
                if status != 1 or not any(why in lines[-1] for why in (
                        "no tenant is named mover", "you have no tenants", "for user 0 alone")):
                    raise Failure(f"another user: {words}: {status}, {lines}")
            taken = receive_as_nobody(run, published)
            if b"for user 0 alone" not in taken:
                raise Failure(f"another user has it taken in: {taken!r}")
            program.goes_on()
            program.kill()
    finally:
        shutil.rmtree(place)


def receive_as_nobody(run, published):
    """What `strata receive` says on its standard output."""
    done = subprocess.run([published.strata, "receive"], user=65534, group=65534, extra_groups=[],
                          cwd="/", env={"PATH": os.environ["PATH"],
                                        "STRATA_SOCKET": run.daemon.socket_path},
                          stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    return done.stdout


@case("move-by-ssh", native=False, own_daemon=True)
def by_ssh(run):
    """What ssh is asked for: the host as it was typed, and strata receive there, to which the
    bytes go. Another program stands for it here."""
    need_criu()
    with another(run) as there:
        program = Moment(run, "plain", 8, "32MiB")
        place = os.path.join(run.directory, "bin")
        os.mkdir(place)
        with open(os.path.join(place, "ssh"), "w", encoding="ascii") as file:
            file.write("#!/bin/sh\n"
                       f'printf "%s\\n" "$@" >{place}/asked\n'
                       'while [ "$1" != -- ]; do shift; done\n'
                       f"STRATA_SOCKET={there.socket_path} PATH={run.binaries.directory}:$PATH\n"
                       'export STRATA_SOCKET PATH\nexec sh -c "$3"\n')
        os.chmod(os.path.join(place, "ssh"), 0o755)
        with program.reaper_running():
            run.daemon.strata("move", program.name, "me@other", timeout_s=60,
                              PATH=f"{place}:{os.environ['PATH']}")
        with open(os.path.join(place, "asked"), encoding="ascii") as file:
            asked = file.read().splitlines()
        if asked[-3:] != ["--", "me@other", "strata receive"] or "-T" not in asked:
            raise Failure(f"ssh was asked for {asked}")
        went_over(run, program, run.daemon, there)
        program.kill()


@case("move-daemon-killed", native=False, own_daemon=True)
def daemon_killed(run):
    """The daemon dies whole, supervisor and worker, while a program stands still that it has
    given up: the next one leaves it so, says so, and has it run on when it is settled."""
    need_criu()
    with another(run) as there:
        program = Moment(run, "plain", 8, "32MiB")
        dying(run, program.name, run.daemon, there, "here", "given", "command")
        run.daemon.kill_whole()
        run.daemon.begin_again()
        noted = run.daemon.strata("ps").stdout
        if "strata move --settle" not in noted or runs_at(run.daemon, program.name):
            raise Failure(f"it is not said that it stands still: {noted!r}")
        done = move(run.daemon, program.name, there, check=False, settle=True)
        if done.returncode != 1 or "it runs on here" not in done.stderr:
            raise Failure(f"settled: {done.returncode}, {done.stderr!r}")
        program.goes_on()
        program.check()
        program.kill()
