"""Bad input on the command line: exit status 2 for usage, 1 for failure, one
line on stderr, nothing started."""

import os
import stat
import subprocess

from program import copy_program
from strata import Failure, Skip
from suite import case


def refused(run, status, *arguments):
    # The tenant of the case before may not have gone yet.
    run.daemon.wait_until(lambda: not run.daemon.tenants(), "no tenant is left over")
    done = run.daemon.strata(*arguments, check=False)
    shown = "strata " + " ".join(repr(a) if a.strip() != a or not a else a for a in arguments)
    lines = done.stderr.splitlines()
    if done.returncode != status:
        raise Failure(f"{shown[:120]}: status {done.returncode} instead of {status}: "
                      f"{done.stderr.strip()[:200]}")
    if len(lines) != 1 or not lines[0].startswith("strata: "):
        raise Failure(f"{shown[:120]}: not one line 'strata: …' but {lines}")
    if done.stdout:
        raise Failure(f"{shown[:120]}: wrote to stdout: {done.stdout[:100]}")
    if run.daemon.tenants():
        raise Failure(f"{shown[:120]}: a tenant is left: {run.daemon.tenants()}")


@case("refuse-sizes", native=False)
def refuse_sizes(run):
    for size in ("-5GiB", "-1", "512", "4Gibi", "", "GiB", "1e9GiB", "0GiB", "nan", "4 4GiB",
                 "99999999999999999999GiB"):
        refused(run, 2, "run", f"--dram={size}", "--", "/bin/true")
        refused(run, 2, "set", "keeper", f"--dram={size}")
    # A size that could be, but not here.
    for size in ("900TiB", "64TiB"):
        refused(run, 1, "run", "--dram", size, "--", "/bin/true")
        refused(run, 1, "set", "keeper", "--dram", size)


@case("refuse-usage", native=False)
def refuse_usage(run):
    if run.daemon.strata(check=False).returncode != 2:
        raise Failure("strata without arguments: not status 2")
    for arguments in (("frobnicate",), ("run",), ("run", "--"), ("run", "--dram"),
                      ("run", "--nonsense", "--", "/bin/true"), ("stats",), ("set", "keeper"),
                      ("stop",), ("release",), ("stats", "a", "b")):
        refused(run, 2, *arguments)


@case("refuse-unknown-tenants", native=False)
def refuse_unknown(run):
    for command in (("stats",), ("stats", "--json"), ("release",), ("stop",)):
        refused(run, 1, *command, "nobody")
    refused(run, 1, "set", "nobody", "--dram", "64MiB")


@case("refuse-names", native=False)
def refuse_names(run):
    for name in ("", "../x", "a/b", "a\nb", "x" * 300, " ", "keeper"):
        done = run.daemon.strata("run", f"--name={name}", "--dram", "64MiB", "--", "/bin/true",
                                 check=False)
        if done.returncode not in (1, 2) or len(done.stderr.splitlines()) != 1:
            raise Failure(f"name {name[:20]!r}: status {done.returncode}, {done.stderr[:200]!r}")


@case("refuse-programs", native=False)
def refuse_programs(run):
    """What cannot be started, and what the library cannot enter."""
    def path(name):
        return os.path.join(run.directory, name)
    with open(path("empty"), "w"):
        pass
    os.chmod(path("empty"), 0o755)
    with open(path("text"), "w") as file:
        file.write("no program\n")
    with open(path("lost-script"), "w") as file:
        file.write("#!/nonexistent/interpreter\n")
    os.chmod(path("lost-script"), 0o755)
    for program in ("/nonexistent/program", "no-such-program-in-path", run.directory, path("text"),
                    path("lost-script")):
        refused(run, 1, "run", "--dram", "64MiB", "--", program)

    # (Root's own setuid programs run with the same ids and can be entered.)
    copy_program("/bin/true", path("setuid"))
    os.chown(path("setuid"), 65534, 65534)
    os.chmod(path("setuid"), 0o755 | stat.S_ISUID)
    refused(run, 1, "run", "--dram", "64MiB", "--", path("setuid"))

    with open(path("static.c"), "w") as file:
        file.write("int main(void) { return 3; }\n")
    built = subprocess.run(["cc", "-static", path("static.c"), "-o", path("static")],
                           capture_output=True, check=False)
    if built.returncode:
        raise Skip("no static C library; the rest passed")
    refused(run, 1, "run", "--dram", "64MiB", "--", path("static"))
    with open(path("script"), "w") as file:
        file.write(f"#!{path('static')}\n")
    os.chmod(path("script"), 0o755)
    refused(run, 1, "run", "--dram", "64MiB", "--", path("script"))
    # If the user insists it runs, with a warning.
    done = run.daemon.strata("run", "--allow-unmanaged", "--dram", "64MiB", "--", path("static"),
                             check=False)
    if done.returncode != 3 or len(done.stderr.splitlines()) != 1:
        raise Failure(f"--allow-unmanaged: status {done.returncode}, {done.stderr!r}")


@case("refuse-daemon", native=False)
def refuse_daemon(run):
    """What stratad itself is told, typed or in its configuration: one line, and
    the daemon that runs goes on."""
    configuration = os.path.join(run.directory, "stratad.toml")
    busy = os.path.dirname(run.daemon.socket_path)
    for status, text, words in (
            (1, 'tier_pth = "/tmp"', ("stratad.toml:1", "did you mean tier_path?")),
            (1, 'tier_path = "/proc/nowhere"', ("cannot write to /proc/nowhere",)),
            (1, 'tier_path = "/var/tmp"\ntier_limit = "900000TiB"',
             (":2: tier_limit", "more than the file system at /var/tmp has")),
            (1, 'default_dram = "-5GiB"', ("default_dram", "is not a size")),
            (1, 'default_dram = "900TiB"', ("more than this machine has",)),
            (1, 'uffd_users = ["no such user"]', ("there is no user",)),
            (1, "[[[", ("mend the TOML syntax",)),
            (1, 'socket_dir = "/proc/nowhere"', ("cannot make /proc/nowhere", "socket_dir")),
            (1, f'socket_dir = "{busy}"', ("in use by another stratad", "stop that one")),
            (2, None, ("usage: unrecognized subcommand 'frobnicate'",))):
        arguments = ["frobnicate"]
        if text is not None:
            with open(configuration, "w") as file:
                file.write(text + "\n")
            arguments = ["--config", configuration]
        done = subprocess.run([run.binaries.stratad, *arguments], stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=30, check=False)
        lines = done.stderr.splitlines()
        if done.returncode != status or len(lines) != 1 or not lines[0].startswith("stratad: ") \
                or not all(word in lines[0] for word in words):
            raise Failure(f"{text or arguments}: status {done.returncode}, {lines}")


@case("refuse-to-be-read", native=False)
def refuse_to_be_read(run):
    """A reader that has seen enough is no failure; a full disk is one."""
    for arguments in (("ps",), ("stats", "keeper"), ("doctor",), ("config", "check")):
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as closed, open("/dev/full", "w") as full:
            for out, expected in ((closed, 0), (full, 1)):
                done = subprocess.run(
                    [run.binaries.strata, *arguments], env=run.daemon.environment(), stdout=out,
                    stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=30,
                    check=False)
                if done.returncode != expected or len(done.stderr.splitlines()) != expected:
                    raise Failure(f"{' '.join(arguments)} into {out.name}: status "
                                  f"{done.returncode}, {done.stderr!r}")
