"""What a program could notice of its agent, and does not; and what cannot have an
agent and runs all the same, with a line that says so."""

import os
import shutil
import subprocess
import sys

from strata import Failure, Skip
from suite import case

NOBODY = 65534

HELLO = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int main(void) {
    char *memory = malloc(1 << 20);
    memset(memory, 7, 1 << 20);
    printf("hello %d\\n", memory[12345]);
    free(memory);
    return 0;
}
"""

FORKS = f"""
import os
os.setgroups([])
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
for _ in range(3):
    child = os.fork()
    if child == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print("forked")
"""


def within(run, name, *command, status=0, options=()):
    """Runs a command as a tenant far below its budget; what it wrote to standard
    output and error."""
    done = run.daemon.strata("run", *options, "--name", name, "--dram", "256MiB", "--", *command,
                             check=False)
    if done.returncode != status:
        raise Failure(f"{' '.join(command)}: status {done.returncode}: {done.stderr.strip()}")
    return done.stdout, done.stderr


def needed(program):
    path = shutil.which(program)
    if path is None:
        raise Skip(f"no {program} here (scripts/setup.sh test)")
    return path


def compiled(run, name, compiler, *options):
    """A small program that prints one line."""
    source = os.path.join(run.directory, f"{name}.c")
    program = os.path.join(run.directory, name)
    with open(source, "w", encoding="ascii") as file:
        file.write(HELLO)
    done = subprocess.run([needed(compiler), *options, "-o", program, source],
                          capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Skip(f"{compiler} {' '.join(options)} cannot build it: {done.stderr.splitlines()[-1]}")
    return program


def said(text, *words):
    lines = [line for line in text.splitlines() if line.startswith("strata:")]
    if len(lines) != 1 or not all(word in lines[0] for word in words):
        raise Failure(f"not one line with {words}: {lines}")


@case("unseen-rights", native=False)
def unseen_rights(run):
    """A program with one thread may change its user with rights kept, join a mount
    namespace, and fork as somebody else: its agent is no thread of its own."""
    within(run, "identity", run.built("identity"))
    within(run, "setpriv", needed("setpriv"), f"--reuid={NOBODY}", f"--regid={NOBODY}",
           "--clear-groups", "true", options=["--allow-unmanaged"])
    within(run, "nsenter", needed("nsenter"), "-t", str(os.getpid()), "-m", "true")
    out, err = within(run, "forks", sys.executable, "-c", FORKS)
    if out != "forked\n" or "strata:" in err:
        raise Failure(f"a fork as somebody else: {out!r}, {err!r}")


JAIL = f"""
import os, sys
data = [b"%d" % number * 1000 for number in range(11000)]
os.chroot(sys.argv[1])
os.chdir("/")
os.setgroups([])
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
child = os.fork()
if child == 0:
    right = all(line == b"%d" % number * 1000 for number, line in enumerate(data))
    print(os.getpid() if right else "wrong", flush=True)
    os.read(0, 1)
    os._exit(7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 7)
"""


def agents(pid):
    """What the agents of a process hold, one list of kinds each."""
    found = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        where = f"/proc/{pid}/task/{thread}"
        with open(f"{where}/comm", encoding="ascii") as name:
            if name.read().strip() != "strata-agent":
                continue
        kinds = [os.readlink(f"{where}/fd/{fd}").strip("[]").split(":")[0]
                 for fd in os.listdir(f"{where}/fd")]
        found.append(sorted(kinds))
    return found


@case("unseen-child-elsewhere", native=False)
def unseen_child_elsewhere(run):
    """The child of a program that has left the daemon's root directory and is
    nobody now has an agent that the daemon knows."""
    empty = os.path.join(run.directory, "empty")
    os.mkdir(empty)
    program = subprocess.Popen(
        [run.binaries.strata, "run", "--name", "jail", "--dram", "40MiB", "--", sys.executable,
         "-c", JAIL, empty],
        env=run.daemon.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )
    try:
        said_pid = program.stdout.readline().strip()
        if not said_pid.isdigit():
            raise Failure(f"its child said {said_pid!r}: {program.stderr.read()}")
        pid = int(said_pid)
        run.daemon.wait_until(lambda: agents(pid) == [["anon_inode", "socket"]],
                              "the child's agent has been answered", 10)
        for process in (pid, program.pid):
            users = {open(f"/proc/{process}/task/{thread}/status", encoding="ascii").read()
                     .split("Uid:")[1].split("\n")[0].strip()
                     for thread in os.listdir(f"/proc/{process}/task")}
            if users != {"\t".join([str(NOBODY)] * 4)}:
                raise Failure(f"threads of {process} are the users {users}")
        if not run.daemon.stats("jail")["evictions_total"]:
            raise Failure("nothing was evicted: it tested nothing")
    finally:
        _, errors = program.communicate("\n", timeout=30)
    if program.returncode != 0 or errors:
        raise Failure(f"it ended with {program.returncode}: {errors}")


@case("unseen-other-library", native=False)
def unseen_other_library(run):
    """A child with another C library runs, and says that it is not managed."""
    program = compiled(run, "with-musl", "musl-gcc")
    out, err = within(run, "musl", "/bin/sh", "-c", f"{program}; exit $?")
    if out != "hello 7\n":
        raise Failure(f"the program with musl wrote {out!r}")
    said(err, "not glibc", "unmanaged")


@case("unseen-valgrind", native=False)
def unseen_valgrind(run):
    """So does a program under Valgrind, if it may; else it does not run."""
    program = compiled(run, "valgrinded", "cc")
    command = (needed("valgrind"), "-q", "--error-exitcode=3", program)
    out, err = within(run, "refused", *command, status=125)
    said(err, "Valgrind", "does not run unmanaged")
    if out:
        raise Failure(f"the program that does not run wrote {out!r}")
    out, err = within(run, "valgrind", *command, options=["--allow-unmanaged"])
    if out != "hello 7\n":
        raise Failure(f"the program under Valgrind wrote {out!r}")
    said(err, "Valgrind", "unmanaged")


@case("unseen-sanitizers", native=False)
def unseen_sanitizers(run):
    """Sanitized programs are managed as any other."""
    for kind in ("address", "thread"):
        program = compiled(run, kind, "cc", f"-fsanitize={kind}")
        out, err = within(run, kind, program)
        if out != "hello 7\n" or err:
            raise Failure(f"-fsanitize={kind}: {out!r}, {err!r}")
