"""The file tier: cold pages go to a file and come back right, also across the
worker's death."""

import json
import os
import signal
import subprocess
import tempfile

import machine
from strata import Failure, configured, worker_of
from suite import case


def check_tiers(run, name, accesses, size_bytes):
    """`strata tiers` says what is where and what moves."""
    told = json.loads(run.daemon.strata("tiers", name, "--json", "--interval", "0.5").stdout)
    tiers = {tier["tier"]: tier for tier in told[0]["tiers"]}
    if list(tiers) != ["dram", "compressed", "file"]:
        raise Failure(f"tiers are {list(tiers)}")
    file = tiers["file"]
    if file["access"] not in accesses or file["size_bytes"] != size_bytes:
        raise Failure(f"the file tier is {file}")
    if not (file["pages"] and file["p50_us"] and file["pages_in_total"]
            and file["pages_out_per_second"]):
        raise Failure(f"nothing in the file tier, or nothing comes back: {file}")
    text = run.daemon.strata("tiers").stdout
    if not any(line.split()[:2] == [name, "file"] for line in text.splitlines()):
        raise Failure(f"strata tiers does not show it: {text}")


def one_daemon_at_a_time(run, tier):
    """A second daemon is told whose the directory is; the first goes on."""
    sockets = os.path.join(run.directory, "second")
    configuration = os.path.join(run.directory, "second.toml")
    with open(configuration, "w") as file:
        file.write(f'socket_dir = "{sockets}"\ntier_path = "{tier}"\n')
    done = subprocess.run([run.binaries.stratad, "--config", configuration], text=True,
                          stdin=subprocess.DEVNULL, capture_output=True,
                          timeout=30 * run.patience, check=False)
    lines = done.stderr.splitlines()
    if done.returncode != 1 or len(lines) != 1 \
            or "another stratad (pid " not in lines[0] or "another directory" not in lines[0]:
        raise Failure(f"a second daemon on the tier's directory: {done.returncode}, {lines}")


def say(log, tier, words):
    """The daemon's log says what the tier lies on."""
    said = machine.read(log)
    if f"file tier in {tier}, {words}" not in said:
        raise Failure(f"the log does not say what the tier lies on: {said}")


def next_worker_reads(run, daemon, program):
    """The worker dies, and the one after it reads from the file."""
    before = program.stats()["file_faults_total"]
    os.kill(worker_of(daemon), signal.SIGKILL)

    def goes_on():
        stats = run.daemon.stats(program.name)
        return stats and stats["worker_restarts_total"] == 1 \
            and stats["file_faults_total"] > before + 100
    run.daemon.wait_until(goes_on, "the next worker reads from the file", 60)


def through_the_file(run, daemon, tier, megabytes, budget, accesses, size_bytes):
    """A program far over its budget, whose pages go to the file and come back
    right, also across the worker's death. Half of the budget cannot hold what it
    compresses to: a fifth or better."""
    program = run.start("hold", megabytes, "load", budget=budget)
    program.gate("running")

    def read_from_file():
        stats = program.stats()
        return stats["file_bytes"] > 1 << 20 and stats["file_faults_total"] > 100
    run.daemon.wait_until(read_from_file, "pages went to the file and came back", 60)
    if os.listdir(tier) != ["strata-tier"]:
        raise Failure(f"the tier's files have names: {os.listdir(tier)}")
    next_worker_reads(run, daemon, program)
    run.note(f"{program.stats()['file_bytes'] >> 20} MiB in the file")
    check_tiers(run, program.name, accesses, size_bytes)
    return program


@case("file-first", native=False, own_daemon=True, seconds=120)
def file_first(run):
    """With the file first in the tiers' order nothing stays in compressed memory, as long
    as the file has room; then it does."""
    tier = os.path.join(run.directory, "tier")
    os.mkdir(tier)
    log = os.path.join(run.log_directory, "stratad-first.log")
    for limit_mib, fits in ((256, True), (4, False)):
        text = f'tier_path = "{tier}"\ntier_limit = "{limit_mib}MiB"\ntier_order = ["file"]\n'
        with configured(run.daemon, text, run.directory, log):
            program = run.start("hold", "64", budget="32MiB")
            program.gate("ready")

            def settled():
                told = json.loads(run.daemon.strata("tiers", program.name, "--json",
                                                    "--interval", "0.1").stdout)
                tiers = told[0]["tiers"]
                if [tier["tier"] for tier in tiers] != ["dram", "file", "compressed"]:
                    raise Failure(f"tiers are {tiers}")
                _, file, compressed = tiers
                if fits:
                    return file["pages"] > 4000 and compressed["pages"] < file["pages"] // 20
                return file["used_bytes"] > 3 << 20 and compressed["pages"] > 1000
            run.daemon.wait_until(settled, "pages went where the order says", 60)
            stats = program.stats()
            if stats["file_bytes"] > limit_mib << 20 or stats["lost_pages_total"]:
                raise Failure(f"more than it may have in the file, or lost: {stats}")
            before = stats["file_faults_total"]
            program.answer("check")
            program.gate("ready")
            run.daemon.wait_until(lambda: program.stats()["file_faults_total"] > before,
                                  "pages came from the file", 20)
            run.note(f"limit {limit_mib} MiB: {stats['file_bytes'] >> 20} MiB in the file, "
                     f"{stats['compressed_bytes'] >> 20} MiB compressed")
            program.answer("end")
            program.finish()


@case("file-tier", native=False, own_daemon=True, seconds=120)
def file_tier(run):
    """Only a configuration can name a tier."""
    tier = os.path.join(run.directory, "tier")
    os.mkdir(tier)
    text = f'tier_path = "{tier}"\ntier_limit = "1GiB"\n'
    log = os.path.join(run.log_directory, "stratad-tier.log")
    with configured(run.daemon, text, run.directory, log) as daemon:
        say(log, tier, "not DAX: as a file")
        one_daemon_at_a_time(run, tier)
        program = through_the_file(run, daemon, tier, "128", "24MiB",
                                   ("io_uring", "threads"), 1 << 30)
        program.answer()
        program.finish()


@case("file-in-tmpfs", native=False, own_daemon=True, seconds=120)
def file_in_tmpfs(run):
    """A tier of memory that comes first: pages go there as they are, and come back right,
    also across the worker's death. From half of it on they are packed."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as tier:
        for limit_mib in (512, 64):
            text = f'tier_path = "{tier}"\ntier_limit = "{limit_mib}MiB"\ntier_order = ["file"]\n'
            log = os.path.join(run.log_directory, f"stratad-tmpfs-{limit_mib}.log")
            with configured(run.daemon, text, run.directory, log) as daemon:
                say(log, tier, "in a tmpfs, by mapping: that is DRAM")
                pages_unpacked(run, daemon, limit_mib)


def pages_unpacked(run, daemon, limit_mib):
    program = run.start("hold", "96", "load", budget="24MiB")
    program.gate("running")

    def file():
        told = run.daemon.strata("tiers", program.name, "--json", "--interval", "0.1").stdout
        (found,) = (tier for tier in json.loads(told)[0]["tiers"] if tier["tier"] == "file")
        return found

    def is_there():
        # In the small one half is taken by the first, and the others fit only if packed.
        there = file()
        fits = there["pages"] * 4096 <= there["used_bytes"]
        return there["pages"] > 15000 and fits == (limit_mib == 512)
    run.daemon.wait_until(is_there, "pages are in the file as is fitting", 60)
    next_worker_reads(run, daemon, program)
    there, stats = file(), program.stats()
    if there["access"] != "tmpfs" or stats["lost_pages_total"]:
        raise Failure(f"{there}, {stats['lost_pages_total']} pages lost")
    if there["used_bytes"] > limit_mib << 20:
        raise Failure(f"more is in the file than may be: {there}")
    run.note(f"limit {limit_mib} MiB: {there['pages']} pages in {there['used_bytes'] >> 20} MiB")
    program.answer()
    program.finish()
