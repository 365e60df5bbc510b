"""Real programs with budgets far below their size; every value is checked."""

import os
import shutil
import subprocess
import sys
import time
import zlib

import machine
import vm
from redis import Redis
from strata import Failure, Skip
from suite import ROOT, case

SOURCES = os.path.join(ROOT, "tests", "programs")


def finish_speaker(run, program):
    """For programs that print "ok" and wait for stdin, which is a fifo: a look
    at the counters before they end."""
    while "ok" not in machine.read(program.log_path).splitlines():
        if program.process.poll() is not None:
            raise Failure(program.end_reason())
        if run.seconds_left() < 0:
            raise Failure("hung: never said ok")
        time.sleep(0.02)
    program.assert_pressed()


def speaker(run, *arguments, budget, **how):
    """Starts one with a fifo as its stdin (through sh, which becomes it)."""
    fifo = os.path.join(run.directory, "stdin")
    if not os.path.exists(fifo):
        os.mkfifo(fifo)
    # Both ends open: neither side waits for the other.
    end = os.open(fifo, os.O_RDWR)
    program = run.start("/bin/sh", "-c", 'exec "$@" <stdin', "sh", *arguments, budget=budget, **how)
    try:
        finish_speaker(run, program)
        os.write(end, b"\n\n\n\n")
        program.end_well()
    finally:
        os.close(end)


@case("real-qemu", native=False, seconds=60)
def real_qemu(run):
    """A virtual machine's memory beyond its budget, read back byte for byte."""
    guest = vm.Machine(run)
    run.daemon.wait_until(lambda: guest.program.stats()["stored_bytes"] > 12 * vm.MIB,
                          "the machine's memory was evicted", 30)
    for _ in range(3):
        guest.check()
    guest.end()


@case("real-redis", seconds=120, takes=10)
def real_redis(run):
    """200 MB of values: load, verify, overwrite, save, and the saved file."""
    server = run.tool("redis-server")
    shared = ["--port", "0", "--unixsocket", "redis.sock", "--save", "", "--appendonly", "no",
              "--dir", run.directory, "--dbfilename", "dump.rdb"]
    program = run.start(server, *shared, budget="128MiB")
    dead = lambda: program.process.poll() is not None  # noqa: E731
    redis = Redis(run.directory, dead=dead)
    count = 170_000
    redis.set_many(range(count))
    if bad := redis.wrong(range(count)):
        raise Failure(f"{bad} values of {count} are wrong after loading")
    redis.set_many(range(0, count, 5), 1)
    expected = lambda n: int(n % 5 == 0)  # noqa: E731
    redis.ask(b"BGSAVE")
    # The parent goes on writing beside its child.
    redis.set_many(range(1, count, 10), 0)
    end = time.monotonic() + run.seconds_left()
    while redis.info("persistence", "rdb_bgsave_in_progress") != "0":
        if time.monotonic() > end:
            raise Failure("hung: BGSAVE does not end")
        time.sleep(0.05)
    if redis.info("persistence", "rdb_last_bgsave_status") != "ok":
        raise Failure("BGSAVE failed")
    if bad := redis.wrong(range(count), expected):
        raise Failure(f"{bad} values of {count} are wrong after BGSAVE")
    used = int(redis.info("memory", "used_memory"))
    run.note(f"{used >> 20} MiB of values")
    program.assert_pressed()
    redis.link.sendall(redis.command(b"SHUTDOWN", b"NOSAVE"))
    program.end_well()
    redis.close()
    # What the child wrote, in a server without Strata.
    with open(os.path.join(run.log_directory, "second-redis.log"), "wb") as log:
        second = subprocess.Popen([server, *shared], cwd=run.directory, stdout=log, stderr=log)
    try:
        redis = Redis(run.directory)
        if bad := redis.wrong(range(count), expected):
            raise Failure(f"{bad} values of {count} are wrong in the saved file")
        redis.close()
    finally:
        second.kill()
        second.wait()


@case("real-mariadb", seconds=120)
def real_mariadb(run):
    """InnoDB with a buffer pool larger than its budget; rows carry their CRC."""
    server = run.tool("mariadbd", "mysqld")
    install = run.tool("mariadb-install-db", "mysql_install_db")
    client = run.tool("mariadb", "mysql")
    data = os.path.join(run.directory, "data")
    prepared = subprocess.run(
        [install, "--no-defaults", f"--datadir={data}", "--auth-root-authentication-method=normal",
         "--skip-test-db", "--skip-name-resolve", "--user=root"],
        capture_output=True, text=True, check=False)
    if prepared.returncode:
        raise Failure("preparing the database: " + prepared.stderr.strip()[-200:])
    program = run.start(
        server, "--no-defaults", f"--datadir={data}", "--socket=db.sock", "--skip-networking",
        "--user=root", "--innodb-buffer-pool-size=128M", "--innodb-log-file-size=32M",
        "--innodb-flush-log-at-trx-commit=0", "--sync-binlog=0", "--skip-log-bin",
        "--innodb-buffer-pool-dump-at-shutdown=0", "--pid-file=db.pid", budget="96MiB")

    def query(text):
        done = subprocess.run(
            [client, "--no-defaults", "--socket=data/db.sock", "-uroot", "-N", "-B", "-e", text],
            cwd=run.directory, capture_output=True, text=True, check=False,
            timeout=max(run.seconds_left(), 1))
        if done.returncode:
            raise Failure(f"{text[:60]}: {done.stderr.strip()[-200:]}")
        return done.stdout.strip()

    end = time.monotonic() + 30 * run.patience
    while True:
        try:
            query("SELECT 1")
            break
        except Failure:
            if program.process.poll() is not None or time.monotonic() > end:
                raise Failure("MariaDB does not answer: " + program.end_reason()) from None
            time.sleep(0.1)
    rows = 60_000
    query(f"""
        CREATE DATABASE test; USE test;
        CREATE TABLE t (id INT PRIMARY KEY, body VARCHAR(2000), crc BIGINT UNSIGNED, KEY (crc))
            ENGINE=InnoDB;
        INSERT INTO t SELECT seq, REPEAT(CONCAT('row ', seq, ' of a table; '), 60), 0
            FROM seq_1_to_{rows};
        UPDATE t SET crc = CRC32(body);""")
    expected = sum(zlib.crc32(f"row {n} of a table; ".encode() * 60) for n in range(1, rows + 1))
    for _ in range(run.times(2)):
        total = query("SELECT SUM(crc) FROM test.t; SELECT COUNT(*) FROM test.t "
                      "WHERE crc = CRC32(body); SELECT SUM(CRC32(body)) FROM test.t").split()
        if total != [str(expected), str(rows), str(expected)]:
            raise Failure(f"sums are {total}, expected {expected} over {rows} rows")
        checked = query("CHECK TABLE test.t EXTENDED")
        if not checked.endswith("OK"):
            raise Failure("CHECK TABLE: " + checked)
    program.assert_pressed()
    query("SHUTDOWN")
    program.end_well()


@case("real-python", seconds=120)
def real_python(run):
    speaker(run, sys.executable, os.path.join(SOURCES, "objects.py"), budget="80MiB")


def java(run, collector):
    virtual_machine = run.tool("java")
    compiler = shutil.which("javac")
    source = os.path.join(SOURCES, "Heap.java")
    where = [source]
    if compiler:
        subprocess.run([compiler, "-d", run.directory, source], check=True)
        where = ["-cp", run.directory, "Heap"]
    speaker(run, virtual_machine, f"-XX:+Use{collector}", "-Xmx400m", "-Xms64m", *where, "300",
            budget="144MiB")


@case("real-java-serial", seconds=120, takes=30)
def real_java_serial(run):
    java(run, "SerialGC")


@case("real-java-g1", seconds=120)
def real_java_g1(run):
    java(run, "G1GC")


@case("real-go", seconds=120, takes=20)
def real_go(run):
    go = shutil.which("go", path=os.environ["PATH"] + ":/usr/local/go/bin")
    if not go:
        raise Skip("go is not installed")
    program = run.built("maps")
    source = os.path.join(SOURCES, "maps.go")
    if not os.path.exists(program) or os.path.getmtime(program) < os.path.getmtime(source):
        subprocess.run([go, "build", "-ldflags=-linkmode=external", "-o", program, source],
                       check=True, env={**os.environ, "CGO_ENABLED": "1", "GO111MODULE": "off"})
    speaker(run, program, budget="72MiB")


def stress(name, *arguments, budget="64MiB"):
    def body(run):
        program = run.start(run.tool("stress-ng"), "--temp-path", run.directory, "--verify",
                            "--metrics-brief", *arguments, budget=budget)
        seen = {"evictions_total": 0, "faults_total": 0}
        while program.process.poll() is None:
            if run.seconds_left() < 0:
                raise Failure("hung: did not end")
            if not run.native and (stats := run.daemon.stats(program.name)):
                seen = {key: max(seen[key], stats[key]) for key in seen}
            time.sleep(0.1)
        program.end_well()
        if not run.native:
            run.note(f"evictions {seen['evictions_total']} faults {seen['faults_total']}")
            if not all(seen.values()):
                raise Failure(f"{seen}: the case tested nothing")
    case(f"stress-{name}", seconds=60)(body)


# Methods whose patterns compress: what does not compress cannot shrink.
for method in ("zero-one", "incdec", "swap", "modulo-x", "walk-1a"):
    stress(f"vm-{method}", "--vm", "1", "--vm-bytes", "128m", "--vm-keep", "--vm-method", method,
           "--timeout", "4")
stress("mmap", "--mmap", "2", "--mmap-bytes", "96m", "--timeout", "5")
stress("mremap", "--mremap", "2", "--mremap-bytes", "96m", "--timeout", "5")
stress("malloc", "--malloc", "2", "--malloc-bytes", "128m", "--malloc-touch", "--timeout", "5")
stress("madvise", "--vm", "1", "--vm-bytes", "96m", "--vm-method", "incdec", "--vm-keep",
       "--vm-madvise", "dontneed", "--fork", "1", "--fork-vm", "--timeout", "5")
