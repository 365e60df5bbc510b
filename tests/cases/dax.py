"""The file tier, and persisted snapshots, on memory that keeps its content: on an
emulated NVDIMM in a guest, which is switched off in the middle and started again.

The cases "dax-…" run in that guest, one after the other, in the order in which
they stand here; elsewhere they say that they are not tested."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import termios

import machine
from elsewhere import doctor, not_here
from moment import Arrived, Moment
from redis import Redis, dense_value
from snapshot_crash import unmount
from strata import Failure, configured
from suite import case
from tier import one_daemon_at_a_time, say, through_the_file

# Says to the suite in the guest that there is one.
NVDIMM = "STRATA_TEST_NVDIMM"
DEVICE = "/dev/pmem0"
PLACE = "/pmem"
TIER = PLACE + "/tier"
KEPT = PLACE + "/kept"
MANIFEST = KEPT + "/manifest.json"
CONFIGURATION = "/etc/strata/stratad.toml"
MODULES = ("libnvdimm", "nfit", "nd_pmem", "ext4", "jbd2")
# The kernel writes metadata by itself so rarely that what is there after a power
# cut is there because somebody asked for it.
COMMIT = "commit=900"
BY_MAPPING = "on memory (DAX): by mapping"
# Above the numbers that the second boot's processes get.
LAST_PID = "/proc/sys/kernel/ns_last_pid"
OUT_OF_THE_WAY = 3000
CUT, AFTER = "dax-until-cut", "dax-after-cut"


def files(run):
    """What must be in a guest for it."""
    tools = [run.tool(name) for name in ("ndctl", "mkfs.ext4", "mount", "umount", "redis-server")]
    return [*tools, "/etc/mke2fs.conf"]


def command(*words):
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failure(f"{' '.join(words)}: {done.stderr.strip()}")


def mount(dax):
    """The NVDIMM's file system at its place; a new one where there is none."""
    if NVDIMM not in os.environ:
        not_here("there is no NVDIMM", "guest-dax")
    if not os.path.exists(DEVICE) or not int(machine.read("/sys/block/pmem0/queue/dax")):
        # As it is, a namespace is without the pages' records that DAX needs.
        command("ndctl", "create-namespace", "-f", "-e", "namespace0.0", "-m", "fsdax", "-M", "mem")
        command("mkfs.ext4", "-q", "-b", "4096", "-m", "0", DEVICE)
    os.makedirs(PLACE, exist_ok=True)
    command("mount", "-t", "ext4", "-o", f"dax={dax},{COMMIT}", DEVICE, PLACE)


@contextlib.contextmanager
def mounted(dax="always"):
    mount(dax)
    try:
        yield
    finally:
        unmount(PLACE)


def free_bytes():
    status = os.statvfs(PLACE)
    return status.f_bfree * status.f_frsize


def named_bytes():
    """What the files and directories there take."""
    return sum(os.lstat(os.path.join(place, name)).st_blocks * 512
               for place, directories, names in os.walk(PLACE) for name in directories + names)


def size():
    """What a tenant may have in the tier where nothing else is said."""
    status = os.statvfs(PLACE)
    return status.f_blocks * status.f_frsize


@contextlib.contextmanager
def with_tier(run, more=""):
    """A daemon whose tier is there; gives its pid and its log."""
    os.makedirs(TIER, exist_ok=True)
    log = os.path.join(run.log_directory, "stratad-tier.log")
    with configured(run.daemon, f'tier_path = "{TIER}"\n{more}', run.directory, log) as pid:
        yield pid, log


def mappings_of_the_tier(pid):
    """How many mappings of the tier's files a process has."""
    return machine.read(f"/proc/{pid}/maps").count(f" {TIER}/tier-")


def case_of_guest(name, seconds=60):
    return case(name, native=False, own_daemon=True, alone=True, seconds=seconds)


@case_of_guest("dax-tier")
def dax_tier(run):
    """Log, doctor and `strata tiers` say what it is, and so do the worker's
    mappings; another version's mark is said and in nobody's way."""
    with mounted():
        os.makedirs(TIER)
        with open(TIER + "/strata-tier", "w") as mark:
            mark.write("strata-tier 9 of another time\n")
        with with_tier(run) as (daemon, log):
            say(log, TIER, BY_MAPPING)
            if machine.read(log).count("another version of stratad") != 1:
                raise Failure(f"another version's mark: {machine.read(log)}")
            one_daemon_at_a_time(run, TIER)
            os.makedirs(os.path.dirname(CONFIGURATION), exist_ok=True)
            with open(CONFIGURATION, "w") as file:
                file.write(f'tier_path = "{TIER}"\n')
            try:
                if BY_MAPPING not in (found := doctor(run)[0]["file tier"])["detail"]:
                    raise Failure(f"doctor says {found}")
            finally:
                os.unlink(CONFIGURATION)
            program = through_the_file(run, daemon, TIER, "24", "5MiB", ("DAX",), size())
            workers = [pid for pid in machine.children(daemon) if mappings_of_the_tier(pid)]
            if len(workers) != 1:
                raise Failure(f"{len(workers)} processes have the tier's files mapped")
            program.answer()
            program.finish()
            if lines := [line for line in machine.read(log).splitlines() if "panicked" in line]:
                raise Failure(lines[0])


@contextlib.contextmanager
def dense_redis(run, count):
    """Redis with values that do not compress, checked; ended well."""
    program = run.start(
        run.tool("redis-server"), "--port", "0", "--unixsocket", "redis.sock", "--save", "",
        "--appendonly", "no", "--dir", run.directory, budget="8MiB")
    redis = Redis(run.directory, 15 * run.patience, lambda: program.process.poll() is not None,
                  dense_value)
    redis.set_many(range(count))
    redis.set_many(range(0, count, 5), 1)
    for _ in range(2):  # what the first look brought back may leave again
        if bad := redis.wrong(range(count), lambda n: int(n % 5 == 0)):
            raise Failure(f"{bad} values of {count} are wrong")
    yield program
    program.assert_pressed()
    redis.link.sendall(redis.command(b"SHUTDOWN", b"NOSAVE"))
    program.end_well()
    redis.close()


@case_of_guest("dax-redis", seconds=90)
def dax_redis(run):
    with mounted(), with_tier(run), dense_redis(run, 4_000) as program:
        stats = program.stats()
        if not stats["file_faults_total"] or not stats["file_bytes"]:
            raise Failure(f"nothing was in the tier: {stats['file_bytes']} bytes, "
                          f"{stats['file_faults_total']} faults")
        run.note(f"{stats['file_faults_total']} faults on the tier")


@case_of_guest("dax-full", seconds=90)
def dax_full(run):
    """What the device has no room for stays in memory, and is right."""
    ballast, spare = PLACE + "/ballast", 2 << 20
    with mounted(), with_tier(run):
        status = os.statvfs(PLACE)
        with open(ballast, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize - spare)
        with dense_redis(run, 3_500) as program:
            stats, status = program.stats(), os.statvfs(PLACE)
            if not stats["file_bytes"] or status.f_bavail * status.f_frsize > spare / 4:
                raise Failure(f"the tier has {stats['file_bytes']} bytes, the device "
                              f"{status.f_bavail * status.f_frsize} left: it is not full")
            run.note(f"{stats['file_bytes'] >> 10} KiB in the file, {stats['state']}, "
                     f"{stats['notes']}")
        os.unlink(ballast)


@case_of_guest("dax-not")
def dax_not(run):
    """The same device, not asked for DAX: a file, and it says so."""
    with mounted("never"), with_tier(run) as (daemon, log):
        say(log, TIER, "not DAX: as a file")
        program = through_the_file(run, daemon, TIER, "24", "5MiB", ("io_uring", "threads"),
                                   size())
        if any(mappings_of_the_tier(pid) for pid in machine.children(daemon)):
            raise Failure("the tier's files are mapped")
        program.answer()
        program.finish()


def cut_power():
    """Nothing is written, nobody is told. The runner of the host takes this line
    for the guest's good end."""
    print("\nguest: end", flush=True)
    termios.tcdrain(sys.stdout)
    with open("/proc/sysrq-trigger", "w") as trigger:
        trigger.write("b")


@case_of_guest(CUT)
def power_cut(run):
    """With pages in the tier, right after `persist` said that it is done."""
    mount("always")
    free = free_bytes()
    os.makedirs(KEPT)
    with open(LAST_PID, "w") as file:
        file.write(str(OUT_OF_THE_WAY))
    with with_tier(run, f'snapshot_dir = "{PLACE}/snapshots"\n'):
        program = Moment(run, "threads", 32, "6MiB")
        program.pressed()
        run.daemon.wait_until(lambda: program.program.stats()["file_faults_total"],
                              "pages come back from the tier", 60)
        snapshot = program.take()
        program.check()
        program.report()
        with open(MANIFEST, "w") as file:
            json.dump({"name": program.name, "snapshot": snapshot, "directory": run.directory,
                       "moment": program.moments[snapshot], "log": program.program.log_path,
                       "board": program.board_path, "free": free,
                       "in_tier": program.program.stats()["file_bytes"]}, file)
        shutil.copy(program.board_path, KEPT)
        os.sync()
        run.daemon.strata("snapshot", "persist", snapshot)
        cut_power()


@case_of_guest(AFTER)
def after_power_cut(run):
    """The persisted snapshot is there, whole, and comes back with all its values,
    also out of the tier; of the tier that was there before nothing is left."""
    with mounted():
        with open(MANIFEST) as file:
            kept = json.load(file)
        taken = kept["free"] - free_bytes() - named_bytes()
        if kept["in_tier"] < 1 << 20 or taken > kept["in_tier"] / 2:
            raise Failure(f"{kept['in_tier']} bytes were in the tier, and {taken} that no file "
                          "has are taken")
        # What it had open, as it was.
        os.makedirs(kept["directory"], 0o700)  # tempfile's; CRIU compares
        os.makedirs(os.path.dirname(kept["log"]), exist_ok=True)
        open(kept["log"], "wb").close()
        shutil.copy(os.path.join(KEPT, os.path.basename(kept["board"])), kept["board"])
        with with_tier(run, f'snapshot_dir = "{PLACE}/snapshots"\n') as (_, log):
            say(log, TIER, BY_MAPPING)
            if os.listdir(TIER) != ["strata-tier"]:
                raise Failure(f"in the tier's directory: {os.listdir(TIER)}")
            program = Arrived(run, kept["name"], kept["board"], kept["log"])
            snapshot = kept["snapshot"]
            found = {id: one["state"] for id, one in program.list().items()}
            if found != {snapshot: "persisted"}:
                raise Failure(f"after the power cut there are {found}")
            run.daemon.strata("snapshot", "export", snapshot, PLACE + "/exported")
            program.moments[snapshot] = kept["moment"]
            program.brought_back(snapshot, lambda: program.restore(snapshot))
            program.pressed()
            run.daemon.wait_until(
                lambda: run.daemon.stats(program.name)["file_faults_total"],
                "pages come back from the tier", 60)
            program.check()
            program.roll(snapshot)
            program.assert_clean()
            program.kill()
